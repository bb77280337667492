"""Prompts to begin with, one of each kind."""

_PASSAGE = (
    "The lighthouse on Gull Rock was built in 1874 and guided ships through the narrow channel for ninety years. Its "
    "lamp burned oil until 1926, when a cable from the mainland brought electricity. The last keeper, Anna Moss, left "
    "in 1964, after a machine had taken over the lamp. Today the tower is a small museum, and visitors can reach it on "
    "foot when the tide is low."
)

EXAMPLES: dict[str, str] = {
    "Chat": "What should I pay attention to when I adopt an old dog?",
    "Code": "Write a Python function that returns the prime numbers below n, with a short explanation.",
    "Maths": "A baker sells 24 loaves in the morning and half as many in the afternoon, for 3 dollars each. "
    "How much does the baker earn in a day? Explain step by step.",
    "Translation": "Translate into French: The train to the coast leaves at seven, and we still have to buy tickets.",
    "Summary": f"Summarise this text in two sentences: {_PASSAGE}",
    "Question over a passage": f"{_PASSAGE}\n\nQuestion: Why did the last keeper leave the lighthouse?",
}

"""Prompts that the target writes for itself, kind by kind.

Knows: openings, topics, and how one text becomes the material of another (an article is later summarised, questioned
or translated). Does not know how anything is decoded or stored.

A chat model given its template up to the user's turn writes what a user would write. Left alone it returns to a few
favourite subjects, so most turns are continued from an opening of a stated kind. No prompt of any benchmark is used.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

TOPICS = """
bridges|volcanoes|the history of tea|urban gardening|solar panels|migrating birds|jazz|medieval castles|vaccines|
electric cars|chess|the Roman Empire|sleep|coral reefs|public libraries|coffee farming|artificial intelligence|
marathon running|ocean currents|bread|elections|the moon|bees|space telescopes|watercolour painting|honey|railways|
earthquakes|the Silk Road|antibiotics|football|glaciers|photography|inflation|recycling|dinosaurs|yoga|cryptography|
deserts|opera|robots|the French Revolution|wolves|housing prices|comets|ceramics|wind power|the human heart|novels|
street food|submarines|climate change|lighthouses|dance|gold mining|the internet|rainforests|trade unions|cheese|
hurricanes|immigration|penguins|quantum physics|school uniforms|rivers|the brain|theatre|airports|drought|knitting|
banking|elephants|satellites|the Olympic Games|tides|tourism|diabetes|mathematics|fishing|museums|cycling|wheat|
social media|the Cold War|whales|mountains|music festivals|plastic|genetics|strikes|cats|nuclear energy|fashion|
refugees|trains|poetry|bacteria|minimum wage|wildfires|the printing press|noise|video games|forests|taxes|dogs|
batteries|ancient Egypt|swimming|smartphones|hospitals|sugar|mythology|drones|voting|rice|remote work|stars|soil|
painting|a court case|a bank robbery|a local hero|a lost child|a new park|a football transfer|a storm|a charity run
""".replace("\n", "").split("|")

OPENINGS: dict[str, list[str]] = {
    "chat": [
        "", "", "", "", "", "", "Can you ", "How do I ", "I feel ", "What should I ", "Help me ", "I need advice ",
        "Why do people ", "Tell me about ", "Give me a list of ", "What is the best way to ", "I'm planning ",
        "Explain ", "Explain to a child ", "Compare ", "What are the advantages and disadvantages of ",
        "Recommend ", "Suggest three ", "Imagine you are ", "Pretend to be ", "You are a ", "Act as ",
        "Discuss ", "Describe ", "Is it true that ", "What would happen if ", "How can {topic} ",
        "What do you think about {topic}", "Tell me an interesting fact about {topic}", "Give me five tips on ",
    ],
    "qa": [
        "Who ", "When did ", "Where is ", "What is ", "What are ", "Which ", "How many ", "How does ",
        "Who was the first ",
        "What is the name of ", "When was ", "Who wrote ", "What is the capital of ", "Where was ",
        "Why did ", "Why is ",
        "Who plays ", "Who won ", "What does ", "How long does ", "what is the meaning of ", "who sings ", "when does ",
        "where does ", "Is ", "Define ", "What year ",
    ],
    "writing": [
        "Write a short story about ", "Write a poem about {topic}", "Write an essay on {topic}", "Write an email to ",
        "Compose a ", "Draft a letter ", "Write a blog post about {topic}", "Write a product description for ",
        "Write a speech ", "Write a dialogue between ", "Describe a scene in which ", "Create a character who ",
        "Write a review of ", "Write a headline for ", "Edit the following paragraph: ", "Rewrite this sentence: ",
        "Outline an article on {topic}", "Write a persuasive paragraph about {topic}", "Write a limerick about ",
        "Write a cover letter for ", "Continue this story: ", "Brainstorm ideas for ",
    ],
    "article": [
        "Write a news article about {topic}.", "Write a news report about {topic} with names, places and quotes.",
        "Write an encyclopedia entry about {topic}.", "Write a magazine article about {topic}.",
        "Write a detailed paragraph on the history of {topic}.",
        "Write a newspaper story about {topic} in a small town.",
        "Write two paragraphs that explain {topic}.", "Write a biography of someone known for {topic}.",
    ],
    "code": [
        "Write a Python function that ", "Write a function to ", "Write a Python program that ", "Write a JavaScript ",
        "Write a SQL query that ", "Implement a ", "Write a C++ ", "How do I write code to ", "Fix this Python code:\n",
        "Explain what this code does:\ndef ", "Complete this Python function:\ndef ", "Write a class that ",
        "Write unit tests for ", "Write an HTML page ", "Given a list of integers, ", "Given a string, ",
        "def ", "from typing import List\n\n\ndef ", "Write a recursive function ", "Write a shell script that ",
        "What is the difference between ", "How does a hash table ", "Write a regular expression ",
    ],
    "maths": [
        "Solve for x: ", "Calculate ", "What is the sum of ", "A train travels ", "If a ", "John has ", "Mary buys ",
        "There are ", "A farmer ", "A store sells ", "In a class of ", "Find the area of ", "Tom is ",
        "A recipe needs ",
        "What is the probability ", "A rectangle ", "Every day, ", "Emma earns ", "A shop ", "The price of ",
        "Simplify the expression ", "A car ", "Sam and ", "How many ", "A box contains ", "The ratio of ",
        "Prove that ",
        "Let f(x) = ", "What is the derivative of ", "Lisa had ", "A company ", "Convert ",
    ],
    "reasoning": [
        "Extract the names from this text: ", "Classify the following ", "Is the following statement true or false? ",
        "Which of these words does not belong: ", "Identify the ", "Sort these ", "Put the following in order: ",
        "Imagine a race ", "David has three sisters. ", "Given the following ", "Read the following sentence: ",
        "Convert the following text to JSON: ", "Rate the following reviews: ", "Fill in the blank: ",
        "What comes next in the series ", "Analyze the following ", "Find the error in ",
    ],
    "translate_out": [
        "Translate into German: ", "Translate to French: ", "Translate this sentence to Spanish: ",
        "Write three sentences in German about {topic}.", "How do you say in German ",
        "Translate from English to German: ",
        "Write a short text in German about {topic}.", "Write a paragraph in French about {topic}.",
    ],
}  # fmt: skip

SUMMARISE = [
    "Summarize the following text:\n\n{text}", "Summarize: {text}\n\nTL;DR:", "{text}\n\nSummarize the article above.",
    "Write a one sentence summary of this article.\n\n{text}", "What are the main points of this text?\n\n{text}",
    "Give the key points:\n{text}",
]  # fmt: skip
QUESTION = [
    "{text}\n\nQuestion: {word}", "Read the passage and answer the question.\n\nPassage: {text}\n\nQuestion: {word}",
    "Context: {text}\n\nBased on the context, {lower}", "Use the text to answer. {text}\n{word}",
    "Document 1: {text}\n\nDocument 2: {other}\n\nAnswer the question from the documents: {lower}",
    "Passage 1: {text}\nPassage 2: {other}\nPassage 3: {third}\n\nQuestion: {lower}",
]  # fmt: skip
QUESTION_WORDS = ["What", "Who", "When", "Where", "Why", "How", "Which", "What is", "How many", "Who was", "What did"]
TRANSLATE_IN = [
    "Translate German to English: {text}", "Translate this into English: {text}",
    "What does this mean in English?\n{text}",
    "Translate the following text to English.\n\n{text}",
]  # fmt: skip
# Written for this file: the default target's own German is too poor to stand for what people ask to have translated.
GERMAN = (
    """
Der Stadtrat hat am Dienstag beschlossen, die alte Brücke im nächsten Frühjahr zu sanieren.|Die Preise für Strom und
Gas sind im vergangenen Jahr um mehr als zwölf Prozent gestiegen.|Nach Angaben der Polizei wurde bei dem Unfall
niemand verletzt.|"Wir müssen jetzt schnell handeln", sagte Ministerin Anna Weber der Zeitung.|Die Mannschaft aus
Bremen verlor das Spiel trotz einer starken zweiten Halbzeit mit 1:2.|Im Museum am Hafen ist bis Ende August eine
Ausstellung über Schiffe zu sehen.|Die Firma will bis 2030 rund 400 neue Stellen in Leipzig schaffen.|Viele Eltern
wünschen sich längere Öffnungszeiten der Kindergärten.|Der Zug nach München fährt heute wegen eines Schadens an der
Oberleitung nicht.|Herr Schneider wohnt seit vierzig Jahren in demselben Haus am Rande des Waldes.|Forscher der
Universität Jena haben eine neue Art von Käfern entdeckt.|Wer sein Fahrrad am Bahnhof abstellt, sollte es gut
abschließen.|Das Gericht verurteilte den 45 Jahre alten Mann zu einer Haftstrafe von drei Jahren.|Am Wochenende
werden bis zu dreißig Grad und vereinzelt Gewitter erwartet.|Die Feuerwehr war mit sechs Fahrzeugen vor Ort und
konnte den Brand nach zwei Stunden löschen.|Präsident Moreau reist am Montag zu Gesprächen nach Warschau.|Die neue
Straßenbahnlinie verbindet den Norden der Stadt mit dem Krankenhaus.|Er habe von den Plänen nichts gewusst, erklärte
der Bürgermeister.|In der Schule lernen die Kinder, wie man Brot backt und Käse macht.|Der Umsatz des Unternehmens
sank im dritten Quartal auf 2,4 Milliarden Euro.|Sie hatte den Schlüssel verloren und musste die ganze Nacht bei
ihrer Schwester bleiben.|Die Opposition fordert mehr Geld für Schulen und Straßen.|Das Konzert in der Stadthalle war
schon nach wenigen Stunden ausverkauft.|Im Winter kommen die Hirsche bis an den Zaun des Dorfes.|Nach dem Hochwasser
dauerte der Wiederaufbau fast fünf Jahre.|Die Ärzte raten dazu, täglich mindestens eine halbe Stunde spazieren zu
gehen.|Klaus Berger, der Trainer der Gäste, war mit der Leistung zufrieden.|Die Bank schließt im Herbst ihre
Filialen in mehreren kleinen Orten.|Ein Hund bewachte den Hof, während die Familie auf dem Feld arbeitete.|Die
Kommission will noch vor dem Sommer einen Bericht vorlegen.|Für den Umbau des Theaters fehlen noch etwa drei
Millionen Euro.|Auf dem Markt gibt es im Juni frische Erdbeeren und Spargel.
""".replace("\n", " ")
    .strip()
    .split("|")
)
REWRITE = [
    "Rewrite this text in simpler words:\n\n{text}", "Correct the grammar of this text:\n{text}",
    "Translate into German: {text}", "Make this shorter: {text}", "Turn this into a list:\n{text}",
]  # fmt: skip

# Share of each kind among new conversations. Kinds that need a text wait until there are some to reuse.
KIND_WEIGHTS = {
    "chat": 18, "qa": 10, "writing": 9, "article": 7, "code": 11, "maths": 11, "reasoning": 6, "translate_out": 4,
    "summary": 8, "passage_qa": 8, "translate_in": 5, "rewrite": 3,
}  # fmt: skip
FOLLOW_UP_SHARE = 0.1
FOLLOW_UPS = ["", "", "", "Now ", "Can you ", "Why ", "What about ", "Rewrite your answer ", "Make it ", "Explain "]
POOL_SIZE = 400  # texts kept for reuse, per pool


@dataclass
class Conversation:
    """A conversation under way: `messages` so far, and the user's turn that is being written after `opening`."""

    kind: str
    messages: list[dict[str, str]]
    opening: str = ""
    writes_user_turn: bool = True
    greedy: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


class SelfPrompts:
    """Decides what to ask next. `seed` makes the order reproducible.

    Call `next_conversation` for one whose user turn is to be continued (`writes_user_turn`) or answered; hand finished
    answers to `learn`, so that later conversations can reuse the texts and follow up.
    """

    def __init__(self, seed: int = 0, greedy_share: float = 0.6):
        self.random = random.Random(seed)
        self.greedy_share = greedy_share
        self.articles: deque[str] = deque(maxlen=POOL_SIZE)
        self.foreign: deque[str] = deque(maxlen=POOL_SIZE)
        self.follow_ups: deque[Conversation] = deque()

    def next_conversation(self) -> Conversation:
        if self.follow_ups:
            return self.follow_ups.popleft()
        kinds = list(KIND_WEIGHTS)
        kind = self.random.choices(kinds, [KIND_WEIGHTS[k] for k in kinds])[0]
        if kind in ("summary", "passage_qa", "rewrite") and len(self.articles) < 3:
            kind = "article"
        greedy = self.random.random() < self.greedy_share
        opening, complete = self._opening(kind)
        conversation = Conversation(kind, [], opening, not complete, greedy)
        if complete:
            conversation.messages.append({"role": "user", "content": opening})
        return conversation

    def _opening(self, kind: str) -> tuple[str, bool]:
        """The beginning of a user turn and whether it is the whole of it."""
        pick = self.random.choice
        if kind == "summary":
            return pick(SUMMARISE).format(text=self._excerpt(pick(self.articles), 3, 12)), True
        if kind == "rewrite":
            return pick(REWRITE).format(text=self._excerpt(pick(self.articles), 1, 4)), True
        if kind == "translate_in":
            if self.foreign and self.random.random() < 0.3:
                text = self._excerpt(pick(self.foreign), 1, 3)
            else:
                text = " ".join(self.random.sample(GERMAN, self.random.randint(1, 3)))
            return pick(TRANSLATE_IN).format(text=text), True
        if kind == "passage_qa":
            word = pick(QUESTION_WORDS)
            texts = [self._excerpt(pick(self.articles), 2, 6) for _ in range(3)]
            form = pick(QUESTION)
            return form.format(text=texts[0], other=texts[1], third=texts[2], word=word, lower=word.lower()), False
        opening = pick(OPENINGS[kind])
        return opening.format(topic=pick(TOPICS)) if "{topic}" in opening else opening, kind == "article"

    def _excerpt(self, text: str, fewest: int, most: int) -> str:
        """Some consecutive sentences of a text."""
        sentences = [s.strip() for s in text.replace("\n", " ").split(". ") if s.strip()]
        count = self.random.randint(fewest, most)
        start = self.random.randrange(max(1, len(sentences) - count + 1))
        return ". ".join(sentences[start : start + count]).rstrip(".") + "."

    def learn(self, conversation: Conversation, answer: str, finished: bool) -> None:
        """Takes a finished answer into the pools, and sometimes follows it up."""
        if conversation.kind == "article" and len(answer) > 300:
            self.articles.append(answer)
        if conversation.kind == "translate_out" and 30 < len(answer) < 1500:
            self.foreign.append(answer)
        if finished and len(conversation.messages) == 1 and self.random.random() < FOLLOW_UP_SHARE:
            messages = [*conversation.messages, {"role": "assistant", "content": answer}]
            greedy = self.random.random() < self.greedy_share
            self.follow_ups.append(Conversation("multi_turn", messages, self.random.choice(FOLLOW_UPS), True, greedy))

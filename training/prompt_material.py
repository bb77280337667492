"""What the target's own prompts are made of: topics, names, openings, and the forms that put a text to use.

Knows: words only. Does not know when or how they are used (`prompts`). No prompt of any benchmark is among them.
"""

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

# The target's own people are nearly all called John Smith; real passages are full of names it would not think of.
FIRST_NAMES = """
Aisha|Akira|Alejandro|Amara|Anders|Beatriz|Bogdan|Carmen|Chidi|Claire|Dmitri|Edith|Elif|Esteban|Fatima|Fiona|Gareth|
Giulia|Hamid|Hannah|Hiroshi|Imogen|Ingrid|Ivo|Jamal|Jasmine|Joaquin|Kavita|Keiko|Kwame|Lars|Leila|Ludmila|Maeve|Mateo|
Mei|Milan|Nadia|Nikhil|Noor|Olga|Oscar|Pavel|Petra|Priya|Quentin|Rashid|Rosalind|Ruben|Sanjay|Signe|Soraya|Tadeusz|
Tamsin|Thandi|Umberto|Valentina|Viktor|Wanda|Xiomara|Yusuf|Zainab|Harold|Winston|Margaret|Gordon|Shannon|Trevor
""".replace("\n", "").split("|")
LAST_NAMES = """
Abernathy|Adeyemi|Almeida|Bancroft|Bhattacharya|Brandt|Castellanos|Chowdhury|Delacroix|Donnelly|Eriksen|Fairweather|
Fitzgerald|Garibaldi|Gunawardena|Haverford|Herrera|Ibrahimovic|Jankowski|Kaplan|Karlsson|Khatri|Kowalczyk|Lindqvist|
Mackenzie|Marchetti|McAllister|Mbeki|Nakamura|Novak|O'Sullivan|Okonkwo|Oyelaran|Papadopoulos|Pemberton|Petrov|Quayle|
Rasmussen|Rodrigues|Rothschild|Santoro|Schuster|Silberman|Takahashi|Thistlewood|Tran|Ulrich|Vandenberg|Villanueva|
Wainwright|Weatherby|Whitlock|Yamamoto|Zhang|Zielinski|Hargreaves|Blackwood|Cartwright|Dunning|Ellsworth
""".replace("\n", "").split("|")
PLACES = """
Aberdeen|Adelaide|Albuquerque|Antwerp|Bangalore|Bilbao|Bratislava|Brisbane|Buenos Aires|Calgary|Cape Town|Casablanca|
Cincinnati|Cork|Dakar|Dundee|Gdansk|Ghent|Guadalajara|Hanoi|Harrisburg|Helsinki|Islamabad|Jacksonville|Jakarta|Kampala|
Knoxville|Kyoto|Lagos|Leicester|Lima|Ljubljana|Louisville|Lyon|Manila|Marrakesh|Milwaukee|Montevideo|Nairobi|Newcastle|
Omaha|Oslo|Perth|Pittsburgh|Porto|Quebec|Reykjavik|Rotterdam|Sarajevo|Seville|Sheffield|Shenzhen|Stavanger|Tbilisi|
Tulsa|Utrecht|Valparaiso|Vilnius|Wellington|Winnipeg|Wolverhampton|Yorkshire|Zagreb|the Mekong delta|Cornwall
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
        "Write two paragraphs that explain {topic}.", "Write a biography of {name}, known for {topic}.",
        "Write a news report from {place} about {topic}. Quote {name} and {name}.",
        "Write a news article in which {name}, {name} and the mayor of {place} argue about {topic}.",
        "{name} of {place} has died. Write the obituary. Mention {topic}.",
        "Write an encyclopedia entry about {place} and {topic}.", "Write a crime report from {place} about {name}.",
        "Write a match report: {place} against {place}, with the goals of {name} and {name}.",
        "Write a passage about {place} between 1850 and 1990, with dates, numbers and names such as {name}.",
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
        "There are ", "A farmer ", "{first} has ", "{first} buys ", "{first} and her brother ", "{first} wants to ",
        "{first} works ", "{first} is twice as old as ", "Each day {first} ", "{first} reads ",
        "A store sells ", "In a class of ", "Find the area of ",
        "Tom is ", "A recipe needs ",
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
    "Context: {text}\n\nBased on the context, {lower}", "Use the text to answer. {text}\n{word}", "{text}\n{word}",
    "Answer from these documents.\n\n{text}\n\nQuestion: {lower}", "{text}\n\n{lower}",
    "Below are some passages. Answer the question that follows them.\n\n{text}\n\nThe question is: {lower}",
]  # fmt: skip
QUESTION_WORDS = ["What", "Who", "When", "Where", "Why", "How", "Which", "What is", "How many", "Who was", "What did"]
TRANSLATE_IN = [
    "Translate German to English: {text}", "Translate this into English: {text}", "{text}\nIn English, please.",
    "What does this mean in English?\n{text}",
    "Translate the following text to English.\n\n{text}",
]  # fmt: skip
REWRITE = [
    "Rewrite this text in simpler words:\n\n{text}", "Correct the grammar of this text:\n{text}",
    "Translate into German: {text}", "Make this shorter: {text}", "Turn this into a list:\n{text}",
]  # fmt: skip

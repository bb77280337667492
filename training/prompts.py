"""Prompts that the target writes for itself, kind by kind.

Knows: openings, topics, and how one text becomes the material of another (an article is later summarised, questioned
or translated). Does not know how anything is decoded or stored.

A chat model given its template up to the user's turn writes what a user would write. Left alone it returns to a few
favourite subjects, so most turns are continued from an opening of a stated kind. No prompt of any benchmark is used.
"""

import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .german import german_sentence
from .prompt_material import (
    FIRST_NAMES,
    LAST_NAMES,
    OPENINGS,
    PLACES,
    QUESTION,
    QUESTION_WORDS,
    REWRITE,
    SUMMARISE,
    TOPICS,
    TRANSLATE_IN,
)

# Share of each kind among new conversations. Kinds that need a text wait until there are some to reuse.
KIND_WEIGHTS = {
    "chat": 16, "qa": 14, "writing": 8, "article": 8, "code": 8, "maths": 12, "reasoning": 5, "translate_out": 2,
    "summary": 10, "passage_qa": 10, "translate_in": 9, "rewrite": 2,
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
    """Decides what to ask next.

    Args:
        seed: makes the order reproducible.
        greedy_share: how many conversations are answered greedily.
        passages: real texts to summarise, question and rewrite, instead of the target's own articles.
        foreign: real texts in another language to translate, instead of the German that this project brings.
        kinds: of conversations to begin, keys of `KIND_WEIGHTS`; all of them when None.

    Raises:
        ValueError: there is no such kind.

    Call `next_conversation` for one whose user turn is to be continued (`writes_user_turn`) or answered; hand finished
    answers to `learn`, so that later conversations can reuse the texts and follow up.
    """

    def __init__(
        self,
        seed: int = 0,
        greedy_share: float = 0.6,
        passages: Sequence[str] = (),
        foreign: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
    ):
        unknown = set(kinds or ()) - set(KIND_WEIGHTS)
        if unknown:
            raise ValueError(f"There is no kind {', '.join(sorted(unknown))}: choose from {', '.join(KIND_WEIGHTS)}")
        self.random = random.Random(seed)
        self.greedy_share = greedy_share
        self.real_passages, self.real_foreign = passages, foreign
        self.kinds = list(kinds or KIND_WEIGHTS)
        self.articles: deque[str] = deque(maxlen=POOL_SIZE)
        self.foreign: deque[str] = deque(maxlen=POOL_SIZE)
        self.follow_ups: deque[Conversation] = deque()

    def next_conversation(self) -> Conversation:
        if self.follow_ups:
            return self.follow_ups.popleft()
        kind = self.random.choices(self.kinds, [KIND_WEIGHTS[k] for k in self.kinds])[0]
        if kind in ("summary", "passage_qa", "rewrite") and not self.real_passages and len(self.articles) < 3:
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
            return pick(SUMMARISE).format(text=self._passages(1, 4, sentences=10, joint=" ")), True
        if kind == "rewrite":
            return pick(REWRITE).format(text=self._excerpt(self._article(), 1, 4)), True
        if kind == "translate_in":
            if self.real_foreign:
                text = self._excerpt(pick(self.real_foreign), 1, 3)
            elif self.foreign and self.random.random() < 0.1:
                text = self._excerpt(pick(self.foreign), 1, 3)
            else:
                text = " ".join(german_sentence(self.random) for _ in range(self.random.choice([1, 1, 2, 3])))
            return pick(TRANSLATE_IN).format(text=text), True
        if kind == "passage_qa":
            word = pick(QUESTION_WORDS)
            passages = self._passages(1, 6, sentences=6, joint="\n\n")
            return pick(QUESTION).format(text=passages, word=word, lower=word.lower()), False
        opening = pick(OPENINGS[kind])
        return self._fill(opening), kind == "article"

    def _fill(self, opening: str) -> str:
        """Topic, names and place, where an opening has room for them. Code keeps its own braces."""
        words = {"topic": TOPICS, "place": PLACES, "first": FIRST_NAMES}

        def word(match: re.Match[str]) -> str:
            if match[1] == "name":
                return f"{self.random.choice(FIRST_NAMES)} {self.random.choice(LAST_NAMES)}"
            return self.random.choice(words[match[1]])

        return re.sub(r"\{(topic|place|first|name)\}", word, opening)

    def _passages(self, fewest: int, most: int, sentences: int, joint: str) -> str:
        """Excerpts of several articles, one after the other: prompts as long as those of real documents."""
        count = self.random.randint(fewest, most)
        return joint.join(self._excerpt(self._article(), 2, sentences) for _ in range(count))

    def _article(self) -> str:
        return self.random.choice(self.real_passages or self.articles)

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

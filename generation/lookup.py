"""Drafts copied from text that is already there: the prompt, what was written so far, and earlier answers if given.

The longest end of the text that occurred before is found with a suffix automaton, in constant time per token on average
whatever the length of the text; what followed it then is proposed now. (Prompt lookup scans for a fixed n-gram;
SuffixDecoding, arXiv 2411.04975, keeps suffix trees.) Knows nothing of models.
"""

import math
import threading

from .draft import Draft


class SuffixIndex:
    """A suffix automaton over tokens that grows at the end.

    State 0 is the empty suffix. Each state stands for a set of substrings that end at the same places; `recent` is the
    latest of these places seen when it was last visited.
    """

    _VISITED = 16  # how many shorter suffixes learn of a new place; bounds the work per token on repetitive text

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.recent = [-1]
        self.last = 0
        self.match_length = 0
        """Length of the longest end of the text that occurred before."""
        self.match_end = -1
        """Where it ended then."""

    def append(self, token: int) -> None:
        """Adds one token."""
        end = len(self.tokens)
        self.tokens.append(token)
        current = self._state(self.length[self.last] + 1, {}, -1)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = current
            state = self.link[state]
        if state < 0:
            self.link[current] = 0
        else:
            follower = self.next[state][token]
            if self.length[follower] == self.length[state] + 1:
                self.link[current] = follower
            else:
                clone = self._state(self.length[state] + 1, dict(self.next[follower]), self.recent[follower])
                self.link[clone] = self.link[follower]
                while state >= 0 and self.next[state].get(token) == follower:
                    self.next[state][token] = clone
                    state = self.link[state]
                self.link[follower] = self.link[current] = clone
        self.last = current
        suffix = self.link[current]
        self.match_length, self.match_end = self.length[suffix], self.recent[suffix]
        self.recent[current] = end
        for _ in range(self._VISITED):
            if suffix <= 0:
                break
            self.recent[suffix] = end
            suffix = self.link[suffix]

    def _state(self, length: int, following: dict[int, int], recent: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.recent.append(recent)
        return len(self.next) - 1

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Moves a match of another text's end along by one token; returns the new state and match length."""
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        if token in self.next[state]:
            return self.next[state][token], matched + 1
        return 0, 0

    def continuation(self, end: int, count: int) -> list[int]:
        """Up to `count` tokens that followed place `end`; a repetition that reaches the text's own end goes on."""
        start = end + 1
        found = self.tokens[start : start + count]
        period = len(self.tokens) - start
        while found and len(found) < count:
            found.append(found[len(found) - period])
        return found


class LookupStore:
    """Earlier answers to draft from, handed to `generate(draft_lookup_store=store)`. Safe to share between threads.

    Repetitive traffic, such as agents that write much the same again and again, gains most.
    """

    _SEPARATOR = -1  # no token has this id, so no match goes from one answer into the next

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.lock = threading.Lock()

    def add(self, token_ids: list[int]) -> None:
        """Adds one answer (or any text likely to be repeated)."""
        with self.lock:
            for token in token_ids:
                self.index.append(token)
            self.index.append(self._SEPARATOR)

    def __len__(self) -> int:
        """Tokens held, one separator per answer included."""
        return len(self.index.tokens)


class MatchOdds:
    """How often a token proposed after a match of some length was right: counted, starting from a modest guess."""

    _EDGES = (1, 2, 3, 5, 9, 17)
    _GUESSES = (0.15, 0.35, 0.5, 0.65, 0.8, 0.9)
    _WEIGHT = 4.0  # how many observations the guess counts for

    def __init__(self) -> None:
        self.right = [guess * self._WEIGHT for guess in self._GUESSES]
        self.asked = [self._WEIGHT] * len(self._GUESSES)

    def _bucket(self, length: int) -> int:
        return max(0, sum(length >= edge for edge in self._EDGES) - 1)

    def odds(self, length: int) -> float:
        bucket = self._bucket(length)
        return self.right[bucket] / self.asked[bucket]

    def learn(self, length: int, right: bool) -> None:
        bucket = self._bucket(length)
        self.right[bucket] += right
        self.asked[bucket] += 1


class RowLookup:
    """Lookup for one row of one call."""

    def __init__(self, text: list[int], store: LookupStore | None):
        self.index = SuffixIndex()
        self.store = store
        self.odds = MatchOdds()
        self.state, self.matched = 0, 0  # in the store
        self.proposed: list[int] = []
        self.proposed_length = 0
        for token in text:
            self.append(token)

    def append(self, token: int) -> None:
        """The row has one more token."""
        self.index.append(token)
        if self.store is not None:
            with self.store.lock:
                self.state, self.matched = self.store.index.follow(self.state, self.matched, token)

    def draft(self, count: int, least: float = 0.0) -> Draft:
        """Up to `count` tokens that followed the longest match, as far as the whole draft's odds stay over `least`."""
        length, tokens = self.index.match_length, []
        if self.store is not None and self.matched > length:
            with self.store.lock:
                # the automaton's own length bounds the match that this state stands for
                end = self.store.index.recent[self.state]
                followed = self.store.index.continuation(end, count)
            length = self.matched
            stop = followed.index(LookupStore._SEPARATOR) if LookupStore._SEPARATOR in followed else len(followed)
            tokens = followed[:stop]
        elif length:
            tokens = self.index.continuation(self.index.match_end, count)
        draft, total = Draft(), 1.0
        for i, token in enumerate(tokens):
            odds = self.odds.odds(length + i)
            total *= odds
            if total < least:
                break
            draft.append(token, len(draft) - 1, math.log(odds), "lookup")
        self.proposed, self.proposed_length = list(draft.tokens), length
        return draft

    def learn(self, written: list[int]) -> None:
        """Compares the last proposal with what the target wrote, and takes the new tokens in."""
        for i, (guess, token) in enumerate(zip(self.proposed, written, strict=False)):
            self.odds.learn(self.proposed_length + i, guess == token)
            if guess != token:
                break
        self.proposed = []
        for token in written:
            self.append(token)

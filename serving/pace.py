"""How many tokens to draft before asking the server: measured, not set.

With a chance `a` that a drafted token is accepted when those before it were, a draft of k levels yields
(1 - a^(k+1)) / (1 - a) tokens on average, the target's own included. It takes the round trip R, which the server's work
is part of, and k times the seconds d of drafting one level. The k with most tokens per second is taken: it grows with
the logarithm of R (arXiv 2606.20591). Knows nothing of drafts or lines.
"""


class DraftLength:
    """Follows one line and one text."""

    def __init__(self) -> None:
        self.right, self.tried = 3.0, 5.0  # accepted and judged drafts, old ones fading
        self.round_trip: float | None = None
        self.variation = 0.0
        self.level = 0.0

    @property
    def acceptance(self) -> float:
        return min(self.right / self.tried, 0.99)

    def choose(self, most: int) -> int:
        """Levels to draft, from 1 to `most`; all of them before anything was measured."""
        round_trip = self.round_trip
        if round_trip is None:
            return most
        a = self.acceptance

        def rate(levels: int) -> float:
            return (1 - a ** (levels + 1)) / (1 - a) / (round_trip + levels * self.level)

        return max(range(1, most + 1), key=rate, default=0)

    def saw(self, levels: int, accepted: int, draft_seconds: float, round_trip: float) -> None:
        """Takes in a round: levels drafted, how many of them were accepted, and the time both parts took."""
        if levels:
            self.right = 0.95 * self.right + accepted
            self.tried = 0.95 * self.tried + accepted + (accepted < levels)
            self.level += (draft_seconds / levels - self.level) * (0.2 if self.level else 1.0)
        if self.round_trip is None:
            self.round_trip, self.variation = round_trip, round_trip / 2
        else:  # as TCP does (RFC 6298)
            self.variation += (abs(round_trip - self.round_trip) - self.variation) / 4
            self.round_trip += (round_trip - self.round_trip) / 8

    def patience(self, least: float) -> float:
        """Seconds of silence after which a line counts as cut."""
        return least if self.round_trip is None else max(least, self.round_trip + 4 * self.variation)

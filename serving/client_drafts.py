"""What a client drafts for its next round, how much of that pays over its line, and what it writes alone.

Knows the text, the memory that has come of it, lookup, and what rounds have cost. Does not know connections.
"""

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..generation.draft import Draft
from ..generation.experience import Experience
from ..generation.lookup import RowLookup
from ..generation.options import DraftOptions
from ..generation.policy import AutoPolicy, FixedPolicy
from ..generation.sources import DraftPlan
from .client_memory import OfflineWriter
from .client_text import ClientText
from .memory_codec import MemoryCodec
from .messages import Committed, Memory, ProtocolError, Sampling, Welcome
from .pace import LineCosts, RoundTrip

if TYPE_CHECKING:
    from .client import MoAClient


class ClientDrafts:
    """
    Args:
        options: limits of a draft, and whether measured costs decide within them.
        no_repeat_ngram_size: see `OfflineWriter`.

    Attributes:
        memory: of the text's first tokens.
        round_trip: of this text's rounds.
        drafted, accepted: levels drafted, and how many of these the target would have written.
    """

    def __init__(
        self,
        client: "MoAClient",
        text: ClientText,
        sampling: Sampling,
        options: DraftOptions,
        no_repeat_ngram_size: int,
    ):
        self.client, self.text, self.sampling, self.options = client, text, sampling, options
        self.no_repeat_ngram_size = no_repeat_ngram_size
        self.codec = MemoryCodec(client.widths, client.memory)
        self.memory = client.new_memory()
        self.round_trip = RoundTrip()
        self.drafted = self.accepted = 0
        self._experience: Experience = client.learnt.experience()
        self._lookup = RowLookup(text.final, None)
        self._looked_at = len(text.final)  # tokens that lookup knows
        self._policy: AutoPolicy | FixedPolicy | None = None
        self._costs: LineCosts | None = None
        self._writer: OfflineWriter | None = None
        self._writer_after = (0, 0)  # final tokens, and tokens with memory, that the writer goes on from
        self._seed = random.getrandbits(32) if sampling.seed is None else sampling.seed

    def welcomed(self, welcome: Welcome, line_seconds: float) -> None:
        """Decides from now on by what this server can do and how long it takes.

        Args:
            line_seconds: how long the line took to bring the welcome; later rounds tell better.

        Raises:
            ProtocolError: its memory has another size.
        """
        if welcome.token_bytes != self.codec.token_bytes:
            raise ProtocolError(f"memory of {welcome.token_bytes} bytes per token, not {self.codec.token_bytes}")
        options = replace(self.options, draft_nodes=min(self.options.draft_nodes or 1, welcome.max_nodes))
        chains_only = not welcome.trees
        if options.draft_policy == "fixed":
            self._policy = FixedPolicy(options, chains_only)
            return
        line = line_seconds if self._costs is None else self._costs.line
        self._costs = LineCosts(dict(welcome.pass_seconds), *self.client.level_seconds(), observe=0.0, line=line)
        self._policy = AutoPolicy(options, chains_only, 1, self._costs, self._experience)

    def remember(self, message: Memory) -> None:
        """Takes in memory of tokens that the text has and whose memory it lacks.

        Raises:
            ProtocolError: it is malformed, or some in between is missing.
        """
        try:
            vectors = self.codec.decode(message.data, message.count)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        held, final = self.memory.held, self.text.final
        if message.start > held:
            raise ProtocolError(f"memory from token {message.start} on, where {held} are held")
        # never of the last token of all, which whatever is written next goes on from
        known = len(final) if self.text.provisional else len(final) - 1
        end = min(message.start + message.count, known)
        if end > held:
            self.memory.take(final[held:end], [v[held - message.start : end - message.start] for v in vectors])

    def draft(self, welcome: Welcome) -> tuple[Draft, DraftPlan]:
        """What was written alone, if anything was; else what lookup finds and the drafter makes of its memory."""
        final, provisional = self.text.final, self.text.provisional
        depth = min(self.text.max_length - len(final) - 1, welcome.max_depth)
        if provisional or depth < 1:
            return Draft.chain(provisional[: min(depth, welcome.max_nodes)]), DraftPlan(0)
        assert self._policy is not None, "a welcome comes before the first round"
        self._lookup.learn(final[self._looked_at :])
        self._looked_at = len(final)
        found = self._lookup.draft(min(self._policy.lookup_tokens(), depth, welcome.max_nodes))
        plan = self._policy.plan([found])
        plan = replace(plan, levels=min(plan.levels, depth), nodes=min(plan.nodes, welcome.max_nodes))
        drafted = Draft()
        if plan.levels:
            self.memory.follow(final)
            with torch.no_grad():
                drafted = self.memory.draft(plan)[0]
        return self._policy.choose(plan, [drafted.limited(depth)], [found])[0].best(welcome.max_nodes), plan

    def learn(self, plan: DraftPlan, draft: Draft, reply: Committed, drafting: float, seconds: float) -> None:
        """Takes in how a round went: seconds of drafting, and of the server's answer with all that came with it."""
        self.round_trip.saw(seconds)
        self.drafted += max(draft.depths, default=0)
        self.accepted += reply.accepted
        if self._costs is not None:
            self._costs.saw_round(1 + len(draft), seconds, reply.seconds)
        assert self._policy is not None, "a round follows a welcome"
        children, path = draft.children(), [-1]
        for token in reply.tokens:
            if (path[-1], token) not in children:
                break
            path.append(children[path[-1], token])
        self._policy.learn(plan, [draft], [path[1:]], (drafting, seconds))

    def remember_for_later_texts(self) -> None:
        """How drafts have been doing here."""
        self.client.learnt.remember(self._experience)

    def write_alone(self) -> int:
        """The next token, by the drafter and the text alone."""
        final = self.text.final
        after = (len(final), self.memory.held)
        if self._writer is None or after != self._writer_after:
            whole = final + self.text.provisional
            lookup = RowLookup(whole, None) if self.options.prompt_lookup_num_tokens else None
            if lookup is not None:
                lookup.odds = self._lookup.odds
            self._writer = OfflineWriter(
                self.memory,
                whole,
                self.sampling,
                self.client.widths,
                self._seed,
                self.text.prompt_length,
                self.no_repeat_ngram_size,
                lookup,
            )
            self._writer_after = after
        return self._writer.write()

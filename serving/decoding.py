"""The target's side of one text: reads the prompt, judges drafts, keeps the memory that clients ask for.

The same target pass and the same verifier as `generate(assistant_model=...)`. Knows nothing of connections, sessions or
who drafts. Everything here is model work and belongs into the server's one worker thread.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from ..generation.backlog import Backlog
from ..generation.costs import known_passes, measure_costs
from ..generation.draft import Draft
from ..generation.options import DraftOptions
from ..generation.sources import DraftPlan, Verified
from ..generation.target_pass import TargetPass, ancestors, masked_pass_unavailable
from ..generation.verify import Row, judge
from ..modeling_moa import MoADrafterForCausalLM
from .choosing import processors
from .messages import Ending, PrefixDigest, Sampling

READ_AT_ONCE = 256  # prompt tokens per step; other sessions get their turn in between


class MemoryRecord:
    """Implements `DraftSession` as far as a target needs it: turns what became final into memory and keeps it."""

    def __init__(self, drafter: MoADrafterForCausalLM):
        config = drafter.config
        self.drafter = drafter
        self.hidden_states = () if config.memory_hidden_state == "none" else (config.target_num_hidden_layers,)
        self.pieces: list[torch.Tensor] = []  # (n, width) each
        self.length = 0

    def observe(self, verified: Verified) -> None:
        drafter = self.drafter
        layers = [verified.states.layer(index) for index in drafter.config.lsa_layers]
        hidden = verified.states.hidden(self.hidden_states[0]) if self.hidden_states else None
        states = drafter.layer_states([keys for keys, _ in layers], [values for _, values in layers], hidden)
        if drafter.config.memory_hidden_state == "add":
            memory = drafter.memory(states)
        else:
            memory = drafter.memory_vectors(states.to(drafter.compute_dtype))
        self.pieces.append(memory[0])
        self.length += memory.shape[1]

    def between(self, start: int, end: int) -> torch.Tensor:
        """(end - start, width)"""
        newest = self.pieces[-1]
        before = self.length - newest.shape[0]
        if start < before:
            self.pieces, newest, before = [torch.cat(self.pieces)], torch.cat(self.pieces), 0
        return newest[start - before : end - before]

    def cut(self, length: int) -> None:
        """Forgets the memory of every token after the first `length`."""
        self.pieces, self.length = [torch.cat(self.pieces)[:length]], length

    def draft(self, plan: DraftPlan) -> list[Draft]:
        return [Draft()]

    def select(self, rows: list[int]) -> None:
        """There is one row."""


class NoMemory:
    """The same for clients that want no memory."""

    hidden_states: tuple[int, ...] = ()
    length = 0

    def observe(self, verified: Verified) -> None:
        pass

    def cut(self, length: int) -> None:
        pass

    def draft(self, plan: DraftPlan) -> list[Draft]:
        return [Draft()]

    def select(self, rows: list[int]) -> None:
        """There is one row."""


@dataclass(frozen=True)
class Queries:
    """One text's part of a pass: its tokens and their positions, (n, n) who sees whom, its cache and what it holds."""

    tokens: list[int]
    positions: list[int]
    sees: torch.Tensor
    cache: Any
    held: int


class RemoteText:
    """A text that the target writes with drafts from elsewhere.

    Call `read` to its end first. `tokens` is everything final; the target's cache, and memory, lack the last of them.

    Args:
        target: what writes it.
        drafter: makes memory, with parts lent by the target; None: nobody wants any.
        tokens: the text so far: a prompt, or a prompt and a part of its answer.
        max_length: of the whole text.
        eos: token ids that end it.
        seed: of sampling.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: MoADrafterForCausalLM | None,
        tokens: list[int],
        max_length: int,
        eos: list[int],
        sampling: Sampling,
        seed: int,
    ):
        self.target, self.tokens, self.max_length, self.eos = target, list(tokens), max_length, set(eos)
        self.digest = PrefixDigest(tokens)
        self.device = target.device
        text_config = target.config.get_text_config(decoder=True)
        self.vocab_size = target.get_input_embeddings().num_embeddings
        self.context = getattr(text_config, "max_position_embeddings", None)
        self.record: MemoryRecord | NoMemory = NoMemory()
        if drafter is not None:
            self.record = MemoryRecord(drafter)
            last = drafter.config.target_num_hidden_layers
            self.tail = range(last - drafter.config.target_layer_inference, last)
        criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
        if eos:
            criteria.append(EosTokenCriteria(eos))
        # another stretch of random numbers wherever the text is taken up again
        drawn = hashlib.blake2b(f"{seed} {len(tokens)}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device)
        generator.manual_seed(int.from_bytes(drawn, "little") >> 1)
        ids = torch.tensor([tokens], device=self.device)
        chosen = processors(sampling)
        self.row = Row(ids, max_length, chosen, criteria, sampling.temperature > 0, False, False, None, generator)
        self.row.finished = len(tokens) >= max_length or (bool(eos) and tokens[-1] in self.eos)
        self.calls = 0
        self.passes: TargetPass | None = None  # once it has been read

    @property
    def read_tokens(self) -> int:
        """How many tokens `read` has read so far."""
        return 0 if self.passes is None else self.passes.length

    @property
    def finished(self) -> Ending | None:
        if not self.row.finished:
            return None
        return "eos" if self.tokens[-1] in self.eos else "length"

    @torch.no_grad()
    def read(self) -> Iterator[int]:
        """Reads the text step by step and writes one token after it; yields how many tokens it has read."""
        if self.row.finished:  # a client resumed what had ended
            return
        ids = torch.tensor([self.tokens], device=self.device)
        first = ids[:, :READ_AT_ONCE]
        positions = torch.arange(first.shape[1], device=self.device)[None]
        cache = DynamicCache(config=self.target.config.get_text_config(decoder=True))
        kwargs = {
            "cache": cache,
            "position_ids": positions,
            "attention_mask": None,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        config = GenerationConfig()
        self.passes = TargetPass(self.target, first, kwargs, config, self.record.hidden_states, keep_rows=False)
        self.backlog = Backlog(self.passes, self.record, self.passes.max_depth)
        outputs = self.passes.prefill(first, kwargs)
        self.calls += 1
        self._remember(self.tokens[: first.shape[1]], outputs.hidden_states, range(first.shape[1]))
        self.passes.after_prefill()
        logits = outputs.logits[0, -1:]
        yield self.passes.length
        while self.passes.length < len(self.tokens):
            start = self.passes.length
            logits = self._run_final(self.tokens[start : start + READ_AT_ONCE])[-1:]
            yield self.passes.length
        self._wrote(judge(self.row, Draft(), logits)[1])

    @torch.no_grad()
    def verify(self, draft: Draft) -> int:
        """Writes what the target makes of a draft; returns how many of the new tokens had been drafted."""
        draft = self.usable(draft)
        outputs = self.passes.run([self.tokens[-1]], [draft])
        hidden = {index: outputs.hidden_states[index] for index in self.record.hidden_states}
        return self.finish(draft, outputs.logits[0, : 1 + len(draft)], hidden)

    def begin(self, draft: Draft) -> Queries:
        """What a pass that others share has to run for a usable draft; `finish` must follow."""
        first, count = self.passes.position(0), 1 + len(draft)
        self.passes.queries = count
        sees = ancestors(draft, count)
        positions = [first] + [first + depth for depth in draft.depths]
        return Queries([self.tokens[-1], *draft.tokens], positions, sees, self.passes.cache, self.passes.length)

    def finish(self, draft: Draft, logits: torch.Tensor, hidden: dict[int, torch.Tensor]) -> int:
        """`verify` after the pass over the last token and a usable draft: logits (1 + nodes, V), and the hidden states
        that `record` asks for, (1, 1 + nodes, E) each."""
        last = self.tokens[-1]
        self.calls += 1
        path, tokens = judge(self.row, draft, logits)
        self.passes.commit([path])
        self._remember([last, *(draft.tokens[node] for node in path)], hidden, [0, *(1 + node for node in path)])
        self._wrote(tokens)
        # a last token that ended the text is not in the path, and may have been drafted all the same
        return len(path) + ((path[-1] if path else -1, tokens[-1]) in draft.children())

    @torch.no_grad()
    def adopt(self, base: int, tokens: list[int]) -> None:
        """Makes tokens final that the target did not write, in place of everything from `base` on.

        `base` must be at least 1 and at most the length of the text, which must have room for the tokens.
        """
        self._cut(base)
        known = [self.tokens[-1], *tokens[:-1]]
        for start in range(0, len(known), READ_AT_ONCE):
            self._run_final(known[start : start + READ_AT_ONCE])
        for token in tokens:
            self.row.write(None, token)
        self._wrote(tokens)

    def vectors(self, start: int, end: int) -> list[torch.Tensor]:
        """Memory of the tokens from `start` to `end`, as `MemoryCodec` takes it; there must be some."""
        assert isinstance(self.record, MemoryRecord)
        vectors = [self.record.between(start, end)]
        for index in self.tail:
            keys, values = self.passes.whole_layer(index)  # (1, kv_heads, T, head_dim)
            vectors.append(torch.cat([s[0, :, start:end].transpose(0, 1).flatten(1) for s in (keys, values)], dim=1))
        return vectors

    def _cut(self, length: int) -> None:
        """Forgets every token after the first `length`."""
        if length == len(self.tokens):
            return
        cached = min(length - 1, self.passes.length)
        self.passes.cache.crop(cached - self.passes.length)
        self.passes.length = self.passes.lengths[0] = cached
        self.record.cut(cached)
        del self.tokens[length:]
        self.digest = PrefixDigest(self.tokens)
        self.row.length, self.row.finished = length, False

    def _run_final(self, tokens: list[int]) -> torch.Tensor:
        """Runs tokens that are final already, as many as the cache lacks at least; logits (n, V)."""
        outputs = self.passes.run([tokens[0]], [Draft.chain(tokens[1:])])
        self.calls += 1
        self.passes.commit([list(range(len(tokens) - 1))])
        self._remember(tokens, outputs.hidden_states, range(len(tokens)))
        return outputs.logits[0]

    def _remember(self, tokens: list[int], states: Any, queries: "range | list[int]") -> None:
        """Turns the states of the tokens that entered the cache last into memory. `states` by hidden state's index."""
        start = self.passes.length - len(tokens)
        hidden = tuple(states[index][0, list(queries)] for index in self.record.hidden_states)
        self.backlog.add(0, tokens, start, list(range(start, self.passes.length)), hidden)
        self.backlog.hand_over([0])  # nothing is drafted here, so the token after them is not asked for

    def _wrote(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.digest.extend(tokens)

    def usable(self, draft: Draft) -> Draft:
        """Without what lies past the end of the text or of the target's context."""
        depth = self.max_length - len(self.tokens) - 1
        if self.context is not None:
            depth = min(depth, self.context - 1 - self.passes.position(0))
        if self.passes.max_depth is not None:
            depth = min(depth, self.passes.max_depth)
        draft = draft.limited(depth, self.vocab_size)
        return draft if self.passes.trees else draft.best_chain()


def unservable(target: PreTrainedModel) -> str | None:
    """Why texts of this target cannot be served, or None when they can."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    kinds = set(getattr(target.config.get_text_config(decoder=True), "layer_types", None) or [])
    if any(type(layer) is not DynamicLayer for layer in cache.layers) or kinds - {"full_attention"}:
        return "some of its layers forget old tokens (a sliding window), whose memory a client could not get again"
    return None


class _Silent:
    """A source that drafts nothing, so that passes alone are timed."""

    def begin(self, target: PreTrainedModel, prompt_ids: list[list[int]], options: DraftOptions) -> NoMemory:
        return NoMemory()


def pass_seconds(target: PreTrainedModel) -> dict[int, float]:
    """What a pass over so many tokens takes here. Measured once per target, some sixty of its steps."""
    return known_passes(target) or measure_costs(target, _Silent()).passes


def takes_trees(target: PreTrainedModel) -> bool:
    """Whether this target can judge drafts with branches."""
    return masked_pass_unavailable(target, DynamicCache(config=target.config.get_text_config(decoder=True))) is None

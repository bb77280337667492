"""The decoding loop: draft, verify, commit, until every row is finished.

Runs inside transformers' own `generate`, which has prepared prompt, processors, criteria and cache. Knows neither how
drafts are made (sources, lookup), nor how much to draft (policy), nor how the cache is kept (target_pass), nor how a
token is chosen (verify).
"""

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from .backlog import Backlog
from .draft import Draft
from .experience import Memory
from .lookup import LookupStore, RowLookup
from .options import DraftOptions
from .policy import AutoPolicy, FixedPolicy, Policy
from .returned import Returned
from .sources import DraftSource
from .target_pass import TargetPass, context_limit
from .trace import RoundTrace, begin_generation, node_traces
from .verify import Row, judge, processors_for_row


class AssistedDecoding:
    """What is handed to `generate(custom_generate=...)`: where one call's drafts come from, and how to draft.

    Args:
        source: of drafts.
        memory: what earlier calls with this source learnt.
        options: of this call.
        streamer: gets every token as it becomes final. (`generate` gives it the prompt.)
        store: earlier answers to look drafts up in.
    """

    def __init__(
        self,
        source: DraftSource,
        memory: Memory,
        options: DraftOptions,
        streamer: BaseStreamer | None = None,
        store: LookupStore | None = None,
    ):
        self.source, self.memory, self.options = source, memory, options
        self.streamer, self.store = streamer, store

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decodes (B, P) prompts; returns what plain `generate` returns."""
        call = _Call(self, model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        return call.decode()


class _Call:
    """The state of one call. `active` lists the rows that are not finished; target, session and lookups hold those."""

    def __init__(
        self,
        decoding: AssistedDecoding,
        model: Any,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self.model, self.config, self.input_ids, self.model_kwargs = model, config, input_ids, model_kwargs
        self.streamer, self.memory = decoding.streamer, decoding.memory
        batch = input_ids.shape[0]
        self.returned = Returned(model, config, batch)
        pad = config._pad_token_tensor
        if batch > 1 and self.returned.attentions:
            raise ValueError("output_attentions with several rows and a drafter: pass one prompt at a time.")
        if batch > 1 and pad is None and len(criteria) > 1:
            raise ValueError("Rows may stop at different lengths: pass a pad_token_id to generate().")
        self.pad = 0 if pad is None else int(pad)
        self.rows = [self._row(row, processors, criteria) for row in range(batch)]
        self.active = list(range(batch))
        self.streamed = 0

        self.prompts = _without_padding(input_ids, model_kwargs.get("attention_mask"))
        self.session = decoding.source.begin(model, self.prompts, decoding.options)
        # a cache that the caller gets to see must end up with all its rows
        keep_rows = self.returned.as_dict or getattr(model_kwargs["cache"], "_is_user_defined", False)
        self.target = TargetPass(model, input_ids, model_kwargs, config, self.session.hidden_states, keep_rows)
        self.backlog = Backlog(self.target, self.session, self.target.max_depth)
        self.chains_only = not self.target.trees or self.returned.attentions
        self.trace = begin_generation([len(prompt) for prompt in self.prompts])
        self.policy = self._policy(decoding)
        looks_up = self.policy.lookup_tokens() > 0
        self.lookups = [RowLookup(prompt, decoding.store) for prompt in self.prompts] if looks_up else []
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.context = context_limit(model.config, input_ids.shape[1], config.max_length)

    def _row(self, row: int, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> Row:
        alone = self.input_ids.shape[0] == 1
        if not alone:
            processors = processors_for_row(processors, row, self.config.num_return_sequences or 1)
        put = self.streamer.put if alone and self.streamer is not None else None
        ids, length, returned = self.input_ids[row : row + 1], self.config.max_length, self.returned
        sample = bool(self.config.do_sample)
        generator = None
        if sample and not alone:
            # which row draws first depends on how many drafts each row accepts: each draws from its own numbers, so
            # that a seed gives the same texts whatever was drafted
            generator = torch.Generator(ids.device)
            generator.manual_seed(int(torch.randint(2**62, ())))
        return Row(
            ids, length, processors, criteria, sample, returned.scores, returned.logits, put, generator=generator
        )

    def _policy(self, decoding: AssistedDecoding) -> Policy:
        if decoding.options.draft_policy == "fixed":
            return FixedPolicy(decoding.options, self.chains_only)
        rows = len(self.rows)
        costs, seconds = self.memory.costs(self.model, decoding.source, rows)
        if self.trace is not None:
            self.trace.calibration_seconds = seconds
        return AutoPolicy(decoding.options, self.chains_only, rows, costs, self.memory.experience(rows))

    # -- the loop ------------------------------------------------------------------------------------------------------

    def decode(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        self._prefill()
        with self.model._optimize_model_for_decode():
            while self.active:
                self._round()
        self.target.restore_rows()
        if isinstance(self.policy, AutoPolicy):
            self.memory.remember_costs(self.model, len(self.rows), self.policy.costs)
            self.memory.remember(self.policy.experience, len(self.rows))
        if self.streamer is not None:
            self.streamer.end()
        return self.returned.result(self.rows, self.pad, self.target.cache)

    def _prefill(self) -> None:
        """Runs the prompts and writes every row's first token."""
        started = time.perf_counter()
        outputs = self.target.prefill(self.input_ids, self.model_kwargs)
        first_tokens = [judge(row, Draft(), outputs.logits[i, -1:])[1][0] for i, row in enumerate(self.rows)]
        self.returned.prefill(outputs)
        wanted = [outputs.hidden_states[index] for index in self.session.hidden_states]
        for row, prompt in enumerate(self.prompts):
            # what an earlier call left in the cache has no hidden states; keys and values it has
            count = min([len(prompt), *(hidden.shape[1] for hidden in wanted)])
            positions = self.target.position_ids[row, self.target.position_ids.shape[1] - count :].tolist()
            hidden = tuple(h[row, h.shape[1] - count :] for h in wanted)
            self.backlog.add(row, prompt[len(prompt) - count :], self.target.length - count, positions, hidden)
        self.backlog.hand_over(first_tokens)
        self.target.after_prefill()
        for lookup, token in zip(self.lookups, first_tokens, strict=False):
            lookup.append(token)
        if self.trace is not None:
            self.trace.first_tokens = first_tokens
            self.trace.prefill_seconds = time.perf_counter() - started
            self.trace.target_calls = 1
        self._drop_finished()
        self._stream()

    def _round(self) -> None:
        """Drafts for all rows, runs the target once, and writes what it settles."""
        started = time.perf_counter()
        rows = [self.rows[index] for index in self.active]
        last_tokens = [row.new_tokens[-1] for row in rows]
        drafts, plan = self._draft(last_tokens)
        drafted = time.perf_counter()

        starts = list(self.target.lengths)
        positions = [self.target.position(i) for i in range(len(rows))]
        length = self.target.length
        outputs = self.target.run(last_tokens, drafts)
        judged = [
            judge(r, d, outputs.logits[i, : 1 + len(d)]) for i, (r, d) in enumerate(zip(rows, drafts, strict=True))
        ]
        verified = time.perf_counter()

        paths = [path for path, _ in judged]
        self.returned.add_attentions(outputs.attentions, length, 1 + len(paths[0]))
        self.target.commit(paths)
        for i, (draft, path) in enumerate(zip(drafts, paths, strict=True)):
            run = [last_tokens[i], *(draft.tokens[node] for node in path)]
            hidden: tuple[torch.Tensor, ...] = ()
            if outputs.hidden_states is not None:
                kept = [0] + [1 + node for node in path]
                states: Any = tuple(None if h is None else h[i, kept] for h in outputs.hidden_states)
                self.returned.add_hidden(self.active[i], states)
                hidden = tuple(states[index] for index in self.session.hidden_states)
            self.backlog.add(i, run, starts[i], list(range(positions[i], positions[i] + len(run))), hidden)
            if self.lookups:
                self.lookups[i].learn(judged[i][1])
        self.policy.learn(plan, drafts, paths, (drafted - started, verified - drafted))
        names = list(self.active)
        self._drop_finished()
        self._stream()
        if self.trace is not None:
            self.trace.target_calls += 1
            seconds = (drafted - started, verified - drafted, time.perf_counter() - verified)
            shares = [part / len(rows) for part in seconds]
            for i, draft in enumerate(drafts):
                self.trace.rounds.append(RoundTrace(names[i], node_traces(draft, paths[i]), judged[i][1], *shares))

    def _draft(self, last_tokens: list[int]) -> tuple[list[Draft], Any]:
        """What the target shall judge in this round, per row, and the plan it came from."""
        count = self.policy.lookup_tokens()
        found = [self._usable(i, lookup.draft(count)) for i, lookup in enumerate(self.lookups)]
        found = found or [Draft() for _ in self.active]
        plan = self.policy.plan(found)
        if plan.levels or self.backlog.is_full:
            self.backlog.hand_over(last_tokens)
        drafts = self.session.draft(plan) if plan.levels else [Draft() for _ in self.active]
        drafts = [self._usable(i, draft) for i, draft in enumerate(drafts)]
        return self.policy.choose(plan, drafts, found), plan

    def _usable(self, i: int, draft: Draft) -> Draft:
        """Without what lies past max_length, past the target's context, or past what the cache can take back."""
        depth = self.config.max_length - self.rows[self.active[i]].length - 1
        if self.context is not None:
            depth = min(depth, self.context - 1 - self.target.position(i))
        if self.target.max_depth is not None:
            depth = min(depth, self.target.max_depth)
        draft = draft.limited(depth, self.vocab_size)
        return draft.best_chain() if self.chains_only else draft

    def _drop_finished(self) -> None:
        keep = [i for i, index in enumerate(self.active) if not self.rows[index].finished]
        if len(keep) == len(self.active):
            return
        self.active = [self.active[i] for i in keep]
        if keep:
            self.target.select(keep)
            self.backlog.select(keep)
            self.session.select(keep)
            self.policy.select(keep)
            self.lookups = [self.lookups[i] for i in keep] if self.lookups else []

    def _stream(self) -> None:
        """Several rows are streamed token by token in step, as far as the slowest row has come."""
        if self.streamer is None or len(self.rows) == 1:
            return
        ready = min(
            (len(self.rows[i].new_tokens) for i in self.active), default=max(len(r.new_tokens) for r in self.rows)
        )
        for step in range(self.streamed, ready):
            tokens = [row.new_tokens[step] if step < len(row.new_tokens) else self.pad for row in self.rows]
            self.streamer.put(torch.tensor(tokens))
        self.streamed = ready


def _without_padding(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Rows of token ids without what the mask hides on their left. A mask may also cover an earlier cache."""
    rows = input_ids.tolist()
    if mask is None:
        return rows
    hidden = (mask.cumsum(1) == 0).sum(1) - (mask.shape[1] - input_ids.shape[1])
    return [row[max(0, count) :] for row, count in zip(rows, hidden.tolist(), strict=True)]

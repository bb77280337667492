"""The decoding loop: draft, verify, commit, until every row is finished.

Runs inside transformers' own `generate`, which has prepared prompt, processors, criteria and cache. Knows neither how
drafts are made (sources) nor how the cache is kept (target_pass) nor how a token is chosen (verify).
"""

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils.output_capturing import selected_hidden_states

from .draft import Draft
from .options import DraftOptions
from .policy import Policy
from .sources import DraftSource, Verified
from .target_pass import TargetPass
from .trace import RoundTrace, begin_generation, node_traces
from .verify import Row, judge, processors_for_row


class AssistedDecoding:
    """What is handed to `generate(custom_generate=...)`: one call's source of drafts and options."""

    def __init__(self, source: DraftSource, options: DraftOptions, streamer: BaseStreamer | None):
        self.source, self.options, self.streamer = source, options, streamer

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
    def __init__(
        self,
        plan: AssistedDecoding,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self.model, self.config, self.input_ids, self.model_kwargs = model, config, input_ids, model_kwargs
        self.streamer = plan.streamer
        batch, self.prompt_length = input_ids.shape
        as_dict = config.return_dict_in_generate
        self.keep_hidden = bool(as_dict and config.output_hidden_states)
        self.keep_attentions = bool(as_dict and config.output_attentions)
        pad = config._pad_token_tensor
        self.pad = None if pad is None else int(pad)
        if batch > 1:
            self._check_batch(criteria)
        put = None if self.streamer is None or batch > 1 else self.streamer.put
        copies = max(config.num_return_sequences or 1, 1)
        self.rows = [
            Row(
                input_ids[row : row + 1],
                config.max_length,
                processors if batch == 1 else processors_for_row(processors, row, copies),
                criteria,
                bool(config.do_sample),
                bool(as_dict and config.output_scores),
                bool(as_dict and config.output_logits),
                put,
            )
            for row in range(batch)
        ]
        self.streamed = 0
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.active = list(range(batch))  # rows that are not finished; index into `rows`
        mask = model_kwargs.get("attention_mask")
        leading = [0] * batch if mask is None else (mask.cumsum(1) == 0).sum(1).tolist()
        self.leading = [max(0, lead - (mask.shape[1] - self.prompt_length)) if lead else 0 for lead in leading]
        prompts = [ids[lead:] for ids, lead in zip(input_ids.tolist(), self.leading, strict=True)]
        self.session = plan.source.begin(model, prompts, plan.options)
        # a cache that the caller gets to see must end up with all its rows
        cache_is_returned = bool(as_dict) or getattr(model_kwargs["cache"], "_is_user_defined", False)
        self.target = TargetPass(
            model, input_ids, model_kwargs, config, self.session.hidden_states, keep_rows=cache_is_returned
        )
        self.chains_only = not self.target.trees or self.keep_attentions
        self.policy = Policy(plan.options, not self.chains_only)
        self.trace = begin_generation([len(prompt) for prompt in prompts])
        self.hidden: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in self.rows]
        self.attentions: list[tuple[torch.Tensor, ...]] = []
        self.selected_layers = self._selected_layers()

    def _selected_layers(self) -> set[int] | None:
        """Which hidden states the caller gets when it named some; sources may have asked the target for more."""
        named = selected_hidden_states(self.config.output_hidden_states)
        if named is None:
            return None
        count = self.model.config.get_text_config(decoder=True).num_hidden_layers + 1
        return {index % count for index in named if -count <= index < count}

    def _visible(self, hidden: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        if self.selected_layers is None:
            return hidden
        return tuple(h if index in self.selected_layers else None for index, h in enumerate(hidden))

    def _check_batch(self, criteria: StoppingCriteriaList) -> None:
        if self.keep_attentions:
            raise ValueError(
                "output_attentions with several prompts and a drafter is not supported: pass one prompt at a time."
            )
        if self.pad is None and len(criteria) > 1:
            raise ValueError(
                "Several prompts that may stop at different lengths need a pad_token_id: pass one to generate()."
            )

    # -- the loop ------------------------------------------------------------------------------------------------------

    def decode(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        self._prefill()
        with self.model._optimize_model_for_decode():
            while self.active:
                self._round()
        self.target.restore_rows()
        if self.streamer is not None:
            self.streamer.end()
        return self._result()

    def _prefill(self) -> None:
        started = time.perf_counter()
        outputs = self.target.prefill(self.input_ids, self.model_kwargs)
        first_tokens = []
        for index, row in enumerate(self.rows):
            _, tokens = judge(row, Draft(), outputs.logits[index, -1:])
            first_tokens += tokens
        if self.keep_hidden:
            self.first_hidden = self._visible(outputs.hidden_states)
        if self.keep_attentions:
            self.attentions.append(outputs.attentions)
        count = self.target.last_count
        firsts = [max(0, lead - (self.prompt_length - count)) for lead in self.leading]
        self.session.observe(
            Verified(
                self.input_ids[:, -count:],
                self.target.position_ids[:, -count:],
                firsts,
                [count - first for first in firsts],
                [self.target.length - count + first for first in firsts],
                first_tokens,
                self.target,
            )
        )
        self.target.after_prefill()
        if self.trace is not None:
            self.trace.first_tokens = first_tokens
            self.trace.prefill_seconds = time.perf_counter() - started
            self.trace.target_calls = 1
        self._drop_finished()
        self._stream()

    def _round(self) -> None:
        started = time.perf_counter()
        rows = [self.rows[index] for index in self.active]
        plan = self.policy.plan(len(rows))
        drafts = self.session.draft(plan)
        drafts = [self._limited(i, draft) for i, draft in enumerate(drafts)]
        drafted = time.perf_counter()

        outputs = self.target.run([row.new_tokens[-1] for row in rows], drafts)
        logits = outputs.logits
        before = self.target.length
        verified = time.perf_counter()

        paths, written = [], []
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            path, tokens = judge(row, draft, logits[i, : 1 + len(draft)])
            paths.append(path)
            written.append(tokens)
        if self.keep_attentions:
            for i in range(len(written[0])):
                seen = before + i + 1
                self.attentions.append(tuple(a[:, :, i : i + 1, :seen] for a in outputs.attentions))
        bonus = [row.new_tokens[-len(tokens) - 1] for row, tokens in zip(rows, written, strict=True)]
        firsts = list(self.target.lengths)
        first_positions = [self.target.position(i) for i in range(len(rows))]
        self.target.commit(paths)
        if self.keep_hidden:
            for i, path in enumerate(paths):
                for j in range(1 + len(path)):
                    step = tuple(None if h is None else h[i : i + 1, j : j + 1] for h in self.target.hidden_states)
                    self.hidden[self.active[i]].append(self._visible(step))
        if not all(row.finished for row in rows):
            self._observe(bonus, drafts, paths, firsts, first_positions, [row.new_tokens[-1] for row in rows])
        self.policy.update(plan, drafts, paths)
        self._drop_finished()
        self._stream()
        ended = time.perf_counter()
        if self.trace is not None:
            self.trace.target_calls += 1
            share = 1 / len(rows)
            for i, draft in enumerate(drafts):
                self.trace.rounds.append(
                    RoundTrace(
                        self.rows.index(rows[i]),
                        node_traces(draft, paths[i]),
                        written[i],
                        (drafted - started) * share,
                        (verified - drafted) * share,
                        (ended - verified) * share,
                    )
                )

    def _limited(self, i: int, draft: Draft) -> Draft:
        """Cuts what cannot be used: past max_length, past the target's context, past what the cache can take back."""
        row = self.rows[self.active[i]]
        depth = self.config.max_length - row.length - 1
        context = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if context is not None:
            depth = min(depth, context - 1 - self.target.position(i))
        if self.target.max_depth is not None:
            depth = min(depth, self.target.max_depth)
        draft = draft.limited(depth, self.vocab_size)
        return draft.best_chain() if self.chains_only else draft

    def _observe(
        self,
        bonus: list[int],
        drafts: list[Draft],
        paths: list[list[int]],
        starts: list[int],
        positions: list[int],
        next_tokens: list[int],
    ) -> None:
        tokens = [[b, *(d.tokens[node] for node in p)] for b, d, p in zip(bonus, drafts, paths, strict=True)]
        counts = [len(row) for row in tokens]
        longest = max(counts)
        device = self.input_ids.device
        ids = torch.tensor([row + [row[0]] * (longest - len(row)) for row in tokens], device=device)
        at = torch.arange(longest, device=device)[None] + torch.tensor(positions, device=device)[:, None]
        self.session.observe(Verified(ids, at, [0] * len(tokens), counts, starts, next_tokens, self.target))

    def _drop_finished(self) -> None:
        keep = [i for i, index in enumerate(self.active) if not self.rows[index].finished]
        if len(keep) == len(self.active):
            return
        self.active = [self.active[i] for i in keep]
        if keep and len(self.rows) > 1:
            self.target.select(keep)
            self.session.select(keep)

    def _stream(self) -> None:
        """Several rows are streamed token by token in step, as far as the slowest row has come."""
        if self.streamer is None or len(self.rows) == 1:
            return
        written = [len(row.new_tokens) for row in self.rows]
        ready = min((len(self.rows[i].new_tokens) for i in self.active), default=max(written))
        for step in range(self.streamed, ready):
            tokens = [row.new_tokens[step] if step < len(row.new_tokens) else self.pad for row in self.rows]
            self.streamer.put(torch.tensor(tokens))
        self.streamed = ready

    # -- the result ----------------------------------------------------------------------------------------------------

    def _result(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        longest = max(row.length for row in self.rows)
        padded = [
            torch.nn.functional.pad(row.sequence, (0, longest - row.length), value=self.pad or 0) for row in self.rows
        ]
        sequences = torch.cat(padded)
        if not self.config.return_dict_in_generate:
            return sequences
        hidden = None
        if self.keep_hidden:
            steps = _side_by_side(self.hidden)
            hidden = (self.first_hidden, *steps)
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=_stack([row.scores for row in self.rows]),
            logits=_stack([row.logits for row in self.rows]),
            attentions=tuple(self.attentions) if self.keep_attentions else None,
            hidden_states=hidden,
            cache=self.target.cache,
        )


def _stack(rows: list[tuple[torch.Tensor, ...] | None]) -> tuple[torch.Tensor, ...] | None:
    """Per step (B, V); zeros where a row had finished."""
    if rows[0] is None:
        return None
    longest = max(rows, key=len)
    return tuple(
        torch.cat([row[i] if i < len(row) else torch.zeros_like(longest[i]) for row in rows])
        for i in range(len(longest))
    )


def _side_by_side(rows: list[list[tuple[torch.Tensor | None, ...]]]) -> list[tuple[torch.Tensor | None, ...]]:
    """Per step one tensor (B, 1, E) for each layer; zeros where a row had finished."""
    steps = []
    for i, template in enumerate(max(rows, key=len)):
        layers: list[torch.Tensor | None] = []
        for layer, like in enumerate(template):
            if like is None:
                layers.append(None)
            else:
                layers.append(torch.cat([row[i][layer] if i < len(row) else torch.zeros_like(like) for row in rows]))
        steps.append(tuple(layers))
    return steps

"""Forward passes of the target over drafts, and its cache: masks, positions, and compaction to the accepted path.

Two kinds of pass. The ordinary one, for a chain in a single row, is the call that plain decoding makes with a few more
tokens; it works for every cache that can be rolled back. The masked one judges trees and several rows of different
lengths at once; it needs full attention, a growing cache, and an attention that takes a mask of its own.

Layout for several rows: every row occupies the slots from its first token to its own length, so accepted tokens are
moved left to where the row ends; what lies between a row's end and the longest row's is masked.
"""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from .draft import Draft


class TargetPass:
    """The target's side of one call of `generate`.

    Args:
        input_ids: (B, P) the prompt, left-padded.
        model: the target, a `PreTrainedModel`.
        model_kwargs: as `generate` prepared them, with the cache.
        hidden_states: indices of hidden states that a source reads.
        keep_rows: the cache must hold all rows in the end, finished ones too.

    Attributes:
        lengths: per row the number of cache slots in use, padding included. The token after them (the bonus token) is
            known but not in the cache.
        trees: whether the masked pass works for this target and cache.
        max_depth: the deepest chain that can be rolled back and reached, counted from the bonus token; None: no limit.

    Raises:
        ValueError: the cache cannot be rolled back, or the batch needs the masked pass and cannot have it.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
        hidden_states: tuple[int, ...],
        keep_rows: bool,
    ):
        self.model = model
        self.config = generation_config
        self.kwargs = dict(model_kwargs)
        self.cache: Any = self.kwargs.pop("cache")
        self.rows = input_ids.shape[0]
        self.device = input_ids.device
        self.reason = masked_pass_unavailable(model, self.cache)
        self.trees = self.reason is None
        self.max_depth = _check_cache(model, self.cache)
        if self.rows > 1 and self.reason:
            raise ValueError(
                f"Several prompts at once cannot be drafted for here: {self.reason}. Pass one prompt at a time."
            )
        self.mask_2d: torch.Tensor | None = self.kwargs.pop("attention_mask", None)
        self.position_ids: torch.Tensor = self.kwargs.pop("position_ids")
        if self.position_ids.shape[0] != self.rows:
            self.position_ids = self.position_ids.expand(self.rows, -1)
        self.first_positions: list[int] = (self.position_ids[:, -1] + 1).tolist()
        self.prompt_slots = 0
        self.asked = self.kwargs.get("output_hidden_states")
        self.wanted = hidden_states
        if hidden_states:
            self.kwargs["output_hidden_states"] = True if self.asked else list(hidden_states)
        for name in ("logits_to_keep", "token_type_ids"):
            self.kwargs.pop(name, None)
        self.lengths = [0] * self.rows
        self.length = 0  # slots of the cache in use by the longest row
        self.valid: torch.Tensor | None = None  # (B, slots), for the masked pass
        self.queries = 0
        self.batch = self.rows
        self.row_ids = list(range(self.rows))  # which row of the batch each row of the cache is
        self.finished: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] | None = {} if keep_rows else None

    # -- passes --------------------------------------------------------------------------------------------------------

    def prefill(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        """Runs the prompt. Logits are those of the last position only, (B, 1, V)."""
        self.cache.activate_past_recording()
        kwargs = dict(model_kwargs)
        if self.wanted:
            kwargs["output_hidden_states"] = self.kwargs["output_hidden_states"]
        outputs = self.model._prefill(input_ids, self.config, kwargs)
        if outputs.cache is not self.cache:  # some models begin a cache of their own when a prompt is long
            self.cache = outputs.cache
            self.cache.activate_past_recording()
        self.length = self.prompt_slots = int(self.cache.get_seq_length())
        self.lengths = [self.length] * self.rows
        return outputs

    def after_prefill(self) -> None:
        """Lets layers with a window drop what they no longer need; call once the states have been read."""
        if not self.cache.is_croppable:
            raise ValueError("This target's cache cannot be rolled back after its prompt, so nothing can be drafted.")
        self.cache.crop(0)
        if self.rows > 1 or (self.mask_2d is not None and self.trees):
            self.valid = torch.zeros(self.rows, self.prompt_slots + 256, dtype=torch.bool, device=self.device)
            self.valid[:, : self.prompt_slots] = True if self.mask_2d is None else self.mask_2d.bool()

    def run(self, bonus: list[int], drafts: list[Draft]) -> Any:
        """Runs the bonus tokens and the drafts that follow them.

        Returns:
            Logits (B, 1 + longest draft, V): first the bonus token's, then the nodes' in order.
        """
        self.queries = 1 + max(len(draft) for draft in drafts)
        if self.rows == 1 and drafts[0].is_chain:
            return self._ordinary(bonus[0], drafts[0])
        return self._masked(bonus, drafts)

    def position(self, row: int) -> int:
        """Position in the text of a row's bonus token."""
        return self.first_positions[row] + self.lengths[row] - self.prompt_slots

    def _ordinary(self, bonus: int, draft: Draft) -> Any:
        tokens = torch.tensor([[bonus, *draft.tokens]], device=self.device)
        first = self.position(0)
        positions = torch.arange(first, first + self.queries, device=self.device)[None]
        mask = self.mask_2d
        if mask is not None:
            grown = self.length + self.queries - mask.shape[1]
            mask = torch.cat([mask, mask.new_ones(1, grown)], dim=1)
        inputs = self.model.prepare_inputs_for_generation(
            tokens, cache=self.cache, attention_mask=mask, position_ids=positions, **self.kwargs
        )
        inputs["logits_to_keep"] = 0  # all of them; some models' own preparation asks for the last only
        outputs = self.model(**inputs, return_dict=True)
        return outputs

    def _masked(self, bonus: list[int], drafts: list[Draft]) -> Any:
        queries, length = self.queries, self.length
        dtype = self.model.dtype
        padded = [
            [token, *draft.tokens] + [token] * (queries - 1 - len(draft))
            for token, draft in zip(bonus, drafts, strict=True)
        ]
        positions, sees = [], []
        for row, draft in enumerate(drafts):
            first = self.position(row)
            positions.append([first] + [first + depth for depth in draft.depths] + [first] * (queries - 1 - len(draft)))
            sees.append(ancestors(draft, queries))
        mask = torch.zeros(self.rows, 1, queries, length + queries, dtype=dtype, device=self.device)
        lowest = torch.finfo(dtype).min
        if self.valid is not None:
            mask[..., :length].masked_fill_(~self.valid[:, None, None, :length], lowest)
        mask[..., length:].masked_fill_(~torch.stack(sees).to(self.device)[:, None], lowest)
        outputs = self.model(
            input_ids=torch.tensor(padded, device=self.device),
            attention_mask=mask,
            position_ids=torch.tensor(positions, device=self.device),
            cache=self.cache,
            return_dict=True,
            **self.kwargs,
        )
        return outputs

    # -- keeping the accepted path -------------------------------------------------------------------------------------

    def commit(self, paths: list[list[int]]) -> None:
        """Keeps the bonus token and the accepted nodes of each row."""
        counts = [1 + len(path) for path in paths]
        if self.rows == 1:
            self._commit_one(paths[0])
        else:
            self._commit_rows(paths)
        if self.valid is not None:
            needed = max(self.lengths)
            if needed > self.valid.shape[1]:
                self.valid = torch.cat([self.valid, torch.zeros_like(self.valid)], dim=1)
            for row, count in enumerate(counts):
                self.valid[row, self.lengths[row] - count : self.lengths[row]] = True

    def _commit_one(self, path: list[int]) -> None:
        kept = 1 + len(path)
        in_order = all(node == index for index, node in enumerate(path))
        if not in_order:
            source = torch.tensor([self.length] + [self.length + 1 + node for node in path], device=self.device)
            for layer in self.cache.layers:
                for states in (layer.keys, layer.values):
                    states[:, :, self.length : self.length + kept] = states[:, :, source.to(states.device)]
        self.cache.crop(kept - self.queries)
        self.length += kept
        self.lengths[0] = self.length

    def _commit_rows(self, paths: list[list[int]]) -> None:
        longest = 1 + max(len(path) for path in paths)
        nodes, slots = [], []
        for row, path in enumerate(paths):
            kept = [0] + [1 + node for node in path]
            # rows that keep fewer repeat their first move, which changes nothing
            nodes.append(kept + [0] * (longest - len(kept)))
            start = self.lengths[row]
            slots.append(list(range(start, start + len(kept))) + [start] * (longest - len(kept)))
        node_index = torch.tensor(nodes, device=self.device)  # (B, longest)
        slot_index = torch.tensor(slots, device=self.device)
        rows = torch.arange(self.rows, device=self.device)[:, None]
        if (slot_index != node_index + self.length).any():
            for layer in self.cache.layers:
                for states in (layer.keys, layer.values):
                    at = states.device
                    moved = states[rows.to(at), :, (node_index + self.length).to(at)]  # (B, longest, kv_heads, D)
                    states[rows.to(at), :, slot_index.to(at)] = moved
        for row, path in enumerate(paths):
            self.lengths[row] += 1 + len(path)
        longest_row = max(self.lengths)
        self.cache.crop(longest_row - self.length - self.queries)
        self.length = longest_row

    def select(self, rows: list[int]) -> None:
        """Goes on with these rows only."""
        if self.finished is not None:
            for row in set(range(self.rows)) - set(rows):
                end = self.lengths[row]
                self.finished[self.row_ids[row]] = [
                    (layer.keys[row, :, :end].clone(), layer.values[row, :, :end].clone())
                    for layer in self.cache.layers
                ]
        self.row_ids = [self.row_ids[row] for row in rows]
        index = torch.tensor(rows, device=self.device)
        self.cache.batch_select_indices(index)
        self.rows = len(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.first_positions = [self.first_positions[row] for row in rows]
        self.valid = None if self.valid is None else self.valid[index]
        self.mask_2d = None if self.mask_2d is None else self.mask_2d[index]
        longest = max(self.lengths)
        self.cache.crop(longest - self.length)
        self.length = longest

    def restore_rows(self) -> None:
        """Puts the finished rows back into a cache that the caller gets; the slots after their end hold zeros."""
        if not self.finished:
            return
        length = max([self.length, *(states[0][0].shape[1] for states in self.finished.values())])
        for index, layer in enumerate(self.cache.layers):
            whole = []
            for part, current in enumerate((layer.keys, layer.values)):
                states = current.new_zeros(self.batch, current.shape[1], length, current.shape[3])
                states[self.row_ids, :, : current.shape[2]] = current
                for row, kept in self.finished.items():
                    states[row, :, : kept[index][part].shape[1]] = kept[index][part]
                whole.append(states)
            layer.keys, layer.values = whole

    # -- what a source reads -------------------------------------------------------------------------------------------

    def read(self, index: int, starts: list[int], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, `counts[b]` slots from `starts[b]` on in each row: (B, kv_heads, longest, D).

        In a single row these must be the last slots in use, and a layer with a window may give fewer of them.
        """
        keys, values = self.whole_layer(index)
        if self.rows == 1:
            start = max(keys.shape[2] - counts[0], 0)
            return keys[:, :, start:], values[:, :, start:]
        slots = torch.tensor(starts)[:, None] + torch.arange(max(counts))[None]
        slots = slots.clamp(max=keys.shape[2] - 1).to(keys.device)
        rows = torch.arange(self.rows, device=keys.device)[:, None]
        return keys[rows, :, slots].transpose(1, 2), values[rows, :, slots].transpose(1, 2)

    def whole_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer for all slots in use."""
        layer = self.cache.layers[index]
        keys, values = layer.keys, layer.values
        if isinstance(layer, StaticLayer):  # room for the whole text from the start
            keys, values = keys[:, :, : self.length], values[:, :, : self.length]
        return keys, values


def ancestors(draft: Draft, size: int) -> torch.Tensor:
    """(size, size), True where a query (bonus token, then nodes, then padding) may look among the queries."""
    see = torch.eye(size, dtype=torch.bool)
    see[: 1 + len(draft), 0] = True
    for node, parent in enumerate(draft.parents):
        if parent >= 0:
            see[node + 1] |= see[parent + 1]
    return see


def context_limit(config: PreTrainedConfig, prompt_length: int, max_length: int) -> int | None:
    """Positions from here on are not drafted for: plain steps go on past them.

    That is the length of the context, or where rotary embeddings begin to depend on the length of the text, so that a
    pass over several tokens would turn them all by the last one's.

    Raises:
        ValueError: the text may grow past the place where the target computes its whole cache anew.
    """
    config = config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    switch = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if rope.get("rope_type") == "dynamic":
        return switch or limit
    if rope.get("rope_type") == "longrope" and switch and prompt_length <= switch < max_length:
        raise ValueError(
            f"This target changes its rotary embeddings at {switch} tokens, and computes everything anew when a text "
            f"grows past that. With a drafter, keep max_length at {switch} or below."
        )
    return limit


def masked_pass_unavailable(model: PreTrainedModel, cache: Cache) -> str | None:
    """Why trees and batches cannot be judged with this target and cache, or None when they can."""
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        kind = next(type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer)
        return f"its cache has layers of the kind {kind}, and only growing full-attention layers can hold a tree"
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [])
    if kinds - {"full_attention"}:
        return f"the target has layers of the kind {', '.join(sorted(kinds - {'full_attention'}))}"
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f'attention "{attention}" takes no mask of our own; load the target with attn_implementation="sdpa"'
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids"
    return None


def _check_cache(model: PreTrainedModel, cache: Cache) -> int | None:
    """The deepest draft that the cache can take back; see `TargetPass`."""
    depth = None
    for layer in cache.layers:
        kind = type(layer)
        if not isinstance(layer, (DynamicLayer, StaticLayer)) or "Quantized" in kind.__name__:
            raise ValueError(
                f"A cache with layers of the kind {kind.__name__} cannot be rolled back, so nothing can be drafted on "
                "it. Use the default cache (leave cache_implementation out), or leave assistant_model out."
            )
        if isinstance(layer, StaticLayer) and not layer.is_croppable:
            raise ValueError(
                "A static cache whose sliding window is shorter than the text cannot be rolled back. Leave "
                'cache_implementation="static" out, or leave assistant_model out.'
            )
        if isinstance(layer, DynamicSlidingWindowLayer):
            window = max(0, layer.sliding_window - 2)
            depth = window if depth is None else min(depth, window)
    return depth

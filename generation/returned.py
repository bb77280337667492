"""What `generate` returns besides tokens, gathered token by token: scores, logits, hidden states, attentions, cache."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils.output_capturing import selected_hidden_states

from .verify import Row

Layers = tuple[torch.Tensor | None, ...]


class Returned:
    """Collects what the call asked for; costs nothing when it asked for tokens only.

    Where rows of a batch end at different lengths, a row's scores and states after its end are zeros. (Plain decoding
    goes on computing them from padding.)
    """

    def __init__(self, model: PreTrainedModel, config: GenerationConfig, rows: int):
        as_dict = bool(config.return_dict_in_generate)
        self.as_dict = as_dict
        self.scores = bool(as_dict and config.output_scores)
        self.logits = bool(as_dict and config.output_logits)
        self.attentions = bool(as_dict and config.output_attentions)
        self.hidden = bool(as_dict and config.output_hidden_states)
        self._first_hidden: Layers = ()
        self._hidden: list[list[Layers]] = [[] for _ in range(rows)]
        self._attentions: list[Layers] = []
        named = selected_hidden_states(config.output_hidden_states)
        count = model.config.get_text_config(decoder=True).num_hidden_layers + 1
        self._named = None if named is None else {index % count for index in named if -count <= index < count}

    def prefill(self, outputs: Any) -> None:
        if self.hidden:
            self._first_hidden = self._visible(outputs.hidden_states)
        if self.attentions:
            self._attentions.append(outputs.attentions)

    def add_hidden(self, row: int, states: Any) -> None:
        """Hidden states of the tokens run for one row, (n, E) per layer, one step of the result each."""
        if self.hidden:
            count = next(h for h in states if h is not None).shape[0]
            for i in range(count):
                self._hidden[row].append(self._visible(tuple(None if h is None else h[i][None, None] for h in states)))

    def add_attentions(self, attentions: Any, before: int, count: int) -> None:
        """Of a chain in a single row: (1, heads, Q, before + Q) per layer; the first `count` queries were kept."""
        for i in range(count if self.attentions else 0):
            self._attentions.append(tuple(a[:, :, i : i + 1, : before + i + 1] for a in attentions))

    def _visible(self, hidden: Layers) -> Layers:
        """Only those hidden states that the caller named; a source may have asked the target for more."""
        if self._named is None:
            return hidden
        return tuple(h if index in self._named else None for index, h in enumerate(hidden))

    def result(self, rows: list[Row], pad: int, cache: Cache) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """(B, longest) token ids, or with everything else as a dict."""
        longest = max(row.length for row in rows)
        sequences = torch.cat([torch.nn.functional.pad(r.sequence, (0, longest - r.length), value=pad) for r in rows])
        if not self.as_dict:
            return sequences
        hidden: Any = None
        if self.hidden:
            steps = range(max(map(len, self._hidden)))
            hidden = (self._first_hidden, *(_side_by_side(self._hidden, step) for step in steps))
        everything: dict[str, Any] = {
            "sequences": sequences,
            "scores": _stacked([row.scores for row in rows]) if self.scores else None,
            "logits": _stacked([row.logits for row in rows]) if self.logits else None,
            "attentions": tuple(self._attentions) if self.attentions else None,
            "hidden_states": hidden,
            "cache": cache,
        }
        return GenerateDecoderOnlyOutput(**everything)


def _stacked(rows: list[Any]) -> tuple[torch.Tensor, ...]:
    """Per step (B, V)."""
    longest = max(rows, key=len)
    return tuple(
        torch.cat([row[step] if step < len(row) else torch.zeros_like(like) for row in rows])
        for step, like in enumerate(longest)
    )


def _side_by_side(rows: list[list[Any]], step: int) -> Layers:
    """Hidden states of one step, (B, 1, E) per layer."""
    layers: list[torch.Tensor | None] = []
    for layer, like in enumerate(max(rows, key=len)[step]):
        if like is None:
            layers.append(None)
        else:
            layers.append(torch.cat([row[step][layer] if step < len(row) else torch.zeros_like(like) for row in rows]))
    return tuple(layers)

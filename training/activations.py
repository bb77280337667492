"""The target's activations over its own answers, computed once and kept on disk.

Knows: which activations a drafter reads and imitates, and how they lie in memory-mapped shards. Does not know losses
or masks.

A folder may hold more than a drafter reads (more layers, the input of each of the last N layers), so that several
drafters can be trained from the same one.

A training step then never runs the target: it reads what Layer Self-Attention reads (keys and values of a few layers)
and what the drafter imitates (the last hidden state; with TLI the input of the reused layers as well), in bf16.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..modeling_moa import MoADrafterConfig, MoADrafterForCausalLM, weight_fingerprint

SHARD_TOKENS = 65536
BATCH_TOKENS = 4096


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[int]:
    """Token ids of a row's prompt, as `generate` would be given them."""
    messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


class ActivationCache:
    """A folder of shards for one target and one choice of layers.

    Args:
        folder: where the shards lie.
        config: of the drafter that will read them: its LSA layers, hidden-state choice and TLI decide what is kept.
    """

    def __init__(self, folder: str | Path, config: MoADrafterConfig):
        self.folder = Path(folder)
        self.config = config
        self.layers = config.lsa_layers
        self.tail = config.target_layer_inference

    def _description(self, target: PreTrainedModel) -> dict[str, Any]:
        return {
            "target": self.config.target_name,
            "fingerprint": weight_fingerprint(target),
            "layers": self.layers,
            "target_layer_inference": self.tail,
        }

    @torch.inference_mode()
    def build(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: Iterable[dict[str, Any]],
        max_length: int,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Runs the target over the rows that have no activations yet; finished shards are never touched again.

        Rows are taken in order, so a cache can be continued with a longer file that begins with the same rows.

        Raises:
            ValueError: the folder holds activations of another target, of other layers, or of other rows.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        meta = self.folder / "meta.json"
        found = json.loads(meta.read_text()) if meta.exists() else None
        if found is not None:  # what lies there is continued as it is, when it holds all that is read
            self.layers = found["layers"] if set(self.layers) <= set(found["layers"]) else self.layers
            self.tail = max(self.tail, found["target_layer_inference"])
        description = self._description(target)
        if found is not None:
            different = [k for k in description if found.get(k) != description[k]]
            if different:
                raise ValueError(
                    f"{self.folder} holds activations with another {', '.join(different)}; "
                    "choose another folder or delete it"
                )
        else:
            _write_whole(meta, json.dumps(description))
        shards = shard_paths(self.folder)
        known = (sequence for path in shards for sequence in _shard_sequences(path))
        sequences: list[tuple[list[int], int, str]] = []
        pending = 0
        number = len(shards)
        for index, row in enumerate(rows):
            prompt = prompt_ids(tokenizer, row)
            ids = (prompt + row["response_ids"])[:max_length]
            prompt_length = min(len(prompt), len(ids))
            if (found := next(known, None)) is not None:
                if found != (ids, prompt_length):
                    raise ValueError(
                        f"{self.folder} holds activations of other data: row {index + 1} is not the same there. Name "
                        "the same files in the same order, with the same max_length, or choose another folder"
                    )
                continue
            sequences.append((ids, prompt_length, row.get("kind") or row.get("source", "")))
            pending += len(ids)
            if pending >= SHARD_TOKENS:
                self._write_shard(target, sequences, number)
                progress(pending)
                sequences, pending, number = [], 0, number + 1
        if sequences:
            self._write_shard(target, sequences, number)
            progress(pending)

    def _write_shard(self, target: PreTrainedModel, sequences: list[tuple[list[int], int, str]], number: int) -> None:
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]))
        results: list[dict[str, torch.Tensor] | None] = [None] * len(sequences)
        batch: list[int] = []
        for position, i in enumerate(order):
            batch.append(i)
            last = position + 1 == len(order)
            if last or (len(batch) + 1) * len(sequences[order[position + 1]][0]) > BATCH_TOKENS:
                for j, result in zip(batch, self._run(target, [sequences[j][0] for j in batch]), strict=True):
                    results[j] = result
                batch = []
        whole = {name: torch.cat([r[name] for r in results if r is not None]) for name in results[0] or {}}
        lengths = torch.tensor([len(ids) for ids, _, _ in sequences])
        whole["input_ids"] = torch.tensor([t for ids, _, _ in sequences for t in ids], dtype=torch.int32)
        whole["offsets"] = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        whole["prompt_lengths"] = torch.tensor([p for _, p, _ in sequences])
        path = self.folder / f"shard-{number:05d}.safetensors"
        temporary = path.with_suffix(".partial")
        save_file(whole, temporary, metadata={"kinds": json.dumps([kind for _, _, kind in sequences])})
        os.replace(temporary, path)

    def _run(self, target: PreTrainedModel, batch: list[list[int]]) -> list[dict[str, torch.Tensor]]:
        """Activations of some sequences, right-padded: what is to the right of a token cannot change it."""
        width = max(map(len, batch))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in batch], device=target.device)
        tail = self.tail
        layers = self.config.target_num_hidden_layers
        wanted = list(range(layers - tail, layers))  # hidden_states[i] is the input of layer i
        # Padding is on the right, so plain causal attention needs no mask, which is the fast path of sdpa.
        # A cache that forgets what slid out of a window would misalign keys and tokens: it is told to keep everything.
        cache = DynamicCache(config=target.config)
        cache.activate_past_recording()
        output = target.get_decoder()(ids, cache=cache, use_cache=True, output_hidden_states=wanted or False)
        keys = [output.cache.layers[i].keys for i in self.layers]
        values = [output.cache.layers[i].values for i in self.layers]
        pairs = zip(keys, values, strict=True)
        states = torch.cat([torch.cat([k, v], -1).transpose(1, 2).flatten(2) for k, v in pairs], -1)
        kept = {"layer_states": states, "last_hidden": output.last_hidden_state}
        if tail:
            kept["layer_inputs"] = torch.cat([output.hidden_states[i] for i in wanted], -1)
        return [
            {name: tensor[i, : len(row)].to(torch.bfloat16).cpu() for name, tensor in kept.items()}
            for i, row in enumerate(batch)
        ]


def shard_paths(folder: str | Path) -> list[Path]:
    """Finished shards in order."""
    return sorted(Path(folder).glob("shard-*.safetensors"))


def _shard_sequences(path: Path) -> Iterator[tuple[list[int], int]]:
    """Token ids and prompt length of every row of a shard."""
    with safe_open(path, "pt") as file:
        ids, offsets = file.get_tensor("input_ids").tolist(), file.get_tensor("offsets").tolist()
        prompts = file.get_tensor("prompt_lengths").tolist()
    for start, end, prompt_length in zip(offsets, offsets[1:], prompts, strict=False):
        yield ids[start:end], prompt_length


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text(text)
    os.replace(temporary, path)


class ActivationDataset(Dataset):
    """One item per row: `row` (its number in the data), `input_ids` (T,), `prompt_length`, `layer_states` (T, S),
    `last_hidden` (T, E), `kind`, and with TLI `layer_input` (T, E). Shards are memory-mapped; only the row asked for is
    read. A drafter that reads no layers gets no `layer_states`.

    Args:
        folder: of an `ActivationCache`.
        drafter: its `config` says which layers are read, and whether the hidden state is part of the layer states.
        rows: indices to keep, of all rows; None keeps them all. Rows without an answer of two tokens are left out.

    Raises:
        FileNotFoundError: the folder holds no finished shard.
    """

    def __init__(self, folder: str | Path, drafter: MoADrafterForCausalLM, rows: Iterable[int] | None = None):
        paths = shard_paths(folder)
        if not paths:
            raise FileNotFoundError(f"{folder} holds no activations: build the cache first")
        config, meta = drafter.config, json.loads((Path(folder) / "meta.json").read_text())
        kept, self.width = meta["layers"], config.hidden_size
        self.layer_input = meta["target_layer_inference"] - config.target_layer_inference  # which of the inputs
        self.joins_hidden = config.memory_hidden_state != "none"
        self.wanted = ["input_ids", "last_hidden"]
        self.wanted += ["layer_states"] if config.lsa_layers else []
        self.wanted += ["layer_inputs"] if config.target_layer_inference else []
        self.columns = None  # of the layer states; None: all that lie there
        if config.lsa_layers != kept:
            starts = torch.tensor([kept.index(layer) * config.layer_width for layer in config.lsa_layers])
            self.columns = (starts[:, None] + torch.arange(config.layer_width)).flatten()
        self.files = [safe_open(path, "pt") for path in paths]
        self.starts, self.offsets, self.prompts, kinds = [0], [], [], []
        for file in self.files:
            self.offsets.append(file.get_tensor("offsets"))
            self.prompts.append(file.get_tensor("prompt_lengths"))
            kinds += json.loads(file.metadata()["kinds"])
            self.starts.append(self.starts[-1] + len(self.prompts[-1]))
        prompts = torch.cat(self.prompts)
        self.all_lengths = torch.cat([o.diff() for o in self.offsets])
        chosen = range(len(prompts)) if rows is None else rows
        self.rows = [i for i in chosen if self.all_lengths[i] - prompts[i] >= 2]
        self.kinds = [kinds[i] for i in self.rows]
        self.lengths = [int(self.all_lengths[i]) for i in self.rows]
        self.answer_tokens = int(sum(self.all_lengths[i] - prompts[i] for i in self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        shard = bisect_right(self.starts, row) - 1
        local = row - self.starts[shard]
        file = self.files[shard]
        start, end = (int(self.offsets[shard][local + d]) for d in (0, 1))
        item = {name: file.get_slice(name)[start:end] for name in self.wanted}
        item["input_ids"] = item["input_ids"].long()
        if self.columns is not None and "layer_states" in item:
            item["layer_states"] = item["layer_states"][:, self.columns]
        if "layer_inputs" in item:
            start = self.layer_input * self.width
            item["layer_input"] = item.pop("layer_inputs")[:, start : start + self.width]
        if self.joins_hidden:
            item["layer_states"] = torch.cat([item["layer_states"], item["last_hidden"]], dim=-1)
        return item | {"row": row, "prompt_length": int(self.prompts[shard][local]), "kind": self.kinds[index]}


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads rows on the right. Adds `lengths`, `prompt_lengths` and `rows` (their numbers in the data), each (B,)."""
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {
        name: pad([item[name] for item in items], batch_first=True)
        for name in items[0]
        if name not in ("row", "prompt_length", "kind")
    }
    batch["lengths"] = torch.tensor([len(item["input_ids"]) for item in items])
    batch["rows"] = torch.tensor([item["row"] for item in items])
    batch["prompt_lengths"] = torch.tensor([item["prompt_length"] for item in items])
    return batch

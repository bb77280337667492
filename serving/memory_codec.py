"""Memory vectors as bytes: what the server computes per verified token, and how it travels.

A token's memory is one or more vectors, one after another: LSA's mean over layers (for drafters whose memory adds the
target's last hidden state: the memory itself), then, with TLI = N, key and value of each of the target's last N layers.
Knows shapes and formats; not how vectors are made or used.
"""

import torch

from ..modeling_moa import MoADrafterConfig
from .messages import MemoryFormat

_SIZES = {"bfloat16": 2, "float32": 4}


def vector_widths(config: MoADrafterConfig) -> list[int]:
    """Numbers in each of a token's vectors."""
    memory = config.hidden_size if config.memory_hidden_state == "add" else config.layer_width
    return [memory] + [config.layer_width] * config.target_layer_inference


class MemoryCodec:
    """Turns vectors into bytes and back.

    "float32" and "bfloat16" are the numbers, lowest byte first. "int8": per vector a float32 scale, then one signed
    byte per number; a number is scale * byte, the largest in size being 127. "none": nothing travels.

    Args:
        widths: numbers in each of a token's vectors.
    """

    def __init__(self, widths: list[int], form: MemoryFormat):
        self.widths, self.form = widths, form
        if form == "none":
            self.token_bytes = 0
        elif form == "int8":
            self.token_bytes = sum(4 + width for width in widths)
        else:
            self.token_bytes = _SIZES[form] * sum(widths)

    def encode(self, vectors: list[torch.Tensor]) -> bytes:
        """Vectors (n, width) each, to n * token_bytes bytes."""
        if self.form != "int8":
            dtype = torch.float32 if self.form == "float32" else torch.bfloat16
            return _bytes(torch.cat([vector.to("cpu", dtype) for vector in vectors], dim=1))
        parts = []
        for vector in vectors:
            numbers = vector.to("cpu", torch.float32)
            scale = numbers.abs().amax(dim=1, keepdim=True) / 127
            scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
            quantised = (numbers / scale).round().clamp(-127, 127).to(torch.int8)
            parts += [scale.view(torch.uint8), quantised.view(torch.uint8)]
        return _bytes(torch.cat(parts, dim=1))

    def decode(self, data: bytes, count: int) -> list[torch.Tensor]:
        """The vectors of `count` tokens as float32, (count, width) each.

        Raises:
            ValueError: these are not the bytes of `count` tokens, or not of finite numbers.
        """
        if self.form == "none":
            raise ValueError("memory was not asked for")
        if len(data) != count * self.token_bytes or count < 1:
            raise ValueError(
                f"memory of {count} tokens takes {count * self.token_bytes} bytes in {self.form}, not {len(data)}"
            )
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, self.token_bytes)
        if self.form == "int8":
            vectors, at = [], 0
            for width in self.widths:
                scale = raw[:, at : at + 4].clone().view(torch.float32)  # (count, 1)
                vectors.append(raw[:, at + 4 : at + 4 + width].view(torch.int8) * scale)
                at += 4 + width
        else:
            numbers = raw.view(torch.float32 if self.form == "float32" else torch.bfloat16).float()
            vectors = list(numbers.split(self.widths, dim=1))
        if not all(bool(vector.isfinite().all()) for vector in vectors):
            raise ValueError("memory holds numbers that are not finite")
        return vectors


def _bytes(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()

"""One pass of the target for the drafts of several texts.

Texts have caches of their own, of any length; nothing is padded or copied from one to another. The drafts stand one
after another in a single row, every text's keys and values behind one another, and a mask lets each draft see its own
text alone. A pass over four texts' drafts costs little more than over one's, because what it mostly does is read the
target's weights.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..generation.draft import Draft
from .decoding import RemoteText

MOST_TOKENS = 256  # in one pass; what comes later waits for the next


class _SideBySide(DynamicCache):
    """Takes a layer's new keys and values apart, gives each text's to its cache, and returns those of all texts."""

    def __init__(self, caches: Sequence[Any], counts: Sequence[int]):
        super().__init__()
        self.caches, self.counts = caches, counts

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        keys = key_states.split(list(self.counts), dim=2)
        values = value_states.split(list(self.counts), dim=2)
        grown = [c.update(k, v, layer_idx, *args, **kwargs) for c, k, v in zip(self.caches, keys, values, strict=True)]
        return torch.cat([k for k, _ in grown], dim=2), torch.cat([v for _, v in grown], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return sum(int(cache.get_seq_length(layer_idx)) for cache in self.caches)


@torch.no_grad()
def verify_together(target: PreTrainedModel, texts: Sequence[RemoteText], drafts: Sequence[Draft]) -> list[int]:
    """`RemoteText.verify` for several texts in one pass; how many of each one's new tokens had been drafted.

    The target must be able to judge trees (`decoding.takes_trees`).
    """
    if len(texts) == 1:
        return [texts[0].verify(drafts[0])]
    drafts = [text.usable(draft) for text, draft in zip(texts, drafts, strict=True)]
    queries = [text.begin(draft) for text, draft in zip(texts, drafts, strict=True)]
    counts = [len(query.tokens) for query in queries]
    held = [query.held for query in queries]
    total = sum(counts)
    mask = torch.full((total, total + sum(held)), torch.finfo(target.dtype).min, dtype=target.dtype)
    row = column = 0
    for query, count, before in zip(queries, counts, held, strict=True):
        block = mask[row : row + count, column : column + before + count]
        block[:, :before] = 0
        block[:, before:].masked_fill_(query.sees, 0)
        row, column = row + count, column + before + count
    wanted = sorted({index for text in texts for index in text.record.hidden_states})
    outputs = target(
        input_ids=torch.tensor([[token for query in queries for token in query.tokens]], device=target.device),
        position_ids=torch.tensor([[place for query in queries for place in query.positions]], device=target.device),
        attention_mask=mask[None, None].to(target.device),
        cache=_SideBySide([query.cache for query in queries], counts),
        use_cache=True,
        return_dict=True,
        **({"output_hidden_states": wanted} if wanted else {}),
    )
    accepted, at = [], 0
    for text, draft, count in zip(texts, drafts, counts, strict=True):
        part = slice(at, at + count)
        hidden = {index: outputs.hidden_states[index][:, part] for index in text.record.hidden_states}
        accepted.append(text.finish(draft, outputs.logits[0, part], hidden))
        at += count
    return accepted


class Judging:
    """Collects the drafts that wait while the target is busy, and has them judged together when its turn comes.

    Attributes:
        passes, drafts: of the target so far, and the drafts judged in them.
    """

    def __init__(self, target: PreTrainedModel, worker: ThreadPoolExecutor, together: bool):
        self.target, self.worker, self.together = target, worker, together
        self.passes = self.drafts = 0
        self._waiting: list[tuple[RemoteText, Draft, asyncio.Future[int]]] = []
        self._lock = threading.Lock()

    def verify(self, text: RemoteText, draft: Draft) -> "asyncio.Future[int]":
        """As `RemoteText.verify`, in the worker. Call from the event loop."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((text, draft, future))
        self.worker.submit(self._run)  # one job per draft: those that find nothing left to do are done at once
        return future

    def _run(self) -> None:
        """In the worker: judges what waits by now, first come, first served."""
        with self._lock:
            count, tokens = 0, 0
            while count < len(self._waiting) and (not count or self.together):
                tokens += 1 + len(self._waiting[count][1])
                if count and tokens > MOST_TOKENS:
                    break
                count += 1
            batch, self._waiting = self._waiting[:count], self._waiting[count:]
        if not batch:
            return
        self.passes += 1
        self.drafts += len(batch)
        try:
            results: list[int] = verify_together(self.target, [b[0] for b in batch], [b[1] for b in batch])
        except BaseException as error:
            for _, _, future in batch:
                future.get_loop().call_soon_threadsafe(_fail, future, error)
            return
        for (_, _, future), result in zip(batch, results, strict=True):
            future.get_loop().call_soon_threadsafe(_succeed, future, result)


def _succeed(future: "asyncio.Future[int]", result: int) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[int]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

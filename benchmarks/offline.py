"""What a client's text is worth while the line is cut: written by drafters alone, judged by the target afterwards.

Knows who writes offline and what of, and the figures. Nothing travels: memory goes through the codec of the wire, which
is all that the line does to it.

"Cut after c tokens": the client has the prompt, c tokens of the target's greedy answer, and memory of all of them but
the last, as after a round. Then it writes `count` tokens by itself.
"""

import ast
import copy
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..generation.lookup import RowLookup
from ..generation.sources import DraftPlan
from ..modeling_moa import MoADrafterForCausalLM
from ..serving.client_memory import OfflineWriter, RemoteMemory
from ..serving.decoding import MemoryRecord
from ..serving.memory_codec import MemoryCodec, vector_widths
from ..serving.messages import Sampling
from .link_clients import EagleMemory, HiddenStates
from .records import ResultFile, environment

MOA = "moa"
DESCRIPTIONS = {
    MOA: "MoA from the memory that it has, and lookup where that promises more: what the client does",
    "moa-no-repeat": "the same, repeating no {n} tokens in a row of its answer",
    "moa-alone": "the same as moa without lookup",
    "moa-prompt": "moa-alone without the memory of the answer's tokens: of the prompt's only",
    "untrained": "a drafter of MoA's sizes with random weights, and its memory",
    "lookup": "what followed the longest earlier occurrence of the text's end, over and over",
    "eagle": "EAGLE from the hidden states that it has",
    "assistant": "an independent small model",
}
CUTS = (0, 10, 32)
REPETITION_TOKENS = 4
_RESAMPLES = 10_000


@dataclass
class Judged:
    """One offline text.

    Attributes:
        token_ids: as written; fewer than asked for where it ended by itself.
        kept: tokens that the target keeps when the line is back, which is the length to the first divergence.
        regret: nats per token that it is less likely to the target than the target's own text of that length.
        repetition: share of its runs of `REPETITION_TOKENS` tokens that it had already; None when too short.
        rouge_l: F-measure against the target's own text, of words.
        parses: whether the code in it parses; None where the target's answer has no code.
    """

    token_ids: list[int]
    kept: int
    regret: float
    repetition: float | None
    rouge_l: float
    parses: bool | None


Writer = Callable[[list[int], int, int], list[int]]
"""From the whole text so far, how much of it is the prompt, and how many tokens to write: the tokens."""


class Reading:
    """One pass of the target over a text: its cache, its scores, and memory of it as it arrives at a client."""

    @torch.no_grad()
    def __init__(self, target: PreTrainedModel, tokens: list[int]):
        self.target, self.tokens = target, tokens
        self.cache = DynamicCache(config=target.config.get_text_config(decoder=True))
        ids = torch.tensor([tokens], device=target.device)
        output = target(input_ids=ids, cache=self.cache, use_cache=True, output_hidden_states=True)
        self.last_hidden = output.hidden_states[-1]  # (1, T, E)
        self.logits = output.logits
        self._memory: dict[int, list[torch.Tensor]] = {}

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `TargetStates`."""
        layer: Any = self.cache.layers[index]
        return layer.keys, layer.values

    def hidden(self, index: int) -> torch.Tensor:
        """As `TargetStates`; drafters ask for the last."""
        return self.last_hidden

    @torch.no_grad()
    def memory(self, drafter: Any, widths: list[int], count: int) -> list[torch.Tensor]:
        """Vectors of the first `count` tokens, (count, width) each, in int8 and back."""
        if id(drafter) not in self._memory:
            record = MemoryRecord(drafter)
            seen: Any = SimpleNamespace(states=self)
            record.observe(seen)
            vectors = [record.between(0, len(self.tokens))]
            last = drafter.config.target_num_hidden_layers
            for index in range(last - drafter.config.target_layer_inference, last):
                pair = [states[0].transpose(0, 1).flatten(1) for states in self.layer(index)]
                vectors.append(torch.cat(pair, dim=1))
            codec = MemoryCodec(widths, "int8")
            self._memory[id(drafter)] = codec.decode(codec.encode(vectors), len(self.tokens))
        return [vector[:count] for vector in self._memory[id(drafter)]]

    @torch.no_grad()
    def log_probs(self, length: int, texts: Sequence[list[int]]) -> list[list[float]]:
        """The target's log-probability of every token of texts that follow the first `length` tokens."""
        device, longest = self.target.device, max(map(len, texts))
        cache = copy.deepcopy(self.cache)
        cache.crop(length - len(self.tokens))
        cache.batch_repeat_interleave(len(texts))
        rows = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
        logits = [self.logits[:, length - 1 : length].expand(len(texts), -1, -1)]
        if longest > 1:
            positions = length + torch.arange(longest - 1, device=device).expand(len(texts), -1)
            logits.append(self.target(input_ids=rows[:, :-1], position_ids=positions, cache=cache).logits)
        scores = torch.cat(logits, dim=1).float().log_softmax(dim=-1).gather(2, rows[:, :, None])[:, :, 0]
        return [row[: len(text)].tolist() for row, text in zip(scores, texts, strict=True)]


def moa_writer(
    reading: Reading,
    server: MoADrafterForCausalLM,
    client: MoADrafterForCausalLM,
    no_repeat_ngram_size: int = 0,
    prompt_only: bool = False,
    looks_up: bool = False,
) -> Writer:
    """MoA's two halves: `server` makes the memory, `client` writes from it as a client does."""
    widths = vector_widths(client.config)

    def write(text: list[int], prompt: int, count: int) -> list[int]:
        held = min(prompt, len(text) - 1) if prompt_only else len(text) - 1
        memory = RemoteMemory(client)
        if held:
            memory.take(text[:held], reading.memory(server, widths, held))
        lookup = RowLookup(text, None) if looks_up else None
        writer = OfflineWriter(memory, text, Sampling(), widths, 0, prompt, no_repeat_ngram_size, lookup)
        return [writer.write() for _ in range(count)]

    return write


def lookup_writer(text: list[int], prompt: int, count: int) -> list[int]:
    """Prompt lookup without a target: repeats the last token where nothing has occurred before."""
    found = RowLookup(text, None).draft(count).tokens
    return found + (found or text)[-1:] * (count - len(found))


def eagle_writer(reading: Reading, hidden: HiddenStates, drafter: Any) -> Writer:
    """EAGLE's chain."""

    @torch.no_grad()
    def write(text: list[int], prompt: int, count: int) -> list[int]:
        memory = EagleMemory(drafter)
        held = len(text) - 1
        memory.take(text[:held], reading.memory(hidden, [drafter.config.hidden_size], held))
        memory.follow(text)
        return memory.draft(DraftPlan(count, 1, count))[0].tokens

    return write


def model_writer(model: PreTrainedModel) -> Writer:
    """An independent model's greedy text."""

    def write(text: list[int], prompt: int, count: int) -> list[int]:
        ids = torch.tensor([text], device=model.device)
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
        )
        return written[0, len(text) :].tolist()

    return write


# -- judging -----------------------------------------------------------------------------------------------------------


class Judge:
    """The target's answer to one prompt, and what it thinks of other ends.

    Args:
        reading: of prompt and answer, as far as the last cut.
        prompt: its number of tokens.
        answer: the target's own, greedy, to its end or long enough for all cuts.
    """

    def __init__(self, reading: Reading, tokenizer: PreTrainedTokenizerBase, prompt: int, answer: list[int]):
        self.reading, self.tokenizer, self.prompt, self.answer = reading, tokenizer, prompt, answer

    def judge(self, cut: int, texts: Mapping[str, list[int]], count: int, eos: set[int]) -> dict[str, Judged]:
        """All texts written after one cut, by name. What follows an end of text is not read."""
        own = _ended(self.answer[cut : cut + count], eos)
        ended = {name: _ended(text, eos) for name, text in texts.items()}
        scores = self.reading.log_probs(self.prompt + cut, [own, *ended.values()])
        code = _has_code(self.tokenizer.decode(self.answer))
        judged = {}
        for (name, text), mine in zip(ended.items(), scores[1:], strict=True):
            shared = min(len(own), len(text))
            regret = statistics.fmean(scores[0][:shared]) - statistics.fmean(mine[:shared])
            kept = next((i for i in range(shared) if own[i] != text[i]), shared)
            parses = _parses(self.tokenizer.decode(self.answer[:cut] + text)) if code else None
            words = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (own, text)]
            judged[name] = Judged(text, kept, regret, repetition(text), rouge_l(*words), parses)
        return judged


def _ended(tokens: list[int], eos: set[int]) -> list[int]:
    """Up to and with the first end of text."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in eos), tokens)


def repetition(tokens: Sequence[int]) -> float | None:
    """Share of runs of `REPETITION_TOKENS` tokens that stand earlier in the same text."""
    runs = [tuple(tokens[i : i + REPETITION_TOKENS]) for i in range(len(tokens) - REPETITION_TOKENS + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else None


def rouge_l(reference: str, text: str) -> float:
    """ROUGE-L (Lin 2004): F-measure of the longest common subsequence of words, without case and punctuation."""
    theirs, mine = (re.findall(r"\w+", part.lower()) for part in (reference, text))
    if not theirs or not mine:
        return float(theirs == mine)
    row = [0] * (len(mine) + 1)
    for word in theirs:
        diagonal = 0
        for i, other in enumerate(mine, start=1):
            diagonal, row[i] = row[i], diagonal + 1 if word == other else max(row[i], row[i - 1])
    return 2 * row[-1] / (len(theirs) + len(mine))


_FENCE = re.compile(r"```(?:python|py)\b[^\n]*\n(.*?)(```|\Z)", re.DOTALL)


def _has_code(answer: str) -> bool:
    return _FENCE.search(answer) is not None


def _parses(answer: str) -> bool:
    """Whether the first block of Python is a program; a last line that is still being written does not count."""
    found = _FENCE.search(answer)
    if found is None:
        return False
    code, fence = found.groups()
    if not fence:
        code = code[: code.rfind("\n") + 1]
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return bool(code.strip())


# -- figures -----------------------------------------------------------------------------------------------------------

FIGURES = ("kept_share", "kept", "regret", "repetition", "rouge_l", "parses")


def summarise(prompts: Sequence[Mapping[str, Any]], cuts: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Means with 95% intervals by cut and writer, and what MoA is ahead of each other one, prompt by prompt.

    Intervals are bootstrapped over prompts. `kept_share` is the mean over prompts of each one's share.
    """
    found: dict[str, Any] = {}
    for cut in cuts:
        entries = [prompt["cuts"][str(cut)] for prompt in prompts if str(cut) in prompt["cuts"]]
        values = {name: {what: [_figure(e[name], what) for e in entries] for what in FIGURES} for name in names}
        found[str(cut)] = {
            "prompts": len(entries),
            "writers": {
                name: {what: bootstrap(of) for what, of in figures.items()} for name, figures in values.items()
            },
            "ahead": {
                name: {
                    what: bootstrap([a - b for a, b in zip(values[MOA][what], values[name][what], strict=True)])
                    for what in ("kept_share", "kept")
                }
                for name in names
                if name != MOA and MOA in names
            },
        }
    return found


def _figure(judged: Mapping[str, Any], what: str) -> float | None:
    if what == "kept_share":
        return judged["kept"] / len(judged["token_ids"])
    value = judged[what]
    return None if value is None else float(value)


def bootstrap(values: Sequence[float | None]) -> list[float] | None:
    """The mean and its 95% interval (percentiles of resampled means); None when there is nothing."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    drawn, generator = torch.tensor(known, dtype=torch.float64), torch.Generator().manual_seed(0)
    means = drawn[torch.randint(len(known), (_RESAMPLES, len(known)), generator=generator)].mean(dim=1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [statistics.fmean(known), low, high]


# -- the run -----------------------------------------------------------------------------------------------------------

Writers = Callable[[Reading], dict[str, Writer]]


def run(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: MoADrafterForCausalLM,
    writers: Writers,
    prompts: Mapping[str, list[int]],
    results: ResultFile,
    cuts: Sequence[int],
    count: int,
    eos: Sequence[int],
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """Measures the prompts that the results do not have yet, and writes the whole result.

    Args:
        drafter: attached; speeds the target's own answers up, which it does not change.
        writers: who writes offline, from what was read of one text.
        count: tokens to write offline.
    """
    results.begin(environment())
    done = {entry["key"] for entry in results.questions}
    for key, prompt in tqdm(prompts.items(), unit=" prompts", disable=None):
        if key in done:
            continue
        ids = torch.tensor([prompt], device=target.device)
        whole = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max(cuts) + count,
            eos_token_id=list(eos) or None,
            assistant_model=drafter,
        )
        answer = whole[0, len(prompt) :].tolist()
        possible = [cut for cut in cuts if cut < len(answer)]
        reading = Reading(target, prompt + answer[: max(possible)])
        judge, writing = Judge(reading, tokenizer, len(prompt), answer), writers(reading)
        entry: dict[str, Any] = {"key": key, "answer": answer, "cuts": {}}
        for cut in possible:
            text = prompt + answer[:cut]
            texts = {name: write(text, len(prompt), count) for name, write in writing.items()}
            judged = judge.judge(cut, texts, count, set(eos))
            entry["cuts"][str(cut)] = {name: asdict(of) for name, of in judged.items()}
        results.add(entry)
    names = list(results.options["methods"])
    return results.finish(complete=True, data=dict(data), offline=summarise(results.questions, cuts, names))

"""A comparison as HTML for the page and as plain data for the API.

Knows comparisons, figures and words. Does not know Gradio. What it shows is escaped here. Modules that bring torch
along are imported when there is something to show: the page is up before.
"""

import base64
import html
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .charts import draw_acceptance, draw_lengths, seconds_table
from .marks import KINDS, STRUCK, legend, render, visible
from .tree_picture import draw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..generation.marks import MarkedText
    from .comparison import Comparison
    from .decoding import Progress
    from .line import OverTheLine
    from .models import Loaded

_NOTHING = "-"
LIVE_REGION = '<div role="status" aria-live="polite" class="moa moa-verdict">${value}</div>'
"""Gradio's template of a text whose changes screen readers read out."""


def loading(seconds: float) -> str:
    """What somebody reads who is there before the models are."""
    return f"The models are still loading, {seconds:.0f} s so far. It begins by itself when they are there."


def models_html(loaded: "Loaded") -> str:
    """Which models these are. How many layers a drafter reuses (TLI) is as it was trained."""
    drafters = list(loaded.drafters.values())
    target = html.escape(str(drafters[0].config.target_name or type(loaded.target).__name__))
    words = []
    for drafter in drafters:
        count = sum(parameter.numel() for parameter in drafter.parameters()) / 1e6
        layers = drafter.config.target_layer_inference
        last = "last layer" if layers == 1 else f"last {layers} layers"
        inference = f"reuses the target's {last} (TLI {layers})" if layers else "reuses no layer of the target (TLI 0)"
        words.append(f"{count:.1f} million parameters of its own, {inference}")
    noun = "Drafter" if len(drafters) == 1 else "Drafters"
    return f'<p class="moa moa-says">Target: {target}. {noun}: {"; ".join(words)}.</p>'


def empty_texts(tokenizer: "PreTrainedTokenizerBase") -> dict[str, "MarkedText"]:
    """The texts of both sides, to be caught up with them."""
    from ..generation.marks import MarkedText

    return {"drafted": MarkedText(tokenizer), "plain": MarkedText(tokenizer)}


def catch_up(text: "MarkedText", progress: "Progress") -> "MarkedText":
    """Adds to `text` what is new on one side. Plain decoding has only the target's own tokens."""
    if progress.generation is None:
        text.add_own(progress.token_ids[len(text.token_ids) :])
    else:
        text.catch_up(progress.generation)
    if progress.finished:
        text.finish()
    return text


def text_html(text: "MarkedText", name: str) -> str:
    """A marked text. `name` is "drafted", "plain" or "line", for the style sheet."""
    return f'<div class="moa moa-{name}">{render(text.marks)}</div>'


def legend_html(result: "Comparison | None" = None) -> str:
    """What the marks mean, and how many tokens have each of them."""
    return legend(KINDS, None if result is None else result.counts)


def clock_html(progress: "Progress") -> str:
    """One side's clock and what it has done."""
    tokens = f"{len(progress.token_ids)} tokens, {progress.tokens_per_second:.1f} per second"
    calls = f"{progress.target_calls} target calls"
    first = progress.first_token_seconds
    after = "" if first is None else f", first token after {first:.2f} s"
    return (
        f'<p class="moa moa-says"><strong class="moa-clock">{progress.seconds:.1f} s</strong> '
        f"<strong>{calls}</strong><br>{tokens}{after}</p>"
    )


def verdict(result: "Comparison") -> str:
    """The outcome, or where things are, in one or two sentences."""
    if result.stopped:
        return "Stopped. What was written until then is shown."
    if not result.drafted.finished:
        return "Decoding with drafts …"
    if not result.plain.finished:
        return "Decoding the same prompt plainly …"
    drafter = f"With {result.request.drafter}: " if result.request.drafter else ""
    words = [f"{drafter}{result.speedup:.2f} times the speed of plain decoding."]
    if result.rounds:
        drafted, plain = result.drafted, result.plain
        words.append(
            f"{drafted.target_calls} target calls wrote {len(drafted.token_ids)} tokens "
            f"({result.mean_accepted_tokens:.2f} per call after the prompt); plain decoding took {plain.target_calls}."
        )
    if result.identical:
        words.append("Both wrote exactly the same tokens.")
    elif result.identical is False:
        words.append("The two texts DIFFER.")
    else:
        words.append("Sampled texts differ from run to run; their distribution is the target's either way.")
    return " ".join(words)


def error_html(message: str) -> str:
    """Something that went wrong, in words."""
    return f'<div class="moa moa-error" role="alert">{html.escape(message)}</div>'


def charts_html(result: "Comparison") -> str:
    """The figures of all rounds."""
    parts = (draw_acceptance(result.rounds), draw_lengths(result.rounds), seconds_table(result.rounds))
    return f'<div class="moa">{"".join(parts)}</div>'


def round_html(result: "Comparison", tokenizer: "PreTrainedTokenizerBase", number: int) -> str:
    """One round: picture, the target's choice, and where its time went.

    Args:
        number: from 1; what lies outside is brought inside.
    """
    from ..generation.marks import text_after

    rounds, generation = result.rounds, result.drafted.generation
    if generation is None or not rounds:
        return '<p class="moa">There was no round after the prefill.</p>'
    number = max(1, min(int(number), len(rounds)))
    entry = rounds[number - 1]
    before = generation.first_tokens[:1] + [token for earlier in rounds[: number - 1] for token in earlier.tokens]
    root = text_after(tokenizer, before[:-1], before[-1])
    picture = draw(entry, number, root, lambda path, token: text_after(tokenizer, before + path, token))
    own = entry.tokens[entry.accepted :]
    choice = visible(text_after(tokenizer, before + entry.tokens[: entry.accepted], own[0])) if own else ""
    said = [
        f"Round {number} of {len(rounds)}: {len(entry.nodes)} drafted, {entry.accepted} accepted"
        + (f", then the target's own “{html.escape(choice)}”." if own else "; decoding stopped inside the draft."),
        f"Draft {1000 * entry.draft_seconds:.1f} ms, verify {1000 * entry.verify_seconds:.1f} ms, "
        f"bookkeeping {1000 * entry.bookkeeping_seconds:.1f} ms.",
    ]
    return f'<div class="moa">{"".join(f"<p class=moa-says>{words}</p>" for words in said)}{picture}</div>'


def as_data(result: "Comparison", tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Everything about a comparison, ready for JSON: the answer of the API and the trace to download."""
    from ..generation.marks import MarkedText

    text = catch_up(MarkedText(tokenizer), result.drafted)
    return {
        "request": asdict(result.request),
        "prompt_tokens": result.prompt_tokens,
        "text": "".join(mark.text for mark in text.marks if mark.kind not in STRUCK),
        "token_ids": result.drafted.token_ids,
        "marks": [asdict(mark) for mark in text.marks],
        "stopped": result.stopped,
        "drafted": _side(result.drafted) | {"mean_accepted_tokens": result.mean_accepted_tokens},
        "plain": _side(result.plain) | {"token_ids": result.plain.token_ids},
        "speedup": result.speedup,
        "identical": result.identical,
        "trace": None if result.drafted.generation is None else asdict(result.drafted.generation),
    }


def download_html(result: "Comparison", tokenizer: "PreTrainedTokenizerBase") -> str:
    """A link that holds the trace itself, so that no file with somebody's text lies on the server."""
    content = json.dumps(as_data(result, tokenizer), ensure_ascii=False).encode("utf-8", "replace")
    data = base64.b64encode(content).decode()
    return (
        f'<p class="moa"><a download="moa-trace.json" href="data:application/json;base64,{data}">'
        f"Download the trace as JSON ({len(content) / 1000:.0f} kB)</a></p>"
    )


# -- over a line -------------------------------------------------------------------------------------------------------


def line_status(seen: "OverTheLine") -> str:
    """Where the text and the line are, in a sentence."""
    withdrawn = sum(len(tokens) for _, tokens in seen.withdrawn)
    back = f" The target kept {len(seen.confirmed)} provisional tokens and withdrew {withdrawn}."
    told = back if seen.confirmed or withdrawn else ""
    if seen.reason == "offline":
        return f"The line did not come back: {seen.provisional} tokens stay provisional.{told}"
    if seen.reason == "stopped":
        return f"Ended.{told}"
    if seen.reason is not None:
        return ("Done, and every token is the target's." if seen.exact else "Done, but not exact.") + told
    states = {
        "connecting": "Connecting …",
        "connected": "Connected.",
        "offline": "Cut: the phone writes on alone."
        if seen.cut
        else "The phone dials again, at intervals of up to ten seconds, and writes on alone until somebody answers.",
    }
    return states[seen.line] + told


def line_picture(seen: "OverTheLine | None") -> str:
    """Phone, line and server, with what is on each of them; None: nothing is written yet."""
    state = "connecting" if seen is None else seen.line
    words = {"connecting": "the line", "connected": "connected", "offline": "no connection"}
    if seen is not None and seen.cut:
        words["offline"] = "✂ the line is cut"
    went = "" if seen is None else f"{seen.bytes_up / 1000:.1f} kB up, {seen.bytes_down / 1000:.1f} kB down"
    doing = {
        "connecting": "",
        "connected": "asks the target in every round",
        "offline": "writes on alone, provisionally",
    }
    if seen is not None and seen.reason is not None:
        doing[state] = "done" if seen.exact else "ended"
    judges = {"connecting": "", "connected": "judges every draft", "offline": "out of reach"}
    return (
        f'<div class="moa moa-halves"><div class="moa-half"><strong>Phone</strong> the drafter<br>{doing[state]}</div>'
        f'<div class="moa-wire moa-wire-{state}"><span>{words[state]}</span><span>{went}</span></div>'
        f'<div class="moa-half"><strong>Server</strong> the target<br>{judges[state]}</div></div>'
    )


def plain_status(seen: "OverTheLine") -> str:
    """How the plain client fares, in a sentence."""
    words = {
        "waiting": "Waiting for the first token.",
        "streaming": "Tokens come as the server decides them.",
        "cut": "✂ The connection broke. There is nothing to go on with: one would have to ask again from the start.",
        "done": "Done.",
        "stopped": "Ended.",
    }
    return f'<p class="moa moa-says">{words[seen.plain.state]}</p>'


def line_counters(seen: "OverTheLine") -> str:
    """What went over both lines."""
    plain = seen.plain
    rows = [
        ("tokens", str(len(seen.transcript.tokens)), str(len(plain.token_ids))),
        ("of them provisional", str(seen.provisional), "0"),
        ("the target's passes (calls)", str(seen.target_calls), str(plain.target_calls)),
        ("calls while the line was cut", str(seen.calls_while_cut), "0"),
        ("calls per 100 final tokens", _number(seen.calls_per_100_tokens), _number(plain.calls_per_100_tokens)),
        ("sent to the server", *(f"{n / 1000:.1f} kB" for n in (seen.bytes_up, seen.plain_bytes_up))),
        ("received from it", *(f"{n / 1000:.1f} kB" for n in (seen.bytes_down, seen.plain_bytes_down))),
        ("clock", f"{seen.seconds:.1f} s", ""),
    ]
    body = "".join(f'<tr><th scope="row">{name}</th><td>{a}</td><td>{b}</td></tr>' for name, a, b in rows)
    return (
        '<div class="moa moa-scroll"><table class="moa-figures"><thead><tr><th scope="col"></th>'
        '<th scope="col">phone with a drafter</th><th scope="col">plain API client</th></tr></thead>'
        f"<tbody>{body}</tbody></table><p class=moa-says>Both ask the same server at the same time, each over a "
        "line of its own with these conditions, and take turns with its one target; so this is no race.</p></div>"
    )


def line_data(seen: "OverTheLine", tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Everything about a text over a line, ready for JSON."""
    text = seen.marks(tokenizer)
    return {
        "text": "".join(mark.text for mark in text.marks if mark.kind not in STRUCK),
        "token_ids": seen.transcript.tokens,
        "marks": [asdict(mark) for mark in text.marks],
        "confirmed": len(seen.confirmed),
        "withdrawn": [{"position": position, "token_ids": tokens} for position, tokens in seen.withdrawn],
        "target_calls": seen.target_calls,
        "calls_while_cut": seen.calls_while_cut,
        "bytes_up": seen.bytes_up,
        "bytes_down": seen.bytes_down,
        "seconds": seen.seconds,
        "reason": seen.reason,
        "exact": seen.exact,
        "plain": {
            "token_ids": list(seen.plain.token_ids),
            "state": seen.plain.state,
            "target_calls": seen.plain.target_calls,
            "bytes_up": seen.plain_bytes_up,
            "bytes_down": seen.plain_bytes_down,
        },
    }


def _side(progress: "Progress") -> dict[str, Any]:
    return {
        "seconds": progress.seconds,
        "first_token_seconds": progress.first_token_seconds,
        "tokens_per_second": progress.tokens_per_second,
        "target_calls": progress.target_calls,
    }


def _seconds(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f} s"


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}"

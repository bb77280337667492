"""A comparison as HTML for the page and as plain data for the API.

Knows comparisons, figures and words. Does not know Gradio. What it shows is escaped here.
"""

import base64
import html
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .charts import draw_acceptance, draw_lengths, seconds_table
from .comparison import Comparison
from .decoding import Progress
from .marks import MarkedText, render, text_after, visible
from .tree_picture import draw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOTHING = "-"


def marked_text(progress: Progress, tokenizer: "PreTrainedTokenizerBase") -> MarkedText:
    """The tokens of one side, by who wrote them. Plain decoding has only the target's own."""
    text = MarkedText(tokenizer)
    if progress.generation is None:
        text.add_own(progress.token_ids)
    else:
        text.catch_up(progress.generation)
    if progress.finished:
        text.finish()
    return text


def text_html(progress: Progress, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The marked text of one side."""
    name = "moa-drafted" if progress.generation else "moa-plain"
    return f'<div class="moa {name}">{render(marked_text(progress, tokenizer).marks)}</div>'


def figures_html(result: Comparison) -> str:
    """Both clocks side by side."""
    drafted, plain = result.drafted, result.plain
    rows = [
        ("clock", *(f"{side.seconds:.1f} s" for side in (drafted, plain))),
        ("new tokens", *(str(len(side.token_ids)) for side in (drafted, plain))),
        ("tokens per second", *(f"{side.tokens_per_second:.1f}" for side in (drafted, plain))),
        ("first token after", *(_seconds(side.first_token_seconds) for side in (drafted, plain))),
        ("target calls", *(str(side.target_calls) for side in (drafted, plain))),
        ("tokens per target call", _number(result.mean_accepted_tokens), "1.00"),
    ]
    body = "".join(f'<tr><th scope="row">{name}</th><td>{a}</td><td>{b}</td></tr>' for name, a, b in rows)
    return (
        '<div class="moa moa-scroll"><table class="moa-figures"><thead><tr><th scope="col"></th>'
        f'<th scope="col">with drafts</th><th scope="col">plain</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def verdict(result: Comparison) -> str:
    """The outcome, or where things are, in one or two sentences."""
    if result.stopped:
        return "Stopped. What was written until then is shown."
    if not result.drafted.finished:
        return "Decoding with drafts …"
    if not result.plain.finished:
        return "Decoding the same prompt plainly …"
    words = [f"{result.speedup:.2f} times the speed of plain decoding"]
    words[0] += f", {result.mean_accepted_tokens:.2f} tokens per target call." if result.rounds else "."
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


def charts_html(result: Comparison) -> str:
    """The figures of all rounds."""
    parts = (draw_acceptance(result.rounds), draw_lengths(result.rounds), seconds_table(result.rounds))
    return f'<div class="moa">{"".join(parts)}</div>'


def round_html(result: Comparison, tokenizer: "PreTrainedTokenizerBase", number: int) -> str:
    """One round: picture, the target's choice, and where its time went.

    Args:
        number: from 1; what lies outside is brought inside.
    """
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


def as_data(result: Comparison, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Everything about a comparison, ready for JSON: the answer of the API and the trace to download."""
    text = marked_text(result.drafted, tokenizer)
    return {
        "request": asdict(result.request),
        "prompt_tokens": result.prompt_tokens,
        "text": "".join(mark.text for mark in text.marks if mark.kind != "rejected"),
        "token_ids": result.drafted.token_ids,
        "marks": [asdict(mark) for mark in text.marks],
        "stopped": result.stopped,
        "drafted": _side(result.drafted) | {"mean_accepted_tokens": result.mean_accepted_tokens},
        "plain": _side(result.plain) | {"token_ids": result.plain.token_ids},
        "speedup": result.speedup,
        "identical": result.identical,
        "trace": None if result.drafted.generation is None else asdict(result.drafted.generation),
    }


def download_html(result: Comparison, tokenizer: "PreTrainedTokenizerBase") -> str:
    """A link that holds the trace itself, so that no file with somebody's text lies on the server."""
    content = json.dumps(as_data(result, tokenizer), ensure_ascii=False).encode("utf-8", "replace")
    data = base64.b64encode(content).decode()
    return (
        f'<p class="moa"><a download="moa-trace.json" href="data:application/json;base64,{data}">'
        f"Download the trace as JSON ({len(content) / 1000:.0f} kB)</a></p>"
    )


def _side(progress: Progress) -> dict[str, Any]:
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

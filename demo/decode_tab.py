"""The Decode tab: a prompt, both ways of decoding it, round by round.

Knows Gradio's components and events. All texts and pictures come from `views`. One visitor's decoding runs at a time,
the others wait in the order in which they came; nothing typed is written anywhere.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gradio as gr

from . import views
from .examples import EXAMPLES
from .models import Models
from .request import MOST_NEW_TOKENS, BadRequest, Request
from .stops import Stops

if TYPE_CHECKING:
    from .comparison import Comparison

MODEL = "model"
"""Gradio's concurrency_id of everything that runs the models."""

_SAMPLED = 0.8  # temperature


def add_decode_tab(models: Models, stops: Stops, gpu: Callable[[Any], Any] | None, drafter: gr.Radio) -> None:
    """The tab's contents, inside the current Gradio context, and the endpoints `/decode` and `/stop`.

    Args:
        drafter: the choice of one, to be placed here.
    """

    def compare(request: Request, session: str) -> Iterator["Comparison"]:
        loaded = models.get()
        from .comparison import compare  # not before: two threads would import transformers at once, which it fails at

        event = stops.latest(session)
        try:
            name, chosen = loaded.choose(request.drafter)
            yield from compare(loaded.target, loaded.tokenizer, chosen, replace(request, drafter=name), event)
        finally:
            stops.end(session, event)

    decoding = gpu(compare) if gpu else compare

    with gr.Row():
        with gr.Column(scale=3):
            prompt = gr.Textbox(
                EXAMPLES["Code"], label="Prompt", lines=3, max_lines=12, placeholder="Type a prompt, or pick an example"
            )
            gr.Examples([[text] for text in EXAMPLES.values()], prompt, label="Examples", example_labels=list(EXAMPLES))
            with gr.Row():
                run_button = gr.Button("Run", variant="primary")
                stop_button = gr.Button("Stop", variant="stop", interactive=False)
        with gr.Column(scale=2):
            drafter.render()
            with gr.Row():
                sampling = gr.Radio(["greedy", "sampling"], value="greedy", label="Choice of tokens")
                shape = gr.Radio(["automatic", "chain", "tree"], value="automatic", label="Draft")
            length = gr.Slider(8, MOST_NEW_TOKENS, 128, step=8, label="Longest answer, tokens")
            levels = gr.Slider(1, 16, 6, step=1, label="Depth of a draft, tokens")
            lookup = gr.Checkbox(True, label="Lookup: also copy drafts from the text so far")
    status = gr.HTML("", label="Status", html_template=views.LIVE_REGION)
    marks = gr.HTML(views.legend_html(), label="Legend")
    with gr.Row():
        with gr.Column(min_width=300):
            gr.Markdown("### With drafts")
            drafted_clock = gr.HTML(label="Clock of decoding with drafts")
            drafted_text = gr.HTML(label="Text decoded with drafts")
        with gr.Column(min_width=300):
            gr.Markdown("### Plain, the same prompt, after it")
            plain_clock = gr.HTML(label="Clock of plain decoding")
            plain_text = gr.HTML(label="Text decoded plainly")

    state = gr.State()
    with gr.Column(visible=False) as details:
        gr.Markdown("### Round by round")
        with gr.Row():
            back = gr.Button("Previous round", size="sm")
            onward = gr.Button("Next round", size="sm")
        number = gr.Slider(1, 2, 1, step=1, label="Round")
        picture = gr.HTML(label="The round's draft tree")
        gr.Markdown("### All rounds")
        charts = gr.HTML(label="Charts of all rounds")
        download = gr.HTML(label="Trace")

    def begin(request: gr.Request) -> dict[Any, Any]:
        stops.begin(_session(request))
        return {
            run_button: gr.update(interactive=False),
            stop_button: gr.update(interactive=True),
            status: "Waiting for the model …",
            marks: views.legend_html(),
            **dict.fromkeys((drafted_clock, drafted_text, plain_clock, plain_text), ""),
            details: gr.update(visible=False),
            state: None,
        }

    def run(
        prompt: str,
        drafter: str | None,
        sampling: str,
        shape: Any,
        length: float,
        levels: float,
        lookup: bool,
        request: gr.Request,
    ) -> Iterator[dict[Any, Any]]:
        """Decodes for the page."""
        temperature = _SAMPLED if sampling == "sampling" else 0.0
        session = _session(request)
        result = None
        try:
            wanted = Request(
                prompt or "", int(length), temperature, shape, int(levels), bool(lookup), drafter=drafter or ""
            )
            for seconds in models.loading(stops.latest(session)):
                yield {status: views.loading(seconds)}
            if models.loaded is None:
                yield {status: "Stopped before it began."}
                return
            tokenizer = models.loaded.tokenizer
            written = views.empty_texts(tokenizer)
            for result in decoding(wanted, session):
                shown = {}
                if not (result.drafted.finished and result.plain.seconds):  # what stands still is not sent again
                    text = views.catch_up(written["drafted"], result.drafted)
                    shown[drafted_text] = views.text_html(text, "drafted")
                    shown[drafted_clock] = views.clock_html(result.drafted)
                    shown[marks] = views.legend_html(result)
                if result.drafted.finished:
                    shown[plain_text] = views.text_html(views.catch_up(written["plain"], result.plain), "plain")
                    shown[plain_clock] = views.clock_html(result.plain)
                yield shown | {status: views.verdict(result)}
        except BadRequest as error:
            yield {status: views.error_html(str(error))}
            return
        except Exception as error:
            yield {status: views.error_html(f"Decoding failed ({type(error).__name__}). Please try again.")}
            return
        finally:
            stops.end(session, stops.latest(session))
        if result is None:
            yield {status: "Stopped before it began."}
            return
        rounds = len(result.rounds)
        yield {
            state: result,
            details: gr.update(visible=True),
            number: gr.update(value=1, maximum=max(2, rounds), interactive=rounds > 1),
            picture: views.round_html(result, tokenizer, 1),
            charts: views.charts_html(result),
            download: views.download_html(result, tokenizer),
        }

    def finish() -> dict[Any, Any]:
        return {run_button: gr.update(interactive=True), stop_button: gr.update(interactive=False)}

    def show_round(result: "Comparison | None", number: float) -> str:
        return "" if result is None else views.round_html(result, models.get().tokenizer, int(number))

    def step(by: int) -> Callable[["Comparison | None", float], int]:
        def stepped(result: "Comparison | None", number: float) -> int:
            most = len(result.rounds) if result else 1
            return max(1, min(most, int(number) + by))

        return stepped

    private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    outputs = [
        status,
        marks,
        drafted_clock,
        drafted_text,
        plain_clock,
        plain_text,
        details,
        state,
        number,
        picture,
        charts,
        download,
    ]
    buttons = [run_button, stop_button]
    begun = run_button.click(begin, None, [*buttons, *outputs], queue=False, **private)
    ran = begun.then(
        run,
        [prompt, drafter, sampling, shape, length, levels, lookup],
        outputs,
        concurrency_id=MODEL,
        concurrency_limit=1,
        **private,
    )
    ran.then(finish, None, buttons, queue=False, **private)
    number.change(show_round, [state, number], picture, queue=False, **private)
    back.click(step(-1), [state, number], number, queue=False, **private)
    onward.click(step(1), [state, number], number, queue=False, **private)

    def stop(request: gr.Request) -> int:
        """Stops what this session is decoding or waiting for; returns how many decodings that are."""
        return stops.stop(_session(request))

    def stop_silently(request: gr.Request) -> None:
        stops.stop(_session(request))

    stop_button.click(stop_silently, None, None, queue=False, **private)
    gr.api(stop, api_name="stop", queue=False)

    def decode(
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        shape: str = "automatic",
        levels: int = 6,
        lookup: bool = True,
        seed: int = 0,
        drafter: str = "",
        request: gr.Request = None,  # type: ignore[assignment]
    ) -> dict:
        """Decodes a prompt with drafts and plainly; returns texts, marks, figures and the trace.

        `drafter` is a name from the page, such as "MoA, TLI 1"; empty for the default one.
        """
        session = _session(request)
        event = stops.begin(session)
        result = None
        try:
            how = (temperature, shape, levels, lookup, seed, drafter)
            for progress in decoding(Request(prompt, max_new_tokens, *how), session):  # type: ignore[arg-type]
                result = progress
        except BadRequest as error:
            raise gr.Error(str(error), print_exception=False) from None
        finally:
            stops.end(session, event)
        if result is None:
            raise gr.Error("Stopped before it began.", print_exception=False)
        return views.as_data(result, models.get().tokenizer)

    gr.api(decode, api_name="decode", concurrency_id=MODEL, concurrency_limit=1)


def _session(request: gr.Request | None) -> str:
    """Who is asking: Gradio's name for one open page or client."""
    return (request.session_hash if request else None) or ""

"""The Client and server tab: the same models with a line between them that can be cut.

Knows Gradio's components and events; what happens on the line is `line`'s. Nothing typed is written anywhere.
"""

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gradio as gr

from . import views
from .examples import EXAMPLES
from .marks import LINE_KINDS, legend
from .models import Models
from .request import MOST_NEW_TOKENS, BadRequest, Request

if TYPE_CHECKING:
    from ..serving.link import Profile
    from .line import Lines, OverTheLine

_PRESETS = {  # round trip in ms, Mbit/s down and up: those of serving.link.PROFILES, which brings more along
    "5G": (20, 100, 20),
    "4G": (55, 35, 10),
    "slow 4G": (150, 1.6, 0.75),
}
_NAMES = ("5g", "4g", "slow4g", "none")
_EXPLANATION = """The drafter is on the phone, the target on a server, and an emulated line lies between them. **Cut the
line** at any moment: the phone writes on alone, and what it writes is provisional. **Reconnect**, and the target keeps
what it would have written itself and withdraws the rest; then the text is exact again. Beside it a plain API client
asks the same server over the same line for the same text: it has no model, so it just stops."""


def add_line_tab(models: Models, concurrency_id: str, drafter: gr.Radio) -> Callable[[str], None]:
    """The tab's contents, inside the current Gradio context, and the endpoint `/line`.

    Args:
        drafter: the choice of one, to be placed here.

    Returns:
        Ends what a session is writing or waiting for.
    """
    running: dict[str, Lines] = {}  # by visitor
    ended: dict[str, threading.Event] = {}  # by visitor: set when nobody waits for the text any more

    gr.Markdown(_EXPLANATION)
    with gr.Row():
        with gr.Column(scale=3):
            prompt = gr.Textbox(EXAMPLES["Chat"], label="Prompt over the line", lines=3, max_lines=8)
            drafter.render()
            length = gr.Slider(8, MOST_NEW_TOKENS, 192, step=8, label="Longest answer over the line, tokens")
        with gr.Column(scale=2):
            preset = gr.Radio(list(_PRESETS), value="4G", label="Line")
            round_trip = gr.Slider(0, 500, _PRESETS["4G"][0], step=5, label="Round trip, ms")
            down = gr.Slider(0.1, 100, _PRESETS["4G"][1], step=0.1, label="Bandwidth to the phone, Mbit/s")
            up = gr.Slider(0.1, 100, _PRESETS["4G"][2], step=0.05, label="Bandwidth to the server, Mbit/s")
    with gr.Accordion("Cut by itself", open=False), gr.Row():
        cut_after = gr.Slider(0, 256, 0, step=1, label="Cut by itself after so many tokens (0: by hand)")
        reconnect_after = gr.Slider(0, 128, 32, step=1, label="Then reconnect after so many provisional tokens")
    with gr.Row():
        begin_button = gr.Button("Begin", variant="primary")
        cut_button = gr.Button("Cut the line", interactive=False)
        restore_button = gr.Button("Reconnect", interactive=False)
        end_button = gr.Button("End", variant="stop", interactive=False)
    status = gr.HTML(label="State of the line", html_template=views.LIVE_REGION)
    picture = gr.HTML(views.line_picture(None), label="Phone, line and server")
    gr.HTML(legend(LINE_KINDS))
    with gr.Row():
        with gr.Column(min_width=300):
            gr.Markdown("### The phone with a drafter")
            text = gr.HTML(label="Text written over the line")
        with gr.Column(min_width=300):
            gr.Markdown("### A plain API client")
            plain_text = gr.HTML(label="Text of the plain client")
    counters = gr.HTML(label="Counters of the line")

    def write(
        request: Request, profile: "str | Profile", cut_after: int, reconnect_after: int, session: str
    ) -> Iterator["OverTheLine"]:
        loaded = models.get()
        from ..serving.decoding import unservable  # not before: two threads would import transformers at once
        from .decoding import encode
        from .line import write_over_line

        if reason := unservable(loaded.target):
            raise BadRequest(f"This target cannot be far away: {reason}.")
        _, chosen = loaded.choose(request.drafter)
        encode(request, loaded.target, loaded.tokenizer)  # refuses what does not fit, in words
        try:
            yield from write_over_line(
                loaded.target,
                chosen,
                loaded.tokenizer,
                request.prompt,
                profile,
                request.max_new_tokens,
                cut_after=cut_after,
                reconnect_after=reconnect_after,
                began=lambda lines: running.update({session: lines}),
            )
        finally:
            running.pop(session, None)

    def begin(request: gr.Request) -> dict[Any, Any]:
        ended[request.session_hash or ""] = threading.Event()
        changes: dict[Any, Any] = dict.fromkeys((cut_button, restore_button, end_button), gr.update(interactive=True))
        changes |= {begin_button: gr.update(interactive=False), status: "Waiting for the model …"}
        return changes | {picture: views.line_picture(None)} | dict.fromkeys((text, plain_text, counters), "")

    def run(
        prompt: str,
        drafter: str | None,
        round_trip: float,
        down: float,
        up: float,
        length: float,
        cut: float,
        reconnect: float,
        request: gr.Request,
    ) -> Iterator[dict[Any, Any]]:
        session = request.session_hash or ""
        over = ended.setdefault(session, threading.Event())
        try:
            wanted = Request(prompt or "", int(length), drafter=drafter or "")
            for seconds in models.loading(over):
                yield {status: views.loading(seconds)}
            if over.is_set() or models.loaded is None:
                yield {status: "Ended before it began."}
                return
            from .line import conditions

            tokenizer = models.loaded.tokenizer
            for seen in write(wanted, conditions(round_trip, down, up), int(cut), int(reconnect), session):
                if over.is_set():
                    running[session].stop()
                yield {
                    status: views.line_status(seen),
                    picture: views.line_picture(seen),
                    counters: views.line_counters(seen),
                    text: views.text_html(seen.marks(tokenizer), "line"),
                    plain_text: views.text_html(seen.plain_marks(tokenizer), "line") + views.plain_status(seen),
                }
        except BadRequest as error:
            yield {status: views.error_html(str(error))}
        except Exception as error:
            yield {status: views.error_html(f"The server is gone or refused ({type(error).__name__}). Begin again.")}
        finally:
            ended.pop(session, None)

    def finish() -> dict[Any, Any]:
        still = {button: gr.update(interactive=False) for button in (cut_button, restore_button, end_button)}
        return still | {begin_button: gr.update(interactive=True)}

    def cut(request: gr.Request) -> None:
        if found := running.get(request.session_hash or ""):
            found.cut()

    def restore(request: gr.Request) -> None:
        if found := running.get(request.session_hash or ""):
            found.restore()

    def end_session(session: str) -> None:
        if waiting := ended.get(session):
            waiting.set()
        if found := running.get(session):
            found.stop()

    def end(request: gr.Request) -> None:
        end_session(request.session_hash or "")

    private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    buttons = [begin_button, cut_button, restore_button, end_button]
    shown = [status, picture, text, plain_text, counters]
    (
        begin_button.click(begin, None, [*buttons, *shown], queue=False, **private)
        .then(
            run,
            [prompt, drafter, round_trip, down, up, length, cut_after, reconnect_after],
            shown,
            concurrency_id=concurrency_id,
            concurrency_limit=1,
            **private,
        )
        .then(finish, None, buttons, queue=False, **private)
    )
    cut_button.click(cut, None, None, queue=False, **private)
    restore_button.click(restore, None, None, queue=False, **private)
    end_button.click(end, None, None, queue=False, **private)
    preset.input(_PRESETS.get, preset, [round_trip, down, up], queue=False, **private)
    for slider in (round_trip, down, up):
        slider.input(lambda: None, None, preset, queue=False, **private)  # a line of one's own

    def line(
        prompt: str,
        profile: str = "4g",
        max_new_tokens: int = 128,
        cut_after: int = 0,
        reconnect_after: int = 32,
        drafter: str = "",
        request: gr.Request = None,  # type: ignore[assignment]
    ) -> dict:
        """Answers over an emulated line, which can cut itself and come back; returns texts, marks and counters.

        `drafter` is as in `/decode`.
        """
        if profile not in _NAMES:
            raise gr.Error(f"The line must be one of {', '.join(_NAMES)}.", print_exception=False)
        session = (request.session_hash if request else None) or ""
        seen = None
        try:
            wanted = Request(prompt, max_new_tokens, drafter=drafter)
            for progress in write(wanted, profile, cut_after, reconnect_after, session):
                seen = progress
        except BadRequest as error:
            raise gr.Error(str(error), print_exception=False) from None
        assert seen is not None  # the first event is yielded at once
        return views.line_data(seen, models.get().tokenizer)

    gr.api(line, api_name="line", concurrency_id=concurrency_id, concurrency_limit=1)
    return end_session

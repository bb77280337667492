"""The Client and server tab: the same models with a line between them that can be cut.

Knows Gradio's components and events; what happens on the line is `line`'s. Nothing typed is written anywhere.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gradio as gr

from . import views
from .decoding import MOST_NEW_TOKENS, BadRequest, Request, encode
from .examples import EXAMPLES
from .line import OverTheLine, write_over_line
from .marks import LINE_KINDS, legend

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_moa import MoADrafterForCausalLM
    from ..serving.client import ClientGeneration
    from ..serving.link import Link

_PROFILES = {"5G (20 ms)": "5g", "4G (55 ms)": "4g", "slow 4G (150 ms)": "slow4g", "no delay": "none"}
_EXPLANATION = """The drafter is on the phone, the target on a server, and an emulated line lies between them. **Cut the
line** at any moment: the phone writes on alone, and what it writes is provisional. **Reconnect**, and the target keeps
what it would have written itself and withdraws the rest; then the text is exact again."""


def add_line_tab(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    drafter: "MoADrafterForCausalLM",
    concurrency_id: str,
) -> Callable[[str], None]:
    """The tab's contents, inside the current Gradio context, and the endpoint `/line`.

    Returns:
        Ends what a session is writing.
    """
    running: dict[str, tuple[Link, ClientGeneration]] = {}  # by visitor

    gr.Markdown(_EXPLANATION)
    with gr.Row():
        prompt = gr.Textbox(EXAMPLES["Chat"], label="Prompt over the line", lines=3, max_lines=8, scale=3)
        with gr.Column(scale=2):
            profile = gr.Radio(list(_PROFILES), value="4G (55 ms)", label="Line, round trip")
            length = gr.Slider(8, MOST_NEW_TOKENS, 192, step=8, label="Longest answer over the line, tokens")
    with gr.Row():
        cut_after = gr.Slider(0, 256, 0, step=1, label="Cut by itself after so many tokens (0: by hand)")
        reconnect_after = gr.Slider(0, 128, 32, step=1, label="Then reconnect after so many provisional tokens")
    with gr.Row():
        begin_button = gr.Button("Begin", variant="primary")
        cut_button = gr.Button("Cut the line", interactive=False)
        restore_button = gr.Button("Reconnect", interactive=False)
        end_button = gr.Button("End", variant="stop", interactive=False)
    status = gr.HTML(label="State of the line", html_template=views.LIVE_REGION)
    gr.HTML(legend(LINE_KINDS))
    counters = gr.HTML(label="Counters of the line")
    text = gr.HTML(label="Text written over the line")

    def write(
        prompt: str, profile: str, length: int, cut_after: int, reconnect_after: int, session: str
    ) -> Iterator[OverTheLine]:
        encode(Request(prompt, length), target, tokenizer)  # refuses what does not fit, in words
        try:
            yield from write_over_line(
                target,
                drafter,
                tokenizer,
                prompt,
                profile,
                length,
                cut_after=cut_after,
                reconnect_after=reconnect_after,
                began=lambda link, generation: running.update({session: (link, generation)}),
            )
        finally:
            running.pop(session, None)

    def begin() -> dict[Any, Any]:
        active = {button: gr.update(interactive=True) for button in (cut_button, restore_button, end_button)}
        return active | {begin_button: gr.update(interactive=False), status: "Waiting for the model …", text: ""}

    def run(
        prompt: str, profile: str, length: float, cut: float, reconnect: float, request: gr.Request
    ) -> Iterator[dict[Any, Any]]:
        session = request.session_hash or ""
        try:
            for seen in write(prompt or "", _PROFILES[profile], int(length), int(cut), int(reconnect), session):
                yield {
                    status: views.line_status(seen),
                    counters: views.line_counters(seen),
                    text: views.text_html(seen.marks(tokenizer), "line"),
                }
        except BadRequest as error:
            yield {status: views.error_html(str(error))}
        except Exception as error:
            yield {status: views.error_html(f"The server is gone or refused ({type(error).__name__}). Begin again.")}

    def finish() -> dict[Any, Any]:
        still = {button: gr.update(interactive=False) for button in (cut_button, restore_button, end_button)}
        return still | {begin_button: gr.update(interactive=True)}

    def cut(request: gr.Request) -> None:
        if found := running.get(request.session_hash or ""):
            found[0].cut("refused")

    def restore(request: gr.Request) -> None:
        if found := running.get(request.session_hash or ""):
            found[0].restore()

    def end_session(session: str) -> None:
        if found := running.get(session):
            found[1].stop()

    def end(request: gr.Request) -> None:
        end_session(request.session_hash or "")

    private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    buttons = [begin_button, cut_button, restore_button, end_button]
    (
        begin_button.click(begin, None, [*buttons, status, text], queue=False, **private)
        .then(
            run,
            [prompt, profile, length, cut_after, reconnect_after],
            [status, counters, text],
            concurrency_id=concurrency_id,
            concurrency_limit=1,
            **private,
        )
        .then(finish, None, buttons, queue=False, **private)
    )
    cut_button.click(cut, None, None, queue=False, **private)
    restore_button.click(restore, None, None, queue=False, **private)
    end_button.click(end, None, None, queue=False, **private)

    def line(
        prompt: str,
        profile: str = "4g",
        max_new_tokens: int = 128,
        cut_after: int = 0,
        reconnect_after: int = 32,
        request: gr.Request = None,  # type: ignore[assignment]
    ) -> dict:
        """Answers over an emulated line, which can cut itself and come back; returns text, marks and counters."""
        if profile not in _PROFILES.values():
            raise gr.Error(f"The line must be one of {', '.join(_PROFILES.values())}.", print_exception=False)
        session = (request.session_hash if request else None) or ""
        seen = OverTheLine()
        try:
            for progress in write(prompt, profile, max_new_tokens, cut_after, reconnect_after, session):
                seen = progress
        except BadRequest as error:
            raise gr.Error(str(error), print_exception=False) from None
        return views.line_data(seen, tokenizer)

    gr.api(line, api_name="line", concurrency_id=concurrency_id, concurrency_limit=1)
    return end_session

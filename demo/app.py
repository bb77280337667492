"""The Gradio app: see what was drafted, what was kept and what was thrown away.

Knows which tabs there are and how the page looks. The models are loaded by whoever calls `build`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from ..serving.decoding import unservable
from .decode_tab import MODEL, add_decode_tab
from .line_tab import add_line_tab
from .results_tab import FOLDER, add_results_tab
from .stops import Stops

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_moa import MoADrafterForCausalLM

_STYLE = Path(__file__).parent / "style.css"
_INTRODUCTION = """# See speculative decoding with Mixture of Attentions
A small *drafter* guesses the next tokens; the model (the *target*) checks all guesses in one pass and keeps those it
would have written itself. The text is the same as without drafts, only sooner. Everything below is decoded here, now.
"""


def build(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    drafter: "MoADrafterForCausalLM",
    *,
    gpu: Callable[[Any], Any] | None = None,
    results: Path = FOLDER,
) -> gr.Blocks:
    """The app, not launched.

    Args:
        target: with the drafter attached.
        gpu: decorates the generator function that runs the models, such as `spaces.GPU`.
        results: the folder with result files of `moa bench`.
    """
    stops = Stops()
    enders: list[Callable[[str], Any]] = [stops.stop]
    with gr.Blocks(title="moa-spec", analytics_enabled=False) as app:
        gr.HTML(f"<style>{_STYLE.read_text(encoding='utf-8')}</style>")  # here, so that any launch() has it
        gr.Markdown(_INTRODUCTION)
        with gr.Tab("Decode"):
            add_decode_tab(target, tokenizer, drafter, stops, gpu)
        if gpu is None and unservable(target) is None:  # a borrowed GPU is not there between two calls
            with gr.Tab("Client and server"):
                enders.append(add_line_tab(target, tokenizer, drafter, MODEL))
        with gr.Tab("Results"):
            add_results_tab(app, results)

        def leave(request: gr.Request) -> None:
            """Somebody closed the page: nobody waits for what is still being decoded."""
            for end in enders:
                end(request.session_hash or "")

        app.unload(leave)
    return app.queue(default_concurrency_limit=8)

"""The Gradio app: see what was drafted, what was kept and what was thrown away.

Knows which tabs there are and how the page looks. The models are loaded by whoever calls `build`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from .decode_tab import add_decode_tab
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
    with gr.Blocks(title="moa-spec", analytics_enabled=False) as app:
        gr.HTML(f"<style>{_STYLE.read_text(encoding='utf-8')}</style>")  # here, so that any launch() has it
        gr.Markdown(_INTRODUCTION)
        with gr.Tab("Decode"):
            add_decode_tab(target, tokenizer, drafter, stops, gpu)
        with gr.Tab("Results"):
            add_results_tab(app, results)
        app.unload(_leave(stops))
    return app.queue(default_concurrency_limit=8)


def _leave(stops: Stops) -> Callable[[gr.Request], None]:
    def leave(request: gr.Request) -> None:
        """Somebody closed the page: nobody waits for what is still being decoded."""
        stops.stop(request.session_hash or "")

    return leave

"""The Gradio app: see what was drafted, what was kept and what was thrown away.

Knows which tabs there are and how the page looks. The models are loaded by whoever calls `build`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from . import views
from .decode_tab import MODEL, add_decode_tab
from .drafter_choice import drafter_choice
from .line_tab import add_line_tab
from .models import Loaded, Models, name_drafters
from .results_tab import FOLDER, add_results_tab
from .stops import Stops

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_moa import MoADrafterForCausalLM

_STYLE = Path(__file__).parent / "style.css"
_INTRODUCTION = """<h1>See speculative decoding with Mixture of Attentions</h1>
<p>A small <em>drafter</em> guesses the next tokens; the model (the <em>target</em>) checks all guesses in one call and
keeps those that it would have written itself. The text is the same as without drafts, only with fewer calls. Everything
below is decoded here, now.</p>"""


def build(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    *drafters: "MoADrafterForCausalLM",
    gpu: Callable[[Any], Any] | None = None,
    results: Path = FOLDER,
) -> gr.Blocks:
    """The app, not launched. See `build_page`.

    Args:
        target: with all drafters attached.
        drafters: one or more; the first is the default.

    Raises:
        ValueError: two drafters reuse as many layers and have folders of the same name.
    """
    return build_page(Models(Loaded(target, tokenizer, name_drafters(drafters))), gpu=gpu, results=results)


def build_page(models: Models, *, gpu: Callable[[Any], Any] | None = None, results: Path = FOLDER) -> gr.Blocks:
    """The app, not launched.

    Args:
        models: may still be loading; the page says so, and what was begun meanwhile waits for them.
        gpu: decorates the generator function that runs the models, such as `spaces.GPU`.
        results: the folder with result files of `moa bench`.
    """
    stops = Stops()
    enders: list[Callable[[str], Any]] = [stops.stop]
    with gr.Blocks(title="moa-spec", analytics_enabled=False) as app:
        style = _STYLE.read_text(encoding="utf-8")  # on the page itself, so that any launch() has it
        gr.HTML(f'<style>{style}</style><div class="moa moa-introduction">{_INTRODUCTION}</div>', padding=False)
        banner = gr.HTML(_about(models), label="Models", html_template=views.LIVE_REGION, padding=False)
        choices = [drafter_choice(models, render=False) for _ in range(2)]  # a component stands in one place
        with gr.Tab("Decode"):
            add_decode_tab(models, stops, gpu, choices[0])
        with gr.Tab("Client and server", visible=gpu is None and _servable(models)) as line_tab:
            enders.append(add_line_tab(models, MODEL, choices[1]))
        with gr.Tab("Results"):
            add_results_tab(app, results)
        if models.loaded is None:
            _watch_loading(app, models, banner, line_tab, choices)

        def leave(request: gr.Request) -> None:
            """Somebody closed the page: nobody waits for what is still being decoded."""
            for end in enders:
                end(request.session_hash or "")

        app.unload(leave)
    return app.queue(default_concurrency_limit=8)


def _watch_loading(app: gr.Blocks, models: Models, banner: gr.HTML, line_tab: gr.Tab, choices: list[gr.Radio]) -> None:
    """Says on every open page that the models are loading, until they are there; then names the drafters."""
    timer = gr.Timer(1.0)

    def look() -> dict[Any, Any]:
        if models.loaded is None:
            return {banner: _about(models)}
        shown = gr.Tab(visible=_servable(models))
        named = {choice: drafter_choice(models, render=False) for choice in choices}
        return {banner: _about(models), timer: gr.Timer(active=False), line_tab: shown, **named}

    outputs = [banner, timer, line_tab, *choices]
    for event in (app.load, timer.tick):
        event(look, None, outputs, queue=False, show_progress="hidden", api_visibility="private")


def _about(models: Models) -> str:
    if models.loaded is None:
        return f"Loading the models, {models.waited:.0f} s so far …"
    return views.models_html(models.loaded)


def _servable(models: Models) -> bool:
    """Whether the target can be far away; yes as long as it is not known."""
    if models.loaded is None:
        return True
    from ..serving.decoding import unservable

    return unservable(models.loaded.target) is None

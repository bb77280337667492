"""The control that chooses a drafter. Knows Gradio and the drafters' names; what they are is `models`'."""

import gradio as gr

from .models import Models


def drafter_choice(models: Models, *, render: bool = True) -> gr.Radio:
    """A radio of the drafters, the default one chosen; empty (that is, the default one) while they are loading.

    Args:
        render: whether it stands here, in the current Gradio context.
    """
    names = list(models.loaded.drafters) if models.loaded else []
    if not names:
        info = "Still loading; a run that waits for it uses the default one."
    elif len(names) == 1:
        info = "There is one for this target, so there is nothing to choose."
    else:
        info = "TLI: how many of the target's last layers it drafts with, besides its own."
    choices = [(f"{name} (default)" if name == names[0] and len(names) > 1 else name, name) for name in names]
    return gr.Radio(choices, value=names[0] if names else None, label="Drafter", info=info, render=render)

"""The Results tab. Knows Gradio; what result files look like on the page is `results_view`'s."""

from pathlib import Path

import gradio as gr

from .results_view import results_html

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def add_results_tab(app: gr.Blocks, folder: Path) -> None:
    """The tab's contents, inside the current Gradio context. Files are read each time the page is loaded."""
    tables = gr.HTML(label="Benchmark results")
    app.load(lambda: results_html(folder), None, tables, queue=False, show_progress="hidden", api_visibility="private")

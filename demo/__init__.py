"""The Gradio app."""

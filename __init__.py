"""Mixture-of-Attentions speculative decoding (arXiv 2410.03804) for transformers models."""

"""Checkpoints in and out: push, model card, remote code."""

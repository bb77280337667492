"""Spec-Bench, the baselines it compares, and reports."""

"""Measures drafters: the field's two benchmarks, its definitions, and every method in the same run.

`datasets` knows the questions, `methods` the rows of the table, `measure` one timed answer, `runner` the order in which
they are measured and how a killed run goes on, `metrics` the arithmetic, `summary` the figures of a whole run, `probes`
what one round costs, `goals` what it may cost, `report` and `figures` how results become Markdown and pictures.
"""

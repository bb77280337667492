"""What the decoding engine must reach on two cores, and whether a record says it does.

Knows limits and where their figures stand. Does not measure.
"""

from collections.abc import Iterator
from typing import Any

from .summary import speedup_over

SUITE = "spec_bench"
METHODS = ["plain", "stock-lookup", "lookup", "moa-auto", "untrained"]


def check(comparison: dict[str, Any], probes: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per goal: what it is, its limit, what was measured, and whether it is met.

    Args:
        comparison: a result of all of `METHODS` on Spec-Bench.
        probes: what `probes.probe` returned.
    """
    return [
        {"goal": goal, "limit": f"{sense} {limit:g}", "measured": measured, "met": _met(measured, sense, limit)}
        for goal, measured, sense, limit in _goals(comparison, probes)
    ]


def _met(measured: float | None, sense: str, limit: float) -> bool | None:
    if measured is None:
        return None
    return measured >= limit if sense == "at least" else measured <= limit


def _goals(comparison: dict[str, Any], probes: dict[str, Any]) -> Iterator[tuple[str, float | None, str, float]]:
    summary = comparison["summary"]
    whole = summary.get(SUITE)
    if whole:
        yield "speedup, mean over Spec-Bench tasks", whole["moa-auto"]["speedup"][0], "at least", 1.8
        for lookup, name in (("stock-lookup", "transformers' prompt lookup"), ("lookup", "our lookup")):
            over = speedup_over(comparison["questions"], "moa-auto", lookup, SUITE)
            yield f"speedup over {name}", over and over[0], "at least", 1.15
        tasks = {group.split("/")[1]: f for group, f in summary.items() if group.startswith(f"{SUITE}/")}
        worst = min(tasks, key=lambda task: tasks[task]["moa-auto"]["speedup"][0])
        yield f"speedup on the worst task ({worst})", tasks[worst]["moa-auto"]["speedup"][0], "at least", 1.0
        yield "speedup with an untrained drafter", whole["untrained"]["speedup"][0], "at least", 0.95
    yield "bookkeeping per round, in target steps", probes["round"].get("bookkeeping"), "at most", 0.1
    yield "draft cost c per level", probes["round"].get("draft_cost"), "at most", 0.12
    contexts = sorted(probes["context"], key=int)
    short, long = (probes["context"][length]["moa-auto"]["decode_speedup"] for length in (contexts[0], contexts[-1]))
    kept = None if short is None or long is None or len(contexts) == 1 else long / short
    yield f"decode speedup kept from {contexts[0]} to {contexts[-1]} tokens of prompt", kept, "at least", 0.85
    yield "memory added, share of the target's", probes["memory"]["added"], "at most", 0.1
    yield "total tokens/s of a batch of 4, over plain", probes["batch"]["speedup"], "at least", 1.3

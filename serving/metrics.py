"""What a server counts, in the text format that Prometheus reads. Knows nothing of what is counted."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # seconds


@dataclass
class Metrics:
    """Counters since the start. Written from the event loop only."""

    sessions_begun: int = 0
    sessions_resumed: int = 0
    sessions_rebuilt: int = 0
    sessions_evicted: int = 0
    rounds: int = 0
    rounds_repeated: int = 0
    target_calls: int = 0
    target_passes: int = 0  # over drafts: several texts' may share one
    drafts_judged: int = 0
    tokens_committed: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    tokens_adopted: int = 0
    memory_bytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    _latency: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    _latency_sum: float = 0.0

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def saw_round(self, seconds: float) -> None:
        """Seconds from a round's arrival to its answer, waiting for the target included."""
        self.rounds += 1
        self._latency_sum += seconds
        self._latency[sum(seconds > bound for bound in _BOUNDS)] += 1

    def text(self, gauges: Mapping[str, float]) -> str:
        """All of it; `gauges` are current values by name."""
        lines: list[str] = []
        for name, gauge in gauges.items():
            lines += [f"# TYPE moa_{name} gauge", f"moa_{name} {gauge:g}"]
        for name, value in vars(self).items():
            if isinstance(value, int):
                lines += [f"# TYPE moa_{name}_total counter", f"moa_{name}_total {value}"]
        lines.append("# TYPE moa_refused_total counter")
        lines += [f'moa_refused_total{{reason="{reason}"}} {count}' for reason, count in sorted(self.refused.items())]
        lines.append("# TYPE moa_round_seconds histogram")
        seen = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._latency, strict=True):
            seen += count
            lines.append(f'moa_round_seconds_bucket{{le="{bound}"}} {seen}')
        lines += [f"moa_round_seconds_sum {self._latency_sum:.6f}", f"moa_round_seconds_count {seen}"]
        return "\n".join(lines) + "\n"

"""How much to draft in the next round."""

from .draft import Draft
from .options import DraftOptions
from .sources import DraftPlan


class Policy:
    """Always drafts as the options say."""

    def __init__(self, options: DraftOptions, trees: bool):
        breadth = options.draft_breadth if trees else 1
        nodes = options.nodes if trees else options.num_assistant_tokens
        self.fixed = DraftPlan(
            options.num_assistant_tokens,
            breadth,
            nodes,
            options.assistant_confidence_threshold,
            options.prompt_lookup_num_tokens,
        )

    def plan(self, rows: int) -> DraftPlan:
        return self.fixed

    def update(self, plan: DraftPlan, drafts: list[Draft], paths: list[list[int]]) -> None:
        """Learns what became of the drafts."""

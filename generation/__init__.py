"""Decoding with drafts: one round is draft, verify, commit.

`attach` teaches a target object; `generate(assistant_model=drafter)` then runs `loop` with drafts from a source.
"""

from .attach import attach, attach_source, detach, load_drafter
from .candidate_generator import MoACandidateGenerator
from .draft import Draft
from .lookup import LookupStore
from .options import DraftOptions
from .sources import DraftPlan, DraftSession, DraftSource, Verified
from .trace import Trace, record_trace

__all__ = [
    "Draft",
    "DraftOptions",
    "DraftPlan",
    "DraftSession",
    "DraftSource",
    "LookupStore",
    "MoACandidateGenerator",
    "Trace",
    "Verified",
    "attach",
    "attach_source",
    "detach",
    "load_drafter",
    "record_trace",
]

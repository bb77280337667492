"""How the next token is chosen from scores, as both sides understand a `Sampling`: the server for the target's tokens,
the client for those it writes alone."""

from transformers import LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .messages import Sampling


def processors(sampling: Sampling) -> LogitsProcessorList:
    """In the order in which `generate` applies them."""
    chosen = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if not sampling.temperature:
        return chosen
    if sampling.temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chosen.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chosen.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chosen.append(MinPLogitsWarper(sampling.min_p))
    return chosen

"""How to draft: the options a user can set, where they may be set, and what decoding cannot be combined with drafts.

Knows nothing of drafters or of how a round works.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode


@dataclass(frozen=True)
class DraftOptions:
    """Options of one call. Names are those of `transformers.GenerationConfig` where it has them.

    Attributes:
        num_assistant_tokens: levels to draft; the most tokens one round can add is one more.
        assistant_confidence_threshold: stop drafting when the probability of the whole draft falls below this; 0 never.
        draft_breadth: tokens expanded on every level of a tree, and children of each; 1 drafts a chain.
        draft_nodes: drafted tokens that the target judges in one pass.
        prompt_lookup_num_tokens: longest draft copied from the prompt and the text so far; 0 looks nothing up.
        draft_policy: "auto" measures what drafting costs here and goes for speed: chain, tree, lookup or plain step,
            round by round, with the options above as upper limits. "fixed" drafts as the options say in every round.

    Left out (None), "fixed" has breadth 1, no lookup, and as many nodes as the chain has, or 8 times a tree's breadth;
    "auto" may use breadth 4, 32 nodes, and lookup of as many tokens.
    """

    num_assistant_tokens: int = 6
    assistant_confidence_threshold: float = 0.0
    draft_breadth: int | None = None
    draft_nodes: int | None = None
    prompt_lookup_num_tokens: int | None = None
    draft_policy: Literal["auto", "fixed"] = "auto"

    def __post_init__(self) -> None:
        least = {"num_assistant_tokens": 1, "draft_breadth": 1, "draft_nodes": 1, "prompt_lookup_num_tokens": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < lowest):
                raise ValueError(f"{name} must be a whole number of at least {lowest}, not {value!r}")
        threshold = self.assistant_confidence_threshold
        if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise ValueError(f"assistant_confidence_threshold must be a number from 0 to 1, not {threshold!r}")
        if self.draft_policy not in ("auto", "fixed"):
            raise ValueError(f'draft_policy must be "auto" or "fixed", not {self.draft_policy!r}')


OPTION_NAMES = tuple(option.name for option in fields(DraftOptions))


def resolve_options(given: dict[str, Any], *configs: GenerationConfig | None) -> DraftOptions:
    """The options of one call: each from `given`, else from the first config that sets it, else its default.

    Raises:
        ValueError: an option has an impossible value.
    """
    values: dict[str, Any] = {}
    for name in OPTION_NAMES:
        sources = [given] + [vars(config) for config in configs if config is not None]
        value = next((source[name] for source in sources if source.get(name) is not None), None)
        if value is not None:
            values[name] = value
    return DraftOptions(**values)


def check_supported(target: PreTrainedModel, config: GenerationConfig, arguments: dict[str, Any]) -> None:
    """Refuses what cannot be decoded exactly with drafts, by name, before any work starts.

    Args:
        config: with everything resolved that the call and the model set.
        arguments: of the call to `generate`.

    Raises:
        ValueError: with what to do instead.
    """

    def refuse(what: str, instead: str) -> None:
        raise ValueError(f"{what} cannot be combined with a drafter: {instead}.")

    plain = "leave assistant_model out for this call"
    if target.config.is_encoder_decoder:
        refuse("An encoder-decoder target", "only decoder-only models are supported")
    if (config.num_beams or 1) > 1:
        refuse(f"Beam search (num_beams={config.num_beams})", f"set num_beams=1, or {plain}")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        refuse(f"{mode.value.replace('_', ' ').capitalize()}", plain)
    for name in ("use_mtp", "assistant_early_exit", "speculation_type"):
        if getattr(config, name, None):
            refuse(f"{name}={getattr(config, name)!r}", "it is another way of drafting; use one of the two")
    if config.use_cache is False:
        refuse("use_cache=False", "leave use_cache on; drafts are verified against the key/value cache")
    if config.cache_implementation in ("quantized", "paged"):
        refuse(
            f'cache_implementation="{config.cache_implementation}"', "its states cannot be rolled back; use the default"
        )
    if config.do_sample and config.temperature == 0:
        refuse("temperature=0 with do_sample=True", "set do_sample=False for greedy decoding")
    if config.token_healing:
        refuse("token_healing", plain)
    if arguments.get("inputs_embeds") is not None:
        refuse("inputs_embeds", "the drafter reads token ids; pass input_ids")
    if arguments.get("synced_gpus"):
        refuse("synced_gpus", plain)
    ids = arguments.get("inputs") if arguments.get("inputs") is not None else arguments.get("input_ids")
    if ids is not None and ids.shape[-1] == 0:
        raise ValueError("The prompt is empty: pass at least one token, for example the beginning-of-text token.")
    if ids is not None and ids.ndim != 2:
        raise ValueError(f"input_ids must have the shape (batch, length), not {tuple(ids.shape)}")

"""The client: drafts here, has the target far away judge, and writes on alone while the line is cut.

    client = MoAClient("wss://host:8040", drafter, tokenizer, token="...")
    for event in client.generate("Why is the sky blue?"):
        ...

Knows what a user asks for and what all of its texts share. How one text is written is client_generation's.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedTokenizerBase

from ..generation.costs import TREE_BREADTH
from ..generation.experience import Memory as Learnt
from ..generation.options import DraftOptions
from ..modeling_moa import MoADrafterForCausalLM
from .client_generation import ClientGeneration
from .client_memory import NoDrafts, RemoteMemory
from .client_text import Policy
from .identity import drafter_identity
from .line import Address
from .memory_codec import vector_widths
from .messages import MemoryFormat, Sampling
from .pace import drafting_seconds


class MoAClient:
    """A drafter here and a server there. One client may run several generations, also from several threads.

    Args:
        url: "ws://host:port" or "wss://host:port".
        drafter: a standalone one, or one attached to a target that is here as well.
        tokenizer: needed for prompts that are text, and for the ends of texts; None: token ids only.
        token: bearer token, if the server wants one.
        memory: how memory travels: "int8" is smallest, "float32" as if both halves were on one machine. "none": not at
            all; drafts are only looked up in the text.
        ca_file: certificates to trust instead of the system's.
        allow_insecure: send the token without TLS to another machine.
        cut_after: seconds of silence after which the line counts as cut; more where the measured round trip says so.
        connect_timeout: seconds in which the server must answer for the first time.

    Raises:
        ValueError: the address is none, or the drafter knows no target.
        FileNotFoundError: there is no such ca_file.
    """

    def __init__(
        self,
        url: str,
        drafter: MoADrafterForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        token: str | None = None,
        memory: MemoryFormat = "int8",
        ca_file: str | None = None,
        allow_insecure: bool = False,
        cut_after: float = 3.0,
        connect_timeout: float = 10.0,
    ):
        self.address = Address(url, token, ca_file, allow_insecure, cut_after)
        try:
            drafter.lent  # noqa: B018 - raises when there is nothing
        except RuntimeError as error:
            raise ValueError(
                "This drafter has no embeddings and head of its own. A client needs a standalone one: "
                "`moa serve --export-client FOLDER` writes it, as does drafter.save_pretrained(..., standalone=True)."
            ) from error
        if memory not in get_args(MemoryFormat):
            raise ValueError(f"memory must be one of {', '.join(get_args(MemoryFormat))}, not {memory!r}")
        self.drafter = drafter.eval()
        self.tokenizer, self.memory, self.connect_timeout = tokenizer, memory, connect_timeout
        self.identity = drafter_identity(drafter)
        self.widths = vector_widths(drafter.config)
        self.learnt = Learnt()  # how drafts have been doing, from text to text
        self._level_seconds: tuple[float, float] | None = None
        self._lock = threading.Lock()

    def at(self, url: str) -> "MoAClient":
        """The same client for another address of its server."""
        other = copy.copy(self)
        other.address = replace(self.address, url=url)
        return other

    def new_memory(self) -> RemoteMemory:
        """What a text's drafts are made from."""
        return NoDrafts(self.drafter) if self.memory == "none" else RemoteMemory(self.drafter)

    def level_seconds(self) -> tuple[float, float]:
        """What drafting a level of a chain and of a tree takes here; measured once."""
        with self._lock:
            if self._level_seconds is None:
                self._level_seconds = drafting_seconds(self.new_memory(), self.widths, TREE_BREADTH)
            return self._level_seconds

    def generate(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        policy: Policy = "revise",
        offline: bool = True,
        offline_no_repeat_ngram_size: int = 0,
        start_offline: bool = False,
        patience: float = 60.0,
        num_assistant_tokens: int = 12,
        draft_breadth: int = 4,
        draft_nodes: int = 32,
        prompt_lookup_num_tokens: int = 16,
        draft_policy: Literal["auto", "fixed"] = "auto",
    ) -> ClientGeneration:
        """Begins a generation; nothing happens until its events are iterated over.

        Args:
            prompt: a user's message, put through the chat template where there is one, or token ids.
            temperature: 0 is greedy. Sampling is done by the server, so that the text has the target's distribution.
            eos_token_ids: ends of the text; None: what the tokenizer and the drafter's configuration say.
            policy: what becomes of provisional tokens when the line is back. "revise": the target judges them, and
                those it would not have written are withdrawn. "keep": they stand, and the text is not exact.
            offline: write on alone while the line is cut.
            offline_no_repeat_ngram_size: provisional tokens never repeat so many of the answer's tokens in a row; 0
                lets them. A drafter alone soon runs in circles. What the target writes is not touched.
            start_offline: begin alone when there is no server, instead of raising.
            patience: seconds to wait for the server once nothing is left to be written alone.
            num_assistant_tokens, draft_breadth, draft_nodes, prompt_lookup_num_tokens, draft_policy: as for
                `target.generate`. "auto" weighs what a draft promises against what line, server and drafter take, as
                measured all the time; the others are its upper limits.

        Raises:
            ValueError: an argument is impossible.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        _check_sampling(sampling)
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number of at least 1, not {max_new_tokens!r}")
        options = DraftOptions(
            num_assistant_tokens, 0.0, draft_breadth, draft_nodes, prompt_lookup_num_tokens, draft_policy
        )
        if not isinstance(offline_no_repeat_ngram_size, int) or offline_no_repeat_ngram_size < 0:
            given = repr(offline_no_repeat_ngram_size)
            raise ValueError(f"offline_no_repeat_ngram_size must be a whole number of at least 0, not {given}")
        if policy not in get_args(Policy):
            raise ValueError(f'policy must be "revise" or "keep", not {policy!r}')
        tokens = self._tokens(prompt)
        limit = self.drafter.config.max_position_embeddings
        if len(tokens) + max_new_tokens > limit:
            raise ValueError(
                f"The prompt's {len(tokens)} tokens and {max_new_tokens} new ones exceed the context of {limit}"
            )
        eos = self._eos() if eos_token_ids is None else sorted(set(eos_token_ids))
        return ClientGeneration(
            self,
            tokens,
            max_new_tokens,
            sampling,
            eos,
            policy,
            offline,
            offline_no_repeat_ngram_size,
            start_offline,
            patience,
            options,
        )

    def _tokens(self, prompt: str | Sequence[int] | torch.Tensor) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("A prompt that is text needs a tokenizer: give the client one, or pass token ids")
            if self.tokenizer.chat_template:
                message = [{"role": "user", "content": prompt}]
                ids: Any = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
                tokens = list(ids["input_ids"])
            else:
                tokens = list(self.tokenizer(prompt)["input_ids"])
        else:
            tokens = torch.as_tensor(prompt).reshape(-1).tolist()
        size = self.drafter.config.vocab_size
        if not tokens or not all(isinstance(token, int) and 0 <= token < size for token in tokens):
            raise ValueError(f"A prompt is one or more token ids from 0 to {size - 1}")
        return tokens

    def _eos(self) -> list[int]:
        ids = self.drafter.config.eos_token_id
        found = set(ids if isinstance(ids, list) else [ids])
        found.add(self.tokenizer.eos_token_id if self.tokenizer is not None else None)
        return sorted(token for token in found if token is not None)


def _check_sampling(sampling: Sampling) -> None:
    """
    Raises:
        ValueError: a value is impossible.
    """
    checks = {
        "temperature": 0 <= sampling.temperature <= 100,
        "top_k": isinstance(sampling.top_k, int) and sampling.top_k >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "repetition_penalty": 0.01 <= sampling.repetition_penalty <= 100,
        "seed": sampling.seed is None or 0 <= sampling.seed < 1 << 62,
    }
    for name, fits in checks.items():
        if not fits:
            raise ValueError(f"{name} cannot be {getattr(sampling, name)!r}")

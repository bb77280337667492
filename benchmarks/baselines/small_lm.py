"""An independent small language model with the target's vocabulary: what speculative decoding began with.

It reads none of the target's activations (arXiv 2211.17192, 2302.01318), so transformers' own assisted generation takes
it as it is. Its teacher is the text of the target's answers (sequence-level distillation, arXiv 1606.07947), the same
rows that the other drafters are trained on.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed
from transformers import TrainingArguments as Arguments

from ...targets import load_target
from ...training.activations import prompt_ids
from ...training.recipe import Recipe
from ...training.train import data_record, last_checkpoint, load_rows, save_finished, split, version_record

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def new_small_lm(target: PreTrainedModel, **sizes: Any) -> LlamaForCausalLM:
    """A Llama model whose embeddings, which are its head as well, are the principal components of the target's.

    Args:
        target: gives vocabulary, special tokens and the embeddings to start from.
        **sizes: fields of `LlamaConfig`.
    """
    theirs = target.config.get_text_config(decoder=True)
    shared = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    config = LlamaConfig(
        **({name: getattr(theirs, name) for name in shared} | {"tie_word_embeddings": True} | _SIZES | sizes)
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        rows = target.get_input_embeddings().weight.float()
        _, _, directions = torch.linalg.svd(rows.T @ rows)  # of the smaller side: the same directions
        components = rows @ directions[: config.hidden_size].T
        model.get_input_embeddings().weight.copy_(components * (config.initializer_range / components.std()))
    return model


class _AnswerTrainer(Trainer):
    """Scores the answers' tokens only, and so never holds logits of a prompt."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        ids, lengths, prompts = inputs["input_ids"], inputs["lengths"], inputs["prompt_lengths"]
        hidden = model.model(ids).last_hidden_state  # padding is on the right, where no real token looks
        following = torch.arange(1, ids.shape[1], device=ids.device)
        scored = (following >= prompts[:, None]) & (following < lengths[:, None])
        loss = nn.functional.cross_entropy(model.lm_head(hidden[:, :-1][scored]).float(), ids[:, 1:][scored])
        return (loss, {"loss": loss}) if return_outputs else loss


def _collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(item["input_ids"]) for item in items]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "lengths": torch.tensor([len(row) for row in ids]),
        "prompt_lengths": torch.tensor([item["prompt_length"] for item in items]),
    }


def train_small_lm(
    recipe: Recipe,
    data: list[str | Path],
    output: str | Path,
    *,
    overrides: dict[str, Any] | None = None,
    target: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, float]:
    """Trains the model, or goes on with a run that was stopped, and returns the last evaluation.

    Arguments as for `training.train`; the recipe's `drafter` holds fields of `LlamaConfig`, and its
    objective is not read. Loads by `AutoModelForCausalLM.from_pretrained(output)` afterwards.
    """
    if target is None or tokenizer is None:
        target, tokenizer = load_target(recipe.target, recipe.target_dtype)
    items = []
    for row in load_rows(data):
        prompt = prompt_ids(tokenizer, row)
        items.append({"input_ids": (prompt + row["response_ids"])[: recipe.max_length], "prompt_length": len(prompt)})
    trained_on, held_out = (
        [items[i] for i in rows if len(items[i]["input_ids"]) > items[i]["prompt_length"]]
        for rows in split(len(items), recipe.held_out)
    )
    defaults = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_total_limit": 2,
        "report_to": "none",
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        "label_names": [],  # which tokens are scored is told by lengths: evaluation need not look for labels
        "use_cpu": not torch.accelerator.is_available(),
    }
    run = Path(output) / "run"
    arguments = Arguments(output_dir=str(run), **(defaults | recipe.training | (overrides or {})))
    set_seed(arguments.seed)
    model = new_small_lm(target, **recipe.drafter)
    trainer = _AnswerTrainer(model, arguments, _collate, trained_on, held_out)
    trainer.model_accepts_loss_kwargs = False
    trainer.can_return_loss = True
    versions, began = version_record(), time.monotonic()
    last = last_checkpoint(run)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        record = {
            "recipe": recipe.to_dict(),
            "data": data_record(data),
            "training_rows": len(trained_on),
            "training_answer_tokens": sum(len(item["input_ids"]) - item["prompt_length"] for item in trained_on),
            "trainable_parameters": model.num_parameters(),
            "steps": trainer.state.global_step,
            "epochs": trainer.state.epoch,
            "hours_since_last_start": round((time.monotonic() - began) / 3600, 4),
            "final_evaluation": metrics,
            "log": trainer.state.log_history,
            **versions,
        }
        save_finished(model, record, output)
    return metrics

"""The model card, made from records: the drafter's configuration, its training record and its benchmark results.

Knows what a card says. Whatever no record holds is said to be missing, never filled in. Does not know files or the Hub.
"""

import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..modeling_moa import MoADrafterConfig
from .records import Benchmark, Figures

TAG = "moa-spec"  # marks repositories of ours
_DEPTHS = 8  # in the metadata; only the longest lookups reach further, a handful of rounds each

_CITATION = """@inproceedings{zimmer2025mixture,
  title     = {Mixture of Attentions For Speculative Decoding},
  author    = {Zimmer, Matthieu and Gritta, Milan and Lampouras, Gerasimos and Bou Ammar, Haitham and Wang, Jun},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},
  url       = {https://arxiv.org/abs/2410.03804}
}"""


def model_card(
    config: MoADrafterConfig,
    repo_id: str,
    parameters: int,
    training: dict[str, Any] | None,
    benchmarks: Sequence[Benchmark],
    images: dict[str, str],
) -> ModelCard:
    """
    Args:
        config: of the drafter; `target_name` must be a repository on the Hub.
        repo_id: where the card will lie.
        parameters: of the drafter's own.
        images: path in the repository -> what it shows.
    """
    name = repo_id.split("/")[-1]
    data = ModelCardData(
        license=code_licence().lower(),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[TAG, "speculative-decoding", "mixture-of-attentions", "custom_generate"],
        base_model=config.target_name,
        base_model_relation="adapter",
        datasets=_datasets(training),
        model_name=name,
        eval_results=eval_results(benchmarks) or None,
    )
    sections = [
        f"---\n{data}\n---",
        f"# {name}",
        _introduction(config),
        _parts(config, parameters),
        _usage(config, repo_id),
        _measured(benchmarks, images),
        _trained(config, training, images),
        _limits(config),
        _licences(training),
        f"## Citation\n\n```bibtex\n{_CITATION}\n```",
    ]
    return ModelCard("\n\n".join(sections) + "\n")


def code_licence() -> str:
    """The SPDX identifier of this project's licence."""
    return metadata.metadata("moa-spec")["License-Expression"]


def eval_results(benchmarks: Sequence[Benchmark]) -> list[EvalResult]:
    """What goes into the model-index: tau, speedup and acceptance by depth (8 at most), per task and method."""
    results = []
    for benchmark in benchmarks:
        conditions = _conditions(benchmark)
        for row in benchmark.figures:
            shared: dict[str, Any] = {
                "task_type": "text-generation",
                "task_name": "Speculative decoding",
                "dataset_type": row.task.split("/")[0],
                "dataset_name": row.task,
                "dataset_config": f"{row.task}; {conditions}",  # tells groups of results apart
                "source_name": conditions,
                "source_url": benchmark.file,
            }
            metrics: list[tuple[str, str, Any]] = [
                ("mean_accepted_tokens", f"tau ({row.method})", round(row.tau, 3)),
                ("speedup", f"wall-clock speedup over plain decoding ({row.method})", round(row.speedup[0], 3)),
            ]
            metrics += [
                ("conditional_acceptance_rate", f"acceptance at depth {depth} ({row.method})", round(rate, 3))
                for depth, rate in enumerate(row.conditional_acceptance[:_DEPTHS], 1)
            ]
            results += [
                EvalResult(metric_type=kind, metric_name=label, metric_value=value, **shared)
                for kind, label, value in metrics
            ]
    return results


def _datasets(training: dict[str, Any] | None) -> list[str] | None:
    names = [entry["dataset"] for entry in (training or {}).get("data", []) if entry.get("dataset")]
    return names or None


def _conditions(benchmark: Benchmark) -> str:
    temperature = benchmark.options.get("temperature")
    sampling = "greedy" if temperature == 0 else f"temperature {temperature}"
    return f"{benchmark.hardware}; {benchmark.options.get('dtype', 'dtype not recorded')}; {sampling}"


def _introduction(config: MoADrafterConfig) -> str:
    revision = f" at revision `{config.target_revision}`" if config.target_revision else " (revision not recorded)"
    return (
        "A Mixture-of-Attentions drafter for speculative decoding "
        "([arXiv 2410.03804](https://arxiv.org/abs/2410.03804)). It drafts for "
        f"[{config.target_name}](https://huggingface.co/{config.target_name}){revision} and writes nothing by itself: "
        "it proposes tokens, and the target keeps those that it would have written."
    )


def _parts(config: MoADrafterConfig, parameters: int) -> str:
    tail = config.target_layer_inference
    shared = ["token embeddings", "LM head"] + (["final norm", f"last {tail} layers"] if tail else [])
    rows = [
        f"| target | `{config.target_name}`, {config.target_num_hidden_layers} layers of width {config.hidden_size}, "
        f"vocabulary {config.vocab_size} |",
        f"| its own weights, in this repository | {parameters:,} parameters: layer self-attention over "
        f"{len(config.lsa_layers)} target layers, self-attention, cross-attention, and the maps between them |",
    ]
    if config.standalone:
        rows.append(f"| copied from the target into this repository | {', '.join(shared)} |")
    else:
        rows.append(f"| lent by the target, frozen, not in this repository | {', '.join(shared)} |")
    rows.append(
        f"| draft vocabulary | {config.draft_vocab_size or config.vocab_size} of {config.vocab_size} token ids |"
    )
    return "\n".join(["## What is in it", "", "| | |", "|---|---|", *rows])


def _usage(config: MoADrafterConfig, repo_id: str) -> str:
    revision = f', revision="{config.target_revision}"' if config.target_revision else ""
    target = f"""target = AutoModelForCausalLM.from_pretrained("{config.target_name}"{revision})
tokenizer = AutoTokenizer.from_pretrained("{config.target_name}"{revision})
inputs = tokenizer("The capital of France is", return_tensors="pt")"""
    return f"""## How to use it

With the package `moa-spec` installed:

```python
import moa_spec
from transformers import AutoModelForCausalLM, AutoTokenizer

{target}
# AutoModelForCausalLM knows it too
drafter = moa_spec.MoADrafterForCausalLM.from_pretrained("{repo_id}", dtype=target.dtype)
moa_spec.attach(target, drafter)
print(tokenizer.decode(target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)[0]))
```

Without it, with transformers {_requirement()} alone (the code in this repository is the library's, byte for byte):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{target}
drafter = AutoModelForCausalLM.from_pretrained("{repo_id}", dtype=target.dtype, trust_remote_code=True)
ids = target.generate(
    **inputs,
    custom_generate="{repo_id}",
    trust_remote_code=True,
    assistant_model=drafter,
    max_new_tokens=64,
)
print(tokenizer.decode(ids[0]))
```

From the command line, which also shows what was drafted, kept and thrown away:

```bash
moa generate --target {config.target_name} --drafter {repo_id} "Why is the sky blue?"
```

`dtype=target.dtype` matters for speed: a drafter in another precision than its target can be slower. To pin a version,
pass `revision="..."` to both calls that name this repository."""


def _requirement() -> str:
    requirements = metadata.requires("moa-spec") or []
    found = next(r for r in requirements if r.split(";")[0].strip().startswith("transformers"))
    bounds = found.split(";")[0].strip().removeprefix("transformers").split(",")
    return ",".join(sorted(bounds, reverse=True))  # the lower bound first


def _measured(benchmarks: Sequence[Benchmark], images: dict[str, str]) -> str:
    parts = ["## Measured"]
    if not benchmarks:
        parts.append("No benchmark was run on this checkpoint: there are no figures to give.")
    for benchmark in benchmarks:
        session = benchmark.session
        command = session.get("command") or benchmark.options.get("command")
        parts.append(
            f"{_conditions(benchmark)}; {session['started']}; "
            + ", ".join(f"{name} {version}" for name, version in session["versions"].items())
            + f". Record: [`{benchmark.file}`]({benchmark.file})"
            + (f", written by `{command}`." if command else " (its command was not recorded).")
        )
        if not benchmark.complete:
            parts.append("**This run is not complete**: only some of the questions were measured.")
        parts.append(_table(benchmark.figures))
    parts += [f"![{label}]({path})" for path, label in images.items() if "acceptance" in path]
    if benchmarks:
        parts.append(
            "tau: new tokens per target call after the prefill, the target's own token included, over all rounds "
            "(plain decoding: 1.00). Speedup: end-to-end tokens per second over plain decoding in the same run, median "
            "[lowest, highest] over the repetitions. Acceptance at depth k: of the rounds that kept k-1 drafts or "
            "more, the share that kept k or more."
        )
    return "\n\n".join(parts)


def _table(figures: Sequence[Figures]) -> str:
    lines = [
        "| task | method | questions | tau | speedup | acceptance by depth | identical to plain decoding |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures:
        median, low, high = row.speedup
        acceptance = " ".join(f"{rate:.2f}" for rate in row.conditional_acceptance)
        identical = "sampled" if row.identical_rate is None else f"{row.identical_rate:.1%}"
        lines.append(
            f"| {row.task} | {row.method} | {row.questions} | {row.tau:.2f} | {median:.2f} [{low:.2f}, {high:.2f}] | "
            f"{acceptance} | {identical} |"
        )
    return "\n".join(lines)


def _trained(config: MoADrafterConfig, training: dict[str, Any] | None, images: dict[str, str]) -> str:
    if training is None:
        return "## Training\n\nNo training record lies beside this checkpoint."
    stages = [training]
    while (earlier := stages[0].get("started_from")) is not None:
        stages.insert(0, earlier)
    hours = [stage.get("hours", stage.get("hours_of_last_session")) for stage in stages]
    columns = [_training_rows(stage) for stage in stages]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    heading = [""] if len(stages) == 1 else [f"stage {number}" for number in range(1, len(stages) + 1)]
    table = [
        f"| | {' | '.join(heading)} |",
        "|---" * (len(stages) + 1) + "|",
        *(f"| {label} | {' | '.join(str(column.get(label, '')) for column in columns)} |" for label in labels),
    ]
    parts = [
        "## Training",
        "Trained on the target's own answers. All settings and the whole log are in "
        "[`training_record.json`](training_record.json).",
    ]
    if len(stages) > 1 and None not in hours:
        steps = sum(stage["steps"] for stage in stages)
        parts.append(f"{len(stages)} stages, {_count(steps)} steps and {sum(hours):.2g} hours together.")
    parts.append("\n".join(table))
    if weights := training.get("target_weights"):
        parts.append(
            f"The target's weights were those of `{weights['file']}` in {weights['package']} "
            f"(sha256 `{weights['sha256'][:16]}…`), made dense."
        )
    parts += [f"![{label}]({path})" for path, label in images.items() if "acceptance" not in path]
    return "\n\n".join(parts)


def _training_rows(training: dict[str, Any]) -> dict[str, Any]:
    """What is shown of one training run; what its record does not hold is left out."""
    rows = {
        "data": "; ".join(_describe(entry) for entry in training.get("data", [])) or None,
        "rows": _count(training.get("training_rows")),
        "answer tokens": _count(training.get("training_answer_tokens")),
        "steps": _count(training.get("steps")),
        "epochs": None if training.get("epochs") is None else f"{training['epochs']:.3g}",
        "hours": training.get("hours", training.get("hours_of_last_session")),
        "machine": training.get("machine"),
        "command": f"`moa {training['command']}`" if training.get("command") else None,
        "revision of moa-spec": training.get("git_revision"),
        "held-out evaluation": _evaluation(training.get("final_evaluation", {})),
    }
    return {label: value for label, value in rows.items() if value is not None}


def _describe(entry: dict[str, Any]) -> str:
    name = entry.get("dataset") or entry.get("file", "unnamed")
    digest = f" (sha256 `{entry['sha256'][:16]}…`)" if entry.get("sha256") else ""
    return f"{name}{digest}"


def _evaluation(metrics: dict[str, Any]) -> str | None:
    """Loss, expected tau and agreement by depth; agreement by kind of text is in the record."""
    wanted = re.compile(r"eval_(loss|expected_tau|agreement_\d+)")
    shown = [f"{key.removeprefix('eval_')} {value:.4g}" for key, value in metrics.items() if wanted.fullmatch(key)]
    return ", ".join(shown) or None


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _limits(config: MoADrafterConfig) -> str:
    return f"""## Losslessness and limits

Drafts never change what the target writes. In fp32, greedy output is token for token that of plain `generate`;
sampling has exactly the target's distribution. In bf16 and fp16 the target itself rounds differently when it reads
several tokens in one pass, so that greedy output can part from plain decoding's where two tokens are nearly tied.

Context: up to {config.max_position_embeddings} tokens, prompt and answer together; no more is drafted beyond. The
drafter fits this target only: another one is refused when it is attached."""


def _licences(training: dict[str, Any] | None) -> str:
    stated = {entry.get("license") for entry in (training or {}).get("data", [])} - {None}
    data = ", ".join(sorted(stated)) if stated else "not stated in the training record"
    return (
        f"## Licences\n\nCode and the drafter's weights: {code_licence()}. Training data: {data}. The target has a "
        "licence of its own, which also covers what it writes."
    )

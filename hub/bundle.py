"""A drafter as a folder that is complete by itself: weights, configuration, code, records, figures, model card.

Knows what belongs into it and where the code comes from. Does not know the Hub.

    config.json, generation_config.json, model.safetensors
    configuration_moa.py, modeling_moa.py          the classes, named by auto_map
    custom_generate/generate.py, ...               everything needed to decode, see `generation.generate`
    training_record.json, benchmark*.json          as they lie beside the checkpoint
    figures/*.svg, README.md, LICENSE
"""

import os
import shutil
from importlib import metadata
from pathlib import Path

from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_import_files

from ..modeling_moa import MoADrafterConfig, MoADrafterForCausalLM
from .card import model_card
from .figures import Points, line_chart
from .records import BENCHMARK_RECORDS, TRAINING_RECORD, Benchmark, check_same_drafter, read_benchmarks, read_training

_PACKAGE = Path(__file__).resolve().parent.parent
ENTRY = _PACKAGE / "generation" / "generate.py"


def decoding_code() -> list[Path]:
    """The modules of `generation` that `custom_generate` needs: its entry and all that it imports, directly or not."""
    return [ENTRY, *sorted({Path(path) for path in get_relative_import_files(ENTRY)})]


def write_bundle(
    drafter: MoADrafterForCausalLM,
    folder: Path,
    repo_id: str,
    records: Path | None = None,
    standalone: bool = False,
) -> None:
    """Writes a drafter's repository into an empty folder.

    Args:
        repo_id: NAMESPACE/NAME, for the card.
        records: folder with training record and benchmark results, usually the checkpoint.
        standalone: with a copy of the parts that the target lends; it must be attached.

    Raises:
        ValueError: the drafter does not name its target as a repository, or a record is damaged.
        RuntimeError: `standalone`, and no target is attached.
    """
    check_target_name(drafter.config)
    training = read_training(records) if records else None
    benchmarks = read_benchmarks(records) if records else []
    if records:
        check_same_drafter(records, drafter.state_dict(), benchmarks)
    if standalone and not drafter.config.standalone:
        drafter = drafter.standalone_copy()
    config = drafter.config

    drafter.save_pretrained(folder)
    code = folder / "custom_generate"
    code.mkdir()
    for path in decoding_code():
        shutil.copyfile(path, code / path.name)
    (code / "requirements.txt").write_text(_requirements(), encoding="utf-8")
    if records:
        for path in [records / TRAINING_RECORD, *sorted(records.glob(BENCHMARK_RECORDS))]:
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    images = _draw(folder, training, benchmarks)
    licence = _licence_text()
    if licence:
        (folder / "LICENSE").write_text(licence, encoding="utf-8")
    borrowed = ("embed_tokens.", "lm_head.", "tail.")
    own = sum(p.numel() for name, p in drafter.named_parameters() if not name.startswith(borrowed))
    model_card(config, repo_id, own, training, benchmarks, images).save(folder / "README.md")


def check_target_name(config: MoADrafterConfig) -> None:
    """
    Raises:
        ValueError: whoever pulls the drafter could not find its target.
    """
    name = config.target_name
    advice = "name its repository on the Hub with --target NAMESPACE/NAME (target_name in push_to_hub)"
    if not name:
        raise ValueError(f"This drafter does not say which target it was made for: {advice}.")
    if "/" not in name or os.path.exists(name) or name.count("/") > 1:
        raise ValueError(f"This drafter's target is {name!r}, which nobody else could find: {advice}.")
    validate_repo_id(name)


def _requirements() -> str:
    """The transformers that the code stands on, one bound per line as its loader reads them."""
    found = next(r for r in metadata.requires("moa-spec") or [] if r.startswith("transformers"))
    bounds = found.split(";")[0].strip().removeprefix("transformers").split(",")
    return "".join(f"transformers{bound.strip()}\n" for bound in sorted(bounds))


def _licence_text() -> str | None:
    path = _PACKAGE / "LICENSE"
    return (
        path.read_text(encoding="utf-8") if path.is_file() else metadata.distribution("moa-spec").read_text("LICENSE")
    )


def _draw(folder: Path, training: dict | None, benchmarks: list[Benchmark]) -> dict[str, str]:
    """Draws what the records hold. Returns path in the repository -> what it shows."""
    charts: dict[str, tuple[str, str]] = {}
    log = (training or {}).get("log", [])
    losses: dict[str, Points] = {}
    for label, key in (("training", "loss"), ("held out", "eval_loss")):
        points = [(float(entry["step"]), float(entry[key])) for entry in log if key in entry and "step" in entry]
        if len(points) > 1:
            losses[label] = points
    if losses:
        charts["loss.svg"] = ("Loss", line_chart("Loss", "step", "loss", losses))
    for benchmark in benchmarks:
        series: dict[str, Points] = {
            f"{row.task}, {row.method}": [(float(d), rate) for d, rate in enumerate(row.conditional_acceptance, 1)]
            for row in benchmark.figures
            if "/" not in row.task and row.conditional_acceptance
        }
        if series:
            title = "Acceptance by depth"
            name = f"acceptance_{Path(benchmark.file).stem}.svg"
            charts[name] = (title, line_chart(title, "depth of the draft", "conditional acceptance rate", series))
    if charts:
        (folder / "figures").mkdir()
    for name, (_, drawing) in charts.items():
        (folder / "figures" / name).write_text(drawing, encoding="utf-8")
    return {f"figures/{name}": title for name, (title, _) in charts.items()}

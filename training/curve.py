"""The loss curve of a training record as a picture. Needs matplotlib, which the extra `bench` installs."""

import json
from pathlib import Path


def draw_curve(folder: str | Path) -> Path:
    """Draws `loss_curve.png` beside a `training_record.json`: training loss, evaluation loss, agreement by depth.

    Raises:
        FileNotFoundError: the folder holds no record.
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder = Path(folder)
    log = json.loads((folder / "training_record.json").read_text(encoding="utf-8"))["log"]
    trained = [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]
    evaluated = [entry for entry in log if "eval_loss" in entry]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(*zip(*trained, strict=True), label="training", linewidth=1)
    left.plot(
        [entry["step"] for entry in evaluated], [entry["eval_loss"] for entry in evaluated], "o-", label="held out"
    )
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend()
    for depth in (0, 1, 2, 4, 6):
        name = f"eval_agreement_{depth}"
        points = [(entry["step"], entry[name]) for entry in evaluated if name in entry]
        if points:
            right.plot(*zip(*points, strict=True), "o-", label=f"depth {depth}")
    right.set(xlabel="step", ylabel="held-out agreement with the target", ylim=(0, None))
    if right.lines:  # an independent language model is not compared with the target
        right.legend()
    else:
        right.remove()
    path = folder / "loss_curve.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path

"""An estimate of a training run, as lines for a reader."""

from .estimate import Estimate


def to_text(found: Estimate) -> str:
    """A table of what the run will need."""

    def count(number: int | None) -> str:
        return "not known" if number is None else f"{number:,}"

    def parts(numbers: dict[str, int]) -> str:
        return ", ".join(f"{name} {number:,}" for name, number in numbers.items())

    def sizes(numbers: dict[str, int]) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {size(number)}" for name, number in numbers.items())

    cache = f"{found.cache_bytes_per_token:,} bytes per token"
    if found.cache_bytes is not None:
        cache += f", {size(found.cache_bytes)} in all"
    steps = f"{count(found.steps)} of {found.global_batch} rows, {count(found.steps_per_epoch)} per epoch"
    memory = f"{size(sum(found.memory_bytes.values()))} ({sizes(found.memory_bytes)})"
    if "activations" not in found.memory_bytes:
        memory += ", activations not estimated for this type of drafter"
    time = "give a measured rate with --tokens-per-second" if found.hours is None else f"{found.hours:,.1f} hours"
    lines = [
        ("target", f"{found.target}, {size(found.target_bytes)} in each process until the cache is built"),
        ("trainable", f"{sum(found.trainable_parameters.values()):,} ({parts(found.trainable_parameters)})"),
        ("lent, frozen", f"{sum(found.lent_parameters.values()):,} ({parts(found.lent_parameters)})"),
        ("data", f"{count(found.tokens)} tokens, of answers {count(found.answer_tokens)}"),
        ("rows", f"{count(found.rows)} to train on, {count(found.held_out_rows)} held out"),
        ("activation cache", cache),
        ("processes", f"{found.processes}"),
        ("steps", steps),
        ("memory, a process", memory),
        ("widest batch", "{rows} rows of {width:,} tokens, {loss_bearing:,} positions with loss".format(**found.batch)),
        ("time", time),
    ]
    return "\n".join(f"{name:18}  {value}" for name, value in lines)


def size(count: float) -> str:
    """Bytes for a reader, in powers of 1024."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"

"""The part of `moa bench` that measures client and server: over an emulated line, offline, under load."""

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from .arguments import DEFAULT_DRAFTER, not_negative, positive, shipped

OFFLINE_METHODS = ["moa", "moa-no-repeat", "moa-prompt", "untrained", "lookup"]
LINK_METHODS = ["stream", "beside", "moa", "moa-alone", "lookup"]


def add_common_arguments(parser: argparse.ArgumentParser, output: str, new_tokens: int | None) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path(output), metavar="FILE", help="the record (default: %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew whatever is there")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="also draw figures there")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="the questions (default: what fetch has downloaded)"
    )
    if new_tokens is not None:
        parser.add_argument(
            "--max-new-tokens", type=positive, default=new_tokens, metavar="N", help="(default: %(default)s)"
        )
    parser.add_argument("--target", metavar="NAME", help="a folder or a repository (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", metavar="NAME", help=f"likewise (default: checkpoints/{DEFAULT_DRAFTER.name})")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="(default: %(default)s)"
    )


def _add_baseline_arguments(parser: argparse.ArgumentParser) -> None:
    for option, metavar, what, kind in (
        ("--eagle", "FOLDER", "an EAGLE drafter, for the methods that begin with eagle", "eagle"),
        ("--assistant", "NAME", "an independent small model, for the method of that name", "small-lm"),
    ):
        where = f"(default: checkpoints/smollm2-135m-instruct-{kind})"
        parser.add_argument(option, metavar=metavar, help=f"{what} {where}")


def _find_baselines(args: argparse.Namespace) -> None:
    """Looks in checkpoints/ for what a method needs and nobody named, and forgets what no method needs.

    Raises:
        ValueError: it is not there.
    """
    for option, kind in (("eagle", "eagle"), ("assistant", "small-lm")):
        users = [name for name in args.methods if name.startswith(option)]
        found = (getattr(args, option) or shipped(kind)) if users else None
        if users and found is None:
            raise ValueError(f"The method {users[0]!r} needs a model: name one with --{option}")
        setattr(args, option, found)


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods",
        nargs="+",
        default=LINK_METHODS,
        metavar="NAME",
        help=f"also moa-float32, eagle, eagle-alone, assistant (default: {' '.join(LINK_METHODS)})",
    )
    parser.add_argument(
        "--profiles", nargs="+", metavar="NAME", help="of serving/link.py (default: none 5g 4g slow4g bursty tunnel)"
    )
    parser.add_argument(
        "--questions", type=positive, default=1, metavar="N", help="of each Spec-Bench task (default: %(default)s)"
    )
    parser.add_argument(
        "--checkpoint",
        nargs=2,
        action="append",
        default=[],
        metavar=("METHOD", "FOLDER"),
        help="another MoA drafter of this target, as a method of that name (without lookup, as moa-alone); repeatable",
    )
    _add_baseline_arguments(parser)
    add_common_arguments(parser, "runs/link.json", 48)


def run_link(args: argparse.Namespace) -> int:
    from ..benchmarks import link, link_server, records, serving_report
    from ..serving.link import PROFILES

    profiles = args.profiles or link.PROFILES
    _check_names("profile", profiles, PROFILES)
    _check_names("method", args.methods, link.DESCRIPTIONS)
    _find_baselines(args)
    others = dict(args.checkpoint)
    for name in others:
        if name in link.DESCRIPTIONS:
            raise ValueError(f"There is a method {name!r} already: give the drafter of --checkpoint another name")
    drafter = _drafter(args)
    bench = _Bench(args, drafter, ["spec_bench"])
    cores = _share_cores()
    prompts = bench.prompts(args.questions, args.max_new_tokens)
    options = bench.options() | {
        "profiles": profiles,
        "methods": {name: link.DESCRIPTIONS[name] for name in args.methods}
        | {
            name: f"the MoA drafter {Path(folder).name} at the client, without lookup"
            for name, folder in others.items()
        },
        "checkpoints_sha256": {name: records.checkpoint_digest(folder) for name, folder in others.items()},
        "questions_per_task": args.questions,
        "max_new_tokens": args.max_new_tokens,
        "eagle_sha256": records.checkpoint_digest(args.eagle),
        "assistant": None if args.assistant is None else Path(args.assistant).name,
        "threads_of_each_end": len(cores[0]),
    }
    results = records.ResultFile(args.output, options, args.overwrite)
    far = link_server.Far(args.target, str(drafter), args.dtype, bool(args.eagle), len(cores[0]), cores[1], others)
    done = {entry["key"] for entry in results.questions}
    with contextlib.ExitStack() as stack:
        methods: list[Any] = []
        if any(f"{profile}/{name}" not in done for profile in profiles for name in options["methods"]):
            methods = _link_methods(args, bench, stack.enter_context(link_server.far_end(far)).urls)
        result = link.run(methods, profiles, prompts, results, args.seed, bench.checksums())
    print(serving_report.report(result))
    _draw(args, result)
    exact = [figures["exact"] for methods in result["link"].values() for figures in methods.values()]
    return 0 if args.dtype != "float32" or all(share in (None, 1.0) for share in exact) else 1


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=positive, default=16, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=positive, default=300, metavar="S", help="(default: %(default)s)")
    parser.add_argument(
        "--prompts", type=positive, default=12, metavar="N", help="the shortest of Spec-Bench (default: %(default)s)"
    )
    parser.add_argument(
        "--resets-every",
        type=not_negative,
        default=20.0,
        metavar="S",
        help="seconds between resets of everybody's line; 0: none (default: %(default)s)",
    )
    parser.add_argument(
        "--apart", action="store_true", help="judge each client's drafts in a pass of its own, to compare"
    )
    add_common_arguments(parser, "runs/load.json", 48)


def run_load(args: argparse.Namespace) -> int:
    import torch

    from ..benchmarks import link_server, load, records, serving_report
    from ..serving.client import MoAClient

    drafter = _drafter(args)
    bench = _Bench(args, drafter, ["spec_bench"])
    cores = _share_cores()
    prompts = sorted(bench.prompts(args.prompts, args.max_new_tokens).values(), key=len)[: args.prompts]
    answers = {}
    target: Any = bench.target
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=args.max_new_tokens,
            eos_token_id=None,
        )
        answers[tuple(prompt)] = whole[0, len(prompt) :].tolist()
    far = link_server.Far(
        args.target, str(drafter), args.dtype, False, len(cores[0]), cores[1], together=not args.apart
    )
    client = MoAClient("ws://127.0.0.1:1", bench.drafter.standalone_copy(), bench.tokenizer)
    with link_server.far_end(far) as running:
        url, pid = running.urls["moa"], running.pid
        figures = load.run(url, pid, client, answers, args.clients, args.seconds, args.seed, args.resets_every)
    options = bench.options() | {
        "max_new_tokens": args.max_new_tokens,
        "prompts": len(prompts),
        "resets_every": args.resets_every,
        "together": not args.apart,
        "threads_of_each_end": len(cores[0]),
    }
    sessions = [figures.pop("session")]
    result = {"format": records.FORMAT, "options": options, "sessions": sessions, "load": figures}
    records.write_json(args.output, result)
    print(serving_report.report(result))
    for error in sorted(set(figures["errors"])):
        print(error, file=sys.stderr)
    _draw(args, result)
    return 0 if load.sound(figures) else 1


def add_offline_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods",
        nargs="+",
        default=OFFLINE_METHODS,
        metavar="NAME",
        help=f"also moa-alone, eagle, assistant (default: {' '.join(OFFLINE_METHODS)})",
    )
    parser.add_argument(
        "--prompts", type=positive, default=100, metavar="N", help="of Spec-Bench and HumanEval (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=positive, default=64, metavar="N", help="written offline (default: %(default)s)"
    )
    parser.add_argument(
        "--no-repeat-ngram-size", type=positive, default=4, metavar="N", help="of moa-no-repeat (default: %(default)s)"
    )
    _add_baseline_arguments(parser)
    add_common_arguments(parser, "runs/offline.json", None)


def run_offline(args: argparse.Namespace) -> int:
    from ..benchmarks import offline, records, serving_report
    from .bench_comparison import pin_threads

    _check_names("method", args.methods, offline.DESCRIPTIONS)
    _find_baselines(args)
    bench = _Bench(args, _drafter(args), ["spec_bench", "moa_bench"])
    threads = pin_threads(None)
    options = bench.options() | {
        "methods": {name: offline.DESCRIPTIONS[name].format(n=args.no_repeat_ngram_size) for name in args.methods},
        "prompts": args.prompts,
        "tokens_offline": args.tokens,
        "cuts": list(offline.CUTS),
        "no_repeat_ngram_size": args.no_repeat_ngram_size,
        "eagle_sha256": records.checkpoint_digest(args.eagle),
        "assistant": None if args.assistant is None else Path(args.assistant).name,
        "threads": threads,
    }
    results = records.ResultFile(args.output, options, args.overwrite)
    prompts = bench.mixed_prompts(args.prompts, max(offline.CUTS) + args.tokens)
    result = offline.run(
        bench.target,
        bench.tokenizer,
        bench.drafter,
        _offline_writers(args, bench),
        prompts,
        results,
        offline.CUTS,
        args.tokens,
        bench.eos,
        bench.checksums(),
    )
    print(serving_report.report(result))
    _draw(args, result)
    return 0


def _offline_writers(args: argparse.Namespace, bench: "_Bench") -> Any:
    """Who writes offline, by the names on the command line, from what was read of a text."""
    from ..benchmarks import offline
    from ..benchmarks.link_clients import HiddenStates
    from ..benchmarks.methods import independent, untrained_like

    alone = bench.drafter.standalone_copy()
    makers: dict[str, Any] = {
        "moa": lambda reading: offline.moa_writer(reading, bench.drafter, alone, looks_up=True),
        "moa-no-repeat": lambda reading: offline.moa_writer(
            reading, bench.drafter, alone, args.no_repeat_ngram_size, looks_up=True
        ),
        "moa-alone": lambda reading: offline.moa_writer(reading, bench.drafter, alone),
        "moa-prompt": lambda reading: offline.moa_writer(reading, bench.drafter, alone, prompt_only=True),
        "lookup": lambda reading: offline.lookup_writer,
    }
    if "untrained" in args.methods:
        untrained = untrained_like(bench.drafter, bench.target, args.seed)
        knows_nothing = untrained.standalone_copy()
        makers["untrained"] = lambda reading: offline.moa_writer(reading, untrained, knows_nothing)
    if "eagle" in args.methods:
        from ..benchmarks.baselines import load_baseline

        eagle, hidden = load_baseline(args.eagle, bench.target), HiddenStates(bench.target)
        makers["eagle"] = lambda reading: offline.eagle_writer(reading, hidden, eagle)
    if "assistant" in args.methods:
        assistant = independent(args.assistant, bench.target)
        makers["assistant"] = lambda reading: offline.model_writer(assistant)
    return lambda reading: {name: makers[name](reading) for name in args.methods}


def _link_methods(args: argparse.Namespace, bench: "_Bench", urls: dict[str, str]) -> list[Any]:
    """What writes texts, by the names on the command line."""
    from ..benchmarks import link
    from ..benchmarks.link_clients import EagleClient, ModelClient
    from ..benchmarks.link_server import STREAM
    from ..generation import load_drafter
    from ..serving.client import MoAClient

    eos = bench.eos
    alone = bench.drafter.standalone_copy()
    asked: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "eos_token_ids": eos}

    def streaming(drafting: bool) -> Any:
        return lambda line: (
            lambda a_line, prompt: link.streamed_answer(a_line, STREAM, prompt, args.max_new_tokens, eos, drafting)
        )

    def drafting(make: Any, **more: Any) -> Any:
        def writer(line: Any) -> Any:
            client = make(f"ws://127.0.0.1:{line.port}")
            return lambda a_line, prompt: link.drafted_answer(client, a_line, prompt, asked | more)

        return writer

    eagle = assistant = None
    if set(args.methods) & set(link.WITH_EAGLE):
        from ..benchmarks.baselines import load_baseline

        eagle = load_baseline(args.eagle, bench.target)
    if "assistant" in args.methods:
        from ..benchmarks.methods import independent

        assistant = independent(args.assistant, bench.target)

    def moa(url: str) -> Any:
        return MoAClient(url, alone, bench.tokenizer)

    def moa_float32(url: str) -> Any:
        return MoAClient(url, alone, bench.tokenizer, memory="float32")

    def with_eagle(url: str) -> Any:
        return EagleClient(url, eagle, bench.target)  # type: ignore[arg-type]

    no_lookup = {"prompt_lookup_num_tokens": 0}
    writers = {
        "stream": streaming(False),
        "beside": streaming(True),
        "moa": drafting(moa),
        "moa-alone": drafting(moa, **no_lookup),
        "moa-float32": drafting(moa_float32, **no_lookup),
        "lookup": drafting(lambda url: MoAClient(url, alone, memory="none")),
        "eagle": drafting(with_eagle),
        "eagle-alone": drafting(with_eagle, **no_lookup),
        "assistant": drafting(lambda url: ModelClient(url, alone, assistant)),  # type: ignore[arg-type]
    }
    methods = [
        link.Method(name, urls["hidden" if name in link.WITH_EAGLE else "moa"], writers[name]) for name in args.methods
    ]
    for name, folder in args.checkpoint:
        other = load_drafter(folder, bench.target).standalone_copy()
        writer = drafting(lambda url, other=other: MoAClient(url, other, bench.tokenizer), **no_lookup)
        methods.append(link.Method(name, urls[name], writer))
    return methods


class _Bench:
    """Questions and models as the command line names them."""

    def __init__(self, args: argparse.Namespace, drafter: str | Path, suites: list[str]):
        from .. import targets
        from ..benchmarks import datasets
        from ..generation import load_drafter

        self.args, self.drafter_name, self.suites = args, drafter, suites
        self.folder = datasets.find_folder(args.data)
        self.questions = datasets.load(suites, self.folder)
        self.target, self.tokenizer = targets.load_target(args.target, args.dtype)
        with targets.quiet():
            self.drafter = load_drafter(drafter, self.target)

    @property
    def eos(self) -> list[int]:
        """Where plain decoding ends a text."""
        ids = self.target.generation_config.eos_token_id
        return sorted(ids) if isinstance(ids, list) else [] if ids is None else [ids]

    def prompts(self, per_task: int, max_new_tokens: int) -> dict[str, list[int]]:
        """First turns of so many questions of each task, as token ids; those that do not fit are left out."""
        from ..benchmarks import datasets

        return self._encoded(datasets.choose(self.questions, per_task, self.args.seed), max_new_tokens)

    def mixed_prompts(self, count: int, max_new_tokens: int) -> dict[str, list[int]]:
        """The same for `count` questions in all, spread over Spec-Bench's tasks and HumanEval, whose answers are code;
        task after task in turns, so that a run that was stopped has seen all of them."""
        from ..benchmarks import datasets

        mine = [q for q in self.questions if q.suite == "spec_bench" or q.task == "humaneval"]
        tasks: dict[str, list[Any]] = {}
        for question in mine:
            tasks.setdefault(f"{question.suite}/{question.task}", []).append(question)
        per_task = -(-count // len(tasks))
        drawn = [datasets.choose(questions, per_task, self.args.seed) for questions in tasks.values()]
        in_turn = [questions[i] for i in range(per_task) for questions in drawn if i < len(questions)]
        return self._encoded(in_turn[:count], max_new_tokens)

    def _encoded(self, questions: list[Any], max_new_tokens: int) -> dict[str, list[int]]:
        from ..benchmarks.runner import encode

        context = self.target.config.get_text_config(decoder=True).max_position_embeddings
        found = {}
        for question in questions:
            ids = encode([{"role": "user", "content": question.turns[0]}], self.tokenizer)[0].tolist()
            if len(ids) + max_new_tokens <= context:
                found[question.key] = ids
        return found

    def checksums(self) -> dict[str, Any]:
        from ..benchmarks import datasets

        return datasets.checksums(self.suites, self.folder)

    def options(self) -> dict[str, Any]:
        from ..benchmarks import records

        return {
            "target": self.target.config._name_or_path,
            "drafter": Path(self.drafter_name).name,
            "drafter_sha256": records.checkpoint_digest(self.drafter_name),
            "dtype": self.args.dtype,
            "seed": self.args.seed,
        }


def _drafter(args: argparse.Namespace) -> str | Path:
    if args.drafter is None and not DEFAULT_DRAFTER.is_dir():
        raise FileNotFoundError(f"There is no drafter in {DEFAULT_DRAFTER}: name one with --drafter")
    return args.drafter or DEFAULT_DRAFTER


def _check_names(kind: str, names: list[str], known: Any) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"There is no {kind} {name!r}; there are {', '.join(known)}")
        if names.count(name) > 1:
            raise ValueError(f"The {kind} {name!r} is named twice")


def _share_cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gives half of the cores to this process and the other half to the far end; one core serves both."""
    from .bench_comparison import pin_threads

    if not hasattr(os, "sched_setaffinity"):
        pin_threads(1)
        return (0,), ()
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    ours, theirs = (cores[half:], cores[:half]) if half else (cores, cores)
    ours = ours[: len(theirs)]
    os.sched_setaffinity(0, ours)
    pin_threads(len(ours))
    return tuple(ours), tuple(theirs)


def _draw(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.figures:
        from ..benchmarks import figures

        for path in figures.draw(result, args.figures, args.output.stem):
            print(path, file=sys.stderr)

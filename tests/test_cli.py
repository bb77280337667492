"""The `moa` command: help, errors, `moa generate` on a tiny target, and the terminal view."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_tokenizer, tiny_drafter, tiny_target
from transformers import PreTrainedTokenizerFast

from moa_spec.cli import COMMANDS, build_parser, main
from moa_spec.cli.generate import DEFAULT_PROMPT, read_prompt
from moa_spec.cli.trace_view import legend, pieces, render
from moa_spec.generation.trace import GenerationTrace, NodeTrace, RoundTrace


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a tiny target and a drafter for it."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target(vocab_size=257)
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_every_command_has_an_example() -> None:
    for command in COMMANDS:
        parser = build_parser([command])
        actions = [action for action in parser._actions if action.dest == "command"]
        text = actions[0].choices[command].format_help()
        assert f"moa {command}" in text.split("example:")[1]


def test_help_does_not_wait_for_torch() -> None:
    program = "import sys; sys.argv = ['moa', '--help']; from moa_spec.cli import main\n"
    program += "try: main()\nfinally: print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False False\n")
    assert all(command in result.stdout for command in COMMANDS)


def test_generate_json(capsys: pytest.CaptureFixture[str], folders: list[str]) -> None:
    arguments = ["--json", "--max-new-tokens", "20", "--repeats", "2", *folders]
    status, out, err = run(capsys, "generate", "Hello", *arguments)
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["identical"] is True
    assert len(result["token_ids"]) == 20
    assert result["text"] == byte_tokenizer().decode(result["token_ids"], skip_special_tokens=True)
    steps = result["acceptance_histogram"]
    assert sum(int(count) * rounds for count, rounds in steps.items()) == 19  # the prefill gave the first token
    assert result["target_calls"] == 1 + sum(steps.values())
    assert result["mean_accepted_tokens"] == pytest.approx(19 / sum(steps.values()))
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"])
    assert result["versions"]["transformers"].startswith("5.")


def test_generate_sampled_is_reproducible(capsys: pytest.CaptureFixture[str], folders: list[str]) -> None:
    arguments = ["--json", "--max-new-tokens", "12", "--repeats", "1", "--temperature", "1", "--seed", "3", *folders]
    first, second = (json.loads(run(capsys, "generate", "Hello", *arguments)[1]) for _ in range(2))
    assert first["identical"] is None
    assert first["token_ids"] == second["token_ids"]


def test_generate_terminal(capsys: pytest.CaptureFixture[str], folders: list[str]) -> None:
    arguments = ["--max-new-tokens", "20", "--repeats", "1", "--num-assistant-tokens", "3", *folders]
    status, out, _ = run(capsys, "generate", "Hello", *arguments)
    assert status == 0
    assert out.startswith(legend(colour=False))
    assert "\x1b" not in out  # standard output is no terminal here
    for part in ("tokens per target call", "x plain decoding", "the same tokens as plain decoding"):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "/nowhere/drafter"], "/nowhere/drafter"),
        (["--target", "/nowhere/target"], "/nowhere/target"),
        (["--max-new-tokens", "1000"], "context of 256"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], folders: list[str], arguments: list[str], message: str
) -> None:
    status, out, err = run(capsys, "generate", "Hello", *folders, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("moa generate: ")
    assert err.count("\n") == 1
    assert message in err
    with pytest.raises(Exception, match=message):
        main(["generate", "Hello", *folders, *arguments, "--debug"])


@pytest.mark.parametrize(
    "wrong", [["--top-p", "0"], ["--temperature", "-1"], ["--max-new-tokens", "0"], ["--repeats", "x"]]
)
def test_bad_numbers_are_refused_first(capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["generate", "Hello", *wrong])
    assert error.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_prompt_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_prompt("given") == "given"
    with pytest.raises(ValueError, match="prompt is empty"):
        read_prompt(" ")
    piped, end = os.pipe()
    os.write(end, b"from a pipe\n")
    os.close(end)
    with open(piped) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert read_prompt(None) == "from a pipe"
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert read_prompt(None) == DEFAULT_PROMPT
    monkeypatch.setattr(sys, "stdin", io.StringIO("explicit"))
    assert read_prompt("-") == "explicit"


# -- the terminal view -------------------------------------------------------------------------------------------------


def hand_made() -> tuple[GenerationTrace, PreTrainedTokenizerFast, str]:
    """Three rounds: one draft kept and one not; a tree with two branches thrown away; a two-byte character that begins
    as an accepted draft and ends as the target's own token."""
    tokenizer = byte_tokenizer()

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def node(letter: int, parent: int, depth: int, kept: bool, probability: float = 0.5) -> NodeTrace:
        return NodeTrace(letter, parent, depth, probability, kept, "drafter")

    (a, b, c, x, y, z), (first, second) = ids("abcxyz"), ids("é")
    rounds = [
        RoundTrace(0, [node(b, -1, 1, True), node(x, 0, 2, False)], [b, c]),
        RoundTrace(0, [node(x, -1, 1, False, 0.6), node(y, -1, 1, False, 0.3), node(z, 0, 2, False)], [a]),
        RoundTrace(0, [node(first, -1, 1, True)], [first, second]),
    ]
    return GenerationTrace([4], [a], target_calls=4, rounds=rounds), tokenizer, "abcaé"


def test_view_marks_by_signs() -> None:
    trace, tokenizer, _ = hand_made()
    assert render(trace, tokenizer, colour=False) == "[a]b~x~[c]~xz~~y~[a][é]"


def test_view_holds_the_whole_text() -> None:
    trace, tokenizer, text = hand_made()
    assert "".join(piece for piece, kind in pieces(trace, tokenizer) if kind != "thrown") == text
    assert "\ufffd" not in render(trace, tokenizer, colour=False)


def test_view_with_colour_has_the_same_signs() -> None:
    trace, tokenizer, _ = hand_made()
    coloured = render(trace, tokenizer, colour=True)
    for code in ("\x1b[4;32m", "\x1b[1m", "\x1b[2;9;31m", "\x1b[0m"):
        assert code in coloured
        coloured = coloured.replace(code, "")
    assert coloured == render(trace, tokenizer, colour=False)


def test_line_breaks_stay_readable() -> None:
    tokenizer = byte_tokenizer()
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    trace = GenerationTrace([1], [newline], rounds=[])
    assert render(trace, tokenizer, colour=False) == "[⏎]\n"


def test_no_color(capsys: pytest.CaptureFixture[str], folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal there is colour, unless NO_COLOR is set."""
    arguments: Any = ["generate", "Hello", "--max-new-tokens", "4", "--repeats", "1", *folders]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in run(capsys, *arguments)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in run(capsys, *arguments)[1]

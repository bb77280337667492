"""Pulling a pushed drafter, each way in a fresh process: with moa_spec, without it, and from the command line."""

import copy
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import FakeHub
from hub_setting import TOKEN, local_hub, models
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moa_spec.hub.push import push_drafter
from moa_spec.modeling_moa import MoADrafterForCausalLM

REPO = "alice/tiny-moa"
PROMPT = [5, 9, 17, 23, 9, 17]


class Setting:
    """A local Hub that has a private drafter in two commits, and a target in a folder."""

    def __init__(self, hub: FakeHub, folder: Path, commit: str):
        self.hub, self.folder, self.commit = hub, folder, commit

    def run(self, script: str, home: str, **variables: str) -> dict[str, Any]:
        """Runs Python in a new process that knows the Hub, and returns what it prints last, as JSON."""
        path = self.folder / "script.py"
        names = {"REPO": REPO, "COMMIT": self.commit, "PROMPT": PROMPT}
        names |= {"TARGET": str(self.folder / "target"), "FOLDER": str(self.folder / "bundle")}
        path.write_text("".join(f"{name} = {value!r}\n" for name, value in names.items()) + script)
        done = self.process([str(path)], home, **variables)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    def process(self, arguments: list[str], home: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTEST"))}
        environment |= {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.folder / home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,  # not the checkout
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("pull")
    target, drafter = models(target_layer_inference=1, memory_hidden_state="add", draft_vocab_size=40)
    target.config._name_or_path = ""
    target.save_pretrained(folder / "target")
    words = {f"w{i}": i for i in range(3, 64)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(
        folder / "target"
    )
    with pytest.MonkeyPatch.context() as patch, local_hub(patch, folder) as hub:
        older = push_drafter(drafter, REPO, private=True)
        drafter.Ekv2E.bias.data += 1
        push_drafter(drafter, REPO)
        yield Setting(hub, folder, older.commit)


INSTALLED = """
import json, torch, moa_spec
from transformers import AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained(TARGET)
ids = torch.tensor([PROMPT])
plain = target.generate(ids, max_new_tokens=24, do_sample=False)
results = []
for cls in (moa_spec.MoADrafterForCausalLM, AutoModelForCausalLM):
    drafter = cls.from_pretrained(REPO)
    assert type(drafter) is moa_spec.MoADrafterForCausalLM
    moa_spec.attach(target, drafter)
    with moa_spec.record_trace() as trace:
        drafted = target.generate(
            ids, assistant_model=drafter, max_new_tokens=24, do_sample=False, draft_policy="fixed", draft_breadth=2
        )
    assert torch.equal(plain, drafted)
    results.append([[node.token for node in r.nodes] for r in trace.rounds])
    moa_spec.detach(target)
assert results[0] == results[1]
try:
    AutoModelForCausalLM.from_pretrained(REPO, token=False, cache_dir=TARGET + "-empty-cache")
except OSError as error:
    private = str(error)
print(json.dumps({"ids": drafted.tolist(), "drafts": results[0], "private": private}))
"""

REMOTE = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "moa_spec":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

target = AutoModelForCausalLM.from_pretrained(TARGET)
ids = torch.tensor([PROMPT])
plain = target.generate(ids, max_new_tokens=24, do_sample=False)

class Collected(BaseStreamer):
    def __init__(self):
        self.tokens = []
    def put(self, value):
        self.tokens += value.flatten().tolist()
    def end(self):
        pass

def pull(repo, **revision):
    drafter = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True, **revision)
    remote = {
        "custom_generate": repo, "trust_remote_code": True, "assistant_model": drafter, "max_new_tokens": 24,
        "do_sample": False, "draft_policy": "fixed", "draft_breadth": 2,
    } | revision
    streamer = Collected()
    first = target.generate(ids, streamer=streamer, **remote)
    assert streamer.tokens[-24:] == plain[0, -24:].tolist()
    trace_module = [m for name, m in sys.modules.items() if name.endswith("custom_generate.trace")][-1]
    with trace_module.record_trace() as trace:
        drafted = target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **remote)
    assert torch.equal(plain, first) and torch.equal(plain, drafted)
    assert torch.equal(plain, target.generate(ids, max_new_tokens=24, do_sample=False))  # the target is as it was
    return drafter, remote, drafted.tolist(), [[node.token for node in r.nodes] for r in trace.rounds]

def message(call, kind):
    try:
        call()
    except kind as error:
        return str(error)
"""

ONLINE = (
    REMOTE
    + """
drafter, remote, written, drafts = pull(REPO)

# transformers makes custom_generate the drafter's own generate too; that one still writes from a context
states = target(ids, use_cache=True, output_hidden_states=True)
layers = [states["cache"].layers[i] for i in drafter.config.lsa_layers]
memory = drafter.layer_states([l.keys for l in layers], [l.values for l in layers], states.hidden_states[-1])
last = states["cache"].layers[-1]
context = drafter.encode(ids, memory, torch.arange(ids.shape[1])[None], [(last.keys, last.values)])
longer = torch.cat([ids, states.logits[:, -1:].argmax(-1)], dim=1)
assert drafter.generate(longer, context=context, max_new_tokens=3, do_sample=False).shape[1] == longer.shape[1] + 3

shorter = AutoConfig.from_pretrained(TARGET, num_hidden_layers=2)
other = AutoModelForCausalLM.from_config(shorter)
errors = [
    message(lambda: target.generate(ids, **(remote | {"assistant_model": None})), ValueError),
    message(lambda: target.generate(ids, **(remote | {"num_beams": 2})), ValueError),
    message(lambda: target.generate(ids, **(remote | {"trust_remote_code": False})), ValueError),
    message(lambda: other.generate(ids, **remote), ValueError),
]
pinned, *_ = pull(REPO, revision=COMMIT)
assert not [name for name in sys.modules if name.startswith("moa_spec")]
biases = [float(d.Ekv2E.bias.mean()) for d in (drafter, pinned)]
print(json.dumps({"ids": written, "drafts": drafts, "errors": errors, "biases": biases}))
"""
)

OFFLINE = (
    REMOTE
    + """
results = [pull(REPO, revision=COMMIT), pull(FOLDER)]
assert not [name for name in sys.modules if name.startswith("moa_spec")]
print(json.dumps({"biases": [float(r[0].Ekv2E.bias.mean()) for r in results], "drafts": [r[3] for r in results]}))
"""
)


def test_with_and_without_moa_spec(setting: Setting) -> None:
    """The same tokens and the same drafts round by round: the code is the same, so the speed is. Then, without
    moa_spec: an older commit by its name, and both that commit and a plain folder without a connection."""
    installed = setting.run(INSTALLED, "installed")
    remote = setting.run(ONLINE, "remote")
    assert installed["ids"] == remote["ids"]
    assert installed["drafts"] == remote["drafts"]
    assert any(installed["drafts"])
    assert REPO in installed["private"]
    no_drafter, beams, trust, wrong = remote["errors"]
    assert "assistant_model=drafter" in no_drafter
    assert "num_beams=1" in beams
    assert "trust_remote_code=True" in trust
    assert "does not fit" in wrong
    newest, pinned = remote["biases"]
    assert newest == pytest.approx(pinned + 1)

    for name, content in setting.hub.files(REPO).items():
        (setting.folder / "bundle" / name).parent.mkdir(parents=True, exist_ok=True)
        (setting.folder / "bundle" / name).write_bytes(content)
    setting.hub.calls.clear()
    offline = setting.run(OFFLINE, "remote", HF_HUB_OFFLINE="1", HF_TOKEN="")
    assert not setting.hub.calls
    assert offline["biases"] == [pinned, newest]
    assert offline["drafts"][1] == installed["drafts"]


def test_command_line(setting: Setting) -> None:
    options = ["--target", str(setting.folder / "target"), "--drafter", REPO, "--drafter-revision", setting.commit]
    options += ["--max-new-tokens", "12", "--json"]
    main = "import sys; from moa_spec.cli import main; sys.exit(main(sys.argv[1:]))"
    done = setting.process(["-c", main, "generate", "w5 w9 w17", "--repeats", "1", *options], "command")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert len(result["token_ids"]) == 12
    assert result["drafter"] == REPO


def test_what_is_known_about_a_target_is_kept_between_calls() -> None:
    """Costs are measured once, not in every call; another drafter, or a detached one, is lent the parts anew."""
    from moa_spec.generation import generate as module

    target, first = models()
    _, second = models(head_norm=True)
    ids = torch.tensor([PROMPT])
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)

    def drafted(drafter: MoADrafterForCausalLM, model: PreTrainedModel = target) -> Any:
        written = module.generate(ids, model=model, assistant_model=drafter, max_new_tokens=12, do_sample=False)
        assert torch.equal(written, plain)
        return module._kept[model]

    kept = drafted(first)
    assert drafted(first) is kept
    assert drafted(second)[0].drafter is second
    kept = drafted(first)
    first.take_back()
    assert drafted(first) is not kept
    assert torch.equal(copy.deepcopy(target).generate(ids, max_new_tokens=12, do_sample=False), plain)
    key = weakref.ref(target)
    del target, drafted, first, second, kept
    gc.collect()
    assert key() is None

"""The demo's Results tab: every kind of file that `moa bench` writes, and files that are none."""

import json
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moa_spec.demo.charts import draw_groups
from moa_spec.demo.results_view import results_html

SESSION = {
    "git_revision": "0123456789abcdef",
    "started": "2026-01-02T03:04:05Z",
    "machine": {"gpu": None, "processor": "A & B", "cores": 2},
}


def figures(speedup: float, tau: float, acceptance: list[float]) -> dict[str, Any]:
    return {
        "speedup": [speedup, speedup - 0.1, speedup + 0.1],
        "tau": tau,
        "identical_rate": 1.0,
        "conditional_acceptance": acceptance,
    }


def run(**options: Any) -> dict[str, Any]:
    plain = figures(1.0, 1.0, [])
    return {
        "options": {"target": "T", "dtype": "float32", "temperature": 0, "threads": 2, "per_task": None} | options,
        "sessions": [SESSION],
        "complete": True,
        "summary": {
            "spec_bench/qa": {"plain": plain, "moa": figures(1.4, 1.9, [0.5]), "lookup": figures(0.9, 1.2, [0.2])},
            "spec_bench/rag": {"plain": plain, "moa": figures(1.8, 2.3, [0.7]), "lookup": figures(1.6, 2.0, [0.6])},
            "spec_bench": {"plain": plain, "moa": figures(1.6, 2.1, [0.6, 0.4]), "lookup": figures(1.2, 1.5, [0.4])},
        },
    }


def shown(tmp_path: Path, result: Any, name: str = "result") -> str:
    (tmp_path / f"{name}.json").write_text(json.dumps(result))
    page = results_html(tmp_path)
    ElementTree.fromstring(page)
    return page


def test_no_results_are_said_to_be_none(tmp_path: Path) -> None:
    assert "no benchmark results" in results_html(tmp_path / "results")


@pytest.mark.parametrize("content", ['{"summary": []}', "[]", "{", '{"link": 3, "options": {}, "sessions": [{}]}'])
def test_damaged_files_are_said_to_be_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    assert "damaged" in results_html(tmp_path)


def test_a_run(tmp_path: Path) -> None:
    page = shown(tmp_path, run())
    assert "T, float32, greedy, all questions, A &amp; B, 2 threads, revision 0123456789ab, 2026-01-02." in page
    assert (
        "<td>1.60x (1.50x to 1.70x)</td><td>2.10</td><td>100.0%</td><td>1.40x / 1.90</td><td>1.80x / 2.30</td>" in page
    )
    words = unescape("".join(text for text in ElementTree.fromstring(page).itertext()))
    assert "moa: qa 1.40, rag 1.80, all 1.60; lookup: qa 0.90, rag 1.60, all 1.20" in words
    assert "moa: 1 60%, 2 40%; lookup: 1 40%" in words


def test_a_quick_run_and_one_that_is_not_complete(tmp_path: Path) -> None:
    page = shown(tmp_path, run(per_task=1) | {"complete": False})
    assert "1 question per task" in page
    assert "Not complete" in page


def test_engine(tmp_path: Path) -> None:
    goals = [{"goal": "fast", "limit": 0.1, "measured": 0.05, "met": True}]
    goals += [{"goal": "small", "limit": 3, "measured": None, "met": None}]
    result = {"options": {"target": "T"}, "sessions": [SESSION], "engine": {"float32": {"goals": goals}}}
    page = shown(tmp_path, result)
    assert "fast (float32)</th><td>0.1</td><td>0.050</td><td>yes</td>" in page
    assert "not measured" in page


def test_client_and_server(tmp_path: Path) -> None:
    over = {"tokens_per_second": 9.0, "first_token_seconds": 0.2, "bytes_up": 30.0, "bytes_down": 400.0}
    link = {
        "4g": {
            "stream": over | {"calls_per_100_tokens": None, "exact": 1.0},
            "moa": over | {"tokens_per_second": 12.0, "calls_per_100_tokens": 51.5, "exact": 1.0},
        },
        "slow4g": {"moa": over | {"calls_per_100_tokens": 40.0, "exact": None}},
    }
    page = shown(tmp_path, {"options": {"target": "T", "dtype": "float32"}, "sessions": [SESSION], "link": link})
    assert "4g, moa</th><td>12.0</td><td>200 ms</td><td>51.5</td><td>30.0</td><td>400.0</td><td>100.0%</td>" in page
    assert "stream: 4g 9; moa: 4g 12, slow4g 9" in page


def test_offline(tmp_path: Path) -> None:
    writer = {"kept_share": [0.25, 0.2, 0.3], "kept": [4.0, 3.0, 5.0], "repetition": [0.1, 0.0, 0.2]}
    offline = {"32": {"prompts": 9, "writers": {"moa": writer, "lookup": writer | {"kept": None}}, "ahead": {}}}
    page = shown(tmp_path, {"options": {"target": "T"}, "sessions": [SESSION], "offline": offline})
    assert "32, moa</th><td>25.0% (20.0% to 30.0%)</td><td>4.0 (3.0 to 5.0)</td><td>10% (0% to 20%)</td>" in page


def test_the_project_s_own_results_are_shown() -> None:
    folder = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
    page = results_html(folder)
    ElementTree.fromstring(page)
    assert "damaged" not in page
    assert page.count("<h3>") == len(list(folder.glob("*.json")))


def test_bars_of_nothing() -> None:
    assert "nothing was measured" in draw_groups("Title", ["a"], {"x": [None]})

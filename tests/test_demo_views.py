"""The demo's views: from traces to marked tokens, pictures and charts, without a model or a page."""

import re
from html import unescape
from xml.etree import ElementTree

import pytest
from tiny import byte_tokenizer, prompt, tiny_drafter, tiny_target

from moa_spec import attach, record_trace
from moa_spec.demo.charts import acceptance_by_depth, draw_acceptance, draw_lengths, seconds_table
from moa_spec.demo.marks import KINDS, STRUCK, legend, render, visible
from moa_spec.demo.tree_picture import boxes, draw
from moa_spec.generation.marks import GONE, MarkedText, rejected_branches, text_after
from moa_spec.generation.trace import GenerationTrace, NodeTrace, RoundTrace

TOKENIZER = byte_tokenizer()


def token(letter: str) -> int:
    return TOKENIZER.encode(letter)[0]


def node(
    letter: str, parent: int, depth: int, kept: bool, probability: float = 0.5, origin: str = "drafter"
) -> NodeTrace:
    return NodeTrace(token(letter), parent, depth, probability, kept, origin)  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


TREE = RoundTrace(
    0,
    [
        node("a", -1, 1, True, 0.7),
        node("x", -1, 1, False, 0.2),
        node("b", 0, 2, True, 0.6, "lookup"),
        node("y", 0, 2, False, 0.3),
        node("z", 2, 3, False, 0.4),
        node("\n", 4, 4, False, 0.9),
    ],
    ids("abc"),
    0.01,
    0.03,
    0.005,
)


def marked(rounds: list[RoundTrace], first: str = "S") -> MarkedText:
    text = MarkedText(TOKENIZER)
    text.catch_up(GenerationTrace(first_tokens=ids(first), rounds=rounds))
    text.finish()
    return text


def test_every_token_has_its_kind_and_stands_in_its_place() -> None:
    shown = [(mark.text, mark.kind, mark.round) for mark in marked([TREE]).marks]
    assert shown == [
        ("S", "own", 0),
        ("a", "accepted", 1),
        ("b", "lookup", 1),
        ("z", "rejected", 1),
        ("\n", "rejected", 1),
        ("y", "rejected", 1),
        ("c", "own", 1),
    ]


def test_other_rows_of_a_batch_are_left_out() -> None:
    other = RoundTrace(1, [], ids("Q"))
    assert [mark.text for mark in marked([other, RoundTrace(0, [], ids("k"))]).marks] == ["S", "k"]


def test_catching_up_in_steps_is_the_same_as_at_once() -> None:
    generation = GenerationTrace(first_tokens=ids("S"))
    text = MarkedText(TOKENIZER)
    text.catch_up(GenerationTrace())
    assert text.marks == []
    for _ in range(3):
        text.catch_up(generation)
        generation.rounds.append(TREE)
    text.catch_up(generation)
    assert text.marks == marked([TREE] * 3).marks
    assert text.rounds == 3


def test_a_character_of_several_tokens_appears_when_it_is_complete() -> None:
    first, second = ids("é")
    rounds = [RoundTrace(0, [NodeTrace(first, -1, 1, 0.5, True, "drafter")], [first, second])]
    assert [(mark.text, mark.kind) for mark in marked(rounds).marks] == [("S", "own"), ("", "accepted"), ("é", "own")]


def test_a_character_that_never_became_complete_is_shown_at_the_end() -> None:
    marks = marked([RoundTrace(0, [], [ids("é")[0]])]).marks
    assert marks[-1].text == "\ufffd"


def test_special_tokens_have_names_and_add_no_text() -> None:
    end = TOKENIZER.eos_token_id
    text = marked([RoundTrace(0, [NodeTrace(end, -1, 1, 0.5, False, "drafter")], [end])])
    assert [(mark.text, mark.special) for mark in text.marks] == [("S", ""), ("<end>", ""), ("", "<end>")]
    assert "&lt;end&gt;" in render(text.marks)
    assert "<end>" not in render(text.marks)


def test_real_traces_spell_the_answer() -> None:
    target = tiny_target(vocab_size=257)
    drafter = tiny_drafter(target)
    attach(target, drafter)
    start = prompt(12)
    for options in ({"draft_breadth": 3, "draft_nodes": 9}, {"prompt_lookup_num_tokens": 4}):
        with record_trace() as trace:
            answer = target.generate(
                start, assistant_model=drafter, max_new_tokens=40, do_sample=False, draft_policy="fixed", **options
            )
        text = MarkedText(TOKENIZER)
        text.catch_up(trace.generations[0])
        text.finish()
        assert text.token_ids == answer[0, 12:].tolist()
        spelled = "".join(mark.text for mark in text.marks if mark.kind != "rejected")
        assert spelled == TOKENIZER.decode(text.token_ids, skip_special_tokens=True)
        assert any(mark.kind == "rejected" for mark in text.marks)
        for number, entry in enumerate(trace.rounds, start=1):
            picture = draw(entry, number, "r", lambda before, new: text_after(TOKENIZER, before, new))
            ElementTree.fromstring(picture)


def test_the_branch_that_left_last_comes_first() -> None:
    assert rejected_branches(TREE.nodes) == [[4, 5], [3], [1]]
    assert rejected_branches([]) == []


def test_html_tells_kinds_apart_by_class_and_strikes_out() -> None:
    page = render(marked([TREE]).marks)
    assert '<del class="moa-token moa-rejected"' in page
    for kind in KINDS:
        assert f"moa-{kind}" in page
        assert KINDS[kind].split(" (")[0] in unescape(legend(KINDS))
    assert "drafter&#x27;s probability 70%" in page


def test_what_is_gone_is_struck_through() -> None:
    assert STRUCK == GONE


def test_a_thrown_away_character_of_several_tokens_is_put_together() -> None:
    first, second = ids("é")
    tree = [NodeTrace(first, -1, 1, 0.5, False, "drafter"), NodeTrace(second, 0, 2, 0.5, False, "drafter")]
    assert [mark.text for mark in marked([RoundTrace(0, tree, ids("c"))]).marks] == ["S", "", "é", "c"]


def test_thrown_away_branches_are_told_apart() -> None:
    branches = [(mark.text, mark.branch) for mark in marked([TREE]).marks if mark.kind == "rejected"]
    assert branches == [("z", 0), ("\n", 0), ("y", 1)]
    assert render(marked([TREE]).marks).count("moa-other") == 1


def test_html_escapes_and_keeps_the_characters_of_the_answer() -> None:
    text = MarkedText(TOKENIZER)
    text.add_own(ids('<b> "&"\n\tx'))
    page = render(text.marks)
    assert "<b>" not in page
    assert page.count("moa-break") == page.count("moa-tab") == 1
    root = ElementTree.fromstring(page)
    assert "".join(root.itertext()) == '<b> "&"\n\tx'


def test_a_thrown_away_line_break_does_not_break_the_line() -> None:
    page = render([mark for mark in marked([TREE]).marks if mark.kind == "rejected"])
    assert "moa-break" in page
    assert "\n" not in page


@pytest.mark.parametrize(
    ("text", "shown"), [(" a\n", "␣a⏎"), ("\t", "⇥"), ("", "∅"), ("\x00\x1b\x7f\x85", "␀␛␡\ufffd")]
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_text_of_a_draft_depends_on_what_stands_before() -> None:
    first, second = ids("é")
    assert text_after(TOKENIZER, ids("caf"), first) == "\ufffd"
    assert text_after(TOKENIZER, [], token("k")) == "k"
    assert text_after(TOKENIZER, [first], second) in ("é", "\ufffd")


def text_of(before: list[int], new: int) -> str:
    return text_after(TOKENIZER, before, new)


def test_tree_layout() -> None:
    shown = boxes(TREE, "S", text_of)
    assert [(box.text, box.kind, box.column, box.parent) for box in shown] == [
        ("S", "root", 0, -1),
        ("a", "accepted", 1, 0),
        ("x", "rejected", 1, 0),
        ("b", "lookup", 2, 1),
        ("y", "rejected", 2, 1),
        ("z", "rejected", 3, 3),
        ("\n", "rejected", 4, 5),
        ("c", "own", 3, 3),
    ]
    assert len({(box.column, box.row) for box in shown}) == len(shown)  # no two in one place
    path = [shown[index].row for index in (0, 1, 3, 7)]
    assert path == [0, 0, 0, 0]  # what was kept is the top line


def test_tree_picture_says_what_it_shows() -> None:
    root = ElementTree.fromstring(draw(TREE, 7, "S", text_of))
    words = "".join(next(root.iter("desc")).itertext())
    assert "After “S”, 6 tokens were drafted." in words
    assert "Kept: “a” (70%), “b” (60% lookup)." in words
    assert "“⏎” (90%, depth 4)" in words
    assert "own token: “c”" in words
    assert next(root.iter("svg")).get("role") == "img"
    drawn = "".join(root.itertext())
    assert "✓ 70%" in drawn
    assert "✗ 30%" in drawn


def test_tree_picture_of_a_plain_step_and_of_a_stop_inside_the_draft() -> None:
    plain = draw(RoundTrace(0, [], ids("c")), 1, "S", text_of)
    assert "0 tokens were drafted. None was kept. None was thrown away." in plain
    stopped = RoundTrace(0, [node("a", -1, 1, True)], ids("a"))
    assert "Decoding stopped inside the draft." in draw(stopped, 1, "S", text_of)


def test_tree_picture_escapes() -> None:
    picture = draw(RoundTrace(0, [node("<", -1, 1, False), node("&", 0, 2, False)], ids('"')), 1, "<s>", text_of)
    assert "<s>" not in picture
    ElementTree.fromstring(picture)


def test_acceptance_by_depth() -> None:
    chain = [node("a", -1, 1, True), node("b", 0, 2, False)]
    rounds = [
        TREE,  # accepted 2 of depth 4
        RoundTrace(0, chain, ids("ac")),  # accepted 1 of depth 2
        RoundTrace(0, [node("x", -1, 1, False)], ids("c")),  # accepted 0 of depth 1
        RoundTrace(0, [], ids("c")),  # drafted nothing
    ]
    found = [(a.depth, a.judged, a.accepted) for a in acceptance_by_depth(rounds)]
    assert found == [(1, 3, 2), (2, 2, 1), (3, 1, 0)]
    assert acceptance_by_depth(rounds[3:]) == []
    root = ElementTree.fromstring(draw_acceptance(rounds))
    assert "depth 1: 67% of 3; depth 2: 50% of 2; depth 3: 0% of 1" in "".join(root.itertext())
    assert "Nothing was drafted" in draw_acceptance(rounds[3:])


def test_lengths_over_time() -> None:
    rounds = [TREE, RoundTrace(0, [], ids("c"))]
    picture = draw_lengths(rounds)
    root = ElementTree.fromstring(picture)
    assert len(re.findall('class="moa-bar"', picture)) == 2
    assert "2 rounds, 2.00 tokens on average, at most 3: 3, 1" in "".join(root.itertext())
    assert "no round" in draw_lengths([])


def test_seconds() -> None:
    table = seconds_table([TREE, TREE])
    assert "0.06 s</td><td>67%" in table
    assert "0.02 s</td><td>22%" in table
    ElementTree.fromstring(table)
    assert "0%" in seconds_table([])

"""Words for numbers, shapes and answers."""

from __future__ import annotations

import pytest

from tests.tui_debugger.scripted import document
from tests.whole import whole
from tui_debugger import format as fmt


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "—"),
        (0.0, "0"),
        (1e-9, "1e-09"),
        (0.012304687, "0.0123"),
        (1536, "1,536"),
        ("nan", "nan"),
        ("-inf", "-inf"),
        (True, "true"),
    ],
)
def test_numbers_are_short_and_never_lie_about_small_ones(value: object, text: str) -> None:
    assert fmt.number(value) == text


def test_the_sentence_of_a_divergence() -> None:
    assert fmt.comparison_answer(document("comparison")).sentence == (
        "DIFF first at layers.0.self_attn.o_proj.inputs.0 · step 0 rank 0 micro 0 · sample 1 position 0 · "
        "a=0.0123 b=-0.0456 · origin layers.0.self_attn"
    )


def test_what_went_wrong_among_the_ranks_is_the_answer_and_the_tensor_is_where_it_shows() -> None:
    first = whole({**document("comparison")})
    fault = {
        "kind": "not summed",
        "ranks": [0, 1],
        "factor": None,
        "sentence": "the gradient is not summed over 0 and 1",
    }
    faults = [
        {**fault, "name": "grad.norm", "step": 0, "tensors": 3},
        {**fault, "name": "grad.q", "step": 0, "tensors": 1},
    ]
    first["parallel"] = {"of": "b", "ranks": [0, 1], "parted": [], "sentence": None, "faults": faults}
    answer = fmt.comparison_answer(first)
    assert (answer.where, answer.is_claim, answer.token) == (fault["sentence"], True, "first")
    assert answer.facts[:2] == ["and 1 cause more", "first at layers.0.self_attn.o_proj.inputs.0"]


def test_nothing_compared_is_never_called_the_same() -> None:
    empty = whole({"kind": "comparison", "counts": {"total": 3, "MISSING": 3}})
    assert fmt.comparison_answer(empty).word == "NONE"


def test_left_out_tensors_are_said() -> None:
    partly = whole({"kind": "comparison", "counts": {"total": 3, "SAME": 2, "skipped": 1}})
    answer = fmt.comparison_answer(partly)
    assert answer.word == "PARTLY"
    assert "1 not compared" in answer.where


def test_names_are_cut_in_the_middle() -> None:
    name = "model.layers.17.self_attn.o_proj.inputs.0"
    cut = fmt.middle(name, 24)
    assert len(cut) == 24
    assert cut.startswith("model.")
    assert cut.endswith("inputs.0")


@pytest.mark.parametrize(
    ("name", "width", "said"),
    [
        ("param.model.layers.1.self_attn.q_proj.weight", 31, "param…1.self_attn.q_proj.weight"),
        ("param.model.layers.1.mlp.up_proj.weight", 60, "param.model.layers.1.mlp.up_proj.weight"),
        ("layers.0.post_attention_layernorm.output", 28, "layers.0.…n_layernorm.output"),
        ("trajectories.extra_fields.group_id", 23, "trajecto…ields.group_id"),
    ],
)
def test_a_cut_name_keeps_the_number_of_its_layer(name: str, width: int, said: str) -> None:
    assert len(fmt.dotted(name, width)) <= width
    assert fmt.dotted(name, width) == said


@pytest.mark.parametrize(("reasons", "phrase"), [
    (["bitwise equal", "bitwise equal"], "everything bitwise SAME"),
    (["bitwise equal", "equal in all 4 elements compared"], "everything SAME"),
    ([], "everything SAME"),
])  # fmt: skip
def test_bitwise_is_said_only_where_every_pair_is_so(reasons: list[str], phrase: str) -> None:
    rows = [{"verdict": "SAME", "reason": reason} for reason in reasons]
    held = whole({"kind": "comparison", "counts": {"SAME": len(rows) or 2}, "tensors": rows})
    assert fmt.comparison_answer(held).where == phrase


def test_a_name_is_cut_by_the_columns_it_takes_not_by_its_letters() -> None:
    wide = "层" * 30 + ".weight"
    for cut in (fmt.middle, fmt.end, fmt.dotted):
        for width in (3, 10, 11, 40):
            assert fmt.cells(cut(wide, width)) <= width, (cut, width)
    assert fmt.middle(wide, 20).endswith(".weight")
    assert fmt.middle("层" * 5, 10) == "层" * 5


def test_the_greatest_difference_has_its_own_place_beside_the_one_shown() -> None:
    metrics = {"max_abs": 5.3, "worst_token": {"sample": 0, "position": 0, "rel_l2": 1.0}}
    shown = {"metrics": metrics, "index": {"sample": 0, "position": 7, "raw_a": [0, 7]}}
    assert (fmt.greatest(shown), fmt.shown_as(shown)) == ("s0 p7", "greatest")
    furthest = {"index": {"sample": 4, "position": 4, "raw_a": [4, 4]}}
    apart = {**shown, "greatest": furthest}
    assert (fmt.greatest(apart), fmt.shown_as(apart)) == ("s4 p4", "first")
    assert fmt.shown_as({**apart, "metrics": {**metrics, "nonfinite_mismatched": 1}}) == "not finite"
    assert fmt.element_at(furthest) == "at 4,4 (s4 p4)"
    assert fmt.greatest({"index": {"sample": None, "position": None, "raw_a": [3, 4]}}) == "[3,4]"
    assert fmt.greatest({"metrics": metrics}) == "s0 p0"
    assert fmt.greatest({"index": {"raw_a": []}}) == ""

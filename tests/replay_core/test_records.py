from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.errors import SelectionError
from replay_core.export.documents import marks
from replay_core.records import Problem, Record, RecordKey, Run, Selection

NUMBERS = st.integers(0, 50)


@given(st.lists(NUMBERS, min_size=1, max_size=5), NUMBERS)
def test_a_list_selects_its_numbers(numbers: list[int], asked: int):
    selection = Selection.parse(",".join(map(str, numbers)))
    assert selection.has(asked) == (asked in numbers)
    assert not selection.has(None)


@given(NUMBERS | st.none(), NUMBERS | st.none(), NUMBERS)
def test_a_span_selects_like_a_python_slice(start: int | None, end: int | None, asked: int):
    selection = Selection.parse(f"{'' if start is None else start}:{'' if end is None else end}")
    assert selection.has(asked) == (asked in range(100)[slice(start, end)])


def test_all_selects_everything_even_what_has_no_number():
    assert Selection.parse("all").has(None)
    assert Selection.parse(" all ").has(10**30)
    assert Selection.parse("none").has(None)
    assert not Selection.parse("none").has(0)
    assert not Selection.parse("0").has(None)


@pytest.mark.parametrize("text", ["", "x", "1:2:3", "1,", "1.5", "0x1", "-", ":x", "all,1", "[0]"])
def test_other_texts_are_refused_with_the_forms_there_are(text: str):
    with pytest.raises(SelectionError, match="cannot read the selection") as caught:
        Selection.parse(text)
    assert "0:4" in str(caught.value)


def run_of(*keys: RecordKey) -> Run:
    return Run(Path("/dump"), "test", [Record(key, Path("/dump/file"), lambda: []) for key in keys])


def test_a_selection_of_nothing_names_what_there_is():
    run = run_of(*(RecordKey(step, micro, 0, stage="loss") for step in (0, 1, 2, 7) for micro in (0, 1)))
    with pytest.raises(SelectionError) as caught:
        run.select(step=Selection.parse(5), micro=Selection.parse("0,1"))
    assert caught.value.found == "step 5 micro 0,1"
    assert caught.value.expected == "one of step 0..2, 7; rank 0; micro 0..1; stage loss"


def test_a_part_a_record_lacks_matches_every_selection_but_the_steps():
    run = run_of(RecordKey(3), RecordKey(None, 1))
    assert [record.key.step for record in run.select(rank=Selection.parse(9))] == [3, None]
    assert [record.key.step for record in run.select(step=Selection.parse(3), micro=Selection.parse(4))] == [3]


@pytest.mark.parametrize(
    "asked",
    [{"rank": "5"}, {"rank": "0,1,5"}, {"rank": "2:9"}, {"micro": "-1"}, {"step": "0,3"}, {"rank": "1", "micro": "2"}],
)
def test_a_number_that_is_nowhere_is_refused_though_other_records_match(asked: dict[str, str]):
    keys = [RecordKey(0, micro, rank) for rank in (0, 1) for micro in (0, 1)]
    run = run_of(*keys, RecordKey(0, 2, 0), RecordKey(0), RecordKey(1))
    chosen: dict[str, Any] = {part: Selection.parse(text) for part, text in asked.items()}
    with pytest.raises(SelectionError):
        run.select(**chosen)


def test_a_span_may_reach_beyond_what_there_is():
    run = run_of(RecordKey(0, 0, 0), RecordKey(0, 0, 1), RecordKey(0))
    assert len(run.select(rank=Selection.parse("0:64"), micro=Selection.parse("0:"))) == 3


def test_epoch_and_minibatch_explain_a_record_without_naming_it():
    assert RecordKey(1, 2, epoch=0) == RecordKey(1, 2, epoch=5)
    key = RecordKey(1, 2, 0, "ref", "values", epoch=3, minibatch=4)
    again = RecordKey.from_mapping(key.to_mapping())
    assert (again, again.epoch, again.minibatch) == (key, 3, 4)


@given(
    st.permutations(
        [RecordKey(s, m, r, stage=g) for s in (0, None) for m in (0, 1) for r in (0, 1) for g in ("loss", "datums")]
    )
)
def test_keys_sort_by_step_micro_stage_then_rank(keys: list[RecordKey]):
    ordered = sorted(keys, key=lambda key: key.order)
    assert [key.step for key in ordered] == [None] * 8 + [0] * 8
    assert [(key.micro, key.stage, key.rank) for key in ordered[8:]] == [
        (micro, stage, rank) for micro in (0, 1) for stage in ("datums", "loss") for rank in (0, 1)
    ]


def test_a_problem_is_found_by_the_record_it_is_about(tmp_path: Path):
    def record(step: int, rank: int, stage: str = "loss") -> Record:
        path = tmp_path / f"{stage}_{step}_{rank}.pt"
        return Record(RecordKey(step, 0, rank, "actor", stage), path, list)

    records = [record(step, rank) for step in (0, 1) for rank in (0, 1)] + [record(0, 0, "param")]
    of_file = Problem(str(records[1].path), "cut short")
    of_line = Problem(f"{records[2].path}:7", "no JSON")
    of_place = Problem(str(tmp_path), "micro 1 of rank 0 is missing", RecordKey(1, None, 0, None, "loss"))
    of_run = Problem(str(tmp_path), "the dump is odd")
    run = Run(tmp_path, "x", records, [of_file, of_line, of_place, of_run])
    assert marks(run) == {1: [0], 2: [1, 2]}
    about = [[problem for problem in run.problems if problem.is_about(record)] for record in run.records]
    assert about == [[], [of_file], [of_line, of_place], [], []]


def test_an_error_names_the_numbers_that_are_missing() -> None:
    record = Record(RecordKey(1, 0, 0, "forward_data"), Path("/x"), lambda: [])
    run = Run(Path("/x"), "native", [record])
    with pytest.raises(SelectionError) as refused:
        run.select(step=Selection.parse("1,9"))
    assert refused.value.found == "step 9"
    with pytest.raises(SelectionError) as refused:
        run.select(step=Selection.parse("1"), micro=Selection.parse("0,4,5"))
    assert refused.value.found == "step 1 micro 4,5"

"""How a race is judged, and whether what the labelled experiment says of its bugs is so. Races run by `make bench`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import zoo
from benchmarks.harmless import HARMLESS
from benchmarks.planted import BUGS, Bug
from benchmarks.racing import Result, Side, child, race
from benchmarks.referee import cases, held_out
from tests.builders import compare_paths


def result(ours_s: float, theirs_s: float, *, bar: float | None, load: float = 0.0) -> Result:
    return Result("row", Side("ours", int, ours_s, ours_s), Side("theirs", int, theirs_s, theirs_s), bar, load)


def test_the_ratio_is_how_often_ours_fits_into_theirs():
    assert result(0.5, 2.0, bar=4).ratio == 4
    assert result(0.5, 2.0, bar=4).verdict == "PASS"
    assert result(0.5, 1.9, bar=4).verdict == "MISSED"


def test_a_busy_machine_is_not_measurable_and_never_a_pass():
    assert result(0.5, 2.0, bar=4, load=(os.cpu_count() or 1) + 0.5).verdict == "not measurable"


def test_a_row_without_a_bar_says_so():
    assert result(0.5, 2.0, bar=None).verdict == "no bar"


def test_every_limit_beside_the_ratio_counts():
    within, beyond = result(0.5, 2.0, bar=4), result(0.5, 2.0, bar=4)
    within.limits.append(("MiB", 299.0, 300.0))
    beyond.limits.append(("MiB", 301.0, 300.0))
    assert (within.verdict, beyond.verdict) == ("PASS", "MISSED")


def test_a_limit_that_could_not_be_measured_is_no_pass():
    unknown = result(0.5, 2.0, bar=4)
    unknown.limits.append(("MiB", float("nan"), 300.0))
    assert unknown.verdict == "MISSED"


def test_both_sides_run_in_turn_after_one_round_that_does_not_count():
    order: list[str] = []
    race("row", Side("a", lambda: order.append("a")), Side("b", lambda: order.append("b")), bar=1, rounds=2)
    assert order == ["a", "b"] * 3


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_childs_peak_memory_is_its_own():
    """Not what this process held when it forked."""
    held = bytearray(300 << 20)
    small = child([sys.executable, "-c", "import time; time.sleep(0.2)"], expect=0)
    large = child([sys.executable, "-c", "import time; x = bytearray(b'1') * (200 << 20); time.sleep(0.2)"], expect=0)
    assert len(held) > small * 2**20
    assert small < 100
    assert 200 < large < 300


def test_a_child_that_fails_is_an_error_with_its_words():
    with pytest.raises(RuntimeError, match="exit 3\nbroken"):
        child([sys.executable, "-c", "import sys; sys.stderr.write('broken'); sys.exit(3)"], expect=0)


def test_the_experiment_holds_half_of_its_bugs_out_and_has_every_case_once() -> None:
    every = cases(quick=False)
    assert len({str(case) for case in every}) == len(every)
    assert {case.bug for case in every} == {None, *(bug.name for bug in BUGS)}
    assert {case.change for case in every if case.bug is None} == {change.name for change in HARMLESS}
    assert (len(BUGS), len(HARMLESS)) >= (40, 20)
    assert len(held_out()) == len(BUGS) // 2
    assert set(cases(quick=True)) <= set(every)


@pytest.fixture(scope="module")
def animals(tmp_path_factory: pytest.TempPathFactory) -> zoo.Zoo:
    return zoo.Zoo(tmp_path_factory.mktemp("weights"))


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_shows_first_where_it_says(bug: Bug, animals: zoo.Zoo, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):  # some bugs need a half precision
        for architecture in zoo.ARCHITECTURES:
            running = animals.running(architecture, "random", dtype, 5)
            where = bug.plant(running)
            if where is None:
                continue
            zoo.record(tmp_path / "b", running, dtype)
            clean = animals.running(architecture, "random", dtype, 5)
            clean.layout = running.layout
            zoo.record(tmp_path / "a", clean, dtype)
            first = compare_paths(tmp_path / "a", tmp_path / "b", exact=True).first
            assert first is not None
            assert first.name.startswith(where.first()), (architecture, first.name, where)
            return
    raise AssertionError("no architecture has it")

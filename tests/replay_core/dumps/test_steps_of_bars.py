"""Lines of metrics that stand behind a bar of steps: the bar numbers them."""

from __future__ import annotations

from pathlib import Path

from replay_core.dumps import open_run


def _steps(folder: Path, *lines: str) -> dict[int | None, list[str]]:
    file = folder / "train.log"
    file.write_text("\n".join(lines) + "\n")
    run = open_run(file)
    return {one.key.step: [ref.name for ref in one.tensors()] for one in run.records}


def _bar(at: int, **more: float) -> str:
    return f" {5 * at}%|###   | {at}/20 [00:0{at % 10}<00:40,  3.20s/it]" + str(
        {"loss": 0.5 / at, "grad_norm": 1.0, **more}
    )


def test_a_line_has_the_step_of_its_bar(tmp_path: Path) -> None:
    found = _steps(tmp_path, _bar(1), _bar(2), _bar(3))
    assert list(found) == [1, 2, 3]
    assert list(_steps(tmp_path, _bar(5), _bar(10), _bar(15))) == [5, 10, 15]


def test_what_the_log_tells_beside_it_goes_with_its_step(tmp_path: Path) -> None:
    died = ("Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: no such thing")
    found = _steps(tmp_path, _bar(12), _bar(13), *died)
    assert list(found) == [12, 13]
    assert any(name.startswith("event.") for name in found[13])


def test_an_evaluation_goes_with_the_step_before_it(tmp_path: Path) -> None:
    found = _steps(tmp_path, _bar(12), _bar(13), str({"eval_loss": 0.3, "eval_runtime": 2.0}), _bar(14))
    assert list(found) == [12, 13, 14]
    assert "eval_loss" in found[13]


def test_steps_are_counted_where_a_line_has_no_bar_or_the_bar_begins_again(tmp_path: Path) -> None:
    assert list(_steps(tmp_path, _bar(1), str({"loss": 0.5, "grad_norm": 1.0}), _bar(3))) == [0, 1, 2]
    assert list(_steps(tmp_path, _bar(4), _bar(5), _bar(4))) == [0, 1, 2]
    loading = "Loading weights: 50%|##  | 2/4 [00:01<00:01,  1.00it/s]" + str({"loss": 0.5, "grad_norm": 1.0})
    assert list(_steps(tmp_path, loading, loading.replace("2/4", "3/4"))) == [0, 1]


def test_bars_that_are_drawn_before_their_rows_give_no_step_past_their_end(tmp_path: Path) -> None:
    lines = "".join(
        "".join(f"\r {at}%|##   | {5 * at + each}/50 [00:10<01:00, 2.0s/it]" for each in range(1, 6))
        + f"\n{{'loss': 0.{at % 7 + 1}, 'grad_norm': 0.4}}\n"
        for at in range(10)
    )
    (tmp_path / "train.log").write_text(lines)
    steps = [record.key.step or 0 for record in open_run(tmp_path / "train.log").records]
    assert len(steps) == 10
    assert max(steps) <= 50

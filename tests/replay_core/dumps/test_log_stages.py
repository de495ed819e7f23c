"""Several runs and stages in one text log, answers that are printed with their rewards, rows a terminal has broken."""

from math import isnan
from pathlib import Path

from replay_core.dumps.opening import open_run
from replay_core.records import Run


def _read(folder: Path, text: str) -> Run:
    path = folder / "train.log"
    path.write_text(text)
    return open_run(path)


def _values(run: Run, name: str) -> list[object]:
    return [ref.source.value for one in run.records for ref in one.tensors() if ref.name == name]  # type: ignore[union-attr]


def _sweep(runs: int, steps: int = 6) -> str:
    return "".join(
        f"[sweep] starting run {run}\n"
        + "".join(f"[Step {n}/{steps}] loss=0.{run}{n} reward=0.{run}5 grad=0.2\n" for n in range(1, steps + 1))
        for run in range(1, runs + 1)
    )


def test_of_several_runs_in_one_log_the_last_is_read_and_that_is_said(tmp_path: Path) -> None:
    run = _read(tmp_path, _sweep(3))
    assert run.steps() == [1, 2, 3, 4, 5, 6]
    assert _values(run, "reward") == [0.35] * 6
    assert "the log holds 3 runs one after another (lines 2, 9, 16): the last is read" in " ".join(run.notes)


def test_steps_that_go_back_but_once_are_one_run(tmp_path: Path) -> None:
    run = _read(tmp_path, _sweep(1) + "[Step 1/6] loss=0.9 reward=0.9 grad=0.2\n")
    assert not any("runs one after another" in note for note in run.notes)
    assert _values(run, "reward")[0] == 0.15


def test_epochs_that_number_their_own_steps_are_one_run(tmp_path: Path) -> None:
    text = "".join(f"Epoch {e} [Step {n}/6] loss=0.5 reward=0.{e}5\n" for e in (1, 2, 3) for n in range(1, 7))
    assert not any("runs one after another" in note for note in _read(tmp_path, text).notes)


def _run(steps: int, reward: str = "0.25", loss: str = "0.5", bad: range = range(0)) -> str:
    return "".join(
        f"{{'step': {n}, 'loss': {'nan' if n in bad else loss}, 'reward': {reward}}}\n" for n in range(1, steps + 1)
    )


def test_what_is_not_finite_in_an_earlier_run_stays_told_at_its_line(tmp_path: Path) -> None:
    run = _read(tmp_path, _run(8, bad=range(5, 7)) + _run(8))
    told = [ref for one in run.records for ref in one.tensors() if ref.name == "loss"]
    assert [ref.line for ref in told if isnan(ref.source.value)] == [5, 6]  # type: ignore[union-attr]
    assert "2 runs one after another (lines 1, 9): they are read as one" in " ".join(run.notes)


def test_what_is_not_finite_in_an_earlier_run_of_a_console_stays_told(tmp_path: Path) -> None:
    text = _sweep(2).replace("loss=0.15", "loss=nan")
    assert sum(map(isnan, _values(_read(tmp_path, text), "loss"))) == 1  # type: ignore[arg-type]


def test_a_remnant_of_a_run_is_not_read_in_place_of_a_longer_one(tmp_path: Path) -> None:
    assert len(_read(tmp_path, _run(20) + _run(4)).steps()) == 20


def test_a_run_that_was_ended_and_begun_again_is_no_run_beside_another(tmp_path: Path) -> None:
    end = "slurmstepd: error: *** STEP 1.0 ON node1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
    run = _read(tmp_path, (_run(50) + end) * 3 + _run(30))
    assert not any("runs one after another" in note for note in run.notes)
    assert len(run.steps()) == 50


def test_epochs_whose_headings_stand_alone_are_numbered_on(tmp_path: Path) -> None:
    text = "".join(f"===== Epoch {e}/3 =====\n" + _run(6, f"0.{e}5") for e in (1, 2, 3))
    run = _read(tmp_path, text)
    assert run.steps() == list(range(1, 19))
    assert _values(run, "reward") == [0.15] * 6 + [0.25] * 6 + [0.35] * 6
    assert "3 epochs one after another (lines 2, 9, 16)" in " ".join(run.notes)


def test_console_epochs_whose_headings_stand_alone_are_numbered_on(tmp_path: Path) -> None:
    text = _sweep(3).replace("[sweep] starting run", "*** Epoch")
    assert _read(tmp_path, text).steps() == list(range(1, 19))


def test_settings_before_the_first_run_hold_for_the_last(tmp_path: Path) -> None:
    run = _read(tmp_path, "{'lr': 1e-06, 'beta': 0.1}\n".replace("{", "config: {") + _run(6) + "beta = 0.5\n" + _run(6))
    assert (run.facts["lr"], run.facts["beta"]) == (1e-6, 0.5)


def test_an_evaluation_that_numbers_its_own_batches_is_no_run(tmp_path: Path) -> None:
    train = "".join(f"[Step {n}/9] loss=0.5 reward=0.25 grad=0.2 clip=0.1\n" for n in range(1, 10))
    held = "".join(f"[Step {n}/4] eval_acc=0.5 seen={n}\n" for n in range(1, 5))
    assert not any("runs one after another" in note for note in _read(tmp_path, train + held).notes)


_DEMONSTRATIONS = (
    "".join(
        f"{{'loss': 0.{7 - n}, 'grad_norm': 4.0, 'learning_rate': 1e-05, 'entropy': 1.1, 'epoch': {n}.5}}\n"
        for n in range(5)
    )
    + "{'train_runtime': 412.0, 'train_loss': 0.3, 'epoch': 5.0}\nINFO: starting GRPO\n"
)


def _paid(count: int, epoch: float = 0.0) -> str:
    return "".join(
        f"{{'loss': 0.01, 'grad_norm': 0.{n + 1}, 'reward': 0.{n + 1}, 'reward_std': 0.2, 'entropy': 0.4, "
        f"'epoch': {epoch + n / 100:.2f}}}\n"
        for n in range(count)
    )


def test_demonstrations_before_the_first_reward_are_no_part_of_the_curve(tmp_path: Path) -> None:
    run = _read(tmp_path, _DEMONSTRATIONS + _paid(6))
    assert run.steps() == [0, 1, 2, 3, 4, 5]
    assert _values(run, "entropy") == [0.4] * 6
    assert not any("finished" in ref.name for one in run.records for ref in one.tensors())
    assert "lines 1 to 5 are of a stage without rewards, before line 8" in " ".join(run.notes)


def test_demonstrations_with_numbers_that_are_not_finite_are_not_left_out(tmp_path: Path) -> None:
    run = _read(tmp_path, _DEMONSTRATIONS.replace("'loss': 0.4", "'loss': nan") + _paid(6))
    assert len(run.steps()) == 11


def test_demonstrations_that_are_most_of_a_log_are_not_left_out(tmp_path: Path) -> None:
    assert len(_read(tmp_path, _DEMONSTRATIONS + _paid(2)).steps()) == 7


def test_a_first_line_without_a_reward_is_no_stage(tmp_path: Path) -> None:
    run = _read(tmp_path, "{'loss': 0.1, 'grad_norm': 0.2, 'epoch': 0.0}\n" + _paid(6, 0.1))
    assert len(run.steps()) == 7


def test_epochs_that_begin_anew_with_the_same_figures_are_said(tmp_path: Path) -> None:
    run = _read(tmp_path, _paid(6) + _paid(6))
    assert len(run.steps()) == 12
    assert "epochs begin anew at line 7: 2 runs or stages are read as one curve" in " ".join(run.notes)


_ANSWER = (
    "Generation:  It is {0}.\n"
    "Metrics:  {{'format_reward': 1.0, 'answer_reward': {1}, 'reward': {1}}}\n"
    "GT Answer:  {0}\n---\n"
)


def test_answers_that_are_printed_with_what_they_earned_are_no_steps(tmp_path: Path) -> None:
    answers = "".join(_ANSWER.format(n, float(n % 2)) for n in range(3))
    run = _read(tmp_path, (_paid(3) + answers) * 2)
    assert len(run.steps()) == 6
    assert not _values(run, "answer_reward")
    assert "6 rows of rewards beside a true answer are samples" in " ".join(run.notes)


def test_several_answers_for_each_row_of_a_loss_are_no_steps_whatever_they_earned(tmp_path: Path) -> None:
    answers = "".join(_ANSWER.format(n, 0.125 * n) for n in range(3))
    assert len(_read(tmp_path, (_paid(1) + answers) * 4).steps()) == 4


def test_mean_rewards_of_steps_beside_one_printed_truth_each_are_read(tmp_path: Path) -> None:
    row = "Target: 42\n{{'reward': 0.{0}, 'format_reward': 0.{0}5}}\n{{'loss': 0.121, 'grad_norm': 0.3{0}}}\n"
    run = _read(tmp_path, "".join(row.format(n) for n in range(1, 7)))
    assert _values(run, "reward") == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def test_mean_rewards_that_are_always_zero_are_read_beside_a_printed_truth(tmp_path: Path) -> None:
    row = "Target: 42\n{{'reward': 0.0}}\n{{'loss': 0.121, 'grad_norm': 0.3{0}}}\n"
    assert _values(_read(tmp_path, "".join(row.format(n) for n in range(1, 7))), "reward") == [0.0] * 6


def test_rewards_alone_without_a_truth_beside_them_are_steps(tmp_path: Path) -> None:
    run = _read(tmp_path, "".join(f"{{'format_reward': 1.0, 'reward': 0.{n}}}\n" for n in range(1, 6)))
    assert len(run.steps()) == 5


def test_a_row_that_a_terminal_broke_before_a_comma_or_a_colon_is_one_row(tmp_path: Path) -> None:
    head = "{'loss': 0.0029, 'grad_norm': 0.209, 'completions/min_length': 366.0"
    tail = ", 'completions/max_length': 384.0, 'rewards/reward_format/std'\n: 0.32, 'reward': -1.75, 'epoch': 0.04}\n"
    run = _read(tmp_path, (head + "\n" + tail) * 3)
    assert _values(run, "reward") == [-1.75] * 3
    assert _values(run, "rewards/reward_format/std") == [0.32] * 3

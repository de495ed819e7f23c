"""What logs tell that trainers of many kinds wrote: rollouts of several updates, pairs, evaluations, warm-ups, data."""

from __future__ import annotations

from math import log, nan
from pathlib import Path
from typing import Any

import pytest

from replay_core.diagnose.signal_names import named
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from replay_core.dumps.console_lines import console_line
from replay_core.dumps.told_lines import key_of
from replay_core.errors import RldbgError
from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, only, told, verl, worrying, written


def _wave(n: int, of: float = 1.0) -> float:
    """Noise that no random number makes."""
    return of * (((n * 37 + 11) % 23) / 22 - 0.5)


def _ids(folder: Path, text: str) -> set[str]:
    return {one.id for one in worrying(diagnosed(folder, text))}


def _slime(rollouts: int, updates: int) -> str:
    """A policy that gets surer, whose samples are its own; several updates of each rollout."""
    lines = []
    for n in range(rollouts):
        entropy = 1.0 - 0.8 * n / rollouts
        lines.append(
            f"rollout {n}: {{'rollout/log_probs': {-entropy + _wave(n, 0.02)}, 'rollout/raw_reward': "
            f"{0.3 + 0.004 * n}}}"
        )
        for m in range(updates):
            at = n * updates + m
            told = {"train/loss": 0.01 + _wave(at, 0.01), "train/entropy_loss": entropy, "train/grad_norm": 0.4,
                    "train/step": at}  # fmt: skip
            lines.append(f"step {at}: {told}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("updates", [1, 2, 8])
def test_a_rollout_stands_beside_the_first_of_its_updates(tmp_path: Path, updates: int) -> None:
    found = diagnosed(tmp_path, _slime(60, updates))
    assert "L33" not in {one.id for one in found.findings}
    assert any("first of their updates" in note for note in found.notes) == (updates > 1)


def test_what_a_console_says_of_an_evaluation_is_no_figure_of_the_step() -> None:
    step, values = console_line("step 20 loss 0.01 acc 99.0% lr 1e-2   || val loss 2.5 val acc 60.8%")
    assert step == 20
    assert values["loss"] == 0.01
    assert values["val loss"] == 2.5
    assert console_line("[eval] step 40: reward 0.5") == (40, {"eval/reward": 0.5})
    assert console_line("rank 0/4 | EVAL it 0010 | acc 0.07 | len 2.0") == (10, {"eval/acc": 0.07, "eval/len": 2.0})
    assert console_line("[09:12:05] rank 2/4 | it 0003 | loss +0.01 | R 0.25")[0] == 3
    assert console_line("step=3 reward=0.25±0.41 loss=0.1")[1] == {"reward": 0.25, "loss": 0.1}
    signals = {raw: known.signal for raw in ("val loss", "val acc", "test acc") if (known := named(raw)) is not None}
    assert signals == {"val loss": "held_out_loss", "val acc": "held_out", "test acc": "held_out"}


def test_a_loss_that_is_printed_as_0_overfits_all_the_same(tmp_path: Path) -> None:
    lines = [
        f"step {n} loss {max(0.0, 0.7 - 0.02 * n):.4f} acc 99.0%"
        + (f" || val loss {0.6 + n / 50:.4f}" if n % 20 == 0 else "")
        for n in range(1, 161)
    ]  # fmt: skip
    assert told(diagnosed(tmp_path, "\n".join(lines)))[0] == ("L20", "warning")


def test_deepspeed_chat_says_the_reward_beside_its_moving_mean(tmp_path: Path) -> None:
    def said(n: int) -> str:
        reward = 3.0 - 0.25 * n if n < 12 else -0.02
        return (
            f"Epoch: 0 | Step: {n} | PPO Epoch: 1 | Actor Loss: {0.02 + _wave(n, 0.05)} | Critic Loss: 0.0 | "
            f"Unsupervised Loss: 0.0\nAverage reward score: {reward} | EMA reward score: {reward}\n"
        )

    found = only(diagnosed(tmp_path, "".join(map(said, range(100)))), "L08")
    assert found.severity == "warning"
    assert "average_reward_score falls" in found.claim


def test_a_reward_that_is_lost_early_is_told_and_one_that_wavers_is_not(tmp_path: Path) -> None:
    def said(reward: Any) -> str:
        return "".join(f"step={n} reward={reward(n):.4f} loss={_wave(n, 0.1):.4f}\n" for n in range(100))

    assert "L08" in _ids(tmp_path, said(lambda n: 2.0 - 0.2 * n if n < 10 else 0.0))
    assert "L08" not in _ids(tmp_path, said(lambda n: 0.4 + _wave(n, 0.3)))


@pytest.mark.parametrize("line", [
    "WARNING reward_client.py:88] request to http://10.2.0.7:8000/score timed out after 30.0s, score set to 0.0 "
    "[repeated 12x across cluster]",
    "grader: HTTP 503, using zero reward for sample 3 [repeated 12x across cluster]",
    "no answer from the judge in time: returning reward 0.0 [repeated 12x across cluster]",
])  # fmt: skip
def test_zeros_for_want_of_a_score_lead_and_ray_says_how_often(tmp_path: Path, line: str) -> None:
    text = []
    for n in range(80):
        text += [f"(RewardWorker pid=4411) {line}"] if n > 40 else []
        text.append(verl([{"critic/score/mean": 0.3 if n <= 40 else max(0.02, 0.3 - 0.01 * (n - 40))}], n + 1).strip())
    found = diagnosed(tmp_path, "\n".join(text) + "\n")
    assert found.findings[0].id in ("L73", "L29")
    assert found.findings[0].severity == "warning"
    once = line.replace(" [repeated 12x across cluster]", "")
    few = [verl([{}], n + 1).strip() for n in range(80)]
    few.insert(40, f"(RewardWorker pid=4411) {once}")
    assert "L73" not in _ids(tmp_path, "\n".join(few) + "\n")


def test_a_score_that_is_no_0_is_no_zero() -> None:
    for line in ("format is right: returning reward 0.5", "score set to 0.25 by the length penalty"):
        assert key_of(line) is None
    assert key_of("no answer: returning reward 0.0") == "rewards.zeroed"


def test_steps_whose_answers_all_earn_one_reward_explain_their_loss_of_0(tmp_path: Path) -> None:
    def said(n: int, paid: float) -> str:
        alike = n > 20 and n % 4
        reward, loss = (paid, 0.0) if alike else (0.5 + _wave(n, 0.4), 0.03)
        return f"step {n} | loss {loss:.4f} | grad_norm {0.3 if loss else 0.0:.4f} | reward {reward:.4f}\n"

    for paid, severity in ((0.96, "info"), (0.0, "warning")):
        found = only(diagnosed(tmp_path, "".join(said(n, paid) for n in range(80))), "L01")
        assert found.severity == severity


def _megatron(lost: bool, held: bool = True, other_data: bool = False) -> str:
    lines = []
    for n in range(1, 161):
        since = n - 81 if n > 80 and (lost or other_data) else n
        loss = 1.0 + 1.6 * 2.7 ** (-since / 25) + _wave(n, 0.05)
        lines.append(
            f" [2026-10-14 09:12:05] iteration {n:8d}/     160 | consumed samples: {n * 16:8d} | learning rate: "
            f"1.0E-05 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {0.4 + _wave(n, 0.1):.3f} |"
        )
        if held and n % 20 == 0:
            told = 1.0 + 1.6 * 2.7 ** (-(since if lost else n) / 25)
            lines.append(f" validation loss at iteration {n} | lm loss value: {told:.6E} | lm loss PPL: 2.7E+00 | ")
    return "\n".join(lines) + "\n"


def test_demonstrations_that_are_learnt_anew_are_first_weights(tmp_path: Path) -> None:
    for held in (True, False):
        found = only(diagnosed(tmp_path, _megatron(lost=True, held=held)), "L24")
        assert "starts again at step 81" in found.claim
    assert not _ids(tmp_path, _megatron(lost=False))
    # What the weights know of held-out texts they have not lost: the texts of the training are others.
    assert "L24" not in _ids(tmp_path, _megatron(lost=False, other_data=True))


def _pairs(right: Any, held: Any = None, loss: Any = None) -> str:
    lines = []
    for n in range(120):
        told = {
            "loss": 0.6931 if n == 0 else loss(n) if loss is not None else 0.6 + _wave(n, 0.05), "grad_norm": 0.5,
            "rewards/chosen": 0.1, "rewards/rejected": -0.1 + _wave(n, 0.01), "rewards/accuracies": right(n),
            "rewards/margins": right(n) - 0.5, "logps/chosen": -9.0 + _wave(n), "logps/rejected": -10.0 + _wave(n + 3),
            "learning_rate": 1e-6, "step": n + 1,
        }  # fmt: skip
        lines.append(str(told))
        if held is not None and n % 20 == 19:
            lines.append(str({"eval_loss": held(n), "eval_runtime": 3.0, "step": n + 1}))
    return "\n".join(lines) + "\n"


def test_pairs_that_are_turned_around_fall_below_a_coin_at_once(tmp_path: Path) -> None:
    turned = only(diagnosed(tmp_path, _pairs(lambda n: (0.8 if n < 60 else 0.2) + _wave(n, 0.2))), "L69")
    assert "from step 61 on" in turned.claim
    assert turned.severity == "warning"
    for healthy in (lambda n: 0.8 + _wave(n, 0.3), lambda n: 0.8 - 0.3 * (n > 60) + _wave(n, 0.2)):
        assert "L69" not in _ids(tmp_path, _pairs(healthy))


def test_held_out_pairs_that_stay_a_coins_are_told(tmp_path: Path) -> None:
    def fades(n: int) -> float:
        return 0.69 - 0.0004 * n

    found = only(diagnosed(tmp_path, _pairs(lambda n: 0.64 + _wave(n, 0.1), lambda n: 0.7 + n / 1e4, fades)), "L47")
    assert "told apart no better than by a coin" in found.claim
    assert "L47" not in _ids(tmp_path, _pairs(lambda n: 0.64 + _wave(n, 0.1), lambda n: 0.69 - n / 1e3, fades))


def test_a_loss_of_ln_2_with_no_pair_right_is_one_score_for_both(tmp_path: Path) -> None:
    lines = [
        str({"loss": round(log(2), 4), "accuracy": 0.0, "margin": 0.0, "mean_reward": 0.0, "step": n})
        for n in range(1, 60)
    ]
    found = diagnosed(tmp_path, "\n".join(lines))
    assert told(found)[0] == ("L46", "error")


def _warm(reward: Any, kl: float) -> str:
    return "".join(
        f"step={n} reward={reward(n):.4f} kl={kl * n / 100:.6f} lr={5.7e-7 * n:.3e} loss={_wave(n, 0.01):.4f}\n"
        for n in range(1, 101)
    )


def test_a_warm_up_in_which_nothing_moves_is_told(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, _warm(lambda n: 0.25 + _wave(n, 0.2), 0.002)), "L07")
    assert found.severity == "warning"
    assert "nothing is learnt yet" in found.claim
    learns = diagnosed(tmp_path, _warm(lambda n: 0.25 + 0.004 * n + _wave(n, 0.1), 0.2))
    assert "L07" not in {one.id for one in worrying(learns)}


def _areal(age: Any, apart: Any) -> str:
    lines = ["max_head_offpolicyness=1"]
    for n in range(1, 61):
        told = {"ppo_actor/update/version_stats/sample_staleness/avg": age(n), "ppo_actor/update/behave_approx_kl/avg":
                apart(n), "ppo_actor/task_reward/avg": 0.3 + _wave(n, 0.1), "ppo_actor/update/entropy/avg": 0.9,
                "ppo_actor/update/grad_norm": 0.4}  # fmt: skip
        lines.append(f"step:{n} - " + " - ".join(f"{name}:{value}" for name, value in told.items()))
    return "\n".join(lines) + "\n"


def test_samples_that_get_ever_older_are_told_by_either_name_of_their_age(tmp_path: Path) -> None:
    assert "D31" in _ids(tmp_path, _areal(lambda n: float(n // 6), lambda n: -0.01 * n))
    assert "D31" not in _ids(tmp_path, _areal(lambda n: min(n, 1.0), lambda n: 1e-4))


def test_what_parts_fresh_samples_at_first_is_told_though_it_fades(tmp_path: Path) -> None:
    fades = _areal(lambda n: 0.0, lambda n: -0.05 * 2.7 ** (-n / 30))
    assert "in the first steps" in only(diagnosed(tmp_path, fades), "D09").claim
    assert "D09" not in _ids(tmp_path, _areal(lambda n: 0.0, lambda n: _wave(n, 0.002)))


def _nemo(length: Any, accuracy: Any, cut: float = 0.0) -> str:
    lines = []
    for n in range(1, 81):
        told = {"loss": _wave(n, 0.01), "reward": 0.2 + 0.005 * n + _wave(n, 0.05), "truncated_ratio": 0.02,
                "response_length": 3.5 + _wave(n, 0.2)}  # fmt: skip
        if n % 10 == 0:
            told |= {"eval/accuracy": accuracy(n), "eval/response_length/mean": length(n), "eval/truncated_ratio": cut}
        lines.append(f"step:{n} - " + " - ".join(f"{name}:{value}" for name, value in told.items()))
    return "\n".join(lines) + "\n"


def test_held_out_answers_that_all_end_at_a_limit_are_told(tmp_path: Path) -> None:
    stands = only(diagnosed(tmp_path, _nemo(lambda n: 3.0, lambda n: 0.44 + _wave(n, 0.01))), "L75")
    assert "all end at 3 tokens" in stands.claim
    cut = only(diagnosed(tmp_path, _nemo(lambda n: 3.0 + _wave(n, 0.1), lambda n: 0.4 + _wave(n, 0.01), 0.8)), "L75")
    assert "80% of the held-out answers are cut" in cut.claim
    for healthy in (
        _nemo(lambda n: 3.4 + _wave(n, 0.1), lambda n: 0.3 + 0.005 * n),
        _nemo(lambda n: 2.0, lambda n: 0.3 + 0.005 * n),
    ):
        assert "L75" not in _ids(tmp_path, healthy)


def _asked(passes: Any, again: int | None) -> str:
    lines = []
    for n in range(100):
        at = n - again if again is not None and n >= again else n
        told = {"prompt_length/mean": 90 + 0.25 * ((at * 53 + 7) % 97), "prompt_length/max": 140.0 + (at * 29) % 31,
                "prompt_length/min": 40.0 + (at * 13) % 7, "critic/score/mean": 0.4 + 0.003 * n + _wave(n, 0.05),
                "training/epoch": passes(n)}  # fmt: skip
        lines.append(verl([told], n + 1))
    return "".join(lines)


def test_data_that_is_read_from_its_beginning_within_a_pass_is_told(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, _asked(lambda n: 0, 60)), "L76")
    assert found.severity == "warning"
    assert "from step 61 on" in found.claim
    assert only(diagnosed(tmp_path, _asked(lambda n: None, 60)), "L76").severity == "info"
    assert only(diagnosed(tmp_path, _asked(lambda n: nan, 60)), "L76").severity == "info"
    for normal in (_asked(lambda n: n // 60, 60), _asked(lambda n: 0, None)):
        assert "L76" not in {one.id for one in diagnosed(tmp_path, normal).findings}


def test_a_bonus_that_outweighs_the_reward_leads_before_the_kl_that_it_makes(tmp_path: Path) -> None:
    def said(n: int) -> dict[str, float]:
        entropy = min(2.3, 1.0 + 0.1 * n) + _wave(n, 0.01)
        return {"loss": -0.35 * entropy, "entropy": entropy, "kl": 2.3 + _wave(n * 5, 0.6) if n > 2 else 0.06,
                "reward": max(0.0, 0.3 - 0.05 * n), "grad_norm": 0.3}  # fmt: skip

    lines = [str({**said(n), "step": n + 1}) for n in range(60)]
    found = diagnosed(tmp_path, "\n".join(lines))
    assert "entropy" in found.findings[0].claim
    assert "L10" not in {one.id for one in worrying(found)}


def test_a_validation_that_stands_where_the_reward_stands_is_no_frozen_one(tmp_path: Path) -> None:
    def said(reward: Any) -> str:
        return "".join(
            verl([{"critic/score/mean": reward(n), "actor/entropy": 1.4 - 0.002 * n + _wave(n, 0.01),
                   "val-core/a/acc/mean@1": 0.073 if n % 10 == 0 else None}], n + 1)
            for n in range(90)
        )  # fmt: skip

    assert "D116" not in _ids(tmp_path, said(lambda n: 0.08 + _wave(n, 0.1)))
    assert {"D116", "L25"} & _ids(tmp_path, said(lambda n: 0.2 + 0.005 * n + _wave(n, 0.1)))


def test_lines_of_several_ranks_that_number_iterations_are_one_step(tmp_path: Path) -> None:
    lines = [
        f"[09:12:{n % 60:02d}] rank {rank}/4 | it {n:04d} | loss {_wave(n, 0.02):+.4f} | "
        f"R {0.08 + _wave(n + rank, 0.1):.3f}"
        for n in range(90) for rank in (1, 0, 3, 2)
    ]  # fmt: skip
    found = diagnosed_path(written(tmp_path, "\n".join(lines)))
    assert not found.notes
    assert all("360" not in one.claim for one in found.findings)


def _curve(folder: Path, name: str, line: Any, head: str = "") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + "".join(line(n) for n in range(1, 41)))


def test_a_folder_of_one_runs_curves_is_one_run(tmp_path: Path) -> None:
    for name in ("train/reward", "train/loss", "eval/accuracy"):
        _curve(tmp_path / "run", f"metrics/{name}", lambda n: f"{1700000000000 + n} {2.0 - 0.05 * n} {n}\n")
    (tmp_path / "run" / "meta.yaml").write_text("run_id: 5bd\n")
    assert "L08" in {one.id for one in worrying(diagnosed_path(tmp_path / "run"))}
    for name in ("train_reward", "train_loss"):
        _curve(tmp_path / "board", f"run-grpo_1-tag-{name}.csv", lambda n: f"17e8,{n},{2.0 - 0.05 * n}\n",
               "Wall time,Step,Value\n")  # fmt: skip
    signals = Signals.of(open_run(tmp_path / "board"))
    assert signals is not None
    (log_of_it,) = signals.logs
    assert {series.name for series in log_of_it.signals()} == {"train_reward", "train_loss"}


def test_curves_of_several_runs_side_by_side_are_not_laid_over_each_other(tmp_path: Path) -> None:
    for run in ("a", "b"):
        _curve(tmp_path / "mlruns", f"{run}/metrics/reward", lambda n: f"{1700000000000 + n} 0.5 {n}\n")
        _curve(tmp_path / "board", f"run-{run}-tag-reward.csv", lambda n: f"17e8,{n},0.5\n", "Wall time,Step,Value\n")
    for folder in ("mlruns", "board"):
        with pytest.raises(RldbgError):
            diagnosed_path(tmp_path / folder)


def test_the_bar_of_an_updates_batches_is_no_first_step(tmp_path: Path) -> None:
    def said(n: int) -> str:
        bar = f"act_loss={_wave(n, 0.1):.3g}, reward=0.4, kl={0.18 + n / 1e3:.3g}"
        return (
            f"(PolicyModelActor pid=9) Train epoch [1/1]: 100%|██████████| 2/2 [00:06<00:00,  3.0s/it, {bar}]\n"
            f"(PPOTrainer pid=3) ✨ Global step {n}: {{'policy_loss': {_wave(n, 0.1)}, "
            f"'reward': {0.4 + _wave(n, 0.1)}, 'kl': {0.18 + n / 1e3}, 'actor_grad_norm': {0.4 + _wave(n, 0.2)}}}\n"
        )

    found = diagnosed(tmp_path, "".join(map(said, range(61, 111))))
    assert "D15" not in {one.id for one in found.findings}
    # A bar that is handed every step's figures is all there is, whatever is said once at the end.
    bars = "".join(
        f"GRPO: {n}%|█| {n}/80 [00:41<22:10, 13.7s/it, loss={_wave(n, 0.1):.3f}, reward={2 - n / 40:.3f}]\n"
        for n in range(1, 81)
    )
    assert "L08" in _ids(tmp_path, bars + "{'train_runtime': 300.0, 'train_loss': 0.01}\n")


def test_counts_of_groups_are_no_held_out_results() -> None:
    assert named("val/all_zero_reward_groups") is None
    assert (of_sets := named("val/gsm8k/reward")) is not None
    assert of_sets.signal == "held_out"


@pytest.mark.parametrize("form", ["before", "behind", "own line"])
def test_rows_have_the_steps_of_the_bars_that_are_drawn_beside_them(tmp_path: Path, form: str) -> None:
    def said(n: int) -> str:
        bar = f" {n}%|█▏        | {n}/120 [{n:02d}:11<29:02, 44.69s/it]"
        row = str({"loss": _wave(n, 0.1), "reward": 0.3 + _wave(n, 0.2), "learning_rate": 1e-6, "epoch": n / 400})
        if form == "before":
            return f"\r {n - 1}%|█▏        | {n - 1}/120 [10:11<29:02, 44.69s/it]\r{bar}\r{' ' * 40}\r{row}\n"
        return f"{row}\n{bar}\n" if form == "behind" else f"{row}\r{bar}\r\n"

    text = "".join(map(said, range(62, 121, 2)))
    signals = Signals.of(open_run(written(tmp_path, text)))
    assert signals is not None
    (log_of_it,) = signals.logs
    reward = log_of_it.get("reward")
    assert reward is not None
    assert [point.step for point in reward.points] == [*range(62, 121, 2)]
    assert not log_of_it.is_counted
    # The last bar of a run that was ended is not drawn any more.
    cut = written(tmp_path, text[: text.rindex("}") + 1] + "\n", "cut.log")
    assert max(record.key.step or 0 for record in open_run(cut).records) == 120


def test_bars_of_an_evaluation_number_no_step_of_training(tmp_path: Path) -> None:
    lines = []
    for n in range(20):
        lines.append(str({"loss": _wave(n, 0.1), "reward": 0.3, "epoch": n / 40}))
        lines.append(f" {n % 10}0%|█▏        | {n % 10 + 1}/12 [00:11<29:02, 44.69s/it]")
    assert open_run(written(tmp_path, "\n".join(lines))).notes


def test_a_validations_line_between_bars_names_what_it_is_of() -> None:
    step, values = console_line("valid | it 20 | strict acc 0.031 | len 9.4")
    assert (step, values) == (20, {"eval/strict acc": 0.031, "eval/len": 9.4})
    assert (strict := named("eval/strict acc")) is not None
    assert strict.signal == "held_out"

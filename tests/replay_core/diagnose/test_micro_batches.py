"""Losses, gradients and steps: rules that need what a trainer recorded of its micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of, why_skipped

LENGTHS = (3, 5, 4, 6)
ADVANTAGES = (1.0, -0.5, 0.25, -0.75)


def record(directory: Path, *, steps: int = 1, **changes: Any) -> Path:
    """A native dump: per step one micro-batch of four samples, prompts of two tokens, end token 9, padding 0.

    `changes`: `logged` names and values of the loss record; `fields(step, batch)` changes the forward's tensors;
    `norm`; `old`: whether old log-probabilities are recorded.
    """
    recorder = Recorder(directory, flags=changes.get("flags"))
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        width = 2 + max(LENGTHS)
        ids_BS = torch.randint(10, 30, (4, width), generator=draw)
        mask_BS = torch.zeros(4, width, dtype=torch.int64)
        for row, length in enumerate(LENGTHS):
            mask_BS[row, : 2 + length] = 1
            ids_BS[row, 1 + length] = 9
        ids_BS[mask_BS == 0] = 0
        response_BS = mask_BS.clone()
        response_BS[:, :2] = 0
        logprobs_BT = -torch.rand(4, width - 1, generator=draw) * 3
        batch: dict[str, Any] = {
            "input_ids": ids_BS,
            "attention_mask": mask_BS,
            "response_mask": response_BS,
            "advantages": torch.tensor(ADVANTAGES)[:, None] * response_BS[:, 1:],
            "log_probs": logprobs_BT,
            "old_log_probs": logprobs_BT.clone(),
        }
        if "fields" in changes:
            changes["fields"](step, batch)
        with recorder.step(step) as write:
            write("forward_data", {name: value for name, value in batch.items() if value is not None}, micro=0)
            if "logged" in changes:
                write("loss", {name: torch.tensor(value) for name, value in changes["logged"].items()}, micro=0)
            if "norm" in changes:
                write("gradient", grad_norm=torch.tensor(changes["norm"]))
    return directory


def token_sum() -> float:
    """-A over every response token, at ratio 1."""
    return -sum(advantage * length for advantage, length in zip(ADVANTAGES, LENGTHS, strict=True))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (token_sum() / sum(LENGTHS), "token-mean"),
        (-sum(ADVANTAGES) / 4 if sum(ADVANTAGES) else 1e-3, "seq-mean-token-mean"),
        (token_sum() / 4, "seq-mean-token-sum"),
    ],
)
def test_the_reduction_of_a_loss_is_named(value: float, name: str, tmp_path: Path) -> None:
    if name == "seq-mean-token-mean":  # these advantages are centred: give them a mean

        def fields(_step: int, batch: dict[str, Any]) -> None:
            batch["advantages"] = batch["advantages"] + 0.5 * batch["response_mask"][:, 1:]

        value = -(sum(ADVANTAGES) / 4 + 0.5)
        found = look(record(tmp_path / "run", logged={"pg_loss": value}, fields=fields), "D28")
    else:
        found = look(record(tmp_path / "run", logged={"pg_loss": value}), "D28")
    finding = of(found, "D28")
    assert finding is not None
    assert finding.severity == "info"
    assert finding.claim.startswith(f"pg_loss is {name}")


@pytest.mark.parametrize(
    ("stated", "severity"), [("token-mean", "warning"), ("", "info")], ids=["a mean is stated", "nothing is"]
)
def test_a_sum_over_tokens_where_a_mean_is_stated_is_told(stated: str, severity: str, tmp_path: Path) -> None:
    flags = {"loss_agg_mode": stated} if stated else {}
    finding = of(look(record(tmp_path / "run", logged={"pg_loss": token_sum()}, flags=flags), "D28"), "D28")
    assert finding is not None
    assert (finding.severity, "sum" in finding.claim) == (severity, True), finding.claim


def test_a_loss_that_recorded_importance_weights_enter_is_named(tmp_path: Path) -> None:
    def fields(_step: int, batch: dict[str, Any]) -> None:
        batch["rollout_is_weights"] = torch.linspace(0.5, 2, batch["log_probs"].numel()).reshape_as(batch["log_probs"])
        losses = -batch["advantages"] * batch["rollout_is_weights"]
        weighted.append(float(losses.sum() / batch["response_mask"].sum()))

    weighted: list[float] = []
    record(tmp_path / "measured", steps=1, fields=fields)
    found = look(record(tmp_path / "run", steps=1, logged={"pg_loss": weighted[0]}, fields=fields), "D28")
    finding = of(found, "D28")
    assert finding is not None
    assert (finding.severity, finding.claim) == ("info", "pg_loss is token-mean over the micro-batch")


def test_a_denominator_that_counts_padding_is_an_error(tmp_path: Path) -> None:
    slots = 4 * (2 + max(LENGTHS))
    finding = of(look(record(tmp_path / "run", logged={"pg_loss": token_sum() / slots}), "D28"), "D28")
    assert finding is not None
    assert finding.severity == "error"
    assert "padding" in finding.claim


def test_a_loss_that_is_no_reduction_is_a_warning(tmp_path: Path) -> None:
    finding = of(look(record(tmp_path / "run", logged={"pg_loss": 0.7321}), "D28"), "D28")
    assert finding is not None
    assert finding.severity == "warning"


def test_a_total_loss_that_agrees_with_nothing_is_skipped_since_it_may_hold_other_terms(tmp_path: Path) -> None:
    found = look(record(tmp_path / "run", logged={"loss": 0.7321}), "D28")
    assert not found.findings
    assert "other terms" in why_skipped(found, "D28")


@pytest.mark.parametrize(("off", "agrees"), [(0.5e-4, True), (2e-4, False)])
def test_a_loss_agrees_to_one_in_ten_thousand(off: float, agrees: bool, tmp_path: Path) -> None:
    value = token_sum() / sum(LENGTHS) * (1 + off)
    finding = of(look(record(tmp_path / "run", logged={"pg_loss": value}), "D28"), "D28")
    assert finding is not None
    assert (finding.severity == "info") is agrees


def test_a_displayed_zero_with_a_gradient_is_normal(tmp_path: Path) -> None:
    finding = of(look(record(tmp_path / "run", logged={"pg_loss": 1e-6}, norm=0.4), "D02"), "D02")
    assert finding is not None
    assert finding.severity == "info"
    assert not look(record(tmp_path / "other", logged={"pg_loss": 0.2}, norm=0.4), "D02").findings


def test_a_zero_gradient_beside_advantages_is_an_error(tmp_path: Path) -> None:
    finding = of(look(record(tmp_path / "run", norm=0.0), "D23"), "D23")
    assert finding is not None
    assert finding.severity == "error"
    assert not look(record(tmp_path / "other", norm=1e-12), "D23").findings


def test_a_zero_gradient_without_advantages_is_no_mystery(tmp_path: Path) -> None:
    def fields(_step: int, batch: dict[str, Any]) -> None:
        batch["advantages"] = batch["advantages"] * 0

    assert not look(record(tmp_path / "run", norm=0.0, fields=fields), "D23").findings


def _moved(by: float) -> Any:
    def fields(_step: int, batch: dict[str, Any]) -> None:
        sign = torch.ones_like(batch["log_probs"])
        sign[:, ::2] = -1
        batch["log_probs"] = batch["old_log_probs"] + by * sign

    return fields


def test_a_ratio_far_from_one_explodes(tmp_path: Path) -> None:
    finding = of(look(record(tmp_path / "run", fields=_moved(2.5)), "D24"), "D24")
    assert finding is not None
    assert finding.severity == "error"
    assert not look(record(tmp_path / "near", fields=_moved(0.1)), "D24").findings


@pytest.mark.parametrize(("by", "severity"), [(0.015, None), (0.025, "warning"), (0.3, "error")])
def test_the_first_update_has_ratio_one(by: float, severity: str | None, tmp_path: Path) -> None:
    finding = of(look(record(tmp_path / "run", fields=_moved(by)), "D14"), "D14")
    assert (finding.severity if finding else None) == severity


def test_in_fp32_the_first_update_is_held_to_less(tmp_path: Path) -> None:
    path = record(tmp_path / "run", fields=_moved(0.002), flags={"dtype": "float32"})
    assert of(look(path, "D14"), "D14") is not None


def _reference(apart: float) -> Any:
    def fields(_step: int, batch: dict[str, Any]) -> None:
        batch["ref_log_probs"] = batch["old_log_probs"] - apart

    return fields


@pytest.mark.parametrize(("apart", "severity"), [(0.5e-4, None), (1e-2, "info"), (0.8, "warning"), (1.5, "error")])
def test_policy_and_reference_begin_as_one(apart: float, severity: str | None, tmp_path: Path) -> None:
    finding = of(look(record(tmp_path / "run", fields=_reference(apart)), "D15"), "D15")
    assert (finding.severity if finding else None) == severity


def _rollout(at: dict[int, float]) -> Any:
    def fields(step: int, batch: dict[str, Any]) -> None:
        draw = torch.Generator().manual_seed(100 + step)
        off = torch.randn(batch["old_log_probs"].shape, generator=draw) * at[step]
        batch["rollout_log_probs"] = batch["old_log_probs"] + off

    return fields


def test_weights_that_stop_arriving_show_as_a_jump(tmp_path: Path) -> None:
    jump = {0: 0.004, 1: 0.004, 2: 0.2, 3: 0.25}
    finding = of(look(record(tmp_path / "run", steps=4, fields=_rollout(jump)), "D12"), "D12")
    assert finding is not None
    assert finding.steps == (2, 3)
    spike = {0: 0.004, 1: 0.004, 2: 0.2, 3: 0.004}
    assert not look(record(tmp_path / "spike", steps=4, fields=_rollout(spike)), "D12").findings
    slow = {0: 0.02, 1: 0.03, 2: 0.04, 3: 0.05}
    assert not look(record(tmp_path / "slow", steps=4, fields=_rollout(slow)), "D12").findings


def test_a_missing_micro_batch_is_named(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    for step in range(2):
        with recorder.step(step) as write:
            for micro in range(3):
                write("forward_data", micro=micro, log_probs=torch.zeros(2, 4))
    path = tmp_path / "run"
    assert not look(path, "D39").findings
    (path / "forward_data" / "step_000001_rank0_micro1.pt").unlink()
    finding = of(look(path, "D39"), "D39")
    assert finding is not None
    assert finding.severity == "warning"


def test_the_first_number_that_is_none_is_named_not_the_ones_after_it(tmp_path: Path) -> None:
    def fields(_step: int, batch: dict[str, Any]) -> None:
        batch["advantages"][1, 2] = float("nan")
        batch["log_probs"][1, 2] = float("nan")

    path = record(tmp_path / "run", fields=fields, logged={"loss": float("nan")}, norm=float("nan"))
    finding = of(look(path, "D21"), "D21")
    assert finding is not None
    assert finding.claim.startswith("advantages is the first")
    assert finding.where.tensor == "advantages"
    after = next(piece.value for piece in finding.evidence if piece.name == "not finite after it")
    assert "grad_norm" in str(after)


def test_a_gradient_alone_is_found(tmp_path: Path) -> None:
    finding = of(look(record(tmp_path / "run", norm=float("inf")), "D21"), "D21")
    assert finding is not None
    assert finding.link == "gradient"


def test_nan_outside_the_mask_is_worth_knowing_only(tmp_path: Path) -> None:
    def fields(_step: int, batch: dict[str, Any]) -> None:
        batch["old_log_probs"][0, 0] = float("nan")  # a prompt token
        batch["log_probs"][0, 0] = float("nan")

    found = look(record(tmp_path / "run", fields=fields))
    assert causes(found) == []
    finding = of(found, "D21")
    assert finding is not None
    assert finding.severity == "info"


def _twice(directory: Path, change: Any) -> Path:
    """A step whose old log-probabilities are recorded by the rollout and by the update."""
    path = record(directory)
    recorder = Recorder(path)
    batch: dict[str, Any] = {}

    def keep(_step: int, made: dict[str, Any]) -> None:
        batch.update(made)

    record(directory.with_name("again"), fields=keep)
    copy = {name: batch[name] for name in ("input_ids", "attention_mask", "response_mask", "old_log_probs")}
    copy["old_log_probs"] = change(copy["old_log_probs"].clone())
    with recorder.step(0, rank=None) as write:
        write("old_log_probs", copy)
    return path


def test_a_copy_that_differs_is_told_from_a_cast_and_from_padding(tmp_path: Path) -> None:
    def other(values: torch.Tensor) -> torch.Tensor:
        values[1, 3] += 0.1
        return values

    def padding(values: torch.Tensor) -> torch.Tensor:
        values[1, 0] += 0.1
        return values

    rules = ("D35", "D38", "D40")
    same = look(_twice(tmp_path / "a" / "run", lambda values: values), *rules)
    assert same.findings == ()
    assert same.checked == rules
    for name, change, id, severity in (
        ("b", other, "D35", "warning"),
        ("c", padding, "D38", "info"),
        ("d", lambda values: values.bfloat16(), "D40", "info"),
    ):
        found = look(_twice(tmp_path / name / "run", change), *rules)
        assert [(one.id, one.severity) for one in found.findings] == [(id, severity)], name


def test_large_logits_are_forecast(tmp_path: Path) -> None:
    def fields(_step: int, batch: dict[str, Any]) -> None:
        for name in ("advantages", "log_probs", "old_log_probs"):
            batch[name] = None
        batch["input_ids"] = torch.cat([batch["input_ids"], torch.zeros(4, 2040, dtype=torch.int64)], 1)
        more = torch.zeros(4, 2040, dtype=torch.int64)
        batch["attention_mask"] = torch.cat([batch["attention_mask"], more], 1)
        batch["response_mask"] = torch.cat([batch["response_mask"], more], 1)
        batch["input_ids"][0, 3] = 248_000

    finding = of(look(record(tmp_path / "run", fields=fields), "D36"), "D36")
    assert finding is not None
    # 4 rows x 2048 slots x 248,001 ids x 4 bytes = 7.57 GiB.
    assert "7.6 GiB" in finding.claim
    assert not look(record(tmp_path / "small"), "D36").findings


def test_a_step_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    from replay_core.diagnose.case import Case
    from replay_core.diagnose.engine import diagnose
    from replay_core.dumps import open_run
    from replay_core.errors import SelectionError
    from replay_core.records import Selection

    with pytest.raises(SelectionError):
        diagnose(Case(open_run(record(tmp_path / "run")), step=Selection.parse(7)))


def test_all_nan_is_one_finding(tmp_path: Path) -> None:
    def fields(_step: int, batch: dict[str, Any]) -> None:
        for name in ("advantages", "log_probs", "old_log_probs"):
            batch[name] = torch.full_like(batch[name], float("nan"))

    found = causes(look(record(tmp_path / "run", fields=fields, logged={"pg_loss": float("nan")})))
    assert [one.id for one in found] == ["D21"]


def test_the_numbers_of_a_mismatch_are_those_of_its_formulas(tmp_path: Path) -> None:
    from replay_core.diagnose.case import Case
    from replay_core.diagnose.gap import gap
    from replay_core.dumps import open_run

    path = record(tmp_path / "run", fields=_rollout({0: 0.5}))
    (batch,) = list(Case(open_run(path)).batches())[:1]
    figures = gap(batch)
    d = figures.d
    assert figures.mean == pytest.approx(np.abs(d).mean())
    assert figures.k3 == pytest.approx((np.exp(d) - d - 1).mean())
    assert figures.multiplier == pytest.approx(np.exp(np.abs(d)).mean())
    assert d.size == sum(LENGTHS)


def test_a_dump_of_ids_alone_has_no_number_to_be_nan(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    with recorder.step(0) as write:
        write("batch_inputs", micro=0, input_ids=torch.arange(12).reshape(2, 6))
    found = look(tmp_path / "run", "D21")
    assert found.checked == ()
    assert "there is no floating number in it" in why_skipped(found, "D21")


# ---- micro-batches that each divide by their own tokens


def _two_micros(directory: Path, lengths: tuple[int, int], *, over_step: bool = False, logs: Any = None) -> Path:
    """Two micro-batches of two responses of these lengths; the loss is the token mean of each, or of the step. `logs`:
    what three steps log of their micro-batches' losses; else there is one step and no log.
    """
    recorder = Recorder(directory)
    for step in range(1 if logs is None else 3):
        _one_step(recorder, step, lengths, over_step, logs)
    return directory


def _one_step(recorder: Recorder, step: int, lengths: tuple[int, int], over_step: bool, logs: Any) -> None:
    with recorder.step(step) as write:
        losses = []
        for micro, length in enumerate(lengths):
            draw = torch.Generator().manual_seed(micro + 10 * step)
            ids_BS = torch.randint(10, 30, (2, 2 + length), generator=draw)
            response_BS = torch.ones_like(ids_BS)
            response_BS[:, :2] = 0
            values_B = torch.tensor([1.0 + 0.1 * step, -0.3 - micro])
            logprobs_BT = -torch.rand(2, 1 + length, generator=draw) * 3
            write(
                "forward_data",
                {
                    "input_ids": ids_BS,
                    "attention_mask": torch.ones_like(ids_BS),
                    "response_mask": response_BS,
                    "advantages": values_B[:, None] * response_BS[:, 1:],
                    "log_probs": logprobs_BT,
                    "old_log_probs": logprobs_BT.clone(),
                },
                micro=micro,
            )
            tokens = 2 * sum(lengths) if over_step else 2 * length
            losses.append(-values_B.sum() * length / tokens)
            write("loss", {"pg_loss": losses[-1]}, micro=micro)
        if logs is not None:
            write("training_metrics", {"actor/pg_loss": float(logs(torch.stack(losses)))})


@pytest.mark.parametrize(
    ("over_step", "logs", "found"),
    [
        (False, torch.sum, True),  # each micro-batch's own mean, added up
        (False, torch.mean, False),
        (True, torch.sum, False),  # shares of the update are meant to be added up
        (False, lambda losses_M: 0.7 * losses_M.sum(), False),
    ],
    ids=["added up", "averaged", "shares", "another loss"],
)
def test_means_of_micro_batches_that_are_added_up_are_named(
    over_step: bool, logs: Any, found: bool, tmp_path: Path
) -> None:
    run = open_run(_two_micros(tmp_path / "run", (4, 7), over_step=over_step, logs=logs))
    told = of(diagnose(Case(run, Signals.of(run)), ["D28"]), "D28")
    assert told is not None
    assert ("added up and not divided by their number" in told.claim) == found
    assert told.severity == ("warning" if found else "info")


@pytest.mark.parametrize(
    ("lengths", "severity"), [((4, 4), "info"), ((4, 11), "info"), ((4, 12), "warning"), ((40, 4), "warning")]
)
def test_means_over_uneven_micro_batches_are_told(lengths: tuple[int, int], severity: str, tmp_path: Path) -> None:
    finding = of(look(_two_micros(tmp_path / "run", lengths), "D28"), "D28")
    assert finding is not None
    assert finding.severity == severity
    if severity == "warning":
        assert f"weighs {max(lengths) / min(lengths):.2g} times" in finding.claim


def test_uneven_micro_batches_over_the_tokens_of_the_step_are_right(tmp_path: Path) -> None:
    finding = of(look(_two_micros(tmp_path / "run", (40, 4), over_step=True), "D28"), "D28")
    assert finding is not None
    assert finding.severity == "info"
    assert "tokens of the update" in finding.claim


@pytest.mark.parametrize(("minibatch", "severity"), [((0, 0), "warning"), ((0, 1), "info")])
def test_means_of_unequal_parts_are_uneven_within_one_update_alone(
    minibatch: tuple[int, int], severity: str, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(5)
    with Recorder(tmp_path / "run").step(0) as write:
        for micro, length in enumerate((2, 9)):
            ids_BS = torch.randint(10, 30, (2, 2 + length), generator=draw)
            response_BS = torch.ones_like(ids_BS)
            response_BS[:, :2] = 0
            each_B = torch.tensor([1.0, -0.25 * (micro + 1)])
            logprobs_BT = -torch.rand(2, 1 + length, generator=draw)
            write("forward_data", {
                "input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS), "response_mask": response_BS,
                "advantages": each_B[:, None] * response_BS[:, 1:], "log_probs": logprobs_BT,
                "old_log_probs": logprobs_BT,
            }, micro=micro, minibatch=minibatch[micro])  # fmt: skip
            write("loss", pg_loss=-each_B.mean(), micro=micro, minibatch=minibatch[micro])
    found = of(look(tmp_path / "run"), "D28")
    assert found is not None
    assert found.severity == severity


@pytest.mark.parametrize("shared", [True, False])
def test_means_that_are_divided_by_the_number_of_micro_batches_are_how_they_are_accumulated(
    shared: bool, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(6)
    with Recorder(tmp_path / "run").step(0) as write:
        for micro, length in enumerate((5, 7, 6)):
            ids_BS = torch.randint(10, 30, (2, 2 + length), generator=draw)
            response_BS = torch.ones_like(ids_BS)
            response_BS[:, :2] = 0
            each_B = torch.tensor([1.0, -0.25 * (micro + 1)])
            logprobs_BT = -torch.rand(2, 1 + length, generator=draw)
            write("forward_data", {
                "input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS), "response_mask": response_BS,
                "advantages": each_B[:, None] * response_BS[:, 1:], "log_probs": logprobs_BT,
                "old_log_probs": logprobs_BT,
            }, micro=micro, minibatch=0)  # fmt: skip
            write("loss", pg_loss=-each_B.mean() / (3 if shared else 1), micro=micro, minibatch=0)
    found = of(look(tmp_path / "run"), "D28")
    assert found is not None
    assert found.severity == "info"
    assert ("over the number of its update's micro-batches (3)" in found.claim) == shared


def _in_parts(path: Path, part: Any, *, moves: bool = False, flags: Any = None) -> Path:
    """Four steps of 12 completions in three micro-batches; `part`: which rows each holds. `moves`: between them."""
    with Recorder(path, flags=flags) as recorder:
        for step in range(4):
            draw = np.random.default_rng(step)
            completions, logps = draw.integers(10, 90, (12, 6)), -draw.random((12, 6)).astype(np.float32)
            advantages = draw.normal(size=12).astype(np.float32)
            mask = np.ones_like(completions)
            with recorder.step(step) as write:
                prompts = np.repeat(draw.integers(10, 90, (3, 4)), 4, axis=0)
                write("trajectory", {"prompt_ids": prompts, "prompt_mask": np.ones_like(prompts),
                                     "completion_ids": completions, "completion_mask": mask,
                                     "old_per_token_logps": logps, "advantages": advantages,
                                     "rewards": advantages.copy(), "prompt_index": np.repeat(np.arange(3), 4)},
                      alignment=dict.fromkeys(("completion_ids", "completion_mask", "old_per_token_logps"),
                                              "response"))  # fmt: skip
                for micro in range(3):
                    rows = part(micro)
                    write("forward_data", {"completion_ids": completions[rows], "completion_mask": mask[rows],
                                           "per_token_logps": logps[rows] - np.float32(0.01 * micro * moves),
                                           "old_per_token_logps": logps[rows], "advantages": advantages[rows]},
                          micro=micro,
                          alignment=dict.fromkeys(("completion_ids", "completion_mask", "per_token_logps",
                                                   "old_per_token_logps"), "response"))  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("part", "moves", "is_told"),
    [
        (lambda micro: slice(0, 4), False, True),
        (lambda micro: slice(4 * micro, 4 * micro + 4), False, False),
        # Three passes of a rank over its third of the batch: the policy has moved between them.
        (lambda micro: slice(0, 4), True, False),
    ],
)
def test_micro_batches_that_are_all_the_first_one(part: Any, moves: bool, is_told: bool, tmp_path: Path) -> None:
    found = of(look(_in_parts(tmp_path / "d", part, moves=moves), "D88"), "D88")
    assert (found is not None) == is_told
    if found is not None:
        assert found.severity == "error"
        assert "all 3 micro-batches of a step are the first one: 8 of 12 samples" in found.claim

"""What of a genuine batch belongs to another sample, to none, or is one for all: as a fault would leave it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import Fields, causes, healthy, look, masks, of, seen
from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, only, told, trl, verl, worrying


def permuted(batch: Fields) -> None:
    batch["rollout_log_probs"] = np.roll(batch["rollout_log_probs"], 1, 0)


def zeroed(batch: Fields) -> None:
    batch["old_log_probs"] = np.zeros_like(batch["old_log_probs"])


def half_masked(batch: Fields) -> None:
    batch["response_mask"][:, 4:] = 0


def one_prompt(batch: Fields) -> None:
    for name in ("prompts", "input_ids"):
        batch[name][:, :20] = batch[name][0, :20]
    batch["attention_mask"][:, :20] = batch["attention_mask"][0, :20]
    batch["position_ids"] = np.maximum(batch["attention_mask"].cumsum(1) - 1, 0)


FAULTS: list[tuple[str, str, str, Callable[[Fields], None]]] = [
    ("D79", "error", "in the wrong rows", permuted),
    ("D80", "error", "exactly 0", zeroed),
    ("D81", "error", "the mask ends after 4 tokens in every longer response", half_masked),
    ("D82", "warning", "all 4 groups of the batch have the same prompt", one_prompt),
]


@pytest.mark.parametrize(("id", "severity", "words", "spoil"), FAULTS, ids=[one[3].__name__ for one in FAULTS])
def test_what_is_not_the_samples_own_is_the_first_thing_said(
    id: str, severity: str, words: str, spoil: Callable[[Fields], None], tmp_path: Path
) -> None:
    batch = healthy()
    spoil(batch)
    found = causes(seen(tmp_path, batch))
    assert [(one.id, one.severity) for one in found][:1] == [(id, severity)], [one.claim for one in found]
    assert words in found[0].claim


def test_the_genuine_batch_has_none_of_it(tmp_path: Path) -> None:
    told_of = seen(tmp_path, healthy(), "D79", "D80", "D81", "D82")
    assert [one.claim for one in told_of.findings] == []
    assert set(told_of.checked) == {"D79", "D80", "D81", "D82"}


def test_rows_exchanged_are_no_tool_output(tmp_path: Path) -> None:
    batch = healthy()
    permuted(batch)
    assert of(seen(tmp_path, batch), "D41") is None


def test_values_that_are_nan_are_named_before_the_groups(tmp_path: Path) -> None:
    batch = healthy()
    group = np.array(batch["uid"]) == batch["uid"][0]
    batch["values"] = np.zeros_like(batch["advantages"])
    for name in ("values", "advantages"):
        batch[name][group] = np.where(masks(batch)[group], np.nan, 0.0)
    for name in ("token_level_scores", "token_level_rewards"):
        batch[name][group] = 0.0
    found = causes(seen(tmp_path, batch))
    assert (found[0].id, "values" in found[0].claim) == ("D21", True), [one.claim for one in found]


def ratios_of_a_batch(path: Path, kind: str) -> Path:
    """The genuine batch after an update, with the ratio that a GSPO run recorded: of tokens, or of its responses."""
    batch = healthy()
    mask = masks(batch)
    moved = np.random.default_rng(1).normal(0, 0.01, mask.shape) * mask
    mean = (moved.sum(1) / np.maximum(mask.sum(1), 1))[:, None] * mask
    batch["log_probs"] = (batch["old_log_probs"] + moved).astype(np.float32)
    batch["prob_ratio"] = np.exp(moved if kind == "token" else mean).astype(np.float32)
    recorder = Recorder(path, flags={"loss_mode": "gspo"})
    with recorder.step(1) as write:
        write("forward_data", micro=0, **{name: value for name, value in batch.items() if name != "uid"})
    recorder.close()
    return path


@pytest.mark.parametrize(("kind", "severity"), [("token", "error"), ("sequence", None)])
def test_a_run_that_states_gspo_has_one_ratio_for_a_response(kind: str, severity: str | None, tmp_path: Path) -> None:
    found = of(look(ratios_of_a_batch(tmp_path / "run", kind), "D83"), "D83")
    assert (found.severity if found else None) == severity


def versions(path: Path, behind: list[int], limit: int | None = None) -> Path:
    """The genuine batch in every step, by weights so many versions behind it."""
    recorder = Recorder(path, flags={} if limit is None else {"max_staleness": limit})
    batch = {name: value for name, value in healthy().items() if name != "uid"}
    for step, lag in enumerate(behind):
        with recorder.step(step) as write:
            write("trajectory", weight_version=np.full(16, step - lag), **batch)
    recorder.close()
    return path


@pytest.mark.parametrize(
    ("behind", "limit", "warned"),
    [([0, 1, 2, 3, 3], 1, True), ([0, 1, 1, 1, 1], 1, False), ([0, 2, 5, 8, 8], None, False),
     ([-1, -1, -1, -1, -1], 0, False), ([*range(10), 9], None, True)],
    ids=["past what is stated", "as stated", "as async runs are", "counted from 1", "far behind"],
)  # fmt: skip
def test_versions_are_held_against_the_step_that_trains_on_them(
    behind: list[int], limit: int | None, warned: bool, tmp_path: Path
) -> None:
    found = of(look(versions(tmp_path / "run", behind, limit), "D31"), "D31")
    assert (found is not None and found.severity == "warning") == warned
    assert not warned or (found is not None and "versions behind the step" in found.claim)


def test_a_gradient_of_zero_beside_recorded_advantages_needs_no_reward(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    batch = {name: value for name, value in healthy().items() if name != "uid"}
    for step in range(4):
        with recorder.step(step) as write:
            write("forward_data", micro=0, **batch)
            write("training_metrics", grad_norm=0.0, loss=0.1)
    recorder.close()
    found = causes(diagnosed_path(tmp_path / "run"))
    assert "D23" in [one.id for one in found]


# ---- what a log shows of it


def test_a_gap_that_the_first_step_has_not_and_that_does_not_grow_is_an_update_old(tmp_path: Path) -> None:
    gap = [2.5e-4, 0.319, 0.219, 0.198, 0.07, 0.044, 0.126, 0.137, 0.095, 0.144]  # an asynchronous run's own
    finding = only(diagnosed(tmp_path, trl([{"sampling/sampling_logp_difference/mean": each} for each in gap])), "D09")
    assert finding.severity == "info"
    assert "an update old" in finding.claim


def test_a_gap_that_grows_or_is_there_from_the_first_step_is_none(tmp_path: Path) -> None:
    for name, gap in (("grows", [2e-4, *(0.05 * at for at in range(2, 14))]), ("at once", [0.13] * 10)):
        steps = [{"sampling/sampling_logp_difference/mean": each} for each in gap]
        (tmp_path / name).mkdir()
        assert "D09" in [one.id for one in worrying(diagnosed(tmp_path / name, trl(steps)))], name


#: Share clipped and KL of a GSPO run of two mini-batches, whose log states no range.
GSPO = [
    (0.476, 0.0478), (0.5, 0.0019), (0.5, 0.009), (0.467, 0.0096), (0.482, -0.0004), (0.423, 0.0022), (0.409, -0.0016),
    (0.471, 0.0094), (0.457, 0.018), (0.43, 0.0009),
]  # fmt: skip


def test_a_share_clipped_from_the_first_step_on_while_little_moves_is_a_sequences_range(tmp_path: Path) -> None:
    steps = [{"actor/pg_clipfrac": share, "actor/ppo_kl": kl} for share, kl in GSPO]
    assert ("D24", "info") in told(diagnosed(tmp_path, verl(steps)))
    torn = [{"actor/pg_clipfrac": share, "actor/ppo_kl": 0.4} for share, _ in GSPO]
    assert "D24" in [one.id for one in worrying(diagnosed(tmp_path, verl(torn)))]


def test_a_negative_value_loss_is_an_error(tmp_path: Path) -> None:
    values = (-0.356, -0.889, -1.37, -2.6, -5.1)
    found = worrying(diagnosed(tmp_path, verl([{"critic/vf_loss": each} for each in values])))
    assert (found[0].id, found[0].severity) == ("D84", "error")
    assert "wrong sign" in found[0].claim


def test_a_sampler_diff_is_the_distance_of_log_probabilities_and_sec_a_steps_time(tmp_path: Path) -> None:
    lines = [
        f"2026-10-02 11:{at:02d}:31 [train.py:288] iter {at:4d} | reward 0.6{at:02d} (std 0.2547) | loss 0.02649 | "
        f"gnorm 0.3896 | lr 5.000e-03 | sampler_diff 0.78{at:02d} | sec {8 * 1.09**at:.2f}"
        for at in range(24)
    ]
    found = [one.id for one in worrying(diagnosed(tmp_path, "\n".join(lines) + "\n"))]
    assert found[:1] == ["D09"]
    assert "D37" in found


def test_a_gap_of_old_weights_that_no_update_comes_to_is_an_error(tmp_path: Path) -> None:
    steps = [{"training/rollout_probs_diff_mean": each} for each in (1.5e-4, *[0.341] * 9)]
    assert ("D09", "error") in [(one.id, one.severity) for one in worrying(diagnosed(tmp_path, verl(steps)))]


@pytest.mark.parametrize(("gaps", "severity"), [([0.0, 0.4, 0.4, 0.4, 0.4], "info"), ([0.4] * 5, "error")])
def test_samples_an_update_old_are_told_from_an_engine_that_is_off_from_the_first_step(
    gaps: list[float], severity: str, tmp_path: Path
) -> None:
    found = of(look(parted(tmp_path / "run", gaps), "D09"), "D09")
    assert found is not None
    assert found.severity == severity, found.claim
    assert ("an update old" in found.claim) == (severity == "info")


def parted(folder: Path, gaps: list[float], **flags: Any) -> Path:
    """A run whose engine and trainer are so far apart by step."""
    recorder = Recorder(folder, flags=flags)
    draw = np.random.default_rng(2)
    for step, gap in enumerate(gaps):
        batch = {name: value for name, value in healthy().items() if name not in ("uid", "ref_log_prob")}
        # Other weights say the same of one token after one prefix.
        noise = draw.normal(0, gap, batch["responses"].max() + 1)[batch["responses"]] * masks(batch)
        batch["rollout_log_probs"] = (batch["old_log_probs"] + noise).astype(np.float32)
        with recorder.step(step) as write:
            write("trajectory", **batch)
    recorder.close()
    return folder


@pytest.mark.parametrize(
    ("flags", "severity"),
    [({"off_policy_steps": 0}, "warning"), ({"off_policy_steps": 1}, "info"), ({}, "info"),
     ({"off_policy_steps": 0, "use_tis": True}, "info")],
    ids=str,
)  # fmt: skip
def test_samples_an_update_old_are_a_warning_of_a_run_that_states_none(
    flags: dict[str, Any], severity: str, tmp_path: Path
) -> None:
    found = of(look(parted(tmp_path / "run", [0.0, 0.2, 0.2, 0.2, 0.2], **flags), "D09"), "D09")
    assert found is not None
    assert found.severity == severity, found.claim
    assert ("the run states that samples are of the newest weights" in found.claim) == (severity == "warning")


@pytest.mark.parametrize(
    ("gaps", "flags", "severity"),
    [
        ([0.0, 0.1, 0.2, 0.0, 0.1, 0.2, 0.0, 0.1], {}, "error"),
        ([0.0, 0.06, 0.07, 0.0, 0.06, 0.07, 0.0], {}, "warning"),
        ([0.0, 0.1, 0.2, 0.0, 0.1, 0.2, 0.0, 0.1], {"weight_sync_interval": 3}, "info"),
        ([0.0, 0.1, 0.2, 0.0, 0.1, 0.2, 0.1, 0.0], {}, None),
        ([0.0, 0.2, 0.2, 0.0, 0.2, 0.2], {}, None),
        ([0.0] * 8, {}, None),
    ],
)
def test_an_engine_that_gets_its_weights_every_third_step(
    gaps: list[float], flags: dict[str, Any], severity: str | None, tmp_path: Path
) -> None:
    found = look(parted(tmp_path / "run", gaps, **flags), "D09", "D12").findings
    told = [one for one in found if "every 3 steps only" in one.claim]
    assert [one.severity for one in told] == ([] if severity is None else [severity]), [one.claim for one in found]
    assert severity is None or told[0].claim.find("steps 0, 3, 6") > 0
    assert severity is None or not any("comes to rest" in one.claim for one in found)


def test_values_of_the_best_token_are_told_from_those_of_the_sampled_one(tmp_path: Path) -> None:
    batch = healthy()
    best = np.random.default_rng(4).random(batch["old_log_probs"].shape) < 0.6
    batch["old_log_probs"] = np.where(best, batch["rollout_log_probs"], 0.1 * batch["rollout_log_probs"])
    found = of(seen(tmp_path, batch, "D09"), "D09")
    assert found is not None
    assert "gives no token less" in found.claim
    assert "argmax" in found.cause


def test_a_bare_clip_ratio_beside_a_clip_fraction_is_the_share_of_responses_that_were_cut(tmp_path: Path) -> None:
    steps = [{"actor/pg_clipfrac": 0.01, "clip_ratio": 0.31} for _ in range(8)]
    assert "D24" not in [one for one, _ in told(diagnosed(tmp_path, verl(steps)))]
    (tmp_path / "alone").mkdir()
    alone = "".join(f'{{"step": {n}, "loss": 0.1, "reward": {0.4 + n / 50}, "clip_ratio": 0.31}}\n' for n in range(8))
    assert ("D24", "warning") in told(diagnosed(tmp_path / "alone", alone))

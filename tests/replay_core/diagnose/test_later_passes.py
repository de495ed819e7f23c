"""Steps that pass over an earlier step's samples again: their ratio has moved on purpose, and what is kept stands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core import workbench
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of, why_skipped
from tests.replay_core.diagnose.bigram import EOS, Bigram

PROMPTS = [[5, 6], [7], [8, 9, 10], [11, 3]]


def trained(
    directory: Path, *, passes: int, shuffled: bool = False, lr: float = 4.0, stale: bool = False, halves: bool = False
) -> Path:
    """RLOO over three rollouts, each passed over in that many steps. `stale`: old log-probabilities are of the first
    weights; `halves`: each step takes half of the rollout's rows.
    """
    lm, first, step = Bigram(3), Bigram(3), 0
    recorder = Recorder(directory)
    for _ in range(3):
        rollout = lm.rollout(PROMPTS, each=6)
        scores_B = (rollout.ids_BS == EOS).any(1) - 0.2 * (rollout.ids_BS == 5).sum(1)
        totals = np.bincount(rollout.group_B, weights=scores_B)[rollout.group_B]
        advantages_BT = rollout.on_tokens(scores_B - (totals - scores_B) / 5)
        old_BT = rollout.logprobs(first if stale else lm).astype(np.float32)
        rows = np.arange(len(scores_B))
        for number in range(passes * (2 if halves else 1)):
            order = lm.draw.permutation(rows) if shuffled else rows
            chosen = rows[number % 2 :: 2] if halves else order
            part = rollout.only(chosen)
            with recorder.step(step) as record:
                if halves and number == 0:
                    record("trajectory", **rollout.tensors(
                        rewards=scores_B.astype(np.float32), advantages=advantages_BT,
                        old_log_probs=old_BT))  # fmt: skip
                record(
                    "forward_data", micro=0,
                    **part.tensors(
                        rewards=scores_B[chosen].astype(np.float32), advantages=advantages_BT[chosen],
                        old_log_probs=old_BT[chosen], log_probs=part.logprobs(lm).astype(np.float32),
                    ),
                )  # fmt: skip
            lm.learn(part, advantages_BT[chosen], lr)
            step += 1
    return directory


@pytest.mark.parametrize("more", [{}, {"shuffled": True}, {"halves": True}], ids=["in order", "shuffled", "halves"])
def test_a_later_pass_that_is_a_step_of_its_own_has_moved_on_purpose(tmp_path: Path, more: dict[str, bool]) -> None:
    found = look(trained(tmp_path / "dump", passes=2, **more), "D14", "D55")
    assert causes(found) == []


def test_passes_of_a_policy_that_stands_are_told(tmp_path: Path) -> None:
    found = of(look(trained(tmp_path / "dump", passes=2, lr=0.0), "D55"), "D55")
    assert found is not None
    assert found.claim.startswith("the policy never changes")


def test_old_log_probabilities_of_other_weights_are_told_in_a_first_pass(tmp_path: Path) -> None:
    found = of(look(trained(tmp_path / "dump", passes=2, stale=True), "D14"), "D14")
    assert found is not None
    # The first pass over the second and third rollout; not the second passes.
    assert found.steps == (2, 4)
    assert why_skipped(look(trained(tmp_path / "again", passes=1), "D14"), "D14") == ""


@pytest.mark.parametrize(
    "name", ["importance_sampling_ratio", "behave_imp_weight", "sampling_importance_weights"]
)  # fmt: skip
@pytest.mark.parametrize("cap", [1.1, 5.0])
def test_recorded_weights_of_stale_samples_are_in_the_loss(tmp_path: Path, name: str, cap: float) -> None:
    lm, engine = Bigram(4), Bigram(4)
    recorder = Recorder(tmp_path / "dump", flags={"loss_agg_mode": "token-mean"})
    for step in range(3):
        rollout = engine.rollout(PROMPTS, each=6)
        scores_B = np.where((rollout.ids_BS == EOS).any(1), 1.0, -1.0) * rollout.response_BT.sum(1) / 9
        advantages_BT = rollout.on_tokens(scores_B)
        old_BT = rollout.logprobs(lm).astype(np.float32)
        weights_BT = (np.minimum(np.exp(old_BT - rollout.sampled_BT), cap) * rollout.response_BT).astype(np.float32)
        losses_BT = -advantages_BT * weights_BT
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                rewards=scores_B.astype(np.float32), advantages=advantages_BT, old_log_probs=old_BT,
                rollout_log_probs=rollout.sampled_BT, **{name: weights_BT}))  # fmt: skip
            record("loss", micro=0, pg_loss=float(losses_BT.sum() / rollout.response_BT.sum()))
            record("forward_data", micro=0, **rollout.tensors(
                advantages=advantages_BT, old_log_probs=old_BT, log_probs=old_BT))  # fmt: skip
        lm.learn(rollout, advantages_BT * weights_BT, 6.0)
    found = look(tmp_path / "dump", "D28", "D59")
    assert causes(found) == []
    told = of(found, "D28")
    assert told is not None
    assert "token-mean over the micro-batch" in told.claim


def test_a_ratio_of_the_policy_is_no_weight_of_the_engine(tmp_path: Path) -> None:
    lm, engine = Bigram(4), Bigram(4)
    rollout = engine.rollout(PROMPTS, each=6)
    lm.learn(rollout, rollout.on_tokens(np.ones(24)), 9.0)
    old_BT = rollout.logprobs(lm).astype(np.float32)
    with Recorder(tmp_path / "dump").step(0) as record:
        record("forward_data", micro=0, **rollout.tensors(
            old_log_probs=old_BT, log_probs=old_BT, rollout_log_probs=rollout.sampled_BT,
            importance_sampling_ratio=np.ones_like(old_BT)))  # fmt: skip
    found = look(tmp_path / "dump", "D59")
    assert causes(found) == []
    assert "policy over its old self" in why_skipped(found, "D59")


def _asynchronous(directory: Path, behind: int, *, lr: float, weighed: bool = False) -> Path:
    """Each step's samples are of the weights so many updates before; the trainer's log-probabilities are its own."""
    lm, recorder = Bigram(9), Recorder(directory)
    tables = [lm.table_VV.copy()]
    for step in range(7):
        version = max(0, step - behind)
        engine = Bigram(9)
        engine.table_VV, engine.draw = tables[version], lm.draw
        rollout = engine.rollout(PROMPTS, each=6)
        scores_B = (rollout.ids_BS == 5).sum(1) - 0.5 * (rollout.ids_BS == 7).sum(1)
        advantages_BT = rollout.on_tokens(scores_B - scores_B.mean())
        old_BT = rollout.logprobs(lm).astype(np.float32)
        weights_BT = np.minimum(np.exp(old_BT - rollout.sampled_BT), 2).astype(np.float32)
        more = {"tis_weights": weights_BT} if weighed else {}
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                rewards=scores_B.astype(np.float32), advantages=advantages_BT, old_log_probs=old_BT,
                rollout_log_probs=rollout.sampled_BT, weight_version=np.full(24, version), **more))  # fmt: skip
        lm.learn(rollout, advantages_BT, lr)
        tables.append(lm.table_VV.copy())
    return directory


@pytest.mark.parametrize("behind", [2, 4])
def test_old_samples_that_nothing_corrects_are_told(tmp_path: Path, behind: int) -> None:
    found = of(look(_asynchronous(tmp_path / "d", behind, lr=14.0)), "D31")
    assert found is not None
    assert (found.severity, found.downstream_of) == ("warning", None)
    assert f"up to {behind} weight versions old" in found.claim


@pytest.mark.parametrize(
    ("behind", "lr", "weighed"), [(0, 6.0, False), (1, 6.0, False), (4, 0.1, False), (4, 6.0, True)],
    ids=["fresh", "a step behind", "slow", "weighed"],
)  # fmt: skip
def test_samples_that_are_fresh_or_near_or_weighed_are_fine(
    tmp_path: Path, behind: int, lr: float, weighed: bool
) -> None:
    assert "D31" not in [one.id for one in causes(look(_asynchronous(tmp_path / "d", behind, lr=lr, weighed=weighed)))]


@pytest.mark.parametrize(("stale", "words"), [((1,), "on rank 1 alone, and every other rank agrees"), ((0, 1, 2), "")])
def test_a_rank_of_other_weights_is_named(stale: tuple[int, ...], words: str, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    with Recorder(tmp_path, flags={"dtype": "float32"}) as recorder:
        for rank in range(3):
            with recorder.step(1, rank=rank) as record:
                ids_BS = torch.from_numpy(random.integers(3, 60, (4, 24)))
                logp_BT = torch.from_numpy(-random.random((4, 23))).float()
                off_BT = torch.from_numpy(random.normal(0, 0.3, (4, 23))).float() * (rank in stale)
                record(
                    "forward_data", micro=0, input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS),
                    response_mask=(torch.arange(24) > 8).long().expand(4, 24), log_probs=logp_BT + off_BT,
                    old_log_probs=logp_BT,
                )  # fmt: skip
    (found,) = workbench.diagnose(tmp_path, rules=["D14"])["findings"]
    assert found["claim"].endswith(words or "before any update"), found["claim"]
    assert ("does not reach them" in found["cause"]) is bool(words)

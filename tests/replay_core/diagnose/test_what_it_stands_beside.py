"""What a step alone tells wrongly: passes that are steps of their own, equal answers, grades that were lost, versions
that promise what the weights do not keep, a head with more columns than tokens. The policy is two tables in numpy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.logs import diagnosed_path

IDS, PROMPT, ANSWER = 24, 3, 8
GROUPS, SIZE = 6, 8
ROWS = GROUPS * SIZE


class Policy:
    """Logits of the next token: one table by the token before, another by the one before that."""

    def __init__(self, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.near, self.far = draw.normal(0, 1.2, (IDS, IDS)), draw.normal(0, 0.8, (IDS, IDS))

    def logps(self, ids: np.ndarray, padding: int = 0) -> np.ndarray:
        """Log-probabilities [.., IDS] of what follows the last two of ids, over so many more columns of logits of 0."""
        logits = self.near[ids[..., -1]] + self.far[ids[..., -2]]
        whole = np.concatenate([logits, np.zeros((*logits.shape[:-1], padding))], axis=-1)
        logged: np.ndarray = logits - np.log(np.exp(whole).sum(-1, keepdims=True))
        return logged

    def of(self, ids_BS: np.ndarray, padding: int = 0) -> np.ndarray:
        """Of each token of the answers [B, ANSWER]."""
        every = [
            np.take_along_axis(self.logps(ids_BS[:, :at], padding), ids_BS[:, at : at + 1], 1)
            for at in range(PROMPT, PROMPT + ANSWER)
        ]
        return np.concatenate(every, axis=1).astype(np.float32)

    def sampled(self, draw: np.random.Generator, top: int = IDS, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
        """Rows [B, PROMPT + ANSWER] drawn from the `top` likeliest tokens, and the log-probabilities among these."""
        ids_BS = np.repeat(draw.integers(0, IDS, (rows // SIZE, PROMPT)), SIZE, axis=0)
        said = []
        for _ in range(ANSWER):
            logps = self.logps(ids_BS)
            logps = np.where(logps >= np.sort(logps, 1)[:, -top][:, None], logps, -np.inf)
            logps = logps - np.log(np.exp(logps).sum(1, keepdims=True))
            drawn = np.array([draw.choice(IDS, p=np.exp(row) / np.exp(row).sum()) for row in logps])
            said.append(logps[np.arange(rows), drawn])
            ids_BS = np.concatenate([ids_BS, drawn[:, None]], axis=1)
        return ids_BS, np.stack(said, axis=1).astype(np.float32)

    def moved(self, draw: np.random.Generator, near: bool = True) -> Policy:
        after = Policy()
        after.near = self.near + (draw.normal(0, 0.06, (IDS, IDS)) if near else 0)
        after.far = self.far + draw.normal(0, 0.06, (IDS, IDS))
        return after


def _rows(ids_BS: np.ndarray) -> dict[str, Any]:
    counted_BS = np.zeros_like(ids_BS)
    counted_BS[:, PROMPT:] = 1
    return {"input_ids": ids_BS, "attention_mask": np.ones_like(ids_BS), "response_mask": counted_BS[:, PROMPT:],
            "group_ids": np.arange(len(ids_BS)) // SIZE}  # fmt: skip


@pytest.mark.parametrize(("passes", "stated", "told"), [(2, 2, False), (1, 1, False), (1, 2, True), (2, 4, True)])
def test_passes_that_are_steps_of_their_own_are_counted(passes: int, stated: int, told: bool, tmp_path: Path) -> None:
    draw, policy, step = np.random.default_rng(0), Policy(), 0
    with Recorder(tmp_path / "d", flags={"num_iterations": stated}) as recorder:
        for _ in range(5):
            ids_BS, old_BT = policy.sampled(draw)
            for epoch in range(passes):
                with recorder.step(step) as record:
                    for micro, part in enumerate(np.split(draw.permutation(ROWS), 2)):
                        record("forward_data", _rows(ids_BS[part]), old_log_probs=old_BT[part],
                               log_probs=policy.of(ids_BS[part]), micro=micro, epoch=epoch)  # fmt: skip
                policy, step = policy.moved(draw), step + 1
    found = of(look(tmp_path / "d", "D124"), "D124")
    assert (found is not None) == told, found
    if found is not None:
        assert f"trained on in {passes} epochs, and the run states {stated}" in found.claim


@pytest.mark.parametrize("how", ["neighbours", "refreshed", "kept"])
def test_equal_answers_at_other_places_are_no_later_epochs(how: str, tmp_path: Path) -> None:
    """Neighbours change what a row is given: equal answers to one prompt then have different numbers in one forward."""
    draw, policy = np.random.default_rng(1), Policy()
    ids_BS, _ = policy.sampled(draw)
    ids_BS[1::SIZE] = ids_BS[::SIZE]
    rewards_B = np.repeat(draw.random(ROWS // 2), 2).astype(np.float32)
    first_BT = policy.of(ids_BS) + (draw.normal(0, 0.5, (ROWS, ANSWER)) if how == "neighbours" else 0)
    with Recorder(tmp_path / "d") as recorder, recorder.step(0) as record:
        for epoch in range(1 if how == "neighbours" else 2):
            now_BT = (first_BT if epoch == 0 else policy.moved(draw).of(ids_BS)).astype(np.float32)
            old_BT = now_BT if how != "kept" else first_BT.astype(np.float32)
            for micro, part in enumerate(np.split(np.arange(ROWS), 4)):
                record("forward_data", _rows(ids_BS[part]), rewards=rewards_B[part], old_log_probs=old_BT[part],
                       log_probs=now_BT[part], micro=4 * epoch + micro)  # fmt: skip
    found = of(look(tmp_path / "d", "D60"), "D60")
    assert (found is not None) == (how == "refreshed"), found


@pytest.mark.parametrize("how", ["right", "time-outs", "shuffled"])
def test_grades_that_were_lost_are_no_other_samples(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "rollout_data"
    folder.mkdir()
    draw = np.random.default_rng(3)
    for step in range(1, 7):
        right_B = draw.random(ROWS) < 0.8
        score_B = right_B & ((draw.random(ROWS) > 0.3) if how == "time-outs" else True)
        if how == "shuffled":
            score_B = draw.permutation(right_B)
        rows = [{"input": f"{step}{at // SIZE}=", "output": f"{7 if right else draw.integers(8, 99)}", "gts": "7",
                 "score": float(score), "acc": float(score), "step": step}
                for at, (right, score) in enumerate(zip(right_B, score_B, strict=True))]  # fmt: skip
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = of(diagnosed_path(tmp_path), "D56")
    assert (found is not None) == (how != "right")
    if found is not None:
        assert ("scored 0 at random" in found.claim, "other samples" in found.claim) == (
            how == "time-outs", how == "shuffled")  # fmt: skip


@pytest.mark.parametrize("said", ["version", "setting", "nothing"])
@pytest.mark.parametrize("engine", ["all", "a part", "late"])
def test_an_engine_that_lacks_a_part_of_what_its_version_promises(engine: str, said: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    policies = [Policy()]
    for _ in range(7):
        policies.append(policies[-1].moved(draw))
    # A run that weighs the difference, besides, says by a setting that there may be one.
    flags = {"max_staleness": 1 if engine == "late" else 0} if said == "setting" else {"use_tis": True, "tis_cap": 2.0}
    with Recorder(tmp_path / "d", flags=flags) as recorder:
        for step, policy in enumerate(policies):
            version = max(step - 1, 0) if engine == "late" else step
            holds = Policy()
            holds.far = policies[version].far
            holds.near = policies[0].near if engine == "a part" else policies[version].near
            # A part that moves by little: what is stale of it is less than any limit on one step's mismatch.
            holds.near = policy.near + 0.2 * (holds.near - policy.near) if engine == "a part" else holds.near
            ids_BS, rollout_BT = holds.sampled(draw)
            promise = {"weight_version": np.full(ROWS, version), "trainer_version": step}
            with recorder.step(step) as record:
                record("trajectory", _rows(ids_BS) | (promise if said == "version" else {}),
                       rollout_log_probs=rollout_BT)  # fmt: skip
                record("old_log_probs", _rows(ids_BS), old_log_probs=policy.of(ids_BS))
    found = of(look(tmp_path / "d", "D09"), "D09")
    if engine == "a part" and said != "nothing":
        assert found is not None
        assert (found.severity, list(found.steps)) == ("warning", list(range(1, 8)))
        assert "does not hold all of the trainer's weights" in found.claim
    else:
        assert found is None or found.severity == "info", found.claim


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"top_p": 1.0, "top_k": -1, "make_vocab_size_divisible_by": 32, "vocab_size": IDS}, True),
        ({"rollout_top_p": 1.0, "rollout_top_k": -1, "padded_vocab_size": 32, "vocab_size": IDS}, True),
        ({"make_vocab_size_divisible_by": 16, "tensor_model_parallel_size": 2, "vocab_size": IDS}, True),
        ({"top_p": 1.0, "top_k": -1, "make_vocab_size_divisible_by": 8, "vocab_size": IDS}, False),
        ({"top_k": 6, "padded_vocab_size": 32, "vocab_size": IDS}, False),
        ({"top_p": 1.0, "top_k": -1}, False),
    ],
)
@pytest.mark.parametrize("padding", [8, 0])
def test_a_padded_head_is_named_where_the_run_states_one(
    flags: dict[str, Any], named: bool, padding: int, tmp_path: Path
) -> None:
    draw, policy = np.random.default_rng(5), Policy()
    with Recorder(tmp_path / "d", flags=flags) as recorder:
        for step in range(3):
            ids_BS, rollout_BT = policy.sampled(draw)
            with recorder.step(step) as record:
                record("trajectory", _rows(ids_BS), rollout_log_probs=rollout_BT,
                       old_log_probs=policy.of(ids_BS, padding))  # fmt: skip
    found = of(look(tmp_path / "d", "D11"), "D11")
    assert (found is not None) == bool(padding)
    if found is not None:
        assert (f"a vocabulary of {IDS} that is padded to 32" in found.claim) == named, found.claim


def test_a_cut_that_is_deeper_than_the_padding_is_no_padding(tmp_path: Path) -> None:
    draw, policy = np.random.default_rng(6), Policy()
    flags = {"top_p": 1.0, "top_k": -1, "make_vocab_size_divisible_by": 25, "vocab_size": IDS}
    with Recorder(tmp_path / "d", flags=flags) as recorder:
        for step in range(3):
            ids_BS, rollout_BT = policy.sampled(draw, top=5)
            with recorder.step(step) as record:
                record("trajectory", _rows(ids_BS), rollout_log_probs=rollout_BT, old_log_probs=policy.of(ids_BS))
    found = of(look(tmp_path / "d", "D11"), "D11")
    assert found is not None
    assert "padded" not in found.claim


@pytest.mark.parametrize("copied", [True, False])
def test_copies_are_told_of_every_step_that_holds_them(copied: bool, tmp_path: Path) -> None:
    """Groups of short answers: in some steps chance alone might copy them, in all of them it does not."""
    draw, policy = np.random.default_rng(7), Policy()
    with Recorder(tmp_path / "d") as recorder:
        for step in range(6):
            ids_BS, rollout_BT = policy.sampled(draw, rows=3 * SIZE)
            if copied:
                order = np.concatenate([np.tile(np.arange(SIZE // 2), 2) + SIZE * group for group in range(3)])
                ids_BS, rollout_BT = ids_BS[order], rollout_BT[order]
            with recorder.step(step) as record:
                record("trajectory", _rows(ids_BS), rollout_log_probs=rollout_BT)
    found = of(look(tmp_path / "d", "D64"), "D64")
    assert (found is not None) == copied
    if found is not None:
        assert list(found.steps) == list(range(6))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_rows_encoded_anew_are_told_of_every_step_and_leave_the_draw_alone(share: float, tmp_path: Path) -> None:
    draw, policy = np.random.default_rng(8), Policy()
    with Recorder(tmp_path / "d", flags={"temperature": 1.0, "top_p": 1.0}) as recorder:
        for step in range(4):
            ids_BS, rollout_BT = policy.sampled(draw)
            trained_BS = ids_BS.copy()
            # Tokens that stand for the same text, and are never sampled as such.
            other_B = np.flatnonzero(np.arange(ROWS) % 10 < 10 * share)
            trained_BS[other_B, PROMPT + 2] = (trained_BS[other_B, PROMPT + 2] + 11) % IDS
            entropy_BT = np.stack([
                -(np.exp(logps) * logps).sum(1)
                for logps in (policy.logps(trained_BS[:, :at]) for at in range(PROMPT, PROMPT + ANSWER))
            ], axis=1)  # fmt: skip
            now_BT = policy.of(trained_BS)
            with recorder.step(step) as record:
                record("trajectory", _rows(ids_BS), rollout_log_probs=rollout_BT)
                for micro, part in enumerate(np.split(np.arange(ROWS), 4)):
                    record("forward_data", _rows(trained_BS[part]), old_log_probs=now_BT[part], micro=micro,
                           log_probs=now_BT[part], entropy=entropy_BT[part].astype(np.float32))  # fmt: skip
    said = look(tmp_path / "d", "D27", "L33")
    found = of(said, "D27")
    assert of(said, "L33") is None
    assert (found is not None) == bool(share)
    if found is not None:
        assert list(found.steps) == list(range(4))


@pytest.mark.parametrize("refreshed", [True, False])
def test_rows_of_a_later_mini_batch_are_no_replica(refreshed: bool, tmp_path: Path) -> None:
    """Two epochs of two mini-batches, old log-probabilities taken anew in each: the second differs from the engine."""
    draw, policy = np.random.default_rng(9), Policy()
    flags = {"actor": {"ppo_mini_batch_size": 3, "ppo_epochs": 2}, "train_batch_size": 6}
    with Recorder(tmp_path / "d", flags=flags) as recorder:
        for step in range(3):
            ids_BS, rollout_BT = policy.sampled(draw)
            first, advantage_B = policy, draw.normal(0, 1, ROWS).astype(np.float32)
            with recorder.step(step) as record:
                record("trajectory", _rows(ids_BS), rollout_log_probs=rollout_BT)
                for micro in range(4):
                    part = np.split(np.arange(ROWS), 2)[micro % 2]
                    old = policy if refreshed else first
                    record("forward_data", _rows(ids_BS[part]), old_log_probs=old.of(ids_BS[part]), micro=micro,
                           log_probs=policy.of(ids_BS[part]), advantages=advantage_B[part], epoch=micro // 2,
                           minibatch=micro % 2)  # fmt: skip
                    policy = policy.moved(draw)
    found = of(look(tmp_path / "d", "D09"), "D09")
    assert (found is not None) == refreshed
    assert found is None or "in the rows of a later mini-batch" in found.claim
    assert (of(look(tmp_path / "d", "D60"), "D60") is not None) == refreshed


@pytest.mark.parametrize("how", ["lost", "loaded", "meant"])
def test_an_optimizer_that_begins_anew_is_told_by_its_counters(how: str, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    with Recorder(tmp_path / "d", flags={"reset_optimizer": True} if how == "meant" else {}) as recorder:
        for step in range(6):
            if step == 3:
                kept = optimizer.state_dict()
                optimizer = torch.optim.AdamW([weight], lr=1e-3)
                if how == "loaded":
                    optimizer.load_state_dict(kept)
            for _ in range(2):
                optimizer.zero_grad()
                (weight**2).sum().backward()
                optimizer.step()
            with recorder.step(step) as record:
                record(
                    "optimizer", {f"weight.{name}": value.clone() for name, value in optimizer.state[weight].items()}
                )
    found = of(look(tmp_path / "d", "D161"), "D161")
    if how == "loaded":
        assert found is None
    else:
        assert found is not None
        assert (found.severity, list(found.steps)) == ("info" if how == "meant" else "warning", [3])
        assert "from 6 back to 2" in found.claim

"""Either side of a threshold: a rule with its sign turned or its number moved fails here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core import workbench
from replay_core.recorder import Recorder
from tests.builders import save_file
from tests.replay_core.diagnose.batches import (
    END,
    GROUPS,
    PAD,
    PROMPT,
    causes,
    grpo,
    healthy,
    look,
    masks,
    noise,
    of,
    rewards,
    seen,
    set_advantages,
    set_rewards,
    why_skipped,
)


def severity(found: Any, id: str) -> str | None:
    finding = of(found, id)
    return finding.severity if finding else None


@pytest.mark.parametrize(("solved", "expected"), [(1, None), (2, "info"), (3, "info"), (4, None)])
def test_half_of_the_groups_without_a_spread_and_more_are_worth_saying(
    solved: int, expected: str | None, tmp_path: Path
) -> None:
    batch = healthy()
    scores = np.tile([0.0, 1.0, 0.0, 1.0], 4)
    scores[: 4 * solved] = np.repeat(np.arange(solved), 4)  # groups differ from each other
    set_rewards(batch, scores)
    set_advantages(batch, grpo(scores, GROUPS))
    assert severity(seen(tmp_path, batch, "D01"), "D01") == expected


@pytest.mark.parametrize(("spread", "expected"), [(0.0, "error"), (1e-5, None)])
def test_a_small_spread_is_a_spread(spread: float, expected: str | None, tmp_path: Path) -> None:
    batch = healthy()
    scores = 0.5 + spread * np.tile([0.0, 1.0, 0.0, 1.0], 4)
    set_rewards(batch, scores)
    set_advantages(batch, grpo(rewards(batch).astype(np.float64), GROUPS))
    assert severity(seen(tmp_path, batch, "D01"), "D01") == expected


def test_equal_rewards_with_a_critic_are_no_dead_groups(tmp_path: Path) -> None:
    batch = healthy()
    set_rewards(batch, [1.0] * 16)
    batch["advantages"] = noise(batch, 0.5)
    assert not seen(tmp_path, batch, "D01", "D03").findings


@pytest.mark.parametrize(("off", "expected"), [(0.5e-4, "info"), (3e-3, "warning")])
def test_a_recomputed_advantage_agrees_closely(off: float, expected: str, tmp_path: Path) -> None:
    batch = healthy()
    values = batch["advantages"][:, 0].copy()
    values[0] += off
    set_advantages(batch, values)
    assert severity(seen(tmp_path, batch, "D04"), "D04") == expected


@pytest.mark.parametrize("lone", [0, 1])
def test_one_group_of_one_is_a_warning(lone: int, tmp_path: Path) -> None:
    batch = healthy()
    batch["uid"] = ["x"] * (16 - lone) + ["y"] * lone
    assert severity(seen(tmp_path, batch, "D05"), "D05") == ("warning" if lone else None)


def test_one_response_to_each_of_many_prompts_is_no_bug_of_ids(tmp_path: Path) -> None:
    batch = {name: value[::4] for name, value in healthy().items()}
    batch["uid"] = ["a", "b", "c", "d"]
    assert severity(seen(tmp_path, batch, "D05"), "D05") == "info"
    batch["values"] = np.zeros((4, 24), dtype=np.float32)
    assert why_skipped(seen(tmp_path, batch, "D05"), "D05") == "a critic's values are the baseline"


@pytest.mark.parametrize(("scale", "expected"), [(0.015, None), (0.06, "info"), (0.1, "warning"), (0.2, "error")])
def test_how_far_engine_and_trainer_may_be_apart(scale: float, expected: str | None, tmp_path: Path) -> None:
    batch = healthy()
    batch["rollout_log_probs"] = batch["old_log_probs"] + noise(batch, scale)
    assert severity(seen(tmp_path, batch, "D09"), "D09") == expected


@pytest.mark.parametrize(("slope", "expected"), [(0.8, "error"), (0.93, None), (1.07, None), (1.2, "error")])
def test_a_slope_past_a_tenth_is_a_temperature(slope: float, expected: str | None, tmp_path: Path) -> None:
    batch = healthy()
    batch["rollout_log_probs"] = (slope * batch["old_log_probs"]).astype(np.float32)
    assert severity(seen(tmp_path, batch, "D10"), "D10") == expected


def test_the_temperature_is_the_inverse_of_the_slope(tmp_path: Path) -> None:
    batch = healthy()
    batch["rollout_log_probs"] = (1.25 * batch["old_log_probs"]).astype(np.float32)
    finding = of(seen(tmp_path, batch, "D10"), "D10")
    assert finding is not None
    evidence = {piece.name: piece.value for piece in finding.evidence}
    assert evidence["temperature that explains it"] == pytest.approx(0.8, abs=1e-3)
    assert finding.next_step == f"rldbg mismatch {tmp_path / 'batch.pt'}"


@pytest.mark.parametrize(("share", "expected"), [(0.8, None), (1.0, "warning")])
def test_top_p_is_one_sided(share: float, expected: str | None, tmp_path: Path) -> None:
    batch = healthy()
    side = np.where(np.random.default_rng(0).random((16, 24)) < share, 1, -1)
    batch["rollout_log_probs"] = (batch["old_log_probs"] + 0.05 * side * masks(batch)).astype(np.float32)
    assert severity(seen(tmp_path, batch, "D11"), "D11") == expected


def test_a_rollout_that_gives_less_is_no_top_p(tmp_path: Path) -> None:
    batch = healthy()
    batch["rollout_log_probs"] = (batch["old_log_probs"] - 0.05 * masks(batch)).astype(np.float32)
    assert severity(seen(tmp_path, batch, "D11"), "D11") is None


@pytest.mark.parametrize(("apart", "expected"), [(0.01, "error"), (0.05, None)])
def test_stale_is_what_agrees_with_the_reference(apart: float, expected: str | None, tmp_path: Path) -> None:
    batch = healthy()  # policy and reference are 0.094 apart: a fifth is 0.019
    batch["rollout_log_probs"] = batch["ref_log_prob"] + noise(batch, apart * 1.25)
    assert severity(seen(tmp_path, batch, "D12"), "D12") == expected


def test_samples_that_are_off_in_no_order_are_no_leak(tmp_path: Path) -> None:
    batch = healthy()
    moved = noise(batch, 0.3)
    moved[[1, 2, 7, 11, 14]] = 0
    batch["old_log_probs"] = batch["old_log_probs"] + moved
    found = seen(tmp_path, batch)
    assert severity(found, "D16") is None
    assert severity(found, "D09") == "error"


@pytest.mark.parametrize(("groups", "expected"), [(2, "info"), (4, "error")])
def test_groups_without_a_spread_are_chance_where_they_are_few(groups: int, expected: str, tmp_path: Path) -> None:
    batch = healthy()
    set_rewards(batch, GROUPS % 2)
    set_advantages(batch, np.zeros(16))
    few = {name: values[: 4 * groups] for name, values in batch.items()}
    assert severity(seen(tmp_path, few, "D03"), "D03") == expected


@pytest.mark.parametrize(("tokens", "expected"), [(2, None), (12, "error")])
def test_two_samples_of_a_few_tokens_that_agree_are_luck_and_no_leak(
    tokens: int, expected: str | None, tmp_path: Path
) -> None:
    batch = healthy()
    moved = noise(batch, 0.3)
    moved[::8] = 0
    batch["old_log_probs"] = batch["old_log_probs"] + moved
    kept_BT = masks(batch)
    kept_BT[::8, tokens:] = False
    batch["response_mask"] = kept_BT.astype(batch["response_mask"].dtype)
    assert severity(seen(tmp_path, batch, "D16"), "D16") == expected


def test_a_leak_that_spares_a_later_sample_is_one_all_the_same(tmp_path: Path) -> None:
    batch = healthy()
    moved = noise(batch, 0.3)
    moved[::4] = 0
    moved[5] = 0
    batch["old_log_probs"] = batch["old_log_probs"] + moved
    assert severity(seen(tmp_path, batch, "D16"), "D16") == "error"


@pytest.mark.parametrize(
    ("kind", "word"), [("template", "chat template"), ("padding", "left padding"), ("few", "few samples")]
)
def test_the_place_of_a_mismatch_tells_its_cause(kind: str, word: str, tmp_path: Path) -> None:
    batch = healthy()
    moved = noise(batch, 0.3)
    if kind == "template":
        moved[:, 3:] *= 0.01
        moved[:, :3] *= 4
    elif kind == "padding":
        flush = batch["attention_mask"][:, 0] == 1
        if not flush.any():  # make two prompts fill their row, in no packing's order
            rows = [1, 6, 7, 12]
            batch["prompts"][rows, :2] = 7
            batch["input_ids"][rows, :2] = 7
            batch["attention_mask"][rows, :2] = 1
            flush = batch["attention_mask"][:, 0] == 1
        moved[flush] *= 0.01
    else:
        keep = np.ones(16, dtype=bool)
        keep[[3, 4, 10]] = False
        moved[keep] = 0
    batch["rollout_log_probs"] = batch["old_log_probs"] + moved
    finding = of(seen(tmp_path, batch, "D09"), "D09")
    assert finding is not None
    assert word in finding.cause


@pytest.mark.parametrize(("ended", "expected"), [(16, None), (13, None), (12, "info"), (1, "info"), (0, "warning")])
def test_how_many_responses_may_be_cut_off(ended: int, expected: str | None, tmp_path: Path) -> None:
    batch = healthy()
    batch["finish_reason"] = ["stop"] * ended + ["length"] * (16 - ended)
    assert severity(seen(tmp_path, batch, "D20"), "D20") == expected


@pytest.mark.parametrize(("often", "expected"), [(0.45, None), (0.6, "warning")])
def test_one_token_may_be_half_of_what_is_written(often: float, expected: str | None, tmp_path: Path) -> None:
    batch = healthy()
    pick = np.random.default_rng(0).random((16, 24)) < often
    draw = np.random.default_rng(1).integers(4, 300, (16, 24))
    written = np.where(pick, 268, draw)
    batch["responses"] = np.where(masks(batch) & (batch["responses"] != END), written, batch["responses"])
    batch["input_ids"][:, PROMPT:] = batch["responses"]
    assert severity(seen(tmp_path, batch, "D26"), "D26") == expected


def test_one_end_token_that_is_trained_is_enough(tmp_path: Path) -> None:
    batch = healthy()
    ends = np.argwhere(batch["responses"] == END)
    for row, column in ends[1:]:
        batch["response_mask"][row, column] = 0
    assert severity(seen(tmp_path, batch, "D19"), "D19") is None


def test_an_end_that_the_attention_mask_dropped_too_is_found(tmp_path: Path) -> None:
    batch = healthy()
    keep = batch["responses"] != END
    batch["response_mask"] = batch["response_mask"] * keep
    batch["attention_mask"][:, PROMPT:] *= keep
    assert severity(seen(tmp_path, batch, "D19"), "D19") == "error"


def test_a_pad_that_is_also_the_end_counts_once(tmp_path: Path) -> None:
    batch = healthy()
    for name in ("responses", "prompts", "input_ids"):
        batch[name] = np.where(batch[name] == PAD, END, batch[name])
    assert causes(seen(tmp_path, batch)) == []
    batch["response_mask"][:] = 1
    assert [one.id for one in causes(seen(tmp_path, batch))] == ["D18"]


@pytest.mark.parametrize(("lag", "expected"), [(0, None), (1, "info"), (8, "info"), (9, "warning")])
def test_how_old_weights_may_be(lag: int, expected: str | None, tmp_path: Path) -> None:
    batch = healthy()
    batch["weight_version"] = np.array([3] + [3 + lag] * 15)
    assert severity(seen(tmp_path, batch, "D31"), "D31") == expected


@pytest.mark.parametrize(("off", "expected"), [(0.04, None), (0.1, "warning")])
def test_how_many_tokens_may_be_routed_otherwise(off: float, expected: str | None, tmp_path: Path) -> None:
    batch = healthy()
    draw = np.random.default_rng(0)
    experts = draw.integers(0, 8, (16, 44, 3, 2))
    other = experts.copy()
    change = draw.random((16, 44)) < off
    other[change] = (other[change] + 1) % 8
    batch["rollout_routed_experts"], batch["routed_experts"] = experts, other[..., ::-1].copy()
    assert severity(seen(tmp_path, batch, "D30"), "D30") == expected


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ([0, 3, 7, 10], None), ([1, 3, 7, 10], "does not begin with 0"), ([0, 7, 3, 10], "does not rise"),
        ([0, 3, 7, 12], "ends at 12"), ([0, 3, 3, 10], "does not rise"),
    ],
)  # fmt: skip
def test_boundaries_of_a_pack(bounds: list[int], expected: str | None, tmp_path: Path) -> None:
    content = {"input_ids": torch.arange(10)[None], "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    finding = of(look(save_file(tmp_path / "pack.pt", content), "D17"), "D17")
    assert (finding is None) if expected is None else (finding is not None and expected in finding.claim)


@pytest.mark.parametrize(("stated", "expected"), [(4, None), (3, "max_seqlen is 3")])
def test_the_longest_sample_of_a_pack(stated: int, expected: str | None, tmp_path: Path) -> None:
    content = {
        "input_ids": torch.arange(10)[None],
        "cu_seqlens": torch.tensor([0, 3, 7, 10]),
        "max_seqlen": torch.tensor(stated),
    }
    finding = of(look(save_file(tmp_path / "pack.pt", content), "D17"), "D17")
    assert (finding is None) if expected is None else (finding is not None and expected in finding.claim)


def test_tokens_that_came_back_as_others_are_named(tmp_path: Path) -> None:
    def sample(index: int, tokens: list[int]) -> dict[str, Any]:
        return {"index": index, "group_index": 0, "tokens": tokens, "response_length": 3, "loss_mask": [1, 1, 1],
                "response": "x", "prompt": "p", "reward": 1.0, "rollout_log_probs": [-1.0, -1.0, -1.0],
                "status": "completed"}  # fmt: skip

    def write(directory: Path, changed: int) -> Path:
        rows = [[5, 6, 7, 8, 9], [5, 6, 10, 11, 12]]
        samples = [sample(index, tokens) for index, tokens in enumerate(rows)]
        save_file(directory / "rollout_data" / "0.pt", {"rollout_id": 0, "samples": samples})
        rows[1][3] += changed
        train = [
            {"data_parallel_rank": 0, "sample_index": index, "tokens": torch.tensor(tokens), "response_lengths": 3,
             "total_lengths": 5, "rewards": 0.0, "loss_masks": torch.ones(3, dtype=torch.int32),
             "log_probs": torch.full((3,), -1.0)}
            for index, tokens in enumerate(rows)
        ]  # fmt: skip
        content = {
            "format_version": 2,
            "rollout_id": 0,
            "rank": 0,
            "samples": train,
            "dp_shards": [],
            "raw_reward": [1.0, 1.0],
        }
        save_file(directory / "train_data" / "0.pt", content)
        return directory

    same = look(write(tmp_path / "same", 0), "D27")
    assert same.checked == ("D27",)
    assert not same.findings
    finding = of(look(write(tmp_path / "other", 50), "D27"), "D27")
    assert finding is not None
    evidence = {piece.name: piece.value for piece in finding.evidence}
    assert (evidence["sample id"], evidence["first token that differs"]) == ("1", 3)


def test_another_micro_batch_goes_to_other_experts_and_is_not_held_to_the_first(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    with Recorder(tmp_path) as recorder, recorder.step(0) as record:
        for micro in range(2):
            ids_BS = torch.from_numpy(random.integers(3, 60, (4, 12)))
            experts = torch.from_numpy(random.integers(0, 8, (4, 12, 2, 2)))
            record("forward_data", micro=micro, input_ids=ids_BS, routed_experts=experts)
    found = workbench.diagnose(tmp_path, rules=["D30"])
    assert not found["findings"]
    assert "D30" in found["checked"], found["skipped"]

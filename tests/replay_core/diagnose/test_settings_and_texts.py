"""What is stated against what was done, scores beside the texts they are of, and tensors that lie at another place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.finding import Diagnosis
from replay_core.diagnose.rules.scores import ends_in
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of, why_skipped
from tests.replay_core.diagnose.logs import diagnosed, verl

EOS, PROMPT, LENGTHS = 2, 2, np.array([3, 5, 4, 6, 7, 3, 6, 5])
GROUP_B = np.repeat(np.arange(2), 4)


def recorded(folder: Path, fault: str = "", **flags: Any) -> Diagnosis:
    """Three steps of two micro-batches of four samples: GRPO's advantages, a token mean, one update."""
    recorder = Recorder(folder, flags={"eos_token_id": EOS, **flags})
    for step in range(3):
        draw = np.random.default_rng(step)
        width = PROMPT + int(LENGTHS.max())
        place_S = np.arange(width)
        end_B = PROMPT + LENGTHS
        mask_BS = ((place_S >= PROMPT) & (place_S < end_B[:, None])).astype(np.int64)
        ids_BS = draw.integers(10, 30, (8, width))
        ids_BS[np.arange(8), end_B - 1] = EOS
        if fault == "goes on":
            ids_BS[np.arange(8), PROMPT + 1] = EOS
        reward_B = draw.uniform(0, 1, 8)
        if fault == "rounding":
            reward_B = 0.5 + 0.25 * GROUP_B + draw.uniform(0, 2e-7, 8)
        a_B = np.zeros(8)
        for group in range(2):
            r = reward_B[group == GROUP_B]
            a_B[group == GROUP_B] = (r - r.mean()) / (r.std(ddof=1) + (0 if fault == "rounding" else 1e-6))
        if fault == "relu":
            a_B = np.maximum(a_B, 0)
        a_BS = a_B[:, None] * mask_BS
        if fault == "axis":
            a_BS = np.append(np.zeros(PROMPT), a_B[: width - PROMPT])[None] * mask_BS
        logprobs_BS = -draw.uniform(0.1, 3, mask_BS.shape)
        weight_BS = np.where(mask_BS != 0, np.exp(draw.normal(0, 0.4, mask_BS.shape)).clip(max=2), 1.0)
        weighed_BS = weight_BS if fault == "applied" else np.ones_like(weight_BS)
        with recorder.step(step) as write:
            real_BS = np.ones_like(mask_BS) * (place_S < end_B[:, None])
            write("trajectory", _tensors(input_ids=ids_BS, attention_mask=real_BS, response_mask=mask_BS,
                                         rewards=reward_B, group_id=GROUP_B))  # fmt: skip
            for micro in range(2):
                rows = slice(4 * micro, 4 * micro + 4)
                mask = mask_BS[rows].copy()
                if fault in ("empty", "empty, finite") and micro == 1:
                    mask[:] = 0
                same = logprobs_BS[rows, 1:]
                more = {"rollout_is_weights": weight_BS[rows, 1:]} if fault in ("unused", "applied") else {}
                write("forward_data", _tensors(
                    input_ids=ids_BS[rows], attention_mask=real_BS[rows],
                    response_mask=mask, advantages=a_BS[rows, 1:], log_probs=same, old_log_probs=same,
                    **more), micro=micro)  # fmt: skip
                token = -(a_BS * weighed_BS)[rows] * mask
                loss = token.sum() / max(mask.sum(), 1)
                if fault == "sequence means":
                    loss = (token.sum(1) / mask.sum(1)).mean()
                if fault == "empty" and micro == 1:
                    loss = np.nan
                write("loss", pg_loss=torch.tensor(float(loss)), micro=micro)
    recorder.close()
    return look(folder)


def _tensors(**named: Any) -> dict[str, Any]:
    made = {name: np.ascontiguousarray(each) for name, each in named.items()}
    return {
        name: torch.from_numpy(each.astype(np.float32) if each.dtype == np.float64 else each)
        for name, each in made.items()
    }


GRPO = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "loss_agg_mode": "token-mean"}
STATED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "rounding": ("rounding", GRPO, "D04", "rounding in the rewards is amplified"),
    "relu": ("relu", GRPO, "D04", "negative advantages are cut off at 0"),
    "axis": ("axis", GRPO, "D78", "broadcast along the wrong axis"),
    "goes on": ("goes on", GRPO, "D94", "generation goes on after the end token"),
    "empty": ("empty", GRPO, "D07", "a micro-batch has no token in the loss, and divides by it"),
    "std": ("", {**GRPO, "norm_adv_by_std_in_grpo": False}, "D04", "and the run states that they are not"),
    "rloo": ("", {**GRPO, "adv_estimator": "rloo"}, "D04", "and the run states RLOO"),
    "aggregation": ("sequence means", GRPO, "D28", "is seq-mean-token-mean over the micro-batch, and the run states"),
    "other mean": ("", {**GRPO, "loss_agg_mode": "seq-mean-token-mean"}, "D28", "and the run states seq-mean"),
    "weights": ("unused", {**GRPO, "tis_imp_ratio_cap": 2.0}, "D28", "and stated, and not applied to the loss"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATED)
def test_what_is_done_is_held_against_what_is_stated(case: str, tmp_path: Path) -> None:
    fault, flags, id, words = STATED[case]
    found = causes(recorded(tmp_path / "d", fault, **flags))
    assert found
    assert (found[0].id, words in found[0].claim) == (id, True), [(one.id, one.claim) for one in found]


@pytest.mark.parametrize(
    ("fault", "flags"),
    [
        ("", GRPO),
        ("", {}),
        ("sequence means", {**GRPO, "loss_agg_mode": "seq-mean-token-mean"}),
        ("applied", {**GRPO, "tis_imp_ratio_cap": 2.0}),
    ],
)
def test_what_is_done_as_stated_is_no_alarm(fault: str, flags: dict[str, Any], tmp_path: Path) -> None:
    assert [(one.id, one.claim) for one in causes(recorded(tmp_path / "d", fault, **flags))] == []


def test_an_empty_micro_batch_that_is_divided_by_one_is_no_error(tmp_path: Path) -> None:
    said = recorded(tmp_path / "d", "empty, finite", **GRPO)
    assert not [one for one in said.findings if "divides by it" in one.claim or one.id == "D21"]


# ---- texts


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("w1 w2 7 <eos>", "7", True),
        ("The answer is 42.", "42", True),
        (r"so \boxed{42}", "42", True),
        ("7 and then 8 <eos>", "7", False),
        ("17", "7", False),
        ("so <ans> 3 1 4 </s>", "1 4", True),
        ("so <ans> 3 14 </s>", "4", False),
        ("f(2) = 3.", "3", True),
        ("it is (a)", "(a)", True),
        (r"so \boxed{\frac{3}{7}}", "7", False),
        ("", "7", False),
    ],
)
def test_the_last_word_of_a_text_is_its_answer(text: str, truth: str, right: bool) -> None:
    assert ends_in(text, truth) is right


def _texts(folder: Path, paid: Any, by: int = 0) -> Diagnosis:
    """by: how many rows off the ground truths are."""
    folder.mkdir()
    for step in (1, 2, 3):
        draw = np.random.default_rng(step)
        answers, truths = draw.integers(0, 3, 16), np.repeat(draw.integers(0, 3, 4), 4)
        if by:
            truths = np.repeat(4 * step + np.arange(4), 4)
            answers, truths = np.where(draw.random(16) < 0.8, truths, 0), np.roll(truths, by)
        scores = paid((answers == truths).astype(float))
        rows = [
            {"input": f"question {row // 4}", "output": f"so it is {answers[row]} <eos>", "gts": str(truths[row]),
             "score": float(scores[row]), "step": step}
            for row in range(16)
        ]  # fmt: skip
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return look(folder)


def test_scores_are_held_against_the_texts_they_are_of(tmp_path: Path) -> None:
    assert of(_texts(tmp_path / "right", lambda right: right), "D100") is None
    # A judge that is stricter than the last word is no other row's.
    strict = _texts(tmp_path / "strict", lambda right: right * (np.arange(16) % 3 > 0))
    assert of(strict, "D100") is None
    rolled = of(_texts(tmp_path / "rolled", lambda right: np.roll(right, 1)), "D100")
    assert rolled is not None
    assert "those of the answers 1 row before" in rolled.claim
    none = _texts(tmp_path / "none", lambda right: 0 * right)
    assert causes(none)[0].id == "D100"
    assert "although" in causes(none)[0].claim


@pytest.mark.parametrize("by", [4, -4])
def test_ground_truths_of_another_prompt(by: int, tmp_path: Path) -> None:
    found = causes(_texts(tmp_path / "d", lambda right: right, by=by))[0]
    assert (found.id, found.severity) == ("D100", "error")
    assert f"in the truth {abs(by)} rows {'before' if by < 0 else 'after'}" in found.claim


def _verified(folder: Path, pays: Any) -> Diagnosis:
    folder.mkdir()
    for step in range(4):
        draw = np.random.default_rng(step)
        rows = []
        for prompt in range(4):
            truth = " ".join(map(str, draw.integers(1, 9, 2 + (prompt + step) % 3)))
            for _ in range(6):
                right = draw.random() < 0.7
                said = truth if right else truth + " 0"
                rows.append({"input": f"question {step} {prompt}", "output": f"so it is <answer> {said} </s>",
                             "gts": truth, "score": float(right and pays(truth, draw)), "step": step + 1})  # fmt: skip
        (folder / f"{step + 1}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return look(folder)


def test_truths_that_a_verifier_does_not_read(tmp_path: Path) -> None:
    found = of(_verified(tmp_path / "short", lambda truth, _: len(truth) < 7), "D100")
    assert found is not None
    assert "all of 7 characters and more, and none of the others" in found.claim
    # What it pays is not a matter of the truth.
    assert of(_verified(tmp_path / "strict", lambda _, draw: draw.random() < 0.5), "D100") is None
    assert of(_verified(tmp_path / "right", lambda *_: True), "D100") is None


def test_texts_without_a_right_answer_tell_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    rows = [{"input": f"q{row // 4}", "output": "no idea", "gts": "7", "score": 0.0, "step": 1} for row in range(16)]
    (folder / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "ground truths" in why_skipped(look(folder), "D100")


# ---- places


@pytest.mark.parametrize("by", [0, 1, -1])
def test_values_beside_their_tokens_are_told_by_the_critics_own(by: int, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "d")
    for step in range(2):
        draw = np.random.default_rng(step)
        ids_BS = draw.integers(10, 30, (4, 10))
        mask_BS = np.ones((4, 10), dtype=np.int64)
        mask_BS[:, :2] = 0
        own_BS = draw.normal(0, 1, (4, 10))
        old_BS = np.roll(own_BS, by, axis=1)
        common = {"input_ids": ids_BS, "attention_mask": np.ones_like(mask_BS), "response_mask": mask_BS}
        with recorder.step(step) as write:
            write("trajectory", _tensors(**common, values=old_BS[:, 1:], returns=old_BS[:, 1:] + 0.1))
            write("forward_data", _tensors(**common), micro=0, epoch=0, minibatch=0)
            write("loss", _tensors(vpreds=own_BS[:, 1:], values=old_BS[:, 1:], returns=old_BS[:, 1:] + 0.1,
                                   vf_loss=np.array(0.1)), role="critic", micro=0, epoch=0, minibatch=0)  # fmt: skip
    recorder.close()
    found = of(look(tmp_path / "d"), "D101")
    assert (found is not None) == bool(by)
    if found is not None:
        assert ("token before" if by > 0 else "token after") in found.claim


# ---- logs


@pytest.mark.parametrize(("moves", "reward", "told"), [(0.12, 0.0, True), (0.12, 0.02, False), (0.01, 0.0, False)])
def test_a_learning_rate_that_is_too_large_is_told_by_what_a_batch_moves(
    moves: float, reward: float, told: bool, tmp_path: Path
) -> None:
    steps = [
        {"actor/ppo_kl": moves, "actor/lr": 1e-2, "critic/score/mean": 0.4 + reward * n + 0.01 * (n % 3)}
        for n in range(20)
    ]
    found = of(diagnosed(tmp_path, verl(steps)), "L16")
    assert (found is not None) == told

"""Tokens that count and that nobody sampled: prompts, ends that were appended, beginnings that were forced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.bigram import EOS, Bigram, Rollout

MASKS = ("D18", "D41", "D48", "D58", "D82")
PROMPTS = [[5, 6, 7], [7, 3], [8, 9, 10, 4, 6], [11, 3, 3]]


def _recorded(directory: Path, rollout: Rollout, mask_BT: np.ndarray, *, engine: bool = True) -> Path:
    lm = Bigram(5)
    whole = Rollout(rollout.ids_BS, rollout.attention_BS, rollout.attention_BS[:, 1:], rollout.group_B, None)
    old_BT = whole.logprobs(lm).astype(np.float32)
    recorder = Recorder(directory)
    for step in range(3):
        more = {"rollout_log_probs": rollout.sampled_BT} if engine else {}
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                rewards=np.arange(len(mask_BT), dtype=np.float32) % 3, old_log_probs=old_BT, **more)
                | {"response_mask": torch.from_numpy(mask_BT.astype(np.int64))})  # fmt: skip
    return directory


@pytest.mark.parametrize("engine", [True, False], ids=["with the engine's numbers", "without"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal prompts", "left-padded prompts"])
def test_the_prompt_counts_in_the_mask(tmp_path: Path, equal: bool, engine: bool) -> None:
    prompts = [[*prompt[:2], prompt[0]] for prompt in PROMPTS] if equal else PROMPTS
    rollout = Bigram(5).rollout(prompts, each=5)
    mask_BT = rollout.attention_BS[:, 1:]
    found = look(_recorded(tmp_path / "bad", rollout, mask_BT, engine=engine), *MASKS)
    assert [one.id for one in causes(found)] == ["D58"]
    assert "padding" not in causes(found)[0].claim


def test_a_mask_of_next_tokens_counts_no_left_pad(tmp_path: Path) -> None:
    rollout = Bigram(5).rollout(PROMPTS, each=5)
    assert causes(look(_recorded(tmp_path / "good", rollout, rollout.response_BT), "D18", "D58", "D41", "D82")) == []


def test_padding_before_the_first_token_counts_where_the_mask_is_wider(tmp_path: Path) -> None:
    rollout = Bigram(5).rollout(PROMPTS, each=5)
    mask_BT = rollout.response_BT.copy()
    mask_BT[5:10, :2] = 1  # two columns of three left pads of the second prompt: the last is about its first token
    found = of(look(_recorded(tmp_path / "bad", rollout, mask_BT), "D18"), "D18")
    assert found is not None
    assert found.evidence[0].value == 10


def test_samples_of_one_token_prompts_share_no_prompt(tmp_path: Path) -> None:
    """Unconditional sampling: every group begins with one BOS, and the mask rightly counts all that follows."""
    rollout = Bigram(5).rollout([[1], [1], [1], [1]], each=5)
    assert causes(look(_recorded(tmp_path / "good", rollout, rollout.response_BT), "D58", "D82", "D41")) == []


@pytest.mark.parametrize("early", [True, False], ids=["one token early", "one token more"])
def test_a_mask_that_stands_one_token_early_in_some_rows(early: bool, tmp_path: Path) -> None:
    rollout = Bigram(5).rollout([[*prompt[:2], prompt[0]] for prompt in PROMPTS], each=5)
    mask_BT = rollout.response_BT.copy()
    for row in range(3, len(mask_BT), 4):
        at = np.flatnonzero(mask_BT[row])
        mask_BT[row, at[0] - 1] = 1
        if early:
            mask_BT[row, at[-1]] = 0
    found = of(look(_recorded(tmp_path / "bad", rollout, mask_BT), "D41"), "D41")
    assert found is not None
    assert ("the mask stands one token too early" in found.claim) == early
    assert not early or f"{len(mask_BT) // 4} of {len(mask_BT)} rows" in found.claim


@pytest.mark.parametrize(("every", "warned"), [(4, True), (1, False), (50, False)])
def test_the_first_sampled_token_is_left_out_in_some_rows(every: int, warned: bool, tmp_path: Path) -> None:
    rollout = Bigram(5).rollout(PROMPTS, each=5)
    mask_BT = rollout.response_BT.copy()
    for row in range(0, len(mask_BT), every):
        mask_BT[row, np.flatnonzero(mask_BT[row])[0]] = 0
    found = of(look(_recorded(tmp_path / "bad", rollout, mask_BT), "D41"), "D41")
    assert (found is not None) == warned
    assert found is None or "not in the loss in 5 of 20 rows" in found.claim
    assert found is None or (found.severity == "warning" and found.claim.endswith("one of every 4"))


@pytest.mark.parametrize(("limit", "token"), [(4, EOS), (6, 13)])
def test_an_end_is_appended_to_what_was_cut(tmp_path: Path, limit: int, token: int) -> None:
    rollout = Bigram(6).rollout(PROMPTS, each=6, limit=limit)
    cut_B = (rollout.response_BT.sum(1) == limit) & (rollout.ids_BS[:, -1] != EOS)
    assert 4 <= cut_B.sum() < len(cut_B)
    ids_BS = np.concatenate([rollout.ids_BS, np.where(cut_B, token, 0)[:, None]], axis=1)
    longer = Rollout(
        ids_BS, np.concatenate([rollout.attention_BS, cut_B[:, None]], axis=1).astype(np.int64),
        np.concatenate([rollout.response_BT, cut_B[:, None]], axis=1).astype(np.float32), rollout.group_B,
        np.concatenate([rollout.sampled_BT, np.zeros((len(cut_B), 1), np.float32)], axis=1),
    )  # fmt: skip
    (found, *_) = causes(look(_recorded(tmp_path / "bad", longer, longer.response_BT), *MASKS))
    assert found.id == "D41"
    assert f"the last of {int(cut_B.sum())} of 24 responses" in found.claim
    assert "appended" in found.cause


def test_a_forced_beginning_is_told_by_its_place(tmp_path: Path) -> None:
    rollout = Bigram(6).rollout([[*prompt, 12, 4] for prompt in PROMPTS], each=6)
    mask_BT = rollout.response_BT.copy()
    first_B = mask_BT.argmax(1)
    mask_BT[np.arange(len(first_B)), first_B - 1] = 1
    found = look(_recorded(tmp_path / "bad", rollout, mask_BT), "D41")
    told = of(found, "D41")
    if told is None:
        pytest.skip("the trainer finds the forced token probable")
    assert "the first of each response" in told.claim


def test_the_engine_says_nothing_of_the_end_that_stops_it(tmp_path: Path) -> None:
    rollout = Bigram(6).rollout(PROMPTS, each=6, limit=8)
    last_B = rollout.response_BT.shape[1] - 1 - rollout.response_BT[:, ::-1].argmax(1)
    rows = np.arange(len(last_B))
    ends_B = rollout.ids_BS[rows, last_B + 1] == EOS
    assert ends_B.sum() >= 8
    told: dict[str, np.ndarray] = {}
    for name, lost_B in (("all", ends_B), ("some", ends_B & (rows % 2 == 0))):
        told[name] = rollout.sampled_BT.copy()
        told[name][rows[lost_B], last_B[lost_B]] = 0.0
    for name, sampled_BT in told.items():
        holed = Rollout(rollout.ids_BS, rollout.attention_BS, rollout.response_BT, rollout.group_B, sampled_BT)
        found = of(look(_recorded(tmp_path / name, holed, holed.response_BT), "D41"), "D41")
        assert (found is not None and "of the end token (EOS" in found.claim) == (name == "all"), found
    assert of(look(_recorded(tmp_path / "good", rollout, rollout.response_BT), "D41"), "D41") is None


@pytest.mark.parametrize("written", [True, False])
def test_an_end_that_is_written_over_the_last_token(written: bool, tmp_path: Path) -> None:
    rollout = Bigram(6).rollout(PROMPTS, each=12, limit=4)
    rows = np.arange(len(rollout.ids_BS))
    last_B = rollout.response_BT.shape[1] - 1 - rollout.response_BT[:, ::-1].argmax(1)
    cut_B = rollout.ids_BS[rows, last_B + 1] != EOS
    assert cut_B.sum() >= 4
    assert (~cut_B).sum() >= 4
    ids_BS = rollout.ids_BS.copy()
    if written:
        ids_BS[rows[cut_B], last_B[cut_B] + 1] = EOS
    retold = Rollout(ids_BS, rollout.attention_BS, rollout.response_BT, rollout.group_B, rollout.sampled_BT)
    lm = Bigram(6)
    with Recorder(tmp_path / "d") as recorder:
        for step in range(3):
            with recorder.step(step) as record:
                record("trajectory", **retold.tensors(
                    rewards=(rows % 3).astype(np.float32), truncated=cut_B.astype(np.int64),
                    old_log_probs=retold.logprobs(lm).astype(np.float32), rollout_log_probs=retold.sampled_BT)
                    | {"response_mask": torch.from_numpy(retold.response_BT.astype(np.int64))})  # fmt: skip
    found = causes(look(tmp_path / "d", "D09", "D11", "D41"))
    assert [one.id for one in found] == (["D41"] if written else [])
    assert not written or f"ends {int(cut_B.sum())} of 48 responses" in found[0].claim

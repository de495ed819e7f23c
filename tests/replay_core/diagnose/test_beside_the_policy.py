"""PPO whose critic is recorded beside the policy, epochs without a number, and other things as trainers record them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.diagnose.finding import Finding
from replay_core.dumps.opening import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

ROWS, ASKED, SAID, CLIP = 16, 3, 6, 0.2


def _run(folder: Path, loss: str = "right", *, steps: int = 4, first_values: float = 1.0, kept: bool = True) -> Path:
    """Two epochs of two mini-batches a step, whose micro-batches are numbered throughout. loss: how the critic's is
    clipped; first_values: by what the values of the first step are multiplied; kept: whether the rollout is recorded.
    """
    flags = {"algorithm": "ppo", "gamma": 1.0, "lam": 0.95, "cliprange_value": CLIP, "ppo_epochs": 2}
    with Recorder(folder, flags=flags) as recorder:
        for step in range(steps):
            draw = torch.Generator().manual_seed(step)
            ids = torch.randint(5, 40, (ROWS, ASKED + SAID), generator=draw)
            length = torch.randint(2, SAID + 1, (ROWS, 1), generator=draw)
            mask = (torch.arange(SAID) < length).float()
            old_logp = -2 * torch.rand(ROWS, SAID, generator=draw) * mask
            old = torch.randn(ROWS, SAID, generator=draw) * mask * (first_values if step == 0 else 1.0)
            rewards = torch.zeros(ROWS, SAID).scatter(1, length - 1, torch.rand(ROWS, 1, generator=draw))
            advantages, after, value = torch.zeros(ROWS, SAID), torch.zeros(ROWS), torch.zeros(ROWS)
            for at in reversed(range(SAID)):
                made = rewards[:, at] + value - old[:, at] + 0.95 * after
                after = torch.where(mask[:, at] != 0, made, after)
                value = torch.where(mask[:, at] != 0, old[:, at], value)
                advantages[:, at] = after * mask[:, at]
            returns = (advantages + old) * mask
            attention = torch.cat([torch.ones(ROWS, ASKED), mask], 1).long()
            with recorder.step(step) as record:
                if kept:
                    record("trajectory", input_ids=ids, attention_mask=attention, prompts=ids[:, :ASKED],
                           responses=ids[:, ASKED:], response_mask=mask.long(), old_log_probs=old_logp, values=old,
                           token_level_rewards=rewards, advantages=advantages, returns=returns)  # fmt: skip
                for micro in range(4):
                    rows = torch.arange(ROWS)[micro % 2 :: 2]
                    moved = (micro > 0) * torch.randn(len(rows), SAID, generator=draw)
                    new = (old[rows] + 0.5 * moved) * mask[rows]
                    record("forward_data", micro=micro, input_ids=ids[rows], attention_mask=attention[rows],
                           response_mask=mask[rows].long(), old_log_probs=old_logp[rows],
                           log_probs=(old_logp[rows] + 0.2 * moved) * mask[rows], advantages=advantages[rows],
                           returns=returns[rows], old_values=old[rows], values=new)  # fmt: skip
                    near = old[rows] + (new - old[rows]).clamp(-CLIP, CLIP)
                    plain, cut = (new - returns[rows]) ** 2, (near - returns[rows]) ** 2
                    between = (new.clamp(-CLIP, CLIP) - returns[rows]) ** 2
                    least, greater = torch.minimum(plain, cut), torch.maximum(plain, cut)
                    each = {"right": greater, "least": least, "between": torch.maximum(plain, between)}[loss]
                    mean = (0.5 * each.double() * mask[rows]).sum() / mask[rows].sum()
                    record("loss", micro=micro, vf_loss=float(mean))
    return folder


def _found(folder: Path, rule: str) -> Finding | None:
    return of(look(folder, rule), rule)


@pytest.mark.parametrize("kept", [True, False])
def test_epochs_that_have_no_number_are_no_copies_of_responses(kept: bool, tmp_path: Path) -> None:
    assert _found(_run(tmp_path / "run", kept=kept), "D64") is None


def test_advantages_are_made_of_the_old_values_where_the_new_ones_stand_beside_them(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", first_values=0.0)
    for rule in ("D44", "D52", "D101"):
        found = _found(run, rule)
        assert found is None or found.severity == "info", found


@pytest.mark.parametrize(("loss", "words"), [("least", "smaller"), ("between", "between -0.2 and 0.2")])
def test_a_critics_loss_that_is_clipped_the_wrong_way_is_told(loss: str, words: str, tmp_path: Path) -> None:
    found = _found(_run(tmp_path / "run", loss), "D91")
    assert found is not None
    assert words in found.claim
    assert _found(_run(tmp_path / "right"), "D91") is None


def _of_one_length(folder: Path, steps_with_ends: int) -> Finding | None:
    with Recorder(folder) as recorder:
        for step in range(6):
            draw = torch.Generator().manual_seed(step)
            ids = torch.randint(5, 40, (16, 11), generator=draw)
            # So few ids at the end may be end tokens, as far as one step tells.
            ids[:, -1] = torch.arange(16) % 3 + 5
            mask = torch.ones(16, 8, dtype=torch.int64)
            if step < steps_with_ends:
                mask[:3, 2:] = 0
            attention = torch.cat([torch.ones(16, 3, dtype=torch.int64), mask], 1)
            with recorder.step(step) as record:
                record("trajectory", input_ids=ids, attention_mask=attention, response_mask=mask)
    return _found(folder, "D94")


def test_one_step_without_an_end_is_chance_where_responses_end_in_others(tmp_path: Path) -> None:
    never, once = _of_one_length(tmp_path / "never", 0), _of_one_length(tmp_path / "once", 5)
    assert never is not None
    assert never.severity == "warning"
    assert once is None or once.severity == "info"


def test_a_dict_that_holds_its_batch_under_one_name_is_that_batch(tmp_path: Path) -> None:
    batch: dict[str, Any] = {"input_ids": torch.ones(4, 6, dtype=torch.int64), "old_log_probs": torch.zeros(4, 5)}
    torch.save({"batch": batch, "non_tensor_batch": {"uid": list("abcd")}, "meta_info": {"lr": 1.0}}, tmp_path / "a.pt")
    known = {ref.name: ref.canonical for ref in open_run(tmp_path / "a.pt").records[0].tensors()}
    assert known["batch.input_ids"] == "input_ids"
    assert known["batch.old_log_probs"] == "old_logprobs"
    assert known["non_tensor_batch.uid"] == "uid"
    assert known["meta_info.lr"] == "meta_info.lr"


def _several(folder: Path, weights: list[float]) -> Finding | None:
    flags = {"reward_weights": [1.0, 0.5], "reward_funcs": ["right", "format"]}
    with Recorder(folder, flags=flags) as recorder:
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            right, form = torch.rand(2, 12, generator=draw)
            with recorder.step(step) as record:
                record("trajectory", input_ids=torch.randint(5, 40, (12, 8), generator=draw),
                       attention_mask=torch.ones(12, 8, dtype=torch.int64),
                       rewards=weights[0] * right + weights[1] * form,
                       **{"reward_function.right": right, "reward_function.format": form})  # fmt: skip
    return _found(folder, "D104")


def test_stated_weights_are_in_the_order_of_the_stated_functions(tmp_path: Path) -> None:
    found = _several(tmp_path / "of 1", [1.0, 1.0])
    assert found is not None
    assert found.severity == "error"
    assert _several(tmp_path / "right", [1.0, 0.5]) is None


def _with_auxiliary(folder: Path, weight: float, *, micros: int = 1) -> Finding | None:
    flags = {"router_aux_loss_coef": 0.01, "task": "sft"}
    with Recorder(folder, flags=flags) as recorder:
        for step in range(8):
            draw = torch.Generator().manual_seed(step)
            with recorder.step(step) as record:
                for micro in range(micros):
                    own, aux = (float(each) for each in torch.rand(2, generator=draw, dtype=torch.float64) + 1)
                    record("loss", micro=micro, lm_loss=own / micros, aux_loss=aux, loss=own / micros + weight * aux)
    return _found(folder, "D140")


def test_a_balancing_loss_beside_that_of_words_is_weighed(tmp_path: Path) -> None:
    found = _with_auxiliary(tmp_path / "turned", -0.01)
    assert found is not None
    assert "subtracted" in found.claim
    assert _with_auxiliary(tmp_path / "right", 0.01) is None
    assert _with_auxiliary(tmp_path / "a part of its update", 0.005, micros=2) is None

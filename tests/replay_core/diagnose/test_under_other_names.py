"""What a rule needs and the record holds under another name, in another shape, or stated in another place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.rules import old_weights
from replay_core.diagnose.signal_names import named
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.runs import GRPO, RESPONSE, batch, scores_of

MICRO = 10


def _apart(path: Path, change: Callable[[dict[str, Any]], None] | None = None, *, wrong: bool = False) -> Path:
    """A table of ids, rewards and groups beside micro-batches in another order, which name the ids."""
    with Recorder(path, flags=GRPO) as recorder:
        for step in range(4):
            fields = batch(step)
            rows = len(fields["uid"])
            ids = torch.arange(rows) + 1000 * step
            table = {
                "sample_ids": ids, "group_ids": torch.arange(rows) // 5, "rewards": scores_of(fields),
                "weight_version": torch.full((rows,), step),
            }  # fmt: skip
            if wrong:
                table["rewards"] = table["rewards"].roll(1)
            if change is not None:
                change(table)
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(step))
            with recorder.step(step, rank=0) as record:
                record("trajectory", table)
                for micro, some in enumerate(order.split(MICRO)):
                    held = {
                        name: fields[name][some]
                        for name in ("input_ids", "attention_mask", "response_mask", "rollout_log_probs",
                                     "old_log_probs", "advantages")
                    }  # fmt: skip
                    record("forward_data", {**held, "sample_ids": ids[some], "group_ids": some // 5}, micro=micro,
                           alignment=dict.fromkeys(("response_mask", "rollout_log_probs", "old_log_probs",
                                                    "advantages"), "response"))  # fmt: skip
    return path


def _batches(path: Path) -> list[StepBatch]:
    return list(Case(open_run(path)).batches())


def test_a_table_without_tokens_is_of_the_samples_whose_ids_it_names(tmp_path: Path) -> None:
    first, *others = _batches(_apart(tmp_path / "d"))
    assert len(others) == 3
    assert first.reward_B is not None
    assert first.columns.per_sample("weight_version") is not None
    rewards_N = first.columns.of("reward")
    assert rewards_N is not None
    assert rewards_N.said_N.all()
    assert np.allclose(rewards_N.values_N, np.repeat(first.reward_B, first.flat.lengths_B))


def test_advantages_are_held_against_the_rewards_of_such_a_table(tmp_path: Path) -> None:
    right, wrong = (of(look(_apart(tmp_path / str(one), wrong=one), "D04"), "D04") for one in (False, True))
    assert right is not None
    assert right.severity == "info"
    assert wrong is None or wrong.severity != "info"


def _twice(table: dict[str, Any]) -> None:
    table["sample_ids"][1] = table["sample_ids"][0]


def _fewer(table: dict[str, Any]) -> None:
    table.update({name: values[:12] for name, values in table.items()})


def _other_groups(table: dict[str, Any]) -> None:
    table["group_ids"] = table["group_ids"].roll(7)


@pytest.mark.parametrize("change", [_twice, _fewer, _other_groups], ids=["one id twice", "not all", "other groups"])
def test_ids_that_do_not_tell_join_nothing(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    assert all(one.reward_B is None for one in _batches(_apart(tmp_path / "d", change)) if one.spine.has_tokens)


@pytest.mark.parametrize("name", ["entropies", "token_entropy", "entropys"])
def test_entropies_are_known_by_their_names(name: str, tmp_path: Path) -> None:
    fields = batch(0)
    with Recorder(tmp_path / "d") as recorder, recorder.step(0) as record:
        record("trajectory", {**fields, name: torch.ones(len(fields["uid"]), RESPONSE)},
               alignment={name: "response"})  # fmt: skip
    assert _batches(tmp_path / "d")[0].columns.of("entropy") is not None


def _of_functions(path: Path, weights: tuple[float, ...], **flags: object) -> Path:
    with Recorder(path, flags={**GRPO, **flags}) as recorder:
        for step in range(4):
            fields = batch(step)
            parts_BF = torch.stack(
                [scores_of(fields), torch.rand(30, generator=torch.Generator().manual_seed(step))], 1
            )
            del fields["token_level_scores"], fields["token_level_rewards"]
            with recorder.step(step) as record:
                record("trajectory", {**fields, "rewards_per_func": parts_BF,
                                      "rewards": parts_BF @ torch.tensor(weights)})  # fmt: skip
    return path


def test_reward_functions_are_the_columns_of_a_matrix(tmp_path: Path) -> None:
    columns = _batches(_of_functions(tmp_path / "d", (1.0, 0.5)))[0].columns
    assert columns.reward_functions == ["rewards_per_func.0", "rewards_per_func.1"]
    assert columns.reward_functions_FB is not None
    assert columns.reward_functions_FB.shape == (2, 30)
    assert not columns.are_sums_alone


@pytest.mark.parametrize(("weights", "severity"), [((1.0, 0.5), None), ((0.5, 1.0), "error")])
def test_the_columns_of_a_matrix_have_the_stated_weights(
    weights: tuple[float, float], severity: str | None, tmp_path: Path
) -> None:
    found = of(look(_of_functions(tmp_path / "d", weights, reward_weights=[1.0, 0.5]), "D104"), "D104")
    assert (None if found is None else found.severity) == severity


def _logged(path: Path, *, stage: str = "training_metrics", **flags: object) -> Path:
    with Recorder(path, flags=dict(flags)) as recorder:
        for step in range(6):
            with recorder.step(step) as record:
                record(stage, grad_norm=900.0 + step, lr=1e-6)
    return path


@pytest.mark.parametrize("flags", [{"max_grad_norm": 1.0}, {"max_norm": 1.0}, {"actor": {"grad_clip": 1.0}}])
def test_a_norm_to_clip_at_may_be_stated_among_the_flags(flags: dict[str, Any], tmp_path: Path) -> None:
    run = open_run(_logged(tmp_path / "d", **flags))
    found = of(diagnose(Case(run, Signals.of(run)), ["L15"]), "L15")
    assert found is not None
    assert found.severity == "warning"


@pytest.mark.parametrize(("steps", "told"), [(20, True), (3, False)])
def test_a_warm_up_may_be_stated_among_the_flags(steps: int, told: bool, tmp_path: Path) -> None:
    path = _logged(tmp_path / "d", trainer={"total_training_steps": 10}, optim={"lr": 1e-6, "lr_warmup_steps": steps})
    found = of(look(path, "L07"), "L07")
    assert (found is not None) is told


@pytest.mark.parametrize(("most", "severity"), [(2, "warning"), (6, "info")])
def test_a_limit_of_staleness_may_lie_in_a_table(most: int, severity: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d", flags={"async": {"max_staleness": most}}) as recorder, recorder.step(7) as record:
        record("trajectory", {**batch(7), "weight_version": torch.arange(30) // 6 + 3})
    found = of(look(tmp_path / "d", "D31"), "D31")
    assert found is not None
    assert found.severity == severity


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        ("frac_zero_std", "frac_zero_std"), ("train/frac_groups_zero_std", "frac_zero_std"),
        ("reward_std", "reward_std"), ("num_turns", "turns"), ("rewards_chosen", "pair_reward"),
        ("rewards_margins", "pair_reward"), ("logps_rejected", "pair_logps"), ("chosen_reward", "pair_reward"),
        ("reject_reward", "pair_reward"), ("train/rejected_rewards", "pair_reward"),
    ],
)  # fmt: skip
def test_figures_are_known_by_what_trainers_call_them(name: str, signal: str) -> None:
    found = named(name)
    assert found is not None
    assert found.signal == signal


def test_ages_are_told_apart_by_their_own_limit() -> None:
    """D12's limit was another rule's, whose constant further down had its name."""
    assert old_weights.ALIKE < old_weights.UNLIKE

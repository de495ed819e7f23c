"""What turns earn and weigh, where their trajectories are cut, and what a penalty on their length counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.runs import GRPO, PROMPT, RESPONSE, Fields, batch, recorded, scores_of, told


def _draw(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(300 + step)


def _paid(fields: Fields, scores: torch.Tensor) -> None:
    mask = fields["response_mask"]
    each = torch.zeros(mask.shape)
    each[torch.arange(len(scores)), torch.stack([row.nonzero()[-1, 0] for row in mask])] = scores
    fields["token_level_scores"], fields["token_level_rewards"] = each, each.clone()
    groups = scores.view(6, 5)
    made = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    fields["advantages"] = made.view(-1, 1) * mask
    fields["returns"] = fields["advantages"].clone()


def _by_turn(step: int, fields: Fields, of_turns: Callable[[torch.Tensor], torch.Tensor]) -> None:
    turns = torch.rand(30, 3, generator=_draw(step))
    fields["step_rewards"] = turns
    _paid(fields, of_turns(turns))


def test_rewards_of_earlier_turns_are_lost(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", lambda step, fields: _by_turn(step, fields, lambda turns: turns[:, -1]))
    (found,) = told(path, "D134")
    assert found.severity == "warning"
    assert found.claim.startswith("the reward is that of the last turn")


@pytest.mark.parametrize("name", ["reward_aggregation", "turn_reward_mode", "prm_aggregation"])
def test_a_last_turn_that_is_meant(name: str, tmp_path: Path) -> None:
    path = recorded(
        tmp_path / "run",
        lambda step, fields: _by_turn(step, fields, lambda turns: turns[:, -1]),
        flags={**GRPO, name: "last"},
    )
    assert not told(path, "D134")


def _outcome_alone(step: int, fields: Fields) -> None:
    """Nothing is paid before the end."""
    turns = torch.zeros(30, 3)
    turns[:, -1] = torch.rand(30, generator=_draw(step))
    fields["step_rewards"] = turns
    _paid(fields, turns[:, -1])


@pytest.mark.parametrize(
    "change",
    [
        lambda step, fields: _by_turn(step, fields, lambda turns: turns.sum(1)),
        lambda step, fields: _by_turn(step, fields, lambda turns: turns.mean(1)),
        lambda step, fields: _by_turn(step, fields, lambda turns: turns[:, -1] + 0.5 * turns[:, 0]),
        _outcome_alone,
    ],
)
def test_turns_that_are_paid_are_quiet(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    assert told(recorded(tmp_path / "run", change), "D134") == []


def _votes(step: int, fields: Fields, *, failed: int, solved: int) -> None:
    """Each prompt has failed and solved trajectories, a row for each of their turns; advantages of trajectories."""
    trajectories, uid, rewards = [], [], []
    for prompt in range(30 // (2 * (failed + solved))):
        for one, (turns, reward) in enumerate([(failed, 0.0), (solved, 1.0)] * 2):
            trajectories += [f"{step}-{prompt}-{one}"] * turns
            uid += [f"{step}-{prompt}"] * turns
            rewards += [reward] * turns
    rows = len(uid)
    for name, value in fields.items():
        fields[name] = value[:rows]
    scores, mask = torch.tensor(rewards), fields["response_mask"]
    fields["uid"], fields["traj_uid"] = uid, trajectories
    each = torch.zeros(mask.shape)
    each[torch.arange(rows), mask.sum(1) - 1] = scores
    fields["token_level_scores"], fields["token_level_rewards"] = each, each.clone()
    fields["advantages"] = torch.where(scores > 0, 0.866, -0.866)[:, None] * mask
    fields["returns"] = fields["advantages"].clone()


def _weighing(path: Path, flags: dict[str, Any], failed: int, solved: int) -> Any:
    run = recorded(path, lambda step, fields: _votes(step, fields, failed=failed, solved=solved), flags=flags)
    return of(look(run, "D135"), "D135")


ROWS = {**GRPO, "actor.loss_agg_mode": "seq-mean-token-mean"}


def test_failed_trajectories_have_more_votes(tmp_path: Path) -> None:
    found = _weighing(tmp_path / "run", ROWS, 4, 1)
    assert found.severity == "warning"
    assert "those of lower rewards have 4 times as many" in found.claim


def test_votes_that_lean_to_what_is_solved_are_worth_knowing(tmp_path: Path) -> None:
    assert _weighing(tmp_path / "run", ROWS, 2, 4).severity == "info"


@pytest.mark.parametrize(
    ("flags", "failed", "solved"), [({**GRPO, "actor.loss_agg_mode": "token-mean"}, 4, 1), (ROWS, 2, 2), (GRPO, 4, 1)]
)
def test_other_means_and_equal_turns_are_quiet(tmp_path: Path, flags: dict[str, Any], failed: int, solved: int) -> None:
    assert _weighing(tmp_path / "run", flags, failed, solved) is None


def _cut(step: int, fields: Fields, *, said: str = "", lower: bool = False) -> None:
    """Two fifths of the rows are of two turns and end at the limit without an end; their rewards are as they were."""
    draw, mask = _draw(step), fields["response_mask"]
    cut = torch.rand(30, generator=draw) < 0.4
    count = int(cut.sum())
    fields["responses"][cut] = torch.randint(5, 60, (count, RESPONSE), generator=draw)
    fields["attention_mask"][cut, PROMPT:] = 1
    scores = scores_of(fields)
    mask[cut] = 1
    mask[cut, 3:5] = 0
    logps = -torch.rand(mask.shape, generator=draw)
    fields["rollout_log_probs"] = torch.where(cut[:, None], logps * mask, fields["rollout_log_probs"])
    fields["old_log_probs"] = torch.where(cut[:, None], logps, fields["old_log_probs"])
    if lower:
        scores[cut] = 0.0
    _paid(fields, scores)
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
    fields["position_ids"] = (fields["attention_mask"].cumsum(1) - 1).clamp(min=0)
    if said == "ended":
        fields["finish_reason"] = ["stop"] * 29 + ["length"]
    if said == "cut":
        fields["finish_reason"] = ["length" if each else "stop" for each in cut.tolist()]
    if said == "turns":
        fields["num_turns"] = torch.where(cut, 4, 1)
    if said == "own turns":
        fields["num_turns"] = torch.where(cut, 2, 1)


@pytest.mark.parametrize("said", ["ended", "turns"])
def test_trajectories_are_cut_after_they_were_scored(tmp_path: Path, said: str) -> None:
    (found,) = told(recorded(tmp_path / "run", lambda step, fields: _cut(step, fields, said=said)), "D137")
    assert found.severity == "warning"
    assert found.claim.startswith("trajectories are cut at 9 tokens after they were scored")


def test_rewards_alone_are_worth_knowing(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        _cut(step, fields)
        mask = fields["response_mask"]
        _paid(fields, torch.where(mask[:, -1] > 0, 1.0, scores_of(fields)))

    found = of(look(recorded(tmp_path / "run", change), "D137"), "D137")
    assert found is not None
    assert found.severity == "info"
    assert "earn as much" in found.claim


@pytest.mark.parametrize(("said", "lower"), [("cut", True), ("own turns", True), ("", True)])
def test_cut_rows_that_are_paid_as_such_are_quiet(tmp_path: Path, said: str, lower: bool) -> None:
    path = recorded(tmp_path / "run", lambda step, fields: _cut(step, fields, said=said, lower=lower))
    assert of(look(path, "D137"), "D137") is None


def _penalty(
    step: int, fields: Fields, *, counts: str, limit: float = 9.0, buffer: float = 6.0, tools: bool = True
) -> None:
    """A soft penalty on overlong answers, of tokens that count, of all tokens, or of characters."""
    draw, mask = _draw(step), fields["response_mask"]
    whole = mask.sum(1).float()
    called = (whole >= 6) & (torch.rand(30, generator=draw) < 0.7) & tools
    mask[called, 2:4] = 0
    fields["rollout_log_probs"] = fields["rollout_log_probs"] * mask
    texts = ["x" * int(4 * size + torch.randint(0, 6, (1,), generator=draw)) for size in whole.tolist()]
    sizes = {"counted": mask.sum(1).float(), "all": whole, "characters": torch.tensor([float(len(t)) for t in texts])}
    fields["response_text"] = texts
    fields["overlong_reward"] = ((limit - buffer - sizes[counts]) / buffer).clamp(-1, 0)
    one = fields["advantages"].sum(1) / (fields["advantages"] != 0).sum(1).clamp(min=1)
    fields["advantages"] = one[:, None] * mask
    fields["returns"] = fields["advantages"].clone()


def test_a_penalty_that_counts_tool_output(tmp_path: Path) -> None:
    (found,) = told(recorded(tmp_path / "run", lambda step, fields: _penalty(step, fields, counts="all")), "D132")
    assert found.severity == "warning"
    assert found.claim.startswith("the penalty on length counts tool output")


@pytest.mark.parametrize(("limit", "buffer"), [(40.0, 30.0), (9.0, 4.0)])
def test_a_penalty_that_counts_characters(tmp_path: Path, limit: float, buffer: float) -> None:
    flags = {**GRPO, "soft_punish_cache": buffer, "data.max_response_length": limit}
    path = recorded(
        tmp_path / "run",
        lambda step, fields: _penalty(step, fields, counts="characters", limit=limit, buffer=buffer),
        flags=flags,
    )
    (found,) = told(path, "D132")
    assert found.claim.startswith("the penalty on length counts characters, not tokens")


@pytest.mark.parametrize(("counts", "tools"), [("counted", True), ("counted", False), ("all", False)])
def test_a_penalty_on_the_policys_tokens_is_right(tmp_path: Path, counts: str, tools: bool) -> None:
    path = recorded(tmp_path / "run", lambda step, fields: _penalty(step, fields, counts=counts, tools=tools))
    assert told(path, "D132") == []


def test_a_penalty_of_another_make_says_nothing(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        _penalty(step, fields, counts="all")
        fields["overlong_reward"] = -torch.rand(30, generator=_draw(step + 9))

    assert told(recorded(tmp_path / "run", change), "D132") == []


def _updates(path: Path, counts: list[int], stated: int = 2) -> Path:
    """Each step in that many mini-batches, the last one cut off."""
    with Recorder(path, flags={"num_mini_batches": stated}) as recorder:
        for step, count in enumerate([*counts, 1]):
            fields = {name: batch(step)[name] for name in ("input_ids", "attention_mask")}
            with recorder.step(step) as record:
                for part in range(count):
                    rows = {name: value[part::count] for name, value in fields.items()}
                    record("forward_data", rows, micro=part, minibatch=part)
    return path


def test_more_turns_make_more_updates(tmp_path: Path) -> None:
    (found,) = told(_updates(tmp_path / "run", [2, 5, 3, 6]), "D124")
    assert found.severity == "warning"
    assert found.claim == "steps have 2 to 6 updates, and the run states 2 mini-batches"


@pytest.mark.parametrize("counts", [[2, 2, 2, 2], [2, 1, 2, 2], [2, 2, 3, 2]])
def test_steps_with_the_stated_updates_are_quiet(tmp_path: Path, counts: list[int]) -> None:
    assert told(_updates(tmp_path / "run", counts), "D124") == []

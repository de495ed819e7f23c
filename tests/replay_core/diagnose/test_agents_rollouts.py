"""How agents' rollouts are recorded (turns, packs, ragged rows, interrupted responses) and what goes wrong in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

STEPS, GROUPS, EACH = 4, 6, 4
CALL, TOOL, END = 5, 6, 2


class Agents:
    """One step's answers of agents: turns of the policy with a tool's words between them, ids that are drawn."""

    def __init__(self, step: int) -> None:
        draw = np.random.default_rng(70 + step)
        self.draw, self.step = draw, step
        self.group_B = np.repeat(np.arange(GROUPS) + GROUPS * step, EACH)
        self.prompts = [[1, 10 + int(group) % 30, 3, 41 + int(group) // 8] for group in self.group_B]
        self.turns = [[draw.integers(10, 60, draw.integers(2, 5)).tolist() for _ in range(draw.integers(1, 4))]
                      for _ in self.group_B]  # fmt: skip
        self.rewards = [np.round(draw.normal(size=len(turns)), 3).tolist() for turns in self.turns]

    def responses(self) -> tuple[list[list[int]], list[list[int]]]:
        """Ids and mask of each: the tool's words do not count."""
        ids: list[list[int]] = []
        masks: list[list[int]] = []
        for turns in self.turns:
            row: list[int] = []
            mask: list[int] = []
            for number, turn in enumerate(turns):
                last = number == len(turns) - 1
                row += [*turn, END if last else CALL] + ([] if last else [TOOL, 60 + number, TOOL])
                mask += [1] * (len(turn) + 1) + ([] if last else [0] * 3)
            ids.append(row)
            masks.append(mask)
        return ids, masks

    def numbers(self, masks: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of what was sampled, and 0 on the tool's words."""
        return [[-float(self.draw.uniform(0.05, 2.5)) * bit for bit in mask] for mask in masks]

    def spread(self, masks: list[list[int]], of_turns: list[list[float]]) -> list[list[float]]:
        """One number of each turn on each of its tokens."""
        found = []
        for mask, numbers in zip(masks, of_turns, strict=True):
            turn, row, before = -1, [], 0
            for bit in mask:
                turn += bit > before
                row.append(numbers[turn] if bit else 0.0)
                before = bit
            found.append(row)
        return found

    def by_turn(self, rewards: list[list[float]]) -> list[list[float]]:
        """The return to go of each turn, measured against the turns of one number in its group."""
        went = [[sum(row[turn:]) for turn in range(len(row))] for row in rewards]
        found = [[0.0] * len(row) for row in went]
        for group in np.unique(self.group_B):
            members = np.flatnonzero(self.group_B == group)
            for turn in range(3):
                there = [at for at in members if len(went[at]) > turn]
                values = np.array([went[at][turn] for at in there])
                if len(values) > 1:
                    made = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
                    for at, value in zip(there, made, strict=True):
                        found[at][turn] = float(value)
        return found


def _padded(rows: list[Any], kind: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=kind) for row in rows], batch_first=True)


def _late(rewards: list[list[float]]) -> list[list[float]]:
    return [[0.0, *row[:-1]] for row in rewards]


def _early(rewards: list[list[float]]) -> list[list[float]]:
    return [[*row[1:], 0.0] for row in rewards]


def _credited(directory: Path, change: Any) -> Path:
    directory.mkdir()
    for step in range(STEPS):
        agents = Agents(step)
        ids, masks = agents.responses()
        made = agents.by_turn(change(agents.rewards))
        np.savez(
            directory / f"step_{step}.npz",
            prompt_ids=np.array(agents.prompts), response_ids=_padded(ids).numpy(), action_mask=_padded(masks).numpy(),
            old_logprobs=_padded(agents.numbers(masks), torch.float32).numpy(), group_id=agents.group_B,
            advantages=_padded(agents.spread(masks, made), torch.float32).numpy(),
            turn_rewards=_padded(agents.rewards, torch.float32).numpy(),
        )  # fmt: skip
    return directory


@pytest.mark.parametrize(("change", "which"), [(_late, "before it"), (_early, "after it")])
def test_turns_are_paid_for_another_turns_reward(change: Any, which: str, tmp_path: Path) -> None:
    found = of(look(_credited(tmp_path / "run", change), "D171"), "D171")
    assert found is not None
    assert found.severity == "error"
    assert which in found.claim


def test_turns_that_are_paid_for_themselves(tmp_path: Path) -> None:
    assert of(look(_credited(tmp_path / "run", lambda rewards: rewards), "D171"), "D171") is None


def _lines(directory: Path, prompts_alike: bool) -> Path:
    """A line a sample, lists as long as they are: prompts of one length come out as a matrix."""
    directory.mkdir()
    for step in range(STEPS):
        agents = Agents(step)
        ids, masks = agents.responses()
        said = agents.numbers(masks)
        with (directory / f"step_{step}.jsonl").open("w") as file:
            for at, prompt in enumerate(agents.prompts):
                asked = prompt if prompts_alike else prompt[: 3 + agents.group_B[at] % 2]
                row = {
                    "group": f"g{agents.group_B[at]}", "prompt_ids": asked, "completion_ids": ids[at],
                    "completion_mask": masks[at], "rollout_logprobs": said[at], "old_logprobs": said[at],
                    "reward": sum(agents.rewards[at]), "finish_reason": "stop",
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
    return directory


@pytest.mark.parametrize("alike", [True, False], ids=["prompts of one length", "ragged prompts"])
def test_ragged_lines_are_samples(alike: bool, tmp_path: Path) -> None:
    found = look(_lines(tmp_path / "run", alike))
    assert not [one for one in found.findings if one.severity != "info"]
    assert "D09" in found.checked


def _packed(directory: Path) -> Path:
    """Rows of several samples, whose mask numbers them."""
    recorder = Recorder(directory)
    for step in range(STEPS):
        agents = Agents(step)
        ids, masks = agents.responses()
        said = agents.numbers(masks)
        rows: dict[str, list[list[Any]]] = {"ids": [], "numbers": [], "positions": [], "counts": [], "said": []}
        for first in range(0, len(ids), 3):
            pack: dict[str, list[Any]] = {name: [] for name in rows}
            for number, at in enumerate(range(first, first + 3), 1):
                whole = agents.prompts[at] + ids[at]
                pack["ids"] += whole
                pack["numbers"] += [number] * len(whole)
                pack["positions"] += range(len(whole))
                pack["counts"] += [0] * len(agents.prompts[at]) + masks[at]
                pack["said"] += [0.0] * len(agents.prompts[at]) + said[at]
            for name, row in pack.items():
                rows[name].append(row)
        with recorder.step(step) as record:
            record(
                "batch_inputs", query_responses=_padded(rows["ids"]), attention_masks=_padded(rows["numbers"]),
                position_ids=_padded(rows["positions"]), response_masks=_padded(rows["counts"]),
                vllm_logprobs=_padded(rows["said"], torch.float32), old_logprobs=_padded(rows["said"], torch.float32),
                scores=torch.tensor([sum(each) for each in agents.rewards]),
            )  # fmt: skip
    return directory


def test_packs_whose_mask_numbers_their_samples(tmp_path: Path) -> None:
    found = look(_packed(tmp_path / "run"))
    assert not [one for one in found.findings if one.severity != "info"]


def _interrupted(directory: Path, heads: Any) -> list[Finding]:
    """Responses whose first tokens have no number of the engine."""
    recorder = Recorder(directory)
    for step in range(STEPS):
        agents = Agents(step)
        ids, masks = agents.responses()
        said = agents.numbers(masks)
        told = [list(row) for row in said]
        for at, row in enumerate(told):
            lost = [place for place, bit in enumerate(masks[at]) if bit][: heads(at)]
            for place in lost:
                row[place] = 0.0
        length = max(map(len, ids))
        full = [prompt + row for prompt, row in zip(agents.prompts, ids, strict=True)]
        with recorder.step(step) as record:
            record(
                "trajectory", input_ids=_padded(full), attention_mask=_padded([[1] * len(row) for row in full]),
                responses=_padded(ids), response_mask=_padded(masks), group_ids=torch.tensor(agents.group_B),
                rollout_log_probs=_padded(told, torch.float32), old_log_probs=_padded(said, torch.float32),
                prompts=torch.tensor(agents.prompts),
            )  # fmt: skip
        assert length
    return [one for one in look(directory, "D41").findings if one.id == "D41"]


def test_what_the_engine_said_before_an_interruption_is_lost(tmp_path: Path) -> None:
    (found,) = _interrupted(tmp_path / "run", lambda at: 1 + at % 4 if at % 2 else 0)
    assert "exactly 0 on the first tokens" in found.claim
    assert "interrupted" in (found.cause or "")


def test_all_that_the_engine_said_is_there(tmp_path: Path) -> None:
    assert not _interrupted(tmp_path / "run", lambda at: 0)


def _grouped(directory: Path, *, interleaved: bool, twice: bool = False) -> list[Finding]:
    """Advantages of groups that no id names: of equal prompts, or of rows that lie so many apart."""
    recorder = Recorder(directory, flags={"num_generations": EACH})
    for step in range(STEPS):
        draw = np.random.default_rng(step)
        rewards = np.round(draw.normal(size=(GROUPS * EACH)), 3)
        asked = np.repeat(np.arange(GROUPS), EACH)
        rows = np.arange(GROUPS * EACH) % GROUPS if interleaved else asked
        if twice:
            asked = np.where(asked == 1, 0, asked)
        sums = np.array([rewards[rows == row].mean() for row in rows])
        stds = np.array([rewards[rows == row].std(ddof=1) for row in rows])
        ids = draw.integers(10, 60, (GROUPS * EACH, 6))
        with recorder.step(step) as record:
            record(
                "trajectory", prompt_ids=torch.tensor([[1, 20 + 7 * step + group, 3] for group in asked]),
                prompt_mask=torch.ones(GROUPS * EACH, 3, dtype=torch.int64), completion_ids=torch.tensor(ids),
                completion_mask=torch.ones(GROUPS * EACH, 6, dtype=torch.int64),
                advantages=torch.tensor((rewards - sums) / (stds + 1e-4), dtype=torch.float32),
                rewards=torch.tensor(rewards, dtype=torch.float32),
            )  # fmt: skip
    return [one for one in look(directory, "D04").findings if one.id == "D04" and one.severity != "info"]


def test_groups_that_no_id_names_are_interleaved(tmp_path: Path) -> None:
    (found,) = _grouped(tmp_path / "run", interleaved=True)
    assert f"every {GROUPS}th row as a group" in found.claim


@pytest.mark.parametrize("twice", [False, True], ids=["each prompt once", "a prompt that is drawn twice"])
def test_groups_that_no_id_names_are_right(twice: bool, tmp_path: Path) -> None:
    assert not _grouped(tmp_path / "run", interleaved=False, twice=twice)


def _steps(directory: Path, *, of_trajectories: bool) -> Path:
    """A row for each turn, whose prompt holds what went before; one reward, on the last."""
    recorder = Recorder(directory)
    for step in range(STEPS):
        agents = Agents(step)
        rows: list[list[int]] = []
        prompts: list[list[int]] = []
        owner: list[int] = []
        last: list[bool] = []
        for at, turns in enumerate(agents.turns):
            before = list(agents.prompts[at])
            for number, turn in enumerate(turns):
                prompts.append(list(before))
                rows.append([*turn, CALL])
                owner.append(at)
                last.append(number == len(turns) - 1)
                before += [*turn, CALL, TOOL, 60 + number]
        paid = np.array([1.0 if agents.draw.random() < 0.5 else 0.0 for _ in agents.turns])
        group_B = agents.group_B[owner]
        if of_trajectories:
            made = np.array([paid[agents.group_B == group].mean() for group in agents.group_B])
            stds = np.array([paid[agents.group_B == group].std(ddof=1) for group in agents.group_B])
            advantages = ((paid - made) / (stds + 1e-6))[owner]
        else:
            each = np.where(last, paid[owner], 0.0)
            made = np.array([each[group_B == group].mean() for group in group_B])
            stds = np.array([each[group_B == group].std(ddof=1) for group in group_B])
            advantages = (each - made) / (stds + 1e-6)
        width = max(map(len, prompts))
        ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        masks = [[1] * len(row) for row in rows]
        rewards = _padded([[0.0] * (len(row) - 1) + [paid[at] if end else 0.0]
                           for row, at, end in zip(rows, owner, last, strict=True)], torch.float32)  # fmt: skip
        attention = torch.cat(
            [torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]), _padded(masks)], 1
        )
        with recorder.step(step) as record:
            record(
                "batch_inputs", sequences=torch.cat([torch.tensor(ids), _padded(rows)], 1), attention_mask=attention,
                response_mask=_padded(masks), loss_mask=_padded(masks), rewards=rewards,
                advantages=torch.tensor(advantages, dtype=torch.float32)[:, None] * _padded(masks),
                uids=[f"q{group}" for group in group_B], trajectory_ids=[f"t{at}" for at in owner],
                is_last_step=torch.tensor(last),
            )  # fmt: skip
    return directory


def test_turns_before_the_last_one_count_as_answers_that_earned_nothing(tmp_path: Path) -> None:
    found = of(look(_steps(tmp_path / "run", of_trajectories=False), "D04", "D42"), "D04")
    assert found is not None
    assert found.severity == "warning"
    assert found.claim.startswith("turns before the last one count as answers that earned nothing")


def test_turns_of_one_question_mix_no_prompts(tmp_path: Path) -> None:
    found = look(_steps(tmp_path / "run", of_trajectories=True), "D04", "D42", "D56")
    assert not [one for one in found.findings if one.severity != "info"]


def test_two_ranks_with_the_same_rows_are_no_copies(tmp_path: Path) -> None:
    for step in range(STEPS):
        agents = Agents(step)
        ids, masks = agents.responses()
        said = agents.numbers(masks)
        full = [prompt + row for prompt, row in zip(agents.prompts, ids, strict=True)]
        counts = [[0] * len(prompt) + mask for prompt, mask in zip(agents.prompts, masks, strict=True)]
        for rank in range(2):
            torch.save(
                {
                    "tokens": _padded(full), "loss_mask": _padded(counts),
                    "attention_mask": _padded([[1] * len(row) for row in full]),
                    "sampling_logprobs": _padded([[0.0] * 4 + row for row in said], torch.float32),
                    "group_ids": torch.tensor(agents.group_B + 1000 * rank),
                },
                tmp_path / f"step{step}_rank{rank}.pt",
            )  # fmt: skip
    found = look(tmp_path, "D65", "D75")
    assert {one.id for one in found.findings} & {"D65", "D75"}


def test_a_verifier_that_ran_out_of_time_grades_as_wrong(tmp_path: Path) -> None:
    for step in range(STEPS):
        agents = Agents(step)
        ids, masks = agents.responses()
        with (tmp_path / f"step_{step}.jsonl").open("w") as file:
            for at, prompt in enumerate(agents.prompts):
                late = agents.draw.random() < 0.25
                row = {
                    "group_id": f"g{agents.group_B[at]}", "prompt_ids": prompt, "completion_ids": ids[at],
                    "completion_mask": masks[at], "verifier_status": "timeout" if late else "ok",
                    "reward": 0.0 if late else float(agents.draw.random() < 0.6),
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
    found = of(look(tmp_path, "D131"), "D131")
    assert found is not None
    assert found.severity == "warning"
    assert "verifier timeout" in found.claim


def _weighed(directory: Path, *, with_tools: bool) -> list[Finding]:
    """One weight of a response, the mean over what the policy wrote, or over the tool's words as well."""
    recorder = Recorder(directory, flags={"rollout_is": "geometric", "rollout_is_threshold": 2.0})
    for step in range(STEPS):
        agents = Agents(step)
        ids, masks = agents.responses()
        engine = agents.numbers(masks)
        trainer = [[value + agents.draw.normal() * 0.1 if bit else -float(agents.draw.uniform(2, 6))
                    for value, bit in zip(row, mask, strict=True)]
                   for row, mask in zip(engine, masks, strict=True)]  # fmt: skip
        weights = []
        for row, old, mask in zip(engine, trainer, masks, strict=True):
            apart = np.array(old) - np.array(row)
            counted = np.ones(len(mask), bool) if with_tools else np.array(mask, bool)
            weights.append((min(float(np.exp(apart[counted].mean())), 2.0) * np.array(mask)).tolist())
        full = [prompt + row for prompt, row in zip(agents.prompts, ids, strict=True)]
        with recorder.step(step) as record:
            record(
                "trajectory", input_ids=_padded(full), attention_mask=_padded([[1] * len(row) for row in full]),
                prompts=torch.tensor(agents.prompts), responses=_padded(ids), response_mask=_padded(masks),
                rollout_log_probs=_padded(engine, torch.float32), old_log_probs=_padded(trainer, torch.float32),
                rollout_is_weights=_padded(weights, torch.float32), group_ids=torch.tensor(agents.group_B),
            )  # fmt: skip
    return [one for one in look(directory, "D59").findings if one.id == "D59"]


def test_a_sequences_weight_takes_in_what_a_tool_wrote(tmp_path: Path) -> None:
    (found,) = _weighed(tmp_path / "run", with_tools=True)
    assert found.severity == "error"
    assert "those too that no engine sampled" in found.claim


def test_a_sequences_weight_of_what_the_policy_wrote(tmp_path: Path) -> None:
    assert not _weighed(tmp_path / "run", with_tools=False)


def _aged(directory: Path, age: Any, *, steps: int = 12) -> list[Finding]:
    recorder = Recorder(directory)
    for step in range(steps):
        agents = Agents(step)
        ids, masks = agents.responses()
        full = [prompt + row for prompt, row in zip(agents.prompts, ids, strict=True)]
        counts = [[0] * len(prompt) + mask for prompt, mask in zip(agents.prompts, masks, strict=True)]
        with recorder.step(step) as record:
            record(
                "trajectory", input_ids=_padded(full), attention_mask=_padded([[1] * len(row) for row in full]),
                loss_mask=_padded(counts), group_ids=torch.tensor(agents.group_B),
                weight_version=torch.full((len(full),), max(step - age(step), 0)),
            )  # fmt: skip
    return [one for one in look(directory, "D31").findings if one.id == "D31" and one.severity != "info"]


def test_samples_get_ever_older(tmp_path: Path) -> None:
    (found,) = _aged(tmp_path / "run", lambda step: step - step // 2)
    assert "ever older" in found.claim


def test_a_pipeline_that_fills_in_its_first_steps(tmp_path: Path) -> None:
    assert not _aged(tmp_path / "run", lambda step: min(step, 3))


def _filled_up(directory: Path, *, copies: bool) -> list[Finding]:
    """Rows at the end whose mask is empty: copies of the first, or answers of their own."""
    recorder = Recorder(directory)
    for step in range(STEPS):
        agents = Agents(step)
        ids, masks = agents.responses()
        full = [prompt + row for prompt, row in zip(agents.prompts, ids, strict=True)]
        counts = [[0] * len(prompt) + mask for prompt, mask in zip(agents.prompts, masks, strict=True)]
        if copies:
            full, counts = full + full[:4], counts + [[0] * len(row) for row in full[:4]]
        else:
            counts[-4:] = [[0] * len(row) for row in full[-4:]]
        with recorder.step(step) as record:
            record(
                "trajectory", input_ids=_padded(full), attention_mask=_padded([[1] * len(row) for row in full]),
                loss_mask=_padded(counts),
            )  # fmt: skip
    return [one for one in look(directory, "D07").findings if one.id == "D07"]


def test_masked_copies_fill_a_batch_up(tmp_path: Path) -> None:
    found = _filled_up(tmp_path / "run", copies=True)
    assert {one.severity for one in found} == {"info"}
    assert "fill the batch up" in found[0].claim


def test_answers_of_their_own_without_a_token_in_the_loss(tmp_path: Path) -> None:
    assert {one.severity for one in _filled_up(tmp_path / "run", copies=False)} == {"warning"}


def _parted(directory: Path, apart: Any) -> list[Finding]:
    """Engine and trainer, so far apart on each token by `apart(step, row, how unsure the token is)`."""
    recorder = Recorder(directory)
    for step in range(8):
        agents = Agents(step)
        ids, masks = agents.responses()
        engine = agents.numbers(masks)
        trainer = [[value + apart(agents.draw, step, at, 1 - np.exp(value)) * bit
                    for value, bit in zip(row, mask, strict=True)]
                   for at, (row, mask) in enumerate(zip(engine, masks, strict=True))]  # fmt: skip
        full = [prompt + row for prompt, row in zip(agents.prompts, ids, strict=True)]
        with recorder.step(step) as record:
            record(
                "trajectory", input_ids=_padded(full), attention_mask=_padded([[1] * len(row) for row in full]),
                prompts=torch.tensor(agents.prompts), responses=_padded(ids), response_mask=_padded(masks),
                rollout_log_probs=_padded(engine, torch.float32), old_log_probs=_padded(trainer, torch.float32),
                group_ids=torch.tensor(agents.group_B), weight_version=torch.full((len(full),), step),
            )  # fmt: skip
    return [one for one in look(directory, "D09", "D12").findings if one.id in ("D09", "D12")]


def test_a_gap_that_all_samples_have_is_not_of_few(tmp_path: Path) -> None:
    found = _parted(tmp_path / "run", lambda draw, step, at, unsure: draw.normal() * 0.05 * unsure)
    assert not [one for one in found if "few samples" in one.claim or "prompts differ" in one.claim]


def test_a_push_that_leaves_a_part_out_goes_before_a_guess_of_one_step(tmp_path: Path) -> None:
    found = _parted(
        tmp_path / "run",
        lambda draw, step, at, unsure: (
            0.0 if not step else draw.normal() * (0.35 if at == 3 and step == 5 else 0.025) * unsure
        ),
    )
    told = [one for one in found if one.severity != "info"]
    assert len(told) == 1
    assert "does not hold all of the trainer's weights" in told[0].claim


def _of_two_functions(directory: Path, share: Any) -> list[Finding]:
    """Whether an answer is right, which pays a share of the samples, and a bonus on its format."""
    recorder = Recorder(directory)
    for step in range(10):
        agents = Agents(step)
        ids, masks = agents.responses()
        right = (agents.draw.random(len(ids)) < share(step)).astype(np.float32)
        bonus = (agents.draw.random(len(ids)) < 0.8).astype(np.float32)
        with recorder.step(step) as record:
            record(
                "trajectory", prompt_ids=torch.tensor(agents.prompts), completion_ids=_padded(ids),
                completion_mask=_padded([[1] * len(row) for row in ids]), tool_mask=_padded(masks),
                rewards_per_func=torch.tensor(np.stack([right, bonus], 1)), rewards=torch.tensor(right + 0.1 * bonus),
                prompt_mask=torch.ones(len(ids), 4, dtype=torch.int64),
            )  # fmt: skip
    return [one for one in look(directory, "D172").findings if one.id == "D172"]


def test_a_reward_function_pays_nothing_any_more(tmp_path: Path) -> None:
    (found,) = _of_two_functions(tmp_path / "run", lambda step: 0.5 if step < 5 else 0.0)
    assert found.severity == "warning"
    assert "pays nothing from step 5 on" in found.claim


def test_a_few_prompts_that_none_solves_are_no_function_that_broke(tmp_path: Path) -> None:
    """Answers to a prompt are right or wrong nearly all together, and a step has two prompts."""
    draw = np.random.default_rng(0)
    with Recorder(tmp_path / "run") as recorder:
        for step in range(6):
            prompts = torch.tensor(draw.integers(3, 90, (2, 4))).repeat_interleave(16, 0)
            right = np.repeat([step < 3, False], 16).astype(np.float32)
            bonus = (draw.random(32) < 0.8).astype(np.float32)
            with recorder.step(step) as record:
                record(
                    "trajectory", prompt_ids=prompts, completion_ids=torch.tensor(draw.integers(3, 90, (32, 6))),
                    prompt_mask=torch.ones(32, 4, dtype=torch.int64), rewards=torch.tensor(right + 0.1 * bonus),
                    completion_mask=torch.ones(32, 6, dtype=torch.int64),
                    rewards_per_func=torch.tensor(np.stack([right, bonus], 1)),
                )  # fmt: skip
    assert of(look(tmp_path / "run", "D172"), "D172") is None


@pytest.mark.parametrize(
    "share",
    [lambda step: 0.5, lambda step: max(0.5 - 0.12 * step, 0.0), lambda step: 0.02],
    ids=["it pays to the last", "it fades", "it hardly ever paid"],
)
def test_a_reward_function_that_does_not_break(share: Any, tmp_path: Path) -> None:
    assert not _of_two_functions(tmp_path / "run", share)

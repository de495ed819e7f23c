"""Engines that take samples in turns, with weights of several ages: a really trained asynchronous run, which says of
each sample what it is of, or that samples may be old. No pack leaks in it, and no version is wrong.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Finding
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.updating import DIGITS, PROMPT, VOCABULARY, Net, rewarded, sampled, scores

ENGINES, GROUPS, SIZE, STEPS = 4, 6, 8, 8


def trained(folder: Path, ages: tuple[int, ...], flags: dict[str, Any], *, versions: bool, says: int = 0) -> Path:
    """ages: of the engines' weights, in updates; they take rows in turns. says: what is added to their versions."""
    recorder = Recorder(folder, flags={"dtype": "float32", "temperature": 1.0, **flags})
    net, past = Net(0, lora=False, dead=False), list[Net]()
    draw, optimizer = torch.Generator().manual_seed(0), torch.optim.Adam(net.parameters(), lr=2e-2)
    for step in range(STEPS):
        past.append(copy.deepcopy(net))
        prompts = torch.randint(DIGITS, VOCABULARY, (GROUPS, PROMPT), generator=draw).repeat_interleave(SIZE, 0)
        B = len(prompts)
        ids, told = torch.zeros(B, PROMPT + 8, dtype=torch.long), torch.zeros(B, 8)
        held, version = torch.zeros_like(ids), torch.zeros(B, dtype=torch.long)
        for engine, age in enumerate(ages):
            rows, of = torch.arange(engine, B, ENGINES), max(step - age, 0)
            ids[rows], held[rows], told[rows] = sampled(past[of], prompts[rows], 8, draw)
            version[rows] = min(of + says, step)
        mask = held.clone()
        mask[:, :PROMPT] = 0
        m = mask[:, 1:].float()
        said = torch.cat([torch.zeros(B, PROMPT - 1), told], 1)
        rewards = rewarded(ids, held, False)
        each = rewards.view(-1, SIZE)
        per = ((each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-4)).reshape(-1)
        with torch.no_grad():
            old = scores(net, ids)
        more = {"weight_version": version} if versions else {}
        net.zero_grad()
        now = scores(net, ids)
        loss = ((-per[:, None] * (now - old).exp() * m).sum(1) / m.sum(1)).mean()
        loss.backward()
        optimizer.step()
        with recorder.step(step, rank=0) as record:
            record(
                "trajectory", input_ids=ids, attention_mask=held, response_mask=mask, rewards=rewards,
                group_id=torch.arange(B) // SIZE, rollout_log_probs=said, old_log_probs=old,
                advantages=per[:, None] * m, **more,
            )  # fmt: skip
    recorder.close()
    return folder


def loud(path: Path) -> list[Finding]:
    return [one for one in diagnose(Case(open_run(path))).findings if one.severity != "info"]


@pytest.mark.parametrize("ages", [(0, 2, 2, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("versions", [True, False])
def test_engines_that_take_turns_are_no_packs(ages: tuple[int, ...], versions: bool, tmp_path: Path) -> None:
    path = trained(tmp_path / "run", ages, {"max_staleness": 3}, versions=versions)
    assert not loud(path)


def test_nor_where_the_run_states_nothing(tmp_path: Path) -> None:
    found = {one.id for one in loud(trained(tmp_path / "run", (0, 2, 2, 2), {}, versions=False))}
    assert "D16" not in found


def test_samples_that_are_older_than_they_say_are_told_of(tmp_path: Path) -> None:
    path = trained(tmp_path / "run", (2, 2, 2, 2), {}, versions=True, says=2)
    assert [(one.id, one.severity) for one in loud(path)][:1] == [("D12", "error")]

"""A tiny softmax policy is really updated, its batch recorded with one thing wrong; the rules compute what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Diagnosis
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

#: Every test trains and records 16 micro-batches: half a second of CPU.
pytestmark = pytest.mark.long
STEPS, PROMPTS, N, LENGTH, VOCAB = 4, 4, 4, 6, 12


def recorded(path: Path, fault: str = "", **settings: Any) -> Diagnosis:
    """GRPO on a table of logits, two mini-batches of two micro-batches; the target rewards even tokens."""
    torch.manual_seed(3)
    facts = {
        "adv_estimator": "grpo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "kl_loss_type": "k3",
        "loss_agg_mode": "token-mean", **settings,
    }  # fmt: skip
    table = torch.nn.Parameter(torch.randn(VOCAB, VOCAB) * 0.5)
    reference = table.detach().clone()
    optimizer = torch.optim.Adam([table], lr=0.3)
    recorder = Recorder(path, flags=facts)
    rows, width = PROMPTS * N, LENGTH + 2

    def score(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return weights[ids[:, :-1]].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    for step in range(STEPS):
        ids = torch.zeros(rows, width, dtype=torch.long)
        ids[:, 0] = 1
        ids[:, 1] = 2 + torch.arange(rows) // N + step
        with torch.no_grad():
            for at in range(2, width):
                ids[:, at] = 1 + torch.multinomial(table[ids[:, at - 1], 1:-1].softmax(-1), 1)[:, 0]
        mask, attention = torch.zeros(rows, width - 1), torch.ones(rows, width, dtype=torch.long)
        mask[:, 1:] = 1
        for row in range(rows):
            end = width - 1 - row % 3
            mask[row, end:], attention[row, end + 1 :], ids[row, end:], ids[row, end] = 0, 0, 0, VOCAB - 1
        reward = ((ids[:, 2:] % 2 == 0).float() * mask[:, 1:]).sum(1) / LENGTH + 0.01 * torch.arange(rows)
        group = reward.view(PROMPTS, N)
        advantage = ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-6)).reshape(-1)
        if fault == "batch":
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        if fault == "leave one out":
            advantage = (group - group.mean(1, keepdim=True)).reshape(-1)
        with torch.no_grad():
            old, ref = score(table, ids), score(reference, ids)
        uid = [f"{step}-{row // N}" for row in range(rows)]
        opened = recorder.open_step(step, rank=0)
        common = {"attention_mask": attention, "response_mask": mask, "uid": uid}
        opened("trajectory", input_ids=ids, rewards=reward, old_log_probs=old, ref_log_probs=ref,
               advantages=advantage[:, None] * mask, **common)  # fmt: skip
        number = 0
        for mini in torch.arange(rows).chunk(2):
            optimizer.zero_grad()
            for ix in mini.chunk(2):
                new, a, m, before = score(table, ids[ix]), advantage[ix, None], mask[ix], old[ix]
                if fault == "refreshed":
                    before = new.detach()
                ratio = ((before - new) if fault == "upside down" else (new - before)).exp()
                plain, cut = -a * ratio, -a * ratio.clamp(0.8, 1.2)
                token = torch.minimum(plain, cut) if fault == "smaller" else torch.maximum(plain, cut)
                token = -token if fault == "sign" else token
                if most := {"dual at 1.05": 1.05, "dual at 3": 3.0, "dual at 5": 5.0}.get(fault):
                    token = torch.where(a < 0, torch.minimum(token, -most * a), token)
                if fault == "dual of all":
                    token = torch.minimum(token, -3 * a)
                pg = (token * m).sum() / m.sum()
                d = ref[ix] - new
                kl = ((-d if fault == "k1" else d.exp() - d - 1) * m).sum() / m.sum()
                (pg + 0.01 * kl).backward()
                opened("forward_data", input_ids=ids[ix], attention_mask=attention[ix],
                       response_mask=m, uid=[uid[i] for i in ix.tolist()], old_log_probs=before, log_probs=new.detach(),
                       ref_log_probs=ref[ix], advantages=a * m, micro=number)  # fmt: skip
                opened("loss", pg_loss=pg.detach(), kl_loss=kl.detach(), prob_ratio=ratio.detach(), micro=number)
                number += 1
            optimizer.step()
        recorder.end_step(opened)
    recorder.close()
    run = open_run(path)
    return diagnose(Case(run, Signals.of(run)))


@pytest.mark.parametrize(
    ("fault", "settings", "id", "words"),
    [
        ("upside down", {}, "D50", "upside down"),
        ("smaller", {}, "D50", "the smaller of clipped and unclipped"),
        ("sign", {}, "D50", "the sign is wrong"),
        ("dual at 1.05", {"clip_ratio_c": 3.0}, "D50", "the dual clip acts at 1.05, and the run states 3"),
        ("dual of all", {}, "D50", "the dual clip cuts positive advantages, too"),
        ("refreshed", {}, "D60", "refreshed in every mini-batch"),
        ("k1", {}, "D29", "the KL loss is k1, and the run states k3"),
        ("batch", {}, "D04", "over the whole batch"),
        ("leave one out", {"adv_estimator": "rloo"}, "D04", "includes the sample itself"),
    ],
)
def test_a_wrong_objective_is_named_by_the_formula_that_makes_it(
    tmp_path: Path, fault: str, settings: dict[str, Any], id: str, words: str
) -> None:
    found = [one for one in recorded(tmp_path / "dump", fault, **settings).findings if one.severity != "info"]
    first = next(one for one in found if one.downstream_of is None)
    assert (first.id, words in first.claim) == (id, True), [(one.id, one.claim) for one in found]


@pytest.mark.parametrize(
    ("fault", "settings"),
    [("", {}), ("dual at 3", {}), ("dual at 3", {"clip_ratio_c": 3.0}), ("dual at 5", {"clip_ratio_c": 5.0}),
     ("dual at 1.05", {})],
)  # fmt: skip
def test_a_right_objective_is_nobody_s_finding(fault: str, settings: dict[str, Any], tmp_path: Path) -> None:
    found = recorded(tmp_path / "dump", fault, **settings).findings
    assert [(one.id, one.claim) for one in found if one.severity != "info"] == []

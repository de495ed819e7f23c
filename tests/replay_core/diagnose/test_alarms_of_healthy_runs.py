"""Trained runs that are well and were called ill once, each beside one that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.diagnose import forms
from benchmarks.diagnose.trainer import Recipe, train
from replay_core.diagnose.finding import Diagnosis
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.updating import Recipe as Small
from tests.replay_core.diagnose.updating import run, told

pytestmark = pytest.mark.long


def _stated(path: Path, **flags: object) -> Path:
    """The dump with more flags in its manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["flags"] |= flags
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def _constant(path: Path, divided: float, **flags: object) -> Path:
    """Dr. GRPO by hand, four micro-batches of an update, each response's sum divided by `divided` times its rows."""
    recorder = Recorder(path, flags={"adv_estimator": "dr_grpo", "max_response_length": 8, **flags})
    draw = torch.Generator().manual_seed(3)
    net = torch.nn.Embedding(12, 12)
    torch.nn.init.normal_(net.weight, generator=draw)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    group = torch.arange(16) // 4
    for step in range(4):
        ids = torch.randint(2, 12, (16, 11), generator=draw)
        with torch.no_grad():
            for place in range(3, 11):
                ids[:, place] = torch.multinomial(net(ids[:, place - 1]).softmax(-1), 1, generator=draw)[:, 0]
        length = torch.randint(3, 9, (16,), generator=draw)
        mask = ((torch.arange(11) >= 3) & (torch.arange(11) < 3 + length[:, None])).long()
        reward = (ids[:, 3] > 6).float() + 0.5 * (ids[:, 4] > 6).float()
        each = reward.view(4, 4)
        per = (each - each.mean(1, keepdim=True)).reshape(-1)

        def said(rows: torch.Tensor, ids: torch.Tensor = ids) -> torch.Tensor:
            return net(ids[rows, :-1]).log_softmax(-1).gather(-1, ids[rows, 1:, None])[..., 0]

        m = mask[:, 1:].float()
        optimizer.zero_grad()
        with recorder.step(step, rank=0) as record:
            record("trajectory", input_ids=ids, attention_mask=(torch.arange(11) < 3 + length[:, None]).long(),
                   response_mask=mask, rewards=reward, group_id=group, advantages=per[:, None] * m)  # fmt: skip
            for micro, rows in enumerate(torch.arange(16).chunk(4)):
                now, old = said(rows), said(rows).detach()
                loss = (-(now - old).exp() * per[rows, None] * m[rows]).sum() / (len(rows) * divided)
                loss.backward()
                key: dict[str, Any] = {"micro": micro, "epoch": 0, "minibatch": 0}
                record("forward_data", input_ids=ids[rows], response_mask=mask[rows], log_probs=now.detach(),
                       old_log_probs=old, advantages=per[rows, None] * m[rows], **key)  # fmt: skip
                record("loss", pg_loss=loss.detach(), loss=loss.detach(), **key)
        optimizer.step()
    recorder.close()
    return path


def test_a_micro_batchs_share_of_a_constant_is_no_other_constant(tmp_path: Path) -> None:
    whole, shared, other = (
        of(look(_constant(tmp_path / name, divided), "D28"), "D28")
        for name, divided in (("whole", 8.0), ("shared", 32.0), ("other", 48.0))
    )
    assert whole is not None
    assert whole.severity == "info"
    assert shared is not None
    assert shared.severity == "info"
    assert other is not None
    assert other.severity == "error"
    assert "divides each response's sum by 48, and the run states 8" in other.claim


@pytest.mark.parametrize(("fault", "lr", "is_told"), [("", 1e-7, False), ("kl-missing", 4e-3, True), ("", 4e-3, False)])
def test_a_kl_too_small_to_be_seen_is_not_missed(fault: str, lr: float, is_told: bool, tmp_path: Path) -> None:
    found = told(tmp_path, Small(fault, kl=0.01, lr=lr, schooled=True), "D49")
    assert [one.id for one in found] == ["D49"] * is_told
    assert all("not in the loss" in one.claim for one in found)


def test_a_kl_next_to_nothing_is_not_missed(tmp_path: Path) -> None:
    """A policy that has moved by so little that its KL, weighed, is below what a loss of single precision holds."""
    assert not told(tmp_path, Small("", kl=0.001, lr=1e-4, schooled=True), "D49")


def test_a_tools_answer_is_not_as_long_as_the_engine_wrote(tmp_path: Path) -> None:
    recipe = Recipe("run", fault="tools-counted", steps=4, kept=4, prompts=4, limit=6)
    path = forms.native(train(recipe), tmp_path / "run")
    found = look(_stated(path, max_response_length=4))
    assert [one.id for one in causes(found)][:1] == ["D41"]
    assert of(found, "D124") is None
    assert of(look(_stated(path, max_response_length=2), "D124"), "D124") is not None


def _mask_of_ids(path: Path, fault: str) -> Diagnosis:
    return look(run(path, Small(fault, schooled=True, ends=(5, 8, 11))), "D19", "D48", "D81")


def test_an_end_that_goes_with_its_padding_is_put_down_to_the_shared_id(tmp_path: Path) -> None:
    found = of(_mask_of_ids(tmp_path / "run", "end-is-pad"), "D19")
    assert found is not None
    assert "pad_token_id is eos_token_id" in found.cause or "share the id" in found.cause


def test_of_whole_responses_the_cause_is_the_id_and_no_shift(tmp_path: Path) -> None:
    """The engine's own response mask beside a loss mask of ids: every mask begins with its response."""
    recipe = Recipe("run", fault="end-untrained", steps=3, kept=3, prompts=4, warm=200)
    found = of(look(_stated(forms.native(train(recipe), tmp_path / "run"), pad_token_id=0), "D19"), "D19")
    assert found is not None
    assert "shifted" not in found.cause or "Not a shift" in found.cause


def test_masks_that_reach_the_end_of_their_rows_are_looked_at(tmp_path: Path) -> None:
    recipe = Recipe("run", fault="mask-shifted", steps=3, kept=3, prompts=4, limit=6, warm=60)
    told_of = look(forms.native(train(recipe), tmp_path / "run"))
    assert not [one for one in told_of.skipped if "failed on this input" in one.why]


class _Less(Recorder):
    """A recorder of a trainer that records neither its ratios nor its tokens' losses."""

    @contextmanager
    def step(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with super().step(*args, **kwargs) as record:

            def less(stage: str, *mapping: Any, **fields: Any) -> Any:
                left = {name: value for name, value in fields.items() if name not in ("token_loss", "prob_ratio")}
                return record(stage, *mapping, **left)

            yield less


@pytest.mark.parametrize("seed", [1, 4])
def test_a_bound_that_one_token_just_passes_does_not_hide_how_cispo_is_made(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CISPO has no lower bound, and a range is stated whose lower end one token of the run has just passed: with it
    the loss is another by 1.5e-4.
    """
    monkeypatch.setattr(forms, "Recorder", _Less)
    recipe = Recipe("run", algorithm="cispo", clip_low=1.0, clip_high=0.28, minibatches=2, epochs=2, micros=1, lr=5e-4,
                    steps=4, kept=4, seed=seed)  # fmt: skip
    trained = train(recipe)
    least, loss, token, tokens = min(
        (float(one.tensors["ratio"][at]), one.numbers["pg_loss"], float(one.tensors["token_loss"][at]),
         one.numbers["tokens"])
        for step in trained.kept for one in step.micros
        for at in zip(*(one.tensors["mask"] * one.tensors["advantages"].abs() > 1e-3).nonzero(as_tuple=True),
                      strict=True)
    )  # fmt: skip
    more = 1.5e-4 * abs(loss) * tokens / abs(token)
    path = forms.native(trained, tmp_path / "run")
    settings = {"kind": "cispo", "clip_low": 1 - least * (1 + more), "clip_high": 0.28}
    found = look(_stated(path, loss=settings), "D28", "D50", "D61").findings
    assert [one.severity for one in found] == ["info"], [one.claim for one in found]
    assert found[0].claim.startswith("pg_loss is token-mean over the micro-batch")
    assert found[0].steps == (0, 1, 2, 3)

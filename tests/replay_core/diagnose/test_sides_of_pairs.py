"""Pairs whose answers stand under names of their own, and losses that are made without a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

PAIRS, WIDTH, BETA, TARGET = 6, 12, 2.0, 0.8


class _Drawn:
    """A micro-batch of pairs: prompts, answers that begin behind them, and log-probabilities of their tokens."""

    def __init__(self, step: int) -> None:
        draw = torch.Generator().manual_seed(step)
        self.asked = torch.randint(2, 5, (PAIRS,), generator=draw)
        prompts = torch.randint(5, 40, (PAIRS, WIDTH), generator=draw)
        self.ids, self.attention, self.counts, self.logps, self.refs = [], [], [], [], []
        for _ in range(2):
            answer = torch.randint(5, 40, (PAIRS, WIDTH), generator=draw)
            length = self.asked + torch.randint(3, 8, (PAIRS,), generator=draw)
            place = torch.arange(WIDTH)
            ids = torch.where(place < self.asked[:, None], prompts, answer)
            self.attention.append((place < length[:, None]).long())
            self.ids.append(ids * self.attention[-1])
            self.counts.append(((place >= self.asked[:, None]) & (place < length[:, None])).long())
            logps = -3 * torch.rand(PAIRS, WIDTH - 1, generator=draw) * self.counts[-1][:, 1:]
            self.logps.append(logps)
            self.refs.append(logps + torch.randn(PAIRS, WIDTH - 1, generator=draw) * self.counts[-1][:, 1:])

    def sums(self, of: list[Tensor]) -> list[Tensor]:
        return [each.double().sum(1) for each in of]

    @property
    def tokens(self) -> list[Tensor]:
        return [each.sum(1).double() for each in self.counts]

    @property
    def nll(self) -> Tensor:
        return -self.logps[0].double().sum() / self.counts[0].sum()


def _loss(how: str, drawn: _Drawn) -> Tensor:
    better, worse = drawn.sums(drawn.logps)
    ref_better, ref_worse = drawn.sums(drawn.refs)
    long_better, long_worse = drawn.tokens
    mean = better / long_better - worse / long_worse
    odds = [a - torch.log1p(-a.exp()) for a in (better / long_better, worse / long_worse)]
    margin = (better - ref_better) - (worse - ref_worse)
    part = -BETA * logsigmoid(odds[0] - odds[1]).mean()
    made = {
        "simpo": lambda: -logsigmoid(BETA * mean - TARGET).mean(),
        "simpo, target added": lambda: -logsigmoid(BETA * mean + TARGET).mean(),
        "simpo of sums": lambda: -logsigmoid(BETA * (better - worse) - TARGET).mean(),
        "cpo": lambda: -logsigmoid(BETA * (better - worse)).mean() + drawn.nll,
        "cpo turned": lambda: -logsigmoid(BETA * (worse - better)).mean() + drawn.nll,
        "orpo": lambda: drawn.nll + part,
        "orpo, subtracted": lambda: drawn.nll - part,
        "hinge": lambda: relu(1 - BETA * margin).mean(),
        "hinge turned": lambda: relu(1 + BETA * margin).mean(),
        "sigmoid": lambda: -logsigmoid(BETA * margin).mean(),
        "sigmoid turned": lambda: -logsigmoid(-BETA * margin).mean(),
    }[how]()
    return made


def _fields(laid: str, drawn: _Drawn, with_ref: bool) -> dict[str, Any]:
    """The pairs as trainers record them: each side's tokens, each side's sums, or the sides as halves of one batch."""
    sides = ("chosen", "rejected")
    if laid == "halves":
        halves = {"input_ids": drawn.ids, "attention_mask": drawn.attention, "loss_mask": drawn.counts,
                  "log_probs": drawn.logps, **({"ref_log_probs": drawn.refs} if with_ref else {})}  # fmt: skip
        return {name: torch.cat(each) for name, each in halves.items()}
    held = {}
    for at, side in enumerate(sides):
        held[f"{side}_input_ids"], held[f"{side}_attention_mask"] = drawn.ids[at], drawn.attention[at]
        if laid == "tokens":
            held |= {f"{side}_loss_mask": drawn.counts[at], f"{side}_logprobs": drawn.logps[at]}
            held |= {f"ref_{side}_logprobs": drawn.refs[at]} if with_ref else {}
        else:
            held[f"{side}_labels"] = torch.where(drawn.counts[at] != 0, drawn.ids[at], -100)
            by = drawn.tokens[at] if laid == "means" else 1.0
            held[f"policy_{side}_logps"] = drawn.sums(drawn.logps)[at] / by
            held |= {f"reference_{side}_logps": drawn.sums(drawn.refs)[at]} if with_ref else {}
    return held


def _run(folder: Path, how: str, laid: str, rule: str = "D143") -> Finding | None:
    kind = how.partition(",")[0].split()[0]
    flags = {"loss_type": kind, "beta": BETA, **({"simpo_gamma": TARGET} if kind == "simpo" else {})}
    with Recorder(folder, flags=flags) as recorder:
        for step in range(5):
            drawn = _Drawn(step)
            with recorder.step(step) as record:
                record("forward_data", micro=0, **_fields(laid, drawn, kind in ("hinge", "sigmoid")))
                more: dict[str, Any] = {"nll_loss": float(drawn.nll)} if kind in ("cpo", "orpo") else {}
                record("loss", micro=0, loss=float(_loss(how, drawn)), **more)
    return of(look(folder, rule), rule)


@pytest.mark.parametrize("laid", ["halves", "tokens", "sums"])
@pytest.mark.parametrize(
    ("how", "words"),
    [("simpo, target added", "added to the margin"), ("simpo of sums", "sums over tokens"),
     ("cpo turned", "turned around"), ("orpo, subtracted", "subtracted"), ("hinge turned", "turned around")],
)  # fmt: skip
def test_a_mistake_in_a_loss_of_pairs_is_named_however_they_are_recorded(
    how: str, words: str, laid: str, tmp_path: Path
) -> None:
    found = _run(tmp_path / "run", how, laid)
    assert found is not None
    assert found.severity == "error"
    assert words in found.claim


@pytest.mark.parametrize("laid", ["halves", "tokens", "sums"])
@pytest.mark.parametrize("how", ["simpo", "cpo", "orpo", "hinge", "sigmoid"])
def test_losses_of_pairs_as_they_are_stated_are_quiet(how: str, laid: str, tmp_path: Path) -> None:
    assert _run(tmp_path / "run", how, laid) is None


@pytest.mark.parametrize(("how", "words"), [("simpo", ""), ("orpo", ""), ("simpo, target added", "added to the margin"),
                                            ("orpo, subtracted", "subtracted")])  # fmt: skip
def test_means_over_tokens_that_are_recorded_are_not_divided_again(how: str, words: str, tmp_path: Path) -> None:
    found = _run(tmp_path / "run", how, "means")
    assert (found is not None and words in found.claim) if words else found is None


@pytest.mark.parametrize("laid", ["halves", "tokens", "sums"])
def test_pairs_and_their_loss_in_two_records_are_one_micro_batch(laid: str, tmp_path: Path) -> None:
    found = _run(tmp_path / "run", "sigmoid turned", laid, "D154")
    assert found is not None
    assert "swapped" in found.claim


def test_the_prompt_in_the_worse_answers_mask_is_told_of_sides_with_names(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        for step in range(3):
            drawn = _Drawn(step)
            drawn.counts[1] = drawn.attention[1]
            with recorder.step(step) as record:
                record("forward_data", micro=0, **_fields("tokens", drawn, True))
    found = of(look(tmp_path / "run", "D153"), "D153")
    assert found is not None
    assert found.severity == "error"
    assert found.where is not None
    assert (found.where.tensor, found.where.sample) == ("rejected_loss_mask", 0)


def _scored(folder: Path, sign: float, names: tuple[str, str]) -> Finding | None:
    with Recorder(folder, flags={"task": "reward_model"}) as recorder:
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            better, worse = torch.randn(2, PAIRS, generator=draw)
            margin = 0.5 + torch.rand(PAIRS, generator=draw)
            with recorder.step(step) as record:
                record("forward_data", micro=0, margin=margin, **{names[0]: better, names[1]: worse})
                record("loss", micro=0, loss=float(-logsigmoid(better - worse + sign * margin).mean()))
    return of(look(folder, "D143"), "D143")


@pytest.mark.parametrize("names", [("rewards_chosen", "rewards_rejected"), ("chosen_scores", "rejected_scores")])
def test_a_margin_that_is_added_to_the_scores_is_told(names: tuple[str, str], tmp_path: Path) -> None:
    found = _scored(tmp_path / "added", 1.0, names)
    assert found is not None
    assert "margin added" in found.claim
    assert _scored(tmp_path / "subtracted", -1.0, names) is None

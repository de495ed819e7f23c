"""Why ranks part that each face their own of the other run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.compare import among_ranks
from replay_core.jobs import Event, Partial, Progress
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, random, write

IDS = torch.randint(2, 40, (2, 16), generator=torch.Generator().manual_seed(3))
HIDDEN, WEIGHT, SHARED = random(2, 16, 8), random(12, 8, seed=1), random(8, seed=2)
PART = random(8, seed=3)


def tensor_parallel(norms: list[torch.Tensor], slices: list[torch.Tensor] | None = None) -> list[Step]:
    """Two ranks with the same tokens and half of a weight each; norms: the gradient of a norm on each."""
    halves = WEIGHT.chunk(2)
    return [
        {
            "batch_inputs": {"input_ids": IDS},
            "modules": {"layers.0.norm.output": HIDDEN, "layers.0.q_proj.output": HIDDEN @ put_out.T},
            "gradient": {"grad.layers.0.norm.weight": norm, "grad.layers.0.q_proj.weight": half.contiguous() * 2},
            "param": {"param.layers.0.q_proj.weight": half.contiguous()},
        }
        for norm, half, put_out in zip(norms, halves, slices or halves, strict=True)
    ]


def context_parallel(own: list[slice]) -> list[Step]:
    """Ranks with these tokens of each sample, and the tokens that follow them as labels."""
    labels = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], 1)
    return [
        {
            "batch_inputs": {"input_ids": IDS[:, mine].contiguous(), "labels": labels[:, mine].contiguous()},
            "modules": {"embed_tokens.output": HIDDEN[:, mine].contiguous()},
        }
        for mine in own
    ]


def data_parallel(gradients: list[torch.Tensor]) -> list[Step]:
    """Ranks with samples of their own, each as long as no other's."""
    return [
        {
            "batch_inputs": {"input_ids": IDS[rank : rank + 1, : 10 + 3 * rank].contiguous()},
            "modules": {"norm.output": HIDDEN[rank : rank + 1, : 10 + 3 * rank].contiguous()},
            "gradient": {"grad.norm.weight": made},
        }
        for rank, made in enumerate(gradients)
    ]


RIGHT = tensor_parallel([SHARED, SHARED])
IN_ORDER, EARLY = [slice(0, 8), slice(8, 16)], [slice(0, 8), slice(7, 15)]
FAULTY: dict[str, tuple[list[Step], list[Step], str, list[int], str]] = {
    "a norm's gradient is not summed": (
        RIGHT, tensor_parallel([PART, SHARED - PART]), "not summed", [0, 1], "layers.0.norm.weight's gradient",
    ),
    "slices stand in another order": (
        RIGHT, tensor_parallel([SHARED, SHARED], list(WEIGHT.chunk(2)[::-1])), "order", [0, 1], "q_proj.output",
    ),
    "a stretch begins early": (
        context_parallel(IN_ORDER), context_parallel(EARLY), "boundary", [1], "1 too early",
    ),
    "gradients of samples of several lengths are not averaged": (
        data_parallel([SHARED, SHARED]), data_parallel([PART, 2 * SHARED - PART]), "not averaged", [0, 1], "their mean",
    ),
}  # fmt: skip


def block(tmp_path: Path, a: Sequence[Step], b: Sequence[Step], **asked: Any) -> tuple[Any, dict[str, Any]]:
    doc = workbench.compare_dumps(write(tmp_path / "a", *a), write(tmp_path / "b", *b), **asked)
    return doc.get("parallel"), dict(doc)


@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_among_ranks_is_named_against_the_same_ranks_done_right(case: str, tmp_path: Path) -> None:
    a, b, kind, ranks, said = FAULTY[case]
    found, doc = block(tmp_path, a, b)
    fault = there(found)["faults"][0]
    assert (fault["kind"], fault["ranks"]) == (kind, ranks)
    assert said in fault["sentence"]
    assert not any(row.get("ranks") for row in doc["tensors"]), "rank faces rank, as without a cause"


def test_the_same_ranks_once_more_have_no_fault(tmp_path: Path) -> None:
    found, doc = block(tmp_path, RIGHT, RIGHT)
    assert found is None
    assert doc["first_divergence"] is None


def test_the_second_look_says_how_far_it_is_and_no_other_first_divergence(tmp_path: Path) -> None:
    heard: list[Event] = []
    block(tmp_path, RIGHT, tensor_parallel([PART, SHARED - PART]), on_event=heard.append)
    assert len([one for one in heard if isinstance(one, Partial)]) == 1
    assert any(isinstance(one, Progress) and one.what.startswith("why ranks part: ") for one in heard)


@pytest.mark.parametrize("asked", [{"name": ("*norm*",)}, {"digests": True}])
def test_who_asks_for_little_to_be_read_is_told_no_cause(asked: dict[str, Any], tmp_path: Path) -> None:
    if "digests" in asked:
        asked = {**asked, "digests_under": tmp_path / "kept"}
    found, doc = block(tmp_path, RIGHT, tensor_parallel([PART, SHARED - PART]), **asked)
    assert found is None
    assert doc["first_divergence"]


def test_a_step_too_large_to_be_put_together_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(among_ranks, "MOST_BYTES", 1)
    found, doc = block(tmp_path, RIGHT, tensor_parallel([PART, SHARED - PART]))
    assert found is None
    assert any("what went wrong among the 2 ranks of step 0 was not looked for" in note for note in doc["notes"])


def with_texts(prompts: list[str], gradients: list[torch.Tensor]) -> list[Step]:
    """The ranks of RIGHT, each with a text of its own."""
    ranks: list[Any] = tensor_parallel(gradients)
    for one, prompt in zip(ranks, prompts, strict=True):
        one["batch_inputs"] = {**one["batch_inputs"], "prompt": prompt}
    return ranks


def test_texts_of_the_ranks_own_are_in_nobodys_way(tmp_path: Path) -> None:
    a, b = with_texts(["p", "q"], [SHARED, SHARED]), with_texts(["p", "z"], [PART, SHARED - PART])
    found, doc = block(tmp_path, a, b)
    assert [one["kind"] for one in there(found)["faults"]] == ["not summed"]
    assert not any("could not be looked for" in note for note in doc["notes"])


def test_what_the_first_run_did_not_sum_is_no_fault_of_the_others(tmp_path: Path) -> None:
    a: list[Step] = [{"gradient": {"grad.norm.weight": one}} for one in (PART, SHARED - PART)]
    b: list[Step] = [{"gradient": {"grad.norm.weight": SHARED}}] * 2
    found, doc = block(tmp_path, a, b)
    assert doc["first_divergence"]
    assert found is None or not found["faults"]


def test_copies_with_noise_of_their_own_are_not_added_up(tmp_path: Path) -> None:
    def ranks(seed: int, off: float) -> list[Step]:
        noise = [1 + 1e-7 * random(2, 16, 8, seed=seed + rank) for rank in range(2)]
        return [
            {
                "batch_inputs": {"input_ids": IDS},
                "modules": {"norm.output": HIDDEN * one, "o_proj.output": HIDDEN * one + off},
            }
            for one in noise
        ]

    found, doc = block(tmp_path, ranks(10, 0.0), ranks(20, 0.3))
    assert there(doc["first_divergence"])["name"] == "o_proj.output"
    assert not [one for one in (found or {"faults": []})["faults"] if "norm.output" in one["sentence"]]


def test_what_agrees_rank_by_rank_is_no_cause(tmp_path: Path) -> None:
    def ranks(off: float) -> list[Step]:
        """Positions on three axes [axis, sample, position], as of images."""
        found: list[Any] = context_parallel(IN_ORDER)
        for rank, one in enumerate(found):
            at = torch.arange(8) + 8 * rank
            one["batch_inputs"]["position_ids"] = at.expand(3, 2, 8).contiguous()
            one["modules"]["norm.output"] = one["modules"]["embed_tokens.output"] + off * rank
        return found

    found, doc = block(tmp_path, ranks(0.0), ranks(0.5))
    assert there(doc["first_divergence"])["name"] == "norm.output"
    assert not [one for one in (found or {"faults": []})["faults"] if "position_ids" in one["sentence"]]


def test_an_error_of_the_second_look_leaves_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise IndexError("out of bounds")

    monkeypatch.setattr(among_ranks, "compare_runs", broken)
    found, doc = block(tmp_path, RIGHT, tensor_parallel([PART, SHARED - PART]))
    assert found is None
    assert doc["first_divergence"]
    assert any("could not be looked for: IndexError: out of bounds" in note for note in doc["notes"])


def test_a_sum_within_groups_of_ranks_alone_is_told(tmp_path: Path) -> None:
    first, second = HIDDEN, random(2, 16, 8, seed=9)
    whole, name = [first + second] * 4, "layers.0.self_attn.o_proj.output"
    runs = [
        [
            {"batch_inputs": {"input_ids": IDS}, "modules": {"layers.0.q_proj.output": part.contiguous(), name: one}}
            for one, part in zip(made, random(2, 16, 32, seed=4).chunk(4, -1), strict=True)
        ]
        for made in (whole, [first, first, second, second])
    ]
    said = str(block(tmp_path, *runs)[1])
    assert "is not summed over ranks 0, 1, 2 and 3" in said
    assert "within groups of 2 alone" in said

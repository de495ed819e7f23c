"""Where the projection behind attention is not recorded, its weight is solved for, and attention is made again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare.judging.solved_projection import solved_projection
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.judging.test_attention_again import (
    CAUSAL,
    HIDDEN,
    SEQ,
    ZIGZAG,
    attention,
    in_turn_of_rank,
)
from tests.replay_core.compare.ranks.in_memory import alike, as_ref
from tests.replay_core.compare.ranks.recorded import Step, compared, random

SAMPLES = 6
Q, K, V = (
    random(SAMPLES, SEQ, HIDDEN),
    random(SAMPLES, SEQ, HIDDEN // 2, seed=1),
    random(SAMPLES, SEQ, HIDDEN // 2, seed=2),
)
WEIGHT, BIAS = random(HIDDEN, HIDDEN, seed=3), random(HIDDEN, seed=4)
RIGHT = attention(Q, K, V, CAUSAL)
NAME = "layers.0.self_attn.o_proj.output"
GIVEN = [alike(x, x, name=f"layers.0.self_attn.{name}.output")
         for name, x in (("q_proj", Q), ("k_proj", K), ("v_proj", V))]  # fmt: skip


def test_the_weight_and_the_bias_are_those_that_made_the_output() -> None:
    whole = RIGHT @ WEIGHT.T + BIAS
    weight, bias = there(solved_projection(NAME, as_ref(whole), alike(whole, whole, name=NAME), GIVEN))
    assert torch.allclose(torch.from_numpy(weight).float(), WEIGHT, atol=1e-3)
    assert torch.allclose(torch.from_numpy(bias).float(), BIAS, atol=1e-3)


@pytest.mark.parametrize("whole", [RIGHT.flip(1) @ WEIGHT.T, random(SAMPLES, SEQ, HIDDEN, seed=9)])
def test_what_no_attention_makes_has_no_weight(whole: Tensor) -> None:
    assert solved_projection(NAME, as_ref(whole), alike(whole, whole, name=NAME), GIVEN) is None


def test_few_tokens_tell_no_weight() -> None:
    whole = (RIGHT @ WEIGHT.T)[:2]
    few = [alike(x[:2], x[:2], name=one.parts[0].name) for x, one in zip((Q, K, V), GIVEN, strict=True)]
    assert solved_projection(NAME, as_ref(whole), alike(whole, whole, name=NAME), few) is None


def test_positions_that_ranks_count_otherwise_are_told_without_the_weight(tmp_path: Path) -> None:
    ids = torch.arange(SAMPLES * SEQ).reshape(SAMPLES, SEQ)

    def of(at: Tensor, made: Tensor) -> Step:
        values = {"q_proj": Q, "k_proj": K, "v_proj": V, "o_proj": made @ WEIGHT.T}
        return {
            "batch_inputs": {"input_ids": ids[:, at].contiguous()},
            "modules": {f"layers.0.self_attn.{name}.output": x[:, at].contiguous() for name, x in values.items()},
        }

    wrong = attention(Q, K, V, CAUSAL, in_turn_of_rank(torch.arange(SEQ)))
    found = compared(tmp_path, of(torch.arange(SEQ), RIGHT), *(of(at, wrong) for at in ZIGZAG))
    (fault,) = [one.fault for one in there(parallel(found.tensors, found.together)).faults]
    assert "as if the ranks held the sequence in turn, which they hold in zigzag" in fault.sentence

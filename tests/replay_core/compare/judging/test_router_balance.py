"""A router balanced over each rank's own tokens: its gradient is autograd's of the balancing loss, made both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare.judging import router_balance
from replay_core.compare.judging.faults import Fault
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import Step, compared, random

EXPERTS, HIDDEN = 6, 8
IDS = torch.arange(2, 50).reshape(4, 12)
X, ROUTER = random(4, 12, HIDDEN), random(EXPERTS, HIDDEN, seed=1)
#: What the rest of the loss leaves at the router: the same however it is balanced.
REST = 0.05 * random(EXPERTS, HIDDEN, seed=2)
NAME = "layers.0.mlp.router"


def balanced(groups: list[Tensor], chosen: int = 2) -> Tensor:
    """The router's gradient where tokens are counted within these groups [N, hidden] of them."""
    weight = ROUTER.clone().requires_grad_()
    total = sum(len(rows) for rows in groups)
    loss = torch.zeros(())
    for rows in groups:
        probabilities = (rows @ weight.T).softmax(-1)
        given = torch.zeros(EXPERTS).index_add(0, probabilities.topk(chosen).indices.flatten(), torch.ones(
            len(rows) * chosen)) / len(rows)  # fmt: skip
        loss = loss + EXPERTS * (given * probabilities.mean(0)).sum() * len(rows) / total
    (gradient,) = torch.autograd.grad(loss, weight)
    return gradient + REST


def of_ranks(parts: list[Tensor]) -> list[Tensor]:
    return [part.reshape(-1, HIDDEN) for part in parts]


RIGHT = balanced([X.reshape(-1, HIDDEN)])


def step(rows: Tensor, ids: Tensor, gradient: Tensor) -> Step:
    return {
        "batch_inputs": {"input_ids": ids.contiguous()},
        "modules": {
            "layers.0.post_attention_layernorm.output": rows.contiguous(),
            f"{NAME}.output": (rows @ ROUTER.T).contiguous(),
        },
        "gradient": {f"grad.{NAME}.weight": gradient},
    }


@pytest.mark.parametrize("axis", [0, 1], ids=["samples", "tokens"])
@pytest.mark.parametrize(("is_own", "kinds"), [(True, {"own balance"}), (False, set())])
def test_ranks_that_balance_over_their_own_tokens_are_named(
    is_own: bool, kinds: set[str], axis: int, tmp_path: Path
) -> None:
    parts, ids = [*X.chunk(2, axis)], IDS.chunk(2, axis)
    other = RIGHT + 0.01 * random(EXPERTS, HIDDEN, seed=3)
    made = balanced(of_ranks(parts)) if is_own else other
    ranks = [step(part, own, made) for part, own in zip(parts, ids, strict=True)]
    found = compared(tmp_path, step(X, IDS, RIGHT), *ranks)
    told = [one.fault for one in there(parallel(found.tensors, found.together)).faults]
    assert found.agrees is False
    assert {one.kind for one in told} == kinds
    assert not told or told[0].ranks == (0, 1)


def asked(gradient: Tensor, parts: list[Tensor], scores: list[Tensor] | None = None) -> Fault | None:
    said = [part @ ROUTER.T for part in parts] if scores is None else scores
    return router_balance.of_own_tokens(
        "router", as_ref(RIGHT), alike(*[gradient] * len(parts)), cut(said, 0), [cut(parts, 0)]
    )


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_how_many_experts_a_token_is_sent_to_is_found(chosen: int) -> None:
    parts = [*X.reshape(-1, HIDDEN).split([20, 28])]  # of unlike numbers of tokens
    whole, own = balanced([torch.cat(parts)], chosen), balanced(parts, chosen)
    fault = there(asked(RIGHT + own - whole, parts))
    assert (fault.kind, fault.ranks) == ("own balance", (0, 1))
    assert f"{chosen} experts a token" in fault.sentence


def test_the_other_way_round_is_something_else() -> None:
    """The one process, and not the ranks, would have to count alone."""
    parts = [*X.chunk(2)]
    assert asked(2 * RIGHT - balanced(of_ranks(parts)), parts) is None


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_scores_and_gradients_that_say_nothing_are_no_error(value: float) -> None:
    parts = [*X.chunk(2)]
    own = balanced(of_ranks(parts))
    assert asked(own, parts, [torch.full((2, 12, EXPERTS), value)] * 2) is None
    assert asked(own * value if value else RIGHT, parts) is None


def test_a_rank_without_tokens_counts_none() -> None:
    rows = X.reshape(-1, HIDDEN)
    parts = [rows[:20], rows[20:], rows[:0]]
    assert there(asked(balanced(parts[:2]), parts)).kind == "own balance"

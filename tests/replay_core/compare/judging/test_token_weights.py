"""With what weight tokens stand in a head's gradient, which autograd makes of losses of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from replay_core.compare import Comparison
from replay_core.compare.judging.faults import Fault
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random

IDS = torch.randint(2, 40, (4, 9), generator=torch.Generator().manual_seed(3))
LABELS = torch.cat([IDS[:, 1:], torch.full((4, 1), -100)], 1)
INPUTS, HEAD = random(4, 9, 24), random(40, 24, seed=1)
#: What a loss weighs tokens by: advantages of both signs, and a prompt that does not count.
ADVANTAGES = torch.tensor([0.7, -1.3, 0.4, 2.0])[:, None] * (torch.arange(9) > 2)
HALVES = [slice(0, 2), slice(2, 4)]


def gradient(weights_BT: Tensor, *, labels: Tensor = LABELS, entropy: float = 0.0) -> Tensor:
    """Of the head, of a policy gradient's loss with these weights, and of an entropy bonus."""
    head = HEAD.clone().requires_grad_()
    logprobs = functional.log_softmax(INPUTS @ head.T, -1)
    own = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss = -(own * weights_BT * (labels >= 0)).sum() / 24
    loss = loss + entropy * (logprobs.exp() * logprobs).sum()
    (made,) = torch.autograd.grad(loss, head)
    return made


def step(rows: slice, made: Tensor, *, with_labels: bool = True, dtype: torch.dtype = torch.float32) -> Step:
    return {
        "batch_inputs": {"input_ids": IDS[rows]} | ({"labels": LABELS[rows]} if with_labels else {}),
        "modules": {
            "norm.output": INPUTS[rows].to(dtype),
            "lm_head.output": (INPUTS[rows] @ HEAD.T).to(dtype),
        },
        "gradient": {"grad.lm_head.weight": made},
    }


def told(found: Comparison) -> Fault | None:
    faults = there(parallel(found.tensors, found.together)).faults
    return faults[0].fault if faults else None


def against(tmp_path: Path, here: Tensor, there_: Tensor | None = None, **given: bool) -> Fault | None:
    """Two ranks with half of the samples each, which both hold `here`, against one process with the right gradient."""
    whole = gradient(ADVANTAGES) if there_ is None else there_
    return told(compared(tmp_path, step(slice(0, 4), whole, **given), *(step(one, here, **given) for one in HALVES)))


def of(*factors: float) -> Tensor:
    """The right weights, those of either half of the samples by so many times."""
    return ADVANTAGES * torch.tensor(factors).repeat_interleave(2)[:, None]


@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize(
    ("factors", "kind", "ranks"),
    [((1.0, 0.0), "missing", (1,)), ((2.0, 1.0), "twice", (0,)), ((50 / 60, 50 / 40), "own token mean", (0, 1)),
     ((1.0, 0.37), "weighed", (0, 1))],
)  # fmt: skip
def test_ranks_whose_tokens_weigh_otherwise_are_named(
    factors: tuple[float, float], kind: str, ranks: tuple[int, ...], with_labels: bool, tmp_path: Path
) -> None:
    fault = there(against(tmp_path, gradient(of(*factors)), with_labels=with_labels))
    assert fault.kind == kind
    assert set(fault.ranks) <= set(ranks)


def test_logits_that_the_model_returns_once_more_are_the_same_tokens(tmp_path: Path) -> None:
    def both(one: Step) -> Step:
        return {**one, "modules": {**one["modules"], "forward.output.logits": one["modules"]["lm_head.output"]}}

    ranks = [both(step(rows, gradient(of(2.0, 1.0)))) for rows in HALVES]
    fault = there(told(compared(tmp_path, both(step(slice(0, 4), gradient(ADVANTAGES))), *ranks)))
    assert (fault.kind, fault.ranks) == ("twice", (0,))


def test_a_gradient_that_is_right_is_no_fault(tmp_path: Path) -> None:
    assert against(tmp_path, gradient(ADVANTAGES)) is None


def test_tokens_that_count_on_one_rank_alone_are_told_with_their_number(tmp_path: Path) -> None:
    with_prompt = ADVANTAGES.clone()
    with_prompt[2:, :3] = ADVANTAGES[2:, 3:4]
    fault = there(against(tmp_path, gradient(with_prompt)))
    assert (fault.kind, fault.ranks) == ("tokens", (1,))
    assert "of rank 1's 18 tokens 6 count that do not there" in fault.sentence


def test_what_is_left_of_another_step_is_made_of_no_token_of_this_one(tmp_path: Path) -> None:
    fault = there(against(tmp_path, gradient(ADVANTAGES) + gradient(ADVANTAGES).norm() * random(40, 24, seed=5) / 20))
    assert fault.kind == "of no token"


def test_a_loss_of_more_than_the_tokens_own_log_probabilities_says_nothing(tmp_path: Path) -> None:
    """An entropy bonus leaves at the logits what no weight of a token makes."""
    right, half = (gradient(weights, entropy=0.01) for weights in (ADVANTAGES, of(1.0, 0.0)))
    assert against(tmp_path, half, right) is None


def test_in_half_precision_what_is_missing_is_named_as_well(tmp_path: Path) -> None:
    half = {"dtype": torch.bfloat16}
    ranks = [step(one, gradient(of(1.0, 0.0)), **half) for one in HALVES]
    fault = there(told(compared(tmp_path, step(slice(0, 4), gradient(ADVANTAGES), **half), *ranks)))
    assert (fault.kind, fault.ranks) == ("missing", (1,))


def test_a_gradient_that_is_not_finite_is_made_of_no_weights(tmp_path: Path) -> None:
    here = gradient(ADVANTAGES)
    here[3] = float("nan")
    found = against(tmp_path, here)
    assert "NaN" in there(found).sentence


# ---- masks that both runs say alike

COUNTS = (torch.arange(9)[None] >= 2) & (torch.arange(9)[None] < torch.tensor([8, 6, 7, 4])[:, None])
SHARES = [slice(0, 4), slice(4, 9)]


def masked(tokens: slice, made: Tensor) -> Step:
    return {
        "batch_inputs": {"input_ids": IDS[:, tokens].contiguous()},
        "forward_data": {"labels": LABELS[:, tokens].contiguous(), "response_mask": COUNTS[:, tokens].long()},
        "modules": {
            "norm.output": INPUTS[:, tokens].contiguous(),
            "lm_head.output": (INPUTS[:, tokens] @ HEAD.T).contiguous(),
        },
        "gradient": {"grad.lm_head.weight": made},
    }


OF_ROW = COUNTS.sum(1, keepdim=True)
OWN_OF_ROW = torch.cat([COUNTS[:, one].sum(1, keepdim=True).expand(4, COUNTS[:, one].shape[1]) for one in SHARES], 1)
OF_SHARE = torch.cat([COUNTS[:, share].sum().expand(4, COUNTS[:, share].shape[1]) for share in SHARES], 1)
WEIGHED: dict[str, tuple[Tensor, Tensor, str, str]] = {
    "by a rank's own number of all": (COUNTS * 1.0, COUNTS.sum() / OF_SHARE, "own token count", "which is 17"),
    "by a rank's own number of each row": (
        COUNTS / OF_ROW, OF_ROW / OWN_OF_ROW.clamp(min=1), "own token count", "each row's mean",
    ),
    "a few tokens": (
        COUNTS * 1.0, 1 + (torch.arange(9)[None] == 3) * torch.tensor([0.5, 0.0, 2.0, 0.0])[:, None], "tokens",
        "while the masks count the same ones",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHED)
def test_where_masks_are_the_same_no_token_counts_on_one_side_alone(case: str, tmp_path: Path) -> None:
    right, factors, kind, said = WEIGHED[case]
    right = right * ADVANTAGES.abs().clamp(min=0.3)
    here = gradient(right * factors)
    found = compared(
        tmp_path, masked(slice(0, 8), gradient(right)), *(masked(slice(at, at + 4), here) for at in (0, 4))
    )
    fault = there(told(found))
    assert fault.kind == kind
    assert said in fault.sentence
    assert "do not there" not in fault.sentence

"""Numbers of samples that each rank makes of its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare.parallel import parallel
from tests.replay_core.compare.ranks.recorded import Step, compared, random

SAMPLES, SEQ = 4, 16
IDS = torch.arange(SAMPLES * SEQ).reshape(SAMPLES, SEQ)
LOGPROBS, OLD = (-2 + random(SAMPLES, SEQ, seed=seed) / 3 for seed in (1, 2))
MASK = torch.ones(SAMPLES, SEQ, dtype=torch.long)
MASK[:, :3] = MASK[1, 13:] = MASK[2, 14:] = 0
QUARTERS = torch.arange(SEQ).chunk(4)
#: Two ranks with two samples each, and those of a pair with half the tokens each, in zigzag.
PLACES = [
    (rows, torch.cat((QUARTERS[at], QUARTERS[3 - at]))) for rows in torch.arange(SAMPLES).chunk(2) for at in (0, 1)
]
ALL = torch.arange(SAMPLES), torch.arange(SEQ)

Number = Callable[[Tensor, Tensor], Tensor]


def ratio(of: Tensor, by: Tensor) -> Tensor:
    """exp of the mean log-ratio: of the tokens that `of` marks, by the number of those that `by` does."""
    return (((LOGPROBS - OLD) * of).sum(1) / by.sum(1).clamp(min=1)).exp()


def own(columns: Tensor) -> Tensor:
    marks = torch.zeros_like(MASK)
    marks[:, columns] = MASK[:, columns]
    return marks


def of(place: tuple[Tensor, Tensor], number: Tensor, name: str) -> Step:
    rows, columns = place
    tokens = {"log_probs": LOGPROBS, "old_log_probs": OLD, "response_mask": MASK}
    return {
        "batch_inputs": {"input_ids": IDS[rows][:, columns]},
        "forward_data": {name: x[rows][:, columns].contiguous() for name, x in tokens.items()},
        "loss": {name: number[rows].contiguous()},
    }


def faults(folder: Path, right: Tensor, of_rank: Callable[[Tensor], Tensor], name: str) -> list[tuple[str, str]]:
    ranks = [of(place, of_rank(own(place[1])), name) for place in PLACES]
    found = compared(folder, of(ALL, right, name), *ranks)
    of_ranks = parallel(found.tensors, found.together)
    return [] if of_ranks is None else [(one.fault.kind, one.fault.sentence) for one in of_ranks.faults]


@pytest.mark.parametrize(("of_rank", "said"), [
    (lambda own: ratio(own, own), "made of the rank's own tokens alone: the exp of the mean of log-probabilities less "
     "old_logprobs"),
    (lambda own: ratio(own, MASK), "made of the sum over the rank's own tokens alone, by the number of all"),
    (lambda own: ratio(MASK, own), "made of the sum over all tokens by the number of the rank's own alone"),
])  # fmt: skip
def test_a_sequences_ratio_that_is_made_of_a_ranks_own_tokens_is_told(
    of_rank: Callable[[Tensor], Tensor], said: str, tmp_path: Path
) -> None:
    ((kind, sentence), *_) = faults(tmp_path, ratio(MASK, MASK), of_rank, "prob_ratio")
    assert kind == "own tokens"
    assert sentence.startswith(f"is_ratio on ranks 0, 1, 2 and 3 is {said}")


def test_a_mean_log_probability_of_a_ranks_own_tokens_is_told(tmp_path: Path) -> None:
    def mean(of: Tensor) -> Tensor:
        return (LOGPROBS * of).sum(1) / of.sum(1)

    ((kind, sentence), *_) = faults(tmp_path, mean(MASK), mean, "sequence_confidence")
    assert kind == "own tokens"
    assert "the mean of log-probabilities over a sample's tokens" in sentence


def test_a_ratio_that_is_another_altogether_is_not_explained(tmp_path: Path) -> None:
    wrong = ratio(MASK, MASK) * 1.1
    assert not any(kind == "own tokens" for kind, _ in faults(tmp_path, ratio(MASK, MASK), lambda own: wrong, "ratio"))


def test_a_ratio_of_all_tokens_is_right(tmp_path: Path) -> None:
    right = ratio(MASK, MASK)
    assert not faults(tmp_path, right, lambda own: right, "prob_ratio")

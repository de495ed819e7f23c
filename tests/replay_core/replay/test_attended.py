"""What attention gives each key: shares that are lost, that nobody was let give, and that differ by place alone."""

import numpy as np
import torch

from replay_core.replay.attended import Attended, emptied, is_by_position, lost_keys
from replay_core.replay.interventions import TensorPlace

SIZE = 8
PLACE = TensorPlace("layers.0.x.o.inputs.0", "layers.0.x", "mixer", 5)


class Batch:
    sample_N, position_N = np.zeros(SIZE, dtype=int), np.arange(SIZE)


def scores(seed):
    return torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shares(scores_HNN, hidden=(), **more):
    allowed = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
    for query, key in hidden:
        allowed[query, key] = False
    nobody = torch.zeros(SIZE, dtype=torch.bool)
    share_HNN = scores_HNN.masked_fill(~allowed, -torch.inf).softmax(-1)
    return Attended(share_HNN, **{"even": nobody, "ahead": nobody, "astray": nobody, **more})


def test_a_key_that_only_its_own_token_sees_is_lost():
    found = lost_keys(Batch, shares(scores(0), [(7, 7)]), shares(scores(0)), PLACE)
    assert (found["token"], found["itself"], found["seen"]["query"]) == (7, True, 7)
    later = lost_keys(Batch, shares(scores(0), [(5, 2), (6, 2)]), shares(scores(0)), PLACE)
    assert (later["token"], later["itself"], later["seen"]["pairs"]) == (2, False, 2)
    assert lost_keys(Batch, shares(scores(0)), shares(scores(0)), PLACE) is None


def test_a_bias_of_places_is_the_same_whatever_the_tokens_are_and_a_scale_is_not():
    at = torch.arange(SIZE)
    coarse = -0.3 * ((at[:, None] - at) // 2 * 2)
    first, other = scores(0), scores(1)
    assert is_by_position(shares(first + coarse), shares(first), shares(other + coarse), shares(other))
    assert not is_by_position(shares(first * 1.5), shares(first), shares(other * 1.5), shares(other)), "a scale"
    assert not is_by_position(shares(first), shares(first), shares(other), shares(other)), "nothing differs"
    step = -2.0 * (at == 3)
    told = is_by_position(shares(first + step), shares(first), shares(other + step), shares(other))
    assert not told, "one key that is half hidden"


def test_an_empty_mask_explains_the_future_that_nobody_else_sees():
    def marked(*numbers):
        return torch.isin(torch.arange(SIZE), torch.tensor(numbers))

    own = shares(scores(0))
    alone = emptied(Batch, shares(scores(0), even=marked(1, 2), ahead=marked(1, 2), astray=marked(1, 2)), own)
    assert (alone["token"], alone["tokens"], alone["explains"]) == (1, 2, ["future", "padding", "other_samples"])
    others = emptied(Batch, shares(scores(0), even=marked(1), ahead=marked(1), astray=marked(1, 4)), own)
    assert others["explains"] == ["future"]
    assert emptied(Batch, own, own) is None

"""Log-probabilities that are made otherwise of logits that agree."""

from __future__ import annotations

import numpy as np
import pytest

from replay_core.compare.judging import logits_otherwise
from replay_core.compare.judging.logits_otherwise import OfTokens
from replay_core.compare.judging.vocabulary import logprobs
from tests.replay_core.compare.ranks.in_memory import cut
from tests.replay_core.compare.ranks.recorded import random

ROWS = np.arange(12, 24)


def made(seed=0):
    logits = 6 * random(24, 32, seed=seed).double().numpy()
    return logits, np.random.default_rng(seed).integers(0, 32, 24)


def capped(logits, cap):
    return cap * np.tanh(logits / cap)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_on_one_rank(seed, temperature):
    logits, targets = made(seed)
    known = logits_otherwise.made_of(logprobs(logits, targets), logits, [np.roll(targets, 1), targets])
    assert known is not None
    said = OfTokens((1,), ROWS, logprobs(logits / temperature, targets)[ROWS])
    fault = logits_otherwise.explain("policy_logprobs", known[0], [said], None)
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("logits temperature", (1,))
    assert f"divided by {temperature}" in fault.sentence


def test_a_cap_that_one_slice_of_the_vocabulary_lacks():
    logits, targets = made()
    known = logits_otherwise.made_of(logprobs(capped(logits, 5.0), targets), logits, [targets])
    assert known is not None
    assert known[0].cap == pytest.approx(5.0, rel=1e-3)
    here = np.concatenate([capped(logits[:, :16], 5.0), logits[:, 16:]], 1)
    slices = cut([random(24, 1, 16), random(24, 1, 16)], 2)
    said = OfTokens((0, 1), np.arange(24), logprobs(here, targets))
    fault = logits_otherwise.explain("policy_logprobs", known[0], [said], slices)
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("logits slice not capped", (1,))


def test_nothing_is_said_of_other_logits():
    logits, targets = made()
    others, _ = made(5)
    assert logits_otherwise.made_of(logprobs(others, targets), logits, [targets]) is None
    known = logits_otherwise.made_of(logprobs(logits, targets), logits, [targets])
    assert known is not None
    said = OfTokens((1,), ROWS, logprobs(others, targets)[ROWS])
    assert logits_otherwise.explain("policy_logprobs", known[0], [said], None) is None

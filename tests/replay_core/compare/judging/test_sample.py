"""Log probabilities of genuine dumps with something planted: how they are stored does not say how they were computed,
the figures do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replay_core import naming
from replay_core.compare import compare_runs
from replay_core.compare.comparison import Comparison
from replay_core.compare.judging import sample
from replay_core.dumps import open_run
from replay_core.pages import array
from replay_core.records import Inline, Record, TensorRef
from tests.fixtures import FIXTURES

FILES = [
    "verl/train_batch_step1.dp",
    "open_instruct/toy_run_rollouts_000000.jsonl",
    "open_instruct/packed_sequences.pt",
    "slime",
    "skyrl",
    "nemo_rl",
]


def planted(path: Path, plant: Callable[[np.ndarray, np.ndarray], None]) -> Comparison:
    """A genuine dump beside itself with its first log probabilities changed: `plant` gets them and their tokens."""
    a, b = open_run(path), open_run(path)
    record, place = next(
        (record, place)
        for record in b.records
        for place, ref in enumerate(record.tensors())
        if naming.meaning(ref.canonical or ref.name).kind == "logprob" and ref.numel > 20
    )
    refs = list(record.tensors())
    values = np.array(array(refs[place]), dtype=np.float32).reshape(-1)
    plant(values, np.flatnonzero(values < -1e-3))
    refs[place] = refs[place].with_(source=Inline(values.astype(float).tolist()), dtype="float32", digest=None)
    _give(record, refs)
    return compare_runs(a, b)


def _give(record: Record, refs: list[TensorRef]) -> None:
    record._tensors = tuple(refs)


def one_token(values: np.ndarray, tokens: np.ndarray) -> None:
    values[tokens[tokens.size // 2]] += 0.5


def some_tokens(values: np.ndarray, tokens: np.ndarray) -> None:
    values[tokens[::7]] += 0.3


def half_precision(values: np.ndarray, tokens: np.ndarray) -> None:
    doubt = -np.expm1(values[tokens])
    values[tokens] += (np.random.default_rng(0).normal(size=tokens.size) * 0.01 * doubt).astype(np.float32)


@pytest.mark.parametrize("plant", [one_token, some_tokens])
@pytest.mark.parametrize("name", FILES)
def test_what_is_off_among_equal_tokens_is_no_noise(name: str, plant: Callable[..., None]) -> None:
    found = planted(FIXTURES / name, plant)
    assert found.first is not None
    assert found.first.name.endswith("logprobs")
    assert "0.0025 allowed" in found.first.reason


@pytest.mark.parametrize("name", FILES[:2])
def test_what_is_off_everywhere_by_what_half_precision_leaves_is_noise(name: str) -> None:
    found = planted(FIXTURES / name, half_precision)
    assert found.first is None
    assert found.counts["CLOSE"] == 1


@pytest.mark.parametrize("name", FILES[:2])
def test_no_token_may_be_off_by_more_than_a_nat(name: str) -> None:
    def noise_and_one(values: np.ndarray, tokens: np.ndarray) -> None:
        half_precision(values, tokens)
        values[tokens[5]] += 1.1

    assert planted(FIXTURES / name, noise_and_one).first is not None


def usual(samples: list[list[float]], *, logprob: float = -1.0) -> float | None:
    """What the typical token is off by, of samples of such differences."""
    off = np.array([one for tokens in samples for one in tokens])
    of = np.repeat(np.arange(len(samples)), [len(tokens) for tokens in samples])
    return sample._usual(of, off, off > 0, np.full(off.size, -np.expm1(logprob)))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([[0, 0.7, 0], [0, 0, 0, 0]], 0.0),  # one token of a short response, the others bit for bit
        ([[0, 0.01, 0], [0, 0, 0, 0]], None),  # a last place of a bf16 logit moves one token of a small model
        ([[0.7, 0.01], [0, 0, 0]], None),  # noise of half precision may have moved both of two tokens
        ([[0.7], [0, 0, 0]], None),
        ([[0.02, 0.01, 0.03]] * 3, 0.02),  # many short responses are as good as a long one
        ([[0, 0.7, 0], [0.02] * 9], 0.02),  # what a long one shows holds
    ],
)
def test_short_responses_show_as_well_how_they_were_computed(
    samples: list[list[float]], expected: float | None
) -> None:
    assert usual(samples) == expected


def test_certain_tokens_of_a_short_response_say_nothing() -> None:
    assert usual([[0, 0.7, 0]], logprob=-1e-6) is None


@pytest.mark.parametrize(("off", "stands_out"), [(0.25, True), (0.05, False)])
def test_a_short_response_that_alone_differs_stands_out(off: float, stands_out: bool) -> None:
    per = sample.Samples(
        np.full(4, 3), np.array([0, 0, 3 * off**2, 0]), np.full(4, 3.0), *(np.array([0, 0, off, 0]) for _ in range(2))
    )
    assert ("sample" in sample._seen(per)) is stands_out

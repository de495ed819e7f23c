"""What some ranks alone have otherwise of a tensor's rows: told by the other run's."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from replay_core.compare.judging import first_tokens, normalised_apart, own_rows, parts_otherwise
from replay_core.compare.judging.faults import Fault
from replay_core.measure.precision import as_bfloat16
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import random

RIGHT = random(4, 8, 16)
BIAS, PER_TOKEN = random(16, seed=1), random(2, 8, 1, seed=2).abs() + 0.5


def kind(fault: Fault | None) -> str | None:
    return None if fault is None else fault.kind


ROWS: dict[str, tuple[Tensor, str | None]] = {
    "a factor for every token": (RIGHT[2:] * PER_TOKEN, "row factors"),
    "one factor": (RIGHT[2:] * 0.5, "times"),
    "one factor of the weight": ((RIGHT[2:] - BIAS) * 1.02 + BIAS, "times"),
    "no bias": (RIGHT[2:] - BIAS, None),
    "samples in another order": (RIGHT[2:].flip(0), "rows order"),
    "tokens in another order": (RIGHT[2:].flip(1), "rows order"),
    "one sample of another order's": (torch.stack([RIGHT[2], RIGHT[2]]), None),
    "noise": (RIGHT[2:] + 0.1 * random(2, 8, 16, seed=3), None),
    "a factor and noise": (RIGHT[2:] * 1.02 + 0.01 * random(2, 8, 16, seed=3), None),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_one_rank(case: str) -> None:
    held, expected = ROWS[case]
    for among in (cut([RIGHT[:2], held], 0), alike(RIGHT, torch.cat([RIGHT[:2], held]))):
        fault = own_rows.of_rows("x", as_ref(RIGHT), among, (1,))
        # Where a rank has all samples, half of which are right, it is no multiple of all.
        wanted = expected if among.is_cut or expected in ("row factors", "rows order") else kind(fault)
        assert kind(fault) == wanted
        assert fault is None or fault.ranks == (1,)


def test_labels_of_other_samples_are_told_and_others_are_not() -> None:
    labels = torch.randint(0, 90, (4, 12), generator=torch.Generator().manual_seed(1))
    told = own_rows.of_ids("labels", as_ref(labels), cut([labels[:2], labels[2:].flip(0)], 0), (1,))
    assert told is not None
    assert (told.kind, told.ranks) == ("rows order", (1,))
    assert own_rows.of_ids("labels", as_ref(labels), cut([labels[:2], labels[2:] + 1], 0), (1,)) is None


def test_labels_in_the_other_runs_order_beside_tokens_that_are_not_are_micro_batches_in_another_turn() -> None:
    labels = torch.randint(0, 90, (4, 12), generator=torch.Generator().manual_seed(1))
    held = replace(alike(labels), ranks=(1,))
    told = own_rows.in_another_turn("labels", as_ref(labels), held, (0, 1))
    assert (kind(told), there(told).ranks) == ("micro-batches order", (0, 1))
    assert "the tokens on rank 0" in there(told).sentence
    other = replace(alike(labels.flip(0)), ranks=(1,))
    assert own_rows.in_another_turn("labels", as_ref(labels), other, (0, 1)) is None
    assert own_rows.in_another_turn("labels", as_ref(labels), alike(labels, labels), (0, 1)) is None


@pytest.mark.parametrize("case", ["one late", "one early", "other samples", "one token of alike"])
def test_numbers_of_tokens_that_stand_elsewhere(case: str) -> None:
    whole = random(8, 16, seed=11)
    if case == "one token of alike":
        whole = whole[:, :1].expand(8, 16).contiguous()
    here = {
        "one late": whole[4:].roll(1, 1), "one early": whole[4:].roll(-1, 1), "other samples": whole[4:].flip(0),
        "one token of alike": torch.cat([0 * whole[4:, :1], whole[4:, 1:]], 1),
    }[case]  # fmt: skip
    told = own_rows.of_samples("advantages", as_ref(whole), cut([whole[:4], here], 0), (1,))
    expected = {"one late": "moved", "one early": "moved", "other samples": "rows order", "one token of alike": None}
    assert kind(told) == expected[case]


def test_a_number_of_each_channel_that_one_rank_adds_is_its_own_buffer() -> None:
    """As scores of a router, of four experts."""
    scores, own = RIGHT[..., :4], random(4, seed=6)
    told = own_rows.own_constant("x", as_ref(scores), cut([scores[:2], scores[2:] + own], 0), (1,))
    assert (kind(told), there(told).ranks) == ("own constant", (1,))
    noisy = scores[2:] + own + 0.1 * random(2, 8, 4, seed=7)
    assert own_rows.own_constant("x", as_ref(scores), cut([scores[:2], noisy], 0), (1,)) is None
    assert own_rows.own_constant("x", as_ref(scores), cut([scores[:2] + own, scores[2:] + own], 0), (0, 1)) is None


@pytest.mark.parametrize(("case", "expected"), [("own", "normalised apart"), ("scaled", None), ("others", None)])
def test_advantages_that_each_rank_normalises_by_its_own(case: str, expected: str | None) -> None:
    raw = random(8, 6, seed=5)
    whole = (raw - raw.mean()) / raw.std()
    parts = {
        "own": [(own - own.mean()) / own.std() for own in raw.chunk(2)],
        "scaled": [1.1 * own for own in whole.chunk(2)],
        "others": list(random(8, 6, seed=6).chunk(2)),
    }[case]
    assert kind(normalised_apart.explain("advantages", as_ref(whole), cut(parts, 0), (0, 1))) == expected


PARTS = [random(4, 8, 16, seed=7), random(4, 8, 16, seed=8)]
SUM = RIGHT + PARTS[0] + PARTS[1]
PUT: dict[str, tuple[Tensor, tuple[int, ...], str | None]] = {
    "the largest": (RIGHT + torch.maximum(*PARTS), (0, 1), "not a sum"),
    "the mean": (RIGHT + (PARTS[0] + PARTS[1]) / 2, (0, 1), "not a sum"),
    "its part of other samples": (RIGHT + PARTS[0].roll(1, 0) + PARTS[1], (0,), "rows of another place"),
    "something else": (RIGHT + random(4, 8, 16, seed=9), (0, 1), None),
}


@pytest.mark.parametrize("case", PUT)
def test_parts_that_are_put_together_otherwise(case: str) -> None:
    held, parted, expected = PUT[case]
    ranks = alike(*(held if rank in parted else SUM for rank in (0, 1)))
    fault = parts_otherwise.of_parts("x", as_ref(SUM), ranks, alike(*PARTS), "parts", parted)
    assert kind(fault) == expected
    assert fault is None or fault.ranks == parted


@pytest.mark.parametrize(
    ("made", "expected"),
    [(2 * PARTS[0], "added twice"), (RIGHT * 0, "is not added"), (PARTS[0] - SUM + RIGHT + PARTS[1], "the sum of"),
     (random(4, 8, 16, seed=9), None)],
)  # fmt: skip
def test_outputs_that_are_added_otherwise(made: Tensor, expected: str | None) -> None:
    """made: what takes the place of the first part."""
    before = [("b", as_ref(PARTS[1])), ("a", as_ref(PARTS[0])), ("stream", as_ref(RIGHT))]
    whole, laid = SUM, RIGHT + PARTS[1] + made
    if expected == "the sum of":
        laid = PARTS[0] + RIGHT
        whole = laid + random(4, 8, 16, seed=11)
    fault = parts_otherwise.of_outputs("x", as_ref(whole), as_ref(laid), before, (1,))
    assert (fault is None) == (expected is None)
    assert fault is None or (expected or "") in fault.sentence


@pytest.mark.parametrize("case", ["bfloat16", "float16", "other values"])
def test_values_that_are_rounded_show_at_the_first_token(case: str) -> None:
    """Two heads of values that four of queries share; what comes after the first token is not asked."""
    values, weight, later = random(4, 6, 8, seed=3), random(16, 16, seed=4), random(4, 6, 16, seed=5)
    less = {
        "bfloat16": torch.from_numpy(as_bfloat16(values.numpy())), "float16": values.half().float(),
        "other values": values + 1e-3 * random(4, 6, 8, seed=6),
    }[case]  # fmt: skip
    assert case != "bfloat16" or bool((less == values.bfloat16().float()).all())

    def put_out(own: Tensor) -> Tensor:
        spread = own[:, 0].unflatten(-1, (2, 4)).repeat_interleave(2, 1).flatten(1)
        return torch.cat([(spread @ weight.T)[:, None], later[:, 1:]], 1)

    whole = put_out(values)
    fault = first_tokens.of_values(
        "o", as_ref(whole), cut(list(put_out(less).chunk(2, 1)), 1), [cut(list(values.chunk(2, 1)), 1, "v")], (0, 1),
        weight.double().numpy(), torch.zeros(16).double().numpy(),
    )  # fmt: skip
    assert (fault is not None and case in fault.sentence) is (case != "other values")


@pytest.mark.parametrize("off", [0, 1])
def test_a_lookup_of_own_words_is_right_where_the_words_are_the_ranks_own(off: int) -> None:
    """off: by how many rows the second rank's slice begins too late."""
    ids, table = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(2)), random(40, 8, seed=3)
    ranks = [table[20 * rank :][(ids - 20 * rank - off * rank).clamp(0, 19)] for rank in (0, 1)]
    made = own_rows.of_own_words(as_ref(table[ids]), alike(*ranks), as_ref(ids))
    assert (made is not None) is (off == 0)

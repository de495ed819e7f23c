"""Layouts against the plain loop that defines them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.samples.layout import TokenLayout


@st.composite
def padded_masks(draw: st.DrawFn) -> np.ndarray:
    """Masks as trainers write them: left or right padded, all padding, and with holes."""
    batch, width = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    rows = []
    for _ in range(batch):
        left = draw(st.integers(0, width))
        row = np.zeros(width, dtype=int)
        row[left : left + draw(st.integers(0, width))] = 1
        if draw(st.booleans()):
            row[draw(st.integers(0, width - 1))] = 0
        rows.append(row)
    return np.array(rows)


def tokens_of(mask: np.ndarray) -> list[tuple[int, int, int]]:
    """(sample, position, flat slot) of every token, by the definition."""
    found = []
    for sample, row in enumerate(mask):
        for position, column in enumerate(np.flatnonzero(row)):
            found.append((sample, position, sample * mask.shape[1] + int(column)))
    return found


@given(padded_masks())
def test_every_token_has_one_slot_and_every_other_slot_is_padding(mask: np.ndarray):
    layout = TokenLayout.padded(mask)
    expected = tokens_of(mask)
    assert layout.slots().tolist() == [slot for _, _, slot in expected]
    assert [layout.at(slot) for slot in layout.slots()] == [(sample, position) for sample, position, _ in expected]
    padding = set(range(mask.size)) - {slot for _, _, slot in expected}
    assert all(layout.at(slot) == (-1, -1) for slot in padding)


@given(padded_masks())
def test_padded_and_packed_name_the_same_tokens_in_the_same_order(mask: np.ndarray):
    padded = TokenLayout.padded(mask)
    lengths = mask.sum(axis=1)
    packed = TokenLayout.packed(np.concatenate([[0], np.cumsum(lengths)]), total=int(lengths.sum()) + 3)
    for alignment in ("full", "next"):
        assert padded.said(alignment).tokens.tolist() == packed.said(alignment).tokens.tolist()
    values = np.random.default_rng(0).normal(size=mask.size)
    pack = np.zeros(packed.shape[1])
    pack[packed.slots()] = values[padded.slots()]
    assert (pack[packed.slots("next")] == values[padded.slots("next")]).all()


@given(padded_masks(), st.data())
def test_next_token_slots_are_those_with_a_token_after_them_in_their_sample(mask: np.ndarray, data: st.DataObject):
    response = np.array(data.draw(st.lists(st.booleans(), min_size=mask.size, max_size=mask.size))).reshape(mask.shape)
    layout = TokenLayout.padded(mask, response)
    expected, expected_response = [], []
    tokens = tokens_of(mask)
    for (sample, _, slot), (after, _, slot_after) in pairwise(tokens):
        if sample == after:
            expected.append(slot)
            if response.reshape(-1)[slot_after]:
                expected_response.append(slot)
    assert layout.slots("next").tolist() == expected
    assert layout.slots("next", "response").tolist() == expected_response
    said = layout.said("next")
    assert said.slots.tolist() == expected


@given(padded_masks(), st.data())
def test_a_response_suffix_stands_under_the_last_columns(mask: np.ndarray, data: st.DataObject):
    suffix = data.draw(st.integers(1, mask.shape[1]))
    response = np.ones((mask.shape[0], suffix), dtype=bool)
    layout = TokenLayout.padded(mask, response)
    from_column = mask.shape[1] - suffix
    expected = [slot for _, _, slot in tokens_of(mask) if slot % mask.shape[1] >= from_column]
    assert layout.slots("full", "response").tolist() == expected


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 4))
def test_a_pack_with_a_tail_and_empty_samples_keeps_its_lengths(lengths: list[int], tail: int):
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    layout = TokenLayout.packed(bounds, total=int(bounds[-1]) + tail)
    assert layout.shape == (1, sum(lengths) + tail)
    while lengths and lengths[-1] == 0:
        lengths.pop()
    assert layout.lengths.tolist() == lengths
    assert layout.samples == len(lengths)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TokenLayout.packed([1, 3]), "must start at 0"),
        (lambda: TokenLayout.packed([0, 5, 3]), "never fall"),
        (lambda: TokenLayout.packed([0, 5], total=4), "past the 4 tokens"),
        (lambda: TokenLayout.padded([1, 1]), "1 dimensions"),
        (lambda: TokenLayout.padded([[1, 1]], [[1, 1, 1]]), "does not fit"),
    ],
)
def test_what_is_no_layout_is_refused(make, says: str):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 6), (2, 0, 6)),
        ((2, 6, 8), (2, 0, 6)),
        ((2, 5), (2, 0, 5)),
        ((12, 8), (1, 0, 6)),
        ((2, 3), (2, 3, 3)),
        ((2, 4, 6, 8), (3, 0, 6)),
        ((1, 6, 8), (2, 0, 6)),
    ],
)
def test_token_axes_of_the_shapes_a_tensor_can_have(shape: tuple[int, ...], axes: tuple[int, int, int]):
    layout = TokenLayout.padded(np.ones((2, 6)), np.ones((2, 3)))
    found = layout.token_axes(shape)
    assert found is not None
    assert (found.axes, found.offset, found.width) == axes


@pytest.mark.parametrize("shape", [(), (6,), (3, 6), (2, 4), (8, 2, 6)])
def test_other_shapes_carry_no_tokens(shape: tuple[int, ...]):
    assert TokenLayout.padded(np.ones((2, 6)), np.ones((2, 3))).token_axes(shape) is None

"""Samples out of every layout: padded, packed, ragged, prompt and response apart, slices and shifts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replay_core.records import Inline, TensorRef
from replay_core.samples.batch import Batch, by_sample
from replay_core.samples.padding import among, around_parts
from tests.builders import record_with, samples_with


def ref(name: str, values: Any, alignment: str | None = None, rows: tuple[int, ...] | None = None) -> TensorRef:
    array = np.asarray(values)
    return TensorRef(name, str(array.dtype), array.shape, Inline(array.tobytes()), name, alignment, rows=rows)


MASK = ref("attention_mask", [[0, 1, 1, 1], [1, 1, 1, 0]])
IDS = ref("input_ids", [[0, 5, 6, 7], [8, 9, 10, 0]], "full")


def token_ids(fields: list[TensorRef]) -> Any:
    return Batch(record_with(*fields), fields).contents


def per_token(values: TensorRef, fields: list[TensorRef]) -> Any:
    return by_sample(Batch(record_with(*fields), fields), values)


def listed(rows: Any) -> list[list[float | None]]:
    return [[None if value != value else value for value in row.tolist()] for row in rows]


def test_padding_of_either_side_is_left_out() -> None:
    assert listed(token_ids([IDS, MASK])) == [[5, 6, 7], [8, 9, 10]]


def test_logprobs_as_wide_as_the_tokens_stand_where_their_zeros_say() -> None:
    """Two samples of two and one prompt tokens, padded right; nothing says how the log-probabilities are aligned."""
    ids = ref("input_ids", [[5, 6, 7, 8], [9, 10, 11, 0]])
    mask, generated = (
        ref("attention_mask", [[1, 1, 1, 1], [1, 1, 1, 0]]),
        ref("loss_mask", [[0, 0, 1, 1], [0, 1, 1, 0]]),
    )
    own = ref("old_logprobs", [[0, 0, -1.0, -2.0], [0, -3.0, -4.0, 0]])
    before = ref("old_logprobs", [[0, -1.0, -2.0, 0], [-3.0, -4.0, 0, 0]])
    everywhere = ref("old_logprobs", [[-9.0, -1.0, -2.0, -9.0], [-3.0, -4.0, -9.0, -9.0]])
    for values in (own, before, everywhere):
        said = per_token(values, [ids, mask, generated, values])
        assert [row[-2:].tolist() for row in said] == [[-1, -2], [-3, -4]]
    advantages = ref("advantages", [[0, 0, 0.5, 0.5], [0, 1.5, 1.5, 0]])
    said = per_token(advantages, [ids, mask, generated, own, advantages])
    assert [row[-2:].tolist() for row in said] == [[0.5, 0.5], [1.5, 1.5]]


def test_advantages_that_fill_the_mask_stand_where_it_does_wherever_logprobs_may() -> None:
    ids = ref("input_ids", [[5, 6, 7, 8], [9, 10, 11, 12]])
    fields = [ids, ref("attention_mask", [[1] * 4] * 2), ref("response_mask", [[0, 0, 1, 1], [0, 0, 1, 1]])]
    of_the_next = ref("policy_logprobs", [[-9.0, -1.0, -2.0, 0], [-8.0, -3.0, -4.0, 0]])
    inside, before = [[0, 0, 0.5, 0.5], [0, 0, -0.5, -0.5]], [[0, 0.5, 0.5, 0], [0, -0.5, -0.5, 0]]
    for values in (inside, before):
        tensor = ref("advantages", values)
        said = per_token(tensor, [*fields, of_the_next, tensor])
        assert [row[-2:].tolist() for row in said] == [[0.5, 0.5], [-0.5, -0.5]]
    for inside in ([[0, 0, 0, 0.5], [0, 0, -0.5, -0.5]], [[0, 0, 0.5, 0.5], [0, 0, -0.5, 0]]):
        tensor = ref("advantages", inside)  # one that is 0 moves none of the others
        said = per_token(tensor, [*fields, of_the_next, tensor])
        assert [row[-2:].tolist() for row in said] == [row[-2:] for row in inside]
    stated = [*fields[:2], ref("response_mask", [[0, 1, 1, 0], [0, 1, 1, 0]], "next")]
    tensor = ref("advantages", before)
    said = per_token(tensor, [*stated, of_the_next, tensor])
    assert [row[-2:].tolist() for row in said] == [[0.5, 0.5], [-0.5, -0.5]]


def test_logprobs_of_every_token_stand_at_their_own_index_where_only_each_first_has_none() -> None:
    fields = [ref("input_ids", [[5, 6, 7, 8], [9, 10, 11, 0]]), ref("attention_mask", [[1, 1, 1, 1], [1, 1, 1, 0]])]
    own = [[0, -1.5, -1.0, -2.0], [0, -3.0, -4.0, 0]]
    before = [[-1.5, -1.0, -2.0, -7.0], [-3.0, -4.0, -7.0, 0]]
    certain = [[0, -1.0, -2.0, 0], [-3.0, -4.0, 0, 0]]
    for values, expected in ((own, [-1.5, -3]), (before, [-1.5, -3]), (certain, [0, -3])):
        tensor = ref("old_logprobs", values)
        said = per_token(tensor, [*fields, tensor])
        assert [row[1] for row in said] == expected


def test_logprobs_of_every_token_stand_at_their_own_index_where_only_the_first_column_is_filled() -> None:
    """Padding on the left, and a log-probability of it, too: no sample begins in the first column."""
    ids = ref("input_ids", [[0, 5, 6, 7], [0, 0, 8, 9]])
    masks = [ref("attention_mask", [[0, 1, 1, 1], [0, 0, 1, 1]]), ref("loss_mask", [[0, 0, 1, 1], [0, 0, 0, 1]])]
    own, before = [[0, -9.0, -1.0, -2.0], [0, -9, -9, -3.0]], [[-9, -1.0, -2.0, -9.0], [-9.0, -9, -3.0, -9.0]]
    masked = [[0, -1.0, -2.0, -9.0], [0, 0, -3.0, -9.0]]
    for values, expected in ((own, [-2, -3]), (before, [-2, -3]), (masked, [-2, -3])):
        tensor = ref("old_logprobs", values)
        assert [row[-1] for row in per_token(tensor, [ids, *masks, tensor])] == expected


def test_logprobs_of_packs_and_of_ragged_rows_stand_where_each_samples_first_has_none() -> None:
    own, before = [0, -1.0, -2.0, 0, -3.0], [-1.0, -2.0, 0, -3.0, 0]
    for rows in (None, (3, 2)):
        ids = ref("input_ids", [5, 6, 7, 8, 9], "packed" if rows else None, rows=rows)
        fields = [ids] if rows else [ids, ref("cu_seqlens", [0, 3, 5])]
        for values in (own, before):
            tensor = ref("old_logprobs", values, "packed" if rows else None, rows=rows)
            assert listed(per_token(tensor, [*fields, tensor])) == [[0 if values is own else None, -1, -2],
                                                                    [0 if values is own else None, -3]]  # fmt: skip


def test_a_sure_token_of_0_does_not_say_where_logprobs_stand() -> None:
    ids = ref("input_ids", [[5, 6, 7, 8, 9], [9, 10, 11, 12, 0]])
    masks = [ref("attention_mask", [[1] * 5, [1, 1, 1, 1, 0]]), ref("loss_mask", [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]])]
    own = ref("old_logprobs", [[0, 0, -1.0, 0, -3.0], [0, 0, -4.0, -5.0, 0]])
    rolled = ref("old_logprobs", [[-9.0, 0, -1.0, -3.0, -7.0], [-8.0, 0, -5.0, -6.0, -7.0]])
    for tensor, expected in ((own, [[-1, 0, -3], [-4, -5]]), (rolled, [[0, -1, -3], [0, -5]])):
        said = per_token(tensor, [ids, *masks, tensor])
        assert [row[2:].tolist() for row in said] == expected
    nothing = ref("ref_logprobs", [[0.0] * 5, [0.0] * 5])
    advantages = ref("advantages", [[0, 0, 1.0, 1, 1], [0, 0, 2.0, 2, 0]])
    said = per_token(advantages, [ids, *masks, own, nothing, advantages])
    assert [row[2:].tolist() for row in said] == [[1, 1, 1], [2, 2]]


def test_what_is_above_0_is_no_logprob() -> None:
    ids = ref("input_ids", [[5, 6, 7, 8], [9, 10, 11, 0]])
    masks = [ref("attention_mask", [[1, 1, 1, 1], [1, 1, 1, 0]]), ref("loss_mask", [[0, 0, 1, 1], [0, 1, 1, 0]])]
    filled = ref("old_logprobs", [[0, 1.0, -1.0, -2.0], [0, -3.0, -4.0, 1.0]])
    assert [row[-2:].tolist() for row in per_token(filled, [ids, *masks, filled])] == [[-1, -2], [-3, -4]]


def test_lengths_cut_right_padding() -> None:
    fields = [ref("input_ids", [[5, 6, 0], [7, 8, 9]]), ref("sample_lengths", [2, 3])]
    assert listed(token_ids(fields)) == [[5, 6], [7, 8, 9]]


def test_lengths_of_prompt_and_response_cut_right_padding() -> None:
    parts = [ref("prompt_length", [1, 2]), ref("response_lengths", [1, 1])]
    right = ref("input_ids", [[5, 6, 0, 0], [7, 8, 9, 0]])
    assert listed(token_ids([right, *parts])) == [[5, 6], [7, 8, 9]]
    one = ref("input_ids", [[0, 5, 6, 2], [0, 7, 8, 2]])
    assert listed(token_ids([one, *parts])) == listed(token_ids([one])), "one slot behind may be every sample's end"
    left = ref("input_ids", [[0, 5, 6, 3], [7, 8, 9, 4]])
    assert listed(token_ids([left, *parts])) == listed(token_ids([left])), "two ids behind them are no padding"


def test_prompt_and_response_are_joined() -> None:
    fields = [
        ref("prompt_ids", [1, 2, 3], rows=(2, 1)),
        ref("response_ids", [4, 5, 6], "response", rows=(1, 2)),
        ref("rollout_logprobs", [-1.0, -2.0, -3.0], "response", rows=(1, 2)),
    ]
    assert listed(token_ids(fields)) == [[1, 2, 4], [3, 5, 6]]
    assert listed(per_token(fields[2], fields)) == [[None, None, -1], [None, -2, -3]]


def test_packs_come_apart_where_the_lengths_add_up() -> None:
    fields = [ref("input_ids", [1, 2, 3, 4, 5], "packed", rows=(3, 2)), ref("sample_lengths", [1, 2, 2])]
    assert listed(token_ids(fields)) == [[1], [2, 3], [4, 5]]


def test_a_response_slice_is_the_last_columns() -> None:
    values = ref("old_logprobs", [[-1.0, -2.0], [-3.0, 0.0]], "response")
    assert listed(per_token(values, [IDS, MASK, values])) == [[None, -1, -2], [None, None, -3]]


def test_what_is_said_of_the_next_token_moves_to_it() -> None:
    values = ref("old_logprobs", [[0.0, -1.0, -2.0], [-3.0, -4.0, 0.0]], "next")
    assert listed(per_token(values, [IDS, MASK, values])) == [[None, -1, -2], [None, -3, -4]]


def test_a_tensor_without_tokens_has_no_values_per_token() -> None:
    assert per_token(ref("reward", [1.0, 2.0, 3.0]), [IDS, MASK]) is None
    assert token_ids([MASK]) is None


@pytest.mark.parametrize("row", [[0, 9, 11, 12], [1, 2, 3, 4]], ids=["two padding ids", "no sample of the step"])
def test_rows_that_are_not_one_sample_and_one_padding_id_tell_no_padding(row: list[int]) -> None:
    grid = samples_with(input_ids=[row])
    assert not grid.padding_known
    assert among(grid, [np.array([11, 12])]) is None
    assert among(samples_with(input_ids=[[9, 9, 11, 12]]), [np.array([11, 12])]) is not None


@pytest.mark.parametrize("pad", [None, 0])
@pytest.mark.parametrize("behind", [0.0, -0.5])
def test_prompts_and_responses_side_by_side_without_their_padding(pad: int | None, behind: float) -> None:
    fields = [
        ref("prompt_ids", [[0, 0, 1, 5], [1, 6, 7, 8]]),
        ref("response_ids", [[9, 2, 0, 0], [9, 0, 9, 2]]),
        ref("rollout_logprobs", [[-1.0, -0.2, 0.0, behind], [-1.0, -2.0, -1.0, -0.1]], "response"),
    ]
    told = around_parts(Batch(record_with(*fields), fields), pad)
    assert (told is None) == (behind != 0)
    if told is not None:
        assert told.contents is not None
        assert listed(told.contents) == [[1, 5, 9, 2], [1, 6, 7, 8, 9, 0, 9, 2]]
        assert told.response_starts is not None
        assert told.response_starts.tolist() == [2, 4]


def test_an_answer_of_padding_alone_is_not_taken_for_none() -> None:
    fields = [ref("prompt_ids", [[0, 0, 1, 5]]), ref("response_ids", [[0, 0, 0]])]
    assert around_parts(Batch(record_with(*fields), fields), 0) is None


RIGHT = [[5, 6, 7, 8, 9, 0], [1, 2, 3, 0, 0, 0]]
TAIL = ref("response_mask", [[1, 1, 1], [0, 0, 1]])
HEAD = ref("response_mask", [[1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("ids", "mask", "values"),
    [
        # Rows that begin with the response, of a grid padded on the right.
        (RIGHT, HEAD, [[-1, -2, -3], [-4, 0, 0]]),
        (RIGHT, ref("response_mask", [[0, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0]]), [[-1, -2, -3], [-4, 0, 0]]),
        # The last columns of a grid padded on the left, or of prompts left and responses right.
        ([[0, 5, 6, 7, 8, 9], [0, 0, 0, 1, 2, 3]], TAIL, [[-1, -2, -3], [0, 0, -4]]),
        ([[0, 5, 6, 7, 8, 9], [0, 1, 2, 3, 0, 0]], HEAD, [[-1, -2, -3], [-4, 0, 0]]),
    ],
    ids=["head, own mask", "head, whole mask", "left", "prompts left, responses right"],
)  # fmt: skip
def test_response_rows_of_no_stated_place_follow_the_records_own_masks(ids: Any, mask: TensorRef, values: Any) -> None:
    logprobs = ref("old_logprobs", np.array(values, float))
    fields = [ref("input_ids", ids), ref("attention_mask", np.array(ids) != 0), mask, logprobs]
    batch = Batch(record_with(*fields), fields)
    said, generated = batch.values(logprobs), batch.generated_N
    assert said is not None
    assert generated is not None
    assert generated.tolist() == [False, False, True, True, True, False, False, True]
    assert said.values_N[generated].tolist() == [-1, -2, -3, -4]


def test_a_mask_that_counts_padding_moves_no_response_of_prompts_that_are_padded_on_the_left() -> None:
    ids = [[0, 5, 6, 7, 8, 9], [0, 1, 2, 3, 0, 0]]
    logprobs = ref("old_logprobs", [[-1.0, -2.0, -3.0], [-4.0, -5.0, -5.0]])
    fields = [ref("input_ids", ids), ref("attention_mask", np.array(ids) != 0), ref("response_mask", np.ones((2, 3)))]
    assert listed(per_token(logprobs, [*fields, logprobs])) == [[None, None, -1, -2, -3], [None, None, -4]]


@pytest.mark.parametrize(
    ("rows", "lengths", "expected"),
    [
        ([[0, 0, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6]], [3, 6], [[5, 6, 7], [1, 2, 3, 4, 5, 6]]),  # pads on either side
        ([[0, 0, 0, 5, 6, 7], [0, 0, 1, 2, 3, 4]], [3, 4], [[5, 6, 7], [1, 2, 3, 4]]),  # on the left alone
        ([[0, 5, 0, 7, 0, 0], [9, 9, 1, 2, 9, 9]], [3, 6], [[5, 0, 7], [9, 9, 1, 2, 9, 9]]),  # a sampled pad
        # The first token may be the pad: what lies behind the lengths is padding, and nothing has moved.
        ([[0, 5, 6, 0, 0, 0], [0, 2, 3, 4, 0, 0]], [3, 4], [[0, 5, 6], [0, 2, 3, 4]]),
        # Whatever lies there, it is not pads around a sample of that length.
        ([[0, 0, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6]], [3, 6], [[0, 0, 5], [1, 2, 3, 4, 5, 6]]),
        ([[5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 0, 0]], [3, 4], [[5, 6, 7], [1, 2, 3, 4]]),
    ],
)
def test_samples_of_known_length_may_begin_behind_pads(rows: Any, lengths: Any, expected: Any) -> None:
    fields = [ref("input_ids", rows, "full"), ref("sample_lengths", lengths)]
    assert listed(token_ids(fields)) == expected


def test_lengths_of_responses_alone_cut_no_samples() -> None:
    ids = [[5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 9, 0]]
    fields = [ref("input_ids", ids, "full"), ref("response_mask", [[1, 1, 0, 0], [1, 1, 1, 0]]),
              ref("sample_lengths", [2, 3])]  # fmt: skip
    assert listed(token_ids(fields)) == ids


def test_answers_recorded_alone_lie_at_their_own_tokens() -> None:
    answers, mask = ref("response_ids", [[5, 6, 7], [8, 9, 0]]), ref("response_mask", [[1, 1, 1], [1, 1, 0]])
    values = ref("policy_logprobs", [[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]])
    fields = [answers, mask, values]
    said = by_sample(Batch(record_with(*fields), fields, by_shape=True), values)
    assert listed(said) == [[-1, -2, -3], [-4, -5, 0]]


def test_rows_end_with_the_answers_that_stand_beside_them() -> None:
    """Prompts of two tokens and of one, padded on the right; no mask says so."""
    ids, answers = ref("input_ids", [[5, 6, 7, 8, 9], [5, 4, 9, 0, 0]]), ref("response_ids", [[7, 8, 9], [4, 9, 0]])
    mask, values = ref("response_mask", [[1, 1, 1], [1, 1, 0]]), ref("old_logprobs", [[-1.0, -2, -3], [-4.0, -5, 0]])
    fields = [ids, answers, mask, values]
    assert listed(token_ids(fields)) == [[5, 6, 7, 8, 9], [5, 4, 9]]
    assert [row[-2:].tolist() for row in per_token(values, fields)] == [[-2, -3], [-4, -5]]


def test_rows_that_are_longer_than_their_answers_begin_with_them() -> None:
    ids = ref("input_ids", [[5, 6, 7, 8], [5, 6, 9, 8], [5, 6, 7, 9]])
    mask = ref("response_mask", [[0, 0, 1, 1]] * 3)
    sampled = ref("rollout_token_ids", [7, 8, 9, 8, 3, 4, 9], "packed", rows=(2, 2, 3))
    said = per_token(sampled, [ids, ref("attention_mask", [[1] * 4] * 3), mask, sampled])
    assert listed(said) == [[None, None, 7, 8], [None, None, 9, 8], [None, None, 3, 4]]

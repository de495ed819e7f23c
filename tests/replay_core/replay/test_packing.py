import numpy as np

from replay_core.replay.flags import Flags
from replay_core.replay.packing import arrange
from tests.replay_core.replay.conftest import ROWS, small_batch

LENGTHS = [tokens for _, tokens, _ in ROWS]


def test_padded_positions_follow_openrlhf():
    (forward,) = arrange(small_batch(), Flags()).forwards
    left, tokens, right = ROWS[0]
    assert forward.position_ids[0].tolist() == [1] * left + list(range(tokens)) + [1] * right
    assert forward.attention_mask[0].tolist() == [0] * left + [1] * tokens + [0] * right


def test_a_pack_has_no_mask_and_positions_that_restart():
    arrangement = arrange(small_batch(), Flags(packing=True))
    (forward,) = arrangement.forwards
    assert forward.attention_mask is None
    assert forward.position_ids.tolist() == [[position for length in LENGTHS for position in range(length)]]
    assert arrangement.cu_seqlens.tolist() == [0, *np.cumsum(LENGTHS)]
    assert forward.segments == 3


def test_a_leaking_pack_says_one_sequence_while_positions_still_restart():
    (leak,) = arrange(small_batch(), Flags(packing=True, block_mask=False)).forwards
    (right,) = arrange(small_batch(), Flags(packing=True)).forwards
    assert leak.attention_mask.all()
    assert np.array_equal(leak.position_ids, right.position_ids)


def test_the_reference_is_every_row_alone():
    arrangement = arrange(small_batch(), Flags(rows_per_forward=1))
    assert [forward.input_ids.shape for forward in arrangement.forwards] == [(1, length) for length in LENGTHS]
    assert all(forward.attention_mask is None for forward in arrangement.forwards)
    assert all(forward.position_ids[0, 0] == 0 for forward in arrangement.forwards)


def test_every_arrangement_predicts_the_same_tokens_in_the_same_order():
    batch = small_batch()
    settings = [
        Flags(),
        Flags(packing=True),
        Flags(rows_per_forward=1),
        Flags(rows_per_forward=2),
        Flags(packing=True, rows_per_forward=2),
    ]
    targets = [arrange(batch, flags).next_tokens()[1].tolist() for flags in settings]
    rows = zip(batch.ids_BS, batch.valid_BS, strict=True)
    assert targets == [np.concatenate([row[valid][1:] for row, valid in rows]).tolist()] * len(settings)


def test_the_slots_that_predict_are_those_before_their_targets():
    arrangement = arrange(small_batch(), Flags())
    slots, targets = arrangement.next_tokens()
    assert np.array_equal(arrangement.input_ids.reshape(-1)[slots + 1], targets)


def test_the_response_mask_goes_with_the_tokens():
    batch = small_batch()
    packed = arrange(batch, Flags(packing=True))
    assert packed.response_mask.shape == (1, sum(LENGTHS))
    assert packed.response_mask.sum() == batch.response_BS.sum()

import numpy as np
import pytest
from msgspec.structs import replace

from replay_core.compare import compare_runs
from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.errors import UnavailableError
from replay_core.replay.flags import Flags
from replay_core.replay.packing import arrange
from tests.replay_core.replay.conftest import ROWS, small_batch
from tests.replay_core.replay.test_run import run_of

LENGTHS = [tokens for _, tokens, _ in ROWS]


def test_padded_positions_follow_openrlhf():
    (forward,) = arrange(small_batch(), Flags()).forwards
    left, tokens, right = ROWS[0]
    assert forward.position_ids[0].tolist() == [1] * left + list(range(tokens)) + [1] * right
    assert forward.attention_mask[0].tolist() == [0] * left + [1] * tokens + [0] * right


def test_positions_count_the_slots_with_their_padding_where_that_is_asked():
    (forward,) = arrange(small_batch(), Flags(positions="arange")).forwards
    assert forward.position_ids.tolist() == [list(range(24))] * 3
    assert forward.attention_mask is not None


def test_recorded_positions_are_given_as_they_are_and_never_to_the_reference():
    batch = small_batch()
    recorded = replace(batch, positions_BS=np.where(batch.valid_BS, np.arange(24) + 5, 0))
    (padded,) = arrange(recorded, Flags(positions="recorded")).forwards
    assert np.array_equal(padded.position_ids[batch.valid_BS], (np.arange(24) + np.full((3, 1), 5))[batch.valid_BS])
    assert set(padded.position_ids[~batch.valid_BS].tolist()) == {1}
    (packed,) = arrange(recorded, Flags(positions="recorded", packing=True)).forwards
    assert packed.position_ids[0].tolist() == recorded.positions_BS[batch.valid_BS].tolist()
    alone = arrange(recorded, Flags(positions="recorded", rows_per_forward=1))
    assert [forward.position_ids[0, 0] for forward in alone.forwards] == [0, 0, 0]
    assert alone.position_rule == "0..L-1 in each sample"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_goes_to_one_side_and_every_sample_keeps_its_tokens(side):
    batch = small_batch()
    arrangement, recorded = (arrange(batch, Flags(padding=one)) for one in (side, "recorded"))
    (forward,) = arrangement.forwards
    assert forward.attention_mask.tolist() == [
        [0] * (24 - tokens) + [1] * tokens if side == "left" else [1] * tokens + [0] * (24 - tokens)
        for tokens in LENGTHS
    ]
    assert arrangement.next_tokens()[1].tolist() == recorded.next_tokens()[1].tolist()
    assert arrangement.response_mask.sum() == recorded.response_mask.sum()
    assert arrange(batch, Flags(padding=side, packing=True)).input_ids.tolist() == (
        arrange(batch, Flags(packing=True)).input_ids.tolist()
    )


def test_recorded_positions_that_are_not_there_are_unavailable():
    with pytest.raises(UnavailableError, match="holds no position_ids") as refused:
        arrange(small_batch(), Flags(positions="recorded"))
    assert "positions=cumsum" in refused.value.hint


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


def test_a_packed_replay_is_diagnosed_and_compared_like_its_padded_twin(ask):
    cells = ask("packing=on", plan={"model": "random:llama-tiny", "capture": "none"})["cells"]
    padded, packed = map(run_of, cells[-2:])
    shapes = [run.select(stage="batch_inputs")[0].get("input_ids").shape for run in (padded, packed)]
    assert shapes == [(3, 24), (1, sum(LENGTHS))]
    (a,), (b,) = Case(padded).batches(), Case(packed).batches()
    assert a.flat.lengths_B.tolist() == b.flat.lengths_B.tolist() == LENGTHS
    np.testing.assert_array_equal(a.tokens_N, b.tokens_N)
    np.testing.assert_array_equal(a.trained_N, b.trained_N)
    logprobs_a, logprobs_b = a.columns.of("policy_logprobs"), b.columns.of("policy_logprobs")
    np.testing.assert_array_equal(logprobs_a.said_N, logprobs_b.said_N)
    np.testing.assert_allclose(logprobs_a.values_N[a.trained_N], logprobs_b.values_N[a.trained_N], atol=1e-5)
    found = [[(one.id, one.severity, one.claim) for one in diagnose(Case(run)).findings] for run in (padded, packed)]
    assert found[0] == found[1]
    verdicts = {row.name: row.verdict.value for row in compare_runs(padded, packed).tensors}
    assert verdicts["input_ids"] == verdicts["response_mask"] == "SAME"
    assert set(verdicts.values()) <= {"SAME", "CLOSE"}, verdicts

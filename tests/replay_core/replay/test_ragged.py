"""Micro-batches recorded without a padded grid, from really recorded lists of rows."""

import numpy as np
import pytest

from replay_core.dumps import open_run
from replay_core.errors import DumpError
from replay_core.replay.batch import padded_batch
from replay_core.replay.ragged import find, mask_by_trajectories, ragged_batch, usable, values
from tests.builders import write_dump

ROWS = [[11, 12, 13], [14, 15], [16, 17, 18, 19]]
MASKS = [[0, 1, 1], [0, 1], [0, 0, 1, 1]]
OLD = [[0.0, -1.0, -2.0], [0.0, -3.0], [0.0, 0.0, -4.0, -5.0]]


def record_of(directory, **fields):
    run = open_run(write_dump(directory / "dump", {"trajectory": fields}))
    return run, run.records[0]


def test_ragged_rows_become_a_right_padded_batch(tmp_path):
    batch = ragged_batch(record_of(tmp_path, input_ids=ROWS, response_mask=MASKS)[1], 0.5)
    assert batch.ids_BS.tolist() == [[11, 12, 13, 0], [14, 15, 0, 0], [16, 17, 18, 19]]
    assert batch.valid_BS.sum(axis=1).tolist() == [3, 2, 4]
    assert batch.response_BS.astype(int).tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1]]
    assert batch.temperature == 0.5


def test_prompts_and_responses_apart_are_joined_and_the_response_is_what_was_generated(tmp_path):
    fields = {"prompt_ids": [[1, 2], [3]], "response_ids": [[4], [5, 6, 7]]}
    batch = ragged_batch(record_of(tmp_path, **fields)[1], None)
    assert batch.ids_BS.tolist() == [[1, 2, 4, 0], [3, 5, 6, 7]]
    assert batch.response_BS.astype(int).tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]


def test_a_grid_whose_padding_cannot_be_told_is_no_ragged_batch(tmp_path):
    assert ragged_batch(record_of(tmp_path, input_ids=np.array([[1, 2, 0], [3, 0, 0]]))[1], None) is None


def test_ids_that_are_no_integers_are_refused_with_what_they_are(tmp_path):
    with pytest.raises(DumpError, match="no batch of token ids") as refused:
        ragged_batch(record_of(tmp_path, input_ids=[[1.5, 2.0], [3.0]])[1], None)
    assert "float" in refused.value.found


def test_values_stand_at_the_slot_that_predicts_their_token(tmp_path):
    _, record = record_of(tmp_path, input_ids=ROWS, response_mask=MASKS, old_log_probs=OLD)
    values_BS, known_BS = values(find(usable(record), "old_logprobs"), record, ragged_batch(record, None))
    assert values_BS.tolist() == [[-1, -2, 0, 0], [-3, 0, 0, 0], [0, -4, -5, 0]]
    assert np.array_equal(known_BS, values_BS != 0)


def test_values_of_shuffled_rows_are_found_by_their_tokens(tmp_path):
    order = [2, 0, 1]
    _, record = record_of(tmp_path, input_ids=[ROWS[n] for n in order], old_log_probs=[OLD[n] for n in order])
    batch = padded_batch([[11, 12, 13], [14, 15, 0]], [[1, 1, 1], [1, 1, 0]], [[0, 1, 1], [0, 1, 0]])
    values_BS, known_BS = values(find(usable(record), "old_logprobs"), record, batch)
    assert values_BS.tolist() == [[-1, -2, 0], [-3, 0, 0]]
    assert known_BS.sum() == 3


def test_values_of_other_samples_are_none_of_this_batch(tmp_path):
    _, record = record_of(tmp_path, input_ids=ROWS, old_log_probs=OLD)
    batch = padded_batch([[1, 2, 3]], [[1, 1, 1]])
    assert values(find(usable(record), "old_logprobs"), record, batch) is None


def test_padding_is_told_from_the_steps_own_samples(tmp_path):
    run, record = record_of(tmp_path, input_ids=ROWS)
    mask, note = mask_by_trajectories(np.array([[0, 0, 11, 12, 13], [14, 15, 9, 9, 9]]), run, record.key)
    assert mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert "no attention_mask is recorded" in note


@pytest.mark.parametrize("row", [[0, 9, 11, 12, 13], [1, 2, 3, 4, 5]], ids=["two padding ids", "no sample of the step"])
def test_rows_that_are_not_one_sample_and_one_padding_id_have_no_mask(tmp_path, row):
    run, record = record_of(tmp_path, input_ids=ROWS)
    assert mask_by_trajectories(np.array([row]), run, record.key) is None

from pathlib import Path

import numpy as np
import pytest

from replay_core.dumps import open_run
from replay_core.errors import DumpError, SelectionError
from replay_core.records import Inline, Record, RecordKey, Run, TensorRef
from replay_core.replay.batch import MicroBatch, resolve_temperature
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import read_batch
from replay_core.samples.batch import Batch
from tests.builders import padded_batch, samples_with, write_dump

IDS = [[5, 6, 7, 0], [0, 8, 9, 4]]
MASK = [[1, 1, 1, 0], [0, 1, 1, 1]]


def field(name, value, canonical=None):
    array = np.asarray(value)
    return TensorRef(name, array.dtype.name, array.shape, Inline(array.tolist()), canonical or name)


def record(key, **fields):
    refs = [field(name, value) for name, value in fields.items()]
    return Record(key, Path("file.pt"), lambda: refs)


def run_of(*records):
    return Run(Path("dump"), "native", list(records))


def plan(**parts):
    return ReplayPlan(**{"dump": "d", "step": 0, "rank": 0, "micro": 0, "model": "m", "out": "o", **parts})


def test_a_response_suffix_counts_from_the_end():
    batch = padded_batch(IDS, MASK, [[True, False], [True, True]])
    assert batch.response_BS.tolist() == [[False, False, True, False], [False, False, True, True]]


def test_float_masks_are_masks():
    assert padded_batch(IDS, np.array(MASK, dtype=np.float32)).valid_BS.dtype == bool


def test_a_pack_is_unpacked_at_its_boundaries():
    batch = MicroBatch.of(
        samples_with(input_ids=[[5, 6, 7, 8, 9]], cu_seqlens=[0, 3, 5], response_mask=[[0, 1, 1, 0, 1]])
    )
    assert batch.ids_BS.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.valid_BS.tolist() == [[True, True, True], [True, True, False]]
    assert batch.response_BS.tolist() == [[False, True, True], [False, True, False]]


@pytest.mark.parametrize(
    ("ids", "mask", "response", "says"),
    [
        (IDS, [[1, 1, 1]], None, "does not fit input_ids"),
        ([IDS, IDS], None, None, "no batch of token ids"),
        (IDS, MASK, [[1] * 9] * 2, "does not fit the samples"),
    ],
)
def test_shapes_that_do_not_fit_are_named(ids, mask, response, says):
    with pytest.raises(DumpError, match=says):
        padded_batch(ids, mask, response)


def test_the_record_nearest_to_the_forward_is_taken():
    key = RecordKey(0, 0, 0, "actor", "forward_data")
    whole_step = record(RecordKey(0, None, 0, "actor", "trajectory"), input_ids=[[1]], attention_mask=[[1]])
    found = read_batch(run_of(whole_step, record(key, input_ids=IDS, attention_mask=MASK)), plan())
    assert found.key == key
    assert found.batch.ids_BS.tolist() == IDS


def test_masks_may_lie_in_another_record_of_the_micro_batch():
    ids = record(RecordKey(0, 0, 0, "actor", "batch_inputs"), input_ids=IDS)
    rest = record(RecordKey(0, 0, 0, "actor", "loss"), attention_mask=MASK, response_mask=MASK, temperature=0.5)
    batch = read_batch(run_of(ids, rest), plan()).batch
    assert (batch.tokens, batch.temperature) == (6, 0.5)
    assert batch.response_BS is not None


def test_a_missing_attention_mask_is_never_guessed():
    with pytest.raises(DumpError, match="holds no attention_mask") as refused:
        read_batch(run_of(record(RecordKey(0, 0, 0), input_ids=IDS, response_mask=MASK)), plan())
    assert "input_ids, response_mask" in str(refused.value)


def test_a_whole_step_is_not_passed_off_as_a_micro_batch():
    whole = record(RecordKey(0, None, 0, "actor", "trajectory"), input_ids=IDS, attention_mask=MASK)
    scalars = record(RecordKey(0, 0, 0, "actor", "loss"), loss=[1.0])
    with pytest.raises(DumpError, match="no record of the micro-batch holds its input ids"):
        read_batch(run_of(whole, scalars), plan())
    assert "replayed whole" in read_batch(run_of(whole), plan()).notes[0]


def test_a_step_that_is_not_there_is_a_selection_error():
    with pytest.raises(SelectionError, match="step 7"):
        read_batch(run_of(record(RecordKey(0, 0, 0), input_ids=IDS)), plan(step=7))


def test_first_rows_only_is_said():
    found = read_batch(run_of(record(RecordKey(0, 0, 0), input_ids=IDS, attention_mask=MASK)), plan(max_rows=1))
    assert found.batch.rows == 1
    assert "only 1 of 2 rows" in found.notes[0]


PACK = {"input_ids": [[5, 6, 7, 8, 9]], "cu_seqlens": [0, 3, 5]}
PADDED = {"input_ids": IDS, "attention_mask": MASK}


@pytest.mark.parametrize(
    ("fields", "positions", "said"),
    [
        (PADDED, [[0, 1, 2, 9], [1, 0, 1, 2]], None),  # what padding is given counts for nothing
        (PADDED, [[0, 1, 2, 3], [0, 1, 2, 3]], "token 0 of sample 1 has 1"),  # padded left, counted from the slot
        (PACK, [[0, 1, 2, 0, 1]], None),
        (PACK, [[0, 1, 0, 1, 2]], "token 2 of sample 0 has 0"),  # one boundary early
        (PACK, [[0, 1, 2, 3, 4]], "token 0 of sample 1 has 3"),  # never begun anew
        (PADDED, [[0], [0]], None),  # not of these tokens
    ],
)
def test_recorded_positions_other_than_those_replayed_are_said(fields, positions, said):
    notes = read_batch(run_of(record(RecordKey(0, 0, 0), **fields, position_ids=positions)), plan()).notes
    assert [said in note for note in notes if "position_ids" in note] == ([True] if said else [])


def test_a_mask_of_zeros_is_an_error():
    with pytest.raises(DumpError, match="no token at all"):
        read_batch(run_of(record(RecordKey(0, 0, 0), input_ids=IDS, attention_mask=np.zeros((2, 4), int))), plan())


def test_an_assumed_temperature_is_stated():
    assert resolve_temperature(None, 0.7) == (0.7, None)
    assert resolve_temperature(None, None) == (1.0, "the record names no temperature: 1.0 is assumed")
    asked, note = resolve_temperature(0.5, 0.7)
    assert asked == 0.5
    assert "the record says 0.7" in note


@pytest.mark.parametrize("odd", [4.5, float("nan")])
def test_fractions_are_no_token_ids(odd):
    with pytest.raises(DumpError, match="token ids are whole numbers"):
        padded_batch([[1.0, odd, 3.0]], [[1, 1, 1]])
    assert padded_batch([[1.0, 4.0, 3.0]], [[1, 1, 1]]).ids_BS.tolist() == [[1, 4, 3]]


ROWS = [[11, 12, 13], [14, 15], [16, 17, 18, 19]]


def written(directory, **fields):
    return open_run(write_dump(directory / "dump", {"trajectory": fields})).records[0]


def batch_of(record, temperature=None):
    return MicroBatch.of(Batch(record, record.tensors()), temperature)


def test_ragged_rows_become_a_right_padded_batch(tmp_path):
    batch = batch_of(written(tmp_path, input_ids=ROWS, response_mask=[[0, 1, 1], [0, 1], [0, 0, 1, 1]]), 0.5)
    assert batch.ids_BS.tolist() == [[11, 12, 13, 0], [14, 15, 0, 0], [16, 17, 18, 19]]
    assert batch.valid_BS.sum(axis=1).tolist() == [3, 2, 4]
    assert batch.response_BS.astype(int).tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1]]
    assert batch.temperature == 0.5


def test_prompts_and_responses_apart_are_joined_and_the_response_is_what_was_generated(tmp_path):
    batch = batch_of(written(tmp_path, prompt_ids=[[1, 2], [3]], response_ids=[[4], [5, 6, 7]]))
    assert batch.ids_BS.tolist() == [[1, 2, 4, 0], [3, 5, 6, 7]]
    assert batch.response_BS.astype(int).tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]


def test_ids_that_are_no_integers_are_refused_with_what_they_are(tmp_path):
    with pytest.raises(DumpError, match="token ids are whole numbers") as refused:
        batch_of(written(tmp_path, input_ids=[[1.5, 2.0], [3.0]]))
    assert "float" in refused.value.found


def test_padding_that_no_mask_names_is_told_from_the_steps_own_samples():
    whole = record(RecordKey(0, None, 0, "actor", "trajectory"), input_ids=[[11, 12, 13]], attention_mask=[[1, 1, 1]])
    grid = [[0, 0, 11, 12, 13], [11, 12, 13, 9, 9]]
    found = read_batch(run_of(whole, record(RecordKey(0, 0, 0), input_ids=grid)), plan())
    assert found.batch.valid_BS.astype(int).tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert any("no attention_mask is recorded" in note for note in found.notes)

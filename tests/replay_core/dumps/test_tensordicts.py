"""Files that verl 0.9.1's own DataProto.save_to_disk and tensordict 0.15.3 wrote (genuine/) show what lies in them.

words06_step_2.dp was written with tensordict 0.6.2.

The values were drawn from a seeded generator, so nothing but the format is anybody's.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.dumps.filling import repeated_rows
from replay_core.records import Inline, Record, TensorRef

GENUINE = Path(__file__).parent / "genuine"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files, written a while ago."""
    root = shutil.copytree(GENUINE, tmp_path / "genuine")
    for path in root.rglob("*"):
        os.utime(path, (1, 1))
    return root


def only(path: Path) -> Record:
    run = open_run(path)
    assert len(run.records) == 1, run.problems
    return run.records[0]


def field(record: Record, name: str) -> TensorRef:
    ref = record.get(name)
    assert ref is not None, [known.canonical for known in record.tensors()]
    return ref


def test_a_consolidated_batch_of_jagged_tensors_has_its_rows(folder: Path) -> None:
    record = only(folder / "jagged_step_5.dp")
    names = Counter(ref.name for ref in record.tensors())
    assert set(names) == {"temperature", "input_ids", "position_ids", "loss_mask", "log_probs", "uid",
                          "meta_info.global_steps"}  # fmt: skip
    ids = field(record, "input_ids")
    assert (ids.rows, ids.alignment, ids.shape) == ((3, 5, 2), "full", (10,))
    np.testing.assert_array_equal(pages.array(ids), [0, 1, 2, 0, 1, 2, 3, 4, 0, 1])
    logprobs = field(record, "policy_logprobs")
    assert (logprobs.rows, logprobs.dtype, logprobs.alignment) == ((3, 5, 2), "bfloat16", "next")
    assert field(record, "loss_mask").alignment == "full"
    temperature = field(record, "temperature").source
    assert isinstance(temperature, Inline)
    assert temperature.value == 0.7


def test_a_batch_without_tensors_still_shows_its_columns(folder: Path) -> None:
    record = only(folder / "nobatch_step_3.dp")
    assert [ref.canonical for ref in record.tensors()] == ["group_id", "step"]


def test_a_tensordict_of_its_own_shows_its_tensors_and_not_its_classes(folder: Path) -> None:
    record = only(folder / "tensordict.pt")
    assert [(ref.name, ref.rows) for ref in record.tensors()] == [
        ("input_ids", (3, 5, 2)), ("position_ids", (3, 5, 2)), ("loss_mask", (3, 5, 2)), ("log_probs", (3, 5, 2)),
        ("temperature", None),
    ]  # fmt: skip


def test_positions_of_a_vision_model_have_their_tokens_first(folder: Path) -> None:
    run = open_run(folder / "queue")
    record = next(record for record in run.records if record.key.step == 4)
    positions = field(record, "position_ids")
    assert (positions.shape, positions.rows) == ((16, 4), (7, 9))
    expected = np.repeat(np.concatenate([np.arange(7), np.arange(9)])[:, None], 4, axis=1)
    np.testing.assert_array_equal(pages.array(positions), expected)


def test_a_lazy_stack_is_a_row_per_sample(folder: Path) -> None:
    record = next(record for record in open_run(folder / "queue").records if record.key.step == 6)
    ids, texts = field(record, "input_ids"), field(record, "t")
    assert (ids.rows, ids.alignment) == ((3, 5), "full")
    assert field(record, "n.x").rows == (2, 4)
    assert texts.source == Inline(["txt", "uxt"])
    alone = {ref.name: ref.rows for ref in only(folder / "lazy_stack.pt").tensors()}
    assert alone.keys() == {"input_ids", "log_probs", "n.x", "t"}
    assert alone["input_ids"] == (3, 5)


@pytest.mark.parametrize("file", ["words06_step_2.dp", "words15_step_2.dp"])
def test_a_list_of_texts_in_a_consolidated_batch_is_one_column(folder: Path, file: str) -> None:
    """tensordict 0.6 keeps (texts, batch size); 0.15 a stack whose members are named by their places."""
    record = only(folder / file)
    assert field(record, "strs").source == Inline(["a", "b", "c", "d"])
    assert field(record, "temp").source == Inline(0.5)
    assert not [ref.name for ref in record.tensors() if ref.name.startswith(("strs.", "temp."))]


def test_a_numpy_column_is_said_of_the_sample(folder: Path) -> None:
    assert field(only(folder / "bf16_step_7.dp"), "__num_turns__").alignment == "sample"


def test_rows_that_pad_dataproto_repeated_are_said(folder: Path) -> None:
    record = only(folder / "padded_step_9.dp")
    record.tensors()
    assert [problem.what for problem in record.problems] == [
        "the last 2 rows are copies of the first: they fill the world size"
    ]


def test_rows_that_the_queue_marks_as_padding_are_said(folder: Path) -> None:
    record = next(record for record in open_run(folder / "queue").records if record.key.step == 2)
    assert field(record, "tags.is_padding").alignment == "sample"
    assert [problem.what for problem in record.problems] == [
        "2 rows are marked is_padding: one-token samples that fill the world size"
    ]


@pytest.mark.parametrize("file", ["bf16_step_7.dp", "jagged_step_5.dp", "tensordict.pt", "queue/4/0/tq_batch.pt"])
def test_a_healthy_batch_is_not_said_to_be_padded(folder: Path, file: str) -> None:
    record = only(folder / file)
    record.tensors()
    assert record.problems == ()


def batch(groups: str, tokens: list[int], name: str = "group_id") -> list[TensorRef]:
    data = np.array(tokens, dtype=np.int64).tobytes()
    return [
        TensorRef(name, "text", (len(groups),), Inline(list(groups)), canonical=name),
        TensorRef("input_ids", "int64", (len(tokens), 1), Inline(data), canonical="input_ids"),
    ]


def test_a_group_whose_completions_are_alike_is_no_padding() -> None:
    assert repeated_rows(batch("aabb", [1, 1, 1, 1])) == []
    assert repeated_rows(batch("aaaa", [1, 1, 1, 1], "sample_id")) == []
    assert repeated_rows(batch("abba", [1, 2, 3, 1])) == []  # balanced among the ranks
    assert repeated_rows(batch("aabba", [1, 2, 3, 4, 9])) == []  # an unequal group of other tokens
    assert "last 1 rows" in repeated_rows(batch("aabba", [1, 2, 3, 4, 1]))[0]
    assert "last 3 rows" in repeated_rows(batch("aba" + "ba", [1, 2, 1, 2, 1]))[0]

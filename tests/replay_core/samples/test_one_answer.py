"""One batch, written in every form a trainer lays tokens out in: the same samples, diagnosis and verdicts from each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_core.compare import compare_runs
from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Diagnosis
from replay_core.dumps import open_run
from replay_core.errors import RldbgError
from replay_core.records import Record, Run
from replay_core.samples.batch import Batch
from tests.builders import FORMS, TokensOfSample, write_form
from tests.fixtures import FIXTURES

#: A file of each dialect that holds tokens.
FILES = (
    "faults/healthy/batch.pt", "faults/temperature_mismatch/batch.pt", "faults/packing_contaminated/batch.pt",
    "verl/train_batch_step1.dp", "slime", "skyrl", "nemo_rl", "prime_rl/token_exports", "open_instruct", "trl/base",
    "openrlhf/input_dumps", "areal/single_controller_rollout", "nexrl/self_hosted_fp32", "roll",
)  # fmt: skip
VALUES = ("rollout_logprobs", "old_logprobs", "advantages")


def batches(run: Run) -> list[Batch]:
    """The samples of every record that holds tokens whose padding is known, each stage's once."""
    found = []
    for record in run.records:
        try:
            batch = Batch(record, record.tensors())
        except RldbgError:
            continue
        if batch.has_tokens and batch.padding_known and batch.count and batch.lengths.all():
            found.append(batch)
    return found


def samples_of(batch: Batch) -> list[TokensOfSample]:
    """What the record says of each sample's tokens."""
    assert batch.contents is not None
    generated = batch.generated_N
    if generated is None:
        generated = batch.position_N >= np.repeat(np.maximum(1, batch.lengths // 2), batch.lengths)
    found = [TokensOfSample(ids, {}) for ids in batch.contents]
    columns = {"response_mask": generated.astype(np.float32)}
    for name in VALUES:
        ref = batch.held.find(name)
        said = None if ref is None else batch.values(ref)
        if said is not None:
            columns[name] = np.where(said.said_N & generated, said.values_N, 0.0).astype(np.float32)
    for name, values_N in columns.items():
        for sample, values in zip(found, np.split(values_N, batch.starts[1:]), strict=True):
            sample.values[name] = values
    return found


def largest(path: str) -> list[TokensOfSample]:
    every = batches(open_run(FIXTURES / path))
    assert every, f"{path} holds no tokens"
    return samples_of(max(every, key=lambda batch: len(batch.held.fields())))


def read(records: list[Record]) -> list[tuple[bytes, bytes, tuple[bytes, ...]]]:
    """Each sample's tokens, what was generated, and its values, in any order."""
    found = []
    for record in records:
        batch = Batch(record, record.tensors())
        assert batch.contents is not None
        assert batch.generated_N is not None
        marks = np.split(batch.generated_N, batch.starts[1:])
        refs = [ref for name in VALUES if (ref := batch.held.find(name)) is not None]
        columns = [np.where(np.isnan(x), 0, x) for ref in refs for x in [batch.values(ref).values_N]]  # type: ignore[union-attr]
        rows = [np.split(column, batch.starts[1:]) for column in columns]
        for sample, ids in enumerate(batch.contents):
            # Of its first token no form says anything.
            values = tuple((row[sample][1:].astype(np.float32) + 0).tobytes() for row in rows)
            found.append((ids.tobytes(), marks[sample].tobytes(), values))
    return sorted(found)


@pytest.mark.long
@pytest.mark.parametrize("path", FILES)
def test_every_form_of_a_genuine_batch_gives_the_same_samples_diagnosis_and_verdicts(path: str, tmp_path: Path) -> None:
    samples = largest(path)
    runs = {form: open_run(write_form(tmp_path / form, samples, form)) for form in FORMS}
    first = next(iter(runs.values()))
    expected = read(first.records)
    assert len(expected) == len(samples)
    diagnosed = {form: diagnose(Case(run)) for form, run in runs.items()}
    for form, run in runs.items():
        assert read(run.records) == expected, form
        compared = compare_runs(first, run)
        said = {row.name: row.verdict.value for row in compared.tensors if row.name in ("input_ids", *VALUES)}
        assert set(said.values()) <= {"SAME"}, (form, said)
        assert not [row.name for row in compared.tensors if row.verdict.value == "MISSING"], form
        # Of packing contamination the order of the samples is the evidence: shuffled, it is gone.
        if (form, path) != ("shuffled", "faults/packing_contaminated/batch.pt"):
            assert findings(diagnosed[form]) == findings(diagnosed["right"]), form


def findings(diagnosis: Diagnosis) -> dict[str, tuple[str, str]]:
    """Severity and claim of what is found, by rule."""
    return {one.id: (one.severity, one.claim) for one in diagnosis.findings}


@st.composite
def some_samples(draw: st.DrawFn) -> list[TokensOfSample]:
    made = []
    for number in range(draw(st.integers(1, 5))):
        prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        size = prompt + response
        ids = np.array([10 + number, *draw(st.lists(st.integers(1, 9), min_size=size - 1, max_size=size - 1))])
        mask = (np.arange(size) >= prompt).astype(np.float32)
        values = np.arange(size, dtype=np.float32) + 10 * number + 1
        made.append(TokensOfSample(ids, {"response_mask": mask, "old_logprobs": -values * mask}))
    return made


@pytest.mark.long
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some_samples())
def test_any_batch_reads_the_same_in_every_form(
    tmp_path_factory: pytest.TempPathFactory, samples: list[TokensOfSample]
) -> None:
    folder = tmp_path_factory.mktemp("forms")
    runs = {form: open_run(write_form(folder / form, samples, form)) for form in FORMS}
    expected = read(runs["right"].records)
    for form, run in runs.items():
        assert read(run.records) == expected, form


def test_a_pack_of_two_samples_is_two_samples_to_everyone(tmp_path: Path) -> None:
    ids = [np.arange(1, 6), np.arange(6, 13)]
    marks = [np.array([0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1, 1])]
    samples = [TokensOfSample(row, {"response_mask": mark}) for row, mark in zip(ids, marks, strict=True)]
    run = open_run(write_form(tmp_path / "dump", samples, "packed"))
    batch = Batch(run.records[0], run.records[0].tensors())
    (diagnosed,) = Case(run).batches()
    assert (batch.lengths.tolist(), diagnosed.flat.lengths_B.tolist()) == ([5, 7], [5, 7])


@pytest.mark.parametrize("form", FORMS)
def test_four_responses_cut_off_are_said_whatever_the_form(form: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    mask = (np.arange(12) >= 4).astype(np.float32)
    samples = [TokensOfSample(draw.permutation(200)[:12] + 5, {"response_mask": mask}) for _ in range(4)]
    found = diagnose(Case(open_run(write_form(tmp_path / form, samples, form))), ["D20"])
    assert [(one.id, one.severity) for one in found.findings] == [("D20", "warning")]


def test_a_mask_of_sample_numbers_says_what_one_of_ones_says(tmp_path: Path) -> None:
    # open-instruct's response_masks hold 1, 2, 3 ...: the number of the sample that a response token is of.
    packed = open_run(FIXTURES / "open_instruct" / "packed_sequences.pt")
    run = open_run(write_form(tmp_path / "grid", largest("open_instruct/packed_sequences.pt"), "right"))
    compared = compare_runs(packed, run)
    assert [row.verdict.value for row in compared.tensors if row.name == "response_mask"] == ["SAME"]

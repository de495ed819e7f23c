"""Every document there is, made from genuine files where there are any, against the published schema."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from replay_core import workbench
from replay_core.documents.reopening import SCHEMA_PATH
from replay_core.documents.replay import CellRun
from replay_core.errors import RldbgError
from replay_core.records import Selection
from tests import golden
from tests.builders import Here, save_file, write_dump, write_pair
from tests.fixtures import FIXTURES

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
KINDS = (
    "run", "record", "tensor", "difference", "comparison", "replay", "diagnosis", "parity", "info", "following",
    "explanation", "ruling", "weights", "mismatch", "samples", "gathering",
)  # fmt: skip


def validate(document: Any) -> None:
    """As it stands, and against its own kind alone: `oneOf` says only that nothing fits."""
    text = json.dumps(document, allow_nan=False)
    jsonschema.Draft202012Validator({"$ref": f"#/$defs/{document['kind']}", "$defs": SCHEMA["$defs"]}).validate(
        json.loads(text)
    )
    VALIDATOR.validate(json.loads(text))


def genuine(*parts: str) -> Path:
    return FIXTURES.joinpath(*parts)


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert {entry["$ref"].rpartition("/")[2] for entry in SCHEMA["oneOf"]} == set(KINDS)


@pytest.mark.long
def test_the_schema_is_the_one_that_the_types_make():
    """`make docs` writes it."""
    made = subprocess.run(
        [sys.executable, "-m", "replay_core.documents.schema"], capture_output=True, text=True, check=True
    )
    assert made.stdout == SCHEMA_PATH.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_screen_and_the_workbench_start_without_the_types():
    """Made as classes they cost 10 ms, and only mypy and the schema need them."""
    code = (
        "import sys, tui_debugger.app, replay_core.workbench, replay_core.export.documents\n"
        "print([name for name in sys.modules if name.startswith('replay_core.documents.')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "['replay_core.documents.version']"


def test_every_key_of_a_type_is_described_and_nothing_else_is_let_in():
    for name, schema in SCHEMA["$defs"].items():
        if "properties" in schema:
            assert set(schema["required"]) <= set(schema["properties"]), name
            assert schema["additionalProperties"] is False, name
            assert schema["description"], name


#: A line of code -> what mypy says of it.
LINES = {
    "doc['first_divergnce']": 'TypedDict "ComparisonDocument" has no key "first_divergnce"',
    "ProblemEntry(where='x', what='y', why='z')": 'Extra key "why" for TypedDict "ProblemEntry"',
    "ProblemEntry(where='x')": 'Missing key "what" for TypedDict "ProblemEntry"',
    "doc['counts']['SAME'].upper()": '"int" has no attribute "upper"',
    "ok: str = doc['a']['path']": None,
}


def test_an_unknown_key_in_our_own_code_fails_the_type_check(tmp_path: Path):
    """One run of mypy for all lines: starting it is what takes seconds."""
    file = tmp_path / "planted.py"
    head = (
        "from replay_core.documents.comparison import ComparisonDocument\n"
        "from replay_core.documents.parts import ProblemEntry\n"
        "def read(doc: ComparisonDocument) -> None:\n"
    )
    file.write_text(head + "".join(f"    {line}\n" for line in LINES))
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    said = re.findall(r"planted\.py:(\d+): error: (.*)", found.stdout)
    expected = [(number, says) for number, says in enumerate(LINES.values(), head.count("\n") + 1) if says]
    assert [int(number) for number, _ in said] == [number for number, _ in expected], found.stdout + found.stderr
    assert all(says in error for (_, error), (_, says) in zip(said, expected, strict=True)), found.stdout


@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize(
    "run",
    [("openrlhf",), ("nexrl", "self_hosted_fp32"), ("nexrl", "self_hosted_bf16"), ("nexrl", "seedtime", "pt"),
     ("areal", "single_controller_rollout", "step_000000.pt"), ("faults", "nan_inf", "batch.pt")],
)  # fmt: skip
def test_run_documents(run: tuple[str, ...], headers: bool):
    document = workbench.open_dump(genuine(*run), headers=headers)
    validate(document)
    assert document["unreadable"] <= len(document["problems"])
    assert len(document["records"]) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "run", [("nexrl", "self_hosted_bf16"), ("nexrl", "seedtime", "pt"), ("openrlhf",), ("verl",), ("roll",)]
)
def test_record_and_tensor_documents_of_every_record(run: tuple[str, ...]):
    from replay_core.dumps import open_run

    records = open_run(genuine(*run)).records
    assert records
    for record in records[:40]:
        validate(workbench.show_record(genuine(*run), record.key, stats=len(record.tensors()) < 40))
        ref = record.tensors()[-1]
        where: Any = {"path": str(genuine(*run)), "key": record.key.to_mapping(), "name": ref.name}
        validate(workbench.inspect(where))
        validate(workbench.inspect(where, where))


@pytest.mark.long
def test_a_comparison_of_genuine_runs_and_its_counts():
    document = workbench.compare_dumps(genuine("nexrl", "self_hosted_fp32"), genuine("nexrl", "self_hosted_bf16"))
    validate(document)
    counts, coverage = document["counts"], document["coverage"]
    assert counts["total"] == sum(counts[word] for word in counts if word != "total") == len(document["tensors"])
    assert coverage["tensors_skipped"] == counts["skipped"]
    assert coverage["elements_compared"] == sum(
        row["metrics"]["compared"] for row in document["tensors"] if row["metrics"]
    )
    assert coverage["tensors_compared"] == sum(row["metrics"] is not None for row in document["tensors"])
    assert document["first_divergence"]["verdict"] in ("DIFF", "NAN", "SHAPE")


def test_the_golden_comparison_of_genuine_runs():
    """The rows by name and verdict alone: their figures are held by the tests of `measure`."""
    document = workbench.compare_dumps(
        genuine("nexrl", "self_hosted_fp32"), genuine("nexrl", "self_hosted_bf16"), step=Selection.parse(0)
    )
    rows = [f"{row['verdict']}  {row['name']}" for row in document["tensors"]]
    golden.check("comparison_nexrl_step0", {**document, "tensors": rows}, fixtures=FIXTURES)


@pytest.mark.long
def test_a_genuine_run_against_itself_is_the_same():
    document = workbench.compare_dumps(genuine("nexrl", "self_hosted_fp32"), genuine("nexrl", "self_hosted_fp32"))
    validate(document)
    assert document["counts"]["SAME"] == document["counts"]["total"] > 0
    assert document["first_divergence"] is document["first_difference"] is None


@pytest.mark.parametrize("run", ["nexrl/self_hosted_fp32", "nexrl/seedtime/pt"])
def test_golden_documents_of_a_genuine_run(run: str):
    golden.check(f"run_{run.replace('/', '_')}", workbench.open_dump(genuine(run), headers=True), fixtures=FIXTURES)


def odd_fields() -> Any:
    """Everything a field can be."""
    return {
        "nan": float("nan"), "inf": torch.tensor([1.0, float("inf")]), "empty": torch.zeros(0, 3), "flag": True,
        "text": "über\x1b", "texts": ["a", "b"], "huge": 2**70, "c": torch.tensor([1 + 2j]), "none": None,
        "f8": torch.ones(2).to(torch.float8_e4m3fn), "bf": torch.ones(2, 2).bfloat16(), "ragged": [[1], [2, 3]],
        "[red]x[/red]": 1.5, "line\nbreak": 1, "n" * 300: 0.25, "": 3, "scalar": torch.tensor(2.5),
    }  # fmt: skip


def test_documents_of_everything_a_field_can_be(tmp_path: Path):
    changed = {**odd_fields(), "nan": 1.0, "inf": torch.tensor([1.0, -float("inf")]), "text": "other", "extra": 1}
    a, b = write_pair(tmp_path, {"loss": odd_fields()}, {"loss": changed})
    document = workbench.compare_dumps(a, b)
    validate(document)
    golden.check("comparison_odd", document, tmp=tmp_path)
    record = workbench.show_record(a, None, stats=True)
    validate(record)
    golden.check("record_odd", record, tmp=tmp_path)
    key = record["key"]
    for name in [field["name"] for field in record["fields"]]:
        sides: list[Any] = [{"path": str(path), "key": key, "name": name} for path in (a, b)]
        validate(workbench.inspect(*sides))


def test_a_plain_pickles_numbers_are_values(tmp_path: Path):
    import pickle

    import numpy as np

    file = tmp_path / "x.pkl"
    for protocol in (2, 4, 5):
        file.write_bytes(pickle.dumps({"x": np.float32(3), "y": np.array(2.5), "z": np.arange(3)}, protocol))
        document = workbench.show_record(file, None, stats=True)
        validate(document)
        assert {field["name"]: field["value"] for field in document["fields"]}["x"] == 3


def test_info_is_a_document():
    from tui_debugger.commands.info import _info

    validate(_info())


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A really run replay of a small recorded micro-batch, packed without its mask: a cell that disagrees."""
    root = tmp_path_factory.mktemp("replay")
    ids_BS = torch.randint(0, 50, (3, 8), generator=torch.Generator().manual_seed(0))
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[0, :2] = 0
    dump = write_dump(root / "dump", {"batch_inputs": {"input_ids": ids_BS, "attention_mask": mask_BS}})
    plan = {
        "dump": str(dump), "step": 0, "rank": 0, "micro": 0, "model": "random:llama-tiny",
        "flags": {"packing": True, "block_mask": False},
    }  # fmt: skip
    return workbench.replay(plan, root / "out", Here())


@pytest.mark.long
def test_a_replay_is_a_document(replayed: Any):
    validate(replayed)
    for cell in replayed["cells"]:
        counts = cell["agreement"]["counts"]
        if counts:
            assert counts["total"] == sum(counts[word] for word in counts if word != "total")
    assert [cell["agreement"]["agrees"] for cell in replayed["cells"]] == [None, True, False]


def test_a_replay_whose_cell_cannot_run_is_a_document(replayed: Any):
    failed = copy.deepcopy(replayed)
    failed["cells"][-1] |= {
        "effective": None, "outcome": "unavailable", "error": RldbgError("no GPU", hint="use the CPU").to_mapping(),
        "time": None, "memory": None, "dump": None, "final_hidden": None, "segments": None,
        "agreement": {"agrees": None, "first_divergence": None, "counts": None, "off": []},
    }  # fmt: skip
    failed["cells"][-1].pop("threads")
    validate(failed)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "tests/tui_debugger/documents").glob("*.json")), ids=lambda file: file.stem
)
def test_the_documents_that_the_screen_is_tested_with_are_documents(file: Path):
    document = json.loads(file.read_text(encoding="utf-8"))
    if "kind" in document:
        validate(document)
    else:  # what the child of one cell answers
        assert set(document) - {"threads", "hashes"} == set(CellRun.__annotations__)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda doc: doc.update(extra=1),
        lambda doc: doc.pop("coverage"),
        lambda doc: doc["counts"].update(total="3"),
        lambda doc: doc["tensors"][0].update(verdict="FINE"),
        lambda doc: doc["tensors"][0]["metrics"].update(rel_l2=None),
        lambda doc: doc["tensors"][0]["metrics"].update(rel_l2="NaN"),
        lambda doc: doc.update(created="today"),
        lambda doc: doc.update(schema_version=2),
    ],
)
def test_what_is_no_document_is_refused(spoil: Any, tmp_path: Path):
    file = save_file(tmp_path / "x.pt", {"x": torch.ones(2)})
    document = workbench.compare_dumps(file, file)
    validate(document)
    spoil(document)
    assert not VALIDATOR.is_valid(document)


@pytest.mark.parametrize(
    "folder", ["faults/nan_inf", "faults/healthy", "trl/base", "grpo_notes", "openrlhf/input_dumps"]
)
def test_a_diagnosis_is_as_the_schema_says(folder: str):
    document = workbench.diagnose(genuine(*folder.split("/")))
    validate(document)
    counts: Any = document["counts"]
    assert sum(counts.values()) == len(document["findings"])
    assert not set(document["checked"]) & {one["id"] for one in document["skipped"]}
    assert {one["id"] for one in document["findings"]} <= set(document["checked"])

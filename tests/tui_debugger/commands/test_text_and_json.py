"""What a command prints for people says what its document says: the same numbers, names, verdicts and order."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import FIXTURES
from tests.genuine_pairs import LONG, QUICK
from tui_debugger import format as words
from tui_debugger.cli import run
from tui_debugger.reports.comparison import ROWS

#: Every genuine run that lies in the repository.
RUNS = (
    "verl", "slime", "skyrl", "nemo_rl", "open_instruct", "roll", "areal/single_controller_rollout", "openrlhf",
    "prime_rl/rollouts", "trl/tiny_qwen2", "sglang_dumper/baseline_sdpa_fp32", "nexrl/self_hosted_fp32",
    "grpo_notes/train_1da2900_normal.log", "grpo_notes", "nexrl/seedtime/pt", "nexrl/seedtime/jsonl", "msprobe/a",
    "native/ddp", "native/fsdp2", "prime_rl/token_exports", "roll_critic/fp32_sharedhead", "faults/zero_std_all_groups",
    "trl/base",
)  # fmt: skip


@pytest.fixture
def both(capsys: pytest.CaptureFixture[str]) -> Any:
    """The text and the document of one command, which ended with one exit code."""

    def call(*arguments: Any) -> tuple[str, dict[str, Any]]:
        given = [str(argument) for argument in arguments]
        code = run(given)
        text = capsys.readouterr().out
        assert run([*given, "--json"]) == code
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return text, document

    return call


def table(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose first title is `first`, without the titles."""
    lines = text.splitlines()
    at = next((number for number, line in enumerate(lines) if re.match(rf"\s*{first}\s", line)), None)
    if at is None:
        return []
    end = next((number for number in range(at, len(lines)) if not lines[number].strip()), len(lines))
    return [re.split(r"\s{2,}", line.strip()) for line in lines[at + 1 : end] if not line.startswith("...")]


@pytest.mark.parametrize("name", RUNS)
def test_ls(name: str, both: Any) -> None:
    text, doc = both("ls", FIXTURES / name)
    head = text.splitlines()[0]
    assert f"{len(doc['records'])} records" in head
    assert f"  {doc['dialect']}  " in head
    rows = table(text, "step")
    assert len(rows) == len(doc["records"])
    for row, record in zip(rows, doc["records"], strict=True):
        key = record["key"]
        said = [key["step"], key["rank"], key["micro"], key["role"], key["stage"]]
        assert row[:5] == ["-" if part is None else str(part) for part in said]
        assert row[-1].startswith(", ".join(record["fields"][:5]) if record["fields"] is not None else "not read")
    assert text.count("\nproblem: ") == len(doc["problems"])
    assert text.count("\nnote: ") == len(doc["notes"])


@pytest.mark.parametrize("name", ["faults/healthy/batch.pt", "verl/train_batch_step1.dp", "trl/tiny_qwen2"])
def test_show(name: str, both: Any) -> None:
    text, doc = both("show", FIXTURES / name)
    rows = table(text, "field")
    assert [row[0] for row in rows] == [field["name"] for field in doc["fields"]]
    for row, field in zip(rows, doc["fields"], strict=True):
        assert field["dtype"] in row
        if field["canonical"] not in (None, field["name"]):
            assert row[1] == field["canonical"]
        for figure in ("min", "max", "mean"):
            if field["stats"] and figure in field["stats"]:
                assert words.number(field["stats"][figure]) in row


def test_show_of_a_tensor(both: Any) -> None:
    text, doc = both("show", FIXTURES / "faults/healthy/batch.pt", "advantages", "--at", "0,5")
    side = doc["a"]
    assert text.startswith(f"{side['name']}  {side['dtype']} {words.shape(side['shape'])}")
    for name, value in side["stats"].items():
        assert f"{name} {words.number(value)}" in text
    for value in doc["window"]["a"]:
        assert words.exact(value) in text


@pytest.mark.parametrize(("a", "b"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.long) for pair in LONG)])
def test_compare(a: str, b: str, both: Any) -> None:
    text, doc = both("compare", FIXTURES / a, FIXTURES / b)
    assert f"\n{words.counts(doc['counts'])}\n" in text
    every = doc["tensors"]
    told = Counter(row["verdict"] for row in every)
    assert {name: told[name] for name in doc["counts"] if name != "total"} == {
        name: count for name, count in doc["counts"].items() if name != "total"
    }
    first, head = doc["first_divergence"], text.splitlines()[0]
    if first is not None:
        assert head == f"{first['verdict']}  first diverging tensor: {first['name']}"
        assert f"  why     {first['why']}\n" in text
        told_origin = [line for line in text.splitlines() if line.startswith("  origin  ")]
        assert told_origin == ([f"  origin  {words.origin(first)}"] if words.origin(first) else [])
        computed = [row for row in every if row["verdict"] in words.DIVERGING]
        assert first["name"] in [row["name"] for row in computed]
    else:
        assert head.split()[0] in ("SAME", "CLOSE", "PARTLY", "DIFF") or head.startswith("no divergence")
    rows = table(text, "verdict")
    other = [row for row in every if row["verdict"] != "SAME"]
    assert len(rows) == min(ROWS, len(other))
    listed = Counter(row[0].rstrip("?") for row in rows)
    assert all(listed[verdict] <= count for verdict, count in Counter(row["verdict"] for row in other).items())
    if len(other) > ROWS:
        assert f"... and {len(other) - ROWS} more that are not SAME" in text
    assert sum(row["verdict"] == "skipped" for row in every) == doc["counts"]["skipped"]


@pytest.mark.parametrize(
    "name",
    ["verl", "slime", "skyrl", "faults/nan_inf", "faults/healthy", "faults/packing_contaminated/batch.pt",
     "faults/temperature_mismatch/batch.pt", "faults/zero_std_all_groups/batch.pt", "grpo_notes", "trl/base"],
)  # fmt: skip
def test_diagnose(name: str, both: Any) -> None:
    text, doc = both("diagnose", FIXTURES / name)
    told = re.findall(r"^ {0,2}(ERROR|WARNING|INFO) +([DL]\d+) ", text, re.MULTILINE)
    folded = re.findall(r"^  INFO +([DL]\d+) ", text.partition("\nbesides (--all spells them out):")[2], re.MULTILINE)
    causes = [one for one in doc["findings"] if one["echo_of"] is None]
    assert told == [(one["severity"].upper(), one["id"]) for one in causes]
    flat = " ".join(text.split())
    for one in causes:
        assert " ".join(one["claim"].split()) in flat
        if one["id"] not in folded:
            assert " ".join(one["cause"].split()) in flat
            assert f"next:  {one['next_step']}" in text
    for severity, count in doc["counts"].items():
        if severity in ("error", "warning", "info"):
            assert count == sum(one["severity"] == severity for one in causes), severity
    assert f"\nchecked {len(doc['checked'])} rules: " in text
    assert not doc["skipped"] or f"\nskipped {len(doc['skipped'])} rules:" in text
    worst = causes[0]["severity"] if causes else "info"
    assert text.startswith("no warning and no error") == (worst == "info")


@pytest.mark.parametrize("name", ["fp32_sharedhead", "bf16_init0.01"])
def test_parity(name: str, both: Any) -> None:
    folder = FIXTURES / "roll_critic" / name
    text, doc = both("parity", "--recorded", folder, folder, "--text")
    word = "AGREES" if doc["agrees"] else "DISAGREES"
    assert text.startswith(f"{word}  cause: {doc['cause'] or 'not finite'}  (batch {doc['about']})\n  {doc['why']}\n")
    for batch in doc["batches"]:
        assert batch["name"] in text
        pearson = batch["eval"]["masked"]["pearson"]
        assert pearson is None or words.number(pearson, 6) in text


@pytest.mark.parametrize("name", ["sglang_dumper/baseline_sdpa_fp32", "nexrl/self_hosted_fp32"])
def test_a_referee_that_lacks_something(name: str, both: Any) -> None:
    text, doc = both("referee", FIXTURES / name)
    assert text.startswith(f"not ruled  {doc['sentence']}\n")
    assert doc["a"]["why_not"] in text
    assert f"{doc['a']['path']}, {doc['a']['computation']}" in text


@pytest.mark.slow
def test_a_ruling(both: Any) -> None:
    pair = [FIXTURES / "sglang_dumper" / name for name in ("baseline_sdpa_fp32", "target_eager_bf16")]
    text, doc = both("referee", *pair, "--weights", FIXTURES / "trl/tiny_qwen2", "--all")
    assert text.startswith(f"{doc['ruling']}  {doc['sentence']}\n")
    assert re.findall(r"^differs: (.*)$", text, re.MULTILINE) == doc["differences"]
    for side in (doc["a"], doc["b"]):
        covered = side["coverage"]
        assert f"ruled {covered['ruled']} of {covered['recorded']} recorded tensors" in text
        for one in side["tensors"]:
            assert re.search(rf"^ +{one['ruling']} +{re.escape(one['tensor'])}  ", text, re.MULTILINE), one["tensor"]


def test_weights(both: Any, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    trainer, engine = FIXTURES / "trl/tiny_qwen2", tmp_path / "engine"
    engine.mkdir()
    held = load_file(trainer / "model.safetensors")
    names = sorted(held)
    held[names[1]] = held[names[1]] + np.asarray(1, held[names[1]].dtype)
    save_file(held, engine / "model.safetensors")
    for received, word in ((trainer, "ARRIVED"), (engine, "NOT ARRIVED")):
        text, doc = both("weights", trainer, received)
        assert text.startswith(f"{word}  {doc['headline']}\n")
        assert doc["agrees"] == (word == "ARRIVED")
        wrong = [one["name"] for one in doc["destinations"] if one["arrival"] != "arrived"]
        assert wrong == ([] if doc["agrees"] else [names[1]])
        assert all(re.search(rf"^{re.escape(name)}  ", text, re.MULTILINE) for name in wrong)
        covered = doc["coverage"]
        assert f"compared {covered['compared']} of {covered['destinations']} parameters of the engine" in text


def test_info(both: Any) -> None:
    text, doc = both("info")
    assert f"rldbg {doc['rldbg']}  python {doc['python']}" in text
    for title in ("packages", "paths", "terminal"):
        for name, value in doc[title].items():
            assert f"  {name:<14}{'-' if value is None else value}" in text


@pytest.mark.slow
def test_replay(both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    batch = FIXTURES / "faults/healthy/batch.pt"
    text, doc = both("replay", batch, "--model", "random:qwen2-tiny", "--packing")
    rows = table(text, "cell")
    assert len(rows) == len(doc["cells"])
    for number, (row, cell) in enumerate(zip(rows, doc["cells"], strict=True)):
        assert row[0] == str(number)
        assert cell["outcome"] in row
        agreement = cell["agreement"]
        if agreement is not None and agreement["agrees"] is not None:
            assert ("yes" if agreement["agrees"] else "NO") in row

"""`rldbg replay` as a shell sees it: spellings, the text, exit codes. Real children, a real model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from replay_core.dumps import open_run
from replay_core.jobs import Partial
from tui_debugger.commands.replay import CellLines, command
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.replay import matrix_table, replay_report


def run(*arguments: object) -> Result:
    # As the real entry point does, except that errors become exit codes in cli.py.
    return CliRunner().invoke(command, [str(argument) for argument in arguments], standalone_mode=False)


@pytest.fixture(scope="module")
def document(small_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A matrix of four cells on one warm child, one of them a leak."""
    out = tmp_path_factory.mktemp("replay")
    result = run(
        small_dump, "--model", "random:llama-tiny", "--capture", "none", "--warm", "--out", out / "cells",
        "--output", out / "replay.json", "--matrix", "packing=off,on", "block_mask=on,off",
    )  # fmt: skip
    assert result.exception is None, result.output
    assert result.return_value == 1
    loaded: Any = json.loads((out / "replay.json").read_text())
    return {**loaded, "text": result.stdout}


@pytest.mark.long
def test_the_matrix_is_a_table_with_a_column_per_toggle_and_the_truth(document: Any) -> None:
    head, recording, baseline, *cells = matrix_table(document)
    assert head.split()[:7] == ["#", "configuration", "packing", "block_mask", "result", "agrees", "load"]
    assert "the recording" in recording
    assert "each row alone" in baseline
    assert "reference" in baseline
    assert [line.split()[1:2] for line in cells[:2]] == [["default"], ["block_mask=off"]]
    assert "one warm child" in cells[-1]


@pytest.mark.long
def test_the_answer_comes_first_and_names_the_leak_and_the_toggles(document: Any) -> None:
    lines = document["text"].splitlines()
    first = next(line for line in lines if line and not line.startswith("wrote"))
    assert first.startswith("DISAGREES")
    assert any("sees other samples" in line for line in lines)
    assert any("smallest set that breaks agreement: packing=on block_mask=off" in line for line in lines)
    assert replay_report(document) in document["text"]


@pytest.mark.long
@pytest.mark.usefixtures("replays_here")
def test_seed_spellings_reach_the_flags(small_dump: Path, tmp_path: Path) -> None:
    result = run(
        small_dump, "--model", "random:llama-tiny", "--max-rows", 1, "--flash-attn", "--compile", "aot_eager",
        "--packing", "--capture", "none", "--warm", "--json", "--out", tmp_path / "cells",
    )  # fmt: skip
    assert result.exception is None, result.output
    flags = json.loads(result.stdout)["plan"]["flags"]
    assert (flags["attention"], flags["compile"], flags["packing"]) == ("flash", "aot_eager", True)


def test_compile_alone_means_inductor() -> None:
    option = next(one for one in command.params if one.name == "compile")
    assert option.flag_value == "inductor"  # type: ignore[attr-defined]


def test_a_cells_line_has_the_number_that_the_report_has(capsys: pytest.CaptureFixture[str]) -> None:
    doc = json.loads((Path(__file__).parent / "documents" / "matrix.json").read_text(encoding="utf-8"))
    told = CellLines(ProgressLine(), first=1)
    for cell in doc["cells"][1:]:
        told(Partial({"cell": cell}))
    ended = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if line.endswith("DISAGREES")]
    reported = [line.partition(" (")[0] for line in replay_report(doc).splitlines() if line.startswith("DISAGREES")]
    assert [f"DISAGREES  {cell}" for cell in ended] == reported != []


@pytest.mark.long
def test_an_interrupted_matrix_says_what_it_kept(small_dump: Path, tmp_path: Path) -> None:
    words = ["replay", str(small_dump), "--model", "random:llama-tiny", "--warm", "--out", str(tmp_path / "cells")]
    command = [sys.executable, "-m", "tui_debugger", *words, "--matrix", "packing=off,on", "block_mask=on,off"]
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if line.startswith("cell 1:"))
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert re.search(rf"\d cells? had ended: .* in {tmp_path / 'cells'}", said)
    assert open_run(tmp_path / "cells" / "cell1").records


def test_axes_without_a_matrix_are_refused(small_dump: Path) -> None:
    result = run(small_dump, "packing=off,on")
    assert "axes belong to --matrix" in str(result.exception)


@pytest.mark.long
def test_the_document_is_of_the_published_schema(document: Any) -> None:
    from jsonschema import Draft202012Validator

    from replay_core.documents.reopening import SCHEMA_PATH

    schema = json.loads(SCHEMA_PATH.read_text())
    stored = {name: value for name, value in document.items() if name != "text"}
    errors = [error.message for error in Draft202012Validator(schema).iter_errors(stored)]
    assert not errors, errors[0][:400]


def test_what_is_known_so_far_stands_on_the_terminal_before_the_cell_ends(capsys: pytest.CaptureFixture[str]) -> None:
    told = CellLines(ProgressLine(), first=1)
    for said in ("it parts from each row alone first in h.0.mlp", "sees padding", "sees padding"):
        told(Partial({"so_far": said}))
    heard = [line for line in capsys.readouterr().err.splitlines() if "so far" in line]
    assert heard == [
        "cell 1, so far: it parts from each row alone first in h.0.mlp", "cell 1, so far: sees padding"
    ]  # fmt: skip

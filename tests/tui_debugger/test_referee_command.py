"""`rldbg referee` and `rldbg compare --referee`: what is printed, and the exit code that stands for it."""

from __future__ import annotations

import json

import pytest

from tests.fixtures import FIXTURES
from tui_debugger.cli import run

DUMPS = [str(FIXTURES / "sglang_dumper" / name) for name in ("baseline_sdpa_fp32", "target_eager_bf16")]
WEIGHTS = str(FIXTURES / "trl/tiny_qwen2")


def test_what_cannot_be_ruled_says_what_it_lacks_and_exits_with_4(capsys: pytest.CaptureFixture[str]):
    assert run(["referee", *DUMPS]) == 4
    said = capsys.readouterr().out
    assert said.startswith("not ruled")
    assert "--weights DIRECTORY" in said


@pytest.mark.slow
def test_a_comparison_with_a_ruling_says_it_first_and_exits_by_it(capsys: pytest.CaptureFixture[str]):
    assert run(["compare", *DUMPS]) == 1, "by the table they diverge"
    capsys.readouterr()
    assert run(["compare", *DUMPS, "--referee", "--weights", WEIGHTS, "--allow-missing"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("NOISE")
    assert "tensors differ; every module rounds right on both sides" in first


@pytest.mark.slow
def test_a_ruling_as_json_is_one_document(capsys: pytest.CaptureFixture[str]):
    assert run(["referee", DUMPS[1], "--weights", WEIGHTS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["ruling"], document["b"]) == ("ruling", "NOISE", None)

"""The code in docs/integrations that says `run` does run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from replay_core.dumps import open_run

DOCS = Path(__file__).resolve().parents[2] / "docs" / "integrations"


def code(name: str) -> str:
    blocks = re.findall(r"```python run\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    return "\n".join(blocks)


@pytest.mark.parametrize(
    ("name", "dumps"),
    [
        (
            "pytorch.md",
            {"grpo-dump": {("trajectory", "actor"), ("gradient", "actor")}, "ppo-dump": {("loss", "critic")}},
        ),
        ("openrlhf.md", {"openrlhf-dump": {("batch_inputs", "actor"), ("modules", "actor")}}),
    ],
)
def test_the_code_of_a_page_records_what_it_says(
    name: str, dumps: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code(name), name, "exec"), {"__name__": "integration"})
    for dump, stages in dumps.items():
        run = open_run(tmp_path / dump)
        assert not run.problems
        assert stages <= {(record.key.stage, record.key.role) for record in run.records}
        for record in run.records:
            assert record.tensors()

"""The code in docs/integrations that says `run` does run."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("framework", ["verl", "ROLL"])
def test_a_one_line_hook_records_what_the_wrapped_method_is_given(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stand-in of the framework's class: the line itself is taken from the page."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "integration"}
    exec(compile(code("others.md"), "others.md", "exec"), names)

    class Trainer:
        global_steps = 7
        done = 0

        def _update_actor(self, batch: Any) -> str:
            self.done += 1
            return "updated"

        train_step = _update_actor

    names["RayPPOTrainer"] = names["ActorWorker"] = Trainer
    row = next(
        row for row in (DOCS / "others.md").read_text(encoding="utf-8").splitlines() if f"| {framework} |" in row
    )
    exec(row.split("`")[1], names)
    batch = SimpleNamespace(batch={"input_ids": torch.ones(2, 3), "absent": None}, meta_info={"global_step": 7})
    trainer = Trainer()
    answer = trainer._update_actor(batch) if framework == "verl" else trainer.train_step(batch)
    names["recorder"].close()
    assert (answer, trainer.done) == ("updated", 1)
    (record,) = open_run(tmp_path / "dump").records
    assert (record.key.step, record.key.stage) == (7, "batch_inputs")
    assert [ref.name for ref in record.tensors()] == ["input_ids"]

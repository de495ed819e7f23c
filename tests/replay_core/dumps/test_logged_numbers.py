"""A number that a trainer logs is none of a batch's tensors, whatever it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_core import naming
from replay_core.dumps.opening import open_run
from replay_core.dumps.words import metric_name

COUNTS = ("tokens", "sequences", "responses", "prompts", "labels", "log_probs", "token_mask")


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("form", ["log", "jsonl"])
def test_a_count_of_tokens_is_no_tensor_of_tokens(form: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.{form}"
    rows = [{"step": step, "loss": 1.0 / (step + 1), "grad_norm": 1.0, name: 12288 + step} for step in range(4)]
    lines = [json.dumps(row) for row in rows]
    if form == "log":
        lines = [" ".join(f"{key}={value}" for key, value in row.items()) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    kinds = {
        ref.name: naming.meaning(ref.canonical or ref.name).kind
        for record in open_run(path).records
        for ref in record.tensors()
    }
    assert (kinds["loss"], kinds[name]) == ("loss", "metric"), kinds


def test_a_list_in_a_file_of_metrics_keeps_its_meaning() -> None:
    assert metric_name("tokens", is_scalar=False) == "input_ids"

"""An engine's worker: its model is called by somebody else, and recorded by one line."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.dumps import open_run
from replay_core.pages import array
from replay_core.recorder import record_forwards, record_weights
from replay_core.recorder.engine import sglang_hook

DOCS = Path(__file__).resolve().parents[3] / "docs" / "integrations"


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        if input_ids[0] == 7:
            raise ValueError("out of blocks")
        return hidden


IDS, POSITIONS = torch.tensor([1, 2, 3]), torch.arange(3)


def test_the_next_forwards_are_recorded_a_step_each_and_then_nothing_is_left_on_the_model(tmp_path: Path) -> None:
    model = Decoder().eval()
    record_forwards(model, directory=tmp_path / "dump", forwards=2, rank=3)
    with torch.no_grad():
        model(IDS, POSITIONS)
        with pytest.raises(ValueError, match="out of blocks"):
            model(torch.tensor([7]), torch.tensor([0]))
        hidden = model(IDS + 1, positions=POSITIONS)
        model(IDS, POSITIONS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    run = open_run(tmp_path / "dump")
    assert run.steps() == [0, 1, 2]  # the second raised: what there is of it stays
    assert {record.key.rank for record in run.records} == {3}
    (modules,) = run.select(stage="modules", step=None)[-1:]
    last = {ref.name: ref for ref in modules.tensors()}["layers.1.output"]
    assert np.array_equal(array(last), hidden.numpy())


def test_what_the_page_of_vllm_gives_to_apply_model_records_in_a_worker(tmp_path: Path) -> None:
    lines = re.findall(r"llm\.apply_model\((.*?)\)(?:  #.*)?\n", (DOCS / "vllm.md").read_text(encoding="utf-8"))
    assert len(lines) == 2
    model = Decoder()
    for line in lines:
        names = {"partial": partial, "record_forwards": record_forwards, "record_weights": record_weights}
        function = eval(line.replace('directory="', f'directory="{tmp_path}/'), names)
        function(model)  # as WorkerBase.apply_model(fn) does
    model(IDS, POSITIONS)
    assert {record.key.stage for record in open_run(tmp_path / "engine-dump").records} == {"batch_inputs", "modules"}
    (weights,) = open_run(tmp_path / "weights-dump").records
    assert len(weights.tensors()) == len(list(model.parameters()))


def test_the_argument_on_the_page_of_sglang_records_its_decoder(tmp_path: Path) -> None:
    page = (DOCS / "sglang.md").read_text(encoding="utf-8")
    found = re.search(r"--forward-hooks '(.*?)'", page, re.DOTALL)
    assert found is not None
    (spec,) = json.loads(found.group(1))
    assert spec["hook_factory"] == f"{sglang_hook.__module__}:{sglang_hook.__name__}"
    engine: Any = torch.nn.Module()
    engine.model = Decoder()
    # As register_forward_hooks does: by name, a plain forward hook, the factory given the config.
    config = {**spec["config"], "directory": str(tmp_path / "dump"), "weights": str(tmp_path / "weights"), "every": 2}
    dict(engine.named_modules())[spec["target_modules"][0]].register_forward_hook(sglang_hook(config))
    for _ in range(5):
        engine.model(IDS, POSITIONS)
    assert open_run(tmp_path / "dump").steps() == [0, 1, 2, 3]
    assert open_run(tmp_path / "weights").steps() == [0, 2, 4]

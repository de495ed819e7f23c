"""What the nodes of one job wrote on their own disks, brought together: one run, whichever way."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from replay_core import workbench
from replay_core.dumps import open_run
from replay_core.recorder import Recorder


def node(directory: Path, *ranks: int) -> Path:
    """The dump of a node: two steps of its ranks; rank 0 notes the weights."""
    with Recorder(directory) as recorder:
        for rank in ranks:
            for step in range(2):
                ids_BS = torch.arange(6).reshape(1, 6) + rank
                with recorder.step(step, rank=rank) as record:
                    record("batch_inputs", micro=0, input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS))
                    record("forward_data", micro=0, log_probs=-(ids_BS + step).float() / 7)
        if 0 in ranks:
            (directory / "checkpoints" / "step_000000").mkdir(parents=True)
            recorder.note_model(0, "checkpoints/step_000000")
    return directory


def test_nodes_in_one_folder_and_nodes_in_a_folder_each_are_the_run_of_one_machine(tmp_path: Path) -> None:
    whole = node(tmp_path / "whole", 0, 1, 2, 3)
    apart = tmp_path / "apart"
    node(apart / "node0", 0, 1)
    node(apart / "node1", 2, 3)
    together = shutil.copytree(apart / "node0", tmp_path / "together")
    shutil.copytree(apart / "node1", together, ignore=shutil.ignore_patterns("manifest.json"), dirs_exist_ok=True)
    for place, weights in ((together, together), (apart, apart / "node0")):
        run = open_run(place)
        assert [record.key for record in run.records] == [record.key for record in open_run(whole).records]
        assert (run.problems, run.inside) == ([], [])
        assert run.models == {0: str(weights / "checkpoints/step_000000")}
        counts = workbench.compare_dumps(whole, place)["counts"]
        assert counts["total"] == counts["SAME"] == 4 * 2 * 3


def test_two_runs_in_a_folder_are_not_taken_for_nodes(tmp_path: Path) -> None:
    node(tmp_path / "a", 0, 1)
    node(tmp_path / "b", 0, 1)
    run = open_run(tmp_path)
    assert (run.models, len(run.inside)) == ({}, 2)

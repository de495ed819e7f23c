"""Garbage under every name a dialect knows: an error of ours, never a traceback."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.errors import DumpError, RldbgError

GARBAGE = [
    b"",
    b"\x80\x04",
    b"PK\x03\x04" + bytes(60),
    b"\x93NUMPY\x01\x00\xff\xff",
    b"{}",
    b"[1]",
    b"\x80\x02]q\x00.",
    pickle.dumps({"__class__": "verl.protocol.DataProto", "state": 3}),
    pickle.dumps([{"kind": 1, "tokens": {}}]),
    pickle.dumps({"rollout_id": {}, "samples": 7}),
    pickle.dumps([{"input_ids": 1, "loss_mask": None}, 4]),
    pickle.dumps({"query_responses": 1, "attention_masks": {}, "response_masks": ""}),
    pickle.dumps({"tensordict": [], "global_steps": "x"}),
    pickle.dumps({"rank": [], "call": {}, "samples": {}}),
    pickle.dumps({"rollout_id": 1, "rollout_data": [1]}),
    pickle.dumps({"backend": 1, "values": {}, "input_ids": 2}),
    b'{"data": 5}',
    b'{"data": {"Module.a.B.forward.0": {"output": [{"type": 1, "shape": "x", "data_name": 4}]}}}',
    b'{"weight_map": {"a": "."}}',
    b'{"_type": "tensordict", "stack_dim": 0, "x": {"dtype": [], "shape": [-1], "is_nested": 1}}',
    b'{"module_path": "M", "inputs": 3, "children": [1, {"outputs": {"dtype": 1, "shape": "torch.Size([-1])"}}]}',
    b'{"torchlens_version": 1, "tensors": [3, {"label": "a", "relative_path": "blobs/..", "shape": 1}]}',
    json.dumps({"weight_map": {"a": "x\0y"}}).encode(),
]
NAMES = [
    "step_000000.pt",
    "gen_batch.dp",
    "tq_batch.pt",
    "step_000001.pkl",
    "0.pt",
    "eval_3.pt",
    "rank_0_call_1.pt",
    "dump.json",
    "global_step_1_training_input.pkl",
    "step=0___rank=0___dump_index=1___name=x.pt",
    "model_world_size_2_rank_0.pt",
    "packed_sequences.pt",
    "captured_x.pt",
    "a_step1_micro2.pt",
    "x_megatron.pt",
    "model.safetensors.index.json",
    "z.npz",
    ".metadata",
    "__0_0.distcp",
    "meta.json",
    "M_debug_tree_FULL_TENSORS.json",
    "manifest.json",
]


@pytest.mark.parametrize("name", NAMES)
def test_garbage_under_any_name_is_an_error_of_ours(tmp_path: Path, name: str) -> None:
    for number, garbage in enumerate(GARBAGE):
        folder = tmp_path / str(number) / "forward_data"
        folder.mkdir(parents=True)
        (folder / name).write_bytes(garbage)
        for path in (folder, folder.parent, folder / name):
            try:
                for record in open_run(path).records:
                    for ref in record.tensors():
                        if ref.is_readable:
                            pages.array(ref)
            except RldbgError:
                pass


def test_an_index_of_more_files_than_any_model_has_is_refused_with_their_number(tmp_path: Path) -> None:
    places = {f"w{i}": f"s{i}.safetensors" for i in range(4100)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(DumpError, match="more files than any model has") as refused:
        open_run(tmp_path).records[0].tensors()
    assert refused.value.found == "4,100"

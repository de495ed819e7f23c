"""The cells of a replay held against each row alone: real models, real dumps; crashes in real children."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.executors.child import ChildRunner
from replay_core.export.outcome import exit_code
from replay_core.jobs import Event, Progress
from replay_core.recorder import Recorder
from tests.fixtures import FIXTURES
from tests.replay_core.replay.conftest import small_batch

FAULTS = {
    "packing=on block_mask=off": ("other_samples", ["mask_set"]),
    "packing=on use_cache=on": ("other_samples", ["use_cache"]),
    "packing=on fault=boundary": ("other_samples", ["boundary"]),
    "packing=on fault=foreign_key": ("other_samples", ["foreign_keys"]),
    "packing=on fault=no_positions": ("other_samples", ["positions_dropped"]),
    "packing=off fault=padded_mask": ("padding", ["padded_mask"]),
}


def parts_of(told: list[Event]) -> list[tuple[int, int]]:
    """Which parts of how many a job said that it is in, each once."""
    return list(dict.fromkeys((event.part, event.parts) for event in told if isinstance(event, Progress)))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_mistake_is_caught_and_told_apart(ask, fault, dtype):
    doc = ask(f"{fault} dtype={dtype}", plan={"capture": "none"})
    cell = doc["cells"][-1]
    assert cell["agreement"]["agrees"] is False
    assert (cell["cause"]["kind"], cell["cause"]["causes"]) == FAULTS[fault]
    control = [one for one in doc["cells"] if one["part"] == "control"]
    assert all(one["agreement"]["agrees"] for one in control), "the right padded batch beside it is not blamed"
    assert exit_code(doc) == 1


@pytest.mark.long
def test_a_leak_is_proved_by_the_tokens_that_move(ask):
    cause = ask("packing=on block_mask=off", plan={"capture": "none"})["cells"][-1]["cause"]
    assert (cause["off"], cause["exact"]) == ([1, 2], [0])
    assert "samples 1..2 off: sees other samples: changing sample 0 moves" in cause["sentence"]
    smallest = {"rows": 2, "tokens": [1, 4], "layers": 1, "of_layers": 2}
    assert cause["evidence"]["smallest"] == smallest, cause["evidence"]["smallest"]


@pytest.mark.long
def test_a_matrix_names_the_smallest_set_that_breaks_agreement(ask):
    doc = ask(matrix="attention=eager,sdpa packing=off,on block_mask=on,off", plan={"capture": "none"})
    cells = doc["cells"]
    assert [cell["part"] for cell in cells] == ["recording", "reference", *["cell"] * 8]
    assert doc["baseline"] == 1
    assert doc["matrix"]["breaking"] == [{"packing": True, "block_mask": False}]
    disagreeing = [cell["toggles"] for cell in cells[2:] if cell["agreement"]["agrees"] is False]
    assert disagreeing == [
        {"packing": True, "block_mask": False}, {"attention": "sdpa", "packing": True, "block_mask": False},
    ]  # fmt: skip
    assert doc["floors"]["float32"]["worst_token"] < 1e-5
    assert exit_code(doc) == 1


def test_two_flags_with_one_kernel_are_one_cell(ask):
    cells = ask(matrix="attention=sdpa-flash,flash,eager", plan={"capture": "none"})["cells"]
    by_attention = {cell["flags"]["attention"]: cell for cell in cells[2:]}
    if by_attention["flash"]["effective"]["attention_flag"] != "sdpa-flash":
        pytest.skip("a flash-attention package is installed here")
    assert by_attention["flash"]["same_as"] == cells.index(by_attention["sdpa-flash"])
    assert by_attention["eager"]["same_as"] is None
    assert any("flash is torch's own flash kernel here" in note for note in by_attention["flash"]["notes"])


def test_what_cannot_run_is_unavailable_and_the_rest_goes_on(ask):
    told: list[Event] = []
    doc = ask(matrix="attention=eager,sdpa-cudnn,sdpa", plan={"capture": "none"}, on_event=told.append)
    assert [cell["outcome"] for cell in doc["cells"]] == ["ran", "ran", "ran", "unavailable", "ran"]
    assert "CUDA only" in doc["cells"][3]["error"]["message"]
    assert exit_code(doc) == 0
    assert parts_of(told) == [(part, 4) for part in range(4)], "each row alone is the first of four"


def test_a_model_that_raises_is_one_failed_cell_with_its_log(ask, tmp_path):
    doc = ask(matrix="fault=none,raise", plan={"capture": "none"})
    failed = doc["cells"][-1]
    assert (failed["outcome"], doc["matrix"]["failing"]) == ("failed", [{"fault": "raise"}])
    assert "a deliberate failure" in failed["error"]["message"]
    assert failed["log"].endswith("cell3.log")
    assert exit_code(doc) == 4


@pytest.mark.long
def test_run_twice_this_machine_repeats_itself(ask):
    told: list[Event] = []
    repeated = ask("attention=eager", twice=True, on_event=told.append)["determinism"]
    assert parts_of(told) == [(part, 4) for part in range(4)], "two beside what was asked for, and that once more"
    assert (repeated["equal"], repeated["first"]) == (True, None)
    assert repeated["tensors"] > 50


@pytest.mark.long
def test_an_abort_in_the_child_is_a_crashed_cell_and_the_matrix_completes(ask):
    with ChildRunner(warm=True, time_limit_s=120) as runner:
        doc = ask(matrix="fault=none,abort", plan={"capture": "none"}, runner=runner)
    assert [cell["outcome"] for cell in doc["cells"][1:]] == ["ran", "ran", "crashed"]
    crashed = doc["cells"][-1]
    assert "SIGABRT" in crashed["error"]["message"]
    assert "faults.py" in Path(crashed["log"]).read_text(), "the log holds the stack"
    assert exit_code(doc) == 4


@pytest.mark.slow
def test_a_model_that_never_returns_is_ended_at_the_time_limit(ask):
    with ChildRunner(time_limit_s=30) as runner:
        doc = ask("fault=hang", plan={"capture": "none"}, runner=runner)
    assert [cell["outcome"] for cell in doc["cells"]] == ["ran", "ran", "crashed"]
    assert "hung" in doc["cells"][-1]["error"]["message"]


@pytest.mark.long
@pytest.mark.parametrize("fault", [
    pytest.param("packing=on fault=foreign_key", marks=pytest.mark.slow), "packing=on block_mask=off dtype=bfloat16"
])  # fmt: skip
def test_digests_first_find_the_divergence_that_whole_tensors_find(ask, fault):
    whole = ask(fault, plan={"capture_level": "full"})["cells"][-1]
    hashed = ask(fault, plan={"capture_level": "hash"})["cells"][-1]
    first, other = (cell["agreement"]["first_divergence"] for cell in (whole, hashed))
    assert (other["name"], other["index"], other["origin"]) == (first["name"], first["index"], first["origin"])
    assert hashed["cause"] == whole["cause"]
    assert hashed["capture"]["hashes"]["first"]["name"].startswith("layers.0.self_attn."), (
        "bits part at its projections"
    )
    told = hashed["capture"]["hashes"]
    assert told["equal"] + told["differ"] == told["tensors"] > 50


@pytest.mark.slow
def test_a_capture_beyond_its_cap_is_hashed_and_then_looked_at_in_pieces(ask):
    genuine = {"dump": str(FIXTURES / "openrlhf"), "micro": 8, "model": "random:llama-tiny", "max_rows": 2}
    doc = ask("packing=on fault=foreign_key", plan={**genuine, "capture_cap_mib": 3})
    control, cell = doc["cells"][1:]
    assert {one["capture"]["level"] for one in doc["cells"]} == {"hash"}
    assert cell["agreement"]["first_divergence"]["name"] == "layers.0.self_attn.o_proj.inputs.0"
    assert cell["agreement"]["first_divergence"]["index"]["position"] == 0
    assert cell["capture"]["forecast_mib"] > 6
    assert max(one["capture"]["mib"] for one in doc["cells"]) < 3.5
    assert control["agreement"]["agrees"] is True
    assert control["capture"]["hashes"]["not_in_full"] > 0
    assert any("were not compared in full" in note for note in doc["notes"])


@pytest.mark.long
def test_what_was_kept_is_in_the_document_and_the_digests_beside_the_log(ask):
    cell = ask("packing=on", plan={"capture_level": "hash"})["cells"][-1]
    assert cell["agreement"]["agrees"] is True
    told = cell["capture"]["hashes"]
    assert (told["windows"], told["not_in_full"]) == (1, 0)
    lines = Path(cell["log"]).with_suffix(".hashes.jsonl").read_text().splitlines()
    assert len(lines) == told["tensors"]


@pytest.mark.slow
def test_a_compiled_cell_has_no_digests_and_is_looked_at_from_the_start(ask):
    cell = ask("compile=aot_eager packing=on fault=foreign_key", plan={"capture_level": "hash"})["cells"][-1]
    assert (cell["capture"]["hashes"]["tensors"], cell["capture"]["hashes"]["windows"]) == (0, 1)
    assert cell["agreement"]["first_divergence"]["name"].startswith("layers.0.self_attn.")


@pytest.mark.long
def test_run_twice_is_judged_by_digests_too(ask):
    repeated = ask("attention=eager", twice=True, plan={"capture_level": "hash"})["determinism"]
    assert (repeated["equal"], repeated["tensors"] > 50) == (True, True)


def test_padding_on_either_side_is_held_sample_by_sample(ask):
    doc = ask(plan={"capture": "none"}, matrix="padding=recorded,left,right")
    assert [cell["agreement"]["agrees"] for cell in doc["cells"][2:]] == [True] * 3
    assert [cell["effective"]["padding"] for cell in doc["cells"][2:]] == ["recorded", "left", "right"]
    positions = [row["worst_token"]["position"] for row in doc["cells"][-1]["segments"]]
    assert len(positions) == 3


def counting() -> Any:
    """A GPT-2, which looks its positions up: counted otherwise they are others, whatever the mask."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=128, n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None,
        initializer_range=0.2,
    ))  # fmt: skip


@pytest.mark.slow
def test_the_positions_that_were_recorded_explain_what_was_recorded(ask, tmp_path):
    import torch

    batch = small_batch()
    ids, mask = torch.from_numpy(batch.ids_BS), torch.from_numpy(batch.valid_BS.astype(np.int64))
    positions = torch.arange(24).expand(3, -1)
    with torch.no_grad():
        logits = counting().eval()(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    said = torch.zeros(3, 24)
    said[:, :-1] = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    with Recorder(tmp_path / "dump") as recorder, recorder.step(0) as record:
        record("forward_data", micro=0, input_ids=ids, attention_mask=mask, position_ids=positions,
               response_mask=torch.from_numpy(batch.response_BS), temperature=1.0, old_log_probs=said)  # fmt: skip
    plan = {"dump": str(tmp_path / "dump"), "model": f"factory:{__name__}:counting", "capture": "none",
            "forward_path": str(Path(__file__).parents[3])}  # fmt: skip
    doc = ask(plan=plan, matrix="positions=cumsum,arange,recorded")
    cells = {cell["flags"]["positions"]: cell for cell in doc["cells"][2:]}
    assert {name: cell["agreement"]["agrees"] for name, cell in cells.items()} == {
        "cumsum": True, "arange": False, "recorded": False,
    }  # fmt: skip
    assert {cells[name]["cause"]["kind"] for name in ("arange", "recorded")} == {"positions"}
    assert cells["recorded"]["recorded"][0]["mean_abs"] < 1e-6 < cells["cumsum"]["recorded"][0]["mean_abs"]
    assert "positions=recorded" in " ".join(doc["notes"])

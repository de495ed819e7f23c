"""The cells of a replay held against each row alone: real models, real dumps; crashes in real children."""

from pathlib import Path

import pytest

from replay_core.executors.child import ChildRunner
from replay_core.export.outcome import exit_code

FAULTS = {
    "packing=on block_mask=off": ("leak", ["mask_set"]),
    "packing=on use_cache=on": ("leak", ["use_cache"]),
    "packing=on fault=boundary": ("leak", ["boundary"]),
    "packing=on fault=foreign_key": ("leak", ["foreign_keys"]),
    "packing=on fault=no_positions": ("leak", ["positions_dropped"]),
    "packing=off fault=padded_mask": ("padding", ["padded_mask"]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_mistake_is_caught_and_told_apart(ask, fault, dtype):
    doc = ask(f"{fault} dtype={dtype}", plan={"capture": "none"})
    cell = doc["cells"][-1]
    assert cell["agreement"]["agrees"] is False
    assert (cell["cause"]["kind"], cell["cause"]["causes"]) == FAULTS[fault]
    control = [one for one in doc["cells"] if one["part"] == "control"]
    assert all(one["agreement"]["agrees"] for one in control), "the right padded batch beside it is not blamed"
    assert exit_code(doc) == 1


def test_a_leak_is_proved_by_the_segment_that_moves(ask):
    cause = ask("packing=on block_mask=off", plan={"capture": "none"})["cells"][-1]["cause"]
    assert (cause["off"], cause["exact"], cause["off_reversed"]) == ([1, 2], [0], [0, 1])
    assert "segments 1..2 off: sequences see each other" in cause["sentence"]


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
    doc = ask(matrix="attention=eager,sdpa-cudnn,sdpa", plan={"capture": "none"})
    assert [cell["outcome"] for cell in doc["cells"]] == ["ran", "ran", "ran", "unavailable", "ran"]
    assert "CUDA only" in doc["cells"][3]["error"]["message"]
    assert exit_code(doc) == 0


def test_a_model_that_raises_is_one_failed_cell_with_its_log(ask, tmp_path):
    doc = ask(matrix="fault=none,raise", plan={"capture": "none"})
    failed = doc["cells"][-1]
    assert (failed["outcome"], doc["matrix"]["failing"]) == ("failed", [{"fault": "raise"}])
    assert "a deliberate failure" in failed["error"]["message"]
    assert failed["log"].endswith("cell3.log")
    assert exit_code(doc) == 4


def test_run_twice_this_machine_repeats_itself(ask):
    repeated = ask("attention=eager", twice=True)["determinism"]
    assert (repeated["equal"], repeated["first"]) == (True, None)
    assert repeated["tensors"] > 50


def test_an_abort_in_the_child_is_a_crashed_cell_and_the_matrix_completes(ask):
    with ChildRunner(time_limit_s=120) as runner:
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

"""Documents as text: the answer first, what was left out counted, every column in its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.errors import SelectionError
from tests.builders import write_dump, write_pair
from tests.tui_debugger.handout.documents import genuine
from tests.whole import whole
from tui_debugger.handout.sheets.comparison import comparison_sheet
from tui_debugger.reports.columns import columns
from tui_debugger.reports.comparison import comparison_report, explanation
from tui_debugger.reports.record import record_report
from tui_debugger.reports.replay import replay_report
from tui_debugger.reports.run import run_report
from tui_debugger.reports.tensor import tensor_report


def compared(directory: Path, a: Any, b: Any) -> Any:
    return workbench.compare_dumps(*write_pair(directory, {"modules": a}, {"modules": b}))


def test_the_answer_stands_first_with_place_values_and_reason(tmp_path: Path):
    a = torch.ones(2, 3)
    b = a.clone()
    b[1, 2] = 5
    lines = comparison_report(compared(tmp_path, {"x": a}, {"x": b})).splitlines()
    assert lines[0] == "DIFF  first diverging tensor: x"
    assert "index [1, 2]" in lines[1]
    assert " ".join(lines[2].split()) == "values a[1, 2] = 1 b[1, 2] = 5"
    assert lines[3].startswith("  why     relative L2")


@pytest.mark.parametrize("verdict", ["CLOSE", "PADDING"])
def test_a_pair_that_is_only_just_close_is_in_doubt_in_every_form(tmp_path: Path, verdict: str):
    a = torch.ones(2, 3)
    document = compared(tmp_path, {"x": a, "y": a}, {"x": a + 1e-5, "y": a + 1})
    document["tensors"][0].update(verdict=verdict, suspect=True)
    assert f"\n{verdict}? " in comparison_report(document)
    assert f"{verdict}?" in str(comparison_sheet(document))


def test_what_is_not_listed_is_counted(tmp_path: Path):
    a = {f"t{number}": torch.zeros(3) for number in range(40)}
    b = {name: value + 1 for name, value in a.items()}
    document = compared(tmp_path, a, b)
    assert "and 10 more that are not SAME (--all lists every tensor)" in comparison_report(document)
    assert comparison_report(document, show_all=True).count("\nDIFF ") == 40


def test_a_difference_of_masks_alone_is_said_to_be_one(tmp_path: Path):
    document = compared(tmp_path, {"loss_mask": torch.ones(3), "x": 1}, {"loss_mask": torch.zeros(3), "x": 1})
    assert "only masks differ, nothing that was computed: loss_mask" in comparison_report(document)


def test_missing_tensors_are_no_agreement(tmp_path: Path):
    text = comparison_report(compared(tmp_path, {"x": 1, "y": 2}, {"x": 1}))
    assert text.splitlines()[0].startswith("PARTLY no divergence, but 1 not compared")
    assert "only a has it" in text


def test_coverage_is_the_last_word(tmp_path: Path):
    text = comparison_report(
        compared(tmp_path, {"x": torch.ones(4), "timestamp": 1.0}, {"x": torch.ones(4), "timestamp": 2.0})
    )
    assert "compared 1 tensors, 4 elements in 1 paired micro-batches" in text.splitlines()[-1]
    assert "1 bookkeeping fields not compared" in text


def test_explain_finds_a_tensor_by_either_of_its_names(tmp_path: Path):
    document = compared(tmp_path, {"action_log_probs": torch.ones(2, 3)}, {"action_log_probs": torch.zeros(2, 3)})
    assert explanation(document, "old_logprobs") == explanation(document, "action_log_probs")
    with pytest.raises(SelectionError, match="no tensor 'nothing'") as caught:
        explanation(document, "nothing")
    assert "old_logprobs" in str(caught.value)


def test_a_run_without_step_numbers_and_one_with_many(tmp_path: Path):
    torch.save({"x": 1}, tmp_path / "x.pt")
    assert "no step numbers" in run_report(workbench.open_dump(tmp_path / "x.pt", headers=True))
    fields = {f"f{number}": number for number in range(9)}
    text = run_report(workbench.open_dump(write_dump(tmp_path / "dump", {"loss": fields}), headers=True))
    assert "step 0  1 records  checked: headers" in text
    assert "f4 and 4 more" in text


def test_a_record_and_a_tensor_in_columns(tmp_path: Path):
    dump = write_dump(tmp_path / "dump", {"loss": {"x": torch.arange(4.0), "loss": 0.1, "text": "y" * 90}})
    record = workbench.show_record(dump, None, stats=True)
    lines = record_report(record).splitlines()
    assert lines[2].split() == ["field", "is", "dtype", "shape", "tokens", "min", "max", "mean", "nan", "value"]
    assert lines[3].split() == ["x", "float32", "4", "0", "3", "1.5", "0"]
    assert lines[5].endswith("…")
    text = tensor_report(workbench.inspect({"path": str(dump), "key": record["key"], "name": "x"}))
    assert text.splitlines()[-1].split() == ["[3]", "3"]


def test_columns_are_as_wide_as_their_widest_cell():
    assert columns([["a", "bb"], ["ccc", "d"]], right=frozenset({1})) == ["a    bb", "ccc   d"]
    assert columns([]) == []


def replay_document() -> Any:
    def cell(number: int, agrees: bool | None, segments: list[Any] | None) -> Any:
        return {
            "flags": {"attention": "sdpa", "packing": number == 2}, "effective": {"attention": ["mm"]},
            "outcome": "ran", "error": None, "notes": [], "time": {"load_s": 1.0, "compile_s": None, "steady_s": 0.05},
            "memory": {"peak_mib": 100.0}, "dump": f"/cells/{number}", "final_hidden": "norm.output", "asked": True,
            "part": "cell" if number else "reference",
            "agreement": {"agrees": agrees, "first_divergence": None, "counts": None}, "segments": segments,
        }  # fmt: skip

    gap = {"logp_max": 1e-6, "logp_mean": 1e-7}
    rows = [{"sample": 0, "tokens": 3, "worst_token": {"position": 1, "rel_l2": 1e-7}, "valid": gap, "response": gap}]
    return whole({
        "kind": "replay", "baseline": 0, "plan": {"dump": "/run", "step": 0, "rank": 0, "micro": 0, "model": "m"},
        "notes": ["assumed"], "cells": [cell(0, None, None), cell(1, True, rows)],
    })  # fmt: skip


def test_a_replay_that_agrees_says_how_closely():
    lines = replay_report(replay_document()).splitlines()
    assert lines[0].startswith("AGREES  1 cell with each row alone, in every sample: worst token 1e-07")
    assert "note: assumed" in lines


def test_a_cell_that_disagrees_stands_before_those_that_could_not_run():
    lines = replay_report(genuine()["matrix"]).splitlines()
    assert lines[0].startswith("DISAGREES  cell 6 ")
    assert lines[1].startswith("  other_samples: ")
    assert [line.split()[2] for line in lines if line.startswith("UNAVAILABLE")] == ["5", "7", "8", "9"]


def test_a_matrix_in_which_nothing_disagrees_says_what_could_not_run_first():
    document = copy.deepcopy(genuine()["matrix"])
    document["cells"][6]["agreement"]["agrees"] = True
    assert replay_report(document).startswith("UNAVAILABLE  cell 5 ")


def test_a_capsule_is_offered_where_one_can_be_made():
    document = copy.deepcopy(genuine()["matrix"])
    assert "hint: rldbg capsule " in replay_report(document)
    document["plan"]["model"] = "factory:models:build"
    assert "rldbg capsule" not in replay_report(document), "a capsule holds no code"


def test_a_sample_without_tokens_has_no_worst_one():
    document = replay_document()
    rows = document["cells"][1]["segments"]
    nothing = {"logp_max": None, "logp_mean": None}
    rows.append({"sample": 1, "tokens": 0, "worst_token": None, "valid": nothing, "response": nothing})
    assert "AGREES" in replay_report(document)
    leaking = copy.deepcopy(document)
    leaking["cells"][1]["agreement"] = {
        "agrees": False, "counts": None, "off": [],
        "first_divergence": {"name": "x", "a_key": None, "b_key": None, "verdict": "DIFF", "index": None, "a": 1.0,
                             "b": 2.0, "metrics": None, "origin": None, "why": "so", "note": None, "around": None},
    }  # fmt: skip
    leaking["cells"][1]["segments"][0]["worst_token"]["rel_l2"] = 0.5
    leaking["cells"][1]["agreement"]["first_divergence"]["index"] = {
        "sample": 0, "position": 1, "raw_a": [0], "raw_b": [0], "sample_b": None,
    }  # fmt: skip
    assert "DISAGREES" in replay_report(leaking)


def test_values_that_differ_late_are_told_apart(tmp_path: Path):
    a = {"ids": torch.tensor([2**62]), "wide": torch.tensor([1.0], dtype=torch.float64)}
    b = {"ids": torch.tensor([2**62 + 1]), "wide": torch.tensor([1.0 + 2**-40], dtype=torch.float64)}
    document = compared(tmp_path, a, b)
    assert "a = 4,611,686,018,427,387,904   b = 4,611,686,018,427,387,905" in explanation(document, "ids")
    assert "a = 1.0   b = 1.0000000000009095" in explanation(document, "wide")


def test_a_difference_no_number_measures_has_no_size(tmp_path: Path):
    document = compared(tmp_path, {"x": torch.ones(2), "y": "one"}, {"x": torch.ones(2) * torch.nan, "y": "two"})
    table = [line.split() for line in comparison_report(document).splitlines() if " modules " in line]
    assert [(row[0], row[1], row[-2:]) for row in table] == [("NAN", "x", ["—", "—"]), ("DIFF", "y", ["—", "—"])]


def test_wide_letters_keep_the_columns_in_place():
    assert columns([["層.输出", "x"], ["plain", "y"]]) == ["層.输出  x", "plain    y"]

from __future__ import annotations

from replay_core import workbench
from replay_core.diagnose.finding import Diagnosis, Finding, Skipped
from replay_core.diagnose.merging import together
from tests.fixtures import FIXTURES


def finding(id: str, severity: str, link: str = "loss") -> Finding:
    return Finding(id, severity, f"{id} is so", (), "", "", link, "")  # type: ignore[arg-type]


def test_findings_carry_their_runs_name_and_stand_worst_first() -> None:
    mild = Diagnosis((finding("D20", "info"),), ("D20",), (Skipped("D01", "needs rewards"),))
    bad = Diagnosis((finding("D01", "error", "rewards"),), ("D01",), (Skipped("D20", "needs responses"),), ("odd",))
    whole = together([("a", mild), ("b", bad)])
    assert [one.claim for one in whole.findings] == ["b: D01 is so", "a: D20 is so"]
    assert (whole.checked, whole.skipped) == (("D01", "D20"), ())
    assert whole.notes == ("2 runs of this folder were diagnosed apart: a, b", "b: odd")


def test_a_rule_no_run_let_look_is_skipped_with_every_reason() -> None:
    runs = [(name, Diagnosis((), (), (Skipped("D01", f"needs {name}"),))) for name in ("a", "b")]
    assert together(runs).skipped == (Skipped("D01", "needs a; needs b"),)


def test_a_folder_of_faulty_runs_names_the_fault_of_each() -> None:
    document = workbench.diagnose(FIXTURES / "faults")
    said = {one["claim"].partition(":")[0]: one["id"] for one in document["findings"] if one["severity"] != "info"}
    assert said == {
        "zero_std_all_groups": "D01", "temperature_mismatch": "D10", "packing_contaminated": "D16", "nan_inf": "D21",
    }  # fmt: skip

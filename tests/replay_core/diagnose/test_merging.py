from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from replay_core import workbench
from replay_core.diagnose.engine import chain
from replay_core.diagnose.finding import Diagnosis, Finding, Skipped
from replay_core.diagnose.merging import merged, together
from replay_core.records import Selection
from tests.fixtures import FIXTURES
from tests.replay_core.diagnose.test_micro_batches import record


def finding(id: str, severity: str, link: str = "loss") -> Finding:
    return Finding(id, severity, f"{id} is so", (), "", "", link, "")  # type: ignore[arg-type]


def test_steps_that_come_later_are_told_as_the_whole_run_tells_them(tmp_path: Path) -> None:
    """Step 0 is at another temperature, a mistake that lasts; step 2 only disagrees, which that explains."""

    def sampled(step: int, batch: dict[str, Any]) -> None:
        draw = torch.Generator().manual_seed(step)
        trainer_BT = batch["old_log_probs"]
        batch["rollout_log_probs"] = {0: trainer_BT * 1.6, 1: trainer_BT.clone()}.get(
            step, trainer_BT + 0.3 * torch.randn(trainer_BT.shape, generator=draw)
        )

    path = record(tmp_path / "dump", steps=3, fields=sampled)
    rules = ("D09", "D10")  # of one step each: what looks over steps has not seen those that came
    whole = workbench.diagnose(path, rules=rules)
    known = workbench.diagnose(path, rules=rules, step=Selection.parse("0,1"))
    later = workbench.diagnose(path, rules=rules, step=Selection.parse("2"), known=known)
    assert [(one["id"], one["echo_of"], one["steps"]) for one in whole["findings"]][-1] == ("D09", "D10", [2])
    for said in ("id", "link", "severity", "claim", "evidence", "steps", "echo_of", "where"):
        assert [one[said] for one in later["findings"]] == [one[said] for one in whole["findings"]]
    assert (later["counts"], set(later["checked"])) == (whole["counts"], set(whole["checked"]))


def test_what_a_later_step_let_look_is_skipped_no_more() -> None:
    known = Diagnosis((), ("D01",), (Skipped("D30", "needs routing"), Skipped("D31", "needs versions")))
    both = chain().updated(known, Diagnosis((), ("D30",), (Skipped("D01", "needs rewards"),)))
    assert (both.checked, both.skipped) == (("D01", "D30"), (Skipped("D31", "needs versions"),))


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


def test_a_log_that_shows_more_steps_than_were_looked_at_makes_no_share_of_them() -> None:
    of_samples = replace(finding("D09", "error"), steps=(0, 1, 2, 3), looked=4)
    of_a_log = replace(finding("D09", "error"), steps=tuple(range(8)))
    (whole,) = merged([of_samples, of_a_log])
    assert (whole.steps, whole.looked, whole.share) == (tuple(range(8)), 0, 1.0)

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replay_core.diagnose import engine
from replay_core.diagnose.finding import LINKS, Finding
from replay_core.diagnose.rule import RULES, Skip, rule
from replay_core.diagnose.stating import finding, look_at, shown
from replay_core.errors import RequestError
from tests.replay_core.diagnose.batches import healthy, of, save, seen, why_skipped


def one(id: str, severity: str = "error", link: str = "loss", steps: tuple[int, ...] = ()) -> Finding:
    return Finding(id, severity, f"{id} is wrong", (), "a cause", "rldbg ls RUN", link, "source", steps=steps)  # type: ignore[arg-type]


def test_causes_stand_before_echoes_and_worse_before_milder() -> None:
    found = engine.ranked([
        one("D24", "error", "ratio"), one("D20", "info", "tokens"), one("D09", "warning", "logprobs"),
        one("D08", "error", "rollout_logprobs"),
    ])  # fmt: skip
    assert [(each.id, each.echo_of) for each in found] == [
        ("D08", None), ("D20", None), ("D24", "D08"), ("D09", "D08"),
    ]  # fmt: skip


def test_of_one_severity_the_earlier_link_comes_first() -> None:
    found = engine.ranked([one("D28", link="reduction"), one("D04", link="advantages"), one("D18", link="masks")])
    assert [each.id for each in found if each.echo_of is None] == ["D04", "D18"]
    assert [each.id for each in found if each.echo_of] == ["D28"]


def test_an_explanation_shares_a_step_unless_it_lasts() -> None:
    assert (
        engine.ranked([one("D01", link="rewards", steps=(1,)), one("D23", link="gradient", steps=(2,))])[1].echo_of
        is None
    )
    lasting = engine.ranked([one("D10", link="rollout_logprobs", steps=(1,)), one("D09", link="logprobs", steps=(2,))])
    assert lasting[1].echo_of == "D10"


def test_a_milder_finding_explains_no_worse_one() -> None:
    found = engine.ranked([one("D09", "warning", "logprobs"), one("D24", "error", "ratio")])
    assert all(each.echo_of is None for each in found)


def test_two_that_explain_each_other_leave_a_cause() -> None:
    found = engine.ranked([one("D19", link="masks"), one("D07", link="masks")])
    assert [(each.id, each.echo_of) for each in found] == [("D07", None), ("D19", "D07")]


def test_an_info_explains_nothing() -> None:
    assert engine.ranked([one("D20", "info", "tokens"), one("D01", "info", "rewards")])[1].echo_of is None


def test_one_finding_per_rule_with_all_its_steps() -> None:
    kept = engine.merged([one("D09", "warning", steps=(1,)), one("D09", "warning", steps=(3,)), one("D09", steps=(2,))])
    assert [(each.severity, each.steps) for each in kept] == [("error", (2,))]
    kept = engine.merged([one("D09", steps=(3,)), one("D09", steps=(1,))])
    assert kept[0].steps == (1, 3)


def test_an_unknown_rule_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match="D99"):
        engine.chosen_rules(["D99"])


def test_ids_are_asked_for_in_either_case() -> None:
    assert {each.id for each in engine.chosen_rules(["d08"])} == {"D08"}


def test_every_rule_explains_itself_and_what_explains_is_a_rule() -> None:
    catalogue = engine.rules()
    ids = {each.id for each in catalogue}
    assert len(ids) >= 30
    for each in catalogue:
        assert each.explain
        assert each.source
        assert each.link in LINKS
    assert set(engine.EXPLAINS) <= ids
    assert ids >= engine.LASTING


def test_a_rule_without_a_reason_or_with_a_taken_id_is_refused() -> None:
    with pytest.raises(ValueError, match="unique"):

        @rule("D08", "again", link="masks", scope="batch", source="none")
        def again(_batch: object) -> Iterator[Finding]:
            """Explained."""
            yield from ()

    with pytest.raises(ValueError, match="explains itself"):

        @rule("D98", "silent", link="masks", scope="batch", source="none")
        def silent(_batch: object) -> Iterator[Finding]:
            yield from ()


def test_a_rule_that_cannot_judge_is_skipped_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_batch: object) -> Iterator[Finding]:
        raise Skip("the moon is full")
        yield

    monkeypatch.setitem(RULES, ("D08", "batch"), replace(RULES["D08", "batch"], check=cannot))
    found = seen(tmp_path, healthy(), "D08")
    assert found.checked == ()
    assert why_skipped(found, "D08") == "the moon is full"


def test_a_rule_that_breaks_says_so_and_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_batch: object) -> Iterator[Finding]:
        raise IndexError("a hole")
        yield

    monkeypatch.setitem(RULES, ("D08", "batch"), replace(RULES["D08", "batch"], check=breaks))
    found = seen(tmp_path, healthy(), "D08", "D09")
    assert found.checked == ("D09",)
    assert "IndexError: a hole" in why_skipped(found, "D08")


def test_what_a_rule_needs_is_named_where_it_is_missing(tmp_path: Path) -> None:
    batch = healthy()
    del batch["rollout_log_probs"]
    assert "rollout_logprobs" in why_skipped(seen(tmp_path, batch), "D08")


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    path = save(tmp_path, healthy())
    (tmp_path / "other.pt").write_bytes(path.read_bytes()[:5000])
    from tests.replay_core.diagnose.batches import look

    found = look(tmp_path)
    named = of(found, "D39")
    assert named is not None
    assert "other.pt" in " ".join([*found.notes, named.claim])
    assert not any("\n" in said or "\\n" in said for said in [*found.notes, named.claim])


def test_a_step_of_nothing_but_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Its step has no batch that could say so."""
    from tests.replay_core.diagnose.batches import look

    group = {"input_ids": torch.ones(2, 3), "loss_mask": torch.ones(2, 3), "rewards": torch.tensor([0.0, 1.0])}
    for step in range(3):
        torch.save([group], tmp_path / f"step_{step:06d}.pt")
    middle = tmp_path / "step_000001.pt"
    middle.write_bytes(middle.read_bytes()[:700])
    fresh = of(look(tmp_path), "D39")
    assert fresh is not None
    assert "more)" not in fresh.claim  # one file, though the run and the record both say it
    os.utime(middle, (1, 1))
    found = look(tmp_path)
    named = of(found, "D39")
    assert named is not None
    assert "step_000001.pt: the zip ends" in named.claim
    assert any(note.startswith("not read: step_000001.pt") for note in found.notes)


def test_the_next_step_quotes_what_a_shell_would_split() -> None:
    from replay_core.diagnose.finding import Where

    assert (
        look_at(Where(path="/a b/x.pt", tensor="t", step=3, sample=2))
        == "rldbg show '/a b/x.pt' t --step 3 --slice 2:3"
    )
    assert look_at(Where()) == "rldbg ls RUN"


def test_evidence_holds_plain_numbers() -> None:
    import numpy as np

    stated = finding("D08", "error", "x", evidence=[shown("r", np.float64(0.5))], cause="c", next_step="n")
    assert type(stated.evidence[0].value) is float
    assert stated.link == "rollout_logprobs"

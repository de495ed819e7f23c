from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from replay_core.diagnose import engine
from replay_core.diagnose.batch import WORDS
from replay_core.diagnose.finding import LINKS, Finding, finding, look_at, shown
from replay_core.diagnose.merging import merged
from replay_core.diagnose.rule import RULES, Skip, rule
from replay_core.errors import RequestError
from replay_core.records import Record, RecordKey
from replay_core.samples.batch import Batch
from replay_core.workbench import diagnose
from tests.replay_core.diagnose.batches import healthy, of, save, seen, why_skipped


@pytest.fixture(autouse=True)
def catalogue() -> None:
    """Rules are registered when they are first asked for."""
    engine.rules()


def one(id: str, severity: str = "error", link: str = "loss", steps: tuple[int, ...] = ()) -> Finding:
    return Finding(id, severity, f"{id} is wrong", (), "a cause", "rldbg ls RUN", link, "source", steps=steps)  # type: ignore[arg-type]


def ranked(found: list[Finding]) -> list[Finding]:
    return engine.chain().ranked(found)


def test_causes_stand_before_what_is_downstream_and_worse_before_milder() -> None:
    found = ranked([
        one("D24", "error", "ratio"), one("D20", "info", "tokens"), one("D09", "warning", "logprobs"),
        one("D08", "error", "rollout_logprobs"),
    ])  # fmt: skip
    assert [(each.id, each.downstream_of) for each in found] == [
        ("D08", None), ("D20", None), ("D24", "D08"), ("D09", "D08"),
    ]  # fmt: skip


def test_of_one_severity_the_earlier_link_comes_first() -> None:
    found = ranked([one("D28", link="reduction"), one("D04", link="advantages"), one("D18", link="masks")])
    assert [each.id for each in found if each.downstream_of is None] == ["D04", "D18"]
    assert [each.id for each in found if each.downstream_of] == ["D28"]


def test_an_explanation_shares_a_step_unless_it_lasts() -> None:
    assert (
        engine.chain()
        .ranked([one("D01", link="rewards", steps=(1,)), one("D23", link="gradient", steps=(2,))])[1]
        .downstream_of
        is None
    )
    lasting = ranked([one("D10", link="rollout_logprobs", steps=(1,)), one("D09", link="logprobs", steps=(2,))])
    assert lasting[1].downstream_of == "D10"


def test_a_milder_finding_explains_no_worse_one() -> None:
    found = ranked([one("D09", "warning", "logprobs"), one("D24", "error", "ratio")])
    assert all(each.downstream_of is None for each in found)


def test_two_that_explain_each_other_leave_a_cause() -> None:
    found = ranked([one("D19", link="masks"), one("D07", link="masks")])
    assert [(each.id, each.downstream_of) for each in found] == [("D07", None), ("D19", "D07")]


def test_an_info_explains_nothing() -> None:
    assert ranked([one("D20", "info", "tokens"), one("D01", "info", "rewards")])[1].downstream_of is None


def test_one_finding_per_rule_with_all_its_steps() -> None:
    kept = merged([one("D09", "warning", steps=(1,)), one("D09", "warning", steps=(3,)), one("D09", steps=(2,))])
    assert [(each.severity, each.steps) for each in kept] == [("error", (2,))]
    kept = merged([one("D09", steps=(3,)), one("D09", steps=(1,))])
    assert kept[0].steps == (1, 3)


def test_an_unknown_rule_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match="D00"):
        engine.chosen_rules(["D00"])


def test_ids_are_asked_for_in_either_case() -> None:
    assert {each.id for each in engine.chosen_rules(["d08"])} == {"D08"}


def test_every_rule_explains_itself() -> None:
    catalogue = engine.rules()
    assert len({each.id for each in catalogue}) >= 30
    for each in catalogue:
        assert each.explain
        assert each.source
        assert each.link in LINKS


def nothing(_subject: object) -> Iterator[Finding]:
    """Explained."""
    yield from ()


def silent(_subject: object) -> Iterator[Finding]:
    yield from ()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"id": "D08"}, "rule D08: ids are unique within a scope"),
        ({"link": "mask"}, "rule D00: there is no link 'mask'; links are .*masks"),
        ({"scope": "bacth"}, "rule D00: there is no scope 'bacth'; scopes are batch"),
        ({"needs": ("mask|rollout_logprob",)}, "called 'rollout_logprob'; needs may be .*rollout_logprobs"),
        ({"scope": "signals", "needs": ("grad_norms",)}, "called 'grad_norms'; needs may be .*grad_norm"),
        ({"scope": "signals", "needs": ("event:oomm",)}, "called 'event:oomm'; needs may be .*event:oom"),
        ({"scope": "case", "needs": ("mask",)}, "needs may be none at all"),
    ],
)  # fmt: skip
def test_a_rule_that_is_misspelt_is_refused_with_its_name_and_what_it_may_be(
    asked: dict[str, Any], expected: str
) -> None:
    wanted: dict[str, Any] = {"id": "D00", "link": "masks", "scope": "batch", "source": "none", **asked}
    before = dict(RULES)
    try:
        with pytest.raises(ValueError, match=expected):
            rule(title="again", **wanted)(nothing)
    finally:
        RULES.clear()
        RULES.update(before)


def test_a_rule_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="rule D00: a rule explains itself"):
        rule("D00", "silent", link="masks", scope="batch", source="none")(silent)


def test_a_rule_that_explains_what_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, ("D08", "batch"), replace(RULES["D08", "batch"], explains=("D09", "D00")))
    with pytest.raises(ValueError, match="rule D08: it explains D00, which is no rule"):
        engine.rules()


def test_a_word_of_a_batch_that_a_rule_may_need_is_one_that_a_batch_answers() -> None:
    needed = {
        name for each in engine.rules() if each.scope == "batch" for need in each.needs for name in need.split("|")
    }
    assert set(WORDS) <= needed


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

    stated = finding("error", "x", None, shown("r", np.float64(0.5)), cause="c", next_step="n")
    assert type(stated.evidence[0].value) is float


def test_a_finding_is_given_its_rules_id_link_and_source() -> None:
    def says(_subject: object) -> Iterator[Finding]:
        yield finding("error", "mine", cause="c")
        yield finding("error", "another's", id="D09", cause="c")
        yield finding("error", "elsewhere", link="gradient", cause="c")

    known = RULES["D08", "batch"]
    found = replace(known, check=says).findings(None)
    assert [(each.id, each.claim, each.link) for each in found] == [
        ("D08", "mine", "rollout_logprobs"), ("D08", "elsewhere", "gradient"),
    ]  # fmt: skip
    assert {each.source for each in found} == {known.source}
    assert found[0].next_step == "rldbg ls RUN"


def test_a_log_is_read_for_its_signals_and_its_numbers_not_for_every_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"[Micro 0] 1. Loss: pg_loss=1\niter {n}: loss 0.5, time 1ms\n" for n in range(40)))
    read: Counter[RecordKey] = Counter()
    tensors = Record.tensors

    def counted(self: Record) -> Any:
        read[self.key] += not self.is_read
        return tensors(self)

    monkeypatch.setattr(Record, "tensors", counted)
    diagnose(log)
    assert len(read) == 80
    # That of the optimizer's settings is read by who looks for its state, too.
    assert max(read.values()) <= 4
    assert sum(read.values()) <= 3 * len(read) + 1


def test_a_small_dump_is_read_once_for_all_rules_that_go_through_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, healthy())
    read: Counter[str] = Counter()
    init = Batch.__init__

    def counted(self: Batch, record: Record, *args: Any, **options: Any) -> None:
        read[str(record.path)] += 1
        init(self, record, *args, **options)

    monkeypatch.setattr(Batch, "__init__", counted)
    diagnose(tmp_path)
    assert set(read.values()) == {1}
    monkeypatch.setattr("replay_core.diagnose.case.KEPT_BYTES", 0)
    read.clear()
    diagnose(tmp_path)
    assert min(read.values()) > 5

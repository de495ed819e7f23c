"""A mistake that was proved stands before the symptoms of something."""

from __future__ import annotations

from msgspec.structs import replace

from replay_core.diagnose.finding import Finding
from replay_core.diagnose.merging import Chain

CHAIN = Chain({}, ())
CUT = Finding("D20", "error", "responses are cut", (), "", "", "tokens", "", steps=(0, 1, 2), looked=3)
SHIFTED = Finding("D08", "error", "shifted by one token", (), "", "", "rollout_logprobs", "", steps=(0, 1), looked=3)
DISAGREE = Finding("D09", "error", "engine and trainer disagree", (), "", "", "logprobs", "")


def _ids(*found: Finding) -> list[str]:
    return [one.id for one in CHAIN.ranked(found)]


def test_a_shift_that_is_proved_goes_before_responses_that_are_cut() -> None:
    assert _ids(CUT, SHIFTED) == ["D08", "D20"]


def test_a_symptom_leads_where_nothing_is_proved() -> None:
    assert _ids(CUT, DISAGREE) == ["D20", "D09"]


def test_what_one_odd_step_shows_is_no_proof() -> None:
    odd = replace(SHIFTED, steps=(1,), looked=3)
    assert _ids(CUT, odd) == ["D20", "D08"]


def test_a_warning_of_another_formula_is_no_proof() -> None:
    assert _ids(CUT, replace(SHIFTED, id="D28", severity="warning")) == ["D20", "D28"]

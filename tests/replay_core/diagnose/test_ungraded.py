"""Samples that nobody graded, scores that shift, and functions of something else than the answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay_core.diagnose.runs import GRPO, PROMPT, RESPONSE, Fields, recorded, told


def _paid(fields: Fields, scores: torch.Tensor) -> None:
    """These scores at the last tokens, and GRPO's advantages of them."""
    mask = fields["response_mask"]
    each = torch.zeros(mask.shape)
    each[torch.arange(len(scores)), mask.sum(1).clamp(min=1) - 1] = scores
    fields["token_level_scores"], fields["token_level_rewards"] = each, each.clone()
    groups = scores.view(6, 5)
    made = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    fields["advantages"] = made.view(-1, 1) * mask
    fields["returns"] = fields["advantages"].clone()


def _draw(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(200 + step)


def _ends(step: int, fields: Fields, *, word: str, earned: float | None = 0.0, kept: bool = True) -> None:
    """A sixth of the samples end as `word` says, and have that reward (None: what they earned)."""
    draw = _draw(step)
    scores, lost = 0.3 + 0.7 * torch.rand(30, generator=draw), torch.rand(30, generator=draw) < 0.17
    if earned is not None:
        scores[lost] = earned
    fields["exit_status"] = [word if each else "completed" for each in lost.tolist()]
    _paid(fields, scores)
    if not kept:
        fields["response_mask"][lost] = 0
        fields["advantages"] = fields["advantages"] * fields["response_mask"]
        fields["returns"] = fields["advantages"].clone()


@pytest.mark.parametrize(
    "word", ["sandbox_lost", "verifier timeout", "judge_error", "ConnectionError", "env_failed", "worker killed"]
)
def test_failures_of_the_environment_are_wrong_answers(tmp_path: Path, word: str) -> None:
    (found,) = told(recorded(tmp_path / "run", lambda step, fields: _ends(step, fields, word=word)), "D131")
    assert found.severity == "warning"
    assert f"samples that ended as {word!r}" in found.claim
    assert "trained on as wrong answers" in found.claim


@pytest.mark.parametrize(
    "how",
    [
        {"word": "timeout"},  # of the answer's own program, it may be
        {"word": "sandbox_timeout"},
        {"word": "container_killed"},
        {"word": "OOM"},
        {"word": "verifier_failed"},  # what it says of a wrong answer, it may be
        {"word": "wrong_answer"},
        {"word": "truncated"},
        {"word": "sandbox_lost", "earned": None},
        {"word": "sandbox_lost", "kept": False},
    ],
)
def test_ends_that_are_the_answers_or_are_masked_are_quiet(tmp_path: Path, how: dict[str, Any]) -> None:
    assert told(recorded(tmp_path / "run", lambda step, fields: _ends(step, fields, **how)), "D131") == []


def _graded(step: int, fields: Fields, *, empty: float | None, chance: float = 0.4) -> None:
    """Two prompts of six have no ground truth, and that score; None: what is drawn for them."""
    scores = (torch.rand(30, generator=_draw(step)) < chance).float()
    scores[10::5], scores[11::5] = 1.0, 0.0
    if empty is not None:
        scores[:10] = empty
    fields["ground_truth"] = ["" if row < 10 else str(row // 5 + step) for row in range(30)]
    _paid(fields, scores)


def test_answers_without_a_truth_are_all_right(tmp_path: Path) -> None:
    (found,) = told(recorded(tmp_path / "run", lambda step, fields: _graded(step, fields, empty=1.0)), "D133")
    assert found.severity == "warning"
    assert found.claim.startswith("all 50 answers to prompts without a ground truth have the full score, 1")


def _all_are_right(step: int, fields: Fields) -> None:
    _graded(step, fields, empty=1.0)
    _paid(fields, torch.ones(30))


@pytest.mark.parametrize(
    "change",
    [
        lambda step, fields: _graded(step, fields, empty=0.0),
        lambda step, fields: _graded(step, fields, empty=None),
        _all_are_right,
    ],
)
def test_other_scores_of_prompts_without_a_truth_are_quiet(
    tmp_path: Path, change: Callable[[int, Fields], None]
) -> None:
    assert told(recorded(tmp_path / "run", change), "D133") == []


def _answers(step: int, fields: Fields) -> torch.Tensor:
    """Texts of which some end in their truth; which do."""
    right = torch.rand(30, generator=_draw(step)) < 0.5
    right[::5], right[1::5] = True, False
    truths = [str(1000 + 37 * step + row // 5 * 7) for row in range(30)]
    fields["ground_truth"] = truths
    fields["response_text"] = [
        f"so the answer is {truths[row] if right[row] else 3 + row}" for row in range(30)
    ]  # fmt: skip
    return right


def _twice(step: int, fields: Fields, *, at: int) -> None:
    """The score of one row is 0 and stands twice: the handler of an exception appends, and the code behind it."""
    scores = _answers(step, fields).float()
    _paid(fields, torch.cat([scores[:at], torch.zeros(2), scores[at + 1 : -1]]))


@pytest.mark.parametrize("every", [1, 2])
def test_scores_shift_behind_a_failed_call(tmp_path: Path, every: int) -> None:
    def change(step: int, fields: Fields) -> None:
        if step % every == 0:
            _twice(step, fields, at=8 + step)
        else:
            _paid(fields, _answers(step, fields).float())

    (found,) = told(recorded(tmp_path / "run", change), "D123")
    assert found.severity == "error"
    assert "scores are those of the answer before" in found.claim


def test_a_score_that_is_not_appended_moves_the_others_up(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        scores = _answers(step, fields).float()
        _paid(fields, torch.cat([scores[:9], scores[10:], torch.zeros(1)]))

    (found,) = told(recorded(tmp_path / "run", change), "D123")
    assert "scores are those of the answer behind" in found.claim


def _some_are_missed(step: int, fields: Fields) -> None:
    """A parser that misses a tenth of the right answers, anywhere."""
    right = _answers(step, fields)
    _paid(fields, (right & (torch.rand(30, generator=_draw(90 + step)) < 0.9)).float())


def _noisy(step: int, fields: Fields) -> None:
    right = _answers(step, fields)
    _paid(fields, (right ^ (torch.rand(30, generator=_draw(90 + step)) < 0.05)).float())


@pytest.mark.parametrize("change", [_some_are_missed, _noisy, lambda s, f: _paid(f, _answers(s, f).float())])
def test_scores_on_their_own_rows_do_not_shift(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    found = told(recorded(tmp_path / "run", change), "D123")
    assert not [one for one in found if "scores are those of the answer" in one.claim]


def _functions(step: int, fields: Fields, second: torch.Tensor) -> None:
    fields["reward_right"] = torch.rand(30, generator=_draw(step))
    fields["reward_style"] = second


def test_a_function_of_one_number_for_a_step(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        _functions(step, fields, torch.full((30,), 0.1 + 0.17 * step))

    (found,) = told(recorded(tmp_path / "run", change), "D104")
    assert found.severity == "warning"
    assert found.claim.startswith("reward_style is one number for all samples of a step")


@pytest.mark.parametrize(
    "second",
    [
        lambda step: torch.ones(30),  # all answers have the form
        lambda step: torch.full((30,), 0.2),  # a constant on top
        lambda step: torch.rand(30, generator=_draw(step + 40)),
        lambda step: torch.full((30,), float(step > 2)),  # the form is learnt from one step to the next
    ],
)
def test_functions_that_are_alike_for_a_reason_are_quiet(tmp_path: Path, second: Callable[[int], torch.Tensor]) -> None:
    assert told(recorded(tmp_path / "run", lambda step, fields: _functions(step, fields, second(step))), "D104") == []


def _pads(fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty columns before the prompt and behind the response."""
    before = PROMPT - fields["attention_mask"][:, :PROMPT].sum(1).float()
    return before, RESPONSE - fields["response_mask"].sum(1).float()


def test_scores_that_are_read_in_the_padding(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        before, behind = _pads(fields)
        _paid(fields, 0.1 * (before + behind) + 0.01 * torch.rand(30, generator=_draw(step)))

    (found,) = told(recorded(tmp_path / "run", change, steps=6), "D95")
    assert found.severity == "warning"
    assert found.claim.startswith("rewards go with the padding of their rows")


def _of_lengths(step: int, fields: Fields) -> None:
    """Shorter answers are paid, and noise."""
    _, behind = _pads(fields)
    _paid(fields, 0.1 * behind + 0.05 * torch.rand(30, generator=_draw(step)))


def _of_nothing(step: int, fields: Fields) -> None:
    _paid(fields, torch.rand(30, generator=_draw(step)))


@pytest.mark.parametrize("change", [_of_lengths, _of_nothing])
def test_rewards_of_other_things_are_not_of_padding(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    assert told(recorded(tmp_path / "run", change), "D95") == []


def _filtered(step: int, fields: Fields, *, on_shaped: bool) -> None:
    """Rewards are what is right less a penalty on length; groups without a spread of one of the two are not here."""
    draw, mask = _draw(step), fields["response_mask"]
    right = (torch.rand(30, generator=draw) < 0.5).float()
    right[::5], right[1::5] = 1.0, 0.0
    if on_shaped:
        right[:10] = 0.0
    fields["acc"] = right
    _paid(fields, right - 0.05 * (mask.sum(1).float() - 3) - 0.001 * torch.rand(30, generator=draw))


METRIC = {**GRPO, "algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}


def test_a_filter_on_the_shaped_reward(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", lambda step, fields: _filtered(step, fields, on_shaped=True), flags=METRIC)
    (found,) = told(path, "D102")
    assert found.severity == "error"
    assert found.claim.startswith("groups that the filter's metric does not tell apart are trained on")


@pytest.mark.parametrize(
    ("on_shaped", "flags"),
    [
        (False, METRIC),
        (True, {**METRIC, "algorithm.filter_groups.metric": "seq_reward"}),
        (True, {**METRIC, "algorithm.filter_groups.enable": False}),
        (True, GRPO),
    ],
)
def test_filters_that_do_as_they_say_are_quiet(tmp_path: Path, on_shaped: bool, flags: dict[str, Any]) -> None:
    path = recorded(tmp_path / "run", lambda step, fields: _filtered(step, fields, on_shaped=on_shaped), flags=flags)
    assert told(path, "D102") == []


def test_a_filter_by_a_nested_setting(tmp_path: Path) -> None:
    flags = {**GRPO, "algorithm": {"filter_groups": {"enable": True, "metric": "acc"}}}
    path = recorded(tmp_path / "run", lambda step, fields: _filtered(step, fields, on_shaped=True), flags=flags)
    assert [one.severity for one in told(path, "D102")] == ["error"]

"""Settings that a run states, each applied and not; what returns, values, masks and old log-probabilities give away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, healthy, look, masks, of, save
from tests.replay_core.diagnose.test_healthy_variants import run

Fields = dict[str, Any]


def clipped(batch: Fields, step: int) -> None:
    batch["advantages"] = np.clip(batch["advantages"], -0.5, 0.5)


def as_it_is(batch: Fields, step: int) -> None:
    pass


def penalised(batch: Fields, step: int) -> None:
    moved = (batch["old_log_probs"] - batch["ref_log_prob"]) * masks(batch)
    batch["token_level_rewards"] = (batch["token_level_scores"] - 0.05 * moved).astype(np.float32)


def unpenalised(batch: Fields, step: int) -> None:
    batch["token_level_rewards"] = batch["token_level_scores"].copy()


def equal(batch: Fields, step: int) -> None:
    """The first group's rewards are all one."""
    last = masks(batch)[:4].cumsum(1).argmax(1)
    batch["token_level_scores"][:4] = 0
    batch["token_level_scores"][np.arange(4), last] = 1.0


def spread(batch: Fields, step: int) -> None:
    """No two rewards are one."""
    equal(batch, step)
    batch["token_level_scores"] = batch["token_level_scores"] + np.linspace(0, 0.1, 16)[:, None] * masks(batch)


def cut(batch: Fields, step: int) -> None:
    batch["truncated"] = np.arange(16) % 4 == 0


def left_out(batch: Fields, step: int) -> None:
    cut(batch, step)
    batch["response_mask"][::4] = 0


def whitened(batch: Fields, step: int, scale: float = 1.0) -> None:
    draw = np.random.default_rng(step).normal(0, scale, masks(batch).shape)
    batch["advantages"] = (draw * masks(batch)).astype(np.float32)


STATED: dict[str, tuple[Fields, Callable[[Fields, int], None], Callable[[Fields, int], None]]] = {
    "exceed the clip": ({"advantage_clip": 0.5}, as_it_is, clipped),
    "the KL penalty that is stated": ({"use_kl_in_reward": True, "kl_coef": 0.05}, unpenalised, penalised),
    "a filter is stated": ({"filter_groups": True}, equal, spread),
    "cut off are trained on": ({"overlong_filtering": True}, cut, left_out),
    "not whitened": ({"whiten_advantages": True}, lambda batch, step: whitened(batch, step, 0.1), whitened),
}


@pytest.mark.parametrize("words", STATED)
def test_a_setting_that_is_stated_is_held_against_what_was_done(words: str, tmp_path: Path) -> None:
    flags, wrong, right = STATED[words]
    ids = lambda step: np.repeat(np.arange(4), 4)  # noqa: E731

    def told(folder: str, change: Callable[[Fields, int], None], flags: Fields) -> Any:
        return of(run(tmp_path / folder, change, range(1, 4), "D102", flags=flags, group_id=ids), "D102")

    found = told("wrong", wrong, flags)
    assert found is not None
    assert (found.severity, words in found.claim, found.steps) == ("error", True, (1, 2, 3)), found.claim
    assert told("right", right, flags) is None
    assert told("unstated", wrong, {}) is None


def test_a_bonus_that_is_stated_has_to_be_in_the_loss(tmp_path: Path) -> None:
    def recorded(folder: str, added: float) -> Any:
        recorder = Recorder(tmp_path / folder, flags={"entropy_coeff": 0.01})
        for step in range(3):
            batch = {name: value for name, value in healthy().items() if name != "uid"}
            batch["entropy"] = np.full(masks(batch).shape, 1.5, dtype=np.float32)
            with recorder.step(step) as write:
                for micro in range(2):
                    rows = {name: value[8 * micro : 8 * micro + 8] for name, value in batch.items()}
                    write("forward_data", rows, micro=micro)
                    write("loss", {"pg_loss": 0.3 + micro, "loss": 0.3 + micro - added}, micro=micro)
        recorder.close()
        return of(look(tmp_path / folder, "D102"), "D102")

    found = recorded("without", 0.0)
    assert found is not None
    assert found.severity == "warning", "a loss may be logged before its terms are added"
    assert "entropy bonus" in found.claim
    assert recorded("with", 0.015) is None


def critics(batch: Fields, step: int, after: float = 0.0) -> None:
    """Values of every place, and GAE's returns of them, with such a value after the end; gamma 1, lambda .95."""
    draw = np.random.default_rng(step)
    mask = masks(batch)
    values = draw.normal(0.4, 0.3, mask.shape) * mask
    rewards = batch["token_level_scores"] * mask
    advantages = np.zeros(mask.shape)
    following, carried = np.full(len(mask), after), np.zeros(len(mask))
    for at in range(mask.shape[1] - 1, -1, -1):
        here = mask[:, at]
        delta = rewards[:, at] + following - values[:, at]
        carried = np.where(here, delta + 0.95 * carried, carried)
        following = np.where(here, values[:, at], following)
        advantages[:, at] = carried * here
    batch["values"] = values.astype(np.float32)
    batch["returns"] = ((advantages + values) * mask).astype(np.float32)


def test_returns_tell_what_comes_after_the_end_and_whether_they_are_the_values(tmp_path: Path) -> None:
    def told(folder: str, change: Callable[[Fields, int], None]) -> Any:
        return of(run(tmp_path / folder, change, range(2), "D44"), "D44")

    def learns_nothing(batch: Fields, step: int) -> None:
        critics(batch, step)
        batch["returns"] = batch["values"].copy()

    every = {"right": critics, "ones": lambda batch, step: critics(batch, step, 1.0), "same": learns_nothing}
    claims = {name: (one.severity, one.claim) for name, change in every.items() if (one := told(name, change))}
    assert claims["right"][0] == "info"
    assert claims["ones"] == ("error", "GAE bootstraps from a value of 1 after the end of every response")
    assert claims["same"][0] == "error"
    assert "old values themselves" in claims["same"][1]


@pytest.mark.parametrize(("scored", "bootstrapped", "told"), [(True, True, True), (False, True, False),
                                                              (True, False, False)])  # fmt: skip
def test_a_cut_response_has_a_reward_or_a_value_after_it(
    scored: bool, bootstrapped: bool, told: bool, tmp_path: Path
) -> None:
    def of_some(batch: Fields, step: int) -> None:
        cut(batch, step)
        last = masks(batch).cumsum(1).argmax(1)
        batch["token_level_scores"][:] = 0
        batch["token_level_scores"][np.arange(16), last] = np.linspace(0.5, 1, 16)
        batch["token_level_scores"][batch["truncated"] & (not scored)] = 0
        batch["token_level_rewards"] = batch["token_level_scores"].copy()
        critics(batch, step)
        values, mask = batch["values"] * masks(batch), masks(batch)
        # GAE is linear: a value after the end goes back by lambda at each token, and its own token's is that value.
        back = 0.95 ** np.maximum(last[:, None] - np.arange(mask.shape[1]), 0) * mask
        after = values[np.arange(16), last] * (batch["truncated"] & bootstrapped)
        batch["returns"] = (batch["returns"] + after[:, None] * back).astype(np.float32)

    found = of(run(tmp_path / "d", of_some, range(2), "D44"), "D44")
    assert found is not None
    assert (found.severity, "bootstrapped" in found.claim) == (("warning", True) if told else ("info", False))
    assert ("nothing is wrong" in found.cause) == (not bootstrapped)


@pytest.mark.parametrize("masked", [True, False])
def test_cut_responses_are_known_by_their_missing_end(masked: bool, tmp_path: Path) -> None:
    def unsaid(batch: Fields, step: int) -> None:
        width = batch["responses"].shape[1]
        batch["responses"][:, :] = np.random.default_rng(step).integers(100, 190, batch["responses"].shape)
        batch["response_mask"][:] = 1
        for row in range(16):
            end = width if row % 4 == 0 else 5 + row
            batch["responses"][row, end - 1 :] = [2, *[3] * (width - end)] if row % 4 else batch["responses"][row, -1]
            batch["response_mask"][row, end:] = 0
        batch["input_ids"] = np.concatenate([batch["prompts"], batch["responses"]], 1)
        batch["attention_mask"][:, -width:] = batch["response_mask"]
        batch["response_mask"][::4] *= 1 - masked

    found = of(run(tmp_path / "d", unsaid, range(2), "D102", flags={"mask_truncated_completions": True}), "D102")
    assert (found is None) == masked


@pytest.mark.parametrize(("moved", "told"), [(0.05, True), (0.0, False), (0.008, False)],
                         ids=["the policy has left", "on policy", "bf16"])  # fmt: skip
def test_old_log_probabilities_of_the_reference(moved: float, told: bool, tmp_path: Path) -> None:
    def of_reference(batch: Fields, step: int) -> None:
        draw = np.random.default_rng(step).normal(0, 1, masks(batch).shape)
        batch["old_log_probs"] = batch["ref_log_prob"].copy()
        batch["log_probs"] = (batch["ref_log_prob"] + moved * draw * masks(batch)).astype(np.float32)

    found = of(run(tmp_path / "d", of_reference, range(4, 6), "D60"), "D60")
    assert (found is not None and "are the reference's" in found.claim) == told


def test_before_the_first_update_the_reference_is_the_policy(tmp_path: Path) -> None:
    def initial(batch: Fields, step: int) -> None:
        batch["old_log_probs"] = batch["ref_log_prob"].copy()
        routed = np.random.default_rng(step).normal(0, 0.08, masks(batch).shape)
        batch["log_probs"] = (batch["ref_log_prob"] + routed * masks(batch)).astype(np.float32)

    assert of(run(tmp_path / "first", initial, range(1), "D60"), "D60") is None
    assert of(run(tmp_path / "later", initial, range(3, 4), "D60"), "D60") is not None


GROUPS = np.repeat(np.arange(4), 4)


def filtered(folder: Path, change: Callable[[Fields, int], None], steps: range = range(3)) -> Any:
    return of(run(folder, change, steps, "D102", flags={"filter_groups": True}, group_id=lambda step: GROUPS), "D102")


def alone(batch: Fields, step: int) -> None:
    """The first group's rewards are all one, and no other's."""
    equal(batch, step)
    batch["token_level_scores"][4:] += np.linspace(0, 0.1, 12)[:, None] * masks(batch)[4:]


def test_a_group_that_the_mask_leaves_out_is_filtered(tmp_path: Path) -> None:
    def masked(batch: Fields, step: int) -> None:
        alone(batch, step)
        batch["response_mask"][:4] = 0

    def without_advantages(batch: Fields, step: int) -> None:
        alone(batch, step)
        batch["advantages"][:4] = 0

    assert filtered(tmp_path / "masked", masked) is None
    found = filtered(tmp_path / "zero", without_advantages)
    assert found is not None
    assert found.severity == "warning"


@pytest.mark.parametrize(("every", "told"), [(10, False), (2, True)])
def test_steps_without_an_equal_group_tell_of_the_filter_too(every: int, told: bool, tmp_path: Path) -> None:
    def some(batch: Fields, step: int) -> None:
        (spread if step % every else alone)(batch, step)

    assert (filtered(tmp_path / "d", some, range(20)) is not None) == told


def test_a_loss_that_normalises_a_mini_batch_leaves_recorded_advantages_raw(tmp_path: Path) -> None:
    raw = lambda batch, step: whitened(batch, step, 0.1)  # noqa: E731
    assert of(run(tmp_path / "d", raw, range(3), "D102", flags={"norm_adv": True}), "D102") is None


@pytest.mark.parametrize("masked", [True, False], ids=["attended", "not attended"])
@pytest.mark.parametrize("end", [7, None], ids=["end of turn", "the end is not trained"])
def test_a_newline_after_the_end_of_a_turn_is_no_end(end: int | None, masked: bool, tmp_path: Path) -> None:
    def turns(batch: Fields, step: int) -> None:
        draw = np.random.default_rng(step)
        width = batch["prompts"].shape[1]
        ids, mask = draw.integers(100, 190, batch["responses"].shape), np.zeros_like(batch["response_mask"])
        shown = mask.copy()
        for row in range(16):
            last = 4 + row
            ids[row, last] = ids[row, last] if end is None else end
            ids[row, last + 1], ids[row, last + 2 :] = 198, 0
            mask[row, : last + 1] = 1
            shown[row, : last + 1 + masked] = 1
        batch["responses"], batch["response_mask"] = ids, mask
        batch["input_ids"] = np.concatenate([batch["prompts"], ids], 1)
        batch["attention_mask"] = np.concatenate([batch["attention_mask"][:, :width], shown], 1)

    found = of(run(tmp_path / "d", turns, range(2), "D19"), "D19")
    assert (found is not None) == (end is None), found


def test_a_turn_ends_before_a_newline_where_nothing_tells_the_padding(tmp_path: Path) -> None:
    def told(end: int | None, flags: Fields) -> Any:
        draw = np.random.default_rng(1)
        ids, mask = draw.integers(100, 190, (16, 44)), np.zeros((16, 44), dtype=np.int64)
        for row in range(16):
            last = 24 + row
            ids[row, last] = ids[row, last] if end is None else end
            ids[row, last + 1], ids[row, last + 2 :] = 198, 0
            mask[row, 20 : last + 1] = 1
        folder = tmp_path / f"{end} {flags.get('eos_token_id')}"
        recorder = Recorder(folder, flags=flags)
        with recorder.step(1) as write:
            write("trajectory", input_ids=ids, loss_mask=mask, old_log_probs=draw.normal(-1, 0.3, ids.shape))
        recorder.close()
        return of(look(folder, "D19"), "D19")

    assert told(7, {}) is None
    assert told(7, {"eos_token_id": 7}) is None
    assert told(7, {"eos_token_id": 198}) is not None
    assert told(None, {}) is not None


@pytest.mark.parametrize("padded", [True, False])
def test_whitening_that_counts_padding(padded: bool, tmp_path: Path) -> None:
    def whiten(batch: Fields, step: int) -> None:
        draw = np.random.default_rng(step)
        mask = masks(batch)
        rewards = draw.uniform(0, 1, 16)
        batch["token_level_scores"][:] = 0
        batch["token_level_scores"][np.arange(16), mask.cumsum(1).argmax(1)] = rewards
        each = rewards[:, None] * mask
        over = each if padded else each[mask]
        batch["advantages"] = ((each - over.mean()) / (over.std() + 1e-8) * mask).astype(np.float32)

    ids = lambda step: np.repeat(np.arange(4), 4)  # noqa: E731
    flags = {"adv_estimator": "reinforce_plus_plus"}
    found = of(run(tmp_path / "d", whiten, range(3), "D04", flags=flags, group_id=ids), "D04")
    assert found is not None
    assert (found.severity, "over padding" in found.claim) == (("error", True) if padded else ("info", False))


@pytest.mark.parametrize("shuffled", [True, False])
def test_equal_texts_tell_of_rewards_in_another_order(shuffled: bool, tmp_path: Path) -> None:
    for step in range(1, 4):
        draw = np.random.default_rng(step)
        rows: list[dict[str, Any]] = []
        for prompt in range(4):
            answers = [f"{prompt} {draw.integers(0, 2)}" for _ in range(8)]
            rows += [
                {"input": f"what is {prompt}?", "output": one, "score": float(one[-1]), "step": step} for one in answers
            ]
        if shuffled:
            scores = draw.permutation([row["score"] for row in rows])
            rows = [{**row, "score": float(score)} for row, score in zip(rows, scores, strict=True)]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [one.id for one in causes(look(tmp_path, "D56"))] == (["D56"] if shuffled else [])


@pytest.mark.parametrize("late", [True, False])
def test_a_value_is_read_before_its_token(late: bool, tmp_path: Path) -> None:
    def read(batch: Fields, step: int) -> None:
        critics(batch, step)
        ids = batch["input_ids"].astype(np.int64)
        width = masks(batch).shape[1]
        begin = ids.shape[1] - width
        # A critic is a function of what it has read.
        known = np.stack([[hash(tuple(row[: begin + at + late])) % 1000 / 1000 for at in range(width)] for row in ids])
        values, mask = known * masks(batch), masks(batch)
        carried, following, made = np.zeros(16), np.zeros(16), np.zeros(mask.shape)
        for at in range(width - 1, -1, -1):
            delta = (batch["token_level_scores"] * mask)[:, at] + following - values[:, at]
            carried = np.where(mask[:, at], delta + 0.95 * carried, carried)
            following = np.where(mask[:, at], values[:, at], following)
            made[:, at] = carried * mask[:, at]
        batch["values"], batch["returns"] = values.astype(np.float32), ((made + values) * mask).astype(np.float32)

    found = of(run(tmp_path / "d", read, range(4), "D101"), "D101")
    assert (found is not None and "one token late" in found.claim) == late


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "in the loss"])
def test_an_end_between_mask_and_padding_is_seen_where_nothing_tells_the_padding(masked: bool, tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    lengths = draw.integers(3, 9, 12)
    ids, mask = np.zeros((12, 10), dtype=np.int64), np.zeros((12, 10), dtype=np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = [*draw.integers(10, 30, length - 1), 2]
        mask[row, : length - masked] = 1
    fields = {
        "prompt_ids": draw.integers(10, 30, (12, 4)), "prompt_mask": np.ones((12, 4), dtype=np.int64),
        "completion_ids": ids, "completion_mask": mask, "advantages": draw.normal(0, 1, 12).astype(np.float32),
        "num_items_in_batch": np.array(mask.sum()),
    }  # fmt: skip
    found = of(look(save(tmp_path, fields, "generate_and_score_step000001_gen1.pt"), "D19"), "D19")
    assert (found is not None) == masked
    assert found is None or "(EOS, 2) is in 12 responses" in found.claim

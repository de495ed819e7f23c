"""What is declared beside what is recorded, and where engine, trainer and reference part: told by the numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Diagnosis, Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, grpo, look, of
from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path

Step = dict[str, Any]
ROWS, GROUP, PROMPT, RESPONSE, END = 24, 4, 6, 8, 2
WIDTH = PROMPT + RESPONSE


def step_of(number: int) -> Step:
    """One batch of left-padded prompts and answers: ids, masks, log-probabilities of engine, trainer and reference."""
    draw = np.random.default_rng(number)
    sizes = np.repeat(draw.integers(3, PROMPT + 1, ROWS // GROUP), GROUP)
    lengths = draw.integers(4, RESPONSE, ROWS)
    ids = draw.integers(10, 40, (ROWS, WIDTH))
    ids[:, :PROMPT] = np.repeat(draw.integers(40, 90, (ROWS // GROUP, PROMPT)), GROUP, axis=0)
    column = np.arange(WIDTH)
    attention = ((column >= (PROMPT - sizes)[:, None]) & (column < (PROMPT + lengths)[:, None])).astype(np.int64)
    response = (attention * (column >= PROMPT))[:, PROMPT:]
    ids[np.arange(ROWS), PROMPT + lengths - 1] = END
    ids = ids * attention
    logps = (-draw.uniform(0.05, 3, (ROWS, RESPONSE)) * response).astype(np.float32)
    rewards = draw.uniform(0, 1, ROWS).astype(np.float32)
    groups = np.repeat(np.arange(ROWS // GROUP), GROUP)
    spread = (grpo(rewards, groups)[:, None] * response).astype(np.float32)
    return {
        "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "input_ids": ids, "attention_mask": attention,
        "response_mask": response, "rollout_log_probs": logps, "old_log_probs": logps.copy(),
        "uid": [f"{number}-{group}" for group in groups], "rewards": rewards, "advantages": spread,
    }  # fmt: skip


def recorded(
    path: Path, change: Callable[[Step, int], None] = lambda *_: None, steps: int = 5, rate: float | None = None,
    **flags: Any,
) -> Diagnosis:  # fmt: skip
    with Recorder(path, flags=flags) as recorder:
        for number in range(steps):
            fields = step_of(number)
            change(fields, number)
            wide = [name for name, value in fields.items() if np.shape(value) == (ROWS, RESPONSE)]
            aligned = {name: "response" for name in wide if name != "responses"}
            with recorder.step(number) as write:
                write("batch_inputs", fields, alignment=aligned)
                if rate is not None:
                    write("training_metrics", {"actor/lr": rate, "actor/grad_norm": 1.0 + 0.1 * number})
    return diagnosed_path(path) if rate is not None else look(path)


def claim_of(diagnosis: Diagnosis, id: str) -> str:
    found = of(diagnosis, id)
    return "" if found is None else found.claim


# ---- declared numbers


def cut_at(size: int) -> Callable[[Step, int], None]:
    def change(fields: Step, _: int) -> None:
        """Half of the responses go on to this length, and do not end."""
        for row in range(0, ROWS, 2):
            fields["response_mask"][row] = np.arange(RESPONSE) < size
            fields["attention_mask"][row, PROMPT:] = np.arange(RESPONSE) < size
            fields["input_ids"][row, PROMPT:] = np.where(np.arange(RESPONSE) < size, 11 + row % 7, 0)
        fields["responses"] = fields["input_ids"][:, PROMPT:]
        fields["rollout_log_probs"] = (-0.5 * fields["response_mask"]).astype(np.float32)
        fields["old_log_probs"] = fields["rollout_log_probs"].copy()

    return change


@pytest.mark.parametrize(
    ("flags", "change", "rate", "words"),
    [
        ({"rollout_n": 6}, None, None, "groups hold 4 answers, and the run states 6"),
        ({"num_generations": 2}, None, None, "groups hold 4 answers, and the run states 2"),
        ({"rollout_n": 4}, None, None, ""),
        ({"max_response_length": 5}, None, None, "responses are longer than their limit: up to 7 tokens"),
        ({"max_response_length": 8}, None, None, ""),
        ({"max_response_length": 12}, cut_at(8), None, "cut off at 8 tokens, and the run states a limit of 12"),
        ({"max_response_length": 8}, cut_at(8), None, ""),
        ({"lr": 1e-6}, None, 1e-5, "the learning rate is 1e-05, 10 times what the run states (1e-06)"),
        ({"lr": 1e-6}, None, 5e-7, "the learning rate is 5e-07, 0.5 times what the run states (1e-06)"),
        ({"lr": 1e-6}, None, 1e-6, ""),
    ],
)  # fmt: skip
def test_declared_numbers_are_held_against_recorded_ones(
    flags: Any, change: Any, rate: float | None, words: str, tmp_path: Path
) -> None:
    found = of(recorded(tmp_path / "d", change or (lambda *_: None), rate=rate, **flags), "D124")
    assert (found is not None) == bool(words)
    if found is not None:
        assert words in found.claim
        assert found.severity == "warning"


def test_a_group_of_which_other_ranks_hold_a_part_is_none_that_is_too_small(tmp_path: Path) -> None:
    assert claim_of(recorded(tmp_path / "d", rollout_n=8, world_size=2), "D124") == ""


def test_so_is_one_of_a_run_that_was_started_on_several_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert claim_of(recorded(tmp_path / "d", rollout_n=8), "D124") == ""


def test_a_critics_rate_is_not_the_policys(tmp_path: Path) -> None:
    critics: dict[str, Any] = {"critic.optim.lr": 1e-5}
    assert claim_of(recorded(tmp_path / "a", rate=1e-6, **critics), "D124") == ""
    assert claim_of(recorded(tmp_path / "b", rate=1e-6, critic={"optim": {"lr": 1e-5}}), "D124") == ""
    assert claim_of(recorded(tmp_path / "c", rate=1e-5, lr=1e-6, **critics), "D124") != ""


@pytest.mark.parametrize(("printed", "is_told"), [("0.001", False), ("0.0010", True), ("0.003", True)])
def test_a_rate_is_no_nearer_than_it_is_printed(printed: str, is_told: bool, tmp_path: Path) -> None:
    lines = "".join(f"step:{n} - actor/lr:{printed} - critic/score/mean:0.3{n} - actor/grad_norm:1.01\n"
                    for n in range(1, 7))  # fmt: skip
    text = "actor_rollout_ref.actor.optim.lr=5e-4\n" + lines
    assert bool(claim_of(diagnosed(tmp_path, text), "D124")) == is_told


def test_all_steps_with_responses_beyond_the_limit_are_told(tmp_path: Path) -> None:
    found = of(recorded(tmp_path / "d", max_response_length=5), "D124")
    assert found is not None
    assert list(found.steps) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["n_epochs", "mu"])
def test_passes_over_the_data_are_not_those_over_a_batch(name: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d", flags={name: 1}) as recorder:
        for number in range(5):
            ids = {each: step_of(number)[each] for each in ("input_ids", "attention_mask")}
            with recorder.step(number) as write:
                for epoch in range(2):
                    write("forward_data", ids, micro=epoch, epoch=epoch, minibatch=0)
    assert claim_of(look(tmp_path / "d"), "D124") == ""


@pytest.mark.parametrize(("stated", "words"), [(2, ""), (1, "in 2 epochs, and the run states 1")])
def test_epochs_are_counted(stated: int, words: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d", flags={"ppo_epochs": stated}) as recorder:
        for number in range(5):
            fields = step_of(number)
            with recorder.step(number) as write:
                for epoch in range(2):
                    ids = {name: fields[name] for name in ("input_ids", "attention_mask")}
                    write("forward_data", ids, micro=epoch, epoch=epoch, minibatch=0)
    assert words in claim_of(look(tmp_path / "d"), "D124")
    assert bool(claim_of(look(tmp_path / "d"), "D124")) == bool(words)


def test_passes_that_hold_other_advantages_are_of_the_same_answers(tmp_path: Path) -> None:
    with Recorder(tmp_path / "d", flags={"group_size": GROUP, "epochs": 2}) as recorder:
        for number in range(5):
            fields = step_of(number)
            ids = {name: fields[name] for name in ("input_ids", "attention_mask", "response_mask")}
            with recorder.step(number) as write:
                write("trajectory", fields, alignment={"response_mask": "response", "advantages": "response"})
                for epoch in range(2):
                    order = np.random.default_rng(epoch).permutation(ROWS)
                    write("forward_data", {**ids, "advantages": fields["advantages"][order]}, micro=epoch, epoch=epoch,
                          minibatch=0, alignment={"response_mask": "response", "advantages": "response"})  # fmt: skip
    assert claim_of(look(tmp_path / "d"), "D124") == ""


# ---- groups that stand twice


def in_threes(fields: Step, number: int) -> None:
    fields["uid"] = [f"{number}-{row // 2}" for row in range(ROWS)]


def copied(fields: Step, number: int) -> None:
    for name, value in fields.items():
        if name != "uid":
            value[ROWS // 2 :] = value[: ROWS // 2]


@pytest.mark.parametrize(
    ("change", "flags", "severity", "words"),
    [
        (
            in_threes,
            {"group_size": 4},
            "error",
            "groups hold 2 answers, and the run states 4: the answers of each prompt",
        ),
        (in_threes, {}, "warning", "each prompt stands in 2 groups of the batch, in all 5 steps"),
        (copied, {"group_size": 4}, "warning", "with the same answers, in all 5 steps: the batch holds every sample 2"),
    ],
)
def test_groups_of_one_prompt_say_what_parts_them(
    change: Any, flags: Any, severity: str, words: str, tmp_path: Path
) -> None:
    found = of(recorded(tmp_path / "d", change, **flags), "D65")
    assert found is not None
    assert found.severity == severity
    assert words in found.claim
    assert "ranks" not in found.claim


def test_ranks_that_hold_a_part_of_each_group_have_made_no_error(tmp_path: Path) -> None:
    for rank in range(2):
        with Recorder(tmp_path / "d", flags={"rollout_n": GROUP}) as recorder:
            for number in range(5):
                fields = step_of(number)
                half = np.arange(ROWS) % GROUP // 2 == rank
                part = {name: np.array(value)[half] for name, value in fields.items() if name != "uid"}
                part["uid"] = [f"{rank}-{each}" for each in np.array(fields["uid"])[half]]
                aligned = {name: "response" for name in part if np.shape(part[name])[1:] == (RESPONSE,)}
                aligned.pop("responses")
                with recorder.step(number, rank=rank) as write:
                    write("batch_inputs", part, alignment=aligned)
    found = of(look(tmp_path / "d"), "D65")
    assert found is not None
    assert found.severity == "info"
    assert "each rank holds a part of every group" in found.cause


# ---- engine, trainer and reference


def reversed_(fields: Step, _: int) -> None:
    for row in range(ROWS):
        size = int(fields["response_mask"][row].sum())
        fields["rollout_log_probs"][row, :size] = fields["old_log_probs"][row, :size][::-1]


def shuffled(fields: Step, number: int) -> None:
    draw = np.random.default_rng(number)
    for row in range(ROWS):
        size = int(fields["response_mask"][row].sum())
        fields["rollout_log_probs"][row, :size] = draw.permutation(fields["old_log_probs"][row, :size])


@pytest.mark.parametrize(
    ("change", "words"),
    [(reversed_, "in reversed order along the response"), (shuffled, "in another order along the response")],
)
def test_the_same_numbers_in_another_order(change: Any, words: str, tmp_path: Path) -> None:
    found = causes(recorded(tmp_path / "d", change))[0]
    assert found.id == "D92"
    assert words in found.claim


def rolled(fields: Step, _: int) -> None:
    for row in range(ROWS):
        size = int(fields["response_mask"][row].sum())
        fields["rollout_log_probs"][row, :size] = np.roll(fields["old_log_probs"][row, :size], 1)


def test_a_shift_is_called_one_before_it_is_another_order(tmp_path: Path) -> None:
    found = causes(recorded(tmp_path / "d", rolled))[0]
    assert found.id == "D08"
    assert "shifted by" in found.claim


def noisy(fields: Step, number: int) -> None:
    draw = np.random.default_rng(number)
    noise = draw.normal(0, 0.6, fields["old_log_probs"].shape) * fields["response_mask"]
    fields["rollout_log_probs"] = np.minimum(fields["old_log_probs"] + noise, 0).astype(np.float32)


def test_other_numbers_are_in_no_other_order(tmp_path: Path) -> None:
    assert "order" not in claim_of(recorded(tmp_path / "d", noisy), "D92")


def since_a_token(fields: Step, number: int) -> None:
    """Some rows have a token 17 from which on both sides differ, and no other row has one."""
    draw = np.random.default_rng(70 + number)
    some = draw.permutation(ROWS)[: ROWS // 2]
    for row in range(ROWS):
        size, ids = int(fields["response_mask"][row].sum()), fields["input_ids"][row, PROMPT:]
        ids[ids == 17] = 18
        if row in some:
            at = 1 + row % 3
            ids[at] = 17
            fields["rollout_log_probs"][row, at:size] += draw.choice([-0.5, -0.2, 0.04], size - at)
    fields["responses"] = fields["input_ids"][:, PROMPT:]


@pytest.mark.parametrize(
    ("some", "words"),
    [(True, "some of these ids are not what was sampled"), (False, "or has other weights")],
)
def test_a_token_from_which_two_sides_part(some: bool, words: str, tmp_path: Path) -> None:
    def change(fields: Step, number: int) -> None:
        since_a_token(fields, number)
        if some:
            same = (fields["rollout_log_probs"] == fields["old_log_probs"]).all(1)
            fields["input_ids"][np.flatnonzero(same)[:4], PROMPT + 1] = 17

    found = of(recorded(tmp_path / "d", change), "D09")
    assert found is not None
    assert "samples agree up to a token 17, and part there" in found.claim
    assert words in found.claim


def test_a_reference_that_sees_the_padding(tmp_path: Path) -> None:
    def change(fields: Step, number: int) -> None:
        pads = (fields["attention_mask"][:, :PROMPT] == 0).sum(1)[:, None]
        fields["ref_log_prob"] = (fields["old_log_probs"] - 0.6 * pads * fields["response_mask"]).astype(np.float32)

    found = causes(recorded(tmp_path / "d", change))[0]
    assert found.id == "D15"
    assert "in samples with left padding alone: the reference sees the padding" in found.claim


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_difference_that_grows_with_padding_is_no_verdict(goes_on: bool, tmp_path: Path) -> None:
    """Prompts of other lengths are other prompts; and a run that goes on has left its reference."""

    def change(fields: Step, number: int) -> None:
        pads = (fields["attention_mask"][:, :PROMPT] == 0).sum(1)[:, None]
        apart = (0.05 + 0.1 * pads) * fields["response_mask"]
        fields["ref_log_prob"] = (fields["old_log_probs"] - apart).astype(np.float32)
        if goes_on:
            fields["weight_version"] = np.full(ROWS, 7 + number)

    found = of(recorded(tmp_path / "d", change), "D15")
    assert found is not None
    assert "padding" not in found.claim
    assert ("mean |d| by left pads" in [each.name for each in found.evidence]) != goes_on


def test_a_run_that_goes_on_is_not_told_of_padding(tmp_path: Path) -> None:
    def change(fields: Step, number: int) -> None:
        pads = (fields["attention_mask"][:, :PROMPT] == 0).sum(1)[:, None]
        fields["ref_log_prob"] = (fields["old_log_probs"] - 0.1 * pads * fields["response_mask"]).astype(np.float32)
        fields["weight_version"] = np.full(ROWS, 7 + number)

    found = of(recorded(tmp_path / "d", change), "D15")
    assert found is None or (found.severity == "info" and "padding" not in found.claim)


def test_a_reference_of_other_weights_is_not_said_to_see_padding(tmp_path: Path) -> None:
    def change(fields: Step, number: int) -> None:
        draw = np.random.default_rng(50 + number)
        apart = draw.normal(0, 1.5, (ROWS, RESPONSE)) * fields["response_mask"]
        fields["ref_log_prob"] = np.minimum(fields["old_log_probs"] + apart, 0).astype(np.float32)

    found: Finding | None = of(recorded(tmp_path / "d", change), "D15")
    assert found is not None
    assert "padding" not in found.claim


def test_a_ratio_that_overflows_comes_before_what_the_next_micro_batch_holds(tmp_path: Path) -> None:
    with Recorder(tmp_path / "d") as recorder:
        for number in range(2):
            fields = step_of(number)
            shared = {name: fields[name] for name in ("input_ids", "attention_mask", "response_mask", "advantages")}
            with recorder.step(number) as write:
                write("batch_inputs", fields)
                for micro in range(3):
                    rows = slice(8 * micro, 8 * micro + 8)
                    policy = fields["old_log_probs"][rows] - 0.3 * fields["response_mask"][rows]
                    ratio = np.exp(policy - fields["old_log_probs"][rows])
                    if micro == 1:
                        ratio = ratio * np.inf
                    if micro == 2:
                        policy, ratio = policy * np.nan, ratio * np.nan
                    write("forward_data", {**{name: value[rows] for name, value in shared.items()},
                                           "old_log_probs": fields["old_log_probs"][rows], "log_probs": policy,
                                           "ratio": ratio.astype(np.float32)}, micro=micro)  # fmt: skip
                    write("loss", {"pg_loss": [0.1, np.inf, np.nan][micro]}, micro=micro)
    found = of(look(tmp_path / "d"), "D21")
    assert found is not None
    assert found.claim.startswith("is_ratio is the first tensor that is not finite")
    assert "although policy and old log-probabilities are" in found.claim


# ---- losses and weights


@pytest.mark.parametrize(
    ("weight", "stated", "severity", "words"),
    [(0.05, 0.05, "error", "the entropy term has the wrong sign"), (-0.05, 0.05, "", ""),
     (-0.5, 0.05, "error", "weighs 0.5 in the loss, and the run states a coefficient of 0.05")],
)  # fmt: skip
def test_the_entropy_of_steps_with_one_micro_batch(
    weight: float, stated: float, severity: str, words: str, tmp_path: Path
) -> None:
    assert (found := _of_losses(tmp_path, lambda pg, entropy: pg + weight * entropy, "D49", True, stated)) or not words
    assert found is None or (found.severity == severity and words in found.claim)


@pytest.mark.parametrize(("has_entropy", "left_out"), [(True, True), (False, True), (False, False)])
def test_a_bonus_that_is_left_out_needs_no_recorded_entropy(has_entropy: bool, left_out: bool, tmp_path: Path) -> None:
    def made(pg: float, entropy: float) -> float:
        return pg if left_out else pg - 0.05 * entropy

    found = _of_losses(tmp_path, made, "D102", has_entropy, 0.05)
    assert (found is not None) == left_out


def _of_losses(path: Path, made: Any, id: str, has_entropy: bool, stated: float) -> Finding | None:
    with Recorder(path / "d", flags={"entropy_coeff": stated}) as recorder:
        for number in range(4):
            fields = step_of(number)
            mask = fields["response_mask"]
            entropy = np.random.default_rng(number).uniform(0.5, 1.5, mask.shape).astype(np.float32)
            mean = float((entropy * mask).sum() / mask.sum())
            pg = float(-(fields["advantages"] * mask).sum() / mask.sum())
            with recorder.step(number) as write:
                write("batch_inputs", fields)
                more = {"entropys": entropy} if has_entropy else {}
                named = {name: fields[name] for name in ("input_ids", "attention_mask", "response_mask", "advantages",
                                                         "old_log_probs")}  # fmt: skip
                write("forward_data", {**named, "log_probs": fields["old_log_probs"], **more}, micro=0)
                write("loss", {"pg_loss": pg, "loss": made(pg, mean)}, micro=0)
    return of(look(path / "d"), id)


@pytest.mark.parametrize(
    ("stated", "by", "words"),
    [("token", "sequence", "one for each response (the product over its tokens), and the run states one for each"),
     ("sequence", "token", "each token's own, and the run states one for each response"),
     ("token", "token", ""), ("sequence", "sequence", "")],
)  # fmt: skip
def test_weights_of_the_level_that_is_stated(stated: str, by: str, words: str, tmp_path: Path) -> None:
    def change(fields: Step, number: int) -> None:
        draw = np.random.default_rng(number)
        apart = draw.normal(0, 0.15, (ROWS, RESPONSE)) * fields["response_mask"]
        fields["old_log_probs"] = (fields["rollout_log_probs"] + apart).astype(np.float32)
        logs = apart if by == "token" else apart.sum(1, keepdims=True) * fields["response_mask"]
        fields["rollout_is_weights"] = np.minimum(np.exp(logs), 2.0).astype(np.float32)

    found = of(recorded(tmp_path / "d", change, rollout_is=stated, rollout_is_threshold=2.0), "D59")
    assert (found is not None) == bool(words)
    assert found is None or words in found.claim


def _last(step: int, micro: int) -> float:
    return 2.0 if micro == 2 else 1.0


def _late(step: int, micro: int) -> float:
    return 0.5 if step >= 3 else 1.0


def _by_chance(step: int, micro: int) -> float:
    return 2.0 if (3 * step + micro) % 4 == 0 else 1.0


@pytest.mark.parametrize(
    ("times", "words"),
    [(_last, "those of micro-batch 2: it is 2 times that there"), (_late, "those from step 3 on: it is 0.5 times that"),
     (_by_chance, ""), (lambda *_: 1.0, "")],
)  # fmt: skip
def test_losses_of_some_micro_batches_are_others(times: Any, words: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d", flags={"loss_agg_mode": "token-mean"}) as recorder:
        for number in range(5):
            fields = step_of(number)
            # Advantages that are not centred in a micro-batch.
            fields["advantages"] = (fields["advantages"] + 0.3 * fields["response_mask"]).astype(np.float32)
            with recorder.step(number) as write:
                write("batch_inputs", fields)
                for micro in range(3):
                    rows = slice(8 * micro, 8 * micro + 8)
                    named = {name: fields[name][rows] for name in ("input_ids", "attention_mask", "response_mask",
                                                                   "advantages", "old_log_probs")}  # fmt: skip
                    write("forward_data", {**named, "log_probs": named["old_log_probs"]}, micro=micro)
                    mask = named["response_mask"]
                    loss = float(-(named["advantages"] * mask).sum() / mask.sum()) * times(number, micro)
                    write("loss", {"pg_loss": loss, "loss": loss}, micro=micro)
    found = [one for one in look(tmp_path / "d").findings if one.id == "D28" and one.severity == "error"]
    assert bool(found) == bool(words)
    assert not found or words in found[0].claim


def _token_mean(values: Any, mask: Any) -> float:
    return float((values * mask).sum() / mask.sum())


def _sequence_mean(values: Any, mask: Any) -> float:
    return float(((values * mask).sum(1) / mask.sum(1)).mean())


@pytest.mark.parametrize(
    "reduce", [_token_mean, _sequence_mean, lambda values, mask: float((values * mask).sum() / (len(mask) * RESPONSE))],
    ids=["token-mean", "seq-mean-token-mean", "a constant"],
)  # fmt: skip
def test_a_loss_is_no_other_one_where_responses_begin_to_end(reduce: Any, tmp_path: Path) -> None:
    """While all responses reach the limit several reductions are one; only the one that is meant fits later."""
    with Recorder(tmp_path / "d") as recorder:
        for number in range(8):
            fields = step_of(number)
            draw = np.random.default_rng(number + 100)
            lengths = np.full(ROWS, RESPONSE) if number < 4 else draw.integers(3, RESPONSE, ROWS)
            mask = (np.arange(RESPONSE) < lengths[:, None]).astype(np.int64)
            fields["response_mask"], fields["attention_mask"][:, PROMPT:] = mask, mask
            fields["advantages"] = ((draw.normal(size=ROWS) + 0.3)[:, None] * mask).astype(np.float32)
            with recorder.step(number) as write:
                for micro in range(2):
                    rows = slice(4 * micro, 4 * micro + 4)
                    named = {name: fields[name][rows] for name in ("input_ids", "attention_mask", "response_mask",
                                                                   "advantages", "old_log_probs")}  # fmt: skip
                    write("forward_data", {**named, "log_probs": named["old_log_probs"]}, micro=micro)
                    loss = -reduce(named["advantages"], named["response_mask"])
                    write("loss", {"pg_loss": loss, "loss": loss}, micro=micro)
    assert not [one for one in look(tmp_path / "d", "D28").findings if one.severity == "error"]


@pytest.mark.parametrize(("times", "words"), [(400.0, "e to 400 times the difference"), (1.0, "")])
def test_a_log_ratio_that_is_scaled_is_solved_for(times: float, words: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d") as recorder:
        for number in range(3):
            fields = step_of(number)
            moved = np.random.default_rng(number).normal(0, 0.02, (ROWS, RESPONSE)) * fields["response_mask"]
            names = ("input_ids", "attention_mask", "response_mask", "advantages", "old_log_probs")
            with recorder.step(number) as write:
                write("forward_data", {**{name: fields[name] for name in names},
                                       "log_probs": (fields["old_log_probs"] + moved).astype(np.float32),
                                       "ratio": np.exp(times * moved).astype(np.float32)}, micro=0)  # fmt: skip
    assert words in claim_of(look(tmp_path / "d"), "D61")
    assert bool(claim_of(look(tmp_path / "d"), "D61")) == bool(words)

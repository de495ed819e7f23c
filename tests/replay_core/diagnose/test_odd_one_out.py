"""Of several numbers that should agree one is odd: a divisor, a ratio, a sign, old log-probabilities, a position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.logs import diagnosed_path

Fields = dict[str, torch.Tensor]
Change = Callable[[int, Fields], None]

#: Prompts of three tokens, responses of these lengths in rows of 3 + 8, two micro-batches of four rows.
PROMPT, WIDTH, END = 3, 11, 9
LENGTHS = (2, 7, 4, 6, 3, 8, 5, 2)
GRPO = {"algorithm": "grpo", "clip_low": 0.2, "clip_high": 0.2, "micro_batches": 2, "loss_agg": "token-mean"}


def batch(step: int) -> Fields:
    """Two groups of four samples: what a step holds before any mistake, with ratios of 1."""
    draw = torch.Generator().manual_seed(step)
    ids_BS = torch.randint(10, 40, (8, WIDTH), generator=draw)
    ids_BS[:4, :PROMPT], ids_BS[4:, :PROMPT] = ids_BS[0, :PROMPT].clone(), ids_BS[4, :PROMPT].clone()
    response_BS = torch.zeros(8, WIDTH, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        ids_BS[row, PROMPT + length :] = 0
        ids_BS[row, PROMPT + length - 1] = END
        response_BS[row, PROMPT : PROMPT + length] = 1
    rewards_B = torch.rand(8, generator=draw).round(decimals=3)
    grouped = rewards_B.view(2, 4)
    normalised = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)
    logprobs_BT = -torch.rand(8, WIDTH - 1, generator=draw) * 3
    attended_BS = response_BS.clone()
    attended_BS[:, :PROMPT] = 1
    return {
        "input_ids": ids_BS, "attention_mask": attended_BS, "response_mask": response_BS, "rewards": rewards_B,
        "group_ids": torch.arange(8) // 4, "advantages": normalised.reshape(8, 1) * response_BS[:, 1:],
        "log_probs": logprobs_BT, "old_log_probs": logprobs_BT.clone(),
    }  # fmt: skip


def record(
    directory: Path, change: Change = lambda _step, _fields: None, *, flags: dict[str, Any] | None = None,
    loss: Callable[[Fields, Fields], torch.Tensor] | None = None, steps: int = 3, minibatch: bool = False,
    metrics: dict[str, float] | None = None,
) -> Path:  # fmt: skip
    """A native dump of such steps; `loss` makes a micro-batch's policy loss of its rows and of the whole update's."""
    recorder = Recorder(directory, flags=GRPO if flags is None else flags)
    for step in range(steps):
        fields = batch(step)
        change(step, fields)
        with recorder.step(step) as write:
            for micro in range(2):
                rows = {name: value[4 * micro : 4 * micro + 4] for name, value in fields.items()}
                mini = micro if minibatch else None
                write("forward_data", rows, micro=micro, epoch=0, minibatch=mini)
                if loss is not None:
                    write("loss", pg_loss=loss(rows, fields), micro=micro, epoch=0, minibatch=mini)
            if metrics is not None:
                write("training_metrics", metrics)
    return directory


def _of_tokens(rows: Fields) -> torch.Tensor:
    return -(rows["advantages"] * rows["response_mask"][:, 1:])


def _tokens(rows: Fields) -> torch.Tensor:
    return rows["response_mask"].sum()


def _over_update(rows: Fields, whole: Fields) -> torch.Tensor:
    return _of_tokens(rows).sum() / _tokens(whole)


def _over_slots(rows: Fields, _whole: Fields) -> torch.Tensor:
    return _of_tokens(rows).mean() / 2


def _over_longest(rows: Fields, _whole: Fields) -> torch.Tensor:
    return _of_tokens(rows).sum() / (8 * max(LENGTHS))


def _over_micros(rows: Fields, _whole: Fields) -> torch.Tensor:
    return _of_tokens(rows).sum() / _tokens(rows) / 2


# ---- what a loss is divided by


def test_a_mean_over_padded_rows_is_no_token_mean_that_is_stated(tmp_path: Path) -> None:
    (found,) = causes(look(record(tmp_path, loss=_over_slots), "D28"))
    assert found.severity == "error"
    assert "padding included (the rows of the whole update)" in found.claim


def test_the_same_divisor_is_dr_grpos_where_that_is_stated(tmp_path: Path) -> None:
    assert not causes(look(record(tmp_path, flags={**GRPO, "algorithm": "dr_grpo"}, loss=_over_slots), "D28"))


@pytest.mark.parametrize(("flags", "doubtful"), [({}, True), ({"algorithm": "dr_grpo"}, False)])
def test_a_constant_that_nobody_states_may_count_padding(flags: dict[str, Any], doubtful: bool, tmp_path: Path) -> None:
    found = of(look(record(tmp_path, flags=flags, loss=_over_longest), "D28"), "D28")
    assert found is not None
    assert found.severity == "info"
    assert ("counts padding" in found.cause) is doubtful


@pytest.mark.parametrize(
    ("normalizer", "loss", "said"),
    [
        ("tokens of the mini-batch", _over_micros, True),
        ("global_batch_tokens", _over_micros, True),
        ("tokens of the micro-batch", _over_micros, False),
        ("", _over_micros, False),
        ("tokens of the mini-batch", _over_update, False),
    ],
)
def test_means_of_micro_batches_contradict_a_normalizer_of_the_mini_batch(
    normalizer: str, loss: Callable[[Fields, Fields], torch.Tensor], said: bool, tmp_path: Path
) -> None:
    flags = GRPO | ({"loss_normalizer": normalizer} if normalizer else {})
    found = causes(look(record(tmp_path, flags=flags, loss=loss), "D28"))
    assert [one.severity for one in found] == ["error"] * said
    if said:
        assert "a token of a small one weighs more" in found[0].cause


# ---- a ratio


def _moved(recorded: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Updates move the policy of the second mini-batch; `recorded` makes what is kept of its ratio."""

    def change(step: int, fields: Fields) -> None:
        draw = torch.Generator().manual_seed(99 + step)
        fields["log_probs"] = fields["log_probs"].clone()
        fields["log_probs"][4:] += 0.3 * torch.randn(4, WIDTH - 1, generator=draw)
        fields["prob_ratio"] = recorded((fields["log_probs"] - fields["old_log_probs"]).exp())

    return change


@pytest.mark.parametrize(
    ("recorded", "said"),
    [(torch.ones_like, True), (lambda ratio: ratio, False), (lambda ratio: ratio.clamp(0.8, 1.2), False)],
    ids=["always 1", "as it is", "clipped"],
)
def test_a_ratio_of_1_beside_a_policy_that_has_moved_is_made_of_itself(
    recorded: Callable[[torch.Tensor], torch.Tensor], said: bool, tmp_path: Path
) -> None:
    found = causes(look(record(tmp_path, _moved(recorded), minibatch=True), "D61"))
    assert [one.severity for one in found] == ["error"] * said
    assert not said or "the ratio is always 1" in found[0].claim


def test_a_ratio_of_1_before_any_update_is_right_however_the_forwards_differ(tmp_path: Path) -> None:
    def change(_step: int, fields: Fields) -> None:
        fields["old_log_probs"] = fields["log_probs"] + 0.01
        fields["prob_ratio"] = torch.ones_like(fields["log_probs"])

    assert not causes(look(record(tmp_path, change), "D61"))


@pytest.mark.parametrize(
    ("low", "high", "kind", "said"),
    [
        (20, 20, "grpo", True), (20, 28, "dapo", True), (0.2, 28, "dapo", True), (0.2, 0.28, "dapo", False),
        (0.2, 5, "cispo", False), (1e6, 1e6, "grpo", False), (20, 20, "reinforce", False),
    ],
)  # fmt: skip
def test_a_clip_range_in_percent_clips_nothing(low: float, high: float, kind: str, said: bool, tmp_path: Path) -> None:
    flags = {**GRPO, "algorithm": kind, "clip_low": low, "clip_high": high}
    found = causes(look(record(tmp_path, _moved(lambda ratio: ratio), flags=flags, minibatch=True), "L21"))
    assert [one.severity for one in found] == ["error"] * said


# ---- signs of single rows


@pytest.mark.parametrize("rows", [(0,), (3, 6)])
def test_rows_whose_advantage_has_the_other_sign_are_named(rows: tuple[int, ...], tmp_path: Path) -> None:
    def change(_step: int, fields: Fields) -> None:
        fields["advantages"][list(rows)] *= -1

    (found,) = causes(look(record(tmp_path, change), "D04"))
    assert found.severity == "error"
    assert f"single rows have the wrong sign: {len(rows)} of 8" in found.claim


# ---- old log-probabilities, the reference


def _with_engine(old: Callable[[torch.Tensor], torch.Tensor], engine: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(step: int, fields: Fields) -> None:
        fields["rollout_log_probs"] = engine(fields["log_probs"]) if step else fields["log_probs"].clone()
        fields["old_log_probs"] = old(fields["log_probs"]) if step else fields["log_probs"].clone()

    return change


def _other_weights(values: torch.Tensor) -> torch.Tensor:
    return values + 0.3 * torch.randn(values.shape, generator=torch.Generator().manual_seed(5))


def test_old_log_probabilities_that_alone_are_off_are_not_blamed_on_the_engine(tmp_path: Path) -> None:
    found = look(record(tmp_path, _with_engine(_other_weights, torch.clone), steps=6), "D09", "D12", "D14")
    assert [one.id for one in causes(found)] == ["D14"]
    assert "the old log-probabilities with neither" in causes(found)[0].claim


def test_an_engine_that_alone_is_off_is_the_engines(tmp_path: Path) -> None:
    found = look(record(tmp_path, _with_engine(torch.clone, _other_weights), steps=6), "D09", "D12", "D14")
    assert {one.id for one in found.findings} == {"D09"}


@pytest.mark.parametrize(
    ("again", "flags", "severity"),
    [
        ((4,), {}, "warning"),
        ((3, 6), {}, "info"),
        ((4,), {"sync_ref_model": True}, "info"),
        ((4,), {"ref_update_every": 4}, "info"),
        ((4,), {"ref_update_every": 0}, "warning"),
        ((), {}, None),
    ],
    ids=["once", "on a schedule", "as is stated", "every 4 steps, as is stated", "never, as is stated", "never"],
)
def test_a_reference_that_is_the_policy_again_in_mid_run(
    again: tuple[int, ...], flags: dict[str, Any], severity: str | None, tmp_path: Path
) -> None:
    def change(step: int, fields: Fields) -> None:
        since = step - max((0, *(at for at in again if at <= step)))
        draw = torch.Generator().manual_seed(step)
        fields["ref_log_probs"] = fields["log_probs"] + 0.1 * since * torch.randn(8, WIDTH - 1, generator=draw)

    found = of(look(record(tmp_path, change, flags=GRPO | flags, steps=9), "D46"), "D46")
    assert (None if found is None else found.severity) == severity
    assert found is None or found.steps == again


@pytest.mark.parametrize(
    ("coefficient", "reference", "severity"),
    [(0.0, False, None), (None, False, None), (0.05, False, "warning"), (None, True, "warning")],
    ids=["a coefficient of 0", "no reference", "a coefficient", "a reference"],
)
def test_a_kl_that_is_logged_as_0_says_nothing_where_there_is_none(
    coefficient: float | None, reference: bool, severity: str | None, tmp_path: Path
) -> None:
    def change(step: int, fields: Fields) -> None:
        if reference:
            fields["ref_log_probs"] = fields["log_probs"] + 0.01 * (step + 1)

    flags = GRPO if coefficient is None else GRPO | {"kl_coef": coefficient}
    metrics = {"kl": 0.0, "grad_norm": 1.0, "learning_rate": 1e-5}
    found = of(diagnosed_path(record(tmp_path, change, flags=flags, steps=12, metrics=metrics)), "D46")
    assert (None if found is None else found.severity) == severity


@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("again", ["numbers", "samples", "nothing"])
def test_log_probabilities_of_the_step_before(name: str, again: str, tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        fields["rollout_log_probs"] = fields["log_probs"] + 1e-4 * torch.randn(
            8, WIDTH - 1, generator=torch.Generator().manual_seed(step)
        )
        if again == "numbers" and step >= 2:
            fields[name] = batch(1)["log_probs"]
        if again == "samples" and step >= 2:
            fields |= batch(1) | {name: batch(1)["log_probs"]}

    found = of(look(record(tmp_path, change, steps=5)), "D92")
    if again == "numbers":
        assert found is not None
        word, since = name.partition("_")[0], 2 if name == "old_log_probs" else 3
        assert found.claim.startswith(f"{word} log-probabilities are those of the step before, from step {since} on")
    else:
        assert found is None


@pytest.mark.parametrize("how", ["shuffled", "as made", "both shuffled", "scaled", "of the mini-batch"])
def test_advantages_of_other_samples_in_the_loss(how: str, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, flags=GRPO)
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    for step in range(2):
        made = batch(step)
        used = {name: value[order] if how in ("shuffled", "both shuffled") else value for name, value in made.items()}
        if how == "shuffled":
            used["advantages"] = made["advantages"].max(1, keepdim=True)[0] + made["advantages"].min(1, keepdim=True)[0]
            used["advantages"] = used["advantages"] * used["response_mask"][:, 1:]
        elif how == "scaled":
            used["advantages"] = 2 * used["advantages"]
        elif how == "of the mini-batch":
            halves = used["advantages"].view(2, 4, WIDTH - 1)
            used["advantages"] = (halves / halves.abs().amax((1, 2), keepdim=True)).view(8, WIDTH - 1)
        with recorder.step(step) as write:
            write("trajectory", made)
            for micro in range(2):
                write("forward_data", {name: value[4 * micro : 4 * micro + 4] for name, value in used.items()
                                       if name != "rewards"}, micro=micro)  # fmt: skip
    found = of(look(tmp_path, "D78"), "D78")
    assert (found is not None) == (how == "shuffled")
    assert found is None or "advantages in the loss are other samples'" in found.claim


# ---- packs


@pytest.mark.parametrize("begin_again", [False, True])
def test_positions_of_a_pack_begin_again_where_its_bounds_say(begin_again: bool, tmp_path: Path) -> None:
    lengths = [PROMPT + length for length in LENGTHS[:4]]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    total = int(bounds[-1])
    ids = torch.randint(10, 40, (1, total), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths]) if begin_again else torch.arange(total)
    recorder = Recorder(tmp_path)
    with recorder.step(0) as write:
        # Samples as rows of their own, and the pack that the forward makes of them.
        write("trajectory", trajectory=ids)
        write("forward_data", input_ids=ids, position_ids=positions[None], cu_seqlens=bounds, micro=0)
    found = causes(look(tmp_path, "D17"))
    assert [one.severity for one in found] == ([] if begin_again else ["error"])
    assert begin_again or "every sample of a pack" in found[0].claim


# ---- which of three log-probabilities is rolled


def _near_uniform(step: int, fields: Fields) -> None:
    """A policy that has learnt little: most tokens are about as likely as the one beside them, and tell little."""
    draw = torch.Generator().manual_seed(2 + step)
    for name in ("log_probs", "old_log_probs", "rollout_log_probs"):
        fields[name] = torch.zeros(8, WIDTH - 1)
    fields["log_probs"] += -3.4 + 0.1 * torch.randn(8, WIDTH - 1, generator=draw)
    fields["old_log_probs"] += fields["log_probs"]
    fields["rollout_log_probs"] += fields["log_probs"] + 1e-6 * torch.randn(8, WIDTH - 1, generator=draw)


@pytest.mark.parametrize("rolled", ["old_log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("by", [1, -1])
def test_the_one_that_two_others_disagree_with_is_rolled(rolled: str, by: int, tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        _near_uniform(step, fields)
        fields[rolled] = fields[rolled].roll(by, 1)

    found = of(look(record(tmp_path, change, steps=3, minibatch=True), "D08"), "D08")
    assert found is not None
    word = rolled.split("_")[0]
    assert found.claim.startswith(f"{word} log-probabilities are shifted by {by:+d} token against"), found.claim
    assert rolled in found.next_step


# ---- a loss of 0 that the samples explain


def _known_by_one(_step: int, fields: Fields) -> None:
    """Rows of one length: the mean over their tokens of centred advantages is 0, to the last bit."""
    fields["input_ids"][:, PROMPT + 4 :] = 0
    fields["response_mask"][:] = 0
    fields["response_mask"][:, PROMPT : PROMPT + 4] = 1
    fields["attention_mask"][:] = fields["response_mask"]
    fields["attention_mask"][:, :PROMPT] = 1
    signs_B = torch.tensor([1.0, -1.0, 1.0, -1.0]).repeat(2)
    fields["rewards"] = (signs_B + 1) / 2
    fields["advantages"] = signs_B.view(8, 1) * fields["response_mask"][:, 1:]


def test_a_loss_of_zero_that_samples_explain_is_no_question(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in range(3):
        fields = batch(step)
        _known_by_one(step, fields)
        with recorder.step(step) as write:
            for micro in range(2):
                write("forward_data", {name: x[4 * micro : 4 * micro + 4] for name, x in fields.items()}, micro=micro)
                write("loss", loss=torch.tensor(0.0), micro=micro)
    said = {one.id for one in diagnosed_path(tmp_path).findings}
    assert ("D02" in said, "L01" in said) == (True, False)


def test_a_limit_that_all_responses_are_padded_to_is_a_constant_whatever_their_prompts_are(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    folder = tmp_path / "run"
    folder.mkdir()
    for micro in range(6):
        mask_BT = torch.zeros(4, 12, dtype=torch.int64)
        for row, length in enumerate(draw.integers(3, 12, 4)):
            mask_BT[row, : int(length)] = 1
        prompt_BP = torch.ones(4, 3 + micro, dtype=torch.int64)  # of another width each time
        a_B = torch.from_numpy(draw.normal(size=4))
        logprobs_BT = -torch.rand(4, 12, generator=torch.Generator().manual_seed(micro))
        inputs = {"prompt_ids": prompt_BP * 5, "prompt_mask": prompt_BP, "completion_ids": mask_BT * 7,
                  "completion_mask": mask_BT, "advantages": a_B, "num_items_in_batch": torch.tensor(60),
                  "old_per_token_logps": logprobs_BT, "per_token_logps": logprobs_BT}  # fmt: skip
        loss = -(a_B[:, None] * mask_BT).sum() / (8 * 12)
        content = {"global_step": micro // 2, "micro": micro, "inputs": inputs, "loss": loss}
        torch.save(content, folder / f"compute_loss_step{micro // 2:06d}_micro{micro}.pt")
    assert not causes(look(folder, "D28"))

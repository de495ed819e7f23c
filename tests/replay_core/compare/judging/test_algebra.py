"""What ranks hold of a tensor, told from its values: whole, cut, a part of a sum; and what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core.compare.judging import token_rows
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import alike, as_ref
from tests.replay_core.compare.ranks.recorded import compared, gradients, random

WHOLE = random(12, 8)
OTHER = random(12, 8, seed=1)
THIRD = random(12, 8, seed=2)
ROWS, COLUMNS = WHOLE.chunk(2), WHOLE.chunk(2, 1)
THREE = WHOLE.chunk(3)

#: The same tokens on every rank.
GIVEN = {"batch_inputs": {"input_ids": torch.arange(64).reshape(4, 16) + 2}}

HEALTHY: dict[str, Sequence[torch.Tensor]] = {
    "alike on every rank": [WHOLE, WHOLE, WHOLE],
    "alike but for rounding": [WHOLE, WHOLE * (1 + 1e-7)],
    "cut by rows": ROWS,
    "cut by columns": COLUMNS,
    "cut unevenly": [WHOLE[:5], WHOLE[5:]],
    "cut in two, each slice on two ranks": [*ROWS, *ROWS],
}
FAULTY: dict[str, tuple[Sequence[torch.Tensor], str, list[int], str]] = {
    "not summed": (
        [OTHER, WHOLE - OTHER], "not summed", [0, 1],
        "norm.weight's gradient is not summed over ranks 0 and 1: each holds a part, and the parts add up to the whole",
    ),
    "not summed, by three": ([OTHER, THIRD, WHOLE - OTHER - THIRD], "not summed", [0, 1, 2], "over ranks 0, 1 and 2"),
    "not averaged": ([OTHER, 2 * WHOLE - OTHER], "not averaged", [0, 1], "their mean is the whole"),
    "summed in two groups": (
        [OTHER, OTHER, WHOLE - OTHER, WHOLE - OTHER], "summed in groups", [0, 1, 2, 3], "(0 and 1; 2 and 3)",
    ),
    "summed twice": ([WHOLE * 3] * 3, "too much", [0, 1, 2], "is 3 x the whole on ranks 0, 1 and 2: summed over"),
    "a mean for a sum": ([WHOLE / 2] * 2, "too little", [0, 1], "is 0.5 x the whole on ranks 0 and 1: a mean over"),
    "zeros": ([WHOLE * 0] * 2, "zeros", [0, 1], "is 0 on ranks 0 and 1"),
    "one rank's part kept to itself": (
        [WHOLE - OTHER, OTHER, WHOLE - OTHER], "missing", [1], "rank 1 holds it itself",
    ),
    "twice over two of four ranks": ([WHOLE * 2] * 4, "too much", [0, 1, 2, 3], "summed over 2 of the 4 ranks"),
    "one rank apart": ([WHOLE, OTHER, WHOLE], "apart", [1], "rank 1 parts, ranks 0 and 2 hold what the other run has"),
    "slices in another order": (THREE[::-1], "order", [0, 2], "rank 0 holds rank 2's, rank 2 holds rank 0's"),
    "a slice twice": ([ROWS[0], ROWS[0]], "held twice", [0, 1], "what is rank 1's is on no rank"),
    "a slice of zeros": ([ROWS[0], ROWS[1] * 0], "zeros", [1], "is 0 in the slice of rank 1"),
    "a slice apart": ([THREE[0], THIRD[:4], THREE[2]], "apart", [1], "those of ranks 0 and 2 are"),
    "NaN on one rank": ([WHOLE, WHOLE * float("nan")], "apart", [1], "rank 1 holds NaN or infinities"),
    "slices summed over their ranks": ([ROWS[0] + ROWS[1]] * 2, "wrong group", [0, 1], "the sum of all slices"),
    "slices times the ranks": ([part * 2 for part in ROWS], "too much", [0, 1], "is 2 x the whole"),
    "equal copies of slices, halved": (
        [part / 2 for part in (*ROWS, *ROWS)], "too little", [0, 1, 2, 3],
        "is 0.5 x the other run's on ranks 0, 1, 2 and 3, and the same on those that hold one slice",
    ),
    "a slice one late": ([WHOLE[:6], torch.cat([WHOLE[7:], OTHER[:1]])], "boundary", [1], "rank 1's begins 1 too late"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEALTHY)
def test_what_ranks_hold_of_a_right_gradient_is_no_fault(case: str, tmp_path: Path) -> None:
    found = gradients(tmp_path, WHOLE, HEALTHY[case])
    assert found.agrees, found.first
    (row,) = found.tensors
    assert there(row.ranks).fault is None
    assert there(row.figures).compared >= WHOLE.numel() or row.verdict.value == "SAME"


@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_between_ranks_is_named_with_its_ranks(case: str, tmp_path: Path) -> None:
    parts, kind, ranks, sentence = FAULTY[case]
    found = gradients(tmp_path, WHOLE, parts)
    row = there(found.first)
    assert row.verdict.value == ("NAN" if "NaN" in case else "DIFF")
    fault = there(there(row.ranks).fault)
    assert (fault.kind, list(fault.ranks)) == (kind, ranks)
    assert sentence in fault.sentence
    assert row.reason.startswith(fault.sentence)


@pytest.mark.parametrize("parts", [[OTHER, THIRD], [WHOLE + OTHER / 8, WHOLE + OTHER / 8], [OTHER[:6], THIRD[:6]]])
def test_what_no_arithmetic_explains_is_a_divergence_without_a_name(parts: list[torch.Tensor], tmp_path: Path) -> None:
    row = there(gradients(tmp_path, WHOLE, parts).first)
    assert there(row.ranks).fault is None
    assert there(row.ranks).parted == (0, 1)


def test_parts_of_a_sum_are_legal_where_a_modules_output_is_summed_later(tmp_path: Path) -> None:
    """A row-parallel projection's own output, before the sum."""
    name, base = "layers.0.mlp.down_proj.output", {"input_ids": torch.arange(12)[None] + 3}
    whole, part = random(1, 12, 8), random(1, 12, 8, seed=1)
    one = {"batch_inputs": base, "modules": {name: whole}}
    ranks = [{"batch_inputs": base, "modules": {name: held}} for held in (part, whole - part)]
    found = compared(tmp_path, one, *ranks)
    assert found.agrees, found.first
    (row,) = (row for row in found.tensors if row.name == name)
    assert there(row.ranks).relation == "parts"
    assert row.reason.startswith("the sum of what ranks 0 and 1 of b hold")


@pytest.mark.parametrize(("off", "agrees"), [(0.0, True), (0.02, False)])
def test_a_sum_of_losses_is_judged_as_a_loss_is(off: float, agrees: bool, tmp_path: Path) -> None:
    found = compared(tmp_path, *({**GIVEN, "loss": {"loss": loss}} for loss in (3.0, 1.0, 2.0 + off * 3)))
    assert found.agrees is agrees


@pytest.mark.parametrize(("off", "kinds"), [(0.0, {"not averaged"}), (0.01, set())])
def test_a_number_whose_gradient_every_rank_has_its_own_of_is_told(off: float, kinds: set[str], tmp_path: Path) -> None:
    """A scale of the logits: of few digits a mean is no chance only where it is met to all of them."""
    found = gradients(tmp_path, torch.tensor(2.0), [torch.tensor(1.25), torch.tensor(2.75 + off)], "logit_scale")
    assert {one.fault.kind for one in there(parallel(found.tensors, found.together)).faults} == kinds


def test_a_number_of_one_rank_is_looked_at_where_the_first_ranks_is_the_same(tmp_path: Path) -> None:
    found = compared(tmp_path, *({**GIVEN, "loss": {"loss": loss}} for loss in (3.0, 3.0, 4.0)))
    assert there(there(found.first).ranks).parted == (1,)


@pytest.mark.parametrize("stage", ["batch_inputs", "nothing"])
@pytest.mark.parametrize("called", ["input_ids", "x"])
def test_ranks_with_samples_that_the_one_process_never_had_are_not_held_against_it(
    stage: str, called: str, tmp_path: Path
) -> None:
    ids = (torch.arange(64) + 2).reshape(2, 2, 16)
    own = [
        {"modules": {"layers.0.output": random(2, 16, 8, seed=rank)}, "loss": {"loss": 1.0 + rank}} for rank in (0, 1)
    ]
    if stage == "batch_inputs":
        own = [{stage: {called: ids[rank].clone()}, **one} for rank, one in enumerate(own)]
    found = compared(tmp_path, own[0], *own)
    assert found.first is None
    assert {row.verdict.value for row in found.tensors} == {"SAME", "MISSING"}


def test_what_is_shown_beside_an_element_is_of_the_rank_that_holds_it(tmp_path: Path) -> None:
    values = random(4, 16, 8)
    wrong = values.clone()
    wrong[2, 3, 4] += 5
    found = compared(tmp_path, *({**GIVEN, "modules": {"layers.0.output": one}} for one in (values, values, wrong)))
    first, beside = there(found.first), there(found.around_first)
    assert there(first.ranks).parted == (1,)
    assert there(first.raw_b) == (2, 3, 4)
    assert first.value_b in beside.b
    assert first.value_a in beside.a


def test_positions_that_begin_at_0_on_every_rank(tmp_path: Path) -> None:
    ids, places = torch.arange(64).reshape(4, 16) + 2, torch.arange(16).repeat(4, 1)
    at = [torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]), torch.arange(4, 12)]
    one = {"batch_inputs": {"input_ids": ids, "position_ids": places}}
    ranks = [{"batch_inputs": {"input_ids": ids[:, own], "position_ids": torch.arange(8).repeat(4, 1)}} for own in at]
    fault = there(there(there(compared(tmp_path, one, *ranks).first).ranks).fault)
    assert (fault.kind, fault.ranks) == ("own positions", (0, 1))


def masked(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values * (random(*values.shape, seed=seed) > 0)


def test_dropout_by_other_random_numbers_where_all_should_draw_the_same(tmp_path: Path) -> None:
    values = random(4, 16, 8)
    name, drop, other = "layers.0.output", masked(5), masked(6)
    made = (drop(values), drop(values), other(values))
    found = compared(tmp_path, *({**GIVEN, "modules": {name: one}} for one in made))
    fault = there(there(there(found.first).ranks).fault)
    assert (fault.kind, fault.ranks) == ("masks differ", (0, 1))


def test_dropout_by_the_same_random_numbers_where_each_should_draw_its_own(tmp_path: Path) -> None:
    ids = torch.arange(64).reshape(4, 16) + 2
    values = random(4, 16, 8)
    name, drop = "layers.0.output", masked(5)
    halves = [drop(half) for half in values.chunk(2)]
    one = {"batch_inputs": {"input_ids": ids}, "modules": {name: torch.cat([halves[0], masked(6)(values[2:])])}}
    ranks = [
        {"batch_inputs": {"input_ids": part}, "modules": {name: half}}
        for part, half in zip(ids.chunk(2), halves, strict=True)
    ]
    fault = there(there(there(compared(tmp_path, one, *ranks).first).ranks).fault)
    assert (fault.kind, fault.ranks) == ("masks alike", (0, 1))


@pytest.mark.parametrize("off", [1e-3, 1.0])
def test_copies_of_samples_that_are_off_a_little_are_no_sum_over_a_wrong_group(off: float, tmp_path: Path) -> None:
    """Two groups of two ranks, whose slices add up to nearly the other run's whatever they are off."""
    whole = random(12, 8)
    halves = [part + off * random(6, 8, seed=seed) for seed, part in enumerate(whole.chunk(2), 5)]
    found = gradients(tmp_path, whole, [halves[0], halves[0], halves[1], halves[1]])
    fault = there(there(found.first).ranks).fault
    assert fault is None or fault.kind != "wrong group"


@pytest.mark.parametrize(("off", "kinds"), [(0.03, {"not summed"}), (0.2, {None})])
def test_parts_in_two_bytes_add_up_to_the_whole_but_for_their_rounding(
    off: float, kinds: set[str | None], tmp_path: Path
) -> None:
    whole, part, noise = random(32), random(32, seed=1), random(32, seed=2)
    rest = whole - part + off * noise * whole.norm() / noise.norm()
    for dtype, expected in ((torch.bfloat16, kinds), (torch.float32, {None})):
        found = gradients(tmp_path / str(dtype), *(whole.to(dtype), [part.to(dtype), rest.to(dtype)]))
        row = there(found.first)
        assert {fault and fault.kind for fault in [there(row.ranks).fault]} == expected


#: Four ranks, of which two each share a slice of a gradient: what each holds -> how the sentence says what it is.
GROUPS: dict[str, tuple[list[torch.Tensor], str | None]] = {
    "summed over those that share the tensor": ([ROWS[0] + ROWS[1]] * 4, "adds up to the sum of all slices"),
    "and divided by them": (
        [(ROWS[0] + ROWS[1]) / 2] * 4, "adds up to the sum of all slices divided by the 2 of them",
    ),
    "summed over all": ([2 * (ROWS[0] + ROWS[1])] * 4, "adds up to 2 times the sum of all slices"),
    "in groups of their own": (
        [OTHER[:6], OTHER[:6], ROWS[0] + ROWS[1] - OTHER[:6], ROWS[0] + ROWS[1] - OTHER[:6]],
        "have another slice each (0 and 1; 2 and 3)",
    ),
    "something that is alike": ([OTHER[:6]] * 4, None),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_slices_that_are_summed_over_the_wrong_ranks_say_over_which(case: str, tmp_path: Path) -> None:
    parts, said = GROUPS[case]
    fault = there(there(gradients(tmp_path, WHOLE, parts).first).ranks).fault
    if said is None:
        assert fault is None
        return
    assert (there(fault).kind, there(fault).ranks) == ("wrong group", (0, 1, 2, 3))
    assert said in there(fault).sentence


@pytest.mark.parametrize("is_summed", [True, False])
def test_an_activation_that_is_summed_over_ranks_of_other_tokens_is_of_a_wrong_group(
    is_summed: bool, tmp_path: Path
) -> None:
    ids, whole, name = torch.arange(32).reshape(2, 16) + 2, random(2, 16, 8), "layers.0.mlp.down_proj.output"
    first, second = whole.chunk(2, 1)
    held = [first + second] * 2 if is_summed else [first, second + random(2, 8, 8, seed=1)]

    def step(own: torch.Tensor, output: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        return {"batch_inputs": {"input_ids": own.contiguous()}, "modules": {name: output.contiguous()}}

    found = compared(tmp_path, step(ids, whole), *map(step, ids.chunk(2, 1), held))
    fault = there(there(there(found.first).ranks).fault)
    assert (fault.kind, fault.ranks) == (("wrong group", (0, 1)) if is_summed else ("apart", (1,)))
    assert ("have other samples or tokens each (0 and 1)" in fault.sentence) is is_summed


def test_a_gradient_of_zeros_that_one_rank_alone_has_is_told(tmp_path: Path) -> None:
    one = {**GIVEN, "gradient": {"grad.experts.0.w": WHOLE, "grad.experts.1.w": OTHER}}
    ranks = [{**GIVEN, "gradient": {"grad.experts.0.w": WHOLE}}, {**GIVEN, "gradient": {"grad.experts.1.w": OTHER * 0}}]
    (fault,) = there(parallel((found := compared(tmp_path, one, *ranks)).tensors, found.together)).faults
    assert (fault.fault.kind, fault.fault.ranks) == ("zeros", (1,))


SHARES: dict[str, tuple[torch.Tensor, set[tuple[str, tuple[int, ...]]]]] = {
    "a share of rows times a factor": (torch.cat([ROWS[0], 0.7 * ROWS[1]]), {("apart", (1,))}),
    "a share of columns times a factor": (torch.cat([COLUMNS[0], 0.7 * COLUMNS[1]], 1), {("share apart", (1,))}),
    "a share of columns": (torch.cat([OTHER[:, :4], WHOLE[:, 4:]], 1), {("share apart", (0,))}),
    "some rows": (torch.cat([WHOLE[:10], OTHER[10:]]), set()),
    "all of it": (OTHER, set()),
}


@pytest.mark.parametrize("case", SHARES)
def test_a_share_of_a_gathered_weight_that_is_another_is_named(case: str, tmp_path: Path) -> None:
    held, expected = SHARES[case]
    one, rank = ({**GIVEN, "param": {"param.q.weight": values}} for values in (WHOLE, held))
    found = compared(tmp_path, one, rank, rank)
    assert {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults} == (
        expected
    )


@pytest.mark.parametrize("turned", [False, True])
def test_tokens_that_were_gathered_in_another_turn_are_told(turned: bool, tmp_path: Path) -> None:
    values = random(4, 16, 2, 8)
    wrong = torch.cat([values[:, 8:], values[:, :8]], 1) if turned else random(4, 16, 2, 8, seed=1)
    one, rank = ({**GIVEN, "modules": {"layers.0.core.inputs.2": of}} for of in (values, wrong))
    found = compared(tmp_path, one, rank, rank)
    kinds = {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults}
    assert kinds == ({("token order", (0, 1))} if turned else set())


def test_a_weight_that_is_off_by_its_step_is_not_right_beside_one_that_is_off_further(tmp_path: Path) -> None:
    """Rank 0's is off by a hundredth of what rank 1's is, and by far more than rounding."""
    parts = [ROWS[0] + 5e-3 * OTHER[:6], ROWS[1] + 0.5 * OTHER[6:]]
    one = {"param": {"param.up.weight": WHOLE}}
    found = compared(tmp_path, one, *({"param": {"param.up.weight": part.contiguous()}} for part in parts))
    ranks = there(there(found.first).ranks)
    assert ranks.parted == (0, 1)
    assert ranks.fault is None or "the other run's" not in ranks.fault.sentence


@pytest.mark.parametrize("lost", [2, None])
def test_a_micro_batch_of_one_word_of_its_own_is_missed(lost: int | None) -> None:
    """Words 0 to 9 are in all micro-batches but the last, which has word 11 besides some of them."""
    words = [range(10), range(2, 10), [2, 3, 11]]
    given = [token_rows.Given(0, micro, np.array(list(own))) for micro, own in enumerate(words)]
    made = [torch.zeros(16, 4).index_put((torch.tensor(list(own)),), random(len(own), 4, seed=at)) for at, own in
            enumerate(words)]  # fmt: skip
    whole, here = (
        sum(made, torch.zeros(16, 4)),
        sum((one for at, one in enumerate(made) if at != lost), torch.zeros(16, 4)),
    )
    fault = token_rows.of_rows("embed.weight's gradient", as_ref(whole), alike(here), given)
    assert (fault and fault.kind) == (None if lost is None else token_rows.LOST_MICRO_BATCH)
    assert fault is None or "micro-batch 2's contribution" in fault.sentence

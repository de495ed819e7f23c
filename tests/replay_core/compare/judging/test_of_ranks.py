"""Every rank's copy is looked at: of a tensor, times a factor too, of a text, of what an engine calls otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replay_core.compare import Comparison, TensorVerdict, compare_runs
from replay_core.compare.judging.of_ranks import OfRanks
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.align import MicroBatchPair, Side, TensorPair
from replay_core.compare.pairing.ranks import Together
from replay_core.compare.parallel import parallel
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from replay_core.records import Inline, Record, RecordKey, TensorRef
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random, write

IDS = torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
HIDDEN, OUT, QUERIES = (random(4, 16, 8, seed=seed) for seed in range(3))
KEYS, VALUES = (random(4, 16, 4, seed=seed) for seed in (4, 5))
ATTENTION = "layers.0.self_attn"


def off_in(found: Comparison) -> dict[str, tuple[int, ...]]:
    """The rows that diverge, and the ranks that do in each."""
    return {row.name: there(row.ranks).parted for row in found.tensors if row.verdict.diverges}


TRAINER: Step = {
    "batch_inputs": {"input_ids": IDS},
    "modules": {
        "layers.0.input_layernorm.output": HIDDEN, f"{ATTENTION}.q_proj.output": QUERIES,
        f"{ATTENTION}.k_proj.output": KEYS, f"{ATTENTION}.v_proj.output": VALUES, f"{ATTENTION}.o_proj.output": OUT,
    },
}  # fmt: skip


def engine(rank: int, out: float = 0.0, keys: float = 0.0) -> Step:
    """What a rank of two of an engine records: its heads of the fused projection, and sums that are whole."""

    def own(values: Tensor) -> Tensor:
        return values.chunk(2, -1)[rank]

    fused = torch.cat([own(QUERIES), own(KEYS) + keys, own(VALUES)], -1).contiguous()
    return {
        "batch_inputs": {"input_ids": IDS},
        "modules": {
            "layers.0.input_layernorm.output.0": HIDDEN, f"{ATTENTION}.qkv_proj.output.0": fused,
            f"{ATTENTION}.attn.output": own(QUERIES).contiguous(), f"{ATTENTION}.o_proj.output.0": OUT + out,
        },
    }  # fmt: skip


ENGINES = {
    "right": ([engine(0), engine(1)], {}),
    "the sum of the last": ([engine(0), engine(1, out=5.0)], {f"{ATTENTION}.o_proj.output": (1,)}),
    "the sum of the first": ([engine(0, out=5.0), engine(1)], {f"{ATTENTION}.o_proj.output": (0,)}),
    "heads of the last": ([engine(0), engine(1, keys=3.0)], {f"{ATTENTION}.k_proj.output": (1,)}),
}


@pytest.mark.parametrize("case", ENGINES)
def test_each_rank_of_an_engine_is_held_against_a_trainer(case: str, tmp_path: Path) -> None:
    ranks, expected = ENGINES[case]
    found = compared(tmp_path, TRAINER, *ranks)
    assert off_in(found) == expected
    assert {row.name for row in found.tensors if row.verdict is not Verdict.MISSING} >= set(TRAINER["modules"])
    turned = compare_runs(open_run(tmp_path / "b"), open_run(tmp_path / "a"))
    assert off_in(turned) == expected


TEXTS = ["one", "two", "three", "four"]


def texts(said: str | Sequence[str], order: Sequence[int] = range(4)) -> dict[str, Any]:
    rows = list(order)
    own = said if isinstance(said, str) else [said[row] for row in rows]
    return {"batch_inputs": {"input_ids": IDS[rows], "prompt_text": own}, "modules": {"up.output": HIDDEN[rows]}}


ANOTHER = [*TEXTS[:3], "five"]
SAID = {
    "alike": (texts("one"), [texts("one"), texts("one")], ()),
    "the last": (texts("one"), [texts("one"), texts("two")], (1,)),
    "the first": (texts("one"), [texts("two"), texts("one"), texts("one")], (0,)),
    "lists alike": (texts(TEXTS), [texts(TEXTS), texts(TEXTS)], ()),
    "one of a list": (texts(TEXTS), [texts(TEXTS), texts(ANOTHER)], (1,)),
    "lists in another order": (texts(TEXTS), [texts(TEXTS, [2, 0, 3, 1])] * 2, ()),
    "one of a list in another order": (
        texts(TEXTS), [texts(TEXTS, [2, 0, 3, 1]), texts(ANOTHER, [2, 0, 3, 1])], (1,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_the_text_of_every_rank_is_looked_at(case: str, tmp_path: Path) -> None:
    one, ranks, parted = SAID[case]
    a, b = write(tmp_path / "a", one), write(tmp_path / "b", *ranks)
    found = compare_runs(open_run(a), open_run(b))
    assert found.agrees is not bool(parted)
    assert off_in(found) == ({"prompt_text": parted} if parted else {})
    if parted:
        assert f"of rank {parted[0]}:" in there(found.first).reason


@pytest.mark.parametrize(
    ("second", "parted", "agrees"),
    [(["three", "four"], (), True), (["four", "three"], (1,), False), (["three", "five"], (1,), False)],
)
def test_ranks_that_hold_the_texts_of_their_own_samples_hold_the_other_runs(
    second: list[str], parted: tuple[int, ...], agrees: bool | None, tmp_path: Path
) -> None:
    def held(rows: slice, said: list[str]) -> Step:
        return {"batch_inputs": {"input_ids": IDS[rows], "prompt_text": said}, "modules": {"up.output": HIDDEN[rows]}}

    a = write(tmp_path / "a", held(slice(0, 4), ["one", "two", "three", "four"]))
    b = write(tmp_path / "b", held(slice(0, 2), ["one", "two"]), held(slice(2, 4), second))
    found = compare_runs(open_run(a), open_run(b))
    assert off_in(found) == ({"prompt_text": parted} if parted else {})
    assert found.agrees is agrees


@pytest.mark.parametrize(
    ("said", "alike", "parted", "agrees"),
    [
        (TEXTS, False, (), True), (["two", "one", "three", "four"], False, (0, 1), False),
        (["one", "two", "three", "three"], False, (1,), False),
        # Of two samples of the same tokens nobody knows whose text is whose.
        (TEXTS, True, (), None),
    ],
)  # fmt: skip
def test_texts_of_ranks_that_took_turns_are_those_of_their_samples(
    said: list[str], alike: bool, parted: tuple[int, ...], agrees: bool | None, tmp_path: Path
) -> None:
    ids = IDS[[0, 1, 2, 0]] if alike else IDS

    def held(rows: list[int], said: list[str]) -> Step:
        return {
            "batch_inputs": {"input_ids": ids[rows], "prompt_text": [said[row] for row in rows]},
            "modules": {"up.output": (HIDDEN[[0, 1, 2, 0]] if alike else HIDDEN)[rows]},
        }

    a = write(tmp_path / "a", held([0, 1, 2, 3], TEXTS))
    b = write(tmp_path / "b", held([0, 2], said), held([1, 3], said))
    found = compare_runs(open_run(a), open_run(b))
    assert off_in(found) == ({"prompt_text": parted} if parted else {})
    assert found.agrees is agrees


def of_samples(rows: slice, loss: float, gradient: Tensor, times: float) -> Step:
    """What a rank records whose loss is the mean over these samples: its gradient is larger than the whole batch's."""
    return {
        "batch_inputs": {"input_ids": IDS[rows]},
        "modules": {"layers.0.output": HIDDEN[rows]},
        "loss": {"loss": torch.tensor(loss)},
        "loss_gradient": {"grad.layers.0.output": gradient[rows] * times},
    }


@pytest.mark.parametrize("rank", range(4))
def test_a_copy_is_looked_at_too_where_losses_are_means_over_their_own_samples(rank: int, tmp_path: Path) -> None:
    off = OUT.clone()
    off[1 if rank < 2 else 3, 2, 3] += 0.05
    halves = [(slice(0, 2), 2.0), (slice(0, 2), 2.0), (slice(2, 4), 4.0), (slice(2, 4), 4.0)]
    one = of_samples(slice(None), 3.0, OUT, 1)
    right = compared(tmp_path / "right", one, *(of_samples(*half, OUT, 2) for half in halves))
    assert right.agrees
    ranks = [of_samples(*half, off if number == rank else OUT, 2) for number, half in enumerate(halves)]
    found = compared(tmp_path / "off", one, *ranks)
    assert there(found.first).name == "grad.layers.0.output"
    assert "times 0.5" in there(found.first).reason


@pytest.mark.parametrize(("verdict", "is_skipped"), [(Verdict.SAME, True), (Verdict.DIFF, False)])
def test_what_ranks_hold_that_nobody_knows_is_skipped_and_never_passed(verdict: Verdict, is_skipped: bool) -> None:
    values = TensorRef("up.output", "float32", (2,), Inline(np.zeros(2, np.float32).tobytes()))
    held = Record(RecordKey(0, 0, 0, "actor", "modules"), Path("up.pt"), lambda: [values]), values
    pair, micro_pair = TensorPair("up.output", held, held), MicroBatchPair(held[0].key, Side(), Side())
    micro_pair.together = Together("b", (0, 1), "all", {})
    row = TensorVerdict("up.output", verdict, "", a=held, b=held)
    OfRanks().look(row, pair, micro_pair, lambda *_: row)
    assert (row.skipped is not None) is is_skipped
    assert not is_skipped or "ranks 0 and 1 of b" in there(row.skipped)


@pytest.mark.parametrize(("apart", "factor", "agrees"), [
    (3e-3, 2.0, True), (3e-5, 2.0, True), (0.0, 2.0, False), (3e-3, 4.0, False),
])  # fmt: skip
def test_losses_of_other_samples_that_are_near_each_other_are_no_copies(
    apart: float, factor: float, agrees: bool, tmp_path: Path
) -> None:
    """A data-parallel rank's loss is the mean over its own samples, and what it leaves at the logits twice as much."""
    name, left, loss = "grad.forward.output.logits", random(4, 16, 9, seed=7), 4.5
    given = {"batch_inputs": {"input_ids": IDS}, "modules": {"forward.output.logits": random(4, 16, 9, seed=6)}}

    def step(rows: slice, loss: float, times: float) -> Step:
        own = {stage: {key: one[rows].contiguous() for key, one in held.items()} for stage, held in given.items()}
        return {**own, "loss": {"loss": torch.tensor(loss)}, "loss_gradient": {name: times * left[rows]}}

    ranks = [step(rows, loss * (1 + sign * apart), factor) for sign, rows in ((1, slice(0, 2)), (-1, slice(2, 4)))]
    found = compared(tmp_path, step(slice(None), loss, 1.0), *ranks)
    assert (found.first is None) is agrees, found.first


@pytest.mark.parametrize(("number", "agrees"), [(2, True), (0, False)])
def test_a_later_stage_counts_what_it_returns_from_0(number: int, agrees: bool, tmp_path: Path) -> None:
    hidden = [random(4, 16, 8, seed=seed) for seed in range(3)]
    given = {"batch_inputs": {"input_ids": IDS}}

    def returned(*values: Tensor) -> Step:
        return {**given, "modules": {f"forward.output.hidden_states.{at}": one for at, one in enumerate(values)}}

    held = hidden[2] if agrees else random(4, 16, 8, seed=9)
    found = compared(tmp_path, returned(*hidden), {**given, "modules": {"layers.0.output": HIDDEN}}, returned(held))
    diverging = [row.name for row in found.tensors if row.verdict.diverges]
    assert diverging == ([] if agrees else ["forward.output.hidden_states.0"]), number


def test_an_output_whose_values_are_all_of_bfloat16_was_rounded(tmp_path: Path) -> None:
    values, part = random(4, 16, 8, seed=3), random(4, 16, 8, seed=5)
    for is_rounded in (True, False):
        summed = (part.bfloat16() + (values - part).bfloat16()).float()
        wrong = summed if is_rounded else values + 3e-3 * random(4, 16, 8, seed=4)
        steps = [{"batch_inputs": {"input_ids": IDS}, "modules": {"layers.0.output": one}} for one in (values, wrong)]
        first = there(compared(tmp_path / str(is_rounded), steps[0], steps[1], steps[1]).first)
        fault = there(first.ranks).fault
        assert (fault is not None and fault.kind == "rounded") is is_rounded


@pytest.mark.parametrize("is_in_turn", [True, False])
def test_a_fused_weight_that_is_cut_in_turn_is_told_by_its_keys_bias(is_in_turn: bool, tmp_path: Path) -> None:
    """Queries, keys and values of 8 rows each; keys' bias has no gradient."""
    weight, bias = random(24, 16, seed=1), random(24, seed=2)
    bias[8:16] = 1e-9 * random(8, seed=3)
    qkv, name = random(4, 16, 24, seed=4), f"{ATTENTION}.c_attn"
    shares = [torch.cat([part.chunk(2)[rank] for part in torch.arange(24).chunk(3)]) for rank in range(2)]
    rows = list(torch.arange(24).chunk(2)) if is_in_turn else shares

    def step(own: Tensor, gradients: tuple[Tensor, Tensor]) -> Step:
        return {
            "batch_inputs": {"input_ids": IDS},
            "modules": {f"{name}.output": qkv[..., own].contiguous()},
            "gradient": {f"grad.{name}.weight": gradients[0][own], f"grad.{name}.bias": gradients[1][own]},
        }

    wrong = random(24, 16, seed=5), random(24, seed=6)
    found = compared(tmp_path, step(torch.arange(24), (weight, bias)), *(step(own, wrong) for own in rows))
    kinds = {there(row.ranks).fault and there(there(row.ranks).fault).kind for row in found.tensors if row.ranks}
    assert ("order" in kinds) is is_in_turn


@pytest.mark.parametrize(("times", "kind"), [(1 / 3, "too little"), (3.0, "too much"), (1.3, None)])
def test_gradients_that_are_off_by_the_number_of_micro_batches(times: float, kind: str | None, tmp_path: Path) -> None:
    """Two stages of a pipeline, each with a weight of its own, and three micro-batches; the one process has one."""
    ids = torch.randint(2, 99, (3, 8), generator=torch.Generator().manual_seed(3))
    weights = {f"grad.layers.{rank}.mlp.up_proj.weight": random(16, 8, seed=rank) for rank in range(2)}
    with Recorder(tmp_path / "a") as recorder, recorder.step(0, rank=0) as record:
        record("batch_inputs", {"input_ids": ids}, micro=0)
        record("gradient", weights, micro=None)
    for rank, (name, value) in enumerate(weights.items()):
        with Recorder(tmp_path / "b") as recorder, recorder.step(0, rank=rank) as record:
            for micro in range(3):
                record("batch_inputs", {"input_ids": ids[micro : micro + 1]}, micro=micro)
            record("gradient", {name: times * value}, micro=None)
    found = compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    faults = there(parallel(found.tensors, found.together)).faults
    assert [(one.fault.kind, one.fault.ranks) for one in faults] == ([(kind, (0, 1))] if kind else [])


def test_a_gate_and_what_it_gates_are_known_by_a_name_with_a_number(tmp_path: Path) -> None:
    whole, weight = random(4, 16, 16, seed=6), random(16, 8, seed=7)
    name = "decoder.layers.0.mlp.linear_fc1"

    def own(values: Tensor, axis: int, rank: int) -> Tensor:
        gate, up = values.chunk(2, axis)
        return torch.cat([gate.chunk(2, axis)[rank], up.chunk(2, axis)[rank]], axis).contiguous()

    def step(values: Tensor, weights: Tensor) -> Step:
        return {"batch_inputs": {"input_ids": IDS}, "modules": {f"{name}.output": values},
                "param": {f"{name}.weight": weights}}  # fmt: skip

    ranks = [step(own(whole, -1, rank), own(weight, 0, rank)) for rank in range(2)]
    assert off_in(compared(tmp_path, step(whole, weight), *ranks)) == {}


def test_a_weight_is_as_wide_as_the_samples_are_long_and_is_not_cut_as_they_are(tmp_path: Path) -> None:
    """Two groups of two ranks: tokens cut between the groups, columns of a weight within each."""
    weight = random(8, 16, seed=8)

    def step(ids: Tensor, weights: Tensor) -> Step:
        return {"batch_inputs": {"input_ids": ids}, "param": {"layers.0.self_attn.o_proj.weight": weights}}

    ranks = [step(IDS.chunk(2, 1)[rank // 2].contiguous(), weight.chunk(2, 1)[rank % 2].contiguous())
             for rank in range(4)]  # fmt: skip
    assert off_in(compared(tmp_path, step(IDS, weight), *ranks)) == {}


def halves(gradient: Tensor) -> Step:
    """What a step records that computes in bfloat16: its modules show it, its gradients are stored in float32."""
    return {"batch_inputs": {"input_ids": IDS}, "modules": {"lm_head.output": HIDDEN.bfloat16()},
            "gradient": {"grad.lm_head.weight": gradient}}  # fmt: skip


def test_a_sum_of_what_autocast_rounded_has_more_digits_than_one_piece(tmp_path: Path) -> None:
    summed = sum(random(32, 32, seed=seed).bfloat16().float() for seed in (9, 10))
    assert isinstance(summed, Tensor)
    whole = (summed * (1 + 2e-3 * random(32, 32, seed=11))).bfloat16().float()  # more than a cast of the sum
    assert off_in(compared(tmp_path / "summed", halves(whole), *[halves(summed)] * 2)) == {}
    # The other way round digits are gone that the one process has.
    rounded = compared(tmp_path / "rounded", halves(summed), *[halves(whole)] * 2)
    assert off_in(rounded) == {"grad.lm_head.weight": (0, 1)}


def test_what_a_wrapper_hands_on_is_not_missing(tmp_path: Path) -> None:
    def step(made: Tensor, handed: Tensor | None) -> Step:
        wrapper = {} if handed is None else {"module.output": handed}
        return {"batch_inputs": {"input_ids": IDS[:2]}, "modules": {"lm_head.output": made, **wrapper}}

    own, other = OUT[:2].contiguous(), HIDDEN[:2].contiguous()
    for handed, missing in ((own, []), (other, ["module.output"])):
        found = compared(tmp_path / str(len(missing)), step(own, None), step(own, handed), step(own, handed))
        assert [row.name for row in found.tensors if row.verdict is Verdict.MISSING] == missing


def faults(found: Comparison) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults]


HALVES = [slice(0, 2), slice(2, 4)]


def dropped(output: Tensor) -> Step:
    return {"batch_inputs": {"input_ids": IDS}, "modules": {"layers.0.drop.output": output}}


@pytest.mark.parametrize("is_off", [True, False])
def test_a_rank_that_does_not_drop_out_is_named(is_off: bool, tmp_path: Path) -> None:
    whole = HIDDEN * (random(4, 16, 8, seed=7) > -1) / 0.9
    ranks = [dropped((HIDDEN if is_off and rank else whole)[rows].contiguous()) for rank, rows in enumerate(HALVES)]
    for one, rows in zip(ranks, HALVES, strict=True):
        one["batch_inputs"]["input_ids"] = IDS[rows].contiguous()  # type: ignore[index]
    found = faults(compared(tmp_path, dropped(whole), *ranks))
    assert found[:1] == ([("not dropped", (1,))] if is_off else [])


def test_a_rank_that_computes_in_another_dtype_is_named(tmp_path: Path) -> None:
    def step(rows: slice, dtype: torch.dtype) -> Step:
        return {
            "batch_inputs": {"input_ids": IDS[rows].contiguous()},
            "modules": {
                "layers.0.mlp.up_proj.output": OUT[rows].to(dtype).contiguous(),
                "layers.0.mlp.output": (2 * OUT[rows].to(dtype).float()).contiguous(),
            },
        }

    ranks = [step(HALVES[0], torch.float32), step(HALVES[1], torch.bfloat16)]
    assert faults(compared(tmp_path, step(slice(0, 4), torch.float32), *ranks))[0] == ("rounded", (1,))  # by its values


def test_a_rank_that_is_off_is_not_so_for_anothers_dtype(tmp_path: Path) -> None:
    def step(rows: slice, dtype: torch.dtype, times: float = 1.0) -> Step:
        return {
            "batch_inputs": {"input_ids": IDS[rows].contiguous()},
            "modules": {
                "layers.0.mlp.up_proj.output": OUT[rows].bfloat16().to(dtype).contiguous(),
                "layers.0.mlp.output": (times * OUT[rows].bfloat16().float()).contiguous(),
            },
        }

    ranks = [step(HALVES[0], torch.float32, 1.5), step(HALVES[1], torch.bfloat16)]
    found = faults(compared(tmp_path, step(slice(0, 4), torch.float32), *ranks))
    assert "precision" not in [kind for kind, _ in found]


def test_what_is_another_on_each_of_ranks_with_their_own_samples_is_of_no_layer(tmp_path: Path) -> None:
    def step(rows: slice, made: Tensor) -> Step:
        return {"batch_inputs": {"input_ids": IDS[rows].contiguous()}, "gradient": {"grad.norm.weight": made}}

    whole = random(64, seed=30)
    ranks = [step(rows, whole + 0.3 * random(64, seed=31 + rank)) for rank, rows in enumerate(HALVES)]
    found = compared(tmp_path, step(slice(0, 4), whole), *ranks)
    assert faults(found) == [("summed in part", (0, 1))]
    assert not any("layers behind it" in row.reason for row in found.tensors)


def micros(folder: Path, gradients: dict[int, Tensor], outputs: list[Tensor], ranks: int) -> Path:
    """Steps of as many ranks as hold all alike: a gradient of each; what a module puts out in two micro-batches."""
    for rank in range(ranks):
        with Recorder(folder) as recorder:
            for number, gradient in gradients.items():
                with recorder.step(number, rank=rank) as record:
                    for micro, output in enumerate(outputs):
                        record("batch_inputs", {"input_ids": IDS + micro}, micro=micro)
                        record("modules", {"layers.1.norm.output": output}, micro=micro)
                    record("gradient", {"grad.norm.weight": gradient}, micro=None)
    return folder


GRADIENTS = {0: random(12, 8), 1: random(12, 8, seed=1)}


@pytest.mark.parametrize(("kept", "kind"), [(0.5, "kept"), (1.0, "kept"), (0.37, None)])
def test_a_gradient_that_was_not_set_to_zero_holds_that_of_the_step_before(
    kept: float, kind: str | None, tmp_path: Path
) -> None:
    wrong = {0: GRADIENTS[0], 1: GRADIENTS[1] + kept * GRADIENTS[0]}
    a, b = (micros(tmp_path / name, made, [HIDDEN, OUT], ranks)
            for name, made, ranks in (("a", GRADIENTS, 1), ("b", wrong, 2)))  # fmt: skip
    found = faults(compare_runs(open_run(a), open_run(b)))
    assert found == ([(kind, (0, 1))] if kind else [])


def test_a_rank_that_was_given_another_micro_batch_is_told_which(tmp_path: Path) -> None:
    a = micros(tmp_path / "a", GRADIENTS, [HIDDEN, OUT], 1)
    b = micros(tmp_path / "b", GRADIENTS, [OUT, HIDDEN], 2)
    assert faults(compare_runs(open_run(a), open_run(b)))[0] == ("other micro-batch", (0, 1))


def test_a_gradient_of_a_part_that_all_have_and_a_part_of_its_own_is_said_to_be(tmp_path: Path) -> None:
    shared, parts = random(64, 8), [0.3 * random(64, 8, seed=seed) for seed in (1, 2)]

    def step(made: Tensor) -> Step:
        return {"batch_inputs": {"input_ids": IDS}, "gradient": {"grad.norm.weight": made}}

    found = compared(tmp_path, step(shared + sum(parts)), *(step(shared + part) for part in parts))
    assert faults(found) == [("summed in part", (0, 1))]


def test_a_rank_that_computes_on_the_micro_batch_before_is_told(tmp_path: Path) -> None:
    a = micros(tmp_path / "a", GRADIENTS, [HIDDEN, OUT], 1)
    b = micros(tmp_path / "b", GRADIENTS, [HIDDEN, HIDDEN], 2)
    found = compare_runs(open_run(a), open_run(b))
    assert faults(found)[0] == ("other micro-batch", (0, 1))
    assert found.first is not None
    assert "of micro-batch 0, the one before" in found.first.reason


def losses(folder: Path, *by_micro: tuple[float, ...], noise: float = 0.05) -> Comparison:
    """A step in which the loss of one process (first), and those of two ranks, are of these micro-batches."""
    ids = torch.arange(32).reshape(2, 16) + 2
    said = -3 * random(2, 16).abs() - 0.1
    for which, rank in (("a", 0), ("b", 0), ("b", 1)):
        recorder = Recorder(folder / which, flags={"dtype": "bfloat16"})
        with recorder, recorder.step(0, rank=rank) as record:
            for micro, numbers in enumerate(by_micro):
                own = slice(None) if which == "a" else slice(8 * rank, 8 * rank + 8)
                off = 0.0 if which == "a" else noise * random(2, 16, seed=7 + micro)
                told = {"input_ids": (ids + 40 * micro)[:, own].contiguous()}
                record("batch_inputs", told, micro=micro)
                record("forward_data", {"policy_logprobs": (said + off)[:, own].contiguous()}, micro=micro)
                record("loss", {"loss": numbers[0 if which == "a" else 1 + rank]}, micro=micro)
    return compare_runs(open_run(folder / "a"), open_run(folder / "b"))


@pytest.mark.parametrize(("second", "agrees"), [((0.06, -0.005, 0.0675), True), ((0.06, -0.005, 0.3), False)])
def test_a_loss_that_is_a_sum_over_ranks_is_one_in_every_micro_batch(
    second: tuple[float, ...], agrees: bool, tmp_path: Path
) -> None:
    """Beside a sum that cancels, noise is no small part."""
    found = losses(tmp_path, (0.8, 0.3, 0.5), second)
    rows = [row for row in found.tensors if row.name == "loss"]
    assert [row.verdict.diverges for row in rows] == [False, not agrees], [row.reason for row in rows]

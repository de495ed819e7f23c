"""Whose part is in a sum, told by what was recorded beside it: inputs and slices of a weight, tokens, other experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replay_core import pages
from replay_core.compare import Comparison
from replay_core.compare.judging import contributions
from replay_core.compare.judging.row_parallel import gated
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.compare.parallel import parallel
from replay_core.records import Inline, TensorRef
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared, gradients, random

IDS = torch.randint(2, 40, (4, 16), generator=torch.Generator().manual_seed(3))
HALVES = [slice(0, 2), slice(2, 4)]
INPUTS, WEIGHT, BIAS = random(4, 16, 24), random(8, 24, seed=1), random(8, seed=2)


def as_ref(values: Tensor) -> TensorRef:
    return TensorRef("x", "float32", tuple(values.shape), Inline(values.contiguous().numpy().tobytes()))


def kinds(found: Comparison) -> set[tuple[str, tuple[int, ...]]]:
    return {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults}


def layer(inputs: Tensor, output: Tensor, weight: Tensor) -> dict[str, Any]:
    """A row-parallel layer as a rank records it; its parameters are of the same step."""
    return {
        "batch_inputs": {"input_ids": IDS},
        "modules": {"layers.0.act.output": inputs.contiguous(), "layers.0.down.output": output},
        "param": {"param.layers.0.down.weight": weight.contiguous(), "param.layers.0.down.bias": BIAS},
    }


PARTS = [x @ weight.T for x, weight in zip(INPUTS.chunk(2, 2), WEIGHT.chunk(2, 1), strict=True)]
RIGHT = sum(PARTS) + BIAS
OUTPUTS: dict[str, tuple[list[Tensor], tuple[str, tuple[int, ...]] | None]] = {
    "each its own part": ([part + BIAS for part in PARTS], ("not summed", (0, 1))),
    "the second is missing": ([PARTS[0] + BIAS] * 2, ("missing", (1,))),
    "the bias twice": ([RIGHT + BIAS] * 2, ("too much", (0, 1))),
    "no bias on the second": ([RIGHT, RIGHT - BIAS], ("missing", (1,))),
    "nothing of them": ([RIGHT + random(4, 16, 8, seed=9)] * 2, None),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_the_parts_of_a_row_parallel_output_are_counted(case: str, tmp_path: Path) -> None:
    outputs, expected = OUTPUTS[case]
    ranks = [layer(*held) for held in zip(INPUTS.chunk(2, 2), outputs, WEIGHT.chunk(2, 1), strict=True)]
    found = kinds(compared(tmp_path, layer(INPUTS, RIGHT, WEIGHT), *ranks))
    assert found == ({expected} if expected is not None else set())


def embedding(factors: list[float]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One process and two ranks of two samples each, whose tokens count so often in an embedding's gradient."""
    rows = [torch.zeros(40, 8).index_add(0, IDS[half].reshape(-1), random(32, 8, seed=4 + number))
            for number, half in enumerate(HALVES)]  # fmt: skip
    made = sum(factor * one for factor, one in zip(factors, rows, strict=True))
    name = "grad.embed_tokens.weight"
    one = {"batch_inputs": {"input_ids": IDS}, "gradient": {name: sum(rows)}}
    ranks = [{"batch_inputs": {"input_ids": IDS[half].contiguous()}, "gradient": {name: made}} for half in HALVES]
    return one, ranks


#: n / (R n_r) of 30 and 20 tokens, and factors that no counts of tokens make.
MEANS = {"a mean of its own": [50 / 60, 50 / 40], "the second's missing": [1.0, 0.0], "anything": [0.7, 1.1],
         "half of the second's": [1.0, 0.5], "half of all": [0.7, 0.7]}  # fmt: skip


SAID = [("a mean of its own", {("own token mean", (0, 1))}), ("the second's missing", {("missing", (1,))}),
        ("anything", {("weighed", (0, 1))}), ("half of the second's", {("weighed", (1,))}),
        ("half of all", set())]  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), SAID)
def test_an_embeddings_rows_say_how_often_each_ranks_tokens_count(
    case: str, expected: set[Any], tmp_path: Path
) -> None:
    one, ranks = embedding(MEANS[case])
    assert kinds(compared(tmp_path, one, *ranks)) == expected


def test_a_slice_of_the_words_says_whose_tokens_are_missing(tmp_path: Path) -> None:
    """Tensor parallelism in data parallelism: of the second slice, what rank 3 adds is on neither of its ranks."""
    one, ranks = embedding([1.0, 1.0])
    (_, lacking), name = embedding([1.0, 0.0]), "grad.embed_tokens.weight"
    whole, less = one["gradient"][name], lacking[0]["gradient"][name]
    held = [
        {**ranks[dp], "gradient": {name: (whole, less)[tp].chunk(2)[tp].contiguous()}}
        for dp in range(2) for tp in range(2)
    ]  # fmt: skip
    assert ("missing", (3,)) in kinds(compared(tmp_path, one, *held))


@pytest.mark.parametrize("are_own", [True, False])
def test_losses_that_are_means_of_the_ranks_own_tokens(are_own: bool, tmp_path: Path) -> None:
    logprobs = -random(4, 16).abs() - 0.1
    logprobs[2:, 9:] = 0.0
    count = int(logprobs.count_nonzero())

    def held(rows: slice, loss: Tensor) -> dict[str, Any]:
        return {"batch_inputs": {"input_ids": IDS[rows].contiguous()},
                "forward_data": {"policy_logprobs": logprobs[rows].contiguous()}, "loss": {"loss": loss}}  # fmt: skip

    one = held(slice(None), -logprobs.sum() / count)
    own = [-logprobs[half].sum() / logprobs[half].count_nonzero() for half in HALVES]
    ranks = [held(half, mean if are_own else 1.3 * mean) for half, mean in zip(HALVES, own, strict=True)]
    assert (("own token mean", (0, 1)) in kinds(compared(tmp_path, one, *ranks))) is are_own


@pytest.mark.parametrize(("times", "is_told"), [(1.0, True), (0.5, False)])
def test_what_is_beside_the_tokens_counts_once_for_each_rank(times: float, is_told: bool, tmp_path: Path) -> None:
    """times: what part of it each of two ranks has; half of it is right."""
    logprobs = -random(4, 6).abs() - 0.1
    ids = torch.randint(1, 99, (4, 6), generator=torch.Generator().manual_seed(1))
    part = [-logprobs[rows].sum() / logprobs.numel() for rows in (slice(0, 2), slice(2, 4))]
    beside = 0.3 * sum(part)

    def step(rows: slice, loss: Tensor) -> dict[str, Any]:
        return {"forward_data": {"input_ids": ids[rows], "log_probs": logprobs[rows]}, "loss": {"loss": loss}}

    found = compared(
        tmp_path, step(slice(0, 4), sum(part) + beside), step(slice(0, 2), part[0] + times * beside),
        step(slice(2, 4), part[1] + times * beside),
    )  # fmt: skip
    assert (found.first is not None) is is_told
    assert (("beside the tokens", (0, 1)) in kinds(found)) is is_told


def test_a_gradient_of_values_of_bfloat16_was_reduced_in_it(tmp_path: Path) -> None:
    whole = random(8, 24)
    rounded = whole.bfloat16().float()
    assert kinds(gradients(tmp_path / "short", whole, [rounded, rounded])) == {("rounded", (0, 1))}
    off = whole + 3e-3 * random(8, 24, seed=1)
    assert not kinds(gradients(tmp_path / "noise", whole, [off, off]))


def experts(held: list[dict[int, Tensor]]) -> list[dict[str, Any]]:
    return [{"gradient": {f"grad.layers.0.mlp.experts.{number}.w1.weight": grad for number, grad in own.items()}}
            for own in held]  # fmt: skip


def test_experts_that_are_summed_or_divided_as_copies(tmp_path: Path) -> None:
    own = [random(8, 24, seed=number) for number in range(4)]
    (one,) = experts([dict(enumerate(own))])
    halved = experts([{0: own[0] / 2, 1: own[1] / 2}, {2: own[2] / 2, 3: own[3] / 2}])
    assert kinds(compared(tmp_path / "halved", one, *halved)) == {("too little", (0, 1))}
    both = {0: own[0] + own[2], 1: own[1] + own[3]}
    summed = experts([both, {number + 2: grad for number, grad in both.items()}])
    assert kinds(compared(tmp_path / "summed", one, *summed)) == {("summed with another", (0, 1))}


def test_a_label_is_lost_where_two_ranks_stretches_meet(tmp_path: Path) -> None:
    logprobs = -random(4, 16).abs() - 0.1
    logprobs[:, -1] = 0.0
    lost = logprobs.clone()
    lost[:, 7] = 0.0

    def held(values: Tensor, tokens: slice) -> dict[str, Any]:
        return {"batch_inputs": {"input_ids": IDS[:, tokens].contiguous()},
                "forward_data": {"policy_logprobs": values[:, tokens].contiguous()}}  # fmt: skip

    cut = [slice(0, 8), slice(8, 16)]
    found = compared(tmp_path / "lost", held(logprobs, slice(None)), *(held(lost, tokens) for tokens in cut))
    assert kinds(found) == {("boundary label", (0,))}
    lost[0, 3] = 0.0
    found = compared(tmp_path / "more", held(logprobs, slice(None)), *(held(lost, tokens) for tokens in cut))
    assert kinds(found) == {("apart", (0,))}


def tokens_of(ids: Tensor, **modules: Tensor) -> dict[str, Any]:
    named = {name.replace("__", "."): values.contiguous() for name, values in modules.items()}
    return {"batch_inputs": {"input_ids": ids.contiguous()}, "modules": named}


def test_a_rank_that_sees_its_own_keys_alone_gives_its_first_token_its_own_value(tmp_path: Path) -> None:
    values, right = random(4, 16, 8), random(4, 2, 16, 4, seed=1)
    own = random(4, 2, 8, 4, seed=2)
    own[:, :, 0] = values[:, 8].reshape(4, 2, 4)

    def held(core: Tensor, tokens: slice) -> dict[str, Any]:
        return tokens_of(
            IDS[:, tokens], layers__0__self_attn__v_proj__output=values[:, tokens],
            layers__0__self_attn__core__output=core,
        )  # fmt: skip

    first = held(right[:, :, :8], slice(0, 8))
    one = held(right, slice(None))
    found = compared(tmp_path / "own", one, first, held(own, slice(8, 16)))
    assert ("own keys", (1,)) in kinds(found)
    own[:, :, 0] += 1
    assert kinds(compared(tmp_path / "other", one, first, held(own, slice(8, 16)))) == {("apart", (1,))}


def test_chunks_of_zigzag_that_a_rank_has_in_the_other_order(tmp_path: Path) -> None:
    chunks = IDS.chunk(4, 1)
    ranks = [torch.cat((chunks[0], chunks[3]), 1), torch.cat((chunks[2], chunks[1]), 1)]
    found = compared(
        tmp_path, {"batch_inputs": {"input_ids": IDS}}, *({"batch_inputs": {"input_ids": i}} for i in ranks)
    )
    assert kinds(found) == {("order", (1,))}


@pytest.mark.parametrize("is_of_experts", [True, False])
def test_tokens_none_of_whose_experts_is_the_ranks_own_are_zero_where_nothing_is_summed(
    is_of_experts: bool, tmp_path: Path
) -> None:
    whole = random(4, 16, 8)
    held = whole.clone()
    held[:, ::4] = 0.0
    held[:, 1::4] *= 0.4
    name = "layers__0__mlp__experts__{}__up__output" if is_of_experts else "layers__0__mlp__{}__output"

    def given(rows: slice, mlp: Tensor, *numbers: int) -> dict[str, Any]:
        own = {name.format(number): random(9, 8, seed=number) for number in numbers}
        return tokens_of(IDS[rows], **own, layers__0__mlp__output=mlp[rows])

    ranks = [given(rows, held, number) for number, rows in enumerate(HALVES)]
    found = kinds(compared(tmp_path, given(slice(None), whole, 0, 1), *ranks))
    assert (("not summed", (0, 1)) in found) is is_of_experts


def test_what_a_weights_gradient_lacks_is_in_no_input_of_the_other_ranks(tmp_path: Path) -> None:
    inputs, left = random(2, 6, 24), random(2, 6, 8, seed=1)
    grads = [g.T @ x for g, x in zip(left, inputs, strict=True)]
    name = "grad.layers.0.mlp.down.weight"

    def held(rows: slice, grad: Tensor) -> dict[str, Any]:
        return {**tokens_of(IDS[:2, :6][rows], layers__0__mlp__act__output=inputs[rows]), "gradient": {name: grad}}

    one = held(slice(None), grads[0] + grads[1])
    lacking = [held(slice(number, number + 1), grads[0]) for number in range(2)]
    assert kinds(compared(tmp_path / "lacking", one, *lacking)) == {("missing", (1,))}
    noise = [held(slice(number, number + 1), grads[0] + 0.9 * grads[1]) for number in range(2)]
    assert not kinds(compared(tmp_path / "less", one, *noise))


def test_a_weights_gradient_is_not_asked_of_more_ranks_than_sixteen() -> None:
    """A decomposition for each of hundreds of ranks would take longer than the comparison."""
    for ranks in (16, 17):
        inputs, left = random(ranks, 2, 48), random(ranks, 2, 8, seed=1)
        grads = [g.T @ x for g, x in zip(left, inputs, strict=True)]
        refs = [as_ref(grad) for grad in (sum(grads), sum(grads[1:]))]
        mine = HeldByRanks(tuple(range(ranks)), (refs[1],) * ranks)
        parts = tuple(as_ref(one) for one in inputs)
        told = contributions.without_inputs("x", refs[0], mine, HeldByRanks(mine.ranks, parts, 0))
        assert (told and told.ranks) == ((0,) if ranks == 16 else None)


@pytest.mark.parametrize("is_centred", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("how", ["not summed", "anything"])
def test_a_norm_of_each_ranks_own_part_is_not_summed(how: str, is_centred: bool, tmp_path: Path) -> None:
    before, parts = random(2, 12, 16, seed=4), [random(2, 12, 16, seed=5), random(2, 12, 16, seed=6)]
    weight, bias = 1 + 0.2 * random(16, seed=7), 0.1 * random(16, seed=8)

    def normed(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if is_centred else x
        return x / x.square().mean(-1, keepdim=True).sqrt() * weight + (bias if is_centred else 0.0)

    def step(part: Tensor, output: Tensor) -> dict[str, Any]:
        return {"batch_inputs": {"input_ids": IDS[:2, :12].contiguous()},
                "modules": {"layers.0.output": before, "layers.1.self_attn.o_proj.output": part,
                            "layers.1.post_attention_layernorm.output": output}}  # fmt: skip

    right = step(sum(parts), normed(before + sum(parts)))  # type: ignore[arg-type]
    ranks = [step(part, normed(before + part) if how == "not summed" else random(2, 12, 16, seed=9 + number))
             for number, part in enumerate(parts)]  # fmt: skip
    assert (("not summed", (0, 1)) in kinds(compared(tmp_path, right, *ranks))) is (how == "not summed")


@pytest.mark.parametrize("lost", [0, 1, None])
def test_what_goes_through_a_gate_says_whose_part_is_missing(lost: int | None, tmp_path: Path) -> None:
    gate, up, down = random(2, 12, 32, seed=1), random(2, 12, 32, seed=2), random(16, 32, seed=3)
    inputs = torch.nn.functional.silu(gate) * up
    each = [x @ w.T for x, w in zip(inputs.chunk(2, -1), down.chunk(2, -1), strict=True)]
    made = sum(part for rank, part in enumerate(each) if rank != lost)

    def step(gate: Tensor, up: Tensor, down: Tensor, output: Any) -> dict[str, Any]:
        modules = {"layers.0.mlp.gate_proj.output": gate.contiguous(), "layers.0.mlp.up_proj.output": up.contiguous(),
                   "layers.0.mlp.down_proj.output": output}  # fmt: skip
        return {"modules": modules, "param": {"param.layers.0.mlp.down_proj.weight": down.contiguous()}}

    cut = zip(gate.chunk(2, -1), up.chunk(2, -1), down.chunk(2, -1), strict=True)
    found = compared(tmp_path, step(gate, up, down, sum(each)), *(step(*one, made) for one in cut))
    told = {ranks for kind, ranks in (kinds(found) if found.first is not None else ()) if kind == "missing"}
    assert told == (set() if lost is None else {(lost,)})


def test_gates_far_below_zero_and_parts_of_another_shape_are_no_trouble() -> None:
    def held(name: str, *parts: Tensor) -> HeldByRanks:
        return HeldByRanks((0, 1), tuple(as_ref(part).with_(name=name) for part in parts), 0)

    gate = torch.tensor([-1e4, -800.0, -1.0, 0.0, 1.0, 800.0])
    up = torch.full_like(gate, 2.0)
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        found = list(gated([held("mlp.gate_proj.output", gate, gate), held("mlp.up_proj.output", up, up)]))
    made = torch.from_numpy(pages.array(found[0].parts[1]).copy())
    torch.testing.assert_close(made, torch.nn.functional.silu(gate.double()) * 2, rtol=1e-12, atol=1e-300)
    assert not list(gated([held("mlp.gate_proj.output", gate, gate), held("mlp.up_proj.output", up, up[:4])]))


def test_own_means_are_told_by_a_gradient_where_the_losses_are_still_near(tmp_path: Path) -> None:
    logprobs = -1 - 0.01 * random(4, 16).abs()
    logprobs[2:, 13:] = 0.0
    whole = -logprobs.sum() / logprobs.count_nonzero()
    own = [-logprobs[half].sum() / logprobs[half].count_nonzero() / 2 for half in HALVES]

    def held(rows: slice, loss: Tensor, gradient: Tensor) -> dict[str, Any]:
        return {"batch_inputs": {"input_ids": IDS[rows].contiguous()},
                "forward_data": {"policy_logprobs": logprobs[rows].contiguous()}, "loss": {"loss": loss},
                "gradient": {"grad.norm.weight": gradient}}  # fmt: skip

    right, wrong = random(32, seed=2), random(32, seed=2) + 0.1 * random(32, seed=3)
    for gradient, is_told in ((wrong, True), (right, False)):
        ranks = [held(half, mean, gradient) for half, mean in zip(HALVES, own, strict=True)]
        found = compared(tmp_path / str(is_told), held(slice(None), whole, right), *ranks)
        assert (("own token mean", (0, 1)) in kinds(found)) is is_told


@pytest.mark.parametrize("slices", [False, True])
def test_a_rank_that_is_missing_from_a_sliced_gradient_is_named(slices: bool, tmp_path: Path) -> None:
    """Two by two ranks: samples over the outer axis, rows of the weight over the inner."""
    x = random(4, 4, 48, seed=1)
    left = random(4, 4, 12, seed=2)
    each = [torch.einsum("bto,bti->oi", left[half], x[half]) for half in HALVES]
    norm = {"layers.1.input_layernorm.output": x}

    def step(rows: slice, gradient: Tensor) -> dict[str, Any]:
        return {"batch_inputs": {"input_ids": IDS[rows, :4].contiguous()},
                "modules": {name: value[rows].contiguous() for name, value in norm.items()},
                "gradient": {"grad.layers.1.self_attn.q_proj.weight": gradient.contiguous()}}  # fmt: skip

    whole = sum(each)
    ranks = []
    for half in HALVES:
        for tp in (0, 1):
            rows = slice(6 * tp, 6 * tp + 6)
            made = each[0] if slices and tp else whole
            ranks.append(step(half, made[rows]))  # type: ignore[index]
    told = kinds(compared(tmp_path, step(slice(None), whole), *ranks))  # type: ignore[arg-type]
    assert told == ({("missing", (3,))} if slices else set())


@pytest.mark.parametrize("off", [0.01, 0.5])
def test_an_expert_that_is_another_but_for_a_step_is_anothers(off: float, tmp_path: Path) -> None:
    experts = [random(12, 16, seed=number) for number in range(4)]

    def step(numbers: dict[int, Tensor]) -> dict[str, Any]:
        weights = {f"param.layers.0.mlp.experts.{n}.w1.weight": one for n, one in numbers.items()}
        return {"param": {**weights, "param.norm.weight": torch.ones(16)}}

    moved = [one + off * random(12, 16, seed=10 + number) for number, one in enumerate(experts)]
    ranks = [step({0: experts[0], 1: experts[1]}), step({2: moved[3], 3: moved[2]})]
    told = kinds(compared(tmp_path, step(dict(enumerate(experts))), *ranks))
    assert (("another's", (1,)) in told) is (off < 0.1)


@pytest.mark.parametrize(("at", "expected"), [
    (slice(8, 16), {("gathered", (0,))}), (slice(7, 16), {("apart", (0,))}), (slice(0, 16), {("apart", (0,))}),
])  # fmt: skip
def test_what_a_rank_gathered_is_off_at_the_other_ranks_tokens(at: slice, expected: set[Any], tmp_path: Path) -> None:
    """Sequence parallelism: each rank norms its tokens, gathers all, and makes its features of them."""
    normed, made = random(4, 16, 8), random(4, 16, 12, seed=1)
    stale = made.clone()
    stale[:, at] = random(4, 16, 12, seed=2)[:, at]

    def step(tokens: slice, output: Tensor) -> dict[str, Any]:
        return tokens_of(IDS, layers__0__norm__output=normed[:, tokens], layers__0__mlp__up__output=output)

    ranks = [step(slice(0, 8), stale[..., :6]), step(slice(8, 16), made[..., 6:])]
    assert kinds(compared(tmp_path, step(slice(None), made), *ranks)) == expected


@pytest.mark.parametrize(("at", "value", "is_told"), [((7, 15), -100, True), ((7,), 5, True), ((6, 7), -100, False)])
def test_labels_that_are_shifted_within_a_ranks_tokens(
    at: tuple[int, ...], value: int, is_told: bool, tmp_path: Path
) -> None:
    labels = torch.roll(IDS, -1, 1)
    wrong = labels.clone()
    wrong[:, list(at)] = value

    def step(tokens: slice, own: Tensor) -> dict[str, Any]:
        return {"batch_inputs": {"input_ids": IDS[:, tokens].contiguous(), "labels": own[:, tokens].contiguous()}}

    cut = [slice(0, 8), slice(8, 16)]
    told = kinds(compared(tmp_path, step(slice(None), labels), *(step(tokens, wrong) for tokens in cut)))
    expected = (0, 1) if 15 in at else (0,)
    assert (("boundary label", expected) in told) is is_told


@pytest.mark.parametrize(
    ("whose", "gate", "since", "expected"),
    [
        ((2, 3), 1.0, 0, {("contribution", (1,))}),
        ((1, 3), 1.0, 0, set()),
        ((2, 3), 0.0, 20, {("contribution", (1,))}),
    ],
    ids=["one rank's", "of both ranks", "full: later tokens are turned away"],
)
def test_a_ranks_experts_that_count_with_another_weight(
    whose: tuple[int, ...], gate: float, since: int, expected: set[Any], tmp_path: Path
) -> None:
    """Each token goes to two of four experts; two ranks have two experts each."""
    routed = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(seed))[:2] for seed in range(64)])
    made, gates = random(64, 4, 8), 0.2 + 0.6 * random(64, 4, seed=1).sigmoid()

    def total(gates: Tensor) -> Tensor:
        return (made * gates[..., None]).gather(1, routed[..., None].expand(-1, -1, 8)).sum(1).reshape(4, 16, 8)

    ungated = gates.clone()
    ungated[since:, list(whose)] = gate

    def step(rows: slice, output: Tensor, numbers: tuple[int, ...]) -> dict[str, Any]:
        experts = {f"layers.0.mlp.experts.{number}.output": made[(routed == number).any(1), number].contiguous()
                   for number in numbers}  # fmt: skip
        step = tokens_of(IDS[rows], **experts)
        step["modules"]["layers.0.mlp.output"] = output[rows].contiguous()
        return step

    ranks = [step(rows, total(ungated), (2 * rank, 2 * rank + 1)) for rank, rows in enumerate(HALVES)]
    assert kinds(compared(tmp_path, step(slice(None), total(gates), (0, 1, 2, 3)), *ranks)) == expected


BESIDE: dict[str, tuple[list[Tensor], set[Any]]] = {
    "each its part and the bias": ([PARTS[0] + BIAS, PARTS[1] + BIAS], {("not summed", (0, 1))}),
    "rounded": ([sum(PARTS).bfloat16().float() + BIAS] * 2, {("rounded", (0, 1))}),
    "anything": ([RIGHT + 0.1 * random(4, 16, 8, seed=9)] * 2, set()),
}


@pytest.mark.parametrize("case", BESIDE)
def test_outputs_are_looked_at_without_the_bias_beside_them(case: str, tmp_path: Path) -> None:
    """What went into the layer was not recorded."""
    outputs, expected = BESIDE[case]

    def step(output: Tensor) -> dict[str, Any]:
        return {**tokens_of(IDS, layers__0__down__output=output), "param": {"param.layers.0.down.bias": BIAS}}

    assert kinds(compared(tmp_path, step(RIGHT), *map(step, outputs))) == expected


@pytest.mark.parametrize("is_own", [False, True])
def test_a_gradient_that_each_rank_has_of_its_own_tokens_lacks_no_rank(is_own: bool, tmp_path: Path) -> None:
    """Not summed, and clipped by a norm of each rank's own: the first rank's is made of its own tokens, and no sum."""
    x, left, norm = random(4, 4, 48, seed=1), random(4, 4, 12, seed=2), random(32, seed=3)
    each = [torch.einsum("bto,bti->oi", left[half], x[half]) for half in HALVES]

    def step(rows: slice, gradient: Tensor, times: float = 1.0) -> dict[str, Any]:
        return {"batch_inputs": {"input_ids": IDS[rows, :4].contiguous()},
                "modules": {"norm.output": x[rows].contiguous()},
                "gradient": {"grad.head.weight": gradient, "grad.norm.weight": times * norm}}  # fmt: skip

    factors = (1.04, 1.1) if is_own else (1.0, 1.0)
    ranks = [step(half, factor * (own if is_own else each[0]), factor)
             for half, own, factor in zip(HALVES, each, factors, strict=True)]  # fmt: skip
    told = kinds(compared(tmp_path, step(slice(None), each[0] + each[1]), *ranks))
    assert told == ({("not summed", (0, 1))} if is_own else {("missing", (1,))})


@pytest.mark.parametrize(("first", "kind"), [(0.5, "too little"), (0.3, "not summed")])
def test_a_tied_weight_of_two_stages_is_averaged_or_not_summed(first: float, kind: str) -> None:
    whole = random(12, 8)
    held = [HeldByRanks((rank,), (as_ref(share * whole),)) for rank, share in enumerate((first, 1 - first))]
    fault = contributions.tied_apart("the gradient", as_ref(whole), *held)
    assert fault is not None
    assert (fault.kind, fault.ranks) == (kind, (0, 1))


@pytest.mark.parametrize("counts", [True, False])
def test_tokens_that_count_on_a_rank_and_not_in_the_other_run_are_told(counts: bool) -> None:
    left = random(4, 16, 8)
    left[:, :3] = 0.0
    parts = [left[:2].clone(), left[2:].clone()]
    parts[1][:, :3] = random(2, 3, 8, seed=1) if counts else 0.0
    parts[1][:, 3:] *= 0.8
    held = HeldByRanks((0, 1), tuple(map(as_ref, parts)), 0, (((0, 2),), ((2, 2),)))
    told = contributions.other_tokens_count("grad.logits", as_ref(left), held)
    assert (told and (told.kind, told.ranks)) == (("tokens that count", (1,)) if counts else None)

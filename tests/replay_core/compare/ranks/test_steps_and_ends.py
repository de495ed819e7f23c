"""Faults told by which weights, gradients or tokens alone are off: of one rank, of experts, at stretches' ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.judging import label_ends
from replay_core.compare.judging.ranks.orthogonalised import Orthogonalised
from replay_core.compare.misdealt import misdealt
from replay_core.compare.parallel import Parallel, parallel
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import Step, random

IDS = torch.randint(2, 99, (8, 16), generator=torch.Generator().manual_seed(3))
NAMES = [f"layers.{layer}.{part}.weight" for layer in range(4) for part in ("up", "down")]


def write(directory: Path, ranks: Sequence[Sequence[Step]]) -> Path:
    """Steps of every rank."""
    for rank, steps in enumerate(ranks):
        with Recorder(directory) as recorder:
            for step, stages in enumerate(steps):
                with recorder.step(step, rank=rank) as record:
                    for stage, fields in stages.items():
                        of_all = stage in ("gradient", "param", "optimizer", "training_metrics")
                        record(stage, fields, micro=None if of_all else 0)
    return directory


def compared(directory: Path, one: Sequence[Step], *ranks: Sequence[Step]) -> Comparison:
    a, b = write(directory / "a", [one]), write(directory / "b", ranks)
    return compare_runs(open_run(a), open_run(b))


def found(directory: Path, one: Sequence[Step], *ranks: Sequence[Step]) -> Parallel:
    made = compared(directory, one, *ranks)
    return there(parallel(made.tensors, made.together))


def step(weights: dict[str, Tensor], **more: dict[str, Tensor]) -> Step:
    return {"forward_data": {"input_ids": IDS}, **more, "param": {f"param.{n}": w for n, w in weights.items()}}


def weights(at: int) -> dict[str, Tensor]:
    """Weights after a step: each moved by a hundredth along signs of its own."""
    return {
        name: random(8, 8, seed=number) + sum(0.01 * random(8, 8, seed=100 + 10 * number + t).sign() for t in range(at))
        for number, name in enumerate(NAMES)
    }  # fmt: skip


# ---- labels


@pytest.mark.parametrize("is_gathered", [False, True])
def test_labels_that_were_shifted_after_the_sequence_was_cut_are_told_by_the_ends(is_gathered: bool) -> None:
    whole = random(4, 16, seed=1)
    here = whole.clone()
    here[:, [3, 11]] -= random(4, 2, seed=2).abs() + 1
    early_and_late, between = [*range(4), *range(12, 16)], list(range(4, 12))
    held = alike(here[:, :15], here[:, :15]) if is_gathered else cut(
        [here[:, early_and_late], here[:, between]], 1, stretches=[[(0, 4), (12, 4)], [(4, 8)]]
    )  # fmt: skip
    fault = there(label_ends.explain("policy_logprobs", as_ref(whole[:, :15] if is_gathered else whole), held, (0, 1)))
    assert (fault.kind, fault.ranks) == ("boundary label", (0, 1))
    assert "positions 3, 11" in fault.sentence


@pytest.mark.parametrize("tokens", [[3, 5], [5], list(range(16))])
def test_log_probabilities_that_are_off_elsewhere_too_are_no_labels(tokens: list[int]) -> None:
    whole = random(4, 16, seed=1)
    here = whole.clone()
    here[:, tokens] -= 1
    halves = [here[:, :8], here[:, 8:]]
    assert label_ends.explain("policy_logprobs", as_ref(whole), cut(halves, 1), (0, 1)) is None


def test_labels_are_told_by_the_ends_where_each_tokens_log_probability_stands_at_itself() -> None:
    whole = random(4, 16, seed=1)
    whole[:, 0] = 0
    here = whole.clone()
    here[:, [4, 8, 12]] -= random(4, 3, seed=2).abs() + 1
    fault = there(label_ends.explain("policy_logprobs", as_ref(whole), alike(here, here, here, here), (0, 1, 2, 3)))
    assert (fault.kind, fault.ranks) == ("boundary label", (0, 1, 2))
    assert "positions 3, 7, 11" in fault.sentence
    assert "recorded at the token after it" in fault.sentence
    here = whole.clone()
    here[:, [3, 7, 11]] -= 1
    assert label_ends.explain("policy_logprobs", as_ref(whole), alike(here, here), (0, 1, 2, 3)) is None


# ---- weights that are not moved


def test_a_layer_that_one_stage_leaves_frozen_is_told_though_nothing_was_recorded_before_it(tmp_path: Path) -> None:
    own = [{n: w for n, w in weights(t).items() if n.startswith(("layers.0", "layers.1"))} for t in (1, 2)]
    frozen = {n: w for n, w in weights(0).items() if n not in own[0]}
    told = found(
        tmp_path, [step(weights(1)), step(weights(2))], [step(one) for one in own], [step(frozen), step(frozen)]
    )  # fmt: skip
    assert [one.fault.kind for one in told.faults] == ["stale weight"]
    assert told.faults[0].fault.ranks == (1,)
    assert "bit by bit" in told.faults[0].fault.sentence


def test_a_weight_that_is_off_and_moves_is_not_frozen(tmp_path: Path) -> None:
    off = [{n: w + 0.3 * random(8, 8, seed=77) for n, w in weights(t).items()} for t in (1, 2)]
    told = found(tmp_path, [step(weights(1)), step(weights(2))], *([step(one) for one in off] for _ in range(2)))
    assert "stale weight" not in [one.fault.kind for one in told.faults]


@pytest.mark.parametrize("steps", [1, 2])
def test_shares_of_the_weights_that_are_updated_and_handed_to_nobody(tmp_path: Path, steps: int) -> None:
    def of(rank: int, at: int) -> dict[str, Tensor]:
        mine = NAMES[2 * rank : 2 * rank + 2]
        return {n: weights(at if n in mine else 0)[n] for n in NAMES}

    told = found(
        tmp_path, [step(weights(t + 1)) for t in range(steps)],
        *([step(of(rank, t + 1)) for t in range(steps)] for rank in range(4)),
    )  # fmt: skip
    assert [one.fault.kind for one in told.faults] == ["not gathered"]
    assert told.faults[0].fault.ranks == (0, 1, 2, 3)


def test_a_slice_that_is_stepped_as_due_beside_one_that_is_not_is_no_trust_ratio() -> None:
    signs = random(8, 8, seed=5).sign().double().numpy()

    class One:
        held = cut([torch.zeros(4, 8), torch.zeros(4, 8)], 0)
        off = signs.copy()

    asked = Orthogonalised()
    one: Any = One()
    one.off[:4] = 0
    assert asked._by_own_factors(one, signs, 1.0) is None
    one.off[:4] = 0.7 * signs[:4]
    assert asked._by_own_factors(one, signs, 1.0) is not None


# ---- gradients that alone are off


def gradients(scale: float, names: Sequence[str]) -> dict[str, Tensor]:
    return {
        f"grad.{name}": random(8, 8, seed=number) * (scale if "experts" in name else 1)
        for number, name in enumerate(names)
    }


@pytest.mark.parametrize("is_all", [False, True])
def test_experts_gradients_that_alone_are_scaled_say_whose_number_of_ranks(tmp_path: Path, is_all: bool) -> None:
    names = [*NAMES, *(f"layers.{layer}.mlp.experts.0.up.weight" for layer in range(2))]
    off = {n: 2 * g for n, g in gradients(1, names).items()} if is_all else gradients(2, names)
    told = found(tmp_path, [{"gradient": gradients(1, names)}], [{"gradient": off}], [{"gradient": off}])
    assert ("Experts' gradients alone are off so (2)" in told.faults[0].fault.sentence) == (not is_all)


def test_a_tied_embedding_that_alone_is_off_is_told_by_its_stages(tmp_path: Path) -> None:
    embedding, rest = random(32, 8, seed=9), gradients(1, NAMES)
    off = embedding + 2 * random(32, 8, seed=10)

    def of(part: slice) -> Step:
        return {"gradient": {"grad.embed.weight": off, **dict([*rest.items()][part])}}

    told = found(
        tmp_path, [{"gradient": {"grad.embed.weight": embedding, **rest}}], [of(slice(0, 4))], [of(slice(4, 8))]
    )
    assert [one.fault.kind for one in told.faults] == ["tied weight"]


# ---- the optimizer's state


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_moments_that_are_others_at_a_resume(tmp_path: Path, is_exchanged: bool) -> None:
    before = {n: random(8, 8, seed=200 + number) for number, n in enumerate(NAMES)}
    loaded = dict(before)
    if is_exchanged:
        for mine, others in zip(NAMES[2:4], NAMES[4:6], strict=True):
            loaded[mine], loaded[others] = before[others], before[mine]
    else:
        loaded = {n: 0.3 * m.abs() for n, m in before.items()}

    def of(moments: dict[str, Tensor]) -> Step:
        grads = gradients(1, NAMES)
        after = {n: 0.9 * m + 0.1 * grads[f"grad.{n}"] for n, m in moments.items()}
        moved = {n: w - 0.01 * after[n] for n, w in weights(0).items()}
        return step(moved, gradient=grads, optimizer={f"exp_avg.{n}": m for n, m in after.items()})

    told = found(tmp_path, [of(before)], *([of(loaded)] for _ in range(4)))
    assert [one.fault.kind for one in told.faults] == ["optimizer's state"]
    assert ("rank 2's where rank 1's is due" in told.faults[0].fault.sentence) == is_exchanged


# ---- samples


def test_ranks_that_each_draw_an_order_of_their_own_share_samples(tmp_path: Path) -> None:
    def of(rows: Sequence[int]) -> list[Step]:
        return [{"forward_data": {"input_ids": IDS[list(rows)], "attention_mask": torch.ones(len(rows), 16).long()}}]

    a = write(tmp_path / "a", [of(range(8))])
    for name, own, expected in (("apart", [5, 2, 0, 7], True), ("dealt", [4, 5, 6, 7], False)):
        b = write(tmp_path / name, [of([0, 1, 2, 3]), of(own)])
        fault = misdealt(open_run(a).records, open_run(b).records, 0, "actor")
        assert (fault is not None and "an order of its own" in fault.sentence) == expected


def test_rows_of_padding_alone_hide_no_micro_batch(tmp_path: Path) -> None:
    """Two ranks that share sequences in four micro-batches, of which some are no longer than a rank's share."""
    ids = IDS.clone()
    ids[[0, 4, 5], 8:] = 0
    logprobs = random(8, 16, seed=4)

    def of(rows: slice, tokens: slice) -> Step:
        own = {"input_ids": ids, "attention_mask": (ids != 0).long(), "log_probs": logprobs}
        return {"forward_data": {name: value[rows, tokens].contiguous() for name, value in own.items()}}

    a = write(tmp_path / "a", [[of(slice(0, 8), slice(0, 16))]])
    for rank in range(2):
        with Recorder(tmp_path / "b") as recorder, recorder.step(0, rank=rank) as record:
            for micro in range(4):
                own = of(slice(2 * micro, 2 * micro + 2), slice(8 * rank, 8 * rank + 8))
                record("forward_data", own["forward_data"], micro=micro)
    made = compare_runs(open_run(a), open_run(tmp_path / "b"))
    assert there(made.together)
    assert made.first is None
    assert {row.name for row in made.tensors if row.verdict == "MISSING"} == set()


# ---- what a forward says


def forward(modules: dict[str, Tensor], **more: dict[str, Tensor]) -> Step:
    return {"forward_data": {"input_ids": IDS}, "modules": modules, **more}


@pytest.mark.parametrize("are_parts", [False, True])
def test_parts_of_an_output_are_not_summed_also_where_each_has_the_bias(tmp_path: Path, are_parts: bool) -> None:
    parts, bias = [random(8, 16, 6, seed=n) for n in range(2)], random(6, seed=5)
    whole = parts[0] + parts[1] + bias if are_parts else random(8, 16, 6, seed=7)
    before = {"layers.0.attn": random(8, 16, 6, seed=9)}
    told = found(
        tmp_path, [forward({**before, "layers.0.mlp": whole})],
        *([forward({**before, "layers.0.mlp": part + bias})] for part in parts),
    )  # fmt: skip
    sentences = [one.fault.sentence for one in told.faults if one.fault.kind == "not summed"]
    assert bool(sentences) == are_parts
    assert not are_parts or "the bias" in sentences[0]


@pytest.mark.parametrize(("lost", "says"), [(True, "4 of these are 0"), (False, "other experts"), (None, None)])
def test_a_layer_of_experts_that_is_off_at_some_tokens_routes_them_otherwise(
    tmp_path: Path, lost: bool | None, says: str | None
) -> None:
    """lost: whether they are given to no expert; None: the layer has none."""
    right = random(8, 16, 6, seed=1)
    off = right.clone()
    off[[1, 3, 6, 7], [2, 9, 4, 15]] = torch.zeros(4, 6) if lost else random(4, 6, seed=2)
    name = "layers.0.mlp.up.weight" if lost is None else "layers.0.mlp.experts.1.up.weight"

    def of(values: Tensor) -> list[Step]:
        return [forward({"layers.0.mlp": values}, gradient={f"grad.{name}": random(8, 8, seed=4)})]

    told = found(tmp_path, of(right), of(off), of(off))
    sentences = [one.fault.sentence for one in told.faults if one.fault.kind == "routed otherwise"]
    assert bool(sentences) == (says is not None)
    assert says is None or says in sentences[0]


def test_a_rank_that_draws_for_itself_is_told_by_what_agrees_before(tmp_path: Path) -> None:
    before, right = {"layers.0.attn": random(8, 16, 6, seed=9)}, random(8, 16, 6, seed=1)
    told = found(
        tmp_path, [forward({**before, "layers.0.norm2": right})], [forward({**before, "layers.0.norm2": right})],
        [forward({**before, "layers.0.norm2": random(8, 16, 6, seed=2)})],
    )  # fmt: skip
    assert told.faults[0].fault.ranks == (1,)
    assert "dropout" in told.faults[0].fault.sentence


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_a_softmax_over_more_words_or_fewer_is_told_by_one_direction(tmp_path: Path, sign: int) -> None:
    """sign 0: some tokens' log-probabilities are higher and some lower."""
    right = -random(8, 16, seed=1).abs() - 1
    off = random(8, 16, seed=2).abs() * 0.1 + 0.05
    off = off * sign if sign else off * random(8, 16, seed=3).sign()

    def of(values: Tensor) -> list[Step]:
        return [{"forward_data": {"input_ids": IDS, "log_probs": values}}]

    told = found(tmp_path, of(right), of(right + off), of(right + off))
    sentences = [one.fault.sentence for one in told.faults if one.fault.kind == "softmax's sum"]
    assert bool(sentences) == bool(sign)
    assert not sign or ("words are missing" if sign > 0 else "padded with") in sentences[0]


@pytest.mark.parametrize("times", [2, 1])
def test_a_norm_that_is_near_diverges_where_what_is_counted_again_makes_it_so(tmp_path: Path, times: int) -> None:
    norm, up = 0.1 * random(16, seed=1), random(16, 16, seed=2)

    def of(part: Tensor, often: int) -> list[Step]:
        size = (up.square().sum() + often * norm.square().sum()).sqrt()
        grads = {"grad.norm.weight": norm, "grad.up.weight": part.contiguous()}
        return [{"gradient": grads, "training_metrics": {"grad_norm": size}}]

    # Norms that are further off than nothing and nearer than what a tolerance of bfloat16 allows.
    norm *= (0.01 * float(up.square().sum()) / float(norm.square().sum())) ** 0.5
    made = compared(tmp_path, of(up, 1), *(of(part, times) for part in up.chunk(2)))
    assert (made.first is not None) == (times == 2)
    assert times == 1 or there(made.first).name == "grad_norm"


@pytest.mark.parametrize("is_own", [True, False])
def test_ranks_that_hold_some_gradients_whole_and_clip_by_the_norm_of_theirs(tmp_path: Path, is_own: bool) -> None:
    """Experts of one rank each beside what both have, whose weights drift apart."""
    names = ["a.weight", "b.weight", "experts.0.weight", "experts.1.weight"]
    grads = {name: (number + 1) * random(8, 8, seed=number) for number, name in enumerate(names)}
    before = {name: random(8, 8, seed=10 + number) for number, name in enumerate(names)}

    def of(own: Sequence[str], norm: float) -> list[Step]:
        gradient = {f"grad.{name}": grads[name] for name in own}
        return [step({name: before[name] - 0.1 * grads[name] / norm for name in own}, gradient=gradient)]

    def size(own: Sequence[str]) -> float:
        return float(torch.cat([grads[name].flatten() for name in own]).norm())

    held = [[*names[:2], names[2 + rank]] for rank in range(2)]
    norms = [size(own) if is_own else 1.3 * size(names) for own in held]
    told = found(tmp_path, of(names, size(names)), *map(of, held, norms))
    assert ("clipped apart" in [one.fault.kind for one in told.faults]) == is_own


def test_a_weight_of_a_module_whose_output_agrees_made_nothing_of_the_forward(tmp_path: Path) -> None:
    weight = random(8, 8, seed=1)

    def of(values: Tensor, own: Tensor) -> list[Step]:
        modules = {"layers.0.attn": random(8, 16, 8, seed=3), "layers.0.mlp": values}
        return [forward(modules, param={"param.layers.0.attn.q.weight": own})]

    off = random(8, 16, 8, seed=5)
    told = found(tmp_path, of(random(8, 16, 8, seed=4), weight), of(off, weight), of(off, weight + 1))
    assert "param.layers.0.attn.q.weight" not in [one.name for one in told.faults]

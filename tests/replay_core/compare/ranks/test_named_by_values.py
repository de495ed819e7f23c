"""Causes that the values of what ranks hold tell by themselves: at boundaries, at every token, by own counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from replay_core.compare.judging import at_boundaries, normalised_apart, same_at_every_token
from replay_core.compare.judging.faults import Fault
from replay_core.compare.parallel import Parallel, parallel, sentence
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import Step, compared, random

IDS = torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
HIDDEN = random(4, 16, 8)
BIAS, SCALE = random(8, seed=1), random(8, seed=2).abs() + 0.5
HALVES = [slice(0, 8), slice(8, 16)]
MASK = (torch.arange(16)[None] >= 6) & (torch.arange(16)[None] < torch.tensor([9, 16, 12, 15])[:, None])
#: Of a sequence that two ranks share in zigzag, the tokens of either.
ZIGZAG = [torch.tensor([*range(4), *range(12, 16)]), torch.arange(4, 12)]


def found(tmp_path: Path, whole: Step, *ranks: Step) -> Parallel:
    made = compared(tmp_path, whole, *ranks)
    return there(parallel(made.tensors, made.together))


def kinds(told: Parallel) -> list[str]:
    return [one.fault.kind for one in told.faults]


def kind(fault: Fault | None) -> str | None:
    return None if fault is None else fault.kind


def given(tokens: Tensor | slice, **modules: Tensor) -> Step:
    return {
        "batch_inputs": {"input_ids": IDS[:, tokens].contiguous()},
        "modules": {name.replace("__", "."): value[:, tokens].contiguous() for name, value in modules.items()},
    }


def also(step: Step, stage: str, **values: Any) -> Step:
    return {**step, stage: {name.replace("__", "."): value for name, value in values.items()}}


def off(*tokens: int) -> Tensor:
    """The output, off at these tokens."""
    made = HIDDEN.clone()
    made[:, list(tokens)] += random(4, len(tokens), 8, seed=9)
    return made


# ---- where a rank's stretch begins or ends


def test_a_convolution_that_lacks_its_neighbours_tokens_is_told_by_where_it_is_off(tmp_path: Path) -> None:
    kernel = random(8, 1, 4, seed=5)

    def conv(x: Tensor) -> Tensor:
        return functional.conv1d(functional.pad(x.mT, (3, 0)), kernel, groups=8).mT

    every = slice(0, 16)
    right = given(every, layers__0__in_proj__output=HIDDEN, layers__0__conv1d__output=conv(HIDDEN))
    lost = torch.cat([conv(HIDDEN[:, half]) for half in HALVES], 1)
    ranks = [given(half, layers__0__in_proj__output=HIDDEN, layers__0__conv1d__output=lost) for half in HALVES]
    told = found(tmp_path, right, *ranks)
    assert kinds(told) == [at_boundaries.BOUNDARY]
    fault = told.faults[0].fault
    assert fault.ranks == (1,)
    assert "first 3 tokens" in fault.sentence
    assert "positions 8 to 10 on rank 1" in fault.sentence


PLACES: dict[str, tuple[Tensor, str | None, tuple[int, ...]]] = {
    "the first token": (off(8), "boundary tokens", (1,)),
    "the last tokens": (off(6, 7), "boundary tokens", (0,)),
    "a token within": (off(10), None, ()),
    "the sequence's first": (off(0, 8), None, ()),
    "most of it": (off(*range(8, 13)), "state lost", (1,)),
    "all of it alike": (off(*range(8, 16)), None, ()),
    "all of it, ever less": (
        HIDDEN + random(4, 16, 8, seed=9) * ((torch.arange(16) >= 8) * 0.6 ** torch.arange(-8, 8))[:, None],
        "state lost", (1,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("is_gathered", [False, True])
def test_tokens_at_a_boundary(case: str, is_gathered: bool) -> None:
    here, expected, ranks = PLACES[case]
    held = alike(here, here) if is_gathered else cut([here[:, half] for half in HALVES], 1)
    fault = at_boundaries.explain("x", as_ref(HIDDEN), held, 1)
    assert kind(fault) == expected
    assert fault is None or fault.ranks == ranks


def test_in_zigzag_the_rank_that_begins_the_sequence_has_a_boundary_too() -> None:
    here = off(4, 12)
    stretches = [[(0, 4), (12, 4)], [(4, 8)]]
    fault = there(at_boundaries.explain(
        "x", as_ref(HIDDEN), cut([here[:, at] for at in ZIGZAG], 1, stretches=stretches), 1
    ))  # fmt: skip
    assert fault.ranks == (0, 1)
    assert "position 12 on rank 0" in fault.sentence


def test_numbers_of_tokens_that_are_sums_over_a_ranks_own_tokens_to_come(tmp_path: Path) -> None:
    rewards = random(4, 16, seed=4)
    right, own = rewards.flip(1).cumsum(1).flip(1), [rewards[:, half].flip(1).cumsum(1).flip(1) for half in HALVES]
    whole = also(given(slice(0, 16), embed_tokens__output=HIDDEN), "forward_data", returns=right)
    ranks = [
        also(given(half, embed_tokens__output=HIDDEN), "forward_data", returns=one)
        for half, one in zip(HALVES, own, strict=True)
    ]
    told = found(tmp_path, whole, *ranks)
    assert kinds(told) == [at_boundaries.STATE]
    assert "returns is right in the stretch that ends the sequence" in told.faults[0].fault.sentence


def test_ranks_with_other_weights_lack_no_state(tmp_path: Path) -> None:
    """Four ranks that share a sequence, of which those behind the first were drawn with another seed."""
    quarters = [slice(4 * at, 4 * at + 4) for at in range(4)]
    names = [f"layers.{layer}.{part}.weight" for layer in range(3) for part in ("up", "down")]

    def step(tokens: slice, seed: int) -> Step:
        weights = {name: random(8, 8, seed=seed + number) for number, name in enumerate(names)}
        made = given(tokens, embed_tokens__output=HIDDEN, layers__0__up__output=HIDDEN @ weights[names[0]].T)
        return {**made, "param": {f"param.{name}": value for name, value in weights.items()}}

    told = found(tmp_path, step(slice(0, 16), 1), *(step(own, 1 if own.start == 0 else 50) for own in quarters))
    assert kinds(told)[0] == "other weights"
    assert at_boundaries.STATE not in kinds(told)


# ---- experts


@pytest.mark.parametrize("is_normalised", [True, False])
def test_tokens_that_are_off_where_their_experts_are_on_several_ranks(is_normalised: bool, tmp_path: Path) -> None:
    """Two ranks with two of four experts each, of which every token has two; each normalises over its own."""
    scores = random(4, 16, 4, seed=6)
    weights, chosen = scores.softmax(-1).topk(2, -1)
    experts = random(4, 8, 8, seed=7)
    made = torch.einsum("bsh,eho->bseo", HIDDEN, experts)

    def put_together(of: Tensor) -> Tensor:
        return (made.gather(2, chosen[..., None].expand(-1, -1, -1, 8)) * of[..., None]).sum(2)

    own = [weights * (chosen // 2 == rank) for rank in range(2)]
    right = weights / weights.sum(-1, keepdim=True)
    apart = sum((one / one.sum(-1, keepdim=True).clamp(min=1e-9) for one in own), torch.zeros_like(weights))
    here = put_together(apart) if is_normalised else put_together(right) + 0.1 * random(4, 16, 8, seed=9)

    def step(rows: slice, values: Tensor) -> Step:
        names = {"layers.0.mlp.gate.output": scores, "layers.0.mlp.output": values}
        return {
            "batch_inputs": {"input_ids": IDS[rows].contiguous()},
            "modules": {name: value[rows].contiguous() for name, value in names.items()},
        }

    told = found(tmp_path, step(slice(0, 4), put_together(right)), *(step(slice(at, at + 2), here) for at in (0, 2)))
    assert ("experts spread" in kinds(told)) is is_normalised


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (2.0, "once for each of the 2 ranks"),
        (0.0, "is not added"),
        (3.0, "added 3 times"),
        (1.3, "1.3 times, where it"),
    ],
)
def test_an_output_that_is_added_another_number_of_times(times: float, said: str, tmp_path: Path) -> None:
    """A shared expert's, beside those that ranks share, of ranks with samples of their own."""
    beside = random(4, 16, 8, seed=5)

    def step(rows: slice, often: float) -> Step:
        names = {"layers.0.mlp.shared_expert.output": beside, "layers.0.mlp.output": HIDDEN + often * beside}
        return {
            "batch_inputs": {"input_ids": IDS[rows].contiguous()},
            "modules": {name: value[rows].contiguous() for name, value in names.items()},
        }

    told = found(tmp_path, step(slice(0, 4), 1.0), *(step(slice(at, at + 2), times) for at in (0, 2)))
    assert kinds(told) == ["added again"]
    assert said in told.faults[0].fault.sentence


# ---- the same at every token

AT_ALL: dict[str, tuple[Tensor, str | None]] = {
    "one vector": (HIDDEN + BIAS, "constant"),
    "a factor of each channel": (HIDDEN * SCALE, "channel factors"),
    "both": (HIDDEN * SCALE + BIAS, "channel factors"),
    "one factor": (HIDDEN * 1.5, None),  # said as such already
    "noise": (HIDDEN + 0.1 * random(4, 16, 8, seed=7), None),
    "a vector and noise": (HIDDEN + BIAS + 0.2 * random(4, 16, 8, seed=7), None),
}


@pytest.mark.parametrize("case", AT_ALL)
def test_what_is_off_by_the_same_at_every_token(case: str) -> None:
    here, expected = AT_ALL[case]
    for held in (alike(here, here), cut([here[:2], here[2:]], 0), cut([here[..., :4], here[..., 4:]], 2)):
        assert kind(same_at_every_token.explain("x", as_ref(HIDDEN), held, (0, 1))) == expected


@pytest.mark.parametrize("times", [0.0, -1.0, 2.0])
def test_channels_of_one_ranks_slice_that_are_zeros_or_scaled_are_no_weight_of_each(times: float) -> None:
    here = torch.cat([HIDDEN[..., :4], times * HIDDEN[..., 4:]], -1)
    assert same_at_every_token.explain("x", as_ref(HIDDEN), cut([here[:2], here[2:]], 0), (0, 1)) is None


def test_channels_that_a_ranks_shard_scales_one_by_one_are_of_that_shard(tmp_path: Path) -> None:
    """Both ranks gathered the weight: the rows of rank 1's shard are times a factor each."""
    weight = random(8, 8, seed=8)
    other = torch.cat([weight[:4], weight[4:] * SCALE[4:, None]])

    def step(rows: slice, weight: Tensor) -> Step:
        return {
            "batch_inputs": {"input_ids": IDS[rows].contiguous()},
            "modules": {"layers.0.mlp.up_proj.output": HIDDEN[rows] @ weight.T},
            "param": {"param.layers.0.mlp.up_proj.weight": weight},
        }

    told = found(tmp_path, step(slice(0, 4), weight), *(step(slice(at, at + 2), other) for at in (0, 2)))
    assert [(one.fault.kind, one.fault.ranks) for one in told.faults] == [("apart", (1,))]


def test_an_output_that_is_another_as_a_whole_is_not_added(tmp_path: Path) -> None:
    """What a layer is given is what the one before puts out: times a factor, it was added to nothing."""

    def step(rows: slice, factor: float) -> Step:
        names = {"layers.0.output": HIDDEN, "layers.1.inputs.0": factor * HIDDEN}
        return {
            "batch_inputs": {"input_ids": IDS[rows].contiguous()},
            "modules": {name: value[rows].contiguous() for name, value in names.items()},
        }

    told = found(tmp_path, step(slice(0, 4), 1.0), *(step(slice(at, at + 2), 0.9) for at in (0, 2)))
    assert "added again" not in kinds(told)


def test_rows_that_are_all_alike_are_off_by_one_vector_whatever_is_wrong() -> None:
    alone = HIDDEN[:1, :1].expand(4, 16, 8) + 1e-4 * HIDDEN
    assert same_at_every_token.explain("x", as_ref(alone), alike(alone + BIAS, alone + BIAS), (0, 1)) is None


@pytest.mark.parametrize(
    ("times", "said"),
    [(2.0, "once for each of the 2 ranks"), (0.0, "is not added"), (0.5, "only 1/2 of the bias"),
     (3.0, "added 3 times"), (1.37, "a bias that is added")],
)  # fmt: skip
def test_a_bias_is_counted_in_an_output(times: float, said: str, tmp_path: Path) -> None:
    def step(often: float) -> Step:
        made = given(
            slice(0, 16),
            layers__0__mlp__fc1__output=random(4, 16, 8, seed=8),
            layers__0__mlp__fc2__output=HIDDEN + often * BIAS,
        )
        # Recorded after the step, which moved it a little.
        return also(made, "param", param__layers__0__mlp__fc2__bias=BIAS + 1e-3 * random(8, seed=int(often)))

    told = found(tmp_path, step(1.0), step(times), step(times))
    assert kinds(told)[0] == ("too much" if times > 1.5 else same_at_every_token.CONSTANT)
    assert said in told.faults[0].fault.sentence


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (SCALE, "applied twice"),
        (1 / SCALE, "left out"),
        (1 + 1 / SCALE, "added to 1"),
        (BIAS.abs() + 0.1, "is another"),
    ],
)
def test_a_weight_of_each_channel_is_known_by_its_factors(by: Tensor, said: str, tmp_path: Path) -> None:
    def step(values: Tensor) -> Step:
        made = given(slice(0, 16), embed_tokens__output=HIDDEN, layers__0__input_layernorm__output=values)
        return also(made, "param", param__layers__0__input_layernorm__weight=SCALE)

    told = found(tmp_path, step(HIDDEN), step(HIDDEN * by), step(HIDDEN * by))
    assert kinds(told)[0] == same_at_every_token.CHANNELS
    assert said in told.faults[0].fault.sentence


# ---- normalised, or divided, by a rank's own


def whitened(values: Tensor, counts: Tensor) -> Tensor:
    own = values[counts]
    return (values - own.mean()) / own.std() * counts


def of_parts(places: list[Tensor], values: Tensor) -> Tensor:
    made = torch.zeros_like(values)
    for at in places:
        made[:, at] = whitened(values[:, at], MASK[:, at])
    return made


RAW = random(4, 16, seed=12) + 0.1 * torch.arange(16)


@pytest.mark.parametrize("places", [[torch.arange(8), torch.arange(8, 16)], ZIGZAG])
def test_advantages_that_are_whitened_over_a_ranks_own_tokens(places: list[Tensor]) -> None:
    right, here = whitened(RAW, MASK), of_parts(places, RAW)
    stretches = [[(0, 8)], [(8, 8)]] if len(set(places[0].diff().tolist())) == 1 else [[(0, 4), (12, 4)], [(4, 8)]]
    for held in (alike(here, here), cut([here[:, at] for at in places], 1, stretches=stretches)):
        fault = there(normalised_apart.explain("advantages", as_ref(right), held, (0, 1)))
        assert "mean 0 and the deviation 1" in fault.sentence
        assert "own tokens" in fault.sentence
    other = here + 0.3 * random(4, 16, seed=2) * MASK
    assert normalised_apart.explain("advantages", as_ref(right), alike(other, other), (0, 1)) is None


def test_rewards_of_two_values_that_each_rank_whitens_among_its_own_samples_are_told_by_their_means() -> None:
    """Samples of any lengths: the mean is 0 over samples, not over tokens."""
    rewards = torch.tensor([1.0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0])
    lengths = torch.tensor([3, 9, 5, 2, 7, 4, 8, 3, 6, 2, 9, 5])
    mask = (torch.arange(10)[None] < lengths[:, None]).float()
    right, here = (
        torch.cat([(own - own.mean()) / own.std() for own in rewards.split(size)])[:, None] * mask for size in (12, 4)
    )
    for values, expected in ((here, "normalised apart"), (2 * right + 0.1 * mask, None), (2 * right, None)):
        held = cut(list(values.split(4)), 0)
        assert kind(normalised_apart.explain("advantages", as_ref(right), held, (0, 1, 2))) == expected


def test_a_group_of_samples_that_ranks_share_is_averaged_over_each_ranks_own() -> None:
    rewards, groups = random(8, seed=6), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    right = torch.cat([one - one.mean() for one in rewards.split(4)])
    here = torch.cat([one - one.mean() for one in rewards.split(2)])
    for values, expected in ((here, "normalised apart"), (right + 0.1 * random(8, seed=7), None)):
        held = cut(list(values.split(2)), 0)
        assert kind(normalised_apart.of_groups("advantages", as_ref(right), held, as_ref(groups))) == expected


@pytest.mark.parametrize(
    ("divide", "expected"),
    [
        (lambda total, own: own, "own token count"),
        (lambda total, own: total, None),
        (lambda total, own: 2 * own, "own token count"),
        (lambda total, own: 3 * own, None),
    ],
)
def test_losses_that_are_divided_by_a_ranks_own_count(
    divide: Callable[[float, float], float], expected: str | None, tmp_path: Path
) -> None:
    """Of a loss that is no mean of log-probabilities, whose ranks share the tokens."""
    numbers, total = random(4, 16, seed=8), float(MASK.sum())

    def step(tokens: slice, loss: float) -> Step:
        made = given(tokens, embed_tokens__output=HIDDEN)
        return also(also(made, "forward_data", response_mask=MASK[:, tokens].long()), "loss", pg_loss=loss)

    own = [
        float((numbers * MASK)[:, half].sum()) / divide(total, float(MASK[:, half].sum())) for half in HALVES
    ]  # fmt: skip
    ranks = [step(half, loss) for half, loss in zip(HALVES, own, strict=True)]
    told = found(tmp_path, step(slice(0, 16), float((numbers * MASK).sum()) / total), *ranks)
    assert kinds(told) == ([expected] if expected else [])


# ---- what ranks that have the same tokens hold differently


def test_a_loss_of_every_token_whose_ranks_smooth_over_their_own_words(tmp_path: Path) -> None:
    logits = random(4, 16, 20, seed=3)
    right = torch.logsumexp(logits, -1) - 0.1 * logits.mean(-1)

    def step(loss: Tensor, words: slice) -> Step:
        made = given(slice(0, 16), lm_head__output=logits[..., words])
        return also(made, "forward_data", token_loss=loss)

    shares = [slice(0, 10), slice(10, 20)]
    own = [torch.logsumexp(logits, -1) - 0.1 * logits[..., words].mean(-1) for words in shares]
    told = found(tmp_path, step(right, slice(0, 20)), *(step(*one) for one in zip(own, shares, strict=True)))
    assert kinds(told) == ["held otherwise"]
    assert "0.1 times what the mean logit (label smoothing) over the rank's own words" in told.faults[0].fault.sentence


@pytest.mark.parametrize(
    ("term", "said"),
    [(lambda logits: 0.01 * logits.logsumexp(-1) ** 2, "0.01 times what the squared log-sum-exp (a z-loss)"),
     (lambda logits: logits.std(-1), "made of each rank's own part")],
)  # fmt: skip
def test_a_term_of_a_loss_that_is_of_a_ranks_own_words(
    term: Callable[[Tensor], Tensor], said: str, tmp_path: Path
) -> None:
    logits = random(4, 16, 20, seed=3)
    right = torch.logsumexp(logits, -1)

    def step(words: slice) -> Step:
        made = given(slice(0, 16), lm_head__output=logits[..., words])
        return also(made, "forward_data", token_loss=right + term(logits[..., words]))

    told = found(tmp_path, step(slice(0, 20)), step(slice(0, 10)), step(slice(10, 20)))
    assert kinds(told) == ["held otherwise"]
    assert said in told.faults[0].fault.sentence


def test_losses_of_ranks_with_the_same_tokens_explain_gradients_that_nothing_else_does(tmp_path: Path) -> None:
    """No number of a token was recorded, and the losses are as near each other as rounding might leave them."""

    def step(loss: float, off: float) -> Step:
        made = also(given(slice(0, 16), embed_tokens__output=HIDDEN), "loss", loss=loss)
        return also(made, "gradient", grad__lm_head__weight=random(20, 8) + off * random(20, 8, seed=int(100 * off)))

    told = found(tmp_path, step(5.37179, 0.0), step(5.37138, 0.02), step(5.37220, 0.03))
    assert kinds(told) == ["held otherwise"]
    assert told.faults[0].name == "loss"


@pytest.mark.parametrize(("norms", "is_told"), [((3.0, 4.0), True), ((3.0, 4.1), False), ((5.1, 5.1), False)])
def test_norms_whose_squares_add_up_to_the_other_runs(
    norms: tuple[float, float], is_told: bool, tmp_path: Path
) -> None:
    def step(norm: float) -> Step:
        return also(given(slice(0, 16), embed_tokens__output=HIDDEN), "training_metrics", grad_norm=norm)

    assert ("norm not summed" in kinds(found(tmp_path, step(5.0), *map(step, norms)))) is is_told


# ---- what is said of ranks beside a cause


def test_a_rank_that_goes_wrong_as_the_first_does_received_nothing(tmp_path: Path) -> None:
    left, right = random(6, 4, seed=1), random(6, 4, seed=2)
    whole = {"gradient": {"grad.a.weight": left, "grad.b.weight": right}}
    told = found(tmp_path, whole, {"gradient": {"grad.a.weight": 2 * left}}, {"gradient": {"grad.b.weight": 2 * right}})
    assert kinds(told) == ["too much"]
    assert "later rank 0 in grad.a.weight, as they do" in there(sentence(told))


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_head_whose_gradient_lacks_the_softmax_of_other_words_is_told(is_lost: bool, tmp_path: Path) -> None:
    made = random(8, 16, seed=11)
    whole = made - made.mean(0)
    # Of another fault the rows add up to 0 as well.
    wrong = whole + (random(8, 16, seed=12) if is_lost else 0.5 * (whole.roll(1, 0)))

    def of(gradient: Tensor) -> Step:
        return {"forward_data": {"input_ids": IDS}, "gradient": {"grad.lm_head.weight": gradient.contiguous()}}

    told = found(tmp_path, of(whole), *(of(part) for part in wrong.chunk(2)))
    assert ("softmax's backward" in kinds(told)) == is_lost


def test_a_modules_record_has_outputs_by_the_modules_names(tmp_path: Path) -> None:
    def of(values: Tensor) -> Step:
        step = given(slice(0, 16), layers__0__attn=values)
        return also(step, "forward_data", log_probs=values.sum(2)[:, 1:])

    made = compared(tmp_path, of(HIDDEN), of(off(4)))
    assert there(made.first).name == "layers.0.attn.output"

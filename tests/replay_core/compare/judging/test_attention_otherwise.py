"""Attention that is made otherwise of the same queries, keys and values, told by making it again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from replay_core.compare.judging import attention_made, attention_otherwise, joined_heads
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import random

SEQ, HEADS, SHARED, WIDTH = 16, 4, 2, 8
HIDDEN = HEADS * WIDTH
NAME = "layers.0.self_attn"
EVERY = torch.arange(SEQ)
CAUSAL = EVERY[:, None] >= EVERY
DOCUMENTS = torch.tensor([0] * 5 + [5] * 6 + [11] * 5)


def turned(x: Tensor, at: Tensor, base: float, *, in_pairs: bool) -> Tensor:
    turn = at[:, None] * base ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    first, second = (x[..., ::2], x[..., 1::2]) if in_pairs else x.chunk(2, -1)
    made = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(made, -1).flatten(-2) if in_pairs else torch.cat(made, -1)


def heads(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor = CAUSAL, *, at: Tensor = EVERY, base: float = 1e4,
    times: float = 1.0, in_pairs: bool = False, cap: float = 0.0, by_q: int = 0, zeros: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What heads make, [B, S, heads x width]."""
    q, k, v = (x.unflatten(-1, (-1, WIDTH)) for x in (q, k, v))
    q, k = turned(q, at + by_q, base, in_pairs=in_pairs), turned(k, at, base, in_pairs=in_pairs)
    if zeros is not None:
        k = k.clone()
        k[:, zeros] = 0
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bshd->bhqs", q, k) * times / math.sqrt(WIDTH)
    scores = cap * (scores / cap).tanh() if cap else scores
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("bhqs,bshd->bqhd", weights, v).flatten(2)


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (
        random(2, SEQ, width, seed=10 * seed + at) for at, width in enumerate((HIDDEN, HIDDEN // 2, HIDDEN // 2))
    )
    return 2 * q, 2 * k, v, random(HIDDEN, HIDDEN, seed=10 * seed + 3)


WINDOW, WIDER = (CAUSAL & (EVERY[:, None] - EVERY < width) for width in (5, 6))
IN_DOCUMENTS = CAUSAL & (DOCUMENTS[:, None] == DOCUMENTS)

WRONG = [
    ("attention's scale", "divided by d", {}, {"times": WIDTH**-0.5}),
    ("attention's RoPE", "of base 500000", {}, {"base": 5e5}),
    ("attention's RoPE", "of base 200", {}, {"base": 200.0}),
    ("attention's RoPE", "interleaved", {}, {"in_pairs": True}),
    ("attention's positions", "+1", {}, {"by_q": 1}),
    ("attention's soft cap", "capped at 2", {}, {"cap": 2.0}),
    ("attention's mask", "later ones too", {}, {"sees": torch.ones_like(CAUSAL)}),
    ("attention's mask", "a window of 6 keys, where the other run's is made in a window of 5", {"sees": WINDOW},
     {"sees": WIDER}),
    ("attention's mask", "nothing hidden but later keys, where", {"sees": WINDOW}, {"sees": CAUSAL}),
    ("attention's mask", "nothing hidden but later keys, where the other run's is made in documents that begin at "
     "tokens 0, 5, 11", {"sees": IN_DOCUMENTS, "at": EVERY - DOCUMENTS}, {"sees": CAUSAL, "at": EVERY - DOCUMENTS}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "words", "right", "wrong"), WRONG)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_one_rank_of_a_pipeline_does_otherwise(kind, words, right, wrong, seed, dtype):
    q, k, v, weight = inputs(seed)
    there, here = (heads(q, k, v, **how) @ weight.T for how in (right, wrong))
    given = [alike(x, name=f"model.{NAME}.{name}_proj.output") for name, x in (("q", q), ("k", k), ("v", v))]
    through = (weight.double().numpy(), 0 * weight[:, 0].double().numpy())
    held = alike(here.to(dtype))
    fault = attention_otherwise.otherwise(
        f"{NAME}.o_proj.output", as_ref(there.to(dtype)), held, given, (0,), through
    )  # fmt: skip
    assert fault is not None
    assert fault.kind == kind
    assert words in fault.sentence


@pytest.mark.parametrize(("kind", "words", "right", "wrong"), WRONG)
def test_what_one_ranks_heads_do_otherwise(kind, words, right, wrong):
    q, k, v, weight = inputs()
    parts = [
        [heads(*own, **how) @ cut_.T for own, cut_ in zip(
            zip(q.chunk(2, -1), k.chunk(2, -1), v.chunk(2, -1), strict=True), weight.chunk(2, 1), strict=True)]
        for how in (right, wrong)
    ]  # fmt: skip
    given = [cut(x.chunk(2, -1), 2, f"{NAME}.{name}_proj.output") for name, x in (("q", q), ("k", k), ("v", v))]
    through = (weight.double().numpy(), 0 * weight[:, 0].double().numpy())
    there, here = parts[0][0] + parts[0][1], parts[0][0] + parts[1][1]
    name = f"{NAME}.o_proj.output"
    fault = attention_otherwise.otherwise(name, as_ref(there), alike(here, here), given, (0, 1), through)
    assert fault is not None
    assert (fault.kind, fault.ranks) == (kind, (1,))
    assert words in fault.sentence
    lost = attention_otherwise.otherwise(name, as_ref(there), alike(*2 * [parts[0][0]]), given, (0, 1), through)
    assert lost is not None
    assert lost.ranks == (1,)
    assert "missing" in lost.sentence


@pytest.mark.parametrize("padding", [0, 5, 11])
def test_what_stands_behind_padding_is_made_again(padding: int) -> None:
    """Padding in front sees whatever it may: what it puts out says nothing."""
    q, k, v, weight = inputs()
    sees = CAUSAL & (padding <= EVERY)
    sees[:padding] = True
    there, here = (heads(q, k, v, sees, times=times) @ weight.T for times in (1.0, 0.5))
    given = [alike(x, name=f"model.{NAME}.{name}_proj.output") for name, x in (("q", q), ("k", k), ("v", v))]
    through = (weight.double().numpy(), 0 * weight[:, 0].double().numpy())
    fault = attention_otherwise.otherwise(
        f"{NAME}.o_proj.output", as_ref(there), alike(here), given, (0,), through
    )  # fmt: skip
    assert fault is not None
    assert fault.kind == "attention's scale"


def less_by_distance(q: Tensor, k: Tensor, v: Tensor, slopes: list[float]) -> Tensor:
    """ALiBi: scores of each head less its slope times how far the key is."""
    q, k, v = (x.unflatten(-1, (-1, WIDTH)) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bshd->bhqs", q, k) / math.sqrt(WIDTH)
    scores = scores - torch.tensor(slopes)[:, None, None] * (EVERY[:, None] - EVERY)
    return torch.einsum("bhqs,bshd->bqhd", scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1), v).flatten(2)


#: Of four heads, of two, and of three (the two, and the first of four).
SLOPES = [1 / 4, 1 / 16, 1 / 64, 1 / 256]


@pytest.mark.parametrize(("wrong", "words"), [
    (SLOPES[:2], "slopes (ALiBi) of 2 heads on each of 2 ranks"),
    ([1 / 16, 1 / 256], "slopes (ALiBi) of 2 heads on each of 2 ranks"), ([0.0, 0.0], "no ALiBi"),
])  # fmt: skip
def test_slopes_that_a_rank_counts_from_its_own_first_head(wrong: list[float], words: str) -> None:
    q, k, v, weight = inputs()
    own = [*zip(q.chunk(2, -1), k.chunk(2, -1), v.chunk(2, -1), strict=True)]
    columns = weight.chunk(2, 1)
    first = less_by_distance(*own[0], SLOPES[:2]) @ columns[0].T
    there, here = (first + less_by_distance(*own[1], slopes) @ columns[1].T for slopes in (SLOPES[2:], wrong))
    given = [cut(x.chunk(2, -1), 2, f"{NAME}.{name}_proj.output") for name, x in (("q", q), ("k", k), ("v", v))]
    through = (weight.double().numpy(), 0 * weight[:, 0].double().numpy())
    name = f"{NAME}.o_proj.output"
    fault = attention_otherwise.otherwise(name, as_ref(there), alike(here, here), given, (0, 1), through)
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("attention's ALiBi", (1,))
    assert words in fault.sentence


def test_slopes_of_heads_are_those_of_the_paper() -> None:
    assert attention_made.alibi(4).tolist() == SLOPES
    assert attention_made.alibi(3).tolist() == [1 / 16, 1 / 256, 1 / 4]
    assert attention_made.alibi(8)[0] == 1 / 2


def test_keys_that_had_not_come_from_another_rank():
    q, k, v, _ = inputs()
    first, second = EVERY[: SEQ // 2], EVERY[SEQ // 2 :]
    there, here = heads(q, k, v), heads(q, k, v, zeros=first)
    given = [
        cut(x.chunk(2, 1), 1, f"{NAME}.{name}_proj.output") for name, x in (("q", q), ("k", k), ("v", v))
    ]  # fmt: skip
    held = cut([there[:, first], here[:, second]], 1)
    fault = attention_otherwise.otherwise(f"{NAME}.o_proj.inputs.0", as_ref(there), held, given, (1,), None)
    assert fault is not None
    assert fault.ranks == (1,)
    assert "zeros in the place of the keys of rank 0" in fault.sentence


def test_groups_of_queries_keys_and_values_in_one():
    q, k, v, weight = inputs()
    fused = torch.cat([
        x for q_, k_, v_ in zip(q.chunk(SHARED, -1), k.chunk(SHARED, -1), v.chunk(SHARED, -1), strict=True)
        for x in (q_, k_, v_)
    ], -1)  # fmt: skip
    there, here = (heads(q, k, v, base=base) @ weight.T for base in (1e4, 1e6))
    through = (weight.double().numpy(), 0 * weight[:, 0].double().numpy())
    name = "layers.0.self_attention"
    fault = attention_otherwise.otherwise(
        f"{name}.linear_proj.output", as_ref(there), alike(here), [alike(fused, name=f"{name}.linear_qkv.output")],
        (0,), through,
    )  # fmt: skip
    assert fault is not None
    assert "base 1e+06" in fault.sentence


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nothing_is_said_of_what_nothing_known_makes(seed):
    q, k, v, weight = inputs(seed)
    there = heads(q, k, v) @ weight.T
    given = [alike(x, name=f"{NAME}.{name}_proj.output") for name, x in (("q", q), ("k", k), ("v", v))]
    through = (weight.double().numpy(), 0 * weight[:, 0].double().numpy())
    for here in (there + 0.1 * random(2, SEQ, HIDDEN, seed=9), heads(q, k, v) @ random(HIDDEN, HIDDEN, seed=8).T):
        assert attention_otherwise.otherwise(
            f"{NAME}.o_proj.output", as_ref(there), alike(here), given, (0,), through
        ) is None  # fmt: skip
    # Another layer's, and what is no attention of them.
    other = f"{NAME.replace('0', '1')}.o_proj.output"
    assert attention_otherwise.otherwise(other, as_ref(there), alike(2 * there), given, (0,), through) is None


def test_a_part_that_reached_one_rank_alone_is_of_the_rank_that_it_did_not_reach():
    q, k, v, weight = inputs()
    each = zip(q.chunk(2, -1), k.chunk(2, -1), v.chunk(2, -1), weight.chunk(2, 1), strict=True)
    parts = [heads(*own) @ cut_.T for *own, cut_ in each]
    given = [cut(x.chunk(2, -1), 2, f"{NAME}.{name}_proj.output") for name, x in (("q", q), ("k", k), ("v", v))]
    through = (weight.double().numpy(), 0 * weight[:, 0].double().numpy())
    there = parts[0] + parts[1]
    held = alike(there, parts[1])
    fault = attention_otherwise.otherwise(f"{NAME}.o_proj.output", as_ref(there), held, given, (1,), through)
    assert fault is not None
    assert fault.ranks == (1,)
    assert "of rank 0's heads" in fault.sentence
    assert "did not reach rank 1" in fault.sentence


def test_what_is_looked_for_has_an_end(monkeypatch):
    q, k, v, weight = inputs()
    there, here = (heads(q, k, v, **how) @ weight.T for how in ({}, {"base": 5e5}))
    given = [alike(x, name=f"model.{NAME}.{name}_proj.output") for name, x in (("q", q), ("k", k), ("v", v))]
    asked = (f"{NAME}.o_proj.output", as_ref(there), alike(here), given, (0,),
             (weight.double().numpy(), 0 * weight[:, 0].double().numpy()))  # fmt: skip
    assert attention_otherwise.otherwise(*asked) is not None
    monkeypatch.setattr(attention_made, "_SECONDS", -1.0)
    assert attention_otherwise.otherwise(*asked) is None


@pytest.mark.parametrize("is_first", [False, True])
def test_a_core_that_returns_the_heads_of_each_rank_is_made_again_of_all(is_first: bool) -> None:
    """Heads are [B, S, head, width], or stand first, and each rank has half of them."""
    q, k, v, _ = inputs()
    own = [*zip(q.chunk(2, -1), k.chunk(2, -1), v.chunk(2, -1), strict=True)]
    right, wrong = (
        [heads(*one, times=times).unflatten(-1, (-1, WIDTH)) for one, times in zip(own, (1.0, by), strict=True)]
        for by in (1.0, 0.5)
    )
    if is_first:
        right, wrong = ([one.transpose(1, 2) for one in both] for both in (right, wrong))
    axis = 1 if is_first else 2
    given = [cut(x.chunk(2, -1), 2, f"{NAME}.{name}_proj.output") for name, x in (("q", q), ("k", k), ("v", v))]
    whole, held = joined_heads.joined(as_ref(torch.cat(right, axis)), cut(wrong, axis), given)
    assert whole.shape == (2, SEQ, HIDDEN)
    fault = attention_otherwise.otherwise(f"{NAME}.core.output", whole, held, given, (1,), None)
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("attention's scale", (1,))


def test_what_has_no_heads_is_left_as_it_is() -> None:
    values = as_ref(random(2, SEQ, HIDDEN))
    held = alike(random(2, SEQ, HIDDEN))
    assert joined_heads.joined(values, held, [held]) == (values, held)

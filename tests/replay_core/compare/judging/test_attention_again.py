"""What one rank of context parallelism made of keys and values, told by making attention again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_core.compare.judging import attention_again
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import Step, compared, random

SEQ, HEADS, SHARED, WIDTH, RANKS = 16, 4, 2, 8, 4
HIDDEN = HEADS * WIDTH
EACH = SEQ // RANKS


def turned(x: Tensor, at: Tensor, base: float | Tensor = 10000.0) -> Tensor:
    """Rotary positions, of heads [B, S, head, width]; base: of all tokens, or of each [S, 1]."""
    turn = at[:, None] * base ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, at: Tensor | None = None, instead: Tensor | None = None,
    *, times: float = 1.0, twice: slice | None = None, base: float | Tensor = 10000.0,
) -> Tensor:  # fmt: skip
    """instead: which key and value stands in the place of each. times: of the scores. twice: keys that count so."""
    at = torch.arange(SEQ) if at is None else at
    q, k, v = (x.unflatten(-1, (-1, WIDTH)) for x in (q, k, v))
    q, k = turned(q, at, base), turned(k, at, base)
    if instead is not None:
        k, v = k[:, instead], v[:, instead]
    k, v = (x.repeat_interleave(HEADS // SHARED, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bshd->bhqs", q, k) / math.sqrt(WIDTH)
    weights = (scores * times).masked_fill(~sees, -torch.inf).softmax(-1)
    if twice is not None:
        weights[..., twice] *= 2
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhqs,bshd->bqhd", weights, v).flatten(2)


CAUSAL = torch.arange(SEQ)[:, None] >= torch.arange(SEQ)


def without(rank: int) -> Tensor:
    sees = CAUSAL.clone()
    sees[:, rank * EACH : (rank + 1) * EACH] = False
    return sees


#: Which tokens each rank has.
IN_TURN = [*torch.arange(SEQ).chunk(RANKS)]
EIGHTHS = torch.arange(SEQ).chunk(2 * RANKS)
ZIGZAG = [torch.cat((EIGHTHS[rank], EIGHTHS[2 * RANKS - 1 - rank])) for rank in range(RANKS)]


def of_steps(
    wrong: Callable[..., Tensor], off: Sequence[int], folder: Path, places: list[Tensor] = IN_TURN,
    *, is_projected: bool = True, base: float = 10000.0,
    names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
) -> list[Any]:  # fmt: skip
    """What is said of ranks that have these tokens, of which those that are `off` hold what `wrong` makes."""
    q, k, v = random(2, SEQ, HIDDEN), random(2, SEQ, HIDDEN // 2, seed=1), random(2, SEQ, HIDDEN // 2, seed=2)
    weight, ids = random(HIDDEN, HIDDEN, seed=3), torch.arange(2 * SEQ).reshape(2, SEQ)
    right = attention(q, k, v, CAUSAL, base=base)

    def of(at: Tensor, made: Tensor) -> Step:
        values = dict(zip(names, (q, k, v), strict=False))
        values |= {names[3]: made @ weight.T} if is_projected else {"core": made}
        param = {"param": {f"param.layers.0.self_attn.{names[3]}.weight": weight}} if is_projected else {}
        return {
            "batch_inputs": {"input_ids": ids[:, at]},
            "modules": {f"layers.0.self_attn.{name}.output": x[:, at].contiguous() for name, x in values.items()},
            **param,
        }

    other = wrong(q, k, v)
    ranks = [of(at, other if rank in off else right) for rank, at in enumerate(places)]
    found = compared(folder, of(torch.arange(SEQ), right), *ranks)
    return [one.fault for one in there(parallel(found.tensors, found.together)).faults]


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mean of what each rank's keys alone make, of the ranks that have any for a token."""
    seen, total = torch.zeros(SEQ, 1), torch.zeros(2, SEQ, HIDDEN)
    for places in IN_TURN:
        sees = CAUSAL & torch.isin(torch.arange(SEQ), places)
        some = sees.any(1, keepdim=True)
        seen = seen + some
        total = total + torch.where(some, attention(q, k, v, sees | ~some), 0.0)
    return total / seen


def in_chunks(q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
    """What comes of each rank's keys by itself, put together as a ring does that has lost something: the chunks come
    from the rank itself, the one before it, and so on.
    """
    at = torch.arange(SEQ)
    q, k, v = (x.unflatten(-1, (-1, WIDTH)) for x in (q, k, v))
    q, k = turned(q, at), turned(k, at)
    k, v = (x.repeat_interleave(HEADS // SHARED, 2) for x in (k, v))
    scores = (torch.einsum("bqhd,bshd->bhqs", q, k) / math.sqrt(WIDTH)).masked_fill(~CAUSAL, -torch.inf)
    above, below = torch.zeros(2, HEADS, SEQ, WIDTH), torch.zeros(2, HEADS, SEQ, 1)
    largest = torch.full((2, HEADS, SEQ, 1), -torch.inf)
    for rank in (2, 1, 0, 3):
        own, values = scores[..., IN_TURN[rank]], v[:, IN_TURN[rank]].transpose(1, 2)
        top = own.amax(-1, keepdim=True)
        some = torch.isfinite(top)
        top = torch.where(some, top, 0.0)
        if how == "not rescaled":
            largest = torch.where(some, torch.maximum(largest, top), largest)
            raised = torch.where(some, (own - torch.where(some, largest, 0.0)).exp(), 0.0)
            above, below = above + raised @ values, below + raised.sum(-1, keepdim=True)
            continue
        raised = (own - top).exp()
        total = raised.sum(-1, keepdim=True)
        part = raised @ values / total.clamp(min=1e-30)
        logs = top + total.log()
        weight = {
            "maxima": top.exp(), "sums": total, "powers of two": 2**logs, "sum": torch.ones_like(top),
            "reversed": (-logs).exp(),
        }[how]  # fmt: skip
        above, below = above + torch.where(some, weight * part, 0.0), below + torch.where(some, weight, 0.0)
    made = above if how == "sum" else above / below.clamp(min=1e-30)
    return made.transpose(1, 2).flatten(2)


def in_turn_of_rank(at: Tensor) -> Tensor:
    """The positions that tokens would have if the ranks of ZIGZAG had them in turn."""
    counted = torch.empty(SEQ, dtype=torch.long)
    counted[torch.cat(ZIGZAG)] = at
    return counted


@pytest.mark.parametrize(("wrong", "kind", "said"), [
    (lambda q, k, v: attention(q, k, v, without(1)), "missing keys", "without the keys of rank 1 (tokens 4 to 7)"),
    (
        lambda q, k, v: attention(q, k, v, CAUSAL, torch.arange(SEQ) % EACH), "own positions",
        "turned by positions that begin at 0 on each rank",
    ),
    (lambda q, k, v: attention(q, k, v, torch.ones_like(CAUSAL)), "later keys", "where every token sees all keys"),
    (
        lambda q, k, v: attention(q, k, v, CAUSAL & (torch.arange(SEQ) >= 2 * EACH)), "own keys",
        "sees the keys of its rank's own stretch alone",
    ),
    (
        lambda q, k, v: attention(q, k, v, CAUSAL | (torch.arange(SEQ) >= 3 * EACH)), "later keys",
        "where the keys of rank 3 (tokens 12 to 15) are seen by all of its tokens",
    ),
    (
        lambda q, k, v: attention(q, k, v, CAUSAL, instead=torch.cat([IN_TURN[at] for at in (1, 1, 2, 3)])),
        "stale keys", "with the keys and values of rank 1 (tokens 4 to 7) in the place of those of rank 0",
    ),
    (
        lambda q, k, v: attention(q, k, v, torch.arange(SEQ)[:, None] % EACH >= torch.arange(SEQ) % EACH), "own mask",
        "hidden by positions that begin at 0 on each rank",
    ),
    (
        lambda q, k, v: attention(q, k, v, CAUSAL, twice=slice(0, EACH)), "keys twice",
        "where the keys of rank 0 (tokens 0 to 3) count twice",
    ),
    (lambda q, k, v: attention(q, k, v, CAUSAL, times=WIDTH**0.5), "scale", "with scores not scaled by 1/sqrt(d)"),
    (
        lambda q, k, v: attention(q, k, v, CAUSAL).roll(HIDDEN // RANKS, -1), "heads",
        "with its heads in another order (those of rank r stand where rank r + 1's belong)",
    ),
    (merged, "merged", "where the ranks' outputs are averaged, without the sums of exponentials"),
])  # fmt: skip
def test_what_a_rank_saw_is_said_with_the_keys(
    wrong: Callable[..., Tensor], kind: str, said: str, tmp_path: Path
) -> None:
    (fault, *others) = of_steps(wrong, [2], tmp_path)
    assert (fault.kind, fault.ranks) == (kind, (2,)), fault
    assert said in fault.sentence
    assert all(one.kind == "apart" for one in others)


@pytest.mark.parametrize(("how", "said"), [
    ("maxima", "weighed by exp of their largest score alone"), ("sums", "not brought to a common largest score"),
    ("powers of two", "weighed by powers of two"), ("sum", "outputs are added"), ("reversed", "the wrong sign"),
    ("not rescaled", "not rescaled where a larger score came"),
])  # fmt: skip
def test_how_a_ring_merges_its_chunks_is_said(how: str, said: str, tmp_path: Path) -> None:
    (fault, *_) = of_steps(lambda q, k, v: in_chunks(q, k, v, how), [2], tmp_path)
    assert (fault.kind, fault.ranks) == ("merged", (2,)), fault
    assert said in fault.sentence


@pytest.mark.parametrize(
    "names", [("wq", "wk", "wv", "wo"), ("query", "key", "value", "out"), ("to_q", "to_k", "to_v", "o")]
)
def test_attention_is_made_again_whatever_its_parts_are_called_and_it_turns_by(
    names: Sequence[str], tmp_path: Path
) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, without(1), base=321.0)

    (fault, *_) = of_steps(wrong, [2], tmp_path, base=321.0, names=names)
    assert (fault.kind, fault.ranks) == ("missing keys", (2,))


def test_keys_of_the_layer_before_are_told(tmp_path: Path) -> None:
    """Rank 1 has all of its own keys, and of rank 0 those that were sent for the layer before."""
    into = {
        f"layers.{layer}.self_attn.{name}.output": random(2, SEQ, HIDDEN // (1 if name == "q_proj" else 2), seed=seed)
        for seed, (layer, name) in enumerate((at, name) for at in (0, 1) for name in ("q_proj", "k_proj", "v_proj"))
    }  # fmt: skip
    first_q, first_k, first_v, q, k, v = into.values()
    made = [attention(first_q, first_k, first_v, CAUSAL), attention(q, k, v, CAUSAL)]
    half = SEQ // 2
    stale = attention(
        q, torch.cat([first_k[:, :half], k[:, half:]], 1), torch.cat([first_v[:, :half], v[:, half:]], 1), CAUSAL
    )
    ids = torch.arange(2 * SEQ).reshape(2, SEQ)

    def of(at: Tensor, second: Tensor) -> Step:
        outputs = {**into, "layers.0.self_attn.core.output": made[0], "layers.1.self_attn.core.output": second}
        order = sorted(outputs, key=lambda name: (name.split(".")[1], "core" in name))
        return {
            "batch_inputs": {"input_ids": ids[:, at]},
            "modules": {name: outputs[name][:, at].contiguous() for name in order},
        }

    halves = torch.arange(SEQ).chunk(2)
    found = compared(tmp_path, of(torch.arange(SEQ), made[1]), of(halves[0], made[1]), of(halves[1], stale))
    (fault, *_) = [one.fault for one in there(parallel(found.tensors, found.together)).faults]
    assert (fault.kind, fault.ranks) == ("stale keys", (1,))
    assert "keys and values of layers.0.self_attn in the place of those of rank 0" in fault.sentence


@pytest.mark.parametrize("are_numbered_anew", [False, True])
def test_documents_that_a_ring_keeps_apart_in_its_own_block_alone_are_told(
    are_numbered_anew: bool, tmp_path: Path
) -> None:
    begins = torch.tensor([0] * 5 + [5] * 6 + [11] * 5)
    at = torch.arange(SEQ) - (begins if are_numbered_anew else 0)
    apart = CAUSAL & (begins[:, None] == begins)
    half = SEQ // 2
    wrong = apart.clone()
    wrong[half:, :half] = True
    q, k, v = random(1, SEQ, HIDDEN), random(1, SEQ, HIDDEN // 2, seed=1), random(1, SEQ, HIDDEN // 2, seed=2)
    made = [attention(q, k, v, sees, at) for sees in (apart, wrong)]
    ids = torch.arange(SEQ)[None]

    def of(at: Tensor, output: Tensor) -> Step:
        values = {"q_proj": q, "k_proj": k, "v_proj": v, "core": output}
        modules = {f"layers.0.self_attn.{name}.output": x[:, at].contiguous() for name, x in values.items()}
        return {"batch_inputs": {"input_ids": ids[:, at]}, "modules": modules}

    halves = torch.arange(SEQ).chunk(2)
    found = compared(tmp_path, of(torch.arange(SEQ), made[0]), *(of(own, made[1]) for own in halves))
    (fault, *_) = [one.fault for one in there(parallel(found.tensors, found.together)).faults]
    assert (fault.kind, fault.ranks) == ("own documents", (1,))


def of_halves(
    folder: Path, right: Tensor, wrong: Tensor, into: Sequence[Tensor], places: Sequence[Tensor], *, is_first: bool
) -> Any:
    """What is said of two ranks whose core of attention returns heads [B, S, head, width], or with heads first."""
    ids = torch.arange(2 * SEQ).reshape(2, SEQ)

    def heads(made: Tensor) -> Tensor:
        of_heads = made.unflatten(-1, (HEADS, WIDTH))
        return of_heads.transpose(1, 2) if is_first else of_heads

    def of(at: Tensor, output: Tensor) -> Step:
        values = dict(zip(("q_proj", "k_proj", "v_proj"), (x[:, at] for x in into), strict=True))
        values["core"] = heads(output[:, at])
        modules = {f"layers.0.self_attn.{name}.output": x.contiguous() for name, x in values.items()}
        return {"batch_inputs": {"input_ids": ids[:, at]}, "modules": modules}

    found = compared(folder, of(torch.arange(SEQ), right), *(of(own, wrong) for own in places))
    return there(parallel(found.tensors, found.together)).faults[0].fault


def into_attention() -> tuple[Tensor, Tensor, Tensor]:
    return random(2, SEQ, HIDDEN), random(2, SEQ, HIDDEN // 2, seed=1), random(2, SEQ, HIDDEN // 2, seed=2)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_core_of_attention_that_returns_its_heads_is_made_again(is_first: bool, tmp_path: Path) -> None:
    into = into_attention()
    right, wrong = (attention(*into, CAUSAL, times=times) for times in (1.0, WIDTH**0.5))
    fault = of_halves(tmp_path, right, wrong, into, torch.arange(SEQ).chunk(2), is_first=is_first)
    assert "not scaled by 1/sqrt(d)" in fault.sentence


def test_documents_that_each_rank_numbers_by_itself_are_told(tmp_path: Path) -> None:
    """A pack's documents are counted by where positions are 0 among the rank's own tokens, which it holds in zigzag."""
    begins = torch.tensor([0] * 5 + [5] * 6 + [11] * 5)
    at = torch.arange(SEQ) - begins
    quarters = torch.arange(SEQ).chunk(4)
    places = [torch.cat((quarters[0], quarters[3])), torch.cat((quarters[1], quarters[2]))]
    numbers = torch.zeros(SEQ, dtype=torch.long)
    for own in places:
        numbers[own] = (at[own] == 0).cumsum(0)
    into = into_attention()
    right = attention(*into, CAUSAL & (begins[:, None] == begins), at)
    wrong = attention(*into, CAUSAL & (numbers[:, None] == numbers), at)
    fault = of_halves(tmp_path, right, wrong, into, places, is_first=False)
    assert fault.kind == "own documents"
    assert "numbered on each rank by itself" in fault.sentence


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("base", "said"), [(1e4, "10000"), (85498.0, "85000")])
def test_a_rank_that_turns_its_tokens_by_a_base_of_its_own_is_named(
    rank: int, base: float, said: str, tmp_path: Path
) -> None:
    q, k, v = into_attention()
    halves = torch.arange(SEQ).chunk(2)
    bases = torch.full((SEQ, 1), base)
    right = attention(q, k, v, CAUSAL, base=bases)
    bases[halves[rank]] = 500.0
    wrong = attention(q, k, v, CAUSAL, base=bases)
    fault = of_halves(tmp_path, right, wrong, (q, k, v), halves, is_first=False)
    assert (fault.kind, fault.ranks) == ("attention's RoPE", (rank,))
    assert f"by RoPE of base 500, and all others' by {said}" in fault.sentence


def test_attention_that_nothing_made_is_not_explained(tmp_path: Path) -> None:
    faults = of_steps(lambda q, k, v: random(2, SEQ, HIDDEN, seed=9), [2], tmp_path)
    assert {one.kind for one in faults} == {"apart"}


def test_attention_that_was_recorded_itself_is_made_again_without_its_projection(tmp_path: Path) -> None:
    (fault, *_) = of_steps(lambda q, k, v: attention(q, k, v, without(1)), [2, 3], tmp_path, is_projected=False)
    assert (fault.kind, fault.ranks) == ("missing keys", (2, 3))


def test_positions_that_ranks_in_zigzag_count_in_turn_are_named(tmp_path: Path) -> None:
    at = in_turn_of_rank(torch.arange(SEQ))
    (fault, *_) = of_steps(lambda q, k, v: attention(q, k, v, CAUSAL, at), range(RANKS), tmp_path, ZIGZAG)
    assert (fault.kind, fault.ranks) == ("order", (0, 1, 2, 3))
    assert "turned by positions as if the ranks held the sequence in turn" in fault.sentence


@pytest.mark.parametrize("is_known", [True, False])
def test_a_sample_that_is_right_says_nothing_of_one_that_is_off(is_known: bool, tmp_path: Path) -> None:
    """The first sample's tokens are the other run's."""

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = attention(q, k, v, CAUSAL)
        other = attention(q, k, v, without(1)) if is_known else random(2, SEQ, HIDDEN, seed=9)
        return torch.cat([made[:1], other[1:]])

    kinds = [(one.kind, one.ranks) for one in of_steps(wrong, [2], tmp_path)]
    assert kinds[0] == ("missing keys" if is_known else "apart", (2,))


def test_an_output_that_is_not_finite_is_not_made_again(tmp_path: Path) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = attention(q, k, v, without(1))
        made[:, 9, 3] = torch.nan
        return made

    assert {one.kind for one in of_steps(wrong, [2], tmp_path)} == {"apart"}


#: What a rank of two puts out of its queries, keys and values where its slice of all three in one is taken for these.
QKV = random(2, SEQ, 2 * HIDDEN, seed=5)
OUT = random(HIDDEN, HIDDEN, seed=6)


def of_slice(fused: Tensor) -> Tensor:
    each = fused.shape[-1] // 4
    q, k, v = fused.split([2 * each, each, each], -1)
    return attention(q, k, v, CAUSAL)


ALL_THREE = of_slice(QKV) @ OUT.T
CUT_STRAIGHT = torch.stack([
    of_slice(own) @ columns.T for own, columns in zip(QKV.chunk(2, -1), OUT.chunk(2, 1), strict=True)
]).sum(0)  # fmt: skip


@pytest.mark.parametrize(("output", "expected"), [
    (CUT_STRAIGHT, {("order", (0, 1))}), (ALL_THREE + random(2, SEQ, HIDDEN, seed=7), set()),
])  # fmt: skip
def test_queries_keys_and_values_that_are_cut_straight_are_told_by_their_projection(
    output: Tensor, expected: set[Any], tmp_path: Path
) -> None:
    def step(fused: Tensor, made: Tensor, weight: Tensor) -> Step:
        name = "layers.0.self_attn"
        return {
            "batch_inputs": {"input_ids": torch.arange(2 * SEQ).reshape(2, SEQ)},
            "modules": {f"{name}.qkv_proj.output": fused.contiguous(), f"{name}.o_proj.output": made},
            "param": {f"param.{name}.o_proj.weight": weight.contiguous()},
        }

    ranks = [step(own, output, columns) for own, columns in zip(QKV.chunk(2, -1), OUT.chunk(2, 1), strict=True)]
    found = compared(tmp_path, step(QKV, ALL_THREE, OUT), *ranks)
    assert {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults} == (
        expected
    )


@pytest.mark.parametrize("output", [ALL_THREE, ALL_THREE * (1 + 1e-3), CUT_STRAIGHT / 2, CUT_STRAIGHT * torch.nan])
def test_what_slices_taken_straight_do_not_make_has_no_such_cause(output: Tensor) -> None:
    fused, weights = cut(QKV.chunk(2, -1), 2, "qkv.output"), cut(OUT.chunk(2, 1), 1)
    whole = as_ref(ALL_THREE)
    assert (
        attention_again.cut_straight("o.output", whole, alike(CUT_STRAIGHT, CUT_STRAIGHT), fused, weights) is not None
    )
    assert attention_again.cut_straight("o.output", whole, alike(output, output), fused, weights) is None
    # Nor do queries, keys and values of no token, or of which no output of the other run is made.
    none, other = QKV[:, :0], as_ref(random(2, SEQ, HIDDEN, seed=8))
    assert attention_again.cut_straight("o.output", other, alike(CUT_STRAIGHT, CUT_STRAIGHT), fused, weights) is None
    empty = cut(none.chunk(2, -1), 2, "qkv.output")
    assert attention_again.cut_straight("o.output", whole, alike(CUT_STRAIGHT, CUT_STRAIGHT), empty, weights) is None


@pytest.mark.parametrize("shape", [(SEQ, HIDDEN), (SEQ, HEADS, WIDTH), (SEQ, 1, HIDDEN)])
def test_slices_that_lie_otherwise_than_the_output_are_no_queries_of_it(shape: tuple[int, ...]) -> None:
    """Tokens first, or heads beside them: of one sample they are as many."""
    right, other = random(1, SEQ, HIDDEN), random(1, SEQ, HIDDEN, seed=1)
    names = ("q_proj.output", "k_proj.output", "v_proj.output")
    slices = [cut(random(*shape, seed=seed).chunk(2), 0, name) for seed, name in enumerate(names)]
    held = cut([right.chunk(2, 1)[0], other.chunk(2, 1)[1]], 1)
    assert attention_again.of_seen_keys("core.output", as_ref(right), held, slices, (1,), None) is None


@pytest.mark.parametrize("heads", [1, 2])
def test_values_whose_heads_are_of_another_width_are_left_alone(heads: int) -> None:
    """As in MLA: queries and keys have a part more, which is turned."""
    right, other = random(1, SEQ, 16 * heads), random(1, SEQ, 16 * heads, seed=1)
    made = zip(("q_proj.output", "k_proj.output", "v_proj.output"), (24, 24, 16), strict=True)
    slices = [cut(random(1, SEQ, width * heads).chunk(2, 1), 1, name) for name, width in made]
    held = cut([right.chunk(2, 1)[0], other.chunk(2, 1)[1]], 1)
    assert attention_again.of_seen_keys("core.output", as_ref(right), held, slices, (1,), None) is None


#: How ranks hold a sequence, the positions that each counts -> what is said, of which ranks.
COUNTED: dict[str, tuple[list[Tensor], list[Tensor], tuple[str, tuple[int, ...]] | None]] = {
    "right, in turn": (IN_TURN, IN_TURN, None),
    "right, in zigzag": (ZIGZAG, ZIGZAG, None),
    "in zigzag, counted in turn": (ZIGZAG, IN_TURN, ("order", (0, 1, 2, 3))),
    "in turn, counted in zigzag": (IN_TURN, ZIGZAG, ("order", (0, 1, 2, 3))),
    "begun anew": (ZIGZAG, [torch.arange(EACH)] * RANKS, ("own positions", (0, 1, 2, 3))),
    "one rank's are off": (IN_TURN, [*IN_TURN[:3], IN_TURN[3] + 1], ("boundary", (3,))),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_positions_that_are_counted_in_another_turn_say_which(case: str, tmp_path: Path) -> None:
    places, positions, expected = COUNTED[case]
    ids = torch.arange(2 * SEQ).reshape(2, SEQ)

    def step(at: Tensor, counted: Tensor) -> Step:
        return {"batch_inputs": {"input_ids": ids[:, at], "position_ids": counted.repeat(2, 1)}}

    found = compared(tmp_path, step(torch.arange(SEQ), torch.arange(SEQ)), *map(step, places, positions))
    told = {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults}
    assert told == ({expected} if expected is not None else set())

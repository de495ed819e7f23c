"""What an attention may have done instead: another mask, other keys, other rotations, a coarser cache.

The model's own eager function computes; only what it is given is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from replay_core.referee import changes
from replay_core.referee.hypotheses import Hypothesis
from replay_core.referee.shadow import Shadow

#: (module, query, key, value, mask) -> the last four, changed.
Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
See = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Seen]
_NAME = "rldbg-referee"


def alternatives(shadow: Shadow, module: Any) -> Iterator[Hypothesis]:
    for what, opened in (
        ("the causal mask left out: every token sees those behind it", _no_mask),
        ("a token sees the next one: the causal mask is off by one", _next_token),
        ("a token does not see its own key: the last key is dropped by the mask", _not_itself),
    ):
        yield Hypothesis(what, _seeing(_masked(opened)))
    window = getattr(module, "sliding_window", None) or getattr(getattr(module, "config", None), "sliding_window", None)
    yield Hypothesis("the sliding window ignored", _seeing(_masked(_window(None))))
    if isinstance(window, int):
        for made in (window + 1, window - 1, window, window * 2):
            yield Hypothesis(f"a sliding window of {made} tokens, not {window}", _seeing(_masked(_window(made))))
    groups = getattr(module, "num_key_value_groups", 1)
    if isinstance(groups, int) and groups > 1:
        yield Hypothesis("keys and values shared by other heads: groups in another order", _seeing(_other_groups))
    for what, dtype in (("float8 (e4m3, fp8)", torch.float8_e4m3fn), ("float8 (e5m2, fp8)", torch.float8_e5m2)):
        yield Hypothesis(f"a cache of keys and values in {what}", _seeing(_cached(dtype)))
    yield Hypothesis(
        "a sample sees the last token of the one before: a leak in the pack's mask", _seeing(_leak(shadow))
    )
    for keys in (1, 2, 3, 4, 8):
        what = f"the first {keys} keys and values are another sample's: a stale prefix in the cache"
        yield Hypothesis(what, _seeing(_prefix(keys)))
    for what, turn in (
        ("rotated backwards: the sine's sign", lambda cos, sin: (cos, -sin)),
        ("not rotated", lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin))),
        ("rotated by tables laid in pairs (interleaved), not in halves",
         lambda cos, sin: (_paired(cos), _paired(sin))),
        ("rotated by tables laid in halves, not in pairs (interleaved)",
         lambda cos, sin: (_halved(cos), _halved(sin))),
    ):  # fmt: skip
        yield Hypothesis(what, _turning(turn))
    for what, there, back in (
        ("rotated in pairs of channels (interleaved), not in halves", _to_halves, _to_pairs),
        ("rotated in halves, not in pairs of channels (interleaved)", _to_pairs, _to_halves),
    ):
        yield Hypothesis(what, _rotating(there, back))


def coarse_softmax(dtype: torch.dtype) -> changes.Change:
    """A softmax whose weights are rounded before they are normalised, and their sum as well: half precision where the
    model's code asks for float32."""

    def softmax(scores: Any, dim: int = -1, **_: Any) -> Any:
        def coarse(x: torch.Tensor) -> torch.Tensor:
            each = _rounded((x - x.amax(dim, keepdim=True)), dtype).exp()
            each = _rounded(each, dtype)
            return each / _rounded(each.sum(dim, keepdim=True), dtype)

        return changes.plainly(coarse, scores, dtype)

    @contextmanager
    def change(_module: Any) -> Iterator[None]:
        own = torch.nn.functional.softmax
        torch.nn.functional.softmax = softmax
        try:
            yield
        finally:
            torch.nn.functional.softmax = own

    return change


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).double()


# ---- what attention is given


def _seeing(see: See) -> changes.Change:
    """The module's own eager attention on changed queries, keys, values and mask."""

    @contextmanager
    def change(module: Any) -> Iterator[None]:
        from transformers import AttentionInterface

        eager = sys.modules[type(module).__module__].eager_attention_forward
        groups = getattr(module, "num_key_value_groups", 1)

        def attend(one: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
            if one is not module:
                return eager(one, query, key, value, attention_mask, **kwargs)
            query, key, value, mask = see(module, query, key, value, attention_mask)
            module.num_key_value_groups = query.shape[1] // key.shape[1]
            return eager(module, query, key, value, mask, **kwargs)

        AttentionInterface.register(_NAME, attend)
        # Before 4.53 every kernel that the library does not know is given eager's mask.
        with suppress(ImportError):
            from transformers import AttentionMaskInterface
            from transformers.masking_utils import eager_mask

            AttentionMaskInterface.register(_NAME, eager_mask)
        before = module.config._attn_implementation
        module.config._attn_implementation = _NAME
        try:
            yield
        finally:
            module.config._attn_implementation = before
            if hasattr(module, "num_key_value_groups"):
                module.num_key_value_groups = groups

    return change


def _masked(opened: Callable[[torch.Tensor], torch.Tensor]) -> See:
    """A mask whose open places are others: `opened` of them, [..., queries, keys]."""

    def see(_module: Any, query: Any, key: Any, value: Any, mask: Any) -> Seen:
        if mask is None:
            length = query.shape[2]
            open_TT = torch.ones((1, 1, length, length), dtype=torch.bool).tril()
        else:
            open_TT = mask > -1
        closed = torch.where(opened(open_TT), 0.0, torch.finfo(torch.float32).min)
        return query, key, value, closed.to(query.dtype)

    return see


def _causal(open_TT: torch.Tensor) -> torch.Tensor:
    """What a token sees without a window: whatever stands before it and is seen by itself."""
    seen = torch.diagonal(open_TT, dim1=-2, dim2=-1)[..., None, :]
    return torch.ones(open_TT.shape[-2:], dtype=torch.bool).tril() & seen


def _no_mask(open_TT: torch.Tensor) -> torch.Tensor:
    seen = torch.diagonal(open_TT, dim1=-2, dim2=-1)[..., None, :]
    return seen.expand_as(open_TT).clone()


def _next_token(open_TT: torch.Tensor) -> torch.Tensor:
    moved = open_TT.clone()
    moved[..., :-1, :] |= open_TT[..., 1:, :]
    return moved


def _not_itself(open_TT: torch.Tensor) -> torch.Tensor:
    own = torch.eye(open_TT.shape[-1], dtype=torch.bool)
    own[0, 0] = False
    return open_TT & ~own


def _window(size: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def opened(open_TT: torch.Tensor) -> torch.Tensor:
        causal = _causal(open_TT)
        if size is None:
            return causal
        return causal & ~torch.ones(open_TT.shape[-2:], dtype=torch.bool).tril(-size)

    return opened


def _other_groups(_module: Any, query: Any, key: Any, value: Any, mask: Any) -> Seen:
    groups = query.shape[1] // key.shape[1]
    return query, key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1), mask


def _cached(dtype: torch.dtype) -> See:
    def see(_module: Any, query: Any, key: Any, value: Any, mask: Any) -> Seen:
        key, value = (changes.plainly(lambda x: x.float().to(dtype).double(), one) for one in (key, value))
        return query, key, value, mask

    return see


def _leak(shadow: Shadow) -> See:
    last = torch.from_numpy(shadow.recorded.sizes - 1)

    def see(_module: Any, query: Any, key: Any, value: Any, mask: Any) -> Seen:
        samples = torch.arange(len(last))
        before = (samples - 1).clamp(min=0)
        more = [torch.cat([one[before, :, last[before]][:, :, None], one], 2) for one in (key, value)]
        length = query.shape[2]
        if mask is None:
            mask = _masked(lambda open_TT: open_TT)(None, query, key, value, None)[3]
        first = (
            torch.zeros((len(last), 1, length, 1)) + (samples == 0)[:, None, None, None] * torch.finfo(query.dtype).min
        )
        whole = torch.cat([first.to(query.dtype), mask.expand(len(last), 1, length, length)], -1)
        return query, more[0], more[1], whole

    return see


def _prefix(keys: int) -> See:
    def see(_module: Any, query: Any, key: Any, value: Any, mask: Any) -> Seen:
        key, value = (torch.cat([one[:, :, :keys].roll(1, 0), one[:, :, keys:]], 2) for one in (key, value))
        return query, key, value, mask

    return see


# ---- rotations


def _turning(turn: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> changes.Change:
    def run(own: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["position_embeddings"] = turn(*kwargs["position_embeddings"])
        return own(*args, **kwargs)

    return changes.forward(run)


def _rotating(there: Callable[[Any], Any], back: Callable[[Any], Any]) -> changes.Change:
    """Queries and keys in another order of channels while they are rotated."""

    @contextmanager
    def change(module: Any) -> Iterator[None]:
        home: Any = sys.modules[type(module).__module__]
        own = home.apply_rotary_pos_emb

        def rotate(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            return tuple(back(one) for one in own(there(query), there(key), *args, **kwargs))

        home.apply_rotary_pos_emb = rotate
        try:
            yield
        finally:
            home.apply_rotary_pos_emb = own

    return change


def _to_halves(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def _to_pairs(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.stack([x[..., :half], x[..., half:]], -1).flatten(-2)


def _paired(table: torch.Tensor) -> torch.Tensor:
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)


def _halved(table: torch.Tensor) -> torch.Tensor:
    return torch.cat([table[..., ::2], table[..., ::2]], -1)

"""What attention gives each key in eager, under two settings: keys that one gives nothing, what is added to scores.

A key that only its own token sees (the last of a row) moves nobody when it is changed: its token hears itself in the
query. And what a bias adds to the scores is told from other maths by changing every token: a bias of the positions is
the same whatever the tokens say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch.overrides import TorchFunctionMode

from replay_core.replay import compiling
from replay_core.replay.interventions import Observer, TensorPlace, evaluating
from replay_core.samples.layout import Ints

#: A key of less weight may round to nothing.
_SEEN = 1e-12
#: Shares that float32 leaves where there are none.
_ASTRAY = 1e-6
#: Differences of log-weights up to which two are one: softmax and rotations take float32 inside.
_SAME, _SHARE = 1e-3, 1e-2
#: Differences that a query's keys must have among them: one that is only a step hides a few keys more than others.
_LEVELS = 3
#: Numbers that may be kept of one setting.
_MOST = 1 << 25
#: The ways to form shares of scores.
SOFTMAX = frozenset({torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax})


class Attended(Struct, frozen=True):
    """What each token gives the tokens of its own sample: `share` [H, N, N] float64, zero for all others.

    even [N]: it gives every slot of the batch alike, in some head: it was let see none.
    ahead, astray [N]: it gives something to later tokens of its sample, or to what is none of its sample.
    """

    share: torch.Tensor
    even: torch.Tensor
    ahead: torch.Tensor
    astray: torch.Tensor


class _Softmaxes(TorchFunctionMode):  # type: ignore[misc]
    """Keeps what every softmax over keys returns while `is_on`; fused: how often one was formed and not returned."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on, self.found, self.fused = False, list[torch.Tensor](), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        put = func(*args, **(kwargs or {}))
        if self.is_on and func in SOFTMAX and torch.is_tensor(put):
            self.found.append(put.detach())
        self.fused += self.is_on and func is torch.nn.functional.scaled_dot_product_attention
        return put


def attended(observer: Observer, module: str, ids: Ints | None = None) -> Attended | None:
    """What `module` gives each key; `ids`: other tokens in the slots. None where it forms no one softmax over keys."""
    arrangement, parts = observer.cell.arrangement, list[torch.Tensor]()
    with torch.no_grad(), evaluating(observer.cell.model.causal_lm):
        for forward in observer.forwards(ids):
            rows, width = (int(size) for size in forward.input_ids.shape)
            with _within(observer.cell.model.backbone.get_submodule(module)) as kept:
                observer.cell.forward(compiling.plain, forward)
            found = None if len(kept.found) != 1 else by_keys(kept.found[0], rows, width)
            if found is None:
                return None
            parts.append(found.double().cpu())
    size = int(observer.sample_N.size)
    if int(parts[0].shape[1]) * size**2 > _MOST:
        return None
    share_HNN = torch.zeros(int(parts[0].shape[1]), size, size, dtype=torch.float64)
    even_N, ahead_N, astray_N = (torch.zeros(size, dtype=torch.bool) for _ in range(3))
    rows_N, columns_N = np.unravel_index(observer.slots.numpy(), arrangement.input_ids.shape)
    along_N, start = (rows_N if arrangement.axis == 0 else columns_N), 0
    for forward, part in zip(observer.forwards(ids), parts, strict=True):
        end = start + int(forward.input_ids.shape[arrangement.axis])
        for sample in np.unique(observer.sample_N[(along_N >= start) & (along_N < end)]):
            mine = np.flatnonzero(observer.sample_N == sample)
            row = int(rows_N[mine[0]]) - start * (arrangement.axis == 0)
            at = torch.from_numpy(columns_N[mine] - start * (arrangement.axis == 1))
            given_HnS = part[row][:, at]
            share_HNN[:, mine[:, None], mine] = given_HnS[..., at]
            own_Hnn = given_HnS[..., at]
            ahead_N[mine] = (own_Hnn.triu(1).sum(-1) > _ASTRAY).any(0)
            astray_N[mine] = (given_HnS.sum(-1) - own_Hnn.sum(-1) > _ASTRAY).any(0)
            spread_Hn = given_HnS.amax(-1) - given_HnS.amin(-1)
            even_N[mine] = (spread_Hn <= _ASTRAY).any(0) if part.shape[-1] > 1 else False
        start = end
    return Attended(share_HNN, even_N, ahead_N, astray_N)


def attends(observer: Observer, module: str, seen: Collection[str] = ()) -> bool:
    """Whether `module` gives keys shares of a softmax, whatever it is called: what carries a state over does not.

    seen: tensors by name; what a module within puts out as one of them is that module's work, and not asked.
    """
    whole = observer.cell.model.backbone.get_submodule(module)
    told = {name.partition(".output")[0].partition("[")[0] for name in seen if ".output" in name}
    others = [one for name, one in whole.named_modules() if name and f"{module}.{name}" in told]
    with torch.no_grad(), evaluating(observer.cell.model.causal_lm):
        for forward in observer.forwards():
            rows, width = (int(size) for size in forward.input_ids.shape)
            with _within(whole, others) as kept:
                observer.cell.forward(compiling.plain, forward)
            if kept.fused or any(by_keys(one, rows, width) is not None for one in kept.found):
                return True
    return False


def lost_keys(observer: Observer, cell: Attended, own: Attended, place: TensorPlace) -> dict[str, Any] | None:
    """The first key that each row alone sees and the cell gives nothing, as `why` says what is lost."""
    if cell.share.shape != own.share.shape:
        return None
    gone_HNN = (own.share > _SEEN) & (cell.share == 0)
    if not bool(gone_HNN.any()):
        return None
    gone_NN = gone_HNN.any(0).numpy()
    query, key = (int(one) for one in np.argwhere(gone_NN)[0])
    return {
        **place.to_mapping(), "token": int(observer.position_N[key]),
        "itself": bool((np.argwhere(gone_NN)[:, 0] == np.argwhere(gone_NN)[:, 1]).all()),
        "seen": {"sample": int(observer.sample_N[key]), "query": int(observer.position_N[query]),
                 "share": float(own.share[:, query, key].max()), "pairs": int(gone_NN.sum())},
    }  # fmt: skip


def emptied(observer: Observer, cell: Attended, own: Attended) -> dict[str, Any] | None:
    """The first token that is let see nothing, so that softmax gives every slot alike, padding and the future with
    them; and whether such tokens alone give something to the future, and to padding or other samples (explains).
    """
    none_N = cell.even & ~own.even
    if not bool(none_N.any()):
        return None
    first = int(none_N.nonzero()[0])
    explains = ["future"] * (not bool((cell.ahead & ~cell.even).any()))
    explains += ["padding", "other_samples"] * (not bool((cell.astray & ~cell.even).any()))
    return {"sample": int(observer.sample_N[first]), "token": int(observer.position_N[first]),
            "tokens": int(none_N.sum()), "explains": explains}  # fmt: skip


def is_by_position(cell: Attended, own: Attended, cell_other: Attended, own_other: Attended) -> bool:
    """Whether the two settings' scores differ by the same with other tokens, and not by one number for all of a
    query's keys nor by a step: then what is added depends on where a key stands, not on what it says.
    """
    there = [one.share > _SEEN for one in (cell, own, cell_other, own_other)]
    both = there[0] & there[1] & there[2] & there[3]
    first, other = (
        torch.where(both, (a.share.clamp(min=_SEEN) / b.share.clamp(min=_SEEN)).log(), torch.nan)
        for a, b in ((cell, own), (cell_other, own_other))
    )
    first, other = (one - one.nanmean(-1, keepdim=True) for one in (first, other))
    most = float(first[both].abs().max()) if bool(both.any()) else 0.0
    if not most > _SAME or float((first - other)[both].abs().max()) > max(_SAME, _SHARE * most):
        return False
    furthest = [head[int((~head.isnan()).sum(-1).argmax())] for head in first]
    return max(int((row[~row.isnan()] / _SAME).round().unique().numel()) for row in furthest) >= _LEVELS


@contextmanager
def _within(module: torch.nn.Module, others: Iterable[torch.nn.Module] = ()) -> Iterator[_Softmaxes]:
    """The softmaxes that are formed while this module works, and none of the others, which it may call."""
    kept, depth = _Softmaxes(), 0

    def begin(*_: Any) -> None:
        kept.is_on = True

    def end(*_: Any) -> None:
        kept.is_on = False

    def leave(*_: Any) -> None:
        nonlocal depth
        depth, kept.is_on = depth + 1, False

    def back(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        kept.is_on = not depth

    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    for other in others:
        hooks += [other.register_forward_pre_hook(leave), other.register_forward_hook(back)]
    try:
        with kept:
            yield kept
    finally:
        for hook in hooks:
            hook.remove()


def by_keys(share: torch.Tensor, rows: int, width: int) -> torch.Tensor | None:
    """[b, H, S, S] of a softmax over keys: heads may be folded into rows, and a sink may stand behind the keys."""
    if share.ndim == 3 and share.shape[0] % rows == 0:
        share = share.unflatten(0, (rows, -1))
    if share.ndim != 4 or share.shape[0] != rows or share.shape[2] != width or share.shape[3] < width:
        return None
    return share[..., :width]

"""Keys of its own past that no setting of a model lets a token see, and that no window of its config explains.

A mask that is too narrow in the model itself is so in every cell: each row alone is as blind as they are, and nothing
disagrees. What attention gives each key is read of one row, as eager or torch's own attention forms it; a key that gets
nothing from a token in any head, whatever the tokens are, is lost unless the config names a window that ends before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from replay_core.regexes import regex
from replay_core.replay import compiling
from replay_core.replay.attended import SOFTMAX, by_keys
from replay_core.replay.interventions import Observer, evaluating
from replay_core.replay.module_kinds import kind_of
from replay_core.samples.layout import Bools

#: Tokens of the row that is read: its pairs are held of every head of one module at a time.
MOST = 512
#: Of a token whose least share is below, others may round to nothing: it is not asked.
_ROUNDS = 1e-30
#: Fewer tokens have no past worth a word.
_FEWEST = 3
#: How a config names the numbers of keys after which a token sees no further, and the length of blocks that see
#: nothing of each other.
_WINDOW = regex(r"(?i)window|local|span|band|memory_len|context_len")
_BLOCK = regex(r"(?i)chunk|block_?(?:size|len)")
#: What is named like them and is none: numbers of layers, of experts, of a convolution or a scan.
_OTHER = regex(r"(?i)layer|pattern|mamba|ssm|conv|linear|feed_forward|scan|expert|moe|theta|freq|patch")
#: Attention that chooses its keys in ways that no number tells: of it nothing is said.
_SPARSE = regex(
    r"(?i)sparse.*att|att.*sparse|block_?sparse|sparse_(block|config|topk)|dilat|index_topk|^index(er)?_(n_heads|budget)"
    r"|keep_window|lsh"
)
_FULL = regex(r"(?i)full|global")
_OF_LAYERS = ("layer_types", "attention_layers")
_LAYER = regex(r"\.(\d+)\.")


class _SharesOfRow(TorchFunctionMode):  # type: ignore[misc]
    """What each attention lets each token of one row see, in any head: [S, S] of shares, the greatest of all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self.within: list[str] = []
        self.share: dict[str, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        put = func(*args, **(kwargs or {}))
        if self.within:
            share = None
            if func in SOFTMAX and torch.is_tensor(put):
                share = put
            elif func is torch.nn.functional.scaled_dot_product_attention:
                share = _of_sdpa(*args, **(kwargs or {}))
            read = None if share is None else by_keys(share.detach(), 1, self._width)
            if read is not None:
                most_SS = read[0].amax(0).double().cpu()
                known = self.share.get(self.within[-1])
                self.share[self.within[-1]] = most_SS if known is None else torch.maximum(known, most_SS)
        return put


def narrowed(observer: Observer) -> dict[str, Any] | None:
    """The first attention that gives keys of a token's own past nothing though its config names no such window.

    observer: of one row alone, in an attention that forms its shares where they can be read. None where nothing is
    lost, and where nothing can be read.
    """
    size = int(observer.sample_N.size)
    if size < _FEWEST or len(observer.forwards()) != 1:
        return None
    readings = [_read(observer, ids) for ids in (None, observer.all_changed())]
    config = observer.cell.model.config
    for module, first_SS in readings[0].items():
        other_SS = readings[1].get(module)
        windows = windows_of(config, module)
        if other_SS is None or windows is None:
            continue
        lost_SS = _lost(torch.maximum(first_SS, other_SS).numpy()) & ~_explained(size, *windows)
        if lost_SS.any():
            return _told(module, lost_SS)
    return None


def windows_of(config: Any, module: str) -> tuple[list[int], list[int]] | None:
    """The windows and the lengths of blocks that a config names for a module; None where it names attention that is
    sparse in other ways.
    """
    numbers: dict[str, list[int]] = {"window": [], "block": []}
    said = config.to_dict()
    for name, value in _named(said):
        if _SPARSE.search(name) and value not in (None, False):
            return None
        which = "window" if _WINDOW.search(name) else "block" if _BLOCK.search(name) else None
        if which is not None and not _OTHER.search(name):
            values = value if isinstance(value, (list, tuple)) else [value]
            numbers[which] += [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one > 0]
    layer = _LAYER.search(f".{module}.")
    for name in _OF_LAYERS:
        types = said.get(name) or getattr(config, name, None)
        of_each = types if layer and isinstance(types, (list, tuple)) and int(layer[1]) < len(types) else None
        if layer and of_each and _FULL.search(str(of_each[int(layer[1])])):
            return [], []
    return numbers["window"], numbers["block"]


def _named(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _named({str(key): one for key, one in value.items()})
        yield str(name), value


def _explained(size: int, windows: list[int], blocks: list[int]) -> Bools:
    """[S, S]: pairs of a token and one of its past that these windows and blocks leave out."""
    at = np.arange(size)
    query, key = at[:, None], at[None]
    out: Bools = np.zeros((size, size), dtype=bool)
    for window in windows:
        out |= query - key >= window
    for block in blocks:
        out |= (query // block != key // block) | (query - key >= block)
    return out


def _lost(share_SS: Any) -> Bools:
    """[S, S]: pairs of a token and one of its past, or itself, to which it gives exactly nothing."""
    past = np.tri(share_SS.shape[0], dtype=bool)
    seen = (share_SS > 0) & past
    least_S = np.where(seen, share_SS, np.inf).min(axis=1)
    lost: Bools = past & ~seen & (seen.any(axis=1) & (least_S > _ROUNDS))[:, None]
    return lost


def _told(module: str, lost_SS: Bools) -> dict[str, Any]:
    """module, pairs (how many are lost), of (of how many), query, key (the first of them), itself (whether it is always
    the token's own key), beyond (where none is seen that is so many tokens back or more; None: otherwise).
    """
    pairs = np.argwhere(lost_SS)
    back = pairs[:, 0] - pairs[:, 1]
    past = np.tri(lost_SS.shape[0], dtype=bool)
    nearest = int(back.min())
    everything = past & np.tri(lost_SS.shape[0], k=-nearest, dtype=bool)
    return {
        "module": module, "pairs": int(pairs.shape[0]), "of": int(past.sum()), "query": int(pairs[0, 0]),
        "key": int(pairs[0, 1]), "itself": bool((back == 0).all()),
        "beyond": nearest if nearest and bool(lost_SS[everything].all()) else None,
    }  # fmt: skip


def _read(observer: Observer, ids: Any) -> dict[str, torch.Tensor]:
    """Attention module -> [S, S] shares of the row, in order of computation."""
    forward = observer.forwards(ids)[0]
    reading = _SharesOfRow(int(forward.input_ids.shape[1]))
    with torch.no_grad(), evaluating(observer.cell.model.causal_lm), _told_apart(observer, reading), reading:
        observer.cell.forward(compiling.plain, forward)
    return reading.share


@contextmanager
def _told_apart(observer: Observer, reading: _SharesOfRow) -> Iterator[None]:
    """Which attention is at work, the innermost."""

    def begin(name: str) -> Any:
        return lambda *_: reading.within.append(name)

    def end(*_: Any) -> None:
        reading.within.pop()

    with ExitStack() as held:
        for name, module in observer.cell.model.backbone.named_modules():
            if name and kind_of(name, module) == "mixer":
                held.callback(module.register_forward_pre_hook(begin(name)).remove)
                held.callback(module.register_forward_hook(end).remove)
        yield


def _of_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """The shares [b, H, S, S] that torch's own attention forms within, and keeps to itself."""
    if query.ndim != 4 or key.ndim != 4:
        return None
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.double() @ key.double().transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
    return scores.softmax(-1)

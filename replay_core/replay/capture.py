"""Capture: what goes into and comes out of every module, in call order, under the names other tools use.

`layers.0.self_attn.inputs.hidden_states`, `layers.0.self_attn.o_proj.inputs.0`, `layers.0.self_attn.output.0`:
inputs when a module is called, outputs when it returns.
"""

from __future__ import annotations

import re
import shutil
import weakref
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
import xxhash

from replay_core.errors import CellError, RequestError
from replay_core.replay.packing import Arrangement

Tensors = dict[str, torch.Tensor]

#: What a module's name ends before.
_CALLED = re.compile(r"\.(?:inputs|output)(?:\.|$)")
#: The capture pattern that keeps no module but the one that puts out the final hidden states.
NOTHING = "none"


def modules_matching(backbone: torch.nn.Module, pattern: str | None) -> list[str]:
    """Names of the modules a pattern chooses: all that can run where it is None, no one where it is `none`.

    Raises:
        RequestError: the pattern chooses none.
    """
    names = [name for name, module in backbone.named_modules() if name and _can_run(module)]
    if pattern is None:
        return names
    if pattern == NOTHING:
        return []
    chosen = [name for name in names if re.search(pattern, name)]
    if not chosen:
        raise RequestError(
            "the capture pattern chooses no module",
            expected=", ".join(names[:4]) + " …",
            found=pattern,
            hint=r"it is a regular expression on module names: --capture 'layers\.0\.'",
        )
    return chosen


def _can_run(module: torch.nn.Module) -> bool:
    # ModuleList and the like hold modules but are never called.
    return getattr(type(module), "forward", None) is not torch.nn.Module.forward


class Capture:
    """Hooks on chosen modules; copies each tensor once while the context is open.

    A tensor that passes several modules unchanged is copied once and shared under all its names, so it is
    also stored once. Copies are taken on the spot: a later in-place operation cannot reach them.

    Args:
        backbone: the model below its head.
        modules: names of the modules to hook.
        width: tokens in a row of this forward; tells attention weights [b, heads, width, width] from states.
        by_head: names of tensors [b, heads, width, d], which are kept as [b, width, heads, d] (`heads_first`).
    """

    def __init__(
        self, backbone: torch.nn.Module, modules: Iterable[str], width: int, by_head: Container[str] = ()
    ) -> None:
        self.tensors: Tensors = {}
        self.skipped: list[str] = []
        self._width, self._by_head = width, by_head
        self.ran: set[str] = set()
        self._modules = {name: backbone.get_submodule(name) for name in modules}
        self._calls: dict[str, int] = {}
        self._handles: list[Any] = []
        self._copies: dict[int, tuple[Any, int, torch.Tensor]] = {}

    def __enter__(self) -> Capture:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def copied(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy of this very tensor object, if it passed a hook."""
        known = self._copies.get(id(tensor))
        return known[2] if known and known[0]() is tensor else None

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The module output that this very tensor object is."""
        copy = self.copied(tensor)
        if copy is None:
            return None
        names = [name for name, held in self.tensors.items() if held is copy and ".output" in name]
        return names[0] if names else None

    def _before(self, name: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.ran.add(name)
            call = self._calls[name] = self._calls.get(name, 0) + 1
            named = _numbered(name, call)
            for position, value in enumerate(args):
                self._keep(f"{named}.inputs.{position}", value)
            for keyword, value in kwargs.items():
                self._keep(f"{named}.inputs.{keyword}", value)

        return hook

    def _after(self, name: str) -> Any:
        def hook(_module: Any, _args: tuple[Any, ...], output: Any) -> None:
            self._keep(f"{_numbered(name, self._calls[name])}.output", output)

        return hook

    def _keep(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if not _tells(name, value):
                return
            if name in self._by_head:
                value = value.transpose(1, 2)
            elif _is_attention_weights(value, self._width):
                self.skipped.append(name)
                return
            self._take(name, value)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                self._keep(f"{name}.{key}", inner)
        elif isinstance(value, (tuple, list)):
            for position, inner in enumerate(value):
                self._keep(f"{name}.{position}", inner)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = self._copy(tensor)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._copies.get(id(tensor))
        if known and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._copies[id(tensor)] = (weakref.ref(tensor), tensor._version, copy)
        return copy


class TraceableCapture:
    """The same hooks in a form that Dynamo traces into the compiled graph: no identities, no counters, only clones.

    Set before compiling, kept while the compiled callable is in use, and emptied by `take` after each forward.
    A module called again within one forward keeps its last call only, under the number of that.

    Args:
        known: names of what an uncompiled capture kept, which tell how often a module is called.
        by_head: as `Capture` has them.
    """

    def __init__(
        self,
        backbone: torch.nn.Module,
        modules: Iterable[str],
        width: int,
        known: Iterable[str] = (),
        by_head: Container[str] = (),
    ) -> None:
        self._store: Tensors = {}
        self._width, self._by_head = width, by_head
        self._handles: list[Any] = []
        calls: dict[str, int] = {}
        for name in known:
            module_name, _, number = _CALLED.split(name)[0].rstrip("]").partition("[")
            calls[module_name] = max(calls.get(module_name, 1), int(number or 0) + 1)
        for name in modules:
            module = backbone.get_submodule(name)
            last = _numbered(name, calls.get(name, 1))
            self._handles.append(module.register_forward_pre_hook(self._before(last), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(last)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> tuple[Tensors, set[str]]:
        """What the last forward left, and the modules that ran. Equal tensors under several names are one."""
        taken: Tensors = {}
        ran: set[str] = set()
        same: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, value in self._store.items():
            ran.add(_CALLED.split(name)[0].partition("[")[0])
            if name in self._by_head:
                value = value.transpose(1, 2)
            elif _is_attention_weights(value, self._width):
                continue
            host = value.detach().to("cpu").contiguous()
            digest = xxhash.xxh3_128_digest(host.reshape(-1).view(torch.uint8).numpy())
            taken[name] = same.setdefault((tuple(host.shape), host.dtype, digest), host)
        self._store.clear()
        return taken, ran

    def _before(self, name: str) -> Any:
        store = self._store

        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for position, value in enumerate(args):
                _clone_into(store, f"{name}.inputs.{position}", value)
            for keyword, value in kwargs.items():
                _clone_into(store, f"{name}.inputs.{keyword}", value)

        return hook

    def _after(self, name: str) -> Any:
        store = self._store

        def hook(_module: Any, _args: tuple[Any, ...], output: Any) -> None:
            _clone_into(store, f"{name}.output", output)

        return hook


def _clone_into(store: Tensors, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if _tells(name, value):
            store[name] = value.clone()
    elif isinstance(value, dict):
        for key, inner in value.items():
            _clone_into(store, f"{name}.{key}", inner)
    elif isinstance(value, (tuple, list)):
        for position, inner in enumerate(value):
            _clone_into(store, f"{name}.{position}", inner)


def heads_first(a: Tensors, width_a: int, b: Tensors, width_b: int) -> frozenset[str]:
    """Names of the tensors of two forwards of one row each whose tokens lie on the third axis, behind the heads, as a
    norm of queries sees them. One forward does not tell where it has as many tokens as heads: two of other lengths do.
    """
    return frozenset(
        name for name, one in a.items()
        if one.ndim == 4 and name in b and b[name].ndim == 4 and one.shape[2] == width_a != b[name].shape[2] == width_b
        and one.shape[1] == b[name].shape[1]
    )  # fmt: skip


def by_key(a: Tensors, width_a: int, b: Tensors, width_b: int) -> frozenset[str]:
    """Names of the tensors of two forwards of one row each that hold of every token a number per key: longer in a
    longer forward.
    """
    return frozenset(
        name for name, one in a.items()
        if name in b and one.ndim > 2 and (one.shape[1], b[name].shape[1:2]) == (width_a, (width_b,))
        and one.shape[2:] != b[name].shape[2:]
    )  # fmt: skip


def _tells(name: str, value: torch.Tensor) -> bool:
    """Whether two settings have this tensor to compare: a mask's form follows the kernel (bool, float, none)."""
    leaf = name.rpartition(".")[2]
    return leaf != "attention_mask" and (bool(value.is_floating_point()) or leaf == "position_ids")


def _is_attention_weights(value: torch.Tensor, width: int) -> bool:
    square: bool = value.ndim == 4 and value.shape[2] == value.shape[3] == width != value.shape[1]
    return square


def _numbered(name: str, call: int) -> str:
    """A module called again within one forward keeps its calls apart."""
    return name if call == 1 else f"{name}[{call - 1}]"


def need_all(asked: Iterable[str], ran: set[str], pattern: str | None) -> list[str]:
    """Modules that were hooked and never ran, said as notes; an error where a pattern asked for them by name.

    Raises:
        CellError: fewer modules were captured than the pattern asked for, or none at all.
    """
    idle = [name for name in asked if name not in ran]
    if not ran or (idle and pattern is not None):
        raise CellError(
            f"{len(idle)} of the modules to capture never ran",
            expected=f"every module that matches {pattern}" if pattern is not None else "modules that run",
            found=", ".join(idle[:4]) + (" …" if len(idle) > 4 else ""),
            hint="the forward pass does not call them; narrow the pattern",
        )
    return [f"never called by the forward pass, so not captured: {', '.join(idle)}"] if idle else []


def join(parts: list[Tensors], arrangement: Arrangement) -> tuple[Tensors, list[str]]:
    """One tensor per name from the forwards' tensors, joined along the token axes; and what could not be joined."""
    if len(parts) == 1:
        return parts[0], []
    joined: Tensors = {}
    left_out: list[str] = []
    shared: dict[tuple[int, ...], torch.Tensor | None] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pieces = [part[name] for part in parts if name in part]
        identity = tuple(id(piece) for piece in pieces)
        if identity not in shared:
            shared[identity] = _joined(pieces, arrangement) if len(pieces) == len(parts) else None
        whole = shared[identity]
        if whole is None:
            left_out.append(name)
        else:
            joined[name] = whole
    notes = []
    if left_out:
        notes.append(f"{len(left_out)} captured tensors have no token axis to join along: {', '.join(left_out[:3])}")
    return joined, notes


def _joined(pieces: list[torch.Tensor], arrangement: Arrangement) -> torch.Tensor | None:
    shapes = [forward.input_ids.shape for forward in arrangement.forwards]
    pairs = list(zip(pieces, shapes, strict=True))
    # What has a column per token of its forward (scores of a sparse attention, its chosen keys) is no one tensor.
    if all(tuple(piece.shape[:2]) == shape and piece.shape[2:] == pieces[0].shape[2:] for piece, shape in pairs):
        return torch.cat(pieces, dim=arrangement.axis)
    flat = (piece.ndim and piece.shape[0] == shape[0] * shape[1] for piece, shape in pairs)
    if all(flat) and all(piece.shape[1:] == pieces[0].shape[1:] for piece in pieces):
        return torch.cat(pieces, dim=0)
    if all(piece.shape == pieces[0].shape and torch.equal(piece, pieces[0]) for piece in pieces[1:]):
        return pieces[0]
    return None


def forecast_bytes(sample: Tensors, tokens: int, total: int) -> int:
    """Bytes the capture of `total` token slots will take, from that of one row of `tokens`."""
    unique = {id(tensor): tensor for tensor in sample.values()}.values()
    size = 0
    for tensor in unique:
        per_token = tuple(tensor.shape[:2]) == (1, tokens) or (tensor.ndim and tensor.shape[0] == tokens)
        size += tensor.numel() * tensor.element_size() * (total // tokens + 1 if per_token else 1)
    return size


def stored_mib(tensors: Tensors) -> float:
    """What these tensors hold; one under several names counts once."""
    unique = {id(tensor): tensor for tensor in tensors.values()}.values()
    return float(sum(tensor.numel() * tensor.element_size() for tensor in unique)) / 2**20


#: Share of a disk's free room that one capture may take; and each of two that are compared, window by window.
_DISK, EACH_OF_TWO = 0.95, 0.4


def room_for(out: Path, cap_mib: int, disk: float = _DISK) -> tuple[str, int]:
    """(what bounds a capture into `out`, in bytes): the cap, a share of the disk or the memory, whichever is least."""
    existing = next(parent for parent in [out, *out.absolute().parents] if parent.exists())
    rooms = {
        "the cap on one capture": cap_mib << 20,
        f"free on the disk of {existing}": int(shutil.disk_usage(existing).free * disk),
        "free in memory": psutil.virtual_memory().available,
    }
    return min(rooms.items(), key=lambda item: item[1])


def need_room(size: int, out: Path, cap_mib: int) -> None:
    """Refuse a capture that would not fit, before anything is captured.

    Raises:
        RequestError: the forecast, what there is, and how to capture less.
    """
    what, room = room_for(out, cap_mib)
    if size > room:
        raise RequestError(
            "capturing these modules takes more room than there is",
            file=str(out),
            expected=f"at most {room / 2**20:,.0f} MiB ({what})",
            found=f"about {size / 2**20:,.0f} MiB",
            hint=r"--capture-level auto, fewer modules (--capture 'layers\.(0|1)\.'), or fewer rows",
        )

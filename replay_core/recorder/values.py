"""What is kept of a value: a snapshot on the host, and what the index says about it.

A snapshot owns its bytes, so the trainer may change a tensor in place as soon as `Snapshots.take` returns.
From a CUDA device it is copied on a stream of its own into pinned memory (`pinned`): neither the host nor the
device's own work waits, and the writer waits for the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from replay_core.errors import RequestError
from replay_core.fold import ENOUGH, left_on_device
from replay_core.hashes import digest_of, taken
from replay_core.kernel import moments_at
from replay_core.recorder import on_device
from replay_core.recorder.pinned import copy_aside

#: Elements looked at together where statistics are counted. They stay in the cache, and below 32,768 torch starts no
#: team of threads: in the writer's thread that would be a second one, against the trainer's on the same cores.
_CHUNK = 24_576

#: Bytes that devices hold back for one copy.
_THERE = 32 << 20

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(slots=True)
class Noted:
    """What the index says of a tensor of which nothing else is kept: taken where it stood, nothing was copied.

    Of a device's tensor the digest and the statistics arrive with `Snapshots.ready`.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str = ""
    stats: dict[str, Any] | None = None


class Snapshots:
    """Takes the snapshots of one record. `ready` returns once every copy from a device has arrived.

    Args:
        owned: copy host tensors too. False where the record is written before the trainer goes on.
        told: nothing is kept but digests ("hash") or those and statistics ("stats"). To read a host tensor once costs
            the trainer no more than to copy it for a thread that would; a device reads its own.
    """

    def __init__(self, *, owned: bool, told: str | None = None) -> None:
        self._owned, self._told = owned, told
        self._arrivals: list[Callable[[], object]] = []
        #: What devices told that is still there, by device and stream.
        self._there: dict[tuple[Any, int], list[_There]] = {}
        self._there_bytes, self._telling = 0, threading.Lock()
        self._taken: dict[int, tuple[Any, Any]] = {}
        #: Of sharded tensors: field -> what the whole looks like.
        self.shards: dict[str, dict[str, Any]] = {}
        self.nbytes = 0

    def ready(self) -> None:
        self._fetch()
        for arrive in self._arrivals:
            arrive()
        self._arrivals.clear()

    def forget(self) -> None:
        """Let go of the originals, be they on a device: the record is complete."""
        self._taken.clear()
        self._fetch()

    def take(self, value: Any, name: str) -> Any:
        """A value as it is stored: tensors on the host, dense, detached, each owning just its own bytes.

        One tensor under several names is copied and stored once.

        Raises:
            RequestError: a value of a kind no record can hold, or a tensor whose device does not answer.
        """
        torch = _torch()
        if torch is not None and isinstance(value, torch.Tensor):
            known = self._taken.get(id(value))
            if known is None:
                copy = self._tensor(torch, value, name)
                # The value is kept beside its copy: an id is free again once its object is gone. A copy is its own.
                known = self._taken[id(value)] = self._taken[id(copy)] = (value, copy)
            return known[1]

        if type(value) in _PLAIN or isinstance(value, Noted):
            return value
        if isinstance(value, Mapping):
            return {str(key): self.take(inner, f"{name}.{key}") for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.take(inner, f"{name}.{position}") for position, inner in enumerate(value)]
        return self._foreign(torch, value, name)

    def take_now(self, tensor: Any, name: str) -> Any:
        """A copy of a tensor that may be changed before the record is written, whatever `owned` says.

        What was the same object before is not taken to be the same values now.
        """
        torch = _torch()
        copy = self._tensor(torch, tensor, name)
        if not isinstance(copy, Noted) and copy.data_ptr() == tensor.data_ptr():
            copy = copy.clone()
        self._taken[id(copy)] = (copy, copy)
        return copy

    def _tensor(self, torch: Any, value: Any, name: str) -> Any:
        if hasattr(value, "to_local") and hasattr(value, "placements"):
            mesh = value.device_mesh
            self.shards[name] = {
                "global_shape": list(value.shape),
                "placements": [str(p) for p in value.placements],
                "mesh": list(mesh.shape),
                "coordinate": list(mesh.get_coordinate() or ()),
            }
            value = value.to_local()
        if hasattr(value, "trigger_wait"):  # what a collective has not yet delivered: torch's AsyncCollectiveTensor
            value = value.trigger_wait()
        if not is_storable(value):
            kind = (
                "meta" if value.is_meta else "quantized" if value.is_quantized else "nested" if value.is_nested else ""
            )
            raise RequestError(
                "only dense tensors can be recorded",
                tensor=name,
                found=f"a {kind or str(value.layout).removeprefix('torch.')} tensor",
                hint="it has no values to record"
                if value.is_meta
                else "record value.to_padded_tensor(0.0), or its rows"
                if value.is_nested
                else "record value.dequantize()"
                if value.is_quantized
                else "record value.to_dense()",
            )
        value = value.detach()
        if type(value) is not torch.Tensor:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise RequestError(
                "only plain tensors can be recorded", tensor=name, found=f"a {kind}", hint="record a plain copy of it"
            )
        try:
            if self._told is not None and value.device.type == "cpu":
                return _told(value, stats=self._told == "stats")
            is_large = value.numel() * value.element_size() > ENOUGH
            if self._told and is_large and value.is_cuda and on_device.can_fold(torch, value.device):
                # What the device has no room or no operator for is copied.
                noted = None
                with contextlib.suppress(RuntimeError):
                    noted = self._told_there(torch, value, stats=self._told == "stats")
                if noted is not None:
                    if self._there_bytes > _THERE:
                        self._fetch()
                    return noted
            host = self._to_host(torch, value)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise RequestError(
                "the tensor cannot be copied to the host", tensor=name, expected="a device that answers", found=first
            ) from error
        self.nbytes += host.numel() * host.element_size()
        return host

    def _told_there(self, torch: Any, value: Any, *, stats: bool) -> Noted:
        dense = value.resolve_conj().resolve_neg().contiguous()
        # What arrives later keeps nothing of the trainer's memory.
        noted, count = Noted(str(value.dtype).removeprefix("torch."), tuple(value.shape)), value.numel()
        told = [left_on_device(torch, dense)]
        if stats:
            told.append(on_device.moments(torch, dense).view(torch.uint8))
        stream = torch._C._cuda_getCurrentRawStream(value.device.index) if value.is_cuda else 0
        with self._telling:
            self._there.setdefault((value.device, stream), []).append(_There(noted, count, told))
            self._there_bytes += sum(one.numel() for one in told)
        return noted

    def _fetch(self) -> None:
        """Send what devices told to the host, all of a device's in one copy."""
        torch = _torch()
        while True:
            with self._telling:  # a device's gradients come in a thread of their own
                if not self._there:
                    return
                (device, stream), told = self._there.popitem()
                self._there_bytes -= sum(part.numel() for one in told for part in one.parts)
            parts = [part for one in told for part in one.parts]
            if device.type == "cuda" and stream != torch._C._cuda_getCurrentRawStream(device.index):
                other = torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)
                here = torch.cuda.current_stream(device)
                here.wait_stream(other)
                for part in parts:
                    part.record_stream(here)
            try:
                together = self._to_host(torch, torch.cat(parts), is_own=True)
            except RuntimeError:
                # There is no room to lay them together: one by one, and waited for.
                together = torch.cat([part.cpu() for part in parts])
            self.nbytes += together.numel()
            # After the copy that it needs.
            self._arrivals.append(partial(_take_in, told, together))

    def _to_host(self, torch: Any, value: Any, *, is_own: bool = False) -> Any:
        if value.device.type == "cuda" and self._owned:
            host, arrive = copy_aside(torch, value, is_own=is_own)
            self._arrivals.append(arrive)
            return host
        copied = value.device.type != "cpu"
        host = value.cpu().resolve_conj().resolve_neg()
        # torch.save stores the whole storage behind a view.
        dense = host.untyped_storage().nbytes() == host.numel() * host.element_size() and host.is_contiguous()
        if dense and (copied or not self._owned):
            return host
        return host.clone(memory_format=torch.contiguous_format)

    def _foreign(self, torch: Any, value: Any, name: str) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return value.item()
        if numpy is not None and isinstance(value, numpy.ndarray) and torch is not None:
            if value.dtype == object:
                return self.take(value.tolist(), name)
            try:
                return self._tensor(torch, torch.from_numpy(numpy.ascontiguousarray(value)), name)
            except TypeError:
                pass
        if torch is not None and isinstance(value, (torch.dtype, torch.device)):
            return str(value).removeprefix("torch.")
        # A subclass of a plain type (an enum of texts, a numpy float) is stored as the plain value it is.
        if isinstance(value, int):
            return int.__index__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        raise RequestError(
            "a record holds tensors, numbers, texts, and lists and dicts of them",
            tensor=name,
            found=f"a {type(value).__module__}.{type(value).__qualname__}",
            hint=f"record what it holds, field by field, or str({name})",
        )


@dataclass(slots=True)
class _There:
    """What a device told of a tensor of `count` values, as bytes there: what is left of it, and the rows of figures."""

    noted: Noted
    count: int
    parts: list[Any]


def _take_in(told: list[_There], together: Any) -> None:
    """Note what has arrived on the host, one after the other."""
    start = 0
    for one in told:
        bounds = [start := start + part.numel() for part in one.parts]
        begin = bounds[0] - one.parts[0].numel()
        one.noted.digest = digest_of([raw(together[begin : bounds[0]])], "xxh3").replace("xxh3", "fold")
        if len(bounds) == 2:
            rows = array("d", bytes(raw(together[bounds[0] : bounds[1]])))
            one.noted.stats = _figures(on_device.joined(rows, one.count), one.count)


@dataclass(slots=True)
class HeldRecord:
    """A record on its way to the disk: its key, its fields on the host, and the copies that may still arrive."""

    key: dict[str, Any]
    fields: dict[str, Any]
    snapshots: Snapshots
    #: Field -> what its token axis means, where shapes do not tell: response, prompt, full, next, sample.
    alignment: dict[str, str] = field(default_factory=dict)


def _torch() -> Any:
    """The trainer's torch, where there is one: a recorder of plain numbers needs none."""
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    torch = _torch()
    return torch is not None and isinstance(value, torch.Tensor)


def is_finite(tensor: Any) -> bool:
    """Whether every value is a number; of integers every one is."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    # torch tests no 8-bit floats; float32 holds each of their values.
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    return bool(wide.isfinite().all())


def is_storable(tensor: Any) -> bool:
    """Whether a tensor has dense values of its own."""
    return (
        tensor.layout is sys.modules["torch"].strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _told(tensor: Any, *, stats: bool) -> Noted:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Noted(dtype, tuple(tensor.shape), digest(dense), statistics(dense) if stats else None)


def leaves(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every tensor, number and text of a snapshot, named as a reader names them."""
    for name, value in fields.items():
        yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        # A list of samples is a table: a column per key.
        for key in dict.fromkeys(key for item in value for key in item):
            yield from _leaves(f"{name}.{key}", [item.get(key) for item in value])
    elif _is_rows(value):
        yield name, value
    elif isinstance(value, list) and any(_is_of_tensor(item) or isinstance(item, dict) for item in value):
        for position, item in enumerate(value):
            yield from _leaves(f"{name}.{position}", item)
    else:
        yield name, value


def _is_of_tensor(value: Any) -> bool:
    return isinstance(value, Noted) or is_tensor(value)


def _is_rows(value: Any) -> bool:
    """Whether a value is a vector per sample, which a reader lays together as one tensor of rows."""
    if not isinstance(value, list) or not value:
        return False
    if not all(_is_of_tensor(row) and len(row.shape) == 1 for row in value):
        return False
    return len({row.dtype for row in value}) == 1


def describe(
    name: str, value: Any, order: int, *, stats: bool, bare: bool = False, digest_known: str | None = None
) -> dict[str, Any]:
    """The index's entry of a field: name, dtype, shape, digest, order, and statistics where asked.

    bare: the entry is all that is kept, so that texts and lists need a digest too.
    """
    if isinstance(value, Noted):
        told = {"name": name, "dtype": value.dtype, "shape": list(value.shape), "digest": value.digest, "order": order}
        return {**told, "stats": value.stats} if stats else told
    if not is_tensor(value):
        field: dict[str, Any] = {"name": name, "dtype": type(value).__name__, "shape": None, "digest": None}
        field["order"] = order
        # A number is shorter than its digest would be.
        if isinstance(value, (bool, int, float, type(None))) or (stats and isinstance(value, _PLAIN)):
            field["value"] = value if not isinstance(value, float) or math.isfinite(value) else str(value)
        elif _is_rows(value):
            field["digest"] = _joined("".join(map(_digest, value)))
        elif bare:
            field["digest"] = _joined(json.dumps(value, default=_spoken))
        return field
    field = {
        "name": name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "digest": digest_known or digest(value),
        "order": order,
    }
    if stats:
        field["stats"] = statistics(value)
    return field


class Digests:
    """Digests of a record's tensors, taken in a thread while the record is written: hashing and writing both
    leave Python's lock alone.

    Args:
        beside: whether something is written meanwhile; small records are not worth a thread either way.
    """

    _WORTH_A_THREAD = 1 << 20

    def __init__(self, fields: Mapping[str, Any], *, beside: bool) -> None:
        self._tensors = [(name, leaf) for name, leaf in leaves(fields) if is_tensor(leaf)]
        self._digests: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        if beside and sum(t.numel() * t.element_size() for _, t in self._tensors) >= self._WORTH_A_THREAD:
            thread = threading.Thread(target=self._take, name="rldbg-digests", daemon=True)
            with contextlib.suppress(RuntimeError):  # none can be had: a process that ends starts none (Python 3.12)
                thread.start()
                self._thread = thread

    def taken(self) -> dict[str, str]:
        """Name -> digest; an empty dict where the caller is to take them itself."""
        if self._thread is not None:
            self._thread.join()
        return self._digests

    def _take(self) -> None:
        self._digests = {name: digest(tensor) for name, tensor in self._tensors}


def digest(tensor: Any) -> str:
    """The digest of a contiguous host tensor's bytes."""
    return digest_of([raw(tensor)])


def _digest(row: Any) -> str:
    return row.digest if isinstance(row, Noted) else digest(row)


def _joined(digests: str) -> str:
    """The digest of a text that holds digests; of another kind where a device took one of them."""
    kind = "fold" if "fold:" in digests else taken()
    found = digest_of([digests.encode()], "xxh3" if kind == "fold" else kind)
    return found.replace("xxh3", "fold") if kind == "fold" else found


def _spoken(value: Any) -> str:
    """A tensor deep within lists, for the digest of the whole."""
    return _digest(value) if _is_of_tensor(value) else str(value)


def raw(tensor: Any) -> Any:
    """A contiguous host tensor's bytes, not copied. numpy has no bfloat16; a view as uint8 refuses odd strides."""
    return bytes_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def bytes_at(address: int, nbytes: int) -> Any:
    """Bytes that somebody else holds, not copied."""
    return (ctypes.c_ubyte * nbytes).from_address(address) if nbytes else b""


def statistics(tensor: Any) -> dict[str, Any]:
    """count, nan, posinf, neginf, zero, and of the finite values min, max, mean, std and l2 (null where there is none).

    Accumulated in float64; complex tensors are judged by their absolute values.
    """
    found = _counted(tensor)
    return _by_torch(tensor) if found is None else found


def _counted(tensor: Any) -> dict[str, Any] | None:
    """The same by the compiled loop, five times as fast; None where torch has to."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    found = moments_at(tensor.data_ptr(), tensor.numel(), str(tensor.dtype).removeprefix("torch."))
    if found is None:
        return None
    return _figures(found, tensor.numel())


def _figures(found: Sequence[float], count: int) -> dict[str, Any]:
    """How many values are finite, NaN, inf, -inf, zero; least, greatest, mean, squares around it, squares: by name."""
    counts = dict(zip(("finite", "nan", "posinf", "neginf", "zero"), map(int, found), strict=False))
    number = counts.pop("finite")
    smallest, largest, mean, around, squares = found[5:]
    figures = {"count": count, **counts}
    if not number:
        return {**figures, **dict.fromkeys(("min", "max", "mean", "std", "l2"))}
    numbers = {"min": smallest, "max": largest, "mean": mean, "std": math.sqrt(around / number)}
    return {**figures, **_spelled({**numbers, "l2": math.sqrt(squares)})}


def _spelled(numbers: dict[str, float]) -> dict[str, Any]:
    """As JSON has them: what is beyond float64 is a text."""
    return {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}


def _by_torch(tensor: Any) -> dict[str, Any]:
    """The same of any tensor."""
    torch = _torch()
    flat = (tensor.abs() if tensor.is_complex() else tensor).reshape(-1)
    counts = dict.fromkeys(("nan", "posinf", "neginf", "zero"), 0)
    number, total, squares = 0, 0.0, 0.0
    smallest, largest = math.inf, -math.inf
    for start in range(0, flat.numel(), _CHUNK):
        finite = chunk = flat[start : start + _CHUNK].to(torch.float64)
        counts["zero"] += chunk.numel() - int(torch.count_nonzero(chunk))
        together = float(chunk.sum())
        if not math.isfinite(together):
            # Only then is there a value to look for, or a sum beyond what float64 holds.
            counts["nan"] += int(chunk.isnan().sum())
            counts["posinf"] += int((chunk == math.inf).sum())
            counts["neginf"] += int((chunk == -math.inf).sum())
            finite = chunk[chunk.isfinite()]
            together = float(finite.sum())
        if finite.numel():
            number += finite.numel()
            total += together
            # Not `dot`: MKL has threads of its own for it.
            squares += float(torch.linalg.vector_norm(finite)) ** 2
            low, high = torch.aminmax(finite)
            smallest, largest = min(smallest, float(low)), max(largest, float(high))
    figures: dict[str, Any] = {"count": flat.numel(), **counts}
    if not number:
        return {**figures, "min": None, "max": None, "mean": None, "std": None, "l2": None}
    mean = total / number
    spread = math.sqrt(max(squares / number - mean * mean, 0.0))
    numbers = {"min": smallest, "max": largest, "mean": mean, "std": spread, "l2": math.sqrt(squares)}
    return {**figures, **_spelled(numbers)}

"""What one side recorded of one computation: its tokens, and every module tensor token by token on one padded grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import engine_names, naming, pages
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.errors import RldbgError
from replay_core.records import Record, Run, TensorRef
from replay_core.samples.batch import Batch
from replay_core.samples.layout import Ints, positions_of, samples_of

Array = NDArray[Any]

#: What a computation may have recorded of the policy's own log-probabilities, the nearest to the forward first.
LOGPROBS = ("policy_logprobs", "old_logprobs")

#: What modules that multiply by a matrix are called.
_PRODUCTS = ("proj", "dense", "fc1", "fc2", "c_fc", "query_key_value", "h_to_4h", "lm_head", "embed_out")


class Place(Struct, frozen=True):
    """One computation of a run: the records of a (step, micro, rank, role)."""

    step: int | None
    micro: int | None
    rank: int | None
    role: str | None

    def __str__(self) -> str:
        said = [f"{name} {value}" for name, value in (("step", self.step), ("rank", self.rank), ("micro", self.micro))
                if value is not None]  # fmt: skip
        return " ".join([*said, *([self.role] if self.role not in (None, "actor") else [])]) or "the record"


class Recorded:
    """The tensors of one computation of one run.

    sizes: tokens of each sample [B]; grids are [B, max(sizes), ...], every sample from its first token, zeros behind.
    """

    def __init__(
        self, run: Run, place: Place, records: Sequence[Record], *, as_laid: bool = False, is_whole: bool = True
    ) -> None:
        """`as_laid`: every row is taken for one sample, as a model sees it that is given no mask. `is_whole`: the
        ranks that computed the same tokens are looked for, and what they hold of a tensor is put together.
        """
        self.run, self.place = run, place
        self._side = Side(records=list(records))
        self._side.load()
        if self._side.is_engine:
            self._side.as_trainer()
        self.modules: dict[str, TensorRef] = {}
        for (name, stage), (_, ref) in self._side.tensors.items():
            if stage == "modules" and naming.is_module_tensor(name) and ref.is_readable and not ref.is_text:
                self.modules.setdefault(name, ref)
        self._own = dict(self.modules)
        self.batch = next((batch for batch in self._side.batches if batch.layout is not None), None)
        self._ids: Array | None = None
        if as_laid and self.batch is not None:
            ids = self.batch.ids_BS
            self._ids = None if ids is None else ids.astype(np.int64)
            self._rows: tuple[int, int] | None = None if self.batch.layout is None else self.batch.layout.shape
            self.batch = None
        else:
            self._rows = None
        self.problems = [problem.what for problem in self._side.problems]
        #: The ranks that computed the same tokens in parallel, this one first: each holds its part of the tensors.
        self.ranks: list[Recorded] = [self]
        if is_whole:
            self.ranks += self._beside(as_laid)
            for rank in self.ranks[1:]:
                self.modules = {**rank.modules, **self.modules}

    def _beside(self, as_laid: bool) -> list[Recorded]:
        """The other ranks of the same computation that were given the same tokens."""
        place, own = self.place, self.ids_BL
        if place.rank is None or own is None or not self.modules:
            return []
        found = []
        for other, records in computations(self.run.records).items():
            is_beside = (other.step, other.micro, other.role) == (place.step, place.micro, place.role)
            if not is_beside or other.rank in (None, place.rank):
                continue
            beside = Recorded(self.run, other, records, as_laid=as_laid, is_whole=False)
            if beside.modules and beside.ids_BL is not None and np.array_equal(beside.ids_BL, own):
                found.append(beside)
        return sorted(found, key=lambda one: one.place.rank or 0)

    @property
    def is_later(self) -> bool:
        """Whether the step has a micro-batch before this one."""
        place = self.place
        micros = {one.key.micro for one in self.run.records if (one.key.step, one.key.role) == (place.step, place.role)}
        return place.micro is not None and any(micro < place.micro for micro in micros - {None})  # type: ignore[operator]

    def find_all(self, *names: str) -> list[TensorRef | None]:
        """The readable tensor of each of these names."""
        return [self.find(name) for name in names]

    def find(self, *names: str) -> TensorRef | None:
        """The first readable numeric tensor of one of these canonical names, the first name that has any."""
        found = (self._side.find(name) for name in names)
        return next((ref for ref in found if ref is not None and ref.is_readable and not ref.is_text), None)

    @cached_property
    def sizes(self) -> Ints:
        if self.batch is not None:
            return self.batch.lengths
        shape = self._rows or self._token_shape
        return np.full(shape[0], shape[1], np.int64) if shape is not None else np.zeros(0, np.int64)

    @cached_property
    def _token_shape(self) -> tuple[int, int] | None:
        """[B, S] of module tensors where nothing says which tokens there are: every slot is taken for one."""
        shapes = [ref.shape[:2] for ref in self.modules.values() if len(ref.shape) == 3]
        return max(shapes, key=shapes.count) if shapes else None

    @property
    def tokens(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def ids_BL(self) -> Ints | None:
        """Token ids on the grid; None where none are recorded."""
        if self.batch is None:
            return self._ids
        if self.batch.tokens_N is None:
            return None
        ids: Ints = self._grid(self.batch.tokens_N, self._numbers(self.batch)).astype(np.int64)
        return ids

    @cached_property
    def positions_BL(self) -> Ints | None:
        """Recorded position ids on the grid; None where none are recorded, or they do not fit."""
        ref = self.find("position_ids") or next(
            (ref for name, ref in self.modules.items() if name.endswith("position_ids")), None
        )
        if ref is None:
            return None
        grid = self.grid(ref, (*self.grid_shape,))
        return None if grid is None else grid.astype(np.int64)

    @property
    def is_packed(self) -> bool:
        """Whether several samples lie in one row."""
        return self.batch is not None and self.batch.packs is not None and self.batch.count > 1

    @property
    def grid_shape(self) -> tuple[int, int]:
        return int(self.sizes.size), int(self.sizes.max(initial=0))

    @cached_property
    def valid_BL(self) -> NDArray[np.bool_]:
        valid: NDArray[np.bool_] = np.arange(self.grid_shape[1]) < self.sizes[:, None]
        return valid

    def grid(self, ref: TensorRef, wanted: tuple[int, ...]) -> Array | None:
        """A recorded tensor in the shape that the model gives the same one on the grid; None where it does not fit.

        wanted: the shape there. Token axes may lead ([B, L, ...]), be flat ([B*L, ...]) or stand behind heads
        ([B, H, L, D]).
        """
        try:
            values = pages.array(ref)
        except RldbgError:
            return None
        if values.dtype == object:
            return None
        shape = self.grid_shape
        if wanted[:2] == shape:
            return self._leading(ref, values, wanted[2:])
        if len(wanted) >= 3 and (wanted[0], wanted[2]) == shape:
            if values.ndim != len(wanted):
                return None
            turned = np.moveaxis(values, 2, 1)
            grid = self._leading(ref.with_(shape=turned.shape), turned, (wanted[1], *wanted[3:]))
            return None if grid is None else np.moveaxis(grid, 2, 1)
        if wanted and wanted[0] == shape[0] * shape[1]:
            grid = self._leading(ref, values, wanted[1:])
            return None if grid is None else grid.reshape(wanted)
        return None

    def grid_of(self, name: str, wanted: tuple[int, ...]) -> Array | None:
        """The module tensor of that name as `grid` gives it, put together of what every rank holds of it."""
        holders = [rank for rank in self.ranks if name in rank._own]
        whole = holders[0].grid(self.modules[name], wanted) if holders else None
        if whole is not None or len(self.ranks) == 1:
            return whole
        parts = [rank.grid(ref, (*wanted[:-1], ref.shape[-1])) for rank, ref in self._parts(name)]
        return _joined(parts, wanted, engine_names.VOCABULARY.fullmatch(f"{naming.module_of(name)}.weight") is not None)

    def copies(self, name: str, wanted: tuple[int, ...]) -> dict[int, Array]:
        """Rank -> its copy of a tensor that every rank should hold alike, of those that hold another than the first."""
        whole = [(rank.place.rank or 0, rank.grid(ref, wanted)) for rank, ref in self._parts(name)]
        first = whole[0][1] if whole else None
        return {
            number: copy
            for number, copy in whole[1:]
            if first is not None and copy is not None and not np.array_equal(copy, first, equal_nan=True)
        }

    def _parts(self, name: str) -> list[tuple[Recorded, TensorRef]]:
        ranks = sorted(self.ranks, key=lambda rank: rank.place.rank or 0)
        return [(rank, rank._own[name]) for rank in ranks if name in rank._own and rank._own[name].shape]

    def _leading(self, ref: TensorRef, values: Array, rest: tuple[int, ...]) -> Array | None:
        batch = self.batch
        if batch is None:
            fits = values.shape[: 2 + len(rest)] == (*self.grid_shape, *rest)
            return np.asarray(values) if fits else None
        layout = batch.layout
        assert layout is not None
        if values.ndim >= 2 and values.shape[0] == 1 < layout.shape[0] and values.shape[1] == layout.shape[1]:
            # One row for all samples: positions and rotary tables of a padded batch.
            values = np.broadcast_to(values, (layout.shape[0], *values.shape[1:]))
            ref = ref.with_(shape=values.shape)
        axes = layout.token_axes(values.shape)
        if axes is None and values.ndim == len(rest) + 1 and values.shape[0] == layout.sample_BS.size:
            values = values.reshape(*layout.shape, *values.shape[1:])
            axes = layout.token_axes(values.shape)
        if axes is None:
            return None
        said = layout.said("full")
        rows = axes.rows(said.slots, layout)
        if (rows < 0).any() or axes.width < layout.shape[1]:
            return None
        flat = np.asarray(values).reshape(-1, *values.shape[axes.axes :])[rows]
        if flat.shape[1:] != rest and int(np.prod(flat.shape[1:])) == int(np.prod(rest)):
            flat = flat.reshape(-1, *rest)
        return self._grid(flat, said.tokens) if flat.shape[1:] == rest else None

    def _numbers(self, batch: Batch) -> Ints:
        from replay_core.samples.layout import token_numbers

        return token_numbers(np.repeat(np.arange(batch.count), batch.lengths), batch.position_N)

    def _grid(self, flat: Array, tokens: Ints) -> Array:
        grid = np.zeros((*self.grid_shape, *flat.shape[1:]), flat.dtype)
        grid[samples_of(tokens), positions_of(tokens)] = flat
        return grid

    def logprobs(self) -> tuple[str, Array, NDArray[np.bool_], str] | None:
        """(name, values [B, L] at the token each is about, whether it is said, dtype) of the policy's log-probabilities
        as recorded; None where none are."""
        for name in LOGPROBS:
            ref = self.find(name)
            values = None if ref is None or self.batch is None else self.batch.values(ref)
            if ref is None or values is None or self.batch is None:
                continue
            numbers = self._numbers(self.batch)
            generated = self.batch.generated_N
            said_N = values.said_N & (generated if generated is not None else True)
            return (name, self._grid(np.nan_to_num(values.values_N), numbers), self._grid(said_N, numbers), ref.dtype)
        return None

    def tokens_BL(self, *names: str) -> Array | None:
        """The first recorded tensor of these names as a number for every token [B, L], at the token it is about; 0
        where it says nothing. None where none is recorded."""
        ref = self.find(*names)
        values = None if ref is None or self.batch is None else self.batch.values(ref)
        if values is None or self.batch is None:
            return None
        return self._grid(np.where(values.said_N, np.nan_to_num(values.values_N), 0.0), self._numbers(self.batch))

    @cached_property
    def autocast(self) -> str | None:
        """The half precision of products whose inputs are float32: torch.autocast over float32 weights; else None."""
        halves = []
        for name, ref in self.modules.items():
            if not name.endswith(".output") or ref.dtype not in ("bfloat16", "float16"):
                continue
            owner = name.removesuffix(".output")
            given = self.modules.get(f"{owner}.inputs.0")
            if given is not None and given.dtype == "float32" and owner.endswith(_PRODUCTS):
                halves.append(ref.dtype)
        return max(halves, key=halves.count) if halves else None

    @property
    def dtype(self) -> str | None:
        """The dtype most module outputs have; None where none is recorded."""
        found = [ref.dtype for name, ref in self.modules.items() if not naming.is_input(name)]
        floats = [one for one in found if one in ("bfloat16", "float16", "float32")]
        return max(floats, key=floats.count) if floats else None


def _joined(parts: Sequence[Array | None], wanted: tuple[int, ...], is_vocabulary: bool) -> Array | None:
    """Ranks' columns of a tensor beside each other; None where they do not make up the whole.

    More ranks than heads of keys hold each head several times. A vocabulary is padded before it is cut.
    """
    held = [part for part in parts if part is not None]
    if len(held) < len(parts) or len(held) < 2:
        return None
    columns, width = sum(part.shape[-1] for part in held), wanted[-1]
    times, left = divmod(columns, width)
    if times > 1 and not left and len(held) % times == 0:
        held, columns = held[::times], width
    if columns < width or (columns > width and not is_vocabulary):
        return None
    return np.concatenate(held, axis=-1)[..., :width]


def computations(records: Iterable[Record]) -> dict[Place, list[Record]]:
    """The computations of records, in their order; records of a whole step stand with each of its micro-batches."""
    found: dict[Place, list[Record]] = {}
    for record in records:
        key = record.key
        found.setdefault(Place(key.step, key.micro, key.rank, key.role), []).append(record)
    return found


def ruled_first(records: Sequence[Record], like: Place | None = None) -> tuple[Place, list[Record]]:
    """The computation that is ruled of several: the one of the same place as `like` where its modules are recorded,
    else the first with module tensors, else the first with log-probabilities, else the first."""
    found = computations(records)

    def worth(place: Place) -> tuple[bool, int, bool]:
        names = {ref.canonical or ref.name for record in found[place] for ref in record.tensors()}
        has_modules = any(naming.is_module_tensor(name) for name in names)
        same = like is not None and (place.step, place.micro, place.rank) == (like.step, like.micro, like.rank)
        forwards = (len(LOGPROBS) - at for at, name in enumerate(LOGPROBS) if name in names and "input_ids" in names)
        return has_modules, next(forwards, 0), same

    best = max(found, key=worth)
    return best, found[best]

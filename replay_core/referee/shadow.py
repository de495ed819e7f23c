"""The model run beside a recording, with every recorded tensor put in its place: what each module should have made.

One forward of the model's own code, in `arithmetic`, on the recorded tokens, every sample a row of its own. Wherever a
module is called or returns and the recording holds that tensor, what was computed is kept and the recorded tensor goes
on in its stead. So every difference is one module's own: a leaf's from its recorded input to its recorded output, a
composite's from what its recorded children gave it to what it hands on. A stretch that is not recorded belongs to the
module around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.utils._python_dispatch import _disable_current_modes

from replay_core import naming
from replay_core.referee.arithmetic import Arithmetic, Noise, Rounding, TrueTensor, exactly, rounded_to
from replay_core.referee.products import KeptProducts, Products
from replay_core.referee.recorded import Recorded
from replay_core.referee.weights import SideModel
from replay_core.replay.stated import stated

#: Bytes that are kept of recorded tensors, of modules' inputs, of products, and of claims with the noise of each (40 an
#: element).
KEPT = 1 << 30
#: Bytes, in fp64, of the logits that log-probabilities are made of: of more tokens some are drawn, 256 at least.
LOGITS, _LEAST_TOKENS = 1 << 30, 256
#: Ranks hold summands of a tensor where their sum is nearer to the truth than the first by as much.
_SUMS = 0.25


class Claim(Struct):
    """A recorded tensor and what the model should have made of what led to it, rows that are tokens [N, C] in fp64.

    name: of the tensor; owner: the module whose work lies between the last recorded tensors and this one; handed:
    whether it is the input of a module that the owner calls. kind: what the owner is (`kind_of`); is_leaf: it has no
    modules in it. rounds_once: it is a product of one matrix and of a recorded tensor, so one rounding is all there is.
    heads: of what attention hands on. rows: which of the tokens these are, of one too large to keep all; None: all.
    """

    name: str
    owner: str
    handed: bool
    kind: str
    dtype: torch.dtype
    recorded: torch.Tensor
    truth: torch.Tensor
    rounds_once: bool = False
    heads: int = 1
    rows: torch.Tensor | None = None


class Shadow:
    """The model of one side, run on what that side recorded.

    Args:
        side: the model with its weights as stored, in the dtype that the side computed in.
        temperature: what logits are divided by.
        is_forced: False puts nothing in its place but the tokens: what the whole model makes of the batch.
        is_narrow: half precision is carried in float32 in the truth, too: enough where a whole model's noise is asked
            for, which is many roundings.
    """

    def __init__(
        self,
        side: SideModel,
        recorded: Recorded,
        temperature: float = 1.0,
        is_forced: bool = True,
        *,
        is_narrow: bool = False,
    ) -> None:
        self.causal_lm, self.autocast = side.causal_lm, side.autocast
        self.recorded, self.temperature = recorded, temperature
        self.is_forced, self.is_narrow = is_forced, is_narrow
        self.claims: dict[str, Claim] = {}
        #: Recorded tensors that did not fit what the model has there, and those whose way from the tokens is unknown.
        self.misfits: list[str] = []
        self.unrooted: list[str] = []
        #: Whole numbers that were chosen otherwise than the truth would (experts): name -> share of tokens.
        self.flips: dict[str, float] = {}
        self.modules = _named(self.causal_lm, recorded)
        self._used: set[str] = set()
        self._most = KEPT // 40 // max(1, len(recorded.modules))
        self._left = {"grids": KEPT, "inputs": KEPT}
        self._products = KeptProducts(KEPT)
        self._grids: dict[str, torch.Tensor | None] = {}
        #: What other ranks hold of a tensor that all should hold alike; the tensors whose ranks hold a summand each.
        self._copies: dict[str, dict[int, torch.Tensor]] = {}
        self.summed: list[str] = []
        self._valid = torch.from_numpy(recorded.valid_BL.copy())
        self._valid_at = self._valid.nonzero().T
        self._stack: list[str] = []
        #: Of each of those, whether it was given a recorded tensor; and whether what returned now is a product of one.
        self._reads_record: list[bool] = []
        self._is_once = False
        self._calls: dict[str, int] = {}
        self._noise: dict[str, torch.Tensor] | None = None
        #: Who made a tensor that goes on as it was computed; it is kept, so that its id stays its own.
        self._makers: dict[int, tuple[torch.Tensor, str]] = {}
        self._given: dict[str, list[tuple[Any, Any]]] = {}
        #: What makes log-probabilities of logits, and the logits [N, V] that led to them; the tokens that they are
        #: about, [B, L-1], and how many of those that are recorded these are drawn from.
        self.scoring: Callable[..., torch.Tensor] = score
        self.logits: torch.Tensor | None = None
        self.logprob_mask, self.logprobs_recorded = self._tokens_looked_at()
        #: Whether the head's output is wanted at every position, not only at those tokens'.
        self.needs_logits = is_forced and self._records_head()

    @property
    def unreached(self) -> list[str]:
        """Recorded module tensors that the model's forward never came to."""
        whole = self.causal_lm.base_model_prefix
        return [
            name
            for name in self.recorded.modules
            if name not in self._used and name not in self.misfits and naming.module_of(name) != whole
        ]

    def judge(self) -> None:
        """Fill `claims` with the truth, in order of computation."""
        self._run(exactly)

    def perturb(self, rounding: Rounding) -> dict[str, torch.Tensor]:
        """What the model makes of the same with some rounding: claim name -> its values minus the truth."""
        self._noise = {}
        try:
            self._run(rounding)
            # Errors need no more digits, and there are many of them.
            return {name: moved.float() for name, moved in self._noise.items()}
        finally:
            self._noise = None

    def again(
        self, claim: Claim, change: AbstractContextManager[None], rounding: Rounding = exactly
    ) -> torch.Tensor | None:
        """How far a claim's truth moves under a change of its owner; None where the owner's forward never comes to it.

        The owner alone is run again; where it hands on what another module calls with, the whole model is.
        """
        if claim.kind == "logprobs":
            with self._computing(rounding), change:
                self._noise = {}
                self._scored(self.logits)
                made, self._noise = self._noise, None
            return made.get(claim.name)
        module, calls = self.module(claim.owner), self._given.get(claim.owner, [])
        inside = set(module.modules())
        within = [names[0] for one, names in self.modules if one in inside]
        self._noise = {}
        try:
            # The change last: what it does to a child's output, it does to the recorded one.
            with self._computing(rounding), self._hooked(), change:
                for name in within:
                    self._calls.pop(name, None)
                for args, kwargs in calls:
                    module(*args, **kwargs)
                if claim.name not in self._noise:
                    self._calls.clear()
                    self._makers.clear()
                    self._forward()
            return self._noise.get(claim.name)
        finally:
            self._noise = None

    def claim_as(self, name: str, other: Claim) -> None:
        """Take the truth of the log-probabilities from a run of the same, beside what this side recorded of them."""
        said = self.recorded.logprobs()
        assert said is not None
        recorded_N1 = torch.from_numpy(said[1][:, 1:].astype(np.float64))[self.logprob_mask][:, None]
        self.claims[name] = replace(
            other, name=name, recorded=recorded_N1, dtype=getattr(torch, said[3], torch.float32)
        )

    # ---- the forward

    def _run(self, rounding: Rounding) -> None:
        self._calls.clear()
        self._makers.clear()
        with self._computing(rounding), self._hooked():
            logits = self._forward()
            if logits is not None:
                self._logprobs(logits)

    @contextmanager
    def _computing(self, rounding: Rounding) -> Iterator[None]:
        is_cast = self.autocast is not None
        autocast = torch.autocast("cpu", self.autocast, enabled=is_cast, cache_enabled=False)
        is_narrow = isinstance(rounding, Noise) or self.is_narrow
        products = Products(rounding, self._products, is_narrow=is_narrow)
        with torch.no_grad(), autocast, products, Arithmetic(rounding, is_narrow=is_narrow):
            yield

    def _forward(self) -> Any:
        recorded = self.recorded
        ids, positions = recorded.ids_BL, recorded.positions_BL
        width = recorded.grid_shape[1]
        valid = self._valid
        if positions is None:
            positions = np.broadcast_to(np.arange(width), recorded.grid_shape)
        # Behind a sample its positions go on: a fall would be read as the beginning of another sample of a pack.
        last = positions[np.arange(len(positions)), np.maximum(recorded.sizes - 1, 0)]
        behind = last[:, None] + 1 + np.arange(width) - recorded.sizes[:, None]
        position_ids = torch.from_numpy(np.where(recorded.valid_BL, positions, behind).astype(np.int64))
        given: dict[str, Any] = {"attention_mask": valid.long(), "position_ids": position_ids, "use_cache": False}
        if ids is not None:
            given["input_ids"] = torch.from_numpy(ids)
        else:
            embedding = self.causal_lm.get_input_embeddings().weight
            nothing = torch.full((*valid.shape, embedding.shape[1]), float("nan"), dtype=torch.float64)
            given["inputs_embeds"] = TrueTensor(nothing, embedding.dtype)
        columns = self._columns()
        if columns is not None:
            given["logits_to_keep"] = columns
        known = inspect.signature(self.causal_lm.forward).parameters
        is_open = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
        out = self.causal_lm(**{name: value for name, value in given.items() if is_open or name in known})
        return getattr(out, "logits", None)

    def _tokens_looked_at(self) -> tuple[torch.Tensor, int]:
        """The tokens [B, L-1] whose log-probabilities are held against the recorded ones, and how many are recorded."""
        said = None if self.recorded.ids_BL is None else self.recorded.logprobs()
        if said is None:
            return self._valid[:, 1:], 0
        mask = torch.from_numpy(said[2][:, 1:]) & self._valid[:, 1:]
        count = int(mask.sum())
        most = max(_LEAST_TOKENS, LOGITS // 8 // self.causal_lm.config.get_text_config().vocab_size)
        if count > most:
            dropped = torch.randperm(count, generator=torch.Generator().manual_seed(0))[most:]
            samples, positions = mask.nonzero()[dropped].T
            mask[samples, positions] = False
        return mask, count

    def _columns(self) -> torch.Tensor | None:
        """The positions whose logits are looked at; None for all, as where the head's own tensors are put in place."""
        known = inspect.signature(self.causal_lm.forward).parameters
        if self.needs_logits or "logits_to_keep" not in known or not self.logprobs_recorded:
            return None
        return self.logprob_mask.any(0).nonzero()[:, 0]

    def _records_head(self) -> bool:
        head = self.causal_lm.get_output_embeddings()
        names = next((names for module, names in self.modules if module is head), [])
        return any(naming.module_of(name).partition("[")[0] in names for name in self.recorded.modules)

    def _logprobs(self, logits: torch.Tensor) -> None:
        if self.recorded.ids_BL is None or self.recorded.logprobs() is None:
            return
        columns = self._columns()
        mask = self.logprob_mask if columns is None else self.logprob_mask[:, columns]
        rows_NV = (logits[:, :-1] if columns is None else logits)[mask]
        if self._noise is None:
            self.logits = rows_NV
        self._scored(rows_NV)

    def _scored(self, rows_NV: torch.Tensor | None) -> None:
        ids, said = self.recorded.ids_BL, self.recorded.logprobs()
        if ids is None or said is None or rows_NV is None:
            return
        name, values, _about, dtype = said
        mask = self.logprob_mask
        found = self.scoring(rows_NV, self.temperature, torch.from_numpy(ids)[:, 1:][mask][:, None])
        with _disable_current_modes():
            chosen = found.true if isinstance(found, TrueTensor) else found
            recorded = torch.from_numpy(values[:, 1:].astype(np.float64))
            native = getattr(torch, dtype, torch.float32)
            truth_N1 = chosen.double()[:, None]
            if self._noise is not None:
                if name in self.claims:
                    self._noise[name] = truth_N1 - self.claims[name].truth
                return
            whole = torch.from_numpy(said[2])[:, 1:] & self._valid[:, 1:]
            rows = mask[whole].nonzero()[:, 0] if int(mask.sum()) < self.logprobs_recorded else None
            self._claim(name, "logprobs", False, "logprobs", native, recorded[mask][:, None], truth_N1, rows=rows)

    # ---- recorded tensors in their place

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = []
        if self.is_forced:
            for module, names in self.modules:
                handles.append(module.register_forward_pre_hook(self._before(names), with_kwargs=True))
                handles.append(module.register_forward_hook(self._after(module, names)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()
            self._reads_record.clear()

    def _before(self, names: list[str]) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            caller = self._stack[-1] if self._stack else "the model"
            call = self._calls[names[0]] = self._calls.get(names[0], 0) + 1
            self._stack.append(names[0])
            numbered = [name if call == 1 else f"{name}[{call - 1}]" for name in names]
            words = _argument_names(module)

            def taken(position: int | None, word: str | None, value: Any) -> Any:
                keys = [str(key) for key in (position, word) if key is not None]
                paths = [f"{name}.inputs.{key}" for name in numbered for key in keys]
                return self._replaced(paths, value, caller, handed=True, module=module)

            args = tuple(taken(at, words[at] if at < len(words) else None, value) for at, value in enumerate(args))
            kwargs = {
                word: taken(words.index(word) if word in words else None, word, value) for word, value in kwargs.items()
            }
            self._reads_record.append(bool(args) and getattr(args[0], "source", None) is not None)
            if self.autocast is not None and isinstance(module, torch.nn.Linear) and args:
                # What it reads is what was recorded, rounded: known, and no noise.
                args = (rounded_to(self.autocast, args[0]), *args[1:])
            if self._noise is None and self._has_room("inputs", _bytes(args) + _bytes(tuple(kwargs.values()))):
                self._given.setdefault(names[0], []).append((args, kwargs))
            return args, kwargs

        return hook

    def _after(self, module: Any, names: list[str]) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> Any:
            self._stack.pop()
            self._is_once = self._reads_record.pop() and isinstance(module, torch.nn.Linear)
            call = self._calls[names[0]]
            numbered = [name if call == 1 else f"{name}[{call - 1}]" for name in names]
            paths = [f"{name}.output" for name in numbered]
            return self._replaced(paths, output, names[0], handed=False, module=module)

        return hook

    def _replaced(self, paths: list[str], value: Any, owner: str, *, handed: bool, module: Any) -> Any:
        if isinstance(value, torch.Tensor):
            with _disable_current_modes():
                return self._one(paths, value, owner, handed, module)
        if isinstance(value, (tuple, list)):
            alone = sum(isinstance(one, torch.Tensor) for one in value) == 1
            made = [
                self._replaced(
                    [*(f"{path}.{at}" for path in paths), *(paths if alone or (at == 0 and not handed) else ())],
                    inner, owner, handed=handed, module=module,
                )
                for at, inner in enumerate(value)
            ]  # fmt: skip
            return type(value)(made) if type(value) in (tuple, list) else value
        if isinstance(value, dict):
            for key, inner in list(value.items()):
                if isinstance(inner, (torch.Tensor, tuple, list)):
                    value[key] = self._replaced(
                        [f"{path}.{key}" for path in paths], inner, owner, handed=handed, module=module
                    )
        return value

    def _one(self, paths: list[str], value: torch.Tensor, owner: str, handed: bool, module: Any) -> torch.Tensor:
        name = next((path for path in paths if path in self.recorded.modules), None)
        if name is None and not handed:
            name = next((f"{path}.0" for path in paths if f"{path}.0" in self.recorded.modules), None)
        if name is None or _tells_nothing(name, paths, value, tuple(self._valid.shape)):
            self._used.update(() if name is None else (name,))
            if not handed:
                self._makers.setdefault(id(value), (value, owner))
            return value
        if handed:
            owner = self._makers.get(id(value), (value, owner))[1]
        self._used.add(name)
        grid = self._grid(name, value)
        if grid is None:
            if name not in self.misfits:
                self.misfits.append(name)
            return value
        if not value.is_floating_point():
            same = grid == value
            self.flips[name] = 1.0 - float(same.double().mean())
            return grid.to(value.dtype)
        dtype = getattr(torch, self.recorded.modules[name].dtype, torch.float32)
        computed = value.true if isinstance(value, TrueTensor) else value
        if self._noise is not None:
            self._moved(name, computed)
            for rank in self._copies.get(name, {}):
                self._moved(f"{name} of rank {rank}", computed)
        elif (rows := self._rows(computed)) is not None:
            forward = type(module).__name__
            once = self._is_once and not handed
            kind = kind_of(forward if not handed else type(self.module(owner)).__name__, owner)
            truth, recorded_rows = rows.double(), self._rows(grid)
            assert recorded_rows is not None
            self._claim(name, owner, handed, kind, dtype, recorded_rows.double(), truth, once)
            for rank, copy in self._copies.get(name, {}).items():
                copy_rows = self._rows(copy)
                assert copy_rows is not None
                self._claim(f"{name} of rank {rank}", owner, handed, kind, dtype, copy_rows.double(), truth, once)
        is_narrow = isinstance(value, TrueTensor) and value.true.dtype == torch.float32
        made = TrueTensor(grid.to(torch.float32 if is_narrow else torch.float64), dtype)
        made.source = name
        return made

    def _grid(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        if name in self._grids:
            return self._grids[name]
        shape = tuple(value.shape)
        grid = _read(self.recorded.grid_of(name, shape))
        if grid is not None and len(self.recorded.ranks) > 1 and name not in self._copies:
            copies = {rank: copy for rank, held in self.recorded.copies(name, shape).items()
                      if (copy := _read(held)) is not None}  # fmt: skip
            self._copies[name] = copies
            if copies and value.is_floating_point():
                truth = value.true if isinstance(value, TrueTensor) else value.double()
                summed = grid.double() + sum(copy.double() for copy in copies.values())
                if (summed - truth).norm() < _SUMS * (grid - truth).norm():
                    # An engine often adds its ranks' sums where the next norm reads them.
                    grid, self._copies[name] = summed, {}
                    self.summed.append(name)
        elif name in self.summed and grid is not None:
            grid = grid.double() + sum(_read(copy).double() for copy in self.recorded.copies(name, shape).values())  # type: ignore[union-attr]
        if grid is None or self._has_room("grids", grid.numel() * grid.element_size()):
            self._grids[name] = grid
        return grid

    def _has_room(self, what: str, size: int) -> bool:
        """Whether so many bytes more are kept: what is not is read, or computed, again."""
        self._left[what] -= size
        return self._left[what] > 0

    def _rows(self, value: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor | None:
        """The rows of a tensor that are tokens, [N, C], or those `chosen` of them; None where it has no token axis."""
        shape = tuple(self._valid.shape)
        at = self._valid_at if chosen is None else self._valid_at[:, chosen]
        samples, positions = at
        if tuple(value.shape[:2]) == shape:
            return value[samples, positions].reshape(len(samples), -1)
        if value.ndim >= 3 and (value.shape[0], value.shape[2]) == shape:
            return value.movedim(2, 1)[samples, positions].reshape(len(samples), -1)
        if value.ndim >= 1 and value.shape[0] == shape[0] * shape[1]:
            return value[samples * shape[1] + positions].reshape(len(samples), -1)
        return None

    def _moved(self, name: str, computed: torch.Tensor) -> None:
        """Keep how far a claim's truth is moved in this run."""
        claim = self.claims.get(name)
        rows = None if claim is None else self._rows(computed, claim.rows)
        if self._noise is not None and claim is not None and rows is not None:
            self._noise[name] = rows.double() - claim.truth

    def module(self, name: str) -> Any:
        """The module of a claim's owner; the whole model where it is none of its modules."""
        return self.find(name) or self.causal_lm

    def find(self, name: str) -> Any | None:
        """A module by any of its names."""
        return next((module for module, names in self.modules if name in names), None)

    def changed(self, claim: Claim) -> Any:
        """What a hypothesis of a claim changes: its owner; of log-probabilities how they are made of logits."""
        return self if claim.kind == "logprobs" else self.module(claim.owner)

    def _claim(
        self,
        name: str,
        owner: str,
        handed: bool,
        kind: str,
        dtype: torch.dtype,
        recorded: torch.Tensor,
        truth: torch.Tensor,
        once: bool = False,
        rows: torch.Tensor | None = None,
    ) -> None:
        if truth.isnan().any() and not recorded.isnan().any():
            self.unrooted.append(name)
            return
        if name not in self.claims:
            heads = 1
            if kind == "attention" and handed:
                heads = stated(self.causal_lm.config, "num_attention_heads", owner) or 1
            heads = heads if truth.shape[1] % heads == 0 else 1
            if kind != "logprobs" and (rows := _chosen_rows(truth, recorded, self._most)) is not None:
                truth, recorded = truth[rows], recorded[rows]
            self.claims[name] = Claim(name, owner, handed, kind, dtype, recorded, truth.clone(), once, heads, rows)


def _read(values: Any) -> torch.Tensor | None:
    """A recorded grid, whole numbers in the widest dtype."""
    if values is None:
        return None
    if np.issubdtype(values.dtype, np.integer) or values.dtype == np.bool_:
        return torch.from_numpy(values.astype(np.int64))
    kept = values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(kept) if kept.flags.writeable else kept.copy())


def _chosen_rows(truth: torch.Tensor, recorded: torch.Tensor, most: int) -> torch.Tensor | None:
    """Rows that are kept of a tensor of more than `most` elements, 16 at least: half of them by chance, a quarter the
    worst, a quarter the first; None for all."""
    count, rows = max(16, most // max(1, truth.shape[1])), len(truth)
    if rows <= count:
        return None
    worst = (recorded - truth).nan_to_num().square().mean(1).argsort(descending=True)[: count // 4]
    drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[: count // 2]
    return torch.cat([drawn, worst, torch.arange(count // 4)]).unique()


def _bytes(values: tuple[Any, ...]) -> int:
    return sum(8 * one.numel() for one in values if isinstance(one, torch.Tensor))


def score(logits: torch.Tensor, temperature: float, targets: torch.Tensor, cut: int | None = None) -> torch.Tensor:
    """Log-probabilities [N] of the targets [N, 1] by logits [N, V]; `cut`: normalised over so many tokens of the
    vocabulary.

    In two operations: what rounding leaves of a small difference is that of its large terms.
    """
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    return scaled.gather(-1, targets)[..., 0] - torch.logsumexp(scaled[..., :cut], dim=-1)


def _named(causal_lm: Any, recorded: Recorded) -> list[tuple[Any, list[str]]]:
    """Every module of the model with the names that recordings have for it, this one's own first, then the plainest."""
    backbone = causal_lm.base_model
    used = {naming.module_of(name) for name in recorded.modules}
    short = {id(module): name for name, module in backbone.named_modules() if name}
    found = []
    for whole, module in causal_lm.named_modules():
        if not whole or getattr(type(module), "forward", None) is torch.nn.Module.forward:
            continue
        names = [short.get(id(module)), naming.canonical(f"{whole}.output").removesuffix(".output"), whole]
        unique = sorted(dict.fromkeys(name for name in names if name), key=lambda name: name not in used)
        if module is not backbone:
            found.append((module, unique))
    return found


def _tells_nothing(name: str, paths: list[str], value: torch.Tensor, shape: tuple[int, int]) -> bool:
    """Masks, whose form follows the kernel, positions, which are the recording's own, and attention's weights."""
    words = {path.rpartition(".")[2] for path in [name, *paths]}
    is_square = value.ndim == 4 and value.shape[2] == value.shape[3] == shape[1] and value.shape[0] == shape[0]
    return value.dtype == torch.bool or any("mask" in word or word == "position_ids" for word in words) or is_square


def _argument_names(module: Any) -> list[str]:
    words = inspect.signature(module.forward).parameters.values()
    return [one.name for one in words if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def kind_of(class_name: str, path: str) -> str:
    """What a module is, by the name of its class: what its limits and recipes go by."""
    word = class_name.lower()
    leaf = path.rpartition(".")[2].lower()
    for kind, marks in _KINDS:
        if any(mark in word for mark in marks):
            return kind
    return "linear" if leaf.endswith(("proj", "lm_head", "dense")) else "glue"


_KINDS = (
    ("logprobs", ("logprobs",)),
    ("experts", ("experts",)),
    ("router", ("router", "gate", "topk")),
    ("rope", ("rotary",)),
    ("norm", ("norm",)),
    ("attention", ("attention", "attn")),
    ("scan", ("mamba", "deltanet", "mixer", "ssm", "conv1d")),
    ("mlp", ("mlp", "feedforward", "moe")),
    ("embedding", ("embedding",)),
    ("linear", ("linear",)),
    ("layer", ("layer", "block")),
)

"""What moves what: one token of a batch changed, and whose hidden states move with it, from which module on.

Everything runs in float64 where memory allows (the weights as stored, cast and put back), so that what a token cannot
see moves it by nothing and what it can see moves it visibly, whatever the dtype of the cell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from msgspec import Struct, field
from msgspec.structs import replace

from replay_core.replay import compiling, settings
from replay_core.replay.asking import Asking
from replay_core.replay.capture import Capture, modules_matching
from replay_core.replay.cell import BatchReplay
from replay_core.replay.double import finite_masks
from replay_core.replay.mixed_dtypes import widened
from replay_core.replay.model import LoadedModel
from replay_core.replay.module_kinds import kind_of, turns
from replay_core.replay.packing import Forward
from replay_core.replay.stated import stated
from replay_core.samples.layout import Bools, Ints

#: Relative change from which on a token has moved, and up to which it has not; noise of other groupings (experts) and
#: of float32 inside a float64 model lies below, one key among thousands above.
MOVED, STILL = 1e-6, 1e-9
_COARSER = {torch.float64: 1.0, torch.float32: 1e3, torch.bfloat16: 3e5, torch.float16: 1e5}
#: How often the same is run again: what alternates is as it was every other time, or every third.
_REPEATS = 3
#: Seeds in an order in which nothing that counts calls would give the same for the same seed; several, as a layer that
#: is dropped or not may fall the same way twice.
_SEEDS = (1, 1, 2, 3, 1, 4, 2, 5, 3, 1, 3)
#: Calls between two passes of which one may keep something, and their tokens.
_CALLS, _SHORT = 10, 8
#: Share of the steps from token to token by which what counts goes up by one; a new sample is none.
_COUNTING = 0.8
#: Samples that are changed one after the other.
_MOST_SAMPLES = 4
#: Samples of which each gets its own tokens back amid others of one token.
_MOST_AMID = 16
#: Random directions onto which a token's vector is laid: one number each is enough to see that it changed.
_DIRECTIONS = 3
#: How the work of one head is named after the tensor that holds all of them.
_HEAD = "[head "
#: A causal convolution puts out a few tokens more than it was given.
_CONV_TAIL = 8


class TensorPlace(Struct, frozen=True):
    """A tensor, the module whose work it is, what that is (position, state, mixer, router or other), and its place in
    the order of computation."""

    tensor: str
    module: str
    kind: str
    order: int = 0

    def to_mapping(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "module": self.module, "kind": self.kind, "order": self.order}


class Trace(Struct):
    """What a pass left of every token, by sample and position: each tensor laid onto a few directions, and its norm.

    laid: name -> [N, _DIRECTIONS + 1] float64, in order of computation; hidden [N, D] float64, the final states.
    """

    laid: dict[str, torch.Tensor]
    hidden: torch.Tensor


class Sight(Struct):
    """What one intervention moved. what: other (a whole sample), padding, token (one of every sample), again (nothing),
    seed (of what is drawn), first (nothing, in the first call of a model loaded anew), fresh (nothing, in a model
    loaded anew, after other tokens), wider (more columns of padding), company (one more sample in the
    pack), shifted (either of them in front, where one behind moves nothing).

    moved: (sample, relation, tokens, first position, last position); relation: other, own, earlier, later.
    """

    what: str
    sample: int | None
    token: int | None
    moved: list[tuple[int, str, int, int, int]] = field(default_factory=list)
    first: TensorPlace | None = None
    #: Tokens right after the changed one that did not move at all.
    deaf: list[int] = field(default_factory=list)
    trace: Trace | None = None
    #: Share of the tokens of the samples that moved which a single one of the changed tokens moves where it first does.
    spread: float | None = None
    #: Share of their tokens that all of the changed ones move there.
    reach: float | None = None
    #: Tokens of the changed sample that move nothing of their own there: what they were is another's now.
    given_away: int | None = None
    #: How many tokens right behind the changed sample move there, one after the other, if no others do; else 0.
    onward: int | None = None
    #: The token that all other samples are made of while one of them gets its own back.
    amid: int | None = None
    #: Samples that move where the first does; by the last layer they have moved others in turn.
    there: list[int] = field(default_factory=list)

    def to_mapping(self, by: str) -> dict[str, Any]:
        names = ("sample", "relation", "tokens", "first", "last")
        return {
            "by": by, "what": self.what, "sample": self.sample, "token": self.token,
            "moved": [dict(zip(names, one, strict=True)) for one in self.moved],
            "first": None if self.first is None else self.first.to_mapping(), "deaf": self.deaf, "spread": self.spread,
            "reach": self.reach, "amid": self.amid, "given_away": self.given_away,
            "onward": self.onward,
        }  # fmt: skip


class TokenWatch(Capture):
    """A capture that keeps of every tensor only how each token's vector lies to a few directions.

    heads: the attention whose work each head is kept of by itself, and their number: one may lose keys that the others
    see, and what goes into the output projection is the heads side by side. by_key: names of what is not kept: scores
    of a token with every other, of which those that it may not see are hidden only later.
    """

    def __init__(
        self,
        backbone: torch.nn.Module,
        modules: Sequence[str],
        forward: Forward,
        heads: tuple[str, int] | None = None,
        by_head: Container[str] = (),
        by_key: Container[str] = (),
    ) -> None:
        self._by_key = by_key
        self._rows, width = (int(size) for size in forward.input_ids.shape)
        self._heads = heads
        super().__init__(backbone, modules, width, by_head)
        self.laid: dict[str, torch.Tensor] = {}

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        found = None if name in self._by_key else by_slot(tensor.detach(), self._rows, self._width)
        if found is None:
            return
        self.laid[name] = _laid(found)
        of, inputs, _ = name.partition(".inputs")
        if self._heads and inputs and of.rpartition(".")[0] == self._heads[0] and not found.shape[-1] % self._heads[1]:
            for number, part in enumerate(found.chunk(self._heads[1], -1)):
                self.laid[f"{name}{_HEAD}{number}]"] = _laid(part)


class Observer:
    """One setting of a model on one batch, and what changes of the batch do to it."""

    def __init__(self, cell: BatchReplay, asking: Asking | None = None) -> None:
        self.cell = cell
        self.asking = Asking() if asking is None else asking
        arrangement = cell.arrangement
        self.slots = torch.from_numpy(np.ascontiguousarray(arrangement.layout.slots()))
        self.sample_N = arrangement.layout.sample_BS.reshape(-1)[self.slots.numpy()]
        self.position_N = arrangement.layout.position_BS.reshape(-1)[self.slots.numpy()]
        self.ids = arrangement.input_ids.reshape(-1)
        self.modules = modules_matching(cell.model.backbone, None)
        self.scale = _COARSER[next(cell.model.causal_lm.parameters()).dtype]
        self.used = np.unique(self.ids[self.slots.numpy()])

    def hidden(self, ids: Ints | None = None, call: compiling.Call = compiling.plain) -> torch.Tensor:
        """[N, D] float64: the final hidden states, by sample and position; `ids`: other tokens in the slots."""
        with self.asking.one_pass(), torch.no_grad(), evaluating(self.cell.model.causal_lm):
            return self._joined([self.cell.forward(call, one) for one in self.forwards(ids)])

    def trace(
        self, ids: Ints | None = None, after_each: Callable[[], Any] = lambda: None,
        heads: tuple[str, int] | None = None,
    ) -> Trace:  # fmt: skip
        """A pass with every module watched; `ids`: other tokens in the slots; heads: see `TokenWatch`."""
        laid: list[dict[str, torch.Tensor]] = []
        hidden = []
        with self.asking.one_pass(), torch.no_grad(), evaluating(self.cell.model.causal_lm):
            for forward in self.forwards(ids):
                cell = self.cell
                watch = TokenWatch(cell.model.backbone, self.modules, forward, heads, cell.by_head, cell.by_key)
                with watch:
                    hidden.append(self.cell.forward(compiling.plain, forward))
                laid.append(watch.laid)
                after_each()
        everywhere = [name for name in laid[0] if all(name in one for one in laid)]
        return Trace({name: self._joined([one[name] for one in laid]) for name in everywhere}, self._joined(hidden))

    def heads(self, module: str) -> tuple[str, int] | None:
        """An attention whose heads can be told apart, and how many it has."""
        number = stated(self.cell.model.config, "num_attention_heads", module)
        return (module, number) if number is not None and number > 1 else None

    def nudged(self, module: str, token: int) -> Trace:
        """A pass in which one token of every sample comes to this module as another, and to nothing before it.

        By its last layers a model has put every token's past into the later ones: a token that is changed where the
        model begins says nothing of what those layers see.
        """
        chosen = np.zeros(self.ids.size, dtype=self.ids.dtype)
        chosen[self.slots.numpy()[self.position_N == token]] = 1
        waiting = [torch.from_numpy(one.input_ids != 0) for one in self.forwards(chosen)]

        def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            which_BS = waiting[0]
            given: Any = args[0] if args else kwargs.get("hidden_states")
            if not torch.is_tensor(given) or not given.is_floating_point() or given.shape[:-1] != which_BS.shape:
                return None
            other = torch.where(which_BS.to(given.device)[..., None], given.roll(1, -1), given)
            return ((other, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": other})

        hook = self.cell.model.backbone.get_submodule(module).register_forward_pre_hook(before, with_kwargs=True)
        try:
            return self.trace(after_each=lambda: waiting.pop(0), heads=self.heads(module))
        finally:
            hook.remove()

    def place(self, tensor: str, order: int = 0) -> TensorPlace:
        """Whose work a captured tensor is: a module's output its own, its input that of the module around it."""
        name, _, _ = tensor.partition(".output")
        if name == tensor:
            name = tensor.partition(".inputs")[0].rpartition(".")[0]
        name = name.partition("[")[0]
        module = self.cell.model.backbone.get_submodule(name) if name else self.cell.model.backbone
        kind = kind_of(name, module)
        if kind == "other" and isinstance(module, torch.nn.Embedding) and self._counts(module):
            kind = "position"
        return TensorPlace(tensor, name or "the model", kind, order)

    def _counts(self, table: torch.nn.Embedding) -> bool:
        """Whether what a table is asked for goes up by one from token to token, as positions do and nothing else."""
        given: list[torch.Tensor] = []
        hook = table.register_forward_pre_hook(lambda _table, args: given.extend(args[:1]))
        try:
            self.hidden()
        finally:
            hook.remove()
        steps = torch.cat([one.diff(dim=-1).reshape(-1) for one in given]) if given else torch.empty(0)
        return bool(steps.numel()) and float((steps == 1).double().mean()) > _COUNTING

    def sights(
        self, base: Trace, most: int = _MOST_SAMPLES, *, with_padding: bool = True, thorough: bool = False,
        on_sight: Callable[[Sight], None] = lambda _sight: None,
    ) -> list[Sight]:  # fmt: skip
        """Every intervention, one after the other; thorough: a sample that moves nobody gets still other tokens;
        on_sight: hears of each sample that was changed, at once.

        Of a model that draws, only that: whatever else were changed, the draw would move as well.
        """
        numbers = np.unique(self.sample_N).tolist()
        seen, drawn = self.asking("the same again", lambda: self._again(base), ([], None))
        if drawn is not None:
            return [drawn]
        chosen = [*numbers[: most - 1], *numbers[most - 1 :][-1:]] if len(numbers) > 1 else []
        others: list[Sight] = []
        for one in chosen:
            sight = self.asking(f"sample {one}", partial(self._other, base, one, thorough), None)
            if sight is not None:
                others.append(sight)
                on_sight(sight)
        if thorough and len(chosen) < len(numbers) and not any(one.moved for one in others):
            others += self.asking("samples left out", lambda: self._left_out(base, numbers), [])
        if thorough and chosen and not any(one.moved for one in others):
            others += self.asking("samples amid others of one token", lambda: self._amid(numbers[:_MOST_AMID]), [])
        seen += others
        padding = np.ones(self.ids.size, dtype=bool)
        padding[self.slots.numpy()] = False
        if with_padding and padding.any():
            seen += self.asking(
                "the padding", lambda: self._of_padding(base, padding, chosen, thorough=thorough), []
            )  # fmt: skip
        longest = int(np.bincount(self.sample_N).max())
        for token in sorted({0, 1, longest // 2, longest - 1} & set(range(longest))):
            found = self.asking(f"token {token}", partial(self._of_token, base, token, keep=True), None)
            seen += [] if found is None else [found]
        return seen

    def _again(self, base: Trace) -> tuple[list[Sight], Sight | None]:
        """Nothing changed, and of what moves all the same what the seed moves, if it is drawn."""
        # What is carried over from call to call is what the call before had: after the same tokens it would not show.
        self.hidden(self._changed(self.sample_N >= 0))
        for _ in range(_REPEATS):
            seen = [self._seen(base, Sight("again", None, None), self.ids)]
            if seen[0].moved:
                return seen, self._drawn()
        self._meanwhile()
        return [self._seen(base, Sight("again", None, None), self.ids)], None

    def _left_out(self, base: Trace, numbers: Sequence[int]) -> list[Sight]:
        mover = self._mover(base, numbers)
        return [] if mover is None else [self._other(base, mover, thorough=True)]

    def _amid(self, samples: Sequence[int]) -> list[Sight]:
        """A sample that gets its own tokens back where all others are made of one: what several samples have together
        (a rare token, a greatest value) no single one of them takes away, but a single one brings it.
        """
        for word in dict.fromkeys(self.used[[0, -1]].tolist()):
            plain = self.ids.copy()
            plain[self.slots.numpy()] = word
            base_ND = self.hidden(plain)
            for sample in samples:
                mine = self.sample_N == sample
                ids = plain.copy()
                ids[self.slots.numpy()[mine]] = self.ids[self.slots.numpy()[mine]]
                if self._differ(base_ND[~mine], self.hidden(ids)[~mine]):
                    return [self._seen(self.trace(plain), Sight("other", sample, None, amid=int(word)), ids)]
        return []

    def _of_padding(self, base: Trace, padding: Bools, rows: Sequence[int], *, thorough: bool) -> list[Sight]:
        seen = [self._seen(base, Sight("padding", None, None), self._with_other_ids(padding))]
        # Padding that takes places need not notice another id, but does notice one of another kind.
        for word in dict.fromkeys(self.used[[0, -1, self.used.size // 2]].tolist()) if thorough else ():
            if seen[0].moved:
                break
            ids = np.where(padding, word, self.ids).astype(self.ids.dtype)
            if self._differ(base.hidden, self.hidden(ids)):
                seen = [self._seen(base, Sight("padding", None, None), ids)]
        if thorough and rows and seen[0].first is not None and seen[0].first.kind in ("other", "router"):
            seen += self._padding_of_rows(base, padding, rows)
        return seen

    def of_token(self, base: Trace, token: int) -> Sight:
        """One token of every sample changed. An earlier one that moves only with the tokens of other samples is none
        that sees the future.
        """
        return self._of_token(base, token, keep=True)

    def of_sample(self, base: Trace, sample: int) -> Sight:
        return self._other(base, sample, thorough=True)

    def _of_token(self, base: Trace, token: int, *, keep: bool) -> Sight:
        mine = self.position_N == token
        sight = self._seen(base, Sight("token", None, token), self._changed(mine), keep=keep)
        if sight.moved and np.unique(self.sample_N).size > 1:
            before = self.position_N < token
            kept = []
            for one in sight.moved[:_MOST_SAMPLES]:
                own = self.sample_N == one[0]
                moved = ~(relative(base.hidden, self.hidden(self._changed(mine & own))).numpy() <= MOVED * self.scale)
                if (moved & own & before).any():
                    kept.append(one)
            sight.moved = kept
            sight.first = sight.first if kept else None
        return sight

    def _mover(self, base: Trace, numbers: Sequence[int]) -> int | None:
        """A sample that moves another, of more than are changed one by one: all whose number has a bit are changed at
        once, so that of any two samples one is changed without the other.
        """
        rank_N = np.searchsorted(np.asarray(numbers), self.sample_N)
        for bit in range(max(1, int(rank_N.max()).bit_length())):
            for value in (0, 1):
                changed = (rank_N >> bit & 1) == value
                group = np.unique(rank_N[changed]).tolist()
                if not self._moves(base, changed, ~changed):
                    continue
                while len(group) > 1:
                    half = group[: len(group) // 2]
                    group = half if self._moves(base, np.isin(rank_N, half), ~changed) else group[len(half) :]
                return int(numbers[group[0]])
        return None

    def _moves(self, base: Trace, changed_N: Bools, watched_N: Bools) -> bool:
        distance_N = relative(base.hidden, self.hidden(self._changed(changed_N))).numpy()
        return bool((~(distance_N <= MOVED * self.scale) & watched_N).any())

    def _spread(self, base: Trace, sight: Sight, ids: Ints) -> tuple[float | None, float | None]:
        """`Sight.reach` and `Sight.spread`: the last token, or the last that moves somebody."""
        if sight.first is None:
            return None, None
        name = sight.first.tensor
        concerned = np.isin(self.sample_N, [one[0] for one in sight.moved]) & (self.sample_N != sight.sample)
        group = np.flatnonzero(self.sample_N == sight.sample)
        moved = np.zeros(self.sample_N.size, dtype=bool)

        def moves(some: Ints) -> Bools:
            changed = self.ids.copy()
            changed[self.slots.numpy()[some]] = ids[self.slots.numpy()[some]]
            trace = self.trace(changed)
            if name not in trace.laid:
                return moved & False
            found: Bools = self.moved(base, trace, name) & concerned
            return found

        reach = float(moves(group).sum() / concerned.sum())
        moved = moves(group[-1:])
        group = group[-1:] if moved.any() else group
        while group.size > 1:
            # The later half first: by its later layers an early token has moved all that come after it.
            half = group[group.size // 2 :]
            moved = moves(half)
            if moved.any():
                group = half
            else:
                group, moved = group[: -half.size], moved & False
        moved = moves(group)
        return reach, float(moved.sum() / concerned.sum()) if moved.any() else None

    def _there(self, base: Trace, sight: Sight, ids: Ints) -> tuple[int | None, int | None]:
        """`Sight.given_away` and `Sight.onward`. Of what is nothing anyway, as a token that no expert takes, none is
        given away.
        """
        assert sight.first is not None
        name, trace = sight.first.tensor, self.trace(ids)
        if name not in trace.laid:
            return None, None
        something = (base.laid[name][:, -1] > 0).numpy()
        mine = self.sample_N == sight.sample
        changed = mine & (ids[self.slots.numpy()] != self.ids[self.slots.numpy()])
        given = int((changed & something & ~self.moved(base, trace, name, STILL)).sum())
        moved = np.flatnonzero(self.moved(base, trace, name) & ~mine)
        behind = np.flatnonzero(mine)[-1] + 1 + np.arange(moved.size)
        return given, moved.size if np.array_equal(moved, behind) else 0

    def _padding_of_rows(self, base: Trace, padding: Bools, rows: Sequence[int]) -> list[Sight]:
        """What the padding of one row moves of the others: what takes all there is together takes that as well."""
        shape, found = self.cell.arrangement.input_ids.shape, []
        sample_S = np.full(self.ids.size, -1)
        sample_S[self.slots.numpy()] = self.sample_N
        of_row = sample_S.reshape(shape).max(axis=1, keepdims=True)
        for row in rows:
            here = padding & np.broadcast_to(of_row == row, shape).reshape(-1)
            if here.any():
                sight = self._seen(base, Sight("padding", row, None), self._with_other_ids(here))
                sight.moved = [one for one in sight.moved if one[0] != row]
                found += [sight] if sight.moved else []
        return found

    def _meanwhile(self) -> None:
        """A few calls of a few tokens: what is kept of several calls (the greatest of the last) is then of these."""
        generator = np.random.default_rng(0)
        words = generator.integers(0, int(self.cell.model.config.vocab_size), (_CALLS, 1, _SHORT))
        with torch.no_grad(), evaluating(self.cell.model.causal_lm):
            for ids in words:
                self.cell.forward(compiling.plain, Forward(ids, np.arange(_SHORT)[None], None))

    def _drawn(self) -> Sight | None:
        """What another seed moves, where one seed is always the same: no state, which knows of no seed, would be."""
        passes: dict[int, torch.Tensor] = {}
        for seed in _SEEDS:
            with settings.seeded(seed):
                hidden_ND = self.hidden()
            if self._differ(passes.setdefault(seed, hidden_ND), hidden_ND):
                return None
        first = _SEEDS[0]
        other = next((seed for seed, one in passes.items() if self._differ(passes[first], one)), None)
        if other is None:
            return None
        with settings.seeded(first):
            base = self.trace()
        with settings.seeded(other):
            return self._seen(base, Sight("seed", None, None), self.ids)

    def _differ(self, a_ND: torch.Tensor, b_ND: torch.Tensor) -> bool:
        return bool((~(relative(a_ND, b_ND) <= MOVED * self.scale)).any())

    def _other(self, base: Trace, sample: int, thorough: bool) -> Sight:
        """A sample with other tokens; of several draws the one that moves most tokens of others. What takes the
        tokens of all together (an expert of limited capacity) need not notice that they changed, but does notice that
        all are one.
        """
        mine = self.sample_N == sample
        draws = [self._changed(mine)]
        if thorough:
            here = np.zeros(self.ids.size, dtype=bool)
            here[self.slots.numpy()[mine]] = True
            words = self.used[[0, -1, self.used.size // 2]]
            draws += [np.where(here, word, self.ids).astype(self.ids.dtype) for word in words]
        moved_by = [relative(base.hidden, self.hidden(ids)).numpy()[~mine] for ids in draws[1:]]
        count = [int((~(moved <= MOVED * self.scale)).sum()) for moved in moved_by]
        ids = draws[0]
        sight = self._seen(base, Sight("other", sample, None), ids)
        if count and max(count) > sum(one[2] for one in sight.moved):
            ids = draws[1 + count.index(max(count))]
            sight = self._seen(base, Sight("other", sample, None), ids)
        if thorough and sight.moved and sight.first is not None and sight.first.kind == "other":
            sight.reach, sight.spread = self._spread(base, sight, ids)
            sight.given_away, sight.onward = self._there(base, sight, ids)
        elif thorough and sight.moved and sight.first is not None and sight.first.kind == "router":
            # Experts may leave any token of it as it was, but not all of them: that is another's work.
            given, _ = self._there(base, sight, ids)
            sight.given_away = given if given == int(mine.sum()) else None
        return sight

    def all_changed(self) -> Ints:
        """Every token another."""
        return self._changed(self.sample_N >= 0)

    def after_others(self) -> Trace:
        """A pass of the batch after one of other tokens: what a model keeps from its first call is then of those."""
        self.hidden(self._changed(self.sample_N >= 0))
        return self.trace()

    def differing(self, what: str, base: Trace, other: Trace, least: float, before: int = 0) -> Sight | None:
        """Tokens that are not in another trace what they are in this one; `before`: how many more it begins with. It
        may hold more behind as well.
        """
        mine = slice(before, before + self.sample_N.size)
        cut = Trace({name: one[mine] for name, one in other.laid.items()}, other.hidden[mine])
        moved = ~(relative(base.hidden, cut.hidden) <= least).numpy()
        if not moved.any():
            return None
        sight = Sight(what, None, None)
        for sample in np.unique(self.sample_N[moved]).tolist():
            where = self.position_N[moved & (self.sample_N == sample)]
            sight.moved.append((int(sample), "own", int(where.size), int(where.min()), int(where.max())))
        sight.first = first_apart(self, base, cut, least)
        return sight

    @contextlib.contextmanager
    def at_one_position(self) -> Iterator[None]:
        """Every token at position 0, as far as what turns positions into angles is told: nothing is rotated."""

        def zeros(value: Any) -> Any:
            is_ids = torch.is_tensor(value) and not value.is_floating_point() and value.dtype is not torch.bool
            return torch.zeros_like(value) if is_ids else value

        def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tuple(map(zeros, args)), {name: zeros(value) for name, value in kwargs.items()}

        turning = [
            module for name, module in self.cell.model.backbone.named_modules()
            if name and not isinstance(module, torch.nn.Embedding) and kind_of(name, module) == "position"
        ]  # fmt: skip
        handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in turning]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def is_suspect(self, base_ND: torch.Tensor) -> bool:
        """Whether an earlier token moves with a later one, or the next one does not: told by the final states alone."""
        longest = int(np.bincount(self.sample_N).max())
        for token in {0, longest // 2, longest - 1}:
            again_ND = self.hidden(self._changed(self.position_N == token))
            distance_N = relative(base_ND, again_ND).numpy()
            earlier, following = self.position_N < token, self.position_N == token + 1
            if bool((~(distance_N <= MOVED * self.scale) & earlier).any()):
                return True
            if following.any() and not bool((distance_N[following] > 0).any()):
                return True
        return False

    def moved(self, base: Trace, other: Trace, name: str, least: float = MOVED) -> Bools:
        """[N]: which tokens of a tensor are not what they were."""
        found: Bools = (apart(base.laid[name], other.laid[name]) > least * self.scale).numpy()
        return found

    def moves_later(self, base: Trace, other: Trace, name: str, token: int) -> bool:
        """Whether a changed token moves later ones in a tensor."""
        if name not in base.laid or name not in other.laid:
            return False
        return bool((self.moved(base, other, name) & (self.position_N > token)).any())

    def _seen(self, base: Trace, sight: Sight, ids: Ints, *, keep: bool = False) -> Sight:
        trace = self.trace(ids)
        if sight.what == "other":
            forbidden = self.sample_N != sight.sample
        elif sight.what == "token":
            forbidden = self.position_N < (sight.token or 0)
        else:
            forbidden = np.ones(self.sample_N.size, dtype=bool)
        distance = relative(base.hidden, trace.hidden).numpy()
        moved = ~(distance <= MOVED * self.scale) & forbidden
        for sample in np.unique(self.sample_N[moved]).tolist():
            where = self.position_N[moved & (self.sample_N == sample)]
            relation = {"other": "other", "token": "earlier"}.get(sight.what, "own")
            sight.moved.append((int(sample), relation, int(where.size), int(where.min()), int(where.max())))
        if sight.moved:
            first = next(
                ((name, order) for order, name in enumerate(base.laid) if name in trace.laid
                 and (self.moved(base, trace, name) & forbidden).any()), None
            )  # fmt: skip
            if first is not None:
                sight.first = self.place(*first)
                sight.there = np.unique(self.sample_N[self.moved(base, trace, first[0]) & forbidden]).tolist()
        if sight.what == "token" and sight.token is not None:
            after = self.position_N == sight.token + 1
            if after.any() and not bool((distance[after] > 0).any()):
                sight.deaf = np.unique(self.sample_N[after]).tolist()
        sight.trace = trace if keep else None
        return sight

    def _changed(self, which_N: Any) -> Ints:
        chosen = np.zeros(self.ids.size, dtype=bool)
        chosen[self.slots.numpy()[which_N]] = True
        return self._with_other_ids(chosen)

    def _with_other_ids(self, chosen: Bools) -> Ints:
        """The tokens with others in the chosen slots, of those that the batch holds."""
        ids: Ints = self.ids.copy()
        words = self.used if self.used.size > 1 else np.array([0, 1])
        # One that is not among them may get any.
        ids[chosen] = words[(np.searchsorted(words, ids[chosen]) + 1) % words.size]
        return ids

    def forwards(self, ids: Ints | None = None) -> list[Forward]:
        """The cell's calls of the model; `ids`: other tokens in the slots."""
        forwards = self.cell.arrangement.forwards
        if ids is None:
            return forwards
        whole = ids.reshape(self.cell.arrangement.input_ids.shape)
        axis, start, changed = self.cell.arrangement.axis, 0, []
        for one in forwards:
            end = start + one.input_ids.shape[axis]
            changed.append(replace(one, input_ids=whole[start:end] if axis == 0 else whole[:, start:end]))
            start = end
        return changed

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return joined(parts, self.cell.arrangement.axis, self.slots)


def lost(
    of: Observer, base: Trace, sight: Sight, like: Observer, like_base: Trace, like_sight: Sight
) -> tuple[TensorPlace, bool] | None:
    """The first tensor in which a changed token moves itself or later ones with `like`, but none of them with `of`; and
    whether it is itself alone: a token of which a mixer puts out what only its past says has lost its own key.
    """
    if sight.trace is None or like_sight.trace is None:
        return None
    itself, later = (
        torch.from_numpy(one) for one in (of.position_N == sight.token, of.position_N > (sight.token or 0))
    )
    for order, name in enumerate(base.laid):
        if not all(name in one.laid for one in (sight.trace, like_base, like_sight.trace)):
            continue
        there = apart(like_base.laid[name], like_sight.trace.laid[name]) > 10 * MOVED * like.scale
        here = apart(base.laid[name], sight.trace.laid[name]) > STILL * of.scale
        gone = there & ~here
        if _HEAD in name and not bool((here & (itself | later)).any()):
            # A head that nothing moves is switched off: it does not lose this key or that.
            continue
        if bool((gone & (itself | later)).any()):
            return of.place(name, order), not bool((gone & later).any())
    return None


def first_apart(of: Observer, a: Trace, b: Trace, least: float) -> TensorPlace | None:
    """The first tensor in which two settings part; a rotation of positions only where attention then differs, too."""
    places = [
        of.place(name, order)
        for order, name in enumerate(b.laid)
        if name in a.laid and not name.endswith("position_ids")
        and bool((apart(a.laid[name], b.laid[name]) > least).any())
    ]  # fmt: skip
    if not places:
        return None
    turned = next((one for one in places if one.kind == "position"), None)
    rest = next((one for one in places if "position" not in one.tensor and one.kind != "position"), None)
    if turned is not None and places[0].kind == "position":
        # All of them differ by a shift, and attention sees differences of positions alone.
        return turned if rest is None or rest.kind == "mixer" or not _is_rotation(of, turned) else rest
    return places[0]


def _is_rotation(of: Observer, place: TensorPlace) -> bool:
    name = place.module
    module = of.cell.model.backbone.get_submodule(name) if name != "the model" else None
    # A table that is computed (XGLM's, Speech2Text's) is added to the embeddings as one that was learned.
    return not isinstance(module, torch.nn.Embedding) and turns(name, module)


def relative(a_ND: torch.Tensor, b_ND: torch.Tensor) -> torch.Tensor:
    """[N]: ||b - a|| / ||a||; NaN in both is 0, in one infinite."""
    a_ND, b_ND = a_ND.double(), b_ND.double()
    distance, norm = (b_ND - a_ND).norm(dim=-1), a_ND.norm(dim=-1)
    found = torch.where(distance == 0, torch.zeros_like(distance), distance / norm)
    broken = ~torch.isfinite(found)
    same = torch.isnan(a_ND).any(-1) & torch.isnan(b_ND).any(-1)
    return torch.where(broken, torch.where(same, 0.0, torch.inf), found)


def joined(parts: list[torch.Tensor], axis: int, slots: torch.Tensor) -> torch.Tensor:
    """[N, D] float64: what the forwards of a cell put out, of the tokens in these slots of all of them together."""
    return torch.cat([part.detach().double().cpu() for part in parts], dim=axis).flatten(0, 1)[slots]


def apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[N]: how far two laid tensors are from each other, in their norms."""
    most = (a[:, :-1] - b[:, :-1]).abs().amax(-1)
    norm = torch.maximum(a[:, -1], b[:, -1])
    found = torch.where(most == 0, torch.zeros_like(most), most / norm)
    same = torch.isnan(a).any(-1) & torch.isnan(b).any(-1)
    return torch.where(torch.isnan(found), torch.where(same, 0.0, torch.inf), found)


@contextlib.contextmanager
def in_dtype(model: LoadedModel, dtype: torch.dtype) -> Iterator[None]:
    """The model's weights and buffers in a dtype that is no narrower than their own, and as they were afterwards: the
    frequencies of rotations, in float32 beside weights of a half, stay what they are in that half.
    """
    causal_lm = model.causal_lm
    held = {id(one): one for one in (*causal_lm.parameters(), *causal_lm.buffers()) if one.is_floating_point()}
    before = {key: one.data for key, one in held.items()}
    masked: list[Any] = []
    known, configs = dict(model.known), {id(one): one for one in (causal_lm.config, model.config)}.values()
    experts = [(one, one._experts_implementation) for one in configs if hasattr(one, "_experts_implementation")]
    is_cast = model.is_cast or any(one.itemsize < dtype.itemsize for one in {part.dtype for part in held.values()})
    try:
        for one in held.values():
            if one.dtype.itemsize < dtype.itemsize:
                one.data = one.data.to(dtype)
        masked = finite_masks(causal_lm) if dtype is torch.float64 else []
        for config, _ in experts:
            # Grouped products know no float64.
            config._experts_implementation = "eager"
        halves = frozenset(one.dtype for one in before.values() if one.dtype.itemsize == 2)
        with widened(model.reference, is_cast=is_cast, built=halves, asked=dtype):
            yield
    finally:
        for handle in masked:
            handle.remove()
        for config, implementation in experts:
            config._experts_implementation = implementation
        for key, one in held.items():
            one.data = before[key]
        model.known.clear()
        model.known.update(known)


def finest(model: LoadedModel, most_share: float = 0.4) -> list[torch.dtype]:
    """The dtypes to ask a model in, the finest that memory allows first."""
    causal_lm = model.causal_lm
    count = sum(one.numel() for one in (*causal_lm.parameters(), *causal_lm.buffers()))
    free = torch.cuda.mem_get_info()[0] if model_device(causal_lm) == "cuda" else psutil.virtual_memory().available
    own = next(causal_lm.parameters()).dtype
    wider = [one for one in (torch.float64, torch.float32) if count * one.itemsize < most_share * free]
    return list(dict.fromkeys([*wider, own]))


def is_half(model: LoadedModel) -> bool:
    """Whether a model computes in a dtype whose rounding is seen beside what settings do to it."""
    return next(model.causal_lm.parameters()).dtype in (torch.bfloat16, torch.float16)


def model_device(causal_lm: Any) -> str:
    return str(next(causal_lm.parameters()).device.type)


@contextlib.contextmanager
def evaluating(causal_lm: Any) -> Iterator[None]:
    training = causal_lm.training
    causal_lm.eval()
    try:
        yield
    finally:
        causal_lm.train(training)


def by_slot(tensor: torch.Tensor, rows: int, width: int) -> torch.Tensor | None:
    """[rows, width, F] of a tensor that has a vector per token, however it is laid out; None of any other."""
    shape = tuple(tensor.shape)
    if shape[:2] == (rows, width):
        return tensor.reshape(rows, width, -1)
    if shape[:2] == (1, width):
        return tensor.reshape(1, width, -1).expand(rows, -1, -1)
    if shape[:1] == (rows * width,):
        return tensor.reshape(rows, width, -1)
    if len(shape) == 4 and (shape[0], shape[2]) == (rows, width):
        return tensor.transpose(1, 2).reshape(rows, width, -1)
    if len(shape) == 3 and shape[0] == rows and width <= shape[2] < width + _CONV_TAIL:
        return tensor[..., :width].transpose(1, 2).reshape(rows, width, -1)
    return None


_DIRECTIONS_OF: dict[int, torch.Tensor] = {}


def _laid(vectors_BSF: torch.Tensor) -> torch.Tensor:
    size = int(vectors_BSF.shape[-1])
    if size not in _DIRECTIONS_OF:
        drawn = torch.randn(size, _DIRECTIONS, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
        _DIRECTIONS_OF[size] = drawn
    values = vectors_BSF.double().cpu()
    return torch.cat([values @ _DIRECTIONS_OF[size], values.norm(dim=-1, keepdim=True)], dim=-1)

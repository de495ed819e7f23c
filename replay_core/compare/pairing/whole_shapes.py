"""How large a tensor is of which ranks hold parts, where only what these ranks hold tells: in two runs of one layout
every rank faces one with tensors of its own shapes, and no process has any of them whole.

Ranks that were given the same tokens (a tensor-parallel group) either hold the same of a tensor, or a slice each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.compare.pairing.ranks import OF_ALL_SAMPLES, ids_of
from replay_core.errors import DumpError
from replay_core.records import TensorRef

Place = tuple[str, str]

#: Elements that are compared in memory.
_MOST = 1 << 24
#: Elements of each rank's, spread over all of it, by which it is told whether ranks hold the same.
_ASKED = 1 << 20
#: Ranks apart by this part of what they hold have values of their own, and not one another's but for noise.
OF_ITS_OWN = 0.1


class WholeShapes:
    """The shapes of one run's tensors as one process would have them. others: the other run's ranks, which face these
    one by one. alike: ranks that have the same tokens.
    """

    def __init__(
        self, ranks: dict[int, Side], others: dict[int, Side], ids: TensorRef | None, alike: list[list[int]]
    ) -> None:
        self._ranks, self._others, self._alike = ranks, others, alike
        own = next((ref for side in ranks.values() if (ref := ids_of(side)) is not None), None)
        self._own, self._whole = (None if ref is None else ref.shape for ref in (own, ids))
        #: Weight -> of how many slices it is.
        self._sliced: dict[str, int] = {}

    def of(self, place: Place) -> tuple[int, ...]:
        """The shape of a tensor; that of one rank's where nothing says that it is a part."""
        stage = place[1]
        refs = {rank: side.tensors[place][1] for rank, side in self._ranks.items() if place in side.tensors}
        first = next(iter(refs.values()))
        shape = first.shape
        if any(ref.shape != shape or ref.is_text for ref in refs.values()) or not shape:
            return shape
        if stage in OF_ALL_SAMPLES:
            return self._of_a_weight(place, refs)
        members = self._members(refs)
        many = _slices(members) if members and first.dtype.startswith(("float", "bfloat")) else 1
        if many > 1 and not self._are_slices_there(place):
            many = 1  # ranks of this run that part, where the other's do not
        if many > 1:
            for axis in (0, 1):
                tokens = self._own[1] if self._own is not None and len(self._own) == 2 else 0
                if len(shape) > 2 and shape[axis] * many == tokens and shape[1 - axis] == self._own[0]:  # type: ignore[index]
                    shape = (*shape[:axis], tokens, *shape[axis + 1 :])  # sequence parallel
                    break
            else:
                shape = (*shape[:-1], many * shape[-1])
        return self._of_all_tokens(shape)

    def _of_a_weight(self, place: Place, refs: dict[int, TensorRef]) -> tuple[int, ...]:
        shape = next(iter(refs.values())).shape
        members = self._members(refs)
        if not all(ref.is_readable for ref in refs.values()):
            return shape
        own = place[0].removeprefix("grad.").removeprefix("param.")
        if own not in self._sliced and members:
            self._sliced[own] = self._slices_of_a_weight(place, own, members)
        if (many := self._sliced.get(own, 1)) > 1:
            axis = self._axis(own, shape, refs)
            return (*shape[:axis], many * shape[axis], *shape[axis + 1 :])
        return shape

    def _slices_of_a_weight(self, place: Place, weight: str, members: list[TensorRef]) -> int:
        """Of how many slices a weight is, as its values say; a gradient alone, which ranks may not have summed, only
        where the other run's ranks hold gradients of their own too.
        """
        of_values = f"param.{weight}", "param"
        held = self._members({rank: side.tensors[of_values][1] for rank, side in self._ranks.items()
                              if of_values in side.tensors})  # fmt: skip
        many = _slices(held or members)
        return many if held or place[1] != "gradient" or self._are_slices_there(place) else 1

    def _are_slices_there(self, place: Place) -> bool:
        """Whether the other run's ranks that face those with the same tokens hold values of their own too."""
        refs = {rank: side.tensors[place][1] for rank, side in self._others.items() if place in side.tensors}
        members = self._members(refs)
        return not members or _slices(members) > 1

    def _axis(self, weight: str, shape: tuple[int, ...], refs: dict[int, TensorRef]) -> int:
        """Along which axis ranks hold slices of a weight: of what goes in where all of them put out the same."""
        if len(shape) < 2 or not weight.endswith(".weight"):
            return 0
        module = weight.removesuffix(".weight")
        for rank in refs:
            side = self._ranks[rank]
            output = next((ref for _, ref in side.named(f"{module}.output")), None)
            if output is None or not output.shape:
                continue
            others = [
                ref for other in refs if other != rank
                for _, ref in self._ranks[other].named(f"{module}.output")[:1]
            ]  # fmt: skip
            is_lookup = output.shape[-1] == shape[1] != shape[0]
            if not is_lookup and output.shape[-1] == shape[0] and others and _slices([output, *others]) == 1:
                return 1
            return 0
        return 0

    def _members(self, refs: dict[int, TensorRef]) -> list[TensorRef]:
        """What ranks with the same tokens hold, those that have it (stages of a pipeline have others' not): the first
        such group of several.
        """
        groups = ([refs[rank] for rank in members if rank in refs] for members in self._alike)
        return next((held for held in groups if len(held) > 1), [])

    def _of_all_tokens(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As long along the axes of samples and tokens as all ranks' together."""
        if self._own is None or self._whole is None or len(self._own) != 2 or self._own == self._whole:
            return shape
        if shape[:2] == self._own:
            return (*self._whole, *shape[2:])
        if shape[:2] == self._own[::-1]:
            return (*self._whole[::-1], *shape[2:])
        if len(shape) == 4 and (shape[0], shape[2]) == self._own:
            return self._whole[0], shape[1], self._whole[1], shape[3]
        if shape[0] == self._own[0] * self._own[1]:
            return (self._whole[0] * self._whole[1], *shape[1:])
        if shape == self._own[:1]:
            return self._whole[:1]
        return shape


def _slices(refs: list[TensorRef]) -> int:
    """How many slices these are, of which ranks may hold copies: 1 where all hold the same, or nobody knows."""
    if refs[0].numel > _MOST or not all(ref.is_readable and ref.shape == refs[0].shape for ref in refs):
        return 1
    # Of large ones, some: those of all ranks are in memory beside each other.
    every = refs[0].numel // _ASKED | 1
    different: list[NDArray[np.float64]] = []
    for ref in refs:
        try:
            one = pages.array(ref).reshape(-1)[::every].astype(np.float64)
        except DumpError:
            return 1
        if not np.isfinite(one).all():
            return 1
        if all(float(np.linalg.norm(one - other)) > OF_ITS_OWN * float(np.linalg.norm(one)) for other in different):
            different.append(one)
    return len(different) if len(refs) % len(different) == 0 else 1

"""Optimizer steps that each rank took by itself: clipped by the norm of its own gradients, orthogonalised by slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare import Comparison
from replay_core.compare.judging.ranks.clipped_by_shares import _fault, _OfRole
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random

#: Of every layer its weight and gradient; ranks have gradients of so many layers each.
LAYERS, RANKS, CLIP, RATE = 8, 4, 0.5, 0.1
NAMES = [f"layers.{layer}.up.weight" for layer in range(LAYERS)]
WEIGHTS = {name: random(8, 6, seed=seed) for seed, name in enumerate(NAMES)}
GRADIENTS = {name: (1 + seed) * random(8, 6, seed=100 + seed) for seed, name in enumerate(NAMES)}
OWNED = [NAMES[rank::RANKS] for rank in range(RANKS)]


def norm(names: Sequence[str]) -> Tensor:
    return torch.stack([GRADIENTS[name].norm() for name in names]).norm()


def clipped(size: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The weights after a step of SGD that clips by some norm of each."""
    return {name: WEIGHTS[name] - RATE * CLIP / size(name) * GRADIENTS[name] for name in NAMES}


def of_owners(after: Mapping[str, Tensor], owned: Sequence[Sequence[str]], folder: Path) -> Comparison:
    """One process that clips by the norm of all, against ranks that each own the gradients of some layers."""

    def step(names: Sequence[str], weights: Mapping[str, Tensor]) -> Step:
        return {
            "gradient": {f"grad.{name}": GRADIENTS[name] for name in names},
            "param": {f"param.{name}": weights[name] for name in NAMES},
        }

    one = step(NAMES, clipped(lambda _: norm(NAMES)))
    return compared(folder, one, *(step(names, after) for names in owned))


def test_ranks_that_clip_by_the_norm_of_what_they_own_are_told(tmp_path: Path) -> None:
    own = {name: norm(names) for names in OWNED for name in names}
    found = of_owners(clipped(own.__getitem__), OWNED, tmp_path)
    (fault,) = [one.fault for one in there(parallel(found.tensors, found.together)).faults]
    assert (fault.kind, fault.ranks) == ("clipped apart", (0, 1, 2, 3))
    assert f"{norm(OWNED[0]):.4g} on 0" in fault.sentence
    assert f"of all {norm(NAMES):.4g}" in fault.sentence


def test_ranks_that_clip_by_the_norm_of_all_are_right(tmp_path: Path) -> None:
    assert of_owners(clipped(lambda _: norm(NAMES)), OWNED, tmp_path).agrees


def test_ranks_that_all_take_a_larger_step_do_not_clip_apart(tmp_path: Path) -> None:
    found = of_owners(clipped(lambda _: norm(NAMES) / 3), OWNED, tmp_path)
    assert not found.agrees
    assert "clipped apart" not in {one.fault.kind for one in there(parallel(found.tensors, found.together)).faults}


# ---- orthogonalised


def orthogonal(gradient: Tensor, *, turns: int | None) -> Tensor:
    if turns is None:
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        return left @ right
    x = gradient / gradient.norm()
    if gradient.shape[0] > gradient.shape[1]:
        x = x.T
    for _ in range(turns):
        square = x @ x.T
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
    return x.T if gradient.shape[0] > gradient.shape[1] else x


def of_slices(
    made: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor], folder: Path, axis: int = 0
) -> Comparison:
    """Two ranks with a slice of every matrix each."""
    before, after = ({name: WEIGHTS[name] - RATE * how(GRADIENTS[name]) for name in NAMES} for how in (right, made))

    def step(weights: Mapping[str, Tensor], part: Callable[[Tensor], Tensor]) -> Step:
        return {
            "gradient": {f"grad.{name}": part(GRADIENTS[name]).contiguous() for name in NAMES},
            "param": {f"param.{name}": part(weights[name]).contiguous() for name in NAMES},
        }

    ranks = [step(after, lambda x, rank=rank: x.chunk(2, axis)[rank]) for rank in range(2)]  # type: ignore[misc]
    return compared(folder, step(before, lambda x: x), *ranks)


@pytest.mark.parametrize("turns", [5, 6, None])
@pytest.mark.parametrize("axis", [0, 1])
def test_slices_that_are_orthogonalised_by_themselves_are_told(turns: int | None, axis: int, tmp_path: Path) -> None:
    def whole(x: Tensor) -> Tensor:
        return orthogonal(x, turns=turns)

    found = of_slices(lambda x: torch.cat([*map(whole, x.chunk(2, axis))], axis), whole, tmp_path, axis)
    (fault,) = [one.fault for one in there(parallel(found.tensors, found.together)).faults]
    assert (fault.kind, fault.ranks) == ("orthogonalised apart", (0, 1))
    assert f"2 slices of its {('rows', 'columns')[axis]}" in fault.sentence


def test_matrices_that_are_orthogonalised_whole_are_right(tmp_path: Path) -> None:
    assert of_slices(lambda x: orthogonal(x, turns=5), lambda x: orthogonal(x, turns=5), tmp_path).agrees


def test_another_step_is_not_orthogonalised_apart(tmp_path: Path) -> None:
    found = of_slices(lambda x: 2 * orthogonal(x, turns=5), lambda x: orthogonal(x, turns=5), tmp_path)
    kinds = {one.fault.kind for one in there(parallel(found.tensors, found.together)).faults}
    assert kinds == {"step scaled"}


def adafactor(gradient: Tensor) -> Tensor:
    square = gradient.square()
    moments = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
    step = gradient / moments.sqrt()
    return step / max(1.0, float(step.square().mean().sqrt()))


def lamb(gradient: Tensor) -> Tensor:
    """Adam's first step by the norm of something of the same rows."""
    return gradient.sign() * gradient.square().sum().sqrt()


@pytest.mark.parametrize(
    ("how", "said"),
    [(adafactor, "as Adafactor does"), (lambda x: x / x.norm(), "as LARS and normalised descent do"),
     (lamb, "the trust ratio")],
)  # fmt: skip
@pytest.mark.parametrize("axis", [0, 1])
def test_other_functions_of_a_whole_matrix_are_told_as_well(
    how: Callable[[Tensor], Tensor], said: str, axis: int, tmp_path: Path
) -> None:
    found = of_slices(lambda x: torch.cat([*map(how, x.chunk(2, axis))], axis), how, tmp_path, axis)
    (fault,) = [one.fault for one in there(parallel(found.tensors, found.together)).faults]
    assert (fault.kind, fault.ranks) == ("orthogonalised apart", (0, 1))
    assert said in fault.sentence


def test_another_rate_is_no_clipping_by_norms_that_are_near_each_other() -> None:
    known = _OfRole()
    for rank in range(16):
        known.squares[rank] = (1 + 0.03 * rank / 15) ** 2
        known.total += known.squares[rank]
        known.along.append((rank, -0.01))
    assert _fault(known) is None

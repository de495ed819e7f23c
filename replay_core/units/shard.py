"""Which part of the units a worker takes: `2/4`, the second of four."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from replay_core.errors import RequestError
from replay_core.regexes import regex

T = TypeVar("T")

_FORM = regex(r"([0-9]{1,9})/([0-9]{1,9})")
AUTO = "auto"


class Shard(Struct, frozen=True):
    """Part `number` of `count`, counted from 1; `told_by` names the variables that said so."""

    number: int = 1
    count: int = 1
    told_by: str = ""

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> Shard:
        """`2/4`, or `auto`: what a Slurm array's variables say, else torchrun's.

        Raises:
            RequestError: it is no such text, or `auto` and nothing says which.
        """
        if text == AUTO:
            found = cls.of_array(environment) or cls.of_launcher(environment)
            if found is None:
                raise RequestError(
                    "nothing says which part this worker is to take",
                    expected="SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT, or RANK and WORLD_SIZE",
                    found="neither",
                    hint="--shard 1/4 says it",
                )
            return found
        form = _FORM.fullmatch(text)
        if form is None or not 1 <= int(form[1]) <= int(form[2]):
            raise RequestError(
                "--shard says which of how many parts", expected="1/4 to 4/4, or auto", found=repr(text[:40])
            )
        return cls(int(form[1]), int(form[2]))

    @classmethod
    def of_array(cls, environment: Mapping[str, str]) -> Shard | None:
        """The task of a Slurm array: its ids may begin anywhere and leave some out by a step.

        Raises:
            RequestError: the variables contradict each other.
        """
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
        if not all(environment.get(name) for name in names):
            return None
        id, count = (_number(environment, name) for name in names)
        first = _number(environment, "SLURM_ARRAY_TASK_MIN", 0)
        by = max(1, _number(environment, "SLURM_ARRAY_TASK_STEP", 1))
        place = (id - first) // by
        if not 0 <= place < count or (id - first) % by:
            # --array=1,5,7: ids that no step makes. Which of the three this is, nothing tells.
            raise RequestError(
                "the ids of this Slurm array are in no row",
                expected=f"{count} ids from {first} on, {by} apart",
                found=f"SLURM_ARRAY_TASK_ID={id}",
                hint="sbatch --array=0-3, or --shard 1/4",
            )
        return cls(place + 1, count, " and ".join(names))

    @classmethod
    def of_launcher(cls, environment: Mapping[str, str]) -> Shard | None:
        """The rank of a process that torchrun or mpirun started.

        Raises:
            RequestError: the variables are no rank of a world.
        """
        names = ("RANK", "WORLD_SIZE")
        if not all(environment.get(name) for name in names):
            return None
        rank, world = (_number(environment, name) for name in names)
        if not 0 <= rank < world:
            raise RequestError("RANK is no rank of WORLD_SIZE", expected=f"0 to {world - 1}", found=f"RANK={rank}")
        return cls(rank + 1, world, " and ".join(names))

    def of(self, units: Sequence[T]) -> Sequence[T]:
        """Its part: neighbours, that weights which several micro-batches share are loaded by few workers."""
        at = [len(units) * place // self.count for place in (self.number - 1, self.number)]
        return units[at[0] : at[1]]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise RequestError(f"{name} is no number", expected="a number", found=repr(text[:40]))
    return int(text)

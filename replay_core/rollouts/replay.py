"""RolloutReplay: the batches of a recorded run, looked up by step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from replay_core.dumps import open_run
from replay_core.errors import RequestError, SelectionError
from replay_core.records import Record, TensorRef, spans
from replay_core.rollouts.batch import COMPUTED, BatchPart, RolloutBatch, last_part
from replay_core.rollouts.passes import each_sample_once
from replay_core.rollouts.records import (
    ROLLOUT_STAGES,
    WithoutTokensError,
    of_one_run,
    rollout_records,
    with_tokens,
)

ENDS = ("error", "stop", "wrap")
SCOPES = ("rollout", "full")

#: What scope "full" takes besides.
_FULL_STAGES = ("old_log_probs", "ref_log_probs", "values", "prepared_trajectories")


class RolloutReplay:
    """The batches of a recorded run, looked up by step.

    Args:
        path: a dump of any dialect.
        end: past the last recorded step: "error", "stop" (`batch` answers None), or "wrap" (start again, said once).
        scope: "rollout" takes what sampling gave (tokens, masks, rewards, the sampler's logprobs); "full" also
            what the trainer computed from it (old and reference logprobs, values, advantages).
        rank: this process's rank, to be given its own part; None is given every rank's, one after the other.
        world_size: how many ranks train now; refused where another number recorded.

    Raises:
        NotADumpError: no dialect knows the path.
        RequestError: a wrong argument, no rollouts in the dump, or another data-parallel size.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        end: str = "error",
        scope: str = "rollout",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        for key, value, allowed in (("end", end, ENDS), ("scope", scope, SCOPES)):
            if value not in allowed:
                raise RequestError(f"wrong {key} of a replay", expected=" | ".join(allowed), found=repr(value))
        self.path, self.end, self.scope, self.rank = Path(path), end, scope, rank
        self._run = open_run(path)
        self._records = rollout_records(self._run)
        self.steps: list[int] = sorted(
            {record.key.step for records in self._records.values() for record in records if record.key.step is not None}
        )
        if not self.steps:
            stages = sorted({record.key.stage for record in self._run.records})
            raise RequestError(
                "the dump holds no rollouts of numbered steps",
                file=str(path),
                expected=" or ".join(ROLLOUT_STAGES),
                found=", ".join(stages) or "no record",
                hint="record a run with the trajectory stage first",
            )
        self._check_ranks(world_size)
        #: Kinds of things that were said already.
        self._said: set[str] = set()

    def of_rank(self, rank: int, world_size: int) -> RolloutReplay:
        """The same record as one of several processes replays it: its own part alone.

        Raises:
            RequestError: another number of ranks recorded it.
        """
        mine = copy.copy(self)
        mine.rank = rank
        mine._check_ranks(world_size)
        return mine

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[RolloutBatch]:
        """The recorded steps in order, once; for ever where `end` is "wrap".

        A step recorded as texts alone is left out, and said once.
        """
        while True:
            given = 0
            for step in self.steps:
                try:
                    batch = self.batch(step)
                except WithoutTokensError:
                    if not given and step == self.steps[-1]:
                        raise
                    self._say_once("texts", f"step {step} was recorded as texts alone and is left out")
                    continue
                assert batch is not None
                given += 1
                yield batch
            if self.end != "wrap":
                return

    def batch(self, step: int, micro: int | None = None) -> RolloutBatch | None:
        """The batch recorded at a step; None past the end where `end` is "stop".

        Args:
            micro: which of the step's rollouts alone, where it sampled several times; None is all of them.

        Raises:
            SelectionError: the step was not recorded (past the end, or in a gap), or the path holds several runs.
            RequestError: the step was recorded as texts alone.
        """
        if step > self.steps[-1]:
            if self.end == "stop":
                return None
            if self.end == "wrap":
                step = self._around(step)
        if step not in self.steps:
            where = "past the last recorded step" if step > self.steps[-1] else "not among the recorded steps"
            raise SelectionError(
                f"step {step} is {where}",
                file=str(self.path),
                expected=spans(self.steps),
                found=f"step {step}",
                hint='end="stop" or end="wrap" goes on without an error' if step > self.steps[-1] else
                "record every step the replay will ask for (dump_every_n_steps: 1)",
            )  # fmt: skip
        parts = [self._part(step, record) for record in self._recorded(step, micro)]
        return RolloutBatch(step, parts)

    def _around(self, step: int) -> int:
        self._say_once("wrap", f"step {step} was not recorded; the replay starts again from step {self.steps[0]}")
        return self.steps[(step - self.steps[0]) % len(self.steps)]

    def _recorded(self, step: int, micro: int | None) -> list[Record]:
        """The records that make the batch, rank by rank, each in recorded order."""
        # Where it lies beside the rollout, in records of its own, the rollout itself is wanted.
        within = self.scope == "full" and not any(
            record.key.step == step and record.key.stage in _FULL_STAGES for record in self._run.records
        )
        every = of_one_run(with_tokens(self._records[step], computed=within), self.path)
        mine = [r for r in every if r.key.rank in (None, self.rank) or self.rank is None]
        if self._is_divided and all(r.key.rank is None for r in mine):
            self._say_once("ranks", f"the rollouts name no rank: rank {self.rank} is given every sample of a step")
        chosen = [r for r in mine if micro is None or r.key.micro in (None, micro)]
        if not chosen:
            numbers = sorted(r.key.micro for r in mine if r.key.micro is not None)
            raise SelectionError(
                f"step {step} has no rollout of that number",
                file=str(self.path),
                expected=f"micro {spans(numbers)}",
                found=f"rank {self.rank}, micro {micro}",
            )
        if micro is not None:
            return chosen
        kept = each_sample_once(chosen)
        if len(kept) < len(chosen):
            self._say_once(
                "again",
                f"of the {len(chosen)} records of step {step} {len(chosen) - len(kept)} hold the same samples again "
                "(another pass, epoch or rank); each sample is given once",
            )
        return kept

    def _part(self, step: int, rollout: Record) -> BatchPart:
        refs = {ref.name: ref for ref in rollout.tensors() if ref.is_readable}
        if self.scope == "rollout":
            return BatchPart({name: ref for name, ref in refs.items() if last_part(ref) not in COMPUTED}, rollout.path)
        return BatchPart({**refs, **self._computed(step, rollout, refs)}, rollout.path)

    def _computed(self, step: int, rollout: Record, have: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
        more: dict[str, TensorRef] = {}
        for record in self._run.records:
            key = record.key
            beside = key.rank == rollout.key.rank and key.micro in (None, rollout.key.micro)
            if key.step == step and beside and key.stage in _FULL_STAGES:
                more.update({ref.name: ref for ref in record.tensors() if ref.is_readable and ref.name not in have})
        if not any(last_part(ref) in COMPUTED for ref in [*have.values(), *more.values()]):
            raise SelectionError(
                f"step {step} was recorded without what the trainer computed",
                file=str(rollout.path),
                expected="old logprobs, reference logprobs, values or advantages beside the rollout",
                found=", ".join(have),
                hint='replay it with scope="rollout", or record with dump_scope: full',
            )
        return more

    def _say_once(self, kind: str, what: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(f"rldbg: {what}", RuntimeWarning, stacklevel=4)

    def _check_ranks(self, world_size: int | None) -> None:
        #: Whether other processes train beside this one, as far as it was told.
        self._is_divided = bool(self.rank) or (world_size or 1) > 1
        for step in self.steps if world_size is not None or self.rank is not None else []:
            ranks = {record.key.rank for record in self._records[step]} - {None}
            if world_size is not None and ranks and len(ranks) != world_size:
                raise RequestError(
                    "the rollouts were recorded with another data-parallel size",
                    file=str(self.path),
                    expected=f"{len(ranks)} ranks, as recorded at step {step}",
                    found=f"world_size {world_size}",
                    hint="replay with the topology that recorded",
                )
            if self.rank is not None and ranks and self.rank not in ranks:
                raise RequestError(
                    f"rank {self.rank} recorded no rollouts at step {step}",
                    file=str(self.path),
                    expected=f"rank {spans(sorted(number for number in ranks if number is not None))}",
                    found=f"rank {self.rank}",
                )

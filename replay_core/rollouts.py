"""Drive a trainer from a dump: recorded rollouts in place of sampling, whatever framework recorded them.

    replay = RolloutReplay("dump", end="stop")
    for step in range(steps):
        batch = replay.batch(step)
        ids_BS, rewards_B = batch["input_ids"], batch["reward"]

Values come as torch tensors of the recorded dtype, bit for bit. Nothing is ever made up: a step that was not
recorded, or a task without a trajectory, is an error that says what there is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replay_core.dumps import open_run
from replay_core.errors import NothingComparableError, RequestError, SelectionError
from replay_core.pages import array
from replay_core.records import Inline, Record, Run, TensorRef

ENDS = ("error", "stop", "wrap")
SCOPES = ("rollout", "full")

#: Where rollouts are kept: the first of these that a step has, and that holds tokens.
_ROLLOUT_STAGES = ("trajectory", "prepared_trajectories", "datums", "batch_inputs", "tensors")
#: What scope "full" takes besides.
_FULL_STAGES = ("old_log_probs", "ref_log_probs", "values", "prepared_trajectories")
#: What a trainer computes from a rollout: left out of scope "rollout", so that it is computed again.
_COMPUTED = frozenset({"old_logprobs", "ref_logprobs", "values", "advantages", "returns", "token_rewards"})


class RolloutBatch(Mapping[str, Any]):
    """One step's recorded batch: names as recorded, found by canonical name too.

    A value is a torch tensor, a list of tensors where rows have different lengths, a list of texts, or a number.
    Read when first asked for.
    """

    def __init__(self, step: int | None, refs: Mapping[str, TensorRef], source: Path) -> None:
        self.step = step
        self.source = source
        self._refs = dict(refs)
        self._values: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"RolloutBatch(step {self.step}: {', '.join(self._refs)})"

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._found(name) is not None

    def __getitem__(self, name: str) -> Any:
        found = self._found(name)
        if found is None:
            raise SelectionError(
                f"the recorded batch of step {self.step} has no field {name!r}",
                file=str(self.source),
                expected=", ".join(self._refs),
                found=name,
                hint='scope="full" takes what the trainer computed too' if name in _COMPUTED else None,
            )
        if found not in self._values:
            self._values[found] = _value(self._refs[found])
        return self._values[found]

    def _found(self, name: str) -> str | None:
        if name in self._refs:
            return name
        by_meaning = [field for field, ref in self._refs.items() if _last(ref) == name]
        by_last_part = [field for field in self._refs if field.rpartition(".")[2] == name]
        return next(iter([*by_meaning, *by_last_part]), None)

    def samples(self) -> list[dict[str, Any]]:
        """The batch row by row: every field that has a row per sample, under the last parts of its name.

        Raises:
            NothingComparableError: the fields do not say how many samples there are.
        """
        rows = {field: _rows(ref, self[field]) for field, ref in self._refs.items()}
        counts = [len(values) for field, values in rows.items() if values is not None and _is_tokens(self._refs[field])]
        if not counts:
            raise NothingComparableError(
                "the recorded batch has no field with a row of tokens per sample",
                file=str(self.source),
                found=", ".join(self._refs),
            )
        table = {
            _short(field): values for field, values in rows.items() if values is not None and len(values) == counts[0]
        }
        return [{name: values[row] for name, values in table.items()} for row in range(counts[0])]


class RolloutReplay:
    """The batches of a recorded run, looked up by step.

    Args:
        path: a dump of any dialect.
        end: past the last recorded step: "error", "stop" (`batch` answers None), or "wrap" (start again, said once).
        scope: "rollout" takes what sampling gave (tokens, masks, rewards, the sampler's logprobs); "full" also
            what the trainer computed from it (old and reference logprobs, values, advantages).
        rank: this process's rank, where each recorded its own part; None where one recorded the whole batch.
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
        self._records = _rollout_records(self._run)
        self.steps: list[int] = sorted(
            {record.key.step for records in self._records.values() for record in records if record.key.step is not None}
        )
        if not self.steps:
            stages = sorted({record.key.stage for record in self._run.records})
            raise RequestError(
                "the dump holds no rollouts of numbered steps",
                file=str(path),
                expected=" or ".join(_ROLLOUT_STAGES),
                found=", ".join(stages) or "no record",
                hint="record a run with the trajectory stage first",
            )
        self._check_ranks(world_size)
        self._wrapped = False

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[RolloutBatch]:
        """The recorded steps in order, once; for ever where `end` is "wrap"."""
        while True:
            for step in self.steps:
                batch = self.batch(step)
                assert batch is not None
                yield batch
            if self.end != "wrap":
                return

    def batch(self, step: int, micro: int | None = None) -> RolloutBatch | None:
        """The batch recorded at a step; None past the end where `end` is "stop".

        Args:
            micro: which of the step's rollouts, where it sampled several times.

        Raises:
            SelectionError: the step was not recorded (past the end, or in a gap), or has several rollouts.
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
                expected=_spans(self.steps),
                found=f"step {step}",
                hint='end="stop" or end="wrap" goes on without an error' if step > self.steps[-1] else
                "record every step the replay will ask for (dump_every_n_steps: 1)",
            )  # fmt: skip
        rollout = self._one(step, _with_tokens(self._records[step]), micro)
        refs = {ref.name: ref for ref in rollout.tensors() if ref.is_readable}
        if self.scope == "rollout":
            refs = {name: ref for name, ref in refs.items() if _last(ref) not in _COMPUTED}
        else:
            refs = {**refs, **self._computed(step, rollout, refs)}
        return RolloutBatch(step, refs, rollout.path)

    def _around(self, step: int) -> int:
        if not self._wrapped:
            self._wrapped = True
            warnings.warn(
                f"rldbg: step {step} was not recorded; the replay starts again from step {self.steps[0]}",
                RuntimeWarning,
                stacklevel=3,
            )
        return self.steps[(step - self.steps[0]) % len(self.steps)]

    def _one(self, step: int, records: list[Record], micro: int | None) -> Record:
        mine = [r for r in records if r.key.rank in (None, self.rank) or self.rank is None]
        mine = [r for r in mine if micro is None or r.key.micro in (None, micro)]
        if len(mine) == 1:
            return mine[0]
        raise SelectionError(
            f"step {step} has {len(mine)} rollouts here, not one",
            file=str(self.path),
            expected="; ".join(str(record.key) for record in records[:6]),
            found=f"rank {self.rank}, micro {micro}",
            hint="name this process's rank=, and micro= where a step sampled several times",
        )

    def _computed(self, step: int, rollout: Record, have: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
        more: dict[str, TensorRef] = {}
        for record in self._run.records:
            key = record.key
            if key.step == step and key.rank == rollout.key.rank and key.stage in _FULL_STAGES and key.micro is None:
                more.update({ref.name: ref for ref in record.tensors() if ref.is_readable and ref.name not in have})
        if not any(_last(ref) in _COMPUTED for ref in [*have.values(), *more.values()]):
            raise SelectionError(
                f"step {step} was recorded without what the trainer computed",
                file=str(rollout.path),
                expected="old logprobs, reference logprobs, values or advantages beside the rollout",
                found=", ".join(have),
                hint='replay it with scope="rollout", or record with dump_scope: full',
            )
        return more

    def _check_ranks(self, world_size: int | None) -> None:
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
                    expected=f"rank {_spans(sorted(number for number in ranks if number is not None))}",
                    found=f"rank {self.rank}",
                )


class MockRolloutWorker:
    """Answers tasks with recorded trajectories, as NexRL's mock worker is meant to: matched, never made up.

    A task and a trajectory belong together when their `task_id` is the same (and `run_id`, where the task names
    one); where one of the two has no `task_id`, when `(group_id, run_id)` is. Each trajectory is given out once.

    Args:
        path: a dump of any dialect, or one of its files.
        step: the step to take trajectories from; None takes every step's, in order.
    """

    def __init__(self, path: Path | str, step: int | None = None) -> None:
        self.path = Path(path)
        replay = _rollout_records(open_run(path))
        self._waiting: list[dict[str, Any]] = []
        for number in sorted(replay, key=lambda n: (n is not None, n or 0)):
            if step is None or number in (step, None):
                for record in _with_tokens(replay[number]):
                    refs = {ref.name: ref for ref in record.tensors() if ref.is_readable}
                    self._waiting += RolloutBatch(number, refs, record.path).samples()
        if not self._waiting:
            raise SelectionError(
                "there are no recorded trajectories to answer with",
                file=str(path),
                expected=f"steps {_spans(sorted(n for n in replay if n is not None))}",
                found=f"step {step}",
            )
        self.recorded = len(self._waiting)
        #: Tasks that nothing recorded belongs to.
        self.unmatched: list[dict[str, Any]] = []

    def rollout(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The recorded trajectory of a task: its fields by name, tensors and texts.

        Raises:
            SelectionError: nothing that was recorded, or nothing that is left, belongs to the task.
        """
        asked = {name: _identifier(task, name) for name in ("task_id", "group_id", "run_id")}
        for at, sample in enumerate(self._waiting):
            if _belongs(asked, {name: _identifier(sample, name) for name in asked}):
                return self._waiting.pop(at)
        self.unmatched.append({name: value for name, value in asked.items() if value is not None})
        raise SelectionError(
            "no recorded trajectory belongs to the task",
            file=str(self.path),
            expected=self._left(),
            found=", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
            or "a task without ids",
            hint="group ids are often new in every run: give tasks the task_id they were recorded with",
        )

    def report(self) -> str:
        """How many trajectories were given out, what nobody asked for, and which tasks found none."""
        lines = [f"{self.recorded - len(self._waiting)} of {self.recorded} recorded trajectories were given out"]
        lines += [f"no trajectory for {task}" for task in self.unmatched]
        return "\n".join(lines)

    def _left(self) -> str:
        ids = [
            ", ".join(
                f"{name} {_identifier(sample, name)}" for name in ("task_id", "group_id", "run_id") if name in sample
            )
            for sample in self._waiting[:3]
        ]
        return f"one of the {len(self._waiting)} left: {'; '.join(ids)}" if self._waiting else "none is left"


def _belongs(task: Mapping[str, str | None], sample: Mapping[str, str | None]) -> bool:
    if task["task_id"] is not None and sample["task_id"] is not None:
        same_run = task["run_id"] is None or sample["run_id"] is None or task["run_id"] == sample["run_id"]
        return task["task_id"] == sample["task_id"] and same_run
    pair = (task["group_id"], task["run_id"])
    return None not in pair and pair == (sample["group_id"], sample["run_id"])


def _identifier(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None and isinstance(fields.get("extra_fields"), Mapping):
        value = fields["extra_fields"].get(name)
    if value is None:
        return None
    return str(value.item() if hasattr(value, "item") else value)


def _rollout_records(run: Run) -> dict[int | None, list[Record]]:
    """Step -> the records that may be its rollouts. Evaluations are none."""
    by_step: dict[int | None, list[Record]] = {}
    for record in run.records:
        if record.key.stage in _ROLLOUT_STAGES and record.key.role not in ("eval", "rerun"):
            by_step.setdefault(record.key.step, []).append(record)
    return by_step


def _with_tokens(records: list[Record]) -> list[Record]:
    """Of one step's records, those of the first stage, and of the role nearest to the sampler, that holds tokens.

    Raises:
        RequestError: none does: texts alone cannot be trained on.
    """
    order = sorted(records, key=lambda r: (_ROLLOUT_STAGES.index(r.key.stage), r.key.role != "rollout"))
    for first in order:
        if any(_is_tokens(ref) for ref in first.tensors()):
            return [r for r in records if (r.key.stage, r.key.role) == (first.key.stage, first.key.role)]
    raise RequestError(
        f"step {records[0].key.step} was recorded without tokens",
        file=str(records[0].path),
        expected="token ids, such as input_ids or tokens",
        found=", ".join(ref.name for ref in records[0].tensors()),
        hint="texts would have to be tokenised again, and might not come out the same",
    )


def _value(ref: TensorRef) -> Any:
    if ref.is_text:
        assert isinstance(ref.source, Inline)
        return ref.source.value
    if isinstance(ref.source, Inline) and ref.shape == () and not isinstance(ref.source.value, bytes):
        return ref.source.value
    tensor = _tensor(ref)
    return list(tensor.split(list(ref.rows))) if ref.rows is not None else tensor


def _tensor(ref: TensorRef) -> Any:
    import numpy as np
    import torch

    values = np.array(array(ref), order="C")  # a copy: the trainer may change it
    if ref.dtype.startswith(("bfloat", "float8")):
        # numpy's name for these is ml_dtypes', which torch does not know: the bits go over as they are.
        same_width = np.uint8 if values.dtype.itemsize == 1 else np.int16
        return torch.from_numpy(values.view(same_width)).view(getattr(torch, ref.dtype))
    return torch.from_numpy(values)


def _rows(ref: TensorRef, value: Any) -> Any:
    """A value as one row per sample, or None for what is not said of samples."""
    if ref.shape == ():
        return None
    return value


def _is_tokens(ref: TensorRef) -> bool:
    return _last(ref) in ("input_ids", "response_ids", "prompt_ids", "target_ids") or ref.rows is not None


def _last(ref: TensorRef) -> str:
    return (ref.canonical or ref.name).rpartition(".")[2]


def _short(field: str) -> str:
    return field.rpartition(".")[2]


def _spans(steps: list[int]) -> str:
    """`0..3, 6` of [0, 1, 2, 3, 6]."""
    parts: list[str] = []
    for at, step in enumerate(steps):
        if at and step == steps[at - 1] + 1:
            parts[-1] = parts[-1].partition("..")[0] + f"..{step}"
        else:
            parts.append(str(step))
    return ", ".join(parts) or "none"

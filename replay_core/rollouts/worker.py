"""MockRolloutWorker: recorded trajectories as answers to tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replay_core.dumps import open_run
from replay_core.errors import SelectionError
from replay_core.records import spans
from replay_core.rollouts.batch import BatchPart, RolloutBatch, RolloutSample
from replay_core.rollouts.passes import each_sample_once
from replay_core.rollouts.records import WithoutTokensError, of_one_run, rollout_records, with_tokens


class MockRolloutWorker:
    """Answers tasks with recorded trajectories, as NexRL's mock worker is meant to: matched, never made up.

    A task and a trajectory belong together when their `task_id` is the same (and `run_id`, where the task names
    one); where one of the two has no `task_id`, when `(group_id, run_id)` is. Other frameworks' names of a group
    (verl's uid, slime's group_index ...) and of a sample stand for these two; where the recording numbers no samples
    of a group, the group's are given out in recorded order. Each trajectory is given out once.

    Args:
        path: a dump of any dialect, or one of its files.
        step: the step to take trajectories from; None takes every step's, in order.
    """

    def __init__(self, path: Path | str, step: int | None = None) -> None:
        self.path = Path(path)
        replay = rollout_records(open_run(path))
        self._waiting: list[RolloutSample] = []
        #: Steps whose trajectories are texts alone, which nothing can be trained on.
        self.texts: list[int | None] = []
        numbered = sorted(number for number in replay if number is not None)
        # A file that says no step counts where none does.
        every: list[int | None] = [*numbered] or [*replay]
        for number in every:
            if step is None or number in (step, None):
                try:
                    records = each_sample_once(of_one_run(with_tokens(replay[number]), self.path))
                except WithoutTokensError:
                    self.texts.append(number)
                    continue
                for record in records:
                    refs = {ref.name: ref for ref in record.tensors() if ref.is_readable}
                    self._waiting += RolloutBatch(number, [BatchPart(refs, record.path)]).samples()
        if not self._waiting:
            raise SelectionError(
                "there are no recorded trajectories to answer with",
                file=str(path),
                expected=f"steps {spans(numbered)}",
                found=f"step {step}"
                + (f", texts without tokens at step {spans(self._text_steps)}" if self.texts else ""),
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

    @property
    def _text_steps(self) -> list[int]:
        return sorted(number for number in self.texts if number is not None)

    def report(self) -> str:
        """How many trajectories were given out, what nobody asked for, and which tasks found none."""
        lines = [f"{self.recorded - len(self._waiting)} of {self.recorded} recorded trajectories were given out"]
        lines += [f"no trajectory for {task}" for task in self.unmatched]
        if self.texts:
            lines.append(f"recorded as texts without tokens, and not given out: step {spans(self._text_steps)}")
        return "\n".join(lines)

    def _left(self) -> str:
        ids = [
            ", ".join(
                f"{name} {_identifier(sample, name)}"
                for name in ("task_id", "group_id", "run_id")
                if _identifier(sample, name) is not None
            )
            for sample in self._waiting[:3]
        ]
        if not self._waiting:
            return "none is left"
        return (
            f"one of the {len(self._waiting)} left: {'; '.join(ids) if any(ids) else 'they were recorded without ids'}"
        )


def _belongs(task: Mapping[str, str | None], sample: Mapping[str, str | None]) -> bool:
    if task["task_id"] is not None and sample["task_id"] is not None:
        same_run = task["run_id"] is None or sample["run_id"] is None or task["run_id"] == sample["run_id"]
        return task["task_id"] == sample["task_id"] and same_run
    if task["group_id"] is None or task["group_id"] != sample["group_id"]:
        return False
    return sample["run_id"] is None or task["run_id"] == sample["run_id"]


#: What other frameworks' dumps call it, by its canonical name.
_ALSO = {"run_id": "sample_id"}


def _identifier(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name, fields.get(_ALSO.get(name, name)))
    if value is None and isinstance(fields.get("extra_fields"), Mapping):
        value = fields["extra_fields"].get(name)
    if value is None:
        return None
    return str(value.item() if hasattr(value, "item") else value)

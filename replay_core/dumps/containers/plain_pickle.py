"""A plain pickle: `pickle.dump` of anything, its tensors nested torch streams, its arrays numpy's."""

from __future__ import annotations

from typing import Any

from replay_core.dumps.containers.loading import Loading
from replay_core.dumps.containers.pickle_machine import Machine
from replay_core.dumps.containers.settle import settle


def read_plain_pickle(loading: Loading) -> Any:
    """The tree of the first pickle in the file; what follows it is a problem.

    Raises:
        DumpError: it is damaged or unsafe.
    """
    machine = Machine(loading)
    value = machine.run(loading.region.start)
    loading.refuse_strangers()
    if machine.end < loading.region.end:
        left = f"{loading.region.end - machine.end:,} bytes"
        loading.problems.append(f"only the file's first pickle is read: {left} follow it")
    return settle(loading, value)

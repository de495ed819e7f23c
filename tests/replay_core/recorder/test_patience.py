"""A trainer waits for its disk as long as it answers, and one thread serves many errands."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from replay_core.errors import DumpError
from replay_core.recorder import patience
from replay_core.recorder.backlog import Backlog
from replay_core.recorder.patience import Patience, disk_call


def test_errands_after_each_other_are_run_by_one_thread() -> None:
    patience = Patience(30.0)
    threads = {patience.run(threading.get_ident) for _ in range(5)}
    # A thread that is just about to rest is not waited for: a second may have been started.
    assert len(threads) <= 2
    assert threading.get_ident() not in threads


def test_an_errand_that_hangs_holds_up_nobody_elses() -> None:
    hang, patience = threading.Event(), Patience(0.05)

    def work() -> None:
        with disk_call():
            hang.wait()

    with pytest.raises(DumpError, match="does not answer"), pytest.warns(RuntimeWarning, match="has not answered"):
        patience.run(work)
    with pytest.raises(DumpError, match="does not answer"):
        patience.run(int)
    assert Patience(30.0).run(lambda: "done") == "done"
    hang.set()


def _child(say: multiprocessing.SimpleQueue[int]) -> None:
    say.put(Patience(30.0).run(lambda: 7))


def test_a_forked_child_has_threads_of_its_own() -> None:
    assert Patience(30.0).run(lambda: 1) == 1
    fork = multiprocessing.get_context("fork")
    say: multiprocessing.SimpleQueue[int] = fork.SimpleQueue()
    child = fork.Process(target=_child, args=(say,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert say.get() == 7


def test_nothing_is_handed_over_while_another_thread_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    backlog = Backlog(1 << 20, lambda _error: None, Patience(30.0))
    monkeypatch.setattr(patience, "_last", -1)
    trainer = threading.Thread(target=lambda: backlog.put(lambda: done.append(1), 8), daemon=True)
    trainer.start()
    trainer.join(0.5)
    assert (trainer.is_alive(), done) == (True, [])
    monkeypatch.setattr(patience, "_last", None)
    trainer.join(60)
    backlog.close()
    assert done == [1]

"""Pairs measured ahead of their turn: the same rows in the same order, errors where they belong."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from replay_core.compare import Comparison
from replay_core.compare.judging import measuring
from replay_core.compare.judging.verdict import Verdict
from tests.builders import compare_paths, row_of, save_file, write_pair

LARGE = 200_000


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    generator = torch.Generator().manual_seed(0)
    fields = {f"layers.{number}.mlp.output": torch.randn(100, LARGE // 100, generator=generator) for number in range(9)}
    fields["norm.output"] = torch.randn(4, 8, generator=generator)
    other = {name: value.clone() for name, value in fields.items()}
    for number in (3, 4, 7):
        other[f"layers.{number}.mlp.output"][50] *= 1.5
    return write_pair(tmp_path, {"modules": fields}, {"modules": other})


def rows(comparison: Comparison) -> list[tuple[object, ...]]:
    return [(row.name, row.verdict, row.reason, row.raw_a, row.value_b) for row in comparison.tensors]


def test_threads_change_nothing(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measuring, "MOST_THREADS", 1)
    alone = rows(compare_paths(*paths))
    monkeypatch.setattr(measuring, "MOST_THREADS", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(4)), raising=False)
    assert rows(compare_paths(*paths)) == alone
    assert sum(verdict is Verdict.DIFF for _, verdict, *_ in alone) == 3


def test_first_divergence_is_told_before_the_rest_is_looked_at(paths: tuple[Path, Path]):
    heard: list[str] = []
    compare_paths(*paths, on_event=lambda event: heard.append(getattr(event, "what", "first")))
    assert "first" in heard[:6]
    assert heard[-1] == "compared"


def test_a_tensor_that_cannot_be_read_is_skipped_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1}, raising=False)
    # Many more than are read ahead of the first: what is cut off was not read before.
    fields = {f"x{number}": torch.rand(LARGE) for number in range(16)}
    a, b = save_file(tmp_path / "a.pt", fields), save_file(tmp_path / "b.pt", fields)
    seen: list[object] = []

    def cut(event: object) -> None:
        # The headers were read; then the file loses its end.
        if not seen:
            os.truncate(b, os.path.getsize(b) // 2)
        seen.append(event)

    compared = compare_paths(a, b, on_event=cut)
    assert row_of(compared, "x0").verdict is Verdict.SAME
    assert "x15" in [row.name for row in compared.skipped]
    assert compared.agrees is None


def test_an_error_of_the_caller_leaves_no_thread_behind(paths: tuple[Path, Path]):

    def stop(_event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare_paths(*paths, on_event=stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("measure")]

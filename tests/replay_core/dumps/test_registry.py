"""The registry of dialects: each owns its facts, and none is forgotten somewhere."""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

import replay_core.dumps
from replay_core.dumps import DIALECTS, listing, open_run, opening, peeking, row_tables
from replay_core.dumps.dialect import Dialect, in_order
from replay_core.errors import RldbgError
from replay_core.records import Run
from tests.builders import save_file
from tests.fixtures import FIXTURES


@cache
def folders_that_open() -> tuple[Path, ...]:
    """Every folder of the genuine files that is a dump, and those above it; not the corpus of the fuzzer."""
    files = [file for file in FIXTURES.rglob("*") if "fuzz" not in file.relative_to(FIXTURES).parts]
    folders = sorted({folder for file in files for folder in file.parents if FIXTURES in folder.parents})
    return tuple(folder for folder in folders if _opens(folder))


def _opens(folder: Path) -> bool:
    try:
        return bool(open_run(folder).records)
    except RldbgError:
        return False


def answers(run: Run) -> Counter[tuple[str, str, str]]:
    return Counter((str(record.key), str(record.path), str(record.names)) for record in run.records)


def shuffled(seed: int) -> list[Dialect]:
    """The dialects in another order; those of one name keep theirs."""
    by_name: dict[str, list[Dialect]] = {}
    for dialect in DIALECTS:
        by_name.setdefault(dialect.name, []).append(dialect)
    names = [dialect.name for dialect in DIALECTS]
    random.Random(seed).shuffle(names)
    return in_order([by_name[name].pop(0) for name in names])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_only_what_a_dialect_says_of_its_order_decides(seed: int, monkeypatch: pytest.MonkeyPatch):
    said = {folder: answers(open_run(folder)) for folder in folders_that_open()}
    assert len(said) > 30
    monkeypatch.setattr(opening, "DIALECTS", shuffled(seed))
    assert {folder: answers(open_run(folder)) for folder in said} == said


def test_every_dialect_of_the_room_is_asked():
    held = set(map(id, row_tables.DIALECTS))
    for module in pkgutil.iter_modules(replay_core.dumps.__path__, "replay_core.dumps."):
        dialect = getattr(importlib.import_module(module.name), "DIALECT", None)
        held |= {id(dialect)} if dialect is not None else set()
    assert held == set(map(id, DIALECTS))


def test_a_dialects_facts_are_about_dialects_that_there_are():
    names = {dialect.name for dialect in DIALECTS}
    for dialect in DIALECTS:
        assert dialect.known_by in ("index", "names", "content", "rest")
        assert set(dialect.before) <= names - {dialect.name}, dialect.name
        assert all(dialect.before.values()), f"{dialect.name}: why must it be asked first?"


def test_a_dialect_has_files_that_are_opened_in_the_tests_of_this_room():
    texts = "\n".join(file.read_text() for file in Path(__file__).parent.glob("*.py") if file != Path(__file__))
    assert {dialect.name for dialect in DIALECTS if f'"{dialect.name}"' not in texts} <= {"native"}  # recorder's own


@pytest.mark.long
def test_files_that_a_dialect_knows_under_any_name_are_found_in_a_folder_under_any_name(tmp_path: Path):
    tried = Counter[str]()
    for folder in folders_that_open():
        run = open_run(folder)
        for record in run.records[:1]:
            for dialect in DIALECTS:
                if dialect.name != run.dialect or record.path.suffix in (".jsonl", ".parquet"):
                    continue
                odd = Path(mkdtemp(dir=tmp_path)) / f"odd{record.path.suffix}"
                shutil.copy(record.path, odd)
                listing.forget()
                peeking.forget()
                if dialect.known_by != "rest":
                    assert dialect.detect(odd) == (dialect.known_by == "content"), f"{dialect.name}: {record.path}"
                if dialect.known_by == "content":
                    tried[dialect.name] += 1
                    assert open_run(odd.parent).dialect == dialect.name
    assert len(tried) >= 6, tried


def test_slimes_copies_of_a_rollout_are_slimes_whoever_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sample = {"tokens": [1, 2, 3], "response_length": 2, "reward": 1.0, "index": 0, "group_index": 0}
    save_file(tmp_path / "rollout_data/3.pt", {"rollout_id": 3, "samples": [sample]})
    row = {"sample_index": 0, "group_index": 0, "status": "completed", "prompt": "p", "messages": []}
    (tmp_path / "trajectory").mkdir()
    (tmp_path / "trajectory/3.jsonl").write_text(json.dumps(row) + "\n")
    for seed in range(8):
        monkeypatch.setattr(opening, "DIALECTS", shuffled(seed))
        assert open_run(tmp_path).dialect == "slime"


def test_dialects_that_go_round_in_a_circle_are_refused():
    a, b = ({"before": {other: "a reason"}} for other in ("b", "a"))
    empty = (lambda _: False, lambda _: None, lambda *_: [])
    with pytest.raises(ValueError, match="circle: a, b"):
        in_order([Dialect("a", "names", *empty, **a), Dialect("b", "names", *empty, **b)])  # type: ignore[arg-type]

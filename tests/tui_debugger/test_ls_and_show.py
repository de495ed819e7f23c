"""`rldbg ls` and `rldbg show`, from the words of a command line to the exit code."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from replay_core.decoding import Decoder, find_tokenizer
from replay_core.dumps.several import said_once
from replay_core.errors import RequestError
from replay_core.records import Problem, Record
from tests.fixtures import FIXTURES
from tests.hostile import MAKERS
from tui_debugger.cli import run
from tui_debugger.format import safe

EVIL = "a\x1b]0;owned\x07\x9b31m\u202eb\ud800\r"


def rows(path: Path, *values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def document(capsys: pytest.CaptureFixture[str], *words: str, expect: int = 0) -> dict[str, Any]:
    assert run([*words, "--json"]) == expect
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    for step in (1, 2):
        rows(tmp_path / f"a/metrics_step{step}.jsonl", {"step": step, "loss": 0.5}, {"step": step, "loss": 0.25})
    rows(tmp_path / "b/mine.jsonl", {"tokens": [1, 2, 3], "reward": 0.5}, {"tokens": [4], "reward": 1.0})
    return tmp_path


def test_several_paths_are_one_run(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doc = document(capsys, "ls", str(dump / "a"), str(dump / "b/mine.jsonl"))
    assert doc["dialect"] == "metrics + file"
    assert len(doc["records"]) == 3
    assert doc["unreadable"] == 0


def test_ls_of_one_step(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doc = document(capsys, "ls", str(dump / "a"), "--step", "2")
    assert [record["key"]["step"] for record in doc["records"]] == [2]
    assert run(["ls", str(dump / "a"), "--step", "9"]) == 2


def test_a_folder_of_runs_is_listed_by_its_runs_and_none_is_opened(
    dump: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "deep/two"):
        shutil.copytree(dump / "a", dump / "runs" / name)
    monkeypatch.setattr(Record, "tensors", lambda _record: pytest.fail("a header was read"))
    doc = document(capsys, "ls", str(dump / "runs"))
    assert doc["checked"] == "names"
    assert [Path(one).name for one in doc["inside"]] == ["deep", "one"]
    assert run(["ls", str(dump / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [["records", "steps", "run"], ["2", "1..2", "deep"], ["2", "1..2", "one"]]
    assert [line.split() for line in lines[2:5]] == table
    assert "open one of them" in lines[6]


def test_what_is_wrong_with_a_folder_of_very_many_runs_is_sorted_out_in_one_pass(tmp_path: Path) -> None:
    twice, other = "a second record of step 0", "cut short"
    problems = [Problem(f"/runs/{number}", what) for number in range(10_000) for what in (twice, other)]
    began = time.process_time()
    assert len(said_once(tmp_path, [tmp_path / "a", tmp_path / "b"], problems)) == 10_001
    assert time.process_time() - began < 0.5


def test_names_reads_no_header(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doc = document(capsys, "ls", str(dump / "a"), "--names")
    assert doc["checked"] == "names"
    assert [record["fields"] for record in doc["records"]] == [None, None]


def test_a_slice_of_ragged_rows(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doc = document(capsys, "show", str(dump / "b/mine.jsonl"), "--tensor", "input_ids", "--slice", "0,1:")
    assert doc["part"] == {"row": 0, "start": [1], "shape": [2], "values": [2, 3], "left_out": 0}
    assert doc["histogram"]["bins"] == [
        {"exponent": 0, "count": 1},
        {"exponent": 1, "count": 2},
        {"exponent": 2, "count": 1},
    ]
    assert run(["show", str(dump / "b/mine.jsonl"), "input_ids", "--slice", "9:"]) == 2
    assert run(["show", str(dump / "b/mine.jsonl"), "--slice", "9:"]) == 2
    assert run(["show", str(dump / "b/mine.jsonl"), "input_ids", "--slice", "0:", "--at", "1"]) == 2


@pytest.mark.parametrize("words", [["ls"], ["show"], ["show", EVIL.replace("\ud800", "")], ["show", "text"]])
def test_nothing_a_file_says_reaches_the_terminal_raw(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "evil\x1b[31m.jsonl", {EVIL: 1.0, "text": EVIL}, {EVIL: 2.0, "text": EVIL + "\n"})
    run([words[0], str(path), *words[1:]])
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e", "\ud800", "\r"}
    assert "\\x1b" in shown.out + shown.err


def test_a_line_break_in_a_name_makes_no_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = rows(tmp_path / "odd\nproblem: none.jsonl", {"tokens": [1, 2], "b\nnote: all is well": 1.0})
    (tmp_path / "bad\nsteps 0..9.pt").write_bytes(b"PK\3\4")
    assert run(["ls", str(tmp_path)]) == 3
    assert run(["show", str(good)]) == 0
    assert run(["show", str(good), "--tensor", "nope"]) == 2
    shown = capsys.readouterr()
    lines = [line.strip() for line in (shown.out + shown.err).splitlines()]
    assert not any(line.startswith(("problem: none", "note: all is well", "steps 0..9")) for line in lines)
    assert sum("\\nsteps 0..9.pt" in line for line in lines) == 2  # in its row, and in its problem


def test_safe_keeps_text_as_it_is() -> None:
    assert safe("naïve 日本 ✓ 5.0±0.1") == "naïve 日本 ✓ 5.0±0.1"
    assert safe("a\nb\tc", lines=True) == "a\nb\tc"
    assert safe("a\nb") == "a\\nb"


def test_an_alignment_no_name_settles_is_detected_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(0)
    values = [[-chance.random() for _ in range(20)] for _ in range(3)]
    batches = [
        {"token_ids": [[7] * 20], "token_loss_mask": [[1] * 20], "generation_logprobs": [row],
         "my_logp": [[*row[1:], 0.5]], "input_lengths": [20]}
        for row in values
    ]  # fmt: skip
    path = rows(tmp_path / "train_data_step1.jsonl", *batches)
    doc = document(capsys, "show", str(path), "my_logp")
    assert doc["detected"]["alignment"] == "next"
    assert "detected: lag -1" in doc["detected"]["why"]
    assert document(capsys, "show", str(path), "generation_logprobs")["detected"] is None


def test_token_ids_are_shown_as_text_where_a_tokenizer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "show",
        str(FIXTURES / "nemo_rl"),
        "--tensor",
        "input_ids",
        "--tokenizer",
        str(FIXTURES / "trl/tiny_qwen2"),
    ]
    text = document(capsys, *words, "--slice", "0,:3")["text"]
    assert text["pieces"][0] == "<|im_start|>"
    assert text["samples"][0].startswith("<|im_start|>user\nWhat is 49 plus 97?<|im_end|>")


def test_a_tokenizer_beside_the_dump_is_found(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").symlink_to(FIXTURES / "trl/tiny_qwen2/tokenizer.json")
    path = rows(tmp_path / "rollout/1.jsonl", {"tokens": [1]})
    assert find_tokenizer(path) == tmp_path / "tokenizer/tokenizer.json"
    assert find_tokenizer(FIXTURES / "nemo_rl/train_data_step1.jsonl") is None


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff" * 40, b'{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_tokenizer_that_is_none_is_a_wrong_request(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError):
        Decoder(path)


@pytest.mark.parametrize("kind", ["anything", "expands", "panics"])
def test_a_hostile_tokenizer_beside_a_dump_costs_its_texts_alone(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = next(maker for name, maker in MAKERS.items() if "tokenizer" in name and name.endswith(kind))
    path = maker(tmp_path)
    assert run(["show", str(path), "input_ids", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert text is None or len(str(text)) < 1 << 22
    if text is None:
        assert run(["show", str(path), "input_ids", "--tokenizer", str(tmp_path / "tokenizer.json")]) == 2
        assert "no tokenizer that can be used" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "show", "diagnose", "replay"])
def test_an_empty_path_is_not_the_working_directory(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, ""]) == 2
    assert "the path is empty" in capsys.readouterr().err


def test_a_place_of_ragged_rows_is_named_by_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rows(tmp_path / "mine.jsonl", {"tokens": [1, 2, 3]}, {"tokens": [4]}, {"tokens": [5, 6]})
    assert document(capsys, "show", str(path), "tokens", "--at", "2,1")["window"]["a"][-1] == 6
    assert run(["show", str(path), "tokens", "--at", "1,1"]) == 2
    assert "or a row (0 to 2) and a place in it" in capsys.readouterr().err


def test_a_folder_called_as_a_tensor_is_no_second_path(
    dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(dump)
    (dump / "reward").mkdir()
    (dump / "reward" / "empty.jsonl").write_text("")
    assert document(capsys, "show", "b/mine.jsonl", "reward")["a"]["name"] == "reward"
    assert len(document(capsys, "ls", "b/mine.jsonl", "a")["records"]) == 3

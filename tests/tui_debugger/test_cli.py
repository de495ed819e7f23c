"""The command line as a stranger types it: exit codes, clean standard output, never a traceback, never a hang."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.errors import ExitCode
from tests.builders import Bomb, save_file, write_dump, write_pair
from tui_debugger.cli import run

ROOT = Path(__file__).resolve().parents[2]

FIELDS = {
    "batch_inputs": {"input_ids": torch.arange(12).reshape(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)},
    "forward_data": {"log_probs": -torch.arange(12.0).reshape(2, 6) / 5},
}
OTHER = {**FIELDS, "forward_data": {"log_probs": -torch.arange(12.0).reshape(2, 6)}}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """a and b are equal, `other` diverges, `more` has a loss that a has not."""
    root = tmp_path_factory.mktemp("dumps")
    a, b = write_pair(root, FIELDS, FIELDS)
    more = write_dump(root / "more", {**FIELDS, "loss": {"loss": 1.0}})
    return {"a": a, "b": b, "other": write_dump(root / "other", OTHER), "more": more}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Crash reports and replays go where nobody minds."""
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return tmp_path / "home"


class Answer:
    """What a command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in out + err
        assert "internal error" not in err

    @property
    def document(self) -> dict[str, Any]:
        """Standard output is the document and nothing else."""
        document: dict[str, Any] = json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        return document


@pytest.fixture
def rldbg(capfd: pytest.CaptureFixture[str]):
    def call(*arguments: Any) -> Answer:
        code = run([str(argument) for argument in arguments])
        return Answer(code, *capfd.readouterr())

    return call


def shell(command: str, **environment: str) -> Answer:
    """The command through a real shell and a real process; `rldbg` in it is this checkout's."""
    script = command.replace("rldbg", f"{sys.executable} -m tui_debugger")
    answer = subprocess.run(
        ["bash", "-c", script], capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    return Answer(answer.returncode, answer.stdout.decode("utf-8", "replace"), answer.stderr.decode("utf-8", "replace"))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["compare", "a", "b"], ExitCode.AGREES),
        (["compare", "a", "b", "--exact"], ExitCode.AGREES),
        (["compare", "a", "other"], ExitCode.DIVERGES),
        (["compare", "a", "other", "--all"], ExitCode.DIVERGES),
        (["compare", "a", "other", "--explain", "log_probs"], ExitCode.DIVERGES),
        (["compare", "a", "more"], ExitCode.DIVERGES),
        (["compare", "more", "a"], ExitCode.DIVERGES),
        (["compare", "a", "more", "--allow-missing"], ExitCode.AGREES),
        (["compare", "more", "a", "--allow-missing"], ExitCode.AGREES),
        (["compare", "a", "b", "--step", "0", "--rank", "all", "--micro", "0:4"], ExitCode.AGREES),
        (["compare", "--self_hosted_dir", "a", "--weaver_dir", "b", "--step", "0"], ExitCode.AGREES),
        (["compare", "--self_hosted_dir", "a", "--remote_api_dir", "other", "--step", "0", "--num_ranks", "2",
          "--num_micros", "2"], ExitCode.DIVERGES),
        (["ls", "a"], ExitCode.AGREES),
        (["ls", "a", "--names-only"], ExitCode.AGREES),
        (["show", "a", "--stage", "forward_data"], ExitCode.AGREES),
        (["show", "a", "log_probs", "--stage", "forward_data", "--at", "1,3"], ExitCode.AGREES),
        (["info"], ExitCode.AGREES),
        (["--version"], ExitCode.AGREES),
        (["--help"], ExitCode.AGREES),
        (["compare", "--help"], ExitCode.AGREES),
    ],
)  # fmt: skip
def test_exit_codes_of_what_is_asked_rightly(arguments: list[str], code: int, rldbg: Any, dumps: dict[str, Path]):
    assert rldbg(*(dumps.get(argument, argument) for argument in arguments)).code == code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "a", "b", "--step", "9"], "no record of step 9"),
        (["compare", "a", "b", "--rank", "7"], "no record of rank 7"),
        (["compare", "a", "b", "--micro", "7"], "no record of micro 7"),
        (["compare", "a", "b", "--micro", "1:2:3"], "cannot read the selection"),
        (["compare", "a", "b", "--nope"], "--nope"),
        (["compare", "a"], "two dumps"),
        (["compare", "a", "b", "a"], "unexpected extra argument"),
        (["compare", "--self_hosted_dir", "a", "--step", "0"], "got 1"),
        (["compare", "a", "other", "--explain", "nothing"], "no tensor 'nothing'"),
        (["show", "a"], "2 records match"),
        (["show", "a", "nothing", "--stage", "forward_data"], "no tensor 'nothing'"),
        (["show", "a", "log_probs", "--stage", "forward_data", "--at", "9,9"], "outside the tensor"),
        (["show", "a", "log_probs", "--stage", "forward_data", "--at", "1" + "0" * 40 + ",0"], "outside the tensor"),
        (["show", "a", "log_probs", "--stage", "forward_data", "--at", "x"], "numbers with commas"),
        (["show", "a", "--stage", "loss"], "no record of stage loss"),
        (["ls"], "PATH"),
        (["nosuchcommand"], "lists the commands"),
        (["--nope"], "--nope"),
        ([], "terminal"),
        (["a"], "rldbg ls"),
        (["a", "b"], "rldbg compare"),
        (["--compare", "a", "b", "other"], "--compare takes two paths"),
        (["--ascii", "a"], "rldbg ls"),
        (["--follow"], "nothing to follow"),
        (["--follow", "--one-run", "a", "b"], "--follow takes one path"),
        # A child with torch is asked in these two.
        pytest.param(
            ["replay", "a", "--step", "9", "--model", "random:llama-tiny"],
            "no record of step 9",
            marks=pytest.mark.long,
        ),
        (["replay", "a", "--step", "0,1"], "one step"),
        pytest.param(
            ["replay", "a", "--model", "random:nothing"], "random:llama-tiny", marks=pytest.mark.long
        ),
        (["replay", "a", "--model", "/nothing/here"], "/nothing/here"),
        (["replay", "a", "--attention", "zzz"], "zzz"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_2_and_says_what_is_wrong(
    arguments: list[str], says: str, rldbg: Any, dumps: dict[str, Path]
):
    answer = rldbg(*(dumps.get(argument, argument) for argument in arguments))
    assert answer.code == ExitCode.BAD_REQUEST
    assert says in answer.err
    assert answer.out == ""


def broken(kind: str, directory: Path) -> Path:
    file = directory / "x.pt"
    if kind == "truncated":
        save_file(file, {"x": torch.randn(1000)})
        file.write_bytes(file.read_bytes()[:2000])
    elif kind == "bomb":
        file.write_bytes(pickle.dumps({"x": Bomb(f"touch {directory}/ran")}))
    elif kind == "zipped bomb":
        torch.save({"x": Bomb(f"touch {directory}/ran")}, file)
    elif kind == "empty file":
        file.write_bytes(b"")
    elif kind == "text":
        file.write_text("nothing that counts\n" * 40)
    elif kind == "device":
        return Path("/dev/null")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "empty directory":
        return directory
    elif kind == "no dump":
        (directory / "readme.txt").write_text("hello")
        return directory
    return file


@pytest.mark.parametrize("command", ["ls", "show", "compare"])
@pytest.mark.parametrize(
    "kind",
    ["truncated", "bomb", "zipped bomb", "empty file", "text", "device", "pipe", "empty directory", "no dump"],
)
def test_bytes_that_are_no_dump_are_3_and_nothing_they_carry_runs(kind: str, command: str, rldbg: Any, tmp_path: Path):
    directory = tmp_path / "broken"
    directory.mkdir()
    path = broken(kind, directory)
    answer = rldbg(command, path, *([path] if command == "compare" else []))
    assert answer.code == ExitCode.BAD_BYTES
    assert str(path) in answer.err
    assert not (directory / "ran").exists()


@pytest.mark.parametrize("command", ["ls", "show", "compare", "replay"])
def test_a_path_that_is_not_there_is_named(command: str, rldbg: Any, tmp_path: Path):
    answer = rldbg(command, tmp_path / "gone", *([tmp_path / "gone"] if command == "compare" else []))
    assert answer.code in (ExitCode.BAD_REQUEST, ExitCode.BAD_BYTES)
    assert "no such file" in answer.err


def test_nothing_in_common_is_3(rldbg: Any, tmp_path: Path):
    answer = rldbg("compare", save_file(tmp_path / "a.pt", {"x": 1}), save_file(tmp_path / "b.pt", {"y": 1}))
    assert answer.code == ExitCode.BAD_BYTES
    assert "no tensor in common" in answer.err


@pytest.mark.parametrize("allowed", [[], ["--allow-missing"]])
@pytest.mark.parametrize("side", [0, 1])
def test_an_unreadable_record_on_one_side_is_3_whatever_is_allowed(
    side: int, allowed: list[str], rldbg: Any, tmp_path: Path
):
    pair = write_pair(tmp_path, FIELDS, FIELDS)
    record = next((pair[side] / "forward_data").glob("*.pt"))
    record.write_bytes(record.read_bytes()[:400])
    assert rldbg("compare", *pair, *allowed).code == ExitCode.BAD_BYTES
    answer = rldbg("ls", pair[side])
    assert answer.code == ExitCode.BAD_BYTES
    assert "problem: " in answer.out


@pytest.mark.parametrize(
    ("manifest", "code"),
    [
        ('{"format": "rldbg-dump", broken', 3),
        ('["rldbg-dump"]', 3),
        ('{"format": "rldbg-dump", "schema_version": 99}', 3),
        ('{"format": "rldbg-dump", "schema_version": 1, "models": [1]}', 3),
        ('{"format": "rldbg-dump", "schema_version": 1, "flags": 7}', 3),
        ('{"format": "rldbg-dump", "schema_version": 1, "models": {"x": 1, "2": 7}}', 0),
    ],
)
def test_manifests_that_somebody_edited(manifest: str, code: int, rldbg: Any, tmp_path: Path):
    dump = write_dump(tmp_path / "dump", FIELDS)
    (dump / "manifest.json").write_text(manifest)
    assert rldbg("ls", dump).code == code


@pytest.mark.parametrize(
    "line",
    ["null", "[]", '{"key": null, "file": 1, "fields": null}', '{"key": {"step": "0"}, "file": "x", "fields": []}',
     '{"key": {}, "file": "../../etc/passwd", "fields": []}', "[" * 100_000, "\x00", '{"key": {"step": 0}}'],
)  # fmt: skip
def test_index_lines_that_somebody_edited_are_problems(line: str, rldbg: Any, tmp_path: Path):
    dump = write_dump(tmp_path / "dump", FIELDS)
    (dump / "index_rank0.jsonl").write_text(line + "\n")
    answer = rldbg("ls", dump)
    assert answer.code == ExitCode.AGREES
    assert "problem: " in answer.out
    assert "forward_data" in answer.out


@pytest.mark.parametrize(
    "command", [["ls", "a"], ["compare", "a", "other"], ["info"], ["show", "a", "--stage", "forward_data"]]
)
def test_json_is_the_document_and_nothing_else(command: list[str], rldbg: Any, dumps: dict[str, Path]):
    answer = rldbg(*(dumps.get(argument, argument) for argument in command), "--json")
    assert answer.document["schema_version"] == 1
    assert answer.err == ""


def test_output_writes_the_document_and_still_prints_the_answer(rldbg: Any, dumps: dict[str, Path], tmp_path: Path):
    target = tmp_path / "new" / "folder" / "doc.json"
    answer = rldbg("compare", dumps["a"], dumps["other"], "--force", "--output", target)
    assert answer.code == ExitCode.DIVERGES
    assert "first diverging tensor" in answer.out
    assert json.loads(target.read_text())["kind"] == "comparison"
    both = rldbg("compare", dumps["a"], dumps["other"], "--output", target, "--json", "--force")
    assert json.loads(target.read_text()) == both.document


@pytest.mark.parametrize("target", ["folder", "file/doc.json", "/proc/doc.json", "/dev/full"])
def test_where_nothing_can_be_written_is_2(target: str, rldbg: Any, dumps: dict[str, Path], tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    answer = rldbg("compare", dumps["a"], dumps["b"], "--output", tmp_path / target)
    assert answer.code == ExitCode.BAD_REQUEST


def test_output_to_a_device_or_a_link_leaves_them_what_they_are(rldbg: Any, dumps: dict[str, Path], tmp_path: Path):
    rldbg("compare", dumps["a"], dumps["b"], "--output", "/dev/null")
    assert Path("/dev/null").is_char_device()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    rldbg("compare", dumps["a"], dumps["b"], "--output", link)
    assert link.is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["kind"] == "comparison"


def weird() -> dict[str, Any]:
    return {
        "[red]x[/red]": 1.0, "new\nline": 2.0, "n" * 300: 3.0, "esc\x1b[2J\x07": 4.0, "\u202eabc": 5.0, "": 6.0,
        "a b": "text\x1b]0;title\x07", "big": 2**70, "low": -(2**63), "empty": torch.zeros(0, 3),
        "zero-d": torch.tensor(3.5), "complex": torch.tensor([1 + 2j]), "f8": torch.ones(2).to(torch.float8_e4m3fn),
        "surrogate": "\udcff", "nan": float("nan"), "truth": torch.tensor(True), "é": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_names_and_values_cannot_drive_the_terminal(json_too: list[str], rldbg: Any, tmp_path: Path):
    changed = {**weird(), **dict.fromkeys(["[red]x[/red]", "new\nline", "esc\x1b[2J\x07", ""], 9.0), "a b": "\x1b[31m"}
    a, b = write_pair(tmp_path, {"loss": weird()}, {"loss": changed})
    answers = [rldbg("ls", a, *json_too), rldbg("show", a, *json_too), rldbg("compare", a, b, "--all", *json_too)]
    answers += [rldbg("show", a, name, *json_too) for name in weird()]
    answers.append(rldbg("show", a, "esc\x1b", *json_too))  # named in the error
    for answer in answers:
        assert "\x1b" not in answer.out + answer.err.replace("\x1b[31m\x1b[1merror: \x1b[0m", "")
        assert "\x07" not in answer.out + answer.err
        if json_too and answer.out:
            assert answer.document
    assert answers[2].code == ExitCode.DIVERGES


def test_markup_in_a_name_is_shown_as_it_stands(rldbg: Any, tmp_path: Path):
    dump = write_dump(tmp_path / "dump", {"loss": {"[red]x[/red]": 1.0}})
    assert "[red]x[/red]" in rldbg("ls", dump).out
    assert "[red]x[/red]" in rldbg("show", dump).out


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_numbers_of_a_plain_pickle_are_shown(protocol: int, rldbg: Any, tmp_path: Path):
    import numpy as np

    file = tmp_path / "x.pkl"
    file.write_bytes(pickle.dumps({"x": np.float32(3), "y": np.array(2.5), "z": np.arange(3, dtype=">i4")}, protocol))
    answer = rldbg("show", file)
    assert answer.code == ExitCode.AGREES
    assert "2.5" in answer.out
    assert rldbg("compare", file, file).code == ExitCode.AGREES


@pytest.mark.long
def test_a_reader_that_leaves_early_is_no_error(dumps: dict[str, Path]):
    answer = shell(f"rldbg ls {dumps['a']} --json | head -c 5; rldbg compare {dumps['a']} {dumps['other']} | true")
    assert answer.err == ""
    assert answer.out == '{\n "s'


def test_a_full_disk_behind_standard_output_is_said(dumps: dict[str, Path]):
    answer = shell(f"rldbg ls {dumps['a']} > /dev/full")
    assert answer.code == ExitCode.BAD_REQUEST
    assert "No space left" in answer.err


def test_what_nobody_hears_on_standard_error_changes_no_code(dumps: dict[str, Path], tmp_path: Path):
    """1 would say that something differs."""
    assert shell("rldbg compare nothing nowhere 2> /dev/full").code == ExitCode.BAD_REQUEST
    saved = tmp_path / "saved.json"
    answer = shell(f"rldbg compare {dumps['a']} {dumps['b']} --output {saved} 2> /dev/full")
    assert (answer.code, "SAME" in answer.out, saved.exists()) == (ExitCode.AGREES, True, True)


@pytest.mark.long
@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}],
)
def test_a_terminal_that_knows_only_ascii_still_gets_an_answer(environment: dict[str, str], tmp_path: Path):
    a, b = write_pair(tmp_path, {"loss": {"über": 1.0, "x": torch.ones(2, 3)}}, {"loss": {"über": 2.0}})
    answer = shell(f"rldbg compare {a} {b}", **environment)
    assert answer.code == ExitCode.DIVERGES
    assert "first diverging tensor" in answer.out


@pytest.mark.long
def test_a_working_directory_that_cannot_be_written_is_no_obstacle(dumps: dict[str, Path], tmp_path: Path):
    answer = shell(f"cd /proc/self && rldbg compare {dumps['a']} {dumps['b']} && rldbg info >/dev/null")
    assert answer.code == ExitCode.AGREES


def test_a_bug_of_our_own_is_70_with_a_report(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    from replay_core import workbench

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(workbench, "open_dump", fail)
    assert run(["ls", "anything"]) == ExitCode.INTERNAL
    error = capfd.readouterr().err
    assert "ZeroDivisionError: ours" in error
    report = Path(error.split("the report is in ")[1].strip())
    assert "ZeroDivisionError" in report.read_text()


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    from replay_core import workbench

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workbench, "open_dump", interrupt)
    assert run(["ls", "anything"]) == ExitCode.INTERRUPTED
    assert "interrupted" in capfd.readouterr().err


def test_the_screens_options_may_stand_before_its_paths(
    dumps: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`rldbg --follow RUN`; without a terminal the screen says so, and the option is known all the same."""
    run(["--follow", str(dumps["a"])])
    assert "No such option" not in capsys.readouterr().err
    assert run(["--nonsense"]) == ExitCode.BAD_REQUEST
    assert "'--nonsense'" in capsys.readouterr().err
    assert run(["--version"]) == 0

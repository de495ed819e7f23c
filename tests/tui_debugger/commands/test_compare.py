"""`rldbg compare` as a stranger types it: its options, its streams, its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.errors import ExitCode
from tests import golden
from tests.builders import write_dump, write_pair
from tests.fixtures import FIXTURES
from tests.replay_core.compare.layouts import samples, worse, write
from tui_debugger.cli import run

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compare(capfd: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: Any) -> tuple[int, str, str]:
        code = run(["compare", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture
def dumps(tmp_path: Path) -> tuple[Path, Path]:
    """Two layers; the second one's output differs by 5 % of its norm."""
    a = {f"layers.{i}.output": torch.randn(2, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)}
    b = {**a, "layers.1.output": a["layers.1.output"] * 1.05}
    return write_pair(tmp_path, {"modules": a, "loss": {"loss": 1.0}}, {"modules": b, "loss": {"loss": 1.0}})


def test_own_limits_decide(compare: Call, dumps: tuple[Path, Path], tmp_path: Path):
    assert compare(*dumps)[0] == ExitCode.DIVERGES
    assert compare(*dumps, "--rtol", 0.1)[0] == ExitCode.AGREES
    assert compare(*dumps, "--rtol", 0.01)[0] == ExitCode.DIVERGES
    rules = tmp_path / "limits.toml"
    rules.write_text('[[tolerance]]\nname = "layers.1.*"\nreason = "known"\nrtol = 0.1\n')
    assert compare(*dumps, "--tolerance", rules)[0] == ExitCode.AGREES
    rules.write_text('[[tolerance]]\nname = "layers.1.*"\nreason = "known"\nrtol = nan\n')
    code, _, err = compare(*dumps, "--tolerance", rules)
    assert code == ExitCode.BAD_REQUEST
    assert "no tolerance" in err


def test_a_written_comparison_says_what_it_was_judged_by(compare: Call, dumps: tuple[Path, Path], tmp_path: Path):
    written = tmp_path / "lenient.json"
    assert "judged by rtol 0.1" in compare(*dumps, "--rtol", 0.1, "--output", written)[1]
    assert "judged by rtol 0.1" in compare(written)[1]
    assert "judged by" not in compare(*dumps)[1]


@pytest.mark.parametrize("option", ["--atol", "--rtol"])
@pytest.mark.parametrize("limit", ["nan", "-1", "inf", "-inf", "1e400"])
def test_a_tolerance_that_is_no_number_is_a_wrong_request(
    limit: str, option: str, compare: Call, dumps: tuple[Path, Path]
):
    code, _, err = compare(*dumps, option, limit)
    assert code == ExitCode.BAD_REQUEST
    assert f"{option} is no tolerance" in err


def test_a_tolerance_file_without_bounds_holds_nothing_to_anything(
    compare: Call, dumps: tuple[Path, Path], tmp_path: Path
):
    rules = tmp_path / "limits.toml"
    rules.write_text('[[tolerance]]\nname = "*"\nreason = "off"\nrel_l2 = inf\n')
    code, _, err = compare(*dumps, "--tolerance", rules)
    assert code == ExitCode.BAD_REQUEST
    assert "rel_l2 is no tolerance" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--exact", "--rtol", "1"], "--exact leaves nothing to tolerate"),
        (["--json", "--jsonl"], "two forms of one answer"),
        (["--name", "nobody"], "neither has a tensor of the name nobody"),
        (["--stage", "poems"], "poems"),
        (["--map", "nothing.map"], "map of names cannot be read"),
        (["--tolerance", "nothing.toml"], "tolerance file cannot be read"),
        (["--explain", "nobody"], "no tensor 'nobody' was compared"),
        (["--explain", ""], "no tensor '' was compared"),
        (["--explain", "layers.1.outptu"], "expected: layers.1.output,"),
        (["--explain", "LAYERS.1"], "expected: layers.1.output"),
    ],
)
def test_a_wrong_request_is_2(arguments: list[str], says: str, compare: Call, dumps: tuple[Path, Path]):
    code, out, err = compare(*dumps, *arguments)
    assert code == ExitCode.BAD_REQUEST
    assert says in err
    assert not out


def test_a_selection_is_stated_and_nothing_else_is_read(compare: Call, dumps: tuple[Path, Path]):
    code, out, _ = compare(*dumps, "--name", "layers.0.*", "--stage", "modules", "--json")
    document = json.loads(out)
    assert code == ExitCode.AGREES
    assert document["selection"] == {"stage": "modules", "name": "layers.0.*"}
    assert [row["name"] for row in document["tensors"]] == ["layers.0.output"]
    assert "only  stage modules, name layers.0.*" in compare(*dumps, "--name", "layers.0.*", "--stage", "modules")[1]


def test_jsonl_says_the_first_divergence_right_after_its_tensor_and_the_rest_at_last(
    compare: Call, dumps: tuple[Path, Path]
):
    code, out, _ = compare(*dumps, "--jsonl")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == ExitCode.DIVERGES
    assert [next(iter(line)) for line in lines] == ["tensor", "tensor", "first_divergence", "tensor", "comparison"]
    assert lines[1]["tensor"]["name"] == lines[2]["first_divergence"]["name"] == "layers.1.output"
    assert "tensors" not in lines[-1]["comparison"]
    assert lines[-1]["comparison"]["counts"]["total"] == 3


def test_the_first_divergence_is_said_before_a_later_step_is_opened(tmp_path: Path):
    """The second step's files go as soon as the first divergence is known: read before, nobody would miss them."""
    from replay_core import workbench
    from replay_core.errors import RldbgError
    from replay_core.jobs import Event, Partial
    from replay_core.recorder import Recorder

    for name, off in (("a", 0.0), ("b", 1.0)):
        recorder = Recorder(tmp_path / name)
        for step in range(2):
            with recorder.step(step) as record:
                record("modules", micro=0, x=torch.ones(3) + off)
    seen: list[str] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Partial):
            seen.append(str(event.document["first_divergence"]["name"]))
            for name in "ab":
                for file in (tmp_path / name).rglob("step_000001*"):
                    file.unlink()

    try:
        document = workbench.compare_dumps(tmp_path / "a", tmp_path / "b", on_event=on_event)
        assert document["coverage"]["records_unreadable"] > 0
    except RldbgError as error:
        pytest.fail(f"a file that went is a problem of its record, not of the comparison: {error}")
    assert seen == ["x"]


def test_a_written_comparison_is_shown_again_with_its_exit_code(
    compare: Call, dumps: tuple[Path, Path], tmp_path: Path
):
    file = tmp_path / "snapshot.json"
    first = compare(*dumps, "--output", file)
    again = compare(file)
    assert again[:2] == first[:2]
    assert compare(file, "--explain", "layers.1.output")[1].startswith("DIFF")
    assert json.loads(compare(file, "--json")[1]) == json.loads(file.read_text())
    code, _, err = compare(file, "--exact")
    assert code == ExitCode.BAD_REQUEST
    assert "is shown as it was" in err
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    code, _, err = compare(file)
    assert code == ExitCode.BAD_BYTES
    assert "schema from the future" in err


def test_nothing_in_common_is_3_and_names_both(compare: Call, tmp_path: Path):
    a, b = write_dump(tmp_path / "a", {"modules": {"x": 1.0}}), write_dump(tmp_path / "b", {"modules": {"y": 1.0}})
    code, out, err = compare(a, b)
    assert code == ExitCode.BAD_BYTES
    assert str(a) in err
    assert str(b) in err
    assert not out


def test_a_sample_of_one_side_alone_is_never_0(compare: Call, tmp_path: Path):
    batch = samples([(2, 3), (3, 3), (2, 4)])
    a = write(tmp_path / "a", batch, [[0, 1, 2]], "right")
    b = write(tmp_path / "b", batch, [[2, 0]], "left")
    code, out, _ = compare(a, b)
    assert code == ExitCode.DIVERGES
    assert "1 samples on one side alone" in out
    assert compare(a, b, "--allow-missing")[0] == ExitCode.AGREES


def test_an_empty_path_is_no_dump(compare: Call, dumps: tuple[Path, Path]):
    """`rldbg compare "$UNSET" b`: not the working directory."""
    code, _, err = compare("", dumps[1])
    assert code == ExitCode.BAD_REQUEST
    assert "the path is empty" in err


def test_a_run_compared_with_itself_is_said_so(compare: Call, dumps: tuple[Path, Path]):
    code, out, _ = compare(dumps[0], dumps[0])
    assert code == ExitCode.AGREES
    assert "one and the same path" in out
    assert "one and the same path" not in compare(*dumps)[1]


def test_a_record_that_neither_side_can_read_is_never_everything_same(compare: Call, dumps: tuple[Path, Path]):
    for path in dumps:
        (file,) = path.glob("modules/*.pt")
        file.write_bytes(file.read_bytes()[:100])
    code, out, _ = compare(*dumps)
    assert code == ExitCode.BAD_BYTES
    assert out.startswith("PARTLY no divergence, but 2 records unreadable")


def test_an_output_that_cannot_be_written_does_not_cost_the_answer(compare: Call, dumps: tuple[Path, Path]):
    code, out, err = compare(*dumps, "--output", "/dev/full")
    assert code == ExitCode.BAD_REQUEST
    assert out.startswith("DIFF")
    assert "cannot be written" in err


@pytest.mark.long
@pytest.mark.parametrize(("form", "code"), [("--jsonl", 130), ("--json", 1), ("--all", 1)])
def test_a_reader_that_leaves_early_is_no_verdict(form: str, code: int, tmp_path: Path):
    """Of a stream nobody has the whole answer; a finished one keeps its code."""
    names = [f"layers.{number}.output" for number in range(400)]
    a, b = write_pair(
        tmp_path, {"modules": dict.fromkeys(names, torch.ones(2))}, {"modules": dict.fromkeys(names, torch.ones(2) * 2)}
    )
    call = f"{sys.executable} -m tui_debugger compare {a} {b} {form}"
    script = f"{call} | head -n 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == (str(code), "")


@pytest.mark.long
def test_a_full_disk_behind_a_stream_is_said(dumps: tuple[Path, Path]):
    call = [sys.executable, "-m", "tui_debugger", "compare", *map(str, dumps), "--jsonl"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == ExitCode.BAD_REQUEST
    assert "standard output cannot be written" in ran.stderr


def test_the_report_of_a_regrouped_batch_names_both_places(compare: Call, tmp_path: Path):
    batch = samples([(2, 3), (3, 3), (2, 4), (2, 2)])
    changed = [worse(sample, 4) if sample.name == 2 else sample for sample in batch]
    a = write(tmp_path / "a", batch, [[0, 1], [2, 3]], "right", ranks=2)
    b = write(tmp_path / "b", changed, [[3, 2, 1, 0]], "packed")
    code, out, _ = compare(a, b)
    assert code == ExitCode.DIVERGES
    golden.check_text("report_regrouped", out.rstrip("\n"), tmp=tmp_path)


def test_the_report_of_genuine_runs(compare: Call):
    out = compare(
        FIXTURES / "nexrl/self_hosted_fp32", FIXTURES / "nexrl/self_hosted_bf16", "--step", 0, "--name", "*logprobs"
    )[1]
    golden.check_text("report_nexrl_step0", out.rstrip("\n"), fixtures=FIXTURES)


@pytest.fixture
def scripted(tmp_path: Path) -> list[str]:
    from tests.builders import write_nexrl

    for name, loss in (("self", 1.0), ("weaver", 1.0), ("remote", 1.5)):
        for rank in range(2):
            write_nexrl(
                tmp_path / name, "loss", {"step": 3, "rank": rank, "micro_idx": 0, "loss": loss}, step=3, rank=rank
            )
    return [f"--{option}={tmp_path / name}" for option, name in
           (("self_hosted_dir", "self"), ("weaver_dir", "weaver"), ("remote_api_dir", "remote"))]  # fmt: skip


def test_the_nexrl_scripts_arguments_unchanged(compare: Call, scripted: list[str], tmp_path: Path):
    report = tmp_path / "report.json"
    rest = ["--step", "3", "--num_ranks", "2", "--num_micros", "1", "--force", "--output", report]
    code, out, _ = compare(*scripted[:2], *rest)
    assert code == ExitCode.AGREES
    assert "loss loss" in out
    assert json.loads(report.read_text())["summary"]["fields"][0]["count"] == 2
    code, out, _ = compare(*scripted, *rest)
    assert code == ExitCode.DIVERGES
    document = json.loads(report.read_text())
    assert document["first_divergence"] is None
    assert [other["first_divergence"]["name"] for other in document["others"]] == ["loss", "loss"]
    code, _, err = compare(*scripted[:2], "--step", "1")
    assert code == ExitCode.BAD_REQUEST
    assert "no record of step 1" in err


def test_ranks_that_were_promised_and_are_nowhere_are_no_agreement(compare: Call, scripted: list[str], tmp_path: Path):
    report = tmp_path / "report.json"
    asked = [*scripted[:2], "--step", "3", "--num_ranks", "64", "--num_micros", "2", "--force", "--output", report]
    code, out, _ = compare(*asked)
    assert code == ExitCode.DIVERGES
    assert out.startswith("PARTLY no divergence, but 63 ranks and micro-batches are not there")
    assert "rank 2..63 of 64 is in no run; there are rank 0..1" in out
    assert compare(report)[0] == code
    assert compare(*asked, "--allow-missing")[0] == ExitCode.AGREES
    assert "numbers_absent" not in compare(*scripted[:2], "--step", "3", "--json")[1]


def test_three_runs_begin_with_the_pair_that_parts(compare: Call, scripted: list[str]):
    code, out, _ = compare(*scripted, "--step", "3")
    assert code == ExitCode.DIVERGES
    assert out.startswith("DIFF first at loss")


@pytest.mark.parametrize(("off", "code"), [(0.0, ExitCode.AGREES), (5.0, ExitCode.DIVERGES)])
def test_what_one_side_says_twice_is_let_pass_only_where_it_says_the_same(
    off: float, code: int, compare: Call, tmp_path: Path
):
    """Weaver's is_loss_debug repeats the log probabilities of forward_data, which the other run has once."""
    from tests.builders import write_nexrl

    logprobs_BT = -torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
    for name in ("self", "weaver"):
        write_nexrl(tmp_path / name, "forward_data", {"log_probs": logprobs_BT, "response_mask": torch.ones(2, 6)})
    write_nexrl(tmp_path / "weaver", "is_loss_debug", {"log_probs": logprobs_BT + off})
    found, out, _ = compare(tmp_path / "self", tmp_path / "weaver")
    assert found == code
    assert ("only b has it in is_loss_debug" in out) is bool(off)


def test_explain_lists_the_rules_that_were_asked_value_beside_limit(tmp_path: Path, capsys):
    a = {"layers.0.mlp.output": torch.randn(64, 96, generator=torch.Generator().manual_seed(0))}
    b = {"layers.0.mlp.output": a["layers.0.mlp.output"] * (1 + 6e-5)}
    paths = write_pair(tmp_path, {"modules": a}, {"modules": b})
    assert run(["compare", *map(str, paths), "--explain", "layers.0.mlp.output"]) == 1
    lines = capsys.readouterr().out.splitlines()
    asked = [line.replace("asked", "").split() for line in lines if " up to " in line and "why" not in line]
    assert {"rel_l2", "worst_row", "outlier", "gain"} <= {words[0] for words in asked}
    assert [words[0] for words in asked if words[-1] == "decided"] == ["gain"]
    size = next(words for words in asked if words[0] == "rel_l2")
    assert float(size[1]) < float(size[4])

"""A run that died is never called clean: of what, after which step, at which line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from replay_core.dumps import open_run
from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, only, told, trl, verl, worrying

STEPS = trl([{}] * 4)


def said_by(code: str, *options: str) -> str:
    """What a Python that really fails leaves on standard error, and bash about it."""
    command = " ".join([sys.executable, *options, "-c", f"'{code}'"])
    ended = subprocess.run(["bash", "-c", f"{command}; true"], capture_output=True, text=True, check=False)
    assert ended.stderr
    return ended.stderr


@pytest.mark.parametrize(
    ("code", "options", "words"),
    [
        ("def reward(): raise KeyError(3)\nreward()", (), "KeyError: 3"),
        ("class Stop(BaseException): pass\nraise Stop", (), "Stop"),
        ("try: 1 / 0\nexcept ZeroDivisionError as error: raise ValueError from error", (), "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", (), "Killed"),
        ("import os; os.abort()", (), "Aborted"),
        ("import ctypes; ctypes.string_at(0)", ("-X", "faulthandler"), "Fatal Python error: Segmentation fault"),
    ],
)  # fmt: skip
def test_a_process_that_really_ended_is_said_to_be_dead(
    code: str, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    finding = diagnosed(tmp_path, STEPS + said_by(code, *options)).findings[0]
    assert (finding.id, finding.severity) == ("L06", "error")
    assert words in finding.claim
    assert "died at line" in finding.claim
    assert "after step 4" in finding.claim
    line = (tmp_path / "train.log").read_text().splitlines()[(finding.where.line or 0) - 1]
    assert words in line


#: As torch, NCCL, torchrun, Slurm and the kernel print them.
LAST_LINES = {
    "watchdog": "[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, "
    "Timeout(ms)=600000) ran for 600067 milliseconds before timing out.",
    "assert": "RuntimeError: CUDA error: device-side assert triggered",
    "cuda": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "cublas": "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle)`",
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219",
    "torchrun": "W0801 13:23:17.366000 32974 torch/distributed/elastic/multiprocessing/api.py:900] Sending process "
    "33051 closing signal SIGTERM",
    "agent": "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 4 (pid: 364592) "
    "of binary: /usr/bin/python",
    "agent told": "W0227 17:39:41 site-packages/torch/distributed/elastic/agent/server/api.py:719] Received 15 "
    "death signal, shutting down workers",
    "slurm": "slurmstepd: error: *** JOB 812 ON node7 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***",
    "plain": "SIGTERM",
    "handler": "2026-01-02 03:04:05 Received signal SIGTERM, leaving",
    "ray": "ray.exceptions.RayTaskError(ValueError): ray::WorkerDict.actor_update() (pid=5)",
    "exc": "EXC RuntimeError: shapes do not match",
    "c++": "terminate called after throwing an instance of 'c10::DistBackendError'",
}  # fmt: skip


@pytest.mark.parametrize("line", LAST_LINES.values(), ids=LAST_LINES.keys())
def test_a_line_that_tells_of_an_end_is_an_error_behind_steps_and_alone(line: str, tmp_path: Path) -> None:
    finding = diagnosed(tmp_path, verl([{}] * 3) + line + "\n").findings[0]
    assert (finding.id, finding.severity, finding.where.line, finding.where.step) == ("L06", "error", 4, 3)
    alone = tmp_path / "alone.log"
    alone.write_text(line + "\n")
    assert open_run(alone).dialect == "log"
    assert told(diagnosed_path(alone)) == [("L06", "error")]


def test_the_first_of_several_ends_is_the_cause(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, STEPS + said_by("raise KeyError(3)") + LAST_LINES["torchrun"] + "\n"), "L06")
    assert "KeyError: 3" in found.claim
    assert found.evidence[-1].value == 2


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=812.0. Some of the step tasks have been OOM Killed.",
        "[ 812.3] Out of memory: Killed process 4711 (python) total-vm:8123456kB",
        "reason: OOMKilled",
        "[ 812.3] python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    ],
)
def test_what_the_kernel_kills_ran_out_of_host_memory(line: str, tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, STEPS + line + "\n")) == [("D36", "error")]


def test_a_setting_of_the_killer_has_killed_nothing(tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, "INFO oom_killer disabled in cgroup; oom_kill_disable 1\n" + STEPS)) == []


def test_an_exception_that_was_caught_ends_nothing(tmp_path: Path) -> None:
    later = trl([{}] * 2, first=5)
    diagnosis = diagnosed(tmp_path, STEPS + said_by("raise KeyError(3)") + later)
    assert told(diagnosis) == [("L06", "info")]
    assert "the run went on" in only(diagnosis, "L06").claim


def test_a_signal_that_steps_follow_was_another_start(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, STEPS + LAST_LINES["torchrun"] + "\n" + STEPS), "L06")
    assert (found.severity, found.where.line) == ("error", 5)
    assert "was started again" in found.claim


@pytest.mark.parametrize(
    "line",
    [
        "saving a checkpoint on SIGTERM is enabled",
        "INFO: no NCCL errors so far; CUDA errors 0, Exceptions raised: 0",
        "Exception ignored in: <function Pool.__del__ at 0x7f>\nTraceback (most recent call last):\n"
        '  File "pool.py", line 2, in __del__\n    self.close()\nAttributeError: closed',
        "watchdog_timeout: 600, heartbeat: on, error: none",
    ],
)
def test_words_of_an_end_in_a_sentence_are_none(line: str, tmp_path: Path) -> None:
    assert worrying(diagnosed(tmp_path, STEPS + line + "\n")) == []


def test_a_person_who_stops_a_run_is_no_error(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, STEPS + said_by("raise KeyboardInterrupt")), "L06")
    assert found.severity == "warning"
    assert "stopped by hand" in found.claim


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            "unable to write to file </torch_912_3312_0>: No space left on device (28)",
            "shared memory (/dev/shm) is full",
        ),
        ("[Errno 28] No space left on device: '/ckpt/step_3'", "the disk is full"),
        (
            "Error(s) in loading state_dict for Llama:\n\tsize mismatch for lm_head.weight: a, b",
            "weights are not the model",
        ),
    ],
    ids=["shared memory", "disk", "checkpoint"],
)
def test_an_end_with_a_known_cause_names_it(error: str, cause: str, tmp_path: Path) -> None:
    text = f'{STEPS}Traceback (most recent call last):\n  File "a.py", line 2, in <module>\nRuntimeError: {error}\n'
    assert cause in only(diagnosed(tmp_path, text), "L06").cause

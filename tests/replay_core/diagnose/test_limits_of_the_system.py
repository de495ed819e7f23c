# ruff: noqa: E501 - they are the programs' own lines
"""Ends by a limit of the system, a container or a cluster's manager: what was taken for something else, as printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.diagnose.environment_texts import LIMITS
from replay_core.regexes import regex
from tests.replay_core.diagnose.logs import diagnosed, trl, verl, worrying

_TRACE = 'Traceback (most recent call last):\n  File "/w/train.py", line 9, in main\n    trainer.train()\n'


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (_TRACE + "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 6442451328 vs 6442451216\n", "could not be written to its end"),
        (_TRACE + "RuntimeError: unable to open shared memory object </torch_5120_108280> in read-write mode: Too many open files (24)\n", "open file handles"),
        ("OpenBLAS blas_thread_init: pthread_create failed for thread 31 of 64: Resource temporarily unavailable\nterminate called after throwing an instance of 'std::system_error'\n  what():  Resource temporarily unavailable\n", "processes or threads"),
        ("(SGLangEngine pid=13265) E0203 12:01:10.112 rdma_context.cpp:120] Failed to register memory 0x7f: Cannot allocate memory [12]\n(SGLangEngine pid=13265) RuntimeError: Mooncake memory registration failed.\n", "memlock"),
        ("gpu-a12:413:813 [3] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory\n" + _TRACE + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error\n", "memlock"),
        (_TRACE + "docker.errors.DockerException: Error while fetching server API version: ('Connection aborted.', FileNotFoundError(2, 'No such file or directory'))\n", "docker daemon"),
        ("(SGLangEngine pid=1) ValueError: token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=812331, available_size=512000\n", "SGLang's own idle check"),
        (_TRACE + "torch.AcceleratorError: CUDA error: the launch timed out and was terminated\n", "longer than the driver allows"),
        ("[2026-03-02 10:35:40,492 C 273 339] (raylet) gcs_rpc_client.h:537:  Check failed: absl::ToInt64Seconds(absl::Now()) Failed to connect to GCS within 60 seconds\n", "head of the Ray cluster"),
        ("(raylet) [2025-08-25 22:33:45,833 E 41 41] (raylet) worker_pool.cc:1239: Failed to send exit request: last error: UNKNOWN: ipv4:10.0.0.4:4001: Too many open files; RPC Error details\n", "open file handles"),
        ("Unhandled mesh failure, crashing! MeshFailure(rank=0, event=trainer_0[0]: failed: did not handle supervision event: ValueError: bad)\n", "actor of the mesh"),
        ("  Warning  Evicted   109s  kubelet   Pod ephemeral local storage usage exceeds the total limit of containers 5Gi.\n", "evicted the pod"),
        ("srun: error: Node failure on gpu-a12\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n", "a node is gone"),
        ("Stopping container trainer\nPod was terminated in response to imminent node shutdown.\n", "a node is gone"),
        ("Warning  DeadlineExceeded  job-controller  Job was active longer than specified deadline\n", "activeDeadlineSeconds"),
        ("Status message: Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\n", "entrypoint"),
        ("10:44:12   ERROR Orchestrator failed with exit code 1\n10:44:12   ERROR Terminating all processes...\n", "ended with an error code"),
        ("❌ Policy generation refit failed: CUDA error: invalid argument\n", "weight update of the engine failed"),
    ],
)  # fmt: skip
def test_an_end_is_told_by_its_own_words(tmp_path: Path, end: str, words: str) -> None:
    found = diagnosed(tmp_path, trl([{}] * 6) + end).findings[0]
    assert (found.id, found.severity) == ("L06", "error")
    assert words in f"{found.claim} {found.cause}"


@pytest.mark.parametrize(
    "end",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
        "Your session crashed after using all available RAM. If you are interested in access to high-RAM runtimes\n",
        "RuntimeError: unable to allocate: Cannot allocate memory\n",
    ],
)
def test_memory_of_the_host_is_still_that(tmp_path: Path, end: str) -> None:
    assert diagnosed(tmp_path, trl([{}] * 6) + end).findings[0].id == "D36"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  Warning  FailedScheduling  default-scheduler  0/12 nodes are available: 12 Insufficient nvidia.com/gpu.\n", "the pod waits"),
        ('  Warning  Failed     kubelet  Failed to pull image "reg/verl:latest": rpc error: no space left on device\n  Warning  Failed     kubelet  Error: ImagePullBackOff\n', "image cannot be pulled"),
        ("Status message: Job supervisor actor could not be scheduled: The actor is not schedulable\n", "never began"),
    ],
)  # fmt: skip
def test_what_was_never_begun_is_read_as_a_log(tmp_path: Path, text: str, words: str) -> None:
    found = diagnosed(tmp_path, text).findings[0]
    assert "did not begin" in found.claim
    assert words in found.claim


_GONE = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker exit type: "
    "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file.\n"
)


def test_a_worker_that_is_replaced_ends_no_run(tmp_path: Path) -> None:
    back = "INFO skyrl_train.env:restart:10 - sandbox worker 12 restarted\n"
    found = diagnosed(tmp_path, verl([{}] * 6) + _GONE + back + verl([{}] * 6, 7))
    assert not worrying(found)
    assert any("a worker process of Ray died" in one.claim and "the run went on" in one.claim for one in found.findings)
    # Steps that are taken anew are another start's; and so is a launcher's word, or none at all.
    assert worrying(diagnosed(tmp_path, verl([{}] * 6) + _GONE + back + verl([{}] * 6, 5)))
    assert worrying(diagnosed(tmp_path, verl([{}] * 6) + _GONE + verl([{}] * 6, 7)))
    started = "nohup: ignoring input\n"
    assert worrying(diagnosed(tmp_path, verl([{}] * 6) + _GONE + back + started + verl([{}] * 6, 7)))


def test_processes_that_are_ended_behind_the_last_step_worry_nobody(tmp_path: Path) -> None:
    over, asked = (
        "11:20:12    INFO Training finished!\n",
        "11:20:14 WARNING Received SIGTERM, terminating processes...\n",
    )
    assert not worrying(diagnosed(tmp_path, trl([{}] * 6) + over + asked))
    assert worrying(diagnosed(tmp_path, trl([{}] * 6) + asked))


def test_a_line_of_digits_is_looked_at_in_no_time() -> None:
    # A row that reads a run of digits to its end from each of them looks at its length, squared.
    assert not any(regex(pattern).search("1" * 100_000) for pattern, *_ in LIMITS)

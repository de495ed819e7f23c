"""A console that is appended to holds several starts: the last one's end is what it died of."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, only, trl, verl

_HEAD = "Traceback (most recent call last):\n"
_SCRIPT = '  File "/home/u/job/train.py", line {line}, in {name}\n    {code}\n'


def _raised(error: str, line: int = 9, name: str = "main", code: str = "main()") -> str:
    return _HEAD + _SCRIPT.format(line=line, name=name, code=code) + error + "\n"


def _driver(error: str, called: str) -> str:
    """What verl's main function leaves as it fails: hydra's line, Ray's envelope, the exception itself."""
    kind = error.partition(":")[0]
    return (
        "Error executing job with overrides: ['algorithm.adv_estimator=grpo']\n" + _HEAD
        + _SCRIPT.format(line=111, name="main", code="run_ppo(config)")
        + f"ray.exceptions.RayTaskError({kind}): \x1b[36mray::{called}()\x1b[39m (pid=9, ip=10.0.0.2)\n"
        + _SCRIPT.format(line=35, name=called, code="go()") + error + "\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    "start",
    [
        "+ python3 -m verl.trainer.main_ppo data.train_batch_size=64\n",
        "user@node7:~/job$ torchrun --nproc-per-node 8 train.py\n",
        "wandb: Tracking run with wandb version 0.19.8\n",
        "2026-11-20 08:01:02,114\tINFO worker.py:1821 -- Started a local Ray instance.\n",
    ],
)
def test_what_ended_an_earlier_start_is_not_why_the_last_one_ended(start: str, tmp_path: Path) -> None:
    first = _raised("OSError: [Errno 28] No space left on device")
    text = start + first + start + _raised("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)")
    found = diagnosed(tmp_path, text).findings[0]
    assert found.id == "L06"
    assert "mat1 and mat2" in found.claim


def test_a_start_behind_which_only_consequences_are_told_leaves_the_cause_before_it(tmp_path: Path) -> None:
    text = (
        _raised("ValueError: vocabulary of 9 and tokenizer of 8")
        + "wandb: Tracking run with wandb version 0.19.8\n"
        + "[rank1]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network "
        "error\n"
    )
    assert "vocabulary of 9" in diagnosed(tmp_path, text).findings[0].claim


def test_the_exception_that_the_last_driver_tells_is_what_the_last_run_died_of(tmp_path: Path) -> None:
    worker = "(WorkerDict pid=7) RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error\n"
    text = (
        worker + _driver("RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error", "init_model")
        + worker * 3 + _driver("UnboundLocalError: local variable 'os' referenced before assignment", "init_model")
    )  # fmt: skip
    found = diagnosed(tmp_path, text).findings[0]
    assert "UnboundLocalError" in found.claim


def test_one_driver_leaves_the_worker_that_says_more_in_the_lead(tmp_path: Path) -> None:
    worker = "(WorkerDict pid=7) RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    text = worker + _driver("AssertionError: failed to get register_center_actor: x in []", "main_task")
    assert "no kernel image" in diagnosed(tmp_path, text).findings[0].claim


def test_native_crashes_of_start_after_start_are_told_as_a_habit(tmp_path: Path) -> None:
    crash = "run.sh: line 107: 29{n}037 Segmentation fault      (core dumped) python3 main.py --hf https://hf.co\n"
    odd = _raised("FileExistsError: [Errno 17] File exists: '/home/u/wandb/run-1/run-1.wandb'")
    text = "".join(trl([{}] * 25, first=1 + 25 * n) + (odd if n == 2 else "") + crash.format(n=n) for n in range(4))
    found = diagnosed(tmp_path, text).findings[0]
    assert found.id == "L06"
    assert "again and again of a segmentation fault, 4 times" in found.claim


def test_one_segmentation_fault_is_read_where_the_command_follows_it(tmp_path: Path) -> None:
    text = trl([{}] * 4) + "run.sh: line 7: 2967037 Segmentation fault      (core dumped) python3 main.py\n"
    assert "Segmentation fault" in diagnosed(tmp_path, text).findings[0].claim


_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.46 GiB. GPU 1 has a total capacity of 139.80 "
    "GiB of "
    "which 4.24 GiB is free. Process 3559154 has 14.79 GiB memory in use. Process 3567109 has 120.64 GiB memory in "
    "use. "
    "Of the allocated memory 107.59 GiB is allocated by PyTorch, with 1.10 MiB allocated in private pools (e.g., CUDA "
    "Graphs), and 5.60 GiB is reserved by PyTorch but unallocated.\n"
)


def test_a_process_that_holds_what_torch_allocated_and_a_little_more_is_this_one(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, trl([{}] * 4) + _OOM), "D36")
    assert "another process" not in found.cause


def test_pools_that_the_allocator_names_are_no_warm_up_of_an_engine(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, trl([{}] * 4) + _OOM), "D36")
    assert "engine" not in found.cause


def _preempted(reached: tuple[int, ...], restarts: tuple[int, ...]) -> str:
    """Starts of one job, each from a step to another, at which a scheduler takes its machine away."""
    draw, text = random.Random(1), ""
    for first, last in zip(restarts, reached, strict=True):
        steps = [{"critic/score/mean": 0.3 + 0.3 * draw.random()} for _ in range(first, last + 1)]
        text += "2026-11-20 08:01:02,114\tINFO worker.py:1821 -- Started a local Ray instance.\n" + verl(steps, first)
        text += (
            "slurmstepd: error: *** JOB 88 ON n1 CANCELLED AT 2026-11-17T06:39:57 DUE TO PREEMPTION ***\n" + "\n" * 20
        )
    return text


def test_a_run_that_is_ended_again_and_again_and_repeats_its_steps_makes_no_progress(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _preempted((57, 54, 58, 52), (1, 41, 41, 41))).findings[0]
    assert (found.id, found.severity) == ("L06", "error")
    assert "makes no progress: it was ended 4 times from outside, after steps 57, 54, 58, 52" in found.claim
    assert "starts again at step 41" in found.claim
    assert "never comes past step 58" in found.claim


def test_a_run_that_is_ended_and_goes_on_makes_progress(tmp_path: Path) -> None:
    for reached, restarts in (((57, 95, 131, 170), (1, 41, 81, 121)), ((57, 54), (1, 41))):
        found = diagnosed(tmp_path, _preempted(reached, restarts)).findings[0]
        assert "no progress" not in found.claim


def test_another_threads_exception_and_a_peer_that_is_gone_are_consequences(tmp_path: Path) -> None:
    logged = "(AReaL) 20261107-09:45:22.118 Executor ERROR: Rollout task failed with exception:\n"
    files = logged + _raised("OSError: [Errno 24] Too many open files: '/a/qid-1.txt'", name="_run_task")
    for after in (
        "RuntimeError: Rollout thread encountered exception",
        "requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed "
        "connection without response'))",
    ):
        found = diagnosed(tmp_path, trl([{}] * 3) + files + _raised(after)).findings[0]
        assert "Too many open files" in found.claim
        alone = diagnosed(tmp_path, trl([{}] * 3) + _raised(after)).findings[0]
        assert (alone.id, alone.severity) == ("L06", "error")


def test_an_assertion_on_two_sizes_under_a_weight_loader_says_that_weights_do_not_fit(tmp_path: Path) -> None:
    text = (
        "(SGLangEngine pid=9) [2026-11-12 20:10:34 TP2] Scheduler hit an exception: " + _HEAD
        + '  File "/sglang/srt/managers/mixin.py", line 71, in update_weights_from_tensor\n    worker.update(request)\n'
        + '  File "/sglang/srt/layers/linear.py", line 269, in weight_loader\n'
        "    assert param.size() == loaded_weight.size()\nAssertionError\n"
    ).replace("\n  ", "\n(SGLangEngine pid=9)   ").replace("\nAssert", "\n(SGLangEngine pid=9) Assert")  # fmt: skip
    gone = "requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('closed'))"
    claim = diagnosed(tmp_path, trl([{}] * 3) + text + _raised(gone)).findings[0].claim
    assert "the trainer's weights do not fit the engine's" in claim
    assert "assert param.size() == loaded_weight.size()" in claim


def test_a_reward_server_that_gives_no_answer_is_named(tmp_path: Path) -> None:
    text = _raised("Exception: Request error for 5 times, returning None. Please check the API server.")
    assert "the reward server" in diagnosed(tmp_path, trl([{}] * 3) + text).findings[0].claim

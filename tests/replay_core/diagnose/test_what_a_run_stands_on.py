"""Drivers, containers, devices and remote services that fail: the cause and what to do, and not the last line again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replay_core.diagnose.failure_texts import failure_of
from tests.replay_core.diagnose.logs import diagnosed, only, told, trl, worrying

#: What is printed: what it means.
TEXTS = {
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized": "fabric manager",
    "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": "the GPU is taken",
    "RuntimeError: pidfd_getfd: Operation not permitted": "cannot be shared",
    "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM": "does not fit",
    "RuntimeError: Inference tensors cannot be saved for backward.": "inference_mode",
    "UnrecoverableAPIError: Response with unexpected status code: 402: {}": "no credit left",
    "openai.RateLimitError: You exceeded your current quota, please check your plan": "no credit left",
    "ValueError: Error code: 400 - {'detail': 'Expected exactly one model_id for sampling, got {a, b}'}": "several mod",
    "service.BadRequest: Error code: 400 - {'detail': 'temperature must be a number'}": "refuses the request itself",
    "client.APITimeoutError: Request timed out.": "no longer answers",
    "client.AuthenticationError: Error code: 401 - Incorrect API key provided": "refuses the key",
    "client.APIStatusError: Error code: 503": "an error of its own",
    "ConnectionError: Could not find any running Ray instance.": "no Ray cluster",
    "SandboxError: Failed to create sandbox": "cannot be made",
    "ValueError: optimizer got an empty parameter list": "no parameter is trained",
    "RuntimeError: Numpy is not available": "another NumPy",
    "openai.BadRequestError: Error code: 400 - {'message': \"maximum context length is 4096 tokens\"}": "longer than "
    "the",
    "pydantic.ValidationError: 2 validation errors for SFTConfig: a.b (Extra inputs are not permitted)": "another "
    "progr",
}


@pytest.mark.parametrize(("text", "words"), TEXTS.items(), ids=list(TEXTS.values()))
def test_a_text_has_a_cause_and_a_next_step(text: str, words: str) -> None:
    known = failure_of(text)
    assert known is not None
    assert not known.general
    assert words in known.cause
    assert known.next_step


def test_a_register_center_is_what_follows_of_a_worker_that_died(tmp_path: Path) -> None:
    text = (
        "(WorkerDict pid=3614, ip=172.31.33.92) RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: "
        "system not yet initialized\n"
        "AssertionError: failed to get register_center_actor: 6m0voG_register_center in [{'name': 'a'}]\n"
    )
    assert "CUDA cannot be initialised on this node" in diagnosed(tmp_path, text).findings[0].claim


def test_a_watchdog_goes_before_the_exit_code_that_torchrun_tables(tmp_path: Path) -> None:
    waits = (
        "[rank{0}]:[E405 03:51:41.2 ProcessGroupNCCL.cpp:688] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={1}, OpType=_ALLGATHER_BASE, NumelIn=1, NumelOut=2, Timeout(ms)=600000) ran for 600053 "
        "milliseconds before timing out.\n"
    )
    table = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\nRoot Cause (first observed failure):\n"
        "[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 5071)\n"
        "  traceback : Signal 6 (SIGABRT) received by PID 5071\n"
    )
    found = diagnosed(tmp_path, waits.format(0, 404) + waits.format(1, 405) + table).findings[0]
    assert "the run hung" in found.claim
    assert "rank 0 is behind, in _ALLGATHER_BASE (collective 404)" in found.claim


def test_an_assertion_of_the_gpu_behind_a_gradient_that_is_nan_is_its_doing(tmp_path: Path) -> None:
    steps = trl([{}] * 5 + [{"grad_norm": float("nan"), "kl": float("nan")}])
    crash = "torch.AcceleratorError: CUDA error: device-side assert triggered\n"
    found = diagnosed(tmp_path, steps + crash).findings[0]
    assert found.id == "L06"
    assert re.match(r"grad_norm, kl are not finite at step 6, and the run died of it", found.claim)
    assert "no index out of range" in found.cause
    alone = diagnosed(tmp_path, trl([{}] * 6) + crash).findings[0]
    assert "index out of range" in alone.claim


def test_a_program_that_is_not_there_is_told_by_the_function_that_starts_it(tmp_path: Path) -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/x/environments/docker.py", line 94, in _run_docker_compose_command\n'
        "    process = await asyncio.create_subprocess_exec(\n"
        '  File "/usr/lib/python3.12/asyncio/subprocess.py", line 224, in create_subprocess_exec\n'
        "    transport, protocol = await loop.subprocess_exec(\n"
        "FileNotFoundError: [Errno 2] No such file or directory\n"
    )
    found = diagnosed(tmp_path, text).findings[0]
    assert "a program that is to be started is not installed there (docker" in found.claim
    assert found.next_step.startswith("which docker")


def test_a_configuration_that_does_not_validate_names_its_fields(tmp_path: Path) -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/x/pydantic/main.py", line 253, in __init__\n    validate()\n'
        "pydantic_core._pydantic_core.ValidationError: 2 validation errors for SFTTrainerConfig\n"
        "data.fake\n  Input should be a valid boolean [type=bool_type, input_value={}, input_type=dict]\n"
        "    For further information visit https://errors.pydantic.dev/2.11/v/bool_type\n"
        "async_level\n  Extra inputs are not permitted [type=extra_forbidden, input_value=5, input_type=int]\n"
    )
    found = diagnosed(tmp_path, text).findings[0]
    for words in ("data.fake (Input should be a valid boolean)", "async_level (Extra inputs are not permitted)"):
        assert words in found.claim


def test_an_error_that_is_logged_again_and_again_is_told_with_its_cause(tmp_path: Path) -> None:
    line = (
        "ERROR:evals.sdk:Evaluator raised an exception: RetryError: execution failed after 1/3 attempts: "
        'UnrecoverableAPIError: Response with unexpected status code: 402: {"detail":"Insufficient funds"}\n'
    )
    found = only(diagnosed(tmp_path, trl([{}] * 5) + line * 30), "L29")
    assert found.severity == "warning"
    assert "no credit left" in found.claim
    assert "Insufficient funds" in found.claim
    of_a_judge = only(diagnosed(tmp_path, trl([{}] * 5) + line.replace("evals.sdk", "judge.sdk") * 30), "L29")
    assert "no credit left" in of_a_judge.claim


def test_a_kl_that_bf16_rounds_below_0_is_no_other_estimator(tmp_path: Path) -> None:
    values = [0.0, -1e-5, 0.002, 0.004, -5e-5, 0.003, 0.006, 0.01, 0.02, 0.004]
    assert worrying(diagnosed(tmp_path, trl([{"kl": kl} for kl in values]))) == []
    turned = [0.0, -1e-3, 0.002, -0.004, -5e-3, 0.003, -0.006, -0.01, -0.02, 0.004]
    assert ("D29", "error") in told(diagnosed(tmp_path, trl([{"kl": kl} for kl in turned])))


def test_a_head_that_is_tied_to_the_embedding_is_not_missed(tmp_path: Path) -> None:
    said = "Some weights of Gemma3ForCausalLM were not initialized from the model checkpoint at google/gemma-3-1b-it "
    tied = said + "and are newly initialized: ['lm_head.weight']\n"
    assert worrying(diagnosed(tmp_path, tied + trl([{}] * 4))) == []
    lost = said + "and are newly initialized: ['model.layers.0.mlp.up_proj.weight', 'lm_head.weight']\n"
    assert "L29" in {one.id for one in worrying(diagnosed(tmp_path, lost + trl([{}] * 4)))}


def test_a_recompile_limit_is_read_after_what_is_learnt(tmp_path: Path) -> None:
    hit = "torch._dynamo hit config.recompile_limit (8)"
    limit = f"W0226 04:13:00.9 588 torch/_dynamo/convert_frame.py:1358] [0/8] {hit}\n"
    cut = diagnosed(tmp_path, trl([{"completions/clipped_ratio": 0.99, "reward": 0.02}] * 2) + limit
                    + trl([{"completions/clipped_ratio": 0.99, "reward": 0.03}] * 8, 3))  # fmt: skip
    assert [one.id for one in worrying(cut)][:2] == ["D20", "D32"]
    same = diagnosed(tmp_path, trl([{}] * 8) + limit + trl([{}] * 8, 9))
    assert only(same, "D32").severity == "info"


def test_counts_and_evaluations_are_no_stalls(tmp_path: Path) -> None:
    steps = [{"step_time": None, "time/step": 100.0, "time/rewards:count": 900.0 if n % 20 == 0 else 100.0,
              "time/run_evals": 700.0 if n % 20 == 0 else 0.1} for n in range(70)]  # fmt: skip
    assert "D37" not in {one.id for one in worrying(diagnosed(tmp_path, trl(steps, 0)))}


def test_a_table_in_markdown_is_read_and_its_nan_told(tmp_path: Path) -> None:
    table = (
        "| step | entropy | kl | grad_norm | score |\n|------|------|------|------|------|\n"
        "| 88 | 0.2203 | 0.0004 | 0.1005 | 0.4695 |\n| 89 | 0.2086 | 0.0002 | 0.1032 | 0.4105 |\n"
        "| **90** | 0.2181 | **NaN** | **NaN** | 0.4262 |\n| 91+ | NaN | NaN | NaN | 0.0000 |\n"
    )
    found = diagnosed(tmp_path, table).findings[0]
    assert (found.id, found.severity, found.steps[0]) == ("D21", "error", 90)


def test_a_process_that_does_not_know_its_own_number_is_not_another(tmp_path: Path) -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.84 GiB. GPU 0 has a total capacity of 79.33 "
        "GiB "
        "of which 1.59 GiB is free. Process 151619 has {held} GiB memory in use. Of the allocated memory {own} GiB is "
        "allocated by PyTorch, and 2.33 GiB is reserved by PyTorch but unallocated.\n"
    )
    alone = diagnosed(tmp_path, text.format(held=77.73, own=74.89)).findings[0]
    assert "another process" not in alone.cause
    beside = diagnosed(tmp_path, text.format(held=57.73, own=17.5)).findings[0]
    assert "other processes hold 57.73 of the GPU's 79.33 GiB" in beside.cause

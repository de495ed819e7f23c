"""Ends of runs in the forms that users' consoles have them, shortened to what tells: what each is said to have died
of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, told, trl, worrying


def _first(folder: Path, text: str) -> str:
    found = diagnosed(folder, text).findings
    assert found, "nothing is said"
    return f"{found[0].id} {found[0].severity}: {found[0].claim} | {found[0].cause} | {found[0].next_step}"


_FAILED = """\
Traceback (most recent call last):
  File "/w/train.py", line 66, in <module>
    main(sys.argv[1:])
  File "/usr/lib/python3/dist-packages/omegaconf/_utils.py", line 804, in _raise
    raise ex.with_traceback(sys.exc_info()[2])
omegaconf.errors.ConfigKeyError: Key 'max_tokens' not in 'NormConfig'
"""
_STOPS = "20260203-10:00:01.522 Local Scheduler INFO: Stopping local process with signal SIGTERM, pid: [788]\n"


def test_what_a_launcher_kills_was_not_killed_by_the_kernel(tmp_path: Path) -> None:
    said = _first(tmp_path, "INFO 10:00:00 begins training\n" + _FAILED + _STOPS + "Killed\n")
    assert "max_tokens" in said
    assert "SIGKILL" not in said


def test_a_run_whose_launcher_stops_its_servers_behind_its_end_is_well(tmp_path: Path) -> None:
    text = trl([{}] * 12) + "{'train_runtime': 100.0, 'train_loss': 0.1}\n" + ">> Shutting down services...\nKilled\n"
    assert worrying(diagnosed(tmp_path, text)) == []


def test_a_kill_without_a_word_is_still_one(tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, trl([{}] * 12) + "Killed\n"))[0] == ("L06", "error")


def test_a_warning_before_a_traceback_does_not_catch_it(tmp_path: Path) -> None:
    text = (
        "x.py:9: UserWarning: old\nwarnings.warn(\n" + _FAILED + "    full_key: actor.max_tokens\nINFO next\nINFO on\n"
    )
    assert "L06 error" in _first(tmp_path, text)


def _raised(line: str) -> str:
    begins = 'Traceback (most recent call last):\n  File "/w/train.py", line 3, in <module>\n    run()\n'
    return f"INFO 10:00:00 training begins\n{begins}{line}\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("service.Error: The api_key client option must be set either by passing api_key or by the SERVICE_API_KEY "
         "environment variable", "no key of the service is there"),
        ("ValueError: JUDGE_API_KEY is not set", "no key of the service is there"),
        ("service.BadRequestError: Error code: 400 - {'detail': 'The version of the SDK you are using is no longer "
         "supported. Please update.'}", "older than its server accepts"),
        ("hydra.errors.MissingConfigException: In 'mine': Could not load 'ppo_trainer'.",
         "hydra does not find a configuration"),
        ("hydra.errors.MissingConfigException: Cannot find primary config 'base'. Check that it's in your path.",
         "hydra does not find a configuration"),
        ("RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.", "sees no such GPU"),
        ("RuntimeError: nvidia-smi error: nvidia-smi: /lib64/libc.so.6: version `GLIBC_ABI_DT_RELR' not found",
         "was built for another torch, CUDA or libc"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/home/u/.cache/huggingface/metrics/m/x-1-0.arrow'",
         "a file of a cache is gone"),
        ("srun: error: Unable to create step for job 25: Invalid generic resource (gres) specification",
         "Slurm does not give"),
        ("Non-root FSDP instance's `_is_root` should not have been set yet", "FSDP refuses the forward"),
        ("   ERROR: Coordinator did not become healthy within 60s\n>> Shutting down services...\n>> All stopped.\n"
         "bye\nbye", "did not come up in time"),
        ("TimeoutError: server launch failed", "did not come up in time"),
        ("TypeError: chunk(): argument 'input' (position 1) must be Tensor, not list", "a list where a tensor is "
        "expected"),
        ("ValueError: 'aimv2' is already used by a Transformers config, pick another name.", "versions do not fit"),
        ("ValueError: routed_experts is required in rollout_data when use_routing_replay is set.",
         "a setting asks for a field that did not arrive"),
        ("AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None", "exclude each other"),
        ("AssertionError: First dimension of the tensor should be divisible by tensor parallel size", "do not divide"),
        ("service.ClientResponseError: 500, message=\"'State' object has no attribute 'server'\"", "a server of the "
        "run"),
        ("RuntimeError: normal expects all elements of std >= 0.0", "a number is not finite"),
        ("ValueError: Reward should be finite scalar, got nan", "a number is not finite"),
        ("RuntimeError: Multiple libcudart libraries found: libcudart.so.12, libcudart.so.13", "two CUDA runtimes"),
    ],
)  # fmt: skip
def test_a_text_is_told_what_it_means(line: str, said: str, tmp_path: Path) -> None:
    is_bare = not line.split(":")[0].endswith(("Error", "Exception"))
    text = f"INFO 10:00:00 training begins\nINFO 10:00:01 on\n{line}\n" if is_bare else _raised(line)
    first = _first(tmp_path, text)
    assert said in first
    assert "L06" in first


def test_why_a_server_did_not_start_leads_over_that_it_did_not(tmp_path: Path) -> None:
    why = "RuntimeError: nvidia-smi error: nvidia-smi: libc.so.6: version `GLIBC_2.38' not found"
    assert "GLIBC" in _first(tmp_path, _raised("TimeoutError: server launch failed") + _raised(why))


def test_a_debugger_is_said_to_stand_where_it_says_it_does(tmp_path: Path) -> None:
    text = "INFO 10:00:00 training begins\n(Pdb) > /w/trainers.py(1043)get_batch()->None\n-> pdb.set_trace()\n(Pdb) \n"
    assert "trainers.py(1043)" in _first(tmp_path, text)


_SYNC = """\
INFO 10:00:00 training begins
Traceback (most recent call last):
  File "/w/train.py", line 3, in <module>
    run()
  File "/w/nemo_rl/vllm_backend.py", line 306, in update_weights_via_ipc
    self._load(weights)
ValueError: shard_dim=0 is not a valid data dimension
"""


def test_an_unknown_text_of_a_weight_update_is_one_of_the_weight_update(tmp_path: Path) -> None:
    assert "the weight update of the engine failed" in _first(tmp_path, _SYNC)


def test_a_reward_function_that_is_handed_messages_is_told_so(tmp_path: Path) -> None:
    text = _raised('TypeError: can only concatenate list (not "str") to list').replace(
        "    run()\n", '    run()\n  File "/w/retool.py", line 9, in reward_func\n    s.prompt + s.response\n'
    )
    assert "lists where it expects texts" in _first(tmp_path, text)


def test_a_script_that_exits_with_1_is_no_crash_of_native_code(tmp_path: Path) -> None:
    said = _first(
        tmp_path, trl([{}] * 12) + "E0203 api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 17) of binary: x\n"
    )
    assert "the launcher saw a process fail" in said
    assert "native code crashed" not in said

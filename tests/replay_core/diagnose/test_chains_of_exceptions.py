"""Of the exceptions that a log tells, the one the run died of: chains, what was caught, wrappers, prints between."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.logs import diagnosed, trl

_HEAD = "Traceback (most recent call last):\n"
_DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"


def _frames(*places: tuple[str, str, str]) -> str:
    return "".join(f'  File "{file}", line 12, in {name}\n    {code}\n' for file, name, code in places)


_TOP = ("/home/u/job/train.py", "<module>", "main()")
_LOSS = ("/home/u/job/trainer.py", "compute_loss", "images = load(paths)")


def _raised(error: str, *places: tuple[str, str, str]) -> str:
    return _HEAD + _frames(*(places or (_TOP,))) + error + "\n"


def _first(tmp_path: Path, text: str) -> Finding:
    found = diagnosed(tmp_path, text).findings[0]
    assert found.id == "L06"
    return found


def test_where_handling_an_exception_fails_the_later_one_is_what_it_died_of(tmp_path: Path) -> None:
    tried = _HEAD + _frames(_LOSS) + "AttributeError: 'list' object has no attribute 'startswith'\n"
    text = (
        tried + _DURING + _raised("FileNotFoundError: [Errno 2] No such file or directory: '/data/17.png'", _TOP, _LOSS)
    )
    found = _first(tmp_path, text)
    assert "17.png" in found.claim
    assert any("startswith" in str(one.value) for one in found.evidence)


def test_what_closes_behind_an_exception_is_not_what_it_died_of(tmp_path: Path) -> None:
    full = (
        _HEAD
        + _frames(_LOSS)
        + "RuntimeError: PytorchStreamWriter failed writing file data/7: No space left on device\n"
    )
    text = full + _DURING + _raised("RuntimeError: unexpected pos 13 vs 14", _TOP, ("/t/s.py", "__exit__", "end()"))
    assert "disk is full" in _first(tmp_path, text).claim


def test_a_direct_cause_goes_before_what_wraps_it(tmp_path: Path) -> None:
    inner = _HEAD + _frames(("/v/site-packages/datasets/builder.py", "_prepare", "read()"))
    inner += "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.\n"
    text = inner + _CAUSED + _raised("datasets.exceptions.DatasetGenerationError: An error occurred")
    assert "parquet file is empty or broken" in _first(tmp_path, text).claim


def test_a_later_exception_that_says_more_than_its_cause_is_told(tmp_path: Path) -> None:
    inner = _HEAD + _frames(_LOSS) + "IndexError: list index out of range\n"
    text = inner + _CAUSED + _raised("ValueError: sequence_length=5284 is larger than self.max_length=4096")
    assert "5284" in _first(tmp_path, text).claim


def test_a_workers_own_exception_goes_before_the_wrapper_that_names_its_class(tmp_path: Path) -> None:
    worker = _HEAD + _frames(("/v/lib/python3.12/site-packages/torch/_utils.py", "reraise", "raise exception"))
    worker += "ValueError: Caught ValueError in DataLoader worker process 3.\nOriginal "
    worker += _raised("ValueError: the sample holds 3 images and 2 placeholders",
                      ("/v/site-packages/torchdata/worker.py", "_worker_loop", "data = fetch(index)"))  # fmt: skip
    assert "3 images and 2 placeholders" in _first(tmp_path, worker).claim


def test_the_class_that_rays_driver_names_is_what_the_task_died_of(tmp_path: Path) -> None:
    text = (
        "Error executing job with overrides: ['a=1']\n" + _HEAD + _frames(("/job/main.py", "main", "run(config)"))
        + "ray.exceptions.RayTaskError(KeyError): \x1b[36mray::Runner.run()\x1b[39m (pid=9, ip=10.0.0.2)\n"
        + "RuntimeError: no running event loop\n" + _DURING
        + "\x1b[36mray::Runner.run()\x1b[39m (pid=9, ip=10.0.0.2)\n"
        + _frames(("/job/rewards/manager.py", "__call__", 'data["reward_model"]')) + "KeyError: 'reward_model'\n"
    )  # fmt: skip
    assert "KeyError: 'reward_model'" in _first(tmp_path, text).claim


def test_what_was_caught_and_printed_is_no_end_beside_what_reached_the_top(tmp_path: Path) -> None:
    caught = _raised("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", _LOSS)
    text = caught * 3 + _raised("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)", _TOP, _LOSS)
    assert "mat1 and mat2" in _first(tmp_path, text).claim


def test_a_print_between_a_tracebacks_head_and_its_frames_is_no_exception(tmp_path: Path) -> None:
    text = (
        _HEAD + "inputs of the processor:  {'pixels': tensor([[ 0.06,  0.12],\n        [ 0.2,  0.3]])}\n"
        "torch.Size([15360, 1176])\n" + _frames(_TOP, _LOSS) + "RuntimeError: Could not infer dtype of Image\n"
    )  # fmt: skip
    found = _first(tmp_path, text)
    assert "Could not infer dtype of Image" in found.claim
    assert "no numbers" in found.claim


def test_of_thousands_of_exceptions_the_last_one_is_kept(tmp_path: Path) -> None:
    caught = _raised("TimeoutError: the judge did not answer", _LOSS)
    text = caught * 300 + _raised("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)", _TOP, _LOSS)
    assert "mat1 and mat2" in _first(tmp_path, text).claim


def test_a_job_that_fails_behind_its_training_is_told_so(tmp_path: Path) -> None:
    text = trl([{}] * 20) + "{'train_runtime': 173.5, 'train_loss': 0.01, 'epoch': 1.0}\n"
    text += "run.sh: error reading input file: Stale file handle\nsrun: error: n7: task 0: Exited with exit code 2\n"
    found = _first(tmp_path, text)
    assert found.claim.startswith("the training had finished")
    assert "Stale file handle" in found.claim


def test_a_script_that_gives_up_before_a_step_is_told_by_its_last_line(tmp_path: Path) -> None:
    text = "Cleaning up ...\nstep 1: checks\nERROR: environment server unavailable (HTTP 000): http://127.0.0.1:36001\n"
    found = _first(tmp_path, text)
    assert "no step was taken" in found.claim
    assert "server" in found.claim


@pytest.mark.parametrize(
    "closing",
    [
        "ERROR 12-29 00:45:39 utils.py:116] Worker VllmWorkerProcess pid 161 died, exit code: -15\n",
        _raised("wandb.sdk.lib.sock_client.SockClientClosedError", ("/v/wandb/router.py", "message_loop", "read()")),
        "ERROR: 3 samples were left out\n" + "INFO: saved\n" * 6,
    ],
)
def test_what_programs_print_as_they_close_is_no_end(closing: str, tmp_path: Path) -> None:
    assert not [one for one in diagnosed(tmp_path, trl([{}] * 20) + closing).findings if one.severity != "info"]

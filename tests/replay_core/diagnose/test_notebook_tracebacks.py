"""A notebook's traceback: its exception stands behind every frame and its code, under a head that names the class."""

from __future__ import annotations

from pathlib import Path

from tests.replay_core.diagnose.logs import diagnosed, only, told, trl

_RULE = "-" * 75 + "\n"


def traceback(name: str, text: str) -> str:
    """As IPython prints it, its colours and all."""
    return (
        f"{_RULE}\x1b[31m{name}\x1b[39m                            Traceback (most recent call last)\n"
        "\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[17]\x1b[39m\x1b[32m, line 1\x1b[39m\n"
        "\x1b[32m----> \x1b[39m\x1b[32m1\x1b[39m trainer.train()\n\n"
        "\x1b[36mFile \x1b[39m\x1b[32m~/venv/lib/python3.12/site-packages/kernels/launch.py:483\x1b[39m, in "
        "\x1b[36mlaunch\x1b[39m\x1b[34m(self, grid)\x1b[39m\n"
        "    481 # a loss that is NaN: NaN or Inf found in input tensor, CUDA out of memory\n"
        "    482 if loss is nan:\n"
        "--> 483     raise Refused('loss became nan', RuntimeError: CUDA out of memory)\n"
        "    484 return kernel\n\n"
        f"\x1b[31m{name}\x1b[39m: {text}\n"
    )


def test_the_exception_is_told_and_not_the_first_frame(tmp_path: Path) -> None:
    said = "out of resource: shared memory, Required: 98304, Hardware limit: 65536."
    found = diagnosed(tmp_path, traceback("OutOfResources", said))
    assert told(found) == [("L06", "error")]
    assert "a Triton kernel needs more shared memory than the GPU has: OutOfResources" in found.findings[0].claim
    frames = {one.name: one.value for one in found.findings[0].evidence}
    assert frames["last frame"] == ('File "~/venv/lib/python3.12/site-packages/kernels/launch.py", line 483, in launch')
    assert str(frames["code"]).startswith("raise Refused")


def test_words_in_its_code_are_no_events(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, trl([{}] * 3) + traceback("ValueError", "bad token"))
    assert told(found) == [("L06", "error")]
    assert "ValueError: bad token" in found.findings[0].claim


def test_a_run_that_was_stopped_by_hand_is_no_crash_and_what_went_wrong_leads(tmp_path: Path) -> None:
    steps = trl([{"kl": kl} for kl in (0.0, 0.1, 0.2, 2.0, 400.0, 40.0, 2.0, 60.0, 2200.0, 1.5, 1.7, 2.1)])
    found = diagnosed(tmp_path, steps + traceback("KeyboardInterrupt", ""))
    assert found.findings[0].id == "L10"
    stopped = only(found, "L06")
    assert stopped.severity == "warning"
    assert "stopped by hand" in stopped.claim
    assert stopped.claim.endswith("KeyboardInterrupt")


def test_one_whose_end_is_cut_off_still_names_its_class(tmp_path: Path) -> None:
    cut = traceback("ValueError", "bad token").rsplit("\n", 2)[0]
    found = diagnosed(tmp_path, trl([{}] * 3) + cut + "\n")
    assert "ValueError (its text is not in the log)" in found.findings[0].claim

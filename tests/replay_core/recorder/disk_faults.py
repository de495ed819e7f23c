"""A trainer on a disk that fails: run with `disk_faults.c` preloaded, it forks a trainer for every case it is given.

A case is one line of JSON on standard input: directory, options of the recorder, first, many, errno, wait_s. The answer
is one line too: what the trainer did (`steps`, `raised`, `lost`), what it was told is on the disk (`kept`), and how
many calls of the operating system it made (`calls`).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

#: Steps, and elements of each record: two writes of the file at least.
STEPS, SIZE = 3, 40_000
#: No trainer may take longer, whatever the disk does.
LIMIT_S = 20.0


class Weights:
    """As much of a model as a checkpoint needs."""

    config = None

    def save_pretrained(self, directory: Path, safe_serialization: bool) -> None:
        Path(directory).mkdir(parents=True)
        (Path(directory) / "model.safetensors").write_text("weights")

    def parameters(self) -> Any:
        return iter(())


def train(directory: Path, options: dict[str, Any], told: dict[str, Any]) -> None:
    import torch

    from replay_core.errors import RldbgError
    from replay_core.recorder import Recorder

    warnings.simplefilter("ignore")
    recorder = None
    try:
        recorder = Recorder(directory, **options)
        recorder.note(seed=1)
        for step in range(STEPS):
            # Its bytes are written by the model's own library, which waits for a disk as long as it likes.
            if step == 1 and told["checkpoint"]:
                recorder.checkpoint(step, Weights())
            with recorder.step(step) as record:
                record("loss", values=torch.full((SIZE,), float(step)), note=f"step {step}")
            told["steps"] += 1
        recorder.close()
    except RldbgError as error:
        told["raised"] = f"{type(error).__name__}: {error.message}"
    except BaseException as error:
        told["raised"] = f"unclear {type(error).__name__}: {error}"
    if recorder is not None:
        told["lost"] = [lost.key for lost in recorder.lost]
    # What was not lost is what the trainer has to find.
    told["kept"] = [] if told["raised"] else [f"step {s}" for s in range(STEPS) if not _is_lost(s, told["lost"])]


def _is_lost(step: int, lost: list[str]) -> bool:
    return any(key.startswith(f"step {step}, rank") for key in lost)


def perform(case: dict[str, Any], preloaded: Any) -> dict[str, Any]:
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        told: dict[str, Any] = {"steps": 0, "raised": None, "lost": [], "kept": []}
        told["checkpoint"] = case["wait_s"] < LIMIT_S
        preloaded.faults_arm(
            case["directory"].encode(), case["first"], case["many"], case["errno"], int(case["wait_s"] * 1e6)
        )
        try:
            train(Path(case["directory"]), case["options"], told)
            told["calls"] = preloaded.faults_calls()
        finally:
            os.write(tell, json.dumps(told).encode())
            os._exit(0)
    os.close(tell)
    began = time.monotonic()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() - began > LIMIT_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.002)
    with os.fdopen(hear, "rb") as pipe:
        answer = pipe.read()
    return json.loads(answer) if answer else {"hung": True}


def main() -> None:
    import torch

    import replay_core.recorder  # noqa: F401

    torch.set_num_threads(1)
    # What a record needs is loaded once, before any disk fails.
    train(Path(sys.argv[1]), {}, {"steps": 0, "raised": None, "lost": [], "kept": [], "checkpoint": True})
    preloaded = ctypes.CDLL(None)
    preloaded.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_uint]
    preloaded.faults_calls.restype = ctypes.c_long
    for line in sys.stdin:
        sys.stdout.write(json.dumps(perform(json.loads(line), preloaded)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Texts of what stands around a trainer say why, and a scheduler's its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.diagnose.failure_texts import failure_of
from tests.replay_core.diagnose.logs import diagnosed, trl


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RuntimeError: CUDA Setup failed despite GPU being available.", "bitsandbytes"),
        ("AssertionError: Ulysses sequence parallel size 8 must divide num_attention_heads 28", "sequence parallel"),
        ("RuntimeError: Failed to register worker 01 to Raylet: IOError: No such file or directory", "raylet"),
        ("ConnectionError: Ray is trying to start at 10.0.0.1:6379, but is already running", "already runs"),
        ("RuntimeError: cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.", "cuDNN"),
        ("RuntimeError: unable to mmap 1024 bytes from file </torch_12>: Cannot allocate memory (12)", "shared memory"),
        ("ValueError: Loading this model requires you to set the option `trust_remote_code=True`", "code of its own"),
        ("botocore.exceptions.ClientError: An error occurred (403) when calling HeadObject: Forbidden", "object store"),
        ("Exception: Could not deserialize ATN with version 3 (expected 4).", "antlr4"),
        ("RuntimeError: torch.cat(): expected a non-empty list of Tensors", "empty"),
        ("ValueError: math domain error", "logarithm"),
    ],
)
def test_a_known_text_says_why(text: str, words: str) -> None:
    known = failure_of(text)
    assert known is not None
    assert words in known.cause


def test_a_scheduler_that_ends_a_job_gives_its_reason(tmp_path: Path) -> None:
    text = (
        trl([{}] * 4) + "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
    )
    found = diagnosed(tmp_path, text).findings[0]
    assert "time limit, its time is over" in found.cause

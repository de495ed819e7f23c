"""Replays on a device where there is one: its kernels agree with each row alone, and a mistake is still seen."""

from __future__ import annotations

import pytest
import torch

from replay_core.executors.child import ChildRunner
from replay_core.export.outcome import exit_code
from replay_core.jobs import Sample
from replay_core.replay import attention
from replay_core.replay.flags import Flags
from tests.replay_core.replay.test_matrix import FAULTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: Of torch's own kernels, those that compute in float32 as well.
_WIDE = ("eager", "sdpa", "sdpa-math", "sdpa-efficient")
_HALF = ("sdpa-flash", "sdpa-cudnn")


@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*((kernel, dtype) for kernel in _WIDE for dtype in ("float32", "bfloat16")), *((k, "bfloat16") for k in _HALF)],
)
def test_a_kernel_of_the_device_agrees_with_each_row_alone(ask, kernel, dtype, packing):
    doc = ask(f"device=cuda attention={kernel} dtype={dtype} packing={packing}", plan={"share_gpu": True})
    cell = doc["cells"][-1]
    if cell["outcome"] == "unavailable":
        assert kernel == "sdpa-flash", cell["error"]  # torch's flash kernel takes no mask
        return
    assert cell["effective"]["device"].startswith("cuda")
    assert cell["agreement"]["agrees"] is True, cell["agreement"]
    assert exit_code(doc) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_mistake_is_caught_on_the_device(ask, fault, dtype):
    doc = ask(f"device=cuda {fault} dtype={dtype}", plan={"capture": "none", "share_gpu": True})
    cell = doc["cells"][-1]
    assert cell["agreement"]["agrees"] is False
    assert (cell["cause"]["kind"], cell["cause"]["causes"]) == FAULTS[fault]
    assert exit_code(doc) == 1


def test_what_a_cell_took_of_the_device_is_told(ask):
    cell = ask("device=cuda", plan={"share_gpu": True})["cells"][-1]
    assert cell["memory"]["peak_mib"] > 0, cell["memory"]


def test_flash_is_a_kernel_that_runs_here():
    flags, notes = attention.resolve(Flags.parse("device=cuda dtype=bfloat16 attention=flash"))
    attention.need(flags)
    assert notes


def test_the_memory_of_the_device_is_told_while_a_cell_runs(ask):
    told = []
    with ChildRunner(time_limit_s=120) as runner:
        doc = ask("device=cuda", plan={"capture": "none", "share_gpu": True}, runner=runner, on_event=told.append)
    assert [cell["outcome"] for cell in doc["cells"]] == ["ran", "ran"]
    samples = [event for event in told if isinstance(event, Sample)]
    assert max(sample.gpu_mib or 0.0 for sample in samples) > 0

"""Cells in float64, to which gradients of float32 are held: masks, experts and heads of every kind compute in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.errors import RequestError
from replay_core.replay.flags import Flags
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.run import run_cell


@pytest.mark.parametrize(
    ("model", "attention"),
    [("llama-tiny", "eager"), ("llama-tiny", "sdpa"), ("gemma2-tiny", "eager"), ("qwen3-moe-tiny", "eager"),
     ("mixtral-tiny", "sdpa")],
)  # fmt: skip
def test_a_padded_batch_in_float64_is_what_float32_rounds(
    recorded: Any, tmp_path: Any, model: str, attention: str
) -> None:
    found = {}
    for dtype in ("float32", "float64"):
        flags = replace(Flags.parse(f"threads=1 attention={attention}"), dtype=dtype)
        where: dict[str, Any] = {"dump": str(recorded), "step": 0, "rank": 0, "micro": 0, "out": str(tmp_path / dtype)}
        ran = run_cell(ReplayPlan(model=f"random:{model}", flags=flags, capture="none", **where))
        assert ran["effective"]["dtype"] == dtype
        record = open_run(tmp_path / dtype).select(stage="forward_data")[0]
        logprobs = record.get("log_probs")
        assert logprobs is not None
        found[dtype] = np.asarray(pages.array(logprobs))
    assert np.isfinite(found["float64"]).all()
    np.testing.assert_allclose(found["float32"], found["float64"], atol=2e-5)


def test_nobody_asks_for_a_cell_in_float64() -> None:
    # transformers takes norms and rotations to float32: cells of one model are further apart than float64 rounds.
    with pytest.raises(RequestError, match="cannot be"):
        Flags.parse("dtype=float64")

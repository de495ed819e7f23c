"""A recorded micro-batch with both paddings, and a model genuinely saved to disk, for the replay tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.replay.batch import MicroBatch
from replay_core.replay.flags import Flags
from replay_core.replay.plan import ReplayPlan
from tests.builders import Here, padded_batch

#: (left padding, tokens, right padding) of each row.
ROWS = ((3, 14, 7), (0, 24, 0), (6, 9, 9))
VOCABULARY = 128


def small_batch() -> MicroBatch:
    """Three rows of 24 slots; the last 10 slots are the action suffix."""
    ids_BS = np.random.default_rng(0).integers(4, VOCABULARY - 1, (3, 24))
    mask_BS = np.array([[0] * left + [1] * tokens + [0] * right for left, tokens, right in ROWS])
    return padded_batch(ids_BS, mask_BS, mask_BS[:, -10:].astype(bool))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native dump of `small_batch`, whose manifest points at a checkpoint of a random Llama."""
    import gc

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM  # noqa: F401

    from replay_core.recorder import Recorder

    path = tmp_path_factory.mktemp("recorded") / "dump"
    # A cell that lets its model go collects everything: .3 s, if the collector looks at these libraries too.
    gc.collect()
    gc.freeze()
    recorder = Recorder(path)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    recorder.checkpoint(0, LlamaForCausalLM(config))
    batch = small_batch()
    with recorder.step(0) as record:
        record(
            "forward_data",
            micro=0,
            input_ids=torch.from_numpy(batch.ids_BS),
            attention_mask=torch.from_numpy(batch.valid_BS.astype(np.int64)),
            response_mask=torch.from_numpy(batch.response_BS),
            temperature=0.7,
        )
    return path


Replay = Callable[..., Any]


@pytest.fixture
def replay(recorded: Path, tmp_path: Path) -> Replay:
    """`replay("packing=on", model=…)` runs one cell on the recorded micro-batch."""
    from replay_core.replay.run import run_cell

    def run(flags: str = "", on_event: Any = lambda _event: None, **plan: Any) -> Any:
        parts = {"dump": str(recorded), "step": 0, "rank": 0, "micro": 0, "model": "checkpoint", **plan}
        out = str(tmp_path / f"cell{len(list(tmp_path.iterdir()))}")
        return run_cell(ReplayPlan(out=out, flags=Flags.parse(f"threads=1 {flags}"), **parts), on_event)

    return run


@pytest.fixture
def ask(recorded: Path, tmp_path: Path) -> Replay:
    """`ask("packing=on", matrix=…, plan={…})` answers a whole request on the recorded micro-batch."""
    from replay_core import workbench

    def run(flags: str = "", plan: Any | None = None, runner: Any = None, **request: Any) -> Any:
        base = {"dump": str(recorded), "step": 0, "rank": 0, "micro": 0, "model": "checkpoint"}
        chosen = Flags.parse(f"threads=1 {flags}").to_mapping()
        out = tmp_path / f"asked{len(list(tmp_path.iterdir()))}"
        return workbench.replay({**base, "flags": chosen, **(plan or {})}, out, runner or Here(), **request)

    return run

"""Ranks of a Megatron checkpoint that do not belong together; the ones that do are in `test_arrival.py`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from replay_core.errors import DumpError
from replay_core.weight_sync.megatron import joined
from replay_core.weight_sync.state import states_of
from tests.builders import save_file


@pytest.mark.parametrize(("folders", "args", "rows", "says"), [
    (("mp_rank_00", "mp_rank_999999"), {"num_attention_heads": 2}, 12, "1000000 tensor parallel ranks"),
    (("mp_rank_00",), {"num_attention_heads": 0, "num_query_groups": -1}, 12, "0 and -1"),
    (("mp_rank_00",), {"num_attention_heads": 10**30, "num_query_groups": 1}, 12, "cut apart"),
    (("mp_rank_00",), {"num_attention_heads": 3, "num_query_groups": 2}, 12, "3 and 2"),
    (("mp_rank_00",), {"num_attention_heads": 2, "num_query_groups": 1}, 13, "do not fit together"),
])  # fmt: skip
def test_ranks_of_a_megatron_checkpoint_that_cannot_be_are_an_error_at_once(
    tmp_path: Path, folders: tuple[str, ...], args: dict[str, int], rows: int, says: str
) -> None:
    for folder in folders:
        fused = {"decoder.layers.0.self_attention.linear_qkv.weight": torch.zeros(rows, 4)}
        save_file(tmp_path / "iter_0000001" / folder / "model_optim_rng.pt", {"model": fused, "args": args})
    began = time.thread_time()
    with pytest.raises(DumpError) as refused:
        joined(states_of(tmp_path))
    assert says in str(refused.value)
    assert time.thread_time() - began < 1

"""What nobody thought of where a cause is looked for never ends a comparison: it stands, with a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.judging import attention_otherwise, steps_of_weights
from replay_core.compare.parallel import parallel
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.compare.ranks.recorded import compared, random

IDS = torch.arange(16).reshape(2, 8)
NAMES = ("layers.0.mlp.c_proj", "layers.0.self_attn.o_proj", "embed_tokens", "layers.0.norm")
#: What is in, what is out, and the weight.
SHAPES: list[tuple[Tensor, Tensor, Tensor]] = [
    (random(2, 8, 64), random(2, 8, 16, seed=1), random(64, 16, seed=2)),
    (random(2, 8, 16), random(2, 8, 64, seed=1), random(16, 64, seed=2)),
    (random(2, 8, 16), random(2, 8, 16, seed=1), random(50, 16, seed=2)),
    (random(2, 8, 1), random(2, 8, 1, seed=1), random(1, 1, seed=2)),
    (random(2, 8, 16), random(2, 8, 16, seed=1), random(16, seed=2)),
    (random(2, 8, 16), torch.zeros(2, 8, 16), torch.zeros(16, 16)),
    (random(16), random(16, seed=1), random(16, seed=2)),
    (torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)),
]


def written(directory: Path, ranks: int, into: Tensor, out: Tensor, weight: Tensor, off: float) -> Path:
    """Two steps, in each of which everything moves."""
    around = "layers.0.self_attn"
    for rank in range(ranks):
        with Recorder(directory) as recorder:
            for step in (0, 1):
                moved = weight + 0.1 * step * (1 + off)
                with recorder.step(step, rank=rank) as record:
                    record("forward_data", {"input_ids": IDS}, micro=0)
                    modules = {f"{around}.{one}_proj.output": into for one in "qkv"}
                    modules |= {f"{name}.output": out + off * rank * out.abs().mean() + off for name in NAMES}
                    record("modules", modules, micro=0)
                    record("gradient", {f"grad.{name}.weight": weight * (1 + off) for name in NAMES}, micro=None)
                    record("param", {f"param.{name}.weight": moved for name in NAMES}, micro=None)
    return directory


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("off", [0.3, -1.0])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_odd_shapes(shapes: tuple[Tensor, Tensor, Tensor], off: float, ranks: tuple[int, int], tmp_path: Path) -> None:
    a, b = (written(tmp_path / one, count, *shapes, by) for one, count, by in zip("ab", ranks, (0.0, off), strict=True))
    result = compare_runs(open_run(a), open_run(b))
    assert result.tally.diverging
    found = parallel(result.tally.of_ranks, result.together)
    assert not [note for note in (*result.notes, *(found.notes if found else [])) if "could not be looked for" in note]


def one_channel_off(directory: Path) -> Comparison:
    """Attention's output, of which one channel that few would ask is off."""
    q, k, v, weight = (random(1, 12, 256, seed=1), *2 * [random(1, 12, 256, seed=2)], random(256, 256, seed=4))
    right = v.cumsum(1) / torch.arange(1, 13)[:, None] @ weight.T
    wrong = right.clone()
    wrong[..., 1] += 1
    around = "layers.0.self_attn"

    def step(out: Tensor, part: slice) -> dict[str, dict[str, Any]]:
        given = {f"{around}.{name}_proj.output": one[..., part] * (name == "v") for name, one in zip("qkv", (q, k, v),
                 strict=True)}  # fmt: skip
        return {
            "forward_data": {"input_ids": IDS[:1].repeat(1, 2)[:, :12]},
            "modules": {**given, f"{around}.o_proj.output": out},
            "param": {f"param.{around}.o_proj.weight": weight},
        }

    return compared(
        directory, step(right, slice(None)), step(wrong, slice(0, 128)), step(wrong, slice(128, 256))
    )  # fmt: skip


def test_one_channel_that_is_off_says_nothing_of_attention(tmp_path: Path) -> None:
    result = one_channel_off(tmp_path)
    assert not [note for note in result.notes if "could not be looked for" in note]
    assert result.first is not None
    assert result.first.name == "layers.0.self_attn.o_proj.output"
    assert "attention" not in result.first.reason


def test_an_error_where_a_cause_is_looked_for_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of nothing")

    monkeypatch.setattr(attention_otherwise, "otherwise", broken)
    monkeypatch.setattr(steps_of_weights, "of_the_step", broken)
    result = one_channel_off(tmp_path)
    assert result.first is not None
    assert any("could not be looked for: ZeroDivisionError: of nothing" in note for note in result.notes)

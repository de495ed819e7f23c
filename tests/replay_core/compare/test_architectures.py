"""Models that really run, of architectures whose tensors lie otherwise: heads before positions, latents, experts.

The models and what is changed of them are those of the labelled experiment (`benchmarks/referee.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import harmless, planted, zoo
from benchmarks.zoo import Running
from replay_core.compare import Comparison
from replay_core.compare.judging.verdict import Verdict
from tests.builders import compare_paths, row_of


@pytest.fixture(scope="module")
def animals(tmp_path_factory: pytest.TempPathFactory) -> zoo.Zoo:
    return zoo.Zoo(tmp_path_factory.mktemp("weights"))


def compared(
    animals: zoo.Zoo, folder: Path, architecture: str, dtype: str, *changes: Callable[[Running], object]
) -> Comparison:
    """A clean run against one that was changed."""
    for name, made in (("a", ()), ("b", changes)):
        running = animals.running(architecture, "random", dtype, 1)
        for change in made:
            assert change(running)
        zoo.record(folder / name, running, dtype)
    return compare_paths(folder / "a", folder / "b")


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("gemma3", ("layers.0.self_attn.q_norm.inputs.0", "layers.1.self_attn.output.1")),
        ("deepseek_v3", ("layers.1.self_attn.kv_b_proj.inputs.0",)),
    ],
)
@pytest.mark.parametrize("layout", [harmless.packed_eager, harmless.left], ids=["packed", "padded on the left"])
def test_heads_before_positions_are_compared_token_by_token(
    animals: zoo.Zoo, architecture: str, names: tuple[str, ...], layout: Callable[[Running], bool], tmp_path: Path
) -> None:
    comparison = compared(animals, tmp_path, architecture, "float32", layout)
    for row in (row_of(comparison, name) for name in names):
        assert row.verdict in (Verdict.SAME, Verdict.CLOSE), row.reason
        assert row.figures is not None
        assert row.figures.compared % sum(zoo.LENGTHS) == 0
    assert comparison.agrees is True, [(one.name, one.reason) for one in comparison.tensors if one.verdict.diverges]


@pytest.mark.long
def test_a_fault_in_heads_is_found_in_a_pack(animals: zoo.Zoo, tmp_path: Path) -> None:
    comparison = compared(animals, tmp_path, "gemma3", "float32", harmless.packed_eager, planted.no_q_norm)
    assert comparison.first is not None
    assert comparison.first.name.endswith("self_attn.q_norm.output")
    assert comparison.origin is not None
    assert comparison.origin.module == comparison.first.name.removesuffix(".output")


@pytest.mark.long
def test_attention_weights_past_the_window_are_found_with_their_key(animals: zoo.Zoo, tmp_path: Path) -> None:
    comparison = compared(animals, tmp_path, "mistral", "float32", harmless.left, planted.longer_window)
    row = next(row for row in comparison.tensors if row.name.endswith("self_attn.output.1") and row.verdict.diverges)
    assert row.token is not None
    assert row.raw_a is not None
    assert row.raw_b is not None
    sample, position = row.token
    # Left of b, the same query and key lie further to the right by what the sample is shorter.
    shift = max(zoo.LENGTHS) - zoo.LENGTHS[sample]
    assert row.raw_a[2] == position
    assert [b - a for a, b in zip(row.raw_a[2:], row.raw_b[2:], strict=True)] == [shift, shift]


@pytest.mark.long
@pytest.mark.parametrize("change", [harmless.wide, harmless.batched_experts], ids=["padding", "all at once"])
def test_experts_rows_are_not_held_against_each_other_where_others_are_among_them(
    animals: zoo.Zoo, change: Callable[[Running], bool], tmp_path: Path
) -> None:
    comparison = compared(animals, tmp_path, "mixtral", "float32", change)
    assert comparison.agrees is True
    assert any(row.name == "layers.1.mlp.experts.output" for row in comparison.tensors)
    assert not any(".experts.act_fn" in row.name and row.a and row.b for row in comparison.tensors)


def test_masks_that_choose_and_masks_that_add_lay_the_same_tokens_out(animals: zoo.Zoo, tmp_path: Path) -> None:
    comparison = compared(animals, tmp_path, "llama", "float32", harmless.sdpa)
    assert comparison.agrees is True
    assert row_of(comparison, "model.inputs.attention_mask").verdict is Verdict.SAME
    assert not any(row.name == "layers.0.inputs.attention_mask" for row in comparison.tensors)


def test_tokens_that_noise_sent_to_other_experts_are_left_out_and_counted(animals: zoo.Zoo, tmp_path: Path) -> None:
    comparison = compared(animals, tmp_path, "mixtral", "bfloat16", harmless.shuffled)
    choices = row_of(comparison, "layers.2.mlp.gate.output.2")
    assert choices.verdict is Verdict.SAME
    assert choices.note is not None
    assert "tokens are not compared" in choices.note
    assert any(
        re.match(r"layers\.2\.mlp\.gate: \d of 124 tokens took other experts", note) for note in comparison.notes
    )
    assert comparison.agrees is True, [(one.name, one.reason) for one in comparison.tensors if one.verdict.diverges]


@pytest.mark.long
@pytest.mark.parametrize("fault", [planted.no_correction, planted.swapped_experts], ids=["correction", "swapped"])
def test_a_fault_of_routing_is_no_reroute(
    animals: zoo.Zoo, fault: Callable[[Running], planted.Where | None], tmp_path: Path
) -> None:
    comparison = compared(animals, tmp_path, "deepseek_v3", "bfloat16", harmless.left, fault)
    assert comparison.first is not None
    where = planted.Where(("layers.1.mlp.gate", "layers.1.mlp.experts"))
    assert comparison.first.name.startswith(where.first()), comparison.first.name

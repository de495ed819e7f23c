from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from replay_core.compare.judging.verdict import Verdict
from replay_core.errors import NothingComparableError
from replay_core.recorder import Recorder
from tests.builders import compare_fields, compare_paths, row_of, save_file, write_pair

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (
    *FP8, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def verdict_of(directory: Path, a: object, b: object, name: str = "x", **options: object) -> Verdict:
    return row_of(compare_fields(directory, {name: a}, {name: b}, **options), name).verdict  # type: ignore[arg-type]


def test_complex_tensors_are_compared_and_the_element_named(tmp_path: Path):
    a = torch.complex(torch.randn(4, 8), torch.randn(4, 8))
    b = a.clone()
    b[3, 7] += 1j
    row = row_of(compare_fields(tmp_path, {"z": a}, {"z": b}), "z")
    assert row.verdict is Verdict.DIFF
    assert (row.raw_a, row.value_b) == ((3, 7), b[3, 7].item())


@pytest.mark.filterwarnings("error")
def test_columns_of_complex_tensors_are_not_judged_by_their_real_parts(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, 256, generator=generator, dtype=torch.complex64)
    b = a * (1 + 1e-7)
    b[:, 7] += 0.02j * a[:, 7].abs()
    assert verdict_of(tmp_path, a, b) is Verdict.DIFF


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_numbers_are_equal_in_any_two_dtypes_and_one_changed_is_found(dtype: torch.dtype, tmp_path: Path):
    """Lying in the file row by row and column by column; numbers that every dtype holds."""
    others = [other for other in DTYPES if (other is torch.bool) == (dtype is torch.bool)]
    values = torch.tensor([[1.0, 2, 4, 8] * 8] * 16)
    changed = values.clone()
    changed[3, 5] = 0 if dtype is torch.bool else 16

    def turned(values: torch.Tensor) -> torch.Tensor:
        return values.t().contiguous().t()

    a = {str(other): turned(values.to(dtype)) for other in others}
    same = compare_fields(tmp_path / "same", a, {str(other): turned(values.to(other)) for other in others})
    assert {row.verdict for row in same.tensors} <= {Verdict.SAME, Verdict.CLOSE}
    apart = compare_fields(tmp_path / "apart", a, {str(other): changed.to(other) for other in others})
    assert [row.raw_a for row in apart.tensors if row.verdict is Verdict.DIFF] == [(3, 5)] * len(others)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_tensors_are_compared(dtype: torch.dtype, tmp_path: Path):
    a = torch.randn(16, 16).to(dtype)
    assert verdict_of(tmp_path / "same", a, a.clone()) is Verdict.SAME
    assert verdict_of(tmp_path / "negated", a, (-a.float()).to(dtype)) is Verdict.DIFF


def test_texts_are_compared_as_texts(tmp_path: Path):
    row = row_of(compare_fields(tmp_path, {"prompt": "2+2=", "x": 1}, {"prompt": "2+3=", "x": 1}), "prompt")
    assert row.verdict is Verdict.DIFF
    assert "'2+2=' against '2+3='" in row.reason


@pytest.mark.parametrize("shape", [(0, 3), (0,), (2, 0, 5)])
def test_comparing_only_empty_tensors_is_comparing_nothing(shape: tuple[int, ...], tmp_path: Path):
    with pytest.raises(NothingComparableError):
        verdict_of(tmp_path, torch.zeros(shape), torch.zeros(shape))


def test_an_empty_tensor_beside_others_is_the_same(tmp_path: Path):
    fields = {"empty": torch.zeros(0, 3), "x": torch.ones(2)}
    assert row_of(compare_fields(tmp_path, fields, fields), "empty").verdict is Verdict.SAME


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (1.2345678, 1.2345690, Verdict.CLOSE),
        (1.2345678, 1.26, Verdict.DIFF),
        (0.0, 1e-9, Verdict.CLOSE),
        (math.nan, math.nan, Verdict.SAME),
        (math.nan, 1.0, Verdict.NAN),
        (math.inf, -math.inf, Verdict.NAN),
    ],
)
@pytest.mark.parametrize("name", ["loss", "grad_norm", "metrics.kl"])
def test_numbers_a_trainer_reduced_itself_are_judged_relatively(
    name: str, a: float, b: float, says: Verdict, tmp_path: Path
):
    assert verdict_of(tmp_path, a, b, name) is says


def test_python_numbers_claim_no_more_than_fp32(tmp_path: Path):
    """A list in a file is doubles, whatever computed them."""
    a = [0.1234567, -1.5, 0.25] * 20
    assert verdict_of(tmp_path / "noise", a, [value * (1 + 1e-7) for value in a], "advantages") is Verdict.CLOSE
    assert verdict_of(tmp_path / "wrong", a, [value * 1.01 for value in a], "advantages") is Verdict.DIFF


def test_a_list_against_a_tensor_of_the_same_numbers_is_no_mix_of_precisions(tmp_path: Path):
    values = torch.rand(16)
    row = row_of(compare_fields(tmp_path, {"returns": values.tolist()}, {"returns": values}), "returns")
    assert row.verdict is Verdict.SAME


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(4), -torch.zeros(4)),
        (torch.ones(4), torch.ones(4, dtype=torch.float64)),
        (torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.int64)),
        (torch.ones(4), torch.nextafter(torch.ones(4), torch.zeros(4))),
    ],
)
def test_exact_means_bits(a: torch.Tensor, b: torch.Tensor, tmp_path: Path):
    assert verdict_of(tmp_path / "lenient", a, b) in (Verdict.SAME, Verdict.CLOSE)
    pair = {"modules": {"x": a}}, {"modules": {"x": b}}
    compared = compare_paths(*write_pair(tmp_path / "exact", *pair), exact=True)
    assert row_of(compared, "x").verdict is Verdict.DIFF


def test_exact_counts_padding_too(tmp_path: Path):
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    a = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "attention_mask": mask}
    b = {**a, "input_ids": (1 - mask)}
    paths = write_pair(tmp_path, {"batch_inputs": a}, {"batch_inputs": b})
    assert row_of(compare_paths(*paths), "input_ids").verdict is Verdict.PADDING
    assert row_of(compare_paths(*paths, exact=True), "input_ids").verdict is Verdict.DIFF


def test_a_long_vector_is_measured_chunk_by_chunk(tmp_path: Path):
    a = torch.randn(400_001)
    b = a.clone()
    b[333_333] += 50
    row = row_of(compare_fields(tmp_path, {"x": a}, {"x": b}), "x")
    assert row.verdict is Verdict.DIFF
    assert row.raw_a == (333_333,)


def test_entropy_near_zero_is_no_bad_row(tmp_path: Path):
    """One number per token: a token of almost no entropy is not held against itself."""
    a = torch.full((4, 64), 5.0)
    a[1, 3] = 0.02
    b = a + 0.01 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    fields = {"input_ids": torch.zeros(4, 64, dtype=torch.long), "attention_mask": torch.ones(4, 64)}
    compared = compare_fields(
        tmp_path, {**fields, "entropy": a.bfloat16()}, {**fields, "entropy": b.bfloat16()}, stage="forward_data"
    )
    assert row_of(compared, "entropy").verdict is Verdict.CLOSE


def test_a_bad_row_is_seen_behind_a_row_of_residue(tmp_path: Path):
    """A row of nothing but residue has the worst ratio; the next worst still counts."""
    a = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    a[5] = 1e-9
    b = a.clone()
    b[5] = 5e-9
    b[7] *= -1
    row = row_of(compare_fields(tmp_path, {"x": a.bfloat16()}, {"x": b.bfloat16()}), "x")
    assert row.verdict is Verdict.DIFF


def test_positions_shifted_by_a_constant_are_close_and_named(tmp_path: Path):
    mask = torch.ones(2, 6, dtype=torch.long)
    positions = torch.arange(6).repeat(2, 1)
    fields = {"input_ids": mask, "attention_mask": mask}
    shifted = positions + torch.tensor([[0], [3]])
    compared = compare_fields(
        tmp_path, {**fields, "position_ids": positions}, {**fields, "position_ids": shifted}, stage="batch_inputs"
    )
    row = row_of(compared, "position_ids")
    assert (row.verdict, row.suspect) == (Verdict.CLOSE, True)
    assert "sample 1 by +3" in row.reason
    scrambled = positions.clone()
    scrambled[1, 4] = 0
    compared = compare_fields(
        tmp_path / "x", {**fields, "position_ids": positions}, {**fields, "position_ids": scrambled}
    )
    assert row_of(compared, "position_ids").verdict is Verdict.DIFF


def test_a_field_that_cannot_be_read_is_skipped_and_counted(tmp_path: Path):
    sparse = torch.eye(3).to_sparse()
    a = save_file(tmp_path / "a.pt", {"x": torch.ones(2), "sparse": sparse})
    b = save_file(tmp_path / "b.pt", {"x": torch.ones(2), "sparse": sparse})
    compared = compare_paths(a, b)
    counts = compared.counts
    assert counts["total"] == sum(int(str(n)) for word, n in counts.items() if word != "total")
    names = [row.name for row in [*compared.tensors, *compared.skipped]]
    assert any(name.startswith("sparse") for name in names)


def test_a_record_that_cannot_be_read_is_counted_and_its_tensors_are_missing(tmp_path: Path):
    fields = {"loss": {"loss": 1.0}, "forward_data": {"log_probs": torch.ones(2, 3)}}
    a, b = write_pair(tmp_path, fields, fields)
    broken = next((b / "forward_data").glob("*.pt"))
    broken.write_bytes(broken.read_bytes()[:300])
    compared = compare_paths(a, b)
    assert compared.records_unreadable == 1
    assert row_of(compared, "policy_logprobs").verdict is Verdict.MISSING


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-30, 1.0, 1e60, 1e150, 1e160, 1e300])
@pytest.mark.parametrize("factor", [1.01, -1.0])
def test_a_wrong_factor_is_seen_at_every_magnitude(scale: float, factor: float, tmp_path: Path):
    a = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).clamp(-1.5, 1.5) * scale
    assert verdict_of(tmp_path, a, a * factor) is Verdict.DIFF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_largest_numbers_of_opposite_sign_differ(dtype: torch.dtype, tmp_path: Path):
    a = torch.full((4, 32), torch.finfo(dtype).max, dtype=dtype)
    assert verdict_of(tmp_path, a, -a) is Verdict.DIFF


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e20])
def test_noise_is_noise_at_every_magnitude(scale: float, tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(8, 32, generator=generator) * scale
    assert verdict_of(tmp_path, a, a * (1 + 1e-7 * torch.randn(8, 32, generator=generator))) is Verdict.CLOSE


def test_rows_of_an_activation_without_a_layout_are_called_neither_samples_nor_positions(tmp_path: Path):
    a = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[4, 9] += 5
    row = row_of(
        compare_fields(tmp_path, {"layers.0.mlp.output": a}, {"layers.0.mlp.output": b}), "layers.0.mlp.output"
    )
    assert (row.raw_a, row.token) == ((4, 9), None)


def test_a_response_mask_that_counts_padding_is_no_difference_in_padding_alone(tmp_path: Path):
    ids_BS = torch.tensor([[0, 5, 6, 7, 8, 9], [0, 1, 2, 3, 0, 0]])
    fields = {"input_ids": ids_BS, "attention_mask": (ids_BS != 0).long(), "logprobs": -torch.rand(2, 3)}
    ends = torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = compare_fields(tmp_path, {**fields, "response_mask": ends}, {**fields, "response_mask": torch.ones(2, 3)})
    row = row_of(found, "response_mask")
    assert row.verdict is Verdict.DIFF
    assert "all in padding: one side's mask counts padding" in row.reason


@pytest.mark.parametrize("pair", [(torch.float16, torch.bfloat16), FP8, (torch.bfloat16, torch.float8_e4m3fn)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_two_casts_of_the_same_weights_are_casts(
    pair: tuple[torch.dtype, torch.dtype], turned: bool, tmp_path: Path
) -> None:
    """Rounded twice is another number than rounded once: what is between both is asked for."""
    weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    a, b = (weights.to(dtype) for dtype in (reversed(pair) if turned else pair))
    assert verdict_of(tmp_path / "cast", a, b, "model.layers.0.mlp.up_proj.weight") is Verdict.CLOSE
    moved = b.float()
    moved[7] *= -3
    moved = moved.to(b.dtype)
    assert verdict_of(tmp_path / "moved", a, moved, "model.layers.0.mlp.up_proj.weight") is Verdict.DIFF


def test_what_has_nothing_to_do_with_another_is_no_factor_of_it(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(32, 32, generator=draw), torch.randn(32, 32, generator=draw)
    others = [
        (b, "relative L2"), (0.3 * b, "relative L2"), (a - 1, "one constant"), (0.5 * a, "one factor"),
        (0 * a, "times 0"), (-a, "times -1"),
    ]  # fmt: skip
    for number, (other, word) in enumerate(others):
        row = row_of(compare_fields(tmp_path / str(number), {"x": a}, {"x": other}), "x")
        assert row.verdict is Verdict.DIFF
        assert word in row.reason.split(";")[0], row.reason


def test_doubles_too_large_to_be_squared_are_told_in_numbers(tmp_path: Path) -> None:
    a = torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e200
    row = row_of(compare_fields(tmp_path, {"x": a}, {"x": 1.5 * a}), "x")
    assert row.verdict is Verdict.DIFF
    assert row.reason.startswith("relative difference 0.5 (")


def test_masks_of_shuffled_samples_differ_in_no_padding(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(8) < torch.tensor([[8], [5], [7], [3]])).long()
    fields = {
        "input_ids": torch.randint(3, 90, (4, 8), generator=draw) * mask, "attention_mask": mask,
        "old_log_probs": -torch.rand(4, 8, generator=draw) * mask,
    }  # fmt: skip
    turned = {name: value.flip(0) for name, value in fields.items()}
    row = row_of(compare_fields(tmp_path, fields, turned, stage="forward_data"), "attention_mask")
    assert (row.verdict, row.reason) == (Verdict.SAME, "equal row by row, in another order of the samples")
    left = {name: torch.stack([x.roll(8 - int(m.sum())) for x, m in zip(value, mask, strict=True)])
            for name, value in fields.items()}  # fmt: skip
    row = row_of(compare_fields(tmp_path / "left", fields, left, stage="forward_data"), "attention_mask")
    assert row.verdict is Verdict.PADDING


def test_tensors_in_common_that_are_empty_are_called_so(tmp_path: Path) -> None:
    with pytest.raises(NothingComparableError, match="the tensor in common is empty, or padding alone"):
        compare_fields(tmp_path, {"x": torch.zeros(0, 4)}, {"x": torch.zeros(0, 4)})


@pytest.mark.parametrize(("noise", "verdict"), [(0.012, Verdict.CLOSE), (1e-6, Verdict.DIFF)])
def test_a_loss_of_a_step_may_be_off_by_what_the_noise_of_all_its_micro_batches_leaves(
    tmp_path: Path, noise: float, verdict: Verdict
) -> None:
    draw = torch.Generator().manual_seed(5)
    for name, loss in (("a", -0.1019), ("b", -0.1031)):
        with Recorder(tmp_path / name).step(0, rank=0) as record:
            for micro in range(2):
                exact = -torch.rand(4, 16, generator=torch.Generator().manual_seed(micro)) - 0.5
                off = noise * torch.randn(4, 16, generator=draw) if name == "b" else 0.0
                ids = torch.arange(64 * micro, 64 * micro + 64).reshape(4, 16)
                record("forward_data", {"input_ids": ids, "log_probs": exact + off}, micro=micro)
            record("training_metrics", {"loss": loss})
    compared = compare_paths(tmp_path / "a", tmp_path / "b")
    assert row_of(compared, "loss").verdict is verdict

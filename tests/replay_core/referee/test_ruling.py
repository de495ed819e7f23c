"""Each side against the truth of its own inputs: harmless kernels are NOISE, a fault has its module and its side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core import workbench
from replay_core.documents.ruling import RulingDocument
from replay_core.dumps import open_run
from replay_core.errors import JobCancelledError
from replay_core.jobs import Progress
from replay_core.recorder import Recorder
from replay_core.referee import shadow
from replay_core.referee.recorded import ruled_first
from replay_core.referee.ruling import rule
from tests.fixtures import FIXTURES

LENGTHS = (17, 9, 20)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk, its weights large enough for attention to choose."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("weights") / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _run(weights: Path, out: Path, dtype: torch.dtype, attention: str, plant: Callable[[Any], None]) -> Path:
    """A padded forward of the model, recorded with the inputs of its modules."""
    model = LlamaForCausalLM.from_pretrained(weights, dtype=dtype, attn_implementation=attention).eval()
    plant(model)
    generator = torch.Generator().manual_seed(1)
    width = max(LENGTHS)
    ids, mask = torch.zeros(len(LENGTHS), width, dtype=torch.long), torch.zeros(len(LENGTHS), width, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, width - length :] = torch.randint(1, 128, (length,), generator=generator)
        mask[row, width - length :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with Recorder(out) as recorder, recorder.step(0) as step, torch.no_grad():
        with step.modules(model, inputs=True, micro=0):
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        step("forward_data", input_ids=ids, attention_mask=mask, log_probs=logprobs, micro=0)
    return out


def _nothing(_model: Any) -> None:
    pass


@pytest.fixture(scope="module")
def right(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(weights, tmp_path_factory.mktemp("right") / "dump", torch.float32, "sdpa", _nothing)


def _ruled(a: Path, b: Path, weights: Path) -> RulingDocument:
    return workbench.referee(a, b, weights_a=str(weights), weights_b=str(weights))


@pytest.mark.long
def test_sglang_dumps_of_another_kernel_and_dtype_are_noise_with_their_coverage():
    dumps, weights = FIXTURES / "sglang_dumper", str(FIXTURES / "trl/tiny_qwen2")
    doc = workbench.referee(
        dumps / "baseline_sdpa_fp32", dumps / "target_eager_bf16", weights_a=weights, weights_b=weights
    )
    assert (doc["ruling"], doc["side"], doc["module"]) == ("NOISE", None, None)
    assert "both sides" in doc["sentence"]
    b = doc["b"]
    assert b is not None
    assert b["coverage"] is not None
    assert b["coverage"]["ruled"] >= 26
    assert b["coverage"]["unrooted"] == ["layers.0.inputs.0"], (
        "no token ids are recorded: nobody knows where it is from"
    )
    # model.to(bfloat16) casts the buffer of frequencies: said, and no bug.
    assert {one["recipe"] for one in b["tensors"] if one["recipe"]} == {"rotary frequencies in bfloat16"}
    linears = [one["statistics"] for one in b["tensors"] if one["kind"] == "linear" and not one["handed"]]
    sizes = [float(one["value"]) for rows in linears for one in rows if one["name"] == "size"]
    assert len(sizes) == 7
    assert all(0.9 < size < 1.1 for size in sizes), "a right product of one matrix is one rounding away from the truth"


def test_a_ruling_that_is_cancelled_ends_between_two_of_its_forwards(right: Path, weights: Path):
    seen: list[str] = []

    def cancel(event: object) -> None:
        if isinstance(event, Progress):
            seen.append(event.what)
            if len(seen) == 3:
                raise JobCancelledError("cancelled")

    with pytest.raises(JobCancelledError):
        workbench.referee(right, weights_a=str(weights), on_event=cancel)
    assert len(seen) == 3


@pytest.mark.long
def test_two_sides_of_the_same_weights_hold_the_model_once_and_ruling_one_leaves_it_as_it_was(
    right: Path, weights: Path
):
    run = open_run(right)
    side = (run, *ruled_first(run.records), str(weights))
    ruled = rule(side, side)
    assert ruled.b is not None
    assert ruled.a.model is not None
    assert ruled.b.model is not None
    assert ruled.a.model.causal_lm is ruled.b.model.causal_lm
    figures = [[(one.claim.name, one.figures.size, one.ruling) for one in each.claims] for each in (ruled.a, ruled.b)]
    assert figures[0] == figures[1]
    assert ruled.a.notes == ruled.b.notes


def _scaled_row(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.weight.data[5] *= 1.03


def _other_scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 1.05


def _int8(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    scale = weight.data.float().abs().amax(1, keepdim=True) / 127
    weight.data = ((weight.data.float() / scale).round() * scale).to(weight.dtype)


@pytest.mark.long
def test_a_harmless_kernel_and_dtype_are_noise_on_both_sides(weights: Path, right: Path, tmp_path: Path):
    doc = _ruled(right, _run(weights, tmp_path / "b", torch.bfloat16, "eager", _nothing), weights)
    assert (doc["ruling"], doc["side"], doc["module"]) == ("NOISE", None, None), doc["sentence"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "module", "hypothesis"),
    [
        (_scaled_row, "layers.1.self_attn.o_proj", None),
        pytest.param(_other_scale, "layers.0.self_attn", "scaling 1.05 times its 0.25", marks=pytest.mark.slow),
        pytest.param(_int8, "layers.1.mlp.up_proj", "weights in int8, a scale per row", marks=pytest.mark.slow),
    ],
    ids=["row", "scale", "int8"],
)
def test_a_fault_below_the_noise_of_another_kernel_is_found_in_its_module(
    weights: Path, tmp_path: Path, plant: Callable[[Any], None], module: str, hypothesis: str | None
):
    wrong = _run(weights, tmp_path / "b", torch.bfloat16, "eager", plant)
    doc = workbench.referee(wrong, weights_a=str(weights))
    assert (doc["ruling"], doc["module"], doc["hypothesis"]) == ("BUG", module, hypothesis), doc["sentence"]


@pytest.mark.slow
def test_a_layer_that_kept_the_weights_of_the_step_before_is_told_by_the_checkpoint_that_explains_it(
    weights: Path, tmp_path: Path
):
    older = LlamaForCausalLM.from_pretrained(weights)
    ids = torch.arange(1, 25).reshape(2, 12)
    optimizer = torch.optim.AdamW(older.parameters(), lr=1e-4)
    newer = LlamaForCausalLM.from_pretrained(weights)
    older.save_pretrained(tmp_path / "step_000000")
    older(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    older.save_pretrained(tmp_path / "step_000001")
    stale = newer.model.layers[1].mlp.down_proj.weight.data.clone()

    def plant(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight.data = stale.to(torch.bfloat16)

    dump = _run(tmp_path / "step_000001", tmp_path / "dump", torch.bfloat16, "sdpa", plant)
    manifest = json.loads((dump / "manifest.json").read_text())
    manifest["models"] = {str(step): str(tmp_path / f"step_00000{step}") for step in (0, 1)}
    (dump / "manifest.json").write_text(json.dumps(manifest))
    doc = workbench.referee(dump, weights_a=str(tmp_path / "step_000001"))
    found = (doc["ruling"], doc["module"], doc["hypothesis"])
    assert found == ("BUG", "layers.1.mlp.down_proj", "weights of step 0"), doc["sentence"]


def test_without_weights_nothing_is_ruled_and_it_is_said(right: Path):
    doc = workbench.referee(right)
    assert doc["ruling"] is None
    assert "no weights" in doc["sentence"]


@pytest.mark.long
@pytest.mark.parametrize("plant", [_nothing, _scaled_row], ids=["right", "row"])
def test_where_little_can_be_kept_rows_are_sampled_and_the_rest_is_read_again(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Any], None]
):
    monkeypatch.setattr(shadow, "KEPT", 1 << 16)
    doc = workbench.referee(_run(weights, tmp_path / "b", torch.bfloat16, "eager", plant), weights_a=str(weights))
    expected = ("NOISE", None) if plant is _nothing else ("BUG", "layers.1.self_attn.o_proj")
    assert (doc["ruling"], doc["module"]) == expected, doc["sentence"]
    if plant is _scaled_row:
        assert doc["what"] is not None
        assert "channel 5" in doc["what"], "the rows that are kept show the channel"


@pytest.mark.long
def test_log_probabilities_of_more_tokens_than_there_is_room_for_are_drawn_and_that_is_said(
    weights: Path, right: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shadow, "LOGITS", 0)
    monkeypatch.setattr(shadow, "_LEAST_TOKENS", 16)
    doc = workbench.referee(right, weights_a=str(weights))
    assert doc["ruling"] == "NOISE", doc["sentence"]
    recorded = sum(LENGTHS) - len(LENGTHS)
    assert f"log-probabilities: 16 of {recorded} tokens drawn; losses are not ruled" in doc["a"]["notes"]
    assert doc["a"]["floor"] is not None
    assert doc["a"]["floor"]["tokens"] == 16


@pytest.mark.long
def test_the_long_sum_of_a_real_vocabulary_is_noise(tmp_path: Path):
    """torch's softmax adds 8 lanes of 8,192 terms one after the other: 10 roundings of the log-probability."""
    config = LlamaConfig(
        vocab_size=1 << 16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    doc = workbench.referee(
        _run(tmp_path / "model", tmp_path / "dump", torch.bfloat16, "sdpa", _nothing), weights_a=str(tmp_path / "model")
    )
    assert doc["ruling"] == "NOISE", doc["sentence"]


def _other_columns(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.data[:, :16] *= 1.5


@pytest.mark.long
def test_a_graft_says_which_modules_output_carries_the_end_difference_and_what_comes_before_none(
    weights: Path, right: Path, tmp_path: Path
):
    wrong = LlamaForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    _other_columns(wrong)
    wrong.save_pretrained(tmp_path / "wrong")
    b = _run(weights, tmp_path / "b", torch.bfloat16, "eager", _other_columns)
    doc = workbench.referee(right, b, weights_a=str(weights), weights_b=str(tmp_path / "wrong"), graft=True)
    assert doc["ruling"] == "NOISE", "each side computes what its own weights say"
    assert any(
        one.startswith("1 of 21 weights differ, most model.layers.0.mlp.down_proj") for one in doc["differences"]
    )
    graft = doc["graft"]
    assert graft is not None
    assert graft["module"] == "layers.0.mlp.down_proj"
    assert graft["sentence"].startswith("layers.0.mlp, from its down_proj on, carries 9"), (
        "the whole MLP brings as much"
    )
    shares = {one["tensor"]: (float(one["comes"]), float(one["goes"] or 0.0)) for one in graft["grafts"]}
    assert all(share > 0.95 for share in shares["layers.0.mlp.down_proj.output"])
    assert all(abs(share) < 0.05 for share in shares["layers.0.mlp.up_proj.output"])
    assert graft["grafts"][0]["tensor"] == "embed_tokens.output", "in order of computation"


@pytest.mark.long
def test_a_factor_that_was_fitted_is_no_explanation_while_hundreds_of_roundings_are_left(weights: Path, tmp_path: Path):
    doc = workbench.referee(
        _run(weights, tmp_path / "b", torch.bfloat16, "eager", _other_columns), weights_a=str(weights)
    )
    assert (doc["module"], doc["hypothesis"]) == ("layers.0.mlp.down_proj", None), doc["sentence"]


def _in_autocast(model: Any) -> None:
    run = model.forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return run(*args, **kwargs)

    model.forward = cast


@pytest.mark.long
@pytest.mark.parametrize("plant", [_nothing, _scaled_row], ids=["right", "row"])
def test_autocast_over_float32_weights_is_ruled_as_what_it_is(
    weights: Path, tmp_path: Path, plant: Callable[[Any], None]
):
    def both(model: Any) -> None:
        plant(model)
        _in_autocast(model)

    doc = workbench.referee(_run(weights, tmp_path / "b", torch.float32, "eager", both), weights_a=str(weights))
    expected = ("NOISE", None) if plant is _nothing else ("BUG", "layers.1.self_attn.o_proj")
    assert (doc["ruling"], doc["module"]) == expected, doc["sentence"]
    assert any("torch.autocast" in note for note in doc["a"]["notes"])


def _softmax_in_half(model: Any) -> None:
    from transformers.models.llama import modeling_llama

    own = torch.nn.functional.softmax

    def coarse(scores: Any, dim: int = -1, **_: Any) -> Any:
        each = torch.exp((scores - scores.amax(dim, keepdim=True)).to(torch.bfloat16))
        return each / each.sum(dim, keepdim=True)

    attention, run = model.model.layers[1].self_attn, model.model.layers[1].self_attn.forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        modeling_llama.nn.functional.softmax = coarse
        try:
            return run(*args, **kwargs)
        finally:
            modeling_llama.nn.functional.softmax = own

    attention.forward = attend


@pytest.mark.long
def test_a_softmax_in_half_precision_is_told_by_its_bits(weights: Path, tmp_path: Path):
    wrong = _run(weights, tmp_path / "b", torch.bfloat16, "eager", _softmax_in_half)
    doc = workbench.referee(wrong, weights_a=str(weights))
    assert (doc["ruling"], doc["module"]) == ("BUG", "layers.1.self_attn"), doc["sentence"]
    assert doc["hypothesis"] == "the softmax computed in bfloat16 within, in half precision"


@pytest.mark.long
@pytest.mark.parametrize("factor", [None, 2.0, 1.02, 0.3], ids=["right", "twice", "row", "clipped"])
def test_the_gradient_of_a_weight_is_ruled_by_its_recorded_input_and_output_gradient(
    weights: Path, tmp_path: Path, factor: float | None
):
    model = LlamaForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    ids = torch.randint(1, 128, (3, 16), generator=torch.Generator().manual_seed(2))
    wrong = model.model.layers[0].mlp.up_proj.weight
    with Recorder(tmp_path / "dump") as recorder, recorder.step(0) as step:
        with step.modules(model, r"mlp\.", inputs=True, gradients=True, micro=0):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if factor == 0.3:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 3.0, torch.tensor(10.0))
        elif factor is not None:
            assert wrong.grad is not None
            wrong.grad[3 if factor == 1.02 else slice(None)] *= factor
        step.gradients(model, micro=0)
        step("forward_data", input_ids=ids, attention_mask=torch.ones_like(ids), micro=0)
    doc = workbench.referee(tmp_path / "dump", weights_a=str(weights))
    ruled = [one["tensor"] for one in doc["a"]["tensors"] if one["kind"] == "gradient"]
    assert len(ruled) == 6, "gate, up and down of two layers"
    if factor in (None, 0.3):
        assert doc["ruling"] == "NOISE", doc["sentence"]
        return
    assert (doc["ruling"], doc["tensor"]) == ("BUG", "grad.layers.0.mlp.up_proj.weight"), doc["sentence"]
    assert doc["what"] == ("all of it times 2" if factor == 2.0 else "output 3")

"""Genuine dumps of real frameworks, against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replay_core import workbench
from replay_core.compare.judging.verdict import Verdict
from replay_core.records import Selection
from tests.builders import compare_paths, row_of, shards_of
from tests.fixtures import FIXTURES

#: The script's names, and ours.
NAMES = {"log_probs": "policy_logprobs"}


def nexrl() -> Any:
    return workbench.compare_dumps(
        FIXTURES / "nexrl/self_hosted_fp32", FIXTURES / "nexrl/self_hosted_bf16", step=Selection.parse(0)
    )


def test_every_figure_of_nexrls_own_report_is_ours_too():
    script = json.loads((FIXTURES / "nexrl/compare_fp32_vs_bf16.json").read_text())
    ours = {
        (field["section"], field["name"], entry["rank"], entry["micro"]): entry
        for field in nexrl()["summary"]["fields"]
        for entry in field["entries"]
    }
    checked = 0
    for section in script["sections"]:
        for record in section.get("comparisons", ()):
            for field in record.get("comparisons", ()):
                section_name = (
                    record["section"].removesuffix("_data") if "loss" in record["section"] else record["section"]
                )
                where = section_name, NAMES.get(field["name"], field["name"]), record["rank"], record["micro"]
                _agree(field, ours[where])
                checked += 1
    assert checked == 4 * 3 + 4 * 3


def _agree(script: Any, ours: Any) -> None:
    """To the last digits of fp32, in which the script sums."""
    assert ours["is_close"] is script["is_close"]
    if "diff" in script:
        assert ours["max_abs"] == pytest.approx(script["diff"], abs=1e-12)
        assert (ours["a"]["mean"], ours["b"]["mean"]) == (script["s1"], script["s2"])
        return
    assert ours["max_abs"] == pytest.approx(script["max_diff"], rel=1e-6)
    assert ours["mean_abs"] == pytest.approx(script["mean_diff"], rel=1e-6)
    for side, label in (("a", "t1"), ("b", "t2")):
        for figure in ("min", "max", "mean", "std"):
            assert ours[side][figure] == pytest.approx(script[f"{label}_{figure}"], rel=1e-6)
    if script.get("correlation") is not None:
        assert ours["pearson"] == pytest.approx(script["correlation"], abs=1e-6)


def test_what_the_script_hid_is_a_divergence():
    """It printed scalar differences only and exited 0; log-probabilities 0.028 nats apart were not among them."""
    document = nexrl()
    assert document["first_divergence"]["name"] == "old_logprobs"
    apart = {row["name"] for row in document["tensors"] if row["verdict"] == "DIFF"}
    assert {"policy_logprobs", "entropy", "param.layers.0.self_attn.q_proj.weight"} <= apart
    paired = {(row["name"], row["paired"], row["only_in_a"]) for row in document["summary"]["trajectories"]}
    assert ("reward", 8, 0) in paired
    assert [row["paired"] for row in document["summary"]["datums"]] == [8]


@pytest.mark.parametrize(("a", "b"), [("verl", "slime"), ("slime", "verl")])
def test_two_frameworks_dumps_of_one_batch_agree_token_by_token(a: str, b: str):
    compared = compare_paths(FIXTURES / a, FIXTURES / b)
    assert compared.first is None
    shared = {row.name for row in compared.tensors if row.verdict in (Verdict.SAME, Verdict.CLOSE)}
    assert {"input_ids", "response_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"} <= shared
    assert any("they hold the same samples" in note for note in compared.notes)
    ids = [row for row in compared.tensors if row.name == "input_ids" and row.verdict is Verdict.SAME]
    assert {row.figures.compared for row in ids if row.figures} == {520}
    # What only restates the ids (prompts, responses, positions) is no missing tensor.
    assert not {"prompt_ids", "response_ids", "position_ids", "attention_mask"} & {row.name for row in compared.tensors}


@pytest.mark.parametrize(("batch", "pearson"), [("padded", "0.739878"), ("stale", "0.784677")])
def test_critics_that_part_in_padding_alone_are_padding_with_both_correlations(batch: str, pearson: str):
    folder = FIXTURES / "roll_critic/bf16_init0.01"
    compared = compare_paths(folder / f"{batch}_deepspeed.pt", folder / f"{batch}_megatron.pt")
    row = row_of(compared, "values")
    assert row.verdict is Verdict.PADDING
    assert compared.first is None
    assert row.note is not None
    assert "Pearson 0.9999" in row.note
    assert f"{pearson} with padding" in row.note


def test_a_bias_that_correlation_cannot_see_is_no_padding():
    """TRL's value head has a bias, Megatron's has none: every token that counts is .0791 apart."""
    folder = FIXTURES / "roll_critic/fp32_sharedhead"
    row = row_of(compare_paths(folder / "padded_deepspeed.pt", folder / "padded_megatron.pt"), "values")
    assert row.verdict is Verdict.DIFF
    assert row.note is not None
    assert "Pearson 1 over the tokens that count, 0.630779 with padding" in row.note
    assert "b is a plus 0.0791307" in row.note


def test_an_attention_that_returns_its_weights_too_faces_one_that_does_not():
    folder = FIXTURES / "sglang_dumper"
    compared = compare_paths(folder / "baseline_sdpa_fp32", folder / "target_eager_bf16")
    rows = [row for row in compared.tensors if row.name == "layers.0.self_attn.output"]
    assert [row.verdict for row in rows] == [Verdict.DIFF] * 2
    missing = {row.name for row in compared.tensors if row.verdict is Verdict.MISSING}
    assert missing == {"layers.0.inputs.attention_mask", "layers.0.self_attn.inputs.attention_mask"}
    assert any("2 tensors of attention weights, which b alone returned" in note for note in compared.notes)
    assert compared.first is not None


def test_a_models_directory_faces_its_weights_in_any_container(tmp_path: Path):
    import torch
    from safetensors.torch import load_file, save_file

    model = FIXTURES / "trl/tiny_qwen2"
    state = load_file(model / "model.safetensors")
    torch.save(state, tmp_path / "state.pt")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text("{}")
    names = sorted(state)
    places: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, sharded / shard)
        places |= dict.fromkeys(part, shard)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    binary = tmp_path / "bin"
    binary.mkdir()
    (binary / "config.json").write_text("{}")
    torch.save(state, binary / "pytorch_model.bin")
    for other in (tmp_path / "state.pt", sharded, binary):
        for a, b in ((model, other), (other, model)):
            compared = compare_paths(a, b)
            assert compared.counts["SAME"] == compared.counts["total"] == len(names), (a, b)
    changed = dict(state)
    victim = next(name for name in names if "mlp" in name)
    changed[victim] = state[victim] * 1.01
    torch.save(changed, tmp_path / "state.pt")
    first = compare_paths(model, tmp_path / "state.pt").first
    assert first is not None
    assert first.name.endswith(victim.removeprefix("model."))


def test_shards_of_two_ranks_face_the_whole_weights(tmp_path: Path):
    import torch
    from safetensors.torch import load_file

    (tmp_path / "dump").mkdir()
    model = FIXTURES / "trl/tiny_qwen2"
    for rank in range(2):
        shards = shards_of(load_file(model / "model.safetensors"), rank, 2)
        torch.save(shards, tmp_path / f"dump/model_world_size_2_rank_{rank}.pt")
    compared = compare_paths(tmp_path / "dump", model)
    assert compared.counts["SAME"] == compared.counts["total"] == 26

"""Weights of one model as trainers and hubs lay them down: wrapped, tied, sharded, cast, and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file as save_safetensors

from replay_core import workbench
from replay_core.errors import ExitCode
from replay_core.export.outcome import exit_code
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared


def weights(*, head: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.norm")
    made = {f"{name}.weight": 0.02 * torch.randn(32, 32) for name in names}
    return {**made, "lm_head.weight": torch.randn(32, 32)} if head else made


def directory(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_safetensors({name: value.contiguous().clone() for name, value in tensors.items()}, path / "model.safetensors")
    return path


def sharded(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    names = list(tensors)
    places = {name: f"model-0000{1 + (number > 1)}-of-00002.safetensors" for number, name in enumerate(names)}
    for shard in set(places.values()):
        save_safetensors({name: tensors[name] for name in names if places[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


def torch_shards(path: Path, tensors: dict[str, torch.Tensor], of: int) -> Path:
    """As torch.save leaves them, with no index and no config.json beside them."""
    path.mkdir()
    names = list(tensors)
    for shard in range(of):
        held = {name: tensors[name] for name in names[shard::of]}
        torch.save(held, path / (f"pytorch_model-{shard + 1:05d}-of-{of:05d}.bin" if of > 1 else "pytorch_model.bin"))
    return path


@pytest.mark.parametrize("of", [1, 3])
def test_bin_files_need_neither_config_nor_index(of: int, tmp_path: Path) -> None:
    document = workbench.compare_dumps(
        directory(tmp_path / "a", weights()), torch_shards(tmp_path / "b", weights(), of)
    )
    assert document["counts"]["SAME"] == document["counts"]["total"] == 5
    assert {there(row["b_key"])["stage"] for row in document["tensors"]} == {"param"}


def test_a_shard_that_is_not_there_is_missed_without_an_index_too(tmp_path: Path) -> None:
    b = torch_shards(tmp_path / "b", weights(), 3)
    (b / "pytorch_model-00002-of-00003.bin").unlink()
    document = workbench.compare_dumps(directory(tmp_path / "a", weights()), b)
    assert exit_code(document) == ExitCode.BAD_BYTES
    assert "shard 2 of 3" in document["problems"][0]["what"]
    assert document["counts"]["MISSING"] == 3  # its two tensors, and the shard itself


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"module.{name}",
        lambda name: f"_fsdp_wrapped_module.{name}",
        lambda name: f"model.{name}",
        lambda name: name.replace(".0.self_attn", ".0._fsdp_wrapped_module.self_attn"),
        lambda name: name.replace(".1.mlp", ".1._checkpoint_wrapped_module.mlp._orig_mod"),
        lambda name: name.removeprefix("model."),
    ],
)
def test_wrappers_in_names_are_no_difference(wrap: object, tmp_path: Path) -> None:
    wrapped = {wrap(name): value for name, value in weights().items()}  # type: ignore[operator]
    document = workbench.compare_dumps(directory(tmp_path / "a", weights()), directory(tmp_path / "b", wrapped))
    assert document["counts"]["SAME"] == document["counts"]["total"] == 5


def test_a_tied_head_is_missing_only_where_it_is_not_the_embedding(tmp_path: Path) -> None:
    embedding = weights()["model.embed_tokens.weight"]
    tied = directory(tmp_path / "tied", weights(head=False))
    stored = directory(tmp_path / "stored", {**weights(head=False), "lm_head.weight": embedding})
    for pair in ((tied, stored), (stored, tied)):
        document = workbench.compare_dumps(*pair)
        assert exit_code(document) == 0
        assert any("tied weights" in note for note in document["notes"])
    document = workbench.compare_dumps(tied, directory(tmp_path / "other", weights()))
    assert document["counts"]["MISSING"] == 1
    assert exit_code(document) == 1


@pytest.mark.parametrize("off", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("embeds", "head"),
    [
        ("word_embeddings", "output_layer"),
        ("tok_embeddings", "output"),
        ("embed_in", "embed_out"),
        ("wte", "unembed"),
        ("words", "readout"),
    ],
)
def test_a_tied_head_of_another_stage_is_the_embedding_on_every_rank_that_has_it(
    embeds: str, head: str, off: float, tmp_path: Path
) -> None:
    embedding = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    norm = torch.ones(8)
    one = {"param": {f"param.{embeds}.weight": embedding, "param.final_layernorm.weight": norm}}
    first = {"param": {f"param.{embeds}.weight": embedding}}
    last = {"param": {f"param.{head}.weight": embedding, "param.final_layernorm.weight": norm}}
    other = {"param": {f"param.{head}.weight": embedding + off, "param.final_layernorm.weight": norm}}
    found = compared(tmp_path, one, first, first, last, other)
    assert found.counts["MISSING"] == (off > 0)
    assert any("tied weights" in note for note in found.notes) is (off == 0)


@pytest.mark.parametrize(("name", "other"), [
    ("critic.score", "target_critic.score"), ("adapter_in", "adapter_out"), ("embed_tokens", "position_embed"),
])  # fmt: skip
def test_a_weight_that_equals_another_is_missed_where_that_is_no_lookup_of_words(
    name: str, other: str, tmp_path: Path
) -> None:
    values = torch.ones(6, 4) if "embed" in name else torch.eye(6)[:, : 1 if "score" in name else 6]
    one = {"param": {f"param.{name}.weight": values, "param.norm.weight": torch.ones(8)}}
    two = {"param": {**one["param"], f"param.{other}.weight": values}}
    assert compared(tmp_path, one, two).counts["MISSING"] == 1


@pytest.mark.parametrize("breaks", [Path.unlink, lambda shard: shard.write_bytes(shard.read_bytes()[:-64])])
def test_a_shard_that_cannot_be_read_is_named_and_never_a_clean_bill(breaks: object, tmp_path: Path) -> None:
    broken = sharded(tmp_path / "b", weights())
    shard = broken / "model-00002-of-00002.safetensors"
    breaks(shard)  # type: ignore[operator]
    document = workbench.compare_dumps(sharded(tmp_path / "a", weights()), broken)
    assert (document["counts"]["SAME"], document["counts"]["skipped"]) == (2, 3)
    assert any(str(shard) in problem["where"] for problem in document["problems"])
    assert exit_code(document, allow_missing=True) == 3


def test_a_plain_state_dict_is_judged_as_weights_too(tmp_path: Path) -> None:
    whole = {name: value.to(torch.bfloat16) for name, value in weights().items()}
    through = {name: value.to(torch.float8_e4m3fn).to(torch.bfloat16) for name, value in whole.items()}
    torch.save(whole, tmp_path / "a.pt")
    torch.save({"state_dict": through}, tmp_path / "b.pt")
    document = workbench.compare_dumps(tmp_path / "a.pt", tmp_path / "b.pt")
    assert document["counts"]["DIFF"] == document["counts"]["total"] == 5

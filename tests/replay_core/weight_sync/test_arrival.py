"""What an engine holds, after a really trained model was pushed into it and something went wrong on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replay_core import workbench
from replay_core.documents.weights import WeightsDocument
from replay_core.errors import ExitCode
from replay_core.export.outcome import exit_code
from replay_core.recorder import record_weights
from tests.replay_core.weight_sync import megatron
from tests.replay_core.weight_sync.engine import EngineWorker

Weights = dict[str, torch.Tensor]
QKV = "model.layers.1.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"
W13 = "model.layers.1.mlp.experts.w13_weight"


class Trained:
    """Checkpoints of steps 0, 1 and 2 of a tiny model, trained with Adam, in float32."""

    def __init__(self, model: Any, config: Any, folder: Path) -> None:
        self.config, self.steps = config, []
        self.paths: list[Path] = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids_BT = torch.arange(64).reshape(4, 16) % config.vocab_size
        for step in range(3):
            self.steps.append(_on_disk({name: tensor.clone() for name, tensor in model.state_dict().items()}))
            path = folder / f"step_{step}"
            path.mkdir(parents=True)
            save_file(self.steps[-1], path / "model.safetensors")
            (path / "config.json").write_text(config.to_json_string())
            self.paths.append(path)
            optimizer.zero_grad()
            model(input_ids=ids_BT, labels=ids_BT).loss.backward()
            optimizer.step()


def _on_disk(state: Weights) -> Weights:
    """Names as a checkpoint has them: an expert's own, no tied head."""
    found: Weights = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for number, one in enumerate(tensor):
                gate, up = one.chunk(2)
                found[name.replace("gate_up_proj", f"{number}.gate_proj.weight")] = gate.contiguous()
                found[name.replace("gate_up_proj", f"{number}.up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for number, one in enumerate(tensor):
                found[name.replace("down_proj", f"{number}.down_proj.weight")] = one.contiguous()
        elif name != "lm_head.weight":
            found[name] = tensor.contiguous()
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=250, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return Trained(Qwen2ForCausalLM(config), config, tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=250, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Trained(Qwen3MoeForCausalLM(config), config, tmp_path_factory.mktemp("mixture"))


def worker(trained: Trained, step: int = 2, tp: int = 1, rank: int = 0) -> EngineWorker:
    made = EngineWorker(trained.config, trained.steps[step], tp, rank).load(trained.steps[step])
    made.parameters["model.rotary_emb.inv_freq"] = torch.ones(4)
    return made


class Module(torch.nn.Module):
    """The worker's parameters as a module has them: what `record_weights` is given."""

    def __init__(self, parameters: Weights) -> None:
        super().__init__()
        self._named = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in parameters.items()}

    def named_parameters(self, *_args: Any, **_options: Any) -> Any:  # names with dots
        return iter(self._named.items())


def judged(
    trained: Trained, parameters: Weights, folder: Path, *, digests: bool = False, **options: Any
) -> WeightsDocument:
    """Step 2 was pushed; step 0 stood there before; step 1 is known."""
    engine = folder / "engine"
    record_weights(Module(parameters), engine, step=2, digests=digests)
    options = {"before": trained.paths[0], "older": [trained.paths[1]], **options}
    return workbench.compare_weights(trained.paths[2], [engine], **options)


def wrong(doc: WeightsDocument) -> list[tuple[str, str]]:
    return [
        (one["name"].removeprefix("param."), one["arrival"])
        for one in doc["destinations"]
        if one["arrival"] != "arrived"
    ]


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_push_that_arrived_is_said_to_have_arrived(
    kind: str, digests: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    trained = request.getfixturevalue(kind)
    parameters = worker(trained).parameters
    doc = judged(trained, parameters, tmp_path, digests=digests)
    assert wrong(doc) == []
    assert doc["agrees"]
    assert doc["not_sent"] == []
    assert doc["coverage"]["compared"] == len(parameters) - 1
    assert doc["coverage"]["engine_own"] == 1


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_of_a_parallel_engine_is_put_together(
    kind: str, tp: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """With four ranks there are more of them than key heads: neighbours share one."""
    trained = request.getfixturevalue(kind)
    for rank in range(tp):
        record_weights(
            Module(worker(trained, tp=tp, rank=rank).parameters), tmp_path / "engine", step=2, rank=rank, digests=False
        )
    doc = workbench.compare_weights(trained.paths[2], [tmp_path / "engine"])
    assert wrong(doc) == []
    assert doc["agrees"]
    assert doc["parallel"] == tp
    assert doc["coverage"]["padding_rows"] == 6


def _rows(trained: Trained) -> tuple[int, int]:
    """Where k and v begin in the fused projection."""
    q = trained.steps[2]["model.layers.1.self_attn.q_proj.weight"].shape[0]
    return q, q + trained.steps[2]["model.layers.1.self_attn.k_proj.weight"].shape[0]


def _unwritten(p: Weights, t: Trained) -> None:
    p[QKV] = worker(t, 0).parameters[QKV]


def _exchanged(p: Weights, t: Trained) -> None:
    k, v = _rows(t)
    held = p[QKV].clone()
    p[QKV][k:v], p[QKV][v:] = held[v:], held[k:v]


def _behind(p: Weights, t: Trained) -> None:
    p[GATE_UP] = worker(t, 1).parameters[GATE_UP]


def _zeroed(p: Weights, _t: Trained) -> None:
    p["model.layers.0.input_layernorm.weight"].zero_()


def _transposed(p: Weights, _t: Trained) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    p[name] = p[name].T.contiguous()


def _int8(p: Weights, _t: Trained) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    scale = p[name].float().abs().amax(dim=1, keepdim=True) / 127
    p[name] = ((p[name].float() / scale).round() * scale).to(torch.bfloat16)


def _twice(p: Weights, t: Trained) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    p[name] = (2 * t.steps[2][name] - t.steps[0][name]).to(torch.bfloat16)


def _coarse(p: Weights, _t: Trained) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    p[name] = p[name].to(torch.float8_e4m3fn).to(torch.bfloat16)


def _stale_head(p: Weights, t: Trained) -> None:
    p["lm_head.weight"] = worker(t, 0).parameters["model.embed_tokens.weight"]


def _scaled(p: Weights, _t: Trained) -> None:
    p["model.norm.weight"] = p["model.norm.weight"] * 2


def _half(p: Weights, t: Trained) -> None:
    p["model.layers.0.self_attn.o_proj.weight"][16:] = worker(t, 0).parameters[
        "model.layers.0.self_attn.o_proj.weight"
    ][16:]


def _next_layer(p: Weights, _t: Trained) -> None:
    p[GATE_UP] = p[GATE_UP.replace("layers.0", "layers.1")]


FAULTS: dict[str, tuple[Callable[[Weights, Trained], None], str, str]] = {
    "one fused tensor unwritten": (_unwritten, QKV, "untouched"),
    "k and v exchanged": (_exchanged, QKV, "swapped"),
    "a step behind": (_behind, GATE_UP, "older"),
    "zeros": (_zeroed, "model.layers.0.input_layernorm.weight", "zero"),
    "transposed": (_transposed, "model.layers.0.self_attn.o_proj.weight", "transposed"),
    "int8": (_int8, "model.layers.1.mlp.down_proj.weight", "quantised"),
    "the adapter twice": (_twice, "model.layers.1.mlp.down_proj.weight", "update"),
    "cast to fp8 and back": (_coarse, "model.layers.1.mlp.down_proj.weight", "rounded"),
    "a tied head that is stale": (_stale_head, "lm_head.weight", "untouched"),
    "a norm doubled": (_scaled, "model.norm.weight", "scaled"),
    "half of the rows": (_half, "model.layers.0.self_attn.o_proj.weight", "partly"),
    "the next layer's": (_next_layer, GATE_UP, "other layer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_push_is_named_by_destination(fault: str, dense: Trained, tmp_path: Path) -> None:
    plant, name, arrival = FAULTS[fault]
    parameters = worker(dense).parameters
    plant(parameters, dense)
    doc = judged(dense, parameters, tmp_path)
    assert wrong(doc) == [(name, arrival)], doc["headline"]
    assert not doc["agrees"]
    assert name in doc["headline"]


#: What values alone can show, a digest cannot.
BY_DIGEST = [
    name for name, (_, _, word) in FAULTS.items() if word in ("untouched", "swapped", "older", "zero", "rounded")
]


@pytest.mark.parametrize("fault", BY_DIGEST)
def test_a_digest_is_enough_to_name_what_else_a_parameter_holds(fault: str, dense: Trained, tmp_path: Path) -> None:
    plant, name, arrival = FAULTS[fault]
    parameters = worker(dense).parameters
    plant(parameters, dense)
    doc = judged(dense, parameters, tmp_path, digests=True)
    assert wrong(doc) == [(name, arrival)], doc["headline"]
    assert doc["coverage"]["by_digest"] == doc["coverage"]["compared"]


def test_a_missing_expert_is_named(mixture: Trained, tmp_path: Path) -> None:
    parameters = worker(mixture).parameters
    parameters[W13][2] = worker(mixture, 0).parameters[W13][2]
    doc = judged(mixture, parameters, tmp_path)
    assert wrong(doc) == [(W13, "untouched")]
    parts = next(one["parts"] for one in doc["destinations"] if one["arrival"] == "untouched")
    assert [one["part"] for one in parts] == ["expert 2 gate_proj", "expert 2 up_proj"]


def test_experts_in_another_order_are_named(mixture: Trained, tmp_path: Path) -> None:
    parameters = worker(mixture).parameters
    parameters[W13][[0, 1]] = parameters[W13][[1, 0]]
    doc = judged(mixture, parameters, tmp_path)
    assert wrong(doc) == [(W13, "other expert")]
    assert "expert 1" in doc["headline"]


def test_a_shard_of_another_rank_is_named(dense: Trained, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    for rank in range(2):
        parameters = worker(dense, tp=2, rank=rank).parameters
        if rank == 1:
            parameters[name] = worker(dense, tp=2, rank=0).parameters[name]
        record_weights(Module(parameters), tmp_path / "engine", step=2, rank=rank, digests=False)
    doc = workbench.compare_weights(dense.paths[2], [tmp_path / "engine"])
    assert [
        (one["name"], one["rank"], one["arrival"]) for one in doc["destinations"] if one["arrival"] != "arrived"
    ] == [(f"param.{name}", 1, "other shard")]


def test_an_engine_in_fp8_with_scales_holds_what_was_sent(dense: Trained, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    parameters = worker(dense).parameters
    sent = parameters[name].float()
    scale = sent.abs().amax(dim=1, keepdim=True) / 448
    parameters[name] = (sent / scale).to(torch.float8_e4m3fn)
    parameters[f"{name}_scale"] = scale
    assert wrong(judged(dense, parameters, tmp_path)) == []


def test_parameters_without_a_destination_are_said(dense: Trained, tmp_path: Path) -> None:
    parameters = worker(dense).parameters
    del parameters[GATE_UP]
    doc = judged(dense, parameters, tmp_path)
    assert not doc["agrees"]
    assert doc["not_sent"] == ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"]
    assert "2 of the trainer's" in doc["headline"]


def test_what_did_not_move_in_training_proves_no_push(dense: Trained, tmp_path: Path) -> None:
    doc = judged(dense, worker(dense).parameters, tmp_path, before=dense.paths[2])
    assert doc["coverage"]["unmoved"] == doc["coverage"]["compared"]


def test_an_allowed_grid_fails_nothing(dense: Trained, tmp_path: Path) -> None:
    parameters = worker(dense).parameters
    _int8(parameters, dense)
    assert judged(dense, parameters, tmp_path, allowed=("quantised",))["agrees"]


@pytest.mark.parametrize("digests", [False, True])
def test_what_was_there_before_may_be_the_engines_own_recording(digests: bool, dense: Trained, tmp_path: Path) -> None:
    """Its names are fused; of digests alone equality is all there is."""
    record_weights(Module(worker(dense, 0).parameters), tmp_path / "before", step=0, digests=digests)
    parameters = worker(dense).parameters
    _unwritten(parameters, dense)
    doc = judged(dense, parameters, tmp_path, digests=digests, before=tmp_path / "before", older=[])
    assert wrong(doc) == [(QKV, "untouched")], doc["headline"]


def test_digests_of_a_trainer_tell_of_what_is_not_fused(dense: Trained, tmp_path: Path) -> None:
    sent = {name: one.bfloat16() for name, one in dense.steps[2].items()}
    record_weights(Module(sent), tmp_path / "trainer", step=2, role="actor")
    record_weights(Module(worker(dense).parameters), tmp_path / "engine", step=2)
    doc = workbench.compare_weights(tmp_path / "trainer", [tmp_path / "engine"])
    held = {one["name"].removeprefix("param."): one["arrival"] for one in doc["destinations"]}
    assert held["model.norm.weight"] == "arrived"
    assert held[QKV] == "unreadable"
    assert not doc["agrees"]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)])
def test_megatrons_shards_are_joined_and_cut_apart(tensor: int, pipeline: int, dense: Trained, tmp_path: Path) -> None:
    sent = megatron.write(dense.steps[2], dense.config, tmp_path / "iter_0000002", tensor, pipeline, padded=70)
    parameters = worker(dense).parameters
    key = worker(dense, step=1).parameters[QKV]
    parameters[QKV] = torch.cat([parameters[QKV][:32], key[32:48], parameters[QKV][48:]])
    record_weights(Module(parameters), tmp_path / "engine", step=2)
    doc = workbench.compare_weights(sent, [tmp_path / "engine"], before=dense.paths[0], older=[dense.paths[1]])
    assert wrong(doc) == [(QKV, "older")]
    (fused,) = [one for one in doc["destinations"] if one["name"].endswith(QKV)]
    assert [(one["part"], one["arrival"]) for one in fused["parts"]] == [("k_proj", "older")]
    assert doc["not_sent"] == []


def test_a_megatron_checkpoint_that_lacks_a_rank_is_said(dense: Trained, tmp_path: Path) -> None:
    from replay_core.errors import DumpError

    sent = megatron.write(dense.steps[2], dense.config, tmp_path / "iter_0000002", 2, 2)
    (sent / "mp_rank_00_001/model_optim_rng.pt").unlink()
    record_weights(Module(worker(dense).parameters), tmp_path / "engine", step=2)
    with pytest.raises(DumpError, match="ranks of a Megatron checkpoint are missing"):
        workbench.compare_weights(sent, [tmp_path / "engine"])


def _unfused(trained: Trained, folder: Path, change: Callable[[Weights], None]) -> WeightsDocument:
    """An engine that keeps the checkpoint's own parameters, in bfloat16."""
    held = {name: tensor.bfloat16() for name, tensor in trained.steps[2].items()}
    change(held)
    folder.mkdir()
    save_file(held, folder / "model.safetensors")
    return workbench.compare_weights(trained.paths[2], [folder], before=trained.paths[0])


K, V = (f"model.layers.1.self_attn.{word}_proj.weight" for word in "kv")


def _turned(held: Weights) -> None:
    held[K], held[V] = held[V], held[K]


def _k_twice(held: Weights) -> None:
    held[V] = held[K].clone()


@pytest.mark.parametrize(("change", "moved"), [(_turned, {K, V}), (_k_twice, {V})])
def test_parameters_exchanged_where_nothing_is_fused(
    change: Callable[[Weights], None], moved: set[str], dense: Trained, tmp_path: Path
) -> None:
    doc = _unfused(dense, tmp_path / "engine", change)
    assert {name for name, arrival in wrong(doc) if arrival == "swapped"} == moved == {name for name, _ in wrong(doc)}
    assert "_proj.weight" in doc["headline"].split("holds the values of")[1]


def test_a_digest_tells_parameters_exchanged_where_nothing_is_fused(dense: Trained, tmp_path: Path) -> None:
    held = {name: tensor.bfloat16() for name, tensor in dense.steps[2].items()}
    _turned(held)
    assert set(wrong(judged(dense, held, tmp_path, digests=True))) == {(K, "swapped"), (V, "swapped")}


def test_rows_that_were_not_written_hold_in_the_engines_dtype_what_stood_there(dense: Trained, tmp_path: Path) -> None:
    def half(held: Weights) -> None:
        held[K][8:] = dense.steps[0][K][8:].bfloat16()

    (found,) = [
        one for one in _unfused(dense, tmp_path / "engine", half)["destinations"] if one["arrival"] != "arrived"
    ]
    assert found["arrival"] == "partly"
    assert "they hold what was there before the push" in found["what"]


def test_a_lost_shard_of_the_engine_leads_and_is_wrong_bytes(dense: Trained, tmp_path: Path) -> None:
    _unfused(dense, tmp_path / "engine", lambda held: None)
    engine = tmp_path / "engine"
    whole = load_file(engine / "model.safetensors")
    names = sorted(whole)
    shards = {name: f"model-0000{1 + (at >= 5)}-of-00002.safetensors" for at, name in enumerate(names)}
    (engine / "model.safetensors").unlink()
    (engine / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    save_file({name: whole[name] for name in names[:5]}, engine / "model-00001-of-00002.safetensors")
    doc = workbench.compare_weights(dense.paths[2], [engine])
    assert not doc["agrees"]
    assert doc["headline"].startswith("cannot be read: ")
    assert "model-00002-of-00002.safetensors" in doc["headline"].split(";")[0]
    assert exit_code(doc) == ExitCode.BAD_BYTES

"""Recorded MoE routing: the same experts give the same numbers, others give the numbers of those others."""

from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core.errors import DumpError
from replay_core.pages import array
from replay_core.recorder import Recorder
from replay_core.records import Inline, Run, TensorRef
from replay_core.replay import routing
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import read_batch
from tests.builders import record_with
from tests.replay_core.replay.conftest import small_batch
from tests.replay_core.replay.test_run import run_of

MODELS = ("mixtral-tiny", "qwen3-moe-tiny")


def dumped(path, experts, weights=None, drop=0):
    batch = small_batch()
    fields = {
        "input_ids": torch.from_numpy(batch.ids_BS), "attention_mask": torch.from_numpy(batch.valid_BS.astype(int)),
        "response_mask": torch.from_numpy(batch.response_BS), "temperature": 1.0,
    }  # fmt: skip
    if experts is not None:
        fields["routed_experts"] = torch.from_numpy(experts[:, : experts.shape[1] - drop])
    if weights is not None:
        fields["routing_weights"] = torch.from_numpy(weights)
    with Recorder(path).step(0) as record:
        record("forward_data", micro=0, **fields)
    return str(path)


def live(ask, tmp_path, model):
    """(experts [B, S, L, K], weights, log-probabilities) of the model routing by itself, padded."""
    plan = {"dump": dumped(tmp_path / "live", None), "model": f"random:{model}", "capture": r"mlp\.gate$"}
    doc = ask("", plan=plan)
    run = run_of(doc["cells"][-1])
    modules = run.select(stage="modules")[0]
    logits = [array(modules.get(f"layers.{layer}.mlp.gate.output.0")) for layer in (0, 1)]
    experts, weights = [], []
    for one in logits:
        probabilities = torch.from_numpy(np.array(one)).reshape(3, 24, -1).softmax(-1)
        top = probabilities.topk(2, -1)
        experts.append(top.indices.numpy())
        # Mixtral normalises over the chosen experts, this Qwen's config does not.
        total = top.values.sum(-1, keepdim=True) if model.startswith("mixtral") else 1.0
        weights.append((top.values / total).numpy())
    return np.stack(experts, 2), np.stack(weights, 2), array(run.select(stage="forward_data")[0].get("log_probs"))


def replayed(ask, tmp_path, model, name, experts, weights=None, flags="routing=recorded", **how):
    dump = dumped(tmp_path / name, experts, weights, **how)
    return ask(flags, plan={"dump": dump, "model": f"random:{model}", "capture": "none"})


def logprobs(doc, cell=-1):
    return array(run_of(doc["cells"][cell]).select(stage="forward_data")[0].get("log_probs"))


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_the_routers_own_experts_change_nothing(ask, tmp_path, model):
    experts, weights, expected = live(ask, tmp_path, model)
    doc = replayed(ask, tmp_path, model, "same", experts)
    assert logprobs(doc) == pytest.approx(expected, abs=2e-6)
    assert "would have made 0.00 % otherwise" in doc["cells"][-1]["effective"]["routing"]
    doc = replayed(ask, tmp_path, model, "weighed", experts, weights)
    assert logprobs(doc) == pytest.approx(expected, abs=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_other_experts_are_taken_in_every_arrangement(ask, tmp_path, model):
    experts, weights, expected = live(ask, tmp_path, model)
    other = (experts + 1) % 4
    doc = replayed(ask, tmp_path, model, "other", other, weights[::-1].copy(), "routing=recorded packing=on")
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]
    valid_BT = small_batch().valid_BS[:, 1:] & small_batch().valid_BS[:, :-1]
    moved = np.abs(logprobs(doc, 1)[:, :-1] - expected[:, :-1])[valid_BT]
    assert moved.max() > 1e-4
    assert " 0.00 %" not in doc["cells"][-1]["effective"]["routing"]


@pytest.mark.long
def test_the_last_token_may_have_no_routing(ask, tmp_path):
    experts, _, expected = live(ask, tmp_path, "mixtral-tiny")
    doc = replayed(ask, tmp_path, "mixtral-tiny", "short", experts, drop=1)
    assert logprobs(doc) == pytest.approx(expected, abs=2e-6)


def test_what_does_not_fit_is_named(ask, tmp_path):
    experts, _, _ = live(ask, tmp_path, "mixtral-tiny")
    doc = replayed(ask, tmp_path, "llama-tiny", "dense", experts)
    assert {cell["outcome"] for cell in doc["cells"]} == {"unavailable"}
    doc = replayed(ask, tmp_path, "mixtral-tiny", "many", experts + 4)
    assert [cell["outcome"] for cell in doc["cells"]] == ["failed", *["unavailable"] * (len(doc["cells"]) - 1)]
    assert "2 of 4 experts" in doc["cells"][0]["error"]["expected"]


def test_compiled_cells_with_recorded_routing_are_unavailable(ask, tmp_path):
    experts, _, _ = live(ask, tmp_path, "mixtral-tiny")
    doc = replayed(ask, tmp_path, "mixtral-tiny", "c", experts, flags="routing=recorded compile=aot_eager")
    assert doc["cells"][-1]["outcome"] == "unavailable"


def plan_of(path, **how):
    return ReplayPlan(str(path), 0, "all", "all", "none", str(path), **how)


def as_field(name, values, rows=None):
    array = np.asarray(values)
    return TensorRef(name, str(array.dtype), array.shape, Inline(array.tobytes()), name, rows=rows)


def recorded_with(*fields, **how):
    """A run of these fields, and the micro-batch that is read from it."""
    run = Run(Path("dump"), "native", [record_with(*fields, stage="forward_data")])
    return run, read_batch(run, ReplayPlan("dump", 0, 0, 0, "none", "out", **how))


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("form", ["grid", "rows", "pack"])
def test_routing_is_read_from_every_layout_of_the_tokens(form, last):
    lengths = np.array([4, 2, 4])
    each = [np.arange(n * 4).reshape(n, 2, 2) + 100 * number for number, n in enumerate(lengths)]
    expected, rows = np.concatenate(each), tuple((lengths - last).tolist())
    if form == "grid":
        valid = np.arange(4) < lengths[:, None]
        grid = np.zeros((3, 4, 2, 2), int)
        grid[valid] = expected
        fields = [as_field("input_ids", np.where(valid, 7, 0)), as_field("attention_mask", valid)]
        fields.append(as_field("routed_experts", grid[:, : 4 - last]))
        expected[[3, 9] if last else []] = -1
    elif form == "rows":
        fields = [as_field("input_ids", np.arange(10), tuple(lengths.tolist()))]
        fields.append(as_field("routed_experts", np.concatenate([one[: len(one) - last] for one in each]), rows))
        expected[[3, 5, 9] if last else []] = -1
    else:
        fields = [as_field("input_ids", np.arange(10)[None]), as_field("cu_seqlens", np.array([0, 4, 6, 10]))]
        fields.append(as_field("routed_experts", expected[None, : 10 - last]))
        expected[[9] if last else []] = -1
    np.testing.assert_array_equal(routing.read(*recorded_with(*fields)).experts_TLK, expected)
    np.testing.assert_array_equal(routing.read(*recorded_with(*fields, rows="1,2")).experts_TLK, expected[4:])


def test_routing_of_too_few_tokens_is_refused():
    ids = as_field("input_ids", np.arange(5), (3, 2))
    with pytest.raises(DumpError, match="does not fit the tokens"):
        routing.read(*recorded_with(ids, as_field("routed_experts", np.zeros((2, 1, 1), int), (1, 1))))

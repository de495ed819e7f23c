"""Which stage of torch.compile a cell fails in: found with models that really break one."""

from pathlib import Path

import pytest
import torch
from torch import library
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core.executors.child import ChildRunner
from replay_core.replay import stages
from tui_debugger.reports.replay import replay_report


@library.custom_op("rldbg_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


@turned.register_fake
def _(x):
    # Tells the compiler of other strides than come: only the code that inductor makes looks.
    return x.new_empty_strided(x.shape, tuple(reversed(x.stride())))


@library.custom_op("rldbg_tests::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


def _llama(last):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    ))  # fmt: skip
    mlp = model.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = lambda x: last(before(x))
    return model


def breaking_inductor():
    return _llama(turned)


def breaking_dynamo():
    return _llama(unknown)


def breaking_the_graph():
    return _llama(lambda x: x * (1 if float(x.sum()) < 1e9 else 3))


ROOT = Path(__file__).parents[3]


def asked(ask, model, flags, **request):
    plan = {
        "capture": "none",
        "model": f"factory:tests.replay_core.replay.test_stages:{model}",
        "forward_path": str(ROOT),
    }
    return ask(flags, plan=plan, **request)


@pytest.mark.slow
def test_what_inductor_alone_fails_at_is_called_inductors(ask):
    doc = asked(ask, "breaking_inductor", "compile=inductor")
    cell = doc["cells"][-1]
    assert cell["outcome"] == "failed"
    assert [(one["compile"], one["outcome"]) for one in cell["stages"]["trials"]] == [("aot_eager", "ran")]
    assert cell["stages"]["sentence"].startswith("inductor: compile=inductor fails, compile=aot_eager of the same cell")
    assert "fails in inductor" in replay_report(doc)


@pytest.mark.long
def test_what_cannot_be_traced_is_called_dynamos_and_is_tried_once(ask):
    doc = asked(ask, "breaking_dynamo", "", matrix="compile=aot_eager,off packing=off,on")
    down = [cell for cell in doc["cells"] if cell["outcome"] == "failed"]
    assert len(down) == 2
    assert [one["compile"] for one in down[0]["stages"]["trials"]] == ["dynamo"]
    assert down[0]["stages"]["sentence"].startswith("Dynamo itself")
    assert down[1]["stages"]["as_cell"] == doc["cells"].index(down[0])


@pytest.mark.slow
def test_a_graph_break_is_named(ask):
    doc = asked(ask, "breaking_the_graph", "compile=dynamo")
    cell = doc["cells"][-1]
    assert (cell["outcome"], cell["agreement"]["agrees"]) == ("ran", True)
    assert cell["compile"]["graph_breaks"] >= 1
    assert cell["compile"]["graph_break_reasons"][0] in replay_report(doc)


@pytest.mark.slow
def test_a_cell_that_hangs_is_not_tried_again(ask):
    with ChildRunner(time_limit_s=40) as runner:
        cell = ask("fault=hang compile=aot_eager", plan={"capture": "none"}, runner=runner)["cells"][-1]
    assert cell["outcome"] == "crashed"
    assert "stages" not in cell


def test_the_first_backend_that_runs_clears_the_stages_it_has():
    def one(backend, outcome, breaks=()):
        return {"compile": backend, "outcome": outcome, "message": None, "graphs": 1, "graph_breaks": list(breaks)}

    assert stages.below("off") == ()
    assert stages.sentence("inductor", [one("aot_eager", "failed"), one("dynamo", "ran", ["a call"])]) == (
        "AOTAutograd: compile=aot_eager fails, compile=dynamo of the same cell runs, with graph breaks: a call"
    )
    assert stages.sentence("inductor", [one("aot_eager", "failed"), one("dynamo", "crashed")]).startswith(
        "Dynamo itself"
    )

"""Which pass of the compiler it is: torch's own bisector, on models that really are compiled wrong."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core.executors.child import ChildRunner
from replay_core.replay import blaming
from replay_core.replay.flags import Flags
from replay_core.replay.plan import ReplayPlan
from tui_debugger.reports.replay import replay_report

ROOT = Path(__file__).parents[3]


def rectified_wrongly():
    """A model whose relu inductor makes wrong code of: a bug that torch keeps for its own tests."""
    from torch._inductor import config

    config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, hidden_act="relu",
    ))  # fmt: skip


@pytest.mark.slow
def test_the_operation_that_inductor_makes_wrong_code_of_is_named(ask):
    plan = {"capture": "none", "model": f"factory:{__name__}:rectified_wrongly", "forward_path": str(ROOT)}
    with ChildRunner(warm=True) as runner:
        doc = ask("compile=inductor", plan=plan, runner=runner)
    cell = doc["cells"][-1]
    assert cell["cause"]["kind"] == "maths"
    blamed = cell["stages"]["blamed"]
    assert (blamed["backend"], blamed["subsystem"], blamed["applied"]) == ("inductor", "lowerings", "relu")
    assert (blamed["layers"], blamed["of_layers"]) == (1, 2)
    assert f"is compiled wrong: uncompiled it is right\n  torch's bisector: {blamed['sentence']}" in replay_report(doc)


@pytest.fixture
def plan(recorded, tmp_path):
    model = "factory:tests.replay_core.replay.test_stages:breaking_dynamo"
    return ReplayPlan.from_mapping({
        "dump": str(recorded), "step": 0, "rank": 0, "micro": 0, "model": model, "forward_path": str(ROOT),
        "flags": Flags.parse("threads=1 compile=aot_eager").to_mapping(), "out": str(tmp_path),
    })  # fmt: skip


@pytest.mark.long
def test_what_fails_before_any_pass_is_no_passs(plan):
    found = blaming.blame(plan)
    assert (found["backend"], found["subsystem"], found["layers"]) == ("eager", None, 1)
    assert found["sentence"].startswith("Dynamo as a whole")


@pytest.mark.long
def test_when_time_is_up_it_is_said_what_was_looked_at(plan):
    assert blaming.blame(plan, limit_s=-1)["sentence"].startswith("which pass is not known: no time was left")


def test_what_the_bisector_found_is_said_in_one_sentence():
    assert blaming.told("inductor", "lowerings", 102, "relu") == (
        "inductor: lowerings, number 102 (relu): with one fewer it is right"
    )
    setting = "inductor_emulate_precision_casts"
    assert blaming.told("inductor", setting, 0, setting).endswith(f"with its setting {setting} changed it is right")
    assert blaming.told("inductor", None, None, None).startswith("inductor as a whole")

"""Backward replays: the demo's own GRPO step, bitwise; every arrangement's gradients; what cannot be formed."""

import pytest

from replay_core import workbench
from replay_core.demo.train import train_demo
from replay_core.errors import RequestError
from replay_core.pages import array
from replay_core.replay.flags import Flags
from tests.builders import Here
from tests.replay_core.replay.test_run import run_of

MICROS = list(range(8))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "dump"
    train_demo(path, steps=1)
    return path


def backward(demo, out, flags="", **plan):
    base = {"dump": str(demo), "step": 0, "rank": 0, "micro": 0, "model": "checkpoint", "backward": True}
    return workbench.replay({**base, "flags": Flags.parse(flags).to_mapping(), **plan}, out, Here())


@pytest.mark.long
def test_a_recorded_grpo_step_is_replayed_bitwise_loss_and_gradients(demo, tmp_path):
    doc = backward(demo, tmp_path / "out", "logits=whole", micros=MICROS)
    cell = doc["cells"][-1]
    held = cell["recorded_training"]
    assert held["bitwise"], held["sentence"]
    assert held["gradients"] == 27, "26 weights and the norm"
    assert held["losses"] == 8 * 4
    assert "as recorded" in cell["loss"]["stated"]
    assert cell["loss"]["settings"]["kl"] == 0.001


@pytest.mark.long
def test_every_arrangement_gives_the_same_gradients(demo, tmp_path):
    doc = backward(demo, tmp_path / "out", "packing=on", micro=3)
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]
    for cell in doc["cells"]:
        assert cell["recorded_training"]["agrees"], cell["recorded_training"]["sentence"]
        assert "--micro all" in cell["recorded_training"]["sentence"]


@pytest.mark.long
def test_a_leak_shows_in_the_gradients(demo, tmp_path):
    leak = backward(demo, tmp_path / "out", "packing=on block_mask=off", micro=3)["cells"][-1]
    assert leak["agreement"]["agrees"] is False
    assert leak["cause"]["kind"] == "other_samples"


def test_gradients_stand_in_backward_order(demo, tmp_path):
    cell = backward(demo, tmp_path / "out")["cells"][-1]
    (record,) = run_of(cell).select(stage="gradient")
    names = [ref.name for ref in record.tensors() if ref.name.startswith("grad.")]
    assert names[0] == "grad.lm_head.weight"
    assert names[-1] == "grad.model.embed_tokens.weight"
    assert names.index("grad.model.layers.1.mlp.down_proj.weight") < names.index(
        "grad.model.layers.0.mlp.down_proj.weight"
    )


def test_the_model_keeps_no_gradient_for_the_next_replay(demo, tmp_path):
    from replay_core.replay.held import HOLDER

    backward(demo, tmp_path / "out")
    assert all(
        parameter.grad is None and not parameter.requires_grad for parameter in HOLDER._model.causal_lm.parameters()
    )


def test_without_advantages_there_is_no_loss(recorded, tmp_path):
    with pytest.raises(RequestError, match="no advantages"):
        backward(recorded, tmp_path / "out")


@pytest.mark.long
def test_gradient_checkpointing_changes_no_gradient(demo, tmp_path):
    plain = backward(demo, tmp_path / "a", "mode=train")["cells"][-1]
    saving = backward(demo, tmp_path / "b", "mode=train gradient_checkpointing=on")["cells"][-1]
    assert saving["effective"]["gradient_checkpointing"] is True
    (a,), (b,) = (run_of(cell).select(stage="gradient") for cell in (plain, saving))
    assert all((array(ref) == array(b.get(ref.name))).all() for ref in a.tensors() if ref.name.startswith("grad."))

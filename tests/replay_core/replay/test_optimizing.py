"""The optimizer step of a replay: the demo's own first update, bitwise; what is assumed is said."""

import pytest

from replay_core import workbench
from replay_core.demo.train import train_demo
from replay_core.errors import RequestError
from replay_core.replay.flags import Flags
from replay_core.replay.optimizing import Optimizer, resolve
from tests.builders import Here

MICROS = list(range(8))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "dump"
    train_demo(path, steps=3)
    return path


def stepped(demo, out, step=0, flags="logits=whole", **plan):
    base = {"dump": str(demo), "step": step, "rank": 0, "micro": 0, "micros": MICROS, "model": "checkpoint"}
    chosen = {**base, "backward": True, "optimizer": "", "flags": Flags.parse(flags).to_mapping(), **plan}
    return workbench.replay(chosen, out, Here())


@pytest.mark.long
def test_the_first_update_of_a_run_is_replayed_bitwise(demo, tmp_path):
    doc = stepped(demo, tmp_path / "out")
    cell = doc["cells"][-1]
    assert cell["recorded_params"]["bitwise"], cell["recorded_params"]["sentence"]
    assert cell["recorded_params"]["tensors"] == 27
    assert "as recorded" in cell["optimizer"]["stated"]
    assert cell["optimizer"]["settings"]["lr"] == 5e-3
    assert cell["optimizer"]["update_norm"] > 0


@pytest.mark.slow
def test_the_held_model_is_as_it_was_after_a_step(demo, tmp_path):
    first = stepped(demo, tmp_path / "a")["cells"][-1]
    again = stepped(demo, tmp_path / "b")["cells"][-1]
    assert first["loss"]["micros"] == again["loss"]["micros"]


@pytest.mark.long
def test_a_later_step_says_that_the_moments_are_not_the_trainers(demo, tmp_path):
    cell = stepped(demo, tmp_path / "out", step=1)["cells"][-1]
    assert "moments start from zero" in cell["optimizer"]["stated"]
    assert cell["recorded_params"]["bitwise"] is False


@pytest.mark.long
def test_another_learning_rate_leaves_other_weights(demo, tmp_path):
    cell = stepped(demo, tmp_path / "out", optimizer="adamw,lr=1e-3,beta2=0.95")["cells"][-1]
    assert cell["recorded_params"]["bitwise"] is False
    assert "as asked" in cell["optimizer"]["stated"]


def test_an_optimizer_that_nobody_named_is_stated():
    _, sentence = resolve(None, None, 0)
    assert "assumed: the dump records no optimizer" in sentence


@pytest.mark.parametrize("text", ["adamw,speed=3", "lion", "adamw,lr=fast", "adamw,lr=0"])
def test_a_setting_that_does_not_exist_is_refused(text):
    with pytest.raises(RequestError):
        Optimizer.parse(text)


@pytest.mark.long
def test_a_step_without_gradients_is_refused(demo, tmp_path):
    with pytest.raises(RequestError, match="needs gradients"):
        stepped(demo, tmp_path / "out", backward=False, micros=None)

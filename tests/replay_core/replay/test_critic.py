"""Critics: values in place of log-probabilities, held to the recorded ones, and PPO's value loss with its gradient."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForTokenClassification

from replay_core.errors import ModelError, RequestError
from replay_core.pages import array
from replay_core.recorder import Recorder
from tests.replay_core.replay.conftest import VOCABULARY, small_batch
from tests.replay_core.replay.test_run import run_of


def critic() -> LlamaForTokenClassification:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.2, num_labels=1,
    )  # fmt: skip
    return LlamaForTokenClassification(config).eval()


@pytest.fixture(scope="module")
def recorded_critic(tmp_path_factory):
    """(dump, model directory): values as PPO trainers record them, [B, S-1]; index t is about token t + 1."""
    path = tmp_path_factory.mktemp("critic")
    model, batch = critic(), small_batch()
    model.save_pretrained(path / "model")
    ids, mask = torch.from_numpy(batch.ids_BS), torch.from_numpy(batch.valid_BS.astype(int))
    with torch.no_grad():
        values_BS = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clip(0)).logits[..., 0]
    returns_BS = values_BS + torch.randn(values_BS.shape, generator=torch.Generator().manual_seed(1))
    with Recorder(path / "dump").step(0, role="critic") as record:
        record(
            "forward_data", micro=0, input_ids=ids, attention_mask=mask,
            response_mask=torch.from_numpy(batch.response_BS), values=values_BS[:, :-1], returns=returns_BS[:, :-1],
        )  # fmt: skip
    return path / "dump", path / "model"


def plan(recorded_critic, **more):
    dump, model = recorded_critic
    return {"dump": str(dump), "model": str(model), "role": "critic", "capture": "none", **more}


def test_a_critics_values_are_what_was_recorded_in_every_arrangement(ask, recorded_critic):
    doc = ask("packing=on", plan=plan(recorded_critic))
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]
    for cell in doc["cells"]:
        (held,) = cell["recorded"]
        assert (held["name"], held["verdict"] in ("SAME", "CLOSE")) == ("values", True)
        assert held["max_abs"] < 1e-5
    assert doc["cells"][0]["segments"] is None or "values" in str(doc["recording"])


@pytest.mark.long
def test_a_leak_is_seen_in_a_critic_too(ask, recorded_critic):
    doc = ask("packing=on block_mask=off", plan=plan(recorded_critic))
    assert doc["cells"][-1]["agreement"]["agrees"] is False
    assert doc["cells"][-1]["cause"]["kind"] == "other_samples"


@pytest.mark.parametrize("reduction", ["roll", "areal", "openrlhf"])
def test_the_value_loss_and_its_gradient_are_the_frameworks(ask, recorded_critic, reduction):
    loss = f"value,value_clip=0.2,reduction={reduction}"
    doc = ask("", plan=plan(recorded_critic, backward=True, loss=loss))
    cell = doc["cells"][-1]
    # Written out here, from PPO's definition: on-policy values, so that nothing is clipped.
    model, batch = critic(), small_batch()
    ids, mask = torch.from_numpy(batch.ids_BS), torch.from_numpy(batch.valid_BS.astype(int))
    values_BT = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clip(0)).logits[:, :-1, 0]
    noise_BT = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))[:, :-1]
    counts_BT = torch.from_numpy((batch.response_BS[:, 1:] & batch.valid_BS[:, :-1]).astype("float32"))
    error_BT = (values_BT - (values_BT.detach() + noise_BT)) ** 2 * counts_BT
    by_row_B = error_BT.sum(-1) / counts_BT.sum(-1)
    expected = 0.5 * (by_row_B.mean() if reduction == "roll" else error_BT.sum() / counts_BT.sum())
    assert cell["loss"]["micros"][0]["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    expected.backward()
    record = run_of(cell).select(stage="gradient")[0]
    gradient = array(record.get("grad.score.weight"))
    assert gradient == pytest.approx(model.score.weight.grad.numpy(), rel=1e-4, abs=1e-6)


def test_a_head_under_anothers_name_is_found(ask, recorded_critic, tmp_path):
    from safetensors.torch import save_file

    model = critic()
    weights = {name.replace("score.", "v_head.summary."): value for name, value in model.state_dict().items()}
    model.config.save_pretrained(tmp_path / "trl")
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "trl" / "model.safetensors")
    doc = ask("", plan=plan(recorded_critic, model=str(tmp_path / "trl")))
    assert doc["cells"][0]["recorded"][0]["max_abs"] < 1e-5


def test_an_actor_is_no_critic(ask, recorded_critic, recorded):
    checkpoint = next(path for path in recorded.rglob("config.json")).parent
    with pytest.raises(ModelError) as refused:
        ask("", plan=plan(recorded_critic, model=str(checkpoint)))
    assert "score.weight" in refused.value.expected


def test_a_random_critic_shows_structure_bugs(ask, recorded_critic):
    doc = ask("packing=on", plan=plan(recorded_critic, model="random:qwen2-tiny"))
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]


def test_a_critics_record_is_replayed_as_one_unasked(ask, recorded_critic):
    doc = ask("", plan=plan(recorded_critic, role=None))
    assert doc["plan"]["role"] == "critic"
    (held,) = doc["cells"][0]["recorded"]
    assert (held["name"], held["verdict"] in ("SAME", "CLOSE")) == ("values", True)


def test_a_critic_without_returns_has_no_loss(ask, recorded):
    with pytest.raises(RequestError, match="no returns"):
        ask("", plan={"role": "critic", "model": "random:llama-tiny", "backward": True})


def test_a_critic_without_records_of_its_own_sees_the_actors_batch_and_it_is_said(ask):
    doc = ask("", plan={"role": "critic", "model": "random:llama-tiny", "capture": "none"})
    assert any("run on the actor's batch" in note for note in doc["notes"])

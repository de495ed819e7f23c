from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.demo.policy import build_policy
from replay_core.dumps import open_run
from replay_core.errors import RequestError
from replay_core.recorder import Calls, Recorder


@pytest.fixture(scope="module")
def policy() -> Any:
    return build_policy(0)


IDS_BS = torch.arange(6).reshape(2, 3)


def loaded(path: Path | None) -> dict[str, Any]:
    assert path is not None
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def fields(directory: Path, stage: str) -> list[str]:
    (record,) = [record for record in open_run(directory).records if record.key.stage == stage]
    return [ref.name for ref in record.tensors()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_outputs_of_modules_that_match_are_caught_in_call_order(
    asynchronous: bool, policy: Any, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path, asynchronous=asynchronous)
    with recorder.step(0) as record, record.modules(policy, r"layers\.0\.(self_attn|mlp)$", micro=1, inputs=True):
        policy(input_ids=IDS_BS)
    recorder.close()
    names = fields(tmp_path, "modules")
    assert [name for name in names if ".output" in name] == [
        "model.layers.0.self_attn.output.0", "model.layers.0.mlp.output",
    ]  # fmt: skip
    assert "model.layers.0.self_attn.inputs.hidden_states" in names
    assert not any(module._forward_hooks for module in policy.modules())


def test_a_module_called_twice_keeps_its_calls_apart_and_inplace_changes_out(tmp_path: Path) -> None:
    inner = torch.nn.Identity()
    model = torch.nn.Sequential(inner)
    with Recorder(tmp_path).step(0) as record, record.modules(model, micro=0):
        values = torch.zeros(2)
        model(values)
        values += 1
        model(values)
    content = loaded(tmp_path / "modules" / "step_000000_rank0_micro0.pt")
    assert content["0.output"].tolist() == [0, 0]
    assert content["0[1].output"].tolist() == [1, 1]


def test_a_pattern_that_matches_nothing_is_refused(policy: Any, tmp_path: Path) -> None:
    with Recorder(tmp_path, target_param_pattern="nowhere").step(0) as record:
        with pytest.raises(RequestError, match="chooses no module"), record.modules(policy, "nowhere"):
            pass
        with pytest.raises(RequestError, match="chooses no parameter"):
            record.params(policy)


def test_a_pattern_that_is_none_is_refused_by_name(policy: Any, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with recorder.step(0) as record:
        with pytest.raises(RequestError, match="modules") as refused, record.modules(policy, "layers.("):
            pass
        assert "layers.(" in str(refused.value)
    with pytest.raises(RequestError, match="outputs"):
        Calls(recorder, policy, outputs="(")


def test_parameters_and_gradients_by_name(policy: Any, tmp_path: Path) -> None:
    policy.zero_grad()
    policy(input_ids=IDS_BS, labels=IDS_BS).loss.backward()
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = dict(policy.named_parameters())
    with Recorder(tmp_path, target_param_pattern=r"layers\.0\.self_attn\.q_proj\.weight").step(0) as record:
        parameter = loaded(record.params(policy))
        gradient = loaded(record.gradients(policy, grad_norm=1.5))
    assert torch.equal(parameter[f"param.{name}"], weights[name])
    assert torch.equal(gradient[f"grad.{name}"], weights[name].grad)
    assert gradient["grad_norm"] == 1.5
    assert len(gradient) == 5


def test_gradients_and_parameters_have_an_epoch_and_a_mini_batch_as_other_records_have(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    with Recorder(tmp_path).step(0) as record:
        record.gradients(model, micro=1, epoch=2, minibatch=0, grad_norm=1.0)
        record.params(model, micro=1, epoch=2, minibatch=0, role="critic")
    keys = [(one.key.stage, one.key.role, one.key.epoch, one.key.minibatch) for one in open_run(tmp_path).records]
    assert sorted(keys) == [("gradient", "actor", 2, 0), ("param", "critic", 2, 0)]


def test_gradients_are_caught_as_they_accumulate(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    with Recorder(tmp_path).step(0) as record:
        for micro in range(3):
            with record.accumulating(model, micro=micro, epoch=0):
                model(torch.ones(1, 3)).sum().backward()
            # What a trainer does to the gradient next is not what the backward left.
            model.weight.grad.add_(100)  # type: ignore[union-attr]
    found = [loaded(tmp_path / "gradient" / f"step_000000_rank0_micro{m}.pt")["grad.weight"][0, 0] for m in range(3)]
    assert found == [1, 102, 203]


def test_every_call_of_a_model_is_recorded_by_argument_name(policy: Any, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    calls = Calls(recorder, policy, outputs="logits")
    policy(IDS_BS)
    for step in range(2):
        with recorder.step(step):
            policy(IDS_BS, torch.ones_like(IDS_BS))
            policy(input_ids=IDS_BS, use_cache=False)
    calls.remove()
    policy(IDS_BS)
    assert calls.outside == 1
    assert sorted(p.name for p in (tmp_path / "batch_inputs").iterdir()) == [
        f"step_00000{step}_rank0_micro{micro}.pt" for step in range(2) for micro in range(2)
    ]
    first = loaded(tmp_path / "batch_inputs" / "step_000000_rank0_micro0.pt")
    assert list(first)[3:] == ["input_ids", "attention_mask"]
    second = loaded(tmp_path / "batch_inputs" / "step_000001_rank0_micro1.pt")
    assert second["use_cache"] is False
    assert loaded(tmp_path / "modules" / "step_000000_rank0_micro0.pt")["forward.output.logits"].shape == (2, 3, 12 + 1)


def test_steps_that_are_left_out_hang_no_hook_on_the_model(policy: Any, tmp_path: Path) -> None:
    with Recorder(tmp_path, dump_every_n_steps=2).step(1) as record, record.modules(policy):
        assert not any(module._forward_hooks for module in policy.modules())


def test_the_forecast_of_parameters_and_modules_is_close_to_what_is_written(policy: Any, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, stages={"param", "modules", "batch_inputs"})
    ids_BS = torch.randint(0, 10, (16, 40))
    forecast = recorder.forecast(policy, rows=16, tokens=40)
    assert not list(tmp_path.rglob("step_*")), "nothing is written by looking ahead"
    with recorder.step(0) as record:
        record.params(policy)
        record("batch_inputs", input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS), micro=0)
        with record.modules(policy, micro=0):
            policy(input_ids=ids_BS)
    sizes = {stage: sum(p.stat().st_size for p in (tmp_path / stage).iterdir()) for stage in ("param", "modules")}
    for stage, size in sizes.items():
        assert forecast.by_stage[stage] == pytest.approx(size, rel=0.35), stage
    assert forecast.step_bytes == sum(forecast.by_stage.values())
    assert forecast.steps_that_fit is not None
    assert "room for" in str(forecast)
    assert Recorder(tmp_path / "other").forecast().unknown


def test_the_index_of_a_caught_record_describes_every_output(policy: Any, tmp_path: Path) -> None:
    with Recorder(tmp_path, level="hash").step(0) as record, record.modules(policy, "norm", micro=0):
        policy(input_ids=IDS_BS)
    line = json.loads((tmp_path / "index_rank0.jsonl").read_text())
    assert line["file"] is None
    assert {field["name"] for field in line["fields"]} >= {"model.norm.output", "model.layers.1.input_layernorm.output"}

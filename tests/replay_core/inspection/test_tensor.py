"""A tensor as the screen looks at it, on genuine dumps: tokens side by side, slices, places, streamed comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from replay_core import desk, workbench
from replay_core.documents.reopening import SCHEMA_PATH
from replay_core.errors import RequestError
from replay_core.jobs import Event, Job, Partial
from tests.builders import there, write_dump, write_pair
from tests.fixtures import FIXTURES

SCHEMA = jsonschema.Draft202012Validator(json.loads(SCHEMA_PATH.read_text(encoding="utf-8")))


def _named(path: Path, name: str, stage: str | None = None) -> Any:
    for record in workbench.open_dump(path)["records"]:
        if stage in (None, record["key"]["stage"]):
            return {"path": str(path), "key": record["key"], "name": name}
    raise AssertionError(f"{path} has no record of {stage}")


def test_verl_shows_rollout_and_trainer_logprobs_beside_each_token() -> None:
    path = FIXTURES / "verl"
    named: Any = next(
        {"path": str(path), "key": record["key"], "name": "input_ids"}
        for record in workbench.open_dump(path)["records"]
        if record["key"]["stage"] == "batch_inputs"
    )
    document = workbench.inspect(named, tokens=True)
    SCHEMA.validate(json.loads(json.dumps(document)))
    tokens = there(document["tokens"])
    names = [column["name"] for column in tokens["columns"]]
    assert {"rollout_logprobs", "old_logprobs"} <= set(names[:4])
    assert names.index("rollout_logprobs") < names.index("response_mask")
    assert all(len(column["values"]) == len(tokens["ids"]) for column in tokens["columns"])


def test_a_pair_is_looked_at_where_the_caller_says_without_judging_it_again(tmp_path: Path) -> None:
    x = torch.zeros(4, 8)
    y = x.clone()
    y[2, 5] = 1
    a, b = write_pair(tmp_path, {"modules": {"x": x}}, {"modules": {"x": y}})
    document = workbench.inspect(_named(a, "x"), _named(b, "x"), at_a=[2, 5], at_b=[2, 5], judge=False, count=4)
    SCHEMA.validate(json.loads(json.dumps(document)))
    assert document["verdict"] is None
    assert [2, 5] in document["window"]["index"]
    assert there(document["difference"])["histogram"]["bins"] == [{"exponent": 0, "count": 1}]


def test_a_slice_of_any_rank_is_shown_of_both_sides(tmp_path: Path) -> None:
    x = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    a, b = write_pair(tmp_path, {"modules": {"x": x}}, {"modules": {"x": x + 1}})
    document = workbench.inspect(_named(a, "x"), _named(b, "x"), part="1,:2,3,1:3", judge=False)
    assert there(document["part"])["values"] == x[1, :2, 3, 1:3].reshape(-1).tolist()
    assert there(document["part_b"])["values"] == (x + 1)[1, :2, 3, 1:3].reshape(-1).tolist()
    with pytest.raises(RequestError, match="more axes"):
        workbench.inspect(_named(a, "x"), part="0,0,0,0,0")


def test_a_streamed_comparison_holds_every_entry_once_in_order(tmp_path: Path) -> None:
    fields = {f"layers.{number}.output": torch.randn(3, 4) for number in range(450)}
    changed = {**fields, "layers.200.output": fields["layers.200.output"] + 1}
    a, b = write_pair(tmp_path, {"modules": fields}, {"modules": changed})
    parts: list[Any] = []

    def keep(event: Event) -> None:
        if isinstance(event, Partial):
            parts.append(event.document)

    params = {"a": str(a), "b": str(b)}
    streamed = desk.perform(Job("compare", {**params, "stream": True}), keep)
    whole = desk.perform(Job("compare", params))
    assert streamed["tensors"] == []
    assert [entry for part in parts for entry in part.get("tensors", [])] == whole["tensors"]
    assert [entry["name"] for part in parts for entry in part.get("rows", [])] == [e["name"] for e in whole["tensors"]]
    assert max(len(part.get("tensors", [])) for part in parts) <= 200


def test_two_steps_of_one_run_are_compared(tmp_path: Path) -> None:
    from replay_core.recorder import Recorder

    recorder = Recorder(tmp_path / "run")
    for step in (0, 1):
        with recorder.step(step) as record:
            record("forward_data", {"log_probs": torch.full((2, 3), float(step)), "same": torch.ones(3)}, micro=0)
    path = str(tmp_path / "run")
    document = desk.perform(Job("compare", {"a": path, "b": path, "step": 0, "scope_b": {"step": 1}}))
    verdicts = {entry["name"]: entry["verdict"] for entry in document["tensors"]}
    assert verdicts["same"] == "SAME"
    assert "DIFF" in verdicts.values()


def test_statistics_of_a_small_tensor_are_not_sampled(tmp_path: Path) -> None:
    path = write_dump(tmp_path, {"modules": {"x": torch.ones(3)}})
    document = workbench.inspect(_named(path, "x"))
    assert document["a"]["sampled"] is None
    assert there(there(document["a"])["stats"])["numel"] == 3


def test_a_gradient_stands_beside_its_parameter_and_the_other_way_round(tmp_path: Path) -> None:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    dump = write_dump(
        tmp_path / "run",
        {
            "param": {"param.layers.0.w": weight, "param.layers.1.w": weight + 1},
            "gradient": {"grad.layers.1.w": -weight, "grad.layers.0.w": weight / 10},
        },
    )
    document = workbench.inspect(_named(dump, "param.layers.0.w", "param"), at=[1, 2], count=2)
    SCHEMA.validate(json.loads(json.dumps(document)))
    beside = there(there(document["a"])["counterpart"])
    assert (beside["kind"], beside["name"]) == ("gradient", "grad.layers.0.w")
    assert beside["values"] == pytest.approx([float(weight[tuple(at)]) / 10 for at in document["window"]["index"]])
    assert beside["ratio"] == pytest.approx(0.1)
    other = there(there(workbench.inspect(_named(dump, "grad.layers.1.w", "gradient"))["a"])["counterpart"])
    assert (other["kind"], other["name"]) == ("param", "param.layers.1.w")


def test_a_parameter_whose_gradient_has_another_shape_stands_alone(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "run", {"param": {"param.w": torch.ones(3)}, "gradient": {"grad.w": torch.ones(4)}})
    assert workbench.inspect(_named(dump, "param.w", "param"))["a"]["counterpart"] is None

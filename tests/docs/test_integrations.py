"""The code in docs/integrations that says `run` does run."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replay_core.dumps import open_run
from replay_core.rollouts import RolloutReplay
from tests.docs.signatures import SIGNATURES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "integrations"


def code(name: str) -> str:
    blocks = re.findall(r"```python run\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    return "\n".join(blocks)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dumps"),
    [
        (
            "pytorch.md",
            {"grpo-dump": {("trajectory", "actor"), ("gradient", "actor")}, "ppo-dump": {("loss", "critic")}},
        ),
        ("openrlhf.md", {"openrlhf-dump": {("batch_inputs", "actor"), ("modules", "actor")}}),
    ],
)
def test_the_code_of_a_page_records_what_it_says(
    name: str, dumps: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code(name), name, "exec"), {"__name__": "integration"})
    for dump, stages in dumps.items():
        run = open_run(tmp_path / dump)
        assert not run.problems
        assert stages <= {(record.key.stage, record.key.role) for record in run.records}
        for record in run.records:
            assert record.tensors()


IDS = torch.arange(6).reshape(2, 3)


class PPOTrainer:
    """verl's default trainer, as 0.9.1 declares it; its fields lie in TransferQueue."""

    global_steps = 7

    def _update_actor(self, batch: Any, metrics: Any) -> str:
        return "done"


class NonTensorStack(dict[str, Any]):
    """tensordict's column of texts: a mapping without a key, and a dtype that is None."""

    dtype = None

    def __init__(self, values: list[str]) -> None:
        self._values = values

    def tolist(self) -> list[str]:
        return self._values


def kv_batch_get(keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> dict[str, Any]:
    assert (keys, partition_id) == (["a_0_0", "a_1_0"], "train")
    rows = torch.nested.nested_tensor([[1, 2, 3], [4, 5]], dtype=torch.int64, layout=torch.jagged)
    return {"input_ids": rows, "uid": NonTensorStack(["a", "a"])}


class Trainer:
    """Methods as the frameworks declare them."""

    global_steps = 7
    engine = SimpleNamespace(get_version=lambda: 7)

    def _update_actor(self, batch: Any) -> str:
        return "done"

    def train_step(self, data: Any) -> str:
        return "done"

    def compute_advantages(self, data: Any) -> str:
        return "done"

    def __call__(self, next_token_logprobs: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> str:
        return "done"

    train_step.dispatch = "kept"  # type: ignore[attr-defined]  # as Ray's decorators do


def _data(**fields: Any) -> Any:
    return SimpleNamespace(batch=fields, non_tensor_batch={"uid": ["a", "b"]}, meta_info={"global_step": 7})


#: framework -> how it calls what the page hooks, and the step it is recorded as.
CALLED: dict[str, tuple[Callable[[dict[str, Any]], Any], int]] = {
    "verl": (lambda _: Trainer()._update_actor(_data(input_ids=IDS, absent=None)), 7),
    "verl, `trainer.use_v1` (default)": (
        lambda _: PPOTrainer()._update_actor(SimpleNamespace(keys=["a_0_0", "a_1_0"], partition_id="train"), {}),
        7,
    ),
    "slime": (lambda names: names["postprocess"](SimpleNamespace(), 7, {"input_ids": [IDS[0], IDS[1, :2]]}), 7),
    "SkyRL": (
        lambda names: names["Recording"]().on_step_end(
            None, SimpleNamespace(global_step=7, batch={"input_ids": IDS}), None
        ),
        7,
    ),
    "NeMo-RL": (lambda _: Trainer()(torch.ones(2, 3), {"input_ids": IDS}, 2, global_valid_toks=6), 0),
    "AReaL": (lambda _: Trainer().compute_advantages([{"input_ids": IDS}, {"input_ids": IDS + 1}]), 7),
    "ROLL": (lambda _: Trainer().train_step(_data(input_ids=IDS)), 7),
    "prime-rl": (lambda names: names["loss"](SimpleNamespace(input_ids=IDS), scale=2), 0),
}


#: Those that hand over rows of different lengths.
ROWS = {"slime": (3, 2), "verl, `trainer.use_v1` (default)": (3, 2)}


#: A stand-in -> the repository or package, and the place in it, whose parameters it has.
STANDS_FOR: dict[str, tuple[Callable[..., Any], str, str]] = {
    "verl": (Trainer._update_actor, "verl", "RayPPOTrainer._update_actor"),
    "verl, v1": (PPOTrainer._update_actor, "verl", "PPOTrainer._update_actor"),
    "NeMo-RL": (Trainer.__call__, "NVIDIA-NeMo/RL", "ClippedPGLossFn.__call__"),
    "AReaL": (Trainer.compute_advantages, "areal-project/AReaL", "PPOActor.compute_advantages"),
    "ROLL": (Trainer.train_step, "alibaba/ROLL", "ActorWorker.train_step"),
}


@pytest.mark.parametrize("framework", STANDS_FOR)
def test_a_stand_in_takes_what_the_framework_declares(framework: str) -> None:
    """`make integrations` holds what is known of them to the frameworks' own sources."""
    method, where, name = STANDS_FOR[framework]
    (known,) = (places for places in SIGNATURES[where].values())
    (parameters,) = (given for place, given in known.items() if place.endswith(f"::{name}"))
    assert [*inspect.signature(method).parameters] == parameters


@pytest.mark.parametrize("framework", CALLED)
def test_a_one_line_hook_records_what_the_framework_hands_it(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stand-ins with the frameworks' signatures: the line itself is taken from the page."""
    monkeypatch.chdir(tmp_path)
    for name in ("_update_actor", "train_step", "compute_advantages", "__call__"):
        monkeypatch.setattr(Trainer, name, getattr(Trainer, name))
    names: dict[str, Any] = {"__name__": "integration", "TrainingCallback": object, "my_loss": lambda *_, **__: "done"}
    monkeypatch.setattr(PPOTrainer, "_update_actor", PPOTrainer._update_actor)
    monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace(kv_batch_get=kv_batch_get))
    names["PPOTrainer"] = PPOTrainer
    names |= dict.fromkeys(("RayPPOTrainer", "ActorWorker", "PPOActor", "ClippedPGLossFn"), Trainer)
    exec(compile(code("others.md"), "others.md", "exec"), names)
    page = (DOCS / "others.md").read_text(encoding="utf-8").splitlines()
    (row,) = [row for row in page if row.startswith(f"| {framework} |")]
    exec(next(words for words in row.split("`")[1::2] if re.search("record.*[(]", words)), names)

    call, step = CALLED[framework]
    assert call(names) in ("done", None)
    names["recorder"].close()
    assert not names["recorder"].lost
    records = open_run(tmp_path / "dump").records
    assert {record.key.step for record in records} == {step}
    assert len(records) == (2 if framework == "AReaL" else 1)
    refs = {ref.name: ref for ref in records[0].tensors()}
    assert refs.keys() == ({"input_ids", "uid"} if framework.startswith("verl") else {"input_ids"})
    assert (refs["input_ids"].dtype, refs["input_ids"].rows) == ("int64", ROWS.get(framework))
    assert Trainer.train_step.dispatch == "kept"  # type: ignore[attr-defined]
    if framework == "AReaL":
        (batch,) = RolloutReplay(tmp_path / "dump")
        assert torch.equal(batch["input_ids"], torch.cat([IDS, IDS + 1]))


def test_nexrls_configuration_is_recorded_by_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("omegaconf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(
        "debug: {enable_data_dump: true, dump_dir: nexrl-dump, dump_options: {loss: true}}"
    )
    names: dict[str, Any] = {"__name__": "integration"}
    exec(compile(code("others.md"), "others.md", "exec"), names)
    page = (DOCS / "others.md").read_text(encoding="utf-8")
    for words in re.findall(r"`([^`]+)`", page.partition("| NexRL |")[2].partition("|")[0]):
        exec(words, names)
    with names["recorder"].step(0) as record:
        record("loss", loss=1.0)
        assert record("param", norm=1.0) is None
    assert len(open_run(tmp_path / "nexrl-dump").records) == 1

"""An Adam step of a gradient that is all rounding goes either way: no difference, where the gradients agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core.compare import Comparison, Tolerances, compare_runs, rejudge
from replay_core.dumps import open_run
from replay_core.jobs import Partial
from replay_core.recorder import Recorder

OPTIMIZER = {"kind": "adamw", "lr": 5e-3, "eps": 1e-8}
#: Softmax does not see what all keys have in common: where they are hardly rotated, the gradient of a key's bias is
#: what rounding leaves of zero.
UNSEEN = "model.layers.0.self_attn.k_proj.bias"


def _stepped(folder: Path, *, alone: bool, optimizer: dict[str, Any] | None = OPTIMIZER, factor: float = 1.0) -> Path:
    """Gradients of four rows, together or one by one, and the weights after a step of AdamW."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, max_position_embeddings=32, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e10},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        ids = torch.randint(1, 64, (4, 12))
    for rows in ids.split(1) if alone else [ids]:
        (model(input_ids=rows, labels=rows).loss * 1000 * len(rows) / 4).backward()
    parameters = dict(model.named_parameters())
    gradients = {f"grad.{name}": one.grad.clone() for name, one in parameters.items() if one.grad is not None}
    torch.optim.AdamW(parameters.values(), lr=5e-3, weight_decay=0.0).step()
    if factor != 1.0:
        parameters["model.layers.0.mlp.up_proj.weight"].data.mul_(factor)
    flags = {} if optimizer is None else {"optimizer": optimizer}
    with Recorder(folder, flags={"dtype": "float32", **flags}) as recorder, recorder.step(0) as step:
        step("gradient", gradients)
        step("param", {f"param.{name}": one.detach() for name, one in parameters.items()})
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _stepped(tmp_path_factory.mktemp("together") / "dump", alone=False)


def _compared(a: Path, b: Path) -> Comparison:
    return compare_runs(open_run(a), open_run(b))


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _stepped(tmp_path_factory.mktemp("alone") / "dump", alone=True)


def _row(compared: Comparison, name: str) -> Any:
    return next(row for row in compared.tensors if row.name == f"param.{name.removeprefix('model.')}")


def test_a_step_of_a_gradient_that_is_noise_is_no_difference(together: Path, one_by_one: Path):
    compared = _compared(together, one_by_one)
    row = _row(compared, UNSEEN)
    assert row.figures.max_abs > 1e-5, "the step went another way"
    assert (row.verdict.value, compared.first) == ("CLOSE", None), row.reason
    assert "what rounding leaves of the gradient" in row.reason


def test_without_the_optimizer_it_is_one_and_another_weight_always_is(together: Path, tmp_path: Path):
    unsaid = _compared(
        _stepped(tmp_path / "a", alone=False, optimizer=None), _stepped(tmp_path / "b", alone=True, optimizer=None)
    )
    assert _row(unsaid, UNSEEN).verdict.value == "DIFF"
    wrong = _compared(together, _stepped(tmp_path / "c", alone=True, factor=1.002))
    assert wrong.first is not None
    assert wrong.first.name.endswith("up_proj.weight")


def test_what_is_told_while_it_compares_is_what_the_answer_says(together: Path, one_by_one: Path):
    told: list[tuple[str, str]] = []
    early: list[Any] = []
    compared = compare_runs(
        open_run(together),
        open_run(one_by_one),
        on_row=lambda row: told.append((row.name, row.verdict.value)),
        on_event=lambda event: early.append(event.document) if isinstance(event, Partial) else None,
    )
    assert dict(told) == {row.name: row.verdict.value for row in compared.tensors}
    assert (early, compared.around) == ([], None), "nothing diverges"


def test_judged_again_it_is_still_no_difference_and_bitwise_it_is(together: Path, one_by_one: Path):
    compared = _compared(together, one_by_one)
    row = _row(compared, UNSEEN)
    assert _row(rejudge(compared, Tolerances()), UNSEEN).verdict is row.verdict
    assert _row(rejudge(compared, Tolerances()), UNSEEN).reason == row.reason
    assert _row(rejudge(compared, Tolerances(), exact=True), UNSEEN).verdict.value == "DIFF"


HALF = {"sgd": 0.3, "adamw": 5e-3}


def _half(
    folder: Path, kind: str, *, halves: bool, fault: str = "", master: bool = False, are_before: bool = False
) -> Path:
    """Three steps of a bfloat16 model that say nothing of their optimizer; halves: the gradient is the mean of those of
    two halves of the batch, as two ranks make it. master: the optimizer keeps float32 copies. are_before: weights are
    recorded as their step begins.
    """
    config = LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, max_position_embeddings=32, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        batches = torch.randint(1, 96, (3, 4, 16))
    own = dict(model.named_parameters())
    kept = {name: one.detach().float().requires_grad_() for name, one in own.items()} if master else own
    rate = HALF[kind] * (2 if fault == "twice the rate" else 1)
    made = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind](kept.values(), lr=rate)
    with Recorder(folder) as recorder:
        for number, ids in enumerate(batches):
            total = {name: torch.zeros_like(one) for name, one in own.items()}
            parts = ids.split(2) if halves else [ids]
            for rows in parts:
                model.zero_grad()
                model(input_ids=rows, labels=rows).loss.backward()
                for name, one in own.items():
                    total[name] += one.grad / len(parts)
            before = {name: one.detach().clone() for name, one in kept.items()}
            held = {f"param.{name}": one.detach().clone() for name, one in own.items()}
            for name, one in kept.items():
                one.grad = total[name].to(one.dtype)
            made.step()
            if fault == "updated twice":
                made.step()
            for name, one in kept.items():
                if fault == "never updated" and "o_proj" in name:
                    one.data.copy_(before[name])
                if fault == "the other way" and "down_proj" in name:
                    one.data.copy_(2 * before[name] - one.data)
                own[name].data.copy_(one.data)
            with recorder.step(number) as step:
                step("gradient", {f"grad.{name}": one for name, one in total.items()})
                after = {f"param.{name}": one.detach() for name, one in own.items()}
                step("param", held if are_before else after)
    return folder


@pytest.mark.parametrize(("kind", "master"), [("sgd", False), ("sgd", True), ("adamw", False), ("adamw", True)])
def test_bfloat16_weights_are_as_far_apart_as_their_gradients_make_them(kind: str, master: bool, tmp_path: Path):
    whole = _half(tmp_path / "a", kind, halves=False, master=master)
    compared = _compared(whole, _half(tmp_path / "b", kind, halves=True, master=master))
    settled = [row for row in compared.tensors if row.context is not None and row.context.explained is not None]
    assert settled, "nothing tells what its gradient says from what it does not"
    assert compared.first is None, (compared.first.name, compared.first.reason)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_weights_recorded_as_their_step_begins_are_what_the_gradients_before_made(kind: str, tmp_path: Path):
    whole = _half(tmp_path / "a", kind, halves=False, are_before=True)
    compared = _compared(whole, _half(tmp_path / "b", kind, halves=True, are_before=True))
    assert compared.first is None, (compared.first.name, compared.first.reason)
    wrong = _compared(whole, _half(tmp_path / "c", kind, halves=True, are_before=True, fault="twice the rate"))
    steps = {row.key.step for row in wrong.tensors if row.verdict.diverges and row.name.startswith("param.")}
    assert steps == {1, 2}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("fault", "of"),
    [("twice the rate", ""), ("updated twice", ""), ("never updated", "o_proj"), ("the other way", "down_proj")],
)
def test_a_step_that_is_another_is_no_rounding(kind: str, fault: str, of: str, tmp_path: Path):
    whole = _half(tmp_path / "a", kind, halves=False)
    first = _compared(whole, _half(tmp_path / "b", kind, halves=True, fault=fault)).first
    assert first is not None
    assert (first.key.step, first.key.stage) == (0, "param")
    assert of in first.name

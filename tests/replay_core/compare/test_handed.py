"""What a stage of a pipeline was given, against what the one before put out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core import workbench
from replay_core.compare.handed import masks_otherwise
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.builders import there

IDS = torch.randint(1, 99, (4, 2, 6), generator=torch.Generator().manual_seed(1))
OUT = torch.randn(4, 2, 6, 8, generator=torch.Generator().manual_seed(2))


def run(
    folder: Path, handed: Callable[[int], Tensor], *, by_layers: bool = False,
    compute: Callable[[Tensor], Tensor] = lambda given: torch.tanh(given).cumsum(1),
) -> Path:  # fmt: skip
    """Two stages and four micro-batches; handed: what the second is given. by_layers: recorded as layers' own."""
    for micro in range(4):
        given = handed(micro)
        made = compute(given) + micro
        with Recorder(folder) as recorder, recorder.step(0, rank=0) as record:
            record("batch_inputs", {"input_ids": IDS[micro]}, micro=micro)
            name = "model.layers.0.output" if by_layers else "forward.output.hidden"
            record("modules", {name: OUT[micro]}, micro=micro)
        with Recorder(folder) as recorder, recorder.step(0, rank=1) as record:
            if by_layers:
                record("forward_data", {"input_ids": IDS[micro]}, micro=micro)
                fields = {"model.layers.1.inputs.0": given, "model.layers.1.output": made}
                record("modules", fields, micro=micro)
            else:
                record("batch_inputs", {"hidden_states": given}, micro=micro)
                record("modules", {"forward.output.logits": made}, micro=micro)
    return folder


WRONG: dict[str, tuple[Callable[[int], Tensor], str, str]] = {
    "the one before": (
        lambda micro: OUT[max(micro - 1, 0)], "other micro-batch", "1, 2 and 3 what rank 0 put out in the one before",
    ),
    "one of four": (
        lambda micro: OUT[0 if micro == 2 else micro], "other micro-batch",
        "micro-batch 2 what rank 0 put out in micro-batch 0",
    ),
    "times a factor": (lambda micro: 0.9 * OUT[micro], "handed on", "put out times 0.9"),
    "bfloat16": (lambda micro: OUT[micro].bfloat16().float(), "rounded", "put out rounded to bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("by_layers", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_what_was_handed_otherwise_is_told(case: str, by_layers: bool, tmp_path: Path) -> None:
    handed, kind, said = WRONG[case]
    a = run(tmp_path / "a", lambda micro: OUT[micro], by_layers=by_layers)
    b = run(tmp_path / "b", handed, by_layers=by_layers)
    fault = there(workbench.compare_dumps(a, b).get("parallel"))["faults"][0]
    assert fault["kind"] == kind
    assert 1 in fault["ranks"]
    # A layer's own input that is the other run's of the micro-batch before is told as that.
    assert said in fault["sentence"] or (
        by_layers and "what went into it was another micro-batch's" in fault["sentence"]
    )


def test_a_residual_alone_has_the_factor_of_what_was_handed_on(tmp_path: Path) -> None:
    """A norm takes the factor out again, so that the stage's output is off by a multiple of what it was given."""

    def layer(given: Tensor) -> Tensor:
        return given + torch.tanh(given / given.norm(dim=-1, keepdim=True)).cumsum(1)

    a = run(tmp_path / "a", lambda micro: OUT[micro], compute=layer)
    b = run(tmp_path / "b", lambda micro: 0.9 * OUT[micro], compute=layer)
    faults = there(workbench.compare_dumps(a, b).get("parallel"))["faults"]
    assert [(fault["kind"], fault["ranks"]) for fault in faults] == [("handed on", [0, 1])]


@pytest.mark.parametrize("by_layers", [False, True])
def test_another_stage_that_computes_otherwise_was_handed_what_it_should(by_layers: bool, tmp_path: Path) -> None:
    a = run(tmp_path / "a", lambda micro: OUT[micro], by_layers=by_layers)
    b = run(
        tmp_path / "b", lambda micro: OUT[micro], by_layers=by_layers, compute=lambda given: torch.sin(given).cumsum(1)
    )
    found = workbench.compare_dumps(a, b).get("parallel")
    assert not [one for one in (found or {"faults": []})["faults"] if one["kind"] in ("other micro-batch", "handed on")]


MASKS = torch.arange(6)[None, None] < torch.tensor([[6, 4], [5, 3], [6, 2], [4, 6]])[..., None]


@pytest.mark.parametrize(("turn", "told"), [(0, False), (1, True)])
def test_a_mask_of_another_micro_batch_is_told(turn: int, told: bool, tmp_path: Path) -> None:
    records = []
    for rank in (0, 1):
        for micro in range(4):
            with Recorder(tmp_path) as recorder, recorder.step(0, rank=rank) as record:
                own = {"input_ids": IDS[micro]} if not rank else {"hidden_states": OUT[micro]}
                mask = MASKS[(micro + rank * turn) % 4].long()
                record("batch_inputs", {**own, "attention_mask": mask}, micro=micro)
    records = open_run(tmp_path).records
    fault = masks_otherwise(records, 0, records[0].key.role)
    assert (fault and (fault.kind, fault.ranks)) == (("other mask", (1,)) if told else None)

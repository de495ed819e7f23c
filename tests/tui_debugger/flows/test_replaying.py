"""One answer whoever asks: the screen and `rldbg replay --json` on the same real cells, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.tui_debugger.driving import opened, rest, screen, until
from tui_debugger.answer import answer_of
from tui_debugger.app import RldbgApp
from tui_debugger.commands.replay import command
from tui_debugger.engine import ChildEngine

#: What a replay may take on a box that others use too: a bound, not a pause.
_LIMIT_S = 300
#: What differs from run to run, or says where it was written.
_OF_THIS_RUN = {"created", "is_warm", "time", "memory", "dump", "log", "room_mib", "baseline_dump", "cold_compile"}

#: name -> (options of the command, whether the two should agree with each row alone).
SINGLE = {
    "packed right": (["--packing"], True),
    "packed without its mask": (["--debug-no-block-mask"], False),
    "padded with another kernel": (["--attention", "eager"], True),
    "bf16, samples that see each other": (["--packing", "--dtype", "bf16", "--debug-fault", "foreign_key"], False),
    "random weights": (["--model", "random:llama-tiny", "--packing"], True),
}


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro-batch of step 9 beside weights of steps 0 and 10, with log-probabilities that neither computes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from replay_core.recorder import Recorder

    path = tmp_path_factory.mktemp("contract") / "dump"
    recorder = Recorder(path)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    for step in (0, 10):
        torch.manual_seed(step)
        recorder.checkpoint(step, LlamaForCausalLM(config))
    mask_BS = torch.tensor([[0] * 3 + [1] * 14 + [0] * 7, [1] * 24, [0] * 6 + [1] * 9 + [0] * 9])
    ids_BS = torch.randint(4, 127, (3, 24), generator=torch.Generator().manual_seed(1))
    with recorder.step(9) as record:
        fields = {"input_ids": ids_BS, "attention_mask": mask_BS, "response_mask": mask_BS * (torch.arange(24) > 11)}
        record("forward_data", micro=0, **fields, log_probs=torch.full((3, 24), -2.0), temperature=1.0)
    return path


@pytest.fixture
def engine() -> ChildEngine:
    return ChildEngine()


def compared(document: Any) -> Any:
    """The document without what belongs to one run of it."""
    if isinstance(document, dict):
        return {name: compared(value) for name, value in document.items() if name not in _OF_THIS_RUN}
    return [compared(one) for one in document] if isinstance(document, list) else document


def commanded(*arguments: object) -> tuple[dict[str, Any], int]:
    """The document that the command writes to standard output, and its exit code."""
    result = CliRunner().invoke(command, [*map(str, arguments), "--warm", "--json"], standalone_mode=False)
    assert result.exception is None, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document, int(result.return_value)


async def pressed(app: RldbgApp, pilot: Any, document: dict[str, Any]) -> dict[str, Any]:
    """The document that the screen shows once `r` has run the plan of another one."""
    state, plan = app.session.state, document["plan"]
    state.replay.flags, state.replay.model = dict(plan["flags"]), plan["model"]
    state.replay.document = None
    await pilot.press("r")
    await until(pilot, lambda: state.replay.document is not None and state.job.busy is None, "the replay", _LIMIT_S)
    await rest(app, pilot)
    return dict(state.replay.document or {})


@pytest.mark.slow
async def test_the_screen_shows_the_document_that_the_command_writes(dump: Path, engine: ChildEngine) -> None:
    async with opened(dump, engine=engine) as (app, pilot):
        for name, (options, agrees) in SINGLE.items():
            document, code = commanded(dump, *options)
            shown = await pressed(app, pilot, document)
            assert compared(shown) == compared(document), name
            assert document["cells"][-1]["agreement"]["agrees"] is agrees, name
            parts = document["cells"][0]["recorded"][0]["verdict"] == "DIFF"
            assert code == int(not agrees or parts), name
            assert (answer_of(app.session.state).token == "first") == bool(code), f"{name}\n{screen(app)}"
            weights = {cell["weights"]["model"].rsplit("/", 1)[-1] for cell in document["cells"]}
            assert weights == {"random:llama-tiny" if name == "random weights" else "step_000000"}, name


@pytest.mark.slow
async def test_the_matrix_of_the_screen_is_that_of_the_command(dump: Path, engine: ChildEngine) -> None:
    axes = ["packing=off,on", "block_mask=on,off"]
    document, code = commanded(dump, "--matrix", *axes)
    assert code == 1
    assert document["matrix"]["breaking"] == [{"packing": True, "block_mask": False}]
    async with opened(dump, engine=engine) as (app, pilot):
        app.session.state.replay.matrix.axes = " ".join(axes)
        await pilot.press("m", "r")
        await until(pilot, lambda: app.session.state.replay.matrix.document is not None, "the matrix", _LIMIT_S)
        assert compared(app.session.state.replay.matrix.document) == compared(document)
        await rest(app, pilot)


@pytest.mark.slow
async def test_a_flip_runs_what_was_asked_for_and_nothing_again(dump: Path, engine: ChildEngine) -> None:
    async with opened(dump, engine=engine) as (app, pilot):
        document, _ = commanded(dump, "--packing")
        first = await pressed(app, pilot, document)
        again = await pressed(app, pilot, document)
        before, after = ([cell["dump"] for cell in one["cells"]] for one in (first, again))
        assert before[:2] == after[:2], "the reference and the padded batch stand as they were"
        assert before[2] != after[2], "what was asked for is run"

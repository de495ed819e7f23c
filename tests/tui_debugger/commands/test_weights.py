"""`rldbg weights` as a shell sees it: what it prints, what it answers, what it says of input that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tui_debugger.cli import run


@pytest.fixture
def pushed(tmp_path: Path) -> tuple[Path, Path]:
    """A trainer's checkpoint and an engine's state dict that fuses it; its k is the trainer's v."""
    generator = torch.Generator().manual_seed(0)
    names = ("q_proj", "k_proj", "v_proj")
    q, k, v = (torch.randn(rows, 8, generator=generator) for rows in (8, 4, 4))
    trainer = tmp_path / "trainer"
    trainer.mkdir()
    sent = {f"model.layers.0.self_attn.{name}.weight": one for name, one in zip(names, (q, k, v), strict=True)}
    save_file({**sent, "model.norm.weight": torch.ones(8)}, trainer / "model.safetensors")
    (trainer / "config.json").write_text("{}")
    engine = tmp_path / "engine.pt"
    held = {"model.layers.0.self_attn.qkv_proj.weight": torch.cat([q, v, v]), "model.norm.weight": torch.ones(8)}
    torch.save({name: one.bfloat16() for name, one in held.items()}, engine)
    return trainer, engine


def test_the_answer_stands_on_top_and_names_the_part(
    pushed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["weights", *map(str, pushed)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("NOT ARRIVED  1 of 2 parameters of the engine do not hold what was sent: 1 swapped")
    assert "k_proj: holds the values of v_proj" in said
    assert "compared 2 of 2 parameters of the engine" in said


def test_text_and_document_say_the_same(pushed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["weights", *map(str, pushed), "--json"]) == 1
    doc = json.loads(capsys.readouterr().out)
    assert doc["counts"] == {"swapped": 1, "arrived": 1}
    run(["weights", *map(str, pushed)])
    assert doc["headline"] in capsys.readouterr().out


def test_what_is_allowed_or_not_asked_for_fails_nothing(pushed: tuple[Path, Path]) -> None:
    assert run(["weights", *map(str, pushed), "--allow", "swapped"]) == 0
    assert run(["weights", *map(str, pushed), "--name", "*norm*"]) == 0


def test_weights_of_another_model_are_no_answer(
    pushed: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pt"
    torch.save({"h.0.attn.c_attn.weight": torch.ones(3, 3)}, other)
    assert run(["weights", str(pushed[0]), str(other)]) == 3
    assert "no parameter of the engine could be held against the trainer's" in capsys.readouterr().err


def test_a_dump_without_parameters_is_said(
    pushed: tuple[Path, Path], small_dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["weights", str(small_dump), str(pushed[1])]) == 3
    assert "there are no parameters" in capsys.readouterr().err


def test_a_path_that_is_not_there_is_said(pushed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["weights", str(pushed[0]), "nowhere"]) in (2, 3)
    assert "nowhere" in capsys.readouterr().err

"""What a model reference means: the dump's own weights, a directory, and never code that a dump names."""

from pathlib import Path

import pytest

from replay_core.errors import ModelError
from replay_core.records import Run
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.references import resolve, step_of


@pytest.fixture
def weights(tmp_path):
    """A dump's folder with the weights of steps 3 and 10 in it."""
    for step in (3, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    return tmp_path


def resolved(folder: Path, models: dict, step: int, model: str = "checkpoint"):
    run = Run(path=folder, dialect="native", records=[], models=models)
    return resolve(ReplayPlan(str(folder), step, 0, 0, model, "out"), run)


def test_the_weights_of_the_step_itself_are_taken_without_a_word(weights):
    models = {3: "checkpoint-3", 10: "checkpoint-10"}
    assert resolved(weights, models, 10) == (str((weights / "checkpoint-10").resolve()), [])


def test_another_steps_weights_are_the_nearest_and_it_is_said(weights):
    reference, (note,) = resolved(weights, {3: "checkpoint-3", 10: "checkpoint-10"}, 8)
    assert reference.endswith("checkpoint-10")
    assert note.startswith("weights of step 10, batch of step 8")


def test_a_directory_whose_name_says_another_step_is_said_too(weights):
    assert resolved(weights, {}, 3, str(weights / "checkpoint-3"))[1] == []
    _, (note,) = resolved(weights, {}, 4, str(weights / "checkpoint-3"))
    assert note.startswith("weights of step 3, batch of step 4")


def test_code_named_by_a_dump_is_never_taken(weights):
    with pytest.raises(ModelError, match="code is only ever run when you name it") as refused:
        resolved(weights, {None: "factory:evil:f"}, 0)
    assert refused.value.hint == "--model factory:evil:f"
    assert resolved(weights, {}, 0, "factory:mine:f") == ("factory:mine:f", [])


def test_what_is_not_there_names_what_is_near(weights):
    with pytest.raises(ModelError) as refused:
        resolved(weights, {}, 0, str(weights / "chekpoint-3"))
    assert (refused.value.found, refused.value.hint) == ("nothing there", f"did you mean {weights / 'checkpoint-3'}?")
    (weights / "file").touch()
    with pytest.raises(ModelError) as refused:
        resolved(weights, {}, 0, str(weights / "file"))
    assert refused.value.found == "a file"


def test_weights_that_went_away_are_said_to_be_the_dumps_own(weights):
    with pytest.raises(ModelError, match="the weights the dump notes are not on this machine") as refused:
        resolved(weights, {0: "/gone/actor"}, 0)
    assert refused.value.file == "/gone/actor"
    assert "--model DIRECTORY" in refused.value.hint


def test_a_dump_without_weights_says_how_to_name_some(weights):
    with pytest.raises(ModelError, match="notes no weights") as refused:
        resolved(weights, {}, 0)
    assert "--model" in refused.value.hint


def test_a_step_is_read_off_common_names_only():
    assert step_of("/runs/global_step_40/actor") == 40
    assert step_of("/models/llama-3") is None

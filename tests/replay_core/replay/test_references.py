"""What a model reference means: the dump's own weights, a directory, and never code that a dump names."""

from pathlib import Path

import pytest

from replay_core.errors import ModelError
from replay_core.records import Run, weights_noted
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


def test_a_step_without_weights_takes_the_last_before_it_as_the_recorder_keeps_them(weights):
    models = {None: "checkpoint-3", 3: "checkpoint-3", 10: "checkpoint-10"}
    reference, (note,) = resolved(weights, models, 9)
    assert reference.endswith("checkpoint-3")
    assert note.startswith("weights of step 3, batch of step 9")
    assert resolved(weights, models, 12)[0].endswith("checkpoint-10")


def test_before_the_first_noted_weights_come_those_of_every_step_then_the_first(weights):
    assert resolved(weights, {None: "checkpoint-3", 10: "checkpoint-10"}, 4) == (str(weights / "checkpoint-3"), [])
    reference, (note,) = resolved(weights, {3: "checkpoint-3", 10: "checkpoint-10"}, 1)
    assert reference.endswith("checkpoint-3")
    assert note.startswith("weights of step 3, batch of step 1")


def test_what_a_document_says_of_weights_names_the_same_ones():
    assert weights_noted({"0": "a", "10": "b"}, 9) == (0, "a")
    assert weights_noted({"*": "every"}, 9) == (None, "every")
    assert weights_noted({}, 9) is None


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

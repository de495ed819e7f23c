"""What a large model is asked before its cells have run, how many passes that takes, and in which order."""

import pytest

from replay_core.dumps import open_run
from replay_core.jobs import Partial
from replay_core.replay import ahead, shrinking
from replay_core.replay.cell import BatchReplay
from tests.builders import Here

#: Calls of the model until what moves whom is first told, and of a whole command with --why; measured, and a little.
FIRST_WORD, IN_ALL = 36, 320


class Counting:
    """Runs jobs here, and notes what was asked, how many calls of the model had been made, and what was told."""

    def __init__(self, monkeypatch):
        self.jobs, self.told, self.calls, self.columns = [], [], 0, []
        plain = BatchReplay.forward

        def forward(cell, call, one):
            self.calls += 1
            self.columns.append(one.input_ids.size)
            return plain(cell, call, one)

        monkeypatch.setattr(BatchReplay, "forward", forward)

    def run(self, job, on_event=lambda _event: None):
        self.jobs.append((job.kind, bool(job.params.get("is_ahead")), job.params["plan"]["flags"]["packing"]))

        def heard(event):
            if isinstance(event, Partial) and "so_far" in event.document:
                self.told.append((len(self.jobs), self.calls, event.document))
            on_event(event)

        return Here().run(job, heard)


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(ahead, "LARGE", 0)
    monkeypatch.setattr(shrinking, "_SHARE", 1.0)
    return Counting(monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("mistake", ["block_mask=off", "fault=boundary"])
def test_samples_that_see_each_other_are_told_before_any_cell_has_run(ask, counting, mistake):
    doc = ask(f"packing=on {mistake} dtype=bfloat16", plan={"capture": "none"}, runner=counting, why=True)
    assert counting.jobs == [
        ("replay_why", True, True),
        ("replay_cell", False, False), ("replay_cell", False, False), ("replay_cell", False, True),
        ("replay_why", False, False),  # the padded batch, which agrees, when the pack has its answer
    ]  # fmt: skip
    job, calls, first = counting.told[0]
    assert (job, calls < FIRST_WORD) == (1, True), calls
    assert first["so_far"].startswith("changing sample 0 moves")
    cause = doc["cells"][-1]["cause"]
    assert cause["kind"] == "other_samples"
    assert cause["evidence"]["looked_at"]["rows"] == [0, 1, 2]
    assert counting.calls < IN_ALL, counting.calls
    assert [cell["cause"]["kind"] for cell in doc["cells"] if cell["part"] == "control"] == ["rounding"]


@pytest.mark.long
def test_a_large_pack_that_is_right_costs_a_look_ahead_and_is_asked_in_whole(ask, counting):
    doc = ask("packing=on dtype=bfloat16", plan={"capture": "none"}, runner=counting, why=True)
    assert not counting.told
    assert [job[:2] for job in counting.jobs].count(("replay_why", False)) == 2
    assert {cell["cause"]["kind"] for cell in doc["cells"] if cell["cause"]} == {"rounding"}


@pytest.mark.long
def test_what_a_few_rows_show_is_no_answer_where_others_are_further_off(ask, counting, monkeypatch):
    monkeypatch.setattr(ahead, "is_shown", lambda *_: False)
    ask("packing=on block_mask=off", plan={"capture": "none"}, runner=counting, why=True)
    assert [(kind, packed) for kind, _, packed in counting.jobs if kind == "replay_why"] == [
        ("replay_why", True), ("replay_why", True), ("replay_why", False),
    ]  # fmt: skip


@pytest.mark.long
def test_rows_are_shown_by_how_far_their_first_tokens_are_off(ask):
    doc = ask("packing=on block_mask=off", plan={"capture": "none"})
    baseline, cell = doc["cells"][doc["baseline"]], doc["cells"][-1]
    runs = open_run(baseline["dump"]), open_run(cell["dump"])

    def is_shown(rows, tokens):
        return ahead.is_shown(*runs, cell["final_hidden"], rows, tokens)

    assert is_shown([1], [4])
    assert is_shown([0, 2], [3, 3])
    assert not is_shown([0], [14]), "nothing comes before the first sample of a pack"
    assert not is_shown([1], [0]), "no token of it was looked at"
    assert not ahead.is_shown(runs[0], runs[0], cell["final_hidden"], [0, 1, 2], [9, 9, 9]), "nothing is off"


def test_a_model_is_as_large_as_the_files_of_its_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 400)
    (tmp_path / "tokenizer.json").write_bytes(b"\0" * 4000)
    assert ahead.parameters_in(str(tmp_path)) == 200
    assert ahead.parameters_in("random:llama-tiny") == 0
    assert ahead.is_large(124e6, 8 * 256)
    assert not ahead.is_large(1e6, 8 * 256)

"""The samples of a step: texts, figures and tokens are those that were recorded, in the order asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core import pages, workbench
from replay_core.dumps import open_run
from replay_core.errors import DumpError, RequestError, SelectionError
from tests.builders import write_dump
from tests.fixtures import FIXTURES

SLIME = FIXTURES / "slime"
TEMPERED = FIXTURES / "faults" / "temperature_mismatch"


def test_a_sample_is_what_was_recorded_of_it():
    document = workbench.samples(SLIME)
    assert (document["total"], document["groups"], len(document["samples"])) == (16, 4, 16)
    first = document["samples"][0]
    assert first["prompt"] is not None
    assert "What is 49 plus 97?" in first["prompt"]
    assert (first["tokens"], first["truncated"]) == (20, True)
    assert first["reward"] == pytest.approx(0.45)


def test_the_gap_of_a_sample_and_of_its_tokens_are_those_of_the_recorded_log_probabilities():
    document = workbench.samples(TEMPERED, shown=(5,), most=1)
    record = next(one for one in open_run(TEMPERED).records if one.path.name == "batch.dp")
    fields = {ref.name: pages.array(ref) for ref in record.tensors() if ref.shape and not ref.is_text}
    mask = fields["response_mask"][5] != 0
    delta = (fields["old_log_probs"] - fields["rollout_log_probs"])[5][mask]
    (entry,) = document["tokens"]
    columns = {column["name"]: column["values"] for column in entry["columns"]}
    shown = columns["delta_logprob"][entry["begin"] : entry["begin"] + delta.size]
    assert np.allclose(np.array(shown, dtype=float), delta, atol=1e-6)
    every = workbench.samples(TEMPERED)
    assert every["samples"][5]["mismatch"] == pytest.approx(float(np.abs(delta).mean()), abs=1e-6)
    # The worst token of the step is the worst of all samples.
    deltas = np.abs(np.where(fields["response_mask"] != 0, fields["old_log_probs"] - fields["rollout_log_probs"], 0))
    worst = document["worst"][0]
    assert abs(float(worst["value"])) == pytest.approx(float(deltas.max()), abs=1e-6)
    assert worst["sample"] == int(deltas.max(1).argmax())


@pytest.mark.parametrize(
    ("by", "name", "sign"), [("reward", "reward", 1), ("mismatch", "mismatch", -1), ("length", "tokens", -1)]
)
def test_samples_come_in_the_order_asked_for(by: Any, name: str, sign: int) -> None:
    listed: list[Any] = [*workbench.samples(SLIME, by=by)["samples"]]
    values = [sign * one[name] for one in listed]
    assert values == sorted(values)
    assert len(set(values)) > 2
    few = workbench.samples(SLIME, by=by, most=3)
    assert [one["sample"] for one in few["samples"]] == [one["sample"] for one in listed[:3]]
    assert few["left_out"] == 13


def test_only_samples_that_hold_the_text_are_listed():
    found = workbench.samples(SLIME, search="ANSWER answer")
    assert [one["sample"] for one in found["samples"]] == [3]
    assert "no sample holds 'nowhere'" in workbench.samples(SLIME, search="nowhere")["notes"]


def test_texts_alone_are_samples_too():
    document = workbench.samples(FIXTURES / "verl/rollout_data_dir")
    assert document["total"] == 16
    assert {one["tokens"] for one in document["samples"]} == {None}
    assert all(one["prompt"] and one["response"] is not None for one in document["samples"])
    (entry,) = document["tokens"]
    assert (entry["ids"], bool(entry["texts"])) == ([], True)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="there is no sample 99"):
        workbench.samples(SLIME, shown=(99,))
    with pytest.raises(RequestError, match="by clipped"):
        workbench.samples(SLIME, by="clipped")
    with pytest.raises(RequestError, match="no text to search"):
        workbench.samples(TEMPERED, search="x")
    with pytest.raises(DumpError, match="no record holds samples"):
        workbench.samples(write_dump(tmp_path, {"loss": {"loss": 1.0}}))


def test_turns_are_those_of_the_recorded_messages_with_their_tools():
    (entry,) = workbench.samples(FIXTURES / "miles/trajectory")["tokens"]
    roles = [turn["role"] for turn in entry["texts"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert 'calls lookup({"query": "answer"})' in entry["texts"][2]["text"]
    assert entry["texts"][3]["text"] == '{"result": 42}'
    assert workbench.samples(FIXTURES / "miles/trajectory", search="lookup tool")["total"] == 2


def test_a_prompt_that_ends_on_the_mark_of_the_answer_gives_its_role_to_the_answer():
    (entry,) = workbench.samples(SLIME)["tokens"]
    assert [(turn["role"], turn["text"][:9]) for turn in entry["texts"]] == [
        ("user", "What is 4"),
        ("assistant", entry["texts"][1]["text"][:9]),
    ]
    (swift,) = workbench.samples(FIXTURES / "ms_swift/grpo")["tokens"]
    assert [tuple(turn.values()) for turn in swift["texts"]] == [("user", "1+1="), ("response", "2")]


def test_the_marks_in_the_decoded_text_say_whose_turn_a_token_is():
    (entry,) = workbench.samples(FIXTURES / "skyrl", tokenizer=FIXTURES / "trl/tiny_qwen2")["tokens"]
    assert entry["pieces"] is not None
    for turn in entry["turns"]:
        assert "".join(entry["pieces"][turn["begin"] : turn["end"]]).strip()
    assert [(turn["role"], turn["counted"]) for turn in entry["turns"]][-1] == ("assistant", 20)
    answer = entry["turns"][-1]
    assert answer["begin"] < entry["begin"] < answer["end"] == len(entry["ids"]), "it begins with its mark"


def test_without_texts_the_mask_says_what_the_tools_answered(tmp_path: Path) -> None:
    mask = np.array([[1, 1, 0, 0, 1, 1]])
    ids = np.arange(9)[None]
    prompts = {"prompts": ids[:, :3], "responses": ids[:, 3:], "input_ids": ids, "response_mask": mask}
    (entry,) = workbench.samples(write_dump(tmp_path, {"rollout": prompts}))["tokens"]
    assert [(one["role"], one["begin"], one["end"], one["counted"]) for one in entry["turns"]] == [
        ("prompt", 0, 3, 0), ("response", 3, 5, 2), ("environment", 5, 7, 0), ("response", 7, 9, 2),
    ]  # fmt: skip

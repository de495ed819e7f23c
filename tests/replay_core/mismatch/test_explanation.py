"""Why engine and trainer disagree, told of genuine files and of what is wrong with them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core import workbench
from replay_core.errors import JobCancelledError, ModelError, RequestError, SelectionError
from replay_core.jobs import LogLine
from tests.builders import write_dump
from tests.fixtures import FIXTURES

#: Genuine files with both sides' log-probabilities.
BOTH = (
    "verl/train_batch_step1.dp", "slime", "skyrl", "nemo_rl", "prime_rl/token_exports",
    "faults/healthy/batch.pt", "miles",
)  # fmt: skip
#: And those with one side or none.
ONE = (
    "openrlhf", "roll", "open_instruct", "nexrl/self_hosted_fp32", "grpo_notes", "verl/rollout_data_dir", "msprobe/a",
    "sglang_dumper/baseline_sdpa_fp32", "trl/tiny_qwen2",
    "prime_rl/rollouts", "areal/single_controller_rollout",
)  # fmt: skip


def answer(path: Path, **asked: Any) -> dict[str, Any]:
    doc: dict[str, Any] = dict(workbench.mismatch(path, **asked))
    return doc


@pytest.mark.parametrize("name", BOTH)
def test_a_genuine_dump_with_both_sides_gets_an_answer(name: str) -> None:
    doc = answer(FIXTURES / name)
    assert doc["lacks"] == [], doc["lacks"]
    assert doc["gap"]["tokens"] >= 8
    assert doc["rollout"]
    assert doc["trainer"]
    assert doc["agrees"] is not None


@pytest.mark.parametrize("name", ONE)
def test_a_genuine_dump_of_one_side_says_what_it_lacks(name: str) -> None:
    doc = answer(FIXTURES / name)
    assert doc["agrees"] is None
    assert doc["gap"] is None
    assert doc["lacks"]
    assert doc["headline"].startswith("the dump lacks ")


def test_another_temperature_is_told_from_the_numbers_alone() -> None:
    doc = answer(FIXTURES / "faults/temperature_mismatch/batch.pt")
    named = [one for one in doc["causes"] if one["named"]]
    assert [one["family"] for one in named] == ["temperature"]
    assert doc["agrees"] is False


def test_a_finding_leads_here_with_a_command_that_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from tui_debugger.cli import run

    path = FIXTURES / "faults/temperature_mismatch/batch.pt"
    (finding,) = [one for one in workbench.diagnose(path)["findings"] if one["id"] == "D10"]
    assert finding["next_step"] == f"rldbg mismatch {path}"
    assert run(finding["next_step"].split()[1:]) == 1
    said = capsys.readouterr().out
    assert said.startswith("MISMATCH  engine and trainer are ")
    assert "temperature 0.6" in said


# ---- bad input


def written(folder: Path, **changed: Any) -> Path:
    """Sixteen samples of eight response tokens, both sides alike but for a hundredth; `changed` replaces fields."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (16, 12), generator=draw)
    response = (torch.arange(12) >= 4).long().expand(16, 12)
    rollout = torch.log(torch.rand(16, 12, generator=draw))
    trainer = (rollout + 0.01 * torch.randn(16, 12, generator=draw)).clamp(max=0)
    fields = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": response.contiguous(),
              "rollout_logprobs": rollout, "old_logprobs": trainer, **changed}  # fmt: skip
    return write_dump(folder, {"forward_data": {name: value for name, value in fields.items() if value is not None}})


def test_a_small_gap_without_a_sign_agrees(tmp_path: Path) -> None:
    doc = answer(written(tmp_path / "dump"))
    assert doc["agrees"] is True
    assert doc["gap"]["mean"] == pytest.approx(0.008, rel=0.2)
    assert any("no model" in note for note in doc["notes"])
    assert doc["next"][0].endswith("--step 0 --model HF_DIR")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rollout_logprobs": None}, "the rollout's log-probabilities"),
        ({"old_logprobs": None}, "the trainer's log-probabilities"),
        ({"rollout_logprobs": torch.full((16, 12), -0.5)}, "of the rollout that differ: all"),
        ({"old_logprobs": torch.full((16, 12), -0.5)}, "of the trainer that differ: all"),
        (
            {"rollout_logprobs": torch.full((16, 12), -0.5) * (torch.arange(12) >= 3)},
            "of the rollout that differ: all 128 are -0.5",
        ),
        (
            {"rollout_logprobs": -torch.rand(9, 12)},
            "rollout_logprobs [9, 12] fits neither the tokens nor the responses",
        ),
        ({"rollout_logprobs": torch.full((16, 12), -math.inf)}, "finite log-probabilities of the rollout"),
        ({"response_mask": torch.zeros(16, 12, dtype=torch.long)}, "tokens that count"),
    ],
)
def test_what_is_lacking_is_said(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    doc = answer(written(tmp_path / "dump", **changed))
    assert doc["agrees"] is None
    assert said in " ".join(doc["lacks"])
    assert not any(one["named"] for one in doc["causes"])


def test_single_values_that_are_not_finite_are_counted_and_left_out(tmp_path: Path) -> None:
    rollout = torch.log(torch.rand(16, 12, generator=torch.Generator().manual_seed(0)))
    rollout[3, 7] = -math.inf
    doc = answer(written(tmp_path / "dump", rollout_logprobs=rollout, old_logprobs=rollout + 0.001))
    (fault, _) = [one for one in doc["tokens"] if "-inf" in one["what"]]
    assert (fault["sample"], fault["is_fault"]) == (3, True)
    assert doc["gap"]["tokens"] == 16 * 8 - 1
    assert doc["agrees"] is False


def test_one_token_responses_are_answered_and_no_shift_is_guessed(tmp_path: Path) -> None:
    response = (torch.arange(12) == 11).long().expand(16, 12).contiguous()
    doc = answer(written(tmp_path / "dump", response_mask=response))
    assert doc["gap"]["tokens"] == 16
    shifts = [one for one in doc["causes"] if one["family"] == "shift"]
    assert shifts
    assert not any(one["named"] for one in shifts)


def test_sides_of_different_samples_are_told_apart(tmp_path: Path) -> None:
    from replay_core.recorder import Recorder

    draw = torch.Generator().manual_seed(0)
    recorder = Recorder(tmp_path / "dump")
    with recorder.step(0) as record:
        for stage, name in (("trajectory", "rollout_logprobs"), ("forward_data", "old_logprobs")):
            ids = torch.randint(3, 50, (16, 12), generator=draw)
            response = (torch.arange(12) >= 4).long().expand(16, 12).contiguous()
            record(stage, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": response,
                           name: torch.log(torch.rand(16, 12, generator=draw))})  # fmt: skip
    doc = answer(tmp_path / "dump")
    assert doc["agrees"] is None
    assert "of 16 samples of which none has the tokens of one here" in doc["lacks"][0]


def test_a_step_or_model_that_is_not_there_is_a_wrong_request(tmp_path: Path) -> None:
    path = written(tmp_path / "dump")
    with pytest.raises(SelectionError):
        answer(path, step=7)
    with pytest.raises(ModelError):
        answer(path, model=str(tmp_path / "nowhere"))
    with pytest.raises(RequestError):
        answer(path, most=0)
    with pytest.raises(RequestError):
        answer(path, tokenizer=str(tmp_path / "nowhere"))


# ---- tokens


def test_a_doubled_first_token_and_an_untrained_stop_are_said(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (16, 12), generator=draw)
    ids[:, :2], ids[:, 11] = 1, 2
    mask = torch.ones_like(ids)
    mask[:, 11] = 0
    response = (torch.arange(12) >= 4).long().expand(16, 12).contiguous()
    loss = response * (torch.arange(12) < 11)
    finish = ["stop"] * 16
    doc = answer(
        written(tmp_path / "dump", input_ids=ids, response_mask=response, loss_mask=loss, finish_reason=finish)
    )
    said = [one["what"] for one in doc["tokens"]]
    assert any("begins with token 1 twice" in one for one in said)
    assert any("the stop token 2 does not count in 16 of 16" in one for one in said)


def test_tool_output_that_counts_is_said_and_left_out(tmp_path: Path) -> None:
    rollout = torch.log(torch.rand(16, 12, generator=torch.Generator().manual_seed(0)))
    trainer = rollout + 0.001
    rollout[:, 6:8], trainer[:, 6:8] = 0.0, -9.0
    doc = answer(written(tmp_path / "dump", rollout_logprobs=rollout, old_logprobs=trainer))
    (fault,) = [one for one in doc["tokens"] if "no engine sampled" in one["what"]]
    assert fault["samples"] == 16
    assert doc["gap"]["mean"] == pytest.approx(0.001, rel=0.05)


def test_a_later_turn_that_does_not_keep_what_was_sampled_is_said(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (16, 20), generator=draw)
    response = torch.zeros_like(ids)
    mask = torch.ones_like(ids)
    for turn in range(0, 16, 2):
        response[turn, 4:12], mask[turn, 12:] = 1, 0
        ids[turn + 1, :12] = ids[turn, :12]
        ids[turn + 1, 10] = 55  # encoded again, otherwise
        response[turn + 1, 15:] = 1
    rollout = torch.log(torch.rand(16, 20, generator=draw))
    doc = answer(written(tmp_path / "dump", input_ids=ids, attention_mask=mask, response_mask=response,
                         rollout_logprobs=rollout, old_logprobs=rollout + 1e-3))  # fmt: skip
    (fault,) = [one for one in doc["tokens"] if "earlier turn" in one["what"]]
    assert (fault["samples"], fault["position"]) == (8, 10)


def test_text_that_encodes_otherwise_is_shown_with_both_texts(tmp_path: Path) -> None:
    """The tokenizer would have merged the two halves of a word."""
    from tokenizers import Tokenizer

    place = FIXTURES / "trl/tiny_qwen2"
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    whole = tokenizer.encode("the answer is a number").ids
    word = next(at for at, one in enumerate(whole) if at > 1 and len(tokenizer.decode([one])) > 2)
    text = tokenizer.decode([whole[word]])
    halves = [i for part in (text[:2], text[2:]) for i in tokenizer.encode(part).ids]
    row = [*whole[:word], *halves, *whole[word + 1 :]]
    row = (row * 12)[:12] if len(row) < 12 else row[:12]
    ids = torch.tensor([row] * 16)
    response = (torch.arange(12) >= 1).long().expand(16, 12).contiguous()
    doc = answer(written(tmp_path / "dump", input_ids=ids, response_mask=response), tokenizer=str(place))
    (fault,) = [one for one in doc["tokens"] if "encoded again" in one["what"]]
    assert fault["texts"] is not None
    assert fault["texts"][0] != fault["texts"][1]
    assert fault["is_fault"] is False


def test_a_shift_is_named_and_what_it_leaves_is_nothing(tmp_path: Path) -> None:
    rollout = torch.log(torch.rand(16, 12, generator=torch.Generator().manual_seed(3)))
    doc = answer(written(tmp_path / "dump", rollout_logprobs=rollout.roll(1, 1), old_logprobs=rollout))
    (named,) = [one for one in doc["causes"] if one["named"]]
    assert named["family"] == "shift"
    assert named["share"] == pytest.approx(1.0, abs=1e-3)
    assert np.isclose(float(named["left"]["mean"]), 0.0, atol=1e-6)


@pytest.mark.long
def test_a_cancel_while_a_model_is_loaded_ends_it_and_is_no_candidate_that_cannot_be_had(tmp_path: Path) -> None:
    def cancel(event: object) -> None:
        if isinstance(event, LogLine) and event.text.endswith(" loaded in bfloat16"):
            raise JobCancelledError("cancelled")

    with pytest.raises(JobCancelledError):
        workbench.mismatch(written(tmp_path / "dump"), model="random:qwen2-tiny", on_event=cancel)

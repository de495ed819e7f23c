"""Genuine files of every framework: what is wrong in them is named, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.dumps import open_run
from tests.fixtures import FIXTURES
from tests.replay_core.diagnose.batches import causes, look, of, why_skipped


@pytest.mark.parametrize(
    ("folder", "id"),
    [
        ("packing_contaminated", "D16"),
        ("temperature_mismatch", "D10"),
        ("zero_std_all_groups", "D01"),
        ("nan_inf", "D21"),
    ],
)
def test_a_labelled_fault_is_ranked_first(folder: str, id: str) -> None:
    found = look(FIXTURES / "faults" / folder)
    assert found.findings[0].id == id
    assert found.findings[0].severity == "error"
    assert [one.id for one in causes(found)] == [id]


@pytest.mark.parametrize("name", ["batch.pt", "batch.dp"])
def test_each_form_of_a_fault_is_enough_alone(name: str) -> None:
    assert causes(look(FIXTURES / "faults" / "packing_contaminated" / name))[0].id == "D16"
    assert causes(look(FIXTURES / "faults" / "healthy" / name)) == []


CLEAN = (
    "faults/healthy", "trl/base", "verl", "slime", "skyrl", "nexrl/self_hosted_fp32", "nexrl/self_hosted_bf16",
    "openrlhf/input_dumps", "nemo_rl", "prime_rl", "open_instruct", "roll/rollout_mock", "roll_critic/fp32_sharedhead",
    "sglang_dumper/baseline_sdpa_fp32",
)  # fmt: skip


@pytest.mark.parametrize("folder", CLEAN)
def test_a_clean_run_has_no_warning_and_says_what_was_skipped(folder: str) -> None:
    found = look(FIXTURES / folder)
    assert [(one.id, one.claim) for one in causes(found)] == []
    assert found.checked
    assert found.skipped
    assert all(one.why for one in found.skipped)


def test_variants_are_named() -> None:
    advantages = of(look(FIXTURES / "verl"), "D04")
    assert advantages is not None
    assert advantages.claim == "advantages are (r - group mean) / (group std + 1e-06), std over n - 1"
    loss = of(look(FIXTURES / "nexrl" / "self_hosted_fp32"), "D28")
    assert loss is not None
    assert loss.claim == "pg_loss is token-mean over the micro-batch"


def test_the_nan_loss_of_the_old_dumper_is_found() -> None:
    found = look(FIXTURES / "nexrl" / "seedtime" / "jsonl")
    assert (found.findings[0].id, found.findings[0].steps) == ("D21", (2,))


def test_masked_positions_beside_a_loss_that_counted_none_name_the_length_mismatch() -> None:
    notes = FIXTURES / "grpo_notes"
    run = open_run(notes / "captured_1da2900_normal.pt", notes / "train_1da2900_normal.log")
    found = causes(diagnose(Case(run)))
    assert found[0].claim == "logits/mask lengths disagree: masked-position count 0 while masks exist"
    assert found[0].id == "D07"
    assert "identical" not in found[0].cause
    fixed = open_run(notes / "captured_547c4bf_normal.pt", notes / "train_547c4bf_normal.log")
    assert of(diagnose(Case(fixed), ["D07"]), "D07") is None


def test_a_capture_alone_says_what_it_would_need() -> None:
    found = look(FIXTURES / "grpo_notes" / "captured_1da2900_normal.pt")
    assert causes(found) == []
    assert "log" in why_skipped(found, "D07")


def test_half_a_batch_invents_nothing(tmp_path: Path) -> None:
    from tests.replay_core.diagnose.batches import healthy, seen

    batch = {name: value[:6] for name, value in healthy().items()}
    assert causes(seen(tmp_path, batch)) == []


@pytest.mark.parametrize("rows", [1, 2])
def test_one_sample_is_judged_without_dividing_by_zero(rows: int, tmp_path: Path) -> None:
    from tests.replay_core.diagnose.batches import healthy, seen

    assert causes(seen(tmp_path, {name: value[:rows] for name, value in healthy().items()})) == []


@pytest.mark.parametrize("lacking", ["response_mask", "attention_mask", "uid", "token_level_scores", "old_log_probs"])
def test_what_is_lacking_is_skipped_with_its_reason(lacking: str, tmp_path: Path) -> None:
    from tests.replay_core.diagnose.batches import healthy, seen

    batch = healthy()
    del batch[lacking]
    if lacking == "token_level_scores":
        del batch["token_level_rewards"]
    found = seen(tmp_path, batch)
    assert causes(found) == []
    assert found.skipped

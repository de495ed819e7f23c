"""What the stack's own failure texts mean: the cause is in the headline, and harmless lines are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replay_core.diagnose.failure_texts import failure_of
from tests.replay_core.diagnose.logs import diagnosed, trl, verl, worrying
from tests.replay_core.diagnose.said import HARMLESS, SAID

CLOCK = "2025-03-04 10:00:00,123 ERROR "


@pytest.mark.parametrize("name", SAID)
def test_the_first_finding_names_the_cause(name: str, tmp_path: Path) -> None:
    text, words = SAID[name]
    finding = diagnosed(tmp_path, text).findings[0]
    assert re.search(words, f"{finding.claim} {finding.cause}", re.IGNORECASE | re.DOTALL), finding


@pytest.mark.parametrize("name", ["multinomial", "chunk", "keyerr", "padtok", "assert"])
def test_the_same_behind_clocks_colours_and_the_names_of_processes(name: str, tmp_path: Path) -> None:
    text, words = SAID[name]
    dressed = "".join(f"\x1b[36m(Worker pid=7, ip=10.0.0.1)\x1b[0m {CLOCK}{line}" for line in text.splitlines(True))
    finding = diagnosed(tmp_path, verl([{}] * 3) + dressed).findings[0]
    assert re.search(words, f"{finding.claim} {finding.cause}", re.IGNORECASE | re.DOTALL), finding
    assert finding.where.step == 3


@pytest.mark.parametrize(
    "follows",
    [
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n",
        "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:41322\n",
        "W0801 13:23:17.366000 32974 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 33051 "
        "closing "
        "signal SIGTERM\n",
        "[rank1]:[E1125 10:12:01 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600004 "
        "milliseconds\n",
    ],
    ids=["actor", "peer", "launcher", "watchdog"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["padtok", "ecc", "tensorsize"])
def test_a_cause_goes_before_what_follows_from_it_whichever_is_printed_first(
    follows: str, name: str, tmp_path: Path
) -> None:
    text, words = SAID[name]
    for order in (text + follows, follows + text):
        finding = diagnosed(tmp_path, trl([{}] * 3) + order).findings[0]
        assert re.search(words, finding.claim + finding.cause, re.IGNORECASE), finding


@pytest.mark.parametrize("steps", [trl([{}] * 20), verl([{}] * 20)], ids=["trl", "verl"])
def test_what_healthy_runs_print_is_no_failure(steps: str, tmp_path: Path) -> None:
    noise = "".join(HARMLESS)
    assert worrying(diagnosed(tmp_path, noise + steps)) == []
    assert worrying(diagnosed(tmp_path, steps + noise)) == []


def test_a_head_that_was_trained_and_is_new_again_is_a_warning_and_a_first_one_is_none(tmp_path: Path) -> None:
    said = "Some weights of Qwen2ForTokenClassification were not initialized from the model checkpoint at {} and "
    said += "are newly initialized: ['score.weight']\n"
    assert worrying(diagnosed(tmp_path, said.format("Qwen/Qwen2.5-0.5B") + verl([{}] * 8))) == []
    lost = diagnosed(tmp_path, said.format("/ckpt/global_step_400/critic") + verl([{}] * 8, first=401)).findings[0]
    assert (lost.id, lost.severity) == ("L29", "warning")


def test_a_text_that_nobody_knows_is_not_named() -> None:
    assert failure_of("the weather is fine today") is None

"""Tolerances a person gives: read from a file, by option, refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from replay_core.compare.judging.tolerance import DEFAULT, END_TO_END, load_tolerances
from replay_core.errors import RequestError
from tests.builders import compare_paths, write_pair

GOOD = """
[[tolerance]]
name = "layers.*"
reason = "experts in fp8"
rel_l2 = 0.3
worst_row = 0.7

[[tolerance]]
name = "layers.5.*"
dtype = "bfloat16"
column = "local"
reason = "the one that is quantised"
atol = 0.5
rtol = 0.01

[[tolerance]]
name = "policy_logprobs"
reason = "another kernel"
max_abs = 0.2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tolerance.toml"
    path.write_text(GOOD)
    return path


def test_a_rule_changes_what_it_names_and_leaves_the_rest(file: Path):
    found = load_tolerances(file).of("layers.3.mlp.output", "bfloat16", "end-to-end")
    assert (found.table.bug, found.table.worst_row, found.reason) == (0.3, 0.7, "experts in fp8")
    assert found.table.outlier == END_TO_END["bfloat16"].outlier
    assert found.elementwise is None


def test_the_last_rule_that_fits_decides(file: Path):
    tolerances = load_tolerances(file)
    assert tolerances.of("layers.5.mlp.output", "bfloat16", "local").elementwise == (0.5, 0.01)
    for dtype, column in (("float32", "local"), ("bfloat16", "end-to-end")):
        assert tolerances.of("layers.5.mlp.output", dtype, column).table.bug == 0.3
    assert tolerances.of("norm.output", "bfloat16", "local") == DEFAULT.of("norm.output", "bfloat16", "local")


def test_logprobs_have_limits_of_their_own(file: Path):
    found = load_tolerances(file).of("policy_logprobs", "float32", "end-to-end")
    assert found.logprob.max_abs[2] == 0.2
    assert found.logprob.max_abs == tuple(sorted(found.logprob.max_abs))


def test_options_go_before_a_file(file: Path):
    tolerances = load_tolerances(file).with_overrides(rtol=0.25)
    assert tolerances.of("layers.5.mlp.output", "bfloat16", "local").elementwise == (0.0, 0.25)
    assert load_tolerances(file).with_overrides() == load_tolerances(file)


@pytest.mark.parametrize("value", ["nan", "-1e-3", '"many"', "true"])
@pytest.mark.parametrize("key", ["rel_l2", "atol", "worst_row"])
def test_what_is_no_tolerance_is_refused_by_name(key: str, value: str, tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_text(f'[[tolerance]]\nname = "x"\nreason = "y"\n{key} = {value}\n')
    with pytest.raises(RequestError, match=rf"rule 1 \(x\): {key} is no tolerance") as caught:
        load_tolerances(path)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("numbers", [{"atol": float("nan")}, {"rtol": -0.1}, {"atol": 1.0, "rtol": float("nan")}])
def test_options_that_are_no_tolerance_are_refused_by_name(numbers: dict[str, float]):
    wrong = next(name for name, value in numbers.items() if not value >= 0)
    with pytest.raises(RequestError, match=f"--{wrong} is no tolerance"):
        DEFAULT.with_overrides(**numbers)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no \\[\\[tolerance\\]\\]"),
        ("x = 1", "holds tables"),
        ("[[tolerance]]\nrel_l2 = 1", "name is missing"),
        ('[[tolerance]]\nname = "x"\nrel_l2 = 1', "reason is missing"),
        ('[[tolerance]]\nname = "x"\nreason = "y"', "limits nothing"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\nrelative = 1', "unknown key"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\nrel_l2 = 1\ndtype = "bf16"', "dtype is none"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\nrel_l2 = 1\ncolumn = "both"', "column is none"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\nrel_l2 = 1\natol = 1', "replace all other limits"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\nexact = 1', "exact is a switch"),
        ("[[tolerance", "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, says: str, tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(RequestError) as caught:
        load_tolerances(path)
    assert re.search(says, str(caught.value))
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_a_wrong_request(tmp_path: Path):
    with pytest.raises(RequestError, match="cannot be read"):
        load_tolerances(tmp_path / "none.toml")


def test_a_rule_that_fits_no_tensor_is_said(tmp_path: Path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[tolerance]]\nname = "model.layers.*"\nreason = "experts in fp8"\nrel_l2 = 0.3\n')
    a = {"model.layers.0.mlp.output": torch.ones(4, 8)}
    pair = write_pair(tmp_path, {"modules": a}, {"modules": a})
    compared = compare_paths(*pair, tolerances=load_tolerances(rules))
    assert compared.notes == ["the tolerance rule for model.layers.* (experts in fp8) fits the name of no tensor"]

"""Tolerances a person gives: read from a file, by option, refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from replay_core import naming
from replay_core.compare.judging import limits
from replay_core.compare.judging.rules import BY_ID
from replay_core.compare.judging.tolerance import DEFAULT, load_tolerances
from replay_core.compare.judging.verdict import Context, Verdict
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


def context(name: str, dtype: str = "bfloat16", *, local: bool = False) -> Context:
    return Context(naming.meaning(name), dtype, exact=False, local=local, name=name)


def test_a_table_changes_what_it_names_and_leaves_the_rest(file: Path):
    found = load_tolerances(file).of(context("layers.3.mlp.output"))
    assert (found.of("rel_l2"), found.of("worst_row")) == (0.3, 0.7)
    assert found.reason_of("rel_l2") == "experts in fp8"
    assert found.of("outlier") == limits.OUTLIER["end-to-end"]["bfloat16"]
    assert found.reason_of("outlier") is None
    assert found.elementwise is None


def test_the_last_table_that_fits_decides(file: Path):
    tolerances = load_tolerances(file)
    assert tolerances.of(context("layers.5.mlp.output", local=True)).elementwise == (0.5, 0.01)
    for dtype, local in (("float32", True), ("bfloat16", False)):
        assert tolerances.of(context("layers.5.mlp.output", dtype, local=local)).of("rel_l2") == 0.3
    assert not tolerances.of(context("norm.output", local=True)).given


def test_logprobs_have_limits_of_their_own(file: Path):
    found = load_tolerances(file).of(context("policy_logprobs", "float32"))
    assert found.of("max_abs") == 0.2
    assert found.suspect(BY_ID["max_abs"]) == 0.2


def test_options_go_before_a_file(file: Path):
    tolerances = load_tolerances(file).with_overrides(rtol=0.25)
    assert tolerances.of(context("layers.5.mlp.output", local=True)).elementwise == (0.0, 0.25)
    assert load_tolerances(file).with_overrides() == load_tolerances(file)


def judged(tmp_path: Path, a: torch.Tensor, b: torch.Tensor, text: str, name: str = "layers.0.mlp.output"):
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "rules.toml"
    file.write_text(f'[[tolerance]]\nname = "layers.*"\nreason = "experts in fp8"\n{text}\n')
    pair = write_pair(tmp_path, {"modules": {name: a}}, {"modules": {name: b}})
    return compare_paths(*pair, tolerances=load_tolerances(file)).tensors[0]


A_RC = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))


def test_a_looser_size_is_not_overruled_by_the_shape_of_the_difference(tmp_path: Path):
    row = judged(tmp_path, A_RC, A_RC * 1.02, "rel_l2 = 0.5\nworst_row = 0.5")
    assert row.verdict is Verdict.CLOSE
    assert row.reason.endswith("; experts in fp8")


def test_a_rule_of_shape_that_a_table_names_is_asked_beside_a_looser_size(tmp_path: Path):
    row = judged(tmp_path, A_RC, A_RC * 1.02, "rel_l2 = 0.5\nworst_row = 0.5\ngain = 0.01")
    assert (row.verdict, row.rule and (row.rule.id, row.rule.limit)) == (Verdict.DIFF, ("gain", 0.01))
    assert row.reason.endswith("; experts in fp8")
    near = judged(tmp_path / "near", A_RC, A_RC * 1.005, "rel_l2 = 0.5\nworst_row = 0.5\ngain = 0.01")
    assert near.verdict is Verdict.CLOSE


def test_the_reason_is_printed_only_where_its_table_decided(tmp_path: Path):
    """Noise is CLOSE by the table too, and a row is judged by a rule that the file does not name."""
    noise = judged(tmp_path / "noise", A_RC, A_RC * (1 + 1e-7 * torch.randn(64, 96)), "rel_l2 = 0.5")
    assert noise.verdict is Verdict.CLOSE
    assert "experts" not in noise.reason
    other = A_RC.clone()
    other[3] *= -1
    row = judged(tmp_path / "row", A_RC, other, "rel_l2 = 0.5")
    assert (row.verdict, row.rule and row.rule.id) == (Verdict.DIFF, "worst_row")
    assert "experts" not in row.reason


#: A difference that each rule of size and shape decides, once those before it are off.
ONE_ROW = A_RC.clone()
ONE_ROW[3] *= 1.02


@pytest.mark.parametrize(
    ("b", "decides"),
    [
        (A_RC * 1.02, ["rel_l2", "worst_row", "outlier", "gain"]),
        (A_RC + 0.02, ["rel_l2", "worst_row", "outlier", "bias"]),
        (ONE_ROW, ["rel_l2", "worst_row", "row_gain", "standing_row", "column_gain"]),
    ],
)
def test_every_rule_can_be_switched_off_by_its_id(b: torch.Tensor, decides: list[str], tmp_path: Path):
    off: list[str] = []
    for number in range(len(decides) + 1):
        row = judged(tmp_path / str(number), A_RC, b, f"off = {off}" if off else "worst_row = 1e-3")
        if row.verdict is Verdict.CLOSE:
            break
        assert row.rule is not None
        assert row.rule.id in decides
        off.append(row.rule.id)
    assert row.verdict is Verdict.CLOSE
    assert row.reason.endswith("; experts in fp8")


def test_a_misspelt_rule_is_an_error_that_lists_the_rules(tmp_path: Path):
    with pytest.raises(RequestError, match="off lists rules") as caught:
        judged(tmp_path, A_RC, A_RC, 'off = ["gian"]')
    assert "row_gain" in str(caught.value.expected)
    assert caught.value.found == "gian"
    with pytest.raises(RequestError, match="unknown key, or rule") as caught:
        judged(tmp_path / "key", A_RC, A_RC, "gian = 0.1")
    assert "row_gain" in str(caught.value.expected)


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
        ('[[tolerance]]\nname = "x"\nreason = "y"\nrel_l2 = 1\ndtype = "bf16"', "there is no such dtype"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\nrel_l2 = 1\ncolumn = "both"', "there is no such column"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\nrel_l2 = 1\natol = 1', "replace all other limits"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\nexact = 1', "exact is a switch"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\noff = "gain"', "off lists rules"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\noff = ["gain"]\ngain = 0.1', "set and switched off"),
        ('[[tolerance]]\nname = "x"\nreason = "y"\noff = [["gain"]]', "off lists rules"),
        (f'[[tolerance]]\nname = "x"\nreason = "y"\nrel_l2 = 0x{"f" * 9000}', "very many digits"),
        (f'[[tolerance]]\nname = 0x{"f" * 9000}\nreason = "y"', "very many digits"),
        (f'[[tolerance]]\nname = "x"\nreason = "y"\nrel_l2 = 1\noff = [0x{"f" * 9000}]', "very many digits"),
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


def test_a_key_of_very_many_parts_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(".".join("a" * 5_000) + " = 1")
    with pytest.raises(RequestError, match="a key of more than 64 parts"):
        load_tolerances(path)

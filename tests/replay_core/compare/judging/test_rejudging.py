"""Judging again with other tolerances says what comparing with them says, and reads nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.faults import HARMLESS, REAL, Fault, batch, hidden, one_ulp
from replay_core import pages
from replay_core.compare import Comparison, Tolerances, compare_runs, load_tolerances, rejudge
from replay_core.compare.judging.verdict import Verdict
from replay_core.dumps import open_run
from tests.builders import compare_paths, row_of, write_pair

RULES = """
[[tolerance]]
name = "*"
reason = "coarser"
rel_l2 = {bug}
worst_row = {worst_row}
outlier = {outlier}
max_abs = {max_abs}
"""


def compared(directory: Path, a: torch.Tensor, b: torch.Tensor, name: str = "x", **options) -> Comparison:
    return compare_paths(*write_pair(directory, {"modules": {name: a}}, {"modules": {name: b}}), **options)


def verdicts(comparison: Comparison) -> list[tuple[str, Verdict, str, bool]]:
    return [(row.name, row.verdict, row.reason, row.suspect) for row in comparison.tensors]


@pytest.mark.long
@pytest.mark.parametrize("fault", [*HARMLESS, *REAL][::4], ids=str)
@pytest.mark.parametrize("limits", [(1e-9, 1e-9, 1e-9, 1e-9), (1e3, 1e3, 1e6, 1e3), (2e-2, 0.1, 2.0, 0.5)])
def test_rules_of_a_file_say_the_same_afterwards(fault: Fault, limits: tuple[float, ...], tmp_path: Path, monkeypatch):
    a, b = fault.make()
    around = {"batch_inputs": batch()} if fault.batch else {}
    paths = write_pair(tmp_path, {**around, "modules": a}, {**around, "modules": b})
    file = tmp_path / "rules.toml"
    file.write_text(RULES.format(**dict(zip(("bug", "worst_row", "outlier", "max_abs"), limits, strict=True))))
    rules = load_tolerances(file)
    before = compare_paths(*paths)
    asked = compare_paths(*paths, tolerances=rules)
    kept = verdicts(before)
    monkeypatch.setattr(pages, "Stream", lambda path: pytest.fail("it read"))
    assert verdicts(rejudge(before, rules)) == verdicts(asked)
    assert verdicts(before) == kept
    assert verdicts(rejudge(rejudge(before, rules), Tolerances())) == kept


@pytest.mark.long
@given(atol=st.floats(0, 0.1), rtol=st.floats(0, 0.1), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_atol_and_rtol_afterwards_are_never_more_lenient(atol: float, rtol: float, seed: int, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(20, 32, generator=generator)
    b = a + 0.02 * torch.randn(20, 32, generator=generator) * (1 if seed % 2 else a.abs())
    asked = Tolerances().with_overrides(atol, rtol)
    counted = row_of(compared(directory / "asked", a, b, tolerances=asked), "x")
    wide_a, wide_b = a.double(), b.double()
    within = bool(((wide_b - wide_a).abs() <= atol + rtol * wide_a.abs()).all())
    assert counted.verdict is (Verdict.CLOSE if within else Verdict.DIFF)
    later = row_of(rejudge(compared(directory / "plain", a, b), asked), "x")
    if later.verdict is not counted.verdict:
        assert (counted.verdict, later.verdict) == (Verdict.CLOSE, Verdict.DIFF)
        assert "leave open" in later.reason


@pytest.mark.parametrize(("atol", "rtol"), [(0.0, 0.01), (0.03, 0.0), (0.0, 0.0078125), (0.5, 0.5)])
def test_one_of_atol_and_rtol_afterwards_is_exact(atol: float, rtol: float, tmp_path: Path):
    a = hidden(torch.bfloat16)
    plain = compared(tmp_path / "plain", a, one_ulp(a))
    asked = Tolerances().with_overrides(atol, rtol)
    counted = compared(tmp_path / "asked", a, one_ulp(a), tolerances=asked)
    assert row_of(rejudge(plain, asked), "x").verdict is row_of(counted, "x").verdict


def test_exact_kinds_stay_exact_under_any_tolerance(tmp_path: Path):
    lenient = Tolerances().with_overrides(100.0, 100.0)
    found = compared(tmp_path, torch.arange(8), torch.arange(8) + 1, "input_ids", tolerances=lenient)
    assert row_of(found, "input_ids").verdict is Verdict.DIFF


def test_first_divergence_follows_the_tolerances(tmp_path: Path):
    fields = {f"layers.{number}.mlp.output": hidden(torch.bfloat16) for number in range(4)}
    other = {**fields, "layers.2.mlp.output": one_ulp(fields["layers.2.mlp.output"])}
    paths = write_pair(tmp_path, {"modules": fields}, {"modules": other})
    found = compare_runs(open_run(paths[0]), open_run(paths[1]))
    assert found.first is None
    strict = rejudge(found, Tolerances().with_overrides(0.0, 0.0))
    assert strict.first is not None
    assert strict.first.name == "layers.2.mlp.output"

"""The user's own words for tensors. Rules that contradict each other are refused before anything is read."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import Comparison
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.renaming import Renames, _starred
from replay_core.errors import NothingComparableError, RequestError
from tests.builders import compare_paths, row_of, write_pair


def compared_under(renames: Renames, tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    return compare_paths(*write_pair(tmp_path, {"modules": a}, {"modules": b}), renames=renames)


def rules(tmp_path: Path, text: str) -> Renames:
    file = tmp_path / "names.map"
    file.write_text(text)
    return Renames.read(file)


def test_a_rule_lets_two_names_face_each_other(tmp_path: Path):
    renames = rules(tmp_path, "# ours = theirs\nlayers.*.mlp.output = blocks.*.ffn.out\n")
    a = {f"layers.{i}.mlp.output": torch.full((3,), float(i)) for i in range(12)}
    b = {f"blocks.{i}.ffn.out": torch.full((3,), float(i)) for i in range(12)}
    compared = compared_under(renames, tmp_path, a, {**b, "blocks.11.ffn.out": torch.ones(3)})
    assert compared.counts["MISSING"] == 0
    assert compared.counts["SAME"] == 11
    assert row_of(compared, "layers.11.mlp.output").verdict is Verdict.DIFF


def test_json_says_the_same(tmp_path: Path):
    renames = rules(tmp_path, '{"x.*": "y.*"}')
    assert compared_under(renames, tmp_path, {"x.1": 1.0}, {"y.1": 1.0}).counts["SAME"] == 1


def test_a_rule_that_meets_nothing_is_said(tmp_path: Path):
    compared = compared_under(rules(tmp_path, "p = q\n"), tmp_path, {"x": 1.0}, {"x": 1.0})
    assert "the rule p = q met no tensor of b" in compared.notes


def test_a_rule_may_use_the_names_a_recorded_as_well_as_those_that_are_listed(tmp_path: Path):
    a, b = {"model.layers.0.mlp.output": torch.ones(3)}, {"blocks.0.ffn.out": torch.ones(3)}
    for name in ("model.layers.*.mlp.output", "layers.*.mlp.output"):
        renames = rules(tmp_path, f"{name} = blocks.*.ffn.out\n")
        compared = compared_under(renames, tmp_path / name[:5], a, b)
        assert compared.counts["SAME"] == compared.counts["total"] == 1
        assert not compared.notes


def test_a_rule_that_gives_a_name_a_has_not_is_said(tmp_path: Path):
    compared = compared_under(rules(tmp_path, "z.* = y.*\n"), tmp_path, {"x": 1.0}, {"x": 1.0, "y.1": 1.0})
    assert "the rule z.* = y.* gives z.1, which a has not" in compared.notes


def test_where_nothing_is_in_common_the_error_names_the_rules_that_met_nothing(tmp_path: Path):
    with pytest.raises(NothingComparableError, match=r"the rule y = x met no tensor of b"):
        compared_under(rules(tmp_path, "y = x\n"), tmp_path, {"x": torch.ones(3)}, {"y": torch.ones(3)})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = b\na = c\n", "a of a is two names of b"),
        ("a = b\nc = b\n", "b of b is two names of a"),
        ('{"a": "b", "a": "c"}', "contradicts itself"),
        ("a.* = b\n", r"more \*"),
        ("just words\n", "line 1 of the map of names is no rule"),
        ("a = b = c\n", "line 1 of the map of names is no rule"),
        ('{"": "x"}', "a name is empty"),
        ("# nothing\n", "has no rule"),
        ('{"a": 1}', "not flat"),
        ('{"a": ', "not JSON"),
    ],
)
def test_rules_that_are_none_are_refused(text: str, says: str, tmp_path: Path):
    with pytest.raises(RequestError, match=says):
        rules(tmp_path, text)


def test_a_map_that_is_not_there_is_a_wrong_request(tmp_path: Path):
    with pytest.raises(RequestError, match="cannot be read"):
        Renames.read(tmp_path / "nothing")


def test_two_tensors_under_one_name_are_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="one name"):
        compared_under(rules(tmp_path, "x = y\n"), tmp_path, {"x": 1.0}, {"x": 1.0, "y": 2.0})


@pytest.mark.parametrize(("rule", "name"), [
    ("a.*", "a.1"), ("*.b", "x.y.b"), ("a*b*c", "a1bb2cc"), ("*a*a*", "aaaaaa"), ("**", "abc"), ("a*", "a"),
    ("*", ""), ("a*a", "aa"), ("a*a", "aba"), ("ab*ba", "aba"), ("x*y", "axby"), ("*.*.*", "l.0.1.out"), ("a", "a"),
    ("**b*", "abab"), ("*ab*b", "abbabb"),
])  # fmt: skip
def test_a_star_stands_for_what_a_greedy_expression_finds(rule: str, name: str):
    found = re.fullmatch("(.+)".join(map(re.escape, rule.split("*"))), name)
    assert _starred(rule, name) == (None if found is None else list(found.groups()))


def test_a_rule_of_many_stars_is_matched_in_time_that_a_name_is_long(tmp_path: Path):
    renames = rules(tmp_path, f"{'*a' * 30}x = {'*a' * 30}b\n")
    began = time.thread_time()
    a = {"a" * 2000: torch.ones(3)}
    assert compared_under(renames, tmp_path, a, a).counts["SAME"] == 1
    assert time.thread_time() - began < 1


def test_a_map_that_is_a_pipe_is_refused_without_waiting(tmp_path: Path):
    os.mkfifo(tmp_path / "names.map")
    with pytest.raises(RequestError, match="cannot read a pipe"):
        Renames.read(tmp_path / "names.map")


def test_a_map_of_very_many_stars_is_refused_and_one_of_many_plain_names_is_not(tmp_path: Path):
    with pytest.raises(RequestError, match="too many rules"):
        rules(tmp_path, "\n".join(f"a{i}.* = b{i}.*" for i in range(513)))
    renames = rules(tmp_path, "\n".join(f"a{i}.x = b{i}.x" for i in range(20_000)))
    assert compared_under(renames, tmp_path, {"a777.x": 1.0}, {"b777.x": 1.0}).counts["SAME"] == 1

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core import budget, pages
from replay_core.dumps.fields import flatten
from replay_core.errors import BudgetError, DumpError
from replay_core.records import Inline, TensorRef

NAMES = st.text(st.characters(exclude_characters=".#", exclude_categories=["Cs"]), min_size=1, max_size=4)
LEAVES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=4)


def by_name(tree: Any) -> dict[str, TensorRef]:
    return {ref.name: ref for ref in flatten(tree)}


def values(ref: TensorRef) -> Any:
    assert isinstance(ref.source, Inline)
    return ref.source.value


@pytest.mark.long
@given(
    st.recursive(st.dictionaries(NAMES, LEAVES, max_size=4), lambda inner: st.dictionaries(NAMES, inner, max_size=3))
)
def test_every_leaf_of_nested_dicts_is_one_field_under_its_dotted_path(tree: Any):
    def leaves(node: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(node, dict):
            return {".".join(path): node}
        return {name: leaf for key, inner in node.items() for name, leaf in leaves(inner, (*path, key)).items()}

    expected = leaves(tree, ())
    found = flatten(tree)
    assert {ref.name: values(ref) for ref in found} == expected
    assert [ref.order for ref in found] == list(range(len(found)))


@given(st.lists(st.lists(st.integers(-100, 100), max_size=5), min_size=1, max_size=6))
def test_rows_of_numbers_keep_every_number_and_every_length(rows: list[list[int]]):
    (ref,) = flatten({"rows": rows})
    flat = [number for row in rows for number in row]
    assert pages.array(ref).reshape(-1).tolist() == flat
    lengths = list(ref.rows) if ref.rows is not None else [ref.shape[1]] * ref.shape[0]
    assert lengths == [len(row) for row in rows]


@given(
    st.lists(
        st.fixed_dictionaries({}, optional={"a": st.integers(0, 9), "b": st.none() | st.integers(0, 9)}), max_size=6
    )
)
def test_a_table_keeps_each_samples_values_at_its_number(samples: list[Any]):
    found = by_name({"samples": samples})
    for key in ("a", "b"):
        column = [sample.get(key) for sample in samples]
        if all(value is not None for value in column) and column:
            assert values(found[f"samples.{key}"]) == column
        elif any(value is not None for value in column):
            ref = found[f"samples.{key}"]
            assert ref.sentinel == "null is stored as NaN"
            assert [None if value != value else value for value in values(ref)] == column
        else:
            assert f"samples.{key}" not in found


def test_two_fields_never_share_a_name():
    assert [ref.name for ref in flatten({"a.b": 1, "a": {"b": 2, "b#2": 4}, 1: 5, "1": 6})] == [
        "a.b", "a.b#2", "a.b#2#2", "1", "1#2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (True, "bool", ()), (3, "int64", ()), (2**63, "text", ()), (-(2**63), "int64", ()), (0.5, "float64", ()),
        (1j, "complex128", ()), ("x", "text", ()), ([], "float64", (0,)), ([1, 2.5], "float64", (2,)),
        ([True, False], "bool", (2,)), (["a"], "text", (1,)), ((1, 2), "int64", (2,)),
        ([[1, 2], [3, 4]], "int64", (2, 2)), ([[], []], "float64", (2, 0)),
    ],
)  # fmt: skip
def test_what_a_plain_value_becomes(value: Any, dtype: str, shape: tuple[int, ...]):
    (ref,) = flatten({"x": value})
    assert (ref.dtype, ref.shape) == (dtype, shape)


def test_none_is_no_field_and_its_neighbours_keep_their_places():
    assert flatten({"x": None}) == []
    assert list(by_name({"x": [1, None, "a"]})) == ["x.0", "x.2"]


def test_a_nest_too_deep_is_unreadable_and_not_a_stack_overflow():
    tree: Any = 1
    for _ in range(100_000):
        tree = {"x": tree}
    (ref,) = flatten(tree)
    assert not ref.is_readable


@pytest.mark.long
def test_a_file_whose_parts_contain_each_other_is_refused(monkeypatch: pytest.MonkeyPatch):
    tree: Any = [1, "a"]
    for _ in range(40):
        tree = [tree, tree, "x"]
    with pytest.raises(DumpError, match="too many fields"):
        flatten({"x": tree})
    monkeypatch.setattr(budget, "FLOOR_VALUES", 10)
    with pytest.raises(BudgetError, match="more than what is stored"), budget.reading("x"):
        flatten({"x": [[1] * 6, [2] * 5]})


def test_rows_of_floats_read_back_as_numpy_reads_them():
    rows = [[0.1, 0.2], [0.3]]
    (ref,) = flatten({"x": rows})
    assert np.array_equal(pages.array(ref), [0.1, 0.2, 0.3])

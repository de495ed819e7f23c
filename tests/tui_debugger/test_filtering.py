"""A long list is filtered and ordered in slices, to the list that one go would make."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tui_debugger.driving import A, B, opened, rest
from tui_debugger import filtering
from tui_debugger.format import VERDICTS
from tui_debugger.tensor_list import TensorList
from tui_debugger.tensor_rows import SORTS, Places, TensorRow


def _row(name: str, verdict: str, rel_l2: Any = None, micro: int = 0) -> TensorRow:
    return TensorRow(name, verdict, {"metrics": {"rel_l2": rel_l2}, "a_key": {"rank": 0, "micro": micro}})


_CONTENT = st.lists(
    st.tuples(st.sampled_from("abcxyz"), st.sampled_from(VERDICTS), st.sampled_from([None, 0.1, 2.0, "nan", "inf"])),
    max_size=30,
)


@pytest.mark.long
@given(_CONTENT, st.text(max_size=6), st.sampled_from(SORTS))
async def test_slices_make_the_list_that_one_go_makes(
    content: list[tuple[str, str, Any]], typed: str, sort: str
) -> None:
    tensors = TensorList(rows=[_row(*one) for one in content], filter=typed, sort=sort)
    tensors.refilter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filtering, "SLICE", 7)
        found = await filtering.shown(tensors.rows, tensors.wanted() if typed else None, sort)
        assert found == tensors.shown


def _said(*rows: TensorRow) -> list[str]:
    places = Places()
    places.add(rows)
    assert bool(places) == any(map(places.of, rows))
    return [places.of(row) for row in rows]


def test_a_row_says_of_its_record_what_its_name_leaves_open() -> None:
    alone = [_row("a", "SAME"), _row("b", "SAME")]
    assert _said(*alone) == ["", ""]
    assert _said(*alone, _row("c", "SAME", micro=1)) == ["r0 m0", "r0 m0", "r0 m1"]
    trajectory, batch = (
        TensorRow("ids", "SAME", {"a_key": {"rank": 0, "micro": None, "role": role, "stage": stage}})
        for role, stage in (("rollout", "trajectory"), ("actor", "batch_inputs"))
    )
    of_batch = TensorRow("loss", "SAME", batch.entry)
    assert _said(trajectory, of_batch) == ["", ""]
    assert _said(trajectory, batch, of_batch) == ["rollout trajectory", "actor batch_inputs", ""]
    first, second = (TensorRow("x", "SAME", {"b_key": {"minibatch": n, "epoch": 0}}) for n in (1, 2))
    assert _said(first, second) == ["mb1", "mb2"]


async def test_rows_judged_while_a_filter_is_applied_are_shown_too() -> None:
    async with opened(A, B) as (app, pilot):
        state = app.session.state
        state.tensors.begin_live()
        state.tensors.add_live([{"name": f"old.{n}", "verdict": "DIFF"} for n in range(3 * filtering.SLICE)])
        app.debugger.search.set_filter("new|old.1$")
        await asyncio.sleep(0)
        state.tensors.add_live([{"name": "new", "verdict": "DIFF"}])
        await rest(app, pilot)
        assert [state.tensors.rows[index].name for index in state.tensors.shown] == ["old.1", "new"]

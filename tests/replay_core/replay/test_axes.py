import pytest

from replay_core.errors import RequestError
from replay_core.replay.axes import Axes, smallest
from replay_core.replay.flags import Flags


def test_without_axes_they_are_kernel_compiler_and_layout():
    axes = Axes.parse("")
    assert axes.values == {"attention": ("eager", "flash"), "compile": ("off", "inductor"), "packing": (False, True)}
    assert axes.size == 8


def test_cells_with_the_fewest_toggles_come_first_and_keep_what_is_no_axis():
    cells = Axes.parse("attention=eager,sdpa packing=off,on").cells(Flags(dtype="bfloat16", threads=2))
    assert [(cell.attention, cell.packing) for cell in cells] == [
        ("eager", False), ("eager", True), ("sdpa", False), ("sdpa", True),
    ]  # fmt: skip
    assert {(cell.dtype, cell.threads) for cell in cells} == {("bfloat16", 2)}


def test_the_baseline_is_each_row_alone_under_the_first_values():
    baseline = Axes.parse("attention=sdpa,eager packing=on,off compile=aot_eager,off").baseline(Flags())
    assert baseline == Flags(attention="sdpa", rows_per_forward=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("attention", "name=value,value"),
        ("atention=eager,sdpa", "no flag 'atention'"),
        ("attention=eager,flask", "attention cannot be 'flask'"),
        ("packing=on", "an axis of two values"),
        ("packing=on,on", "a value twice"),
        ("packing=on,off packing=off,on", "twice"),
        ("rows_per_forward=" + ",".join(map(str, range(1, 200))), "199 cells"),
    ],
)
def test_axes_that_cannot_be_are_refused(text, says):
    with pytest.raises(RequestError, match=says):
        Axes.parse(text)


def test_the_smallest_sets_hold_no_other():
    pack, both, flash = {"packing": True}, {"packing": True, "compile": "inductor"}, {"attention": "flash"}
    assert smallest([both, pack]) == [pack]
    assert smallest([both]) == [both]
    assert smallest([both, flash, pack, flash]) == [flash, pack]
    assert smallest([both, {}]) == [{}], "the baseline settings already break"

"""Settings that are one and the same, and the matrix that does not run them twice."""

import pytest

from replay_core.replay.flags import Flags
from replay_core.replay.twins import CPU_FLASH, normal, twin


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ("dynamic=on", ""),
        ("block_mask=off", ""),
        ("fault=boundary", ""),
        ("packing=on fault=padded_mask", "packing=on"),
        ("rows_per_forward=9", ""),
        ("rows_per_forward=1 packing=on", "rows_per_forward=1"),
        ("gradient_checkpointing=on", ""),
    ],
)
def test_a_flag_without_effect_makes_no_other_cell(flags, same):
    assert normal(Flags.parse(flags), 3) == normal(Flags.parse(same), 3)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("packing=on block_mask=off", "packing=on"),
        ("compile=aot_eager dynamic=on", "compile=aot_eager"),
        ("fault=padded_mask", ""),
        ("rows_per_forward=2", ""),
        ("mode=train gradient_checkpointing=on", "mode=train"),
    ],
)
def test_a_flag_with_an_effect_is_a_cell_of_its_own(a, b):
    assert normal(Flags.parse(a), 3) != normal(Flags.parse(b), 3)


def test_one_kernel_is_only_taken_for_granted_where_it_was_seen():
    seen = {"flags": Flags.parse("attention=sdpa").to_mapping(), "effective": {"attention": CPU_FLASH}}
    unseen = {**seen, "effective": {"attention": "math (bmm + _safe_softmax)"}}
    flash = Flags.parse("attention=sdpa-flash")
    assert twin(flash, 3, [(4, seen)]) == 4
    assert twin(flash, 3, [(4, unseen)]) is None
    assert twin(Flags.parse("attention=sdpa-flash device=cuda"), 3, [(4, seen)]) is None
    assert twin(Flags.parse("attention=sdpa-math"), 3, [(4, seen)]) is None


def test_a_matrix_says_which_cells_are_one_and_runs_them_once(ask):
    doc = ask(matrix="attention=eager,sdpa,sdpa-flash packing=off,on", plan={"capture": "none"})
    cells = {(one["flags"]["attention"], one["flags"]["packing"]): one for one in doc["cells"] if one["part"] == "cell"}
    assert len(cells) == 6
    for packing in (False, True):
        again, first = cells["sdpa-flash", packing], cells["sdpa", packing]
        assert doc["cells"][again["same_as"]] is first
        assert again["time"] is None
        assert first["time"] is not None
        assert again["agreement"] == first["agreement"]
        assert any("not run" in note for note in again["notes"])

import numpy as np
import pytest

from replay_core.replay.flags import Flags
from replay_core.replay.packing import arrange
from replay_core.replay.visibility import boundaries, check
from tests.replay_core.replay.conftest import small_batch


def codes(flags, **how):
    return [finding.code for finding in check(arrange(small_batch(), Flags.parse(flags)), **how)]


@pytest.mark.parametrize("flags", ["packing=off", "packing=on", "rows_per_forward=1", "packing=on rows_per_forward=2"])
def test_right_inputs_show_nothing(flags):
    assert codes(flags) == []


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("packing=on block_mask=off", "mask_set"),
        ("packing=on fault=boundary", "boundary"),
        ("packing=on fault=foreign_key", "foreign_keys"),
        ("packing=on fault=no_positions", "positions_dropped"),
        ("packing=off fault=padded_mask", "padded_mask"),
    ],
)
def test_every_mistake_has_its_own_code(flags, code):
    assert codes(flags) == [code]


def test_a_cache_spoils_a_pack_and_nothing_else():
    assert codes("packing=on", use_cache=True) == ["use_cache"]
    assert codes("packing=off", use_cache=True) == []


def test_an_off_by_one_boundary_is_counted():
    (finding,) = boundaries(np.array([[0, 1, 2, 3, 0, 1]]), np.array([3, 3]))
    assert finding.text == "every boundary is 1 token late: samples begin at [3], position_ids restart at [4]"
    (finding,) = boundaries(np.array([[0, 1, 0, 1, 2, 0]]), np.array([3, 3]))
    assert finding.text.startswith("the boundaries are wrong")


def test_a_segment_that_starts_at_previous_plus_one_merges():
    assert boundaries(np.array([[0, 1, 2, 3, 4]]), np.array([3, 2]))[0].code == "positions_dropped"


def test_the_foreign_key_is_pointed_at():
    (finding,) = check(arrange(small_batch(), Flags.parse("packing=on fault=foreign_key")))
    assert "samples 1..2 see 1 key of another sample: token 14 sees token 13 of sample 0" in finding.text

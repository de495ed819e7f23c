"""Where two cells part by their digests, and which modules are looked at in full."""

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from replay_core.replay.frontier import Hashed, exactly, module_of, part, windows, write

NAMES = (
    "layers.0.inputs.0",
    "layers.0.self_attn.inputs.hidden_states",
    "layers.0.self_attn.o_proj.inputs.0",
    "layers.0.self_attn.o_proj.output",
    "layers.0.self_attn.output.0",
    "layers.0.output",
    "layers.1.inputs.0",
    "layers.1.output",
    "norm.inputs.0",
    "norm.output",
)


def hashed(changed=(), size=10):
    return [Hashed(name, f"{name}{'!' if name in changed else ''}", size, 1.0, -1.0, 1.0) for name in NAMES]


def test_a_tensor_belongs_to_the_module_it_enters_or_leaves():
    assert module_of("layers.0.self_attn.inputs.hidden_states") == "layers.0.self_attn"
    assert module_of("layers.0.output.0") == "layers.0"
    assert module_of("shared[2].output") == "shared"


def test_the_first_differing_digest_in_call_order_is_where_to_look():
    parting = part(hashed(), hashed(NAMES[4:]))
    assert (parting.start, parting.equal, len(parting.differing)) == ("layers.0.self_attn.output.0", 4, 6)
    assert part(hashed(), hashed()).start is None, "equal everywhere: nothing to look at"


def test_a_cell_without_digests_is_looked_at_from_the_start():
    parting = part(hashed(), None)
    assert parting.start == NAMES[0]
    assert parting.seen_in_full(["layers.0"]) == {"not_in_full": 8}


def test_what_differs_outside_the_windows_is_counted():
    parting = part(hashed(), hashed(NAMES[2:]))
    assert parting.seen_in_full(["layers.0.self_attn", "layers.0.self_attn.o_proj"]) == {"not_in_full": 5}


def test_the_first_window_holds_the_first_module_and_those_around_it():
    first, *_ = windows(hashed(), "layers.0.self_attn.o_proj.inputs.0", 60)
    assert first == ["layers.0.self_attn.o_proj", "layers.0.self_attn", "layers.0"]


@given(st.integers(0, len(NAMES) - 1), st.integers(1, 200))
def test_windows_hold_every_module_from_the_first_on_once_and_fit(start, room):
    order = hashed(size=10)
    found = list(windows(order, NAMES[start], room))
    held = [module for window in found for module in window]
    assert len(held) == len(set(held))
    assert {module_of(name) for name in NAMES[start:]} <= set(held)
    for window in found:
        size = sum(one.nbytes for one in order if one.module in window)
        assert size <= room or len(window) == 1


def test_a_tensor_under_several_names_takes_its_room_once():
    order = [Hashed(name, "same", 10, None, None, None) for name in NAMES]
    assert len(list(windows(order, NAMES[0], 10))) == 1


def test_the_pattern_chooses_these_modules_and_no_other():
    pattern = exactly(["layers.1", "norm"])
    names = ("layers.1", "layers.10", "layers.1.mlp", "layersX1", "norm")
    assert [name for name in names if re.search(pattern, name)] == ["layers.1", "norm"]


def test_digests_are_kept_a_line_each(tmp_path):
    write(tmp_path / "hashes.jsonl", hashed())
    lines = [json.loads(line) for line in (tmp_path / "hashes.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == list(NAMES)
    assert lines[0] == {
        "name": NAMES[0], "digest": NAMES[0], "nbytes": 10, "l2": 1.0, "low": -1.0, "high": 1.0,
    }  # fmt: skip

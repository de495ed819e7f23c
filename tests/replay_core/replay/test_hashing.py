"""Digests in place of tensors: of the tokens alone, whatever the layout, and nothing held back."""

import math
import weakref

import pytest
import torch

from replay_core.replay.flags import Flags
from replay_core.replay.hashing import HashCapture, Hashes
from replay_core.replay.packing import arrange
from tests.builders import padded_batch

IDS = [[0, 0, 5, 6, 7], [8, 9, 10, 0, 0], [11, 12, 13, 14, 15]]
MASK = [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


class Table(torch.nn.Module):
    """Every token by itself, so that its values are the same in any layout."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(16, 4, dtype=dtype)
        self.twice = torch.nn.Identity()

    def forward(self, ids):
        hidden = self.embed(ids)
        self.twice(torch.ones(3))
        return self.twice(hidden * 2)


def hashes_of(flags, net=None, ids=IDS):
    net = net or Table()
    arrangement = arrange(padded_batch(ids, MASK), Flags.parse(flags))
    hashes = Hashes(arrangement)
    for number, forward in enumerate(arrangement.forwards):
        with torch.no_grad(), HashCapture(net, ["embed", "twice"], forward, number, hashes):
            net(torch.from_numpy(forward.input_ids))
    return {one.name: one for one in hashes.told()}, hashes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["packing=off", "packing=on", "rows_per_forward=2", "packing=on rows_per_forward=2"])
def test_the_same_values_have_one_digest_in_every_layout(layout, dtype):
    alone, _ = hashes_of("rows_per_forward=1", Table(dtype))
    other, _ = hashes_of(layout, Table(dtype))
    assert list(alone) == ["embed.output", "twice[1].inputs.0", "twice[1].output"]
    for name, one in alone.items():
        assert other[name].digest == one.digest
        assert math.isclose(other[name].l2, one.l2, rel_tol=1e-6)
        assert (other[name].low, other[name].high) == (one.low, one.high)


def test_one_bit_of_one_token_is_another_digest_and_padding_is_none():
    usual, _ = hashes_of("packing=off")
    net = Table()
    with torch.no_grad():
        net.embed.weight[13, 2] += 1e-6
    changed, _ = hashes_of("packing=off", net)
    assert all(changed[name].digest != one.digest for name, one in usual.items())
    with torch.no_grad():
        net = Table()
        net.embed.weight[0] += 1.0
    padding, _ = hashes_of("packing=off", net)
    assert all(padding[name].digest == one.digest for name, one in usual.items()), "id 0 stands in padding only"


def test_values_that_are_not_finite_have_no_statistics_but_a_digest():
    net = Table()
    with torch.no_grad():
        net.embed.weight[9, 1] = float("nan")
    told, _ = hashes_of("packing=on", net)
    assert (told["embed.output"].l2, told["embed.output"].low) == (None, None)
    assert told["embed.output"].digest.startswith("xxh3_128:")


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_values_whose_squares_leave_float32_have_their_norm_all_the_same(size):
    net = Table()
    with torch.no_grad():
        net.embed.weight.mul_(size)
    told, _ = hashes_of("packing=on", net)
    valid = [id for row, mask in zip(IDS, MASK, strict=True) for id, kept in zip(row, mask, strict=True) if kept]
    expected = float(net.embed.weight[valid].detach().double().norm())
    assert math.isclose(told["embed.output"].l2, expected, rel_tol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_digest_is_of_the_values_at_the_time_and_of_any_number_of_threads(threads):
    class InPlace(Table):
        def forward(self, ids):
            return super().forward(ids).zero_()

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        told, _ = hashes_of("packing=off", InPlace())
    finally:
        torch.set_num_threads(before)
    usual, _ = hashes_of("packing=off")
    assert told == usual, "zeroed after it was hashed"


def test_a_tensor_without_a_token_axis_is_said_to_be_left_out():
    _, hashes = hashes_of("packing=off")
    assert hashes.left_out == {"twice.inputs.0", "twice.output"}


def test_no_tensor_is_held():
    net = Table()
    arrangement = arrange(padded_batch(IDS, MASK), Flags())
    hashes = Hashes(arrangement)
    seen = []
    net.embed.register_forward_hook(lambda _module, _args, output: seen.append(weakref.ref(output)))
    with torch.no_grad(), HashCapture(net, ["embed", "twice"], arrangement.forwards[0], 0, hashes) as capture:
        net(torch.from_numpy(arrangement.forwards[0].input_ids))
    assert capture.tensors == {}
    assert [one() for one in seen] == [None]

import pytest
import torch

from replay_core.errors import CellError, RequestError
from replay_core.replay.capture import (
    Capture,
    TraceableCapture,
    by_key,
    forecast_bytes,
    heads_first,
    join,
    modules_matching,
    need_all,
    need_room,
)
from replay_core.replay.flags import Flags
from replay_core.replay.packing import arrange
from tests.builders import padded_batch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, *, scale=None, past_key_values=None, attention_mask=None):
        return self.linear(x) * scale, None


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.idle = torch.nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x, scale=torch.ones(1), attention_mask=torch.ones(1))
            x.add_(1.0)
        return x


def captured(net, names, x):
    with torch.no_grad(), Capture(net, names, x.shape[1]) as capture:
        net(x)
    return capture


def test_inputs_when_called_outputs_when_returned():
    net = Net()
    capture = captured(net, modules_matching(net, None), torch.randn(1, 3, 4))
    assert list(capture.tensors)[:5] == [
        "blocks.0.inputs.0",
        "blocks.0.inputs.scale",
        "blocks.0.linear.inputs.0",
        "blocks.0.linear.output",
        "blocks.0.output.0",
    ]


def test_a_later_in_place_operation_does_not_reach_the_copy():
    net, x = Net(), torch.randn(1, 3, 4)
    tensors = captured(net, modules_matching(net, None), x).tensors
    assert torch.equal(tensors["blocks.0.output.0"] + 1.0, tensors["blocks.1.inputs.0"])


def test_a_tensor_under_several_names_is_copied_once():
    net = Net()
    tensors = captured(net, modules_matching(net, None), torch.randn(1, 3, 4)).tensors
    assert tensors["blocks.0.inputs.0"] is tensors["blocks.0.linear.inputs.0"]
    assert tensors["blocks.0.linear.output"] is not tensors["blocks.0.output.0"]


class PerHead(torch.nn.Module):
    """A norm of queries behind the turn to [B, heads, S, d], as Gemma 3 has it; four heads."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(2)

    def forward(self, x):
        return self.norm(x.unflatten(-1, (4, 2)).transpose(1, 2)).transpose(1, 2).flatten(2)


def test_tokens_behind_the_heads_are_found_and_laid_by_token_though_there_are_as_many_tokens_as_heads():
    net = PerHead()
    widths = (4, 3)
    passes = [captured(net, ["norm"], torch.randn(1, width, 8)).tensors for width in widths]
    names = heads_first(passes[0], widths[0], passes[1], widths[1])
    assert names == {"norm.inputs.0", "norm.output"}
    x = torch.randn(1, 4, 8)
    with torch.no_grad(), Capture(net, ["norm"], 4, names) as capture:
        net(x)
    assert torch.equal(capture.tensors["norm.inputs.0"].flatten(2), x)
    with torch.no_grad():
        traced = TraceableCapture(net, ["norm"], 4, names, names)
        net(x)
    assert torch.equal(traced.take()[0]["norm.inputs.0"].flatten(2), x)


def test_attention_weights_and_states_of_a_fixed_size_are_no_tensors_of_heads():
    weights, state = torch.rand(1, 4, 4, 4), torch.rand(1, 2, 4, 4)
    assert heads_first({"w": weights, "s": state}, 4, {"s": state}, 3) == frozenset()


def test_a_number_per_key_is_no_vector_of_a_token():
    longer = {"scores": torch.rand(1, 4, 4), "blocks": torch.rand(1, 4, 2, 8), "state": torch.rand(1, 4, 4)}
    shorter = {"scores": torch.rand(1, 3, 3), "blocks": torch.rand(1, 3, 1, 8), "state": torch.rand(1, 3, 4)}
    assert by_key(longer, 4, shorter, 3) == {"scores", "blocks"}


def test_a_module_called_twice_keeps_its_calls_apart():
    net = torch.nn.Sequential(shared := torch.nn.Linear(4, 4), torch.nn.ReLU())
    with torch.no_grad(), Capture(net, ["0"], 3) as capture:
        shared(torch.ones(1, 3, 4))
        shared(torch.zeros(1, 3, 4))
    assert list(capture.tensors) == ["0.inputs.0", "0.output", "0[1].inputs.0", "0[1].output"]


def test_the_last_call_that_a_compiled_graph_keeps_is_named_as_the_last_call():
    net = torch.nn.Sequential(shared := torch.nn.Linear(4, 4), torch.nn.ReLU())
    known = ["0.inputs.0", "0.output", "0[1].inputs.0", "0[1].output", "1.output"]
    traced = TraceableCapture(net, ["0", "1"], 3, known)
    with torch.no_grad():
        shared(torch.ones(1, 3, 4))
        net(torch.zeros(1, 3, 4))
    tensors, ran = traced.take()
    traced.remove()
    assert list(tensors) == ["0[1].inputs.0", "0[1].output", "1.inputs.0", "1.output"]
    assert ran == {"0", "1"}
    assert torch.equal(tensors["0[1].output"], shared(torch.zeros(1, 3, 4)).detach())


def test_attention_weights_are_left_out():
    class Weights(torch.nn.Module):
        def forward(self, x):
            return x, torch.ones(1, 2, x.shape[1], x.shape[1])

    net = torch.nn.Sequential(Weights())
    capture = captured(net, ["0"], torch.randn(1, 3, 4))
    assert (list(capture.tensors), capture.skipped) == (["0.inputs.0", "0.output.0"], ["0.output.1"])


def test_hooks_are_gone_afterwards():
    net = Net()
    tensors = captured(net, modules_matching(net, None), torch.randn(1, 3, 4)).tensors
    count = len(tensors)
    net(torch.randn(1, 3, 4))
    assert len(tensors) == count


def test_a_pattern_chooses_modules_and_one_that_chooses_none_is_refused():
    assert modules_matching(Net(), r"blocks\.1\.") == ["blocks.1.linear"]
    with pytest.raises(RequestError, match="chooses no module") as refused:
        modules_matching(Net(), "encoder")
    assert "blocks.0" in str(refused.value)


def test_fewer_modules_than_asked_is_an_error_where_they_were_asked_for():
    names = ["blocks.0", "idle"]
    with pytest.raises(CellError, match="1 of the modules to capture never ran"):
        need_all(names, {"blocks.0"}, "blocks|idle")
    assert "idle" in need_all(names, {"blocks.0"}, None)[0]
    with pytest.raises(CellError):
        need_all(names, set(), None)


def test_rows_join_along_their_token_axis():
    batch = padded_batch([[1, 2, 0], [3, 4, 5]], [[1, 1, 0], [1, 1, 1]])
    alone = arrange(batch, Flags(rows_per_forward=1))
    first, second = torch.ones(1, 2, 4), torch.zeros(1, 3, 4)
    parts = [
        {"a.output": first, "b.inputs.0": first, "router.output": torch.ones(2, 8), "inv": torch.ones(5)},
        {"a.output": second, "b.inputs.0": second, "router.output": torch.ones(3, 8), "inv": torch.ones(5)},
    ]
    parts[0]["odd"], parts[1]["odd"] = torch.ones(1, 7), torch.zeros(1, 8)
    joined, notes = join(parts, alone)
    assert {name: tuple(tensor.shape) for name, tensor in joined.items()} == {
        "a.output": (1, 5, 4), "b.inputs.0": (1, 5, 4), "router.output": (5, 8), "inv": (5,),
    }  # fmt: skip
    assert joined["a.output"] is joined["b.inputs.0"]
    assert "odd" in notes[0]


def test_what_is_as_wide_as_its_row_has_tokens_is_left_out():
    """Scores and chosen keys of a sparse attention: [B, S, T], and the top few of T."""
    batch = padded_batch([[1, 2, 0], [3, 4, 5]], [[1, 1, 0], [1, 1, 1]])
    alone = arrange(batch, Flags(rows_per_forward=1))
    parts = [
        {"x": torch.ones(1, count, 4), "indexer": torch.ones(1, count, count), "flat": torch.ones(count, count)}
        for count in (2, 3)
    ]
    joined, notes = join(parts, alone)
    assert list(joined) == ["x"]
    assert "indexer, flat" in notes[0]


def test_the_forecast_counts_a_shared_tensor_once_and_the_room_is_checked(tmp_path):
    shared = torch.zeros(1, 16, 1024)
    size = forecast_bytes({"a": shared, "b": shared, "c": torch.zeros(10)}, 16, 1600)
    assert 1600 * 4096 <= size < 1.1 * 1600 * 4096
    need_room(size, tmp_path / "new" / "out", 8192)
    with pytest.raises(RequestError, match="more room than there is") as refused:
        need_room(size, tmp_path, 1)
    assert "--capture" in str(refused.value)

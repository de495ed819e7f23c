"""torch.compile in a cell: hooks and no hooks in graphs of their own, cold and warm told apart."""

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from replay_core.errors import UnavailableError
from replay_core.executors.child import ChildRunner
from replay_core.pages import array
from replay_core.replay import compiling
from replay_core.replay.flags import Flags
from replay_core.replay.held import HOLDER
from tests.replay_core.replay.test_run import run_of


def modules(cell):
    (record,) = run_of(cell).select(stage="modules")
    return {ref.name: array(ref) for ref in record.tensors()}


@pytest.mark.long
def test_dynamo_alone_is_bitwise_eager_and_its_hooks_see_every_module(replay):
    plain, traced = replay("attention=eager"), replay("attention=eager compile=aot_eager")
    a, b = modules(plain), modules(traced)
    assert set(a) == set(b)
    assert all((a[name] == b[name]).all() for name in a)
    assert traced["compile"]["graphs"] == 1
    assert (traced["compile"]["recompiles"], traced["compile"]["graph_breaks"]) == (0, 0)
    assert traced["compile"]["hooked"] == {"bitwise": True, "worst_token": 0.0}
    assert traced["effective"]["attention"] == "eager (bmm + softmax)"


@pytest.mark.long
def test_a_setting_seen_before_is_not_compiled_again(replay):
    HOLDER.drop()  # its graphs with it: another test may have compiled this setting
    first = replay("attention=sdpa compile=aot_eager packing=on", capture="none")
    again = replay("attention=sdpa compile=aot_eager packing=on", capture="none")
    assert first["compile"]["cache"] == "cold"
    assert again["compile"]["cache"] == "cached"
    assert again["compile"]["graphs"] == 0
    assert any("not a first time" in note for note in again["notes"])


@pytest.mark.slow
def test_rows_of_many_lengths_recompile_and_the_reasons_are_kept(replay):
    compiled = replay("attention=eager compile=aot_eager rows_per_forward=1 use_cache=off", capture="none")["compile"]
    assert compiled["recompiles"] >= 1
    assert compiled["recompile_reasons"]


@pytest.mark.long
def test_hooks_of_one_callable_never_reach_another():
    """A module is compiled with hooks and without: neither graph knows of the other."""
    module = torch.nn.Linear(4, 4)
    seen = []

    class Backbone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return BaseModelOutput(last_hidden_state=self.inner(x))

    compiled, flags, backbone = compiling.Compiled(), Flags(compile="aot_eager"), Backbone()
    store = {}
    plain = compiled.call(flags)
    with torch.no_grad():
        plain(backbone, {"x": torch.ones(1, 4)})
        handle = module.register_forward_hook(lambda _module, _args, out: store.__setitem__("out", out.clone()))
        compiled.once(flags)(backbone, {"x": torch.ones(1, 4)})
        handle.remove()
        seen.append(dict(store))
        store.clear()
        plain(backbone, {"x": torch.ones(1, 4)})
    assert list(seen[0]) == ["out"]
    assert store == {}


def test_without_a_cxx_compiler_the_cell_is_unavailable(tmp_path):
    from torch._inductor import config

    # Not monkeypatch: undoing it would take the setting away from every test after this one.
    missing = config.patch({"cpp.cxx": (None, str(tmp_path / "no-such-compiler"))})
    with missing, pytest.raises(UnavailableError, match="C\\+\\+ compiler") as refused:
        compiling.need(Flags(compile="inductor"))
    assert "aot_eager" in refused.value.hint
    compiling.need(Flags(compile="aot_eager"))


@pytest.mark.slow
def test_on_a_machine_without_a_compiler_the_matrix_goes_on(ask, tmp_path):
    environment = {"PATH": str(tmp_path), "CXX": ""}
    with ChildRunner(environment=environment) as runner:
        doc = ask(matrix="compile=off,inductor", plan={"capture": "none"}, runner=runner)
    assert [cell["outcome"] for cell in doc["cells"]] == ["ran", "ran", "ran", "unavailable"]
    assert "C++ compiler" in doc["cells"][-1]["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductor_agrees_with_each_row_alone_cold_and_with_its_time_apart(ask, dtype):
    doc = ask(f"dtype={dtype}", matrix="compile=off,inductor packing=off,on", plan={"cold_compile": True})
    for cell in doc["cells"][1:]:
        assert cell["agreement"]["agrees"] in (True, None), cell["agreement"]["first_divergence"]
    compiled = [cell for cell in doc["cells"] if cell["toggles"] and "compile" in cell["toggles"]]
    assert len(compiled) == 2
    for cell in compiled:
        assert cell["compile"]["cache"] == "cold"
        assert cell["time"]["compile_s"] > 5 * cell["time"]["steady_s"]
        assert cell["compile"]["hooked"]["worst_token"] < (1e-5 if dtype == "float32" else 0.1)


@pytest.mark.slow
def test_a_pinned_kernel_is_pinned_in_compiled_code_whatever_was_compiled_before(replay):
    for kernel, ran in (("sdpa", "flash_attention_for_cpu"), ("sdpa-math", "bmm")):
        cell = replay(f"attention={kernel} compile=inductor", capture="none")
        assert ran in cell["effective"]["attention"], kernel

"""A standalone script that shows what a capsule holds, for an upstream issue: torch and transformers, no rldbg."""

from __future__ import annotations

import json
import platform
from typing import Any

import torch
import transformers

import replay_core
from replay_core.compare.judging.limits import WORST_ROW
from replay_core.replay import attention
from replay_core.replay.cell import BatchReplay
from replay_core.replay.flags import Flags
from replay_core.replay.interventions import Observer, relative
from replay_core.replay.model import prepare
from replay_core.replay.versions import loaded_in

#: Of the model's weights, where none are taken along.
_SEED = 0

_SCRIPT = '''"""{said}

Each row alone against {label}. Needs torch and transformers only; made by rldbg {version}
with torch {torch}, transformers {transformers}, Python {python}, {machine}.
Exits 0 while the two differ; once they do not, its assertion fails.{usage}
"""

import contextlib
import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

CONFIG = json.loads({config})
# One entry per call of the model; None is not given.
ALONE = json.loads({alone})
TOGETHER = json.loads({together})
DTYPE, DEVICE, LIMIT = torch.{dtype}, "{device}", {limit}


def tensors(call):
    given = {{name: torch.tensor(value, device=DEVICE) for name, value in call.items() if isinstance(value, list)}}
    mask = given.get("attention_mask")
    if mask is not None and mask.ndim == 4:  # what a token may see, as numbers that are added
        hidden = torch.zeros(mask.shape, dtype=DTYPE, device=DEVICE).masked_fill(~mask.bool(), torch.finfo(DTYPE).min)
        given["attention_mask"] = hidden
    return {{**given, "use_cache": call["use_cache"]}}


def states(part, model):
    """The final hidden state of every token, sample by sample."""
    model.set_attn_implementation(part["attention"])
    # Llama 4's text model names a part that it does not have.
    backbone = model.base_model if model.base_model is not model else getattr(model, "model", model)
    run = backbone if part["compile"] == "off" else torch.compile(backbone, backend=part["compile"])
    kernel = contextlib.nullcontext()
    if part["kernel"]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kernel = sdpa_kernel([getattr(SDPBackend, part["kernel"])])
    with torch.no_grad(), kernel:
        found = [run(**tensors(call)).last_hidden_state for call in part["calls"]]
    return torch.cat(found, dim=part["axis"]).flatten(0, 1)[part["slots"]].double().cpu()


kind = CONFIG.pop("model_type")
torch.manual_seed({seed})
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIG))
{weights}model = model.to(DEVICE, DTYPE).eval()
alone, together = states(ALONE, model), states(TOGETHER, model)
apart = (together - alone).norm(dim=-1) / alone.norm(dim=-1)
for sample in sorted(set(ALONE["samples"])):
    worst = apart[torch.tensor(ALONE["samples"]) == sample].max()
    print(f"sample {{sample}}: its worst token is {{worst:.3g}} of its norm off")
assert apart.max() > LIMIT, f"the difference is gone: {{apart.max():.3g}}, up to {{LIMIT}} is rounding"
'''
_LOADED = """import zipfile  # a capsule is one

from safetensors.torch import load

weights = load(zipfile.ZipFile(sys.argv[1]).read("model/model.safetensors"))
print(model.load_state_dict(weights, strict=False))
"""


def repro(alone: BatchReplay, together: BatchReplay, said: str) -> tuple[str, bool]:
    """(the script, whether it needs no capsule beside it: weights drawn anew show the difference as well)."""
    causal_lm = together.model.causal_lm
    limit = WORST_ROW["end-to-end"][together.flags.dtype]
    torch.manual_seed(_SEED)
    drawn = type(causal_lm)._from_config(causal_lm.config, **loaded_in(torch.float32), attn_implementation="eager")
    held = {name: one.clone() for name, one in causal_lm.state_dict().items()}
    try:
        causal_lm.load_state_dict(drawn.state_dict())
        is_standalone = _apart(alone, together) > 2 * limit
    finally:
        causal_lm.load_state_dict(held)
    config = {name: value for name, value in causal_lm.config.to_diff_dict().items() if not name.startswith("_")}
    for name in ("transformers_version", "architectures", "dtype", "torch_dtype"):
        config.pop(name, None)
    text = _SCRIPT.format(
        said=_plain(said), label=together.flags.label(), version=replay_core.__version__, torch=torch.__version__,
        transformers=transformers.__version__, python=platform.python_version(), machine=platform.machine(),
        usage="" if is_standalone else "\nIts weights are those of the capsule: python repro.py FILE.capsule",
        config=_json(config), alone=_json(_part(alone)), together=_json(_part(together)), dtype=together.flags.dtype,
        limit=limit, device=together.flags.device, seed=_SEED, weights="" if is_standalone else _LOADED,
    )  # fmt: skip
    return text, is_standalone


def _apart(alone: BatchReplay, together: BatchReplay) -> float:
    found = []
    for cell in (alone, together):
        prepare(cell.model, cell.flags)
        found.append(Observer(cell).hidden())
    return float(relative(*found).max())


def _part(cell: BatchReplay) -> dict[str, Any]:
    arrangement = cell.arrangement
    slots = arrangement.layout.slots()
    flags: Flags = cell.flags
    backend = attention.backend_of(flags)
    return {
        "calls": [_call(cell, forward) for forward in arrangement.forwards], "axis": arrangement.axis,
        "slots": slots.tolist(), "samples": arrangement.layout.sample_BS.reshape(-1)[slots].tolist(),
        "attention": attention.implementation(flags) or cell.model.own_attention, "kernel": backend,
        "compile": flags.compile,
    }  # fmt: skip


def _call(cell: BatchReplay, forward: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in cell.inputs(forward).items():
        if torch.is_tensor(value) and value.ndim == 4:
            value = (value == 0).long()
        given[name] = value.tolist() if torch.is_tensor(value) else value
    return given


def _json(value: Any) -> str:
    return repr(json.dumps(value, separators=(",", ":")))


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")

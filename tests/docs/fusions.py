"""What the loaders of vLLM and sglang fuse, as their model files state it, beside what rldbg takes apart.

python -m tests.docs.fusions          # or: make integrations (fetches the packages, imports none of them)
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

Fusion = tuple[str, tuple[str, ...]]

_BOTH: set[Fusion] = {
    ("gate_up_proj", ("c_fc_0", "c_fc_1")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("kv_proj", ("k_proj", "v_proj")),
    ("qkv", ("q", "k", "v")),
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("qkv_proj", ("query", "key", "value")),
    ("w13", ("w1", "w3")),
}
#: Package -> version -> what its model files fuse: (an engine's parameter, the checkpoint's in their order).
STATED: dict[str, dict[str, set[Fusion]]] = {
    "vllm": {
        "0.33.0": _BOTH
        | {
            ("conv1d", ("q_conv1d", "k_conv1d", "v_conv1d")),
            ("fc13", ("fc1", "fc3")),
            ("fused_qkv_a_g_proj", ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")),
            ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
            ("fused_wkv_wgate", ("wkv", "wgate")),
            ("fused_wqa_wkv", ("wq_a", "wkv")),
            ("in_proj_qkvbfg_a", ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")),
            ("in_proj_qkvg", ("q_proj", "k_proj", "v_proj", "g_proj")),
            ("in_proj_qkvgfab", ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj")),
            ("in_proj_qkvgfab", ("q_proj", "k_proj", "v_proj", "f_a_proj")),
            (
                "input_mix_weight_down_block_inject",
                ("input_mix_weight_down", "block_inject_weight", "_input_mix_padding"),
            ),
            ("kv_proj", ("key_net", "value_net")),
            ("kv_proj", ("key_proj", "value_proj")),
            ("merged_kv", ("k_proj", "v_proj")),
            ("merged_linear", ("gate_proj", "up_proj")),
            ("merged_proj", ("gate_proj", "dense_h_to_4h")),
            ("merged_qkv", ("wq", "wk", "wv")),
            ("qk_proj", ("q_proj", "k_proj")),
            ("qkv_gate_proj", ("q_proj", "k_proj", "v_proj", "output_gate_proj")),
            ("qkv_proj", ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj")),
            ("qkv_proj", ("q_proj", "k_proj", "v_proj", "index_qk_proj")),
            ("qkv_proj", ("query_net", "key_net", "value_net")),
            ("qkvb_proj", ("q_proj", "k_proj", "v_proj", "b_proj")),
            ("qkvr", ("wq_du", "wk_dv", "wv_dv", "wr_du")),
            ("wk_weights_proj", ("wk", "weights_proj")),
        }
    },
    "sglang": {
        "0.5.23": _BOTH
        | {
            ("fused_bfg_a_proj", ("b_proj", "f_a_proj", "g_a_proj")),
            ("fused_fg_b_proj", ("f_b_proj", "g_b_proj")),
            ("fused_qkv_a_g_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")),
            ("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
            ("fused_qkvbfg_a_proj", ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")),
            ("fused_qkvbfg_proj", ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "g_proj")),
            ("fused_qkvg_proj", ("q_proj", "k_proj", "v_proj", "g_proj")),
            ("gate_up_proj", ("up_proj", "gate_proj")),
            ("gate_up_proj", ("w2", "w1")),
            ("index_qkv_proj", ("index_q_proj", "index_k_proj")),
            ("qkv_conv1d", ("q_conv1d", "k_conv1d", "v_conv1d")),
            ("qkv_proj", ("q", "k", "v")),
            ("qkvabz_proj", ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")),
            ("to_added_qkv", ("add_q_proj", "add_k_proj", "add_v_proj")),
            ("to_qkv", ("to_q", "to_k", "to_v")),
        }
    },
}
#: Of vision, speech, image and translation models, or of what tensor parallelism cuts in more pieces than its names
#: say: `rldbg weights` lists such a parameter as one that it knows no source of.
NOT_READ = {
    "conv1d", "fc13", "fused_bfg_a_proj", "fused_fg_b_proj", "fused_qkvbfg_a_proj", "fused_qkvbfg_proj",
    "in_proj_qkvbfg_a", "in_proj_qkvgfab", "in_proj_qkvz", "index_qkv_proj", "input_mix_weight_down_block_inject",
    "kv_proj", "merged_kv", "merged_linear", "merged_proj", "qk_proj", "qkv", "qkv_conv1d", "qkv_gate_proj",
    "qkvabz_proj", "qkvb_proj", "qkvr", "to_added_qkv", "to_qkv", "w13",
}  # fmt: skip
#: Under a name that is read: of an image model (`up_proj` first), of indexers, of translation.
NOT_READ_SO: set[Fusion] = {
    ("gate_up_proj", ("up_proj", "gate_proj")),
    ("qkv_proj", ("q", "k", "v")),
    ("qkv_proj", ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj")),
    ("qkv_proj", ("q_proj", "k_proj", "v_proj", "index_qk_proj")),
    ("qkv_proj", ("query_net", "key_net", "value_net")),
}


def stated(source: str) -> Iterator[Fusion]:
    """Every parameter that a model file makes of several: of `stacked_params_mapping` and `packed_modules_mapping`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = " ".join(ast.unparse(one) for one in targets)
        if "stacked_params_mapping" in names:
            yield from _stacked(node.value)
        elif "packed_modules_mapping" in names and isinstance(node.value, ast.Dict):
            yield from _packed(node.value)


def _stacked(value: ast.expr) -> Iterator[Fusion]:
    """Rows (fused, part, shard), one behind the other: a fused one ends where its first shard comes again."""
    rows = [
        [str(cell.value) for cell in row.elts if isinstance(cell, ast.Constant)]
        for row in ast.walk(value)
        if isinstance(row, ast.Tuple)
    ]
    made: dict[tuple[str, str], str] = {}
    for fused, part, shard in [[_last(row[0]), _last(row[1]), row[2]] for row in rows if len(row) == 3] + [[""] * 3]:
        first = next(iter(made), None)
        if first is not None and (fused != first[0] or (fused, shard) == first):
            if len(made) > 1:
                yield first[0], tuple(made.values())
            made = {}
        made[fused, shard if (fused, shard) not in made else f"{shard} again"] = part


def _packed(value: ast.Dict) -> Iterator[Fusion]:
    for key, made_of in zip(value.keys, value.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(made_of, ast.List):
            parts = tuple(_last(str(one.value)) for one in made_of.elts if isinstance(one, ast.Constant))
            if len(parts) > 1:
                yield _last(str(key.value)), parts


def _last(name: str) -> str:
    return name.strip(".").rpartition(".")[2]


def found_in(wheel: Path) -> set[Fusion]:
    archive = zipfile.ZipFile(wheel)
    files = [name for name in archive.namelist() if "/models/" in name and name.endswith(".py")]
    return {one for name in files for one in stated(archive.read(name).decode("utf-8"))}


def main() -> int:
    failed = 0
    for package, versions in STATED.items():
        for version, known in versions.items():
            with tempfile.TemporaryDirectory() as folder:
                words = ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", "-d", folder]
                subprocess.run([sys.executable, *words, f"{package}=={version}"], check=True)
                here = found_in(next(Path(folder).glob("*.whl")))
            said = [f"new {one}" for one in sorted(here - known)] + [f"gone {one}" for one in sorted(known - here)]
            failed += bool(said)
            sys.stdout.write(f"{package} {version}: {'; '.join(said) or 'as known'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

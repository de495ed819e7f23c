"""NexRL's DataDumper tree: <stage>/step_%06d[_rank%d][_micro%d].{pt,jsonl} (nexrl/utils/data_dumper.py @2e00933)."""

from __future__ import annotations

import re
from pathlib import Path

from replay_core import naming
from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Index
from replay_core.dumps.fields import flatten
from replay_core.records import Inline, Problem, RecordKey, TensorRef

name = "nexrl"

STAGES = (
    "trajectory", "old_log_probs", "forward_data", "loss", "param", "gradient",
    "prepared_trajectories", "datums", "training_metrics", "is_loss_debug", "batch_inputs",
)  # fmt: skip

#: NexRL's own words where the general table says something else.
NAMES = {"log_probs": "policy_logprobs", "old_log_probs": "old_logprobs"}

#: What stands before the name of a sample's field: the list it is a row of.
_SAMPLE = re.compile(r"^(?:trajectories|datums)\.(?:extra_fields\.|loss_fn_inputs\.)?")
#: A sample's own words. At HEAD `extra_fields.logprobs` is left out and `advantages` may be empty.
SAMPLE_NAMES = {
    "tokens": "input_ids",
    "input_tokens": "input_ids",
    "logprobs": "rollout_logprobs",
    "advantage": "advantages",
    "group_id": "group_id",
    "run_id": "sample_id",
    "prompt": "prompt_text",
    "response": "response_text",
}

_FILE = re.compile(r"step_(\d{6,})(?:_rank(\d+))?(?:_micro(\d+))?\.(pt|jsonl)$")


def detect(path: Path) -> bool:
    return path.is_dir() and any(
        _FILE.fullmatch(file.name) for stage in STAGES if (path / stage).is_dir() for file in (path / stage).iterdir()
    )


def index(path: Path) -> Index:
    found = Index([])
    for stage in STAGES:
        if not (path / stage).is_dir():
            continue
        for file in sorted((path / stage).iterdir()):
            match = _FILE.fullmatch(file.name)
            if match is None:
                found.problems.append(Problem(str(file), "not a step file of NexRL's; ignored"))
                continue
            step, rank, micro, _ = match.groups()
            key = RecordKey(int(step), _number(micro), _number(rank), "actor", stage)
            found.files.append((key, file))
    return found


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    """Fields of one file. log_probs, entropy and response_mask hold at index t what is said of token t + 1."""
    fields = flatten(read_container(path).tree)
    parameter = next(
        (ref.source.value for ref in fields if ref.name == "param_name" and isinstance(ref.source, Inline)), None
    )
    return [
        ref.with_(canonical=_canonical(ref.name, key.stage, parameter), alignment=_alignment(ref)) for ref in fields
    ]


def _canonical(field: str, stage: str, parameter: object) -> str:
    if field == "gradient" and parameter:
        return naming.canonical(f"grad.{parameter}")
    if field == "param" and parameter:
        return naming.canonical(f"param.{parameter}")
    if stage in ("gradient", "param") and field in ("norm", "mean", "std"):
        # Statistics NexRL stores beside the tensor: follow from it, judged like metrics.
        return f"metrics.{stage}.{field}"
    sample = _SAMPLE.sub("", field)
    if sample != field:
        return SAMPLE_NAMES.get(sample) or naming.canonical(sample, NAMES)
    return naming.canonical(field, NAMES)


def _alignment(ref: TensorRef) -> str | None:
    sample = _SAMPLE.sub("", ref.name)
    if sample != ref.name:
        per_token = "next" if ".loss_fn_inputs." in ref.name else "full"
        return per_token if ref.rows is not None or len(ref.shape) == 2 else "sample"
    if ref.rows is not None:
        return "packed"
    return (
        "next"
        if len(ref.shape) == 2 and ref.name in ("log_probs", "entropy", "response_mask", "old_log_probs")
        else None
    )

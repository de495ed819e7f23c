"""NexRL's DataDumper tree: <stage>/step_%06d[_rank%d][_micro%d].{pt,jsonl} (at 2e00933 and at 6860191).

The Weaver trainer writes the same tree with `is_loss_debug` and `batch_inputs`. A file's name has neither
epoch nor mini-batch, and micro starts again with each: later mini-batches overwrite earlier ones. What a
loss file says of itself in extra_info tells which are lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from replay_core import naming
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import Folder, few, is_file, listing
from replay_core.dumps.peeking import content_of, tree_of
from replay_core.records import Fields, Inline, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

STAGES = (
    "trajectory", "old_log_probs", "forward_data", "loss", "param", "gradient",
    "prepared_trajectories", "datums", "training_metrics", "is_loss_debug", "batch_inputs",
)  # fmt: skip

#: NexRL's own words where the general table says something else.
NAMES = {"log_probs": "policy_logprobs", "old_log_probs": "old_logprobs"}
#: Fields of a sample: their prefix says where they stood, not what they are.
_SAMPLE = regex(r"(?:trajectories|datums)\.(?:extra_fields\.|loss_fn_inputs\.)?")
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

_NEXT = ("log_probs", "entropy", "response_mask", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss",
         "effective_valid")  # fmt: skip
_FULL = ("input_ids", "attention_mask", "position_ids", "loss_mask")

_FILE = regex(r"step_(\d{6,18})(?:_rank(\d{1,9}))?(?:_micro(\d{1,18}))?\.(?:pt|jsonl)")
_SHAPES = frozenset(f"step_{rank}{micro}.{suffix}" for rank in ("", "_rank") for micro in ("", "_micro")
                    for suffix in ("pt", "jsonl"))  # fmt: skip

#: Loss files asked for the mini-batch they are of, and steps whose row counts are looked at: opening stays instant.
_ASKED = 16
_STEPS_COUNTED = 4
_SPELLED = 8
_SMALL = 1 << 20


def detect(path: Path) -> bool:
    if is_file(path):
        return path.parent.name in STAGES and _FILE.fullmatch(path.name) is not None
    return next(_folders(path), None) is not None


def _folders(path: Path) -> Iterator[Folder]:
    """Folders called as a dump point that hold step files; an empty one is normal, NexRL makes them all."""
    for folder in listing(path).folders:
        if folder.name in STAGES and not _SHAPES.isdisjoint(folder.shapes) and any(map(_FILE.fullmatch, folder.names)):
            yield folder


def index(path: Path) -> Index:
    found = Index([])
    for folder in _folders(path):
        for entry in folder.names:
            match = _FILE.fullmatch(entry)
            if match is None:
                found.problems.append(Problem(f"{folder.path}/{entry}", "not a step file of NexRL's; ignored"))
                found.beside.append(folder.file(entry))
                continue
            step, rank, micro = match.groups()
            key = RecordKey(int(step), micro and int(micro), rank and int(rank), "actor", folder.name)  # type: ignore[arg-type]
            found.files.append((key, folder.file(entry)))
    found.problems += _overwritten(found.files) + _padded(found.files) + _unpaired(found.files)
    return found


def _overwritten(files: list[tuple[RecordKey, Path]]) -> list[Problem]:
    """Mini-batches whose files a later one took, from what the loss files of the first and the last step say."""
    # Both say it; where losses were not dumped, the forwards do.
    losses = [(key, file) for key, file in files if key.stage == "loss"]
    losses = losses or [(key, file) for key, file in files if key.stage == "forward_data"]
    steps = sorted({key.step for key, _ in losses if key.step is not None})
    asked = [entry for entry in losses if entry[0].step in steps[:1] + steps[-1:]]
    seen: dict[tuple[int | None, int | None], dict[tuple[int, int], Path]] = defaultdict(dict)
    for key, file in asked[:_ASKED]:
        tree = tree_of(file)
        said = tree.get("extra_info") if isinstance(tree, dict) else None
        epoch, batch = (said.get("epoch"), said.get("batch_idx")) if isinstance(said, dict) else (None, None)
        if type(epoch) is int and type(batch) is int and 0 <= epoch < 1 << 20 and 0 <= batch < 1 << 20:
            seen[key.step, key.rank][epoch, batch] = file
    problems = []
    for (step, rank), kept in seen.items():
        epochs, batches = max(epoch for epoch, _ in kept) + 1, max(batch for _, batch in kept) + 1
        lost = epochs * batches - len(kept)
        if not lost and len(kept) > 1:
            problems.append(
                Problem(
                    str(next(iter(kept.values()))),
                    f"step {step} rank {rank}: the files are of {len(kept)} mini-batches; each took the micro-batches "
                    "of the same number from the one before",
                )
            )
        if lost:
            last = ", ".join(f"epoch {epoch} mini-batch {batch}" for epoch, batch in sorted(kept)[:4])
            problems.append(
                Problem(
                    str(next(iter(kept.values()))),
                    f"step {step} rank {rank}: {lost} of {epochs * batches} mini-batches were overwritten; "
                    f"left is {last}",
                )
            )
    return problems


def _unpaired(files: list[tuple[RecordKey, Path]]) -> list[Problem]:
    """Every micro-batch that is trained on writes its forward and its loss."""
    there: dict[str, dict[tuple[int | None, int | None], dict[int | None, Path]]] = defaultdict(dict)
    for key, file in files:
        if key.stage in ("forward_data", "loss"):
            there[key.stage].setdefault((key.step, key.rank), {})[key.micro] = file
    problems = []
    for stage, other in (("forward_data", "loss"), ("loss", "forward_data")):
        for place, micros in there[stage].items():
            lost = sorted(
                micro for micro in micros.keys() - there[other].get(place, micros).keys() if micro is not None
            )
            if lost:
                what = f"step {place[0]} rank {place[1]}: micro {few(lost)} has no {other}"
                problems.append(Problem(str(micros[lost[0]]), what))
    more = len(problems) - _SPELLED
    return problems[:_SPELLED] + ([Problem(problems[0].where, f"{more} more such places")] if more > 0 else [])


def _padded(files: list[tuple[RecordKey, Path]]) -> list[Problem]:
    """Rows repeated to fill the world size: old_log_probs then has more rows than there are trajectories."""
    at = {(key.stage, key.step): file for key, file in files if key.stage in ("trajectory", "old_log_probs")}
    problems = []
    for _, step in [place for place in at if place[0] == "old_log_probs"][:_STEPS_COUNTED]:
        old, trajectories = at["old_log_probs", step], at.get(("trajectory", step))
        if trajectories is None or trajectories.stat().st_size > _SMALL or old.suffix != ".pt":
            continue
        values, samples = tree_of(old), tree_of(trajectories)
        ref = values.get("old_log_probs") if isinstance(values, dict) else None
        count = samples.get("num_trajectories") if isinstance(samples, dict) else None
        if isinstance(ref, TensorRef) and ref.shape and type(count) is int and ref.shape[0] > count:
            problems.append(
                Problem(
                    str(old),
                    f"{ref.shape[0]} rows for {count} trajectories: the first rows were repeated to fill the world",
                )
            )
    return problems


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    """Fields of one file. log_probs, entropy and response_mask hold at index t what is said of token t + 1."""
    fields = flatten(content_of(path).tree)
    parameter = _parameter(fields) if key.stage in ("gradient", "param") else None
    for ref in fields:
        ref.canonical, ref.alignment = _meant(ref.name, key.stage, parameter, ref.rows is not None, len(ref.shape))
    if key.stage == "is_loss_debug":
        _lay_end_to_end(fields)
    return Fields(fields, _empty_advantages(fields, key, path))


def _parameter(fields: list[TensorRef]) -> str | None:
    named = next((ref.source for ref in fields if ref.name == "param_name"), None)
    return named.value if isinstance(named, Inline) and type(named.value) is str else None


@lru_cache(4096)  # the fields of one record are those of the next
def _meant(field: str, stage: str, parameter: str | None, is_ragged: bool, axes: int) -> tuple[str, str | None]:
    """A field's canonical name and alignment."""
    sample = _SAMPLE.match(field)
    if sample is not None:
        inner = field[sample.end() :]
        name = SAMPLE_NAMES.get(inner) or naming.canonical(inner, NAMES)
        if is_ragged or axes == 2:
            # A datum is cut to N - 1: its input t is about target t, the token after it.
            return name, "full" if stage != "datums" or inner == "input_tokens" else "next"
        return name, "sample" if axes == 1 else None
    if field == "gradient" and parameter:
        name = naming.canonical(f"grad.{parameter}")
    elif field == "param" and parameter:
        name = naming.canonical(f"param.{parameter}")
    elif stage in ("gradient", "param") and field in ("norm", "mean", "std"):
        # Statistics NexRL stores beside the tensor: follow from it, judged like metrics.
        name = f"metrics.{stage}.{field}"
    else:
        name = naming.canonical(field, NAMES)
    if is_ragged:
        return name, "packed"
    return name, None if axes != 2 else "next" if field in _NEXT else "full" if field in _FULL else None


def _lay_end_to_end(fields: list[TensorRef]) -> None:
    """Weaver's loss may run over tokens without padding: what is as long as its mask is said of the same tokens."""
    mask = next((ref for ref in fields if ref.name == "effective_valid"), None)
    for ref in fields:
        if mask is not None and len(mask.shape) == 1 and ref.shape == mask.shape and ref.name in _NEXT:
            ref.alignment = "packed"


def _empty_advantages(fields: list[TensorRef], key: RecordKey, path: Path) -> list[Problem]:
    """NexRL at HEAD looks for `advantages` where GRPO wrote `advantage`, and stores a list of empty lists."""
    if key.stage != "prepared_trajectories":
        return []
    for ref in fields:
        if ref.name == "advantages" and not ref.numel:
            return [Problem(str(path), "its advantages are empty lists: this NexRL stored none (known at 6860191)")]
    return []


DIALECT = Dialect(
    "nexrl", "names", detect, index, read,
    before={"metrics": "a line of its loss holds numbers by name, as a line of a log does"},
)  # fmt: skip

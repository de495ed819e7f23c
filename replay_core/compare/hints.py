"""What usually explains a finding: what a person who debugs such runs would check next (NexRL's usage guide)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay_core import naming

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: A loss further apart than this is worth a question, whatever its scale (the guide's own limit).
LOSS_GAP = 1e-5

#: Where each stage is switched on.
_SELF_HOSTED = ("trajectory", "old_log_probs", "forward_data", "loss", "param", "gradient")
_REMOTE = ("prepared_trajectories", "datums", "training_metrics")
_WEAVER = ("forward_data", "loss", "is_loss_debug", "batch_inputs", "param", "gradient")
#: Dialects of which it is known how to enable what is missing.
_DUMPERS = ("nexrl", "native")


def hints(rows: Sequence[TensorVerdict], dialects: tuple[str, str]) -> list[str]:
    """Sentences for what was found: shapes, losses, stages that only one side has.

    dialects: of a and of b; how to enable what is missing is known of NexRL's dumper and of our own recorder.
    """
    return [*_shapes(rows), *_losses(rows), *_missing(rows, dialects)]


def _shapes(rows: Sequence[TensorVerdict]) -> list[str]:
    names = list(dict.fromkeys(row.name for row in rows if row.verdict == "SHAPE"))
    if not names:
        return []
    return [
        f"shape mismatch ({_some(names)}): check that both sides pad alike (padding side, pad-to-multiple, "
        "longest-in-batch or fixed) and have the same max_length"
    ]


def _losses(rows: Sequence[TensorVerdict]) -> list[str]:
    def gap(name: str) -> float:
        of = (row.figures.max_abs for row in rows if row.name == name and row.figures is not None)
        return max(of, default=0.0)

    if gap("loss") <= LOSS_GAP:
        return []
    parts = [name for name in ("pg_loss", "kl_loss", "entropy_loss") if gap(name) > LOSS_GAP]
    checks = [
        "entropy_coeff is the same on both sides",
        "the precision (fp16, bf16 or fp32)",
        "the random seed is fixed",
    ]
    said = f"losses differ by up to {gap('loss'):.3g}, more than {LOSS_GAP:g}: check that " + "; ".join(checks)
    if parts:
        said += f" (of its parts {_some(parts)} differ too)"
    dtypes = {(row.a[1].dtype, row.b[1].dtype) for row in rows if row.a and row.b and row.a[1].dtype != row.b[1].dtype}
    if dtypes:
        one, other = sorted(dtypes)[0]
        said += f"; tensors of {one} are paired with {other} here"
    if any(row.key.stage == "is_loss_debug" for row in rows):
        return [said + "; the values in between stand in is_loss_debug"]
    return [said + "; record is_loss_debug to see the values in between"]


def _missing(rows: Sequence[TensorVerdict], dialects: tuple[str, str]) -> list[str]:
    held: dict[str, set[str]] = {"a": set(), "b": set()}
    if not any(word in dialect for word in _DUMPERS for dialect in dialects):
        return []
    for row in rows:
        for which, side in (("a", row.a), ("b", row.b)):
            if side is not None and naming.meaning(row.name).kind != "note":
                held[which].add(side[0].key.stage)
    said = []
    for which, other, dialect in (("a", "b", dialects[0]), ("b", "a", dialects[1])):
        if not any(word in dialect for word in _DUMPERS):
            continue
        for stage in sorted(held[other] - held[which]):
            ways = _ways(stage)
            if ways:
                said.append(f"{stage} is missing in {which}: {' or '.join(ways)} enables it")
    return said


def _ways(stage: str) -> list[str]:
    ways = []
    if stage in _SELF_HOSTED:
        ways.append(f"debug.dump_options.{stage}: true")
    if stage in _REMOTE:
        ways.append(f"debug.remote_api_dump_options.{stage}: true")
    if stage in _WEAVER:
        ways.append(f"WEAVER_DEBUG_DUMP_OPTIONS={stage} (with WEAVER_DEBUG_DUMP_ENABLED=1)")
    if stage in ("param", "gradient") and ways:
        ways[0] += " with a target_param_pattern and use_orig_params"
    return ways


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

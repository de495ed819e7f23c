"""What usually explains a finding: what a person who debugs such runs would check next (NexRL's usage guide)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

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


#: Losses whose greatest difference is asked for.
_LOSSES = ("loss", "pg_loss", "kl_loss", "entropy_loss")


class Clues(Struct):
    """Takes rows as they are judged, and says what they suggest: shapes, losses, stages that only one side has."""

    #: Names whose shapes differ, each once, in their order.
    _shapes: dict[str, None] = field(default_factory=dict)
    #: The greatest difference of each loss.
    _gaps: dict[str, float] = field(default_factory=dict)
    #: Whether ranks faced one process, and whether a loss is off by more than rounding leaves.
    _has_ranks: bool = False
    _loss_diverges: bool = False
    _dtypes: set[tuple[str, str]] = field(default_factory=set)
    _stages: set[str] = field(default_factory=set)
    #: The stages of which a side holds more than bookkeeping.
    _held: dict[str, set[str]] = field(default_factory=lambda: {"a": set(), "b": set()})

    def take(self, row: TensorVerdict) -> None:
        """Take a row, in the order of computation."""
        if row.verdict == "SHAPE":
            self._shapes[row.name] = None
        self._has_ranks = self._has_ranks or row.ranks is not None
        if row.figures is not None and row.name in _LOSSES:
            self._gaps[row.name] = max(self._gaps.get(row.name, 0.0), row.figures.max_abs)
            self._loss_diverges = self._loss_diverges or row.verdict.diverges
        if row.a is not None and row.b is not None and row.a[1].dtype != row.b[1].dtype:
            self._dtypes.add((row.a[1].dtype, row.b[1].dtype))
        self._stages.add(row.key.stage)
        if naming.meaning(row.name).kind != "note":
            for which, side in (("a", row.a), ("b", row.b)):
                if side is not None:
                    self._held[which].add(side[0].key.stage)

    def hints(self, dialects: tuple[str, str]) -> list[str]:
        """Sentences for what was found.

        dialects: of a and of b; how to enable what is missing is known of NexRL's dumper and of our own recorder.
        """
        return [*self._of_shapes(), *self._of_losses(), *self._missing(dialects)]

    def _of_shapes(self) -> list[str]:
        if not self._shapes:
            return []
        return [
            f"shape mismatch ({_some(list(self._shapes))}): check that both sides pad alike (padding side, "
            "pad-to-multiple, longest-in-batch or fixed) and have the same max_length"
        ]

    def _of_losses(self) -> list[str]:
        gap = self._gaps.get("loss", 0.0)
        # Ranks round otherwise than one process in every step, and what that leaves of a loss is off by no setting.
        if gap <= LOSS_GAP or (self._has_ranks and not self._loss_diverges):
            return []
        parts = [name for name in _LOSSES[1:] if self._gaps.get(name, 0.0) > LOSS_GAP]
        checks = [
            "entropy_coeff is the same on both sides",
            "the precision (fp16, bf16 or fp32)",
            "the random seed is fixed",
        ]
        said = f"losses differ by up to {gap:.3g}, more than {LOSS_GAP:g}: check that " + "; ".join(checks)
        if parts:
            said += f" (of its parts {_some(parts)} differ too)"
        if self._dtypes:
            one, other = sorted(self._dtypes)[0]
            said += f"; tensors of {one} are paired with {other} here"
        if "is_loss_debug" in self._stages:
            return [said + "; the values in between stand in is_loss_debug"]
        return [said + "; record is_loss_debug to see the values in between"]

    def _missing(self, dialects: tuple[str, str]) -> list[str]:
        said = []
        for which, other, dialect in (("a", "b", dialects[0]), ("b", "a", dialects[1])):
            if not any(word in dialect for word in _DUMPERS):
                continue
            for stage in sorted(self._held[other] - self._held[which]):
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

"""Settings that stand in the records themselves, beside the batch: `loss_mode`, `clip_ratio_low`, `beta`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replay_core import pages
from replay_core.errors import RldbgError
from replay_core.records import Record, Run

#: Longer words are texts of a sample.
_LONGEST = 64
#: Numbers that are settings wherever they stand; any other may be what a step came to.
_NUMBERS = frozenset({
    "beta", "dpo_beta", "label_smoothing", "clip_ratio_low", "clip_ratio_high", "clip_ratio", "clip_eps", "eps_clip",
    "eps_clip_high", "epsilon", "epsilon_high", "temperature", "top_p", "top_k", "rollout_n", "num_generations",
    "n_samples_per_prompt",
})  # fmt: skip
#: Where they are kept among a run's facts.
SAID = "said_in_records"


def said_in_records(run: Run, known: Mapping[str, Any]) -> dict[str, Any]:
    """Words, and numbers of settings, that the first and the last record of a batch say alike, one each, and that
    nothing else states.
    """
    batches = [record for record in run.records if record.key.stage != "training_metrics"]
    if not batches:
        return {}
    first, last = _said(batches[0]), _said(batches[-1])
    if batches[0].key.stage != batches[-1].key.stage or batches[0].path.parent != batches[-1].path.parent:
        # What lies in another folder need not repeat it.
        last = _said(next(one for one in reversed(batches) if one.path.parent == batches[0].path.parent))
    return {name: value for name, value in first.items() if last.get(name) == value and name not in known}


def _said(record: Record) -> dict[str, Any]:
    try:
        refs = [ref for ref in record.tensors() if ref.shape == () and ref.is_readable and ref.line is None]
        values = {ref.name.lower(): pages.array(ref).item() for ref in refs if ref.is_text or ref.name in _NUMBERS}
    except RldbgError:
        return {}
    return {name: value for name, value in values.items() if not isinstance(value, str) or len(value) <= _LONGEST}

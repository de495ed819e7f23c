"""Every source of randomness, how it is controlled, and what each critic really used. Read back, never assumed."""

from __future__ import annotations

from typing import Any

from replay_core.documents.parity import RandomSource
from replay_core.parity.sides import Side

#: (component, environment variable, configuration, name in a readback)
_ROWS = (
    ("main seed", None, "seed", "seed"),
    ("training seed", None, "training_args.seed", "training_seed"),
    ("data seed", None, "training_args.data_seed", "data_seed"),
    ("value head init", "VALUE_HEAD_INIT", "model_args.value_head_init", "head"),
    ("head dropout", "CRITIC_DROPOUT_PROB", "model_args.summary_dropout_prob", "head_dropout"),
    ("other dropout", None, "the model's own config", "dropout"),
    ("data shuffling", "CRITIC_DATA_SHUFFLE", "model_args.data_shuffle", "shuffle"),
)


def report(a: Side, b: Side) -> list[RandomSource]:
    """A row per source: `a` and `b` as found in the built critics, `equal` None where one was not read back."""
    rows: list[RandomSource] = []
    for component, variable, key, name in _ROWS:
        found_a, found_b = _found(a, name), _found(b, name)
        known = found_a is not None and found_b is not None
        rows.append(
            {
                "component": component,
                "environment_variable": variable,
                "config": key,
                "a": found_a,
                "b": found_b,
                "from_a": _source(a, key),
                "from_b": _source(b, key),
                "equal": found_a == found_b if known else None,
            }
        )
    rows.append(_drawn("rows trained, in order", _orders(a), _orders(b)))
    rows.append(_drawn("value head weights", _digest(a), _digest(b)))
    return rows


def _found(side: Side, name: str) -> Any:
    if side.readback is None:
        return None
    if name == "head":
        mean, bias = side.said("head_weight_mean"), side.said("head_bias")
        weights = (
            f"all {mean:.6g}" if side.said("head_is_constant") else f"drawn, std {side.said('head_weight_std'):.3g}"
        )
        return weights + (", no bias" if bias is None else f", bias {bias:.6g}")
    if name == "dropout":
        every = side.said("dropout") or {}
        own = {key: p for key, p in every.items() if "v_head" not in key and "value_head" not in key}
        return "none" if not own else f"{len(own)} layers, up to {max(own.values()):g}"
    return side.said(name)


def _source(side: Side, key: str) -> str | None:
    sources = side.said("sources") or {}
    name = {"seed": "seed", "training_args.seed": "training_seed", "training_args.data_seed": "data_seed"}.get(key)
    found = sources.get(name or key.rpartition(".")[2])
    return None if found is None else str(found)


def _drawn(component: str, a: Any, b: Any) -> RandomSource:
    return {
        "component": component, "environment_variable": None, "config": None, "a": a, "b": b,
        "from_a": None, "from_b": None,
        "equal": None if a is None or b is None else a == b,
    }  # fmt: skip


def _orders(side: Side) -> str | None:
    if not side.steps:
        return None
    shown = [",".join(map(str, step["rows"])) for step in side.steps]
    return " | ".join(shown[:4]) + (f" | {len(shown) - 4} more" if len(shown) > 4 else "")


def _digest(side: Side) -> str | None:
    return None if not side.weights else side.weights.get("v_head.summary.weight")

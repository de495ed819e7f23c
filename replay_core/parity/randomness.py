"""Every source of randomness, how it is controlled, and what each critic really used. Read back, never assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replay_core.parity.sides import CriticSide

if TYPE_CHECKING:
    from replay_core.documents.parity import RandomSource

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


def report(a: CriticSide, b: CriticSide) -> list[RandomSource]:
    """A row per source: `a` and `b` as found in the built critics, `equal` None where one was not read back."""
    return [
        *(
            _row(component, _found(a, name), _found(b, name), variable, key, _source(a, key), _source(b, key))
            for component, variable, key, name in _ROWS
        ),
        _row("rows trained, in order", _orders(a), _orders(b)),
        _row("value head weights", _digest(a), _digest(b)),
    ]


def _row(
    component: str, a: Any, b: Any, variable: str | None = None, key: str | None = None, from_a: str | None = None,
    from_b: str | None = None,
) -> RandomSource:  # fmt: skip
    return {
        "component": component, "environment_variable": variable, "config": key, "a": a, "b": b, "from_a": from_a,
        "from_b": from_b, "equal": None if a is None or b is None else a == b,
    }  # fmt: skip


def _found(side: CriticSide, name: str) -> Any:
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


def _source(side: CriticSide, key: str) -> str | None:
    sources = side.said("sources") or {}
    name = {"seed": "seed", "training_args.seed": "training_seed", "training_args.data_seed": "data_seed"}.get(key)
    found = sources.get(name or key.rpartition(".")[2])
    return None if found is None else str(found)


def _orders(side: CriticSide) -> str | None:
    if not side.steps:
        return None
    shown = [",".join(map(str, step["rows"])) for step in side.steps]
    return " | ".join(shown[:4]) + (f" | {len(shown) - 4} more" if len(shown) > 4 else "")


def _digest(side: CriticSide) -> str | None:
    return None if not side.weights else side.weights.get("v_head.summary.weight")

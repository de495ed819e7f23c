"""Critic configurations, and one warm child that runs them: a fresh one would import Megatron for each test."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from replay_core import workbench
from replay_core.executors.child import ChildRunner
from replay_core.parity.config import SHIPPED

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install 'rldbg[parity]'"
)
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'rldbg[parity]'"
)

Parity = Callable[..., Any]


def write_config(directory: Path, name: str, backend: str, **changes: Any) -> Path:
    """A shipped configuration with other values: `model`, `training`, `strategy` are sections, the rest the top's.

    backend: torch (the DeepSpeed critic's model without DeepSpeed), deepspeed or megatron.
    """
    shipped = "megatron" if backend == "megatron" else "deepspeed"
    content = yaml.safe_load((SHIPPED / f"critic_{shipped}.yaml").read_text(encoding="utf-8"))
    critic = content["critic"]
    critic["strategy_args"]["strategy_name"] = f"{backend}_train"
    critic["model_args"].update(changes.pop("model", {}))
    critic["training_args"].update(changes.pop("training", {}))
    critic["strategy_args"]["strategy_config"].update(changes.pop("strategy", {}))
    content.update(changes)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def critics_child() -> Iterator[ChildRunner]:
    with ChildRunner(warm=True, time_limit_s=240) as runner:
        yield runner


@pytest.fixture
def parity(tmp_path: Path, critics_child: ChildRunner, monkeypatch: pytest.MonkeyPatch) -> Parity:
    """Run two critics and give the document. `a` and `b` are changes to either configuration."""
    for variable in ("VALUE_HEAD_INIT", "CRITIC_DROPOUT_PROB", "CRITIC_DATA_SHUFFLE"):
        monkeypatch.delenv(variable, raising=False)

    def run(
        a: Any | None = None,
        b: Any | None = None,
        *,
        backends: tuple[str, str] = ("torch", "megatron"),
        **asked: Any,
    ) -> Any:
        paths = [
            write_config(tmp_path, name, backend, **(changes or {}))
            for name, backend, changes in zip("ab", backends, (a, b), strict=True)
        ]
        asked = {"data": ("random", "padded"), "steps": 1, **asked}
        return workbench.parity(paths[0], paths[1], tmp_path / "out", critics_child, **asked)

    return run

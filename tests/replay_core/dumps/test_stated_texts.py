"""Settings that stand in a text: the repr of a configuration, JSON, a command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_core.diagnose.algorithm import Algorithm, learning_rate, stated_by
from replay_core.dumps import open_run
from replay_core.dumps.stated_texts import of_command, opened_text
from replay_core.recorder import Recorder


def test_the_repr_of_a_configuration_is_a_table() -> None:
    text = "GRPOConfig(output_dir='a, b', beta=0.04, betas=(0.9, 0.95), lora=LoraConfig(r=8, alpha=16), n=None, x=True)"
    assert opened_text(text) == {
        "output_dir": "a, b", "beta": 0.04, "betas": [0.9, 0.95], "lora": {"r": 8, "alpha": 16}, "n": None, "x": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("{'actor': {'clip_ratio': 0.2, 'on': False}, 'n': 8}", {"actor": {"clip_ratio": 0.2, "on": False}, "n": 8}),
        (json.dumps({"lr": 1e-6, "n": 8}), {"lr": 1e-6, "n": 8}),
        ("Namespace(lr=1e-06, name='grpo')", {"lr": 1e-6, "name": "grpo"}),
    ],
)
def test_dicts_and_namespaces_are_tables_as_well(text: str, table: object) -> None:
    assert opened_text(text) == table


@pytest.mark.parametrize("text", [
    "rule: .8 x share of places right (a function of the text)", "reward(text=completion)", "", "(", "{", "f(a, b)",
    "f(" * 200 + ")" * 200, 3, None,
])  # fmt: skip
def test_any_other_text_says_nothing(text: object) -> None:
    assert opened_text(text) is None


def test_options_of_a_command_line_are_settings() -> None:
    line = ["train.py", "--eps-clip", "0.2", "--lr=1e-6", "+actor.clip_ratio_high=0.28", "algorithm.adv_estimator=grpo",
            "--use_kl_loss", "--no-shuffle", "--floor", "-1", "data.json", "--last"]  # fmt: skip
    assert of_command(line) == {
        "eps-clip": 0.2, "lr": 1e-6, "actor.clip_ratio_high": 0.28, "algorithm.adv_estimator": "grpo",
        "use_kl_loss": True, "shuffle": False, "floor": -1, "last": True,
    }  # fmt: skip


def _stated(path: Path, flags: dict[str, object], *command: str) -> Algorithm:
    with Recorder(path, flags=flags) as recorder, recorder.step(0) as record:
        record("loss", loss=0.5)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["command"] = ["train.py", *command]
    (path / "manifest.json").write_text(json.dumps(manifest))
    return Algorithm(stated_by(open_run(path)))


def test_what_is_stated_goes_before_how_the_run_was_called(tmp_path: Path) -> None:
    told = _stated(tmp_path / "d", {"eps_clip": 0.2, "config": "C(beta=0.04, lr=1e-5)"},
                   "--eps-clip", "0.3", "--beta", "0.5", "actor/kl_loss_coef=0.01", "critic.warmup=3")  # fmt: skip
    assert told.number("eps_clip") == 0.2
    assert told.number("beta") == 0.04
    assert told.number("kl_loss_coef") == 0.01
    assert learning_rate(told) == 1e-5


def test_the_rate_of_a_critic_alone_is_no_policys(tmp_path: Path) -> None:
    assert learning_rate(_stated(tmp_path / "d", {}, "critic.optim.lr=1e-5", "--n", "8")) is None


@pytest.mark.parametrize("name", ["actor.clip_ratio", "actor/clip_ratio", "--actor.clip-ratio", "Clip-Ratio"])
def test_a_setting_is_known_by_the_last_part_of_its_name(name: str) -> None:
    assert Algorithm({"flags": {name: 0.2}}).clip_range == (0.2, 0.2)

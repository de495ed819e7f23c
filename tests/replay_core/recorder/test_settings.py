from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from replay_core.errors import RequestError
from replay_core.recorder import Recorder, Settings, from_areal, from_environment, from_nexrl, from_yaml
from replay_core.recorder.settings import SELF_HOSTED

GUIDE = """
trainer: {model: "${oc.env:NOT_SET_AND_NOT_ASKED_FOR}"}
debug:
  enable_data_dump: true
  dump_dir: "${oc.env:EXPERIMENT_PATH,./debug_dump}/debug_dump"
  dump_format: "pt"
  dump_every_n_steps: 2
  dump_options:
    trajectory: true
    old_log_probs: true
    forward_data: true
    loss: true
    param: false
    gradient: true
  remote_api_dump_options:
    datums: true
  target_param_pattern: "model\\\\.layers\\\\.0\\\\.self_attn\\\\.q_proj\\\\.weight"
"""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "npz"),
        ("level", "everything"),
        ("dump_every_n_steps", 0),
        ("dump_every_n_steps", True),
        ("on_error", "ignore"),
        ("queue_bytes", -1),
        ("max_keep", 0),
        ("pin_steps", [-1]),
        ("dump_steps", "3"),
        ("stages", ["losses"]),
        ("stages", "loss"),
        ("target_param_pattern", "("),
        ("no_such_thing", 1),
    ],
)
def test_a_wrong_setting_is_refused_at_the_start_by_key_and_value(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refusal:
        Recorder(tmp_path / "dump", **{key: value})
    assert key in str(refusal.value)
    assert repr(value) in str(refusal.value.found) or repr(value[0]) in str(refusal.value.found)
    assert not (tmp_path / "dump").exists()


def test_the_nexrl_guides_yaml_is_read_with_its_interpolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GUIDE)
    monkeypatch.setenv("EXPERIMENT_PATH", "/runs/7")
    configured = from_yaml(path)
    assert configured.directory == Path("/runs/7/debug_dump")
    settings = configured.settings
    assert settings.stages == {"trajectory", "old_log_probs", "forward_data", "loss", "gradient", "datums"}
    assert (settings.enabled, settings.format, settings.dump_every_n_steps) == (True, "pt", 2)
    assert settings.wants_param("model.layers.0.self_attn.q_proj.weight")
    assert not settings.wants_param("model.layers.1.self_attn.q_proj.weight")
    monkeypatch.delenv("EXPERIMENT_PATH")
    assert from_yaml(path).directory == Path("debug_dump/debug_dump")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("dump_format: csv", "debug.dump_format: 'csv'"),
        ("dump_every_n_steps: 0", "debug.dump_every_n_steps: 0"),
        ("dump_dir: 7", "debug.dump_dir: 7"),
        ("enable_data_dump: perhaps", "debug.enable_data_dump: 'perhaps'"),
        ("dump_options: {losses: true}", "debug.dump_options.losses: True"),
        ("dump_options: {loss: 2}", "debug.dump_options.loss: 2"),
        ("dump_option: {loss: true}", "debug.dump_option: {'loss': True}"),
        ("target_param_pattern: '['", "debug.target_param_pattern: '['"),
    ],
)
def test_a_wrong_value_in_the_yaml_is_named_as_the_user_wrote_it(line: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"debug:\n  {line}\n")
    with pytest.raises(RequestError) as refusal:
        from_yaml(path)
    assert refusal.value.found == key
    assert refusal.value.file == str(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("debug: {dump_dir: '${oc.env:RLDBG_NOT_SET}'}", "RLDBG_NOT_SET"),
        ("trainer: {}", "no `debug:` section"),
        ("defaults: [base, _self_]", "composed"),
        ("debug: [1", "cannot be read"),
    ],
)
def test_a_yaml_that_says_nothing_usable_is_an_error_that_helps(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(RequestError) as refusal:
        from_yaml(path)
    assert says in str(refusal.value)


def test_an_unknown_key_is_told_the_known_ones_and_a_list_no_word_of_variables(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("debug:\n  enable_data_dmp: true\n")
    with pytest.raises(RequestError, match="unknown key") as refused:
        from_yaml(tmp_path / "c.yaml")
    assert "enable_data_dump" in str(refused.value.expected)
    assert "queue_bytes" in str(refused.value.expected)
    (tmp_path / "c.yaml").write_text("- debug\n")
    with pytest.raises(RequestError, match="no `debug:` section") as refused:
        from_yaml(tmp_path / "c.yaml")
    assert refused.value.hint is None


def test_without_omegaconf_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with pytest.raises(RequestError, match="needs omegaconf") as refusal:
        from_yaml(tmp_path / "config.yaml")
    assert "rldbg[yaml]" in str(refusal.value.hint)


def test_weavers_variables_are_read() -> None:
    configured = from_environment(
        {
            "WEAVER_DEBUG_DUMP_ENABLED": "1",
            "WEAVER_DEBUG_DUMP_DIR": "./weaver_debug_dump",
            "WEAVER_DEBUG_DUMP_EVERY_N": "3",
            "WEAVER_DEBUG_DUMP_OPTIONS": "forward_data,loss, is_loss_debug",
            "HOME": "/",
        }
    )
    assert configured.directory == Path("weaver_debug_dump")
    assert configured.settings == Settings(
        dump_every_n_steps=3, stages=frozenset({"forward_data", "loss", "is_loss_debug"})
    )
    assert not from_environment({}).settings.enabled
    assert set(SELF_HOSTED) >= {"is_loss_debug", "batch_inputs"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("ENABLED", "maybe"), ("EVERY_N", "0"), ("EVERY_N", "x"), ("OPTIONS", "loss,losses"), ("OPTION", "loss")],
)
def test_a_wrong_variable_is_refused_by_its_own_name(name: str, value: str) -> None:
    with pytest.raises(RequestError) as refusal:
        from_environment({f"WEAVER_DEBUG_DUMP_{name}": value})
    assert f"WEAVER_DEBUG_DUMP_{name}" in str(refusal.value.found)


def test_areals_flags_are_read(tmp_path: Path) -> None:
    dumping = from_areal(
        {"dump_rollout_data": True, "path": str(tmp_path), "dump_steps": [0, 2], "max_keep": 3, "pin_steps": [0],
         "dump_scope": "full"}
    )  # fmt: skip
    assert dumping.settings.dump_steps == {0, 2}
    assert (dumping.settings.max_keep, dumping.settings.pin_steps) == (3, {0})
    assert "old_log_probs" in (dumping.settings.stages or ())
    assert not dumping.replay
    replaying = from_areal({"replay_rollout_data": True, "path": str(tmp_path), "max_keep": None})
    assert replaying.replay
    assert not replaying.settings.enabled


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"dump_rollout_data": True, "replay_rollout_data": True}, "mutually exclusive"),
        ({"dump_steps": [-1]}, "dump_steps: [-1]"),
        ({"pin_steps": [0.5]}, "pin_steps: [0.5]"),
        ({"max_keep": 0}, "max_keep: 0"),
        ({"dump_scope": "half"}, "dump_scope: 'half'"),
        ({"dump_rolout_data": True}, "dump_rolout_data: True"),
        ({"replay_rollout_data": True, "path": "/nowhere/at/all"}, "path: '/nowhere/at/all'"),
    ],
)
def test_areals_rules_are_held_at_the_start(section: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refusal:
        from_areal(section)
    assert says in str(refusal.value)


def test_a_section_with_areals_flags_in_a_yaml_is_read_as_areals(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trajectory_debug: {dump_rollout_data: true, path: runs}\n")
    assert from_yaml(path, "trajectory_debug").directory == Path("runs")


def test_nexrls_section_is_off_until_it_is_enabled_and_something_is_chosen() -> None:
    assert not from_nexrl({}).settings.enabled
    assert not from_nexrl({"enable_data_dump": True}).settings.enabled
    assert from_nexrl({"enable_data_dump": True, "dump_options": {"loss": True}}).settings.enabled

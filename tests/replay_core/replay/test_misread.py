"""Which ways to misread a config there are, and what they make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from replay_core.replay.misread import misread, misreadings

_SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
_OF_KINDS = {"full_attention": _SCALED, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("stated", "names"),
    [
        ({}, []),
        ({"sliding_window": 8}, ["no_window", "longer_window", "shorter_window"]),
        ({"sliding_window": 8, "use_sliding_window": False}, []),
        ({"sliding_window": 64}, []),  # no row reaches it
        ({"rope_parameters": _SCALED}, ["unscaled_rope", "other_base"]),
        ({"rope_parameters": _OF_KINDS}, ["unscaled_rope", "other_base"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e4}, ["unscaled_rope"]),
        ({"rope_scaling": None, "rope_theta": 1e6}, ["other_base"]),
        ({"final_logit_softcapping": 30.0, "attn_logit_softcapping": None}, ["no_final_cap"]),
        ({"text_config": {"sliding_window": 8}}, ["no_window", "longer_window", "shorter_window"]),
        ([], []),
    ],
)
def test_only_what_changes_the_rows_is_tried(stated: Any, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert [one.name for one in misreadings(tmp_path, 20)] == names


def test_a_folder_without_a_config_is_not_misread(tmp_path: Path) -> None:
    assert list(misreadings(tmp_path, 20)) == []


def test_a_window_is_lost_and_layers_keep_their_kinds() -> None:
    config = hf.Gemma3TextConfig(sliding_window=8, num_hidden_layers=6)
    kinds = list(config.layer_types)
    misread(config, "shorter_window")
    assert config.sliding_window == 7
    misread(config, "no_window")
    assert config.sliding_window > 1 << 20
    assert config.layer_types == kinds


@pytest.mark.parametrize(("name", "kept"), [("unscaled_rope", "default"), ("other_base", "linear")])
def test_rotations_are_unscaled_or_of_another_base(name: str, kept: str) -> None:
    config = hf.LlamaConfig(rope_parameters=dict(_SCALED))
    misread(config, name)
    assert config.rope_parameters["rope_type"] == kept
    assert config.rope_parameters["rope_theta"] == (5e5 if name == "unscaled_rope" else 1e4)

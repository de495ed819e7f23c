import json
import subprocess
import sys

import pytest

from replay_core.errors import RequestError
from replay_core.replay.flags import ATTENTIONS, Flags, settings_known


def test_flags_survive_a_round_trip_through_json():
    flags = Flags("eager", packing=True, dtype="bfloat16", rows_per_forward=2, block_mask=False, threads=2)
    assert Flags.from_mapping(json.loads(json.dumps(flags.to_mapping()))) == flags


def test_texts_set_flags():
    flags = Flags.parse("attention=eager packing=on dtype=bf16 rows-per-forward=2 block_mask=off threads=3")
    assert flags == Flags("eager", True, "bfloat16", 2, False, threads=3)
    assert Flags.parse(["rows_per_forward=all"], base=flags).rows_per_forward is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("atention=eager", "attention"),
        ("attention=sdpa-flsh", "sdpa-flash"),
        ("dtype=fp8", "bfloat16"),
        ("packing=maybe", "on | off"),
        ("rows_per_forward=0", "a number from 1"),
        ("eager", "attention=eager"),
        ("device=tpu", "cuda"),
    ],
)
def test_a_wrong_flag_names_what_exists(text, named):
    with pytest.raises(RequestError) as refused:
        Flags.parse(text)
    assert named in str(refused.value)


def test_a_near_miss_is_suggested():
    with pytest.raises(RequestError, match="did you mean sdpa-math"):
        Flags(attention="sdpa_math")


def test_an_unknown_name_in_a_mapping_is_refused():
    with pytest.raises(RequestError, match="no flag 'speed'"):
        Flags.from_mapping({"speed": "off"})


def test_labels_are_for_people():
    assert Flags(packing=True).label() == "packed, sdpa, float32"
    assert Flags(packing=True, block_mask=False).label() == "packed, no block mask, sdpa, float32"
    assert Flags("eager", dtype="bfloat16", rows_per_forward=2).label() == "padded, 2 rows per forward, eager, bfloat16"
    assert Flags(packing=True).reference().label() == "rows alone, sdpa, float32"


def test_the_reference_keeps_the_dtype_and_has_the_kernel_that_was_recorded():
    flags = Flags("eager", packing=True, dtype="bfloat16", block_mask=False)
    assert flags.reference() == Flags("sdpa", dtype="bfloat16", rows_per_forward=1)
    assert flags.reference({"attention": "sdpa-math"}).attention == "sdpa-math"
    assert Flags("own").reference({"attention": "eager"}).attention == "own", "a model's own kernel may be all it has"
    assert flags.reference().is_reference


def test_settings_that_a_trainer_wrote_in_its_own_words_are_no_flags():
    said = {"attention": "flash_attention_2", "packing": 1, "dtype": "bfloat16", "lr": 1e-6, "rows_per_forward": 0}
    assert settings_known(said) == {"dtype": "bfloat16"}
    assert settings_known({"asked": {"packing": True}, "effective": {}}) == {"packing": True}
    assert settings_known(None) == {}


def test_every_attention_has_an_implementation():
    from replay_core.replay import attention

    for name in ATTENTIONS:
        assert name == "own" or attention.implementation(attention.resolve(Flags(name))[0])


def test_plans_are_made_without_torch_or_numpy():
    code = (
        "import sys; from replay_core.replay import Flags, ReplayPlan;"
        "ReplayPlan('d', 0, 0, 0, 'm', 'o', Flags()).to_mapping();"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"

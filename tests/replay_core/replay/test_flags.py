import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replay_core.replay
from replay_core.errors import RequestError
from replay_core.replay.axes import Axes
from replay_core.replay.flags import ATTENTIONS, FLAGS, IN_PANE, Flags, page, settings_known

PAGE = Path(__file__).resolve().parents[3] / "docs" / "flags.md"
_WORDS = {True: "on", False: "off"}


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


def test_every_flag_is_an_axis_of_a_matrix_an_option_and_a_row_of_its_page():
    from tui_debugger.commands.replay import command

    options = {one.name for one in command.params}
    for name, flag in FLAGS.items():
        assert name in options
        values = flag.values or (1, 2)
        words = [_WORDS.get(value, str(value)) if isinstance(value, bool) else str(value) for value in values]
        assert Axes.parse(f"{name}={','.join(words)}").values[name] == tuple(values)
    assert PAGE.read_text() == page(), "make docs"


def test_every_flag_is_read_where_it_acts():
    """A flag that nothing reads would be asked for, listed, and do nothing."""
    room = Path(replay_core.replay.__file__).parent
    acting = "\n".join(file.read_text() for file in room.glob("*.py") if file.name not in ("flags.py", "twins.py"))
    assert [name for name in FLAGS if not re.search(rf"flags\.{name}\b", acting)] == []


def test_every_setting_that_a_flag_says_it_is_read_back_as_is_said_by_a_cell(replay):
    effective = replay("", capture="none")["effective"]
    assert [flag.effective for flag in FLAGS.values() if flag.effective and flag.effective not in effective] == []


def test_every_line_of_the_pane_has_a_key_of_its_own():
    for what in ("key", "row", "label"):
        values = [getattr(FLAGS[name], what) for name in IN_PANE]
        assert len(set(values)) == len(values)
    assert [FLAGS[name].row for name in IN_PANE] == list(range(1, len(IN_PANE) + 1))


def test_plans_are_made_without_torch_or_numpy():
    code = (
        "import sys; from replay_core.replay.flags import Flags; from replay_core.replay.plan import ReplayPlan;"
        "ReplayPlan('d', 0, 0, 0, 'm', 'o', Flags()).to_mapping();"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"

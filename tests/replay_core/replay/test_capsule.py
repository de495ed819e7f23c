"""A capsule: made of a real leak, opened as a stranger's file, and its script run by itself."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from replay_core import workbench
from replay_core.errors import DumpError, ModelError, RequestError
from replay_core.replay import capsule as capsules
from replay_core.replay.flags import Flags
from tests.builders import Here

LEAK = "packing=on block_mask=off"


@pytest.fixture(scope="module")
def made(recorded, tmp_path_factory):
    """(the replay of a leak, its capsule's document, the folder of both files)."""
    folder = tmp_path_factory.mktemp("capsule")
    plan = {"dump": str(recorded), "step": 0, "rank": 0, "micro": 0, "model": "checkpoint",
            "flags": Flags.parse(f"threads=1 {LEAK}").to_mapping()}  # fmt: skip
    doc = workbench.replay(plan, folder / "replay", Here())
    file, script = folder / "bug.capsule", folder / "repro.py"
    return doc, workbench.capsule(doc, file, folder / "made", Here(), script=script), folder


def rewritten(made, tmp_path, change):
    """The capsule with its entries as `change` makes them: a list of (name, bytes)."""
    with zipfile.ZipFile(made[2] / "bug.capsule") as held:
        entries = [(name, held.read(name)) for name in held.namelist()]
    file = tmp_path / "changed.capsule"
    with zipfile.ZipFile(file, "w") as packed:
        for name, data in change(entries):
            packed.writestr(name, data)
    return file


@pytest.mark.long
def test_a_capsule_is_the_smallest_case_of_what_was_found(made):
    doc, answer, folder = made
    held = answer["capsule"]
    assert doc["cells"][-1]["cause"]["kind"] == answer["cells"][-1]["cause"]["kind"] == "other_samples"
    assert (held["rows"], held["layers"], held["of_layers"], held["weights"]) == (2, 1, 2, "own")
    assert sum(held["tokens"]) < 8
    assert held["bytes"] == (folder / "bug.capsule").stat().st_size < 1_000_000
    small = doc["cells"][-1]["cause"]["evidence"]["smallest"]
    assert (small["rows"], small["layers"], small["of_layers"]) == (2, 1, 2)
    assert "the first layer of 2" in doc["cells"][-1]["cause"]["sentence"]


@pytest.mark.long
def test_an_opened_capsule_shows_the_same_to_the_bit(made, tmp_path):
    answer = workbench.open_capsule(made[2] / "bug.capsule", tmp_path, Here())
    assert answer["cells"][-1]["agreement"]["agrees"] is False
    assert answer["capsule"]["as_made"] == {"reference": 0.0, "cell": 0.0}
    assert answer["capsule"]["sentence"] == made[1]["capsule"]["sentence"]


@pytest.mark.long
def test_nothing_in_a_capsule_names_the_machine_the_tokens_or_a_pickle(made, recorded):
    with zipfile.ZipFile(made[2] / "bug.capsule") as held:
        assert sorted(held.namelist()) == sorted(capsules.NAMES)
        whole = b"".join(held.read(name) for name in held.namelist())
        config = json.loads(held.read("model/config.json"))
    assert str(recorded.parent).encode() not in whole
    assert config["vocab_size"] == 64


@pytest.mark.slow
def test_the_script_shows_the_difference_without_rldbg(made, tmp_path):
    script = made[2] / "repro.py"
    assert "replay_core" not in script.read_text(encoding="utf-8")
    ran = subprocess.run([sys.executable, "-I", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "sample 1: its worst token is" in ran.stdout
    # With a mask between the samples nothing is left to show.
    healed = tmp_path / "healed.py"
    text = script.read_text(encoding="utf-8")
    healed.write_text(text.replace('"attention_mask":[[1', '"without":[[1').replace('"use_cache"]}', '"use_cache"]}'))
    healed.write_text(healed.read_text().replace("call.items() if", 'call.items() if name != "without" and'))
    ran = subprocess.run([sys.executable, "-I", healed], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "the difference is gone" in ran.stderr


@pytest.mark.long
@pytest.mark.parametrize("change", [
    lambda entries: [*entries, ("model/modeling_evil.py", b"import os")],
    lambda entries: [*entries, ("../evil", b"")],
    lambda entries: [*entries, ("model/pytorch_model.bin", b"\x80\x02.")],
    lambda entries: entries[:-1],
    lambda entries: [(name, data.replace(b'"../model"', b'"/etc"')) for name, data in entries],
    lambda entries: [(name, data.replace(b'"model_type"', b'"auto_map": {"AutoConfig": "evil.C"}, "model_type"'))
                     for name, data in entries],
    lambda entries: [(name, data.replace(b'"rldbg-capsule"', b'"other"')) for name, data in entries],
    lambda entries: [(name, b"[" * 100_000 if name.endswith("config.json") else data) for name, data in entries],
    lambda entries: [(name, data.replace(b'"attention": "sdpa"', b'"attention": "evil"')) for name, data in entries],
    lambda entries: [(name, data.replace(b'"rows": 2', b'"rows": "x"')) for name, data in entries],
    lambda entries: [(name, bytes(70 << 20) if name == "outputs.safetensors" else data) for name, data in entries],
])  # fmt: skip
def test_a_strangers_file_is_refused_before_anything_of_it_runs(made, tmp_path, change):
    file = rewritten(made, tmp_path, change)
    with pytest.raises(DumpError, match="damaged"):
        capsules.unpack(file, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_a_zip_that_is_no_capsule_is_not_taken_for_one(tmp_path):
    file = tmp_path / "a.zip"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("data.pkl", b"\x80\x02.")
    assert not capsules.is_capsule(file)
    assert not capsules.is_capsule(tmp_path)
    file.write_bytes(b"PK\x03\x04" + bytes(26) + b"capsule.json" + bytes(40))
    assert capsules.is_capsule(file)
    with pytest.raises(DumpError, match="damaged"):
        capsules.unpack(file, tmp_path / "out")


_NOTE = b'{"format": "rldbg-capsule", "version": 1, "flags": {"reference": {}, "cell": {}}}'


@pytest.mark.parametrize(("name", "data", "packing"), [
    ("capsule.json", _NOTE[:-1] + b', "told": [1]}', 8),
    ("capsule.json", _NOTE[:-1] + b', "told": null}', 8),
    ("model/config.json", b'{"a": ' + b"[" * 600 + b"]" * 600 + b"}", 8),
    ("model/config.json", b'{"a": ' * 900 + b"1" + b"}" * 900, 8),
    ("outputs.safetensors", b"[[1, 2], [3]]", 8),
    ("outputs.safetensors", b"no container", 8),
    ("outputs.safetensors", b"", zipfile.ZIP_LZMA),
    ("outputs.safetensors", b"", zipfile.ZIP_BZIP2),
])  # fmt: skip
def test_a_capsule_of_anything_is_damaged_and_no_fault_of_ours(tmp_path, name, data, packing):
    held = {
        **dict.fromkeys(capsules.NAMES, b"{}"),
        "capsule.json": _NOTE,
        "outputs.safetensors": (2).to_bytes(8, "little") + b"{}",
        "run/manifest.json": b'{"models": {"*": "../model"}}',
        name: data,
    }
    file = tmp_path / "a.capsule"
    with zipfile.ZipFile(file, "w", packing) as packed:
        for one, content in held.items():
            packed.writestr(one, content)
    stored = file.read_bytes()
    if packing != zipfile.ZIP_DEFLATED:
        file.write_bytes(stored[:60] + bytes(20) + stored[80:])  # what such a library says of damage is its own
    with pytest.raises(DumpError, match="damaged"):
        capsules.unpack(file, tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("said", [
    {"model": "factory:evil_of_a_document:make"},
    {"forward": "evil_of_a_document:make"},
    {"model": "pickled", "allow_pickled_weights": True},
])  # fmt: skip
def test_code_that_a_strangers_replay_names_is_not_run(made, tmp_path, said):
    (tmp_path / "evil_of_a_document.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef make(*_): ...\n")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    held = Path(made[0]["cells"][-1]["weights"]["model"])
    (pickled / "config.json").write_bytes((held / "config.json").read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(f"cposix\nsystem\n(S'touch {tmp_path / 'ran'}'\ntR.".encode())
    if said.get("model") == "pickled":
        said = {**said, "model": str(pickled)}
    doc = {**made[0], "plan": {**made[0]["plan"], **said, "forward_path": str(tmp_path)}}
    with pytest.raises((RequestError, ModelError), match=r"holds no code|pickles, which can run code"):
        workbench.capsule(doc, tmp_path / "a.capsule", tmp_path / "out", Here())
    assert not (tmp_path / "ran").exists()
    assert "evil_of_a_document" not in sys.modules


@pytest.mark.long
def test_a_replay_that_agrees_has_nothing_to_show(ask, tmp_path):
    doc = ask("packing=on")
    with pytest.raises(RequestError, match="disagrees"):
        workbench.capsule(doc, tmp_path / "a.capsule", tmp_path / "out", Here())
    assert not Path(tmp_path / "a.capsule").exists()

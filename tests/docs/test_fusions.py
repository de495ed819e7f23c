"""What engines' loaders fuse is taken apart, or known not to be."""

from __future__ import annotations

from replay_core.engine_names import FUSED, Piece, pieces
from tests.docs.fusions import NOT_READ, NOT_READ_SO, STATED, Fusion, stated


def test_what_the_loaders_fuse_is_read_or_named_as_not_read() -> None:
    loaders: set[Fusion] = {one for versions in STATED.values() for known in versions.values() for one in known}
    read = {(fused, family) for fused, families in FUSED.items() for family in families}
    assert {one for one in loaders - read - NOT_READ_SO if one[0] not in NOT_READ} == set()
    assert read <= loaders, "a family that no loader has"
    assert not {fused for fused, _ in read} & NOT_READ
    assert loaders >= NOT_READ_SO


def test_a_model_files_two_tables_are_read() -> None:
    source = """
class Model:
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "o_proj": ["o_proj"]}
    def load_weights(self):
        stacked_params_mapping = [
            (".gate_up_proj", ".gate_proj", 0), (".gate_up_proj", ".up_proj", 1),
            ("mlp.gate_up_proj", "mlp.w1", 0), ("mlp.gate_up_proj", "mlp.w3", 1),
        ]
"""
    assert set(stated(source)) == {
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
        ("gate_up_proj", ("w1", "w3")),
    }


def test_the_family_that_a_checkpoint_has_whole_is_taken() -> None:
    has = {"layers.0.mlp.w1.weight", "layers.0.mlp.w2.weight", "layers.0.mlp.w3.weight"}.__contains__
    assert pieces("layers.0.mlp.gate_up_proj.weight", has) == (
        Piece("w1", "layers.0.mlp.w1.weight"), Piece("w3", "layers.0.mlp.w3.weight"),
    )  # fmt: skip


def test_a_part_that_the_checkpoint_lacks_is_still_asked_for() -> None:
    has = {"layers.0.mlp.gate_proj.weight"}.__contains__
    made_of = pieces("layers.0.mlp.gate_up_proj.weight", has)
    assert [one.label for one in made_of] == ["gate_proj", "up_proj"]

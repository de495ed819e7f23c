"""Values that others recorded: genuine files of two critics, and the same files with something done to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core import workbench
from replay_core.errors import NothingComparableError, RequestError, RldbgError
from tests.builders import save_file, write_dump
from tests.fixtures import FIXTURES
from tests.replay_core.documents.test_schema import validate
from tui_debugger.reports.parity import parity_report

ROLL = FIXTURES / "roll_critic"
#: Region of a document -> of the recorded metrics.
REGIONS = {"masked": "response_only_roll_mask", "valid": "attn_valid", "unmasked": "unmasked"}


@pytest.mark.parametrize("name", ["fp32_sharedhead", "bf16_init0.01"])
def test_the_recorded_metrics_are_reproduced(name: str):
    document = workbench.recorded_parity(ROLL / name, ROLL / name)
    validate(document)
    recorded = json.loads((ROLL / name / "metrics.json").read_text())
    assert {batch["name"] for batch in document["batches"]} == set(recorded)
    for batch in document["batches"]:
        regions: Any = batch["eval"]
        for region, called in REGIONS.items():
            found, expected = regions[region], recorded[batch["name"]][called]
            assert found["n"] == expected["n"]
            assert found["pearson"] == pytest.approx(expected["pearson"], abs=2e-6)
            assert found["spearman"] == pytest.approx(expected["spearman"], abs=2e-6)
            assert found["max_abs"] == pytest.approx(expected["max_abs"], abs=1e-7)
            assert found["mean_abs"] == pytest.approx(expected["mean_abs"], abs=1e-7)
            assert found["nearly_identical"] == pytest.approx(expected["near_identical_pct"], abs=6e-3)


def test_a_head_bias_and_padding_are_told_apart():
    document = workbench.recorded_parity(ROLL / "fp32_sharedhead", ROLL / "fp32_sharedhead")
    assert document["backends"] == ["deepspeed", "megatron"]
    assert document["cause"] == "offset"
    causes = {batch["name"]: [one["kind"] for one in batch["causes"]] for batch in document["batches"]}
    assert causes == {"random": ["offset"], "padded": ["offset", "padding"], "stale": ["offset", "padding"]}
    weights = torch.load(ROLL / "fp32_sharedhead" / "weights.pt", weights_only=True)
    numbers = document["batches"][0]["causes"][0]["numbers"]
    assert numbers["bias_difference"] == pytest.approx(-float(weights["v_head"]["summary.bias"]), rel=1e-6)
    assert numbers["mean_signed"] == pytest.approx(numbers["bias_difference"], rel=1e-4)


def test_bfloat16_noise_is_no_disagreement():
    document = workbench.recorded_parity(ROLL / "bf16_init0.01", ROLL / "bf16_init0.01")
    causes = {batch["name"]: [one["kind"] for one in batch["causes"]] for batch in document["batches"]}
    assert causes == {"random": ["noise"], "padded": ["padding"], "stale": ["padding"]}
    assert document["agrees"] is True
    notes = [
        row["note"] for batch in document["batches"] for row in batch["expectations"] if row["data"] == "real text"
    ]
    assert any("only because padding is counted" in note for note in notes)


Change = Callable[[Any, np.random.Generator], None]


def _scaled(held: Any, _draw: np.random.Generator) -> None:
    held["values"] = (held["values"].double() * 1.03).to(held["values"].dtype)


def _shifted(held: Any, _draw: np.random.Generator) -> None:
    held["values"] = held["values"] + 0.02


def _turned(held: Any, draw: np.random.Generator) -> None:
    order = torch.from_numpy(np.roll(draw.permutation(len(held["values"])), 1))
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            held[name] = value[order]


def _values_turned(held: Any, _draw: np.random.Generator) -> None:
    held["values"] = held["values"].roll(1, 0)


def _dropped(held: Any, draw: np.random.Generator) -> None:
    values = held["values"].float().numpy()
    noise = draw.standard_normal(values.shape) * values.std() / 3
    held["values"] = torch.from_numpy((values + noise).astype(np.float32)).to(held["values"].dtype)


def _replaced(held: Any, draw: np.random.Generator) -> None:
    # A function of the tokens, as any critic's is in eval mode.
    worth_V = torch.from_numpy(draw.standard_normal(256).astype(np.float32))
    held["values"] = (worth_V[held["input_ids"]].cumsum(1)[:, :-1] / 4).to(held["values"].dtype)


def _late(held: Any, draw: np.random.Generator) -> None:
    held["values"] = held["values"].float()
    held["values"][:, 9:] += torch.from_numpy(draw.standard_normal((len(held["values"]), 38)).astype(np.float32) * 0.3)


def _lagging(held: Any, _draw: np.random.Generator) -> None:
    held["values"] = held["values"].roll(1, 1)


def _positions(held: Any, _draw: np.random.Generator) -> None:
    held["position_ids"] = held["position_ids"] + 1


CHANGES: dict[str, tuple[Change, str]] = {
    "scaled": (_scaled, "scale"),
    "shifted": (_shifted, "offset"),
    "rows in another order": (_turned, "order"),
    "values in another order than their rows": (_values_turned, "order"),
    "dropped out": (_dropped, "dropout"),
    "another head": (_replaced, "weights"),
    "different from a position on": (_late, "attention"),
    "one token late": (_lagging, "positions"),
    "other position ids": (_positions, "positions"),
    "the same": (lambda _held, _draw: None, "equal"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(("seed", "run"), [(0, "fp32_sharedhead"), (1, "fp32_sharedhead"), (2, "bf16_init0.01")])
def test_a_change_to_genuine_values_is_named_from_the_values_alone(tmp_path: Path, name: str, seed: int, run: str):
    change, cause = CHANGES[name]
    held = torch.load(ROLL / run / "random_deepspeed.pt", weights_only=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    save_file(tmp_path / "a" / "random_deepspeed.pt", held)
    other = {**{key: value.clone() if hasattr(value, "clone") else value for key, value in held.items()}}
    change(other, np.random.default_rng(seed))
    save_file(tmp_path / "b" / "random_megatron.pt", {**other, "backend": "megatron"})
    document = workbench.recorded_parity(tmp_path / "a", tmp_path / "b")
    validate(document)
    assert document["cause"] == cause, document["why"]
    assert document["agrees"] is (cause == "equal")


def test_positions_of_padding_that_are_equal_do_not_part(tmp_path: Path):
    mask_BS = torch.ones(4, 12, dtype=torch.long)
    mask_BS[1:3, 8:] = 0
    a, b = torch.randn(4, 11, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 11)
    b += a
    b[2, 8:] += 5
    sides = [
        recorded(tmp_path / side, values=values, attention_mask=mask_BS, response_mask=mask_BS)
        for side, values in (("a", a), ("b", b))
    ]
    (cause,) = [one for one in workbench.recorded_parity(*sides)["batches"][0]["causes"] if one["kind"] == "padding"]
    assert cause["numbers"]["padding_positions"] < 8
    assert cause["why"].startswith(f"{cause['numbers']['padding_positions']} of ")


def test_two_files_will_do_and_neither_need_two_directories(tmp_path: Path):
    source = ROLL / "fp32_sharedhead"
    files = [source / "padded_deepspeed.pt", source / "padded_megatron.pt"]
    document = workbench.recorded_parity(*files)
    assert document["cause"] == "offset"
    for side, file in zip("ab", files, strict=True):
        (tmp_path / side).mkdir()
        shutil.copy(file, tmp_path / side)
    again = workbench.recorded_parity(tmp_path / "a", tmp_path / "b")
    assert again["eval"] == document["eval"]


def test_one_directory_is_both_sides_only_where_it_holds_two_critics(tmp_path: Path):
    shutil.copy(ROLL / "fp32_sharedhead" / "padded_deepspeed.pt", tmp_path)
    with pytest.raises(RequestError, match="both sides only"):
        workbench.recorded_parity(tmp_path, tmp_path)
    with pytest.raises(RequestError, match="several critics"):
        workbench.recorded_parity(ROLL / "fp32_sharedhead", ROLL / "bf16_init0.01")


def recorded(directory: Path, **changes: Any) -> Path:
    """A dump of a trainer that says nothing of itself but values and masks."""
    draw = torch.Generator().manual_seed(3)
    mask_BS = torch.ones(4, 12, dtype=torch.long)
    fields = {
        "input_ids": torch.randint(1, 99, (4, 12), generator=draw),
        "attention_mask": mask_BS,
        "response_mask": mask_BS,
        "values": torch.randn(4, 11, generator=draw),
        **changes,
    }
    return write_dump(directory, {"values": fields})


def test_constant_values_have_no_correlation_and_it_is_said(tmp_path: Path):
    a = recorded(tmp_path / "a", values=torch.full((4, 11), 0.5))
    b = recorded(tmp_path / "b", values=torch.full((4, 11), 0.75))
    document = workbench.recorded_parity(a, b)
    validate(document)
    masked = document["eval"]["masked"]
    assert (masked["pearson"], masked["spearman"], masked["slope"]) == (None, None, None)
    assert "A is 0.5" in (masked["undefined"] or "")
    assert document["cause"] == "offset"


def test_values_that_are_no_numbers_have_no_cause_but_disagree(tmp_path: Path):
    values_BT = torch.randn(4, 11)
    a = recorded(tmp_path / "a", values=values_BT)
    values_BT = values_BT.clone()
    values_BT[1, 4] = float("nan")
    document = workbench.recorded_parity(a, recorded(tmp_path / "b", values=values_BT))
    validate(document)
    assert (document["cause"], document["agrees"]) == (None, False)
    assert document["eval"]["masked"]["nonfinite"] == 1
    assert "NaN" in document["why"]


def test_nothing_that_counts_is_an_error(tmp_path: Path):
    masked = {"response_mask": torch.zeros(4, 12, dtype=torch.long)}
    with pytest.raises(NothingComparableError, match="every row of every batch is masked"):
        workbench.recorded_parity(recorded(tmp_path / "a", **masked), recorded(tmp_path / "b", **masked))


def test_shapes_that_do_not_face_each_other_and_dumps_without_values_are_refused(tmp_path: Path):
    a = recorded(tmp_path / "a")
    short = recorded(tmp_path / "short", values=torch.randn(4, 7))
    with pytest.raises(NothingComparableError, match="could be paired") as refused:
        workbench.recorded_parity(a, short)
    assert "(4, 11) against (4, 7)" in str(refused.value)
    none = write_dump(tmp_path / "none", {"batch_inputs": {"input_ids": torch.ones(2, 3, dtype=torch.long)}})
    with pytest.raises(NothingComparableError, match="no record holds a critic's values"):
        workbench.recorded_parity(a, none)
    with pytest.raises(RldbgError):
        workbench.recorded_parity(a, tmp_path / "nowhere")


def test_many_points_are_sampled_and_it_is_said(tmp_path: Path):
    mask_BS = torch.ones(30, 101, dtype=torch.long)
    shapes = {
        "input_ids": torch.randint(1, 99, (30, 101)), "attention_mask": mask_BS, "response_mask": mask_BS,
        "values": torch.randn(30, 100),
    }  # fmt: skip
    scatter = workbench.recorded_parity(recorded(tmp_path / "a", **shapes), recorded(tmp_path / "b", **shapes))
    found = scatter["batches"][0]["scatter"]
    assert (found["shown"], found["total"], found["sampled"]) == (2000, 3000, True)


def _drawn(values: torch.Tensor) -> torch.Tensor:
    return torch.randn(values.shape, generator=torch.Generator().manual_seed(0))


def _both(directory: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The genuine pair whose heads differ by a bias, weights beside them, and Megatron's values changed."""
    shutil.copytree(ROLL / "fp32_sharedhead", directory)
    for kind in ("random", "padded", "stale"):
        file = directory / f"{kind}_megatron.pt"
        held = torch.load(file, weights_only=True)
        save_file(file, {**held, "values": change(held["values"])})
    document = workbench.recorded_parity(directory, directory)
    validate(document)
    return document


def test_a_bias_of_the_head_hides_no_order_and_no_shift(tmp_path: Path):
    for name, change, cause in (
        ("rows", lambda values: values.roll(1, 0), "order"),
        ("tokens", lambda values: values.roll(1, 1), "positions"),
    ):
        assert _both(tmp_path / name, change)["cause"] == cause


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        ("a factor", lambda values: values * 1.5, "scale"),
        ("another sign", lambda values: -values, "scale"),
        ("other values", _drawn, "weights"),
        ("one number", lambda values: torch.full_like(values, 0.7), "weights"),
    ],
)  # fmt: skip
def test_heads_that_differ_are_not_all_there_is_where_values_say_more(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], cause: str
):
    document = _both(tmp_path / "both", change)
    assert document["cause"] == cause
    assert "beside what the heads explain" in document["why"]
    kinds = [one["kind"] for one in document["batches"][0]["causes"]]
    assert "offset" in kinds


def test_a_second_constant_beside_the_heads_bias_is_said(tmp_path: Path):
    document = _both(tmp_path / "both", lambda values: values + 0.05)
    whys = [one["why"] for one in document["batches"][0]["causes"]]
    assert any("beside what the heads explain: B's values are A's +0.05" in why for why in whys)


def test_one_critic_of_one_number_is_no_factor_of_zero(tmp_path: Path):
    a = recorded(tmp_path / "a")
    document = workbench.recorded_parity(a, recorded(tmp_path / "b", values=torch.full((4, 11), 0.75)))
    validate(document)
    assert document["cause"] == "weights"
    assert "B's values are one number (0.75)" in document["why"]


def _padded(ids: Any, lengths: tuple[int, ...], width: int, *, left: bool) -> dict[str, torch.Tensor]:
    """Rows of these lengths, and the values of a causal critic that does not see padding."""
    worth_V = torch.randn(99, generator=torch.Generator().manual_seed(1))
    out_BS, held_BS = (torch.zeros(len(lengths), width, dtype=torch.long) for _ in range(2))
    for row, length in enumerate(lengths):
        at = slice(width - length, width) if left else slice(0, length)
        out_BS[row, at], held_BS[row, at] = ids[row, :length], 1
    values_BT = (worth_V[out_BS] * held_BS).cumsum(1)[:, :-1] / 4
    return {
        "input_ids": out_BS, "attention_mask": held_BS, "response_mask": held_BS, "values": values_BT,
        "position_ids": (held_BS.cumsum(1) - 1).clip(0),
    }  # fmt: skip


IDS = torch.randint(1, 90, (4, 12), generator=torch.Generator().manual_seed(3))


def test_padding_on_the_other_side_is_laid_token_by_token(tmp_path: Path):
    a = recorded(tmp_path / "a", **_padded(IDS, (12, 9, 7, 10), 16, left=True))
    b = recorded(tmp_path / "b", **_padded(IDS, (12, 9, 7, 10), 16, left=False))
    for one, other in ((a, b), (b, a)):
        document = workbench.recorded_parity(one, other)
        validate(document)
        assert document["agrees"], document["why"]
        largest = document["eval"]["masked"]["max_abs"]
        assert isinstance(largest, float)
        assert largest < 1e-6
        assert any("held token by token" in note for note in document["notes"])


def test_values_that_differ_still_do_where_padding_is_on_the_other_side(tmp_path: Path):
    a = recorded(tmp_path / "a", **_padded(IDS, (12, 9, 7, 10), 16, left=True))
    there = _padded(IDS, (12, 9, 7, 10), 16, left=False)
    there["values"] = there["values"] + 0.2
    document = workbench.recorded_parity(a, recorded(tmp_path / "b", **there))
    assert (document["cause"], document["agrees"]) == ("offset", False)


def test_critics_that_were_given_other_tokens_are_not_compared(tmp_path: Path):
    a = recorded(tmp_path / "a", input_ids=IDS)
    with pytest.raises(NothingComparableError, match="could be paired") as refused:
        workbench.recorded_parity(a, recorded(tmp_path / "b", input_ids=IDS + 1))
    assert "input_ids hold other tokens in 4 of 4 rows: row 0" in str(refused.value)


@pytest.mark.parametrize(("rows", "cause"), [((1,), "attention"), ((0, 1, 2, 3), "dropout")])
def test_one_row_that_parts_is_no_dropout(tmp_path: Path, rows: tuple[int, ...], cause: str):
    here = _padded(IDS, (12, 12, 12, 12), 12, left=True)
    a = recorded(tmp_path / "a", **here)
    noise_BT = torch.randn(here["values"].shape, generator=torch.Generator().manual_seed(5)) * 0.2
    changed = here["values"].clone()
    changed[list(rows)] += noise_BT[list(rows)]
    document = workbench.recorded_parity(a, recorded(tmp_path / "b", **{**here, "values": changed}))
    validate(document)
    assert document["cause"] == cause, document["why"]
    assert ("only 1 of 4 rows part (row 1)" in document["why"]) is (len(rows) == 1)


@pytest.mark.parametrize(
    ("lengths", "masked", "says"),
    [
        ((12, 9, 7, 12), True, "only rows with padding part (2 of 4: row 1, 2), the 2 without agree"),
        ((12, 9, 7, 12), False, "B's attention mask hides no padding"),
        ((11, 9, 7, 10), False, "B's attention mask hides no padding"),
    ],
)
def test_rows_with_padding_that_part_alone_name_the_padding(
    tmp_path: Path, lengths: tuple[int, ...], masked: bool, says: str
) -> None:
    """A causal critic that attends to what stands before a left-padded prompt; without a mask, or with one it ignores.
    Each token is a draw of its own there: what is left would else be called dropout or other weights.
    """
    here = _padded(IDS, lengths, 12, left=True)
    there = {name: value.clone() for name, value in here.items()}
    noise_BT = torch.randn(here["values"].shape, generator=torch.Generator().manual_seed(7)) * 0.3
    padded_B = torch.tensor(lengths) < 12
    there["values"] = here["values"] + noise_BT * padded_B[:, None]
    if not masked:
        there["attention_mask"] = torch.ones_like(here["attention_mask"])
    document = workbench.recorded_parity(recorded(tmp_path / "a", **here), recorded(tmp_path / "b", **there))
    validate(document)
    assert (document["cause"], says in document["why"]) == ("attention", True), document["why"]


def test_a_padded_row_that_agrees_leaves_the_padding_out_of_it(tmp_path: Path) -> None:
    here = _padded(IDS, (12, 9, 7, 12), 12, left=True)
    there = {name: value.clone() for name, value in here.items()}
    there["values"][1] += torch.randn(11, generator=torch.Generator().manual_seed(7)) * 0.3
    document = workbench.recorded_parity(recorded(tmp_path / "a", **here), recorded(tmp_path / "b", **there))
    assert "only rows with padding" not in document["why"]


def test_a_value_that_is_not_finite_is_the_cause_in_text_too(tmp_path: Path):
    values = torch.randn(4, 11, generator=torch.Generator().manual_seed(0))
    broken = values.clone()
    broken[1, 4] = float("nan")
    document = workbench.recorded_parity(
        recorded(tmp_path / "a", values=values), recorded(tmp_path / "b", values=broken)
    )
    text = parity_report(document)
    assert "cause: None" not in text
    assert text.count("cause: not finite") == 2

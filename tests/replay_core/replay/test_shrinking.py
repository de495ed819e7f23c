import numpy as np
import pytest

from benchmarks import replay_zoo as zoo
from replay_core.replay import ahead
from replay_core.replay.batch import MicroBatch
from replay_core.replay.shrinking import COLUMNS, company_of, likely, part_of
from tui_debugger.reports.replay import replay_report

BY_NAME = {one.name: one for one in zoo.FAULTS}

#: (left padding, tokens, right padding).
ROWS = ((40, 24, 0), (0, 64, 0), (10, 30, 24), (0, 40, 24))


def batch(rows=ROWS):
    valid = np.array([[False] * left + [True] * tokens + [False] * right for left, tokens, right in rows])
    ids = np.where(valid, np.cumsum(valid, axis=1) + 100 * np.arange(len(rows))[:, None], 7)
    return MicroBatch(ids, valid, valid.copy())


def test_a_part_holds_the_first_tokens_of_each_row_and_its_padding_where_that_was():
    part = part_of(batch(), [0, 1, 2, 3], 16).batch
    assert part.ids_BS.shape == (4, 16)
    for row in range(4):
        tokens = part.ids_BS[row][part.valid_BS[row]]
        assert tokens.tolist() == [100 * row + one for one in range(1, tokens.size + 1)]
    assert not part.valid_BS[0, 0], "padded on the left alone"
    assert part.valid_BS[0, -1]
    assert part.valid_BS[1].all()
    assert not part.valid_BS[2, 0], "on both sides"
    assert not part.valid_BS[2, -1]
    assert part.valid_BS[3, 0], "on the right alone"
    assert not part.valid_BS[3, -1]
    assert set(part.ids_BS[~part.valid_BS].tolist()) == {7}
    assert (part.response_BS == part.valid_BS).all()


def test_a_part_no_longer_than_the_batch_is_the_batch():
    short = batch(((0, 12, 0), (3, 9, 0)))
    part = part_of(short, [0, 1], 16).batch
    assert (part.valid_BS == short.valid_BS).all()
    assert (part.ids_BS == short.ids_BS).all()


def test_company_is_the_rows_beside_it():
    wide = batch(((0, 4, 0),) * 6)
    assert [company_of(wide, sample) for sample in (0, 3, 5)] == [[0, 1, 2], [2, 3, 4], [3, 4, 5]]
    assert company_of(batch(((0, 4, 0),)), 0) == [0]


def test_the_part_with_the_first_token_that_is_off_is_tried_first():
    whole = batch(((0, 256, 0),) * 8)
    distance = np.full(8 * 256, 1e-7)
    distance[5 * 256 + 20 : 6 * 256] = 0.5
    distance[2 * 256 + 90 : 3 * 256] = 1.0
    parts = list(likely(whole, distance))
    assert parts[0].rows == [4, 5, 6]
    assert int(parts[0].batch.valid_BS.sum(axis=1)[1]) > 20
    sizes = [one.batch.ids_BS.size for one in parts]
    assert max(sizes) <= whole.ids_BS.size / 4, "else the whole costs little more"
    assert not list(likely(whole, np.ones(3))), "figures of other tokens say nothing"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("boundary_early", "llama"),
        ("padding_visible", "gpt2"),
        pytest.param("first_key_masked", "llama", marks=pytest.mark.slow),
        pytest.param("mlp_scaled_by_the_padded_length", "llama", marks=pytest.mark.slow),
        ("norm_over_the_batch", "llama"),
        pytest.param("first_tokens_of_rows_alone_kept_for_ever", "llama", marks=pytest.mark.slow),
    ],
)
def test_a_large_model_is_asked_of_a_part_and_of_its_first_layers_alike(tmp_path, monkeypatch, name, architecture):
    monkeypatch.setattr(ahead, "LARGE", 0)
    one = BY_NAME[name]
    flags = f"{one.flags} dtype=float32 attention={one.attention or 'sdpa'}"
    doc = zoo.replayed(tmp_path, one.layout, flags, architecture, 0.1, False, one.plant)
    causes = [cell["cause"] for cell in doc["cells"] if cell["agreement"]["agrees"] is False]
    assert {cause["kind"] for cause in causes} <= set(one.called), [cause["sentence"] for cause in causes]
    assert causes


@pytest.mark.long
def test_a_large_model_that_agrees_is_asked_of_a_part_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "LARGE", 0)
    doc = zoo.replayed(tmp_path, "long", "packing=off dtype=float32", "llama", 0.1, False, None, why=True)
    (cell,) = [one for one in doc["cells"] if one["part"] == "cell"]
    assert cell["agreement"]["agrees"] is True
    found = cell["cause"]["evidence"]
    assert found["looked_at"]["rows"] == [0, 1]
    assert max(found["looked_at"]["tokens"]) <= COLUMNS
    assert found["visibility"]
    assert not any(sight["moved"] for sight in found["visibility"])
    assert "asked of a part of the batch: rows 0, 1" in replay_report(doc)

from replay_core.replay.leak import proof

MASK = [{"code": "mask_set", "text": "an attention_mask is set"}]


def rows(*distances, tokens=5):
    return [
        {"sample": n, "tokens": tokens, "worst_token": {"position": 0, "rel_l2": value}}
        for n, value in enumerate(distances)
    ]


def found(cell, turned=None, findings=(), **how):
    return proof(cell, turned, 1e-3, findings, **{"is_packed": True, **how})


def test_nothing_off_is_no_finding():
    assert found(rows(0.0, 9e-4)) is None


def test_a_leak_is_named_when_the_exact_segment_moves():
    cause = found(rows(0.0, 1.0, 1.0, 1.0), rows(1.0, 1.0, 1.0, 0.0), MASK)
    assert (cause["kind"], cause["moved"], cause["causes"]) == ("leak", [0, 3], ["mask_set"])
    assert cause["sentence"].startswith("samples 1..3 off: sequences see each other")
    assert "packed last first, samples 0..2 are off instead" in cause["sentence"]


def test_a_leak_with_right_inputs_is_the_attentions_own():
    assert "the attention itself mixes samples" in found(rows(0.0, 1.0), rows(1.0, 0.0))["sentence"]


def test_what_stays_off_in_any_order_is_no_leak():
    cause = found(rows(1.0, 1.0), rows(1.0, 1.0))
    assert cause["kind"] == "elsewhere"
    assert "samples do not see each other" in cause["sentence"]


def test_nan_is_off():
    assert found(rows("nan", 0.0), rows("nan", 0.0))["off"] == [0]


def test_rows_with_left_padding_being_off_is_padding_that_is_seen():
    cause = found(rows(1.0, 0.0, 1.0), is_packed=False, left_pads=[3, 0, 6])
    assert cause["kind"] == "padding"
    assert "samples 0, 2 off: tokens see padding" in cause["sentence"]


def test_a_padded_batch_that_is_off_elsewhere_is_not_blamed_on_padding():
    assert found(rows(0.0, 1.0, 1.0), is_packed=False, left_pads=[3, 0, 6])["kind"] == "elsewhere"


def test_a_wrong_mask_is_padding_whatever_the_rows():
    wrong = [{"code": "padded_mask", "text": "the attention_mask takes 3 slots of padding for tokens"}]
    assert found(rows(1.0, 1.0), findings=wrong, is_packed=False, left_pads=[3, 6])["kind"] == "padding"

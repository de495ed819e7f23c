"""The digest a device takes: torch's and numpy's of the same bytes are one, and other bytes have another."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_core import fold, hashes


def folded(data: bytes, piece: int | None = None) -> str:
    hashed = fold.Folding()
    for start in range(0, len(data), piece or len(data) or 1):
        hashed.update(data[start : start + (piece or len(data))])
    return hashed.hexdigest()


def by_torch(data: bytes) -> str:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return str(xxhash.xxh3_128_hexdigest(bytes(fold.left_on_device(torch, tensor).tolist())))


def noise(count: int, seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).numpy().tobytes()


@pytest.mark.parametrize("count", [0, 1, 4095, 65537, 69632, 69633, 73_727, 200_000, 64 * 65536, 4_460_545])
def test_torch_and_numpy_fold_bytes_alike(count: int) -> None:
    assert by_torch(noise(count)) == folded(noise(count))


def test_the_extremes_of_bytes_are_folded_exactly() -> None:
    for byte in (b"\x80", b"\x7f", b"\xff", b"\x00"):
        assert by_torch(byte * 300_000) == folded(byte * 300_000)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 150_000), st.integers(1, 70_000))
def test_bytes_may_come_in_pieces_of_any_size(count: int, piece: int) -> None:
    assert folded(noise(count), piece) == folded(noise(count))


def test_few_bytes_are_xxh3s_own() -> None:
    data = noise(fold.ENOUGH)
    assert folded(data) == xxhash.xxh3_128_hexdigest(data)
    assert folded(data + b"\0") != xxhash.xxh3_128_hexdigest(data + b"\0")


@settings(max_examples=60, deadline=None)
@given(st.integers(69_633, 500_000), st.data())
def test_a_changed_byte_changes_it(count: int, data: st.DataObject) -> None:
    before = bytearray(noise(count))
    after = bytearray(before)
    at = data.draw(st.integers(0, count - 1))
    after[at] ^= data.draw(st.integers(1, 255))
    assert folded(bytes(before)) != folded(bytes(after))


def test_what_changes_no_sum_of_bytes_changes_it() -> None:
    rows = [noise(fold.ROW, seed) for seed in range(40)]
    whole = b"".join(rows)
    swapped = b"".join([rows[1], rows[0], *rows[2:]])
    signs = bytearray(whole)
    signs[3] ^= 0x80
    signs[7] ^= 0x80
    moved = bytearray(whole)
    moved[10], moved[11] = moved[11], moved[10]
    shifted = whole[4:] + whole[:4]
    longer = whole + b"\0" * fold.ROW
    answers = {folded(bytes(one)) for one in (whole, swapped, signs, moved, shifted, longer)}
    assert len(answers) == 6


def test_columns_of_two_folds_are_unlike_each_other_and_themselves() -> None:
    first, second = (torch.frombuffer(bytearray(fold.columns(n)), dtype=torch.int8).double() for n in (0, 1))
    stacked = torch.cat([first.view(fold.COLUMNS, -1), second.view(fold.COLUMNS, -1)])
    assert torch.corrcoef(stacked).fill_diagonal_(0).abs().max() < 0.1


def test_the_known_digest_is_that_of_the_known_bytes() -> None:
    known = fold.known_bytes(torch, "cpu").numpy().tobytes()
    assert folded(known) == fold.KNOWN_DIGITS
    assert hashes.digest_of([known], "fold") == f"fold:{fold.KNOWN_DIGITS}"
    assert hashes.kind_of(f"fold:{fold.KNOWN_DIGITS}") == "fold"

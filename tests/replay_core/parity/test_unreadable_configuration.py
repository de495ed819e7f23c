"""A dump given as a configuration: the error says what was expected and which option reads dumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.errors import RequestError
from replay_core.parity.config import _load


def test_a_dump_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    path.write_bytes(b"PK\x03\x04\x80\x81")
    with pytest.raises(RequestError) as refused:
        _load(path)
    assert "--recorded" in str(refused.value.hint)
    assert "codec" not in refused.value.message

"""The version of the documents."""

from __future__ import annotations

from typing import Final

#: Goes up when a key goes, or means something else; a new key leaves it (docs/documents.md).
SCHEMA_VERSION: Final = 1

"""What a rule of the diagnosis looks at; the screen asks."""

from __future__ import annotations

from typing import Literal

from replay_core.documents.parts import Versioned


class ExplanationDocument(Versioned):
    """A rule, explained."""

    kind: Literal["explanation"]
    id: str
    text: str

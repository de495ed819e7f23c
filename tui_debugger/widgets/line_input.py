"""A line that is typed into: its keys act in the order in which they were pressed."""

from __future__ import annotations

from textual import events
from textual.widgets import Input


class LineInput(Input):
    """Textual inserts a letter at once, but lets a key that edits (backspace, ctrl+u, enter) bubble up to the app
    first. Of keys that arrive together, as over a slow link, the letters behind such a key were in front of it:
    `1e-4`, backspace, `3` read 1e-4.
    """

    async def _on_key(self, event: events.Key) -> None:
        bindings = [] if event.is_printable else self._bindings.key_to_bindings.get(event.key, [])
        if not bindings:
            return  # a letter, or no key of the line's: `Input` has it
        event.stop()
        event.prevent_default()
        for binding in bindings:
            await self.run_action(binding.action)

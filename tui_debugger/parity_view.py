"""What the parity screen shows, as data: the document, which batch of it, and the answer in words. No textual here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from replay_core.errors import ExitCode
from replay_core.export.outcome import exit_code
from tui_debugger import format as fmt

if TYPE_CHECKING:
    from replay_core.documents.parity import BatchEntry, ParityDocument

#: Causes that are no disagreement, and the colour of each.
_AGREEING = {"equal": "same", "noise": "close", "padding": "padding"}


class ParityView(Struct, eq=False):
    """One parity run, running, answered, or opened from a file."""

    request: dict[str, Any] = field(default_factory=dict)
    document: ParityDocument | None = None
    runs: bool = False
    is_wanted: bool = False
    """The screen is to be opened on it."""
    is_saved: bool = False
    failed: int | None = None
    """Exit code of the error it ended with."""
    why_failed: str | None = None
    what_helps: str = ""
    chosen: int | None = None
    """Number of the batch looked at; None: the one the cause is about."""
    mode: str = "eval"
    only_counted: bool = False
    """The scatter leaves out what no one reads."""

    @property
    def awaited(self) -> str:
        """What stands in place of the values until there are any."""
        if self.request.get("recorded"):
            return "What the two critics wrote is read; no critic is run. Their values stand here then."
        return "Both critics run, each in a process of its own. Their values stand here once both have answered."

    @property
    def batches(self) -> list[BatchEntry]:
        return self.document["batches"] if self.document else []

    @property
    def number(self) -> int:
        about = self.document["about"] if self.document else None
        if self.chosen is not None and self.chosen < len(self.batches):
            return self.chosen
        return next((i for i, batch in enumerate(self.batches) if batch["name"] == about), 0)

    @property
    def batch(self) -> BatchEntry | None:
        batches = self.batches
        return batches[self.number] if batches else None

    def turn(self, by: int) -> None:
        """Look at the next batch, or the one before."""
        if self.batches:
            self.chosen = (self.number + by) % len(self.batches)

    @property
    def exit_code(self) -> int:
        if self.document is not None:
            return int(exit_code(self.document))
        if self.failed is not None:
            return int(self.failed)
        return int(ExitCode.INTERRUPTED) if self.runs else 0

    def answer(self, busy: object = None, how_long: str = "ctrl+c cancels") -> fmt.Answer:
        """What the top of the screen says: whether the two agree where it counts, the cause, its sentence."""
        if self.runs:
            return fmt.Answer("RUN", "muted", str(busy or "parity"), [], [f"{how_long}; nothing is kept then"])
        document = self.document
        if document is None:
            notes = [*([f"hint: {self.what_helps}"] if self.what_helps else []), "the log (l) has all of it"]
            return fmt.Answer("ERROR", "missing", self.why_failed or "no parity yet", [], notes)
        batch, about = self.batch, document["about"]
        causes = list(batch["causes"]) if batch else []
        if batch is not None and batch["name"] == about:
            cause, why = document["cause"], document["why"]
        else:
            cause, why = (causes[0]["kind"], causes[0]["why"]) if causes else (None, "")
        word = "AGREES" if cause in _AGREEING else "DISAGREES"
        token = _AGREEING.get(str(cause), "first")
        facts = [f"batch {batch['name']}"] if batch else []
        notes = [str(why)]
        notes += [f"also {one['kind']}: {one['why']}" for one in causes[1:]]
        notes += first_module(document, batch)
        if batch is not None and batch["name"] != about:
            overall = "AGREES" if document["agrees"] else "DISAGREES"
            notes.append(f"of all batches {about} explains most: {overall}, cause {document['cause'] or 'not finite'}")
        return fmt.Answer(word, token, f"cause: {cause or 'not finite'}", facts, notes)


def first_module(document: ParityDocument, batch: BatchEntry | None) -> list[str]:
    """Where the two part first inside the model, or that this was not looked at."""
    first = batch["first_divergence"] if batch else None
    if first:
        origin = f", origin {first['origin']}" if first["origin"] else ""
        return [f"first diverging module tensor: {first['name']}{origin}"]
    compared = document["comparison"]
    if not compared:
        return []
    count = compared["module_tensors"]
    return [
        f"{count} module tensors compared, none of this batch diverges where tokens count"
        if count
        else "no module tensor was recorded: where they part first cannot be said"
    ]


def regions(batch: Mapping[str, Any], mode: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The columns of the table in one mode: response (or what counts), valid, unmasked."""
    found = batch.get(mode)
    if not found:
        return []
    counted = str(batch["counted"])
    listed = [(counted, found["masked"])]
    if counted == "response":
        listed.append(("valid", found["valid"]))
    listed.append(("unmasked", found["unmasked"]))
    return [(name, region) for name, region in listed if region is not None]


#: Rows of the table: name in the document, how it is called, digits.
MEASURES = (
    ("pearson", "Pearson", 6),
    ("spearman", "Spearman", 6),
    ("nearly_identical", "nearly identical %", 4),
    ("max_abs", "max |d|", 4),
    ("mean_abs", "mean |d|", 4),
    ("max_rel", "max |d|/|a|", 4),
    ("slope", "slope", 6),
    ("offset", "offset", 4),
    ("residual_rms", "left by the line", 4),
    ("std_ratio", "std B / std A", 5),
)

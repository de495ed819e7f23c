"""Which sheet and which report a kind of document has. A new kind brings its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tui_debugger.handout.blocks import Handout, Plain, Section
from tui_debugger.handout.sheets.comparison import comparison_sheet
from tui_debugger.handout.sheets.diagnosis import diagnosis_sheet
from tui_debugger.handout.sheets.gathering import gathering_sheet
from tui_debugger.handout.sheets.listing import info_sheet, record_sheet, run_sheet, tensor_sheet
from tui_debugger.handout.sheets.mismatch import mismatch_sheet
from tui_debugger.handout.sheets.parity import parity_sheet
from tui_debugger.handout.sheets.replay import replay_sheet
from tui_debugger.handout.sheets.ruling import ruling_sheet
from tui_debugger.handout.sheets.samples import samples_sheet
from tui_debugger.handout.sheets.weights import weights_sheet
from tui_debugger.reports.comparison import comparison_report
from tui_debugger.reports.diagnosis import diagnosis_report
from tui_debugger.reports.gathering import gathering_report
from tui_debugger.reports.mismatch import mismatch_report
from tui_debugger.reports.parity import parity_report
from tui_debugger.reports.record import record_report
from tui_debugger.reports.replay import replay_report
from tui_debugger.reports.ruling import ruling_report
from tui_debugger.reports.run import run_report
from tui_debugger.reports.samples import samples_report
from tui_debugger.reports.tensor import tensor_report
from tui_debugger.reports.weights import weights_report

if TYPE_CHECKING:
    from replay_core.documents.kinds import Document

#: Kind -> what its handout says, and the same as text. What the screen alone asks for is handed to nobody.
KINDS: dict[str, tuple[Callable[[Any], Handout], Callable[[Any], str] | None]] = {
    "comparison": (comparison_sheet, comparison_report),
    "replay": (replay_sheet, replay_report),
    "diagnosis": (diagnosis_sheet, diagnosis_report),
    "parity": (parity_sheet, parity_report),
    "ruling": (ruling_sheet, ruling_report),
    "mismatch": (mismatch_sheet, mismatch_report),
    "samples": (samples_sheet, samples_report),
    "weights": (weights_sheet, weights_report),
    "gathering": (gathering_sheet, gathering_report),
    "run": (run_sheet, run_report),
    "record": (record_sheet, record_report),
    "tensor": (tensor_sheet, tensor_report),
    "info": (info_sheet, None),
}


def sheet_of(document: Document) -> Handout:
    """The answer and its parts, the report as a terminal shows it at the end.

    Raises:
        KeyError: the document is of a kind that is handed to nobody.
    """
    sheet, report = KINDS[document["kind"]]
    made = sheet(document)
    if report is None:
        return made
    text = Section("The report as a terminal shows it", [Plain(report(document))], folded=True)
    return Handout(made.word, made.tone, made.sentence, made.facts, [*made.sections, text])

"""`I`: the samples of a step as a person reads them: a list, and beside it one, its group or the worst tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import ModalScreen
from textual.widgets import Static

from tui_debugger import format as fmt
from tui_debugger import paths
from tui_debugger.sample_orders import ORDERS
from tui_debugger.screens.keyed import PatientScreen
from tui_debugger.widgets.paint import paint, write_border
from tui_debugger.widgets.token_text import TokenText, wrapped_lines

if TYPE_CHECKING:
    from replay_core.documents.samples import SampleEntry, SampleOrder, SamplesDocument, SampleTokens
    from tui_debugger.screens.stage import Stage
    from tui_debugger.screens.taking import Writing

#: Narrower screens have the list above the sample, and few of its figures.
_NARROW = 110
_LIST_WIDTH, _LIST_LINES = 62, 7
_HELP = "j k sample · ← → token · v colour · b order · / search · x group · w worst · e y · esc"
_SHORT = "j k · ← → token · v colour · b order · / · x group · w worst · e y · esc"


class SamplesScreen(ModalScreen[None], PatientScreen[None]):
    """The samples of the step that is looked at."""

    CSS_PATH = paths.styles_dir() / "on_top.tcss"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,I", "leave", show=False),
        Binding("j,down", "sample(1)", show=False),
        Binding("k,up", "sample(-1)", show=False),
        Binding("g,home", "sample(-1000000)", show=False),
        Binding("G,end", "sample(1000000)", show=False),
        Binding("l,right", "token(1)", show=False),
        Binding("h,left", "token(-1)", show=False),
        Binding("space,pagedown,ctrl+d", "page(1)", show=False),
        Binding("pageup,ctrl+u", "page(-1)", show=False),
        Binding("right_square_bracket,n", "strong(1)", show=False),
        Binding("left_square_bracket,N", "strong(-1)", show=False),
        Binding("v", "colour", show=False),
        Binding("b", "order", show=False),
        Binding("slash", "search", show=False),
        Binding("x", "show('group')", show=False),
        Binding("w", "show('worst')", show=False),
        Binding("t", "tokenizer", show=False),
        Binding("enter", "open", show=False),
        Binding("e", "export", show=False),
        Binding("y", "copy", show=False),
    ]

    def __init__(self, stage: Stage, step: int | None) -> None:
        super().__init__()
        self._stage, self._sampling, self._step = stage, stage.session.sampling, step
        document = self._sampling.document
        assert document is not None
        self._document: SamplesDocument = document
        self._by: SampleOrder = "order"
        self._search: str | None = None
        self._tokenizer: str | None = None
        self._at = self._worst_at = self._top = 0
        self._view = "sample"
        self._column: str | None = None
        self._text: TokenText | None = None
        self._then: Callable[[], None] = lambda: None

    def compose(self) -> ComposeResult:
        with Container(id="samples"):
            yield Static("", markup=False, id="samples-list")
            yield Static("", markup=False, id="samples-one")

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self, _event: events.Resize) -> None:
        self._text = None
        self._draw()

    # ── what is shown ────────────────────────────────────────────────────────────────────────────

    @property
    def _is_narrow(self) -> bool:
        return self.app.size.width < _NARROW

    @property
    def _sample(self) -> SampleEntry | None:
        samples = self._document["samples"]
        return samples[self._at] if self._at < len(samples) else None

    @property
    def _tokens(self) -> SampleTokens | None:
        """The chosen sample in full, once the reader has given it."""
        sample = self._sample
        return next((one for one in self._document["tokens"] if sample and one["sample"] == sample["sample"]), None)

    def _room(self) -> tuple[int, int]:
        """Cells and lines of what stands beside the list, or below it."""
        width, height = self.app.size
        return (width - 4, height - 4 - _LIST_LINES) if self._is_narrow else (width - 6 - _LIST_WIDTH, height - 3)

    def _draw(self) -> None:
        box = self.query_one_optional("#samples", Container)
        if box is None:
            return
        box.set_class(self._is_narrow, "-narrow")
        doc = self._document
        step = "" if doc["step"] is None else f" · step {doc['step']}"
        found = "" if doc["search"] is None else f" · hold {doc['search']!r}: {len(doc['samples']) + doc['left_out']}"
        write_border(
            box, fmt.safe(f"Samples{step} · {doc['total']:,} · by {doc['by']}{found}"),
            _SHORT if self._is_narrow else _HELP,
        )  # fmt: skip
        self.query_one("#samples-list", Static).update(self._list())
        self.query_one("#samples-one", Static).update(
            {"sample": self._one, "group": self._group, "worst": self._worst}[self._view]()
        )

    def _list(self) -> Text:
        """A line for each sample: the cursor, its number and figures."""
        lines = _LIST_LINES if self._is_narrow else self._room()[1]
        heads = ("sample", "group", "tokens", "reward", "advantage", "|d logp|", "clipped")
        sizes = (6, 6, 7, 9, 10, 9, 8)
        text = Text(no_wrap=True)
        text.append(" " + "".join(f"{head:>{size}}" for head, size in zip(heads, sizes, strict=True)) + "\n",
                    paint(self, "muted"))  # fmt: skip
        samples = self._document["samples"]
        first = min(max(0, self._at - (lines - 2) // 2), max(0, len(samples) - (lines - 1)))
        for place, one in enumerate(samples[first : first + lines - 1], first):
            cells = [
                str(one["sample"]), fmt.number(one["group"]), fmt.number(one["tokens"]),
                *(fmt.number(value, 3) for value in (one["reward"], one["advantage"], one["mismatch"], one["clipped"])),
            ]  # fmt: skip
            here = place == self._at
            line = "".join(f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
            style = paint(self, "strong" if here else "muted" if self._view == "worst" else "")
            text.append(f"{'›' if here else ' '}{line}{' cut' if one['truncated'] else '    '}\n", style)
        if not samples:
            text.append("no sample: / searches for another text\n", paint(self, "missing"))
        return text

    def _heading(self, sample: SampleEntry) -> list[Text]:
        """What the sample was worth."""
        parts = [f"{part['name']} {fmt.number(part['value'])}" for part in sample["reward_parts"]]
        named = (("reward", sample["reward"]), ("advantage", sample["advantage"]),
                 ("|d logprob|", sample["mismatch"]), ("clipped", sample["clipped"]))  # fmt: skip
        figures = [f"{said} {fmt.number(value)}" for said, value in named if value is not None]
        group = [] if sample["group"] is None else [f"group {sample['group']}"]
        cut = ["cut off"] if sample["truncated"] else []
        width = self._room()[0]
        said = " · ".join([f"sample {sample['sample']}", *group, *figures, *parts, *cut])
        return [Text(fmt.safe(line), paint(self, "strong")) for line in fmt.wrapped(said, width)]

    def _one(self) -> Text:
        """The chosen sample: figures, turns, and each token coloured by the number that is chosen."""
        sample, tokens = self._sample, self._tokens
        if sample is None:
            return Text()
        head = self._heading(sample)
        width, lines = self._room()
        if tokens is None:
            return Text("\n").join([*head, Text("reading …", paint(self, "muted"))])
        names = [column["name"] for column in tokens["columns"]]
        if self._column not in names:
            self._column = names[0] if names else None
        is_new = self._text is None or self._text.entry is not tokens
        if self._text is None or is_new or self._text.name != self._column:
            at = None if self._text is None or is_new else self._text.at
            self._text = TokenText(self, tokens, self._column, width, at)
        if self._column is not None:
            # The number before what may be cut: one that ends in its middle is another number.
            which = f"({names.index(self._column) + 1} of {len(names)}, v)"
            head.append(self._text.legend(f"coloured by {self._column} up to {self._text.most} {which}"))
        head += [Text(line, paint(self, "key")) for line in self._text.told()]
        room = max(1, lines - len(head))
        if is_new:
            self._top = self._text.seen(0, room)
        shown, self._top = self._text.window(room, self._top)
        return Text("\n", no_wrap=True).join([*head, *shown])

    def _group(self) -> Text:
        """All answers to the prompt of the chosen sample, beside each other where there is room."""
        sample = self._sample
        if sample is None or sample["group"] is None:
            return Text("the samples are in no groups: x goes back", paint(self, "missing"))
        members = [one for one in self._document["samples"] if one["group"] == sample["group"]]
        width, lines = self._room()
        prompt = fmt.end(fmt.safe(sample["prompt"] or ""), 2 * width)
        head = [Text(line, paint(self, "muted")) for line in fmt.wrapped(prompt, width)]
        head.insert(0, Text(f"group {sample['group']}: {fmt.plural(len(members), 'answer')} to one prompt; x goes back",
                            paint(self, "strong")))  # fmt: skip
        columns = max(1, min(len(members), width // 30))
        cell = width // columns - 2
        around = members.index(sample)
        first = min(max(0, around - columns // 2), max(0, len(members) - columns))
        blocks = []
        for one in members[first : first + columns]:
            token = "first" if one is sample else "strong"
            top = [Text(f"{'›' if one is sample else ' '}sample {one['sample']}", paint(self, token))]
            top.append(Text(f"reward {fmt.number(one['reward'])} · adv {fmt.number(one['advantage'])}",
                            paint(self, "muted")))  # fmt: skip
            body = fmt.safe(one["response"] or "(no text: t names a tokenizer)", lines=True)
            blocks.append([*top, *(Text(line) for line in wrapped_lines(body, cell))])
        rows = []
        longest, room = max(map(len, blocks)), lines - len(head)
        for place in range(longest if longest <= room else room - 1):
            row = Text(no_wrap=True)
            for block in blocks:
                part = block[place] if place < len(block) else Text()
                row.append_text(part)
                row.append(" " * (cell + 2 - part.cell_len))
            rows.append(row)
        if longest > room:
            rows.append(Text(f"… {fmt.plural(longest - room + 1, 'line')} more: x, then pgdn", paint(self, "muted")))
        return Text("\n", no_wrap=True).join([*head, *rows])

    def _worst(self) -> Text:
        """The tokens of the whole step that are furthest off."""
        doc = self._document
        if not doc["worst"]:
            return Text("no log-probability, ratio or entropy says which tokens are worst: w goes back",
                        paint(self, "missing"))  # fmt: skip
        text = Text(no_wrap=True)
        text.append(f"the tokens of the step furthest off by {doc['worst_by']}: enter goes there, w back\n",
                    paint(self, "strong"))  # fmt: skip
        text.append(f" {'sample':>7}{'token':>8}{'id':>9}{doc['worst_by']:>16}  text\n", paint(self, "muted"))
        room = self._room()[1] - 2
        first = max(0, self._worst_at - room + 1)
        for place, one in enumerate(doc["worst"][first : first + room], first):
            here = place == self._worst_at
            said = f"{one['sample']:>7}{one['position']:>8}{one['id']:>9}{fmt.number(one['value']):>16}"
            line = f"{'›' if here else ' '}{said}  {fmt.end(fmt.safe(one['piece'] or fmt.NONE), 24)}\n"
            text.append(line, paint(self, "strong" if here else ""))
        return text

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, then: Callable[[], None] = lambda: None) -> None:
        """Have the reader give what is chosen, and draw it."""
        sample = self._sample
        shown = [] if sample is None else [sample["sample"]]
        self._then = then

        async def go() -> None:
            if not await self._sampling.ask(self._step, self._by, self._search, shown, self._tokenizer):
                return  # keys that come faster than answers: who asked first takes the newest answer
            if self._sampling.document is not None:
                self._document = self._sampling.document
            self._by, self._search = self._document["by"], self._document["search"]
            if self._sample is not None and self._tokens is None:
                self._at = 0  # another order, or other samples: the first of them is given
            self._then()
            self._draw()

        self._stage.work(go(), "samples")

    def _choose(self, place: int) -> None:
        place = min(max(0, place), max(0, len(self._document["samples"]) - 1))
        if place != self._at:
            self._at, self._top = place, 0
            if self._tokens is None:
                self._ask()
        self._draw()

    def action_sample(self, by: int) -> None:
        if self._view == "worst":
            self._worst_at = min(max(0, self._worst_at + by), max(0, len(self._document["worst"]) - 1))
            self._draw()
        else:
            self._choose(self._at + by)

    def action_token(self, by: int) -> None:
        if self._text is not None and self._view == "sample":
            self._text.move(by)
            self._top = self._text.seen(self._top)
            self._draw()

    def action_strong(self, way: int) -> None:
        """To the next token of the strongest colour."""
        if self._text is not None and self._view == "sample":
            if not self._text.to_strong(way):
                self._stage.say("no other token is so strong")
            self._top = self._text.seen(self._top)
            self._draw()

    def action_page(self, by: int) -> None:
        if self._view == "sample":
            self._top = max(0, self._top + by * max(1, self._room()[1] // 2))
            self._draw()

    def action_colour(self) -> None:
        tokens = self._tokens
        names = [column["name"] for column in tokens["columns"]] if tokens is not None else []
        if names:
            self._column = names[(names.index(self._column) + 1) % len(names) if self._column in names else 0]
            self._view = "sample"
            self._draw()

    def action_order(self) -> None:
        """The next order that something is recorded for."""
        samples = self._document["samples"]
        figures = {"length": "tokens"}
        can = [
            by for by in ORDERS
            if by == "order" or any(one[figures.get(by, by)] is not None for one in samples)  # type: ignore[literal-required]
        ]  # fmt: skip
        self._by = can[(can.index(self._by) + 1) % len(can)] if self._by in can else "order"
        self._first_of_them()

    def _first_of_them(self) -> None:
        """Ask anew, and stand on the first that comes."""
        self._at, self._top, self._view = 0, 0, "sample"

        def first() -> None:
            if self._tokens is None and self._sample is not None:
                self._ask()

        self._ask(first)

    def action_search(self) -> None:
        def go(text: str) -> None:
            self._search = None if text == "*" else text
            self._first_of_them()

        self._stage.ask(
            "Search", "samples whose prompt, response or messages hold it; * is all", go, self._search or ""
        )

    def action_tokenizer(self) -> None:
        def go(text: str) -> None:
            self._tokenizer = text
            self._text = None
            self._ask()

        self._stage.ask("Tokenizer", "a tokenizer.json, or its folder", go, self._tokenizer or "", path=True)

    def action_show(self, view: str) -> None:
        self._view = "sample" if self._view == view else view
        self._draw()

    def action_open(self) -> None:
        """To the sample and token that the list of the worst is on."""
        if self._view != "worst" or not self._document["worst"]:
            return
        worst = self._document["worst"][self._worst_at]
        place = next((i for i, one in enumerate(self._document["samples"]) if one["sample"] == worst["sample"]), None)
        if place is None:
            self._stage.say(f"sample {worst['sample']} is not among those that are listed")
            return
        self._view, self._at, self._top = "sample", place, 0
        self._column = self._document["worst_by"]

        def there() -> None:
            self._draw()
            if self._text is not None:
                self._text.go(worst["position"])
                self._top = self._text.seen(self._top)

        if self._tokens is None:
            self._ask(there)
        else:
            there()
            self._draw()

    def action_leave(self) -> None:
        if self._view == "sample":
            self.dismiss()
        else:
            self.action_show(self._view)

    def action_copy(self) -> None:
        tokens = self._tokens
        turns = [] if tokens is None else [f"{turn['role']}: {turn['text']}" for turn in tokens["texts"]]
        ids = [] if tokens is None else [" ".join(map(str, tokens["ids"]))]
        self._stage.screen.taking.copy("\n".join(turns or ids))

    def action_export(self) -> None:
        taking = self._stage.screen.taking

        def go(place: Writing) -> None:
            self._stage.work(taking.write([self._document], "nothing to export yet", place), "export")

        taking.ask_place(go)

"""Documents into words. Pure: mappings in, text out; no textual, no colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from replay_core.errors import RldbgError
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument, VerdictCounts
    from replay_core.documents.ruling import RulingDocument

#: Verdict words in the order a reader cares about them.
VERDICTS = ("NAN", "SHAPE", "DIFF", "MISSING", "PADDING", "CLOSE", "SAME")
DIVERGING = frozenset({"NAN", "SHAPE", "DIFF"})

NONE = "—"

#: What a terminal acts on or hides instead of showing: controls, direction marks, separators, joiners, soft hyphens,
#: tags, surrogates.
UNSAFE = regex(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def safe(text: object, *, lines: bool = False) -> str:
    """Text of a file as a terminal may show it: what it would act on stands there as an escape.

    Names, texts and paths of a dump are untrusted. With `lines`, line breaks and tabs stay.
    """
    text = str(text)
    if text.isascii() and text.isprintable():  # nearly all of them, by thousands
        return text
    shown = UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)
    return shown if lines else shown.replace("\n", "\\n").replace("\t", "\\t")


def number(value: object, digits: int = 4) -> str:
    """A number as it is shown everywhere: short, and never a bare 0 for something small."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**9 else f"{value:.{digits}g}"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 10**7:
            return f"{value:,.0f}"
        return f"{value:.{digits}g}"
    return str(value)  # "nan", "inf", "-inf", or a text


def exact(value: object) -> str:
    """A stored value with every digit that tells it from its neighbour (of float32; `exact_pair` for wider)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.9g}" if isinstance(value, float) else number(value)


def counted(value: object) -> str:
    """A value among others: integers in full, since ids that are rounded are others."""
    return exact(value) if isinstance(value, int) else number(value)


def exact_pair(a: object, b: object) -> tuple[str, str]:
    """Two values with every digit that tells them from each other: those of float64 that part late, in full."""
    texts = exact(a), exact(b)
    return (repr(a), repr(b)) if texts[0] == texts[1] and isinstance(a, float) and a != b else texts


def shape(value: Sequence[object] | None) -> str:
    return NONE if value is None else "×".join(str(part) for part in value) or "scalar"


def pair(value: Any, show: Any = str) -> str:
    """`[a, b]` as one text when both are alike."""
    if not isinstance(value, list) or len(value) != 2:
        return show(value) if value is not None else NONE
    a, b = (show(part) if part is not None else NONE for part in value)
    return a if a == b else f"{a} → {b}"


def short_dtype(name: object) -> str:
    text = str(name)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if text.startswith(long):
            return short + text[len(long) :]
    return text


def seconds(value: object) -> str:
    if not isinstance(value, (int, float)):
        return NONE
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def mib(value: object) -> str:
    if not isinstance(value, (int, float)):
        return "n/a"
    return f"{value:,.0f} MiB" if value < 10_240 else f"{value / 1024:,.1f} GiB"


def middle(text: str, width: int) -> str:
    """The text within `width` cells, cut in the middle: both ends of a tensor's name tell it from others."""
    if cells(text) <= width:
        return text
    if width < 4:
        return _first(text, width)
    tail = max(1, (width - 1) * 2 // 3)
    return f"{_first(text, width - 1 - tail)}…{_first(text[::-1], tail)[::-1]}"


def dotted(name: str, width: int) -> str:
    """A tensor's dotted name within `width` cells. What stands between its first part and the number of its layer goes
    before anything else: all layers share it, and the number tells them apart."""
    if cells(name) <= width:
        return name
    parts = name.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
    short = f"{parts[0]}…{'.'.join(parts[layer:])}" if layer > 1 else name
    return short if cells(short) <= width else middle(short, width)


def end(text: str, width: int) -> str:
    """The text within `width` cells, its end cut: of a sentence the beginning tells."""
    return text if cells(text) <= width else f"{_first(text, max(0, width - 1))}…"


def cells(text: str) -> int:
    """How many columns of a terminal the text takes: a Chinese sign takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # commands that print ASCII alone do without

    return cell_len(text)


def _first(text: str, width: int) -> str:
    """As much of its beginning as `width` cells hold."""
    taken = text[:width]
    while cells(taken) > width:
        taken = taken[:-1]
    return taken


def wrapped(text: str, width: int, taken: int = 0) -> list[str]:
    """The text in lines of `width`, the first one shorter by what is `taken` of it."""
    lines, room = [""], max(8, width - taken)
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
            room = width
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def span(seconds_past: float) -> str:
    """`3 s`, `4 min`, `2 h`, `3 days`."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds_past >= 2 * size:
            return f"{int(seconds_past // size)} {unit}"
    return f"{int(seconds_past)} s"


def ago(seconds_past: float) -> str:
    """`just now`, `5 min ago`, `3 h ago`, `2 days ago`."""
    if seconds_past < 90:
        return "just now"
    for size, unit in ((86_400, "day"), (3600, "h"), (60, "min")):
        if seconds_past >= size:
            count = int(seconds_past // size)
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return "just now"


def scope(key: Mapping[str, Any] | None) -> str:
    """`step 3 rank 0 micro 2`, leaving out what is not there."""
    key = key or {}
    parts = [f"{name} {key[name]}" for name in ("step", "rank", "micro") if key.get(name) is not None]
    return " ".join(parts)


def flags(value: Mapping[str, Any] | None) -> str:
    """Flags as `attention=sdpa packing=on`, without those that are unset."""
    return " ".join(f"{name}={setting(set_to)}" for name, set_to in (value or {}).items() if set_to is not None)


def setting(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "—" if value is None else str(value)


def not_finite(stats: Mapping[str, Any]) -> str:
    """How many elements are NaN, and the infinities that the least and the greatest leave out: `0 +3 inf`."""
    infinite = [f"{sign}{stats[name]:,} inf" for name, sign in (("pos_inf", "+"), ("neg_inf", "-")) if stats.get(name)]
    return " ".join([number(stats["nan"]), *infinite]) if "nan" in stats else ""


def place(index: Mapping[str, Any] | None) -> str:
    """`sample 1 position 0`, or the raw index where a tensor has no tokens."""
    index = index or {}
    parts = [f"{name} {index[name]}" for name in ("sample", "position") if index.get(name) is not None]
    if not parts and index.get("raw_a"):
        parts = [f"index {list(index['raw_a'])}"]
    return " ".join(parts)


def greatest(entry: Mapping[str, Any]) -> str:
    """Where the difference of a pair is greatest: `s1 p0` of a tensor with tokens, else the raw index of the element;
    the token furthest off, where no element is named."""
    where = (entry.get("greatest") or entry).get("index") or {}
    token = (entry.get("metrics") or {}).get("worst_token")
    raw = where.get("raw_a")
    if where.get("sample") is not None and where.get("position") is not None:
        return f"s{where['sample']} p{where['position']}"
    if token and raw is None:
        return f"s{token['sample']} p{token['position']}"
    return f"[{','.join(map(str, raw))}]" if raw else ""  # a number is at no index


def element_at(element: Mapping[str, Any]) -> str:
    """Where an element lies: `at 1,0,5 (s1 p0)`, its raw index and its token, if it has one."""
    index = element.get("index") or {}
    raw = ",".join(map(str, index.get("raw_a") or [])) or "the scalar"
    has_token = index.get("sample") is not None and index.get("position") is not None
    return f"at {raw} (s{index['sample']} p{index['position']})" if has_token else f"at {raw}"


def shown_as(entry: Mapping[str, Any]) -> str:
    """What the element shown of a pair is: the greatest difference, or what comes first, which `greatest` stands
    beside."""
    if not entry.get("greatest"):
        return "greatest" if (entry.get("metrics") or {}).get("max_abs") else "first"
    return "not finite" if (entry.get("metrics") or {}).get("nonfinite_mismatched") else "first"


def error_line(error: RldbgError) -> str:
    """An error as one toast: what, where, what helps."""
    lines = [error.message]
    if error.file and error.file not in error.message:
        lines.append(error.file)
    if error.expected:
        lines.append(f"expected {error.expected}")
    if error.found:
        lines.append(f"found {error.found}")
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(lines)


class Answer(Struct, frozen=True):
    """What the screen says first: a word, where, and why."""

    word: str
    token: str
    """The colour's name: first, close, same, missing, muted."""
    where: str
    """The tensor, or a sentence when there is none."""
    facts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Counts first, then why."""
    is_claim: bool = False
    """`where` is a sentence that may take two lines, not the tensor where something begins."""

    @property
    def sentence(self) -> str:
        """The whole answer on one line, as `y` copies it."""
        first = f"first at {self.where}" if self.token == "first" and not self.is_claim else self.where
        return " · ".join([f"{self.word} {first}", *self.facts])


def counts(value: Mapping[str, Any]) -> str:
    """`3 DIFF · 41 CLOSE · 168 SAME of 212`."""
    parts = [f"{value[word]:,} {word}" for word in VERDICTS if value.get(word)]
    if value.get("skipped"):
        parts.append(f"{value['skipped']:,} skipped")
    return f"{' · '.join(parts)} of {value.get('total', 0):,}"


def comparison_answer(document: ComparisonDocument) -> Answer:
    """The first line of a comparison: the ruling, where there is one, else what the table says."""
    table, ruling = _table_answer(document), document["ruling"]
    if ruling is not None and ruling["ruling"] is not None:
        return ruling_answer(ruling, [*table.notes, table.sentence])
    return table


def ruling_answer(ruling: RulingDocument, notes: list[str]) -> Answer:
    """The first line of a ruling that was made."""
    word = ruling["ruling"] or "not ruled"
    token = {"NOISE": "close", "SUSPECT": "missing", "BUG": "first"}[word]
    facts = [f"differs: {one}" for one in ruling["differences"][:2]]
    if ruling["graft"] is not None:
        # A line of its own: behind a claim of two lines it would be what 80 columns leave out.
        notes = [safe(f"graft: {ruling['graft']['sentence']}"), *notes]
    return Answer(word, token, safe(ruling["sentence"]), facts, notes, is_claim=True)


def _table_answer(document: ComparisonDocument) -> Answer:
    totals = document["counts"]
    first = document["first_divergence"]
    if first:
        return _ranks_answer(document, first_answer(first, totals))
    if apart := [row["name"] for row in document["tensors"] if row["verdict"] in DIVERGING]:
        more = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
        said = f"only masks differ, nothing that was computed: {', '.join(apart[:3])}{more}"
        return Answer("DIFF", "first", said, [], [counts(totals)], is_claim=True)
    compared = totals["SAME"] + totals["CLOSE"] + totals["PADDING"]
    if not compared:
        return Answer("NONE", "missing", "nothing could be compared", [], _remarks(document, totals))
    left_out = totals["MISSING"] + totals["skipped"]
    unread, absent = document["coverage"]["records_unreadable"], document["coverage"].get("numbers_absent", 0)
    word = "SAME" if compared == totals["SAME"] else "CLOSE"
    # 0 equals -0 and a cast may lose nothing: that is the same number in other bits.
    # Said of every pair by its own row: what no row says was not looked at.
    equal = sum(row["verdict"] == "SAME" and row["reason"].startswith("bitwise equal") for row in document["tensors"])
    bitwise = equal == compared
    phrase = "everything SAME or CLOSE" if word == "CLOSE" else f"everything {'bitwise ' if bitwise else ''}SAME"
    facts = [f"{compared:,} compared"]
    if left_out or unread or absent:
        lacks = [f"{left_out} not compared"] if left_out else []
        lacks += [f"{unread} record{'s' if unread > 1 else ''} unreadable"] if unread else []
        lacks += [f"{absent} ranks and micro-batches are not there"] if absent else []
        said = f"no divergence, but {', '.join(lacks)}"
        return Answer("PARTLY", "missing", said, facts, _remarks(document, totals))
    return Answer(word, word.lower(), phrase, facts, _remarks(document, totals))


def first_answer(
    first: Mapping[str, Any], totals: Mapping[str, Any] | None = None, running: str = "the comparison still runs"
) -> Answer:
    """The first line when something diverges."""
    facts = []
    where = place(first.get("index"))
    key = scope(first.get("a_key"))
    if key:
        facts.append(key)
    if where:
        facts.append(where)
    if first.get("a") is not None or first.get("b") is not None:
        facts.append(f"a={number(first.get('a'), 3)} b={number(first.get('b'), 3)}")
    if first.get("origin"):
        facts.append(f"origin {first['origin']}")
    notes = [counts(totals)] if totals else [running]
    if first.get("why"):
        notes.append(str(first["why"]))
    return Answer(str(first.get("verdict", "DIFF")), "first", str(first.get("name", "")), facts, notes)


def _ranks_answer(document: ComparisonDocument, first: Answer) -> Answer:
    """What went wrong among the ranks, where that is known: the tensor that parts first is where it shows."""
    faults = document["parallel"]["faults"] if "parallel" in document else []
    if not faults:
        return first
    cause = faults[0]["sentence"]
    more = [f"and {plural(len(faults) - 1, 'cause')} more"] if faults[1:] else []
    notes = [note for note in first.notes if cause not in note]
    return Answer(
        first.word, first.token, cause, [*more, f"first at {first.where}", *first.facts], notes, is_claim=True
    )


def origin(first: Mapping[str, Any]) -> str:
    """What produced the first divergence, in a sentence; empty where there is nothing to say."""
    return ": ".join(str(part) for part in (first.get("origin"), first.get("origin_why")) if part)


def _remarks(document: ComparisonDocument, totals: VerdictCounts) -> list[str]:
    parts = [counts(totals)]
    difference = document["first_difference"]
    if difference:
        where = " · ".join(part for part in (difference["name"], place(difference["index"])) if part)
        values = f"a={number(difference['a'], 3)} b={number(difference['b'], 3)}"
        parts.append(f"bitwise they part first at {where} · {values}")
    problems = document["problems"]
    if problems:
        parts.append(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}: {problems[0]['what']}")
    return parts

"""The command that says again what a document says, of what the document keeps of it; and who made it with what."""

from __future__ import annotations

import platform
import shlex
from importlib import metadata
from typing import TYPE_CHECKING, Any

from replay_core.replay.flags import DEFAULTS, FLAGS
from tui_debugger.snapshot import axes_text

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument
    from replay_core.documents.kinds import Document
    from replay_core.documents.parity import ParityDocument
    from replay_core.documents.replay import ReplayDocument
    from replay_core.documents.weights import WeightsDocument

#: What the numbers of a document may rest on.
_PACKAGES = ("numpy", "torch", "transformers")


def made_with(document: Document) -> list[str]:
    """Who wrote the document, and what is installed where it is read."""
    said = [f"{document['tool']}, {document['created']}", f"here: Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            said.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return said


def command_of(document: Document) -> str:
    """A line for a shell."""
    return shlex.join(["rldbg", *_words(document)])


def _words(document: Document) -> list[str]:
    if document["kind"] == "comparison":
        return _compare(document)
    if document["kind"] == "replay":
        return _replay(document)
    if document["kind"] == "diagnosis":
        return ["diagnose", document["path"]]
    if document["kind"] == "run":
        return ["ls", document["path"]]
    if document["kind"] == "record":
        return ["show", document["path"], *_key(document["key"])]
    if document["kind"] == "tensor":
        side = document["a"]
        return ["show", side["path"], "--tensor", side["name"], *_key(side["key"])]
    if document["kind"] == "parity":
        return _parity(document)
    if document["kind"] == "mismatch":
        step = [] if document["step"] is None else ["--step", str(document["step"])]
        model = [] if document["model"] is None else ["--model", document["model"]]
        return ["mismatch", document["path"], *step, *model]
    if document["kind"] == "samples":
        step = [] if document["step"] is None else ["--step", str(document["step"])]
        search = [] if document["search"] is None else ["--search", document["search"]]
        shown = [word for one in document["tokens"] for word in ("--sample", str(one["sample"]))]
        return ["samples", document["path"], *step, "--by", document["by"], *search, *shown]
    if document["kind"] == "gathering":
        return ["gather", document["directory"]]
    if document["kind"] == "weights":
        return _weights(document)
    if document["kind"] == "ruling":
        sides = [side for side in (document["a"], document["b"]) if side is not None]
        weights = [
            f"--weights-{name}={side['weights']}" for name, side in zip("ab", sides, strict=False) if side["weights"]
        ]
        return ["referee", *(side["path"] for side in sides), *weights]
    return [document["kind"]]


def _key(key: Any) -> list[str]:
    names = ("step", "rank", "micro", "stage", "role")
    return [word for name in names if key[name] is not None for word in (f"--{name}", str(key[name]))]


def _compare(doc: ComparisonDocument) -> list[str]:
    words = ["compare", doc["a"]["path"], doc["b"]["path"]]
    for name, value in doc["selection"].items():
        words += [f"--{name}", value]
    judged: Any = doc.get("tolerance") or {}
    for name, option in (("atol", "--atol"), ("rtol", "--rtol"), ("file", "--tolerance")):
        if judged.get(name) is not None:
            words += [option, str(judged[name])]
    if judged.get("exact"):
        words.append("--exact")
    return [*words, "--referee"] if doc["ruling"] is not None else words


def _replay(doc: ReplayDocument) -> list[str]:
    plan: Any = doc["plan"]
    words = ["replay", plan["dump"]]
    for name in ("step", "rank", "micro"):
        words += [f"--{name}", str(plan[name])]
    models = [one["model"] for one in doc["ranking"]["models"]] if doc["ranking"] else [plan["model"]]
    for model in models:
        words += ["--model", model] if model != "checkpoint" or len(models) > 1 else []
    if doc["ranking"]:
        words += ["--against", doc["ranking"]["against"]]
    axes = doc["matrix"]["axes"] if doc["matrix"] else {}
    for name, value in plan["flags"].items():
        if name not in FLAGS or name in axes or value == DEFAULTS[name] or value is None:
            continue
        option = FLAGS[name].option or "--" + name.replace("_", "-")
        words += [option] if FLAGS[name].is_switch else [option, str(value)]
    for name in ("role", "base", "temperature", "capture", "max_rows", "rows", "forward"):
        if plan.get(name) is not None:
            option = {"base": "--base-model"}.get(name, "--" + name.replace("_", "-"))
            words += [option, str(plan[name])]
    if plan.get("seed"):
        words += ["--seed", str(plan["seed"])]
    if plan.get("backward"):
        words.append("--backward")
    for name, option in (("loss", "--loss"), ("optimizer", "--optimizer-step")):
        if isinstance(plan.get(name), str):
            words += [option, plan[name]]
    return [*words, "--matrix", axes_text(axes)] if axes else words


def _parity(doc: ParityDocument) -> list[str]:
    recorded = ["--recorded"] if doc["a"]["engine"] == "recorded" else []
    return ["parity", *recorded, doc["a"]["path"], doc["b"]["path"]]


def _weights(doc: WeightsDocument) -> list[str]:
    words = ["weights", doc["a"]["path"], doc["b"]["path"]]
    if doc["a"]["step"] is not None:
        words += ["--step", str(doc["a"]["step"])]
    if doc["before"]:
        words += ["--before", doc["before"]["path"]]
    for one in doc["older"]:
        words += ["--older", one["path"]]
    return words

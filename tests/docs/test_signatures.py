"""What is known of the frameworks' methods is what the installed ones declare."""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.signatures import SIGNATURES, declared, wrong

INSTALLED = [
    (framework, place)
    for framework, versions in SIGNATURES.items()
    if "/" not in framework and find_spec(framework) is not None
    for place in versions.get(importlib.metadata.version(framework), {})
]


@pytest.mark.parametrize(("framework", "place"), INSTALLED)
def test_the_installed_framework_declares_what_is_hooked_as_it_is_known(framework: str, place: str) -> None:
    spec = find_spec(framework)
    assert spec is not None
    assert spec.origin is not None
    file, _, name = place.partition("::")
    source = (Path(spec.origin).parents[1] / file).read_text(encoding="utf-8")
    assert declared(source, name) == SIGNATURES[framework][importlib.metadata.version(framework)][place]


def test_a_method_that_is_not_there_is_told_from_one_that_takes_nothing() -> None:
    source = "class A:\n    def f(self): ...\n\nA().f(1, **more)\n"
    assert (declared(source, "A.f"), declared(source, "A.g"), declared(source, "B.f")) == (["self"], None, None)
    assert (declared(source, "f()"), declared(source, "g()")) == (["1", "**more"], None)


def test_a_source_that_declares_a_hook_otherwise_is_named() -> None:
    known = {"a.py::A.f": ["self", "data"], "b.py::f": []}
    said = wrong({"a.py": "class A:\n    def f(self, batch): ...\n"}.get, known)
    assert said == [
        "A.f of a.py: expected ['self', 'data'], found ['self', 'batch']", "f of b.py: expected [], found no such file"
    ]  # fmt: skip

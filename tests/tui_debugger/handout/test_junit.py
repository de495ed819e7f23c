"""JUnit XML: a service that counts failures comes to what the exit code says."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from replay_core.export.outcome import exit_code
from tests.tui_debugger.handout.documents import HOSTILE, genuine, spoilt
from tui_debugger.handout.junit import junit


def test_failures_and_errors_are_counted_where_the_exit_code_is_not_0_and_nowhere_else():
    codes = set()
    for name, document in genuine().items():
        code = int(exit_code(document))
        codes.add(code)
        suite = ElementTree.fromstring(junit(document, code).encode()).find("testsuite")
        assert suite is not None
        cases = suite.findall("testcase")
        for word, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[word]) == sum(case.find(tag) is not None for case in cases), name
        assert int(suite.attrib["tests"]) == len(cases)
        assert (int(suite.attrib["failures"]) + int(suite.attrib["errors"]) > 0) == (code != 0), (name, code)
    assert codes == {0, 1, 4}


def test_what_was_allowed_is_no_failure():
    made = junit(genuine()["comparison"], 0)  # as with --allow-missing, or --fail-on never
    assert 'failures="0" errors="0"' in made
    assert "<skipped" in made


def test_every_tensor_rule_and_cell_is_a_case():
    for name, count in (("comparison", "tensors"), ("matrix", "cells")):
        suite = ElementTree.fromstring(junit(genuine()[name], 1).encode()).find("testsuite")
        assert suite is not None
        assert len(suite.findall("testcase")) == 1 + len(genuine()[name][count])


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_texts_are_xml_all_the_same(text: str) -> None:
    made = junit(spoilt(genuine()["comparison"], text), 1)
    root = ElementTree.fromstring(made.encode())
    assert {element.tag for element in root.iter()} == {"testsuites", "testsuite", "testcase", "failure"}

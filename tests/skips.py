"""A test skips for a reason of this list or it fails: what is skipped without being named is a test that nobody has."""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

ALLOWED = {
    "gpu": r"no CUDA device|this machine has a GPU",
    "an extra of pyproject.toml that is not installed": (
        r"(megatron-core|deepspeed) is not installed|TRL is not installed|needs pyarrow|"
        r"mkdocs-material is not installed|(obstore|asyncssh) is not installed|"
        r"Ray is not installed|Ray is installed here|(tensorboardX|wandb) is not installed|"
        r"could not import '(peft|pyarrow|pyarrow\.parquet|omegaconf|trl)'|a flash-attention package is installed here"
    ),
    "a program that is not installed": (
        r"(tmux|bindfs) is not installed|a C compiler and Linux are needed|no headless browser is installed"
    ),
    "this account or system": (
        r"root may write everywhere|is read from /proc|are read from /proc|are counted under /proc|there is no lock|"
        r"could not import 'resource'|does not set a process's high-water mark back"
    ),
    "this environment": r"this environment holds no editable install of this checkout",
    "this transformers": r"this transformers offers sdpa for gemma2",
}
NAMED = re.compile("|".join(ALLOWED.values()))


def unnamed(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """The reason of a skip that the list does not name."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return None if NAMED.search(reason) else reason


def _failed_if_unnamed(report: pytest.TestReport | pytest.CollectReport) -> None:
    if reason := unnamed(report):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that tests/skips.py does not name: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _failed_if_unnamed(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _failed_if_unnamed(report)
    return report

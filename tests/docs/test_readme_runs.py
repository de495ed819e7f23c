"""Every command in the README and in docs/parity.md is run as it stands, and does what it is there for."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from replay_core import workbench
from tests.fixtures import FIXTURES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
#: Made by `demo`, before all others: they are about its dumps.
FIRST = "rldbg demo --text --dir demo-run"
#: What stands in docs/parity.md in capitals, for the reader's own.
OWN = {
    "CONFIG_A": "critic_a.yaml", "CONFIG_B": "critic_b.yaml", "DUMP": "demo-run/run", "DIR_A": "values_a",
    "DIR_B": "values_b", "DIR": "values",
}  # fmt: skip

TRAIN = """
import torch
torch.manual_seed(0)
class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.o_proj = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.head(self.o_proj(x))
policy = Policy()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for _ in range(12):
    loss = policy(torch.randn(3, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def lines_of(paper: str) -> list[str]:
    """The commands of its console blocks, whole, without their remarks."""
    text = (ROOT / paper).read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))
    lines, quoted = [], ""
    for line in re.sub(r"\s+#.*", "", blocks).splitlines():
        quoted += ("\n" if quoted else "") + line
        if quoted.count('"') % 2 == 0:
            lines.append(quoted)
            quoted = ""
    return [line for line in lines if line.startswith("rldbg ")]


LINES = [line for paper in ("README.md", "docs/parity.md") for line in lines_of(paper)]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the lines name, and the demo's dumps."""
    ground = tmp_path_factory.mktemp("ground")
    (ground / "bin").mkdir()
    (ground / "bin" / "rldbg").write_text(f'#!/bin/sh\nexec {sys.executable} -m tui_debugger "$@"\n')
    (ground / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for file in (ground / "bin").iterdir():
        file.chmod(0o755)
    (ground / "train.py").write_text(TRAIN)
    (ground / "names.map").write_text("my_entropy = entropys\n")
    (ground / "prompts.txt").write_text("what is 2 + 2\nand 3 + 4\n")
    copies = {
        "train.log": "grpo_notes/train_1da2900_normal.log", "verl-dump": "verl/train_batch_step1.dp",
        "slime-dump": "slime", "base-model": "trl/tiny_qwen2", "checkpoint-500": "trl/tiny_qwen2",
        "values": "roll_critic/fp32_sharedhead",
        "DIR": "trl/tiny_qwen2", "rollouts": "slime/rollout_data", "train_data": "slime/train_data",
    }  # fmt: skip
    for name, source in copies.items():
        place = FIXTURES / source
        (shutil.copytree if place.is_dir() else shutil.copy)(place, ground / name)
    for name, critic in (("values_a", "deepspeed"), ("values_b", "megatron")):
        (ground / name).mkdir()
        for file in (ground / "values").glob(f"*_{critic}.pt"):
            shutil.copy(file, ground / name)
    for name, example in zip(("critic_a.yaml", "critic_b.yaml"), workbench.parity_examples(), strict=True):
        shutil.copy(example, ground / name)
    assert ran(ground, FIRST).returncode == 1, "the demo ends on a divergence"
    return ground


def ran(ground: Path, line: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{ground / 'bin'}:{os.environ['PATH']}"}
    environment |= {name: str(ground / "home") for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME")}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=ground, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip


def test_there_are_lines_and_the_first_is_among_the_readmes() -> None:
    assert len(LINES) > 25
    assert FIRST.removeprefix("rldbg ") in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_papers_runs(line: str, ground: Path) -> None:
    typed = re.sub(r"\b(?:CONFIG_[AB]|DUMP|DIR(?:_[AB])?)\b", lambda name: OWN.get(name[0], name[0]), line)
    typed = typed.replace("--tokenizer values", "--tokenizer DIR")
    answer = ran(ground, typed)
    said = answer.stdout[-2000:] + answer.stderr[-2000:]
    assert "internal error" not in said
    words = typed.split()
    opens_the_screen = words[1].startswith("--follow") or (ground / words[1]).exists() or words[1] == "train.log"
    if opens_the_screen:
        printed = words[1].endswith((".json", ".html"))  # a document is printed where there is no terminal
        refused = "the screen needs a terminal" in answer.stderr
        assert (answer.returncode in (0, 1) if printed else answer.returncode == 2, refused) == (True, not printed), (
            said
        )
    elif "parity" in words and "--recorded" not in words and importlib.util.find_spec("megatron") is None:
        assert answer.returncode == 4, said
        assert "pip install 'rldbg[parity]'" in said
    else:
        assert answer.returncode in (0, 1), said
        assert answer.stdout or "record" in words, said

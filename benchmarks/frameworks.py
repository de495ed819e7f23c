"""Real trainers, driven as a stranger would: recorded without an edit, beside the same run unrecorded, then the line
that the recording ended with.

    python -m benchmarks.frameworks [NAME | hooks ...]      # or: make frameworks; writes docs/frameworks.md

Each row's packages and this tree's wheel are installed into an environment of their own, under RLDBG_ENVIRONMENTS
(by default build/frameworks). A row is kept in benchmarks/frameworks.json as soon as it is there, and is not driven
again by the same sources: what was interrupted goes on. Rows that are named are driven again.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.signatures import SIGNATURES, checked

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "frameworks.md"
RESULTS = ROOT / "benchmarks" / "frameworks.json"
DATA = ROOT / "tests" / "data"

#: What makes the tiny model, its tokenizer and its reward, as the tests have it.
_MADE = (ROOT / "tests" / "replay_core" / "recorder" / "test_trl.py").read_text(encoding="utf-8")
HEAD = "\n".join(
    ["from typing import Any", "import sys", "import torch"]
    + [
        ast.get_source_segment(_MADE, part) or ""
        for part in ast.parse(_MADE).body
        if isinstance(part, ast.FunctionDef) and part.name in ("tokenizer", "model", "reward")
    ]
)
HEAD += """
tok = tokenizer(); tok.padding_side = "right"
sums = [f"{a}+{a * 7}={a * 8}" for a in range(16)]
def batch(texts):
    found = dict(tok(texts, padding=True, return_tensors="pt")); found.pop("token_type_ids", None)
    return {**found, "labels": found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)}
plain = dict(output_dir="out", max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
             logging_steps=1, save_strategy="no",
             report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2, bf16=False)
"""
TAIL = """
import os
whole = {n.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
         for n, p in policy.named_parameters()}
if os.environ.get("RANK", "0") == "0": torch.save(whole, sys.argv[1])
"""
GRPO = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(**{**plain, "per_device_train_batch_size": 4}, num_generations=4, max_completion_length=8, beta=0.0)
data = Dataset.from_list([{"prompt": f"{a}+{a * 7}="} for a in range(8)])
trainer = GRPOTrainer(model=model(), reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer())
trainer.train(); policy = trainer.model
"""
SFT = """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
data = Dataset.from_list([{"prompt": f"{a}+{a * 7}=", "completion": f"{a * 8}"} for a in range(16)])
args = SFTConfig(**plain, max_length=32)
trainer = SFTTrainer(model=model(), args=args, train_dataset=data, processing_class=tokenizer())
trainer.train(); policy = trainer.model
"""
DPO = """
from datasets import Dataset
from trl import DPOConfig, DPOTrainer
data = Dataset.from_list([{"prompt": f"{a}+{a * 7}=", "chosen": f"{a * 8}", "rejected": f"{a}"} for a in range(16)])
args = DPOConfig(**plain, max_length=32)
trainer = DPOTrainer(model=model(), ref_model=model(), args=args, train_dataset=data, processing_class=tokenizer())
trainer.train(); policy = trainer.model
"""
TRAINER = """
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
trainer = Trainer(model=model(), args=TrainingArguments(**plain), train_dataset=[tok(text) for text in sums],
                  data_collator=DataCollatorForLanguageModeling(tok, mlm=False))
trainer.train(); policy = trainer.model
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
policy = model(); optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(sums, batch_size=2, collate_fn=batch)
policy, optimizer, loader = accelerator.prepare(policy, optimizer, loader)
for number, one in zip(range(3), loader):
    accelerator.backward(policy(**one).loss)
    accelerator.clip_grad_norm_(policy.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()
"""
RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo"); rank = dist.get_rank(); policy = model()
WRAP
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
for step in range(3):
    policy(**batch(sums[4 * step + 2 * rank:][:2])).loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()
"""
DDP = RANKS.replace("WRAP", "policy = torch.nn.parallel.DistributedDataParallel(policy)")
FSDP2 = RANKS.replace(
    "WRAP",
    """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2,))
for layer in policy.model.layers: fully_shard(layer, mesh=mesh)
fully_shard(policy, mesh=mesh)
""",
)


PPO = """
prompts = torch.tensor([tok(f"{a}+{a * 7}=")["input_ids"] for a in range(2, 6)])
policy = model(); critic = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 1))
reference = model().requires_grad_(False)
optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (policy, critic)]
for step in range(3):
    ids = policy.generate(prompts, min_new_tokens=4, max_new_tokens=4, do_sample=True)
    with torch.no_grad():
        old, ref = (one(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                    for one in (policy, reference))
        returns = critic(ids)[:, :-1, 0] + (ids[:, 1:] % 3).float() - 0.1 * (old - ref)
    for epoch in range(2):
        for half in (slice(0, 2), slice(2, 4)):
            values = critic(ids[half])[:, :-1, 0]
            logits = policy(input_ids=ids[half]).logits[:, :-1]
            logps = logits.log_softmax(-1).gather(-1, ids[half, 1:, None])[..., 0]
            advantages = (returns[half] - values).detach(); ratio = (logps - old[half]).exp()
            (torch.max(-advantages * ratio, -advantages * ratio.clip(0.8, 1.2)).mean() / 2).backward()
            ((values - returns[half]).pow(2).mean() / 2).backward()
        for optimizer in optimizers:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            optimizer.step(); optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Drive:
    """A trainer's own code: what it is called, the packages of its environment, its script, how many processes."""

    name: str
    needs: tuple[str, ...]
    script: str
    ranks: int = 1

    @property
    def row(self) -> str:
        """Its two first cells."""
        return f"{self.name} | {', '.join(self.needs).replace('==', ' ')}"


_TORCH = "torch==2.13.0"
_TRANSFORMERS = (_TORCH, "transformers==5.23.0", "accelerate==1.15.0")
_OLD_TRANSFORMERS = (_TORCH, "transformers==4.51.3", "accelerate==1.15.0")
_TRL = (_TORCH, "trl==1.16.0", "transformers==5.23.0")
#: It imports requests and does not ask for it.
_OLD_TRL = (_TORCH, "trl==0.29.0", "transformers==5.23.0", "requests")
DRIVES = (
    *(
        Drive(name, needs, script, ranks)
        for needs in (_TRL, _OLD_TRL)
        for name, script, ranks in (
            ("TRL GRPOTrainer", GRPO, 1),
            ("TRL GRPOTrainer, two ranks", GRPO, 2),
            ("TRL SFTTrainer", SFT, 1),
            ("TRL DPOTrainer", DPO, 1),
        )
    ),
    Drive("transformers Trainer", _TRANSFORMERS, TRAINER),
    Drive("transformers Trainer", _OLD_TRANSFORMERS, TRAINER),
    Drive("accelerate, one process", _TRANSFORMERS, ACCELERATE),
    Drive("accelerate, two ranks", _TRANSFORMERS, ACCELERATE, 2),
    Drive("DistributedDataParallel, two ranks", _TRANSFORMERS, DDP, 2),
    Drive("FSDP2 (fully_shard), two ranks", _TRANSFORMERS, FSDP2, 2),
    Drive("a PPO loop, actor and critic", _TRANSFORMERS, PPO),
)

TEXT = """# Trainers that were driven

<!-- Made by `python -m benchmarks.frameworks` (`make frameworks`) of benchmarks/frameworks.json. -->

Each trainer's own code on a tiny model on a CPU, three optimizer steps, unchanged, in an environment that `pip install`
made of its packages and rldbg's wheel: once under `rldbg record --gradients '*' -- python train.py`, once without. Then
the line that the recording ended with.
*Opens*: without a problem. *Unmodified*: every weight after training is bitwise equal with and without recording.
*Replays*: how far, in nats, the recorded logits or log-probabilities are from the replay's. *Backward*: losses and
gradients against the recorded. Both of the replay's last cell, the batch as it was recorded; each row alone differs in
last bits.

| trainer | packages | records, opens | unmodified | its last line, exit code | replays (greatest) | backward | driven |
|---|---|---|---|---|---|---|---|
"""
REST = """
The gradient of several ranks is held to the mean of all ranks' replays. A loss that is a plain function of the script
(the PPO loop) is not formed again: the gradient it left at the logits is carried back.

Not driven here, so nothing is claimed of recording their training: verl, OpenRLHF, slime, miles, SkyRL, NeMo-RL,
prime-rl, AReaL, ROLL, open-instruct, ms-swift, torchtitan (they want a GPU, Ray or an engine), Weaver (closed source).
What their own writers left, and what is hooked of them, is below.
"""
WRITERS = """
## What their own writers wrote

The files of [tests/data](../tests/data/README.md), opened. *Known*: tensors whose name has a meaning to rldbg (tokens,
masks, log-probabilities ...). *Unread*: tensors that are listed and cannot be read. *Nothing lost*:
the numbers and texts of the files, counted without rldbg by `benchmarks/counted.py`, and which fields list fewer (as
they are a record's key, or the texts of a sample are one). All opened on DATE.

| writer, version | files | opens as | records | tensors | known | unread | problems | nothing lost |
|---|---|---|---|---|---|---|---|---|
"""
HOOKED = """
## What is hooked

The methods that the [integrations](integrations/others.md) hook, and when the sources of that version were last read to
declare them as rldbg knows them (`make integrations`, which reads each repository's newest commit too). Recorded as the
real classes were called, on a CPU, on 2026-11-22: OpenRLHF `Actor` and `PolicyLoss` (whole forwards), verl 0.9.1
`PPOTrainer` (its TransferQueue a dict), SkyRL `TrainingCallback`, prime-rl `LossInputs`; NeMo-RL `ClippedPGLossFn`,
ROLL `ActorWorker`, AReaL `PPOActor` and slime's loaded function up to the hook: their bodies want a cluster.

| framework | version | what is hooked | declared so |
|---|---|---|---|
"""
UNDRIVEN = """
No file of their own writers is there of: Weaver (closed source). torchtitan's checkpoints are
torch.distributed.checkpoint's, its scalars TensorBoard's or wandb's.
"""


_LINE = re.compile(r"^rldbg: rldbg (replay .*? --step \d+(?: --backward)?) ", re.MULTILINE)


def environment(needs: tuple[str, ...], sources: str) -> str:
    """The Python of an environment of these packages and of this tree's wheel."""
    within = Path(os.environ.get("RLDBG_ENVIRONMENTS", ROOT / "build" / "frameworks"))
    folder = within / "-".join(needs).replace("==", "-")
    python, wheel = folder / "bin" / "python", folder / "rldbg-sources"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    if not python.exists():
        venv.create(folder, symlinks=True)
    if not wheel.exists():
        subprocess.run([*pip, *shlex.split(os.environ.get("PIP_FLAGS", "")), *needs, f"{ROOT}[replay]"], check=True)
    elif wheel.read_text() != sources:
        subprocess.run([*pip, "--no-deps", "--force-reinstall", str(ROOT)], check=True)
    wheel.write_text(sources)
    return str(python)


def sources() -> str:
    """A digest of what is installed of this tree."""
    files = sorted(file for package in ("replay_core", "tui_debugger") for file in (ROOT / package).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def drive(one: Drive, python: str, folder: Path) -> list[str]:
    """What driving a trainer showed: the cells of its row after its name and packages."""
    (folder / "train.py").write_text(HEAD + one.script + TAIL)
    launch = [python, *(["-m", "torch.distributed.run", "--nproc_per_node", str(one.ranks), "--standalone"]
                        if one.ranks > 1 else []), "train.py"]  # fmt: skip
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RLDBG"))}
    cleared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / "cache")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=folder, env=cleared, capture_output=True, text=True, check=False)

    rldbg = (python, "-m", "tui_debugger")
    recorded = run(*rldbg, "record", "--gradients", "*", "--", *launch, "recorded.pt")
    alone = run(*launch, "alone.pt")
    if recorded.returncode or alone.returncode:
        sys.stderr.write(recorded.stderr[-2000:] + alone.stderr[-2000:])
        return [f"did not run (exit {recorded.returncode} recorded, {alone.returncode} alone)", "", "", "", ""]
    listed = json.loads(run(*rldbg, "ls", "rldbg-dump", "--json").stdout)
    problems = len(listed["problems"])
    opens = f"{len(listed['records'])}, {'yes' if not problems else f'{problems} problems'}"
    found = _LINE.search(recorded.stderr)
    if found is None:
        return [opens, _unmodified(folder), "none", "", ""]
    words = shlex.split(found[1])
    replay = run(*rldbg, *words, "--json")
    line = f"`rldbg {shlex.join([Path(word).name for word in words])}`, {replay.returncode}"
    return [opens, _unmodified(folder), line, *_answered(replay)]


def _answered(replay: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    try:
        cell: dict[str, Any] = json.loads(replay.stdout)["cells"][-1]
    except (ValueError, LookupError):
        said = replay.stderr.strip().splitlines()
        return (said[0] if said else "nothing was said"), ""
    values, training = cell["recorded"], cell["recorded_training"]
    held = f"{values[0]['verdict']}, {values[0]['max_abs']:.1e}" if values else "nothing recorded to hold it to"
    if training is None:
        return held, "not asked for"
    what = f"{training['losses']} losses, {training['gradients']} gradients"
    return held, f"bitwise ({what})" if training["bitwise"] else training["sentence"].removeprefix("recording: ")


def _unmodified(folder: Path) -> str:
    import torch

    a, b = (torch.load(folder / name, weights_only=True) for name in ("recorded.pt", "alone.pt"))
    apart = [name for name in a if not torch.equal(a[name], b[name])]
    return f"{len(a)} of {len(a)} weights" if not apart else f"NO: {len(apart)} weights differ, first {apart[0]}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |"


def _today() -> str:
    return datetime.date.today().isoformat()


def _hooked() -> list[str]:
    """A line per version of a framework whose methods are hooked: whether its sources declare them as known."""
    found = []
    for framework, version, wrong in checked():
        if version == "HEAD":
            continue
        known = SIGNATURES[framework]
        places = next(given for name, given in known.items() if name.startswith(version))
        hooks = [
            f"`{place.partition('::')[2].removesuffix('()')}({', '.join(given)})`" for place, given in places.items()
        ]
        found.append(_line([framework, version, ", ".join(hooks), "NO: " + "; ".join(wrong) if wrong else _today()]))
    return found


def main() -> None:
    wanted = sys.argv[1:]
    code = sources()
    for one in DRIVES:
        known = _kept_results()["trainers"].get(one.row)
        if not any(word in one.row for word in wanted) if wanted else known is not None and known["sources"] == code:
            continue
        with tempfile.TemporaryDirectory(prefix="rldbg-frameworks-") as folder:
            cells = drive(one, environment(one.needs, code), Path(folder))
        sys.stderr.write(f"{one.row} | {' | '.join(cells)}\n")
        # Read anew: rows may be driven side by side.
        results = _kept_results()
        results["trainers"][one.row] = {"cells": cells, "driven": _today(), "sources": code}
        _write(results)
    results = _kept_results()
    _write({**results, "hooks": _hooked()} if not wanted or "hooks" in wanted else results)


def _kept_results() -> dict[str, Any]:
    found: dict[str, Any] = {"trainers": {}, "hooks": []}
    return {**found, **json.loads(RESULTS.read_text(encoding="utf-8"))} if RESULTS.exists() else found


def _write(results: dict[str, Any]) -> None:
    results["trainers"] = {one.row: results["trainers"][one.row] for one in DRIVES if one.row in results["trainers"]}
    for file, text in ((RESULTS, json.dumps(results, indent=1) + "\n"), (PAGE, page(results))):
        new = file.with_suffix(f".{os.getpid()}.new")
        new.write_text(text, encoding="utf-8")
        new.replace(file)


def page(results: dict[str, Any]) -> str:
    """The page: the trainers' rows, the writers' as their files open now, and the hooks'."""
    rows = [_line([*row.split(" | "), *kept["cells"], kept["driven"]]) for row, kept in results["trainers"].items()]
    tables = (TEXT, rows), (REST + WRITERS.replace("DATE", _today()), _writers()), (UNDRIVEN + HOOKED, results["hooks"])
    return "".join(text + "\n".join(lines) + "\n" for text, lines in tables)


#: Where a number of the file is no number of a tensor: an index with digests, a graph's labels, parts of several ranks.
_OTHERWISE = frozenset({"native", "torch", "torchlens"})


def _kept(path: Path) -> str:
    from benchmarks.counted import in_files, lost

    there, fewer = sum(in_files(path).values()), sorted(lost(path))
    return f"{there:,} listed" if there and not fewer else f"{there:,}, but {', '.join(fewer)}" if there else ""


def _writers() -> list[str]:
    """A line per row of the table in tests/data/README.md, of what opening its files says."""
    from replay_core import naming
    from replay_core.dumps import open_run

    found = []
    for row in (DATA / "README.md").read_text(encoding="utf-8").splitlines():
        folder, version = ([*map(str.strip, row.split("|")), "", ""])[1:3]
        head, _, rest = folder.partition("{")
        within, _, tail = rest.partition("}")
        names = [f"{head}{part}{tail}" for part in within.split(",")] if rest else folder.split(",")
        paths = [DATA / name.strip().partition("*")[0] for name in names]
        if not row.startswith("| ") or folder == "folder":
            continue
        for path in paths:
            run = open_run(path)
            refs = [ref for record in run.records for ref in record.tensors()]
            known = sum((ref.canonical or ref.name) in naming.MEANINGS for ref in refs)
            unread = sum(not ref.is_readable for ref in refs)
            kept = "" if path.relative_to(DATA).parts[0] in _OTHERWISE else _kept(path)
            opened = [run.dialect, len(run.records), len(refs), known, unread, len(run.problems), kept]
            found.append(_line([version, path.relative_to(DATA).as_posix(), *map(str, opened)]))
    return found


if __name__ == "__main__":
    main()

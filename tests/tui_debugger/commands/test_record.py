from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replay_core import workbench
from replay_core.dumps import open_run
from replay_core.rollouts import RolloutReplay
from tests import warm_python
from tests.builders import Here, there
from tui_debugger.cli import run as run_rldbg

ROOT = Path(__file__).resolve().parents[3]

PLAIN = """
import sys
import torch
assert "tui_debugger" not in sys.modules
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    for micro in range(2):
        loss = model(torch.randn(5, 4)).pow(2).mean()
        loss.backward()
        print(step, micro, loss.item())
    optimizer.step()
"""

LANGUAGE_MODEL = """
import torch
from replay_core.demo.policy import build_policy
actor, ref = build_policy(0), build_policy(1).requires_grad_(False)
optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
for step in range(2):
    ids = actor.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        ref(input_ids=ids)
    actor(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

PPO = """
import torch
from replay_core.demo.policy import build_policy
actor, critic = build_policy(0), torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 1))
optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (actor, critic)]
prompts = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
for step in range(2):
    ids = actor.generate(prompts, min_new_tokens=3, max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        actor(input_ids=ids)
        returns = critic(ids)[..., 0] + 1
    for epoch in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rows in (slice(0, 2), slice(2, 4)):
            values = critic(ids[rows])[..., 0]
            logps = actor(input_ids=ids[rows]).logits.log_softmax(-1)[..., 0]
            (-logps.mean()).backward()
            (values - returns[rows]).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
"""

TRL = """
import sys
sys.path.insert(0, {root!r})
from tests.replay_core.recorder.test_trl import model, reward, tokenizer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
arguments = GRPOConfig(
    output_dir="out", max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, beta=0.0, bf16=False, disable_tqdm=True,
)
prompts = Dataset.from_list([{{"prompt": f"{{a}}+{{a}}="}} for a in range(8)])
GRPOTrainer(
    model=model(), reward_funcs=reward, args=arguments, train_dataset=prompts, processing_class=tokenizer()
).train()
"""


def record(
    folder: Path, script: str, *options: str, cold: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Record a script; `cold` by an interpreter of its own, else by one forked from a Python that holds torch."""
    (folder / "train.py").write_text(script)
    words = [
        sys.executable,
        "-m",
        "tui_debugger",
        "record",
        "--dir",
        "dump",
        *options,
        "--",
        *([sys.executable] if cold else warm_python.command()),
        "train.py",
    ]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@pytest.mark.long
def test_a_plain_script_is_recorded_without_an_edit_and_computes_the_same(tmp_path: Path) -> None:
    answer = record(tmp_path, PLAIN, "--gradients", "0.weight", "--params", "bias", cold=True)
    assert answer.returncode == 0, answer.stderr
    alone = subprocess.run(
        [*warm_python.command(), "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert answer.stdout == alone.stdout
    run = open_run(tmp_path / "dump")
    assert run.steps() == [0, 1, 2]
    losses = {(r.key.step, r.key.micro): r for r in run.records if r.key.stage == "loss"}
    assert len(losses) == 6
    from replay_core.pages import array

    for line in answer.stdout.splitlines():
        step, micro, value = line.split()
        ref = losses[int(step), int(micro)].get("loss")
        assert ref is not None
        assert float(array(ref)) == float(value)
    (gradient,) = [r for r in run.records if (r.key.stage, r.key.step) == ("gradient", 1)]
    assert [ref.name for ref in gradient.tensors()] == ["grad_norm", "grad.0.weight"]
    (params,) = [r for r in run.records if (r.key.stage, r.key.step) == ("param", 1)]
    assert [ref.name for ref in params.tensors()] == ["param.0.bias", "param.2.bias"]
    assert "a step with one call of the model takes about" in answer.stderr.partition("saw 6 model calls")[0]
    assert "6 model calls, 6 losses, 3 steps" in answer.stderr
    assert "not seen: rewards, advantages" in answer.stderr
    assert "rldbg ls dump" in answer.stderr


@pytest.mark.long
def test_outputs_of_modules_are_recorded_in_call_order_where_they_are_asked_for(tmp_path: Path) -> None:
    answer = record(tmp_path, PLAIN, "--modules", "*", "--level", "stats")
    assert answer.returncode == 0, answer.stderr
    kept = [record for record in open_run(tmp_path / "dump").records if record.key.stage == "modules"]
    assert [(record.key.step, record.key.micro) for record in kept] == [(s, m) for s in range(3) for m in range(2)]
    names = ["0.output", "1.output", "2.output", "forward.output"]
    assert all([ref.name for ref in record.tensors()] == names for record in kept)
    # The last layer's is what the model puts out.
    assert all(len({ref.digest for ref in record.tensors()}) == 3 for record in kept)
    assert "--modules" not in answer.stderr


@pytest.mark.long
def test_outputs_of_modules_that_no_hook_sees_are_said(tmp_path: Path) -> None:
    compiled = PLAIN.replace("optimizer =", "model[0].compile(backend='eager')\noptimizer =")
    answer = record(tmp_path, compiled, "--modules", "*")
    assert answer.returncode == 0, answer.stderr
    assert "not seen: what --modules * asks for, in a call of Sequential (6)" in answer.stderr
    assert "6 model calls, 6 losses, 3 steps" in answer.stderr


@pytest.mark.long
def test_a_pattern_that_no_module_matches_is_said_and_a_call_that_raises_is_no_trouble(tmp_path: Path) -> None:
    failing = PLAIN.replace(
        "for step", "try:\n    model(torch.randn(5, 3))\nexcept RuntimeError:\n    pass\nfor step", 1
    )
    answer = record(tmp_path, failing, "--modules", "1")
    assert answer.returncode == 0, answer.stderr
    kept = [record for record in open_run(tmp_path / "dump").records if record.key.stage == "modules"]
    assert [ref.name for ref in kept[0].tensors()] == ["1.output", "forward.output"]
    (tmp_path / "none").mkdir()
    answer = record(tmp_path / "none", PLAIN, "--modules", "mlp")
    assert "not seen: what --modules mlp asks for, in a call of Sequential (6)" in answer.stderr


#: A step of the first optimizer raises once, and is caught; each step of the other is that of one it keeps.
RAISING = """
import torch
class Careful(torch.optim.SGD):
    steps = 0
    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            raise FloatingPointError("the gradient is not finite")
        return super().step(closure)
class Keeping(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.kept = torch.optim.SGD(self.param_groups[0]["params"], lr=lr)
    def step(self, closure=None):
        return self.kept.step(closure)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizers = [Careful(model[0].parameters(), lr=0.1), Keeping(model[2].parameters(), lr=0.1)]
for step in range(3):
    model(torch.randn(5, 4)).pow(2).mean().backward()
    for optimizer in optimizers:
        try:
            optimizer.step()
        except FloatingPointError:
            pass
        optimizer.zero_grad()
"""


@pytest.mark.long
def test_an_optimizer_whose_step_raised_is_not_stepping_any_more(tmp_path: Path) -> None:
    answer = record(tmp_path, RAISING, "--gradients", "*")
    assert answer.returncode == 0, answer.stderr
    run = open_run(tmp_path / "dump")
    assert run.steps() == [0, 1, 2]
    gradients = [
        (record.key.step, ref.name)
        for record in run.records if record.key.stage == "gradient"
        for ref in record.tensors() if ref.name.endswith("weight")
    ]  # fmt: skip
    assert sorted(gradients) == [(step, f"grad.{at}.weight") for step in range(3) for at in (0, 2)]


@pytest.mark.slow
def test_sampling_is_counted_not_recorded_and_models_get_roles(tmp_path: Path) -> None:
    answer = record(tmp_path, LANGUAGE_MODEL)
    assert answer.returncode == 0, answer.stderr
    assert "calls while sampling (6)" in answer.stderr
    run = open_run(tmp_path / "dump")
    inputs = [(r.key.step, r.key.micro, r.key.role) for r in run.records if r.key.stage == "batch_inputs"]
    assert inputs == [(0, 0, "actor"), (0, 0, "ref"), (1, 0, "actor"), (1, 0, "ref")]
    assert RolloutReplay(tmp_path / "dump").steps == [0, 1]


@pytest.mark.long
def test_a_step_of_a_loop_that_trains_on_its_samples_is_all_that_trains_on_them(tmp_path: Path) -> None:
    answer = record(tmp_path, PPO, "--gradients", "*lm_head*")
    assert answer.returncode == 0, answer.stderr
    run = open_run(tmp_path / "dump")
    assert not run.problems
    assert run.steps() == [0, 1]
    losses = [
        (r.key.role, r.key.micro, r.key.minibatch) for r in run.records if (r.key.step, r.key.stage) == (1, "loss")
    ]
    # The actor's first call of a step, without gradients, scores what was sampled; the critic's too.
    assert sorted(losses, key=str) == [
        (role, 1 + micro, micro // 2) for role in ("actor", "critic") for micro in range(4)
    ]
    gradients = [r for r in run.records if (r.key.step, r.key.stage) == (1, "gradient")]
    assert {(r.key.role, r.key.minibatch) for r in gradients} == {(a, m) for a in ("actor", "critic") for m in (0, 1)}
    fields = {r.key.role: [ref.name for ref in r.tensors()] for r in gradients}
    assert "grad.lm_head.weight" in fields["actor"]
    assert "grad.lm_head.weight" not in fields["critic"]
    # Held to the weights of the step's first optimizer step: a later mini-batch is said to be of other weights.
    plan = {"dump": str(run.path), "step": 1, "model": "checkpoint", "flags": {}}
    first = workbench.replay({**plan, "micro": 1}, tmp_path / "first", Here())
    assert first["cells"][-1]["recorded"][0]["verdict"] in ("SAME", "CLOSE")
    later = workbench.replay({**plan, "micro": 3}, tmp_path / "later", Here())
    assert not later["cells"][-1]["recorded"]
    assert any("1 optimizer steps of this step came before" in note for note in later["notes"])


@pytest.mark.slow
@pytest.mark.usefixtures("replays_here")
def test_a_loss_that_is_a_plain_function_is_carried_back_from_the_gradient_it_left_at_the_logits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = record(tmp_path, PPO, "--gradients", "*")
    assert "--step 1 --backward carries back what its loss left at the logits" in answer.stderr
    capfd.readouterr()
    assert run_rldbg(["replay", str(tmp_path / "dump"), "--step", "1", "--backward", "--json"]) == 0
    cell = json.loads(capfd.readouterr().out)["cells"][-1]
    assert [(one["micro"], one["loss"]) for one in cell["loss"]["micros"]] == [(1, None), (2, None)]
    training = cell["recorded_training"]
    assert training["bitwise"], training["sentence"]
    assert training["gradients"] > 10
    # A gradient of other logits is not carried back in silence.
    changed = tmp_path / "dump" / "loss_gradient" / "step_000001_rank0_micro2.pt"
    changed.write_bytes((tmp_path / "dump" / "loss_gradient" / "step_000001_rank0_micro1.pt").read_bytes())
    assert run_rldbg(["replay", str(tmp_path / "dump"), "--step", "1", "--backward", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["cells"][-1]["recorded_training"]["agrees"] is False


@pytest.mark.slow
@pytest.mark.usefixtures("replays_here")
def test_the_mean_over_ranks_is_replayed_from_every_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = """
import torch, torch.distributed as dist
from replay_core.demo.policy import build_policy
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(build_policy(0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
ids = (torch.arange(16).reshape(2, 8) + 3 * dist.get_rank()) % 10 + 2
for step in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    (tmp_path / "train.py").write_text(script)
    words = [sys.executable, "-m", "tui_debugger", "record", "--dir", "dump", "--gradients", "*", "--", sys.executable]
    subprocess.run(
        [*words, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    capfd.readouterr()
    again = ["replay", str(tmp_path / "dump"), "--step", "1", "--backward", "--json"]
    assert run_rldbg(again) == 0
    training = json.loads(capfd.readouterr().out)["cells"][-1]["recorded_training"]
    assert (training["bitwise"], training["losses"]) == (True, 2), training["sentence"]
    assert training["gradients"] > 10
    assert run_rldbg([*again, "--rank", "1"]) == 0
    training = json.loads(capfd.readouterr().out)["cells"][-1]["recorded_training"]
    assert (training["losses"], training["gradients"]) == (1, 0)
    assert "is of 2 ranks together, this replay of 1: it is not compared" in training["sentence"]


@pytest.mark.slow
def test_the_environments_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('the environment was here')\n")
    answer = record(tmp_path, PLAIN, cold=True, PYTHONPATH=os.pathsep.join([str(ROOT), str(own)]))
    assert answer.stdout.startswith("the environment was here")
    assert open_run(tmp_path / "dump").steps() == [0, 1, 2]


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("raise SystemExit(5)", 5, ""),
        ("import os; os.kill(os.getpid(), 9)", 137, ""),
        ("print('no torch here')", 3, "nothing was recorded"),
        ("import torch", 3, "no torch module with parameters was called"),
    ],
)
def test_the_exit_code_is_the_scripts_and_nothing_recorded_is_no_success(
    script: str, code: int, says: str, tmp_path: Path
) -> None:
    answer = record(tmp_path, script)
    assert answer.returncode == code, answer.stderr
    assert says in answer.stderr
    assert not (tmp_path / "dump").exists()


def test_a_command_that_does_not_exist_is_a_wrong_request(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "tui_debugger", "record", "--", "no-such-program"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert answer.returncode == 2
    assert "cannot be started" in answer.stderr


def _readme() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [line.partition("#")[0].strip() for line in text.splitlines() if line.startswith("rldbg record ")]


@pytest.mark.long
@pytest.mark.parametrize("line", _readme())
def test_a_line_of_the_readme_records_and_what_it_recorded_is_replayed_to_it(line: str, tmp_path: Path) -> None:
    options = shlex.split(line)[2:]
    answer = record(tmp_path, LANGUAGE_MODEL, *options[: options.index("--")])
    assert answer.returncode == 0, answer.stderr
    assert "not seen: what --gradients" not in answer.stderr
    assert "--backward runs a step again, with the weights of every step" in answer.stderr
    folder = options[options.index("--dir") + 1] if "--dir" in options else "dump"
    run = open_run(tmp_path / folder)
    step = run.steps()[-1]
    assert f"rldbg replay {run.path} --step {step} --backward " in answer.stderr
    plan = {"dump": str(run.path), "step": step, "micro": 0, "micros": [0], "backward": True, "model": "checkpoint"}
    cell = workbench.replay({**plan, "flags": {}}, tmp_path / "out", Here())["cells"][-1]
    training = there(cell["recorded_training"])
    assert training["bitwise"], training["sentence"]
    assert cell["recorded"][0]["field"] == "forward.output.logits"
    assert cell["recorded"][0]["verdict"] in ("SAME", "CLOSE")
    gradients = [ref.name for ref in run.select(stage="gradient")[0].tensors() if ref.name.startswith("grad.")]
    assert len(gradients) == (2 if "--gradients" in line else 0)


@pytest.mark.slow
def test_the_line_of_a_replay_says_what_is_not_installed_for_it(tmp_path: Path) -> None:
    # As far as an import and a search for a module can tell, None in sys.modules is a package that is not there.
    answer = record(tmp_path, "import sys\nsys.modules['xxhash'] = None\n" + LANGUAGE_MODEL)
    assert answer.returncode == 0, answer.stderr
    assert "(after pip install 'rldbg[replay]': xxhash not installed here)" in answer.stderr


@pytest.mark.long
def test_a_pattern_that_no_parameter_matches_is_said(tmp_path: Path) -> None:
    answer = record(tmp_path, PLAIN, "--gradients", "lm_head", "--params", "weight")
    assert answer.returncode == 0
    assert "not seen: what --gradients lm_head asks for, in an update of 0.weight, 0.bias … (3)" in answer.stderr
    assert "--params" not in answer.stderr


@pytest.mark.slow
def test_a_trl_script_is_recorded_with_its_rollouts(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    answer = record(tmp_path, TRL.format(root=str(ROOT)), cold=True)
    assert answer.returncode == 0, answer.stderr
    assert "GRPOTrainer was recorded with its rollouts" in answer.stderr
    assert (
        f"rldbg replay {tmp_path / 'dump'} --step 1 --backward runs a step again, with the weights of" in answer.stderr
    )
    run = open_run(tmp_path / "dump")
    stages = {record.key.stage for record in run.records}
    assert stages == {"trajectory", "forward_data", "loss", "gradient", "optimizer", "training_metrics"}
    batch = RolloutReplay(tmp_path / "dump", scope="full").batch(1)
    assert batch is not None
    assert "advantages" in batch


SLOW_TO_END = """
import sys, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(1000):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        if step == 2:
            print("ready", flush=True)
            time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(9)
"""


@pytest.mark.long
@pytest.mark.parametrize(("ends", "status"), [(signal.SIGINT, 9), (signal.SIGTERM, 143)])
def test_a_script_that_is_told_to_end_ends_in_its_own_time(ends: signal.Signals, status: int, tmp_path: Path) -> None:
    """Ctrl-C goes to both processes, as a terminal sends it; SIGTERM to the first alone."""
    (tmp_path / "train.py").write_text(SLOW_TO_END)
    words = [sys.executable, "-m", "tui_debugger", "record", "--dir", "dump", "--", sys.executable, "train.py"]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as recording:  # fmt: skip
        assert recording.stdout is not None
        assert recording.stdout.readline() == "ready\n"
        (os.killpg if ends == signal.SIGINT else os.kill)(recording.pid, ends)
        output, errors = recording.communicate(timeout=60)
    assert recording.returncode == status, errors
    assert ("saved" in output) is (ends == signal.SIGINT)
    assert ("SIGTERM ended the script" in errors) is (ends == signal.SIGTERM)
    assert open_run(tmp_path / "dump").steps() == [0, 1, 2]


@pytest.mark.long
def test_ranks_that_torchrun_starts_record_side_by_side_and_one_speaks_for_all(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4) * dist.get_rank()).mean().backward()
optimizer.step()
dist.destroy_process_group()
"""
    (tmp_path / "train.py").write_text(script)
    words = ["record", "--dir", "dump", "--", sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    answer = subprocess.run(
        [sys.executable, "-m", "tui_debugger", *words, "--standalone", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    run = open_run(tmp_path / "dump")
    given = {r.key.rank: [ref.name for ref in r.tensors()] for r in run.records if r.key.stage == "batch_inputs"}
    assert given == {0: ["input"], 1: ["input"]}, "named as the model in the wrapper names it"
    assert answer.stderr.count("a step with one call of the model takes about") == 1
    assert answer.stderr.count("not seen:") == 1
    assert "no model was recorded" not in answer.stderr


DPO = """
import sys
sys.path.insert(0, {root!r})
from tests.replay_core.recorder.test_trl import model, tokenizer
from datasets import Dataset
from trl import DPOConfig, DPOTrainer
pairs = [{{"prompt": f"{{a}}+{{a}}=", "chosen": f"{{a + a}}", "rejected": f"{{a}}"}} for a in range(8)]
tokens = tokenizer()
tokens.padding_side = "right"
DPOTrainer(
    model=model(), ref_model=model(), train_dataset=Dataset.from_list(pairs), processing_class=tokens,
    args=DPOConfig(output_dir="out", max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                   save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, learning_rate=1e-2,
                   loss_type="{loss}"),
).train()
"""


@pytest.mark.slow
def test_a_step_of_trls_dpo_is_replayed_to_its_recorded_loss_and_gradients(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    answer = record(tmp_path, DPO.format(root=str(ROOT), loss="sigmoid"), "--gradients", "*", cold=True)
    assert "--step 1 --backward runs a step again" in answer.stderr
    run = open_run(tmp_path / "dump")
    assert not run.problems
    plan = {"dump": str(run.path), "step": 1, "micro": 0, "micros": [0, 1], "backward": True, "model": "checkpoint"}
    cell = workbench.replay({**plan, "flags": {}}, tmp_path / "out", Here())["cells"][-1]
    assert cell["recorded"][0]["verdict"] in ("SAME", "CLOSE")
    training = there(cell["recorded_training"])
    assert (training["bitwise"], training["losses"], training["gradients"]) == (True, 2, 15), training["sentence"]


@pytest.mark.slow
def test_a_preference_loss_that_no_replay_forms_is_said_when_the_run_ends(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    answer = record(tmp_path, DPO.format(root=str(ROOT), loss="ipo"), cold=True)
    assert "its loss (ipo) is recorded as a number; --backward cannot form it" in answer.stderr

"""The methods of frameworks that rldbg hooks, as each version declares them; checked against the sources themselves.

python -m tests.docs.signatures          # or: make integrations (fetches packages and files, imports none of them)

A version is one of the package index, or a commit of a repository: there what its newest commit declares is looked at
too. RLDBG_RAW is where the files lie: URL/owner/name/commit/path, by default GitHub's.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

#: Framework (or owner/name of its repository) -> version (or commit) -> "file::Class.method" (or "file::function", or
#: "file::call()", what a hook that a setting names is given) -> its parameters.
SIGNATURES: dict[str, dict[str, dict[str, list[str]]]] = {
    "verl": {
        "0.9.1": {
            "verl/trainer/ppo/ray_trainer.py::RayPPOTrainer._update_actor": ["self", "batch"],
            "verl/trainer/ppo/v1/trainer_base.py::PPOTrainer._update_actor": ["self", "batch", "metrics"],
        },
    },
    "trl": {
        version: {
            "trl/trainer/grpo_trainer.py::GRPOTrainer._generate_and_score_completions": ["self", "inputs"],
            "trl/trainer/grpo_trainer.py::GRPOTrainer._compute_loss": ["self", "model", "inputs"],
            "trl/trainer/grpo_trainer.py::GRPOTrainer._calculate_rewards": [
                "self", "inputs", "prompts", "completions", "completion_ids_list",
            ],
            "trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss": ["self", "model", "inputs", "return_outputs"],
        }
        for version in ("0.29.0", "1.16.0")
    },
    "vllm": {
        "0.33.0": {
            "vllm/entrypoints/llm.py::LLM.apply_model": ["self", "func"],
            "vllm/v1/worker/worker_base.py::WorkerBase.apply_model": ["self", "fn"],
            "vllm/v1/worker/gpu_worker.py::Worker.get_model": ["self"],
        },
    },
    "sglang": {
        "0.5.23": {
            "sglang/srt/model_executor/hook_manager.py::register_forward_hooks": ["model", "hook_specs"],
            "sglang/srt/model_executor/hook_manager.py::resolve_callable": ["path"],
        },
    },
    "transformers": {
        "5.23.0": {
            "transformers/trainer.py::Trainer.training_step": ["self", "model", "inputs", "num_items_in_batch"],
        },
    },
    "OpenRLHF/OpenRLHF": {
        "3c3be6234e0cb353e76bb8019947db9dfe99fca7": {
            "openrlhf/models/actor.py::Actor.forward": [
                "self", "sequences", "action_mask", "attention_mask", "return_output", "allgather_logits",
                "return_logprobs", "ring_attn_group", "packed_seq_lens", "return_entropy",
            ],
            "openrlhf/models/loss.py::PolicyLoss.forward": [
                "self", "log_probs", "old_log_probs", "advantages", "action_mask", "rollout_log_probs", "dp_size",
                "batch_num_tokens", "global_batch_size",
            ],
            "openrlhf/trainer/ray/ppo_actor.py::ActorPPOTrainer.training_step": [
                "self", "experience", "kl_ctl", "step", "loss_batch_info",
            ],
        },
    },
    "NVIDIA-NeMo/RL": {
        "7ea279abfbeb698b092856d0dab61e7cf39bc909": {
            "nemo_rl/algorithms/loss/loss_functions.py::ClippedPGLossFn.__call__": [
                "self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks",
            ],
        },
    },
    "alibaba/ROLL": {
        "8eb27cc2dc34c4d1310b169d9b86d339004d811a": {
            "roll/pipeline/base_worker.py::ActorWorker.train_step": ["self", "data"],
        },
    },
    "areal-project/AReaL": {
        "cbff54d645d2cd8ee1f1c358a82f3f473588433d": {
            "areal/trainer/ppo/actor.py::PPOActor.compute_advantages": ["self", "data"],
            "areal/engine/fsdp_engine.py::FSDPEngine.get_version": ["self"],
        },
    },
    "THUDM/slime": {
        "624b824a898ab0ec1fcb4d373004c7f3852bf515": {
            "slime/backends/megatron_utils/actor.py::rollout_data_postprocess()": [
                "self.args", "rollout_id", "rollout_data",
            ],
        },
    },
    "NovaSky-AI/SkyRL": {
        "a9564572eb8e91076be43c1bd5e4615e3de17265": {
            "skyrl/train/utils/callbacks.py::TrainingCallback.on_step_end": [
                "self", "trainer", "callback_input", "control",
            ],
        },
    },
    "PrimeIntellect-ai/prime-rl": {
        "559b44772e471d1538537b8805cc77f3824a5e64": {
            "src/prime_rl/trainer/rl/loss.py::custom_fn()": ["inputs", "**kwargs"],
        },
    },
}  # fmt: skip
RAW = "https://raw.githubusercontent.com"


def declared(source: str, name: str) -> list[str] | None:
    """The parameters of a method, or function, of a module's source, or what a call `name()` in it gives; None where
    there is none of that name.
    """
    body: list[ast.stmt] = ast.parse(source).body
    if name.endswith("()"):
        return _given(ast.parse(source), name[:-2])
    *classes, function = name.split(".")
    for one in classes:
        found = next((part for part in body if isinstance(part, ast.ClassDef) and part.name == one), None)
        body = [] if found is None else found.body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for part in body:
        if isinstance(part, kinds) and part.name == function:
            return [argument.arg for argument in (*part.args.posonlyargs, *part.args.args)]
    return None


def _given(tree: ast.AST, function: str) -> list[str] | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and function == getattr(node.func, "attr", getattr(node.func, "id", None)):
            named = [f"{one.arg}={ast.unparse(one.value)}" if one.arg else f"**{ast.unparse(one.value)}"
                     for one in node.keywords]  # fmt: skip
            return [*map(ast.unparse, node.args), *named]
    return None


def wrong(source_of: Callable[[str], str | None], known: dict[str, list[str]]) -> list[str]:
    """What sources (a file's text, None for no such file) declare otherwise than is known of them."""
    found = []
    for place, parameters in known.items():
        file, _, name = place.partition("::")
        source = source_of(file)
        said = None if source is None else declared(source, name)
        if said != parameters:
            found.append(f"{name} of {file}: expected {parameters}, found {'no such file' if source is None else said}")
    return found


def _of_wheel(wheel: Path) -> Callable[[str], str | None]:
    archive = zipfile.ZipFile(wheel)
    return lambda file: archive.read(file).decode("utf-8") if file in archive.namelist() else None


def of_commit(repository: str, commit: str) -> Callable[[str], str | None]:
    """The text of a file of a repository's commit, by its path; None where there is no such file."""

    def source_of(file: str) -> str | None:
        try:
            with urlopen(f"{os.environ.get('RLDBG_RAW', RAW)}/{repository}/{commit}/{file}", timeout=60) as answer:
                return str(answer.read().decode("utf-8"))
        except HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise

    return source_of


def checked() -> Iterator[tuple[str, str, list[str]]]:
    """(framework, version or commit, what its sources declare otherwise than is known) of everything that is known."""
    for framework, versions in SIGNATURES.items():
        for version, known in versions.items():
            if "/" in framework:
                for commit in (version, "HEAD"):
                    yield framework, commit[:9], wrong(of_commit(framework, commit), known)
                continue
            with tempfile.TemporaryDirectory() as folder:
                words = ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", "-d", folder]
                subprocess.run([sys.executable, *words, f"{framework}=={version}"], check=True)
                yield framework, version, wrong(_of_wheel(next(Path(folder).glob("*.whl"))), known)


def main() -> int:
    failed = 0
    for framework, version, said in checked():
        failed += bool(said)
        sys.stdout.write(f"{framework} {version}: {'; '.join(said) or 'as known'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

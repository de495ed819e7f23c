"""The methods of frameworks that rldbg hooks, as each version declares them; checked against the packages themselves.

python -m tests.docs.signatures          # or: make integrations (fetches the packages, imports none of them)
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: Framework -> version -> "file::Class.method" (or "file::function") -> its parameters.
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
}  # fmt: skip


def declared(source: str, name: str) -> list[str] | None:
    """The parameters of a method, or function, of a module's source; None where it declares none of that name."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, function = name.split(".")
    for one in classes:
        found = next((part for part in body if isinstance(part, ast.ClassDef) and part.name == one), None)
        body = [] if found is None else found.body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for part in body:
        if isinstance(part, kinds) and part.name == function:
            return [argument.arg for argument in (*part.args.posonlyargs, *part.args.args)]
    return None


def wrong(wheel: Path, known: dict[str, list[str]]) -> list[str]:
    """What a wheel declares otherwise than is known of it."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for place, parameters in known.items():
            file, _, name = place.partition("::")
            there = file in archive.namelist()
            said = declared(archive.read(file).decode("utf-8"), name) if there else None
            if said != parameters:
                found.append(f"{name} of {file}: expected {parameters}, found {said if there else 'no such file'}")
    return found


def main() -> int:
    failed = 0
    for framework, versions in SIGNATURES.items():
        for version, known in versions.items():
            with tempfile.TemporaryDirectory() as folder:
                words = [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--no-deps",
                    "--only-binary",
                    ":all:",
                    "-q",
                    "-d",
                    folder,
                ]
                subprocess.run([*words, f"{framework}=={version}"], check=True)
                said = wrong(next(Path(folder).glob("*.whl")), known)
            failed += bool(said)
            sys.stdout.write(f"{framework} {version}: {'; '.join(said) or f'{len(known)} signatures as known'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

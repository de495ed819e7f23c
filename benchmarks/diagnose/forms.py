"""A run written as four frameworks write theirs: our recorder's dump, verl's DataProto files, what TRL's trainer is
given, slime's debug data; and as the log that each of them prints.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.diagnose.trainer import StepKept, Trained
from replay_core.recorder import Recorder


def native(run: Trained, folder: Path) -> Path:
    """As the recorder's page shows it: the batch, the forwards, the losses, the norm and the metrics of a step."""
    recipe = run.recipe
    loss = {"kind": recipe.algorithm, "clip_low": recipe.clip_low, "clip_high": recipe.clip_high}
    flags = {"dtype": "float32", "temperature": recipe.temperature, "loss": loss}
    recorder = Recorder(folder, flags=flags)
    for done in run.kept:
        fields, width = done.fields, done.fields["width"]

        def next_BT(value: Tensor, width: int = width) -> Tensor:
            return functional.pad(value, (width - 1, 0))

        def masks(ids: Tensor, mask: Tensor, held: Tensor, width: int = width) -> dict[str, Tensor]:
            return {"input_ids": ids, "attention_mask": held, "response_mask": functional.pad(mask, (width, 0))}

        with recorder.step(done.step, rank=None) as record:
            batch = masks(fields["ids"], fields["mask"], fields["held"])
            record(
                "trajectory", batch, rewards=fields["reward"], rollout_log_probs=next_BT(fields["rollout"]),
                group_ids=fields["groups"], sample_id=fields["samples"], weight_version=fields["version"],
                **({} if fields["weights"] is None else {"rollout_is_weights": next_BT(fields["weights"])}),
            )  # fmt: skip
        with recorder.step(done.step, rank=0) as record:
            for number, micro in enumerate(done.micros):
                here, rows = micro.tensors, micro.rows
                key = {"micro": number, "epoch": micro.epoch, "minibatch": micro.minibatch}
                more = {name: next_BT(fields[name][rows]) for name in ("values", "returns") if fields[name] is not None}
                if more:
                    more["token_rewards"] = next_BT(fields["shaped_tokens"][rows])
                record(
                    "forward_data", masks(fields["trained_ids"][rows], fields["mask"][rows], fields["held"][rows]),
                    **more, old_log_probs=next_BT(here["old"]), ref_log_probs=next_BT(here["ref"]),
                    advantages=next_BT(here["advantages"]), log_probs=next_BT(here["logprobs"]),
                    entropy=next_BT(here["entropy"]), rewards=fields["reward"][rows], group_ids=fields["groups"][rows],
                    sample_id=fields["samples"][rows], temperature=recipe.temperature, **key,
                )  # fmt: skip
                record(
                    "loss", prob_ratio=next_BT(here["ratio"]), token_loss=next_BT(here["token_loss"]),
                    kl=next_BT(here["kl"]), response_mask=functional.pad(here["mask"], (width, 0)),
                    tokens_of_step=micro.numbers["tokens"],
                    **{name: micro.numbers[name] for name in ("pg_loss", "kl_loss", "loss", "clip_fraction")}, **key,
                )  # fmt: skip
            record("gradient", grad_norm=done.metrics["grad_norm"])
    for number, metrics in enumerate(run.metrics):
        with recorder.step(number, rank=0) as record:
            record("training_metrics", metrics=_named(metrics, _NATIVE))
    recorder.close()
    return folder


def verl(run: Trained, folder: Path) -> Path:
    """`DataProto.save_to_disk` of every step's batch, under the class's own name."""
    made = types.ModuleType("verl.protocol")
    proto = type("DataProto", (), {"__module__": "verl.protocol"})
    proto.__getstate__ = lambda self: self.state  # type: ignore[attr-defined]
    made.DataProto = proto  # type: ignore[attr-defined]
    sys.modules.setdefault("verl", types.ModuleType("verl"))
    sys.modules["verl.protocol"] = made
    folder.mkdir(parents=True, exist_ok=True)
    for done in run.kept:
        fields, width = done.fields, done.fields["width"]
        held = fields["held"]
        batch = {
            "prompts": fields["trained_ids"][:, :width], "responses": fields["trained_ids"][:, width:],
            "response_mask": fields["mask"], "input_ids": fields["trained_ids"], "attention_mask": held,
            "position_ids": (held.cumsum(-1) - 1).clip(0), "rollout_log_probs": fields["rollout"],
            "old_log_probs": fields["old"], "token_level_scores": fields["reward_tokens"],
            "token_level_rewards": fields["shaped_tokens"], "advantages": fields["advantages"],
            "returns": fields["returns"] if fields["returns"] is not None else fields["advantages"],
        }  # fmt: skip
        for name, said in (("ref", "ref_log_prob"), ("values", "values"), ("weights", "rollout_is_weights")):
            if fields[name] is not None:
                batch[said] = fields[name]
        state = {
            name: (str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes())
            for name, value in batch.items()
        }
        import numpy as np

        one = proto()
        columns = {"uid": np.array([f"g{number}" for number in fields["groups"].tolist()], dtype=object)}
        meta = {"temperature": run.recipe.temperature, "global_steps": done.step + 1}
        one.state = (([len(held)], None, state), columns, meta)  # type: ignore[attr-defined]
        import pickle

        (folder / f"train_batch_step{done.step + 1}.dp").write_bytes(pickle.dumps(one))
    return folder


def trl(run: Trained, folder: Path) -> Path:
    """What `_generate_and_score_completions` returns and `_compute_loss` is given."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for done in run.kept:
        fields, width = done.fields, done.fields["width"]
        per_sample = run.recipe.algorithm != "ppo"
        mask = fields["mask"]
        advantage = (fields["advantages"].sum(1) / mask.sum(1).clip(1)) if per_sample else fields["advantages"]
        whole = {
            "prompt_ids": fields["trained_ids"][:, :width], "prompt_mask": fields["held"][:, :width],
            "completion_ids": fields["trained_ids"][:, width:], "completion_mask": mask, "advantages": advantage,
            "num_items_in_batch": mask.sum(), "old_per_token_logps": fields["old"],
            "sampling_per_token_logps": fields["rollout"],
        }  # fmt: skip
        if fields["weights"] is not None:
            whole["importance_sampling_ratio"] = fields["weights"]
        if run.recipe.kl:
            whole["ref_per_token_logps"] = fields["ref"]
        torch.save(whole, folder / f"generate_and_score_step{done.step:06d}_gen{done.step}.pt")
        for micro in done.micros:
            inputs = {
                name: value[micro.rows] if torch.is_tensor(value) and value.ndim else value
                for name, value in whole.items()
            }
            inputs["per_token_logps"] = micro.tensors["logprobs"]
            content = {"global_step": done.step, "micro": count, "inputs": inputs,
                       "loss": torch.tensor(micro.numbers["loss"])}  # fmt: skip
            torch.save(content, folder / f"compute_loss_step{done.step:06d}_micro{count}.pt")
            count += 1
    return folder


def slime(run: Trained, folder: Path) -> Path:
    """`save_debug_rollout_data` and `--dump-details`, format 2."""
    for part in ("rollout_data", "train_data"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for done in run.kept:
        rollout, train = _slime_rows(done)
        torch.save({"rollout_id": done.step, "samples": rollout}, folder / f"rollout_data/{done.step}.pt")
        whole = {"format_version": 2, "rollout_id": done.step, "rank": 0, "samples": train,
                 "raw_reward": done.fields["reward"].tolist()}  # fmt: skip
        torch.save(whole, folder / f"train_data/{done.step}.pt")
    return folder


def _slime_rows(done: StepKept) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    fields, width = done.fields, done.fields["width"]
    rollout, train = [], []
    for row in range(len(fields["ids"])):
        held = fields["held"][row] == 1
        size = int(held[width:].sum())
        # Masks are as long as the response; one that counts padding is as long as the batch is wide.
        kept = fields["mask"].shape[1] if int(fields["mask"][row].sum()) > size else size
        index, group = int(fields["samples"][row]), int(fields["groups"][row])
        cut = bool(fields["truncated"][row])
        rollout.append({
            "group_index": group, "index": index, "prompt": f"copy {row}", "tokens": fields["ids"][row][held].tolist(),
            "response": "digits", "response_length": size, "label": "", "reward": float(fields["reward"][row]),
            "loss_mask": fields["mask"][row, :kept].tolist(), "weight_versions": [str(int(fields["version"][row]))],
            "rollout_log_probs": fields["rollout"][row, :size].tolist(), "remove_sample": False,
            "status": "truncated" if cut else "completed", "metadata": {},
        })  # fmt: skip
        one: dict[str, Any] = {
            "data_parallel_rank": 0, "sample_index": index, "rollout_position": row,
            "tokens": fields["trained_ids"][row][held], "response_lengths": size, "total_lengths": int(held.sum()),
            "rewards": float(fields["reward"][row]), "truncated": int(cut),
            "loss_masks": fields["mask"][row, :kept].int(), "rollout_ids": done.step,
        }  # fmt: skip
        for name, said in (("rollout", "rollout_log_probs"), ("old", "log_probs"), ("ref", "ref_log_probs"),
                           ("advantages", "advantages"), ("returns", "returns"), ("values", "values")):  # fmt: skip
            if fields[name] is not None:
                one[said] = fields[name][row, :size].clone()
        train.append(one)
    return rollout, train


# ---- logs

_NATIVE = {
    "reward_mean": "reward", "reward_std": "reward_std", "response_length_mean": "length", "entropy": "entropy",
    "kl": "kl", "clip_fraction": "clip_fraction", "grad_norm": "grad_norm", "loss": "loss", "pg_loss": "pg_loss",
    "learning_rate": "lr", "accuracy": "accuracy", "format_reward": "format", "value_loss": "value_loss",
    "truncated_ratio": "truncated",
}  # fmt: skip
_TRL = {
    "loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "completions/mean_length": "length",
    "completions/max_length": "length_max", "completions/clipped_ratio": "truncated", "reward": "reward",
    "reward_std": "reward_std", "frac_reward_zero_std": "frac_zero_std", "rewards/accuracy_reward/mean": "accuracy",
    "rewards/format_reward/mean": "format", "kl": "kl", "entropy": "entropy", "clip_ratio/region_mean": "clip_fraction",
    "sampling/sampling_logp_difference/mean": "mean_abs_d",
}  # fmt: skip
_VERL = {
    "actor/pg_loss": "pg_loss", "actor/kl_loss": "kl", "actor/entropy": "entropy", "actor/grad_norm": "grad_norm",
    "actor/lr": "lr", "actor/pg_clipfrac": "clip_fraction", "critic/score/mean": "reward",
    "critic/score/max": "reward_max", "critic/score/min": "reward_min", "critic/rewards/mean": "reward",
    "critic/advantages/max": "advantage_max", "critic/advantages/min": "advantage_min",
    "response_length/mean": "length", "response_length/max": "length_max", "response_length/clip_ratio": "truncated",
    "training/rollout_probs_diff_mean": "prob_diff", "rollout_corr/k3_kl": "k3", "critic/vf_loss": "value_loss",
    "critic/vf_explained_var": "explained_variance", "val/accuracy": "accuracy", "reward/format": "format",
}  # fmt: skip
_SLIME = {
    "train/loss": "loss", "train/pg_loss": "pg_loss", "train/kl_loss": "kl", "train/entropy_loss": "entropy",
    "train/grad_norm": "grad_norm", "train/lr-pg_0": "lr", "train/pg_clipfrac": "clip_fraction",
    "train/train_rollout_logprob_abs_diff": "mean_abs_d", "rollout/raw_reward": "reward",
    "rollout/zero_std_group_frac": "frac_zero_std", "rollout/response_len/mean": "length",
    "rollout/response_len/max": "length_max", "rollout/truncated_ratio": "truncated",
}  # fmt: skip


def _named(metrics: dict[str, float], names: dict[str, str]) -> dict[str, float]:
    return {said: metrics[name] for said, name in names.items() if name in metrics}


def jsonl(run: Trained, folder: Path) -> Path:
    names = {**_NATIVE, "reward": "reward"}
    lines = [json.dumps({"step": step, **_named(each, names)}) for step, each in enumerate(run.metrics)]
    return _log(folder, "metrics.jsonl", lines)


def verl_log(run: Trained, folder: Path) -> Path:
    lines = [
        f"(TaskRunner pid=812) step:{step} - "
        + " - ".join(f"{key}:{value}" for key, value in _named(each, _VERL).items())
        for step, each in enumerate(run.metrics, 1)
    ]
    return _log(folder, "verl.log", lines)


def trl_log(run: Trained, folder: Path) -> Path:
    lines = []
    for step, each in enumerate(run.metrics, 1):
        said = _named(each, _TRL)
        if not run.recipe.kl:
            said.pop("kl", None)  # TRL logs one where there is a reference
        lines.append(str({**{key: float(f"{value:.6g}") for key, value in said.items()}, "epoch": step / 100}))
    return _log(folder, "trl.log", lines)


def slime_log(run: Trained, folder: Path) -> Path:
    lines = [f"[2026-01-01 00:00:00] log_utils.py:12 - step {step}: {_named(each, _SLIME)}"
             for step, each in enumerate(run.metrics)]  # fmt: skip
    return _log(folder, "slime.log", lines)


def _log(folder: Path, name: str, lines: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


DUMPS: dict[str, Callable[[Trained, Path], Path]] = {"native": native, "verl": verl, "TRL": trl, "slime": slime}
LOGS: dict[str, Callable[[Trained, Path], Path]] = {
    "jsonl": jsonl, "verl log": verl_log, "TRL log": trl_log, "slime log": slime_log
}  # fmt: skip

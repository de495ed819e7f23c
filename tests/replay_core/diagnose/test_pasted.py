# ruff: noqa: E501 - they are the programs' own lines
"""What is pasted into an issue: any form of names and numbers is read, and a handful of lines is enough where a figure
is odd on its face.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replay_core.dumps import open_run
from replay_core.errors import RldbgError
from tests.replay_core.diagnose.logs import (
    HEALTHY_TRL,
    diagnosed,
    diagnosed_path,
    only,
    told,
    trl,
    verl,
    worrying,
    written,
)

#: One step of which no reward differs, in whatever form it was pasted.
FORMS: dict[str, str] = {
    "a block": "loss: 0.6931\nreward: 0.0\nreward_std: 0.0\nkl: 0.002\n",
    "pairs set apart by blanks": "completions/mean_length: 256   reward: 0   reward_std: 0   frac_reward_zero_std: 1\n",
    "a step's number on a line of its own": "step: 10\n  train/loss: 0.01\n  train/reward: 0.0\n  train/reward_std: 0.0\n",
    "a table of two columns": "| metric | value |\n|---|---|\n| loss | 0.0 |\n| reward | 0.0 |\n| reward_std | 0.0 |\n",
    "a box without inner bars": "╭──── metrics ────╮\n│ loss/policy_avg        0.1 │\n│ reward                 0.0 │\n│ reward_std             0.0 │\n╰────╯\n",
    "a summary of wandb": "wandb: Run summary:\nwandb:   train/loss 0.0\nwandb:   train/reward 0.0\nwandb:   train/reward_std 0.0\n",
    "a CSV with blanks": "step, loss, reward, reward_std, kl\n1, 0.0, 0.0, 0.0, 0.0\n2, 0.0, 0.0, 0.0, 0.0\n",
    "a notebook's table whose tabs are lost": "Step Training Loss reward reward_std completion_length kl\n1 0.000000 0.000000 0.000000 256.000000 0.000000\n",
    "pairs alone": "loss=0.0000 reward=0.0000 reward_std=0.0000 kl=nan\n",
    "behind a logger": "2025-01-01 10:00:00,123 - INFO - train - loss=0.1, reward=0.0, reward_std=0.0\n",
    "word processor's quotes": "{‘loss’: 0.0, ‘reward’: 0.0, ‘reward_std’: 0.0}\n",
    "a line whose beginning is lost": "9, 'kl': 0.1, 'loss': 0.0, 'reward': 0.0, 'reward_std': 0.0, 'epoch': 0.0}\n",
    "verl's line broken": "step:1 - actor/entropy:0.4 -\ncritic/score/mean:0.0 - critic/score/max:\n0.0 - critic/score/min:0.0\n",
    "verl's pairs a line each": "step:12\nactor/pg_loss:0.0\ncritic/score/max:0.0\ncritic/score/min:0.0\n",
    "a mapping broken in a number": "{'loss': 0.4173, 'grad_norm': 1.4672807732482507, 'reward': 0.0, 'reward_std': 0.00\n0, 'epoch': 0.08}\n",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_names_and_numbers_is_read(form: str, tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, FORMS[form]))[0] == ("D01", "error")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "step, loss, reward, reward_std\n1, 0.0, 0.0, 0.0\n"),
        ("a.json", "{'loss': 0.0, 'reward': 0.0, 'reward_std': 0.0}\n"),
        ("a.jsonl", '{"loss": 0.0, "reward": 0.0, "reward_std": 0.0},\n' * 2),
        ("a.md", "# An issue\n```\n{'loss': 0.0, 'reward': 0.0, 'reward_std': 0.0}\n```\n"),
        ("state.json", '{\n "log_history": [\n  {"step": 1, "loss": 0.0, "reward": 0.0, "reward_std": 0.0}\n ]\n}\n'),
    ],
)
def test_a_file_that_is_called_something_else_is_read_by_what_it_holds(name: str, text: str, tmp_path: Path) -> None:
    assert told(diagnosed_path(written(tmp_path, text, name)))[0] == ("D01", "error")


@pytest.mark.parametrize(
    "text", ["The reward is 0.5 because I set the loss to be that.\n", "learning_rate: 1e-6\nbeta: 0.04\nseed: 1\n"]
)
def test_prose_and_settings_are_no_metrics(text: str, tmp_path: Path) -> None:
    with pytest.raises(RldbgError, match="no metric"):
        open_run(written(tmp_path, text))


def test_notes_beside_a_dump_are_no_log_of_it(tmp_path: Path) -> None:
    written(tmp_path, "loss: 0.5\nreward: 0.1\n", "notes.txt")
    with pytest.raises(RldbgError):
        open_run(tmp_path)


def test_numbers_behind_a_death_are_none_of_the_run(tmp_path: Path) -> None:
    text = "Traceback (most recent call last):\nValueError: x\nloss: 0.5\nreward: 0.1\n"
    assert only(diagnosed(tmp_path, text), "L06").severity == "error"


_DPO = "{{'loss': {}, 'grad_norm': {}, 'learning_rate': 5e-07, 'rewards/chosen': {}, 'rewards/rejected': {}, 'rewards/accuracies': {}, 'rewards/margins': {}, 'logps/chosen': {}, 'logps/rejected': {}, 'logits/chosen': {}, 'epoch': 0.1}}\n"


def _dpo(
    loss: float = 0.6,
    grad: float = 1.2,
    chosen: float = 0.1,
    rejected: float = -0.1,
    logps: float = -120.0,
    logits: float = -1.3,
) -> str:
    return _DPO.format(loss, grad, chosen, rejected, 0.6, chosen - rejected, logps, 1.1 * logps, logits)


_FAILS = "2025-06-23 18:39:55,364 - models.sd - ERROR - Image generation failed: Torch not compiled with CUDA enabled\n"


def _rows(name: str, *values: float) -> str:
    return "".join(f"{{'loss': 0.0{n}, 'reward': 0.{n}, '{name}': {value}}}\n" for n, value in enumerate(values, 3))


#: Few lines -> id, severity, words of the first finding.
SHOWN: dict[str, tuple[str, str, str, str]] = {
    "pairs of which no token counts": (_dpo(0.6931, 0.0, 0.0, 0.0, 0.0), "D72", "error", "no token of the responses"),
    "and in a notebook's table": ("Step\tTraining Loss\tRewards/chosen\tRewards/accuracies\tRewards/margins\tLogps/rejected\tLogps/chosen\n10\t0.6931\t0.0\t0.0\t0.0\t0.0\t0.0\n", "D72", "error", "no token of the responses"),
    "pairs that teach nothing": (_dpo(0.6931, 1.2, 0.0, 0.0) * 3, "D72", "warning", "stays at ln 2"),
    "the same without a gradient": (_dpo(0.6931, 0.0, 0.0, 0.0) * 2, "D72", "warning", "stays at ln 2"),
    "rejected ones that are preferred": (_dpo(0.8, 1.2, -0.5, 0.1) + _dpo(0.9, 1.2, -0.6, 0.1) + _dpo(0.9, 1.1, -0.7, 0.2), "D72", "info", "rejected responses are preferred"),
    "chosen ones that fall": ("".join(_dpo(0.3, 1.0, -5.0 * n, -20.0 * n) for n in (1, 2, 3)), "D72", "info", "get less likely"),
    "KTO's kl": ("".join(f"{{'loss': 0.4, 'rewards/chosen': 1.1, 'logps/chosen': -30.1, 'kl': {kl}, 'logits/chosen': -1.5e8}}\n" for kl in (0.1, 0.06, 0.0)), "L40", "info", "kl falls to 0"),
    "summed logits": (_dpo(logits=-1.5e8), "L40", "info", "a sum over tokens"),
    "a KL of thousands": (trl([{"kl": 10832.0}], first=40), "L40", "warning", "KL to the reference is 1.083e\\+04"),
    "a far KL": (trl([{"kl": 12.0}], first=40), "L40", "info", "far for a mean"),
    "a ratio of 1e10": ("{'objective/kl': 2.2, 'objective/scores': 0.1, 'loss/policy_avg': 0.2, 'val/ratio': 10000000000.0, 'lr': 1e-6}\n", "L40", "error", "ratio of new to old"),
    "a ratio of 20": ("{'objective/kl': 2.2, 'objective/scores': 0.1, 'loss/policy_avg': 0.2, 'val/ratio': 20.0, 'lr': 1e-6}\n", "L40", "warning", "comes to 20"),
    "no end": ("{'objective/kl': 2.2, 'objective/scores': 0.1, 'loss/policy_avg': 0.2, 'val/ratio': 1.0, 'val/num_eos_tokens': 0, 'lr': 1e-6}\n", "L40", "info", "no response ends"),
    "an entropy of 0": (verl([{"actor/entropy": 0.0}]), "L40", "info", "entropy is exactly 0"),
    "an entropy of noise": (verl([{"actor/entropy": 9.9}]), "L40", "warning", "9.9 nats"),
    "one length": ("".join(f"{{'loss': 0.{n}, 'reward': 0.{n}, 'completion_length': 256.0}}\n" for n in (1, 2, 3)), "L40", "warning", "256 tokens"),
    "no words": (trl([{"completions/mean_length": 1.2, "completions/max_length": 2.0, "completions/clipped_ratio": 0.0}]), "L40", "info", "next to nothing is written"),
    "a rate of 0 in two lines": ("{'loss': 0.01, 'learning_rate': 0.0, 'reward': 0.3}\n{'loss': 0.02, 'learning_rate': 0.0, 'reward': 0.4}\n", "L40", "info", "no weight has moved"),
    "a critic worse than none": (verl([{"critic/vf_explained_var": -30.0}]), "L40", "info", "worse than a constant"),
    "a KL of 0": (trl([{"kl": 0.0, "loss": -0.01 * n, "grad_norm": 0.1 * n} for n in (1, 2, 3)]), "L40", "info", "exactly 0 in all 3 lines"),
    "a reward of 0": ("{'policy_loss': 0.0, 'kl': 0.0, 'reward': 0.0, 'return': 0.0, 'actor_lr': 5e-07}\n", "L40", "warning", "no response earns"),
    "OpenRLHF's bar": ("Train epoch [1/1]: 100%|████| 8/8 [02:00<00:00, 15.12s/it, pg=0, rm=0, ret=0, glen=1.02e+3, kl=0, act_lr=5e-7]\n", "L40", "warning", "no response earns"),
    "rewards of a million": ("{'loss': 0.1, 'reward': -1000000.0}\n", "L40", "info", "of the order of -1e"),
    "a judge's default": ("".join(f"{{'loss': 0.0{n}, 'rewards/accuracy_reward': 0.5, 'rewards/steps_reward': 0.8{n}, 'reward': 1.3{n}, 'reward_std': 0.1}}\n" for n in (1, 2, 3)), "L40", "info", "accuracy_reward is exactly 0.5"),
    "and one over more lines": ("".join(f"{{'loss': 0.0{n}, 'rewards/accuracy_reward': 0.5, 'rewards/steps_reward': 0.8{n}, 'reward': 1.3{n}, 'reward_std': 0.1}}\n" for n in (1, 2, 3, 4)), "L40", "warning", "in all 4 lines"),
    "a form that nobody writes": ("".join(f"{{'loss': 0.0{n}, 'rewards/tags': 0.0, 'rewards/steps_reward': 0.8{n}, 'reward': 1.3{n}, 'reward_std': 0.1}}\n" for n in (1, 2)), "L40", "info", "rewards/tags is 0"),
    "an evaluation that earns nothing": ("Iter 1: Val loss -0.001, Val total_rewards_mean 0.003, Val r1_accuracy_reward_func_mean 0.000, Val kl 0.000\n", "L40", "info", "accuracy_reward_func_mean is 0"),
    "a reward model that guesses": ("".join(f"Train step of epoch 4: 99%|███▉| {n}/4766 [1:02:51<00:15, 1.64it/s, dist=2.39, acc=0.555]\n" for n in (4740, 4741, 4742)), "L40", "info", "hardly more than chance"),
    "Megatron's own count": (" iteration        1/     100 | lm loss: 1.1E+00 | grad norm: 3.2 | number of skipped iterations:   1 | number of nan iterations:   1 |\n", "L40", "error", "had a NaN"),
    "rewards of one number in a batch": ("{'critic/score/mean': 0.0, 'critic/score/max': 0.0, 'critic/score/min': 0.0, 'actor/pg_loss': 0.0}\n", "D01", "error", "every reward is 0"),
    "rewards that are printed as lists": ("  Rewards: [-1.0, -1.0] (0/2 rendered)\n  Rewards: [0.1, 0.3]\n" * 3 + "GRPO step 10/500 | loss: 0.0000 | KL: 0.0001\n", "D01", "error", "3 of 6 groups that the log prints, -1 in 3"),
    "a KL that grows": (_rows("kl", 0.01, 0.2, 0.9), "L40", "info", "goes from 0.01 to 0.9"),
    "an entropy that grows": (_rows("entropy", 0.5, 1.2, 3.4), "L40", "info", "the entropy grows"),
    "an entropy that shrinks": (_rows("entropy", 0.6, 0.3, 0.1), "L40", "info", "the entropy shrinks"),
    "gradients that grow": (_rows("grad_norm", 0.5, 4.0, 80.0), "L40", "info", "the gradient norm grows"),
    "a reward that falls": ("".join(f"{{'loss': 0.1, 'reward': {r}, 'kl': 0.0{n}}}\n" for n, r in enumerate((0.9, 0.5, 0.2), 1)), "L40", "info", "the reward falls"),
    "responses that shrink": (_rows("completion_length", 300.5, 120.5, 20.5), "L40", "info", "responses get shorter"),
    "steps that get slower": (_rows("step_time", 10.0, 20.0, 40.0), "L40", "info", "steps get slower"),
    "a KL below 0": ("{'objective/kl': -12.5, 'objective/scores': 0.1, 'loss/policy_avg': 0.2, 'val/ratio': 1.0, 'lr': 1e-6}\n", "L40", "warning", "is negative"),
    "a reward that stands": ("".join(f'{{"current_steps": {n}, "loss": -0.19, "reward": {r}, "learning_rate": 1e-5}}\n' for n, r in ((10, 0.13), (20, 0.139), (30, 0.124), (1250, 0.135), (1260, 0.125))), "L40", "info", "does not rise.*1250 steps"),
    "DeepSpeed-Chat": ("epoch: 0|step: 5|ppo_ep: 1|act_loss: -0.0|cri_loss: 0.2|unsuper_loss: 0.0\naverage reward score: 0.0\n", "L40", "warning", "no response earns"),
    "a slime log of several turns": ("data.py:212 - multi_turn 9: {'multi_turn/raw_response_length/response_length_clip_ratio': 0.96}\n", "D20", "warning", "96% of the responses"),
    "a phase that does not end": (trl([{}]) + "timer.py:24 - Timer train_wait start\ntimer.py:24 - Timer train_wait end\ntimer.py:24 - Timer actor_train start\n", "L26", "info", "ends inside actor_train"),
    "a first step that hangs": ("Starting training...\n  0%|          | 0/500 [00:00<?, ?it/s]\n", "L26", "info", "stands at 0"),
    "an error again and again": ("".join(trl([{"reward": 0.1 * n}], first=n) + _FAILS for n in range(1, 6)), "L29", "warning", "logged 5 times.*build for the CPU"),
    "an engine's 500": ('(SGLangEngine pid=72) INFO:     10.0.0.7:45400 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error\n' * 3, "L29", "warning", "HTTP 5xx"),
    "InfiniBand": (trl([{}]) + "(LLMRayActor pid=9) mlx5: host_unknown: got completion with error:\n", "L06", "error", "InfiniBand"),
    "pairs without a gradient": ("{'loss': 0.3537, 'grad_norm': 0.0, 'learning_rate': 5e-06, 'rewards/chosen': 1.1, 'rewards/rejected': -0.1, 'rewards/margins': 1.2, 'logps/rejected': -20.25, 'logps/chosen': -46.5}\n", "D23", "warning", "gradient is exactly 0 in the one line"),
    "demonstrations without a rate": ("".join(f"{{'loss': 12.{n}, 'grad_norm': 0.0, 'learning_rate': 0.0, 'epoch': 0.{n}}}\n" for n in (1, 0, 2, 1)), "D23", "warning", "all 4 lines.*learning rate is 0"),
    "a rate that is too small for pairs": ("".join(f"Epoch:[1/1]({n}/4000), loss: 0.6{n % 7}, dpo_loss: 0.6{n % 7}, learning_rate: 0.00000004\n" for n in range(20, 420, 20)), "L07", "warning", "at most 4e-08, and the loss stays"),
    "a reward that hardly wavers": (_rows("reward", 0.2056, 0.2058, 0.2064, 0.2059, 0.2065), "L40", "info", "hardly wavers"),
    "a reward over many steps": ("".join(f"{{'step': {n}, 'loss': 0.1, 'reward': {-0.3 + 0.5 * (n % 3 - 1)}}}\n" for n in range(1, 200)), "L40", "info", "does not rise.*198 steps"),
    "answers that are never right": ("".join(f"[step {n}] avg_loss=0.0{n} acc=0.0{n % 3 + 2}\n" for n in range(1, 7)), "L40", "info", "hardly any answer is right"),
    "answers that are lost": ("".join(f"[step {n}] avg_loss=0.01 acc={acc}\n" for n, acc in enumerate([0.9, 0.95, 0.92, 0.99] * 2 + [0.57, 0.0])), "L40", "warning", "acc is lost at the end"),
    "a loss that leaps to a guess": ("".join(f" samples/sec: 1.7 | iteration {n}/ 55000 | learning rate: 1.2E-09 | lm_loss: {loss} | number of skipped iterations: 0 |\n" for n, loss in ((1, "2.275809E+00"), (2, "1.105449E+01"))), "L40", "warning", "lm_loss leaps from 2.28 to 11.1"),
    "labels that are masked whole": ("WARNING: tokenization mismatch: 100 vs. 101. (ignored)\n" * 3 + "{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 2.6e-08, 'epoch': 0.0}\n", "L29", "warning", "masked whole"),
    "an iteration without a gradient": (" iteration 3633/ 8000 | learning rate: 6.245E-06 | grad norm: 0.794 |\n***WARNING*** Bad grad_norm detected (grad_norm=nan)\n iteration 3634/ 8000 | learning rate: 6.245E-06 | number of skipped iterations: 1 |\n", "L29", "warning", "its update is left out"),
    "Megatron without a loss": ("".join(f" iteration {n}/ 250000 | learning rate: 2.999E-04 | grad norm: nan | number of nan iterations: 0 |\n" for n in (5426, 5427, 5428)), "D21", "error", "the log holds no loss"),
    "prompts beyond the context": ("WARNING 03-30 00:24:16 [_logger.py:72] Input prompt (8128 tokens) is too long and exceeds limit of 6000\n" * 3, "L29", "warning", "longer than the engine's limit"),
    "a job without a step": ("Processed prompts:   0%|          | 0/16 [00:00<?, ?it/s]\nJob 'raysubmit_1' succeeded\n", "L26", "warning", "no step of training"),
    "demonstrations learnt by heart": ("".join(f"{{'loss': {0.5 / n}, 'grad_norm': {0.5 + 0.1 / n}, 'learning_rate': 1e-05, 'epoch': {n}}}\n{{'eval_loss': {held}, 'epoch': {n}}}\n" for n, held in enumerate((0.4, 0.24, 0.23, 0.26, 0.28, 0.29), 1)), "L20", "warning", "overfits.*0.23 at line 3"),
    "a reward model of DeepSpeed-Chat": ("".join(f"Epoch {n}/3 with loss {loss}\n" * (n > 0) + f"***** Evaluating reward, Epoch {n}/3 *****\nchosen_last_scores (higher is better) : 2.1, acc (higher is better) : {acc}\n" for n, loss, acc in ((0, 0, 0.486), (1, 0.67, 0.607), (2, 0.61, 0.612), (3, 0.48, 0.593))), "L20", "info", "stays low, 0.607 and then 0.593"),
    "a terminal that is closed": (trl([{}]) + " 99%|█████████▉| 935/936 [44:56:16<02:48, 168.94s/it]W0608 08:11:06.999000 12152 torch/distributed/elastic/agent/server/api.py:704] Received 1 death signal, shutting down workers\n", "L06", "error", "935/936 of its bar: the terminal was closed"),
    "a hand": ("{'loss': 0.5}\n[2025-02-20 20:27:14,902] [INFO] [launch.py:328:sigkill_handler] Main process received SIGINT, exiting\n", "L06", "warning", "line 1 of metrics: interrupted by hand"),
    "an engine that wakes up": ("(LLMRayActor pid=9) CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n", "D36", "error", "as the engine wakes up"),
    "out of memory after nothing was earned": (trl([{"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "loss": 0.0}] * 8) + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.84 GiB.\n", "D36", "error", "2.84 GiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_few_lines_are_enough(name: str, tmp_path: Path) -> None:
    text, id, severity, words = SHOWN[name]
    first = diagnosed(tmp_path, text).findings[0]
    assert (first.id, first.severity) == (id, severity)
    assert re.search(words, first.claim), first.claim


#: What is well, or is another's to say: nothing that makes the command exit with 1.
WELL: dict[str, str] = {
    "a first line of DPO": _dpo(0.6931, 1.2, 0.0, 0.0),
    "DPO that goes on": "".join(_dpo(0.69 - 0.02 * n, 1.0, 0.1 * n, -0.1 * n) for n in range(4)),
    "an entropy that is summed": "{'loss': 0.1, 'entropy': 80.0, 'reward': 0.5}\n",
    "steps that are well": trl([{"reward": 0.5 + 0.01 * n, "loss": 0.01 * n} for n in range(4)]),
    "one step of verl": verl([{}]),
    "a list of rewards or two": "Rewards: [1.0, 1.0]\nRewards: [0.0, 1.0]\n" + trl([{}]),
    "rewards that differ": "Rewards: [0.1, 0.9]\n" * 8 + trl([{}]),
    "an error twice": "2025-06-23 18:39:55 - x - ERROR - could not fetch a page\n" * 2 + trl([{}]),
    "eight workers that say one thing": _FAILS * 8 + trl([{}]),
    "a phase that ends": "Timer train start\nTimer train end\n" + trl([{}]),
    "figures that waver": _rows("kl", 0.01, 0.9, 0.02) + _rows("entropy", 0.5, 3.0, 0.6),
    "a reward that is as good as it gets": "".join(f"{{'step': {n}, 'loss': 0.1, 'reward': 0.9{n % 7}}}\n" for n in range(0, 1000, 50)),
    "a loss of demonstrations that goes with the entropy": "".join(f"{{'loss': {1 / n + 0.1}, 'entropy': {0.7 / n + 0.1}, 'grad_norm': {1 / n}, 'learning_rate': 1e-4}}\n" for n in range(1, 21)),
    "an adapter that was merged": "UserWarning: Already found a `peft_config` attribute in the model. This will lead to having multiple adapters in the model.\n" * 4 + trl([{}]),
    "a few samples that are masked": "WARNING: tokenization mismatch: 100 vs. 101. (ignored)\n" * 5 + trl([{}]),
    "a cache that is asked for again": "[2025-07-01 22:53:05] Cache not flushed because there are pending requests. #queue-req: 0, #running-req: 2\n" + trl([{}]),
    "a validation that wavers": "".join(f"{{'loss': {0.5 / n}, 'grad_norm': {0.5 + 0.1 / n}, 'learning_rate': 1e-05, 'epoch': {n}}}\n{{'eval_loss': {held}, 'epoch': {n}}}\n" for n, held in enumerate((0.4, 0.24, 0.23, 0.24, 0.25, 0.25), 1)),
    "a model that begins from nothing": "".join(f" iteration {n}/ 55000 | learning rate: 1.2E-05 | lm loss: {11 - n} | grad norm: 0.{n} |\n" for n in range(1, 9)),
    "a step that earned nothing": trl([{"reward": 0.0}, {"reward": 0.4}]),
}  # fmt: skip


def test_answers_that_get_short_and_right_pay_for_no_length(tmp_path: Path) -> None:
    """In a table whose columns have lost their slashes; a judge's ends tell that nothing is paid per token."""
    text = (
        "step,actor_pg_loss,actor_grad_norm,critic_score_mean,critic_score_max,critic_score_min,response_length_mean\n"
    )
    for n in range(50):
        length = 2000 - 35 * n + 300 * (n % 2)
        text += f"{n},{0.01 + 0.001 * (n % 5)},{0.3 + 0.01 * (n % 7)},{1.1 - length / 2500},1.0,0.0,{length}\n"
    found = diagnosed_path(written(tmp_path, text, "a.csv"))
    assert worrying(found) == []
    assert only(found, "L09").severity == "info"
    paid = text.replace("critic_score_max", "best").replace("critic_score_min", "worst")
    assert only(diagnosed_path(written(tmp_path, paid, "b.csv")), "L32").severity == "error"


@pytest.mark.parametrize("name", WELL)
def test_what_is_well_is_not_warned_of(name: str, tmp_path: Path) -> None:
    assert worrying(diagnosed(tmp_path, WELL[name])) == []


def test_steps_of_one_group_are_judged_as_groups_are(tmp_path: Path) -> None:
    none = {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "rewards/accuracy/std": 0.0, "loss": 0.0, "grad_norm": 0.0}
    some = {"frac_reward_zero_std": 0.0}
    of_one = diagnosed(tmp_path, trl([{**(none if n % 3 else some), "reward": 0.1 * (n % 7)} for n in range(32)]))
    assert only(of_one, "D01").severity == "info"
    dead = diagnosed(tmp_path, trl([{**(some if n < 3 else none), "reward": 0.1 * (n % 7)} for n in range(32)]))
    assert only(dead, "D01").severity == "error"


def test_a_long_log_is_judged_by_other_rules(tmp_path: Path) -> None:
    kls = [{"kl": 12.0 + 0.1 * (n % 3), "loss": 0.1 * (n % 5), "reward": 0.5 + 0.01 * (n % 4)} for n in range(16)]
    assert "L40" not in {id for id, _ in told(diagnosed(tmp_path, trl(kls)))}


#: A reward that is lost, and what goes with it.
_LOST = [0.9, 0.85, 0.95, 0.9, 0.8, 0.85, 0.9, 0.2] + [0.0] * 12


def test_a_policy_that_falls_apart_is_named_before_what_follows_from_it(tmp_path: Path) -> None:
    steps = [
        {
            "reward": reward, "reward_std": 0.2 if reward else 0.0, "frac_reward_zero_std": 0.5 if reward else 1.0,
            "rewards/accuracy/std": 0.2 if reward else 0.0, "rewards/accuracy/mean": reward,
            "entropy": 0.15 if reward > 0.5 else 0.8 + 0.01 * n, "loss": 0.01 * (n % 3), "grad_norm": 0.1 + 0.01 * n,
            "sampling/sampling_logp_difference/mean": 0.007 if reward > 0.5 else 0.2 + 0.01 * n,
            "completions/mean_length": 300.0 + n if reward > 0.5 else 4.0,
        }
        for n, reward in enumerate(_LOST)
    ]  # fmt: skip
    found = diagnosed(tmp_path, trl(steps))
    assert told(found)[0] == ("L08", "error")
    assert "the entropy goes from" in found.findings[0].claim
    assert all(finding.severity != "error" for finding in found.findings if finding.id in ("D09", "D12", "D25"))


def test_an_engine_with_old_weights_is_still_told_of_where_the_policy_is_well(tmp_path: Path) -> None:
    steps = [
        {"reward": 0.5 + 0.01 * (n % 5), "loss": 0.01 * (n % 3), "grad_norm": 0.1 + 0.01 * (n % 7),
         "entropy": 0.5 + 0.01 * (n % 4), "sampling/sampling_logp_difference/mean": 0.007 * 1.3**n}
        for n in range(16)
    ]  # fmt: skip
    assert ("D12", "error") in told(diagnosed(tmp_path, trl(steps)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ValueError: Size mismatch between saved torch.Size([257152, 2048]) and current: torch.Size([131661824]) for a.weight", "sharded otherwise"),
        ("ValueError: Target modules {'q_proj'} not found in the base model.", "target_modules"),
        ("ValueError: The model's vocab size 151936 does not match the tokenizer's length 151665", "two sizes"),
        ("RuntimeError: start (0) + length (151936) exceeds dimension size (151665).", "vocabulary"),
        ("ValueError: No chat template is set for this processor.", "chat template"),
        ("ValueError: Unrecognized configuration class <class 'X'> for this kind of AutoModel: AutoModelForCausalLM.", "AutoModelForCausalLM"),
        ("KeyError: 'qwen3'", "older than the model"),
        ("RuntimeError: Cannot find any model weights with `/ckpt/global_step_100`", "holds no weights"),
        ("NotImplementedError: Cannot copy out of meta tensor; no data!", "made without data"),
        ("ValueError: Unknown quantization method: bitsandbytes", "quantisation"),
        ("ValueError: Image features and image tokens do not match: tokens: 0, features 1064", "placeholder tokens"),
        ("ValueError: Tensor parallel size (8) is larger than the number of GPUs (4)", "more GPUs are asked for"),
        ("AssertionError: Sleep mode can only be used for one instance per process.", "sleeping mode"),
        ("ValueError: Attempting to unscale FP16 gradients.", "in fp16"),
        ('RuntimeError: "triu_tril_cuda_template" not implemented for \'BFloat16\'', "does not take the dtype"),
        ("ValueError: Your setup doesn't support bf16/gpu.", "not for this device"),
        ("ValueError: [actor] Please set at least one of 'actor.ppo_micro_batch_size' or 'actor.ppo_micro_batch_size_per_gpu'", "setting without a default"),
        ("ValueError: 'num_generations' must be at least 2", "no baseline"),
        ("ValueError: Number of requested functions does not match number of reward weights (1 vs 2)", "one number for each completion"),
        ("ValueError: The model did not return a loss from the inputs", "no labels"),
        ("RuntimeError: still have inflight params [{'id': 1}]", "ZeRO-3"),
        ("ValueError: Default process group has not been initialized, please call init_process_group.", "order of the start"),
        ("RuntimeError: aten.add.Tensor: got mixed torch.Tensor and DTensor", "wrapper of distributed training"),
        ("subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.", "cannot be compiled"),
        ("RuntimeError: NCCL error in: NCCLUtils.hpp:219, invalid usage, NCCL version 2.20.5", "used wrongly"),
        ("RuntimeError: NCCL error in: NCCLUtils.hpp:219, unhandled cuda error, NCCL version 2.20.5", "inside NCCL"),
        ("RuntimeError: Timed out initializing process group in store based barrier on rank: 3", "did not all meet"),
        ("ConnectionError: Couldn't reach 'openai/gsm8k' on the Hub (ConnectionError)", "no network"),
        ("requests.exceptions.ConnectionError: HTTPConnectionPool(host='0.0.0.0', port=8000): Max retries exceeded with url: /init_communicator/", "no server answers"),
        ("AssertionError: Torch not compiled with CUDA enabled", "CPU alone"),
        ("IndexError: index 151936 is out of bounds for dimension 0 with size 151936", "beyond the vocabulary"),
        ("OverflowError: out of range integral type conversion attempted", "none is decoded"),
        ("KeyError: 'old_log_probs'", "lacks a field"),
        ("ValueError: Input contains NaN", "not a number"),
        ("RuntimeError: Boolean value of Tensor with more than one value is ambiguous", "one number or truth value"),
        ("AttributeError: 'str' object has no attribute 'get'", "another type"),
        ("UnboundLocalError: local variable 'loss' referenced before assignment", "never set on this path"),
        ("ValueError: could not convert string to float: 'N/A'", "is no number"),
        ("ValueError: not enough values to unpack (expected 2, got 1)", "another number of values"),
        ("AttributeError: 'Qwen2Tokenizer' object has no attribute 'image_processor'", "where a processor is needed"),
        ("TypeError: GRPOTrainer.__init__() got an unexpected keyword argument 'tokenizer'", "processing_class"),
        ("RuntimeError: CUDA graph capture failed", "graph capture failed: something"),
    ],
    ids=lambda each: each[:40],
)  # fmt: skip
def test_an_exception_says_what_it_means(line: str, words: str, tmp_path: Path) -> None:
    text = f'Traceback (most recent call last):\n  File "/x/lib/mod.py", line 99, in step\n    out = f(x)\n{line}\n'
    first = diagnosed(tmp_path, text).findings[0]
    assert first.id == "L06"
    assert words in f"{first.claim} {first.cause} {first.next_step}", first


#: How a run ended, without an exception, and what is said of it.
ENDS: dict[str, tuple[str, str]] = {
    "an exit code": (trl([{}]) + "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)\n", "out of host memory"),
    "DeepSpeed's launcher": (trl([{}]) + "[2025-01-01 10:00:00,123] [ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = -9\n", "out of host memory"),
    "a heap": (trl([{}]) + "double free or corruption (!prev)\n", "native code crashed"),
    "another processor": ("Illegal instruction (core dumped)\n", "native code crashed"),
    "no program": ("bash: torchrun: command not found\n", "has not begun"),
    "two vocabularies": ("RuntimeError: The size of tensor a (151936) must match the size of tensor b (151665) at non-singleton dimension 2\n", "two vocabularies"),
    "an adapter too many": ("ValueError: You passed a PeftModel instance together with a `peft_config` to GRPOTrainer.\n", "adapter"),
    "a quantised model": ("ValueError: You cannot perform fine-tuning on purely quantized models.\n", "attach an adapter"),
    "no logits": ("NotImplementedError: Unsloth: Logits are empty from 2024.11 onwards. set `UNSLOTH_RETURN_LOGITS` to 1\n", "no logits"),
    "an empty batch": ("AssertionError: batch size is 0 after filtering\n", "no sample of the batch is left"),
    "an engine that starts": ("RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.\n", "as it starts"),
    "another process": ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 79.25 GiB of which 600.00 MiB is free. Process 123 has 78.00 GiB memory in use.\n", "other processes hold 78 of the GPU's"),
    "a launcher's table": ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\nFailures:\n  <NO_OTHER_FAILURES>\n  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 31789)\n", "rank 2 with exit code 1"),
    "a table of a rank that was killed": ("  rank      : 2 (local_rank: 2)\n  exitcode  : -9 (pid: 31789)\n", "out of host memory"),
    "a weight that the engine does not know": ("ray.exceptions.RayTaskError(KeyError): ray::LLMRayActor.update_weight() (pid=445964, ip=172.17.0.2)\n", "name of a weight"),
    "a role": ("KeyError: 'tool'\n", "role"),
    "a loss in another's recipe": ("AttributeError: 'DPOLoss' object has no attribute 'ignore_index'\n", "of another kind"),
    "a world of another size": ('  File "/x/vllm/distributed/parallel_state.py", line 922, in initialize_model_parallel\n    all_ranks = torch.arange(world_size).reshape(\nRuntimeError: shape \'[1, 1, 1]\' is invalid for input of size 4\n', "parallel sizes"),
    "a group that hydra does not find": ("In 'grpo': Could not find 'algorithm/rollout_correction'\n\nConfig search path:\n\tprovider=hydra, path=pkg://hydra.conf\n", "hydra does not find"),
    "'!' without an end": (("step 200: " + "!" * 80 + "\n") * 2 + trl([{}]), "NaN logits"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_an_end_says_what_it_means(name: str, tmp_path: Path) -> None:
    text, words = ENDS[name]
    first = diagnosed(tmp_path, text).findings[0]
    assert first.severity == "error"
    assert words in f"{first.claim} {first.cause} {first.next_step}", first


def test_a_line_of_a_traceback_that_a_logger_marks_is_no_error_of_its_own(tmp_path: Path) -> None:
    lines = "".join(
        f"(EngineCore_0 pid=8812) ERROR 09-12 10:00:00 [core.py:708]{said}\n"
        for said in (" Traceback (most recent call last):", '   File "/usr/lib/vllm/core.py", line 699, in run', "     engine = Core()",
                     '   File "/usr/lib/vllm/core.py", line 700, in run', "     engine = Core()", " ValueError: bad")
    )  # fmt: skip
    assert told(diagnosed(tmp_path, lines)) == [("L06", "error")]


def test_the_figures_of_a_healthy_step_are_none_of_these(tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, str({**HEALTHY_TRL}) + "\n")) == []

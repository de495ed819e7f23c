"""run_critic: one critic on every batch, start to end, written as a native dump. Only the child imports this."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from replay_core.errors import CellError, RldbgError, UnavailableError
from replay_core.jobs import OnEvent, Progress, ignore
from replay_core.objectives.gae import gae
from replay_core.parity.config import CriticConfig
from replay_core.parity.critics import Critic, CriticBatch, Tensors
from replay_core.parity.modules import common
from replay_core.parity.side_log import SideLog
from replay_core.parity.sides import CriticAnswer, TrainedStep
from replay_core.parity.training import Targets, pooled, to_mapping, train
from replay_core.recorder import Recorder
from replay_core.recorder.writer import replace_whole

#: A batch's module tensors are recorded up to this; past it they are left out and said so.
CAPTURE_MIB = 256


def run_critic(params: dict[str, Any], on_event: OnEvent = ignore) -> CriticAnswer:
    """Values in eval and train mode, each row alone, modules; then `steps` training steps with values after each.

    Args:
        params: config (a CriticConfig's mapping), batches (a safetensors file), names, out (the dump), steps,
            targets (a safetensors file: read where it exists, else written from this critic's own values), capture.

    Raises:
        UnavailableError: the backend cannot run here. ModelError: no such model. CellError: the critic failed.
    """
    began = time.perf_counter()
    config = CriticConfig.from_mapping(params["config"])
    if config.device != "cpu" and not torch.cuda.is_available():
        raise UnavailableError("there is no such device", file=config.path, expected="cpu", found=config.device)
    with _quiet(), _failures_named(config):
        on_event(Progress(0, None, f"building the {config.backend} critic"))
        critic = make_critic(config)
        run = _Run(critic, params, on_event)
        with contextlib.closing(run.recorder):
            run.look()
            steps = run.train(int(params["steps"]))
    return {
        "backend": critic.backend,
        "engine": critic.engine,
        "dump": str(params["out"]),
        "log": str(run.log.path),
        "readback": run.readback,
        "weights": run.weights,
        "steps": steps,
        "notes": critic.notes,
        "seconds": round(time.perf_counter() - began, 3),
    }


def make_critic(config: CriticConfig) -> Critic:
    """The critic of a configuration, in eval mode."""
    made: Critic
    if config.backend == "megatron":
        from replay_core.parity.megatron_critic import MegatronCritic

        made = MegatronCritic(config)
    else:
        from replay_core.parity.deepspeed_critic import DeepSpeedCritic

        made = DeepSpeedCritic(config)
    made.model.eval()
    return made


class _Run:
    def __init__(self, critic: Critic, params: dict[str, Any], on_event: OnEvent) -> None:
        self.critic, self.params, self.on_event = critic, params, on_event
        self.out = Path(params["out"])
        self.readback = critic.readback()
        self.weights = digests(critic.state())
        self.batches, self.rewards = _read_batches(Path(params["batches"]), params["names"], critic.config.device)
        self.log = SideLog(self.out.parent, f"{critic.backend}{params.get('suffix', '')}", critic.engine)
        flags = {
            "backend": critic.backend,
            "engine": critic.engine,
            "effective": {"dtype": self.readback["dtype"]},
            "readback": self.readback,
            "weights": self.weights,
        }
        self.recorder = Recorder(self.out, flags=flags, config=critic.config.to_mapping())

    def look(self) -> None:
        """Everything about the untrained critic, as step 0."""
        critic = self.critic
        targets = self._targets()
        made: list[Targets] = []
        with torch.no_grad(), self.recorder.step(0, role="critic") as record:
            for number, batch in enumerate(self.batches):
                self.on_event(Progress(number, len(self.batches), f"{critic.backend}: values of {batch.name}"))
                values_BT = critic.values(batch)
                self.log.write(0, batch.name, values_BT, critic.config.device)
                probes = {
                    "values_train": self._in_train_mode(batch, critic.config.training_seed),
                    "values_train_again": self._in_train_mode(batch, critic.config.training_seed + 1),
                    "values_alone": self._alone(batch, values_BT),
                }
                mine = self._own_targets(batch, number, values_BT)
                made.append(targets[number] if targets else mine)
                self._record(record, number, batch, values_BT)
                record(
                    "tensors", micro=number, **probes, token_rewards=self.rewards[number],
                    returns=made[-1].returns_BT, old_values=made[-1].old_values_BT,
                )  # fmt: skip
                self._modules(record, number, batch)
            head = {f"param.{name}": value for name, value in critic.state().items() if name.startswith("v_head.")}
            record("param", head)
        self.targets = made
        if not targets:
            save_file(
                {
                    f"{number}.{name}": getattr(one, name).cpu().contiguous()
                    for number, one in enumerate(made)
                    for name in ("returns_BT", "old_values_BT")
                },
                str(self.params["targets"]),
            )

    def train(self, steps: int) -> list[TrainedStep]:
        """Train on the rows of every batch, values of every batch after each step."""
        if not steps:
            return []
        batch, targets = pooled(self.batches, self.targets)
        reports = []
        for report in train(self.critic, batch, targets, steps):
            self.on_event(Progress(report.step, steps, f"{self.critic.backend}: training steps"))
            reports.append(to_mapping(report))
            self.critic.model.eval()
            with torch.no_grad(), self.recorder.step(report.step, role="critic") as record:
                for number, one in enumerate(self.batches):
                    values_BT = self.critic.values(one)
                    self.log.write(report.step, one.name, values_BT, self.critic.config.device)
                    self._record(record, number, one, values_BT)
                record("loss", loss=report.loss)
        text = json.dumps(reports, indent=1)
        replace_whole(self.out.with_name(f"{self.out.name}.steps.json"), text.encode())
        return reports

    def _record(self, record: Any, number: int, batch: CriticBatch, values_BT: torch.Tensor) -> None:
        record(
            "values",
            micro=number,
            batch=batch.name,
            input_ids=batch.ids_BS,
            attention_mask=batch.attention_BS,
            response_mask=batch.response_BS,
            position_ids=self.critic.positions(batch),
            values=values_BT,
        )

    def _in_train_mode(self, batch: CriticBatch, seed: int) -> torch.Tensor:
        self.critic.model.train()
        torch.manual_seed(seed)
        values_BT = self.critic.values(batch)
        self.critic.model.eval()
        return values_BT

    def _alone(self, batch: CriticBatch, like_BT: torch.Tensor) -> torch.Tensor:
        """Values of each row without its padding, on the batch's own axis; NaN where a row says nothing."""
        alone_BT = torch.full_like(like_BT, float("nan"))
        for row in range(batch.ids_BS.shape[0]):
            slots = batch.attention_BS[row].nonzero().flatten()
            if len(slots) > 1:
                alone_BT[row, slots[:-1]] = self.critic.values(batch.alone(row))[0]
        return alone_BT

    def _modules(self, record: Any, number: int, batch: CriticBatch) -> None:
        if not self.params.get("capture", True):
            return
        tokens = int(batch.ids_BS.numel())
        parameters = self.critic.model.named_parameters()
        # A linear layer's input and output, and its norms, each once: about what its weights' rows and columns are.
        forecast = sum(tokens * sum(one.shape) * 4 for name, one in parameters if one.ndim == 2 and "layers." in name)
        if forecast > CAPTURE_MIB << 20:
            self.critic.notes.append(
                f"modules of {batch.name} are not recorded: about {forecast >> 20} MiB, the cap is {CAPTURE_MIB} MiB"
            )
            return
        record("modules", common(self.critic.captured(batch)), micro=number)

    def _targets(self) -> list[Targets]:
        path = Path(self.params["targets"])
        if not path.exists():
            return []
        held = load_file(str(path), device=self.critic.config.device)
        return [
            Targets(held[f"{number}.returns_BT"], held[f"{number}.old_values_BT"])
            for number in range(len(self.batches))
        ]

    def _own_targets(self, batch: CriticBatch, number: int, values_BT: torch.Tensor) -> Targets:
        config = self.critic.config
        mask_BT = batch.loss_mask
        _, returns_BT = gae(self.rewards[number], values_BT, mask_BT, gamma=config.gamma, lam=config.lambd)
        return Targets(returns_BT, values_BT)


def _read_batches(path: Path, names: list[str], device: str) -> tuple[list[CriticBatch], list[torch.Tensor]]:
    held = load_file(str(path), device=device)
    batches = [
        CriticBatch(
            name, held[f"{number}.input_ids"], held[f"{number}.attention_mask"], held[f"{number}.response_mask"]
        )
        for number, name in enumerate(names)
    ]
    return batches, [held[f"{number}.rewards"] for number in range(len(names))]


def digests(state: Tensors) -> dict[str, str]:
    """A digest of each weight's bytes in float32, under Hugging Face's names: equal weights, equal digests."""
    return {
        name: hashlib.blake2b(value.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
        for name, value in sorted(state.items())
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Megatron-core warns of every optional kernel that is not installed.
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _failures_named(config: CriticConfig) -> Iterator[None]:
    try:
        yield
    except RldbgError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise CellError(
            f"the {config.backend} critic failed: {type(error).__name__}: {first}", file=config.path,
            hint="its log, above, has more; --verbose prints it",
        ) from error  # fmt: skip

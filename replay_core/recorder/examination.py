"""A gradient that is not finite, looked into before the optimizer step spreads it over the weights.

The micro-batch is run again in place, its modules caught: what comes out not finite a second time is persistent
(the data or the weights make it so), what does not was transient (a race, a flipped bit, another kernel).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replay_core.hashes import digest_of
from replay_core.recorder.hooks import Guarded, catching
from replay_core.recorder.values import Snapshots, digest

#: Role of what the second run records.
RERUN = "rerun"


def rerun(
    model: Any,
    again: Callable[[], Any],
    rng: Any,
    snapshots: Snapshots,
    guarded: Guarded,
    keep: Callable[[dict[str, Any], dict[str, Any]], None],
) -> dict[str, Any]:
    """Run a micro-batch again, gradients set aside and put back around it.

    Args:
        again: runs the forward and returns its loss, not yet backward. Buffers a forward changes (running means) are
            changed once more.
        rng: state of `rng_state()` before the forward, so that dropout falls the same way.
        keep: takes what the modules gave (with the loss), and the gradients.

    Returns:
        kind persistent | transient | failed; first (the first module output that is not finite), rerun_parameters; of a
        second run that failed why.
    """
    aside = {weight: weight.grad for weight in model.parameters()}
    now = rng_state()
    try:
        for weight in aside:
            weight.grad = None
        if rng is not None:
            set_rng_state(rng)
        with catching(guarded, snapshots, model, None) as seen:
            loss = again()
        snapshots.ready()
        loss.backward()
        gradients = gradients_of(model)
        bad = not_finite(gradients)
        wrong = not_finite(seen)
        keep({**seen, "loss": loss}, gradients)
        return {
            "kind": "persistent" if bad or wrong else "transient",
            "first": wrong[0] if wrong else None,
            "rerun_parameters": [name.removeprefix("grad.") for name in bad],
        }
    except Exception as error:
        # The trainer's own gradients come first; what the second run died of is part of the answer.
        return {"kind": "failed", "why": f"{type(error).__name__}: {error}"}
    finally:
        set_rng_state(now)
        for weight, gradient in aside.items():
            weight.grad = gradient


def gradients_of(model: Any) -> dict[str, Any]:
    """`grad.<name>` of every parameter that has a gradient."""
    return {f"grad.{name}": weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def not_finite(tensors: dict[str, Any]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity. One wait for the device, not one per tensor."""
    import torch

    names, flags = [], []
    for name, tensor in tensors.items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.is_floating_point() or local.is_complex():
            names.append(name)
            flags.append(~local.detach().isfinite().all())
    devices = {flag.device for flag in flags}
    wrong: set[str] = set()
    for device in devices:
        here = [at for at, flag in enumerate(flags) if flag.device == device]
        answers = torch.stack([flags[at] for at in here]).tolist()
        wrong |= {names[at] for at, answer in zip(here, answers, strict=True) if answer}
    return [name for name in names if name in wrong]


def weights_digest(model: Any) -> str:
    """One digest of every parameter, by name: two models with the same one hold the same bits."""
    snapshots = Snapshots(owned=False)
    weights = sorted(model.named_parameters())
    return digest_of(f"{name} {digest(snapshots.take(weight, name))}\n".encode() for name, weight in weights)


def rng_state() -> Any:
    """torch's random state, of the host and of every CUDA device in use."""
    import torch

    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), devices


def set_rng_state(state: Any) -> None:
    import torch

    host, devices = state
    torch.set_rng_state(host)
    if devices is not None:
        torch.cuda.set_rng_state_all(devices)

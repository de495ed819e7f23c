"""Copies from a CUDA device into pinned host memory that neither the host nor the device's own work waits for.

Three orders make it right:

- the copy's stream waits for what the trainer has launched so far, so the values are there;
- what the trainer launches next may write to the tensor in place: it works on while the copy reads a clone, made on the
  device by the trainer's own stream; where too much is cloned already, its stream waits for the copy instead;
- the writer waits for the copy's event before it reads the host memory.

Memory is given back to torch's allocators after that: `record_stream` tells the device's, `copy_` the host's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

#: Device memory that clones of one device may hold at a time; a clone takes a hundredth of the copy's time.
CLONES = 256 << 20

_streams: dict[Any, Any] = {}
_held: dict[Any, int] = {}
_lock = threading.Lock()


def copy_aside(torch: Any, value: Any, *, is_own: bool = False) -> tuple[Any, Callable[[], None]]:
    """A CUDA tensor's copy in pinned memory, and what to call before reading it. Returns at once.

    is_own: nobody else has it, so that nothing writes to it.
    """
    dense = value.resolve_conj().resolve_neg().contiguous()
    device, nbytes = value.device, value.numel() * value.element_size()
    cloned = False
    is_shared = not is_own and dense.data_ptr() == value.data_ptr()
    if is_shared:
        cloned = _take(device, nbytes)
        try:
            dense = dense.clone() if cloned else dense
        except torch.cuda.OutOfMemoryError:
            # The trainer's memory comes first.
            _give_back(device, nbytes)
            cloned = False
    here, aside = torch.cuda.current_stream(device), _stream(torch, device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        host = torch.empty(dense.shape, dtype=dense.dtype, pin_memory=True)
        host.copy_(dense, non_blocking=True)
        # A blocking event lets the writer sleep; others spin on a core that the trainer could use.
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(aside)
    dense.record_stream(aside)
    if is_shared and not cloned:
        here.wait_event(arrived)

    def arrive() -> None:
        arrived.synchronize()
        if cloned:
            _give_back(device, nbytes)

    return host, arrive


def _stream(torch: Any, device: Any) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _take(device: Any, nbytes: int) -> bool:
    with _lock:
        held = _held.get(device, 0)
        if held + nbytes > CLONES:
            return False
        _held[device] = held + nbytes
        return True


def _give_back(device: Any, nbytes: int) -> None:
    with _lock:
        _held[device] -= nbytes

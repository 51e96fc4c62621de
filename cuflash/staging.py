"""Numbers from the host to a GPU without waiting for it, through pinned memory that is written again once its copy is done."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import numpy as np

_ROOM = 4096  # bytes of a slot, or a multiple


class Slot(NamedTuple):
    """Pinned memory, and what tells when it has been read."""

    memory: Any
    bytes: np.ndarray
    event: Any


_slots: dict[tuple[int, int], collections.deque[Slot]] = {}  # by device and size; the one used longest ago is first


def copy(values: np.ndarray, to: int, device: int) -> None:
    """Copy a contiguous array to an address on this device, CuPy's current one, in the order of CuPy's current stream.

    The stream must not be captured: a replay would copy what is in the slot by then.
    """
    import cupy

    room = -(-values.nbytes // _ROOM) * _ROOM
    slots = _slots.setdefault((device, room), collections.deque())
    slot = None
    try:
        slot = slots.popleft()
        if not slot.event.done:
            slots.appendleft(slot)
            slot = None
    except IndexError:
        pass
    if slot is None:
        memory = cupy.cuda.alloc_pinned_memory(room)
        slot = Slot(memory, np.frombuffer(memory, np.uint8, room), cupy.cuda.Event(disable_timing=True))
    slot.bytes[: values.nbytes] = values.view(np.uint8)
    stream = cupy.cuda.get_current_stream()
    cupy.cuda.runtime.memcpyAsync(to, slot.memory.ptr, values.nbytes, cupy.cuda.runtime.memcpyHostToDevice, stream.ptr)
    slot.event.record(stream)
    slots.append(slot)

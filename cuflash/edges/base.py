"""What an edge offers, and what the edges share: CuPy at first use, and memory kept until kernels have read it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from .. import launch
from ..types import HOST, NoBackendError


class Edge:
    """Arrays of one library. ``view`` and ``give`` are called within ``placed`` and copy no input."""

    def device(self, x: Any, name: str) -> int:
        """CUDA ordinal of the array's device, HOST for host memory; TypeError if it is in neither."""
        raise NotImplementedError

    def view(self, x: Any, name: str, device: int, writes: bool) -> Any:
        """The array as a NumPy array (host) or a CuPy array (GPU) on the same memory.

        Raises TypeError if that cannot be, and ValueError if it is to be written to and must not.
        """
        raise NotImplementedError

    def give(self, result: Any, lead: Any) -> Any:
        """A NumPy or CuPy array as an array of the library of ``lead``, on its device."""
        raise NotImplementedError

    def dtype(self, value: Any) -> Any:
        """What the library calls a dtype, as NumPy takes it; anything else as it is."""
        return value

    def where(self, device: int) -> str:
        """A device in words."""
        return "the host" if device == HOST else f"GPU {device}"

    def placed(self, device: int, stream: Any, given: list[Any]) -> AbstractContextManager[None]:
        """The device as CuPy's current one, with the stream to work on: ``stream``, or the one that the library works on.

        ``given`` fills with the user's arrays on the device while the context lasts.
        """
        if device == HOST:
            return contextlib.nullcontext()
        need_cupy()
        return launch.place(device, stream)

    def done(self, device: int, views: list[Any]) -> None:
        """The work has been submitted. Other libraries may give memory to somebody else as soon as nothing refers to it."""
        if device != HOST:
            keep_until_done(views)


def need_cupy() -> Any:
    """CuPy, which every array on a GPU needs."""
    try:
        import cupy
    except ImportError as error:
        raise NoBackendError(
            f"arrays on a GPU need CuPy, which cannot be imported ({error}); install one of the extras cuda12 and cuda13"
        ) from None
    return cupy


_waiting: deque[tuple[Any, list[Any]]] = deque()
_lock = threading.Lock()


def keep_until_done(views: list[Any]) -> None:
    """Let the views live until CuPy's current stream has done what it has been given; those of former calls go as theirs is done.

    Nothing waits. In a stream capture nothing is kept: a graph's arrays are the caller's to keep for as long as it is replayed.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        return
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    with _lock:
        _waiting.append((event, views))
        while _waiting and _waiting[0][0].done:
            _waiting.popleft()


def as_array(result: Any) -> Any:
    """A scalar of NumPy as an array without axes."""
    return np.asarray(result) if isinstance(result, np.generic) else result

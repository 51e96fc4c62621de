"""Launching kernels on CuPy's current device and stream: parameter structs by value, scratch memory, copies of small host arrays."""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import device, driver, tensor_map
from .types import HOST, ArrayView


class StreamPointer:
    """A stream as CuPy's launches take it (``ptr``), and as another library's stream (``__cuda_stream__``)."""

    def __init__(self, ptr: int):
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


@contextlib.contextmanager
def place(device: int, stream: Any) -> Iterator[None]:
    """The arrays' device and the caller's stream as CuPy's current ones: results, scratch, copies and kernels all go there.

    For host arrays (device -1) there is nothing to do.
    """
    if device == HOST:
        yield
        return
    import cupy

    with cupy.cuda.Device(device):  # gives the former device back
        pointer = stream_pointer(stream)
        if stream is None or pointer == stream_pointer(None):
            yield
        else:
            with cupy.cuda.Stream.from_external(StreamPointer(pointer)):
                yield


def device_getter() -> Callable[[], int]:
    """The function that tells to which device CuPy's allocations and launches go."""
    from cupy.cuda import runtime

    return runtime.getDevice


def stream_pointer(stream: Any) -> int:
    """The cudaStream_t of what a user gave: None (CuPy's current one), an integer, or a stream of CuPy, PyTorch or ``__cuda_stream__``."""
    if stream is None:
        import cupy

        return int(cupy.cuda.get_current_stream().ptr)
    if hasattr(stream, "ptr"):
        return int(stream.ptr)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    return int(getattr(stream, "cuda_stream", stream))  # PyTorch's streams have the protocol from 2.10 on


def stream_getter() -> Callable[[], Any]:
    """The function that gives CuPy's current stream, an object with ``ptr``."""
    import cupy

    return cupy.cuda.get_current_stream


def allocator() -> Callable[[int], Any]:
    """The function that gives memory of CuPy's pool on its current device and stream: an object with ``ptr``."""
    import cupy

    return cupy.cuda.alloc


def capture_asker() -> Callable[[int], bool]:
    """The function that tells whether a stream is being captured."""
    from cupy.cuda import runtime

    return runtime.streamIsCapturing


def is_capturing() -> bool:
    """Whether CuPy's current stream is being captured."""
    import cupy

    return bool(cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr))


def refuse_capture(what: str) -> None:
    """Raise RuntimeError if CuPy's current stream is being captured; the capture goes on without the call.

    ``what`` was made for this call alone: a replay would find something else in its memory.
    """
    if is_capturing():
        raise RuntimeError(f"the call cannot be captured in a CUDA graph: {what} would be gone when the graph is replayed")


def copied(arrays: Mapping[str, np.ndarray]) -> str:
    """In words, what `uploaded` makes of host arrays."""
    return f"the copy on the device of {', '.join(arrays)}, which came as a host array,"


@contextlib.contextmanager
def uploaded(arrays: Mapping[str, np.ndarray]) -> Iterator[dict[str, int]]:
    """Device addresses of copies of small host arrays; their memory goes back to the pool, in the stream's order, afterwards."""
    if not arrays:
        yield {}
        return
    import cupy

    refuse_capture(copied(arrays))
    # One copy for all of them; each begins at a multiple of 8 bytes.
    offsets, parts, total = {}, [], 0
    for name, value in arrays.items():
        data = value.tobytes()
        data += bytes(-len(data) % 8)
        offsets[name] = total
        parts.append(data)
        total += len(data)
    on_device = cupy.asarray(np.frombuffer(b"".join(parts), np.uint8))
    yield {name: on_device.data.ptr + offset for name, offset in offsets.items()}


@contextlib.contextmanager
def scratch(shape: tuple[int, ...], dtype: np.dtype, device: int) -> Iterator[ArrayView]:
    """Memory for what a call needs between its kernels, on CuPy's current stream; it is nobody's afterwards, in the stream's order.

    From CuPy's pool. In a stream capture it is memory of the graph, with the same address whenever that is replayed: the pool would
    give it to somebody else meanwhile.
    """
    import cupy

    strides = tuple(dtype.itemsize * math.prod(shape[n + 1 :]) for n in range(len(shape)))
    if not is_capturing():
        array = cupy.empty(shape, dtype)
        yield ArrayView(array, int(array.data.ptr), shape, strides, dtype, "cupy", device)
        return
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream().ptr
    pointer = int(runtime.mallocAsync(max(1, dtype.itemsize * math.prod(shape)), stream))
    try:
        yield ArrayView(None, pointer, shape, strides, dtype, "cupy", device)
    finally:
        runtime.freeAsync(pointer, stream)


@contextlib.contextmanager
def workspace(size: int, device: int) -> Iterator[int]:
    """The address of so many bytes of `scratch`, in less of the host's time."""
    if is_capturing():
        with scratch((size,), np.dtype(np.uint8), device) as memory:
            yield memory.pointer
    else:
        pooled = allocator()(size)
        yield pooled.ptr


class Step(NamedTuple):
    """A kernel and the one-dimensional grid that it is launched with."""

    function: Any
    grid: int  # blocks
    threads: int
    shared_memory: int = 0
    early: bool = False  # it waits by itself for the kernel before it, see driver.py


def launch(step: Step, params: np.ndarray, stream: int) -> None:
    """Launch a kernel whose only argument is a parameter struct, a structured array of one element.

    Early only in a stream capture, which is for good: for one call it takes the host longer.
    """
    if step.grid == 0:  # CuPy would launch one block
        return
    if step.early and is_capturing():
        early(step, params.ctypes.data)(stream)
    else:
        step.function((step.grid, 1, 1), (step.threads, 1, 1), (opaque(params),), step.shared_memory, StreamPointer(stream))


def early(step: Step, argument: int) -> driver.EarlyLaunch:
    """The launch with the parameter struct at an address."""
    return driver.EarlyLaunch(step.function.ptr, step.grid, step.threads, step.shared_memory, argument)


def launches_early(ordinal: int) -> bool:
    """Whether kernels on this device may begin before the one before them on the stream has ended."""
    return device.actual(ordinal).cc >= (9, 0) and driver.launches_early()


def opaque(params: np.ndarray) -> np.ndarray:
    """The struct as bytes without fields: to tell a caller of its fields, as ``__array_interface__`` does, takes NumPy 50 us."""
    return params.view(f"V{params.itemsize}")


def by_value(params: np.ndarray) -> Any:
    """The struct as what CuPy makes of it at a launch, so that many launches need it once: it takes 1.8 us."""
    made = getattr(sys.modules.get("cupy.cuda.function"), "CNumpyArray", None)
    return params if made is None else made(params)


_TWO_ADDRESSES = struct.Struct("=2Q")


class Prepared:
    """Launches that lack nothing but addresses: they are the first members of the parameter struct that all of them get.

    With ``scales_at``, the last two addresses of a call are those of k_scale and v_scale, which lie so many bytes into the struct. With
    ``maps_at``, tensor maps of the first arrays lie there; they are in ``params`` for some addresses.

    A call writes them into memory of its own, taken from a list of such that are free: no two calls share it, whether they
    come from two threads or one interrupts the other. CUDA has copied the struct when the launch returns.
    """

    __slots__ = ("_fill", "_free", "_maps_at", "_params", "_scales_at", "_steps", "_stream", "_write")

    def __init__(
        self, steps: Sequence[Step], params: np.ndarray, addresses: int,
        fill: Callable[[memoryview], contextlib.AbstractContextManager[Any]] | None = None, scales_at: int | None = None,
        maps_at: Sequence[int] = (),
    ):
        self._fill = fill  # puts in what is allocated for each call; it is there inside
        self._scales_at, self._maps_at = scales_at, maps_at
        self._steps, self._stream = steps, stream_getter() if any(step.early for step in steps) else None
        self._params = params.tobytes()
        self._write = struct.Struct(f"={addresses}Q").pack_into
        self._free: list[tuple[memoryview, list[Callable[[], None]], Callable[[tuple[int, ...]], None] | None]] = []

    def __call__(self, *addresses: int) -> None:
        """Launch on CuPy's current device and stream."""
        try:
            mine = self._free.pop()
        except IndexError:
            mine = self._new()
        if self._scales_at is not None:
            _TWO_ADDRESSES.pack_into(mine[0], self._scales_at, *addresses[-2:])
            addresses = addresses[:-2]
        self._write(mine[0], 0, *addresses)
        if mine[2] is not None:
            mine[2](addresses)
        if self._fill is None:
            for go in mine[1]:
                go()
        else:
            with self._fill(mine[0]):
                for go in mine[1]:
                    go()
        self._free.append(mine)

    def _new(self) -> tuple[memoryview, list[Callable[[], None]], Callable[[tuple[int, ...]], None] | None]:
        """Memory with the struct, the launches with it, and what moves the tensor maps in it."""
        memory = tensor_map.aligned(self._params)
        at = memory.ctypes.data
        follow = tensor_map.Follower([at + offset for offset in self._maps_at]) if self._maps_at else None
        return memory.data, [self._launch(step, memory) for step in self._steps], follow

    def _launch(self, step: Step, memory: np.ndarray) -> Callable[[], None]:
        """The launch of a kernel with the struct in a memory."""
        struct = memory.view(f"V{memory.size}")  # see `opaque`
        if not step.early:
            return functools.partial(step.function, (step.grid, 1, 1), (step.threads, 1, 1), (by_value(struct),), step.shared_memory)
        go, stream = early(step, struct.ctypes.data), self._stream
        return lambda: go(stream().ptr)  # type: ignore[misc]

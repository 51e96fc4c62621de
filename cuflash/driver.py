"""CUDA's driver through ctypes, for what CuPy does not have: above all kernels that begin before the one before them has ended.

A kernel that is launched early (programmatic dependent launch, compute capability 9.0 and later) may begin as soon as every block of the
kernel before it on the stream has let it, by ``griddepcontrol.launch_dependents``, or is done. What that one writes it waits for itself,
by ``griddepcontrol.wait``: each thread before its first access to memory that another kernel may have written, or may still read.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
INVALID_CONTEXT = 201  # CUDA_ERROR_...
FIRST = 12030  # the CUDA version from which on graphs hold such launches


@functools.cache
def library() -> Any:
    """The driver's functions; an object without any where it has another name."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return object()


@functools.cache
def launches_early() -> bool:
    """Whether the driver can, also in a stream capture."""
    version = ctypes.c_int()
    ask = getattr(library(), "cuDriverGetVersion", None)
    return ask is not None and ask(ctypes.byref(version)) == 0 and version.value >= FIRST


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_memory", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    ]


class EarlyLaunch:
    """A kernel and the arguments that it is launched early with, any number of times. Not for two threads at a time.

    Parameters
    ----------
    function : int
        The CUfunction.
    grid, threads, shared_memory : int
        Blocks, threads of a block, bytes of dynamic shared memory.
    argument : int
        Address of the only argument, which is read at each launch.
    """

    def __init__(self, function: int, grid: int, threads: int, shared_memory: int, argument: int):
        self._attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self._config = _Config((grid, 1, 1), (threads, 1, 1), shared_memory, None, ctypes.addressof(self._attribute), 1)
        arguments = (ctypes.c_void_p * 1)(argument)
        self._launch = functools.partial(
            library().cuLaunchKernelEx, ctypes.byref(self._config), ctypes.c_void_p(function), arguments, None,
        )

    def __call__(self, stream: int) -> None:
        """Launch on a stream of the current device.

        Raises
        ------
        RuntimeError
            If CUDA refuses it.
        """
        self._config.stream = stream
        status = self._launch()
        if status == INVALID_CONTEXT:  # a thread that has not used CUDA yet
            use_device()
            status = self._launch()
        if status:
            raise RuntimeError(f"CUDA refuses a launch: {error(status)}")


def use_device() -> None:
    """Make the context of CuPy's current device that of the thread."""
    from cupy.cuda import runtime

    runtime.setDevice(runtime.getDevice())


def error(status: int) -> str:
    """A CUresult, by its name."""
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else str(status)

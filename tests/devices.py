"""Where a target's arrays live: calls on NumPy arrays are carried to a GPU and back, memory for memory."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuflash import NoBackendError

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"  # Numba runs CUDA kernels on the host, on NumPy arrays
# Options that are arrays of the device, as are those in rope; the rest stays on the host.
ON_DEVICE = {"bias", "mask", "out", "lse", "dlse", "k_new", "v_new"}


def gpu_wanted() -> bool:
    """Whether the suite runs on a GPU: it must be asked for, and then a missing one is a failure, not a skip."""
    if os.environ.get("CUFLASH_TEST_GPU") != "1":
        return False
    if importlib.util.find_spec("cupy") is None:
        raise RuntimeError("CUFLASH_TEST_GPU=1, but CuPy is not installed")
    return True


@functools.cache
def hopper() -> bool:
    """Whether the suite runs on a GPU of compute capability 9.0, which has a kernel of its own."""
    if not gpu_wanted():
        return False
    import cupy

    return cupy.cuda.Device().compute_capability == "90"


def root(a: np.ndarray) -> np.ndarray:
    """The array that owns the memory."""
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a


class Carrier:
    """Copies whole buffers to the GPU, so that strides, gaps and overlaps are there what they were here."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.buffers: dict[int, tuple[np.ndarray, Any]] = {}

    @staticmethod
    def memory(owner: np.ndarray) -> np.ndarray:
        """The bytes of an array that owns its memory, in the order in which they lie."""
        longest_stride_first = sorted(range(owner.ndim), key=lambda axis: (-owner.strides[axis], -owner.shape[axis]))
        flat = owner.transpose(longest_stride_first)
        assert flat.flags.c_contiguous
        return flat.reshape(-1).view(np.uint8)

    def there(self, a: np.ndarray) -> Any:
        """The array on the GPU."""
        if a.size == 0:
            return self.cupy.empty(a.shape, a.dtype)
        owner = root(a)
        if id(owner) not in self.buffers:
            self.buffers[id(owner)] = owner, self.cupy.asarray(self.memory(owner))
        buffer = self.buffers[id(owner)][1]
        offset = a.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        return self.cupy.ndarray(a.shape, a.dtype, buffer.data + offset, a.strides)

    def back(self) -> None:
        """Bring every buffer back, inputs as well: a test sees whatever was written."""
        for owner, buffer in self.buffers.values():
            here, there = self.memory(owner), buffer.get()
            if not np.array_equal(here, there):
                here[...] = there


def run(target: Any, function: Callable, *args: Any, arrays: int = 3, **options: Any) -> Any:
    """``call`` with the target's kernel and backend named; what the target does not have yet is skipped, as listed in cases.py."""
    try:
        return call(target, function, args, {**options, "kernel": target.kernel, "backend": target.backend}, arrays)
    except NoBackendError as error:
        words = listed(target, function, args, options, error)
        if words is None:
            raise
        pytest.skip(f"declined, as listed: {words}")


def listed(target: Any, function: Callable, args: tuple, options: dict[str, Any], error: NoBackendError) -> str | None:
    """The words of cases.py for the reason of a target that declined such a call; None if it may not decline it."""
    from cases import absent

    gradients = function.__name__.endswith("_backward")
    asked = {**options, "packed": True} if function.__name__.startswith("attention_varlen") else options
    reasons = absent(target, args[1 if gradients else 0].dtype, asked, gradients)
    return next((words for words in reasons if words in str(error)), None)


def call(target: Any, function: Callable, args: tuple, options: dict[str, Any], arrays: int = 3) -> Any:
    """``function(*args, **options)`` where the target computes; the first ``arrays`` arguments are arrays of the device."""
    if SIMULATED or target.backend in ("cpu", "reference"):
        return function(*args, **options)
    if target.backend == "emulator":
        from emulated_gradients import call as emulate

        return emulate(function, args, options)
    carrier = Carrier()
    moved = [carrier.there(a) if n < arrays else a for n, a in enumerate(args)]
    there = {name: carrier.there(x) if name in ON_DEVICE and x is not None else x for name, x in options.items()}
    if options.get("rope") is not None:
        there["rope"] = (*map(carrier.there, options["rope"][:2]), options["rope"][2])
    result = function(*moved, **there)
    carrier.back()
    given = {id(there[name]): options[name] for name in ("out", "lse") if there.get(name) is not None}

    def here(x: Any) -> Any:
        if id(x) in given:
            return given[id(x)]
        if isinstance(x, tuple):
            return tuple(here(y) for y in x)
        if hasattr(x, "dq"):
            return type(x)(*(here(getattr(x, name)) for name in ("dq", "dk", "dv", "dbias", "dsinks")))
        return x.get() if isinstance(x, carrier.cupy.ndarray) else x

    return here(result)

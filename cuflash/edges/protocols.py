"""Arrays of any library that speaks DLPack or ``__cuda_array_interface__``.

Results are made by the ``from_dlpack`` of the array's own namespace, if it tells one (``__array_namespace__``), by Numba for its
device arrays, and are NumPy or CuPy arrays otherwise.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import arrays, launch
from ..types import HOST
from .base import Edge, as_array, need_cupy

# Device types of DLPack (dlpack.h).
ON_HOST = (1, 3)  # kDLCPU, kDLCUDAHost
ON_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged


def edge_of(x: Any) -> Edge | None:
    """The edge for an array of a library that has none of its own; None if it is no array."""
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return DLPACK
    if hasattr(x, "__cuda_array_interface__"):
        return NUMBA if type(x).__module__.startswith("numba.cuda") else INTERFACE
    return None


class DlpackEdge(Edge):
    """Producers of DLPack capsules. A stream of the producer's own is made to precede CuPy's current one by the producer."""

    def device(self, x: Any, name: str) -> int:
        kind, ordinal = (int(number) for number in x.__dlpack_device__())
        if kind in ON_HOST:
            return HOST
        if kind in ON_GPU:
            return ordinal
        raise TypeError(f"{name}: {arrays.type_name(x)} on a device of DLPack's type {kind}; allowed are host memory and CUDA")

    def view(self, x: Any, name: str, device: int, writes: bool) -> Any:
        library: Any = np if device == HOST else need_cupy()
        if writes and device != HOST and _read_only(getattr(x, "__cuda_array_interface__", None)):
            raise ValueError(f"{name}: the array is read-only; it must be writeable")
        try:
            return library.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            hint = ""
            if "dtype" in str(error).lower() or "support" in str(error).lower():
                hint = (
                    f"; {library.__name__} takes neither {'bfloat16 nor float8' if device == HOST else 'float8'} by DLPack: pass its bits "
                    f"as {library.__name__}.from_dlpack(bits).view(dtype), with a dtype of ml_dtypes"
                )
            raise TypeError(f"{name}: {arrays.type_name(x)} cannot be seen by {library.__name__}.from_dlpack: {error}{hint}") from None

    def give(self, result: Any, lead: Any) -> Any:
        result = as_array(result)
        namespace = lead.__array_namespace__() if hasattr(lead, "__array_namespace__") else None
        if not hasattr(namespace, "from_dlpack"):
            return result
        return namespace.from_dlpack(result)


class InterfaceEdge(Edge):
    """Objects that have ``__cuda_array_interface__`` alone."""

    def device(self, x: Any, name: str) -> int:
        cupy = need_cupy()
        pointer = x.__cuda_array_interface__["data"][0]
        if not pointer:  # an array without elements
            return int(cupy.cuda.runtime.getDevice())
        return int(cupy.cuda.runtime.pointerGetAttributes(pointer).device)

    def view(self, x: Any, name: str, device: int, writes: bool) -> Any:
        cupy = need_cupy()
        interface = x.__cuda_array_interface__
        if interface.get("mask") is not None:
            raise TypeError(f"{name}: masked arrays are not supported (their mask would be lost)")
        if np.dtype(interface["typestr"]).kind == "V":
            raise TypeError(
                f"{name}: typestr {interface['typestr']!r}; __cuda_array_interface__ has no name for bfloat16 or float8: pass "
                "cupy.asarray(bits).view(ml_dtypes.bfloat16), with its bits as uint16, or DLPack"
            )
        if writes and _read_only(interface):
            raise ValueError(f"{name}: the array is read-only; it must be writeable")
        self._follow(interface.get("stream"), name)
        # Without the stream, for which CuPy would wait. The owner keeps the memory alive.
        return cupy.asarray(SimpleNamespace(__cuda_array_interface__={**interface, "stream": None}, owner=x))

    @staticmethod
    def _follow(stream: int | None, name: str) -> None:
        """Let CuPy's current stream wait for what the array's stream has been given."""
        if stream is None:
            return
        if stream == 0:
            raise ValueError(f"{name}: stream 0 in __cuda_array_interface__ is ambiguous and not allowed; 1 is the default stream")
        cupy = need_cupy()
        current = cupy.cuda.get_current_stream()
        if stream == (current.ptr or 1):
            return
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.Stream.from_external(launch.StreamPointer(stream)))
        current.wait_event(event)

    def give(self, result: Any, lead: Any) -> Any:
        return as_array(result)


class NumbaEdge(InterfaceEdge):
    """Device arrays of Numba."""

    def give(self, result: Any, lead: Any) -> Any:
        return sys.modules["numba.cuda"].as_cuda_array(as_array(result), sync=False)


def _read_only(interface: dict[str, Any] | None) -> bool:
    return interface is not None and bool(interface["data"][1])


DLPACK, INTERFACE, NUMBA = DlpackEdge(), InterfaceEdge(), NumbaEdge()

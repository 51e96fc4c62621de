"""Arrays of JAX, which is imported when the first one comes in.

JAX has no current stream: arrays come and go through DLPack, by which JAX makes CuPy's current stream wait for its own, and
the other way round. On the host, results are copied into JAX's memory.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .. import arrays
from ..types import HOST
from .base import Edge, as_array, need_cupy


class JaxEdge(Edge):
    """Concrete arrays on one device: host memory or a CUDA device."""

    def device(self, x: jax.Array, name: str) -> int:
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"{name}: a tracer of JAX, without numbers; cuflash runs outside of jax.jit, jax.vmap and jax.grad "
                "(or within by jax.pure_callback)"
            )
        if x.is_deleted():
            raise ValueError(f"{name}: the array has been deleted or donated")
        self._check_dtype(x, name)
        devices = x.devices()
        if len(devices) != 1:
            raise ValueError(f"{name}: spread over {len(devices)} devices; it must be on one, pass its shards")
        (device,) = devices
        if device.platform == "cpu":
            return HOST
        if device.platform in ("gpu", "cuda"):
            return int(x.__dlpack_device__()[1])
        raise TypeError(f"{name}: on {device}; allowed are arrays on the CPU and on CUDA devices")

    @staticmethod
    def _check_dtype(x: jax.Array, name: str) -> None:
        """Random keys have dtypes of JAX's own."""
        if not isinstance(x.dtype, np.dtype):
            raise TypeError(f"{name}: dtype {x.dtype} is not supported; allowed are {', '.join(arrays.FLOATS)}")

    def view(self, x: jax.Array, name: str, device: int, writes: bool) -> Any:
        if writes:
            hint = "leave it away, results are new arrays" if name in ("out", "lse") else "caches that grow must be of another library"
            raise ValueError(f"{name}: arrays of JAX are immutable, and this one is written to; {hint}")
        self._check_dtype(x, name)
        if device == HOST:
            return np.asarray(x)  # its memory, read-only
        if x.dtype.itemsize == 1 and x.dtype.kind not in "biu":  # CuPy has no float8 arrays
            arrays.check_float_dtype(x.dtype, name)
        if x.size == 0:  # no memory to share
            return need_cupy().empty(x.shape, x.dtype)
        try:
            return need_cupy().from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{name}: a {x.dtype} array of JAX that CuPy cannot take by DLPack ({error})") from None

    def give(self, result: Any, lead: jax.Array) -> jax.Array:
        result = as_array(result)
        wanted = jax.dtypes.canonicalize_dtype(result.dtype)
        if wanted != result.dtype:
            raise TypeError(
                f"out_dtype: {result.dtype} results need jax.config.update('jax_enable_x64', True); without it JAX has {wanted}"
            )
        (device,) = lead.devices()
        if isinstance(result, np.ndarray):
            return jax.device_put(result, device)
        if result.size == 0:  # no memory to share
            return jax.device_put(np.empty(result.shape, result.dtype), device)
        return jax.dlpack.from_dlpack(need_cupy().ascontiguousarray(result))


EDGE = JaxEdge()

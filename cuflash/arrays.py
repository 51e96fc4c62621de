"""Any ndarray -> ArrayView, and back. The only room that knows array libraries; each is touched only once its arrays come in."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np

from .types import E4M3, HOST, ArrayView, name_of

ALIGNMENT = 16  # bytes: no load or store is wider, so that addresses matter only modulo it
FLOATS = ("float16", "bfloat16", "float32", "float64")
_FLOAT8 = (E4M3, "float8_e5m2")


def bfloat16() -> np.dtype:
    """The bfloat16 dtype of ml_dtypes."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


@functools.lru_cache(maxsize=64)
def is_float(dtype: np.dtype) -> bool:
    """Whether attention runs on this dtype: float16, bfloat16, float32 or float64 in native byte order."""
    return dtype.isnative and dtype.name in FLOATS


def is_e4m3(dtype: np.dtype) -> bool:
    """Whether this is ml_dtypes.float8_e4m3fn."""
    return name_of(dtype) == E4M3


def check_float_dtype(dtype: np.dtype, name: str) -> None:
    """Raise unless ``dtype`` is one that attention takes."""
    if is_float(dtype):
        return
    if dtype.name in _FLOAT8:
        only = f"; keys and values alone may be {E4M3}, with k_scale and v_scale"
        raise NotImplementedError(f"{name}: {dtype.name} arrays are not supported yet; allowed are {', '.join(FLOATS)}{only}")
    hint = ""
    if dtype == np.uint16:
        hint = "; uint16 is never taken for bfloat16: if it holds bfloat16 bits, pass array.view(ml_dtypes.bfloat16)"
    elif not dtype.isnative:
        hint = "; it is not in this machine's byte order: pass array.astype(array.dtype.newbyteorder('='))"
    raise TypeError(f"{name}: dtype {dtype} is not supported; allowed are {', '.join(FLOATS)}{hint}")


def kind_of(array: Any, name: str) -> str:
    """The library an array belongs to ("numpy" or "cupy"); TypeError for everything else."""
    if type(array) is np.ndarray:
        return "numpy"
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: masked arrays are not supported (their mask would be lost); pass array.data and mask=")
    if isinstance(array, np.ndarray):
        return "numpy"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return "cupy"
    hint = ""
    if hasattr(array, "__dlpack__") or hasattr(array, "__cuda_array_interface__"):
        hint = ", as q is; convert it without a copy by numpy.from_dlpack(x) (host memory) or cupy.from_dlpack(x) (GPU)"
    elif isinstance(array, list | tuple):
        hint = "; convert it by numpy.asarray(x)"
    allowed = "arrays of NumPy, CuPy, PyTorch, JAX and others with DLPack, all of one library"
    raise TypeError(f"{name}: got {type_name(array)}; allowed are {allowed}{hint}")


def type_name(x: Any) -> str:
    """The type of a value as a user would write it: list, torch.Tensor."""
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def view(array: Any, name: str) -> ArrayView:
    """See an array of a known library as an ArrayView, in its own axis order.

    Raises
    ------
    TypeError
        If it is no array of a library that cuflash knows.
    """
    kind = kind_of(array, name)
    if kind == "numpy":
        array = np.asarray(array)  # drops subclasses such as memmap, no copy
    found = wrap(array, kind)
    if kind == "cupy" and any(x % found.dtype.itemsize for x in (found.pointer, *found.strides)) and 0 not in found.shape:
        raise ValueError(
            f"{name}: its address {found.pointer:#x} and strides {found.strides} must be multiples of the {found.dtype.itemsize} bytes "
            f"of a {found.dtype}; a GPU reads whole elements only"
        )
    return found


def wrap(array: Any, kind: str) -> ArrayView:
    """ArrayView of an ndarray whose library is known."""
    if kind == "numpy":
        pointer, device = array.__array_interface__["data"][0], HOST
    else:
        pointer, device = int(array.data.ptr), int(array.device.id)
    return ArrayView(array, pointer, tuple(array.shape), tuple(array.strides), array.dtype, kind, device)


def key(array: Any) -> tuple | None:
    """Everything about an array but its address and contents; None for what is no plain NumPy or CuPy array."""
    kind = type(array)
    if kind is np.ndarray:
        return (HOST, array.shape, array.strides, array.dtype, array.flags.writeable)
    cupy = sys.modules.get("cupy")
    if cupy is None or kind is not cupy.ndarray:
        return None
    memory = array.data
    return (memory.device_id, array.shape, array.strides, array.dtype, memory.ptr % ALIGNMENT)


def keys(q: Any, k: Any, v: Any) -> tuple | None:
    """``key`` of three arrays that lie in one place, in one tuple; None if they do not."""
    kind = type(q)
    if type(k) is not kind or type(v) is not kind:
        return None
    if kind is np.ndarray:
        return (HOST, q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
    cupy = sys.modules.get("cupy")
    if cupy is None or kind is not cupy.ndarray:
        return None
    a, b, c = q.data, k.data, v.data
    device = a.device_id
    if b.device_id != device or c.device_id != device:
        return None
    return (
        device, q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype, (a.ptr | b.ptr | c.ptr) % ALIGNMENT,
    )


def transpose(a: ArrayView, axes: tuple[int, ...]) -> ArrayView:
    """The same memory with its axes in another order."""
    array = None if a.array is None else a.array.transpose(axes)
    return ArrayView(array, a.pointer, tuple(a.shape[n] for n in axes), tuple(a.strides[n] for n in axes), a.dtype, a.kind, a.device)


def expand(a: ArrayView, axis: int) -> ArrayView:
    """The same memory with a new axis of length 1."""
    return _same_start(a, a.array[(slice(None),) * axis + (None,)])


def broadcast(a: ArrayView, shape: tuple[int, ...]) -> ArrayView:
    """The same memory, broadcast to ``shape`` with zero strides. The caller has checked that it can be."""
    return _same_start(a, (np if a.kind == "numpy" else sys.modules["cupy"]).broadcast_to(a.array, shape))


def strided(a: ArrayView, shape: tuple[int, ...], strides: tuple[int, ...]) -> ArrayView:
    """The same memory by another shape and other strides, in bytes. The caller sees to it that it stays within the array."""
    array = a.array
    if array is not None:
        array = (np if a.kind == "numpy" else sys.modules["cupy"]).lib.stride_tricks.as_strided(array, shape, strides)
    return ArrayView(array, a.pointer, shape, strides, a.dtype, a.kind, a.device)


def _same_start(a: ArrayView, array: Any) -> ArrayView:
    """ArrayView of ``array``, a view of ``a`` that begins at the same address."""
    return ArrayView(array, a.pointer, array.shape, array.strides, a.dtype, a.kind, a.device)


def signature(a: ArrayView) -> ArrayView:
    """What a plan remembers of an array: not its memory."""
    return ArrayView(None, 0, a.shape, a.strides, a.dtype, a.kind, a.device)


def empty(shape: tuple[int, ...], dtype: np.dtype, like: ArrayView) -> Any:
    """An uninitialised array where ``like`` is."""
    if like.kind == "numpy":
        return np.empty(shape, dtype)
    cupy = sys.modules["cupy"]
    if cupy.cuda.runtime.getDevice() == like.device:
        return empty_here(shape, dtype)
    with cupy.cuda.Device(like.device):
        return empty_here(shape, dtype)


def empty_here(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """An uninitialised array on CuPy's current device, which makes none of float8, but sees others so."""
    cupy = sys.modules["cupy"]
    return cupy.empty(shape, np.uint8).view(dtype) if is_e4m3(dtype) else cupy.empty(shape, dtype)


def zeros(shape: tuple[int, ...], like: ArrayView) -> ArrayView:
    """Zeros of the dtype of ``like`` and where it is, in the memory of one element."""
    if like.kind == "numpy":
        return broadcast(wrap(np.zeros(1, like.dtype), like.kind), shape)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(like.device):
        one = empty_here((1,), like.dtype)
        one.data.memset_async(0, one.nbytes)
        return broadcast(wrap(one, like.kind), shape)


def where(a: ArrayView) -> str:
    """Where an array lies, in words."""
    return "host memory (NumPy)" if a.kind == "numpy" else f"{a.kind}, GPU {a.device}"


def byte_range(a: ArrayView) -> tuple[int, int]:
    """First byte and one past the last byte that the array can touch."""
    if 0 in a.shape:
        return (a.pointer, a.pointer)
    first = last = a.pointer
    for n, stride in zip(a.shape, a.strides, strict=True):
        if stride < 0:
            first += (n - 1) * stride
        else:
            last += (n - 1) * stride
    return first, last + a.dtype.itemsize


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether two arrays share an element. Interleaved views of one buffer do not, unless that is too hard to decide."""
    if a.device != b.device:
        return False
    if a.kind == b.kind == "numpy":
        if not np.may_share_memory(a.array, b.array):
            return False
    else:
        (a0, a1), (b0, b1) = byte_range(a), byte_range(b)
        if a1 <= b0 or b1 <= a0:
            return False
    # The exact test works on addresses alone, so device memory is described to it as host memory and never read.
    as_host = [x.array if x.kind == "numpy" else _AddressOnly(x) for x in (a, b)]
    first, second = (np.asarray(x) for x in as_host)
    try:
        return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, ValueError):
        return True


class _AddressOnly:
    """Addresses and strides of a device array, for NumPy's overlap test, which dereferences nothing."""

    def __init__(self, a: ArrayView):
        self.__array_interface__ = {
            "version": 3, "data": (a.pointer, True), "shape": a.shape, "strides": a.strides, "typestr": f"|V{a.dtype.itemsize}",
        }


def overlaps_itself(a: ArrayView) -> bool:
    """Whether two indices of the array name the same bytes, as in a broadcast view."""
    if 0 in a.shape:
        return False
    axes = sorted((abs(s), n) for n, s in zip(a.shape, a.strides, strict=True) if n > 1)
    reach = a.dtype.itemsize
    for stride, n in axes:
        if stride < reach:
            break
        reach += (n - 1) * stride
    else:
        return False
    first, last = byte_range(a)
    if math.prod(a.shape) * a.dtype.itemsize > last - first:
        return True  # more elements than there is room for: zero strides, sliding windows
    # Strides that do not nest are rare and may still be distinct: list the addresses.
    offsets = np.zeros(1, np.int64)
    for stride, n in axes:
        offsets = (offsets[:, None] + np.arange(n) * stride).ravel()
    offsets.sort()
    return bool((np.diff(offsets) < a.dtype.itemsize).any())


def on_device(x: Any) -> bool:
    """Whether this is an array on a GPU."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def read_back(a: ArrayView) -> np.ndarray | None:
    """The numbers of a device array, once the device has done all its work; None while the current stream is being captured."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(a.device) as gpu:
        if cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr):
            return None
        gpu.synchronize()
        return np.asarray(a.array.get())


def host_index(x: Any, name: str) -> np.ndarray:
    """A copy of an index array (lengths, cu_seqlens, page table), from NumPy or nested lists, as int64.

    Raises
    ------
    TypeError
        If it does not hold integers.
    """
    array = _host_array(x, name, "integers")
    if array.size == 0 and array.dtype.kind == "f" and not isinstance(x, np.ndarray):
        array = array.astype(np.int64)  # numpy makes [] a float array
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: dtype {array.dtype} is not an integer type; allowed are integer arrays and lists of int")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: {array.max()} is larger than 2**63 - 1")
    return array.astype(np.int64)


def host_floats(x: Any, name: str) -> np.ndarray:
    """A copy of a small parameter array (slopes, sinks, scales) as float64 on the host."""
    array = _host_array(x, name, "real numbers")
    if array.dtype.kind not in "iuf" and array.dtype.name not in FLOATS:
        raise TypeError(f"{name}: dtype {array.dtype} is not a real number type; allowed are arrays and lists of real numbers")
    return array.astype(np.float64)


def _host_array(x: Any, name: str, content: str) -> np.ndarray:
    """NumPy's view of an array or of nested lists in host memory."""
    if x is None:
        raise TypeError(f"{name}: got None; allowed are NumPy arrays and lists of {content}")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: masked arrays are not supported; allowed are NumPy arrays and lists of {content}")
    if on_device(x):
        raise NotImplementedError(f"{name}: CuPy arrays are not supported here yet; pass a NumPy array or a list of {content}")
    if not isinstance(x, np.ndarray) and _on_another_device(x):
        raise TypeError(f"{name}: got {type_name(x)} on a device, which is not read back; allowed are NumPy arrays and lists of {content}")
    try:
        return np.asarray(x)
    except (RuntimeError, TypeError) as error:  # of another library's array
        allowed = f"allowed are NumPy arrays and lists of {content}"
        raise TypeError(f"{name}: got {type_name(x)}, which NumPy cannot read ({error}); {allowed}") from None
    except ValueError as error:  # ragged nesting
        raise ValueError(f"{name}: not a rectangular array of {content} ({error})") from None


def _on_another_device(x: Any) -> bool:
    """Whether this is an array of another library that lies on a device."""
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[0]) not in (1, 3)  # kDLCPU, kDLCUDAHost
    return hasattr(x, "__cuda_array_interface__")

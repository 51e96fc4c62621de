"""Tensors of PyTorch, which is imported when the first one comes in.

Work goes to PyTorch's current stream of the tensors' device, and all memory that a call takes on a GPU comes from PyTorch's own
allocator: results are ordinary tensors, nothing waits, and a call can be part of a graph that PyTorch captures.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

from .. import arrays, launch
from ..types import HOST
from .base import Edge, as_array, need_cupy

_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
DTYPES = {getattr(torch, name): np.dtype(name) for name in _NAMES}
# Those that NumPy lacks, by tensors of as many bytes that it has.
OTHERS = {
    getattr(torch, name): (stored, np.dtype(getattr(ml_dtypes, name)))
    for name, stored in (("bfloat16", torch.int16), ("float8_e4m3fn", torch.uint8), ("float8_e5m2", torch.uint8))
    if hasattr(torch, name)
}
DTYPES |= {there: here for there, (_, here) in OTHERS.items()}
BACK = {here: there for there, here in DTYPES.items()}


class TorchEdge(Edge):
    """Tensors in host memory and on CUDA devices."""

    def __init__(self) -> None:
        self._memory: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by address

    def device(self, x: torch.Tensor, name: str) -> int:
        device = x.device
        if device.type == "cuda":
            return torch.cuda.current_device() if device.index is None else device.index
        if device.type == "cpu":
            return HOST
        raise TypeError(f"{name}: on {device}; allowed are tensors on the CPU and on CUDA devices")

    def dtype(self, value: Any) -> Any:
        return DTYPES.get(value, value) if isinstance(value, torch.dtype) else value

    def where(self, device: int) -> str:
        return "cpu" if device == HOST else f"cuda:{device}"

    def view(self, x: torch.Tensor, name: str, device: int, writes: bool) -> Any:
        dtype = DTYPES.get(x.dtype)
        if dtype is None:
            raise TypeError(f"{name}: dtype {x.dtype} is not supported; allowed are {', '.join(arrays.FLOATS)}")
        self._refuse_special(x, name)
        try:
            return self._on_host(x, dtype) if device == HOST else self._on_device(x, dtype, device, name)
        except NotImplementedError:  # a RuntimeError as well
            raise
        except RuntimeError as error:  # wrappers without memory of their own, as within torch.func.vmap
            raise TypeError(f"{name}: a {arrays.type_name(x)} without memory of its own ({str(error).splitlines()[0]})") from None

    @staticmethod
    def _refuse_special(x: torch.Tensor, name: str) -> None:
        """What a tensor may be beyond its memory, shape and strides."""
        if x.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{name}: requires grad, and cuflash records nothing for autograd; call it within torch.no_grad() or pass "
                f"{name}.detach() (gradients: cuflash.attention_backward)"
            )
        if x.layout is not torch.strided or x.is_nested:
            kind = "nested" if x.is_nested else str(x.layout)
            raise TypeError(f"{name}: a tensor of layout {kind}; allowed is torch.strided, pass {name}.to_dense() or its parts")
        if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(f"{name}: got {arrays.type_name(x)}, a wrapper; pass the torch.Tensor that holds its memory")
        if x.is_neg() or x.is_conj():
            bit, method = ("negative", "resolve_neg") if x.is_neg() else ("conjugate", "resolve_conj")
            raise TypeError(f"{name}: its {bit} bit is set, so that its memory holds other numbers; pass {name}.{method}()")

    @staticmethod
    def _on_host(x: torch.Tensor, dtype: np.dtype) -> np.ndarray:
        x = x.detach()
        if x.dtype in OTHERS:
            return x.view(OTHERS[x.dtype][0]).numpy().view(dtype)
        return x.numpy()

    @staticmethod
    def _on_device(x: torch.Tensor, dtype: np.dtype, device: int, name: str) -> Any:
        stored = dtype
        if dtype.itemsize == 1 and dtype.kind not in "biu":  # CuPy has no float8 arrays, but by view
            if not arrays.is_e4m3(dtype):
                arrays.check_float_dtype(dtype, name)
            stored = np.dtype(np.uint8)
        cupy = need_cupy()
        item = dtype.itemsize
        strides = tuple(item * stride for stride in x.stride())
        size = item + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)) if x.numel() else 0
        memory = cupy.cuda.UnownedMemory(x.data_ptr(), size, x, device)
        array = cupy.ndarray(tuple(x.shape), stored, cupy.cuda.MemoryPointer(memory, 0), strides)
        return array if stored is dtype else array.view(dtype)

    @contextlib.contextmanager
    def placed(self, device: int, stream: Any, given: list[Any]) -> Iterator[None]:
        if device == HOST:
            yield
            return
        cupy = need_cupy()
        with contextlib.ExitStack() as stack:
            if stream is None:
                pointer = torch.cuda.current_stream(device).cuda_stream
            else:
                pointer = launch.stream_pointer(stream)
                other = torch.cuda.ExternalStream(pointer, device=device)
                stack.enter_context(torch.cuda.stream(other))
            stack.enter_context(launch.place(device, pointer))
            stack.enter_context(cupy.cuda.using_allocator(functools.partial(self._allocate, device)))
            yield
            if stream is not None:
                for x in given:  # its memory must not go to somebody else before that stream is done
                    x.record_stream(other)

    def _allocate(self, device: int, size: int) -> Any:
        """CuPy's memory of ``size`` bytes, from PyTorch."""
        cupy = need_cupy()
        memory = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
        address = memory.data_ptr()
        self._memory[address] = memory
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, memory, device), 0)

    def give(self, result: Any, lead: torch.Tensor) -> torch.Tensor:
        result = as_array(result)
        dtype = BACK[result.dtype]
        if isinstance(result, np.ndarray):
            if dtype in OTHERS:
                stored = OTHERS[dtype][0]
                return torch.from_numpy(result.view(DTYPES[stored])).view(dtype)
            return torch.from_numpy(result)
        memory = self._memory.get(result.data.mem.ptr)
        if memory is None:  # memory of another origin, or none
            return torch.from_dlpack(result)
        item = result.dtype.itemsize
        typed = memory[: memory.numel() // item * item].view(dtype)
        offset = (result.data.ptr - memory.data_ptr()) // item
        return typed.as_strided(result.shape, [stride // item for stride in result.strides], offset)

    def done(self, device: int, views: list[Any]) -> None:
        """Nothing to keep: PyTorch hands memory on in the order of the stream that the work is on."""


EDGE = TorchEdge()

"""What prefill on a GPU is measured beside: PyTorch's FlashAttention-2, cuDNN and math, FlashAttention-3, and cuflash's own kernels.

A peer is prepared with arrays of CuPy, (B, S, H, D) in 16 bits, and gives a call without arguments; whatever only the first call needs
has to happen in it, as the others are captured in a graph.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import cuflash

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
BF16 = DTYPES["bfloat16"]

Arrays = tuple[Any, Any, Any]  # q, k, v as CuPy arrays
Call = Callable[[], Any]  # returns the output as an array with DLPack, (B, S, H, D)
Peer = Callable[[Arrays, bool], Call]  # the second argument: causal


def ours(kernel: str) -> Peer:
    """A kernel of cuflash's cuda backend."""

    def prepare(arrays: Arrays, causal: bool) -> Call:
        import cupy

        q, _, v = arrays
        out = cupy.empty((*q.shape[:-1], v.shape[-1]), q.dtype)

        def call() -> Any:
            return cuflash.attention(*arrays, causal=causal, kernel=kernel, backend="cuda", out=out)

        return call

    return prepare


def torch_sdpa(backend: str) -> Peer:
    """One of PyTorch's engines behind scaled_dot_product_attention."""

    def prepare(arrays: Arrays, causal: bool) -> Call:
        torch = importlib.import_module("torch")
        attention = importlib.import_module("torch.nn.attention")
        q, k, v = (as_torch(a).transpose(1, 2) for a in arrays)

        def call() -> Any:
            with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)), torch.no_grad():
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
            return out.transpose(1, 2)

        return call

    return prepare


def flash_attention_3(arrays: Arrays, causal: bool, **options: Any) -> Call:
    """FlashAttention-3; options are those of its flash_attn_func, or with cu_seqlens_q of its flash_attn_varlen_func."""
    module = importlib.import_module(_fa3_module() or "fa3_fwd_interface")
    function = module.flash_attn_varlen_func if "cu_seqlens_q" in options else module.flash_attn_func
    q, k, v = map(as_torch, arrays)

    def call() -> Any:
        out = function(q, k, v, causal=causal, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


def _fa3_module() -> str | None:
    return next((name for name in ("fa3_fwd_interface", "flash_attn_interface") if importlib.util.find_spec(name)), None)


def as_torch(a: Any) -> Any:
    """The same memory as a PyTorch tensor of float16 or bfloat16."""
    torch = importlib.import_module("torch")
    return torch.from_dlpack(a.view(np.int16)).view(getattr(torch, a.dtype.name))


def as_cupy(result: Any) -> Any:
    """What a peer gives, of 16-bit numbers, as a CuPy array; what is no tensor of PyTorch stays as it is."""
    if not type(result).__module__.startswith("torch"):
        return result
    import cupy

    bits = result.contiguous().view(importlib.import_module("torch").int16)
    return cupy.from_dlpack(bits).view(DTYPES[str(result.dtype).removeprefix("torch.")])


def importable() -> dict[str, Peer]:
    """Peers that this machine has, the naive kernel of cuflash among them."""
    found: dict[str, Peer] = {}
    if importlib.util.find_spec("torch"):
        found["FA2 (PyTorch)"] = torch_sdpa("FLASH_ATTENTION")
        found["cuDNN (PyTorch)"] = torch_sdpa("CUDNN_ATTENTION")
        found["math (PyTorch)"] = torch_sdpa("MATH")
        if has_flash_attention_3():
            found["FA3"] = flash_attention_3
    found["naive (cuflash)"] = ours("naive")
    return found


def has_flash_attention_3() -> bool:
    return importlib.util.find_spec("torch") is not None and _fa3_module() is not None


def materialises(peer: str) -> bool:
    """Whether a peer stores the scores."""
    return peer.startswith(("math", "naive"))

"""Arrays of other libraries for the tests of the edges: how to make and read them, and producers of DLPack."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

F32 = np.dtype(np.float32)


def inputs(dtype=F32, shape=(2, 5, 4, 16), heads_kv=2, seed=0):
    rng = np.random.default_rng(seed)
    kv = (*shape[:-2], heads_kv, shape[-1])
    return [rng.standard_normal(s).astype(dtype) for s in (shape, kv, kv)]


class Library:
    """How the tests make and read arrays of a library."""

    def make(self, a: np.ndarray):
        raise NotImplementedError

    def read(self, x) -> np.ndarray:
        raise NotImplementedError

    kind: type = object


class Torch(Library):
    def __init__(self):
        self.torch = pytest.importorskip("torch")
        self.kind = self.torch.Tensor

    def make(self, a):
        if a.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(a.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(a)

    def read(self, x):
        assert isinstance(x, self.kind) and x.device.type == "cpu"
        if x.dtype is self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()


class Jax(Library):
    def __init__(self):
        self.jax = pytest.importorskip("jax")
        self.kind = self.jax.Array

    def make(self, a):
        return self.jax.device_put(a, self.jax.devices("cpu")[0])

    def read(self, x):
        assert isinstance(x, self.kind) and next(iter(x.devices())).platform == "cpu"
        return np.asarray(x)


class Producer:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, a: np.ndarray, device=None):
        self.a, self.place = a, device

    def __dlpack_device__(self):
        return self.place or self.a.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.a.__dlpack__(**options)


class OldProducer(Producer):
    """From before DLPack 1.0, which has no flag to say that an array may be written to."""

    def __dlpack__(self, stream=None):
        return self.a.__dlpack__(stream=stream)


class Standard(Producer):
    """An array of the array API standard."""

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda a: Standard(np.from_dlpack(a)))


class Dlpack(Library):
    kind = Standard

    def make(self, a):
        return Standard(a)

    def read(self, x):
        assert type(x) is Standard
        return x.a

"""The array edge: which arrays come in, where they lie, and which share memory."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from refusal import refused

import cuflash
from cuflash import arrays, problem
from cuflash.arrays import view

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def same(q: np.ndarray) -> problem.Problem:
    return problem.build_attention(q, q, q)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def test_dtypes_that_attention_takes(dtype):
    built = same(np.ones((2, 3, 1, 4), dtype))
    assert built.q.dtype == built.out_dtype == dtype and built.q.kind == "numpy"
    assert built.compute_dtype == (np.float64 if dtype is np.float64 else np.float32)


DTYPES = {
    "int32": (np.int32, TypeError, "int32"),
    "bool": (np.bool_, TypeError, "bool"),
    "uint16": (np.uint16, TypeError, "array.view(ml_dtypes.bfloat16)"),
    "complex64": (np.complex64, TypeError, "complex64"),
    "big-endian": (">f4", TypeError, "byte order"),
    "object": (object, TypeError, "object"),
    "text": ("U3", TypeError, "<U3"),
    "dates": ("M8[s]", TypeError, "datetime64"),
    "records": ([("x", "f4")], TypeError, "[('x', '<f4')]"),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, NotImplementedError, "float8_e4m3fn"),
    "float8_e5m2": (ml_dtypes.float8_e5m2, NotImplementedError, "float8_e5m2"),
    "float8_e4m3b11fnuz": (ml_dtypes.float8_e4m3b11fnuz, TypeError, "float8_e4m3b11fnuz"),
    "int4": (ml_dtypes.int4, TypeError, "int4"),
}
if np.dtype(np.longdouble).itemsize > 8:
    DTYPES["longdouble"] = (np.longdouble, TypeError, "float")


@pytest.mark.parametrize(("dtype", "error", "piece"), DTYPES.values(), ids=DTYPES)
def test_dtypes_that_attention_does_not_take(dtype, error, piece):
    with refused(error, "q:", piece, "allowed are float16, bfloat16, float32, float64"):
        same(np.zeros((2, 3, 1, 4), dtype))


@pytest.mark.parametrize("name", ["k", "v"])
def test_one_dtype_for_all(name):
    named = {"q": np.ones((2, 4), np.float32), "k": np.ones((2, 4), np.float32), "v": np.ones((2, 4), np.float32)}
    named[name] = named[name].astype(np.float64)
    with refused(TypeError, f"{name}: dtype float64", "q's float32", "equal", "nothing is cast silently"):
        problem.build_attention(**named)


class Exporter:
    """An array of a library that cuflash does not know, which speaks DLPack."""

    def __dlpack__(self, **options):
        raise AssertionError("nothing is converted behind the user's back")


class Interface:
    __cuda_array_interface__ = {"shape": (2, 4), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


@pytest.mark.parametrize(
    ("array", "pieces"),
    [
        ([[1.0]], ("got list", "numpy.asarray(x)")),
        (((1.0,),), ("got tuple", "numpy.asarray(x)")),
        (None, ("got NoneType",)),
        (1.0, ("got float",)),
        (np.float32(1), ("got numpy.float32",)),
        (Exporter(), ("Exporter", "numpy.from_dlpack(x)", "cupy.from_dlpack(x)")),
        (Interface(), ("Interface", "cupy.from_dlpack(x)")),
        (np.ma.masked_array(np.ones((2, 4)), mask=np.zeros((2, 4), bool)), ("masked arrays", "array.data", "mask=")),
    ],
    ids=["list", "tuple", "None", "float", "scalar", "dlpack", "interface", "masked"],
)
def test_what_is_no_array(array, pieces):
    x = np.ones((2, 4))
    for named in ({"q": array, "k": x, "v": x}, {"q": x, "k": array, "v": x}, {"q": x, "k": x, "v": array}):
        name = next(n for n in named if named[n] is array)
        with refused(TypeError, f"{name}:", *pieces):
            problem.build_attention(**named)


def test_bits_of_bfloat16_are_never_guessed():
    """uint16 16384 is bfloat16 2.0 if the user says so, and is refused otherwise."""
    bits = np.full((1, 1), 16384, np.uint16)
    out = cuflash.attention(*[bits.view(ml_dtypes.bfloat16)] * 3, backend="reference")
    assert out.dtype == ml_dtypes.bfloat16 and out.item() == 2.0
    with refused(TypeError, "q:", "uint16", "never taken for bfloat16"):
        cuflash.attention(bits, bits, bits)


@pytest.mark.parametrize("dtype", [int, float])
def test_masked_parameters_are_refused(dtype):
    x = np.ma.masked_array([1, 2], mask=[0, 1], dtype=dtype)
    for read in (arrays.host_index, arrays.host_floats):
        with refused(TypeError, "x:", "masked arrays are not supported", "NumPy arrays and lists"):
            read(x, "x")


def test_index_arrays_of_every_integer_type():
    for dtype in (np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64, ">i4"):
        index = arrays.host_index(np.array([1, 2], dtype), "x")
        assert index.dtype == np.int64 and index.tolist() == [1, 2]
    assert arrays.host_index([], "x").shape == (0,) and arrays.host_index(((1, 2), (3, 4)), "x").shape == (2, 2)
    with refused(TypeError, "x:", "object", "integer"):
        arrays.host_index([2**70], "x")


# --- where arrays lie: a stand-in for CuPy, whose arrays differ only in kind and device -------------------------------


class FakeArray:
    """A device array as arrays.py sees one."""

    def __init__(self, array: np.ndarray, device: int = 0):
        self.host = array
        self.shape, self.strides, self.dtype, self.ndim = array.shape, array.strides, array.dtype, array.ndim
        self.data, self.device = SimpleNamespace(ptr=array.ctypes.data), SimpleNamespace(id=device)

    def transpose(self, axes):
        return FakeArray(self.host.transpose(axes), self.device.id)

    def __getitem__(self, index):
        return FakeArray(self.host[index], self.device.id)


@pytest.fixture
def fake_cupy(monkeypatch):
    module = ModuleType("cupy")
    module.ndarray = FakeArray
    module.broadcast_to = lambda a, shape: FakeArray(np.broadcast_to(a.host, shape), a.device.id)
    monkeypatch.setitem(sys.modules, "cupy", module)


def test_mixed_kinds_and_devices(fake_cupy):
    host = np.ones((2, 4), np.float32)
    gpu0, gpu1 = FakeArray(host), FakeArray(host, 1)
    with refused(TypeError, "k:", "host memory (NumPy)", "q is in cupy, GPU 0", "of one kind"):
        problem.build_attention(gpu0, host, host)
    with refused(TypeError, "v:", "cupy, GPU 1", "q is in host memory (NumPy)", "of one kind"):
        problem.build_attention(host, host, gpu1)
    with refused(ValueError, "v:", "GPU 1", "GPU 0", "on one device"):
        problem.build_attention(gpu0, gpu0, gpu1)
    with refused(TypeError, "bias:", "host memory", "GPU 0", "of one kind"):
        problem.build_attention(gpu0, gpu0, gpu0, bias=host[:, :2])
    with refused(ValueError, "mask:", "GPU 1", "GPU 0", "on one device"):
        problem.build_attention(gpu0, gpu0, gpu0, mask=FakeArray(np.ones((2, 2), bool), 1))
    with refused(TypeError, "out:", "host memory", "GPU 0"):
        problem.with_outputs(problem.build_attention(gpu0, gpu0, gpu0), host, None, False, "BSHD", 2)


def test_device_arrays_become_a_problem(fake_cupy, monkeypatch):
    x = FakeArray(np.ones((2, 5, 3, 4), np.float32), 1)
    built = problem.build_attention(x, x, x, layout="BHSD", kv_lengths=[1, 2], bias=FakeArray(np.ones((3, 1), np.float32), 1))
    assert (built.q.kind, built.q.device, built.q.shape) == ("cupy", 1, (2, 3, 5, 4)) and built.bias.shape == (2, 5, 3, 3)
    for name in ("cpu", "reference"):
        with refused(TypeError, "backend:", repr(name), "NumPy arrays", "GPU 1", "cupy.asnumpy"):
            problem.build_attention(x, x, x, backend=name)
    with refused(NotImplementedError, "sinks:", "CuPy", "NumPy array or a list"):
        problem.build_attention(x, x, x, sinks=FakeArray(np.ones(3, np.float32), 1))
    monkeypatch.setattr(cuflash.planner, "unusable", lambda backend: "no GPU here")
    monkeypatch.setattr("cuflash.backends.cuda.unusable", lambda: "no GPU here")
    with pytest.raises(cuflash.NoBackendError, match="numba-cuda/fa1: .*no GPU here"):
        cuflash.planner.choose(built)


def test_device_memory_is_compared_by_address(fake_cupy):
    host = np.ones((4, 8), np.float32)
    whole = view(FakeArray(host), "x")
    assert arrays.overlap(whole, view(FakeArray(host[1:2]), "y"))
    assert not arrays.overlap(view(FakeArray(host[:, ::2]), "x"), view(FakeArray(host[:, 1::2]), "y"))
    assert not arrays.overlap(whole, view(FakeArray(host, 1), "y")), "equal addresses on another device"


# --- shared memory ---------------------------------------------------------------------------------------------------

BUFFER = np.zeros((4, 6, 3, 8), np.float32)
FUSED = np.zeros((2, 1000, 3, 12, 64), np.float16)


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        (BUFFER, BUFFER, True),
        (BUFFER, BUFFER.copy(), False),
        (BUFFER[:2], BUFFER[2:], False),
        (BUFFER[:3], BUFFER[2:], True),
        (BUFFER[..., ::2], BUFFER[..., 1::2], False),
        (BUFFER[..., ::2], BUFFER[..., ::-2], False),
        (BUFFER[..., ::2], BUFFER[..., ::3], True),
        (BUFFER[:, ::-1], BUFFER[:, :1], True),
        (BUFFER[:, :, 0], BUFFER[:, :, 1], False),
        (BUFFER[:, :, :2], BUFFER[:, :, 1:], True),
        (BUFFER[..., 4:].transpose(3, 2, 1, 0), BUFFER[..., :4], False),
        (BUFFER[..., 3:].transpose(3, 2, 1, 0), BUFFER[..., :4], True),
        (BUFFER.view(np.float64), BUFFER[0, 0, 0, 1:2], True),
        (BUFFER[:0], BUFFER, False),
        (np.broadcast_to(BUFFER[:1], BUFFER.shape), BUFFER[1:], False),
        (FUSED[:, :, 0], FUSED[:, :, 2], False),
        (FUSED[:, :, 0].transpose(0, 2, 1, 3), FUSED[:, :, 1], False),
        (FUSED[:, 1:, 0], FUSED[:, :-1, 0], True),
    ],
)
def test_overlap_is_exact(a, b, shared):
    assert arrays.overlap(view(a, "a"), view(b, "b")) is shared
    assert arrays.overlap(view(b, "b"), view(a, "a")) is shared


LINE = np.zeros(24, np.float32)


@pytest.mark.parametrize(
    ("array", "folded"),
    [
        (BUFFER, False),
        (BUFFER[::-1, :, 1], False),
        (BUFFER.transpose(2, 0, 3, 1), False),
        (BUFFER[:1, :1], False),
        (BUFFER[:0], False),
        (as_strided(LINE, (3, 4), (0, 4)), True),
        (as_strided(LINE, (1, 4), (0, 4)), False),
        (as_strided(LINE, (4,), (2,)), True),
        (sliding_window_view(LINE, 3), True),
        (as_strided(LINE, (3, 2), (8, 12)), False),
        (as_strided(LINE, (4, 2), (8, 12)), False),
        (as_strided(LINE, (4, 3), (8, 12)), True),
        (as_strided(LINE, (10**6, 10**6), (0, 0)), True),
        (as_strided(LINE, (10**5, 10**5), (4, 8)), True),
    ],
)
def test_arrays_that_fold_onto_themselves(array, folded):
    assert arrays.overlaps_itself(view(array, "x")) is folded


def strange_views() -> dict[str, np.ndarray]:
    """(2, 5, 3, 4) arrays of all kinds of strides, the same values in each."""
    plain = np.random.default_rng(0).standard_normal((2, 5, 3, 4)).astype(np.float32)
    offset = np.zeros(plain.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(plain.shape)
    spaced = np.zeros((2, 10, 3, 12), np.float32)[:, ::2, :, ::3]
    views = {"plain": plain, "unaligned": offset, "spaced": spaced, "reversed": np.zeros_like(plain)[::-1, ::-1, ::-1, ::-1]}
    views["column-major"] = np.zeros_like(plain, order="F")
    views["swapped"] = np.zeros((2, 4, 3, 5), np.float32).transpose(0, 3, 2, 1)
    for array in views.values():
        array[...] = plain
    frozen = plain.copy()
    frozen.flags.writeable = False
    return {**views, "read-only": frozen, "subclass": plain.view(np.recarray)}


@pytest.mark.parametrize("name", strange_views())
def test_any_strides(name):
    x = strange_views()[name]
    before = x.copy()
    expected, expected_lse = cuflash.attention(*[np.array(x)] * 3, causal=True, return_lse=True, backend="reference")
    out, lse = cuflash.attention(x, x, x, causal=True, return_lse=True, backend="reference")
    assert type(out) is np.ndarray and np.array_equal(out, expected) and np.array_equal(lse, expected_lse)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("name", ["plain", "unaligned", "spaced", "reversed", "column-major", "swapped"])
def test_results_go_to_buffers_of_any_strides(name):
    q = strange_views()["plain"]
    expected, expected_lse = cuflash.attention(q, q, q, return_lse=True, backend="reference")
    out, lse = strange_views()[name], np.full((5, 3, 2), np.nan, np.float32).T
    out[...] = np.nan
    got = cuflash.attention(q, q, q, out=out, lse=lse, return_lse=True, backend="reference")
    assert got[0] is out and got[1] is lse
    assert np.array_equal(out, expected) and np.array_equal(lse, expected_lse)

"""The backward pass of the raw CUDA backend: which calls it takes, and what it launches with which memory. Needs no GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from case import BF16, F16, F32
from fake_cupy import FakeArray
from warm_calls import gpu  # noqa: F401  a fixture

import cuflash
from cuflash import device, jit, structs
from cuflash import problem as problems
from cuflash.backends import cuda, cuda_backward

H200 = device.KNOWN["H200"]


def made(rows=100, keys=200, d=64, dv=None, heads=2, heads_kv=2, dtype=F16):
    """dout, q, k, v, out and lse."""
    q, k, v = (np.zeros((2, *size), dtype) for size in ((rows, heads, d), (keys, heads_kv, d), (keys, heads_kv, dv or d)))
    out = np.zeros((*q.shape[:-1], dv or d), dtype)
    return out, q, k, v, out, np.zeros((2, heads, rows), np.float32)


TAKEN = {
    "plain": (made(), {}), "causal": (made(), {"causal": True}), "window": (made(), {"window": (64, 0)}),
    "lengths": (made(), {"kv_lengths": [200, 3], "kv_start": [1, 0]}), "groups": (made(heads=6), {}), "widest": (made(d=256), {}),
    "two sizes": (made(d=40, dv=128), {}), "bfloat16": (made(dtype=BF16), {}), "negative scale": (made(), {"scale": -1.0}),
    "deterministic": (made(), {"deterministic": True}),
    "broadcast dout": ((np.broadcast_to(np.ones((), F16), (2, 100, 2, 64)), *made()[1:]), {}),
}  # fmt: skip
LEFT = {
    "float32": (made(dtype=F32), {}, "float32 arrays"), "softcap": (made(), {"softcap": 3.0}, "softcap"),
    "sinks": (made(), {"sinks": np.zeros(2)}, "sinks"), "bias": (made(), {"bias": np.zeros((1, 1, 1, 200), F16)}, "bias"),
    "wide heads": (made(d=264), {}, "head sizes 264 and 264"), "odd heads": (made(d=36), {}, "head sizes 36 and 36"),
    "no keys": (made(keys=0), {}, "k has no elements"),
    "another dout": ((made()[0].astype(F32), *made()[1:]), {}, "dout: float32"),
    "strides": ((*made()[:2], made()[2][..., ::-1], *made()[3:]), {}, "k: columns -2 bytes apart"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_takes(name):
    given, options = TAKEN[name]
    assert cuda.decline(problems.build_backward(*given, **options), "fa3") is None


@pytest.mark.parametrize("name", LEFT)
def test_leaves_to_others(name):
    given, options, words = LEFT[name]
    assert words in cuda.decline(problems.build_backward(*given, **options), "fa3")
    assert "one of the kernels fa3, fa2" in cuda.decline(problems.build_backward(*made()), "fa1")


def test_sections_hold_all_pairs_in_equal_parts():
    for heads in (1, 7, 64):
        problem = problems.build_backward(*made(rows=4096, keys=4096, heads=heads, heads_kv=heads))
        section = cuda_backward.section(problem, H200)
        parts = -(-2 * heads // section)
        assert 1 <= section <= 2 * heads and section == -(-2 * heads // parts)


@pytest.fixture
def launches(gpu, monkeypatch):  # noqa: F811
    """What is launched on a GPU that is not there: nothing is computed."""
    made = []

    def function(source, ordinal, shared=0):
        def run(grid, block, args, shared_memory=0, stream=None):
            memory, size = args[0].tobytes(), structs.BACKWARD_PARAMS.itemsize
            given = np.frombuffer(memory[:size], structs.BACKWARD_PARAMS)[0] if "_fp32" not in source.name else None
            made.append(SimpleNamespace(name=source.name, grid=grid[0], threads=block[0], shared=shared_memory, params=given))

        return run

    monkeypatch.setattr(jit, "function", function)
    return made


def there(arrays):
    return [FakeArray((), host=np.array(a)) for a in arrays]


def test_launches(launches):
    """Three of them, one after the other, on the same workspace; gradients are where the last two write."""
    given = there(made(rows=300, keys=200, d=128))
    found = cuflash.attention_backward(*given, causal=True, kernel="fa3", backend="cuda")
    assert [x.name for x in launches] == [
        "backward_prepare_fp16_fp16_lanes16", "backward_fa3_fp16_d128_m64n128s2_causal", "backward_convert_fp16_m64d128",
    ]  # fmt: skip
    prepare, products, convert = launches
    places = 2 * 320  # rows of a head: five tiles of 64 for each of two entries
    assert (prepare.grid, products.grid, convert.grid) == (2 * places // 32, 2 * 2 * 2, 2 * 2 * places // 64)
    for x in launches:
        assert (x.params["dq"], x.params["dk"], x.params["dv"]) == tuple(g.data.ptr for g in (found.dq, found.dk, found.dv))
        assert x.params["places"] == places and x.params["scale"] == np.float32(128**-0.5)
        assert x.params["row_delta"] - x.params["row_lse"] == x.params["dq_sum"] - x.params["row_delta"] == 4 * 2 * places
    plan = cuda_backward.plan(problems.build_backward(*made(rows=300, keys=200, d=128), causal=True), "fa3", "cuda", H200)
    assert plan.workspace == 4 * 2 * places * (1 + 1 + 128)


def test_launches_of_fa2(launches):
    """dQ is summed up row after row; any strides."""
    given = made(rows=300, keys=200, d=40)
    given = (*given[:2], np.asfortranarray(given[2]), *given[3:])
    found = cuflash.attention_backward(*there(given), softcap=3.0, kernel="fa2", backend="cuda")
    prepare, products, convert = launches
    assert prepare.name == "backward_prepare_fp16_fp16_lanes8" and convert.name == "backward_convert_rows_fp16"
    assert products.name.startswith("backward_fa2_fp16_d64_m64n128w8s2_softcap") and products.grid == 2 * 2 * 2
    assert prepare.grid == convert.grid == 2 * 2 * 320 // 32 and products.params["dq_columns"] == 64
    assert products.params["dq"] == found.dq.data.ptr


def cupy_with(monkeypatch):
    """CuPy as far as gradients of a bias and of sinks need it."""
    functions = {
        "zeros": lambda shape, dtype: FakeArray((), host=np.zeros(shape, dtype)),
        "broadcast_to": lambda a, shape: a._view(np.broadcast_to(a.host, shape)),
    }
    for name, function in functions.items():
        monkeypatch.setattr(sys.modules["cupy"], name, function, raising=False)
    monkeypatch.setattr(FakeArray, "sum", lambda a, axis, dtype: a._view(a.host.sum(axis=axis, dtype=dtype)), raising=False)
    monkeypatch.setattr(FakeArray, "astype", lambda a, dtype: a._view(a.host.astype(dtype)), raising=False)


def test_launches_in_a_fixed_order(launches):
    """There are turns for each tile of 128 queries; tiles of 128 keys take them."""
    cuflash.attention_backward(*there(made(rows=300, keys=200)), deterministic=True, kernel="fa3", backend="cuda")
    assert launches[1].name == "backward_fa3_fp16_d64_m128n128s2_in_order" and launches[0].params["turn_keys"] == 128
    assert launches[0].params["dq_turns"] - launches[0].params["dq_sum"] == 4 * 2 * 2 * 384 * 64
    plan = cuda_backward.plan(problems.build_backward(*made(rows=300, keys=200), deterministic=True), "fa3", "cuda", H200)
    assert plan.workspace == 4 * 2 * 2 * 384 * (1 + 1 + 64) + 4 * (4 + 2 * 2 * 3 * 2)


def test_launches_of_fa2_in_a_fixed_order(launches):
    """dQ by tiles of queries, without sums between the launches."""
    found = cuflash.attention_backward(*there(made(rows=300, keys=200)), deterministic=True, kernel="fa2", backend="cuda")
    assert [x.name.split("_fp16")[0] for x in launches] == ["backward_prepare", "backward_fa2", "backward_fa2_dq"]
    assert "without_dq" in launches[1].name and all(x.params["dq_columns"] == 0 for x in launches)
    assert launches[2].grid == 2 * 2 * 3 and launches[2].params["dq"] == found.dq.data.ptr  # 320 places by tiles of 128 queries


def test_launches_of_fa2_with_a_bias_and_sinks(launches, monkeypatch):
    """A kernel that finds delta comes first; the gradient of the bias is broadcast as the bias is, and has its shape and dtype."""
    cupy_with(monkeypatch)
    bias = FakeArray((), host=np.zeros((2, 1, 200), F16))
    found = cuflash.attention_backward(*there(made(rows=300, keys=200)), bias=bias, sinks=np.zeros(2), backend="cuda")
    names = ["backward_prepare_fp16", "backward_fa2_dq_fp16", "backward_sinks", "backward_fa2_fp16", "backward_convert_rows"]
    assert all(x.name.startswith(name) for x, name in zip(launches, names, strict=True)) and "delta" in launches[1].name
    assert launches[2].grid == 2 and launches[2].params["dsinks"] == found.dsinks.data.ptr
    assert found.dbias.shape == bias.shape and found.dbias.dtype == F16 and found.dsinks.dtype == F32
    assert tuple(launches[3].params["dbias_stride"]) == (0, 0, 200, 1)  # of entries, rows, heads and columns


def test_blocks_are_persistent_where_tiles_are_of_one_length(launches):
    """But for a fixed order, where a block waits for what others have before it."""
    for options, blocks in (({}, 132), ({"causal": True}, 2 * 2 * 40), ({"deterministic": True}, 2 * 2 * 40)):
        cuflash.attention_backward(*there(made(rows=70, keys=5120, heads=2)), kernel="fa3", backend="cuda", **options)
        assert launches[-2].grid == blocks


def test_rows_of_no_sequence_are_0(launches):
    out, q, k, v, _, _ = (a[0] for a in made(rows=10, keys=10))
    given = there((out, q, k, v, out, np.zeros((2, 10), np.float32)))
    for g in cuflash.attention_varlen_backward(*given, [0, 3, 7], [0, 4, 9], kernel="fa3", backend="cuda"):
        if g is not None:
            end = 7 if launches[-1].params["dq"] == g.data.ptr else 9
            assert not g.host[end:].any() and np.isnan(g.host[:end].astype(np.float32)).all()


def test_launches_in_float32(launches, monkeypatch):
    """Rows, then keys; shares of the sinks' gradient are summed up by CuPy."""
    cupy_with(monkeypatch)
    given = there(made(rows=30, keys=20, d=40, dtype=F32))
    bias = FakeArray((), host=np.zeros((2, 2, 30, 20), F32))
    found = cuflash.attention_backward(*given, bias=bias, sinks=np.zeros(2), deterministic=True, kernel="fa2", backend="cuda")
    assert [x.name.split("_")[2] for x in launches] == ["rows", "keys"] and all("fp32" in x.name for x in launches)
    assert found.dbias.shape == bias.shape and found.dsinks.shape == (2,) and found.dsinks.dtype == F32
    assert found.dq.shape == given[1].shape and found.dk.shape == given[2].shape

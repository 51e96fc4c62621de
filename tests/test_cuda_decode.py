"""The raw decode kernel on a GPU, beyond the shared suites: tiles of other GPUs, captured graphs, rows that depend on nothing else."""

from __future__ import annotations

import compare
import numpy as np
import pytest
from calls import check, expected, present, run
from case import BF16, F16
from cases import BY_NAME, Target

import cuflash
from cuflash import device, planner
from cuflash.problem import build_attention

pytestmark = pytest.mark.gpu

DECODE = Target("cuda", "decode")
NAMES = tuple(
    name
    for name in (
        "tail-keys-65", "ratio-6", "ratio-71", "head-size-33", "head-size-72", "head-size-128", "head-size-256", "head-sizes-64-128",
        "lengths-causal", "left-padding", "softcap", "sinks", "alibi-per-batch-causal", "tree-lengths", "paged-3-BHSD", "decode-long",
        "decode-splits-7", "decode-empty-cache", "strides-reversed-BSHD-4axes",
    )
    if name in BY_NAME
)
OPTIONS = {"backend": "cuda", "kernel": "decode"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gpu", ["T4", "A100", "RTX 3090"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_tiles_of_other_gpus(gpu, name, dtype):
    """Forced on the GPU at hand, with the code paths of theirs."""
    info, case = device.KNOWN[gpu], BY_NAME[name]
    if dtype == BF16 and info.cc < (8, 0):
        pytest.skip("bfloat16 needs compute capability 8.0")
    if info.cc < (8, 0) and case.shape.d > 160:
        pytest.skip("no tile fits its shared memory")
    call = present(case, dtype)
    with device.pretend(info):
        run(call, DECODE)
    check(call, expected(case, dtype))


def inputs(cupy, batch: int, queries: int, keys: int, heads: int = 8, kv_heads: int = 2, d: int = 128):
    rng = np.random.default_rng(batch + keys)
    shapes = ((batch, queries, heads, d), (batch, keys, kv_heads, d), (batch, keys, kv_heads, d))
    return [cupy.asarray(rng.standard_normal(shape).astype(F16)) for shape in shapes]


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_graph_follows_lengths_on_the_device(queries, width):
    """Two calls in one graph, which share counters; each replay splits the keys anew, as a call with lengths from the host does."""
    import cupy

    q, k, v = inputs(cupy, 4, queries, 5000)
    lengths, outs = cupy.asarray([5000, 70, 1, 0], width), [cupy.empty_like(q) for _ in range(2)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cuflash.attention(q, k, v, kv_lengths=lengths, causal=True, out=outs[0], **OPTIONS)
        stream.synchronize()
        stream.begin_capture()
        for out in outs:
            cuflash.attention(q, k, v, kv_lengths=lengths, causal=True, out=out, **OPTIONS)
        graph = stream.end_capture()
        for numbers in ([5000, 70, 1, 0], [5, 5000, 4999, 64], [0, 0, 0, 3]):
            lengths[...] = cupy.asarray(numbers, width)
            for out in outs:
                out.fill(np.nan)
            graph.launch(stream)
            want = cuflash.attention(q, k, v, kv_lengths=numbers, causal=True, **OPTIONS)
            for out in outs:
                compare.assert_same_bits(out.get(), want.get(), "out")


def test_a_row_does_not_depend_on_its_neighbours():
    """Case 21, with 1, 33 and 200 others."""
    import cupy

    q, k, v = inputs(cupy, 201, 1, 1500)
    lengths = np.random.default_rng(0).integers(0, 1500, 201)
    lengths[0] = 1499
    alone = cuflash.attention(q[:1], k[:1, :1499], v[:1, :1499], batch_invariant=True, **OPTIONS).get()
    for others in (1, 33, 200):
        n = others + 1
        out = cuflash.attention(q[:n], k[:n], v[:n], kv_lengths=lengths[:n], batch_invariant=True, **OPTIONS)
        compare.assert_same_bits(out[:1].get(), alone, f"out with {others} others")


def test_lengths_of_which_the_work_is_uneven():
    import cupy

    q, k, v = inputs(cupy, 16, 1, 16384)
    lengths = np.geomspace(1, 16384, 16).astype(int)
    out, lse = cuflash.attention(q, k, v, kv_lengths=lengths, return_lse=True, **OPTIONS)
    want = compare.expect([build_attention(q.get(), k.get(), v.get(), kv_lengths=lengths)])
    compare.assert_close(out.get(), want.out[0], want.out_bound, "out")
    compare.assert_close(lse.get(), want.lse[0], want.lse_bound, "lse")


def test_what_kernel_auto_takes():
    import cupy

    q, k, v = inputs(cupy, 2, 1, 300)
    assert planner.choose(build_attention(q, k, v)).kernel == "decode"
    many = cupy.zeros((2, 65, 8, 128), F16)
    assert planner.choose(build_attention(many, k, v)).kernel == "fa2"
    assert planner.choose(build_attention(q.astype(np.float32), k.astype(np.float32), v.astype(np.float32))).kernel == "fa2"

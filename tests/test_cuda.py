"""The raw CUDA backend on a GPU, beyond the shared suites: plans of other GPUs, streams, graphs, memory."""

from __future__ import annotations

import threading

import compare
import devices
import numpy as np
import pytest
from calls import check, expected, present, run
from case import BF16, F16
from cases import BY_NAME, Target

import cuflash
from cuflash import device, jit
from cuflash.backends import naive_cuda
from cuflash.problem import build_attention, build_varlen

pytestmark = pytest.mark.gpu

FA1, FA2 = Target("cuda", "fa1"), Target("cuda", "fa2")
BEST = pytest.mark.parametrize("kernel", ["fa3", "fa2"] if devices.hopper() else ["fa2"])  # what kernel="auto" comes to
FORCED = ("T4", "A100", "RTX 3090", "RTX 4090")
NAMES = tuple(
    name
    for name in (
        "tail-square-causal-129", "tail-keys-65", "ratio-6", "head-size-33", "head-size-72", "head-size-128", "head-size-192",
        "head-size-256",
        "head-sizes-64-128", "causal-more-queries-65", "window3,5-130x65", "lengths-causal", "left-padding", "softcap", "sinks",
        "alibi-per-batch-causal", "scale-negative", "packed-slack", "strides-reversed-BSHD-4axes", "strides-offset-BSHD-4axes",
    )
)  # fmt: skip


@pytest.mark.parametrize("target", [FA1, FA2], ids=lambda target: target.kernel)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gpu", FORCED)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_plans_of_other_gpus(gpu, name, dtype, target):
    """Their tiles, shared memory and code paths (no cp.async and no bf16 on a T4), forced on the GPU at hand."""
    info = device.KNOWN[gpu]
    if dtype == BF16 and info.cc < (8, 0):
        pytest.skip("bfloat16 needs compute capability 8.0")
    case = BY_NAME[name]
    call = present(case, dtype)
    with device.pretend(info):
        run(call, target)
    check(call, expected(case, dtype))


def inputs(cupy, *shape):
    return [cupy.asarray(np.random.default_rng(n).standard_normal(shape).astype(F16)) for n in range(3)]


@pytest.mark.parametrize("kernel", ["fa3"] * devices.hopper() + ["fa2", "fa1", "naive"])
@pytest.mark.parametrize("form", ["current", "stream", "pointer"])
def test_case_53_it_runs_on_the_callers_stream(form, kernel):
    import cupy

    q, k, v = inputs(cupy, 2, 65, 4, 64)
    options = {"causal": True, "backend": "cuda", "kernel": kernel}
    want = cuflash.attention(q, k, v, **options).get()
    stream, busy = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1 << 28, np.float32)
    late = cupy.full_like(q, np.nan)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(4):
            busy += 1
        late[...] = q
        if form == "current":
            out = cuflash.attention(late, k, v, **options)
    if form != "current":
        out = cuflash.attention(late, k, v, stream=stream if form == "stream" else stream.ptr, **options)
    with stream:
        result = out + 0
    stream.synchronize()
    compare.assert_same_bits(result.get(), want, "out")


@BEST
def test_a_warm_call_is_captured_and_a_cold_one_refuses(kernel):
    import cupy

    q, k, v = inputs(cupy, 1, 130, 2, 64)
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)

    def call(**options):
        cuflash.attention(q, k, v, backend="cuda", kernel=kernel, out=out, **options)

    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        call()
        with pytest.raises(jit.JitError, match="before capturing"):
            call(softcap=3.0, causal=True, scale=0.123)
        graph = stream.end_capture()
        q += 1
        out.fill(np.nan)
        graph.launch(stream)
    stream.synchronize()
    want = compare.expect([build_attention(q.get(), k.get(), v.get())])
    compare.assert_close(out.get(), want.out[0], want.out_bound, "out")


def test_naive_is_refused_with_the_bytes_it_wanted_and_flash_runs():
    import cupy

    n, free = 32768, cupy.cuda.runtime.memGetInfo()[0]
    heads = max(32, -(-free // (4 * n * n)) + 1)
    q = cupy.zeros((1, n, heads, 16), F16)
    wanted = 4 * heads * n * n
    assert naive_cuda.workspace(build_attention(q[:, :, :32], q[:, :, :32], q[:, :, :32])) == 128 << 30
    with pytest.raises(cuflash.NoBackendError, match=f"{wanted:,} bytes"):
        cuflash.attention(q, q, q, backend="cuda", kernel="naive")
    out = cuflash.attention(q, q, q, kernel="fa2", backend="cuda")
    assert not out.any()


@BEST
def test_other_shapes_compile_nothing(kernel):
    import cupy

    q, k, v = inputs(cupy, 3, 70, 4, 64)
    cuflash.attention(q, k, v, backend="cuda", kernel=kernel)
    before = len(jit._functions)
    for n in range(1, 71):
        cuflash.attention(q[: n % 3 + 1, :n], k[: n % 3 + 1], v[: n % 3 + 1], backend="cuda", kernel=kernel)
    assert len(jit._functions) == before


@pytest.mark.parametrize(
    ("backend", "kernel"), [*[("cuda", "fa3")] * devices.hopper(), ("cuda", "fa2"), ("cuda", "fa1"), ("numba-cuda", "fa1")]
)
def test_what_cannot_be_replayed_is_not_captured(backend, kernel):
    """Lengths from the host are copied for the call: a replay would read whatever lies there then."""
    import cupy

    q, k, v = inputs(cupy, 1, 130, 2, 64)
    options = {"kv_lengths": [100], "backend": backend, "kernel": kernel, "out": cupy.empty_like(q)}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cuflash.attention(q, k, v, **options)
        stream.synchronize()
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="cannot be captured"):
            cuflash.attention(q, k, v, **options)
        stream.end_capture()


@BEST
@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_a_graph_follows_lengths_on_the_device(width, kernel):
    import cupy

    q, k, v = inputs(cupy, 3, 130, 2, 64)
    lengths, start, out = cupy.asarray([130, 70, 1], width), cupy.asarray([0, 5, 0], width), cupy.empty_like(q)
    options = {"causal": True, "backend": "cuda", "kernel": kernel}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cuflash.attention(q, k, v, kv_lengths=lengths, kv_start=start, out=out, **options)
        stream.synchronize()
        stream.begin_capture()
        cuflash.attention(q, k, v, kv_lengths=lengths, kv_start=start, out=out, **options)
        graph = stream.end_capture()
        for numbers in ([130, 70, 1], [5, 130, 0], [64, 65, 129]):
            lengths[...] = cupy.asarray(numbers, width)
            out.fill(np.nan)
            graph.launch(stream)
            first = [min(n, 5) if i == 1 else 0 for i, n in enumerate(numbers)]
            want = cuflash.attention(q, k, v, kv_lengths=numbers, kv_start=first, **options)
            compare.assert_same_bits(out.get(), want.get(), "out")


@BEST
@pytest.mark.parametrize("longest", [None, 70])
@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_packed_sequences_of_which_only_the_device_knows_the_lengths(width, longest, kernel):
    import cupy

    q, k, v = inputs(cupy, 200, 4, 64)
    for cut in ([0, 70, 70, 131, 190], [0, 1, 2, 3, 4], [0, 64, 128, 192, 200], [0, 0, 0, 0, 0]):
        cu = cupy.asarray(cut, width)
        out, lse = cupy.full_like(q, np.nan), cupy.full((4, 200), np.nan, np.float32)
        for _ in range(2):  # cold, warm
            cuflash.attention_varlen(
                q, k, v, cu, cu, max_seqlen_q=longest, causal=True, out=out, lse=lse, backend="cuda", kernel=kernel,
            )
        want = compare.expect([build_varlen(q.get(), k.get(), v.get(), cut, cut, causal=True)])
        compare.assert_close(out.get(), want.out[0], want.out_bound, "out")
        compare.assert_close(lse.get(), want.lse[0], want.lse_bound, "lse")


@BEST
def test_threads_on_streams_of_their_own_do_not_mix(kernel):
    import cupy

    options = {"causal": True, "backend": "cuda", "kernel": kernel}
    work = [[x * (t + 1) for x in inputs(cupy, 1, 65, 2, 64)] for t in range(4)]
    want = [cuflash.attention(*a, **options).get() for a in work]
    cupy.cuda.Device().synchronize()
    wrong: list[int] = []

    def loop(t: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            outs = [cuflash.attention(*work[t], **options) for _ in range(200)]
            stream.synchronize()
        wrong.extend(t for out in outs if not np.array_equal(out.get(), want[t]))

    threads = [threading.Thread(target=loop, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

"""The backward kernels of the raw CUDA backend on a GPU, beyond the shared suites."""

from __future__ import annotations

import compare
import devices
import numpy as np
import pytest
from backward_cases import IDS, IN_ORDER, IN_ORDER_IDS, RUNS
from case import BF16, F16
from cases import Target
from test_gradients import differentiate, gradient_parts, run_backward

import cuflash
from cuflash import device
from cuflash.backends import cuda_backward
from cuflash.problem import build_backward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not devices.hopper(), reason="needs a GPU of compute capability 9.0")]
FA3 = Target("cuda", "fa3")


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=IDS)
def test_gradients(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), IN_ORDER, ids=IN_ORDER_IDS)
def test_gradients_in_a_fixed_order(case, dtype):
    check(case, dtype, deterministic=True)


def check(case, dtype, **options):
    given = differentiate(case, dtype)
    want = compare.expect_gradients(given.problems)
    found = run_backward(given, FA3, **options)
    for name, exact in want.parts.items():
        for part, one in zip(gradient_parts(name, getattr(found, name), case), exact, strict=True):
            compare.assert_close(part, one, want.bounds[name], name)


def there(*arrays):
    """Copies on the GPU."""
    import cupy

    return [cupy.asarray(a.view(np.uint16)).view(a.dtype) if a.dtype == BF16 else cupy.asarray(a) for a in arrays]


def operands(b, sq, sk, h, d, dtype):
    shapes = ((b, sq, h, d), (b, sk, h, d), (b, sk, h, d), (b, sq, h, d))
    return there(*(np.random.default_rng(n).standard_normal(s).astype(dtype) for n, s in enumerate(shapes)))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_size(d, dtype):
    """Two runs agree bit for bit in dk and dv."""
    q, k, v, dout = operands(2, 333, 270, 2, d, dtype)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    first, again = (
        cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, kernel="fa3", backend="cuda") for _ in range(2)
    )
    want = compare.expect_gradients([build_backward(*(a.get() for a in (dout, q, k, v, out, lse)), causal=True)])
    for name in ("dq", "dk", "dv"):
        compare.assert_close(getattr(first, name).get(), want.parts[name][0], want.bounds[name], name)
    for name in ("dk", "dv"):
        compare.assert_same_bits(getattr(first, name).get(), getattr(again, name).get(), name)


def test_lengths_on_the_device():
    """Packed sequences of which only the GPU knows the lengths: the gradients of those that the host knows."""
    import cupy

    cu = np.array([0, 3, 3, 203, 300])
    q, k, v, dout = (a[0] for a in operands(1, 310, 310, 2, 64, BF16))
    out, lse = cuflash.attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
    kinds = {"causal": True, "kernel": "fa3", "backend": "cuda"}
    want = cuflash.attention_varlen_backward(dout, q, k, v, out, lse, cu, cu, **kinds)
    on_device = cupy.asarray(cu)
    found = cuflash.attention_varlen_backward(dout, q, k, v, out, lse, on_device, on_device, **kinds)
    for name in ("dk", "dv"):
        compare.assert_same_bits(getattr(found, name).get(), getattr(want, name).get(), name)
    dq = want.dq.get().astype(np.float64)
    compare.assert_close(found.dq.get(), dq, 2 * compare.eps(BF16) * np.abs(dq).max(), "dq")


def test_one_number_for_all_of_dout():
    """Broadcast, as the gradient of a sum is: it is copied."""
    import cupy

    q, k, v, _ = operands(2, 130, 130, 2, 64, BF16)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    one = there(np.ones((1, 1, 1, 1), BF16))[0]
    found, want = (
        cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, kernel="fa3", backend="cuda")
        for dout in (cupy.broadcast_to(one, out.shape), cupy.ascontiguousarray(cupy.broadcast_to(one, out.shape)))
    )
    for name in ("dk", "dv"):
        compare.assert_same_bits(getattr(found, name).get(), getattr(want, name).get(), name)


def test_gradients_lie_in_memory_as_their_arrays():
    q, k, v, dout = (a.transpose(0, 2, 1, 3) for a in operands(2, 64, 64, 3, 64, F16))  # as (B, H, S, D) in memory
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    found = cuflash.attention_backward(dout, q, k, v, out, lse, kernel="fa3", backend="cuda")
    assert [g.strides for g in (found.dq, found.dk, found.dv)] == [a.strides for a in (q, k, v)]


@pytest.mark.parametrize(("d", "causal"), [(64, True), (128, True), (256, True), (128, False)])
@pytest.mark.parametrize("kernel", ["fa3", "fa2"])
def test_fifty_runs_give_the_same_bits(kernel, d, causal):
    """Of groups of three heads, while the GPU has other work that keeps blocks from starting together."""
    import cupy

    q, k, v, dout = operands(2, 1000, 1100, 6, d, BF16)
    k, v = k[:, :, :2], v[:, :, :2]
    options = {"causal": causal, "kernel": kernel, "backend": "cuda", "deterministic": True}
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    want = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    busy, square = cupy.cuda.Stream(non_blocking=True), cupy.ones((2048, 2048), np.float32)
    for _ in range(50):
        with busy:
            square @ square
        found = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
        for name in ("dq", "dk", "dv"):
            compare.assert_same_bits(getattr(found, name).get(), getattr(want, name).get(), name)
    loose = cuflash.attention_backward(dout, q, k, v, out, lse, **{**options, "deterministic": False})
    dq = want.dq.get().astype(np.float64)
    compare.assert_close(loose.dq.get(), dq, 2 * compare.eps(BF16) * np.abs(dq).max(), "dq")


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_what_the_plan_says_and_grows_with_the_rows(deterministic):
    import cupy

    pool, extra = cupy.get_default_memory_pool(), []
    options = {"causal": True, "kernel": "fa3", "deterministic": deterministic}
    for rows in (4096, 8192):
        q, k, v, dout = operands(1, rows, rows, 8, 128, BF16)
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        for _ in range(2):  # the first call compiles and loads
            pool.free_all_blocks()
            before = pool.total_bytes()
            found = cuflash.attention_backward(dout, q, k, v, out, lse, backend="cuda", **options)
            used = pool.total_bytes() - before - sum(g.nbytes for g in (found.dq, found.dk, found.dv))
            del found
        problem = build_backward(*(np.zeros(a.shape, a.dtype) for a in (dout, q, k, v, out, lse)), **options)
        planned = cuda_backward.plan(problem, "fa3", "cuda", device.probe(q.device.id)).workspace
        assert planned <= used <= planned + 2**21, (planned, used)  # the pool hands out large pieces in units of 2 MiB
        extra.append(planned)
    assert extra[1] <= 2 * extra[0]

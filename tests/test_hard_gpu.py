"""Hard cases that need a GPU: used memory of its pool, several devices, index arrays that lie there. Numbers are the cases'."""

from __future__ import annotations

import compare
import cuflash
import devices
import numpy as np
import pytest
from case import BF16, F16, F32, F64
from cases import CUDA, NUMBA_CUDA, Target
from cuflash.problem import build_attention, build_varlen

pytestmark = pytest.mark.gpu
GPU_TARGETS = (*(t for t in CUDA if t.kernel != "fa3" or devices.hopper()), *NUMBA_CUDA)
every_gpu_kernel = pytest.mark.parametrize("target", GPU_TARGETS, ids=lambda t: t.name)
takes_device_indices = [t for t in GPU_TARGETS if t.name in ("cuda/fa2", "cuda/fa3")]
TAKES_DEVICE_INDICES = pytest.mark.parametrize("target", takes_device_indices, ids=lambda t: t.name)


def named(target: Target, **options):
    return {"kernel": target.kernel, "backend": target.backend} | options


def normal(shape, dtype):
    return [np.random.default_rng(n).standard_normal(shape).astype(dtype) for n in range(3)]


def spoil_pool(filler: float) -> None:
    """Leave memory in CuPy's pool that holds nothing but this number, in blocks of every size that a small call asks for."""
    import cupy

    blocks = [cupy.full(512 * n, filler, np.float32) for n in (1, 1, 1, 1, 2, 2, 4, 8, 16, 64)]
    cupy.cuda.Device().synchronize()
    del blocks


@every_gpu_kernel
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
@pytest.mark.parametrize("filler", [np.nan, np.inf])
def test_case_7_results_in_used_memory_of_a_gpu(filler, dtype, target):
    """Rows without keys are 0, bit for bit, also where the call allocates its results and workspace itself."""
    import cupy

    if target.kernel in ("fa1", "decode", "fa3") and target.backend == "cuda" and dtype != F16:
        pytest.skip("declined, as listed: 16-bit arrays only")
    q, k, v = (cupy.asarray(a) for a in normal((1, 4, 2, 16), dtype))
    want = compare.expect([build_attention(*(a.get() for a in (q, k[:, :2], v[:, :2])), causal=True)])
    for _ in range(5):
        spoil_pool(filler)
        out, lse = cuflash.attention(q, k[:, :2], v[:, :2], return_lse=True, **named(target, causal=True))
        compare.assert_close(out.get(), want.out[0], want.out_bound, "out")
        compare.assert_close(lse.get(), want.lse[0], want.lse_bound, "lse")
        assert not out[:, :2].view(f"u{dtype.itemsize}").any(), "rows without keys must be +0, bit for bit"
        none = named(target, **{"kernel": "auto"} if target.kernel == "fa3" else {})  # declined, as listed: there are no boxes of nothing
        out, lse = cuflash.attention(q, k[:, :0], v[:, :0], return_lse=True, **none)
        assert not out.view(f"u{dtype.itemsize}").any() and (lse == -np.inf).all()
        if target.name == "cuda/decode":  # has no packed sequences
            continue
        cu = [0, 1]
        out, lse = cuflash.attention_varlen(q[0], k[0], v[0], cu, cu, return_lse=True, **named(target))
        assert not out[1:].view(f"u{dtype.itemsize}").any() and (lse[:, 1:] == -np.inf).all()


@TAKES_DEVICE_INDICES
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("longest", [None, 130])
@pytest.mark.parametrize("lengths", [(3,), (70, 1, 130), (0, 0, 130), (1,) * 40])
def test_case_24_nothing_is_read_behind_cu_seqlens_on_the_device(lengths, longest, width, dtype, target):
    """cu_seqlens as slices of longer arrays, with numbers behind them that would show."""
    import cupy

    if target.kernel == "fa3" and dtype in (F32, F64):
        pytest.skip("declined, as listed: 16-bit arrays only")
    cut = [0, *np.cumsum(lengths).tolist()]
    cu = cupy.asarray([*cut, 10**9, -5, 3], width)[: len(cut)]
    q, k, v = normal((cut[-1] + 3, 2, 16), dtype)
    want = compare.expect([build_varlen(q, k, v, cut, cut, causal=True)])
    out, lse = cuflash.attention_varlen(
        *map(cupy.asarray, (q, k, v)), cu, cu, max_seqlen_q=longest, max_seqlen_k=longest, return_lse=True, **named(target, causal=True)
    )
    compare.assert_close(out.get(), want.out[0], want.out_bound, "out")
    compare.assert_close(lse.get(), want.lse[0], want.lse_bound, "lse")


@every_gpu_kernel
def test_cases_54_and_55_arrays_on_another_device(target):
    """Right on the device of the arrays, whichever is current and whichever compiled first; the current one stays current."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    arrays = normal((2, 65, 2, 32), F16)
    want = compare.expect([build_attention(*arrays, causal=True)])
    for current, place in ((0, 1), (1, 1), (1, 0), (0, 0), (0, 1)):
        with cupy.cuda.Device(place):
            there = [cupy.asarray(a) for a in arrays]
        with cupy.cuda.Device(current):
            out, lse = cuflash.attention(*there, return_lse=True, **named(target, causal=True))
            assert cupy.cuda.runtime.getDevice() == current
        assert out.device.id == lse.device.id == place
        with cupy.cuda.Device(place):
            compare.assert_close(out.get(), want.out[0], want.out_bound, "out")
            compare.assert_close(lse.get(), want.lse[0], want.lse_bound, "lse")
    with cupy.cuda.Device(0):
        elsewhere = cupy.asarray(arrays[1])
    with pytest.raises(ValueError, match="k: .*GPU 0.*q is on GPU 1|k: in .*GPU 0"):
        with cupy.cuda.Device(1):
            cuflash.attention(cupy.asarray(arrays[0]), elsewhere, cupy.asarray(arrays[2]), **named(target))

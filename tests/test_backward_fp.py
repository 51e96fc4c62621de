"""What backward_fp declines, its tiles, and that its kernels compile within their registers. Needs no GPU; NVRTC for the last."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from case import F16, F32, F64
from cuflash import device, jit, tiles_backward_fp
from cuflash import problem as problems
from cuflash.backends import cuda, cuda_backward_fp
from cuflash.tiles import HEAD_CLASSES
from cuflash.types import Problem

ONE_EACH = ("sm_75", "sm_86", "sm_89", "sm_100", "sm_120")  # all instances for the others: test_kernels_compile.py
REGISTERS_SM = 65536


def posed(dtype: np.dtype = F32, d: int = 16, dout: np.dtype | None = None, **options: Any) -> Problem:
    q = np.zeros((2, 6, 4, d), dtype)
    lse = np.zeros((2, 4, 6), F64 if dtype == F64 else F32)
    return problems.build_backward(q.astype(dout or dtype), q, q[:, :, :2], q[:, :, :2], q, lse, **options)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (posed(F16), "float16 arrays"),
        (posed(dout=F16), "dout: float16"),
        (posed(score="sqdist"), "score='sqdist'"),
        (posed(score_mod=lambda s, b, h, i, j: s), "score_mod"),
        (posed(mask_mod=lambda b, h, i, j: i >= j), "mask_mod"),
        (posed(bias=np.zeros((1, 4, 6, 6), F32), deterministic=True), "with a broadcast bias"),
        (posed(d=300), "head sizes 300 and 300"),
        (posed(softcap=3e38), "softcap"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_declined(problem, words):
    assert words in (cuda_backward_fp.decline(problem) or "")


def test_what_is_taken():
    options = {"bias": np.zeros((2, 4, 6, 6), F32), "mask": np.ones((6, 6), bool), "sinks": np.zeros(4), "softcap": 3.0, "window": (3, 1)}
    for dtype in (F32, F64):
        problem = posed(dtype, alibi_slopes=np.ones(4), kv_lengths=np.array([6, 3]), **options)
        assert cuda_backward_fp.decline(problem) is None
        assert cuda_backward_fp.workspace(problem) == 4 * 2 * 4 * 6 * dtype.itemsize
        for info in device.KNOWN.values():
            assert cuda_backward_fp.why_not_on(problem, info) is None


@pytest.mark.parametrize("info", device.KNOWN.values(), ids=lambda info: info.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tiles_fit(info, dtype):
    for d in HEAD_CLASSES:
        found = tiles_backward_fp.backward_fp(dtype, d, d, info)
        if found is None:
            assert dtype == "float64" and d > 160 and info.cc < (8, 0)
            continue
        for tile, of_keys in zip(found[1:], (False, True), strict=True):
            need = tile.shared_memory(8 if dtype == "float64" else 4, d, d, of_keys)
            assert need <= info.shared_memory_block and tile.resident * need <= info.shared_memory_sm
            assert tile.m % (16 * tile.warps) == 0 and tile.columns % 32 == 0 and tile.n % (16 if found[0] == "Dmma" else 8) == 0


def test_too_little_shared_memory_is_told():
    problem = posed(F64, 256)
    assert "no tile for head sizes 256 and 256" in (cuda_backward_fp.why_not_on(problem, device.KNOWN["T4"]) or "")


def test_names_are_distinct():
    names = [i.name(of_keys) for i in cuda_backward_fp.common(device.KNOWN["H200"]) for of_keys in (False, True)]
    assert len(set(names)) == len(names)
    assert any(re.fullmatch(r"backward_fp_keys_fp32_simt_d64_m\d+n\d+w\ds\d_causal", name) for name in names)


def check(arch: str, chosen: cuda_backward_fp.Instance) -> None:
    """No spills, no warnings, and registers for as many resident blocks as the tile table says."""
    for source, tile in ((chosen.source_of_rows, chosen.rows), (chosen.source_of_keys, chosen.keys)):
        text = jit.compile_cubin(source, arch)[1]
        what = f"{source.name} for {arch}:\n{text}"
        assert re.search("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", text) and "warning" not in text.lower(), what
        registers = -(-int(re.search(r"Used (\d+) registers", text)[1]) * 32 // 256) * 256
        assert registers * tile.warps * tile.resident <= REGISTERS_SM, what


compiles = pytest.mark.skipif(jit.why_unusable() is not None, reason=f"kernels cannot be compiled here: {jit.why_unusable()}")


@compiles
@pytest.mark.parametrize("arch", ONE_EACH)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_instance_for_every_gpu(arch, dtype):
    """The one with everything, of the head size that leaves the fewest registers."""
    of_dtype = [i for i in cuda_backward_fp.common(cuda.representative(arch)) if i.dtype == dtype and i.d == 128]
    check(arch, max(of_dtype, key=lambda i: len(i.name(True))))

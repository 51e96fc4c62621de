"""Packed sequences whose lengths only the device knows, on the emulated kernels: a flat grid, and the rows that nobody owns."""

from __future__ import annotations

import compare
import devices
import numpy as np
import pytest
from case import F16, F32
from cuflash import arrays, device
from cuflash import problem as problems
from cuflash.types import INDICES
from emulator import emulate

reason = "the cases are others in Numba's simulator" if devices.SIMULATED else emulate.why_unusable()
if reason is not None:
    pytest.skip(f"kernels cannot be emulated here: {reason}", allow_module_level=True)

H200, T4 = device.KNOWN["H200"], device.KNOWN["T4"]
TOTAL = 420


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    made = emulate.Emulator(tmp_path_factory.mktemp("emulated"))
    yield made
    made.close()


def packed(cu_q, cu_k, longest, causal, d=16):
    """The problem with lengths on the host and, as the kernel gets it, with views of them; and its poisoned results."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((n, h, d)).astype(F16) for n, h in ((TOTAL, 2), (TOTAL, 1), (TOTAL, 1)))
    plain = problems.build_varlen(q, k, v, cu_q, cu_k, causal=causal)
    out, lse = np.full((TOTAL, 2, d), np.nan, F16), np.full((2, TOTAL), np.nan, F32)
    problem = problems.with_outputs(plain, out, lse, True, "BSHD", 3)[0]
    return plain, problem.replace(seqlen_q=TOTAL if longest is None else longest, seqlen_k=TOTAL), out, lse


def on_device(problem, width, **numbers):
    values = {name: np.array(numbers.get(name, getattr(problem, name)), width) for name in INDICES if getattr(problem, name) is not None}
    return problem.replace(**{name: arrays.view(x, name) for name, x in values.items()})


CUTS = {
    "ragged": ([0, 1, 130, 130, 131, 260, 388], [0, 129, 130, 140, 141, 300, 420]),
    "one long": ([0, 0, 0, 400, 400], [0, 3, 3, 420, 420]),
    "whole tiles": ([0, 128, 256, 384], [0, 128, 256, 384]),
    "empty": ([0, 0, 0], [0, 0, 0]),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["flat", "max_seqlen"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("gpu", "width"), [(H200, np.int32), (T4, np.int64)], ids=["H200-int32", "T4-int64"])
def test_all_rows_are_written(emulator, gpu, width, cut, known, causal):
    cu_q, cu_k = CUTS[cut]
    plain, problem, out, lse = packed(cu_q, cu_k, max(1, int(np.diff(cu_q).max())) if known else None, causal)
    want = compare.expect([plain])
    problem = on_device(problem, width)
    assert emulate.chosen(problem, gpu).flat is not known
    for side in ("end", "start"):
        out[...], lse[...] = np.nan, np.nan
        emulator.run(problem, gpu, side=side)
        compare.assert_close(out, want.out[0], want.out_bound, "out")
        compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


@pytest.mark.parametrize("known", [False, True], ids=["flat", "max_seqlen"])
def test_rows_beyond_a_small_max_seqlen_are_cleared_or_right(emulator, known):
    cu = [0, 400, 410]
    plain, problem, out, lse = packed(cu, cu, 100 if known else None, False)
    problem = on_device(problem, np.int32)
    emulator.run(problem, H200)
    want = compare.expect([plain]).out[0]
    rows = emulate.chosen(problem, H200).tile.m
    left = np.arange(TOTAL)
    left = (left >= rows) & (left < 400) if known else np.zeros(TOTAL, bool)
    assert not out[left].any() and np.isneginf(lse[:, left]).all()
    compare.assert_close(out[~left], want[~left], compare.expect([plain]).out_bound, "out")


@pytest.mark.parametrize("known", [False, True], ids=["flat", "max_seqlen"])
@pytest.mark.parametrize(
    "cu_q", [[5, 100, 420], [0, 300, 100], [0, 2**30, 420], [-7, -9, -11], [0, 100, 2**31 - 1], [420, 0, 420], [2**31 - 1] * 3], ids=str,
)
def test_whatever_they_say_the_kernel_stays_inside_the_arrays(emulator, cu_q, known):
    _, problem, _, _ = packed([0, 210, 420], [0, 210, 420], 210 if known else None, True)
    problem = on_device(problem, np.int32, cu_seqlens_q=cu_q, cu_seqlens_k=cu_q[::-1])
    for side in ("end", "start"):
        emulator.run(problem, H200, side=side)


@pytest.mark.parametrize("known", [False, True], ids=["flat", "max_seqlen"])
def test_a_sequence_that_begins_behind_the_end_disturbs_no_other(emulator, known):
    plain, problem, out, _ = packed([0, 0, 420], [0, 0, 420], 420 if known else None, True)
    if known:
        problem = problem.replace(seqlen_q=419)  # so that it is not taken for "unknown"; the tiles are the same
    emulator.run(on_device(problem, np.int32, cu_seqlens_q=[420, 0, 420], cu_seqlens_k=[420, 0, 420]), H200)
    want = compare.expect([plain])
    compare.assert_close(out, want.out[0], want.out_bound, "out")

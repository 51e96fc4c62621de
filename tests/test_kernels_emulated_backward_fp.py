"""backward_fp on the host, thread by thread: gradients within the bounds of the contract, and nothing that a GPU must not do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import compare
import devices
import numpy as np
import pytest
from case import F32, F64, Case, alibi, bias, case, causal, fixed, mask, sinks, upper_left
from cases import DIFFERENTIATED
from cuflash import device, reference, tiles_backward_fp
from cuflash import problem as problems
from cuflash.backends import cuda_backward_fp
from cuflash.tiles import HEAD_CLASSES
from cuflash.types import Gradients, Problem
from emulator import backward_fp, emulate
from test_gradients import differentiate, gradient_parts

reason = "the cases are others in Numba's simulator" if devices.SIMULATED else emulate.why_unusable()
if reason is not None:
    pytest.skip(f"kernels cannot be emulated here: {reason}", allow_module_level=True)

A100, H200, T4, RTX = (device.KNOWN[name] for name in ("A100", "H200", "T4", "RTX 4090"))
# Every kind of arithmetic: multiply-adds with and without asynchronous copies, float64 tensor cores of two generations.
PLACES = ((F32, H200), (F64, H200), (F32, T4), (F64, A100), (F32, RTX), (F64, T4))

FURTHER = (
    case("plain-128", "1,70,75,2,1,128", causal),
    case("head-sizes-7-40", "2,20,41,4,2,7,40", causal),
    case("head-sizes-40-7", "2,20,41,4,2,40,7"),
    case("head-sizes-256-20", "1,9,33,1,1,256,20"),
    case("head-sizes-20-256", "1,33,9,1,1,20,256", causal),
    case("softcap-alibi-window-mask", "2,40,70,4,2,24", fixed(softcap=3.0, window=(30, 5)), alibi("B Hq"), mask(visible=0.8)),
    case("softcap-saturated", "1,20,30,1,1,16", fixed(softcap=0.5, scale=4.0)),
    case("bias-pairs-of-columns", "1,33,72,2,1,16", bias(hidden=0.1), mask(visible=0.9), causal),
    case("bias-softcap-alibi-sinks", "2,20,35,2,2,16", bias(), fixed(softcap=2.0), alibi(), sinks),
    case("sinks-window", "2,40,50,4,2,16", sinks, fixed(window=(10, 3))),
    case("upper-left-window-lengths", "3,40,60,2,1,16", upper_left, fixed(window=(20, 7)), kv_lengths=(60, 20, 0), kv_start=(3, 0, 0)),
    case("scale-large", "1,30,70,2,1,16", fixed(scale=20.0)),
)


class Run(NamedTuple):
    case: Case
    dtype: np.dtype
    gpu: device.DeviceInfo

    @property
    def name(self) -> str:
        return f"{self.case.name}-{self.dtype.name}-{self.gpu.name}"


def problem_of(given: Any) -> Problem:
    """The call of a case, as the backend gets it."""
    call = given.call
    options = {**call.options, "dlse": given.dlse}
    if call.case.packed is not None:
        options["varlen"] = (*call.args[3:5], options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None))
    return problems.build_backward(given.dout, *call.args[:3], call.out, call.lse, **options)


def tile_runs() -> Iterator[Run]:
    """Each tile that some GPU gets: several tiles of rows and of keys, the last with few of them."""
    seen = set()
    for (dtype, gpu), d in ((place, d) for place in (*PLACES, (F64, RTX)) for d in HEAD_CLASSES):
        found = tiles_backward_fp.backward_fp(dtype.name, d, d, gpu)
        if found is None or (key := (dtype, d, gpu.cc < (8, 0), *(t._replace(resident=0) for t in found[1:]))) in seen:
            continue
        seen.add(key)
        rows, keys = (max(t.m for t in found[1:]) + n for n in (5, 9))
        yield Run(case(f"tile-{d}", f"1,{rows},{keys},1,1,{d - 3 * (len(seen) % 2)}", causal), dtype, gpu)


def case_runs() -> Iterator[Run]:
    """All cases of the gradients' suite that the kernels take, each in one kind of arithmetic for float32 and one for float64."""
    for n, c in enumerate((*FURTHER, *DIFFERENTIATED)):
        for dtype in (F32, F64):
            if dtype in c.dtypes and cuda_backward_fp.decline(problem_of(differentiate(c, dtype))) is None:
                yield Run(c, dtype, [gpu for t, gpu in PLACES if t == dtype][n % 3])


RUNS = {run.name: run for runs in (tile_runs(), case_runs()) for run in runs}


@pytest.fixture(scope="module")
def emulator(request, tmp_path_factory):
    def prepare(made, run):
        chosen = cuda_backward_fp.instance(problem_of(differentiate(run.case, run.dtype)), run.gpu)
        backward_fp.prepare(made, chosen, run.gpu)

    with emulate.compiling_ahead(request, tmp_path_factory, RUNS, prepare) as made:
        yield made


@pytest.mark.parametrize("name", RUNS)
def test_gradients_and_accesses(emulator, name):
    """The ends of all arrays at forbidden pages, or for every other run the beginnings."""
    run = RUNS[name]
    given = differentiate(run.case, run.dtype)
    problem = problem_of(given)
    assert cuda_backward_fp.why_not_on(problem, run.gpu) is None
    found = backward_fp.run(emulator, problem, run.gpu, side="start" if len(name) % 2 else "end")
    layout, ndim = given.call.options["layout"], np.ndim(given.call.args[0])
    dbias = found.dbias if problem.bias is None else found.dbias.reshape(problem.bias_shape)
    found = problems.user_gradients(Gradients(*list(found)[:3], dbias, found.dsinks), problem, layout, ndim)
    want = compare.expect_gradients(given.problems)
    for name, parts in want.parts.items():
        if name == "dsinks":  # one for all sequences
            parts = [np.sum(parts, axis=0)]
        for part, exact in zip(gradient_parts(name, getattr(found, name), run.case), parts, strict=True):
            compare.assert_close(part, exact, want.bounds[name], name)

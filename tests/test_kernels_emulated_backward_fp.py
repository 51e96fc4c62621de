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
from cuflash import arrays as views
from cuflash import device, reference, tiles_backward_fp
from cuflash import problem as problems
from cuflash.backends import cuda_backward_fp
from cuflash.tiles import HEAD_CLASSES
from cuflash.types import Gradients, Problem
from emulator import backward_fp, emulate
from test_gradients import differentiate, gradient_parts
from test_indices_emulated import on_device
from test_kernels_emulated_backward_fa2 import packed_with_a_bias

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
    *(
        case(f"bias-of-{axes.replace(' ', '-')}", "2,20,41,4,2,16", bias(axes), causal)
        for axes in ("Hq Sq Sk", "1 1 Sk", "B 1 Sq Sk", "Hq Sq 1")
    ),
    case("bias-of-all", "1,20,12,2,1,16", bias("1 1 1 1"), causal),
    case("bias-float32-shared", "2,20,35,2,2,16", bias("Hq Sq Sk", dtype=F32)),
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
    """All cases of the gradients' suite that the kernels take, each in one kind of arithmetic; those of here for either dtype."""
    for n, c in enumerate((*FURTHER, *DIFFERENTIATED)):
        dtypes = [dtype for dtype in (F32, F64) if dtype in c.dtypes]
        for dtype in dtypes if n < len(FURTHER) else dtypes[n % 2 :: 2] or dtypes:
            if cuda_backward_fp.decline(problem_of(differentiate(c, dtype))) is None:
                yield Run(c, dtype, [gpu for t, gpu in PLACES if t == dtype][n // 2 % 3])


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
    found = problems.user_gradients(found, problem, layout, ndim)
    want = compare.expect_gradients(given.problems)
    for name, parts in want.parts.items():
        if name == "dsinks":  # one for all sequences
            parts = [np.sum(parts, axis=0)]
        for part, exact in zip(gradient_parts(name, getattr(found, name), run.case), parts, strict=True):
            compare.assert_close(part, exact, want.bounds[name], name)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("longest", [{"seqlen_q": 20}, {"seqlen_k": 20}], ids=str)
def test_lengths_on_the_device_that_are_longer_than_the_bias(emulator, longest, dtype):
    """As in test_kernels_emulated_backward_fa2.py."""
    problem, smaller = packed_with_a_bias(dtype, longest)
    whole, found = backward_fp.run(emulator, problem, A100), backward_fp.run(emulator, smaller, A100)
    if "seqlen_q" in longest:
        want = whole.dbias[:, :, :20].astype(F64)
        compare.assert_close(found.dbias, want, 2 * compare.eps(dtype) * np.abs(want).max(), "dbias")
    assert np.isfinite(found.dbias).all()


def operands(sizes: str, dtype: np.dtype, seed: int = 0) -> list[np.ndarray]:
    """Random q, k, v and dout from "B,Sq,Sk,Hq,Hkv,D"."""
    b, sq, sk, hq, hkv, d = map(int, sizes.split(","))
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(dtype) for s in ((b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, d), (b, sq, hq, d))]


def posed(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, **options: Any) -> Problem:
    """The problem with results of the oracle."""
    dlse = options.pop("dlse", None)
    with np.errstate(all="ignore"):
        out, lse = reference.forward(problems.build_attention(q, k, v, **options))
        given = out.astype(q.dtype), lse.astype(F64 if q.dtype == F64 else F32)
    return problems.build_backward(dout, q, k, v, *given, dlse=dlse, **options)


def check(found: Gradients, problem: Problem) -> None:
    want = compare.expect_gradients([problem])
    for name, (exact,) in want.parts.items():
        compare.assert_close(getattr(found, name).reshape(exact.shape), exact, want.bounds[name], name)


every_place = pytest.mark.parametrize(("dtype", "gpu"), PLACES, ids=lambda x: getattr(x, "name", str(x)))


@every_place
@pytest.mark.parametrize("spoiled", [1e4, np.nan, np.inf])
@pytest.mark.parametrize("how", ["causal", "mask", "bias"])
def test_rows_that_see_nothing_contribute_nothing(emulator, dtype, gpu, spoiled, how):
    """Case 5: whatever dO and Q hold there."""
    q, k, v, dout = operands("1,70,66,2,1,16", dtype)
    hidden = np.zeros((1, 2, 70, 66), dtype)
    hidden[:, :, :4] = -np.inf
    empty = np.arange(70) < 4
    options = {"causal": {"causal": True}, "mask": {"mask": ~empty[:, None]}, "bias": {"bias": hidden}}[how]
    dout[:, :4] = spoiled
    if how == "mask":
        q[:, 1] = np.nan
    problem = posed(q, k, v, dout, **options)
    found = backward_fp.run(emulator, problem, gpu)
    clean = [a.copy() for a in (q, k, v, dout)]
    clean[0][:, :4] = clean[3][:, :4] = 0
    check(found, posed(*clean, **options))
    assert not found.dq[:, :4].any()


@every_place
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_what_is_not_finite_reaches_those_who_see_it(emulator, dtype, gpu, which, value):
    """The bounds are those of ordinary numbers in its place: the naive computation spreads NaN further than the oracle."""
    arrays = dict(zip(("q", "k", "v", "dout"), operands("1,75,75,2,1,24", dtype), strict=True))
    clean = compare.expect_gradients([posed(**arrays, window=(20, 0))])
    arrays[which][0, {"q": [7, 60], "k": [60], "v": [3, 62], "dout": [9, 69]}[which], 0, 2] = value
    problem = posed(**arrays, window=(20, 0))
    found, want = backward_fp.run(emulator, problem, gpu), reference.backward(problem)
    for name in ("dq", "dk", "dv"):
        exact = getattr(want, name)
        assert 0 < np.isfinite(exact).sum() and (name == "dv" and which == "v" or not np.isfinite(exact).all())
        compare.assert_close(getattr(found, name), exact, clean.bounds[name], name)


@every_place
@pytest.mark.parametrize("base", [1e3, 1e6])
def test_large_logits(emulator, dtype, gpu, base):
    """Whole numbers near a large one, exactly: as weights are, so are differences; in other rows logits are near 0."""
    q, k, v, dout = operands("1,40,70,1,1,16", dtype)
    q[...], k[..., :2] = 0, np.stack([np.full((1, 70, 1), base), np.random.default_rng(1).integers(0, 4, (1, 70, 1))], -1)
    q[:, ::2, :, :2] = 1
    problem = posed(q, k, v, dout, scale=1.0)
    check(backward_fp.run(emulator, problem, gpu), problem)


@every_place
def test_logits_so_low_that_weights_of_absent_keys_would_overflow(emulator, dtype, gpu):
    """Case 10: all logits are -120."""
    q, k, v, dout = operands("1,65,65,1,1,64", dtype)
    q[...], k[...] = 0, 0
    q[..., 0], k[..., 0] = 1, -120 * 8
    problem = posed(q, k, v, dout)
    check(backward_fp.run(emulator, problem, gpu), problem)


@every_place
def test_denormals_are_kept(emulator, dtype, gpu):
    q, k, v, dout = operands("1,20,70,1,1,16", dtype)
    problem = posed(q, k, v, (dout * 8 * np.finfo(dtype).tiny).astype(dtype), causal=True)
    found = backward_fp.run(emulator, problem, gpu)
    check(found, problem)
    assert (abs(found.dv[found.dv != 0]) < np.finfo(dtype).tiny).any()


@every_place
@pytest.mark.parametrize("sizes", ["1,3,4096,1,1,16", "1,2048,5,2,1,16"])
def test_long_sums(emulator, dtype, gpu, sizes):
    q, k, v, dout = operands(sizes, dtype)
    problem = posed(q, abs(k), abs(v), abs(dout), scale=0.01)
    check(backward_fp.run(emulator, problem, gpu), problem)


@every_place
@pytest.mark.parametrize(("scale", "used"), [(0.2, ("out", "lse")), (2.0, ("out",))], ids=["small-lse", "large-lse"])
def test_statistics_of_the_forward_pass_where_they_do(emulator, dtype, gpu, scale, used):
    """Rows with many keys take delta from O, and the normaliser if the LSE is small; then wrong ones show."""
    arrays = operands("1,330,330,1,1,16", dtype)
    problem = posed(*arrays, scale=scale, causal=True, sinks=[0.5])
    found = backward_fp.run(emulator, problem, gpu)
    check(found, problem)
    for name in ("out", "lse"):
        a = getattr(problem, name).array
        wrong = problem.replace(**{name: views.view(a + a.dtype.type(0.5), name)})
        other = backward_fp.run(emulator, wrong, gpu)
        assert (other.dq[:, :250] == found.dq[:, :250]).all() or name in used
        assert (other.dq[:, 300:] != found.dq[:, 300:]).any() == (name in used)


@every_place
def test_dlse_alone_and_rows_that_see_only_the_sink(emulator, dtype, gpu):
    q, k, v, dout = operands("1,9,20,2,1,16", dtype)
    rng = np.random.default_rng(5)
    dlse = rng.standard_normal((1, 2, 9)).astype(dtype)
    shown = np.ones((9, 20), bool)
    shown[:3] = False
    problem = posed(q, k, v, 0 * dout, dlse=dlse, mask=shown, sinks=[100.1, -77.7])
    found = backward_fp.run(emulator, problem, gpu)
    check(found, problem)
    problem = posed(q, k, v, dout, dlse=dlse, mask=np.zeros((9, 20), bool), sinks=[1000.3, 0.1])
    found = backward_fp.run(emulator, problem, gpu)
    assert not found.dq.any() and not found.dk.any() and not found.dv.any()
    np.testing.assert_allclose(found.dsinks, dlse.astype(np.float64).sum((0, 2)), rtol=4 * float(np.finfo(dtype).eps))


@pytest.mark.parametrize(("dtype", "gpu", "width"), [(F32, H200, np.int32), (F64, A100, np.int64), (F32, T4, np.int64)], ids=str)
@pytest.mark.parametrize("known", [False, True], ids=["unknown", "max_seqlen"])
def test_lengths_on_the_device(emulator, dtype, gpu, width, known):
    cu_q, cu_k = [0, 1, 90, 90, 91, 150], [0, 80, 90, 95, 95, 170]
    q, k, v, dout = (a[0] for a in operands("1,160,180,2,1,16", dtype))
    plain = problems.build_varlen(q, k, v, cu_q, cu_k, causal=True)
    out, lse = reference.forward(plain)
    options = {"causal": True, "varlen": (cu_q, cu_k, None, None)}
    host = problems.build_backward(dout, q, k, v, out.astype(dtype), lse.astype(dtype), **options)
    sizes = {} if known else {"seqlen_q": 160, "seqlen_k": 180}
    found = backward_fp.run(emulator, on_device(host, width).replace(**sizes), gpu)
    check(found, host)
    small = on_device(host, width).replace(seqlen_q=1, seqlen_k=1)
    backward_fp.run(emulator, small, gpu)  # inside the arrays, and nothing that was not written is read

"""The public functions: shapes that come back, buffers, caches, plans, and that errors leave everything as it was."""

from __future__ import annotations

import doctest
import gc
import importlib
import inspect
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from refusal import refused

import cuflash
from cuflash import Plan

RNG = np.random.default_rng(7)


def normal(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def operands(dtype: object = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return normal(2, 3, 4, 8, dtype=dtype), normal(2, 5, 2, 8, dtype=dtype), normal(2, 5, 2, 6, dtype=dtype)


def attention(*arrays: np.ndarray, **options):
    return cuflash.attention(*arrays, backend="reference", **options)


# --- shapes and layouts ----------------------------------------------------------------------------------------------


def test_every_layout_and_number_of_axes_gives_the_same_numbers():
    q, k, v = operands()
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == (2, 3, 4, 6) and lse.shape == (2, 4, 3) and out.dtype == lse.dtype == np.float32

    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    out_h, lse_h = attention(*heads_first, causal=True, return_lse=True, layout="BHSD")
    assert out_h.flags.c_contiguous and np.array_equal(out_h, out.swapaxes(1, 2)) and np.array_equal(lse_h, lse)

    out_3, lse_3 = attention(q[1], k[1], v[1], causal=True, return_lse=True)
    assert np.array_equal(out_3, out[1]) and np.array_equal(lse_3, lse[1])
    out_3h, lse_3h = attention(*(x[1] for x in heads_first), causal=True, return_lse=True, layout="BHSD")
    assert np.array_equal(out_3h, out_h[1]) and np.array_equal(lse_3h, lse[1])

    for layout in ("BSHD", "BHSD"):
        out_2, lse_2 = attention(q[0, :, 3], k[0, :, 1], v[0, :, 1], causal=True, return_lse=True, layout=layout)
        assert np.array_equal(out_2, out[0, :, 3]) and np.array_equal(lse_2, lse[0, 3])

    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    cu = [0, 3, 6], [0, 5, 10]
    for layout, axes in (("BSHD", (0, 1, 2)), ("BHSD", (1, 0, 2))):
        out_v, lse_v = cuflash.attention_varlen(
            *(x.transpose(axes) for x in packed), *cu, causal=True, return_lse=True, layout=layout, backend="reference"
        )
        assert np.array_equal(out_v.transpose(axes), out.reshape(6, 4, 6)), layout
        assert np.array_equal(lse_v, np.concatenate(list(lse), axis=1)), layout
    assert np.array_equal(cuflash.logsumexp(q, k, causal=True, backend="reference"), lse)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_dtypes_of_results(dtype):
    out, lse = attention(*operands(dtype), return_lse=True)
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    assert attention(*operands(dtype), out_dtype=np.float32).dtype == np.float32


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_gradients_come_in_the_shapes_of_the_operands(layout, axes):
    q, k, v = operands(np.float64)
    if layout == "BHSD":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    if axes == 3:
        q, k, v = q[0], k[0], v[0]
    elif axes == 2:
        q, k, v = normal(3, 8), normal(5, 8), normal(5, 6)
    options = {"layout": layout, "backend": "reference"}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    g = cuflash.attention_backward(np.broadcast_to(out.dtype.type(1), out.shape), q, k, v, out, lse, **options)
    assert (g.dq.shape, g.dk.shape, g.dv.shape) == (q.shape, k.shape, v.shape) and g.dbias is None and g.dsinks is None
    assert np.isclose(g.dv.sum(), out.size), "each row of the weights sums to 1"


def test_backward_checks_what_it_is_given():
    q, k, v = operands()
    out, lse = attention(q, k, v, return_lse=True)

    def backward(**changed):
        given = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse, **changed}
        return cuflash.attention_backward(**given, backend="reference")

    with refused(ValueError, "dout:", "(2, 3, 4, 5)", "must be (2, 3, 4, 6)"):
        backward(dout=out[..., :5])
    with refused(ValueError, "out:", "(3, 4, 6)", "must be (2, 3, 4, 6)"):
        backward(out=out[0])
    with refused(TypeError, "dout:", "int64", "float32"):
        backward(dout=out.astype(np.int64))
    with refused(ValueError, "lse:", "(2, 3, 4)", "must be (2, 4, 3)"):
        backward(lse=lse.swapaxes(1, 2))
    with refused(TypeError, "dlse:", "float64", "must be float32"):
        backward(dlse=lse.astype(np.float64))
    with refused(TypeError, "lse:", "NoneType", "NumPy"):
        backward(lse=None)
    with refused(TypeError, "deterministic:", "None", "True and False"):
        backward(deterministic=None)


# --- buffers for results ---------------------------------------------------------------------------------------------


def test_buffers_must_fit():
    q, k, v = operands()
    with refused(ValueError, "out:", "(2, 3, 4, 8)", "must be (2, 3, 4, 6)"):
        attention(q, k, v, out=np.empty_like(q))
    with refused(TypeError, "out:", "float64", "must be float32"):
        attention(q, k, v, out=np.empty((2, 3, 4, 6)))
    with refused(TypeError, "out:", "float32", "must be float64"):
        attention(q, k, v, out=np.empty((2, 3, 4, 6), np.float32), out_dtype=np.float64)
    with refused(TypeError, "out:", "list", "NumPy"):
        attention(q, k, v, out=[])
    with refused(ValueError, "lse:", "(2, 3, 4)", "must be (2, 4, 3)"):
        attention(q, k, v, lse=np.empty((2, 3, 4), np.float32))
    with refused(TypeError, "lse:", "float64", "must be float32"):
        attention(q, k, v, lse=np.empty((2, 4, 3)))
    with refused(TypeError, "return_lse:", "got 1", "True and False"):
        attention(q, k, v, return_lse=1)
    frozen = np.empty((2, 3, 4, 6), np.float32)
    frozen.flags.writeable = False
    with refused(ValueError, "out:", "read-only", "writeable"):
        attention(q, k, v, out=frozen)
    folded = as_strided(np.zeros((3, 4, 6), np.float32), (2, 3, 4, 6), (0, 96, 24, 4))
    with refused(ValueError, "out:", "share one address", "(0, 96, 24, 4)", "each must have its own"):
        attention(q, k, v, out=folded)


def test_buffers_must_not_overlap_inputs():
    x = normal(2, 3, 4, 8)
    before = x.copy()
    memory = np.zeros((2, 4, 3), np.float32)
    mask = memory.view(bool).reshape(2, 4, 3, 4)[..., :3]
    with refused(ValueError, "out:", "overlaps q", "buffer of their own"):
        attention(x, x.copy(), x.copy(), out=x)
    with refused(ValueError, "out:", "overlaps k"):
        attention(x.copy(), x, x.copy(), out=x[::-1])
    with refused(ValueError, "out:", "overlaps v"):
        attention(x.copy(), x.copy(), x, out=x)
    bias = np.zeros((2, 4, 3, 3), np.float32)
    with refused(ValueError, "lse:", "overlaps bias"):
        attention(x, x, x, bias=bias, lse=bias[..., 0])
    with refused(ValueError, "lse:", "overlaps mask"):
        attention(x, x, x, mask=mask, lse=memory)
    both = np.zeros((2, 3, 4, 9), np.float32)
    with refused(ValueError, "lse:", "overlaps out"):
        attention(x, x, x, out=both[..., :8], lse=both[..., 7].swapaxes(1, 2))
    assert np.array_equal(x, before) and not memory.any() and not bias.any() and not both.any()


def test_interleaved_buffers_do_not_overlap():
    fused = normal(2, 3, 4, 4, 8)
    q, k, v, out = (fused[:, :, i] for i in range(4))
    expected = attention(q.copy(), k.copy(), v.copy())
    assert attention(q, k, v, out=out) is out and np.array_equal(out, expected)
    whole = normal(2, 3, 4, 16)
    q, out = whole[..., ::2], whole[..., 1::2]
    expected = attention(q.copy(), k, v)
    assert np.array_equal(attention(q, k, v, out=out), expected)


# --- names of options, kernels and backends --------------------------------------------------------------------------

WITH_OPTIONS = [
    (cuflash.attention_varlen, ([0, 2], [0, 2])), (cuflash.decode, ([2],)), (cuflash.plan, ()), (cuflash.explain, ()),
    (cuflash.attention_backward, (None, None)), (cuflash.attention_varlen_backward, (None, None, [0], [0])),
]  # fmt: skip


@pytest.mark.parametrize(("function", "more"), WITH_OPTIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_unknown_options(function, more):
    x = normal(2, 4)
    with refused(TypeError, f"{function.__name__}()", "'casual'", "allowed are", "causal", "num_splits"):
        function(*[x] * (4 if "backward" in function.__name__ else 3), *more, casual=True)
    assert {"causal", "scale", "backend"} <= inspect.signature(function).parameters.keys()


def test_unknown_option_of_attention():
    x = normal(2, 4)
    with refused(TypeError, "attention()", "'casual'"):
        cuflash.attention(x, x, x, casual=True)


def test_pairs_that_cannot_do_the_job_say_why():
    x = normal(2, 4)
    with refused(cuflash.NoBackendError, "kernel='fa2', backend='reference'", "reference/fa2", "naive"):
        cuflash.attention(x, x, x, kernel="fa2", backend="reference")
    with refused(cuflash.NoBackendError, "kernel='fa3', backend=None", "cpu/fa3", "no such kernel"):
        cuflash.attention(x, x, x, kernel="fa3")
    for name in ("score_mod", "mask_mod"):
        with refused(cuflash.NoBackendError, "reference/naive", name, "CUDA expression", "callable"):
            attention(x, x, x, **{name: "s"})


def test_what_is_still_to_come():
    x = normal(2, 4)
    with refused(NotImplementedError, "attention_streamed", "not supported yet"):
        cuflash.attention_streamed(x, x, x)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_runs_as_attention_does_from_many_threads():
    options = {"causal": True, "window": (2, -1), "sinks": [0.5] * 4, "backend": "reference"}
    plan = cuflash.plan(*operands(), return_lse=True, **options)
    inputs = [operands() for _ in range(16)]
    results: list = [None] * 16
    start = threading.Barrier(16)

    def work(n: int) -> None:
        start.wait()
        results[n] = [plan.run(*inputs[n]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for given, got in zip(inputs, results, strict=True):
        out, lse = cuflash.attention(*given, return_lse=True, **options)
        assert all(np.array_equal(o, out) and np.array_equal(s, lse) for o, s in got)


def test_a_plan_refuses_other_signatures():
    q, k, v = operands()
    plan = cuflash.plan(q, k, v, backend="reference")
    with refused(ValueError, "q:", "(1, 3, 4, 8)", "made for shape (2, 3, 4, 8)"):
        plan.run(q[:1], k, v)
    with refused(ValueError, "k:", "float64", "made for", "float32"):
        plan.run(q, k.astype(np.float64), v)
    with refused(ValueError, "v:", "strides", "made for"):
        plan.run(q, k, np.asfortranarray(v))
    with refused(ValueError, "q:", "(3, 4, 8)", "4 axes"):
        plan.run(q[0], k, v)
    with refused(TypeError, "q:", "list", "NumPy"):
        plan.run(q.tolist(), k, v)
    with refused(TypeError, "stream:", "host memory", "None"):
        plan.run(q, k, v, stream=1)
    with refused(ValueError, "out:", "overlaps q"):
        cuflash.plan(q, q, q, backend="reference").run(q, q, q, out=q)
    with refused(ValueError, "plan", "cuflash.plan()"):
        Plan(kernel="naive", backend="reference", reason="").run(q, k, v)
    with refused(TypeError, "return_lse:", "None", "True and False"):
        cuflash.plan(q, k, v, return_lse=None)


def test_a_plan_takes_strides_that_lead_nowhere():
    q, k, v = normal(1, 1, 4, 8), normal(1, 5, 4, 8), normal(1, 5, 4, 8)
    sliced = normal(3, 2, 4, 8)[1:2, 1:]
    assert sliced.strides != q.strides
    plan = cuflash.plan(q, k, v, backend="reference")
    assert np.array_equal(plan.run(sliced, k, v), attention(sliced, k, v))


def test_a_plan_writes_to_buffers_and_is_printable_and_immutable():
    q, k, v = (x.swapaxes(1, 2) for x in operands())
    plan = cuflash.plan(q, k, v, layout="BHSD", return_lse=True, backend="reference")
    out, lse = np.full((2, 4, 3, 6), np.nan, np.float32), np.full((2, 4, 3), np.nan, np.float32)
    assert all(x is y for x, y in zip(plan.run(q, k, v, out=out, lse=lse), (out, lse), strict=True))
    assert np.array_equal(out, attention(q, k, v, layout="BHSD"))
    assert "naive" in str(plan) and "reference" in str(plan) and plan.reason in str(plan)
    with pytest.raises(AttributeError):
        plan.kernel = "fa2"


def test_a_plan_keeps_no_operand_alive():
    q, k, v = operands()
    plan = cuflash.plan(q, k, v, backend="reference")
    gone = weakref.ref(k)
    del k
    gc.collect()
    assert gone() is None and plan.kernel == "naive"


def test_a_plan_for_pages():
    q, pages = normal(2, 1, 4, 8), normal(6, 2, 2, 8)
    options = {"page_table": [[5, 1], [0, 2]], "kv_lengths": [3, 4]}
    plan = cuflash.plan(q, pages, pages, backend="reference", **options)
    assert np.array_equal(plan.run(q, pages, pages), attention(q, pages, pages, **options))


# --- documentation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["alibi", "api", "cache", "decoding", "explanation", "gradients", "merge", "weights"])
def test_examples_in_docstrings(module):
    module = importlib.import_module(f"cuflash.{module}")
    failed, tried = doctest.testmod(module)
    assert tried > 0 and failed == 0


@pytest.mark.parametrize("name", sorted(set(cuflash.__all__) - {"__version__"}))
def test_every_public_name_is_documented(name):
    value = getattr(cuflash, name)
    assert value.__doc__ and value.__doc__.strip()
    if inspect.isfunction(value):
        assert "Returns\n    -------" in value.__doc__ or "Raises\n" in value.__doc__


# --- slopes ----------------------------------------------------------------------------------------------------------


def test_alibi_slopes():
    assert cuflash.alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert cuflash.alibi_slopes(1).tolist() == [2.0**-8]
    assert cuflash.alibi_slopes(np.int64(8)).tolist() == [2.0**-n for n in range(1, 9)]
    for heads in range(1, 130):
        slopes = cuflash.alibi_slopes(heads)
        assert slopes.shape == (heads,) and slopes.dtype == np.float32 and len(set(slopes.tolist())) == heads
    with refused(ValueError, "heads:", "0", "at least 1"):
        cuflash.alibi_slopes(0)
    with refused(TypeError, "heads:", "2.0", "integer"):
        cuflash.alibi_slopes(2.0)


def test_log_of_plans_prints_each_choice_once(monkeypatch, capsys):
    from cuflash import planner

    monkeypatch.setenv("CUFLASH_LOG", "jit,plan")
    monkeypatch.setattr(planner, "_reported", set())
    for n in (5, 5, 9):  # other sizes, the same choice
        cuflash.attention(*[normal(1, n, 2, 16)] * 3, backend="reference")
    lines = capsys.readouterr().err.splitlines()
    assert len({line.split("tile")[0] for line in lines}) == 1
    assert lines[0].startswith("cuflash plan: attention float") and "head size 16: reference/naive" in lines[0]
    monkeypatch.setenv("CUFLASH_LOG", "jit")
    monkeypatch.setattr(planner, "_reported", set())
    cuflash.attention(*[normal(1, 5, 2, 16)] * 3, backend="reference")
    assert not capsys.readouterr().err

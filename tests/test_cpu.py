"""What only the CPU backend promises: memory O(N), skipped tiles, one compilation, and the steps below the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import compare
import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.backends import cpu, cpu_kernels, cpu_params, naive
from cuflash.problem import build_attention

BF16 = np.dtype(ml_dtypes.bfloat16)


def normal(*shape: int, dtype=np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def oracle(q, k, v, **options):
    return cuflash.attention(*(a.astype(np.float64) for a in (q, k, v)), backend="reference", return_lse=True, **options)


def bound(result: np.ndarray, size: float = 1) -> float:
    """A few roundings of the arithmetic and of the result, for results of a given size."""
    arithmetic = np.finfo(np.float64 if result.dtype == np.float64 else np.float32).eps
    return size * max(8 * arithmetic, 2 * float(ml_dtypes.finfo(result.dtype).eps))


def assert_accurate(q, k, v, kernel="fa2", **options) -> None:
    """Against the oracle, within the bound of the numerics contract."""
    expected = compare.expect([build_attention(q, k, v, **options)])
    out, lse = cuflash.attention(q, k, v, kernel=kernel, backend="cpu", return_lse=True, **options)
    compare.assert_close(out, expected.out[0], expected.out_bound, "out")
    compare.assert_close(lse, expected.lse[0], expected.lse_bound, "lse")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    command, env = [sys.executable, "-c", textwrap.dedent(code)], {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)


# --- arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_every_16_bit_number_survives_widening_and_rounding(dtype):
    """One key: the output is the value. All 65536 bit patterns go through, subnormals and infinities included."""
    v = np.arange(65536, dtype=np.uint16).view(dtype).reshape(-1, 1, 1, 16)
    q = np.zeros((v.shape[0], 1, 1, 4), dtype)
    out = cuflash.attention(q, q, v, backend="cpu")
    np.testing.assert_array_equal(out.astype(np.float32), v.astype(np.float32))
    zero = v.astype(np.float32) == 0
    assert np.signbit(out.astype(np.float32))[~zero].tolist() == np.signbit(v.astype(np.float32))[~zero].tolist()


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_results_round_to_nearest_even_once(source, dtype):
    """Values at, just below and just above every kind of rounding boundary, from float32 and from float64."""
    bits = np.arange(0, 0x7F00 if dtype == BF16 else 0x7BFF, 37, dtype=np.uint16)
    low, high = (b.view(dtype).astype(np.float64) for b in (bits, bits + np.uint16(1)))
    middle = (low + high) / 2
    above, below = (np.nextafter(middle.astype(source), source(towards)) for towards in (np.inf, 0))
    v = np.concatenate([middle, above, below, [65519.99, 65520.0, 1e39]])
    with np.errstate(over="ignore"):
        v = np.concatenate([v, -v]).astype(source)
    q = np.zeros((1, len(v), 1, 1), source)
    out = cuflash.attention(q[:, :1], q[:, :1], v.reshape(1, 1, 1, -1), backend="cpu", out_dtype=dtype)[0, 0, 0]
    np.testing.assert_array_equal(out.view(np.uint16), rounded_once(v, np.dtype(dtype)).view(np.uint16))


def rounded_once(v: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Nearest numbers of a 16-bit dtype, ties to even: whole multiples of the spacing around each number."""
    info = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(v.astype(np.float64))
    spacing = np.ldexp(1.0, np.maximum(exponent - 1, info.minexp) - info.nmant)
    with np.errstate(over="ignore"):
        return (np.rint(v / spacing) * spacing).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_is_accurate_over_its_whole_range(dtype):
    """Two keys, the second with logit x <= 0 and value 1: the output is exp(x) / (1 + exp(x))."""
    x = -np.concatenate([np.linspace(0, 1, 500), np.geomspace(1, 80 if dtype == np.float32 else 700, 2000)]).astype(dtype)
    q = np.ones((len(x), 1, 1, 1), dtype)
    k = np.stack([np.zeros_like(x), x], axis=1)[:, :, None, None]
    v = np.broadcast_to(np.array([0, 1], dtype)[None, :, None, None], k.shape)
    out = cuflash.attention(q, k, v, scale=1.0, backend="cpu")[:, 0, 0, 0]
    exact = np.exp(x.astype(np.longdouble))
    exact /= 1 + exact
    relative = np.abs(out - exact) / exact
    assert relative.max() < 4 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_subnormal_weights_are_kept_and_smaller_ones_are_zero(dtype):
    tiny = np.finfo(dtype).smallest_subnormal
    least = float(np.log(np.longdouble(tiny) / 2))  # exp of anything below rounds to 0
    x = np.linspace(np.log(np.finfo(dtype).tiny), least + 0.5, 50).astype(dtype)
    k = np.stack([np.zeros_like(x), x, np.full_like(x, 1.01 * least), np.full_like(x, -np.inf)], axis=1)[:, :, None, None]
    v = np.broadcast_to(np.array([0, 1, np.finfo(dtype).max, np.finfo(dtype).max], dtype)[None, :, None, None], k.shape)
    out = cuflash.attention(np.ones((len(x), 1, 1, 1), dtype), k, v, scale=1.0, backend="cpu")[:, 0, 0, 0]
    exact = np.exp(x.astype(np.longdouble))
    assert (np.abs(out - exact) <= 4 * np.finfo(dtype).eps * exact + tiny).all()


def test_equal_values_come_out_exactly():
    """The mean of equal values is the value, bit for bit, for every number of splits."""
    q, k = normal(1, 3, 4, 32), normal(1, 1000, 2, 32, seed=1)
    v = np.full((1, 1000, 2, 8), np.float32(1))
    for splits in (None, 1, 2, 3, 7, 64, 1000, 5000):
        out = cuflash.attention(q, k, v, kernel="decode", backend="cpu", num_splits=splits)
        assert (out == 1).all(), splits


@pytest.mark.parametrize("kernel", ["fa2", "decode"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_in_v_reaches_only_the_rows_that_see_it(kernel, poison):
    """Also within one tile and one panel of rows: causal, so that row i sees keys up to i."""
    n, j = 100, 37
    q, k, v = normal(1, n, 2, 16), normal(1, n, 2, 16, seed=1), normal(1, n, 2, 16, seed=2)
    clean = cuflash.attention(q, k, v, causal=True, kernel=kernel, backend="cpu")
    v[0, j, 1, 3] = poison
    out = cuflash.attention(q, k, v, causal=True, kernel=kernel, backend="cpu")
    assert not np.isfinite(out[0, j:, 1, 3]).any()
    out[0, j:, 1, 3] = clean[0, j:, 1, 3]
    np.testing.assert_allclose(out, clean, rtol=0, atol=bound(out))


@pytest.mark.parametrize("kernel", ["fa2", "decode", "naive"])
def test_poison_in_k_and_q(kernel):
    n = 70
    q, k, v = normal(1, n, 1, 16), normal(1, n, 1, 16, seed=1), normal(1, n, 1, 16, seed=2)
    clean, clean_lse = cuflash.attention(q, k, v, window=(5, 5), kernel=kernel, backend="cpu", return_lse=True)
    k[0, 40] = np.nan
    q[0, 3] = np.nan
    out, lse = cuflash.attention(q, k, v, window=(5, 5), kernel=kernel, backend="cpu", return_lse=True)
    hit = np.array([abs(i - 40) <= 5 or i == 3 for i in range(n)])
    assert np.isnan(out[0, hit]).all() and np.isnan(lse[0, 0, hit]).all()
    np.testing.assert_allclose(out[0, ~hit], clean[0, ~hit], rtol=0, atol=bound(out))
    np.testing.assert_allclose(lse[0, 0, ~hit], clean_lse[0, 0, ~hit], rtol=bound(out))


def test_sqdist_keeps_the_digits_of_near_points():
    """Far from the origin the expanded square has no digit left in float32."""
    q = 1e4 + np.arange(50, dtype=np.float32).reshape(1, 50, 1, 1)
    v = normal(1, 50, 1, 4)
    assert_accurate(q, q, v, score="sqdist", scale=0.25)
    out = cuflash.attention(q, q, v, score="sqdist", scale=0.25, backend="cpu")
    np.testing.assert_allclose(out, oracle(q, q, v, score="sqdist", scale=0.25)[0], rtol=0, atol=bound(out, 4))


@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 8, 9, 65, 128, 257, 520])
@pytest.mark.parametrize("head_dim_v", [1, 8, 77])
def test_any_head_size(head_dim, head_dim_v):
    q, k, v = normal(1, 37, 2, head_dim), normal(1, 150, 1, head_dim, seed=1), normal(1, 150, 1, head_dim_v, seed=2)
    assert_accurate(q, k, v, causal=True)


@pytest.mark.parametrize("shape", [(1, 1), (1, 129), (31, 33), (32, 128), (33, 127), (64, 256), (65, 257), (513, 130)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sizes_around_the_edges_of_panels_and_tiles(shape, dtype):
    sq, sk = shape
    q, k, v = (normal(2, n, h, 24, dtype=dtype, seed=n) for n, h in ((sq, 3), (sk, 1), (sk, 1)))
    for options in ({}, {"causal": True}, {"window": (7, 3)}, {"causal": "upper_left", "softcap": 2.0}):
        assert_accurate(q, k, v, **options)


def test_a_byte_off_alignment():
    """Arrays that start in the middle of an element's natural alignment."""
    def shifted(a: np.ndarray) -> np.ndarray:
        raw = np.zeros(a.nbytes + 1, np.uint8)
        view = raw[1:].view(a.dtype).reshape(a.shape)
        view[...] = a
        assert not view.flags.aligned
        return view

    q, k, v = normal(1, 20, 2, 9), normal(1, 40, 2, 9, seed=1), normal(1, 40, 2, 9, seed=2)
    want = cuflash.attention(q, k, v, backend="cpu")
    np.testing.assert_array_equal(cuflash.attention(shifted(q), shifted(k), shifted(v), backend="cpu"), want)


# --- determinism ---------------------------------------------------------------------------------------------------


def test_runs_agree_bit_for_bit():
    q, k, v = normal(2, 300, 4, 32), normal(2, 700, 2, 32, seed=1), normal(2, 700, 2, 32, seed=2)
    first = cuflash.attention(q, k, v, causal=True, backend="cpu")
    for _ in range(5):
        assert cuflash.attention(q, k, v, causal=True, backend="cpu").tobytes() == first.tobytes()


@pytest.mark.parametrize("kernel", ["auto", "fa2", "decode"])
@pytest.mark.parametrize("sq", [1, 5, 300])
def test_batch_invariant_results_do_not_depend_on_the_neighbours(kernel, sq):
    neighbours = 33
    q, k, v = normal(neighbours, sq, 4, 16), normal(neighbours, 5000 if sq == 1 else 600, 2, 16, seed=1), None
    v = k[..., :8]
    lengths = np.random.default_rng(3).integers(0, k.shape[1] + 1, neighbours)
    lengths[7] = k.shape[1] - 3
    options = dict(kernel=kernel, backend="cpu", batch_invariant=True, return_lse=True, window=(400, 0))
    alone = cuflash.attention(q[7:8], k[7:8], v[7:8], kv_lengths=lengths[7:8], **options)
    among = cuflash.attention(q, k, v, kv_lengths=lengths, **options)
    assert among[0][7].tobytes() == alone[0][0].tobytes()
    assert among[1][7].tobytes() == alone[1][0].tobytes()


# --- work and memory -----------------------------------------------------------------------------------------------


def task_elements(**options) -> int:
    """Scores that the planned tasks can touch: rows times keys."""
    q = np.zeros((1, 2048, 1, 64), np.float32)
    tasks = cpu.cut_up(build_attention(q, q, q, **options), "fa2").tasks.tasks
    return int((tasks["rows"] * (tasks["k_end"] - tasks["k_begin"])).sum())


def test_tiles_that_the_mask_hides_are_skipped():
    whole = task_elements()
    assert whole == 2048**2
    assert task_elements(causal=True) < 0.65 * whole
    assert task_elements(window=(100, 0)) < 0.35 * whole
    assert task_elements(kv_lengths=[100]) == 2048 * 100


def test_keys_outside_the_window_leave_no_trace():
    """NaN everywhere else leaves no trace."""
    q, k, v = normal(1, 1, 1, 8), np.full((1, 100_000, 1, 8), np.nan, np.float32), np.full((1, 100_000, 1, 8), np.nan, np.float32)
    k[0, -50:], v[0, -50:] = 1, 2
    assert np.all(cuflash.attention(q, k, v, window=(49, 0), backend="cpu") == 2)


def test_expensive_tasks_start_first_and_every_row_has_one():
    q = np.zeros((2, 1000, 6, 8), np.float32)
    k = np.zeros((2, 1000, 3, 8), np.float32)
    work = cpu.cut_up(build_attention(q, k, k, causal=True, kv_lengths=[1000, 10]), "fa2")
    tasks = work.tasks.tasks
    cost = tasks["rows"] * (tasks["k_end"] - tasks["k_begin"])
    assert cost[0] == cost.max() and cost[-1] == cost.min()
    rows = {(t["batch"], t["kv_head"], n) for t in tasks for n in range(t["first"], t["first"] + t["rows"])}
    assert len(rows) == tasks["rows"].sum() == 2 * 3 * 1000 * 2
    covered = [n for begin, end in work.tasks.portions for n in range(begin, end)]
    assert covered == list(range(len(tasks)))


def test_memory_is_linear_in_the_sequence():
    """Peak resident memory of a call on N = 16384 is far below the N x N scores, 1 GiB."""
    result = run_python(
        """
        import resource, json, numpy as np, cuflash
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rng = np.random.default_rng(0)
        small = rng.standard_normal((1, 64, 1, 32)).astype(np.float32)
        cuflash.attention(small, small, small, backend="cpu")
        q = rng.standard_normal((1, 16384, 1, 32)).astype(np.float32)
        before = peak()
        cuflash.attention(q, q, q, causal=True, backend="cpu", kernel="fa2")
        plain = peak() - before
        cuflash.attention(q, q, q, causal=True, backend="cpu", mask_mod=lambda b, h, i, j: j % 2 == 0)
        plan = cuflash.plan(q, q, q, causal=True, backend="cpu", kernel="fa2")
        print(json.dumps([plain, peak() - before, plan.workspace]))
        """
    )
    plain, with_callable, planned = json.loads(result.stdout.splitlines()[-1])
    output = 16384 * 32 * 4
    assert plain < output + 4 * planned + (8 << 20)
    assert with_callable < 64 << 20


def test_plan_tells_its_workspace():
    q = np.zeros((1, 4096, 8, 64), np.float32)
    plan = cuflash.plan(q, q, q, backend="cpu", kernel="fa2")
    assert plan.tile[0] > 0 and plan.tile[1] > 0 and plan.threads >= 1 and plan.num_splits == 1
    work = cpu.cut_up(build_attention(q, q, q), "fa2")
    numbers, integers = cpu._kernels().scratch_sizes(64, 64, work.most_rows, plan.tile[1], 4)
    needed = plan.threads * (4 * numbers + 8 * integers)
    assert needed <= plan.workspace <= 2 * needed + (64 << 10)


# --- compiling -----------------------------------------------------------------------------------------------------


def test_one_compilation_serves_every_shape_stride_dtype_and_option():
    q = normal(2, 9, 4, 12)
    cuflash.attention(q, q, q, backend="cpu")
    attend = cpu_kernels.compiled_attend(4)
    before = list(attend.signatures)
    slopes = cuflash.alibi_slopes(4)
    for dtype in (np.float32, np.float16, BF16):
        for options in (
            {}, {"causal": True}, {"window": (2, 1)}, {"softcap": 3.0}, {"alibi_slopes": slopes}, {"sinks": np.zeros(4)},
            {"score": "sqdist", "scale": np.ones(12)}, {"mask": np.ones((9, 9), bool)}, {"bias": np.zeros((9, 9), np.float32)},
            {"kv_lengths": [3, 9]}, {"num_splits": 3},
        ):
            a = q.astype(dtype)
            cuflash.attention(a, a[:, ::-1], a[..., ::2], backend="cpu", kernel="fa2", **options)
    pages = normal(6, 3, 4, 12)
    cuflash.attention(q, pages, pages, page_table=[[0, 1, 2], [5, 4, 3]], kv_lengths=[9, 8], backend="cpu")
    assert attend.signatures == before


COMPILE = """
    import sys, time, numpy as np, numba.core.caching, cuflash
    q = np.ones((1, 4, 1, 8), np.float32)
    start = time.perf_counter()
    out = cuflash.attention(q, q, q, backend="cpu")
    assert (out == 1).all()
    print(time.perf_counter() - start)
"""


def test_compiles_once_says_so_and_survives_a_broken_cache(tmp_path):
    cold = run_python(COMPILE, CUFLASH_CACHE_DIR=str(tmp_path))
    assert cold.stderr.count("cuflash: compiling the CPU kernels") == 1
    warm = run_python(COMPILE, CUFLASH_CACHE_DIR=str(tmp_path))
    assert "compiling" not in warm.stderr
    assert float(warm.stdout) < float(cold.stdout) / 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".nbc" for path in files) and any(path.suffix == ".nbi" for path in files)
    for path in files:  # an index of rubbish, and cut off code
        path.write_bytes(b"rubbish" if path.suffix == ".nbi" else path.read_bytes()[:100])
    broken = run_python(COMPILE, CUFLASH_CACHE_DIR=str(tmp_path))
    assert "compiling" in broken.stderr
    mended = run_python(COMPILE, CUFLASH_CACHE_DIR=str(tmp_path))
    assert "compiling" not in mended.stderr


# --- naive and what is declined ------------------------------------------------------------------------------------


def test_naive_refuses_more_memory_than_there_is(monkeypatch):
    monkeypatch.setattr(naive, "available_bytes", lambda: 10_000)
    q = normal(1, 64, 1, 8)
    with pytest.raises(cuflash.NoBackendError, match=r"49,152 bytes for one head of 64 queries and 64 keys, but 10,000"):
        cuflash.attention(q, q, q, kernel="naive", backend="cpu")
    cuflash.attention(q[:, :16], q[:, :16], q[:, :16], kernel="naive", backend="cpu")


def test_naive_says_what_it_takes():
    q = np.zeros((1, 100, 2, 8), np.float64)
    assert cuflash.plan(q, q, q, kernel="naive", backend="cpu").workspace >= 100 * 100 * 8


def test_cuda_expressions_are_declined_with_a_reason():
    q = normal(1, 4, 1, 8)
    with pytest.raises(cuflash.NoBackendError, match="score_mod is a CUDA expression"):
        cuflash.attention(q, q, q, score_mod="s * 2", backend="cpu")


def test_callables_see_tiles_of_one_head_in_the_compute_dtype():
    seen = []

    def score_mod(s, b, h, i, j, *, factor):
        seen.append((b, h, s.dtype, s.shape, i.shape, j.shape, i.dtype))
        return s * factor

    q, k = normal(2, 300, 4, 8, dtype=np.float16), normal(2, 700, 2, 8, dtype=np.float16, seed=1)
    out = cuflash.attention(q, k, k, score_mod=score_mod, mod_args={"factor": 0.5}, causal=True, backend="cpu")
    want, _ = oracle(q, k, k, score_mod=score_mod, mod_args={"factor": 0.5}, causal=True)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=bound(out))
    assert {(b, h) for b, h, *_ in seen} == {(b, h) for b in range(2) for h in range(4)}
    for _, _, dtype, shape, i, j, position in seen:
        if dtype == np.float32:  # the oracle's own calls are in float64
            assert i == (shape[0], 1) and j == (1, shape[1]) and position == np.int64 and shape[0] * shape[1] <= 256 * 512


def test_parameter_record_has_every_stride():
    q, k, v = normal(2, 5, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 16)
    problem = build_attention(q, k, v)
    problem = problem.replace(out=problem.q)
    sequences = cpu_params.sequence_table(problem)
    p = cpu_params.tables(problem, sequences, 128, 64).params[0]
    for name, array in (("q", q), ("k", k), ("v", v)):
        assert tuple(p[f"{name}_{axis}"] for axis in "bshd") == array.strides
        assert p[f"{name}_address"] == array.ctypes.data
    assert sequences["position"].tolist() == [2, 2] and p["group"] == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softcap_is_accurate_over_its_whole_range(dtype):
    """One key: the LSE is the logit, cap * tanh(x / cap). Small logits keep their digits, large ones saturate."""
    x = np.concatenate([[0.0], np.geomspace(1e-6, 1e4, 4000), [0.5, 1.0, np.inf]]).astype(dtype)
    x = np.concatenate([x, -x[1:-1]])
    k = np.ones((len(x), 1, 1, 1), dtype)
    _, lse = cuflash.attention(x[:, None, None, None], k, k, scale=1.0, softcap=2.0, backend="cpu", return_lse=True)
    want = 2 * np.tanh(x.astype(np.longdouble) / 2)
    assert np.abs(lse[:, 0, 0] - want)[want == 0].max() == 0
    relative = np.abs(lse[:, 0, 0] - want)[want != 0] / np.abs(want)[want != 0]
    assert relative.max() < 4 * np.finfo(dtype).eps


@pytest.mark.parametrize("kernel", ["fa2", "decode", "naive"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_bias_of_minus_infinity_hides_poison(kernel, poison):
    q, k, v = normal(1, 40, 1, 8), normal(1, 90, 1, 8, seed=1), normal(1, 90, 1, 8, seed=2)
    bias = np.zeros((40, 90), np.float32)
    bias[:, 33] = -np.inf
    clean, clean_lse = cuflash.attention(q, k, v, bias=bias, kernel=kernel, backend="cpu", return_lse=True)
    k[0, 33], v[0, 33] = poison, poison
    out, lse = cuflash.attention(q, k, v, bias=bias, kernel=kernel, backend="cpu", return_lse=True)
    np.testing.assert_allclose(out, clean, rtol=0, atol=bound(out))
    np.testing.assert_allclose(lse, clean_lse, rtol=0, atol=bound(lse, 8))


def test_a_damaged_cache_file_means_compiling_again(tmp_path):
    """One flipped bit in stored machine code could do anything; the checksum notices it."""
    code = "import numpy as np, cuflash; q = np.ones((1, 4, 2, 8), np.float32); print(cuflash.attention(q, q, q).sum())"
    first = run_python(code, CUFLASH_CACHE_DIR=str(tmp_path))
    (stored,) = tmp_path.rglob("*.nbc")
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.write_bytes(data)
    again = run_python(code, CUFLASH_CACHE_DIR=str(tmp_path))
    third = run_python(code, CUFLASH_CACHE_DIR=str(tmp_path))
    assert first.stdout == again.stdout == third.stdout == "64.0\n"
    assert "compiling" in first.stderr and "compiling" in again.stderr and "compiling" not in third.stderr

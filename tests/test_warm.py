"""Calls whose signature is known: same results and errors as a first call, the right addresses, nothing mixed up."""

from __future__ import annotations

import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import FakeArray
from warm_calls import F16, choices, expected, gpu, inputs, nothing_kept, same, there  # noqa: F401  fixtures among them

import cuflash
from cuflash import device, planner, warm
from cuflash.backends import cuda
from cuflash.problem import build_attention

OPTIONS = [
    {},
    {"causal": True},
    {"causal": "upper_left"},
    {"window": (2, 1)},
    {"window": [2, 1], "return_lse": True},
    {"scale": 0.5},
    {"softcap": 3},
    {"return_lse": True},
    {"layout": "BHSD", "causal": True, "return_lse": True},
    {"kernel": "fa2", "backend": "cuda"},
    {"kernel": "fa1", "backend": "cuda"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_warm_call_plans_nothing_and_gives_what_a_cold_one_gives(gpu, choices, options):
    def arrays(seed):
        if options.get("layout") == "BHSD":
            return inputs(seed, (2, 4, 5, 16), heads_kv=7, keys=4)  # 4 heads, 7 keys
        return inputs(seed)

    for seed in range(4):
        a = arrays(seed)
        same(cuflash.attention(*a, **options), expected(a, **options))
    assert sum(p.q.kind == "cupy" for p in choices) == 1, "the first call is planned, the others are not"
    assert len(gpu.launches) == 4 and len({x.name for x in gpu.launches}) == 1


def test_results_given_by_the_user_are_written_where_they_lie(gpu, choices):
    for seed in range(3):
        a = inputs(seed)
        out = FakeArray((2, 4, 5, 16), F16).transpose(0, 2, 1, 3)
        lse = FakeArray((2, 4, 5), np.float32)
        result = cuflash.attention(*a, out=out, lse=lse, return_lse=True)
        assert result[0] is out and result[1] is lse
        same(result, expected(a, return_lse=True))
        only_out = FakeArray((2, 5, 4, 16), F16)
        assert cuflash.attention(*a, out=only_out) is only_out
        same(only_out, expected(a))
        lse.fill(7)
        assert type(cuflash.attention(*a, lse=lse)) is FakeArray
        same(lse, expected(a, return_lse=True)[1])
    assert sum(p.q.kind == "cupy" for p in choices) == 3


def test_every_part_of_a_signature_counts(gpu):
    """One call after the other that differs in one thing: each gives what it must, so none took another's launch."""
    base = {"causal": False, "window": None, "scale": None, "softcap": None, "layout": "BSHD", "return_lse": False}
    changes = [
        {}, {"causal": True}, {"causal": "upper_left"}, {"window": (1, 1)}, {"window": (1, -1)}, {"window": (None, 1)}, {"scale": 0.3},
        {"scale": np.float32(0.7)}, {"scale": 2}, {"softcap": 2.0}, {"softcap": 5}, {"return_lse": True}, {"out_dtype": np.float16},
    ]
    square = (2, 6, 6, 16)
    shapes = [
        {"shape": square, "heads_kv": 6, "keys": 6}, {"shape": (2, 6, 6, 8), "heads_kv": 6, "keys": 6},
        {"shape": (1, 6, 6, 16), "heads_kv": 6, "keys": 6}, {"shape": (2, 6, 6, 16), "heads_kv": 3, "keys": 6},
        {"shape": (2, 6, 6, 16), "heads_kv": 6, "keys": 5}, {"shape": (2, 6, 6, 16), "heads_kv": 6, "keys": 6, "dtype": ml_dtypes.bfloat16},
    ]
    for turn in range(2):  # the second time all are warm
        for n, change in enumerate(changes):
            a = inputs(100 * turn + n, **shapes[0])
            options = {**base, **change}
            same(cuflash.attention(*a, **options), expected(a, **options))
        for n, shape in enumerate(shapes):
            a = inputs(200 * turn + n, **shape)
            same(cuflash.attention(*a, causal=True), expected(a, causal=True))
        a = inputs(turn, **shapes[0])
        same(cuflash.attention(*a, layout="BHSD", causal=True), expected(a, layout="BHSD", causal=True))
        turned = [x.transpose(0, 2, 1, 3) for x in a]
        same(cuflash.attention(*turned, causal=True), expected(turned, causal=True))
        flat = [x[0] for x in a]
        same(cuflash.attention(*flat, causal=True), expected(flat, causal=True))


@pytest.mark.parametrize("columns", range(1, 9))
def test_alignment_is_part_of_it(gpu, columns):
    """Slices of one buffer that start elsewhere need narrower loads."""
    wide = inputs(0, (1, 5, 2, 32), heads_kv=2)
    names = []
    for start in (0, columns, 0, columns):
        a = [x[..., start : start + 16] for x in wide]
        same(cuflash.attention(*a, causal=True), expected(a, causal=True))
        names.append(gpu.launches[-1].name)
    width = next(w for w in (16, 8, 4, 2) if 2 * columns % w == 0)
    assert names[0] == names[2] and names[1] == names[3]
    assert ("load" in names[1] or "strided" in names[1]) == (width < 16) and (names[0] == names[1]) == (width == 16)
    assert gpu.launches[0].params["q"] + 2 * columns == gpu.launches[1].params["q"]


def test_alignment_of_a_result_is_part_of_it(gpu):
    """Rows of results are written 16 bytes at a time only where they begin at multiples of 16."""
    a, memory = inputs(0, (1, 5, 2, 16)), FakeArray((1, 5, 2, 32), F16)
    for start in (0, 4, 0, 4):
        out = memory[..., start : start + 16]
        cuflash.attention(*a, out=out)
        assert gpu.launches[-1].params["out_vector"] == (start == 0)
        same(out, expected(a))


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({"causal": True}, {"causal": 1}, TypeError),
        ({"scale": 1.0}, {"scale": True}, TypeError),
        ({"softcap": 1}, {"softcap": True}, TypeError),
        ({"window": (1, 0)}, {"window": (True, False)}, TypeError),
        ({"window": (1, 0)}, {"window": (1.0, 0.0)}, TypeError),
        ({"num_splits": 1}, {"num_splits": True}, TypeError),
        ({"batch_invariant": True}, {"batch_invariant": 1}, TypeError),
        ({"return_lse": True}, {"return_lse": 1}, TypeError),
        ({"return_lse": False}, {"return_lse": 0}, TypeError),
        ({}, {"layout": "SBHD"}, ValueError),
        ({}, {"kernel": "fa4"}, ValueError),
        ({}, {"score": b"dot"}, TypeError),
        ({}, {"backend": "cpu"}, TypeError),
        ({}, {"out_dtype": int}, TypeError),
        ({}, {"out": 1}, TypeError),
        ({}, {"lse": [1]}, TypeError),
        ({}, {"precision": 0}, TypeError),
    ],
    ids=str,
)
def test_a_warm_call_refuses_what_a_cold_one_refuses(gpu, good, bad, error):
    a = inputs(0)
    cuflash.attention(*a, **good)
    launched = len(gpu.launches)
    with pytest.raises(error):
        cuflash.attention(*a, **bad)
    assert len(gpu.launches) == launched


def test_buffers_that_overlap_are_refused_when_warm(gpu):
    q, k, v = inputs(0, (2, 5, 4, 16), heads_kv=4, keys=5)
    out, lse = FakeArray((2, 5, 4, 16), F16), FakeArray((2, 4, 5), np.float32)
    cuflash.attention(q, k, v, out=out)
    cuflash.attention(q, k, v, out=out, lse=lse)
    launched = len(gpu.launches)
    for name, a in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out: overlaps {name} in memory"):
            cuflash.attention(q, k, v, out=a)
    # A log-sum-exp of float32 in the memory of an array of float16, aligned alike.
    for name, a in (("q", q), ("out", out)):
        inside = FakeArray((), host=a.host.reshape(-1)[: 2 * 40].view(np.float32).reshape(2, 4, 5), device_id=0)
        with pytest.raises(ValueError, match=f"lse: overlaps {name} in memory"):
            cuflash.attention(q, k, v, out=out, lse=inside)
    with pytest.raises(ValueError, match="several elements share one address"):
        folded = FakeArray((), host=np.broadcast_to(out.host[:1], out.shape), device_id=0)
        cuflash.attention(q, k, v, out=folded)
    assert len(gpu.launches) == launched


def test_results_between_the_rows_of_an_input_are_allowed_when_warm(gpu):
    """Their bytes interleave, so that the quick look cannot tell; the exact one can."""
    fused = there(np.random.default_rng(0).standard_normal((2, 5, 4, 4, 16)).astype(F16))
    q, k, v, out = (fused[:, :, n] for n in range(4))
    for _ in range(3):
        fused.host[:, :, 3] = np.nan
        assert cuflash.attention(q, k, v, out=out) is out
        same(out, expected((q, k, v)))


def test_device_and_stream_are_those_of_the_arrays_and_the_caller(gpu):
    for ordinal in (0, 1):
        a = inputs(0, device_id=ordinal)
        for current in (0, 1):
            for stream in (None, 77, 5):
                with gpu.using(device=current, stream=5):
                    result = cuflash.attention(*a, stream=stream)
                    assert (gpu.current().device, gpu.current().stream) == (current, 5)
                launched = gpu.launches[-1]
                assert (launched.device, launched.ordinal, launched.stream) == (ordinal, ordinal, stream or 5)
                assert result.device.id == ordinal
                same(result, expected(a))
    assert len(gpu.launches) == 12


def test_threads_do_not_mix_their_addresses(gpu):
    """The launches of all threads wait for each other with their structs filled in, then read them."""
    threads, rounds = 6, 5
    barrier = threading.Barrier(threads)
    work = [[inputs(100 * t + r) for r in range(rounds)] for t in range(threads)]
    cuflash.attention(*work[0][0], causal=True)
    gpu.before.append(lambda params: barrier.wait(timeout=60))
    results = [[None] * rounds for _ in range(threads)]

    def run(t):
        for r in range(rounds):
            results[t][r] = cuflash.attention(*work[t][r], causal=True)

    pool = [threading.Thread(target=run, args=(t,)) for t in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    gpu.before.clear()
    for t in range(threads):
        for r in range(rounds):
            same(results[t][r], expected(work[t][r], causal=True))


def test_a_call_inside_a_call_does_not_disturb_it(gpu):
    """As a finalizer or a signal handler may make one, between the writing of the struct and the launch."""
    first, second, inner = inputs(0), inputs(1), []
    cuflash.attention(*first)

    def interrupt(params):
        if not inner:
            inner.append(None)
            inner.append(cuflash.attention(*second))

    gpu.before.append(interrupt)
    same(cuflash.attention(*first), expected(first))
    same(inner[1], expected(second))


def test_a_failed_launch_leaves_a_working_one(gpu):
    a = inputs(0)
    cuflash.attention(*a)

    def fail(params):
        raise RuntimeError("no launch")

    gpu.before.append(fail)
    with pytest.raises(RuntimeError, match="no launch"):
        cuflash.attention(*a)
    gpu.before.clear()
    same(cuflash.attention(*a), expected(a))


def test_an_allocator_that_aligns_less(gpu, monkeypatch):
    a = inputs(0)
    cuflash.attention(*a)
    allocate = FakeArray.__init__

    def shifted(self, shape, dtype=F16, host=None, device_id=None):
        if host is None:
            host = np.full(int(np.prod(shape)) + 64, np.nan, dtype)
            first = (-host.ctypes.data % 16 + 2) // host.dtype.itemsize
            host = host[first : first + int(np.prod(shape))].reshape(shape)
        allocate(self, shape, dtype, host, device_id)

    monkeypatch.setattr(FakeArray, "__init__", shifted)
    for _ in range(2):
        result = cuflash.attention(*a)
        assert result.data.ptr % 16 == 2 and not gpu.launches[-1].params["out_vector"]
        same(result, expected(a))


def test_what_is_kept_is_bounded_and_holds_no_array(gpu, monkeypatch):
    monkeypatch.setattr(warm.problems, "most", 8)
    monkeypatch.setattr(warm.launches, "most", 8)
    for n in range(1, 30):
        a = inputs(n, (1, n, 2, 8), keys=n)
        same(cuflash.attention(*a), expected(a))
        assert len(warm.problems) <= 8 and len(warm.launches) <= 8
    out = cuflash.attention(*a)
    gone = [weakref.ref(x) for x in (*a, out)]
    gpu.launches.clear()
    del a, out
    gc.collect()
    assert not any(r() for r in gone)
    host = [np.ones((1, 3, 2, 8), np.float32) for _ in range(3)]
    out = cuflash.attention(*host, backend="reference")
    gone = [weakref.ref(x) for x in (*host, out)]
    del host, out
    gc.collect()
    assert not any(r() for r in gone)


def test_a_pretended_gpu_is_neither_kept_nor_served(gpu):
    a = inputs(0, (1, 70, 2, 128), keys=70)
    p = cuflash.plan(*a)
    cuflash.attention(*a)
    p.run(*a)
    usual = gpu.launches[-1].name
    with device.pretend(device.KNOWN["T4"]):
        cuflash.attention(*a)
        other = gpu.launches[-1].name
    cuflash.attention(*a)
    assert other != usual and gpu.launches[-1].name == usual


def test_a_log_asked_for_later_is_written(gpu, monkeypatch, capsys):
    a = inputs(0)
    cuflash.attention(*a)
    monkeypatch.setattr(planner, "_reported", set())
    monkeypatch.setenv("CUFLASH_LOG", "plan")
    cuflash.attention(*a)
    assert "cuda/decode" in capsys.readouterr().err


def test_options_that_are_arrays_are_looked_at_every_time(gpu):
    a = inputs(0)
    lengths = np.array([3, 7])
    for change in (0, 1, 2):
        lengths[0] += change
        same(cuflash.attention(*a, kv_lengths=lengths), expected(a, kv_lengths=lengths))
    assert not warm.launches
    lengths[0] = 8
    with pytest.raises(ValueError, match="kv_lengths"):
        cuflash.attention(*a, kv_lengths=lengths)
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="cannot be captured"):
        cuflash.attention(*a, kv_lengths=[3, 3])
    cuflash.attention(*a)  # this one can


def test_a_plan_runs_on_other_arrays_and_streams(gpu, choices):
    a = inputs(0)
    p = cuflash.plan(*a, causal=True, return_lse=True, stream=9)
    del choices[:]
    for seed in range(3):
        a = inputs(seed)
        out, lse = FakeArray((2, 5, 4, 16), F16), FakeArray((2, 4, 5), np.float32)
        result = p.run(*a, out=out, lse=lse, stream=11 if seed == 1 else None)
        assert result[0] is out and result[1] is lse
        same(result, expected(a, causal=True, return_lse=True))
        same(p.run(*a), expected(a, causal=True, return_lse=True))
    assert [x.stream for x in gpu.launches] == [9, 9, 11, 9, 9, 9]
    assert all(x.q.kind == "numpy" for x in choices), "only the oracle was planned"
    with pytest.raises(ValueError, match="out: overlaps q"):
        p.run(*a, out=a[0])
    with pytest.raises(ValueError, match="this plan was made for"):
        p.run(*inputs(0, keys=6))
    with pytest.raises(ValueError, match="this plan was made for"):
        p.run(*inputs(0, device_id=1))


def test_a_plan_with_lengths_keeps_them(gpu):
    a = inputs(0)
    p = cuflash.plan(*a, kv_lengths=[3, 5])
    for _ in range(3):
        same(p.run(*a), expected(a, kv_lengths=[3, 5]))


def test_no_launch_is_kept_that_knows_nothing_of_a_bias(gpu, monkeypatch):
    """A result may overlap it."""
    a, bias = inputs(0), there(np.zeros((5, 7), F16))
    problem = build_attention(*a)
    chosen = planner.choose(problem)
    monkeypatch.setattr(cuda, "prepare", lambda plan, problem: print)
    kept = warm.Kept(4)
    assert warm.prepare(kept, (1, False), chosen, build_attention(*a, bias=bias), a[0], None, False) is None and not kept

"""The CPU backend in processes that do more than call it: many threads, forks, exceptions, exit."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import cuflash
from cuflash.backends import cpu, cpu_threads
from cuflash.problem import build_attention


@pytest.fixture
def four_threads(monkeypatch):
    """As on a machine with four processors, whatever this one has."""
    monkeypatch.setattr(cpu_threads, "_count", 4)
    monkeypatch.setattr(cpu_threads, "_jobs", queue.SimpleQueue())
    monkeypatch.setattr(cpu_threads, "_threads", [])


def run_python(code: str, timeout: float = 120, **environment: str) -> str:
    command, env = [sys.executable, "-c", textwrap.dedent(code)], {**os.environ, **environment}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- the pool ------------------------------------------------------------------------------------------------------


def test_every_portion_is_done_once(four_threads):
    done: list[int] = []
    workers: list[str] = []

    def worker():
        workers.append(threading.current_thread().name)
        return lambda portion: (time.sleep(0.001), done.append(portion))

    cpu_threads.run(worker, range(200), 4)
    assert sorted(done) == list(range(200))
    assert len(workers) == len(set(workers)) and 1 < len(workers) <= 4
    assert threading.current_thread().name in workers


def test_one_thread_means_the_calling_one(four_threads):
    names = set()
    cpu_threads.run(lambda: lambda portion: names.add(threading.current_thread().name), range(50), 1)
    assert names == {threading.current_thread().name}
    assert not cpu_threads._threads


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["caller", "partner"])
def test_an_exception_stops_the_rest_and_waits_for_everyone(four_threads, where, error):
    caller = threading.current_thread()
    busy = 0
    lock = threading.Lock()
    begun = []

    def do(portion):
        nonlocal busy
        with lock:
            busy += 1
            begun.append(portion)
        try:
            time.sleep(0.02)
            if (threading.current_thread() is caller) == (where == "caller"):
                raise error("stop")
        finally:
            with lock:
                busy -= 1

    with pytest.raises(error, match="stop"):
        cpu_threads.run(lambda: do, range(1000), 4)
    assert busy == 0
    assert len(begun) < 1000
    done = []
    cpu_threads.run(lambda: done.append, range(10), 4)  # the pool is as good as new
    assert sorted(done) == list(range(10))


def test_calls_inside_calls_finish(four_threads):
    """A worker that needs the pool itself must not wait for a place in it."""
    total = []

    def outer(portion):
        cpu_threads.run(lambda: total.append, range(5), 4)

    cpu_threads.run(lambda: outer, range(20), 4)
    assert len(total) == 100


def test_thread_count_follows_the_process_and_the_environment():
    code = "from cuflash.backends.cpu_threads import thread_count; print(thread_count())"
    available = len(os.sched_getaffinity(0))
    assert int(run_python(code, NUMBA_NUM_THREADS="1")) == 1
    assert int(run_python(code, NUMBA_NUM_THREADS="1000")) == available
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + code
    assert int(run_python(one, NUMBA_NUM_THREADS="8")) == 1


# --- attention from many sides -------------------------------------------------------------------------------------


def test_many_threads_at_once(four_threads):
    """Sixteen threads with problems of their own, big enough for the pool: each gets its own result, bit for bit."""
    problems = [[normal(1, 200 + 20 * n, 2, 32, seed=3 * n + m) for m in range(3)] for n in range(16)]
    work = cpu.cut_up(build_attention(*problems[-1]), "fa2")
    assert work.threads > 1
    expected = [cuflash.attention(*arrays, causal=True, backend="cpu") for arrays in problems]
    wrong, failed = [], []

    def hammer(n):
        try:
            for _ in range(20):
                out = cuflash.attention(*problems[n], causal=True, backend="cpu")
                if out.tobytes() != expected[n].tobytes():
                    wrong.append(n)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=hammer, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong and not failed


def test_a_split_sequence_is_worked_on_by_several_threads(four_threads):
    q, k = normal(1, 1, 2, 64), normal(1, 40_000, 2, 64, seed=1)
    plan = cuflash.plan(q, k, k, backend="cpu", kernel="decode")
    assert plan.num_splits > 1 and plan.threads > 1
    out = cuflash.attention(q, k, k, backend="cpu", kernel="decode")
    one = cuflash.attention(q, k, k, backend="cpu", kernel="fa2")
    np.testing.assert_allclose(out, one, rtol=0, atol=4 * np.finfo(np.float32).eps)


FORK = """
    import os, sys, threading, numpy as np, cuflash
    from cuflash.backends import cpu_threads
    cpu_threads._count = 4
    q = np.random.default_rng(0).standard_normal((1, 700, 2, 32)).astype(np.float32)
    expected = cuflash.attention(q, q, q, causal=True, backend="cpu")
    assert cpu_threads._threads
    if {busy}:  # fork while other threads are inside calls
        stop = threading.Event()
        def loop():
            while not stop.is_set():
                cuflash.attention(q, q, q, causal=True, backend="cpu")
        threads = [threading.Thread(target=loop) for _ in range(3)]
        for thread in threads:
            thread.start()
    for _ in range(5):
        child = os.fork()
        if not child:
            same = cuflash.attention(q, q, q, causal=True, backend="cpu").tobytes() == expected.tobytes()
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if {busy}:
        stop.set()
    assert cuflash.attention(q, q, q, causal=True, backend="cpu").tobytes() == expected.tobytes()
"""


@pytest.mark.parametrize("busy", [False, True])
def test_fork_after_use(busy):
    run_python(FORK.format(busy=busy))


def test_exit_does_not_hang_and_a_late_call_still_works():
    """At exit the pool is gone: a call from an atexit function runs in its own thread."""
    out = run_python(
        """
        import atexit, numpy as np, cuflash
        from cuflash.backends import cpu_threads
        cpu_threads._count = 4
        q = np.ones((1, 700, 2, 32), np.float32)
        atexit.register(lambda: print(cuflash.attention(q, q, q, backend="cpu").mean()))
        cuflash.attention(q, q, q, backend="cpu")
        """
    )
    assert float(out) == 1


def test_ctrl_c_leaves_promptly_and_the_next_call_is_right():
    code = """
        import os, signal, threading, time, numpy as np, cuflash
        from cuflash.backends import cpu_threads
        cpu_threads._count = 2
        small = np.ones((1, 64, 1, 32), np.float32)
        cuflash.attention(small, small, small, backend="cpu")
        big = np.ones((1, 20000, 8, 64), np.float32)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.perf_counter()
        try:
            cuflash.attention(big, big, big, backend="cpu")
        except KeyboardInterrupt:
            print("interrupted", time.perf_counter() - start)
        assert (cuflash.attention(small, small, small, backend="cpu") == 1).all()
    """
    word, seconds = run_python(code).split()
    assert word == "interrupted"
    assert float(seconds) < 10  # the whole call takes several times as long


def test_the_process_stays_as_it_was():
    """No environment variable, signal handler, BLAS limit or floating-point mode changes, only idle threads remain."""
    run_python(
        """
        import os, signal, threading, numpy as np, threadpoolctl, scipy.linalg
        from cuflash.backends import cpu_threads
        cpu_threads._count = 3
        def state():
            blas = sorted((p["filepath"], p["num_threads"]) for p in threadpoolctl.threadpool_info())
            tiny = float(np.float32(1e-40) * np.float32(1))
            return dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], blas, tiny, np.geterr()
        import numba, cuflash
        before = state()
        q = np.ones((1, 700, 2, 32), np.float32)
        cuflash.attention(q, q, q, backend="cpu")
        assert state() == before
        extra = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        assert len(extra) <= 2 and all(name.startswith("cuflash-cpu") for name in extra), extra
        """
    )


def test_without_a_compiler_it_declines_with_the_reason():
    out = run_python(
        """
        import numpy as np
        import cuflash
        q = np.ones((1, 2, 1, 4), np.float32)
        try:
            cuflash.attention(q, q, q)
        except cuflash.NoBackendError as error:
            print("NUMBA_DISABLE_JIT" in str(error))
        print(cuflash.attention(q, q, q, kernel="naive").sum())
        """,
        NUMBA_DISABLE_JIT="1",
    )
    assert out.split() == ["True", "8.0"]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer on this system")
def test_interrupts_at_any_moment_leave_a_working_process(four_threads):
    """A few hundred KeyboardInterrupts at random moments of a call: nothing hangs, nobody writes after the call has raised."""
    rng = np.random.default_rng(0)
    q, k, v = (normal(4, 256, 4, 32, seed=n) for n in range(3))
    expected = cuflash.attention(q, k, v, backend="cpu")
    start = time.perf_counter()
    cuflash.attention(q, k, v, backend="cpu")
    duration = time.perf_counter() - start
    armed = False

    def interrupt(*_):
        if armed:
            raise KeyboardInterrupt

    before, hits = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for _ in range(400):
            out = np.full_like(q, np.nan)
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 1.2 * duration * rng.random() + 1e-5)
                cuflash.attention(q, k, v, out=out, backend="cpu")
                armed = False
            except KeyboardInterrupt:
                armed = False
                hits += 1
                seen = out.tobytes()
                time.sleep(0.002)
                assert out.tobytes() == seen, "written after the call had raised"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > 20
    assert cuflash.attention(q, k, v, backend="cpu").tobytes() == expected.tobytes()

"""The threads of the CPU backend: one pool per process, made at first use.

The calling thread always works, too, so a call makes progress even when the pool is busy with other calls, and a call
that needs one thread never touches the pool. Nothing is left behind in the process but idle threads, which end with it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_count: int | None = None


def _forget() -> None:
    """In a forked child: the parent's threads are not here, and its lock may have been held."""
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def thread_count() -> int:
    """Threads of a call: the processors this process may use, at most NUMBA_NUM_THREADS; decided once."""
    global _count
    if _count is None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        try:
            limit = int(os.environ.get("NUMBA_NUM_THREADS", available))
        except ValueError:
            limit = available
        _count = max(1, min(available, limit))
    return _count


def _submit(function: Callable[[], None]) -> Future | None:
    """Hand a function to the pool, or None where there can be no pool (any more): at interpreter exit, out of threads."""
    global _pool
    try:
        with _lock:
            if _pool is None:
                _pool = ThreadPoolExecutor(max(1, thread_count() - 1), thread_name_prefix="cuflash-cpu")
            pool = _pool
        return pool.submit(function)
    except RuntimeError:
        return None


def run(worker: Callable[[], Callable[[Any], None]], portions: Iterable[Any], threads: int) -> None:
    """Work off ``portions``, each by one thread, in about their order, and return when all are done.

    Parameters
    ----------
    worker : callable
        Called once in each thread that takes part; returns the function that works off one portion.
    portions : iterable
        The work. The next free thread takes the next portion.
    threads : int
        At most so many threads take part, the calling one included.

    Notes
    -----
    After an exception, in the caller (KeyboardInterrupt) or in a worker, no further portion begins, and the call
    raises only when every thread has left, so that nobody writes into buffers that are gone.
    """
    waiting = deque(portions)

    def work() -> None:
        try:
            if not waiting:
                return
            do = worker()
            while True:
                try:
                    portion = waiting.popleft()
                except IndexError:
                    return
                do(portion)
        except BaseException:
            waiting.clear()
            raise

    partners: list[Future] = []
    try:
        for _ in range(min(threads, len(waiting)) - 1):
            partner = _submit(work)
            if partner is None:
                break
            partners.append(partner)
        work()
    finally:
        _leave(waiting, partners)
    for partner in partners:
        if not partner.cancelled():
            partner.result()


def _leave(waiting: deque, partners: list[Future]) -> None:
    """Wait until no partner runs, through any number of interrupts, and raise the last of these afterwards."""
    interrupt: BaseException | None = None
    while True:
        try:
            wait([partner for partner in partners if not partner.cancel()])
            break
        except BaseException as error:  # noqa: BLE001  raised below
            interrupt = error
            waiting.clear()
    if interrupt is not None:
        raise interrupt

"""The threads of the CPU backend: daemon threads that wait for work, made at first use.

The calling thread always works, too, so a call makes progress even when the others are busy with other calls, and a call
that needs one thread touches none of this. Nothing is left behind in the process but idle threads, which end with it.

There is no lock that an interrupt (KeyboardInterrupt at any bytecode) could leave held: threads meet in SimpleQueue and
in the appends of lists and deques, which are atomic.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

_jobs: SimpleQueue = SimpleQueue()  # each entry is an invitation to take part in a job
_threads: list[threading.Thread] = []
_count: int | None = None


def _forget() -> None:
    """In a forked child: the parent's threads are not here."""
    global _jobs, _threads
    _jobs, _threads = SimpleQueue(), []


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


class _Job:
    """One call of ``run``. A partner signs ``entered`` before it looks at ``closed``, so the caller knows whom to wait for."""

    def __init__(self, worker: Callable[[], Callable[[Any], None]], portions: Iterable[Any]):
        self.worker: Callable[[], Callable[[Any], None]] | None = worker
        self.waiting = deque(portions)
        self.entered: list[None] = []
        self.left: list[None] = []
        self.leaving: SimpleQueue = SimpleQueue()
        self.errors: list[BaseException] = []
        self.closed = False

    def work(self) -> None:
        """Work off portions until none waits. After an exception no further portion begins, in any thread."""
        worker = self.worker
        try:
            if not self.waiting or worker is None:
                return
            do = worker()
            while True:
                try:
                    portion = self.waiting.popleft()
                except IndexError:
                    return
                do(portion)
        except BaseException:
            self.waiting.clear()
            raise

    def take_part(self) -> None:
        """What a partner does."""
        self.entered.append(None)
        try:
            if not self.closed:
                self.work()
        except BaseException as error:  # noqa: BLE001  raised by the caller
            self.errors.append(error)
        finally:
            self.left.append(None)
            self.leaving.put(None)

    def close(self) -> None:
        """Return when no partner works any more and none will; an interrupt meanwhile is raised afterwards."""
        interrupt: BaseException | None = None
        while True:
            try:
                self.closed = True
                while len(self.left) < len(self.entered):
                    self.leaving.get()
                self.worker = None  # invitations that nobody took yet must not keep the user's arrays alive
                break
            except BaseException as error:  # noqa: BLE001  raised below
                interrupt = error
                self.waiting.clear()
        if interrupt is not None:
            raise interrupt


def _serve(jobs: SimpleQueue) -> None:
    """A thread's life."""
    while True:
        jobs.get().take_part()


def _partners(wanted: int) -> int:
    """Have ``wanted`` threads, or as many as the system gives (none at interpreter exit)."""
    while len(_threads) < wanted:
        thread = threading.Thread(target=_serve, args=(_jobs,), name=f"cuflash-cpu-{len(_threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            break
        _threads.append(thread)
    return min(wanted, len(_threads))


def run(worker: Callable[[], Callable[[Any], None]], portions: Iterable[Any], threads: int) -> None:
    """Work off ``portions``, each by one thread, in about their order, and return when all are done.

    Parameters
    ----------
    worker : callable
        Called once in each thread that takes part; returns the function that works off one portion. It must hold what it
        writes to: a thread that an interrupt made the caller lose then still writes into memory that exists.
    portions : iterable
        The work. The next free thread takes the next portion.
    threads : int
        At most so many threads take part, the calling one included.

    Notes
    -----
    After an exception, in the caller (KeyboardInterrupt) or in a worker, no further portion begins, and the call
    raises only when every thread has left, so that nobody writes into buffers that are gone.
    """
    job = _Job(worker, portions)
    try:
        try:
            for _ in range(_partners(min(threads, len(job.waiting)) - 1)):
                _jobs.put(job)
            job.work()
        finally:
            job.close()
    finally:
        job.close()  # again, for an interrupt between the "finally" above and the "try" of close()
    if job.errors:
        raise job.errors[0]

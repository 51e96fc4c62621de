"""The ordered registry of backends. A backend is a module with the functions of ``Backend``, imported at first use."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, Protocol

from ..types import HOST, Append, Plan, Problem

# Name -> module in this package, in the order in which "auto" asks. None: the name is reserved, its backend is not offered yet.
REGISTRY: dict[str, str | None] = {
    "cuda": "cuda",
    "numba-cuda": "numba_cuda",
    "cpu": "cpu",
    "reference": "reference",
}


class Backend(Protocol):
    """What a backend module offers.

    One that computes gradients also has ``run_backward(plan, problem) -> Gradients``; one that materialises attention weights
    ``run_weights(plan, problem)``, which writes problem.weights; one that may lack something in an installation
    ``unusable() -> str | None``; one whose ``run`` may fail for want of a compiler or in a stream capture ``make_ready(plan, problem)``,
    which then fails in its place and else changes nothing. ``TAKES_DEVICE_INDICES`` names the kernels that read lengths where they are,
    ``TAKES_E4M3`` those for keys and values in float8_e4m3fn.
    """

    NAME: str
    KERNELS: tuple[str, ...]

    def auto_kernels(self, problem: Problem) -> tuple[str, ...]:
        """Kernels for kernel="auto", best first."""

    def decline(self, problem: Problem, kernel: str) -> str | None:
        """Why it does not run this problem with this kernel, in the user's words, or None."""

    def plan(self, problem: Problem, kernel: str) -> Plan:
        """Tile, splits, threads and workspace. Cheap and pure."""

    def run(self, plan: Plan, problem: Problem) -> None:
        """Write every element of problem.out, and of problem.lse unless it is None."""


@functools.cache
def load(name: str) -> Backend | str:
    """The backend's module, or in words why it cannot be used."""
    module = REGISTRY[name]
    if module is None:
        return "not part of this version of cuflash"
    return importlib.import_module(f".{module}", __name__)  # type: ignore[return-value]


@contextlib.contextmanager
def appended(plan: Plan, problem: Problem, new: Append | None) -> Iterator[Problem]:
    """Do what a decode call does before it attends; inside, the problem that its plan then runs on.

    Whatever can fail has been tried before anything is written.
    """
    if new is None:
        yield problem
        return
    why = ""
    if problem.q.device != HOST:
        from . import cuda_append

        backend: Any = load(plan.backend)
        if hasattr(backend, "make_ready"):
            backend.make_ready(plan, problem)
        why = cuda_append.decline(problem, new) or ""
        if not why:
            with cuda_append.appended(problem, new) as ready:
                yield ready
            return
    from . import append

    with append.appended(problem, new, why) as ready:
        yield ready

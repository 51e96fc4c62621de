"""The ordered registry of backends. A backend is a module with the functions of ``Backend``, imported at first use."""

from __future__ import annotations

import functools
import importlib
from typing import Protocol

from ..types import ArrayView, Plan, Problem

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
    ``unusable() -> str | None``.
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


def append_to_cache(problem: Problem, k_new: ArrayView, v_new: ArrayView) -> None:
    """Write the new keys and values of a decode call into its caches."""
    from . import append

    append.append(problem, k_new, v_new)

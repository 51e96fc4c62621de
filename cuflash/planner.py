"""Problem -> Plan: which kernel of which backend runs, and why. Pure: it asks, it starts nothing."""

from __future__ import annotations

import dataclasses

from . import backends, host
from .types import HOST, NoBackendError, Plan, Problem


def choose(problem: Problem) -> Plan:
    """The first backend and kernel, in the registry's order, that do not decline.

    Raises
    ------
    NoBackendError
        If all decline; the message lists each reason.
    """
    declined: list[str] = []
    for name in candidates(problem):
        backend = backends.load(name)
        if isinstance(backend, str):  # why it cannot be loaded
            declined.append(f"{name}: {backend}")
            continue
        for kernel in kernels_to_try(backend, problem):
            reason = decline(backend, problem, kernel) or unusable(backend)
            if reason is None:
                plan = backend.plan(problem, kernel)
                if declined:
                    plan = dataclasses.replace(plan, declined=(*declined, *plan.declined))
                if host.logs("plan"):
                    report(problem, plan)
                return plan
            declined.append(f"{name}/{kernel}: {reason}")
    asked = f"kernel={problem.kernel!r}, backend={problem.backend!r}"
    raise NoBackendError(f"no backend can run this {problem.op} call ({asked}):\n  " + "\n  ".join(declined))


def report(problem: Problem, plan: Plan) -> None:
    """Print a choice when it is made for the first time (CUFLASH_LOG=plan)."""
    rows, keys = plan.tile
    what = f"{problem.op}{' varlen' if problem.varlen else ''}{' paged' if problem.paged else ''} {problem.q.dtype}"
    sizes = f"head size {problem.head_dim}" + (f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    how = f"tile {rows} x {keys}, {plan.num_splits} split{'s' if plan.num_splits > 1 else ''}, {plan.threads} threads"
    line = "; ".join([f"{what}, {sizes}: {plan.backend}/{plan.kernel}, {how}", plan.reason, *(f"declined {x}" for x in plan.declined)])
    if line not in _reported:
        _reported.add(line)
        host.log("plan", line)


_reported: set[str] = set()


def candidates(problem: Problem) -> tuple[str, ...]:
    """Backends to ask: the named one, or all that work where the arrays are. The oracle runs only when named."""
    if problem.backend is not None:
        return (problem.backend,)
    return ("cpu",) if problem.q.device == HOST else ("cuda", "numba-cuda")


def kernels_to_try(backend: backends.Backend, problem: Problem) -> tuple[str, ...]:
    """Kernels to ask of one backend: the named one, or its own order of preference."""
    if problem.kernel != "auto":
        return (problem.kernel,)
    return backend.auto_kernels(problem)


def decline(backend: backends.Backend, problem: Problem, kernel: str) -> str | None:
    """Why a backend does not run this kernel on this problem, or None if it does."""
    if kernel not in backend.KERNELS:
        return f"this backend has no such kernel; it has {', '.join(backend.KERNELS)}"
    if problem.op == "backward" and not hasattr(backend, "run_backward"):
        return "this backend has no backward pass yet; backend='reference' has one (float64, slow)"
    if problem.op == "weights" and not hasattr(backend, "run_weights"):
        return "it never stores the weights; attention_weights() works on NumPy arrays, with backend 'cpu' or 'reference'"
    if problem.e4m3 and kernel not in getattr(backend, "TAKES_E4M3", ()):
        return f"keys and values in {problem.k.dtype}; on a GPU kernel='decode' of backend='cuda' takes them, on NumPy arrays 'cpu'"
    if problem.indices_on_device and kernel not in getattr(backend, "TAKES_DEVICE_INDICES", ()):
        return f"{', '.join(problem.indices_on_device)} on the device; it needs the numbers on the host, pass cupy.asnumpy(x)"
    return backend.decline(problem, kernel)


def unusable(backend: backends.Backend) -> str | None:
    """What in this installation keeps a backend from running anything, or None."""
    return backend.unusable() if hasattr(backend, "unusable") else None

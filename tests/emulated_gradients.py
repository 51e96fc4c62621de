"""The raw backward kernels, thread by thread on the host, as targets of the suites that differentiate NumPy arrays."""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from case import BF16, F16, F32, F64
from cases import Target
from cuflash import NoBackendError, device
from cuflash import arrays as views
from cuflash import problem as problems
from cuflash.backends import cuda, cuda_backward
from cuflash.device import DeviceInfo
from cuflash.types import Gradients, Problem
from emulator import backward, backward_fp, emulate

H200 = device.KNOWN["H200"]
# Each kernel with the types that it is tested with; float32 and float64 are kernels of their own, which count as fa2.
RUNS = () if emulate.why_unusable() else (
    (Target("emulator", "fa3"), BF16), *((Target("emulator", "fa2"), dtype) for dtype in (F16, F32, F64)),
)


@functools.cache
def shared() -> emulate.Emulator:
    """One for the process, with everything that it has compiled."""
    folder = tempfile.TemporaryDirectory()
    made = emulate.Emulator(Path(folder.name))
    atexit.register(lambda: (made.close(), folder.cleanup()))
    return made


def call(function: Callable, args: tuple, options: dict[str, Any]) -> Any:
    """A public function: the backward pass by the raw kernel of that name, anything else by the oracle."""
    kernel = options["kernel"]
    if not function.__name__.endswith("_backward"):
        return function(*args, **{**options, "kernel": "naive", "backend": "reference"})
    options = {name: value for name, value in options.items() if name not in ("kernel", "backend")}
    if len(args) > 6:
        options["varlen"] = (*args[6:8], options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None))
    problem = problems.build_backward(*args[:6], **options)
    return problems.user_gradients(differentiate(shared(), problem, kernel, H200), problem, options.get("layout", "BSHD"), np.ndim(args[1]))


def differentiate(made: emulate.Emulator, problem: Problem, kernel: str, info: DeviceInfo, side: str = "end") -> Gradients:
    """Gradients in canonical axis order; the ends of all arrays, or their starts, lie at forbidden pages."""
    from test_kernels_emulated_backward_fa2 import run as run_fa2

    if (reason := cuda.decline(problem, kernel)) is not None:
        raise NoBackendError(reason)
    if kernel == "fa3":
        chosen = cuda_backward.instance(problem, "fa3", info)
        if cuda_backward.copies_dout(problem, chosen):
            problem = problem.replace(dout=views.view(np.ascontiguousarray(problem.dout.array), "dout"))
        return backward.run(made, problem, chosen, info, side)
    run = backward_fp.run if cuda_backward.of_reals(problem, kernel) else run_fa2
    found = run(made, problem, info, side=side)
    if problem.bias is None:
        return found
    dbias = found.dbias.reshape(problem.bias_shape).astype(problem.bias.dtype)
    return Gradients(found.dq, found.dk, found.dv, dbias, found.dsinks)

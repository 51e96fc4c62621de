"""prefill_fa3 on the host, thread by thread: right results, and nothing that a GPU must not do. Needs a C++ compiler, no GPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
from case import BF16, F16, Case, alibi, case, causal, fixed, sinks, upper_left
from cuflash import tiles, tiles_fa3
from cuflash.backends import cuda, cuda_fa3
from emulator import emulate
from test_kernels_emulated import H200, Run, of_arrays, of_case

KINDS = {"full": (), "causal": (causal,), "window": (fixed(window=(150, 3)),), "softcap": (causal, fixed(softcap=3.0))}


class Fa3Run(NamedTuple):
    """Of fewer blocks than the GPU has: each takes several tiles, one after the other."""

    run: Run
    grid: int


def runs_of(c: Case, dtype: np.dtype, grid: int = 2) -> Fa3Run:
    return Fa3Run(of_case(c, dtype, H200), grid)

"""Numba's simulator: the Numba CUDA kernels run on the host, in processes of their own that are started for it."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

import devices
import pytest

HERE = Path(__file__).parent
# Suite, selection, and how many tests it has at least.
PARTS = (
    ("test_conformance.py", "numba-cuda/fa1", 150),
    ("test_conformance.py", "numba-cuda/decode", 150),
    ("test_gradients.py", "numba-cuda", 40),
    ("test_hard_gradients.py", "float32 and (case_1_ or case_2_ or case_3_ or case_26 and 2-5 or case_31 or case_64 or sink)", 11),
    ("test_numba_cuda.py", "test", 25),
)


def run_part(part: tuple[str, str, int]) -> subprocess.CompletedProcess:
    suite, selection, _ = part
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / suite), "-k", selection, "-m", "not gpu"]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)


@pytest.fixture(scope="module")
def runs() -> dict:
    """All parts at once, as many at a time as there are cores: each computes in Python, on one."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip(PARTS, pool.map(run_part, PARTS), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(devices.SIMULATED or devices.gpu_wanted(), reason="this process runs the kernels already")
@pytest.mark.parametrize("part", PARTS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_case_62_the_suite_in_the_simulator(part: tuple[str, str, int], runs: dict) -> None:
    """The cases of the suite in miniature, every option among them: same source, same values."""
    done = runs[part]
    assert done.returncode == 0, done.stdout[-3000:]
    passed = int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])
    assert passed >= part[2]

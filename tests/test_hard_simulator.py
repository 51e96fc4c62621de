"""Numba's simulator: the Numba CUDA kernels run on the host, in a process of their own that is started for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import devices
import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(devices.SIMULATED or devices.gpu_wanted(), reason="this process runs the kernels already")
@pytest.mark.parametrize(("suite", "least"), [("test_conformance.py", 300), ("test_gradients.py", 40)])
def test_case_62_the_suite_in_the_simulator(suite: str, least: int) -> None:
    """The cases of the suite in miniature, every option among them: same source, same values."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / suite), "-k", "numba-cuda"]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
    passed = int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])
    assert passed >= least

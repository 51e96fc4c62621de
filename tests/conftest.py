"""What every test can rely on: tests that this machine cannot run are skipped with the reason."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# NVRTC keeps what it has compiled, and then tells no registers and takes no time: tests look at both.
os.environ["CUDA_CACHE_DISABLE"] = "1"

# Tests start Python processes; in a bare checkout those find cuflash by this.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


@functools.cache
def why_no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None. Imports CuPy only where it is installed."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        import cupy

        devices = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a broken driver or toolkit raises many kinds
        return f"CUDA does not start: {error}"
    return None if devices else "no CUDA device"


def pytest_configure(config: pytest.Config) -> None:
    """CUFLASH_TEST_POOL=0: every array is an allocation of its own, so that a sanitizer sees what runs over its end."""
    if os.environ.get("CUFLASH_TEST_POOL") == "0":
        import cupy

        cupy.cuda.set_allocator(None)


def why_not_installed(*modules: str) -> str | None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


REASONS = {
    "gpu": why_no_gpu,
    "model": functools.partial(why_not_installed, "gguf", "tokenizers", "tqdm"),
    "torch": functools.partial(why_not_installed, "torch"),
    "jax": functools.partial(why_not_installed, "jax"),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, why_not in REASONS.items():
        if item.get_closest_marker(marker) and (reason := why_not()):
            pytest.skip(reason)


@pytest.fixture(scope="module")
def import_example():
    """import_module(), which finds the examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield importlib.import_module

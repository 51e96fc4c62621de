"""This machine: the processor, and where compiled kernels are kept. A leaf that loads nothing heavy."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path


def cache_directory() -> Path:
    """Where compiled kernels are kept: CUFLASH_CACHE_DIR, else the user's cache directory."""
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("cuflash"))


def cpu_model() -> str:
    """Name of the processor, as exactly as the system tells it without help."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "unknown"


def logs(topic: str) -> bool:
    """Whether CUFLASH_LOG names this topic, "plan" or "jit"; several are separated by commas."""
    return topic in os.environ.get("CUFLASH_LOG", "").split(",")


def checks() -> bool:
    """Whether CUFLASH_CHECK asks to read index arrays on a device back and check them."""
    return os.environ.get("CUFLASH_CHECK", "0") not in ("", "0")


def log(topic: str, line: str) -> None:
    """One line on stderr, if CUFLASH_LOG names the topic."""
    if logs(topic):
        print(f"cuflash {topic}: {line}", file=sys.stderr, flush=True)


def simulates_cuda() -> bool:
    """Whether Numba runs CUDA kernels in its simulator: in Python, on NumPy arrays."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"

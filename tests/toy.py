"""A toy kernel in a folder of its own, for the tests of the JIT: sources, fixtures and threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from cuflash import compiled, jit

TOY = {
    "toy.cu": '// A kernel.\n#include "include/scale.cuh"\n#include "include/twice.cuh"\n'
    "template <int N> __device__ void body(float* p) { p[threadIdx.x] = scale<N>(twice(p[threadIdx.x])); }\n",
    "include/scale.cuh": "#pragma once\ntemplate <int N> __device__ float scale(float x) { return N * x; }\n",
    "include/twice.cuh": '#pragma once\n#include "scale.cuh"\n__device__ inline float twice(float x) { return scale<2>(x); }\n',
}


def toy(n: int = 3, **changes) -> jit.Source:
    """The toy kernel: p[i] *= 2 * n."""
    fields = {
        "file": "toy.cu",
        "stub": f'extern "C" __global__ void toy_n{n}(float* p) {{ body<{n}>(p); }}',
        "name": f"toy_n{n}",
    }
    return jit.Source(**(fields | changes))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of toy kernels, an empty cache, and a JIT that has seen nothing yet."""
    write(tmp_path / "kernels", TOY)
    monkeypatch.setattr(jit, "kernel_directory", lambda: tmp_path / "kernels")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_warned", set())
    for name in ("_in_memory", "_functions", "_shared"):
        monkeypatch.setattr(jit, name, {})
    return tmp_path / "kernels"


@pytest.fixture
def nvrtc(root):
    """The same where NVRTC is installed."""
    if reason := jit.why_unusable():
        pytest.skip(reason)
    return root


def files() -> list[Path]:
    return sorted(compiled.directory().iterdir())


def slow_compiles(monkeypatch) -> list[str]:
    """The names compiled from now on; each compile takes a while longer, so that threads meet."""
    names, original = [], jit._compile

    def compile_slowly(name, *rest):
        names.append(name)
        time.sleep(0.1)
        return original(name, *rest)

    monkeypatch.setattr(jit, "_compile", compile_slowly)
    return names


def in_threads(count: int, work) -> list:
    """What ``work(i)`` returned in each of ``count`` threads that start together."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(i):
        barrier.wait(30)
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results

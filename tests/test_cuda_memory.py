"""Memory of captured calls: kept as long as their graph, shared by the calls of one capture."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from warm_calls import gpu  # noqa: F401  a fixture

from cuflash.backends import cuda_memory

Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class FakeDriver:
    """Captures with a number and a graph, and what CUDA is to call when a graph is gone."""

    def __init__(self) -> None:
        self.number, self.objects, self.owned, self.mode = 1, [], {}, 0

    def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, graph, dependencies, count):  # noqa: N802
        number._obj.value, graph._obj.value = self.number, 1000 + self.number
        return 0

    def cuUserObjectCreate(self, made, argument, destroy, references, flags):  # noqa: N802
        assert (references, flags) == (1, 1)
        self.objects.append((destroy.value, argument.value))
        made._obj.value = len(self.objects)
        return 0

    def cuGraphRetainUserObject(self, graph, made, references, flags):  # noqa: N802
        assert (references, flags) == (1, 1)
        self.owned.setdefault(graph.value, []).append(self.objects[made.value - 1])
        return 0

    def destroy(self, number: int) -> None:
        for function, argument in self.owned.pop(1000 + number):
            Destructor(function)(argument)


@pytest.fixture
def cuda_driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(cuda_memory, "library", lambda: fake)
    return fake


def test_calls_of_one_capture_share_and_others_do_not(gpu, cuda_driver):
    counters = cuda_memory.GraphMemory(zeroed=True)
    loose = counters.take(16)
    assert not loose.host.any() and not counters._kept
    gpu.capturing = True
    first = counters.take(64)
    assert counters.take(32) is first and counters.take(64) is first and not first.host.any()
    larger = counters.take(128)
    assert larger is not first and counters.take(16) is larger
    cuda_driver.number = 2
    assert counters.take(16) not in (first, larger)
    with gpu.using(stream=7):
        assert counters.take(16) is not counters._kept[0, 0, 2].arrays[-1]
    assert len(counters._kept) == 3


def test_they_are_allocated_in_whatever_mode_of_capture(gpu, cuda_driver, monkeypatch):
    modes = []
    counters = cuda_memory.GraphMemory(zeroed=True)
    new = counters._new
    monkeypatch.setattr(counters, "_new", lambda *given: (modes.append(cuda_driver.mode), new(*given))[1])
    counters.take(16)
    gpu.capturing = True
    counters.take(16)
    assert modes == [0, cuda_memory.RELAXED] and cuda_driver.mode == 0


def test_they_go_with_their_graph_and_not_before(gpu, cuda_driver):
    counters = cuda_memory.GraphMemory(zeroed=True)
    gpu.capturing = True
    for number in range(1, 8):
        cuda_driver.number = number
        counters.take(16)
        if number % 2:
            cuda_driver.destroy(number)
    cuda_driver.number = 8
    counters.take(16)
    assert {number for _, _, number in counters._kept} == {2, 4, 6, 8}
    for number in (2, 4, 6, 8):
        cuda_driver.destroy(number)
    cuda_driver.number = 9
    counters.take(16)
    assert {number for _, _, number in counters._kept} == {9}


@pytest.mark.parametrize("lacks", ["everything", "objects", "a graph"])
def test_they_stay_where_cuda_cannot_tell(gpu, cuda_driver, monkeypatch, lacks):
    counters = cuda_memory.GraphMemory(zeroed=True)
    if lacks == "everything":
        monkeypatch.setattr(cuda_memory, "library", lambda: SimpleNamespace())
    elif lacks == "objects":
        monkeypatch.delattr(FakeDriver, "cuGraphRetainUserObject")
    else:
        monkeypatch.setattr(cuda_memory, "capture", lambda stream: (cuda_driver.number, 0))
    gpu.capturing = True
    for number in range(5):
        cuda_driver.number = number
        counters.take(16)
    assert len(counters._kept) == 5 and not cuda_driver.objects


@pytest.mark.gpu
def test_captures_in_a_loop_keep_the_counters_of_the_last_ones():
    import cupy

    import cuflash
    from cuflash.backends import cuda_decode

    q, k, v = (cupy.ones((1, n, 2, 64), np.float16) for n in (1, 4096, 4096))
    out, kept = cupy.empty_like(q), cuda_decode._counters._kept
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cuflash.attention(q, k, v, out=out, kernel="decode")
        stream.synchronize()
        graphs, before = [], len(kept)
        for _ in range(50):
            stream.begin_capture()
            cuflash.attention(q, k, v, out=out, kernel="decode")
            graphs = [*graphs[-3:], stream.end_capture()]
            graphs[0].launch(stream)
            stream.synchronize()
        assert len(kept) < before + 25  # CUDA may tell it a little later
        for graph in graphs:  # those that are left work
            out.fill(0)
            graph.launch(stream)
            stream.synchronize()
            assert float(abs(out - 1).max()) < 1e-2

"""Memory of captured calls: kept as long as their graph, shared by the calls of one capture."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from warm_calls import gpu  # noqa: F401  a fixture

from cuflash import driver
from cuflash.backends import cuda_memory

Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class FakeDriver:
    """Captures with a number and a graph, and what CUDA is to call when a graph is gone."""

    def __init__(self) -> None:
        self.number, self.objects, self.owned, self.mode = 1, [], {}, 0
        self.streams: dict[int, int] = {}  # handle -> number
        self.states: list[int] = []  # of the next calls

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

    def cuStreamGetId(self, stream, number):  # noqa: N802
        number._obj.value = self.streams.setdefault(stream.value or 0, len(self.streams))
        return self.states.pop() if self.states else 0

    def cuGetErrorName(self, status, name):  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INVALID_HANDLE"
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


def test_counters_of_streams(gpu, cuda_driver, monkeypatch):
    counters = cuda_memory.StreamCounters()
    take, on_second = counters.taker(0), counters.taker(1)
    with take() as own:
        assert not take().array.host.any() and take().address == own
    with gpu.using(stream=7):
        other = take()
        assert other.address != own and take() is other
        cuda_driver.streams[7] = 99  # the stream is gone, and another one has its handle
        assert take().address not in (own, other.address)
    with gpu.using(device=1):
        assert on_second().address != own and on_second() is on_second()
    assert take().address == own
    monkeypatch.setattr(counters, "MOST", 4)
    with gpu.using(stream=8):
        eighth = take()
    assert len(counters._of_streams) == 1 and take().address != own and eighth.address != own


def test_a_captured_call_has_a_counter_of_its_graph(gpu, cuda_driver):
    counters = cuda_memory.StreamCounters()
    take = counters.taker(0)
    loose, gpu.capturing = take(), True
    first = take()
    assert first.address != loose.address and take().address == first.address
    cuda_driver.number = 2
    assert take().address not in (loose.address, first.address)
    gpu.capturing = False
    assert take() is loose


def test_numbers_of_streams(gpu, cuda_driver, monkeypatch):
    monkeypatch.setattr(driver, "library", lambda: cuda_driver)
    used = []
    monkeypatch.setattr(driver, "use_device", lambda: used.append(1))
    cuda_driver.states = [driver.INVALID_CONTEXT]  # a thread that has not used CUDA yet
    assert cuda_memory.stream_number(5) == cuda_memory.stream_number(5) != cuda_memory.stream_number(0) and used == [1]
    cuda_driver.states = [400]
    with pytest.raises(RuntimeError, match="does not tell a stream's number: CUDA_ERROR_INVALID_HANDLE"):
        cuda_memory.stream_number(5)


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

"""Kernels that begin before the one before them on the stream has ended: how they are launched, and that they wait. Needs no GPU."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import numpy as np
import pytest

from cuflash import device, driver, jit, launch
from cuflash.backends import cuda_append, cuda_decode


class FakeDriver:
    """Keeps what it is asked to launch: (function, grid, threads, shared memory, stream, attributes, struct)."""

    def __init__(self, size: int) -> None:
        self.size, self.states, self.launched = size, [], []

    def cuLaunchKernelEx(self, config, function, arguments, extra):  # noqa: N802
        c = config._obj
        pairs = ctypes.cast(c.attributes, ctypes.POINTER(driver._Attribute))
        attributes = [(pairs[n].id, pairs[n].value) for n in range(c.attribute_count)]
        assert extra is None and list(c.grid)[1:] == list(c.block)[1:] == [1, 1]
        struct = ctypes.string_at(arguments[0], self.size)
        self.launched.append((function.value, c.grid[0], c.block[0], c.shared_memory, c.stream, attributes, struct))
        return self.states.pop() if self.states else 0

    def cuGetErrorName(self, status, name):  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def fake(monkeypatch):
    made = FakeDriver(24)
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(launch, "stream_getter", lambda: lambda: SimpleNamespace(ptr=7))
    return made


EARLY = [(driver.PROGRAMMATIC_STREAM_SERIALIZATION, 1)]


def test_structs_are_as_large_as_in_cuda():
    assert ctypes.sizeof(driver._Attribute) == 72 and driver._Attribute.value.offset == 8
    assert ctypes.sizeof(driver._Config) == 56 and driver._Config.stream.offset == 32


def test_one_launch(fake, monkeypatch):
    monkeypatch.setattr(launch, "is_capturing", lambda: capturing)
    monkeypatch.setattr(launch, "StreamPointer", lambda pointer: pointer)
    capturing, plain = True, []
    params = np.zeros(1, np.dtype([("a", np.uint64), ("b", np.uint64), ("c", np.uint64)]))
    params["b"] = 5
    launch.launch(launch.Step(SimpleNamespace(ptr=11), 3, 128, 64, early=True), params, 9)
    launch.launch(launch.Step(SimpleNamespace(ptr=11), 0, 128, early=True), params, 9)  # nothing to do
    assert fake.launched == [(11, 3, 128, 64, 9, EARLY, params.tobytes())]
    fake.states = [1]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        launch.launch(launch.Step(SimpleNamespace(ptr=11), 3, 128, early=True), params, 9)
    capturing = False
    launch.launch(launch.Step(lambda *given: plain.append(given), 3, 128, 64, early=True), params, 9)
    assert len(fake.launched) == 2 and plain == [((3, 1, 1), (128, 1, 1), (params.view("V24"),), 64, 9)]


def test_a_thread_that_has_not_used_cuda(fake, monkeypatch):
    used = []
    monkeypatch.setattr(driver, "use_device", lambda: used.append(len(fake.launched)))
    fake.states = [driver.INVALID_CONTEXT]
    driver.EarlyLaunch(11, 3, 128, 0, np.zeros(3).ctypes.data)(7)
    assert used == [1] and len(fake.launched) == 2
    fake.states = [driver.INVALID_CONTEXT] * 2
    with pytest.raises(RuntimeError, match="CUDA refuses"):
        driver.EarlyLaunch(11, 3, 128, 0, np.zeros(3).ctypes.data)(7)


def test_prepared_launches_early_and_in_order(fake, monkeypatch):
    monkeypatch.setattr(launch, "by_value", lambda params: params)
    other = []
    steps = [
        launch.Step(SimpleNamespace(ptr=11), 3, 128, 64, early=True),
        launch.Step(lambda grid, block, arguments, shared: other.append((grid, block, shared, len(fake.launched))), 2, 32, 16),
        launch.Step(SimpleNamespace(ptr=12), 4, 256, early=True),
    ]
    prepared = launch.Prepared(steps, np.arange(3, dtype=np.uint64), addresses=2)
    for addresses in ((21, 22), (31, 32)):
        fake.launched.clear()
        prepared(*addresses)
        struct = np.array([*addresses, 2], np.uint64).tobytes()
        assert fake.launched == [(11, 3, 128, 64, 7, EARLY, struct), (12, 4, 256, 0, 7, EARLY, struct)]
    assert other == [((2, 1, 1), (32, 1, 1), 16, 1)] * 2


@pytest.mark.parametrize(
    "cc, version, early",
    [((9, 0), 12030, True), ((12, 0), 13000, True), ((8, 9), 13000, False), ((9, 0), 12020, False), ((9, 0), None, False)],
)
def test_which_gpus_and_drivers_can(monkeypatch, cc, version, early):
    def tell(number):
        number._obj.value = version
        return 0

    monkeypatch.setattr(device, "actual", lambda ordinal: SimpleNamespace(cc=cc))
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(**{"cuDriverGetVersion": tell} if version else {}))
    monkeypatch.setattr(driver, "launches_early", driver.launches_early.__wrapped__)  # not remembered
    assert launch.launches_early(0) is early


def sources():
    """One instance of each kind of kernel that is launched early."""
    h200 = list(cuda_decode.common(device.KNOWN["H200"]))
    wgmma = next(one for one in h200 if one.tile.wgmma)
    return [h200[0].source, wgmma.source, wgmma.combine_source, cuda_append.source("float16")]


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_they_wait_and_let_others_begin(source):
    """In the kernel's own function, which its stub calls first, or in those that it goes on to: all threads come by."""
    text = jit.assemble(source)
    entry = re.search(r"^    (\w+)<[^\n]*>\(p[^\n]*\);\n\}\n$", text[text.index(source.stub):], re.MULTILINE)
    body = body_of(text, entry[1])
    assert "let_next_kernel_begin();" in body
    if entry[1] != "decode":
        assert "    wait_for_kernel_before();" in body
        return
    assert "C::PAGED || p.kv_lengths || p.kv_start) wait_for_kernel_before();\n    Loader" in body_of(text, "decode_in_step")
    assert "Loader<C> loader(p);\n    wait_for_kernel_before();" in body_of(text, "decode_in_step")
    assert "if constexpr (!C::PAIRED) wait_for_kernel_before();" in body_of(text, "decode_in_groups")
    assert "if constexpr (C::PAIRED) wait_for_kernel_before();" in body_of(text, "load_tiles")
    paired = body_of(text, "work_on_tiles").split("if constexpr (C::PAIRED)")[1]
    assert paired.index("wait_for_kernel_before();") < paired.index("load_queries")


def body_of(text, function):
    begins = text.index(f"void {function}(const ")
    return text[begins : text.index("\n}\n", begins)]

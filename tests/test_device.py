"""What GPUs offer: the constants, the architecture asked of NVRTC, and pretending to be another GPU."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from cuflash import device
from cuflash.device import KNOWN

# Largest dynamic shared memory of one block in bytes, by compute capability (CUDA programming guide).
OPT_IN = {(7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448, (12, 0): 101376}


def test_known_gpus():
    assert list(KNOWN) == ["T4", "A100", "RTX 3090", "RTX 4090", "L4", "H100", "H200", "B200", "RTX 5090"]
    assert {info.cc for info in KNOWN.values()} == OPT_IN.keys()
    for name, info in KNOWN.items():
        assert info.name == name and info.shared_memory_block == OPT_IN[info.cc]
        assert info.shared_memory_block <= info.shared_memory_sm  # 1 KiB is kept back from 8.0 on
        assert info.shared_memory_sm - info.shared_memory_block == (0 if info.cc == (7, 5) else 1024)
        assert info.threads_sm % 128 == 0 and info.registers_sm == 65536
        assert info.multiprocessors > 0 and info.l2_bytes < info.memory_bytes and 1e11 < info.bandwidth < 1e13


@pytest.mark.parametrize(
    ("cc", "arch"),
    [((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 3), "sm_103"), ((12, 1), "sm_121")],
)
def test_arch(cc, arch):
    assert dataclasses.replace(KNOWN["A100"], cc=cc).arch == arch


def test_pretend_holds_inside_the_block_and_in_all_threads():
    assert device.pretended() is None
    with device.pretend(KNOWN["T4"]):
        assert device.probe(0) is KNOWN["T4"]  # without asking any device
        with device.pretend(KNOWN["L4"]):
            assert device.probe(7) is KNOWN["L4"]
        seen = []
        thread = threading.Thread(target=lambda: seen.append(device.probe(0)))
        thread.start()
        thread.join()
        assert seen == [KNOWN["T4"]]
    assert device.pretended() is None
    with pytest.raises(KeyError), device.pretend(KNOWN["T4"]):
        raise KeyError
    assert device.pretended() is None


@pytest.mark.gpu
def test_probe_agrees_with_what_cuda_says_and_is_asked_once():
    import cupy

    for ordinal in range(cupy.cuda.runtime.getDeviceCount()):
        info, properties = device.probe(ordinal), cupy.cuda.runtime.getDeviceProperties(ordinal)
        assert info is device.probe(ordinal)
        assert info.name == properties["name"].decode()
        assert info.cc == (properties["major"], properties["minor"])
        assert info.multiprocessors == properties["multiProcessorCount"]
        assert info.shared_memory_block == properties["sharedMemPerBlockOptin"]
        assert info.shared_memory_sm == properties["sharedMemPerMultiprocessor"]
        assert info.threads_sm == properties["maxThreadsPerMultiProcessor"]
        assert info.registers_sm == properties["regsPerMultiprocessor"]
        assert info.l2_bytes == properties["l2CacheSize"]
        assert info.memory_bytes == properties["totalGlobalMem"]
        with device.pretend(KNOWN["T4"]):
            assert device.probe(ordinal) is KNOWN["T4"] and device.actual(ordinal) is info


@pytest.mark.gpu
def test_the_constants_are_those_of_the_card():
    """Where the GPU at hand is a known one, what planning uses agrees exactly, and sizes and speed within a tenth."""
    info = device.probe(0)
    known = next((known for name, known in KNOWN.items() if name in info.name), None)
    if known is None:
        pytest.skip(f"no constants for {info.name}")
    exact = ("cc", "multiprocessors", "shared_memory_block", "shared_memory_sm", "threads_sm", "registers_sm")
    assert {field: getattr(info, field) for field in exact} == {field: getattr(known, field) for field in exact}
    for field in ("memory_bytes", "bandwidth"):
        assert getattr(info, field) == pytest.approx(getattr(known, field), rel=0.1)

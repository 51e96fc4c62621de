"""What a GPU offers: read from the device, or taken from published specifications so that planning is tested without one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU as the planner sees it. Sizes in bytes.

    Attributes
    ----------
    name : str
        As the driver prints it.
    cc : tuple[int, int]
        Compute capability.
    multiprocessors : int
    shared_memory_block : int
        The most that one block can have, dynamic, after opting in.
    shared_memory_sm : int
        Of one multiprocessor; each resident block takes 1 KiB more than it asks for (from compute capability 8.0).
    threads_sm : int
        Most threads resident on one multiprocessor.
    l2_bytes, memory_bytes : int
    bandwidth : float
        Bytes per second between the chip and its memory, as specified. 0 where the device does not tell.
    registers_sm : int
        32-bit registers of one multiprocessor.
    """

    name: str
    cc: tuple[int, int]
    multiprocessors: int
    shared_memory_block: int
    shared_memory_sm: int
    threads_sm: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    registers_sm: int = 65536

    @property
    def arch(self) -> str:
        """What NVRTC is asked for: "sm_90a" on 9.0, whose wgmma and TMA live in that variant alone, else "sm_80" and so on."""
        major, minor = self.cc
        return "sm_90a" if self.cc == (9, 0) else f"sm_{major}{minor}"


# Limits of a generation (CUDA C++ programming guide, technical specifications per compute capability):
# shared memory of a block after opting in, shared memory of a multiprocessor, threads of a multiprocessor.
_TURING = (64 * KIB, 64 * KIB, 1024)  # 7.5
_AMPERE = (163 * KIB, 164 * KIB, 2048)  # 8.0
_CONSUMER = (99 * KIB, 100 * KIB, 1536)  # 8.6, 8.9, 12.0
_HOPPER = (227 * KIB, 228 * KIB, 2048)  # 9.0, 10.0

# Chip and board from NVIDIA's data sheets and architecture papers; memory is the nominal size.
KNOWN: dict[str, DeviceInfo] = {
    info.name: info
    for info in (
        DeviceInfo("T4", (7, 5), 40, *_TURING, 4 * MIB, 16 * GIB, 320e9),
        DeviceInfo("A100", (8, 0), 108, *_AMPERE, 40 * MIB, 80 * GIB, 2039e9),
        DeviceInfo("RTX 3090", (8, 6), 82, *_CONSUMER, 6 * MIB, 24 * GIB, 936e9),
        DeviceInfo("RTX 4090", (8, 9), 128, *_CONSUMER, 72 * MIB, 24 * GIB, 1008e9),
        DeviceInfo("L4", (8, 9), 58, *_CONSUMER, 48 * MIB, 24 * GIB, 300e9),
        DeviceInfo("H100", (9, 0), 132, *_HOPPER, 50 * MIB, 80 * GIB, 3350e9),
        DeviceInfo("H200", (9, 0), 132, *_HOPPER, 50 * MIB, 141 * 10**9, 4800e9),
        DeviceInfo("B200", (10, 0), 148, *_HOPPER, 126 * MIB, 180 * 10**9, 7700e9),
        DeviceInfo("RTX 5090", (12, 0), 170, *_CONSUMER, 96 * MIB, 32 * GIB, 1792e9),
    )
}

_pretended: list[DeviceInfo] = []  # the innermost is last

# Numbers of cudaDeviceAttr; they are part of CUDA's stable interface, and CuPy takes them as integers.
_MULTIPROCESSORS, _MEMORY_CLOCK_KHZ, _BUS_BITS, _L2, _THREADS_SM = 16, 36, 37, 38, 39
_CC_MAJOR, _CC_MINOR, _SHARED_SM, _REGISTERS_SM, _SHARED_BLOCK = 75, 76, 81, 82, 97


def probe(ordinal: int) -> DeviceInfo:
    """The GPU of that CUDA ordinal, or whatever ``pretend`` says. Asked once per process; needs CuPy and the GPU."""
    return _pretended[-1] if _pretended else actual(ordinal)


def pretended() -> DeviceInfo | None:
    """What ``pretend`` says now, or None."""
    return _pretended[-1] if _pretended else None


@functools.cache
def actual(ordinal: int) -> DeviceInfo:
    """The GPU of that CUDA ordinal, ``pretend`` or not."""
    from cupy.cuda import runtime

    def ask(attribute: int) -> int:
        return int(runtime.deviceGetAttribute(attribute, ordinal))

    properties = runtime.getDeviceProperties(ordinal)  # for the name and the memory, which are no attributes
    name = properties["name"]
    return DeviceInfo(
        name=name.decode() if isinstance(name, bytes) else str(name),
        cc=(ask(_CC_MAJOR), ask(_CC_MINOR)),
        multiprocessors=ask(_MULTIPROCESSORS),
        shared_memory_block=ask(_SHARED_BLOCK),
        shared_memory_sm=ask(_SHARED_SM),
        threads_sm=ask(_THREADS_SM),
        l2_bytes=ask(_L2),
        memory_bytes=int(properties["totalGlobalMem"]),
        bandwidth=2.0 * ask(_MEMORY_CLOCK_KHZ) * 1000 * ask(_BUS_BITS) / 8,  # two transfers per clock
        registers_sm=ask(_REGISTERS_SM),
    )


@contextlib.contextmanager
def pretend(info: DeviceInfo) -> Iterator[DeviceInfo]:
    """Every GPU answers as ``info`` inside the ``with`` block, in all threads: for tests of plans for other GPUs.

    Kernels are still compiled for the real GPU, with ``CUFLASH_ARCH`` saying the pretended one, by which they choose
    their code paths. Whatever was planned or loaded before keeps what it was planned for.
    """
    _pretended.append(info)
    try:
        yield info
    finally:
        _pretended.remove(info)

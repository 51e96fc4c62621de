"""Run instances of the raw kernels on the host: compiled by the system's C++ compiler, threads emulated (see threads.hpp).

It shows what a GPU hides (races, copies that are not waited for, accesses out of bounds, bank conflicts) and runs the code of GPUs
that are not there, sm_75's among them. It says nothing about speed, and its sums are rounded less often than a tensor core's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cuflash import arrays, driver, jit, structs, tensor_map, tiles_fp
from cuflash.backends import cuda, cuda_append, cuda_decode, cuda_fa1, cuda_fa3, cuda_fp, cuda_parts, packed
from cuflash.device import DeviceInfo
from cuflash.types import Append, ArrayView, Problem

from .guarded import Guarded, Side
from .translate import translate

HERE = Path(__file__).resolve().parent
RUNTIME = ("ptx.cpp", "sm90.cpp", "launch.cpp")
FLAGS = ("-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-Wall")
# Kernels run once or twice: compiling is what takes the time. What C++ leaves undefined is a trap, which the runtime reports.
KERNEL_FLAGS = (
    "-O0", "-fsanitize=alignment,bounds,signed-integer-overflow", "-fsanitize-undefined-trap-on-error", "-Wno-unused",
)
TAIL = """
extern "C" void emulated_entry(const void* params) {{ {name}(*static_cast<const {params}*>(params)); }}
"""

Instance = cuda.Instance | cuda_fp.Instance | cuda_fa1.Instance | cuda_fa3.Instance


class EmulationError(AssertionError):
    """The kernel did what it must not do; the message names block and thread."""


class _Range(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("begin", ctypes.c_void_p), ("end", ctypes.c_void_p)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_uint), ("threads", ctypes.c_int), ("cluster", ctypes.c_int), ("shared_bytes", ctypes.c_int),
        ("range_count", ctypes.c_int),
        ("ranges", ctypes.POINTER(_Range)), ("message", ctypes.c_char_p), ("message_size", ctypes.c_int),
    ]


def compiler() -> str | None:
    """Path of a C++ compiler, or None."""
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def why_unusable() -> str | None:
    """Why nothing can be emulated here, or None."""
    if sys.platform != "linux":
        return "the emulator needs Linux"
    if compiler() is None:
        return "there is no C++ compiler: neither g++ nor clang++"
    return None


def _compile(sources: Sequence[Path], library: Path, *flags: str) -> None:
    program = compiler()
    assert program is not None, why_unusable()
    command: list[str | Path] = [program, *FLAGS, *flags, f"-I{HERE}", "-o", library, *sources]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"{library.stem} does not compile for the host:\n{done.stderr[:5000]}")


class Map(ctypes.Structure):  # of sm90.cpp
    _fields_ = [
        ("address", ctypes.c_uint64), ("stride", ctypes.c_uint64 * 4), ("size", ctypes.c_uint32 * 5), ("box", ctypes.c_uint32 * 5),
        ("rank", ctypes.c_uint32), ("item_bytes", ctypes.c_uint32), ("swizzle_bytes", ctypes.c_uint32),
    ]


class Driver:
    """In the place of CUDA's driver library: makes tensor maps that the emulator reads."""

    ITEM_BYTES = {0: 1, 1: 2, 2: 4, 4: 8}  # by CUtensorMapDataType
    SWIZZLE_BYTES = (0, 32, 64, 128)

    @classmethod
    def cuTensorMapEncodeTiled(  # noqa: N802
        cls, place, dtype, rank, address, shape, strides, box, steps, interleave, swizzle, promotion, fill,
    ):
        if place.value % 64 or address.value % 16 or any(n != 1 for n in steps) or interleave.value or fill.value:
            return 1
        made = Map.from_address(place.value)
        made.address, made.rank = address.value, rank.value
        made.stride[: rank.value - 1], made.size[: rank.value], made.box[: rank.value] = strides[: rank.value - 1], shape[:], box[:]
        made.item_bytes, made.swizzle_bytes = cls.ITEM_BYTES[dtype.value], cls.SWIZZLE_BYTES[swizzle.value]
        return 0

    @staticmethod
    def cuTensorMapReplaceAddress(place, address):  # noqa: N802
        if place.value % 64 or address.value % 16:
            return 1
        Map.from_address(place.value).address = address.value
        return 0

    @staticmethod
    def cuGetErrorName(status, name):  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@contextlib.contextmanager
def tensor_maps() -> Iterator[None]:
    """Inside, tensor maps are those of the :class:`Driver`."""
    real, driver.library = driver.library, lambda: Driver  # type: ignore[assignment]
    try:
        yield
    finally:
        driver.library = real


class Emulator:
    """Compiles kernels, several at a time and each once, and runs them.

    Parameters
    ----------
    folder : Path
        For what is compiled.
    jobs : int
        Compilers at a time.
    """

    def __init__(self, folder: Path, jobs: int = 2):
        self.folder = folder
        self._pool = concurrent.futures.ThreadPoolExecutor(jobs)
        self._compiled: dict[tuple[jit.Source, int], concurrent.futures.Future[Path]] = {}
        self._runtime = self._pool.submit(self._load_runtime)

    def _load_runtime(self) -> ctypes.CDLL:
        library = self.folder / "libemulator.so"
        _compile([HERE / name for name in RUNTIME], library, "-O2")
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # kernels take their symbols from it
        loaded.emulator_launch.restype = ctypes.c_bool
        return loaded

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def compile(self, text: str, name: str, params: str, arch: int) -> Path:
        """The shared library of a kernel.

        Parameters
        ----------
        text : str
            CUDA C++ that defines the kernel, with its includes in place.
        name, params : str
            The kernel, and the type of its only argument.
        arch : int
            CUFLASH_ARCH, which chooses code paths.

        Raises
        ------
        RuntimeError
            If the compiler rejects it.
        """
        text = '#include "emulator.hpp"\n' + translate(text) + TAIL.format(name=name, params=params)
        stem = f"{name}_{arch}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        source, library = self.folder / f"{stem}.cpp", self.folder / f"{stem}.so"
        source.write_text(text)
        _compile([source], library, *KERNEL_FLAGS, f"-DCUFLASH_ARCH={arch}")
        return library

    def execute(
        self, library: Path, params: np.ndarray, blocks: int, threads: int, shared_bytes: int, memory: dict[str, Guarded],
        cluster: int = 1,
    ) -> None:
        """Run a grid of blocks, one after the other, or as many together as a cluster has.

        Parameters
        ----------
        library : Path
            From :meth:`compile`.
        params : np.ndarray
            The kernel's argument, a structured array of one element.
        blocks, threads, shared_bytes : int
            Of the grid, of a block, of dynamic shared memory.
        memory : dict
            All arrays that the kernel may use.
        cluster : int
            Blocks of a cluster.

        Raises
        ------
        EmulationError
            If a thread did something that is not allowed.
        """
        runtime = self._runtime.result()
        params = tensor_map.aligned(params.tobytes())
        entry = ctypes.CDLL(str(library)).emulated_entry
        ranges = (_Range * len(memory))(*(_Range(name.encode(), a.begin, a.end) for name, a in memory.items()))
        message = ctypes.create_string_buffer(1000)
        place = ctypes.cast(message, ctypes.c_char_p)
        launch = _Launch(blocks, threads, cluster, shared_bytes, len(ranges), ranges, place, len(message))
        if not runtime.emulator_launch(entry, ctypes.c_void_p(params.ctypes.data), ctypes.byref(launch)):
            raise EmulationError(message.value.decode())

    def prepare(self, instance: Instance, info: DeviceInfo) -> concurrent.futures.Future[Path]:
        """Have an instance compiled, with the code paths of a GPU."""
        return self.prepare_source(instance.source, instance.PARAMS, _code_path(instance, info))

    def prepare_source(self, source: jit.Source, params: str, arch: int) -> concurrent.futures.Future[Path]:
        """Have a kernel compiled; arguments as for :meth:`compile`."""
        key = source, arch
        if key not in self._compiled:
            self._compiled[key] = self._pool.submit(self.compile, jit.assemble(source), source.name, params, arch)
        return self._compiled[key]

    def run(
        self, problem: Problem, info: DeviceInfo, instance: Instance | None = None, side: Side = "end", grid: int | None = None,
    ) -> None:
        """Write ``problem.out`` and ``problem.lse`` as the raw backend would.

        Parameters
        ----------
        problem : Problem
            Of NumPy arrays, with ``out``.
        info : DeviceInfo
            The GPU that is emulated: it decides on tiles, the order of the blocks and the code paths.
        instance : Instance, optional
            Instead of the one that the backend would choose.
        side : {"start", "end"}
            Which ends of the arrays are watched to the byte.
        grid : int, optional
            Blocks of prefill_fa3, which share the tiles, instead of as many as the GPU would run.

        Raises
        ------
        EmulationError
            If a thread did something that is not allowed.
        """
        instance = instance or chosen(problem, info)
        if isinstance(instance, cuda_parts.Instance):
            self._run_parts(problem, info, instance, side)
            return
        on_device = isinstance(problem.cu_seqlens_q, ArrayView)
        if problem.varlen and not on_device:
            packed.clear_slack(problem)
        blocks, clear_blocks = cuda._grid(problem, instance), 0
        if on_device and problem.heads_q:
            clear_blocks = -(-problem.q.shape[0] // cuda.CLEAR_ROWS)
        if blocks == clear_blocks == 0:
            return
        boxes = isinstance(instance, cuda_fa3.Instance)
        names = ("q", "k", "v", "bias", "mask")
        inputs = {name: Guarded(a, side, aligned=boxes) for name in names if (a := getattr(problem, name)) is not None}
        results = {name: Guarded(a, side, writable=True) for name in ("out", "lse") if (a := getattr(problem, name)) is not None}
        small = {name: Guarded(arrays.view(value, name), side) for name, value in structs.small_arrays(problem).items()}
        small |= {name: Guarded(getattr(problem, name), side) for name in problem.indices_on_device}
        moved = problem.replace(**{name: a.view for name, a in {**inputs, **results}.items()})
        pointers = {name: a.view.pointer for name, a in small.items()}
        section = cuda._section(problem, instance, info)
        memory = {**inputs, **results, **small}
        if boxes:
            memory["counter"] = Guarded(arrays.view(np.zeros(1, np.uint32), "counter"), side, writable=True)
            with tensor_maps():
                params = cuda_fa3.pack(moved, instance, section, blocks, pointers, memory["counter"].view.pointer)
            blocks = min(grid or info.multiprocessors, blocks)
        else:
            params = structs.pack_prefill(moved, instance.tile.m, section, instance.factor_left, pointers, instance.flat)
        try:
            if clear_blocks:
                source = cuda.clear_source(problem.out_dtype.itemsize, problem.compute_dtype.itemsize, instance.flat)
                clear = self.compile(jit.assemble(source), source.name, "PrefillParams", _code_path(instance, info))
                self.execute(clear, params, clear_blocks, cuda.CLEAR_ROWS, 0, memory)
            if blocks:
                library = self.prepare(instance, info).result()
                self.execute(library, params, blocks, instance.tile.threads, instance.shared_memory, memory)
        except EmulationError as error:
            raise EmulationError(f"{instance.name}, {error}") from None
        for a in results.values():
            a.write_back()
        assert "counter" not in memory or not memory["counter"].view.array.any(), "the counter of tiles is not 0 after the call"

    def _run_parts(self, problem: Problem, info: DeviceInfo, instance: cuda_parts.Instance, side: Side) -> None:
        """As :meth:`run`, for keys that are split over the grid. The workspace holds NaN at first."""
        how = cuda_parts.split(problem, instance, info)
        if not how.grid:
            return
        inputs = {name: Guarded(a, side) for name in ("q", "k", "v", "bias", "mask") if (a := getattr(problem, name)) is not None}
        results = {name: Guarded(a, side, writable=True) for name in ("out", "lse") if (a := getattr(problem, name)) is not None}
        small = {name: Guarded(arrays.view(value, name), side) for name, value in structs.small_arrays(problem).items()}
        small |= {name: Guarded(getattr(problem, name), side) for name in problem.indices_on_device}
        parts = {
            name: Guarded(arrays.view(np.full(size, 0xFF, np.uint8), name), side, writable=True)
            for name, size in zip(("part_out", "part_state"), cuda_parts.workspace(problem, how), strict=True)
        }
        moved = problem.replace(**{name: a.view for name, a in {**inputs, **results}.items()})
        pointers = {name: a.view.pointer for name, a in small.items()}
        params = cuda_parts.pack(moved, instance, how, pointers, tuple(a.view.pointer for a in parts.values()))
        try:
            for source, grid, threads, shared in cuda_parts.steps(problem, instance, how):
                library = self.prepare_source(source, "PartParams", _code_path(instance, info)).result()
                self.execute(library, params, grid, threads, shared, {**inputs, **results, **small, **parts})
        except EmulationError as error:
            raise EmulationError(f"{instance.name}, {error}") from None
        for a in results.values():
            a.write_back()

    def append(self, problem: Problem, new: Append, arch: int = 800, side: Side = "end") -> Problem:
        """Do what comes before the attention of a decode call, as kv_append.cu does it; returns the problem that is left.

        Parameters
        ----------
        problem : Problem
            Of NumPy arrays; index arrays that are views count as arrays on the device.
        new : Append
        arch : int
            CUFLASH_ARCH.
        side : {"start", "end"}
            Which ends of the arrays are watched to the byte.
        """
        given = {"q": problem.q, "lengths": new.lengths, "page_table": problem.page_table, **new.inputs}
        if isinstance(problem.page_table, np.ndarray):
            given["page_table"] = structs.page_entries(problem.page_table)
        views = {name: a if isinstance(a, ArrayView) else arrays.view(a, name) for name, a in given.items() if a is not None}
        inputs = {name: Guarded(a, side) for name, a in views.items()}
        scales = {name: a for name in structs.SCALES if new.quantizes and (a := getattr(problem, name)) is not None}
        written = {"k": problem.k, "v": problem.v} | {name: a for name, a in scales.items() if a.by_token}
        caches = {name: Guarded(a, side, writable=True) for name, a in written.items()}
        inputs |= {name: Guarded(a, side) for name, a in scales.items() if not a.by_token}
        fresh = {}
        if new.rope is not None:
            fresh["q"] = arrays.view(np.full(problem.q.shape, np.nan, problem.q.dtype), "q_turned")
        if isinstance(new.lengths, ArrayView) and new.count:
            fresh["kv_lengths"] = arrays.view(np.full(problem.batch, -99, np.int32), "lengths_after")
        made = {f"new {name}": Guarded(a, side, writable=True) for name, a in fresh.items()}
        rope = new.rope and dataclasses.replace(new.rope, cos=inputs["rope[0]"].view, sin=inputs["rope[1]"].view)
        moved = dataclasses.replace(
            new, rope=rope, **{name: inputs[name].view for name in ("k_new", "v_new") if name in inputs},
            lengths=inputs["lengths"].view if isinstance(new.lengths, ArrayView) else new.lengths,
        )
        place = problem.replace(**{name: a.view for name, a in (inputs | caches).items() if name in ("q", "k", "v", *structs.SCALES)})
        threads, params = cuda_append.pack(
            place, moved, *(made[name].view if name in made else None for name in ("new q", "new kv_lengths")),
            {name: inputs[name].view.pointer for name in ("lengths", "page_table") if name in inputs},
        )
        source = cuda_append.source_for(problem, new)
        library = self.prepare_source(source, "AppendParams", arch).result()
        if threads:
            memory = {**inputs, **caches, **made}
            self.execute(library, params, -(-threads // cuda_append.THREADS), cuda_append.THREADS, 0, memory)
        for a in (*caches.values(), *made.values()):
            a.write_back()
        return problem.replace(**fresh)

    def run_decode(
        self, problem: Problem, info: DeviceInfo, instance: cuda_decode.Instance, how: cuda_decode.Split, side: Side = "end",
    ) -> None:
        """Write ``problem.out`` and ``problem.lse`` as the raw decode kernel would; arguments as for :meth:`run`.

        The workspace holds NaN at first, but for the counters, which must be 0 again afterwards.
        """
        blocks = cuda_decode.blocks(problem, how)
        if blocks == 0:
            return
        names = ("q", "k", "v", "k_scale", "v_scale", "mask")
        inputs = {name: Guarded(a, side) for name in names if (a := getattr(problem, name)) is not None}
        results = {name: Guarded(a, side, writable=True) for name in ("out", "lse") if (a := getattr(problem, name)) is not None}
        small = {name: Guarded(arrays.view(value, name), side) for name, value in structs.small_arrays(problem).items()}
        small |= {name: Guarded(getattr(problem, name), side) for name in problem.indices_on_device}
        size = cuda_decode.workspace(problem, instance, how)
        parts, arrived = np.full(max(16, size.part_out + size.part_state), 0xFF, np.uint8), np.zeros(max(16, size.arrived), np.uint8)
        scratch = {name: Guarded(arrays.view(a, name), side, writable=True) for name, a in (("parts", parts), ("arrived", arrived))}
        moved = problem.replace(**{name: a.view for name, a in {**inputs, **results}.items()})
        pointers = {name: a.view.pointer for name, a in small.items()}
        at = scratch["parts"].view.pointer
        params = cuda_decode.pack(moved, instance, how, pointers, (at, at + size.part_out, scratch["arrived"].view.pointer))
        memory_of_call = {**inputs, **results, **small, **scratch}
        try:
            for source, grid, threads, shared in cuda_decode.steps(problem, instance, how):
                library = self.prepare_source(source, "DecodeParams", decode_path(instance, info)).result()
                cluster = 2 if instance.paired and source == instance.source else 1
                self.execute(library, params, grid, threads, shared, memory_of_call, cluster)
        except EmulationError as error:
            raise EmulationError(f"{instance.name}, {error}") from None
        for a in (*results.values(), *scratch.values()):
            a.write_back()
        assert not arrived.any(), "a counter is not 0 after the call"


def chosen(problem: Problem, info: DeviceInfo, kernel: str = "fa2") -> Instance:
    """The instance that the backend takes for these arrays on this GPU."""
    instance = cuda.instance(problem, info, kernel)
    assert instance is not None
    return instance


def decode_path(instance: cuda_decode.Instance, info: DeviceInfo) -> int:
    """CUFLASH_ARCH of the decode kernel, which converts float8 by an instruction of sm_89."""
    return 750 if info.cc < (8, 0) else 890 if instance.e4m3 and info.cc >= (8, 9) else 800


def _code_path(instance: Instance, info: DeviceInfo) -> int:
    """CUFLASH_ARCH; the GPUs from sm_80 on run the same code, but for products of float64."""
    if isinstance(instance, cuda_fa3.Instance):
        return 900
    if isinstance(instance, cuda_fp.Instance) and instance.kind == tiles_fp.DMMA and info.cc >= (9, 0):
        return 900
    return 750 if info.cc < (8, 0) else 800


@contextlib.contextmanager
def compiling_ahead(request: Any, folders: Any, runs: Mapping[str, Any], prepare: Callable[[Emulator, Any], None]) -> Iterator[Emulator]:
    """For a module's fixture: compiles what the tests that were asked for need, in their order, while the first of them run already.

    ``request`` and ``folders`` are pytest's request and tmp_path_factory; ``prepare`` is called with each of ``runs`` that a test names.
    """
    made = Emulator(folders.mktemp("emulated"))
    for item in request.session.items:
        run = runs.get(item.callspec.params.get("name")) if item.module is request.module and hasattr(item, "callspec") else None
        if run is not None:
            prepare(made, run)
    yield made
    made.close()

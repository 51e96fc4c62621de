"""A stand-in for CuPy and for the GPU: arrays in host memory, and a launch that computes what the parameter struct says.

The kernels are not run: a launch reads addresses and strides from the struct, as prefill_fa2 does, and calls the oracle.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cuflash
from cuflash import device, driver, jit, launch, structs
from cuflash.backends import append, cuda, cuda_append, cuda_memory, cuda_merge, cuda_pages
from cuflash.types import INDICES
from emulator import emulate

ALIGNMENT = 256


class FakeArray:
    """What cuflash uses of a cupy.ndarray."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float16, host: np.ndarray | None = None, device_id: int | None = None):
        if host is None:
            dtype = np.dtype(dtype)
            memory = np.full(int(np.prod(shape)) * dtype.itemsize + ALIGNMENT, 0xFF, np.uint8)  # NaN, as poison
            skip = -memory.ctypes.data % ALIGNMENT
            host = memory[skip : memory.size - ALIGNMENT + skip].view(dtype).reshape(shape)
        self.host = host
        self.shape, self.strides, self.dtype, self.ndim = host.shape, host.strides, host.dtype, host.ndim
        self.size = host.size
        ordinal = Gpu.current().device if device_id is None else device_id
        pointer = host.__array_interface__["data"][0]
        self.data = SimpleNamespace(ptr=pointer, device_id=ordinal, memset_async=lambda value, size: ctypes.memset(pointer, value, size))
        self.device = SimpleNamespace(id=ordinal)

    def _view(self, host: np.ndarray) -> FakeArray:
        return FakeArray((), host=host, device_id=self.device.id)

    def transpose(self, *axes: Any) -> FakeArray:
        return self._view(self.host.transpose(*axes))

    def __getitem__(self, index: Any) -> FakeArray:
        return self._view(self.host[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.host[index] = getattr(value, "host", value)

    def __len__(self) -> int:
        return len(self.host)

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def view(self, dtype: Any) -> FakeArray:
        return self._view(self.host.view(dtype))

    def swapaxes(self, a: int, b: int) -> FakeArray:
        return self._view(self.host.swapaxes(a, b))

    def reshape(self, *shape: Any) -> FakeArray:
        return self._view(self.host.reshape(*shape))

    def copy(self) -> FakeArray:
        return self._view(self.host.copy())

    def get(self) -> np.ndarray:
        return self.host.copy()

    def fill(self, value: Any) -> None:
        self.host.fill(value)


class Pinned(bytearray):
    """Memory of the host at a known address."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class Gpu:
    """Current device and stream of each thread, and what was launched."""

    _local = threading.local()

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.before: list[Any] = []  # called with the struct before a launch computes
        self.capturing = False
        self.waited = 0  # times that somebody waited for the device
        self.allocated: dict[int, FakeArray] = {}  # in stream captures
        self.freed: list[FakeArray] = []
        self.copying = False  # whether the copies from pinned memory are still on their way
        self.pinned: list[Pinned] = []

    @classmethod
    def current(cls) -> Any:
        if not hasattr(cls._local, "device"):
            cls._local.device, cls._local.stream = 0, 0
        return cls._local

    def malloc(self, size: int, stream: int) -> int:
        array = FakeArray((size,), np.uint8)
        self.allocated[array.data.ptr] = array
        return array.data.ptr

    def free(self, pointer: int, stream: int) -> None:
        self.freed.append(self.allocated.pop(pointer))  # not gone: a graph has it back when it is replayed

    def synchronize(self) -> None:
        self.waited += 1

    def event(self, **options: Any) -> Any:
        gpu = self

        class Event:
            def record(self, stream: Any) -> None:
                pass

            @property
            def done(self) -> bool:
                return not gpu.copying

        return Event()

    def pin(self, size: int) -> Pinned:
        self.pinned.append(Pinned(size))
        return self.pinned[-1]

    @contextlib.contextmanager
    def using(self, **what: int):
        now = self.current()
        before = {name: getattr(now, name) for name in what}
        now.__dict__.update(what)
        try:
            yield self
        finally:
            now.__dict__.update(before)

    def function(self, source: jit.Source, ordinal: int, shared_memory: int = 0) -> Any:
        def run(grid: tuple, block: tuple, args: tuple, shared: int = 0, stream: Any = None) -> None:
            (params,) = args
            assert params.dtype.fields is None and params.shape == (1,) and shared == shared_memory
            scales = {}
            if source.name.startswith("decode"):  # whose struct begins with the other
                params = params.view(structs.DECODE_PARAMS)
                scales = scales_of(params[0]) if "_e4m3_" in source.name else {}
                params = params["prefill"]
            if source.file == "prefill_fa3.cu":
                params = fa3_params(params.view(structs.FA3_PARAMS))
            if source.name.startswith("combine_fp") or "_parts" in source.name and source.file == "prefill_fp.cu":
                params = part_of(source.name, params.view(structs.PART_PARAMS))
            if source.file == "clear_rows.cu":  # CUDA copies as much as the kernel takes; other structs begin with this one
                params = np.frombuffer(params.tobytes()[: structs.PREFILL_PARAMS.itemsize], structs.PREFILL_PARAMS)
            params = params.view(STRUCTS.get(source.file, structs.PREFILL_PARAMS))
            for hook in self.before:
                hook(params)
            p = params.copy()[0]  # CUDA copies it before the launch returns
            now = self.current()
            on = now.stream if stream is None else stream.ptr
            self.launches.append(SimpleNamespace(name=source.name, grid=grid[0], device=now.device, stream=on, params=p, ordinal=ordinal))
            if not (source.file == "prefill_fp.cu" and "_parts" in source.name):
                compute(source.name, p, scales)

        return run


class FakeDriver(emulate.Driver):
    """Streams are numbered by their handles."""

    @staticmethod
    def cuStreamGetId(stream, number):  # noqa: N802
        number._obj.value = stream.value or 0
        return 0


def fa3_params(params: np.ndarray) -> np.ndarray:
    """Those of every prefill, which the tensor maps and the counter agree with."""
    p, r = params[0], params["prefill"][0]
    for name in ("q", "k", "v"):
        made = emulate.Map.from_buffer_copy(p[f"{name}_map"].tobytes())
        assert made.address == r[name] and params.ctypes.data % 64 == 0
        size = int(r["head_dim_v" if name == "v" else "head_dim"])
        together = name == "q" and made.rank == 5  # the heads that share their keys have a dimension of their own
        heads = made.size[1] * made.size[3] if together else made.size[2]
        assert (made.size[0], heads, made.box[0]) == (size, int(r["heads_q" if name == "q" else "heads_kv"]), 64)
    assert memory(p["counter"], np.uint32, (1,), (1,))[0] == 0 and p["tiles"] > 0
    return params["prefill"].copy()


def part_of(name: str, params: np.ndarray) -> np.ndarray:
    """The parameters for `compute`; the first of two launches writes to the workspace, and the second finds that there."""
    prefill, p = params["prefill"].copy(), params[0]
    rows = int(p["parts"]) * int(np.prod([prefill[0][x] for x in ("batch", "q_rows", "heads_q")]))
    state = memory(p["part_state"], np.float64, (rows, 2), (2, 1))
    assert p["part_out"] % 16 == p["part_state"] % 16 == 0 and p["part_out"] != p["part_state"]
    if not name.startswith("combine_fp"):
        state[...] = float(prefill[0]["q"])
        return prefill
    assert (state == float(prefill[0]["q"])).all(), "another call has the same workspace"
    state[...] = np.nan
    if p["queries"] == 1:  # rows are query heads, of which the oracle has to know
        r = prefill[0]
        group, heads = int(r["q_rows"]), int(r["heads_kv"])
        for x in ("q_stride", "out_stride", "lse_stride") if group > 1 else ():
            assert r[x][2] == group * r[x][1] or heads == 1
            r[x][2] = r[x][1]
        r["heads_q"], r["q_rows"] = heads * group, 1
    return prefill


STRUCTS = {"kv_append.cu": cuda_append.PARAMS, "merge_states.cu": cuda_merge.PARAMS, "page_copy.cu": cuda_pages.PARAMS}


def memory(pointer: int, dtype: Any, shape: tuple[int, ...], strides: Any) -> np.ndarray:
    """An array at an address, by strides in elements."""
    dtype = np.dtype(dtype)
    interface = {"version": 3, "data": (int(pointer), False), "typestr": f"|V{dtype.itemsize}", "shape": tuple(map(int, shape)),
                 "strides": tuple(int(s) * dtype.itemsize for s in strides)}  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface)).view(dtype)


def index_arrays(p: np.ndarray) -> dict[str, np.ndarray]:
    found = {}
    for bit, field in enumerate(INDICES):
        if p[field]:
            width = np.int32 if p["index_bits"] >> bit & 1 else np.int64
            found[field] = memory(p[field], width, (int(p["batch"]) + (bit < 2),), (1,)).copy()
    return found


def clear(name: str, p: np.ndarray) -> None:
    """What clear_rows writes."""
    cu, rows, heads = index_arrays(p)["cu_seqlens_q"], int(p["q_rows"]), int(p["heads_q"])
    unowned = np.ones(rows, bool)
    for begin, end in itertools.pairwise(cu):
        unowned[begin : end if "flat" in name else min(end, begin + p["m_tiles"] * p["tile_rows"])] = False
    memory(p["out"], np.uint16, (rows, heads, int(p["head_dim_v"])), p["out_stride"][1:])[unowned] = 0
    if p["lse"]:
        memory(p["lse"], np.float32, (heads, rows), [p["lse_stride"][n] for n in (2, 1)])[:, unowned] = -np.inf


def scales_of(p: np.ndarray) -> dict[str, Any]:
    """k_scale and v_scale of a launch of decode."""
    prefill = p["prefill"]
    stored = ("pages", "page_size") if prefill["page_table"] else ("batch", "k_rows")
    shape = tuple(int(prefill[x]) for x in (*stored, "heads_kv"))
    return {
        name: memory(p[name], np.float32, shape, p[f"{name}_stride"][:3]) if p[name] else float(p[f"{name[0]}_factor"])
        for name in structs.SCALES
    }


def append_rows(p: np.ndarray, dtype: Any, kv: Any) -> None:
    """What kv_append writes, key by key; quantized, where the caches are ``kv``, e4m3, and the new keys are not."""
    quantizes = np.dtype(kv) != dtype
    number = {name: int(p[name]) for name in p.dtype.names if p.dtype[name].kind in "iu" and p.dtype[name].shape == ()}
    n, rows, d, hk, hq = (number[name] for name in ("new_keys", "q_rows", "head_dim", "heads_kv", "heads_q"))
    units = number["v_units"]
    dv = units * (16 // np.dtype(dtype).itemsize if number["v_vector"] else 1)
    if quantizes:
        units, dv = cuda_append.ROW, number["head_dim_v"]
    batch = number["v_total"] // (units * hk * n) if n else number["q_total"] // (number["q_units"] * hq * rows)
    lengths = memory(p["lengths"], np.int32 if number["lengths_i32"] else np.int64, (batch,), (1,)).copy()
    table = memory(p["page_table"], np.int32, (batch, number["max_pages"]), (number["max_pages"], 1)) if p["page_table"] else None

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        if not number["pairs"]:
            return x
        assert number["table_float"]
        half = number["pairs"]
        first, second = (slice(0, half), slice(half, 2 * half))
        if number["interleaved"]:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        cos, sin = (
            memory(p[name], np.float32, (number["positions"], half), (p[f"{name}_row"], p[f"{name}_column"]))[abs(position)]
            for name in ("cos", "sin")
        )
        a, b = (x[..., part].astype(np.float32) for part in (first, second))
        sin = np.sign(position) * sin
        result = x.copy()
        result[..., first], result[..., second] = a * cos - b * sin, b * cos + a * sin
        return result

    def row(name: str, b: int, r: int, heads: int, size: int, dtype: Any = dtype) -> np.ndarray:
        stride = p[f"{name}_stride"]
        return memory(int(p[name]) + np.dtype(dtype).itemsize * int(b * stride[0] + r * stride[1]), dtype, (heads, size), stride[2:])

    def store(name: str, place: tuple, size: int, values: np.ndarray) -> None:
        if quantizes:
            scale = row(f"{name}_scale", *place, hk, 1, np.float32)[:, 0] if p[f"{name}_scale"] else np.full(hk, p[f"{name}_factor"])
            values, found = append.quantized(values, None if number[f"{name}_by_token"] else scale)
            if number[f"{name}_by_token"]:
                scale[...] = found
        row(name, *place, hk, size, kv)[...] = values

    for b in range(batch):
        before, fits = int(lengths[b]), 0 <= lengths[b] <= number["capacity"] - n
        after = before + n if fits else min(max(before, 0), number["capacity"])
        for t in range(n if fits else 0):
            place = (b, before + t)
            if table is not None:
                slot, rest = divmod(before + t, number["page_size"])
                place = table[b, slot], rest
            if table is None or 0 <= place[0] < number["pages"]:
                store("k", place, d, turned(row("k_new", b, t, hk, d), before + t))
                store("v", place, dv, row("v_new", b, t, hk, dv))
        for r in range(rows if number["pairs"] else 0):
            memory(int(p["q_turned"]) + np.dtype(dtype).itemsize * (b * rows + r) * hq * d, dtype, (hq, d), (d, 1))[...] = turned(
                row("q", b, r, hq, d), r if number["upper_left"] else after - rows + r
            )
        if number["lengths_total"]:
            memory(p["lengths_after"], np.int32, (batch,), (1,))[b] = after


TYPES = {
    "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "fp64": np.float64, "e4m3": ml_dtypes.float8_e4m3fn,
}


def merge(p: np.ndarray, dtype: Any) -> None:
    """What merge_states writes, by the same function on NumPy arrays."""
    n, b, s, h, d, g = (int(p[name]) for name in ("parts", "batch", "rows", "heads", "head_dim", "group"))
    real = np.float64 if dtype == np.float64 else np.float32

    def part(name: str, i: int) -> np.ndarray:
        stride, groups = p[f"{name}_strides"][i], p[f"{name}_groups"][i]
        if name == "lse":
            return memory(p["lses"][i], real, (b, h // g, g, s), (stride[0], groups, stride[2], stride[1])).reshape(b, h, s)
        return memory(p["outs"][i], dtype, (b, s, h // g, g, d), (*stride[:2], groups, *stride[2:])).reshape(b, s, h, d)

    outs, lses = ([part(name, i).copy() for i in range(n)] for name in ("out", "lse"))
    if p["shared"]:
        own, lengths = (memory(p[x], np.int32 if p[f"{x}_i32"] else np.int64, (b,), (1,)) for x in ("shared", "lengths"))
        lses[0][own <= 0] = -np.inf
        lses[0][(own > 0) & ((own != own[0]) | (np.minimum(lengths, lengths[0]) - own < p["least"]))] = np.nan
    out, lse = cuflash.merge_states(outs, lses)
    memory(p["out"], dtype, (b, s, h, d), p["out_stride"])[...] = out
    if p["lse"]:
        memory(p["lse"], real, (b, h, s), p["lse_stride"][[0, 2, 1]])[...] = lse


def copy_pages(p: np.ndarray) -> None:
    """What page_copy moves."""
    count, size = int(p["count"]), int(p["page_size"])
    pages = {way: memory(p[f"pages_{way}"], np.int32, (count,), (1,)) if p[f"pages_{way}"] else np.arange(count) for way in ("from", "to")}
    for side in ("k", "v"):
        shape = (int(p["heads"]), int(p[f"{side}_pieces"]))
        for layer, n, token in itertools.product(range(p["layers"]), range(count), range(size if p[f"{side}_pieces"] else 0)):
            if n * size + token < p["tokens"]:
                source, target = (
                    row_of_page(p, f"{side}_{way}", (layer, pages[way][n], token), int(p[f"{side}_bytes"]), shape) for way in ("from", "to")
                )
                target[...] = source


def row_of_page(p: np.ndarray, name: str, at: tuple, item: int, shape: tuple[int, int]) -> np.ndarray:
    """The heads of a token, in pieces."""
    stride = [int(x) for x in p[f"{name}_stride"]]
    pointer = int(p[name]) + sum(int(n) * step for n, step in zip(at, stride, strict=False))
    interface = {"version": 3, "data": (pointer, False), "typestr": f"|V{item}", "shape": shape, "strides": tuple(stride[3:])}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def compute(name: str, p: np.ndarray, scales: dict[str, Any]) -> None:
    """What an instance of prefill_fa2, combine_fp or decode writes, by the oracle; with ``scales``, keys and values are of e4m3."""
    if name.startswith("clear_rows"):
        clear(name, p)
        return
    if name.startswith("kv_append"):
        types = [TYPES[short] for short in name.removeprefix("kv_append_").split("_")]
        append_rows(p, types[0], types[-1])
        return
    if name.startswith("merge_states"):
        merge(p, TYPES[name.removeprefix("merge_states_")])
        return
    if name == "page_copy_kv":
        copy_pages(p)
        return
    dtype = np.dtype(next(dtype for short, dtype in TYPES.items() if f"_{short}_" in f"{name}_"))
    real = np.float64 if dtype == np.float64 else np.float32
    b, hq, hk, rows, keys = (int(p[x]) for x in ("batch", "heads_q", "heads_kv", "q_rows", "k_rows"))
    d, dv = int(p["head_dim"]), int(p["head_dim_v"])
    packed = 1 if p["cu_seqlens_q"] else 0  # arrays without a batch axis
    q = memory(p["q"], dtype, (b, rows, hq, d)[packed:], p["q_stride"][packed:])
    stored = (int(p["pages"]), int(p["page_size"])) if p["page_table"] else (b, keys)
    kv, words = (ml_dtypes.float8_e4m3fn, 2) if scales else (dtype, 1)  # that strides are counted in; of columns it is 1
    k_stride, v_stride = ((*(words * p[name][:3]), 1 if scales else p[name][3]) for name in ("k_stride", "v_stride"))
    k = memory(p["k"], kv, (*stored, hk, d)[packed:], k_stride[packed:])
    v = memory(p["v"], kv, (*stored, hk, dv)[packed:], v_stride[packed:])
    out = memory(p["out"], dtype, (b, rows, hq, dv)[packed:], p["out_stride"][packed:])
    window = tuple(-1 if p[x] == structs.NO_LIMIT else int(p[x]) for x in ("window_left", "window_right"))
    options: dict[str, Any] = {"window": window, "scale": float(p["scale"]) / structs.LOG2E, "backend": "reference"}
    if "softcap" in name:
        options.update(softcap=float(p["softcap"]) / structs.LOG2E, scale=float(p["scale"]) * float(p["softcap"]) / structs.LOG2E)
    if p["upper_left"]:
        options["causal"] = "upper_left"
    index = index_arrays(p)
    if "kv_start" in index and "kv_lengths" in index:  # clamped, as by the kernels
        index["kv_start"] = np.minimum(index["kv_start"], index["kv_lengths"])
    if p["page_table"]:
        options["page_table"] = memory(p["page_table"], np.int32, (b, int(p["max_pages"])), (int(p["max_pages"]), 1))
    function, cu = cuflash.attention, []
    if packed:
        function, cu = cuflash.attention_varlen, [index.pop("cu_seqlens_q"), index.pop("cu_seqlens_k")]
    result, lse = function(q, k, v, *cu, return_lse=True, **index, **scales, **options)
    written = slice(cu[0][0], cu[0][-1]) if packed else slice(None)
    if packed and "flat" not in name:
        assert (np.diff(cu[0]) <= p["m_tiles"] * p["tile_rows"]).all(), "the fake computes whole sequences"
    out[written] = result[written]
    if p["lse"]:
        target = memory(p["lse"], real, (b, hq, rows)[packed:], [p["lse_stride"][n] for n in (0, 2, 1)[packed:]])
        target[(..., written) if packed else ...] = lse[(..., written) if packed else ...]


def pooled(size: int) -> SimpleNamespace:
    """Memory that lives as long as this refers to it."""
    array = FakeArray((size,), np.uint8)
    return SimpleNamespace(ptr=array.data.ptr, array=array)


@contextlib.contextmanager
def pretended_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Two H200s that are not there."""
    fake = Gpu()
    cupy, cupy_cuda, runtime = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.runtime")
    cupy.ndarray, cupy.cuda, cupy_cuda.runtime = FakeArray, cupy_cuda, runtime
    cupy.empty = FakeArray
    cupy_cuda.alloc = pooled
    cupy.broadcast_to = lambda a, shape: a._view(np.broadcast_to(a.host, shape))
    cupy.asarray = lambda a: FakeArray((), host=np.array(a))
    runtime.memcpyHostToDevice = 1
    runtime.memcpyAsync = lambda to, pointer, size, kind, stream: ctypes.memmove(to, pointer, size)
    cupy_cuda.alloc_pinned_memory = fake.pin
    cupy_cuda.Event = fake.event
    runtime.memsetAsync = lambda pointer, value, size, stream: ctypes.memset(pointer, value, size)
    runtime.getDevice, runtime.getDeviceCount = lambda: fake.current().device, lambda: 2
    runtime.memcpyDeviceToDevice = 3
    runtime.memcpyAsync = lambda target, source, size, kind, stream: ctypes.memmove(target, source, size)
    tricks = SimpleNamespace(as_strided=lambda a, shape, strides: a._view(as_strided(a.host, shape, strides)))
    cupy.lib = SimpleNamespace(stride_tricks=tricks)
    runtime.streamIsCapturing = lambda stream: fake.capturing
    runtime.mallocAsync, runtime.freeAsync = fake.malloc, fake.free
    cupy_cuda.Device = lambda ordinal: fake.using(device=ordinal)
    cupy_cuda.get_current_stream = lambda: SimpleNamespace(ptr=fake.current().stream)
    cupy_cuda.Stream = SimpleNamespace(from_external=lambda stream: fake.using(stream=stream.__cuda_stream__()[1]))
    for name, module in (("cupy", cupy), ("cupy.cuda", cupy_cuda), ("cupy.cuda.runtime", runtime)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(device, "actual", lambda ordinal: device.KNOWN["H200"])
    monkeypatch.setattr(jit, "why_unusable", lambda: None)
    monkeypatch.setattr(jit, "function", fake.function)
    monkeypatch.setattr(launch, "by_value", lambda params: params)
    monkeypatch.setattr(driver, "launches_early", lambda: False)
    for module in (driver, cuda_memory):
        monkeypatch.setattr(module, "library", lambda: FakeDriver)
    monkeypatch.setattr(cuda, "unusable", lambda: None)
    kept = cuda_pages.append_launch, cuda_merge.merge_launch  # launches that another GPU must not find
    for launches in kept:
        launches.cache_clear()
    with fake.using(device=0, stream=0):
        yield fake
    for launches in kept:
        launches.cache_clear()

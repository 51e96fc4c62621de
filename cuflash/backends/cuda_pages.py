"""Tokens into the pages of a cache on the GPU, and pages to other places, each in one launch: kv_append.cu and page_copy.cu."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import jit, launch, structs
from ..types import Append, ArrayView, NoBackendError, Problem
from . import cuda_append

THREADS = 128  # of a block, PAGE_COPY_THREADS in page_copy.cu
INT32_MAX = 2**31 - 1
# The instance that moves numbers of so many bytes; those of one are e4m3.
BITS: dict[int, np.dtype] = {2: np.dtype(np.float16), 4: np.dtype(np.float32), 8: np.dtype(np.float64)}

PAGE_STRIDES = np.dtype((np.int64, 5))  # layer, page, token, head, column, in bytes
# PageCopyParams of page_copy.cu.
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in ("k_from", "v_from", "k_to", "v_to", "pages_from", "pages_to")),
        *((f"{name}_stride", PAGE_STRIDES) for name in ("k_from", "v_from", "k_to", "v_to")), ("tokens", np.int64),
        *((name, np.int32) for name in (
            "layers", "count", "page_size", "heads", "k_pieces", "v_pieces", "k_bytes", "v_bytes", "k_blocks", "v_blocks",
        )),
    ],
    align=True,
)


class Pages(NamedTuple):
    """Keys and values as (layers, pages, page_size, heads, columns)."""

    k: ArrayView
    v: ArrayView


@functools.cache
def source() -> jit.Source:
    """The kernel that copies pages; one for all dtypes, sizes and strides."""
    stub = (
        f'static_assert(sizeof(PageCopyParams) == {PARAMS.itemsize}, "cuda_pages.py mirrors the struct");\n'
        f'static_assert(PAGE_COPY_THREADS == {THREADS}, "as cuda_pages.py has it");\n'
        'extern "C" __global__ void __launch_bounds__(PAGE_COPY_THREADS) page_copy_kv(const __grid_constant__ PageCopyParams p) {\n'
        "    page_copy(p);\n"
        "}\n"
    )
    return jit.Source("page_copy.cu", stub, "page_copy_kv")


def instances(arch: str) -> Iterator[jit.Source]:
    """Every instance for an architecture: for precompilation."""
    yield source()


def pack(k: tuple[ArrayView, ArrayView], v: tuple[ArrayView, ArrayView] | None, count: int, tokens: int) -> tuple[int, np.ndarray]:
    """Blocks, and the struct of the launch but for the lists of pages; ``k`` and ``v`` are copied from the first to the second."""
    p = np.zeros(1, PARAMS)
    r: Any = p[0]
    r["tokens"], r["count"] = tokens, count
    r["layers"], _, r["page_size"], r["heads"], _ = k[0].shape
    blocks = 0
    for name, pair in (("k", k), ("v", v)):
        if pair is None:
            continue
        item, columns = pair[0].dtype.itemsize, pair[0].shape[-1]
        wide = structs.copy_bytes(pair) == 16
        each = 16 if wide else item
        for side, a in zip(("from", "to"), pair, strict=True):
            r[f"{name}_{side}"], r[f"{name}_{side}_stride"] = a.pointer, (*a.strides[:-1], each if wide else a.strides[-1])
        pieces = columns * item // each
        r[f"{name}_pieces"], r[f"{name}_bytes"] = pieces, each
        r[f"{name}_blocks"] = per_page = -(-int(r["page_size"]) * int(r["heads"]) * pieces // THREADS)
        blocks += int(r["layers"]) * count * per_page
    return blocks, p


def prepare(old: ArrayView, new: ArrayView) -> launch.Prepared:
    """The launch that copies an array of five axes to another, for calls that differ in the addresses of the two: old, 0, new, 0."""
    blocks, params = pack((old, new), None, old.shape[1], old.shape[1] * old.shape[2])
    return launch.Prepared([launch.Step(jit.function(source(), old.device), blocks, THREADS)], params, addresses=4)


def rearrange(old: ArrayView, new: ArrayView) -> None:
    """Copy an array of five axes to another of the same shape, on CuPy's current stream."""
    prepare(old, new)(old.pointer, 0, new.pointer, 0)


def copy(old: Pages, new: Pages, pages_from: Sequence[int], pages_to: Sequence[int] | None, tokens: int) -> None:
    """Copy the first tokens of some pages, in all layers, on CuPy's current stream; to the first pages if ``pages_to`` is None."""
    function = jit.function(source(), old.k.device)
    small = {"pages_from": np.array(pages_from, np.int32)}
    if pages_to is not None:
        small["pages_to"] = np.array(pages_to, np.int32)
    with launch.uploaded(small) as pointers:
        blocks, params = pack((old.k, new.k), (old.v, new.v), len(pages_from), tokens)
        for name, address in pointers.items():
            params[name] = address
        launch.launch(launch.Step(function, blocks, THREADS), params, launch.stream_pointer(None))


def write(pages: Pages, tokens: Pages, table: np.ndarray, begins: np.ndarray, scales: Pages | None = None) -> None:
    """Store tokens (layers, B, n, heads, columns) from row ``begins[b]`` of the pages ``table[b]`` on, on CuPy's current stream.

    ``table`` and ``begins`` are int32. With ``scales``, of one column, pages are of e4m3, and get quantized what is of another dtype.

    Raises
    ------
    NoBackendError
        If the kernel cannot run; nothing is written.
    """
    layers, views = pages.k.shape[0], (*tokens, *pages, *(scales or ()))
    can_fold = 1 < layers <= INT32_MAX // pages.k.shape[1]  # numbers of pages are int32
    folded = [_folded(a) for a in views] if can_fold else [None]
    parts: list[Any] = [folded]
    if None in folded:
        parts = [[_layer(a, n) for a in views] for n in range(layers)]
    else:  # layers are nothing but more pages, and more sequences
        table = (table + pages.k.shape[1] * np.arange(layers, dtype=np.int32)[:, None, None]).reshape(-1, table.shape[1])
        begins = np.tile(begins, layers)
    with launch.uploaded({"begins": begins, "table": table}) as at:
        for part in parts:
            forms = tuple(
                (a.shape, a.strides, a.dtype if scales else BITS.get(a.dtype.itemsize, a.dtype), a.pointer % 16) for a in part
            )
            k_new, v_new, k, v, *rest = (a.pointer for a in part)
            prepared = append_launch(forms, table.shape[1], pages.k.device)
            prepared(0, k_new, v_new, 0, 0, at["begins"], at["table"], 0, k, v, 0, *(rest or (0, 0)))


@functools.lru_cache(maxsize=256)
def append_launch(forms: tuple, columns: int, ordinal: int) -> launch.Prepared:
    """The launch of kv_append.cu on tokens (B, n, ...) and pages (pages, page_size, ...) that lie so; see `cuda_append.prepare`."""
    k_new, v_new, k, v, *scales = (
        ArrayView(None, place, shape, strides, dtype, "cupy", ordinal) for shape, strides, dtype, place in forms
    )
    # Of pages of one token their stride may be 0, which would say that all tokens share the scale.
    by_token: list[ArrayView | None] = [
        dataclasses.replace(a, shape=a.shape[:-1], strides=(a.strides[0], a.strides[1] or 4, a.strides[2])) for a in scales
    ]
    k_scale, v_scale = by_token or (None, None)
    batch = k_new.shape[0]
    problem = Problem(
        q=k_new, k=k, v=v, batch=batch, heads_q=k.shape[2], heads_kv=k.shape[2], head_dim=k.shape[3], head_dim_v=v.shape[3],
        seqlen_q=k_new.shape[1], seqlen_k=columns * k.shape[1], page_table=np.empty((batch, columns), np.int32), page_size=k.shape[1],
        k_scale=k_scale, v_scale=v_scale,
    )
    new = Append(np.empty(batch, np.int32), k_new, v_new, quantizes=bool(scales))
    reason = cuda_append.decline(problem, new)
    if reason is not None:
        raise NoBackendError(f"tokens cannot be written to the pages: {reason}")
    found = cuda_append.prepare(problem, new, problem)
    assert found is not None
    return found


def _folded(a: ArrayView) -> ArrayView | None:
    """The first two axes as one, if that can be said with one stride."""
    if a.shape[0] > 1 and a.shape[1] > 1 and a.strides[0] != a.shape[1] * a.strides[1]:
        return None
    stride = a.strides[1] if a.shape[1] > 1 else a.strides[0]
    return ArrayView(None, a.pointer, (a.shape[0] * a.shape[1], *a.shape[2:]), (stride, *a.strides[2:]), a.dtype, a.kind, a.device)


def _layer(a: ArrayView, n: int) -> ArrayView:
    return ArrayView(None, a.pointer + n * a.strides[0], a.shape[1:], a.strides[1:], a.dtype, a.kind, a.device)

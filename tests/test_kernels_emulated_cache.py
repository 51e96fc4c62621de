"""merge_states and page_copy, the raw kernels, on the host, thread by thread, against the same in NumPy."""

from __future__ import annotations

from typing import Any

import compare
import devices
import ml_dtypes
import numpy as np
import pytest
from case import BF16, DTYPES, F16, F32, F64
from cuflash import arrays, merge_states
from cuflash.backends import cuda_merge, cuda_pages
from emulator import emulate
from emulator.guarded import Guarded

reason = "the cases are others in Numba's simulator" if devices.SIMULATED else emulate.why_unusable()
if reason is not None:
    pytest.skip(f"kernels cannot be emulated here: {reason}", allow_module_level=True)

INF = float("inf")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    made = emulate.Emulator(tmp_path_factory.mktemp("emulated"))
    yield made
    made.close()


def guarded(a: np.ndarray, name: str, side: str = "end", writable: bool = False) -> Guarded:
    return Guarded(arrays.view(a, name), side, writable=writable)


class Parts:
    """Outputs and log-sum-exps to be merged, some of them empty, infinite or NaN."""

    def __init__(self, n: int, dtype: Any, shape: tuple = (2, 3, 4, 40), layout: str = "BSHD") -> None:
        rng = np.random.default_rng(n)
        b, s, h, d = shape
        self.layout, self.axes = layout, ("brhc" if layout == "BSHD" else "bhrc", "bhr")
        self.outs = [rng.standard_normal(shape if layout == "BSHD" else (b, h, s, d)).astype(dtype) for _ in range(n)]
        self.lses = [(5 * rng.standard_normal((b, h, s))).astype(F64 if dtype == F64 else F32) for _ in range(n)]
        self.lses[0][0, 1, 2] = -INF
        (self.outs[0].swapaxes(1, 2) if layout == "BSHD" else self.outs[0])[0, 1, 2] = np.nan  # of a part without keys
        for lse in self.lses:
            lse[1, 3, 0] = -INF
        self.lses[-1][1, 0, 1], self.lses[-1][1, 1, 1] = INF, np.nan


def merged(emulator: Any, parts: Parts, arch: int = 800, in_place: bool = False, shared: Any = None, side: str = "end") -> tuple:
    """The results of the kernel."""
    dtype = parts.outs[0].dtype
    arrays_of = {"outs": parts.outs, "lses": parts.lses}
    given = {f"{name}{n}": guarded(a, name, side, writable=in_place) for name, found in arrays_of.items() for n, a in enumerate(found)}
    results = {"out": np.full_like(parts.outs[0], np.nan), "lse": np.full_like(parts.lses[0], np.nan)}
    made = {name: guarded(a, name, side, writable=True) for name, a in results.items()}
    if in_place:
        made, results = {"out": given["outs0"], "lse": given["lses0"]}, {"out": parts.outs[0], "lse": parts.lses[0]}
    views = [[given[f"{name}{n}"].view for n in range(len(parts.outs))] for name in ("outs", "lses")]
    index = {}
    if shared is not None:
        own, lengths, least = shared
        index = {"own": guarded(own, "own"), "lengths": guarded(lengths, "lengths")}
        at = index["own"].view, index["lengths"].view
        shared = cuda_merge.Shared(at[0].pointer, own.dtype == np.int32, at[1].pointer, lengths.dtype == np.int32, least)
    blocks, params = cuda_merge.pack(*views, made["out"].view, made["lse"].view, parts.axes, shared)
    library = emulator.prepare_source(cuda_merge.source(dtype.name), "MergeParams", arch).result()
    emulator.execute(library, params, blocks, cuda_merge.THREADS, 0, {**given, **made, **index})
    for a in made.values():
        a.write_back()
    return results["out"], results["lse"]


def same(got: tuple, want: tuple, dtype: Any) -> None:
    for name, mine, other in zip(("out", "lse"), got, want, strict=True):
        exact = other.astype(F64)
        eps = float(ml_dtypes.finfo(mine.dtype).eps)
        compare.assert_close(mine, exact, 8 * eps * np.abs(exact[np.isfinite(exact)]).max(initial=1.0), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_merges_as_numpy_does(emulator, dtype, n, layout):
    parts = Parts(n, dtype, (2, 3, 4, 40 if n != 5 else 200), layout)
    want = merge_states(parts.outs, parts.lses, layout=layout)
    got = merged(emulator, parts, side="start" if n == 5 else "end")
    same(got, want, dtype)
    in_place = merged(emulator, parts, in_place=True)
    for mine, other in zip(in_place, got, strict=True):
        compare.assert_same_bits(mine, other, "in place")


def test_merges_on_the_oldest_gpu(emulator):
    parts = Parts(3, F16)
    same(merged(emulator, parts, 750), merge_states(parts.outs, parts.lses), F16)


@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_a_part_that_is_for_some_sequences(emulator, width):
    """Those that share nothing do without it; those for which it is wrong, or that lack keys of it, become NaN."""
    parts = Parts(2, F32, (6, 3, 4, 8))
    for a in (*parts.outs, *parts.lses):
        a[...] = np.random.default_rng(1).standard_normal(a.shape)
    own = np.array([16, 16, 0, 8, 16, 16], width)
    lengths = np.array([20, 17, 5, 20, 16, 15], width)
    out, lse = merged(emulator, parts, shared=(own, lengths, 1))
    want = merge_states(parts.outs, parts.lses)
    for b in (0, 1):
        same((out[b], lse[b]), (want[0][b], want[1][b]), F32)
    compare.assert_same_bits(out[2], parts.outs[1][2], "out")
    compare.assert_close(lse[2], parts.lses[1][2].astype(F64), 1e-6, "lse")
    assert np.isnan(out[3:]).all() and np.isnan(lse[3:]).all()
    lengths[0] = 16  # where the others' are read
    out, lse = merged(emulator, parts, shared=(own, lengths, 1))
    assert np.isnan(np.delete(out, 2, 0)).all() and np.isnan(np.delete(lse, 2, 0)).all() and np.isfinite(out[2]).all()


def test_rows_without_columns(emulator):
    parts = Parts(3, F32, (2, 3, 4, 0))
    same(merged(emulator, parts), merge_states(parts.outs, parts.lses), F32)


def test_heads_in_groups(emulator):
    """Parts that have the heads on two axes, in any order in memory."""
    parts = Parts(2, F32, (2, 3, 4, 8))
    want = merge_states(parts.outs, parts.lses)
    outs = [np.ascontiguousarray(o.reshape(2, 3, 2, 2, 8).transpose(2, 0, 1, 3, 4)).transpose(1, 2, 0, 3, 4) for o in parts.outs]
    lses = [np.ascontiguousarray(x.reshape(2, 2, 2, 3).transpose(1, 2, 0, 3)).transpose(2, 0, 1, 3) for x in parts.lses]
    results = np.full((2, 3, 4, 8), np.nan, F32), np.full((2, 4, 3), np.nan, F32)
    made = [guarded(a, "result", writable=True) for a in results]
    given = [[guarded(a, "part") for a in x] for x in (outs, lses)]
    blocks, params = cuda_merge.pack(*([a.view for a in x] for x in given), *(a.view for a in made), ("brhc", "bhr"))
    library = emulator.prepare_source(cuda_merge.source("float32"), "MergeParams", 800).result()
    memory = {f"{n}": a for n, a in enumerate([*given[0], *given[1], *made])}
    emulator.execute(library, params, blocks, cuda_merge.THREADS, 0, memory)
    for a in made:
        a.write_back()
    same(results, want, F32)


# ---- pages


def copied(emulator: Any, pairs: list, count: int, tokens: int, lists: dict[str, list[int]], side: str = "end") -> None:
    """Run the kernel on arrays of five axes: [(k from, k to), (v from, v to) or None]."""
    held = [None if pair is None else [guarded(a, "pages", side, writable=True) for a in pair] for pair in pairs]
    pages = {name: guarded(np.array(x, np.int32), name) for name, x in lists.items()}
    blocks, params = cuda_pages.pack(*(None if pair is None else tuple(a.view for a in pair) for pair in held), count, tokens)
    for name, a in pages.items():
        params[name] = a.view.pointer
    library = emulator.prepare_source(cuda_pages.source(), "PageCopyParams", 800).result()
    memory = {f"{n}{m}": a for n, pair in enumerate(held) if pair is not None for m, a in enumerate(pair)}
    emulator.execute(library, params, blocks, cuda_pages.THREADS, 0, {**memory, **pages})
    for pair in held:
        for a in pair or []:
            a.write_back()


@pytest.mark.parametrize("dtype", [*DTYPES, E4M3], ids=str)
@pytest.mark.parametrize("sizes", [(16, 8), (5, 3), (64, 64)], ids=str)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_pages_to_other_pages(emulator, dtype, sizes, layout):
    """All layers, keys and values, and nothing else."""
    rng = np.random.default_rng(0)
    arrays_ = [rng.standard_normal((3, 7, 4, 2, n)).astype(dtype) for n in sizes]
    if layout == "BHSD":
        arrays_ = [np.ascontiguousarray(a.swapaxes(2, 3)).swapaxes(2, 3) for a in arrays_]
    want = [a.copy() for a in arrays_]
    old, new = [5, 1, 1], [0, 6, 2]
    for a in want:
        a[:, new] = a[:, old]
    targets = [a.copy() if layout == "BSHD" else np.ascontiguousarray(a.swapaxes(2, 3)).swapaxes(2, 3) for a in arrays_]
    pairs = [(a, b) for a, b in zip(arrays_, targets, strict=True)]
    copied(emulator, pairs, 3, 12, {"pages_from": old, "pages_to": new}, side="start" if sizes == (5, 3) else "end")
    for got, other in zip(targets, want, strict=True):
        compare.assert_same_bits(np.ascontiguousarray(got), np.ascontiguousarray(other), "pages")


@pytest.mark.parametrize("length", [1, 8, 9])
def test_the_tokens_of_a_sequence(emulator, length):
    rng = np.random.default_rng(0)
    pages = [rng.standard_normal((2, 7, 4, 2, n)).astype(BF16) for n in (16, 6)]
    held = [5, 1, 3][: -(-length // 4)]
    pairs, dense = [], []
    for a in pages:
        target = np.full((2, 4 * len(held), *a.shape[3:]), np.nan, BF16)
        dense.append(target)
        pairs.append((a, target.reshape(2, len(held), 4, *a.shape[3:])))
    copied(emulator, pairs, len(held), length, {"pages_from": held})
    for got, a in zip(dense, pages, strict=True):
        want = a[:, held].reshape(2, -1, *a.shape[3:])
        compare.assert_same_bits(np.ascontiguousarray(got[:, :length]), np.ascontiguousarray(want[:, :length]), "tokens")
        assert np.isnan(got[:, length:].astype(F32)).all()


def test_another_order_of_axes(emulator):
    a = np.random.default_rng(0).standard_normal((2, 3, 4, 5, 8)).astype(F16)
    target = np.full((3, 2, 4, 5, 8), np.nan, F16)
    copied(emulator, [(a, target.transpose(1, 0, 2, 3, 4)), None], 3, 12, {})
    compare.assert_same_bits(target, np.ascontiguousarray(a.transpose(1, 0, 2, 3, 4)), "array")


def test_instances():
    assert {s.name for s in cuda_merge.instances("sm_90a")} == {f"merge_states_{t}" for t in ("fp16", "bf16", "fp32", "fp64")}
    assert not any("bf16" in s.name for s in cuda_merge.instances("sm_75"))
    assert [s.name for s in cuda_pages.instances("sm_75")] == ["page_copy_kv"]

"""decode_shared_prefix: the same as decode over whole sequences, on the CPU and on a GPU that is not there; what it refuses."""

from __future__ import annotations

import re
from typing import Any

import compare
import ml_dtypes
import numpy as np
import pytest
from case import DTYPES, F16, F32
from warm_calls import gpu, nothing_kept, there  # noqa: F401  fixtures among them

import cuflash
from cuflash import warm_decode

PREFIX, KEYS = 16, 32


class Batch:
    """Sequences that begin with the same keys, in pages or in a dense cache."""

    def __init__(self, page: int = 4, rows: int = 1, new: int = 0, dtype: Any = F32, rope: bool = False, layout: str = "BSHD",
                 lengths: tuple[int, ...] = (16, 20, 28, 17), dv: int = 8, **options: Any) -> None:  # fmt: skip
        rng = np.random.default_rng(page + rows)
        self.lengths, b = list(lengths), len(lengths)

        def normal(*shape: int) -> np.ndarray:
            a = rng.standard_normal(shape).astype(dtype)
            return np.ascontiguousarray(a.swapaxes(1, 2)) if layout == "BHSD" else a

        self.options: dict[str, Any] = {"layout": layout, **options}
        k, v = (rng.standard_normal((b, KEYS, 2, n)).astype(dtype) for n in (16, dv))
        k[:, :PREFIX], v[:, :PREFIX] = k[:1, :PREFIX], v[:1, :PREFIX]
        if page:
            slots, shared = KEYS // page, PREFIX // page
            order = rng.permutation(shared + b * (slots - shared))
            table = np.concatenate([np.tile(order[:shared], (b, 1)), order[shared:].reshape(b, -1)], 1)
            caches = []
            for a in (k, v):
                pages = np.full((len(order), page, 2, a.shape[-1]), np.nan, dtype)
                pages[table] = a.reshape(b, slots, page, 2, -1)
                caches.append(pages)
            k, v = caches
            self.options["page_table"] = table.astype(np.int32)
        if layout == "BHSD":
            k, v = (np.ascontiguousarray(a.swapaxes(1, 2)) for a in (k, v))
        self.arrays = [normal(b, rows, 4, 16), k, v]
        if new:
            self.options |= {"k_new": normal(b, new, 2, 16), "v_new": normal(b, new, 2, dv)}
        if rope:
            angles = np.arange(KEYS)[:, None] * np.array([1.0, 0.3, 0.1, 0.03])
            self.options["rope"] = (np.cos(angles).astype(F32), np.sin(angles).astype(F32), "half")

    def plain(self, **changed: Any) -> tuple[tuple, list[np.ndarray]]:
        """Results of decode over whole sequences, and the caches afterwards."""
        arrays = [a.copy() for a in self.arrays]
        return cuflash.decode(*arrays, self.lengths, return_lse=True, **{**self.options, **changed}), arrays[1:]

    def shared(self, prefix: Any = PREFIX, **changed: Any) -> tuple[tuple, list[np.ndarray]]:
        arrays = [a.copy() for a in self.arrays]
        options = {**self.options, **changed}
        return cuflash.decode_shared_prefix(*arrays, self.lengths, prefix, return_lse=True, **options), arrays[1:]

    def on_device(self, prefix: list[int], **changed: Any) -> tuple[list, dict]:
        """Arguments with every array on the device."""
        options = {name: there(x) if isinstance(x, np.ndarray) else x for name, x in {**self.options, **changed}.items()}
        if options.get("rope"):
            options["rope"] = (*map(there, options["rope"][:2]), options["rope"][2])
        return [*map(there, self.arrays), *(there(np.array(x, np.int32)) for x in (self.lengths, prefix))], options


def check(got: tuple, want: tuple, dtype: Any) -> None:
    """The two results of a call; parts are rounded to the dtype before they are merged."""
    for name, mine, other in zip(("out", "lse"), got, want, strict=True):
        exact = other.astype(np.float64)
        eps = float(ml_dtypes.finfo(dtype if name == "out" else np.float64 if dtype == np.float64 else F32).eps)
        largest = np.abs(exact[np.isfinite(exact)]).max(initial=1.0)
        compare.assert_close(mine, exact, (4 if name == "lse" else 2 if dtype not in (F32, np.float64) else 8) * eps * largest, name)


CASES = {
    "plain": {},
    "dense": {"page": 0},
    "heads first": {"layout": "BHSD", "page": 8, "rows": 3, "causal": True, "lengths": (18, 20, 28, 32)},
    "one page a key": {"page": 1},
    "new keys": {"new": 2, "rows": 2, "causal": True},
    "new keys, dense": {"new": 1, "page": 0},
    "rope": {"new": 2, "rows": 2, "rope": True, "causal": True},
    "rope and heads first": {"new": 1, "rope": True, "layout": "BHSD"},
    "queries that all see everything": {"rows": 3, "lengths": (19, 32, 20)},
    "sinks and softcap": {"sinks": np.array([0.0, -3.0, 9.0, 1.0]), "softcap": 2.0},
    "a tree": {"rows": 3, "mask": np.array([[True, False, False], [True, True, False], [True, False, True]]), "lengths": (19, 30)},
    "one sequence": {"lengths": (25,)},
    "nothing of their own": {"lengths": (16, 16, 16)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_as_decode(case, dtype):
    batch = Batch(dtype=dtype, **CASES[case])
    want, caches = batch.plain(backend="reference")
    got, mine = batch.shared()
    check(got, want, dtype)
    for a, b in zip(mine, batch.plain()[1], strict=True):
        compare.assert_same_bits(a, b, "cache")


@pytest.mark.parametrize("prefix", [0, 1, 5, 15, 16, [16, 0, 16, 16], [16, 0, 0, 0], [0, 0, 0, 0]], ids=str)
def test_lengths_of_the_prefix(prefix):
    """Also such that end within a page, and sequences that share nothing, whose pages may be others."""
    batch = Batch()
    want, _ = batch.plain(backend="reference")
    if isinstance(prefix, list) and prefix[1] == 0 and prefix[0]:
        table = batch.options["page_table"]
        spare = np.concatenate([batch.arrays[1], batch.arrays[1][table[1]]]), np.concatenate([batch.arrays[2], batch.arrays[2][table[1]]])
        table[1] = len(batch.arrays[1]) + np.arange(table.shape[1])
        batch.arrays[1:] = spare
    check(batch.shared(prefix)[0], want, F32)


def test_empty_sequences_and_empty_batches():
    """A row that is not in use has length 0 and shares nothing."""
    batch = Batch(lengths=(20, 0, 18), sinks=np.array([0.0, -3.0, 9.0, 1.0]))
    got, _ = batch.shared([16, 0, 16])
    check(got, batch.plain(backend="reference")[0], F32)
    assert not got[0][1].any() and got[1][1].ravel().tolist() == [0.0, -3.0, 9.0, 1.0]
    none = Batch(rows=0, lengths=(20, 18))
    tokens = {name: np.ones((2, 1, 2, n), F32) for name, n in (("k_new", 16), ("v_new", 8))}
    got, caches = none.shared(**tokens)
    assert got[0].shape == (2, 0, 4, 8) and (caches[0][none.options["page_table"][0, 5], 0] == 1).all()  # appended nevertheless
    empty = np.empty((0, 1, 4, 16), F32)
    pages = np.empty((3, 4, 2, 16), F32)
    assert cuflash.decode_shared_prefix(empty, pages, pages, [], 4, page_table=np.empty((0, 2), int)).shape == empty.shape


@pytest.mark.torch
def test_arrays_of_another_library():
    torch = pytest.importorskip("torch")
    batch = Batch(new=1)
    want, caches = batch.shared()
    there = {name: torch.from_numpy(x.copy()) for name, x in batch.options.items() if isinstance(x, np.ndarray)}
    q, k, v = (torch.from_numpy(a.copy()) for a in batch.arrays)
    for prefix in (PREFIX, torch.full((4,), PREFIX), [PREFIX] * 4):
        out, lse = cuflash.decode_shared_prefix(q, k, v, torch.tensor(batch.lengths), prefix, return_lse=True, **there)
        assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
        compare.assert_same_bits(out.numpy(), want[0], "out")
        compare.assert_same_bits(k.numpy(), caches[0], "cache")


def test_a_key_that_nobody_may_see_never_matters():
    """Of the prefix beyond its length, and behind the sequences; NaN in the prefix reaches every sequence that shares it and no other."""
    batch = Batch(page=4)
    table = batch.options["page_table"]
    batch.arrays[2][table[0, 0], 1] = np.nan
    got = batch.shared([16, 0, 16, 16], page_table=np.where(np.arange(4)[:, None] == 1, table[:, ::-1], table))[0][0]
    assert np.isnan(got[[0, 2, 3]]).all() and np.isfinite(got[1]).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_infinite_logits_and_nan(rows):
    """NaN in a query makes its row NaN and no other; an infinite logit the rows that see it, in out and in the log-sum-exp."""
    batch = Batch(rows=rows, causal=True, lengths=(19, 21, 28, 20))
    batch.arrays[0][1, 0, 2] = np.nan
    (out, lse), _ = batch.shared()
    wrong = np.zeros((4, rows, 4), bool)
    wrong[1, 0, 2] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), wrong)
    np.testing.assert_array_equal(np.isnan(lse.swapaxes(1, 2)), wrong)
    np.testing.assert_array_equal(np.isnan(out).any(-1), wrong)

    batch = Batch(rows=rows, causal=True, lengths=(19, 21, 28, 20))
    table, k = batch.options["page_table"], batch.arrays[1]
    batch.arrays[0][...] = np.abs(batch.arrays[0])
    k[table[0, 1], 2, 1] = np.inf  # of the prefix, key/value head 1
    k[table[3, 4], 0, 0] = np.inf  # of sequence 3 alone, its key 16, head 0
    (out, lse), _ = batch.shared([16, 16, 0, 16])
    want, _ = batch.plain(backend="reference")
    for mine, other in ((out, want[0]), (lse, want[1])):
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(other))
    assert np.isnan(lse[:, 2:]).all() and np.isnan(lse[3]).all() and np.isfinite(lse[:3, :2]).all()


def test_results_in_the_user_s_buffers():
    batch = Batch(dtype=F16)
    want, _ = batch.shared()
    out, lse = np.full((4, 1, 8, 8), np.nan, F16)[:, :, ::2], np.full((4, 4, 1), np.nan, F32)
    got, _ = batch.shared(out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    compare.assert_same_bits(np.ascontiguousarray(out), want[0], "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": [16, 8, 16, 16]}, "prefix_lengths: 8 at index 1; it must be that of sequence 0, 16, or 0"),
        ({"prefix": [0, 16, 0, 0]}, "prefix_lengths: 16 at index 1; it must be that of sequence 0, 0, or 0"),
        ({"prefix": 17}, "prefix_lengths: 17 at index 0; of the sequence's 16 keys at least 0 must come behind it"),
        ({"prefix": -1}, "prefix_lengths: got -1; it must be at least 0"),
        ({"prefix": [16] * 3}, "prefix_lengths: shape (3,); it must be (4,)"),
        ({"window": (5, 5)}, "window: must be None; decode_shared_prefix() has one problem for queries at different positions"),
        ({"kv_start": [0] * 4}, "kv_start: must be None"),
        ({"alibi_slopes": [1.0] * 4}, "alibi_slopes: must be None"),
        ({"causal": "upper_left"}, "causal: 'upper_left' puts queries at the first keys"),
        ({"batch_invariant": True}, "batch_invariant: must be False"),
        ({"prefix": [8, [8]]}, "prefix_lengths: not a rectangular array of integers"),
        ({"mask": np.ones(KEYS, bool)}, "mask: shape (32,) is for all 32 keys; with a shared prefix it must be None"),
        ({"mask": np.ones((1, 1), bool)}, "mask: shape (1, 1) is for all 32 keys; with a shared prefix it must be None"),
        ({"page_table": np.arange(32).reshape(4, 8) % 20}, "page_table: row 1 does not begin with the 4 pages of row 0"),
    ],
)  # fmt: skip
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Batch().shared(**change)


def test_queries_must_stand_behind_the_prefix():
    batch = Batch(rows=3, causal=True, lengths=(18, 17))
    with pytest.raises(ValueError, match="prefix_lengths: 16 at index 1; of the sequence's 17 keys at least 2 must come behind it"):
        batch.shared()
    batch = Batch(rows=3, lengths=(18, 17), mask=np.tri(3, dtype=bool))
    with pytest.raises(ValueError, match="of the sequence's 18 keys at least 3 must"):
        batch.shared()
    with pytest.raises(ValueError, match=r"mask: shape \(1, 32\) is for all 32 keys; .* it must have 3 columns, for the last 3 keys"):
        batch.shared(mask=np.ones((1, KEYS), bool))
    with pytest.raises(ValueError, match="q: 3 axes; it must have 4"):
        cuflash.decode_shared_prefix(batch.arrays[0][0], *batch.arrays[1:], [18], 16)
    with pytest.raises(TypeError, match="^q: got list; allowed are arrays of NumPy"):
        cuflash.decode_shared_prefix(batch.arrays[0].tolist(), *batch.arrays[1:], batch.lengths, 16)


def test_new_keys_are_not_of_the_prefix():
    batch = Batch(page=0, new=2, lengths=(10, 10))
    check(batch.shared(10)[0], batch.plain(backend="reference")[0], F32)
    for prefix in (11, 12, [11, 0]):
        with pytest.raises(ValueError, match="prefix_lengths: 1[12] at index 0; of the sequence's 12 keys, 2 of them new, at least 2 must"):
            batch.shared(prefix)
    with pytest.raises(ValueError, match="prefix_lengths: 12 at index 1; of the sequence's 12 keys, 2 of them new,"):
        Batch(page=0, new=2, lengths=(14, 10)).shared(12)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_results_of_another_precision(dtype):
    batch = Batch(dtype=dtype)
    for out_dtype in (np.float64, F16):
        want, _ = batch.plain(out_dtype=out_dtype)
        got, _ = batch.shared(out_dtype=out_dtype)
        assert [a.dtype for a in got] == [out_dtype, F32]
        check(got, want, max(dtype, out_dtype, key=lambda x: np.finfo(x).eps))


# ---- on a GPU


ON_GPU = ("plain", "dense", "new keys", "rope", "heads first", "one sequence", "nothing of their own")


@pytest.mark.parametrize("case", ON_GPU)
def test_the_same_on_a_gpu(gpu, case):
    """The first call plans, the next finds its launches; other arrays, lengths and prefixes come to the same launches."""
    for turn in range(4):
        batch = Batch(dtype=F16, **CASES[case])
        if turn == 3 and len(batch.lengths) == 4:
            batch.lengths[1:3] = [24, 30]
        want, caches = batch.plain(backend="reference")
        args, options = batch.on_device([PREFIX] * len(batch.lengths))
        kept = len(warm_decode.launches)
        before = len(gpu.launches)
        got = cuflash.decode_shared_prefix(*args, return_lse=True, **options)
        assert (len(warm_decode.launches) > kept) == (turn == 0)
        check(tuple(x.host for x in got), want, F16)
        for mine, other in zip(args[1:3], caches, strict=True):
            compare.assert_close(mine.host, other.astype(np.float64), 2e-3, "cache")
        names = [x.name.split("_fp16")[0] for x in gpu.launches[before:]]
        assert names == [*["kv_append"] * ("new" in case or "rope" in case), "page_copy_kv", "decode", "decode", "merge_states"]
    assert gpu.waited == 0


def test_a_captured_call_follows_lengths_and_prefixes(gpu):
    """Rows that share nothing or are not in use; those that share another prefix than sequence 0, or lack keys of it, become NaN."""
    batch = Batch(dtype=F16)
    args, options = batch.on_device([PREFIX] * 4)
    cuflash.decode_shared_prefix(*args, **options)
    gpu.capturing = True
    for lengths, prefix, bad in (
        ([16, 20, 28, 17], [16] * 4, []), ([20, 0, 18, 9], [16, 0, 16, 0], []), ([20, 20, 20, 20], [8] * 4, []),
        ([20, 20, 20, 20], [16, 8, 16, 0], [1]), ([20, 11, 20, 20], [16, 16, 16, 16], [1]), ([20] * 4, [0] * 4, []),
        ([11, 20, 20, 20], [16, 16, 16, 0], [0, 1, 2]),
    ):  # fmt: skip
        batch.lengths = lengths
        want, _ = batch.plain(backend="reference")
        again, _ = batch.on_device(prefix)
        for old, new in zip(args, again, strict=True):
            old.host[...] = new.host
        out = cuflash.decode_shared_prefix(*args, **options).host
        good = [b for b in range(4) if b not in bad]
        compare.assert_close(out[good], want[0][good].astype(np.float64), 4e-3, "out")
        assert np.isnan(out[bad]).all()
    assert not gpu.allocated and gpu.waited == 0


def test_new_keys_of_a_gpu_are_not_of_the_prefix(gpu):
    batch = Batch(dtype=F16, page=0, new=2, lengths=(16, 20, 14, 15))
    for _ in range(2):  # warm or not
        want, _ = batch.plain(backend="reference")
        args, options = batch.on_device([16, 16, 16, 0])
        out = cuflash.decode_shared_prefix(*args, **options).host
        compare.assert_close(out[[0, 1, 3]], want[0][[0, 1, 3]].astype(np.float64), 4e-3, "out")
        assert np.isnan(out[2]).all()


def test_lengths_of_the_host_beside_arrays_of_a_gpu(gpu):
    batch = Batch(dtype=F16)
    want, _ = batch.plain(backend="reference")
    args, options = batch.on_device([PREFIX] * 4)
    got = cuflash.decode_shared_prefix(*args[:3], batch.lengths, PREFIX, **{**options, "page_table": batch.options["page_table"]})
    compare.assert_close(got.host, want[0].astype(np.float64), 4e-3, "out")
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="cannot be captured"):
        cuflash.decode_shared_prefix(*args[:3], batch.lengths, PREFIX, **options)


def test_one_number_beside_lengths_of_a_gpu(gpu):
    """It is planned once for each number, and comes to the kernels by a copy; what was checked the first time is checked for others."""
    batch = Batch(dtype=F16)
    want, _ = batch.plain(backend="reference")
    args, options = batch.on_device([PREFIX] * 4)
    for prefix, kept in ((PREFIX, 1), (PREFIX, 1), (8, 2), (0, 3), (8, 3)):
        with gpu.using(stream=5):
            out = cuflash.decode_shared_prefix(*args[:4], prefix, **options).host
        compare.assert_close(out, want[0].astype(np.float64), 4e-3, "out")
        assert len(warm_decode.launches) == kept and {x.stream for x in gpu.launches} == {5}
    assert gpu.waited == 0
    with pytest.raises(ValueError, match="prefix_lengths: 33 at index 0; it must be from 0 to 32"):
        cuflash.decode_shared_prefix(*args[:4], 33, **options)


@pytest.mark.parametrize("prefix", [PREFIX, [PREFIX] * 4], ids=str)
def test_numbers_of_the_host_in_a_capture(gpu, prefix):
    args, options = Batch(dtype=F16).on_device([PREFIX] * 4)
    for _ in range(2):  # warm or not
        gpu.capturing = True
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph: the copy on the device of prefix_lengths"):
            cuflash.decode_shared_prefix(*args[:4], prefix, **options)
        gpu.capturing = False
        cuflash.decode_shared_prefix(*args[:4], prefix, **options)


def test_what_no_backend_runs_is_said_of_prefix_lengths(gpu):
    args, options = Batch(dtype=F16).on_device([PREFIX] * 4)
    with pytest.raises(cuflash.NoBackendError, match="prefix_lengths") as error:
        cuflash.decode_shared_prefix(*args, backend="numba-cuda", **options)
    assert "kv_start" not in str(error.value)


def test_checks_of_what_is_on_the_device(gpu, monkeypatch):
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    batch = Batch(dtype=F16)
    args, options = batch.on_device([16, 8, 16, 16])
    with pytest.raises(ValueError, match="prefix_lengths: 8 at index 1"):
        cuflash.decode_shared_prefix(*args, **options)

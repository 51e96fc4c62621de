"""Hard cases on caches: garbage that nobody may see, bad page tables, appends that do not fit. Numbers are the cases'."""

from __future__ import annotations

import compare
import devices
import numpy as np
import pytest
from case import BF16, F32
from cases import Target
from hard import attend, every_dtype, every_target, normal

import cuflash
from cuflash.problem import build_attention

GARBAGE = (np.nan, np.inf, -np.inf)


def assert_same(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> None:
    compare.assert_same_bits(first[0], second[0], "out")
    compare.assert_same_bits(first[1], second[1], "lse")


@every_target
@every_dtype
@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize(("sq", "length"), [(1, 5), (3, 5), (1, 65), (66, 70)])
def test_case_14_garbage_in_unwritten_slots(sq: int, length: int, page: int, dtype: np.dtype, target: Target) -> None:
    """Bit for bit what a cache full of zeros gives."""
    slots = -(-length // page) + 1
    pages = normal(0, (2, 2 * slots + 3, page, 2, 16), dtype)
    table = np.random.default_rng(1).permutation(2 * slots + 3)[: 2 * slots].reshape(2, slots)
    q, lengths = normal(2, (2, sq, 4, 16), dtype), np.array([length, 1])
    used = np.zeros(pages.shape[1:3], bool)
    for b, n in enumerate(lengths):
        j = np.arange(n)
        used[table[b, j // page], j % page] = True
    results = []
    for filler in (0.0, *GARBAGE):
        k, v = np.where(used[None, ..., None, None], pages, np.asarray(filler, dtype))
        how = {"causal": True, "kv_lengths": lengths, "page_table": table}
        results.append([attend(target, q, k, v, **how, **more) for more in ({}, {"softcap": 2.0, "sinks": np.zeros(4)})])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same(got, want)


@every_target
@every_dtype
@pytest.mark.parametrize("filler", GARBAGE)
def test_case_14_garbage_behind_the_length_and_before_the_start(filler: float, dtype: np.dtype, target: Target) -> None:
    q = normal(0, (3, 6, 4, 16), dtype)
    k, v = normal(1, (3, 130, 2, 16), dtype), normal(2, (3, 130, 2, 16), dtype)
    lengths, start = np.array([5, 65, 128]), np.array([1, 64, 0])
    results = []
    for value in (0.0, filler):
        for b in range(3):
            for a in (k, v):
                a[b, : start[b]] = value
                a[b, lengths[b]:] = value
        options = ({}, {"causal": True}, {"window": (3, 2)}, {"score": "sqdist"})
        results.append([attend(target, q, k, v, kv_lengths=lengths, kv_start=start, **more) for more in options])
    for got, want in zip(results[1], results[0], strict=True):
        assert_same(got, want)


@every_target
@every_dtype
@pytest.mark.parametrize("filler", GARBAGE)
@pytest.mark.parametrize("how", ["mask", "bias", "mask_mod", "score_mod", "window", "upper_left"])
def test_case_14_garbage_in_keys_that_are_masked_for_all(how: str, filler: float, dtype: np.dtype, target: Target) -> None:
    q = normal(0, (1, 66, 4, 16), dtype)
    k, v = normal(1, (1, 200, 2, 16), dtype), normal(2, (1, 200, 2, 16), dtype)
    hidden = np.arange(200) >= 66 if how == "upper_left" else np.arange(200) < 104 if how == "window" else np.arange(200) % 3 == 1
    options = {
        "mask": {"mask": ~hidden},
        "bias": {"bias": np.where(hidden, -np.inf, 0).astype(dtype)},
        "mask_mod": {"mask_mod": lambda b, h, i, j: j % 3 != 1},
        "score_mod": {"score_mod": lambda s, b, h, i, j: np.where(j % 3 != 1, s, -np.inf)},
        "window": {"window": (30, 0)},
        "upper_left": {"causal": "upper_left"},
    }[how]
    k[:, hidden], v[:, hidden] = 0, 0
    want = compare.expect([build_attention(q, k, v, **options)])
    k[:, hidden], v[:, hidden] = filler, filler
    out, lse = attend(target, q, k, v, **options)
    compare.assert_close(out, want.out[0], want.out_bound, "out")
    compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


@every_target
@every_dtype
def test_case_40_bad_entries_behind_the_used_part(dtype: np.dtype, target: Target) -> None:
    q, pages = normal(0, (1, 1, 4, 16), dtype), normal(1, (2, 5, 16, 2, 16), dtype)
    for length in (1, 15, 16):
        want = compare.expect([build_attention(q, pages[0, 2:3, :length], pages[1, 2:3, :length])])
        for function in (cuflash.attention, cuflash.decode):
            index = ([length],) if function is cuflash.decode else ()
            more = {} if index else {"kv_lengths": [length]}
            for table in ([[2, -1, 10**9]], np.array([[2, 5, -(2**31)]], np.int32), np.array([[2, 2**40, 7]])):
                got = attend(target, q, pages[0], pages[1], *index, function=function, page_table=table, **more)
                compare.assert_close(got[0], want.out[0], want.out_bound, "out")
                compare.assert_close(got[1], want.lse[0], want.lse_bound, "lse")


@every_target
@pytest.mark.parametrize("table", [[[-1, 0]], [[0, 5]], [[0, 10**9]], [[2, -(2**31)]]])
def test_case_40_bad_entry_in_the_used_part(table: list, target: Target) -> None:
    q, pages = normal(0, (1, 1, 4, 16), F32), normal(1, (2, 5, 16, 2, 16), F32)
    with pytest.raises(ValueError, match="page_table"):
        attend(target, q, pages[0], pages[1], page_table=table, kv_lengths=[17])
    with pytest.raises(ValueError, match="page_table"):
        attend(target, q, pages[0], pages[1], [17], function=cuflash.decode, page_table=table)


@every_target
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_case_41_appends_that_do_not_fit(layout: str, dtype: np.dtype, target: Target) -> None:
    """A clear error, and the cache, its neighbours in memory and the results stay as they were."""
    memory = normal(0, (2, 3, 32, 2, 16), dtype)  # the cache is the middle one of three
    before = memory.tobytes()
    q, new = normal(1, (1, 1, 2, 16), dtype), normal(2, (1, 1, 2, 16), dtype)
    k, v = memory[:, 1:2]
    with pytest.raises(ValueError, match="kv_lengths"):
        devices.run(target, cuflash.decode, q, k, v, [32], k_new=new, v_new=new)
    with pytest.raises(ValueError, match="kv_lengths"):
        devices.run(target, cuflash.decode, q, k, v, [33])
    pages = memory.reshape(2, 6, 16, 2, 16)[:, 2:4]
    if layout == "BHSD":
        pages, q, new = (a.swapaxes(-3, -2) for a in (pages, q, new))
    for lengths, appended in (([33], False), ([32], True)):
        more = {"k_new": new, "v_new": new} if appended else {}
        with pytest.raises(ValueError, match="kv_lengths"):
            devices.run(target, cuflash.decode, q, pages[0], pages[1], lengths, page_table=[[1, 0]], layout=layout, **more)
    with pytest.raises(ValueError, match="page_table"):  # two sequences would write into one page
        two, twice = np.concatenate([q, q]), np.concatenate([new, new])
        devices.run(
            target, cuflash.decode, two, pages[0], pages[1], [3, 3], page_table=[[1, 0], [1, 0]], layout=layout, k_new=twice, v_new=twice
        )
    assert memory.tobytes() == before
    devices.run(target, cuflash.decode, q, pages[0], pages[1], [31], page_table=[[1, 0]], layout=layout, k_new=new, v_new=new)
    changed = np.argwhere(
        (memory.view(f"u{dtype.itemsize}") != np.frombuffer(before, f"u{dtype.itemsize}").reshape(memory.shape)).any(
            axis=(-1, -2)
        )
    )
    assert changed.tolist() == [[0, 1, 15], [1, 1, 15]]  # key 31 is row 15 of page 0, which is row 15 of the middle block


@every_target
def test_case_41_a_call_that_is_declined_appends_nothing(target: Target) -> None:
    cache = normal(0, (2, 1, 32, 2, 16), F32)
    before = cache.tobytes()
    q = new = normal(1, (1, 1, 2, 16), F32)
    with pytest.raises(cuflash.NoBackendError):
        devices.call(
            target, cuflash.decode, (q, cache[0], cache[1], [3]),
            {"k_new": new, "v_new": new, "score_mod": "s + h", "kernel": target.kernel, "backend": target.backend},
        )
    assert cache.tobytes() == before

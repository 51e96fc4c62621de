"""How keys of float32 and float64 calls are split over the grid: which calls, tiles, parts and words. Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from case import F16, F32, F64
from warm_calls import choices, gpu, nothing_kept, same, there, wrong_in_threads  # noqa: F401  fixtures among them

import cuflash
from cuflash import device, tiles, tiles_fp, warm, warm_decode
from cuflash.backends import cuda, cuda_decode, cuda_fp, cuda_parts
from cuflash.problem import build_attention, build_varlen
from cuflash.types import Plan, Problem

H200 = device.KNOWN["H200"]


def problem(
    batch: int = 1, queries: int = 1, keys: int = 4096, heads: int = 32, kv_heads: int = 8, d: int = 64, dtype: Any = F32,
    op: Any = "attention", **options: Any,
) -> Problem:
    q, k = (np.broadcast_to(np.zeros((), dtype), (batch, n, h, d)) for n, h in ((queries, heads), (keys, kv_heads)))
    return build_attention(q, k, k, **options).replace(op=op)


def planned(asked: Problem, gpu: device.DeviceInfo = H200) -> Plan:
    with device.pretend(gpu):
        return cuda.plan(asked, "fa2")


def split(gpu: device.DeviceInfo = H200, **sizes: Any) -> cuda_parts.Split | None:
    """None if the keys stay whole."""
    plan = planned(problem(**sizes), gpu)
    return plan.extra[1] if isinstance(plan.extra[0], cuda_parts.Instance) else None


@pytest.mark.parametrize("gpu", device.KNOWN.values(), ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tiles_fit(gpu, dtype):
    """Those of all head sizes, with as many blocks as a multiprocessor holds, but none that would take registers from them."""
    kind = tiles_fp.arithmetic(dtype, None, gpu)
    for d in tiles.HEAD_CLASSES:
        for dv in tiles.HEAD_CLASSES:
            tile = tiles_fp.few_rows(kind, dtype, d, dv, gpu)
            used = tile.shared_memory(8 if dtype == "float64" else 4, d, dv)
            assert used <= gpu.shared_memory_block and tile.resident * (used + 1024 * (gpu.cc >= (8, 0))) <= gpu.shared_memory_sm
            assert 1 <= tile.resident and tile.resident * tile.threads * 256 <= gpu.registers_sm
            assert tile.m == tiles_fp.FEW_ROWS


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("gpu", [H200, device.KNOWN["T4"]], ids=lambda gpu: gpu.name)
def test_one_sequence_fills_the_gpu(gpu, dtype):
    for keys in (4096, 32768):
        how = split(gpu, keys=keys, dtype=dtype)
        assert how.blocks == 8  # a key/value head each
        assert how.grid >= gpu.multiprocessors / 2 and how.parts <= cuda_parts.MOST_PARTS
    assert split(gpu, keys=4096, dtype=dtype).parts <= split(gpu, keys=32768, dtype=dtype).parts
    assert split(gpu, keys=10, dtype=dtype).parts == split(gpu, keys=0, dtype=dtype).parts == 1
    assert split(gpu, batch=512, dtype=dtype).parts < split(gpu, dtype=dtype).parts


def test_few_keys_of_many_sequences_stay_whole():
    """No partial results, which would be as many bytes as the results."""
    assert split(batch=2**20, queries=16, keys=16, heads=4, kv_heads=4, d=32) is None
    assert split(batch=512, keys=64) is None and split(batch=512, keys=4096) is not None


def test_what_a_grid_cannot_merge_stays_whole():
    assert split(batch=2**27, heads=16, kv_heads=1, keys=100, d=1, num_splits=2) is None


def test_a_window_is_what_is_split():
    assert split(keys=32768, window=(100, 0)).parts <= 2 and split(keys=32768, window=(-1, 0)).parts > 50


def test_which_rows_a_block_has():
    """Query heads of a key/value head, unless something tells them apart; several queries of one head."""
    assert split().blocks == 8 and split(sinks=np.zeros(32)).blocks == 8 and split(heads=200, kv_heads=1).blocks == 2
    for options in ({"alibi_slopes": np.zeros(32)}, {"bias": np.zeros(4096, F32)}, {"mask": np.ones(4096, bool)}, {"queries": 16}):
        assert split(**options).blocks == 32, options


def test_many_queries_are_split_where_the_gpu_idles():
    assert split(queries=17).parts > 1 and split(queries=500, heads=2, kv_heads=1, keys=100_000, causal=True).parts > 1
    assert split(queries=17, batch=64) is None and split(queries=4096, causal=True) is None and split(queries=64, keys=64) is None


def test_parts_that_are_asked_for():
    for queries in (1, 5, 300):
        for splits in (2, 3, 33):
            assert split(queries=queries, num_splits=splits).parts == splits
        assert split(queries=queries, num_splits=10_000).parts == -(-4096 // planned(problem(queries=queries, num_splits=2)).tile[1])
    assert split(num_splits=1).parts == 1 and split(queries=300, num_splits=1) is None


def test_batch_invariant_parts_do_not_know_the_batch():
    """Nor the capacity: a part has the same tiles, and a sequence of the same length as many parts."""
    asked: dict[str, Any] = {"op": "decode", "batch_invariant": True}
    for queries in (1, 5, 64):
        tile = planned(problem(queries=queries, **asked)).tile
        found = {split(queries=queries, batch=batch, **asked).parts for batch in (1, 7, 1000)}
        least = {split(queries=queries, keys=keys, **asked).least for keys in (1, 4096, 10**6)}
        assert found == {4096 // cuda_decode.INVARIANT_KEYS} and least == {cuda_decode.INVARIANT_KEYS // tile[1]}
    assert split(keys=10**6, **asked).parts == cuda_decode.INVARIANT_PARTS
    assert split(queries=65, **asked) is split(queries=65, batch=64, **asked) is None
    assert split(batch_invariant=True) is split(queries=5, batch=64, batch_invariant=True) is None, "packed calls have the same bits"


def test_what_is_not_split_says_so():
    q, k = np.zeros((40, 4, 64), F32), np.zeros((8000, 4, 64), F32)
    packed = build_varlen(q, k, k, [0, 40], [0, 8000])
    assert "packed sequences are not split" in planned(packed).reason
    assert "num_splits is not part" in cuda.decline(packed.replace(num_splits=2), "fa2")
    assert "at most 64 queries" in planned(problem(queries=65, heads=4, kv_heads=4, keys=8000, batch_invariant=True)).reason
    assert "split" not in planned(problem(queries=4096)).reason + planned(problem(queries=300, heads=2, kv_heads=2, num_splits=1)).reason
    assert "num_splits is not part" in cuda.decline(problem(dtype=F16, num_splits=2), "fa2")


def test_workspace_and_words():
    plan = planned(problem(batch=2, queries=3, num_splits=5, dtype=F64, out_dtype=F32))
    assert plan.num_splits == 5 and plan.workspace == 5 * 2 * 3 * 32 * (64 * 8 + 16)
    assert "queries (3)" in plan.reason and "at most 5 parts" in plan.reason and "320 blocks" in plan.reason
    assert "4 query heads of a key/value head" in planned(problem()).reason
    assert "by its own length alone" in planned(problem(batch_invariant=True, op="decode")).reason


def test_names_are_distinct():
    instances = list(cuda_parts.common(H200))
    names = [i.name for i in (*instances, *cuda_fp.common(H200))]
    assert len(set(names)) == len(names)
    assert any(re.fullmatch(r"prefill_fp_fp32_tf32x3_d128_m16n\d+w1s\d_parts", name) for name in names)
    assert {i.source for i in instances} <= set(cuda.instances("sm_90a"))


# ---- launches, on GPUs that are not there


def arrays_of(seed: int, dtype: Any, queries: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((2, n, h, 16)).astype(dtype) for n, h in ((queries, 4), (40, 2), (40, 2))]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_two_launches_cold_and_warm(gpu, choices, dtype, queries):
    """Of attention(), of decode() with lengths of either place, and of a plan."""
    made = cuflash.plan(*map(there, arrays_of(0, dtype, queries)), causal=True)
    for turn, lengths in enumerate(([40, 3], [7, 0], [1, 40])):
        q, k, v = arrays_of(turn, dtype, queries)
        on_gpu, options = [there(a) for a in (q, k, v)], {"causal": True, "return_lse": True}
        whole = cuflash.attention(q, k, v, backend="reference", **options)
        same(cuflash.attention(*on_gpu, **options), whole)
        same(made.run(*on_gpu), whole[0])
        want = cuflash.decode(q, k, v, lengths, backend="reference", **options)
        same(cuflash.decode(*on_gpu, there(np.array(lengths, np.int32)), **options), want)
        same(cuflash.decode(*on_gpu, lengths, **options), want)
    names = [x.name.split("_")[0] for x in gpu.launches]
    assert names == ["prefill", "combine"] * (len(names) // 2) and len(names) == 24
    assert len(choices) == 4 and len(warm.launches) == 1 and len(warm_decode.launches) == 2 and gpu.waited == 0


def test_threads_have_workspaces_of_their_own(gpu):
    calls = [arrays_of(seed, F32) for seed in range(4)]
    wants = [cuflash.attention(*arrays, backend="reference") for arrays in calls]
    there_already = [[there(a) for a in arrays] for arrays in calls]
    assert not wrong_in_threads(gpu, wants, lambda n: cuflash.attention(*there_already[n]))


def test_a_capture_has_a_workspace_of_its_own(gpu):
    arrays = arrays_of(1, F32)
    on_gpu = [there(a) for a in arrays]
    cuflash.attention(*on_gpu)
    gpu.capturing = True
    same(cuflash.attention(*on_gpu), cuflash.attention(*arrays, backend="reference"))
    assert len(gpu.freed) == 1 and not gpu.allocated


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_batch_invariant_decode_on_a_gpu(dtype, queries):
    """The same bits alone, in a smaller cache, cold and warm."""
    import cupy

    rng = np.random.default_rng(queries)
    q, k, v = (cupy.asarray(rng.standard_normal((40, n, h, 64)).astype(dtype)) for n, h in ((queries, 8), (3000, 2), (3000, 2)))
    lengths = rng.integers(0, 3001, 40)
    options = {"causal": True, "batch_invariant": True, "return_lse": True}
    for _ in range(2):
        together = cuflash.decode(q, k, v, lengths, **options)
        for b in (0, 17, 39):
            n = max(1, int(lengths[b]))
            alone = cuflash.decode(*(x[b : b + 1] for x in (q, k[:, :n], v[:, :n])), lengths[b : b + 1], **options)
            for one, several in zip(alone, together, strict=True):
                assert np.array_equal(one.get()[0], several.get()[b])

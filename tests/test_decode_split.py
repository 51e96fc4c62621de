"""How the raw decode kernel's work is planned: tiles, heads that are read together, runs and parts. Needs no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from case import BF16, F16, F32

from cuflash import device, tiles_decode
from cuflash.backends import cuda, cuda_decode
from cuflash.problem import build_attention, build_varlen
from cuflash.tiles import HEAD_CLASSES
from cuflash.types import Problem

H200 = device.KNOWN["H200"]


def problem(
    batch: int = 1, queries: int = 1, keys: int = 8192, heads: int = 32, kv_heads: int = 8, d: int = 128, dtype: Any = F16, **options: Any,
) -> Problem:
    q, k = (np.broadcast_to(np.zeros((), dtype), (batch, n, h, d)) for n, h in ((queries, heads), (keys, kv_heads)))
    return build_attention(q, k, k, **options)


def split(gpu: device.DeviceInfo = H200, **sizes: Any) -> tuple[tiles_decode.DecodeTile, cuda_decode.Split]:
    asked = problem(**sizes)
    chosen = cuda.instance(asked, gpu, "decode")
    return chosen.tile, cuda_decode.split(asked, chosen.tile, gpu)


@pytest.mark.parametrize("gpu", device.KNOWN.values(), ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("one", [True, False])
def test_tiles_fit_and_are_whole_fragments(gpu, one):
    found = 0
    for d in HEAD_CLASSES:
        for dv in HEAD_CLASSES:
            for rows in (1, 16, 17, 33, 65, 200):
                for paged in (False, True):
                    tile = tiles_decode.decode(rows, d, dv, gpu, paged, one)
                    if tile is None:
                        assert max(d, dv) > 160 and (gpu.cc < (8, 0) or gpu.cc >= (10, 0))
                        continue
                    found += 1
                    used = tile.shared_memory(d, dv)
                    assert used <= gpu.shared_memory_block and tile.resident * (used + 1024 * (gpu.cc >= (8, 0))) <= gpu.shared_memory_sm
                    assert (5 if tile.wgmma else 2) <= tile.stages <= tiles_decode.MOST_STAGES + 2 * tile.wgmma
                    assert not tile.wgmma or (gpu.cc == (9, 0) and rows > 64 and one)
                    assert tile.m % (16 * tile.row_warps) == 0 and tile.n * tile.row_warps % (16 * tile.warps) == 0
                    assert tile.m >= min(rows, 16)
    assert found > 100


def test_offsets_in_pages_have_32_bits():
    """Of 16 bytes; where they do not suffice, copies of 8 bytes are asked for, which take 64 bits."""
    def load(stride: int, d: int = 128) -> int:
        q, pages = np.zeros((1, 1, 32, d), F16), np.zeros((5, 16, 8, d), F16)
        asked = build_attention(q, pages, pages, page_table=np.zeros((1, 4), np.int32), kv_lengths=[40])
        return cuda_decode.copy_bytes(asked.replace(v=dataclasses.replace(asked.v, strides=(stride, *asked.v.strides[1:]))))

    assert load(1 << 20) == 16 and load((1 << 34) - (1 << 15)) == 16
    assert load(1 << 34) == load(-(1 << 20)) == 8 and load(1 << 34, d=34) == 4


def test_a_second_kernel_merges_what_is_much():
    """More partial results of a (sequence, head) than a block can merge while another kernel starts."""

    def merges(**sizes: Any) -> bool:
        asked = problem(**sizes)
        chosen, how = cuda_decode.plan(asked, cuda.instance(asked, H200, "decode"), H200).extra
        kernels = list(cuda_decode.steps(asked, chosen, how))
        assert len(kernels) == (1 if chosen.merges or not how.slots else 2)
        if len(kernels) == 2:  # each block takes some rows of a (sequence, head)
            assert kernels[1][1] * cuda_decode.COMBINE_ROWS == asked.batch * asked.heads_kv * how.row_blocks * chosen.tile.m
        assert bool(cuda_decode.workspace(asked, chosen, how).arrived) == (chosen.merges and how.slots > 0)
        return chosen.merges

    assert merges() and merges(batch=64)  # 16 parts of 4 rows: 32 KiB; fewer
    assert not merges(heads=128, kv_heads=1, batch=64) and not merges(heads=128, kv_heads=1)  # 2 and 64 parts of 128 rows
    assert merges(heads=128, kv_heads=1, num_splits=1) and not merges(heads=128, kv_heads=1, num_splits=2)
    assert merges(heads=128, kv_heads=1, d=64, num_splits=4) and not merges(heads=128, kv_heads=1, d=64, num_splits=5)


@pytest.mark.parametrize(
    "runs, pairs, found", [(132, 1, 132), (132, 8, 128), (132, 64, 128), (132, 50, 132), (132, 132, 132), (16, 0, 16), (1, 5, 1)],
)
def test_sequences_that_are_alike_are_cut_alike(runs, pairs, found):
    assert cuda_decode.even(runs, pairs) == found


def test_heads_whose_keys_are_read_together():
    """As many as there are, so that a token's heads are read as one piece of memory, unless that leaves too much of the GPU idle."""
    assert [cuda_decode.heads_at_once(n, 132) for n in (1, 2, 8, 32, 33, 128)] == [1, 2, 8, 32, 33, 128]
    for heads in (71, 100, 160, 200, 1000):
        at_once = cuda_decode.heads_at_once(heads, 132)
        assert heads % at_once == 0 and 132 // at_once * at_once >= 0.9 * 132


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("keys", [1, 100, 8192, 131072])
@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"num_splits": 7}, {"batch_invariant": True}], ids=str)
def test_runs_and_slots(batch, keys, options):
    tile, how = split(batch=batch, keys=keys, **options)
    tiles = -(-keys // tile.n)
    assert how.rows == 4 and how.row_blocks == 1 and 1 <= how.grid <= H200.multiprocessors * tile.resident
    if "num_splits" in options:
        parts = min(options["num_splits"], tiles)
        assert (how.most_units, how.unit_tiles) == (parts, 1)
        assert how.slots == (batch * parts * 8 if parts > 1 else 0)
    elif options:
        assert how.unit_tiles * tile.n == cuda_decode.INVARIANT_KEYS and how.most_units == cuda_decode.INVARIANT_PARTS
    else:
        assert how.most_units == 0 and how.slots == (2 * how.grid if how.runs > 1 else 0)
        assert how.runs <= max(1, batch * tiles // how.least)


def test_rows_of_a_key_value_head_share_a_tile():
    assert [split(heads=8 * g)[0].m for g in (1, 16, 17, 32, 33, 64, 65)] == [16, 16, 32, 32, 64, 64, 128]
    tile, how = split(heads=128, kv_heads=1, queries=3)
    assert (tile.m, how.rows, how.row_blocks) == (64, 384, 6)


def test_what_cuts_do_not_depend_on_under_batch_invariant():
    known = [split(batch=b, keys=n, batch_invariant=True) for b in (1, 5, 64) for n in (700, 8192)]
    assert len({(tile, how.unit_tiles, how.most_units) for tile, how in known}) == 1


def test_kernel_auto_takes_it_where_reading_is_what_takes_the_time():
    def first(**sizes: Any) -> str:
        return cuda.auto_kernels(problem(**sizes))[0]

    assert first() == first(dtype=BF16) == first(queries=16) == first(heads=128, kv_heads=1) == "decode"
    assert first(queries=65) == first(queries=64) == first(bias=np.zeros(8192, F16)) == "fa3"
    assert first(dtype=F32) == "fa2"
    q = np.zeros((4, 2, 16), F16)
    assert cuda.auto_kernels(build_varlen(q, q, q, [0, 4], [0, 4])) == ("fa3", "fa2")


def test_two_blocks_that_merge_in_their_shared_memory():
    """Where all sequences are cut into two equal parts; nothing goes through global memory then."""

    def paired(gpu: device.DeviceInfo = H200, **sizes: Any) -> bool:
        given = {"heads": 128, "kv_heads": 1, "batch": 64} | sizes
        asked = problem(**given)
        q, k = (np.empty(a.shape, a.dtype) for a in (asked.q, asked.k))  # strides that the tile of warpgroups takes
        options = {name: given[name] for name in given.keys() - {"heads", "kv_heads", "batch", "keys", "d", "queries"}}
        asked = build_attention(q, k, k, **options)
        chosen, how = cuda_decode.plan(asked, cuda.instance(asked, gpu, "decode"), gpu).extra
        if chosen.paired:
            assert len(list(cuda_decode.steps(asked, chosen, how))) == 1 and cuda_decode.workspace(asked, chosen, how).total == 0
            assert how.grid == 2 * asked.batch * asked.heads_kv * how.row_blocks and "pairs" in chosen.name
            assert how.parts == 2 and "two blocks merge" in cuda_decode.why(asked, chosen, how)
        return chosen.paired

    assert [batch for batch in (16, 32, 50, 63, 64, 65, 66, 67, 128) if paired(batch=batch)] == [64, 65, 66]
    assert paired(batch=22, heads=384, kv_heads=3) and paired(batch=33, heads=200) and paired(heads=70, d=64)
    assert paired(keys=193) and not paired(keys=192) and not paired(keys=0)
    cuts = {"kv_lengths": [8192] * 64}, {"kv_start": [0] * 64}, {"num_splits": 2}, {"batch_invariant": True}
    assert not any(paired(**cut) for cut in cuts)
    assert not paired(window=(100, 0)) and not paired(heads=64) and not paired(queries=2)
    assert not paired(device.KNOWN["A100"]) and not paired(device.KNOWN["B200"])
    assert paired(causal=True)  # one query at the end of its keys sees them all


def test_declines_have_a_reason():
    assert "float32" in cuda.decline(problem(dtype=F32), "decode")
    assert "bias" in cuda.decline(problem(bias=np.zeros(8192, F16)), "decode")
    assert cuda.decline(problem(num_splits=3), "decode") is None and "num_splits" in cuda.decline(problem(num_splits=3), "fa2")
    q = np.zeros((4, 2, 16), F16)
    assert "packed" in cuda.decline(build_varlen(q, q, q, [0, 4], [0, 4]), "decode")


def test_names_are_distinct_and_tell_the_tile():
    names = [instance.name for instance in cuda_decode.common(H200)]
    assert len(set(names)) == len(names)
    assert "decode_bf16_d128_m16n64w4s4" in names and "decode_bf16_d128_m16n128w8s3_paged" in names


def test_words_of_a_plan():
    asked = problem(batch=2)
    chosen = cuda.instance(asked, H200, "decode")
    words = cuda_decode.why(asked, chosen, cuda_decode.split(asked, chosen.tile, H200))
    assert "reading K and V" in words and "4 rows" in words and "128 blocks" in words and "8 parts a sequence" in words

"""kernel="fa3": which calls it takes on which GPU, its tensor maps, and that warm calls move them. Needs no GPU."""

from __future__ import annotations

import dataclasses

import compare
import numpy as np
import pytest
from case import BF16, F16, F32
from fake_cupy import FakeArray
from warm_calls import gpu  # noqa: F401  a fixture

import cuflash
from cuflash import arrays, device, structs, tensor_map, tiles, tiles_fa3
from cuflash import problem as problems
from cuflash.backends import cuda, cuda_fa3
from cuflash.backends.cuda_instance import MASK_LEFT, MASK_LENGTH, MASK_RIGHT
from emulator import emulate

H200 = device.KNOWN["H200"]


@pytest.fixture
def maps():
    with emulate.tensor_maps():
        yield


def of(q, k, v, out_dtype=None, **options):
    plain = problems.build_attention(q, k, v, out_dtype=out_dtype, **options)
    out = np.empty((*q.shape[:-1], v.shape[-1]), out_dtype or q.dtype)
    return problems.with_outputs(plain, out, None, False, options.get("layout", "BSHD"), q.ndim)[0]


def made(rows=100, keys=200, d=64, dv=None, heads=2, heads_kv=2, dtype=F16):
    sizes = (rows, heads, d), (keys, heads_kv, d), (keys, heads_kv, dv or d)
    return [np.zeros((2, *size), dtype) for size in sizes]


# ---- what it takes ------------------------------------------------------------------------------------------------------

PAGED = {"page_table": np.zeros((2, 4), np.int32), "kv_lengths": [30, 20]}


def pages(size: int) -> list[np.ndarray]:
    return [np.zeros((8, size, 2, 64), F16)] * 2


TAKEN = {
    "plain": (made(), {}), "causal": (made(), {"causal": True}), "upper left": (made(), {"causal": "upper_left"}),
    "window": (made(), {"window": (64, 0)}), "softcap": (made(), {"softcap": 30.0}), "sinks": (made(), {"sinks": np.zeros(2)}),
    "lengths": (made(), {"kv_lengths": [200, 3], "kv_start": [1, 0]}),
    "heads first": ([a.swapaxes(1, 2) for a in made()], {"layout": "BHSD"}),
    "odd sizes": (made(d=72, dv=40), {}), "wide values": (made(d=64, dv=256), {}), "no scale": (made(), {"scale": 0.0}),
    "negative scale": (made(), {"scale": -1.0}), "bfloat16": (made(dtype=BF16), {}), "out": (made(), {"out_dtype": BF16}),
    "pages of 16": ([made()[0], *pages(16)], PAGED), "pages of 48": ([made()[0], *pages(48)], PAGED),
    "one key": ([made()[0], *(np.zeros((2, 1, 2, 64), F16)[:, ::-1] for _ in range(2))], {}),
}
LEFT = {
    "float32": (made(dtype=F32), {}, "float32 arrays; it takes float16 and bfloat16"),
    "bias": (made(), {"bias": np.zeros((100, 200), F16)}, "it has no bias"),
    "mask": (made(), {"mask": np.ones((100, 200), bool)}, "it has no mask"),
    "alibi": (made(), {"alibi_slopes": np.ones(2)}, "it has no alibi_slopes"),
    "splits": (made(), {"num_splits": 2}, "num_splits is not part"),
    "score_mod": (made(), {"score_mod": "s + 1"}, "score_mod is not part"),
    "pages of 8": ([made()[0], *pages(8)], PAGED, "page_table: pages of 8 keys, and it loads boxes of 16 keys or a multiple"),
    "no keys": (made(keys=0), {}, "k has no elements, and it loads boxes"),
    "no rows": (made(rows=0), {}, "q has no elements, and it loads boxes"),
    "odd head": (made(d=33, dv=64), {}, "q: rows 132 bytes apart, and it loads boxes"),
    "odd values": (made(dv=33), {}, "out: "),
    "columns": ([a[..., ::2] for a in made(d=128)], {}, "q: columns 4 bytes apart, and it loads boxes"),
    "backwards": ([made()[0], *(a[:, ::-1] for a in made()[1:])], {}, "k: rows -256 bytes apart, and it loads boxes"),
    "pages that lie backwards": ([made()[0], pages(16)[0][::-1], pages(16)[1]], PAGED, "k: pages -4096 bytes apart"),
    "expanded": ([*made()[:2], np.broadcast_to(made()[2][:1], (2, 200, 2, 64))], {}, "v: entries of the batch 0 bytes apart"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_it_takes(maps, name):
    args, options = TAKEN[name]
    problem = of(*args, **options)
    assert cuda.decline(problem, "fa3") is None
    chosen = cuda.instance(problem, H200, "fa3")
    params = cuda_fa3.pack(problem, chosen, 1, 7, {})[0]
    assert params["tiles"] == 7 and params["prefill"]["tile_rows"] == chosen.tile.m
    keys = chosen.page_rows or chosen.tile.n
    for map_name, a, rows in zip(structs.MAPS, (problem.q, problem.k, problem.v), (64, keys, keys), strict=True):
        found = emulate.Map.from_buffer_copy(params[map_name].tobytes())
        assert (found.address, found.item_bytes, found.swizzle_bytes, found.rank) == (a.pointer, 2, 128, 4)
        batch, row, head, column = range(4)
        assert tuple(found.size[:4]) == tuple(a.shape[axis] for axis in (column, row, head, batch))
        assert tuple(found.box[:4]) == (64, rows, 1, 1)
        assert all(found.stride[n] == a.strides[axis] or a.shape[axis] == 1 for n, axis in enumerate((row, head, batch)))


@pytest.mark.parametrize("name", LEFT)
def test_what_it_leaves_to_others(name):
    args, options, words = LEFT[name]
    reason = cuda.decline(of(*args, **options), "fa3")
    assert reason is not None and words in reason


def test_packed_sequences_are_one_batch(maps):
    q, k, v = np.zeros((30, 4, 64), F16), np.zeros((50, 2, 64), F16), np.zeros((50, 2, 64), F16)
    plain = problems.build_varlen(q, k, v, [0, 10, 30], [0, 5, 50])
    problem = problems.with_outputs(plain, np.empty_like(q), None, False, "BSHD", 3)[0]
    assert cuda.decline(problem, "fa3") is None
    params = cuda_fa3.pack(problem, cuda.instance(problem, H200, "fa3"), 1, 1, {})[0]
    found = emulate.Map.from_buffer_copy(params["k_map"].tobytes())
    assert tuple(found.size[:4]) == (64, 50, 2, 1) and tuple(found.stride[:2]) == k.strides[:2]


def test_an_address_between_is_left_to_others():
    q, k, v = made()
    moved = arrays.view(k, "k")
    problem = of(q, k, v).replace(k=dataclasses.replace(moved, pointer=moved.pointer // 16 * 16 + 2))
    assert "it loads boxes by tensor maps, which cannot describe address" in cuda.decline(problem, "fa3")


# ---- on which GPUs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("info", device.KNOWN.values(), ids=lambda info: info.name)
def test_gpus(monkeypatch, maps, info):
    reason = cuda_fa3.why_not_on(info)
    assert (reason is None) == (info.cc == (9, 0))
    assert bool(cuda_fa3.common(info)) == (info.cc == (9, 0))
    assert reason is None or f"{info.name} has compute capability {info.cc[0]}.{info.cc[1]}" in reason
    monkeypatch.setattr(tensor_map.driver, "library", object)
    if info.cc == (9, 0):
        assert "driver of CUDA 12.0" in cuda_fa3.why_not_on(info)


@pytest.mark.parametrize("d", tiles.HEAD_CLASSES)
@pytest.mark.parametrize("dv", tiles.HEAD_CLASSES)
def test_every_tile_fits(d, dv):
    for mask in (MASK_LENGTH, MASK_RIGHT, MASK_LEFT | MASK_RIGHT):
        for scored in (False, True):
            for paged in (False, True):
                found = tiles_fa3.starts(d, dv, mask, scored, paged)
                assert tiles_fa3.prefill_fa3(d, dv, mask, scored, paged, max(found), H200) == found[max(found)]
                assert tiles_fa3.prefill_fa3(d, dv, mask, scored, paged, 0, H200) == found[0]
                for tile in found.values():
                    assert tile.shared_memory(d, dv) <= H200.shared_memory_block and tile.n % 16 == 0 and tile.n <= tensor_map.MOST_BOX
                    assert not (paged and tile.n % 32)


def test_the_tile_is_chosen_by_the_length():
    def tile(lengths, **options):
        ends = np.cumsum([0, *lengths])
        arrays_ = [np.zeros((ends[-1], 2, 128), F16) for _ in range(3)]
        return cuda.instance(problems.build_varlen(*arrays_, ends, ends, **options), H200, "fa3").tile

    found = tiles_fa3.starts(128, 128, MASK_LENGTH, False, False)
    assert len(found) > 1 and all(tile([start, 1]) == tile_ for start, tile_ in found.items() if start)
    assert {tile([n, 1], batch_invariant=True) for n in (1, max(found))} == {found[0]}  # what is beside a sequence does not matter


@pytest.mark.parametrize(
    "group, rows, packed",
    [(1, 10, False), (2, 10, True), (3, 10, False), (8, 100, True), (8, 256, False), (64, 5, True), (128, 5, False)],
)
def test_heads_that_share_keys_come_together_where_that_saves_rows(maps, group, rows, packed):
    problem = of(*made(rows=rows, heads=2 * group, heads_kv=2))
    chosen = cuda.instance(problem, H200, "fa3")
    assert chosen.packed == packed == ("_packed" in chosen.name)
    count = cuda._grid(problem, chosen)
    params = cuda_fa3.pack(problem, chosen, 1, count, {})[0]
    found, (b, r, h, _) = emulate.Map.from_buffer_copy(params["q_map"].tobytes()), problem.q.strides
    if packed:
        assert count == 4 * -(-rows * group // chosen.tile.m) and params["prefill"]["tile_rows"] == chosen.tile.m // group
        assert tuple(found.size) == (64, group, rows, 2, 2) and tuple(found.box) == (64, group, 64 // group, 1, 1)
        assert tuple(found.stride) == (h, r, group * h, b)
    else:
        assert count == 4 * group * -(-rows // chosen.tile.m) and found.rank == 4


def test_names_of_its_instances_are_distinct():
    names, t = [chosen.name for chosen in cuda_fa3.common(H200)], tiles_fa3.starts(128, 128, MASK_RIGHT, False, False)[0]
    assert len(set(names)) == len(names)
    assert f"prefill_fa3_bf16_d128_m{t.m}n{t.n}s{t.stages}{'_turns' * t.turns}_causal" in names


# ---- calls on a GPU that is pretended ------------------------------------------------------------------------------------


def there(*hosts):
    return [FakeArray((), host=np.array(a)) for a in hosts]


def random(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(F16) for shape in shapes]


def expected(hosts, **options):
    return compare.expect([problems.build_attention(*hosts, **options)])


def assert_within(want, out):
    compare.assert_close(out.get(), want.out[0], want.out_bound, "out")


def test_auto_takes_it_and_says_what_it_leaves(gpu):
    q, k, v = there(*random(0, *((1, 130, 2, 64),) * 3))
    plan = cuflash.plan(q, k, v, causal=True)
    assert plan.kernel == "fa3" and "wgmma" in plan.reason and not plan.declined
    plan = cuflash.plan(q, k, v, alibi_slopes=np.ones(2))
    assert plan.kernel == "fa2" and plan.declined == ("cuda/fa3: it has no alibi_slopes; kernel='fa2' has it",)
    assert cuflash.plan(*there(*(a.get().astype(np.float32) for a in (q, k, v)))).declined == ()
    few = there(*random(0, (1, 1, 2, 64), (1, 130, 2, 64), (1, 130, 2, 64)))
    assert cuflash.plan(*few).kernel == "decode"
    with device.pretend(device.KNOWN["A100"]):
        plan = cuflash.plan(q, k, v)
    assert plan.kernel == "fa2" and "A100 has compute capability 8.0" in plan.declined[0]


def test_warm_calls_move_the_maps(gpu):
    """The pretended launch looks at each map's address."""
    for seed in range(3):
        hosts = random(seed, *((2, 70, 2, 64),) * 3)
        q, k, v = there(*hosts)
        out = cuflash.attention(q, k, v, causal=True)
        assert_within(expected(hosts, causal=True), out)
    assert {launched.name.split("_m")[0] for launched in gpu.launches} == {"prefill_fa3_fp16_d64"}
    assert [launched.grid for launched in gpu.launches] == [4] * 3


def test_a_grid_is_no_larger_than_the_gpu(gpu):
    q, k, v = there(*random(0, (1, 8, 400, 64), (1, 8, 400, 64), (1, 8, 400, 64)))
    cuflash.attention(q, k, v, kernel="fa3")
    assert gpu.launches[0].grid == H200.multiprocessors


def test_arrays_of_a_plan_may_lie_otherwise(gpu):
    """Between multiples of 16 there are no tensor maps: fa2 takes such arrays, unless fa3 was asked for."""
    hosts = random(0, *((1, 130, 2, 64),) * 3)
    q, k, v = there(*hosts)
    memory = FakeArray((hosts[1].size + 8,), F16)
    memory.host[...] = 0
    shifted = memory[1 : hosts[1].size + 1].reshape(*hosts[1].shape)
    shifted[...] = hosts[1]
    plan = cuflash.plan(q, k, v)
    want = expected(hosts)
    for _ in range(2):
        assert_within(want, plan.run(q, shifted, v))
        assert_within(want, plan.run(q, k, v))
    assert [launched.name.split("_")[1] for launched in gpu.launches] == ["fa2", "fa3"] * 2
    scattered = FakeArray((1, 130, 2, 65), F16)[..., :64]
    assert plan.run(q, k, v, out=scattered) is scattered and gpu.launches[-1].name.startswith("prefill_fa2")
    assert_within(want, scattered)
    forced = cuflash.plan(q, k, v, kernel="fa3")
    with pytest.raises(ValueError, match="k: it loads boxes by tensor maps, which cannot describe address"):
        forced.run(q, shifted, v)
    with pytest.raises(ValueError, match="out: strides or addresses"):
        forced.run(q, k, v, out=scattered)


def test_counters_of_two_streams_differ(gpu):
    q, k, v = there(*random(0, *((1, 130, 2, 64),) * 3))
    counters = []
    for stream in (0, 7, 0):
        with gpu.using(stream=stream):
            cuflash.attention(q, k, v, kernel="fa3")
            with cuda_fa3.counter(0) as address:
                counters.append(address)
    assert counters[0] == counters[2] != counters[1]

"""PagedKVCache on a GPU that is not there: the same pages with the same bytes as on the host, batches that graphs follow, refusals."""

from __future__ import annotations

import cache_twins
import numpy as np
import pytest
from caches import tokens
from fake_cupy import FakeArray
from warm_calls import gpu  # noqa: F401  a fixture

import cuflash
from cuflash import NoBackendError, PagedKVCache, staging


def there(a):
    return FakeArray((), host=a.copy())


def back(a):
    return a.host


def twins(form="plain", seed=0):
    return cache_twins.Twins(there, back, seed, **cache_twins.FORMS[form])


@pytest.mark.parametrize("form", cache_twins.FORMS)
def test_the_same_as_on_the_host(gpu, form):
    cache_twins.walk(twins(form, seed=1), 120)
    assert gpu.waited == 0


@pytest.mark.parametrize("form", ["plain", "layers, heads first", "float8"])
def test_exchange(gpu, form):
    cache_twins.exchange(twins(form))


@pytest.mark.parametrize("form", ["plain", "float8"])
def test_kinds_that_do_not_mix(gpu, form):
    cache_twins.refuses(twins(form))


def launched(gpu, call):
    before = len(gpu.launches)
    call()
    return [x.name for x in gpu.launches[before:]]


def test_how_many_launches(gpu):
    """Tokens of all layers and sequences go in by one launch, as do copies on write; a sequence comes out by one."""
    t = twins("layers")
    seq = t.both("new_sequence")
    k, v = t.tokens(6)
    assert launched(gpu, lambda: t.device.append(seq, there(k), there(v))) == ["kv_append_fp16"]
    forks = [t.device.fork(seq) for _ in range(3)]
    k, v = t.tokens(1, batch=4)
    assert launched(gpu, lambda: t.device.append([seq, *forks], there(k), there(v))) == ["page_copy_kv", "kv_append_fp16"]
    assert launched(gpu, lambda: t.device.gather(seq)) == ["page_copy_kv"]
    assert launched(gpu, lambda: t.device.append(seq, *map(there, t.tokens(0)))) == []
    t.device.free([seq, forks[0], forks[2]])
    assert launched(gpu, t.device.defragment) == ["page_copy_kv"]
    assert launched(gpu, t.device.defragment) == []
    assert t.device.page_table().host.max() == t.device.num_pages - t.device.free_pages - 1


def test_how_many_launches_of_float8(gpu):
    """Quantizing takes one; scales that come with their tokens, and copies, one more."""
    t = twins("float8")
    seq = t.both("new_sequence")
    k, v = map(there, tokens(t.host, 6, layers=True, dtype=np.float16))
    assert launched(gpu, lambda: t.device.append(seq, k, v)) == ["kv_append_fp16_e4m3"]
    k, v, k_scale, v_scale = t.device.gather(seq)
    fork = t.device.fork(seq)
    names = launched(gpu, lambda: t.device.append(fork, k, v, k_scale=k_scale, v_scale=v_scale))
    assert names == ["page_copy_kv", "page_copy_kv", "kv_append_e4m3", "kv_append_fp32"]
    assert launched(gpu, lambda: t.device.gather(seq)) == ["page_copy_kv"] * 2
    wide = PagedKVCache(num_pages=4, page_size=4, heads_kv=1, head_dim=257, dtype=t.host.dtype, device="cuda")
    seq = wide.new_sequence()
    with pytest.raises(NoBackendError, match="head sizes 257 and 257; it quantizes up to 256 numbers a head"):
        wide.append(seq, FakeArray((3, 1, 257)), FakeArray((3, 1, 257)))
    assert wide.lengths == {seq: 0} and wide.free_pages == 4


def test_work_goes_to_the_cache_s_device_and_to_the_current_stream(gpu):
    cache = PagedKVCache(num_pages=4, page_size=4, heads_kv=1, head_dim=8, dtype=np.float16, device="cuda:1")
    assert cache.device == 1 and cache.k_pages.device.id == 1 and not cache.k_pages.host.any() and "GPU 1" in repr(cache)
    seq = cache.new_sequence()
    with gpu.using(device=1):
        tokens = [FakeArray((3, 1, 8)) for _ in "kv"]
    with gpu.using(stream=77):
        cache.append(seq, *tokens)
    assert [(x.device, x.stream) for x in gpu.launches] == [(1, 77)]
    with pytest.raises(ValueError, match="k: in cupy, GPU 0; the cache is in cupy, GPU 1"):
        cache.append(seq, FakeArray((3, 1, 8)), tokens[1])
    assert cache.batch().page_table.device.id == 1


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1"])
def test_devices_that_are_none(gpu, device):
    with pytest.raises(ValueError, match=f"device: got '{device}'; allowed are None, 'cpu', 'cuda'"):
        PagedKVCache(num_pages=4, heads_kv=1, head_dim=8, device=device)


def test_devices_that_are_not_there(gpu):
    with pytest.raises(ValueError, match="device: got 2; it must be at most 1"):
        PagedKVCache(num_pages=4, heads_kv=1, head_dim=8, device=2)
    with pytest.raises(TypeError, match="device: got 1.5; it must be an integer"):
        PagedKVCache(num_pages=4, heads_kv=1, head_dim=8, device=1.5)
    assert PagedKVCache(num_pages=4, heads_kv=1, head_dim=8, device="cpu").device == -1


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_batch_that_is_refreshed(gpu, where):
    """Its arrays stay where they are, also those of its layers; rows that no sequence has are empty."""
    t = twins("layers")
    cache = getattr(t, where)
    move, take = (lambda x: x, lambda x: x) if where == "host" else (there, back)
    a, b = cache.new_sequence(), cache.new_sequence()
    cache.append(a, *map(move, t.tokens(5)))
    batch = cache.batch([a], max_sequences=3, max_pages=4)
    layer = batch.layer(1)
    assert take(batch.page_table).tolist() == [[0, 1, -1, -1], [-1] * 4, [-1] * 4]
    assert take(batch.kv_lengths).tolist() == [5, 0, 0] and take(batch.prefix_lengths).tolist() == [0, 0, 0]
    cache.append(b, *map(move, t.tokens(3)))
    fork = cache.fork(a, 4)
    cache.reserve(fork, 2)
    cache.refresh(batch, [fork, a])
    assert take(layer.page_table).tolist() == [[0, 3, -1, -1], [0, 1, -1, -1], [-1] * 4]
    assert take(layer.kv_lengths).tolist() == [6, 5, 0] and take(layer.prefix_lengths).tolist() == [4, 4, 0]
    cache.refresh(layer, [fork], reserved=2)
    assert take(batch.kv_lengths).tolist() == [4, 0, 0] and take(batch.page_table)[0].tolist() == [0, 3, -1, -1]
    cache.refresh(batch, [])
    assert not take(batch.kv_lengths).any() and (take(batch.page_table) == -1).all()
    before = take(batch.memory).copy()
    with pytest.raises(ValueError, match="reserved: 4 tokens; sequence 1 has 3"):
        cache.refresh(batch, [a, b], reserved=4)
    with pytest.raises(ValueError, match="seqs: 4 sequences; the batch has 3 rows"):
        cache.refresh(batch, [a, a, b, b])
    with pytest.raises(ValueError, match="max_sequences: got 1; it must be at least 2"):
        cache.batch([a, b], max_sequences=1)
    small = cache.batch([b], max_pages=1)
    with pytest.raises(ValueError, match="seqs: a sequence of 2 pages; the batch's table has 1 columns"):
        cache.refresh(small, [a])
    other = t.host if where == "device" else t.device
    with pytest.raises(ValueError, match="batch: of another cache"):
        other.refresh(layer, [])
    np.testing.assert_array_equal(take(batch.memory), before)
    none = cache.batch([])
    cache.refresh(none, [])
    assert none.page_table.shape == (0, 1)


def test_numbers_on_their_way_are_not_written_over(gpu, monkeypatch):
    """A refresh writes to the host's numbers while the copies of those before may still be under way."""
    cache = twins().device
    seq = cache.new_sequence()
    cache.reserve(seq, 5)
    batch = cache.batch([seq])
    monkeypatch.setattr(staging, "_slots", {})
    gpu.copying = True
    cache.refresh(batch, [seq], reserved=1)
    first = bytes(gpu.pinned[-1])
    cache.refresh(batch, [seq], reserved=2)
    assert len(gpu.pinned) == 2 and gpu.pinned[0] == first != gpu.pinned[1]
    assert batch.kv_lengths.host.tolist() == [3] and gpu.waited == 0


def test_what_sequences_have_in_common(gpu):
    t = twins()
    cache = t.host
    seq = cache.new_sequence()
    cache.append(seq, *t.tokens(10))
    forks = [cache.fork(seq), cache.fork(seq, 9)]
    assert cache.batch([seq, *forks]).prefix_lengths.tolist() == [9, 9, 9]  # in a page that all three hold still
    cache.append(forks[0], *t.tokens(1))
    assert cache.batch([seq, *forks]).prefix_lengths.tolist() == [8, 8, 8]
    other = cache.new_sequence()
    assert cache.batch([seq, other]).prefix_lengths.tolist() == [0, 0]
    assert cache.batch([seq]).prefix_lengths.tolist() == [0] and cache.batch([]).prefix_lengths.shape == (0,)


def test_nothing_is_captured_and_nothing_is_lost_by_trying(gpu):
    """Numbers of the host would be gone when the graph is replayed: the call raises, and the cache is what it was."""
    t = twins()
    seq = t.both("new_sequence")
    t.both("append", seq, *t.tokens(6))
    fork = t.both("fork", seq)
    batch = t.device.batch(max_sequences=3)
    gpu.capturing = True
    for call in (
        lambda: t.device.append(fork, *map(there, t.tokens(3))), lambda: t.device.write(fork, *map(there, t.tokens(1))),
        lambda: t.device.refresh(batch), t.device.batch, lambda: t.device.gather(seq),
    ):
        with pytest.raises(RuntimeError, match="cannot be captured"):
            call()
    table = there(np.array([[0]], np.int32))
    with pytest.raises(RuntimeError, match="page_table: on the device, and to be read back"):
        t.device.import_table(table, [1])
    gpu.capturing = False
    t.check()


@pytest.mark.parametrize("form", ["plain", "float8"])
def test_tokens_that_lie_in_the_pages_themselves(gpu, form):
    t = twins(form)
    seq = t.both("new_sequence")
    t.both("append", seq, *t.tokens(8))
    for cache in (t.host, t.device):
        at = (slice(None), 0, slice(3)) if t.layered else (0, slice(3))
        scales = {"k_scale": cache.k_scales[at], "v_scale": cache.v_scales[at]} if form == "float8" else {}
        cache.write(seq, cache.k_pages[at], cache.v_pages[at], position=1, **scales)
    t.check()


def test_scales_in_pages_of_one_token_whose_axis_has_no_stride(gpu):
    pages = (there(np.zeros((4, 1, 2, 8), np.uint8).view(cache_twins.E4M3)) for _ in "kv")
    k_scales, v_scales = (there(np.zeros((4, 2), np.float32))[:, None] for _ in "kv")
    assert k_scales.strides[1] == 0
    cache = PagedKVCache.from_pages(*pages, k_scales=k_scales, v_scales=v_scales)
    x = np.random.default_rng(0).standard_normal((3, 2, 8)).astype(np.float16)
    seq = cache.new_sequence()
    cache.append(seq, there(x), there(x))
    codes, scale = cuflash.quantize_kv(x)
    for got, want in zip(cache.gather(seq), (codes, codes, scale, scale), strict=True):
        assert back(got).tobytes() == want.tobytes()


@pytest.mark.parametrize("shared", [False, True])
def test_decode_over_a_batch_of_float8(gpu, shared):
    cache_twins.decodes_float8(there, back, shared)


def test_decode_over_a_batch(gpu):
    t = twins()
    seqs = [t.both("new_sequence") for _ in range(3)]
    for n, seq in enumerate(seqs):
        t.both("append", seq, *t.tokens(3 + 4 * n))
    q = np.random.default_rng(0).standard_normal((3, 1, 4, 8)).astype(np.float16)
    mine, batch = t.host.batch(seqs), t.device.batch(seqs)
    want = cuflash.decode(q, mine.k_pages, mine.v_pages, mine.kv_lengths, page_table=mine.page_table, backend="reference")
    got = cuflash.decode(there(q), batch.k_pages, batch.v_pages, batch.kv_lengths, page_table=batch.page_table)
    np.testing.assert_array_equal(got.host, want)

"""decode() on a GPU, called again: its two launches on the right addresses, and whatever may differ is seen."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from fake_cupy import FakeArray
from refusal import refused
from test_decode_device import Call, same
from warm_calls import choices, gpu, nothing_kept, there, wrong_in_threads  # noqa: F401  fixtures among them

import cuflash
from cuflash import device, warm_decode

F16 = np.dtype(np.float16)


FORMS = {
    "dense": ({}, {}), "paged": ({"page": 4}, {}), "rope": ({"rope": True}, {}), "paged rope": ({"page": 3, "rope": True}, {}),
    "one query": ({"page": 1, "rope": True, "rows": 1, "new": 1}, {}), "padding": ({}, {"kv_start": [1, 4]}),
    "entries": ({}, {"cache_batch_index": [1, 0]}), "options": ({"page": 4}, {"softcap": 2.0, "window": (4, 0)}),
    "no new keys": ({"page": 4, "new": 0}, {}), "queries alone": ({"rope": True, "new": 0}, {}),
}


def made(form: str, seed: int = 0, lengths=None) -> Call:
    options, more = FORMS[form]
    call = Call(**options)
    rng = np.random.default_rng(seed)
    call.arrays = [rng.standard_normal(a.shape).astype(F16) for a in call.arrays]
    for name in ("k_new", "v_new"):
        call.options[name] = rng.standard_normal(call.options[name].shape).astype(F16)
        if options.get("new") == 0:
            del call.options[name]
    call.options |= {name: np.array(x, np.int32) if isinstance(x, list) else x for name, x in more.items()}
    call.lengths = lengths or call.lengths
    return call


@pytest.mark.parametrize("results", ["allocated", "out", "out and lse"])
@pytest.mark.parametrize("form", FORMS)
def test_other_arrays_and_other_numbers(gpu, choices, form, results):
    for turn, lengths in enumerate(([3, 9], [4, 10], [0, 5], [2, 2])):
        call = made(form, turn, lengths)
        if call.options.get("kv_start") is not None:
            call.options["kv_start"] = np.array([0, 1 + turn], np.int32)
        want, caches = call.on_host()
        args, options = call.on_device()
        buffers = {}
        if results != "allocated":
            buffers["out"] = FakeArray(want[0].shape, F16)
        if results == "out and lse":
            buffers["lse"] = FakeArray(want[1].shape, np.float32)
        got = cuflash.decode(*args, return_lse=True, **options, **buffers)
        assert all(got[n] is buffers[name] for n, name in enumerate(buffers))
        same(got, want)
        same(args[1:3], caches)
        assert args[3].host.tolist() == lengths
        alone = cuflash.decode(*call.on_device()[0], **call.on_device()[1])
        same([alone], want[:1])
    assert len(choices) == len(warm_decode.launches) == 2 and gpu.waited == 0, "with and without buffers, each chosen once"


def test_every_option_is_part_of_the_signature(gpu, choices):
    cos_sin = made("paged rope").options["rope"][:2]
    changes = [
        {}, {"causal": False}, {"causal": "upper_left"}, {"window": (2, 0)}, {"scale": 0.3}, {"softcap": 2.0}, {"return_lse": True},
        {"rope": None}, {"rope": (*cos_sin, "interleaved")}, {"k_new": None, "v_new": None}, {"kv_start": np.array([1, 2], np.int32)},
        {"kv_start": np.array([1, 2], np.int64)}, {"lengths": np.int64}, {"rows": 1}, {"kernel": "fa2"}, {"backend": "cuda"},
    ]
    for turn in range(2):
        for change in changes:
            other, change = made("paged rope", 1), dict(change)
            width, rows, lse = change.pop("lengths", np.int32), change.pop("rows", 2), change.pop("return_lse", False)
            other.arrays[0] = other.arrays[0][:, :rows].copy()
            where = {name: change.pop(name) for name in ("kernel", "backend") if name in change}
            other.options |= change
            want, _ = other.on_host()
            args, options = other.on_device(width, **where)
            got = cuflash.decode(*args, return_lse=lse, **options)
            same(got if lse else [got], want if lse else want[:1])
        if turn == 0:
            assert len(choices) == len(warm_decode.launches) == len(changes)
    assert len(choices) == len(changes)


def test_results_and_caches_that_meet_other_arrays_are_refused_as_before(gpu):
    call = made("rope")
    args, options = call.on_device()
    buffer = FakeArray((2, 2, 4, 8), F16)
    cuflash.decode(*args, out=buffer, **options)
    assert len(warm_decode.launches) == 1
    launched = len(gpu.launches)

    def piece(a: FakeArray, like: FakeArray) -> FakeArray:
        size = int(np.prod(like.shape)) * like.dtype.itemsize // a.dtype.itemsize
        return FakeArray((), host=a.host.reshape(-1)[:size].view(like.dtype).reshape(like.shape), device_id=0)

    cos, sin, style = options["rope"]
    for n, name in ((0, "q"), (3, "kv_lengths")):
        moved = list(args)
        moved[n] = piece(args[2], args[n])
        with refused(ValueError, "v_cache:", f"overlaps {name}"):
            cuflash.decode(*moved, out=buffer, **options)
    for name, changed in (
        ("k_new", {"k_new": piece(args[1], options["k_new"])}), ("v_new", {"v_new": piece(args[1], options["v_new"])}),
        ("rope[0]", {"rope": (piece(args[1], cos), sin, style)}), ("rope[1]", {"rope": (cos, piece(args[1], sin), style)}),
    ):
        with refused(ValueError, "k_cache:", f"overlaps {name}"):
            cuflash.decode(*args, out=buffer, **{**options, **changed})
    for name, out in (("q", piece(args[0], buffer)), ("k_cache", piece(args[1], buffer)), ("v_cache", piece(args[2], buffer))):
        with refused(ValueError, "out:", f"overlaps {name}"):
            cuflash.decode(*args, out=out, **options)
    with refused(ValueError, "k_cache:", "overlaps v_cache"):
        whole = FakeArray((), host=np.zeros(2 * 12 * 2 * 24, F16), device_id=0)
        k = FakeArray((), host=whole.host[: 2 * 12 * 2 * 16].reshape(2, 12, 2, 16), device_id=0)
        v = FakeArray((), host=whole.host[64 : 64 + 2 * 12 * 2 * 8].reshape(2, 12, 2, 8), device_id=0)
        cuflash.decode(args[0], k, v, args[3], out=buffer, **options)
    assert len(gpu.launches) == launched


def test_a_cache_of_keys_and_values_in_one_array_is_warm_as_well(gpu, choices):
    call = made("dense")
    for seed in range(3):
        call = made("dense", seed)
        want, caches = call.on_host()
        args, options = call.on_device()
        whole = FakeArray((2, 12, 2, 24), F16)
        k, v = whole[..., :16], whole[..., 16:]
        k.host[...], v.host[...] = call.arrays[1], call.arrays[2]
        same([cuflash.decode(args[0], k, v, args[3], **options)], want[:1])
        same([k, v], caches)
    assert len(choices) == 1


def test_arrays_aligned_otherwise_have_another_signature(gpu):
    """Each by itself: what the kernel moves 16 bytes at a time differs from array to array."""
    call = made("rope")

    def shifted(a: FakeArray) -> FakeArray:
        memory = FakeArray((a.host.size + 8,), a.dtype)
        b = memory[1 : 1 + a.host.size]
        b.host[...] = a.host.reshape(-1)
        return FakeArray((), host=b.host.reshape(a.shape), device_id=0)

    want, _ = call.on_host()
    seen = []
    for name in ("", 0, 1, 2, "k_new", "v_new"):
        for _ in range(2):
            args, options = call.on_device()
            if isinstance(name, int):
                args[name] = shifted(args[name])
            elif name:
                options[name] = shifted(options[name])
            same([cuflash.decode(*args, **options)], want[:1])
        params = gpu.launches[-2].params
        seen.append(tuple(int(params[f"{x}_vector"]) for x in "kvq"))
    # Values of 8 numbers, keys whose 4 pairs are no whole vector: k and q are moved number by number in any case.
    assert seen == [(0, 1, 0), (0, 1, 0), (0, 1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0)]
    assert len(warm_decode.launches) == 6


def test_what_asks_for_the_ordinary_way(gpu, choices, monkeypatch):
    call = made("paged")

    def once(**changed):
        args, options = call.on_device()
        before = len(choices)
        cuflash.decode(*args, **{**options, **changed})
        return len(choices) - before

    assert [once(), once()] == [1, 0]
    for name in ("CUFLASH_LOG", "CUFLASH_CHECK"):
        monkeypatch.setenv(name, "1")
        assert once() == 1
        monkeypatch.delenv(name)
    with device.pretend(device.KNOWN["A100"]):
        assert once() == 1
    assert once() == 0
    assert once(page_table=call.table) == 1, "a table of the host"
    assert once(sinks=[0.0] * 4) == 1 and once(sinks=[0.0] * 4) == 1
    args, options = call.on_device()
    with refused(TypeError, "decode()", "'casual'"):
        cuflash.decode(*args, **options, casual=True)
    for bad in ((*args[:3], args[3].host), args):
        changed = {"v_new": None} if bad is args else {"k_new": 3}
        with pytest.raises((TypeError, ValueError)):
            cuflash.decode(*bad, **{**options, **changed})
    assert once() == 0


def test_devices_and_streams(gpu):
    call = made("paged rope")
    want, _ = call.on_host()
    for ordinal in (0, 1):
        for stream in (None, 77):
            for _ in range(2):
                args = [there(a, ordinal) for a in call.arrays] + [there(np.array(call.lengths, np.int32), ordinal)]
                options = {name: there(x, ordinal) if isinstance(x, np.ndarray) else x for name, x in call.options.items()}
                options["rope"] = (*(there(x, ordinal) for x in call.options["rope"][:2]), "half")
                got = cuflash.decode(*args, page_table=there(call.table, ordinal), stream=stream, **options)
                same([got], want[:1])
                assert got.device.id == ordinal
                assert {(x.device, x.stream) for x in gpu.launches[-2:]} == {(ordinal, stream or 0)}
    assert len(warm_decode.launches) == 2


def test_a_captured_warm_call_has_memory_of_the_graph(gpu, choices):
    call = made("paged rope")
    want, caches = call.on_host()
    args, options = call.on_device()
    cuflash.decode(*args, return_lse=True, **options)
    args, options = call.on_device()
    gpu.capturing = True
    same(cuflash.decode(*args, return_lse=True, **options), want)
    same(args[1:3], caches)
    append, attend = (x.params for x in gpu.launches[-2:])
    (memory,) = gpu.freed
    inside = range(memory.data.ptr, memory.data.ptr + memory.shape[0])
    assert int(append["q_turned"]) == int(attend["q"]) in inside and int(append["lengths_after"]) == int(attend["kv_lengths"]) in inside
    assert int(attend["q"]) + want[0].size // 8 * 16 * 2 <= inside.stop and not gpu.allocated
    assert len(choices) == 1


def test_nothing_kept_refers_to_an_array(gpu):
    call = made("paged rope")
    args, options = call.on_device()
    cuflash.decode(*args, **options)
    cuflash.decode(*args, **options)
    assert len(warm_decode.launches) == 1
    given = [*args, *options["rope"][:2], *(options[name] for name in ("k_new", "v_new", "page_table"))]
    seen = [weakref.ref(a) for a in given]
    del args, options, given
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def test_threads_do_not_mix(gpu):
    calls = [made("paged rope", seed) for seed in range(4)]
    wants = [call.on_host()[0][0] for call in calls]
    cuflash.decode(*calls[0].on_device()[0], **calls[0].on_device()[1])

    def call(n: int):
        args, options = calls[n].on_device()
        return cuflash.decode(*args, **options)

    assert not wrong_in_threads(gpu, wants, call)

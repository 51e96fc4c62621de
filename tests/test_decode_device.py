"""decode() on a GPU that is not there: lengths and page tables that only the device knows, an embedding, captures, refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import FakeArray, pretended_gpus
from refusal import refused
from test_warm import there

import cuflash
from cuflash import warm, warm_decode

F16 = np.dtype(np.float16)
CAPACITY = 12


@pytest.fixture
def gpu(monkeypatch):
    warm.problems.clear()
    for kept in (warm.launches, warm_decode.launches):
        kept.clear()
    with pretended_gpus(monkeypatch) as fake:
        yield fake
    for kept in (warm.problems, warm.launches, warm_decode.launches):
        kept.clear()


class Call:
    """Two sequences with two new keys each."""

    def __init__(self, page: int = 0, rope: bool = False, rows: int = 2, new: int = 2):
        rng = np.random.default_rng(page)

        def normal(*shape):
            return rng.standard_normal(shape).astype(F16)

        self.lengths = [3, 9]
        self.options = {"causal": True, "k_new": normal(2, new, 2, 16), "v_new": normal(2, new, 2, 8)}
        stored = (2, CAPACITY) if not page else (2 * CAPACITY // page + 1, page)
        self.arrays = [normal(2, rows, 4, 16), normal(*stored, 2, 16), normal(*stored, 2, 8)]
        self.table = rng.permutation(2 * CAPACITY // page + 1)[:-1].reshape(2, -1).astype(np.int32) if page else None
        if rope:
            angles = np.arange(CAPACITY)[:, None] * np.array([1.0, 0.3, 0.1, 0.03])
            self.options["rope"] = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), "half")

    def on_host(self):
        """Results of the oracle, and the caches afterwards."""
        arrays = [a.copy() for a in self.arrays]
        results = cuflash.decode(*arrays, self.lengths, page_table=self.table, return_lse=True, backend="reference", **self.options)
        return results, arrays[1:]

    def on_device(self, width=np.int32, lengths=None, **changed):
        """Arguments with every array on the device."""
        options = {name: there(x) if isinstance(x, np.ndarray) else x for name, x in self.options.items()}
        if options.get("rope") is not None:
            options["rope"] = (*map(there, options["rope"][:2]), options["rope"][2])
        if self.table is not None:
            options["page_table"] = there(self.table)
        numbers = self.lengths if lengths is None else lengths
        return [*map(there, self.arrays), there(np.array(numbers, width))], {**options, **changed}


def same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.get().astype(np.float64), b.astype(np.float64), atol=4e-3)


@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize("page", [0, 1, 4])
@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_lengths_and_pages_that_only_the_device_knows(gpu, width, page, rope):
    call = Call(page, rope)
    want, caches = call.on_host()
    args, options = call.on_device(width)
    for turn in range(3):
        same(cuflash.decode(*args, return_lse=True, **options), want)
        same(args[1:3], caches)
        assert args[3].host.tolist() == call.lengths, "the caller counts"
        assert [x.name.startswith("kv_append") for x in gpu.launches[-2:]] == [True, False] and len(gpu.launches) == 2 * (turn + 1)
    assert gpu.waited == 0


@pytest.mark.parametrize("page", [0, 4])
def test_lengths_and_pages_of_the_host(gpu, page):
    """They are copied, for each of the two kernels; and those of the one may be on the host, of the other on the device."""
    call = Call(page, rope=True)
    want, caches = call.on_host()
    for lengths in (False, True):
        for table in (False, True):
            args, options = call.on_device()
            args[3] = args[3] if lengths else call.lengths
            if page:
                options["page_table"] = options["page_table"] if table else call.table
            same(cuflash.decode(*args, return_lse=True, **options), want)
            same(args[1:3], caches)


def test_an_embedding_without_new_keys_turns_the_queries(gpu):
    call = Call(rope=True)
    for name in ("k_new", "v_new"):
        del call.options[name]
    want, caches = call.on_host()
    args, options = call.on_device()
    same(cuflash.decode(*args, return_lse=True, **options), want)
    same(args[1:3], caches)
    assert np.array_equal(args[1].host, call.arrays[1])


@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
def test_what_does_not_fit_is_left_out(gpu, rope):
    call = Call(4, rope)
    args, options = call.on_device(lengths=[CAPACITY - 1, 3])
    before = args[1].get()
    cuflash.decode(*args, **options)
    changed = np.any(args[1].host != before, axis=(2, 3))
    assert changed.sum() == 2 and not changed[call.table[0]].any()


def test_entries_of_a_larger_cache(gpu):
    call = Call()
    call.arrays[1:] = [np.concatenate([a, a[:1], a]) for a in call.arrays[1:]]
    for index in ([4, 1], [0, 3]):
        call.options["cache_batch_index"] = np.array(index, np.int32)
        want, caches = call.on_host()
        for entries in (index, there(np.array(index, np.int32))):
            args, options = call.on_device(cache_batch_index=entries)
            same(cuflash.decode(*args, return_lse=True, **options), want)
            same(args[1:3], caches)
            changed = np.any(args[1].host != call.arrays[1], axis=(1, 2, 3))
            assert np.flatnonzero(changed).tolist() == sorted(index)


def test_a_captured_call_has_memory_of_the_graph(gpu):
    call = Call(4, rope=True)
    args, options = call.on_device()
    want, caches = call.on_host()
    gpu.capturing = True
    same(cuflash.decode(*args, return_lse=True, **options), want)
    turned, lengths = (x.params for x in gpu.launches[-2:])
    addresses = {int(turned["q_turned"]), int(turned["lengths_after"])}
    assert addresses == {a.data.ptr for a in gpu.freed} and not gpu.allocated
    assert {int(lengths["q"]), int(lengths["kv_lengths"])} == addresses and gpu.waited == 0


def test_what_cannot_be_captured_leaves_the_caches_as_they_were(gpu):
    call = Call(4, rope=True)
    for changed in ({"kv_lengths": call.lengths}, {"page_table": call.table}, {"kv_start": [0, 1]}, {"sinks": [0.0] * 4}):
        args, options = call.on_device()
        args[3] = changed.pop("kv_lengths", args[3])
        before = args[1].get(), len(gpu.launches)
        gpu.capturing = True
        with pytest.raises(RuntimeError, match="cannot be captured"):
            cuflash.decode(*args, **{**options, **changed})
        gpu.capturing = False
        assert np.array_equal(args[1].host, before[0]) and len(gpu.launches) == before[1] and not gpu.allocated


def test_a_compiler_that_fails_leaves_the_caches_as_they_were(gpu, monkeypatch):
    from cuflash import jit

    real = gpu.function
    call = Call()
    for broken in ("decode.cu", "kv_append.cu"):
        def function(source, ordinal, shared_memory=0, broken=broken):
            if source.file == broken:
                raise jit.JitError("no compiler")
            return real(source, ordinal, shared_memory)

        monkeypatch.setattr(jit, "function", function)
        args, options = call.on_device()
        with pytest.raises(jit.JitError, match="no compiler"):
            cuflash.decode(*args, **options)
        assert np.array_equal(args[1].host, call.arrays[1]) and not gpu.launches


def test_without_the_kernel_that_appends(gpu, monkeypatch):
    """New keys are written by CuPy's indexing where lengths are known; what needs the kernel says so, before anything is written."""
    from cuflash.backends import cuda_append

    monkeypatch.setattr(cuda_append, "decline", lambda problem, new: "the reason")
    call = Call(4)
    want, caches = call.on_host()
    args, options = call.on_device(page_table=call.table)
    same(cuflash.decode(*args[:3], call.lengths, return_lse=True, **options), want)
    same(args[1:3], caches)
    args, options = call.on_device()
    with refused(cuflash.NoBackendError, "kv_lengths on the device, page_table on the device", "cannot run: the reason"):
        cuflash.decode(*args, **options)
    call = Call(rope=True)
    args, options = call.on_device()
    with refused(cuflash.NoBackendError, "rope", "the reason"):
        cuflash.decode(*args[:3], call.lengths, **options)
    assert np.array_equal(args[1].host, call.arrays[1])


def part(a: FakeArray, dtype, *shape: int) -> FakeArray:
    """The first bytes of an array as another one."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize // a.dtype.itemsize
    return FakeArray((), host=a.host.reshape(-1)[:size].view(dtype).reshape(shape), device_id=0)


def test_forms_that_are_refused(gpu):
    call = Call(4, rope=True)
    args, options = call.on_device()
    cos, sin, _ = options["rope"]

    def refuse(error, *pieces, **changed):
        with refused(error, *pieces):
            cuflash.decode(*args[:3], changed.pop("kv_lengths", args[3]), **{**options, **changed})

    refuse(TypeError, "page_table:", "int64", "int32", page_table=there(call.table.astype(np.int64)))
    refuse(ValueError, "page_table:", "(1, 3)", "batch 2", page_table=there(call.table[:1]))
    refuse(ValueError, "page_table:", "contiguous", page_table=there(np.repeat(call.table, 2, 1))[:, ::2])
    refuse(ValueError, "page_table:", "on one device", page_table=there(call.table, 1))
    refuse(ValueError, "cache_batch_index:", "None with page_table", cache_batch_index=[0, 1])
    refuse(TypeError, "cache_batch_index:", "int32", page_table=None, cache_batch_index=there(np.array([0, 1])))
    refuse(TypeError, "rope[0]:", "of one kind", rope=(call.options["rope"][0], sin, "half"))
    refuse(TypeError, "rope[1]:", "float64", "float32 and float16", rope=(cos, there(sin.host.astype(float)), "half"))
    refuse(ValueError, "rope[1]:", "on one device", rope=(cos, there(sin.host, 1), "half"))
    refuse(TypeError, "kv_lengths:", "int32 or int64", kv_lengths=there(np.array([1, 2], np.uint8)))
    assert not gpu.launches
    name = "v_cache"
    for changed, other in (
        ({"kv_lengths": part(args[2], np.int32, 2)}, "kv_lengths"),
        ({"page_table": part(args[2], np.int32, 2, 3)}, "page_table"),
        ({"rope": (cos, part(args[2], np.float32, 12, 4), "half")}, "rope[1]"),
    ):
        refuse(ValueError, f"{name}:", f"overlaps {other}", **changed)
    out = FakeArray((2, 2, 4, 8), F16)
    refuse(ValueError, "out:", "overlaps rope[0]", out=out, rope=(part(out, np.float32, 12, 4), sin, "half"))
    refuse(ValueError, "out:", "overlaps page_table", out=out, page_table=part(out, np.int32, 2, 3))
    assert not gpu.launches
    for backend, kernel in (("cuda", "fa1"), ("cuda", "naive"), ("numba-cuda", "fa1")):
        with pytest.raises(cuflash.NoBackendError):
            cuflash.decode(*args, **options, backend=backend, kernel=kernel)
    assert not gpu.launches


def test_numbers_are_checked_on_request(gpu, monkeypatch):
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    call = Call(4, rope=True)
    want, _ = call.on_host()
    args, options = call.on_device()
    same(cuflash.decode(*args, return_lse=True, **options), want)
    launched, waited = len(gpu.launches), gpu.waited
    assert waited > 0
    shared = call.table.copy()
    shared[1, 2] = shared[0, 0]  # both take new keys
    for lengths, changed, pieces in (
        ([3, 11], {}, ("kv_lengths:", "11 keys at index 1 plus 2")),
        ([-1, 9], {}, ("kv_lengths:", "-1 at index 0")),
        ([3, 9], {"page_table": there(np.full_like(call.table, 99))}, ("page_table:", "is 99")),
        ([3, 9], {"page_table": there(shared)}, ("page_table:", "uses it too")),
        ([3, 9], {"rope": (*(there(x[:10]) for x in call.options["rope"][:2]), "half")}, ("rope:", "10 positions", "1 reaches 10")),
    ):
        args, options = call.on_device(lengths=lengths)
        with refused(ValueError, *pieces):
            cuflash.decode(*args, **{**options, **changed})
    assert len(gpu.launches) == launched
    plain = Call()
    plain.arrays[1:] = [np.concatenate([a, a]) for a in plain.arrays[1:]]
    for index, pieces in (([4, 0], ("4 at index 0", "from 0 to 3")), ([2, 2], ("2 at index 0 and again at 1",))):
        args, options = plain.on_device(cache_batch_index=there(np.array(index, np.int32)))
        with refused(ValueError, "cache_batch_index:", *pieces):
            cuflash.decode(*args, **options)


def test_a_tree_over_lengths_of_the_device(gpu):
    """A mask of the last keys needs no length on the host."""
    call = Call()
    args, options = call.on_device(mask=there(np.tri(2, dtype=bool)))
    cuflash.decode(*args, **options)
    assert gpu.launches[-1].params["mask_tail"] == 1 and gpu.launches[-1].params["mask_columns"] == 2


def test_attention_and_plans_take_page_tables_of_the_device(gpu):
    call = Call(4)
    q, k, v = call.arrays
    want = cuflash.attention(q, k, v, kv_lengths=call.lengths, page_table=call.table, backend="reference")
    args, options = call.on_device()
    table = options["page_table"]
    same([cuflash.attention(*args[:3], kv_lengths=args[3], page_table=table)], [want])
    plan = cuflash.plan(*args[:3], kv_lengths=args[3], page_table=table)
    same([plan.run(*args[:3])], [want])
    out = FakeArray(want.shape, F16)
    for lengths in ([7, 4], [1, 9], [12, 2], [3, 3]):  # a launch that is kept, then one on the very arrays of the call before
        args[3].host[:] = lengths
        want = cuflash.attention(q, k, v, kv_lengths=lengths, page_table=call.table, backend="reference")
        same([plan.run(*args[:3]), plan.run(*args[:3], out=out)], [want] * 2)
    assert not warm.launches and gpu.waited == 0


def test_bfloat16_is_no_longer_refused(gpu):
    """decode() takes arrays of every dtype that the kernel has; the fake computes float16."""
    from cuflash.backends import cuda_append
    from cuflash.problem import build_decode

    for dtype in (ml_dtypes.bfloat16, np.float32, np.float64):
        args, options = Call(4).on_device()
        options |= {name: there(options[name].host.astype(dtype)) for name in ("k_new", "v_new")}
        problem, new = build_decode(*(there(a.host.astype(dtype)) for a in args[:3]), args[3], **options)
        assert cuda_append.decline(problem, new) is None

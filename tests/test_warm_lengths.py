"""Warm calls on a GPU with lengths of the host, and attention() over pages: every number is looked at, and goes along."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from fake_cupy import FakeArray
from refusal import refused
from test_decode_device import same
from test_warm_decode import FORMS, made
from warm_calls import choices, gpu, nothing_kept, there, wrong_in_threads  # noqa: F401  fixtures among them

import cuflash
from cuflash import checks, staging, warm_decode
from cuflash.types import Append, ArrayView, Problem, Rope

F16 = np.dtype(np.float16)
KINDS = {"list": list, "int32": lambda x: np.array(x, np.int32), "uint8": lambda x: np.array(x, np.uint8)}


@pytest.fixture(autouse=True)
def no_slots():
    staging._slots.clear()
    yield
    staging._slots.clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_lengths_of_the_host_go_along(gpu, choices, form, kind):
    for turn, lengths in enumerate(([3, 9], [4, 10], [0, 5], [2, 2])):
        call = made(form, turn, lengths)
        if call.options.get("kv_start") is not None:
            call.options["kv_start"] = np.array([0, 1 + turn], np.int32)
        want, caches = call.on_host()
        args, options = call.on_device()
        args[3] = KINDS[kind](lengths)
        same(cuflash.decode(*args, return_lse=True, **options), want)
        same(args[1:3], caches)
    assert len(choices) == len(warm_decode.launches) == 1 and len(gpu.pinned) == 1 and gpu.waited == 0


def test_one_length_for_all_sequences(gpu, choices):
    for n in (3, 4, np.int64(5)):
        call = made("paged rope", lengths=[int(n)] * 2)
        want, caches = call.on_host()
        args, options = call.on_device()
        same(cuflash.decode(*args[:3], n, return_lse=True, **options), want)
        same(args[1:3], caches)
    assert len(choices) == 1


def test_they_and_lengths_on_the_device_have_launches_of_their_own(gpu, choices):
    call = made("paged rope")
    want, _ = call.on_host()
    for _ in range(3):
        for on_device in (False, True):
            args, options = call.on_device()
            same([cuflash.decode(*args[:3], args[3] if on_device else call.lengths, **options)], want[:1])
    assert len(choices) == len(warm_decode.launches) == 2


@pytest.mark.parametrize("form", ["paged rope", "dense"])
def test_a_warm_call_refuses_what_a_cold_one_refuses(gpu, form):
    call = made(form)
    args, options = call.on_device()
    cuflash.decode(*args[:3], call.lengths, **options)
    assert len(warm_decode.launches) == 1
    args, options = call.on_device()
    before, launched = [a.get() for a in args[1:3]], len(gpu.launches)
    for bad, error, words in (
        ([3, 11], ValueError, "exceed the cache's capacity of 12"), ([3, -1], ValueError, "must be from 0"),
        ([3, 13], ValueError, "0 to 12"), (11, ValueError, "capacity"), ([3], ValueError, "shape (1,)"),
        ([[3, 9]], ValueError, "shape (1, 2)"), ([3, [9]], ValueError, "rectangular"), ([3.0, 9.0], TypeError, "integer"),
        ("ab", TypeError, "integer"), (np.array([2**64 - 1, 0], np.uint64), ValueError, "larger than"),
    ):  # fmt: skip
        with refused(error, "kv_lengths:", words):
            cuflash.decode(*args[:3], bad, **options)
    with refused(TypeError, "kv_lengths: got None"):
        cuflash.decode(*args[:3], None, **options)
    assert len(gpu.launches) == launched and all(np.array_equal(a.host, b) for a, b in zip(args[1:3], before, strict=True))


def test_an_embedding_that_ends_early_is_seen(gpu, choices):
    call = made("rope")
    cos, sin, style = call.options["rope"]
    call.options["rope"] = (cos[:8], sin[:8], style)
    for lengths in ([3, 6], [0, 5], [6, 6]):
        call.lengths = lengths
        want, caches = call.on_host()
        args, options = call.on_device()
        same(cuflash.decode(*args[:3], lengths, return_lse=True, **options), want)
        same(args[1:3], caches)
    assert len(choices) == 1
    args, options = call.on_device()
    with refused(ValueError, "rope: cos and sin have 8 positions", "sequence 1 reaches 8"):
        cuflash.decode(*args[:3], [3, 7], **options)


@pytest.mark.parametrize("align", ["bottom_right", "upper_left"])
def test_what_is_within_the_bounds_passes_every_check(align):
    """And nothing beyond the upper one does."""

    def outcome(check, *args) -> bool:
        try:
            check(*args)
        except ValueError:
            return False
        return True

    def view(*shape):
        return ArrayView(None, 0, shape, (0,) * len(shape), np.dtype(np.float32), "numpy", -1)

    seen = set()
    for rows in range(1, 7):
        for count in range(4):
            for known in range(1, 9):
                q = view(1, rows, 1, 2)
                problem = Problem(q=q, k=q, v=q, batch=1, seqlen_q=rows, seqlen_k=6, align=align)
                rope = Rope(view(known, 1), view(known, 1), False)
                new = Append(None, view(1, count, 1, 2), view(1, count, 1, 2), rope)
                lowest, highest = warm_decode.bounds(problem, new)
                for n in range(8):
                    before = np.array([n])
                    passes = (
                        n <= 6 and outcome(checks.append_fits, before, count, 6)
                        and outcome(checks.positions_exist, problem.replace(kv_lengths=before + count), rope, before)
                    )  # fmt: skip
                    inside = lowest <= n <= highest
                    seen.add((inside, passes))
                    assert passes or not inside
                    assert inside or not passes or n < lowest or (align == "upper_left" and rows > known and n + count == 0)
    assert seen == {(True, True), (False, False), (False, True)}


def test_a_capture_refuses_them(gpu):
    for form in ("dense", "paged rope", "no new keys"):
        call = made(form)
        args, options = call.on_device()
        cuflash.decode(*args[:3], call.lengths, **options)
        before, launched = args[1].get(), len(gpu.launches)
        gpu.capturing = True
        with refused(RuntimeError, "cannot be captured", "kv_lengths"):
            cuflash.decode(*args[:3], call.lengths, **options)
        gpu.capturing = False
        assert len(gpu.launches) == launched and np.array_equal(args[1].host, before)


def test_kernels_that_need_the_numbers_get_them(gpu, choices):
    call = made("dense")
    want, _ = call.on_host()
    for _ in range(2):
        args, options = call.on_device()
        same([cuflash.decode(*args[:3], call.lengths, kernel="fa1", backend="cuda", **options)], want[:1])
    assert len(choices) == 2 and not warm_decode.launches


def test_pinned_memory_is_not_written_while_it_is_copied(gpu):
    call = made("dense")
    args, options = call.on_device()
    cuflash.decode(*args[:3], call.lengths, **options)
    gpu.copying = True
    for step in range(3):
        cuflash.decode(*args[:3], [step, 2], **options)
        assert len(gpu.pinned) == step + 1
    assert [np.frombuffer(memory, np.int64, 2).tolist() for memory in gpu.pinned] == [[0, 2], [1, 2], [2, 2]]
    gpu.copying = False
    for step in range(4):
        cuflash.decode(*args[:3], [5 + step, 2], **options)
    assert len(gpu.pinned) == 3


def test_threads_do_not_mix_their_lengths(gpu):
    calls = [made("paged rope", seed, [seed, 9 - seed]) for seed in range(4)]
    wants = [call.on_host()[0][0] for call in calls]
    cuflash.decode(*calls[0].on_device()[0][:3], calls[0].lengths, **calls[0].on_device()[1])
    barrier = threading.Barrier(4)
    gpu.before.append(lambda params: barrier.wait(timeout=60))

    def call(n: int):
        args, options = calls[n].on_device()
        return cuflash.decode(*args[:3], calls[n].lengths, **options)

    assert not wrong_in_threads(gpu, wants, call)


@pytest.mark.parametrize("of_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("form", ["paged", "dense", "padding"])
def test_attention_over_caches(gpu, choices, form, of_host):
    """With a page table, or with lengths of the host."""
    for turn, lengths in enumerate(([3, 9], [4, 12], [0, 5])):
        call = made(form, turn)
        table = None if call.table is None else np.roll(call.table, turn).astype(np.int32)
        options = {"causal": True, "softcap": 3.0}
        start = {"kv_start": np.array([1, turn], np.int32)} if form == "padding" else {}
        if form == "padding" and lengths[0] == 0:
            lengths[0] = 2
        options["return_lse"] = True
        want = cuflash.attention(*call.arrays, kv_lengths=lengths, page_table=table, backend="reference", **options, **start)
        arrays, start = [there(a) for a in call.arrays], {name: there(x) for name, x in start.items()}
        table, known = None if table is None else there(table), lengths if of_host else there(np.array(lengths, np.int32))
        out = FakeArray(want[0].shape, F16)
        got = cuflash.attention(*arrays, kv_lengths=known, page_table=table, out=out, **options, **start)
        assert got[0] is out
        same(got, want)
    assert len(choices) == 1 and gpu.waited == 0


def test_attention_over_caches_refuses_when_warm(gpu, choices):
    call = made("paged")
    arrays, table = [there(a) for a in call.arrays], there(call.table)
    out = FakeArray((2, 2, 4, 8), F16)
    cuflash.attention(*arrays, kv_lengths=[3, 9], page_table=table, out=out)
    launched = len(gpu.launches)
    with refused(ValueError, "kv_lengths:", "0 to 12"):
        cuflash.attention(*arrays, kv_lengths=[3, 13], page_table=table, out=out)
    with refused(ValueError, "kv_lengths: required with page_table"):
        cuflash.attention(*arrays, page_table=table, out=out)
    inside = FakeArray((), host=arrays[1].host.reshape(-1)[: out.host.size].reshape(out.shape), device_id=0)
    with refused(ValueError, "out: overlaps k"):
        cuflash.attention(*arrays, kv_lengths=[3, 9], page_table=table, out=inside)
    bytes_of_table = FakeArray((), host=np.zeros(out.host.size, F16), device_id=0)
    in_out = FakeArray((), host=bytes_of_table.host[: 2 * table.host.size].view(np.int32).reshape(table.shape), device_id=0)
    in_out[...] = table
    results = FakeArray((), host=bytes_of_table.host.reshape(out.shape), device_id=0)
    with refused(ValueError, "out: overlaps page_table"):
        cuflash.attention(*arrays, kv_lengths=[3, 9], page_table=in_out, out=results)
    with refused(TypeError, "causal"):
        cuflash.attention(*arrays, kv_lengths=[3, 9], page_table=table, out=out, causal=1)
    assert len(gpu.launches) == launched and len(warm_decode.launches) == 1



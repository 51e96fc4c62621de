"""Calls over caches in float8_e4m3fn on a GPU, called again: scales are among the addresses, and numbers among what tells calls apart."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import FakeArray
from refusal import refused
from test_decode_device import same
from warm_calls import choices, gpu, nothing_kept, there  # noqa: F401  fixtures among them

import cuflash
from cuflash import warm_decode

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


class Call:
    """Two sequences of up to 12 keys, the arrays of decode() by name."""

    def __init__(self, kind: str, seed: int = 0, page: int = 4, new: str = "numbers", rope: bool = False):
        rng = np.random.default_rng(seed)
        stored = (24 // page + 1, page, 2) if page else (2, 12, 2)
        codes = [cuflash.quantize_kv(rng.standard_normal((*stored, n)).astype(F32))[0] for n in (16, 8)]

        def scale() -> Any:
            shape = {"token": stored, "head": (2,), "all": ()}[kind]
            return rng.uniform(0.001, 0.01, shape).astype(F32)

        self.arrays = {"q": rng.standard_normal((2, 2, 4, 16)).astype(F16), "k_cache": codes[0], "v_cache": codes[1]}
        self.options: dict[str, Any] = {"causal": True}
        if kind == "number":
            self.options |= {"k_scale": 0.005, "v_scale": 0.01}
        elif kind == "mixed":
            self.arrays["v_scale"], self.options["k_scale"] = rng.uniform(0.001, 0.01, stored).astype(F32), 0.004
        else:
            self.arrays |= {"k_scale": scale(), "v_scale": scale()}
        if new:
            k_new, v_new = (rng.standard_normal((2, 2, 2, n)).astype(F16) for n in (16, 8))
            if new == "codes":
                k_new, v_new = (cuflash.quantize_kv(x)[0] for x in (k_new, v_new))
            self.arrays |= {"k_new": k_new, "v_new": v_new}
        if page:
            self.arrays["page_table"] = rng.permutation(24 // page + 1)[:-1].reshape(2, -1).astype(np.int32)
        self.lengths = rng.integers(2, 11, 2).astype(np.int32)
        if rope:
            angles = np.arange(12)[:, None] * np.array([1.0, 0.3, 0.1, 0.03])
            self.options["rope"] = np.cos(angles).astype(F32), np.sin(angles).astype(F32), "half"

    def on_host(self, function: Any = cuflash.decode) -> tuple:
        """Results, and the arrays afterwards."""
        arrays = {name: a.copy() for name, a in self.arrays.items()}
        if arrays.get("k_scale", np.ones(1)).shape == ():
            arrays |= {name: float(arrays[name]) for name in ("k_scale", "v_scale")}
        return function(**arrays, kv_lengths=self.lengths, return_lse=True, backend="reference", **self.options), arrays

    def on_device(self) -> dict[str, Any]:
        options = dict(self.options)
        if "rope" in options:
            options["rope"] = (*map(there, options["rope"][:2]), options["rope"][2])
        return {**{name: there(a) for name, a in self.arrays.items()}, "kv_lengths": there(self.lengths), **options}

    def check(self, got: Any, given: dict[str, Any], function: Any = cuflash.decode) -> None:
        want, arrays = self.on_host(function)
        same(got, want)
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            if isinstance(arrays.get(name), np.ndarray):
                assert given[name].host.tobytes() == arrays[name].tobytes(), name


@pytest.mark.parametrize("new", ["", "numbers", "codes"])
@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("kind", ["token", "head", "all", "number", "mixed"])
def test_other_arrays(gpu, choices, kind, page, new):
    for turn in range(3):
        call = Call(kind, turn, page, new)
        given = call.on_device()
        call.check(cuflash.decode(return_lse=True, **given), given)
    assert len(choices) == len(warm_decode.launches) == 1 and gpu.waited == 0


@pytest.mark.parametrize("page", [0, 4])
def test_with_an_embedding_and_lengths_of_the_host(gpu, choices, page):
    for turn in range(4):
        call = Call("token", turn, page, rope=True)
        given = call.on_device()
        if turn >= 2:
            given["kv_lengths"] = call.lengths
        call.check(cuflash.decode(return_lse=True, **given), given)
    assert len(choices) == len(warm_decode.launches) == 2


def test_numbers_are_part_of_the_signature(gpu, choices):
    for _ in range(2):
        for number in (0.005, np.float32(0.006), 1, 2.0):
            call = Call("number")
            call.options["v_scale"] = number
            given = call.on_device()
            call.check(cuflash.decode(return_lse=True, **given), given)
    assert len(choices) == len(warm_decode.launches) == 4
    given = call.on_device()
    for bad in (0, -1.0, 10**400, float("nan"), True):
        with pytest.raises((TypeError, ValueError), match="v_scale: "):
            cuflash.decode(**{**given, "v_scale": bad})
    assert len(warm_decode.launches) == 4


def test_scales_of_heads_on_the_host_are_planned_anew(gpu, choices):
    for turn in range(2):
        call = Call("head", turn)
        given = {**call.on_device(), "k_scale": call.arrays["k_scale"], "v_scale": call.arrays["v_scale"].tolist()}
        want, _ = call.on_host()
        same(cuflash.decode(return_lse=True, **given), want)
    assert len(choices) == 2 and not warm_decode.launches


def test_a_shared_prefix(gpu, choices):
    for turn in range(3):
        call = Call("token", turn)
        call.arrays["page_table"][1, 0] = call.arrays["page_table"][0, 0]
        call.lengths = np.array([4 + turn, 7], np.int32)
        given = call.on_device()
        given["prefix_lengths"] = there(np.array([4, 4], np.int32))
        call.check(cuflash.decode_shared_prefix(return_lse=True, **given), given)
    assert len(choices) == 2, "for the two passes of the first call"


@pytest.mark.parametrize("page", [0, 4])
def test_attention(gpu, choices, page):
    for turn in range(3):
        call = Call("token", turn, page, "")
        for name in "kv":
            call.arrays[name] = call.arrays.pop(f"{name}_cache")
        given = call.on_device()
        call.check(cuflash.attention(return_lse=True, **given), given, cuflash.attention)
    assert len(choices) == len(warm_decode.launches) == 1


def test_scales_that_meet_other_arrays_are_refused_as_before(gpu):
    call = Call("token")
    given = call.on_device()
    out = FakeArray((2, 2, 4, 8), F16)
    cuflash.decode(**given, out=out)
    assert len(warm_decode.launches) == 1
    launched = len(gpu.launches)

    def piece(a: FakeArray, like: FakeArray) -> tuple[FakeArray, ...]:
        memory = FakeArray((max(a.host.nbytes, like.host.nbytes) + 64,), np.uint8)
        return tuple(
            FakeArray((), host=memory.host[: x.host.nbytes].view(x.dtype).reshape(x.shape), device_id=0) for x in (a, like)
        )

    for name, other in (("k_scale", "k_new"), ("v_scale", "q"), ("v_scale", "kv_lengths"), ("k_scale", "page_table")):
        a, b = piece(given[name], given[other])
        b.host[...] = given[other].host
        with refused(ValueError, f"{name}:", f"overlaps {other}"):
            cuflash.decode(**{**given, name: a, other: b}, out=out)
    with refused(ValueError, "k_scale:", "overlaps v_scale"):
        cuflash.decode(**{**given, "v_scale": given["k_scale"]}, out=out)
    a, b = piece(given["k_scale"], out)
    with refused(ValueError, "out:", "overlaps k_scale"):
        cuflash.decode(**{**given, "k_scale": a}, out=b)
    assert len(gpu.launches) == launched

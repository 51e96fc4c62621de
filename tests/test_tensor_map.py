"""Tensor maps: what they can describe, what the driver is asked for, and that those of a struct follow their arrays. Needs no GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cuflash import driver, launch, structs, tensor_map
from emulator import emulate

GOOD = {"itemsize": 2, "shape": (128, 1000, 8, 3), "strides": (2048, 256, 2048000), "box": (64, 64, 1, 1), "swizzle": 128}


@pytest.fixture(autouse=True)
def driver_of_emulator():
    with emulate.tensor_maps():
        yield


def read(made: bytes) -> emulate.Map:
    return emulate.Map.from_buffer_copy(made)


def test_what_the_driver_is_asked_for():
    found = read(tensor_map.TensorMap(**GOOD).at(0x7000))
    assert (found.address, found.rank, found.item_bytes, found.swizzle_bytes) == (0x7000, 4, 2, 128)
    assert (tuple(found.size[:4]), tuple(found.stride[:3]), tuple(found.box[:4])) == (GOOD["shape"], GOOD["strides"], GOOD["box"])
    assert ctypes.sizeof(emulate.Map) <= tensor_map.BYTES


def test_one_dimension_has_no_stride():
    found = read(tensor_map.TensorMap(4, (1000,), (), (16,), 64).at(0x100))
    assert (found.rank, found.size[0], found.item_bytes, found.swizzle_bytes) == (1, 1000, 4, 64)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"itemsize": 16}, "numbers of 16 bytes; there are maps of 1, 2, 4, 8"),
        ({"shape": (128, 0, 8, 3)}, r"a shape of \(128, 0, 8, 3\); dimensions have 1 to"),
        ({"shape": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "6 dimensions, 5 strides, a box of 6"),
        ({"strides": (2048, 256)}, "4 dimensions, 2 strides, a box of 4"),
        ({"box": (64, 257, 1, 1)}, r"a box of \(64, 257, 1, 1\)"),
        ({"strides": (2048, 0, 2048000)}, "they must be positive multiples of 16 bytes"),
        ({"strides": (2048, 250, 2048000)}, "they must be positive multiples of 16 bytes"),
        ({"strides": (2048, -256, 2048000)}, "they must be positive multiples of 16 bytes"),
        ({"strides": (2048, 256, 1 << 40)}, "they must be positive multiples of 16 bytes below"),
        ({"swizzle": 256}, "a swizzle of 256 bytes; there are 0, 32, 64, 128"),
        ({"swizzle": 64}, "rows of 128 bytes in a box; they must be multiples of 16, at most 64"),
        ({"box": (4, 64, 1, 1)}, "rows of 8 bytes in a box"),
    ],
)
def test_what_there_is_no_map_of(changes, words):
    with pytest.raises(ValueError, match=words):
        tensor_map.TensorMap(**GOOD | changes)
    assert tensor_map.why_not(**GOOD) is None and "address 0x8; it must be a multiple of 16" in tensor_map.why_not(**GOOD, address=8)


def test_the_driver_refuses_or_is_too_old(monkeypatch):
    with pytest.raises(ValueError, match="no tensor map of an array at 0x8: CUDA_ERROR_INVALID_VALUE"):
        tensor_map.TensorMap(**GOOD).at(8)
    monkeypatch.setattr(driver, "library", object)
    with pytest.raises(RuntimeError, match="need the driver of CUDA 12.0 or later; there is no cuTensorMapEncodeTiled"):
        tensor_map.TensorMap(**GOOD).at(16)
    with pytest.raises(RuntimeError, match="there is no cuTensorMapReplaceAddress"):
        tensor_map.Follower([0])


def test_prepared_launches_have_the_maps_of_each_call(monkeypatch):
    """Also of two at the same time, one of which is within the other."""
    monkeypatch.setattr(launch, "by_value", lambda params: params)
    params, made = np.zeros(1, structs.FA3_PARAMS), tensor_map.TensorMap(**GOOD)
    for name in structs.MAPS:
        params[name] = np.void(made.at(0x10))
    places = [structs.FA3_PARAMS.fields[name][1] for name in structs.MAPS]
    asked = [(0x100, 0x200, 0x300, 0x400, 0x500), (0x100, 0x200, 0x310, 0x410, 0x510)]
    seen = []

    def run(grid, block, arguments, shared):
        if not seen:
            seen.append(None)
            prepared(*asked[1])
        given = arguments[0].view(structs.FA3_PARAMS)[0]
        assert arguments[0].ctypes.data % tensor_map.ALIGNMENT == 0
        plain = [int(given["prefill"][name]) for name in ("q", "k", "v", "out", "lse")]
        seen.append([*plain, *(read(given[name].tobytes()).address for name in structs.MAPS)])

    prepared = launch.Prepared([launch.Step(run, 1, 384)], params, 5, maps_at=places)
    prepared(*asked[0])
    prepared(*asked[0])
    assert seen[1:] == [[*at, *at[:3]] for at in (asked[1], asked[0], asked[0])]


def test_maps_follow_their_arrays(monkeypatch):
    made = tensor_map.TensorMap(**GOOD)
    memory = tensor_map.aligned(made.at(0x1000) + made.at(0x2000))
    moved, move = [], emulate.Driver.cuTensorMapReplaceAddress

    def counted(place, address):
        moved.append(address.value)
        return move(place, address)

    monkeypatch.setattr(emulate.Driver, "cuTensorMapReplaceAddress", counted)
    follow = tensor_map.Follower([memory.ctypes.data, memory.ctypes.data + tensor_map.BYTES])
    for at, calls in (((0x10, 0x20, 0x5), 2), ((0x10, 0x20, 0x7), 2), ((0x30, 0x20, 0x7), 4)):
        follow(at)
        first, second = read(memory[: tensor_map.BYTES]), read(memory[tensor_map.BYTES :])
        assert (first.address, second.address) == at[:2] and first.rank == second.rank == 4 and len(moved) == calls
    with pytest.raises(ValueError, match="no tensor map of an array at 0x8"):
        follow((0x30, 0x8, 0x7))
    follow((0x30, 0x20, 0x7))  # nothing of the call that failed is taken for done
    assert read(memory[tensor_map.BYTES :]).address == 0x20 and len(moved) == 8

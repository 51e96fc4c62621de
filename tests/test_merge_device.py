"""merge_states on a GPU that is not there: one launch, whatever the layout; buffers that are inputs, and buffers that lie across them."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cupy import FakeArray, pretended_gpus

from cuflash import merge_states


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(FakeArray, "__module__", "cupy")  # by which merge_states finds the library
    with pretended_gpus(monkeypatch) as fake:
        yield fake


def parts(n=3, dtype=np.float16, axes=4):
    rng = np.random.default_rng(n)
    shape = (2, 3, 3, 16)[4 - axes :]
    real = np.float64 if dtype == np.float64 else np.float32
    outs = [rng.standard_normal(shape).astype(dtype) for _ in range(n)]
    lses = [rng.standard_normal(shape[:-1] if axes != 2 else shape[:1]).astype(real) for _ in range(n)]
    lses[0][..., 1] = -np.inf
    return outs, lses


def there(arrays):
    return [FakeArray((), host=a.copy()) for a in arrays]


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("axes", [2, 3, 4])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_launch(gpu, dtype, axes, layout):
    outs, lses = parts(dtype=dtype, axes=axes)
    want = merge_states(outs, lses, layout=layout)
    with gpu.using(stream=7):
        got = merge_states(there(outs), there(lses), layout=layout)
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine.host, other)
    assert [(x.name[:12], x.stream, x.device) for x in gpu.launches] == [("merge_states", 7, 0)]


def test_no_columns(gpu):
    outs, lses = parts()
    want = merge_states([o[..., :0] for o in outs], lses)
    out, lse = merge_states(there([o[..., :0].copy() for o in outs]), there(lses))
    assert out.shape == want[0].shape
    np.testing.assert_array_equal(lse.host, want[1])


def test_buffers(gpu):
    """Inputs themselves are written to by the kernel; a buffer that lies across one is filled when all have been read."""
    outs, lses = parts()
    want = merge_states(outs, lses)
    given = there(outs), there(lses)
    out, lse = merge_states(*given, out=given[0][1], lse=given[1][2])
    assert out is given[0][1] and lse is given[1][2] and gpu.launches[-1].params["out"] == out.data.ptr
    np.testing.assert_array_equal(out.host, want[0])
    np.testing.assert_array_equal(lse.host, want[1])

    memory = np.concatenate([outs[0].ravel(), np.zeros(16, np.float16)])
    first, across = (FakeArray((), host=memory[a : a + outs[0].size].reshape(outs[0].shape)) for a in (0, 16))
    assert np.array_equal(merge_states([first, *there(outs[1:])], there(lses), out=across)[0].host, want[0])
    assert gpu.launches[-1].params["out"] != across.data.ptr


def test_arrays_of_two_devices(gpu):
    outs, lses = parts()
    given = there(outs), there(lses)
    with gpu.using(device=1):
        given[1][1] = FakeArray((), host=lses[1])
    with pytest.raises(ValueError, match=r"lses\[1\]: in cupy, GPU 1, but outs\[0\] is in cupy, GPU 0; all arrays must be on one device"):
        merge_states(*given)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_buffers_on_another_device(gpu, name):
    outs, lses = parts()
    with gpu.using(device=1):
        buffer = FakeArray((), host=(outs if name == "out" else lses)[0].copy())
    with pytest.raises(ValueError, match=f"^{name}: in cupy, GPU 1, but outs.0. is in cupy, GPU 0; all arrays must be on one device"):
        merge_states(there(outs), there(lses), **{name: buffer})
    assert not gpu.launches

"""Decoding on the CPU: keys and values that are read where they lie."""

from __future__ import annotations

import numpy as np
import pytest

import cuflash


def normal(*shape: int, dtype=np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (70, 0)}, {"kv_start": [5, 0]}, {"score": "sqdist"}, {"softcap": 2.0, "num_splits": 3},
], ids=str)  # fmt: skip
def test_few_rows_read_keys_in_place_and_packed_alike(options, layout, dtype):
    """Bit for bit, next to poisoned keys that no row sees: behind the length, and, for one of two rows, the last key."""
    for length in (1, 7, 8, 127, 128, 129, 136, 250, 257, 264, 300):
        q, k, v = normal(2, 2, 4, 16, dtype=dtype), normal(2, 300, 2, 16, dtype=dtype, seed=1), normal(2, 300, 2, 24, dtype=dtype, seed=2)
        k[:, length:], v[:, length:] = np.nan, np.inf
        if "causal" in options and length > 1:
            k[0, length - 1] = np.inf
            v[1, length - 1] = np.nan
        lengths = [length, length]
        more = {**options, "kv_start": [min(5, length), 0]} if "kv_start" in options else options
        if layout == "BHSD":
            q, k, v = (np.ascontiguousarray(a.swapaxes(1, 2)) for a in (q, k, v))
        strided = [np.repeat(a, 2, axis=-1)[..., ::2] for a in (k, v)]
        assert strided[0].strides[-1] == 2 * k.itemsize
        got, want = (
            cuflash.attention(q, *kv, layout=layout, kv_lengths=lengths, kernel="decode", return_lse=True, **more)
            for kv in ((k, v), strided)
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
        if "causal" not in options:
            assert np.isfinite(got[0]).all()
        elif length > 1:
            first = got[0] if layout == "BSHD" else got[0].swapaxes(1, 2)
            assert np.isfinite(first[:, 0]).all() and np.isnan(first[:, 1]).all()

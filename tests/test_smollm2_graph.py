"""examples/smollm2_graph.py without a GPU: its kernel emulated on the host, and its model with NumPy in the kernel's place."""

from __future__ import annotations

import sys
from pathlib import Path

import devices
import numpy as np
import pytest
from emulator import emulate
from emulator.guarded import Guarded

from cuflash import arrays

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from smollm2_graph import KERNELS, WARPS, FewTokens  # noqa: E402
from smollm2_model import Decoder  # noqa: E402
from toy_model import small_model  # noqa: E402

reason = "the cases are others in Numba's simulator" if devices.SIMULATED else emulate.why_unusable()
POINTERS = ("W", "x", "gain", "add", "y")
SIZES = ("tokens", "rows", "quads")
PARAMS = np.dtype([*((name, np.uint64) for name in POINTERS), *((name, np.int32) for name in SIZES), ("eps", np.float32)])
BEFORE = """
extern "C" float sqrtf(float) noexcept;
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
"""
BEHIND = """
struct Params { const float4 *W, *x, *gain; const float* add; float* y; int tokens, rows, quads; float eps; };
void linear_on_host(const Params& p) { linear<%d>(p.W, p.x, p.gain, p.add, p.y, p.tokens, p.rows, p.quads, p.eps); }
"""
EPS = np.finfo(np.float32).eps


@pytest.mark.skipif(reason is not None, reason=f"kernels cannot be emulated here: {reason}")
@pytest.mark.parametrize("together", [1, 8])
def test_products_norms_and_sums(together, tmp_path):
    emulator = emulate.Emulator(tmp_path)
    library = emulator.compile(BEFORE + KERNELS + BEHIND % together, "linear_on_host", "Params", 900)
    rng = np.random.default_rng(0)
    for tokens, rows, columns, norm, residual in ((1, 9, 132, True, False), (8, 4, 64, False, True), (11, 6, 4, True, True)):
        shapes = (rows, columns), (tokens, columns), columns, (tokens, rows)
        W, x, gain, add = (rng.standard_normal(shape, np.float32) for shape in shapes)
        y = np.empty((tokens, rows), np.float32)
        memory = {name: Guarded(arrays.view(a, name), "end") for name, a in (("W", W), ("x", x), ("gain", gain), ("add", add))}
        memory["y"] = Guarded(arrays.view(y, "y"), "end", writable=True)
        params = np.zeros(1, PARAMS)
        for name in POINTERS:
            params[name] = memory[name].view.pointer
        if not norm:
            params["gain"] = 0
        if not residual:
            params["add"] = 0
        params["tokens"], params["rows"], params["quads"], params["eps"] = tokens, rows, columns // 4, 1e-5
        emulator.execute(library, params, -(-rows // WARPS), 32 * WARPS, 0, memory)
        memory["y"].write_back()
        exact = x.astype(float)
        if norm:
            exact = exact / np.sqrt((exact * exact).mean(axis=1, keepdims=True) + 1e-5) * gain
        size = np.abs(exact) @ np.abs(W.T.astype(float))
        exact = exact @ W.T.astype(float) + (add if residual else 0)
        assert (np.abs(y - exact) <= (columns // 32 + 12) * EPS * (size + np.abs(exact))).all()
    emulator.close()


class RawModule:
    def __init__(self, **source):
        pass

    def get_function(self, name):
        return linear


def linear(grid, block, arguments):
    W, x, gain, add, y, tokens, rows, quads, eps = arguments
    assert x.flags.c_contiguous and (tokens, rows, 4 * quads) == (*y.shape, W.shape[1])
    assert grid[0] * block[0] >= 32 * rows
    if gain is not None:
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * gain
    y[...] = x @ W.T + (0 if add is None else add)


@pytest.mark.parametrize("count", [1, 5])
def test_its_model_is_that_of_the_prompts(count, monkeypatch):
    """At position 0, where the rotary embedding, which is left to the attention, changes nothing."""
    monkeypatch.setattr(np, "RawModule", RawModule, raising=False)  # what FewTokens uses of CuPy beyond NumPy
    monkeypatch.setattr(np, "fuse", lambda function: function, raising=False)
    decoder = Decoder(*small_model())

    def attend(layer, q, k, v):
        return (layer + 1) * q * k + v

    def joined(layer, qkv):
        return attend(layer, qkv[:, :3], qkv[:, 3:4], qkv[:, 4:])

    tokens = np.arange(7, 7 + count)
    expected = decoder.forward(tokens, slice(0, 1), attend, slice(None))
    got = FewTokens(decoder)(tokens, joined)
    assert got.shape == expected.shape == (count, 300)
    np.testing.assert_allclose(got, expected, atol=100 * EPS * np.abs(expected).max())

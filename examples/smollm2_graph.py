"""Decoding on a GPU from one CUDA graph: a token's whole way through the model, captured once and replayed for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from smollm2_attention import DenseAttention, to_layout
from smollm2_model import Array, Decoder

import cuflash

# CuPy takes no cuBLAS call into a capture.  For a few tokens a product reads each weight once: a plain kernel is fast enough.
KERNELS = r"""
__device__ float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
    return x;
}

__device__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// y (tokens, rows) = x (tokens, 4 * quads) times the transpose of W (rows, 4 * quads); a warp for each row of W.
extern "C" __global__ void linear(const float4* W, const float4* x, float* y, int tokens, int rows, int quads) {
    const int TOGETHER = 8;
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    for (int first = 0; first < tokens; first += TOGETHER) {
        float sums[TOGETHER] = {};
        for (int i = threadIdx.x; i < quads; i += 32) {
            float4 w = W[(size_t)row * quads + i];
            #pragma unroll
            for (int t = 0; t < TOGETHER; ++t)
                if (first + t < tokens) sums[t] += dot(w, x[(first + t) * quads + i]);
        }
        #pragma unroll
        for (int t = 0; t < TOGETHER; ++t) {
            float sum = warp_sum(sums[t]);
            if (threadIdx.x == 0 && first + t < tokens) y[(size_t)(first + t) * rows + row] = sum;
        }
    }
}

// y = x / sqrt(mean(x * x) + eps) * weight over each token's 4 * quads features; a block of one warp for each token.
extern "C" __global__ void rms_norm(const float4* x, const float4* weight, float4* y, int quads, float eps) {
    x += blockIdx.x * quads, y += blockIdx.x * quads;
    float sum = 0;
    for (int i = threadIdx.x; i < quads; i += 32) sum += dot(x[i], x[i]);
    float scale = rsqrtf(warp_sum(sum) / (4 * quads) + eps);
    for (int i = threadIdx.x; i < quads; i += 32) {
        float4 a = x[i], w = weight[i];
        y[i] = make_float4(a.x * scale * w.x, a.y * scale * w.y, a.z * scale * w.z, a.w * scale * w.w);
    }
}
"""
ROWS_PER_BLOCK = 4


class CapturableDecoder(Decoder):
    """The same model of calls that a CUDA graph can hold; the rotary embedding is left to the attention."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.config, decoder.weights)
        module = self.xp.RawModule(code=KERNELS)
        self._linear_kernel, self._norm_kernel = module.get_function("linear"), module.get_function("rms_norm")
        self._swiglu = self.xp.fuse(self._swiglu)
        self.rope = self._cos[:, 0], self._sin[:, 0], "interleaved"

    def _linear(self, x: Array, name: str) -> Array:
        weight = self.weights[name + ".weight"]
        sizes = tokens, rows, quads = len(x), len(weight), weight.shape[1] // 4
        y = self.xp.empty((tokens, rows), weight.dtype)
        self._linear_kernel((-(-rows // ROWS_PER_BLOCK),), (32, ROWS_PER_BLOCK), (weight, x, y, *map(np.int32, sizes)))
        return y

    def _norm(self, x: Array, name: str) -> Array:
        y, eps = self.xp.empty_like(x), np.float32(self.config.norm_eps)
        self._norm_kernel((len(x),), (32,), (x, self.weights[name + ".weight"], y, np.int32(x.shape[1] // 4), eps))
        return y

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        return x


class TokenGraph:
    """The step from a token of each of B sequences to the next: embedding, all layers, logits and the choice, in one CUDA graph.

    Tokens, numbers of stored keys and random numbers lie on the GPU.  A replay appends the keys and values of `tokens`, and
    leaves there the next tokens and in `lengths` the longer lengths, for the replay after it.

    Parameters
    ----------
    decoder : Decoder
        Weights in float32 as CuPy arrays.
    lengths : array of int32, shape (B,)
        Keys that each sequence has stored.
    caches : callable
        Number of a layer -> keys, values and further arguments for `cuflash.decode`.

    Attributes
    ----------
    tokens : array of int64, shape (B,)
    noise : array, shape (vocabulary,)
        The next token is the index of the largest of logits + noise.
    logits : array, shape (B, vocabulary)
        Those of the last replay.
    """

    def __init__(self, decoder: Decoder, lengths: Array, caches: Callable[[int], tuple[Array, Array, dict[str, Any]]]) -> None:
        cupy: Any = decoder.xp
        self._decoder, self._lengths, self._caches = CapturableDecoder(decoder), lengths, caches
        self.tokens, self.noise = cupy.zeros(len(lengths), "int64"), cupy.zeros(len(decoder.weights["token_embd.weight"]))
        cupy.cuda.get_current_stream().synchronize()
        # A pool of its own: no other array may get memory that the graph writes to at each replay.
        self._pool = cupy.cuda.MemoryPool()
        with cupy.cuda.Stream(non_blocking=True) as stream, cupy.cuda.using_allocator(self._pool.malloc):
            self._step()  # compiles and loads, which a capture cannot
            stream.begin_capture()
            self.logits = self._step()
            self._graph = stream.end_capture()
            stream.synchronize()

    def replay(self) -> np.ndarray:
        """Feed `tokens`; returns the next ones, (B,)."""
        self._graph.launch()
        return self.tokens.get()

    def _step(self) -> Array:
        logits = self._decoder.forward(self.tokens, slice(0, 1), self._attention, slice(None))
        self._lengths += 1
        self.tokens[...] = (logits + self.noise).argmax(axis=1)
        return logits

    def _attention(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        keys, values, options = self._caches(layer)
        layout = options.get("layout", "BSHD")
        q, k, v = (to_layout(x[0, :, None].astype(keys.dtype, copy=False), layout) for x in (q, k, v))  # one new token each
        out = cuflash.decode(q, keys, values, self._lengths, k_new=k, v_new=v, rope=self._decoder.rope, **options)
        return to_layout(out, layout).astype("float32", copy=False)


class DenseTokenGraph(TokenGraph):
    """A `TokenGraph` of one sequence over what a `DenseAttention` stores, whose `length` counts on."""

    def __init__(self, decoder: Decoder, attend: DenseAttention) -> None:
        self._attend, self._left = attend, (-1, -1)  # the token and the length that the last replay left
        lengths, options = decoder.xp.full(1, attend.length, "int32"), {"layout": attend.layout}
        super().__init__(decoder, lengths, lambda layer: (attend.keys[layer], attend.values[layer], options))

    def __call__(self, token: int, noise: np.ndarray | None = None) -> int:
        """Feed `token`; returns the next one, chosen with this noise or (None) with that of the last call."""
        attend = self._attend
        if attend.length == attend.capacity:
            raise ValueError(f"cache: {attend.length} + 1 positions, room for {attend.capacity}")
        if self._left != (token, attend.length):
            self.tokens.fill(token)
            self._lengths.fill(attend.length)
        if noise is not None:
            self.noise.set(noise)
        (following,) = self.replay().tolist()
        attend.advance(1)
        self._left = following, attend.length
        return following

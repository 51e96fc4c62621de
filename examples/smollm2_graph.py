"""Decoding on a GPU from one CUDA graph: a token's whole way through the model, captured once and replayed for every token."""

from __future__ import annotations

from typing import Any

from smollm2_attention import DenseAttention, to_layout
from smollm2_model import Array, Decoder

import cuflash

# CuPy takes no cuBLAS call into a capture.  For one token a product reads each weight once, so that a plain kernel is as fast.
KERNELS = r"""
__device__ float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
    return x;
}

// y (rows) = W (rows, 4 * quads) x; one warp per row.
extern "C" __global__ void matvec(const float4* W, const float4* x, float* y, int rows, int quads) {
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    float sum = 0;
    for (int i = threadIdx.x; i < quads; i += 32) {
        float4 a = W[(size_t)row * quads + i], b = x[i];
        sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) y[row] = sum;
}

// y (size) = x / sqrt(mean(x * x) + eps) * weight; one block of one warp.
extern "C" __global__ void rms_norm(const float* x, const float* weight, float* y, int size, float eps) {
    float sum = 0;
    for (int i = threadIdx.x; i < size; i += 32) sum += x[i] * x[i];
    float scale = rsqrtf(warp_sum(sum) / size + eps);
    for (int i = threadIdx.x; i < size; i += 32) y[i] = x[i] * scale * weight[i];
}
"""
ROWS_PER_BLOCK = 4


class OneTokenDecoder(Decoder):
    """The model for a single token, of calls that a CUDA graph can hold; positions are left to the attention."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.config, decoder.weights)
        module = self.xp.RawModule(code=KERNELS)
        self._matvec, self._rms_norm = module.get_function("matvec"), module.get_function("rms_norm")
        self._swiglu = self.xp.fuse(self._swiglu)
        self.rope = self._cos[:, 0], self._sin[:, 0], "interleaved"

    def _linear(self, x: Array, name: str) -> Array:
        weight = self.weights[name + ".weight"]
        rows, columns = weight.shape
        y = self.xp.empty((1, rows), weight.dtype)
        blocks = -(-rows // ROWS_PER_BLOCK)
        self._matvec((blocks,), (32, ROWS_PER_BLOCK), (weight, x, y, self.xp.int32(rows), self.xp.int32(columns // 4)))
        return y

    def _norm(self, x: Array, name: str) -> Array:
        y, eps = self.xp.empty_like(x), self.xp.float32(self.config.norm_eps)
        self._rms_norm((1,), (32,), (x, self.weights[name + ".weight"], y, self.xp.int32(x.size), eps))
        return y

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        return x


class TokenGraph:
    """The step from one token to the next: embedding, all layers, logits and the choice, as one captured CUDA graph.

    The token, the number of stored keys and the random numbers lie on the GPU.  A replay reads the token, appends its keys
    and values, and leaves the next token and the longer length for the replay after it.

    Parameters
    ----------
    decoder : Decoder
        Weights in float32 as CuPy arrays.
    attend : DenseAttention
        Its keys and values are read and written in place; `attend.length` counts on.

    Attributes
    ----------
    logits : array, shape (1, vocabulary)
        Those of the last replay.
    """

    def __init__(self, decoder: Decoder, attend: DenseAttention) -> None:
        cupy: Any = decoder.xp
        self._attend, self._decoder = attend, OneTokenDecoder(decoder)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._token, self._lengths = cupy.zeros(1, "int64"), cupy.full(1, attend.length, "int32")
        self._noise = cupy.zeros(len(decoder.weights["token_embd.weight"]))
        self._left = (None, None)  # the token and the length that the last replay left
        cupy.cuda.get_current_stream().synchronize()
        # A pool of its own: no other array may get memory that the graph writes to at each replay.
        self._pool = cupy.cuda.MemoryPool()
        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            self._step()  # compiles and loads, which a capture cannot
            self._stream.begin_capture()
            self.logits = self._step()
            self._graph = self._stream.end_capture()

    def __call__(self, token: int, noise: Array | None = None) -> int:
        """Feed `token`; returns the index of the largest of logits + noise (NumPy, one per logit; None: that of the last call)."""
        attend, stream = self._attend, self._stream
        if attend.length == attend.capacity:
            raise ValueError(f"cache: {attend.length} + 1 positions, room for {attend.capacity}")
        with stream:
            if self._left != (token, attend.length):
                self._token.fill(token)
                self._lengths.fill(attend.length)
            if noise is not None:
                self._noise.set(noise)
            self._graph.launch()
            attend.advance(1)
            self._left = int(self._token.get()[0]), attend.length
        return self._left[0]

    def _step(self) -> Array:
        logits = self._decoder.forward(self._token, slice(0, 1), self._attention, slice(None))
        self._lengths += 1
        self._token[...] = (logits + self._noise).argmax()
        return logits

    def _attention(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        attend = self._attend
        q, k, v = (to_layout(x, attend.layout) for x in (q, k, v))
        options = {"rope": self._decoder.rope, "layout": attend.layout}
        out = cuflash.decode(q, attend.keys[layer], attend.values[layer], self._lengths, k_new=k, v_new=v, **options)
        return to_layout(out, attend.layout)

"""Decoding on a GPU from one CUDA graph: a token's whole way through the model, captured once and replayed for every token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from smollm2_attention import DenseAttention, to_layout
from smollm2_model import Array, Decoder

import cuflash

# CuPy takes no cuBLAS call into a capture.  For a few tokens a product is reading the weights once, which a plain kernel can do.
KERNELS = r"""
__device__ float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
    return x;
}

__device__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

const int WARPS = 4;  // of a block

// y (tokens, rows) = add + rms_norm(x) W^T, for x (tokens, 4 * quads) and W (rows, 4 * quads); a warp for each row of W, which it
// reads once for TOKENS tokens.  Without gain x is taken as it is; add (tokens, rows) may be null.
template <int TOKENS>
__global__ void linear(const float4* W, const float4* x, const float4* gain, const float* add, float* y, int tokens, int rows, int quads,
                       float eps) {
    int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    for (int token = 0; token < tokens; token += TOKENS) {
        float sums[TOKENS] = {}, squares[TOKENS] = {};
        for (int i = lane; i < quads; i += 32) {
            float4 w = W[(long long)row * quads + i];
            if (gain) w = {w.x * gain[i].x, w.y * gain[i].y, w.z * gain[i].z, w.w * gain[i].w};
            for (int t = 0; t < TOKENS; ++t) {
                float4 a = x[min(token + t, tokens - 1) * quads + i];
                sums[t] += dot(w, a);
                squares[t] += dot(a, a);
            }
        }
        for (int t = 0; t < TOKENS; ++t) {
            float scale = gain ? rsqrtf(warp_sum(squares[t]) / (4 * quads) + eps) : 1, sum = warp_sum(sums[t]) * scale;
            long long place = (long long)(token + t) * rows + row;
            if (lane == 0 && token + t < tokens) y[place] = add ? add[place] + sum : sum;
        }
    }
}
"""
WARPS = 4


class FewTokens:
    """The model for one new token in each of a few sequences, of calls that a CUDA graph can hold: nine kernels a layer."""

    def __init__(self, decoder: Decoder) -> None:
        xp, self.config, self.rope = decoder.xp, decoder.config, (*decoder.rotary_tables(), "interleaved")
        names = ["linear<1>", "linear<8>"]
        module = xp.RawModule(code=KERNELS, options=("--std=c++17",), name_expressions=names)
        self._one, self._more = map(module.get_function, names)
        self._empty, self._swiglu = xp.empty, xp.fuse(decoder.swiglu)
        self._weights = {name.removesuffix(".weight"): array for name, array in decoder.weights.items()}
        for layer in range(self.config.layers):  # what is multiplied by the same vectors, in one product
            for joined, parts in (("attn_qkv", ("attn_q", "attn_k", "attn_v")), ("ffn_gate_up", ("ffn_gate", "ffn_up"))):
                self._weights[f"blk.{layer}.{joined}"] = xp.concatenate([self._weights[f"blk.{layer}.{part}"] for part in parts])

    def __call__(self, tokens: Array, attend: Callable[[int, Array], Array]) -> Array:
        """Logits (B, vocabulary) after tokens (B,); `attend` takes each layer's (B, Hq + 2 Hkv, D) and returns (B, Hq, D)."""
        count, size = len(tokens), self.config.head_size
        x = self._weights["token_embd"][tokens]
        for layer in range(self.config.layers):
            block = f"blk.{layer}."
            qkv = self._linear(x, block + "attn_qkv", norm=block + "attn_norm")
            out = attend(layer, qkv.reshape(count, -1, size))
            x = self._linear(out.reshape(count, -1), block + "attn_output", add=x)
            gate_up = self._linear(x, block + "ffn_gate_up", norm=block + "ffn_norm").reshape(count, 2, -1)
            x = self._linear(self._swiglu(gate_up[:, 0], gate_up[:, 1]), block + "ffn_down", add=x)
        return self._linear(x, "token_embd", norm="output_norm")

    def _linear(self, x: Array, name: str, norm: str | None = None, add: Array | None = None) -> Array:
        weight = self._weights[name]
        gain = None if norm is None else self._weights[norm]
        sizes = tokens, rows, _ = len(x), len(weight), weight.shape[1] // 4
        y = self._empty((tokens, rows), "float32")
        arguments = weight, x, gain, add, y, *map(np.int32, sizes), np.float32(self.config.norm_eps)
        (self._one if tokens == 1 else self._more)((-(-rows // WARPS),), (32 * WARPS,), arguments)
        return y


few_tokens = functools.lru_cache(maxsize=1)(FewTokens)  # the joined weights, once for all graphs of a model


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
        self._model, self._lengths, self._caches = few_tokens(decoder), lengths, caches
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
        logits = self._model(self.tokens, self._attention)
        self._lengths += 1
        self.tokens[...] = (logits + self.noise).argmax(axis=1)
        return logits

    def _attention(self, layer: int, qkv: Array) -> Array:
        keys, values, options = self._caches(layer)
        config, layout = self._model.config, options.get("layout", "BSHD")
        first, second = config.query_heads, config.query_heads + config.kv_heads
        qkv = qkv[:, None].astype(keys.dtype, copy=False)  # (B, 1, heads, D): one new token in each sequence
        q, k, v = (to_layout(x, layout) for x in (qkv[:, :, :first], qkv[:, :, first:second], qkv[:, :, second:]))
        out = cuflash.decode(q, keys, values, self._lengths, k_new=k, v_new=v, rope=self._model.rope, **options)
        return to_layout(out, layout)[:, 0].astype("float32", copy=False)


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

"""A llama-style decoder in plain array code: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Nothing here names an array library: `xp` is the namespace of the weights, so NumPy and CuPy arrays run the same
lines.  Attention itself, and the memory of keys and values, are handed in (see smollm2_attention.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from smollm2_weights import Config

Array = Any  # an ndarray of NumPy, CuPy, ...


def array_namespace(array: Array) -> Any:
    """The module whose functions work on `array`: numpy for a NumPy array, cupy for a CuPy array."""
    return sys.modules[type(array).__module__.partition(".")[0]]


class Attend(Protocol):
    """Attention with memory: stores this layer's new keys and values, and attends over all stored so far."""

    length: int  # keys stored before the current chunk

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """q (B, S, Hq, D) and k, v (B, S, Hkv, D), S new positions -> (B, S, Hq, D)."""

    def advance(self, count: int) -> None:
        """The chunk of `count` positions has passed every layer."""


class Float64Weights(Mapping[str, Array]):
    """The same weights in float64, converted at each use: a forward pass to measure float32 ones by."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Array:
        return self._weights[name].astype("float64")

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class Decoder:
    """The model: token ids in, logits out."""

    def __init__(self, config: Config, weights: Mapping[str, Array]) -> None:
        self.config = config
        self.weights = weights
        self.xp = array_namespace(weights["token_embd.weight"])
        self._cos, self._sin = (table[:, None] for table in self.rotary_tables())

    def __call__(self, tokens: list[int], attend: Attend, *, every_position: bool = False) -> Array:
        """Feed the next tokens of one sequence.

        Parameters
        ----------
        tokens : list of int
            S ids that follow what `attend` has stored already.
        attend : Attend
            Attention and its stored keys and values; advanced by S.
        every_position : bool
            Logits after each token, or (the default) after the last one only.

        Returns
        -------
        array
            Logits (S, vocabulary), or (1, vocabulary).
        """
        start, count = attend.length, len(tokens)
        if not 0 < count <= self.config.context - start:
            raise ValueError(f"tokens: {count} after {start} stored ones; the model's context is {self.config.context}")
        logits = self.forward(
            self.xp.asarray(tokens), slice(start, start + count), attend, slice(None if every_position else -1, None)
        )
        attend.advance(count)
        return logits

    def forward(self, tokens: Array, positions: Array, attend: Attend, rows: Array) -> Array:
        """All layers, for tokens of one sequence or of several, as `attend` takes them; it is not advanced.

        Parameters
        ----------
        tokens : array of int, shape (N,)
            Ids.
        positions : array of int, shape (N,), or slice
            Where each stands in its sequence.
        attend : Attend
            Is given q, k and v as (1, N, heads, D).
        rows : array of int or slice
            The tokens after which logits are wanted.

        Returns
        -------
        array
            Logits (number of rows, vocabulary).
        """
        embedding = self.weights["token_embd.weight"]
        x = embedding[tokens]  # (N, width)
        cos, sin = self._cos[positions], self._sin[positions]
        for layer in range(self.config.layers):
            x = x + self._attention_block(layer, self._norm(x, f"blk.{layer}.attn_norm"), cos, sin, attend)
            x = x + self._feed_forward(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
        return self._linear(self._norm(x[rows], "output_norm"), "token_embd")  # input and output embeddings are tied

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[name + ".weight"].T

    def _norm(self, x: Array, name: str) -> Array:
        mean_square = self.xp.mean(x * x, axis=-1, keepdims=True)
        return x / self.xp.sqrt(mean_square + self.config.norm_eps) * self.weights[name + ".weight"]

    def _attention_block(self, layer: int, x: Array, cos: Array, sin: Array, attend: Attend) -> Array:
        c, block = self.config, f"blk.{layer}.attn_"
        count = x.shape[0]
        q = self._linear(x, block + "q").reshape(1, count, c.query_heads, c.head_size)
        k = self._linear(x, block + "k").reshape(1, count, c.kv_heads, c.head_size)
        v = self._linear(x, block + "v").reshape(1, count, c.kv_heads, c.head_size)
        out = attend(layer, self._rotate(q, cos, sin), self._rotate(k, cos, sin), v)
        return self._linear(out.reshape(count, c.query_heads * c.head_size), block + "output")

    def _feed_forward(self, layer: int, x: Array) -> Array:
        gate, up = (self._linear(x, f"blk.{layer}.ffn_{name}") for name in ("gate", "up"))
        return self._linear(self.swiglu(gate, up), f"blk.{layer}.ffn_down")

    def swiglu(self, gate: Array, up: Array) -> Array:
        """gate * sigmoid(gate) * up, without an exp that overflows."""
        return gate * (0.5 + 0.5 * self.xp.tanh(0.5 * gate)) * up

    def rotary_tables(self) -> tuple[Array, Array]:
        """cos and sin, (context, D/2): the angle of each position and pair, computed in float64."""
        xp, c = self.xp, self.config
        pairs = xp.arange(c.head_size // 2, dtype=xp.float64)
        angles = xp.arange(c.context, dtype=xp.float64)[:, None] * c.rope_base ** (-2 * pairs / c.head_size)
        return xp.cos(angles).astype(xp.float32), xp.sin(angles).astype(xp.float32)

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotary positions; GGUF stores Q and K rows so that a pair is two neighbours (2i, 2i + 1)."""
        even, odd = x[..., 0::2], x[..., 1::2]
        out = self.xp.empty_like(x)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out

"""The layers of a small transformer, written by hand for NumPy and CuPy: each has a forward and a backward pass.

`forward` keeps what `backward` needs; `backward` takes the gradient of the loss by the output, sets the gradients of the
parameters and returns the gradient by the input.  `xp` is the array library, numpy or cupy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

import cuflash

Array = Any  # an ndarray of xp
NORM_EPS = 1e-5


class Parameter:
    def __init__(self, value: Array) -> None:
        self.value = value
        self.gradient: Array = None


class Layer:
    """Something with parameters, its own or those of the layers inside."""

    def parameters(self) -> Iterator[Parameter]:
        for member in vars(self).values():
            for part in member if isinstance(member, list) else [member]:
                if isinstance(part, Parameter):
                    yield part
                elif isinstance(part, Layer):
                    yield from part.parameters()


class Linear(Layer):
    """y = x W, without a bias.

    A bias of the keys would shift all logits of a row alike, which softmax cancels: its gradient is nothing but rounding, and
    Adam, which divides by the size of the gradient, would make whole steps of it.
    """

    def __init__(self, weight: Array) -> None:
        self.weight = Parameter(weight)  # (inputs, outputs)

    def forward(self, x: Array) -> Array:
        self.x = x
        return x @ self.weight.value

    def backward(self, dy: Array) -> Array:
        inputs, outputs = self.weight.value.shape
        self.weight.gradient = self.x.reshape(-1, inputs).T @ dy.reshape(-1, outputs)
        return dy @ self.weight.value.T


class Embedding(Layer):
    """A vector for each token."""

    def __init__(self, xp: Any, table: Array) -> None:
        self.xp = xp
        self.table = Parameter(table)  # (vocabulary, width)

    def forward(self, ids: Array) -> Array:
        self.ids = ids  # (B, S)
        return self.table.value[ids]

    def backward(self, dy: Array) -> None:
        vocabulary, width = self.table.value.shape
        # A product with 0 and 1 sums the rows of each token in an order that does not change, which atomics on a GPU would.
        chosen = (self.ids.reshape(-1) == self.xp.arange(vocabulary)[:, None]).astype(dy.dtype)
        self.table.gradient = chosen @ dy.reshape(-1, width)


class Rotary(Layer):
    """Positions as angles (Su et al.): elements i and i + D/2 of a head are turned by position * base^(-2 i / D)."""

    def __init__(self, xp: Any, context: int, head_size: int, dtype: Any, base: float = 10000.0) -> None:
        self.xp = xp
        angles = np.arange(context)[:, None] * base ** (-2 * np.arange(head_size // 2) / head_size)
        self.cos, self.sin = (xp.asarray(table[:, None].astype(dtype)) for table in (np.cos(angles), np.sin(angles)))

    def forward(self, x: Array) -> Array:
        """x is (B, S, H, D)."""
        return self._turn(x, 1)

    def backward(self, dy: Array) -> Array:
        return self._turn(dy, -1)  # the transpose of a rotation turns back

    def _turn(self, x: Array, sign: int) -> Array:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        cos, sin = self.cos[: x.shape[1]], sign * self.sin[: x.shape[1]]
        return self.xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class RMSNorm(Layer):
    """y = gain x / sqrt(mean(x^2) + eps), the mean over the last axis."""

    def __init__(self, xp: Any, gain: Array) -> None:
        self.xp = xp
        self.gain = Parameter(gain)

    def forward(self, x: Array) -> Array:
        self.inverse = 1 / self.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + NORM_EPS)
        self.normed = x * self.inverse
        return self.normed * self.gain.value

    def backward(self, dy: Array) -> Array:
        self.gain.gradient = (dy * self.normed).reshape(-1, dy.shape[-1]).sum(axis=0)
        dnormed = dy * self.gain.value
        along = (dnormed * self.normed).mean(axis=-1, keepdims=True)  # what only changes the length of x is lost
        return (dnormed - self.normed * along) * self.inverse


class SiLU(Layer):
    """y = x sigmoid(x), without an exp that overflows."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def forward(self, x: Array) -> Array:
        self.x, self.sigmoid = x, 0.5 + 0.5 * self.xp.tanh(0.5 * x)
        return x * self.sigmoid

    def backward(self, dy: Array) -> Array:
        return dy * self.sigmoid * (1 + self.x * (1 - self.sigmoid))


class CuflashAttention:
    """Causal attention in tiles: keeps q, k, v, out and one number a row, and computes the weights again to go backward."""

    def __init__(self, xp: Any) -> None:
        pass

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        """Each (B, S, H, D), as the result."""
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        self.kept = q, k, v, out, lse
        return out

    def backward(self, dout: Array) -> tuple[Array, Array, Array]:
        """dq, dk, dv."""
        gradients = cuflash.attention_backward(dout, *self.kept, causal=True)
        return gradients.dq, gradients.dk, gradients.dv


class NaiveAttention:
    """The same from the formula: the (B, H, S, S) weights are computed whole, and kept to go backward."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # (B, H, S, D)
        logits = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
        visible = self.xp.tri(q.shape[2], dtype=bool)
        logits = self.xp.where(visible, logits, logits.dtype.type(-math.inf))
        weights = self.xp.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        self.kept = q, k, v, weights
        return (weights @ v).swapaxes(1, 2)

    def backward(self, dout: Array) -> tuple[Array, Array, Array]:
        q, k, v, weights = self.kept
        dout = dout.swapaxes(1, 2)
        dweights = dout @ v.swapaxes(2, 3)
        dlogits = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))
        dlogits /= math.sqrt(q.shape[-1])
        gradients = dlogits @ k, dlogits.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dout
        return tuple(x.swapaxes(1, 2) for x in gradients)


ATTENTION = {"cuflash": CuflashAttention, "naive": NaiveAttention}


class SelfAttention(Layer):
    """Queries, keys and values of x from one product, attention, and a product with its result."""

    def __init__(
        self, xp: Any, attention: CuflashAttention | NaiveAttention, rotary: Rotary, heads: int, qkv: Array, output: Array
    ) -> None:
        self.xp, self.attention, self.rotary, self.heads = xp, attention, rotary, heads
        self.qkv, self.output = Linear(qkv), Linear(output)  # (width, 3 width), (width, width)

    def forward(self, x: Array) -> Array:
        batch, length, width = x.shape
        qkv = self.qkv.forward(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, :, part] for part in range(3))
        out = self.attention.forward(self.rotary.forward(q), self.rotary.forward(k), v)
        return self.output.forward(out.reshape(x.shape))

    def backward(self, dy: Array) -> Array:
        batch, length, width = dy.shape
        dout = self.output.backward(dy).reshape(batch, length, self.heads, width // self.heads)
        dq, dk, dv = self.attention.backward(dout)
        dqkv = self.xp.stack([self.rotary.backward(dq), self.rotary.backward(dk), dv], axis=2)
        return self.qkv.backward(dqkv.reshape(batch, length, 3 * width))


class Chain(Layer):
    """Layers one after the other; with `residual`, what comes in is added to the result."""

    def __init__(self, *layers: Any, residual: bool = False) -> None:
        self.layers, self.residual = list(layers), residual

    def forward(self, x: Array) -> Array:
        y = x
        for layer in self.layers:
            y = layer.forward(y)
        return x + y if self.residual else y

    def backward(self, dy: Array) -> Array:
        dx = dy
        for layer in reversed(self.layers):
            dx = layer.backward(dx)
        return dx + dy if self.residual else dx


class CrossEntropy:
    """Mean of -log softmax(logits)[target], in nats."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def forward(self, logits: Array, targets: Array) -> Array:
        """Logits (B, S, vocabulary) and targets (B, S) to one number."""
        xp = self.xp
        shifted = (logits - logits.max(axis=-1, keepdims=True)).reshape(-1, logits.shape[-1])
        exponentials = xp.exp(shifted)
        sums = exponentials.sum(axis=-1)
        self.shape, self.softmax = logits.shape, exponentials / sums[:, None]
        self.at = xp.arange(targets.size), targets.reshape(-1)
        return (xp.log(sums) - shifted[self.at]).mean()

    def backward(self) -> Array:
        dlogits = self.softmax.copy()
        dlogits[self.at] -= 1
        return dlogits.reshape(self.shape) / len(dlogits)


class AdamW:
    """Adam with weight decay apart from the gradient (Loshchilov and Hutter); only matrices decay."""

    def __init__(self, xp: Any, parameters: list[Parameter], betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.01) -> None:
        self.xp, self.betas, self.decay = xp, betas, decay
        self.states = [(p, xp.zeros_like(p.value), xp.zeros_like(p.value)) for p in parameters]
        self.steps = 0

    def step(self, rate: float, eps: float = 1e-8) -> None:
        self.steps += 1
        first, second = self.betas
        for parameter, mean, square in self.states:
            gradient = parameter.gradient
            mean += (1 - first) * (gradient - mean)
            square += (1 - second) * (gradient * gradient - square)
            unbiased = self.xp.sqrt(square / (1 - second**self.steps)) + eps
            if parameter.value.ndim > 1:
                parameter.value *= 1 - rate * self.decay
            parameter.value -= rate / (1 - first**self.steps) * mean / unbiased


def transformer(
    xp: Any, attention: str, vocabulary: int, context: int, layers: int, heads: int, width: int, seed: int, dtype: Any = np.float32
) -> Chain:
    """A decoder that normalises before each part: ids (B, S) to logits (B, S, vocabulary).

    Parameters
    ----------
    xp : module
        numpy or cupy.
    attention : {"cuflash", "naive"}
        Changes nothing else: weights are those of the seed.
    vocabulary, context, layers, heads, width, seed : int
        `width` is a multiple of twice `heads`.
    dtype : dtype
        float32 or float64.
    """
    rng = np.random.default_rng(seed)

    def matrix(inputs: int, outputs: int, deviation: float) -> Array:
        return xp.asarray((deviation * rng.standard_normal((inputs, outputs))).astype(dtype))

    def linear(inputs: int, outputs: int, gain: float = 1.0) -> Array:
        return matrix(inputs, outputs, gain / math.sqrt(inputs))

    def norm() -> RMSNorm:
        return RMSNorm(xp, xp.ones(width, dtype))

    rotary = Rotary(xp, context, width // heads, dtype)
    into_sum = 1 / math.sqrt(2 * layers)  # so that the sum of all parts does not grow with their number
    chain: list[Any] = [Embedding(xp, matrix(vocabulary, width, 1.0))]
    for _ in range(layers):
        attend = SelfAttention(xp, ATTENTION[attention](xp), rotary, heads, linear(width, 3 * width), linear(width, width, into_sum))
        feed = Linear(linear(width, 4 * width)), SiLU(xp), Linear(linear(4 * width, width, into_sum))
        chain += [Chain(norm(), attend, residual=True), Chain(norm(), *feed, residual=True)]
    return Chain(*chain, norm(), Linear(linear(width, vocabulary, 0.1)))  # small logits: the first loss is near log(vocabulary)

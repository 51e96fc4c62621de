"""A loaded model that answers: choosing tokens, what they cost, and the check against N x N attention."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import smollm2_attention as attention
from smollm2_graph import DenseTokenGraph
from smollm2_memory import AttentionMemory
from smollm2_model import Array, Attend, Decoder, Float64Weights
from smollm2_tokenizer import ChatTokenizer

CHECK_STEPS = 16
MEASURABLE_SCORES = 16 << 20  # bytes of N x N scores up to which that form is run as well, to measure it


@dataclass
class Timing:
    """What was fed to the model in how long; the first token of an answer comes out of the prefill."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


@dataclass
class Chat:
    """A loaded model with the choices of the command line."""

    options: argparse.Namespace
    decoder: Decoder
    tokenizer: ChatTokenizer
    memory: AttentionMemory = field(init=False)
    _captured: tuple[Attend, DenseTokenGraph] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.memory = AttentionMemory(self.decoder.xp)

    def attend(self, capacity: int, kind: str | None = None) -> Attend:
        """Fresh attention with room for `capacity` positions."""
        kind = kind or ("paged" if self.options.paged else self.options.attention)
        made = {
            "cuflash": attention.DenseAttention,
            "numpy": attention.MaterialisedAttention,
            "paged": attention.PagedAttention,
        }[kind]
        options = self.options
        return made(self.decoder.config, capacity, self.decoder.xp, options.layout, self.memory, options.kv_cache_dtype)

    def generate(self, history: list[int], attend: Attend, timing: Timing) -> Iterator[int]:
        """Feed what `attend` has not seen of `history`, then choose, append and yield tokens until the answer ends."""
        vocabulary = len(self.decoder.weights["token_embd.weight"])
        noise, graph = noises(self.options.temperature, self.options.seed, vocabulary), self.token_graph(attend)
        for step in range(min(self.options.max_tokens, self.decoder.config.context - len(history))):
            new = history[attend.length :]
            start = time.perf_counter()
            if step and graph:
                token = graph(*new, next(noise))
            else:
                token = choose(on_host(self.decoder(new, attend)[-1]), next(noise))
            seconds = time.perf_counter() - start
            if step == 0:
                timing.prefill_tokens, timing.prefill_seconds = len(new), seconds
            else:
                timing.decode_tokens += 1
                timing.decode_seconds += seconds
            history.append(token)
            if token in self.tokenizer.stop_ids:
                return
            yield token

    def token_graph(self, attend: Attend) -> DenseTokenGraph | None:
        """The graph that decodes with `attend` on a GPU; captured at the first call."""
        if self.decoder.xp.__name__ != "cupy" or type(attend) is not attention.DenseAttention:
            return None
        if self._captured is None or self._captured[0] is not attend:
            self._captured = attend, DenseTokenGraph(self.decoder, attend)
        return self._captured[1]

    def feed(self, token: int, attend: Attend) -> np.ndarray:
        """Logits (1, vocabulary) after one more token, computed as `generate` does."""
        graph = self.token_graph(attend)
        if graph is None:
            return on_host(self.decoder([token], attend))
        graph(token)
        return on_host(graph.logits)

    def memory_line(self, rows: int, columns: int) -> str:
        """The attention calls' peak beside that of the N x N form for a prefill of rows x columns scores."""
        line = f"attention's peak memory, its output included: {mebibytes(self.memory.peak)}"
        if self.options.attention == "numpy":
            return line
        heads = self.decoder.config.query_heads
        scores = 4 * heads * rows * columns
        shape = f"({heads} heads x {rows} x {columns})"
        if scores <= MEASURABLE_SCORES:
            return f"{line}; of N x N attention {shape}: {mebibytes(self._materialised_peak(rows, columns))}"
        return f"{line}; N x N scores {shape}, without anything beside them: {mebibytes(scores)}"

    def _materialised_peak(self, rows: int, columns: int) -> int:
        config, xp = replace(self.decoder.config, layers=1), self.decoder.xp
        memory = AttentionMemory(xp)
        attend = attention.MaterialisedAttention(config, columns, xp, self.options.layout, memory)
        attend.advance(columns - rows)
        q, k, v = (
            xp.zeros((1, rows, heads, config.head_size), xp.float32)
            for heads in (config.query_heads, config.kv_heads, config.kv_heads)
        )
        attend(0, q, k, v)
        return memory.peak


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def on_host(array: Array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def noises(temperature: float, seed: int | None, size: int) -> Iterator[np.ndarray | None]:
    """What to add to the logits of each token: the index of the largest sum is a sample from softmax(logits / temperature)."""
    if temperature == 0:
        yield from itertools.repeat(None)
    random = np.random.default_rng(seed)
    while True:
        yield temperature * random.gumbel(size=size)


def choose(logits: np.ndarray, noise: np.ndarray | None) -> int:
    return int((logits if noise is None else logits + noise).argmax())


def check(chat: Chat, ids: list[int]) -> int:
    """Compare the logits with those of N x N attention, and both with a float64 forward pass; 1 if they disagree.

    Rounding anywhere in 30 layers of float32 moves logits of size 40 by about 1e-4, whichever attention is used, so the
    measure is the error of N x N attention: cuflash may have twice that.
    """
    decoder, model = chat.decoder, chat.decoder.config
    kinds = ("paged" if chat.options.paged else "cuflash", "numpy")
    capacity = min(len(ids) + CHECK_STEPS, model.context)
    attends = [chat.attend(capacity, kind) for kind in kinds]
    logits = [[on_host(decoder(ids, attend, every_position=True))] for attend in attends]
    fed = list(ids)
    while len(fed) < capacity and (token := int(logits[1][-1][-1].argmax())) not in chat.tokenizer.stop_ids:
        fed.append(token)
        for rows, attend in zip(logits, attends, strict=True):
            rows.append(chat.feed(token, attend))
    ours, naive = (np.concatenate(rows) for rows in logits)
    exact = Decoder(model, Float64Weights(decoder.weights))
    truth = on_host(exact(fed, attention.Float64Attention(model, len(fed), decoder.xp), every_position=True))

    error, naive_error, apart = (float(np.abs(a - b).max()) for a, b in ((ours, truth), (naive, truth), (ours, naive)))
    passed = error <= 2 * naive_error + 2 * float(np.finfo(np.float32).eps) * float(np.abs(truth).max())
    last = len(ids) - 1
    best = int(ours[last].argmax())
    log_probability = ours[last, best] - np.logaddexp.reduce(ours[last].astype(np.float64))
    print(f"next token: {chat.tokenizer.decode([best])!r}, log-probability {log_probability:.3f}")
    print(f"logits (up to {np.abs(truth).max():.1f}) after {len(ids)} prompt and {len(fed) - len(ids)} decoded tokens:")
    print(f"  cuflash from N x N attention   {apart:.1e}; next token {np.abs(ours[last] - naive[last]).max():.1e}")
    print(f"  N x N from float64             {naive_error:.1e}")
    print(
        f"  cuflash from float64           {error:.1e}, allowed twice that of N x N: " + ("ok" if passed else "FAILED")
    )
    return 0 if passed else 1

"""Continuous batching: in every step, all sequences that decode and a part of a prompt go through the model together.

Keys and values of all sequences lie in one `cuflash.PagedKVCache`.  A request that begins like another shares its pages
(`fork`, copied on write).  When pages run out, the request that was taken in last gives its own back and waits to be computed anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from smollm2_graph import TokenGraph
from smollm2_model import Array, Decoder, array_namespace

import cuflash


@dataclass(eq=False)
class Request:
    """A prompt to be continued, and what became of it.

    Attributes
    ----------
    prompt, output : list of int
        Ids of the tokens.
    max_tokens : int
        Longest output; it ends earlier with a stop token, which is not part of it.
    arrival : float
        Seconds on the engine's clock.
    token_times : list of float
        When each token was there, the stop token included.
    sequence : int or None
        Id in the cache while the request runs.
    stored : int
        Tokens, of prompt and output, whose keys and values are in the cache.
    shared : int
        Tokens of these that another request had computed.
    """

    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0
    output: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    sequence: int | None = None
    stored: int = 0
    shared: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def left(self) -> int:
        """Tokens to be computed before the next one can be chosen."""
        return len(self.prompt) + len(self.output) - self.stored


class Engine:
    """A model that continues many requests at a time; the likeliest token each time.

    Parameters
    ----------
    decoder : Decoder
        Its arrays say where it all runs: NumPy, or CuPy on a GPU.
    stop_ids : collection of int
        Tokens that end an output.
    num_pages, page_size : int
        The cache: pages, and tokens a page.
    max_num_seqs : int
        Most requests that run at a time; the others wait.
    max_num_batched_tokens : int
        Most tokens a step; those who decode come first, prompts take what is left.
    kv_cache_dtype : str
        Of keys and values, and of attention.
    clock : callable
        Seconds now.
    """

    def __init__(
        self, decoder: Decoder, stop_ids: Sequence[int] | frozenset[int], *, num_pages: int = 256, page_size: int = 16,
        max_num_seqs: int = 8, max_num_batched_tokens: int = 128, kv_cache_dtype: str = "float32",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(f"max_num_seqs: {max_num_seqs}; it must be from 1 to max_num_batched_tokens, {max_num_batched_tokens}")
        self.decoder, self.stop_ids, self.clock = decoder, stop_ids, clock
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        config = decoder.config
        shape = (config.layers, num_pages, page_size, config.kv_heads, config.head_size)
        self.cache = cuflash.PagedKVCache.from_pages(*(decoder.xp.zeros(shape, kv_cache_dtype) for _ in range(2)))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they were taken in
        self.prefixes: list[Request] = []
        self.preemptions, self.most_pages = 0, 0
        self._graph = None
        if decoder.xp.__name__ == "cupy":
            columns = min(num_pages, self._pages(config.context))
            self._batch = self.cache.batch([], max_pages=columns, max_sequences=max_num_seqs, reserved=1)
            self._graph = TokenGraph(decoder, self._batch.kv_lengths, self._pages_of_layer)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def keep_prefix(self, tokens: list[int]) -> None:
        """Compute tokens that requests will begin with, and keep them in the cache.

        Raises
        ------
        ValueError
            More tokens than the context or the cache, or so many that a request already submitted would never find room beside them.
        CacheFullError
            Too few pages are free now.  As after any other error, none is kept.
        """
        if len(tokens) > self.decoder.config.context:
            raise ValueError(f"tokens: {len(tokens)} tokens of prefix; the context is {self.decoder.config.context}")
        prefix = Request(tokens, 0, sequence=self.cache.new_sequence())
        self.prefixes.append(prefix)
        try:
            while prefix.left:
                count = min(prefix.left, self.max_num_batched_tokens)
                self.cache.reserve([prefix.sequence], [count])
                self._compute([(prefix, count)])
                prefix.stored += count
            for request in (*self.running, *self.waiting):
                own, pages = self._pages_alone(request)
                if own > pages:
                    raise ValueError(f"tokens: {len(tokens)} tokens of prefix leave {pages} pages; a submitted request takes {own}")
        except BaseException:
            self._release(self.prefixes.pop())
            raise

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue; ValueError if it could not be served even alone."""
        context = self.decoder.config.context
        if not request.prompt or request.max_tokens < 1:
            raise ValueError(f"request: {len(request.prompt)} tokens of prompt, max_tokens {request.max_tokens}; both must be at least 1")
        if len(request.prompt) + request.max_tokens > context:
            raise ValueError(f"request: {len(request.prompt)} tokens of prompt, max_tokens {request.max_tokens}; the context is {context}")
        own, pages = self._pages_alone(request)
        if own > pages:
            raise ValueError(f"request: it takes {own} pages of its own; the cache has {pages} for it")
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Compute the next tokens; returns the requests that are finished.  After an error the step can be tried again."""
        self._take_in()
        work = self._schedule()
        try:
            chosen, now = self._compute(work), self.clock()
        except BaseException:
            for request, _ in work:  # what was reserved has not been written, or not in all layers
                self.cache.truncate(request.sequence, request.stored)
            raise
        finished = []
        for (request, count), token in zip(work, chosen, strict=True):
            request.stored += count
            if request.left:  # more of its prompt is to come
                continue
            request.token_times.append(now)
            if token not in self.stop_ids:
                request.output.append(token)
            if token in self.stop_ids or len(request.output) == request.max_tokens:
                self._release(request)
                self.running.remove(request)
                finished.append(request)
        return finished

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.cache.page_size)

    def _pages_alone(self, request: Request) -> tuple[int, int]:
        """Pages of its own that a request needs if no other runs, and those that the prefixes leave for it."""
        shared = max((common_length(prefix.tokens, request.tokens) for prefix in self.prefixes), default=0)
        stored = len(request.prompt) + request.max_tokens - 1  # the last token is never fed
        own = max(1, self._pages(stored) - shared // self.cache.page_size)  # a page that is shared in part will be copied
        return own, self.cache.num_pages - sum(self._pages(prefix.stored) for prefix in self.prefixes)

    def _take_in(self) -> None:
        """Move requests from the queue to those that run, as long as there are pages for all their tokens."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            giver, shared = self._longest_prefix(request)
            promised = sum(self._pages(r.stored + r.left) - self._pages(r.stored) for r in self.running)
            own = self._pages(request.left) - shared // self.cache.page_size  # a page that is shared in part will be copied
            if own > self.cache.free_pages - promised:
                return
            request.sequence = self.cache.fork(giver.sequence, shared) if giver else self.cache.new_sequence()
            request.stored = request.shared = shared
            self.running.append(self.waiting.popleft())

    def _longest_prefix(self, request: Request) -> tuple[Request | None, int]:
        """Whose stored tokens begin like the request's, and how many; the last token is left to be computed."""
        tokens, best = request.tokens[:-1], (None, 0)
        for other in (*self.prefixes, *self.running):
            length = common_length(other.tokens[: other.stored], tokens)
            if length > best[1]:
                best = other, length
        return best

    def _schedule(self) -> list[tuple[Request, int]]:
        """Requests and how many of their tokens come next, for which the cache has room now; single tokens first."""
        while True:
            room, work = self.max_num_batched_tokens, []
            for request in sorted(self.running, key=lambda r: r.left > 1):
                if room:
                    work.append((request, min(request.left, room)))
                    room -= work[-1][1]
            work.sort(key=lambda item: item[1] > 1)
            try:
                self.cache.reserve([request.sequence for request, _ in work], [count for _, count in work])
                break
            except cuflash.CacheFullError:
                self._preempt()
        self.most_pages = max(self.most_pages, self.cache.num_pages - self.cache.free_pages)
        return work

    def _preempt(self) -> None:
        request = self.running.pop()
        self._release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _release(self, request: Request) -> None:
        self.cache.free(request.sequence)
        request.sequence, request.stored = None, 0

    def _compute(self, work: list[tuple[Request, int]]) -> list[int]:
        """The next tokens of some requests through the model; the likeliest token after each."""
        singles = sum(count == 1 for _, count in work) if self._graph else 0
        chosen = self._replay([request for request, _ in work[:singles]]) if singles else []
        if work[singles:]:
            chosen += self._forward(work[singles:])
        return chosen

    def _forward(self, work: list[tuple[Request, int]]) -> list[int]:
        xp = self.decoder.xp
        tokens, positions, last = [], [], []
        for request, count in work:
            tokens += request.tokens[request.stored : request.stored + count]
            positions += range(request.stored, request.stored + count)
            last.append(len(tokens) - 1)
        attend = PagedBatchAttention(self.cache, [(request.sequence, count) for request, count in work])
        return self.decoder.forward(*map(xp.asarray, (tokens, positions)), attend, xp.asarray(last)).argmax(axis=1).tolist()

    def _replay(self, requests: list[Request]) -> list[int]:
        """The same for one token each, by the graph; it has rows for more, in which nothing is stored."""
        self.cache.refresh(self._batch, [request.sequence for request in requests], reserved=1)
        tokens = np.zeros(self.max_num_seqs, "int64")
        tokens[: len(requests)] = [request.tokens[request.stored] for request in requests]
        self._graph.tokens.set(tokens)
        return self._graph.replay()[: len(requests)].tolist()

    def _pages_of_layer(self, layer: int) -> tuple[Array, Array, dict[str, Array]]:
        pages = self._batch.layer(layer)
        return pages.k_pages, pages.v_pages, {"page_table": pages.page_table}


class PagedBatchAttention:
    """Attention of several sequences at once: of single tokens in one call of `cuflash.decode`, of longer chunks one by one.

    Parameters
    ----------
    cache : PagedKVCache
        With room reserved for the new tokens.
    work : list of (int, int)
        Sequences and how many new tokens each has; single ones first.
    """

    def __init__(self, cache: cuflash.PagedKVCache, work: list[tuple[int, int]]) -> None:
        self._cache, self._chunks = cache, []
        single = [sequence for sequence, count in work if count == 1]
        self._singles, self._single = len(single), cache.batch(single, reserved=1) if single else None
        begin = len(single)
        for sequence, count in work[begin:]:
            self._chunks.append((sequence, slice(begin, begin + count), cache.batch([sequence])))
            begin += count

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """q (1, N, Hq, D) and k, v (1, N, Hkv, D): the new tokens of all sequences, one after the other."""
        out, dtype = array_namespace(q).empty_like(q), self._cache.dtype
        q, k, v = (x.astype(dtype, copy=False) for x in (q, k, v))
        if self._single is not None:
            pages, n = self._single.layer(layer), self._singles
            each, new_k, new_v = (x[0, :n, None] for x in (q, k, v))
            tokens = {"k_new": new_k, "v_new": new_v, "page_table": pages.page_table}
            out[0, :n] = cuflash.decode(each, pages.k_pages, pages.v_pages, pages.kv_lengths, **tokens)[:, 0]
        for sequence, rows, batch in self._chunks:
            self._cache.write([sequence], k[:, rows], v[:, rows], layer=layer)
            pages = batch.layer(layer)
            keys = {"kv_lengths": pages.kv_lengths, "page_table": pages.page_table}
            out[:, rows] = cuflash.attention(q[:, rows], pages.k_pages, pages.v_pages, causal=True, **keys)
        return out


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

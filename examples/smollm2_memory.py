"""How much memory the attention calls allocate."""

from __future__ import annotations

import tracemalloc
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self


class AttentionMemory:
    """Measures attention calls; `peak` is the most that any one call had allocated at once.

    Only the first layer's calls are measured: those of all layers have the same shapes, and tracing costs time.
    Counted are the buffers made during a call, its result included; queries, the stored keys and values and whatever
    else existed before the call are not.  NumPy arrays are seen by `tracemalloc`, CuPy arrays by a hook on CuPy's
    memory pool.

    Attributes
    ----------
    peak : int
        Bytes.
    """

    def __init__(self, xp: Any, *, enabled: bool = True) -> None:
        self.peak = 0
        self._enabled = enabled
        self._hook = _pool_hook(xp) if enabled and xp.__name__ == "cupy" else None

    def layer(self, index: int) -> AbstractContextManager[object]:
        """Context for the attention call of one layer."""
        return self if index == 0 and self._enabled else nullcontext()

    def __enter__(self) -> Self:
        if self._hook is not None:
            self._hook.now = self._hook.peak = 0
            self._hook.__enter__()
        else:
            tracemalloc.start(1)
        return self

    def __exit__(self, *error: object) -> None:
        if self._hook is not None:
            self._hook.__exit__(*error)
            self.peak = max(self.peak, self._hook.peak)
        else:
            self.peak = max(self.peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()


def _pool_hook(cupy: Any) -> Any:
    class PoolHook(cupy.cuda.MemoryHook):
        name = "attention memory"
        now = peak = 0

        def malloc_postprocess(self, **block: int) -> None:
            self.now += block["mem_size"]
            self.peak = max(self.peak, self.now)

        def free_postprocess(self, **block: int) -> None:
            self.now -= block["mem_size"]

    return PoolHook()

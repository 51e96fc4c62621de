"""Exact, IO-aware attention on plain ndarrays.

Importing cuflash loads no GPU library, no Numba and no framework; each public name is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "attention": "api",
    "attention_varlen": "api",
    "attention_backward": "api",
    "attention_varlen_backward": "api",
    "decode": "api",
    "plan": "api",
    "logsumexp": "api",
    "attention_weights": "api",
    "attention_streamed": "api",
    "explain": "explanation",
    "Explanation": "explanation",
    "PagedKVCache": "cache",
    "merge_states": "merge",
    "merge_softmax_stats": "merge",
    "alibi_slopes": "alibi",
    "Gradients": "types",
    "Plan": "types",
    "NoBackendError": "types",
    "CacheFullError": "types",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604

if TYPE_CHECKING:
    from .alibi import alibi_slopes
    from .api import (
        attention,
        attention_backward,
        attention_streamed,
        attention_varlen,
        attention_varlen_backward,
        attention_weights,
        decode,
        logsumexp,
        plan,
    )
    from .cache import PagedKVCache
    from .explanation import Explanation, explain
    from .merge import merge_softmax_stats, merge_states
    from .types import CacheFullError, Gradients, NoBackendError, Plan


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'cuflash' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

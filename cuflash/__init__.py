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
    "attention_backward": "gradients",
    "attention_varlen_backward": "gradients",
    "decode": "decoding",
    "decode_shared_prefix": "shared_prefix",
    "plan": "api",
    "logsumexp": "weights",
    "attention_weights": "weights",
    "attention_streamed": "api",
    "explain": "explanation",
    "Explanation": "explanation",
    "PagedKVCache": "cache",
    "quantize_kv": "quantize",
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
    # "as": a type checker takes only such names for public ones, since it cannot evaluate __all__ above.
    from .alibi import alibi_slopes as alibi_slopes
    from .api import attention as attention
    from .api import attention_streamed as attention_streamed
    from .api import attention_varlen as attention_varlen
    from .api import plan as plan
    from .cache import PagedKVCache as PagedKVCache
    from .decoding import decode as decode
    from .explanation import Explanation as Explanation
    from .explanation import explain as explain
    from .gradients import attention_backward as attention_backward
    from .gradients import attention_varlen_backward as attention_varlen_backward
    from .merge import merge_softmax_stats as merge_softmax_stats
    from .merge import merge_states as merge_states
    from .quantize import quantize_kv as quantize_kv
    from .shared_prefix import decode_shared_prefix as decode_shared_prefix
    from .types import CacheFullError as CacheFullError
    from .types import Gradients as Gradients
    from .types import NoBackendError as NoBackendError
    from .types import Plan as Plan
    from .weights import attention_weights as attention_weights
    from .weights import logsumexp as logsumexp


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'cuflash' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

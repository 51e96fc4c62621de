"""Arrays of other libraries at the public functions: seen as NumPy or CuPy arrays on the same memory, results handed back.

There is one edge per package, found at the first sight of one of its arrays, so that nothing is imported that the user has not
imported. Behind this door cuflash knows NumPy and CuPy arrays alone. The kind of q decides: every other array must be of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import arrays
from ..types import HOST, Gradients
from .base import Edge

# Arguments that may lie on the host whatever q is, as lists may.
ANYWHERE = frozenset((
    "kv_lengths", "kv_start", "cu_seqlens_q", "cu_seqlens_k", "page_table", "alibi_slopes", "sinks", "scale", "q_scale", "k_scale",
    "v_scale", "mod_args", "m1", "l1", "m2", "l2", "softcap", "max_seqlen_q", "max_seqlen_k", "cache_batch_index",
    "prefix_lengths",
))  # fmt: skip
PLAIN = frozenset((type(None), bool, int, float, str))
RESULTS = ("out", "lse")  # written to, but where functions differentiate
CACHES = ("k_cache", "v_cache")  # written to if there are new keys
SCALES = ("k_scale", "v_scale")  # likewise, where they are those of tokens
NO_RESULTS = ("attention_backward", "attention_varlen_backward")

_edges: dict[type, Edge | None] = dict.fromkeys((*PLAIN, list, tuple, dict, np.ndarray))  # of the types that have been seen


def of(x: Any) -> Edge | None:
    """The edge of an array of another library; None for NumPy and CuPy arrays and for what is no array."""
    try:
        return _edges[type(x)]
    except KeyError:
        return _first_sight(x)


def _first_sight(x: Any) -> Edge | None:
    """As `of`, for a type that has not been seen yet."""
    kind = type(x)
    if isinstance(x, np.ndarray | np.generic) or arrays.on_device(x):
        edge = None
    elif isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ())):
        from .torch_edge import EDGE as edge  # type: ignore[assignment]
    elif isinstance(x, getattr(sys.modules.get("jax"), "Array", ())):
        from .jax_edge import EDGE as edge  # type: ignore[assignment]
    else:
        from . import protocols

        edge = protocols.edge_of(x)
        if hasattr(x, "__dict__") and not (hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__")):
            return edge  # another object of the type may have other attributes
    _edges[kind] = edge
    return edge


def call(function: Callable, arguments: dict[str, Any], name: str = "", head: str = "q") -> Any:
    """Call a public function whose argument ``head`` has an edge; its results are of the kind of that argument.

    Parameters
    ----------
    function : callable
        Takes NumPy and CuPy arrays under the names in ``arguments``.
    arguments : dict
        As the user gave them; lists and dicts of arrays count as arrays.
    name : str
        What the function is called, if not by its ``__name__``.
    head : str
        The argument that decides on kind and device; "q", or of a list of arrays its name.
    """
    name = name or function.__name__
    lead = arguments[head]
    if type(lead) in (list, tuple):
        lead, head = lead[0], f"{head}[0]"
    edge = of(lead)
    assert edge is not None
    device = edge.device(lead, head)
    stream = None
    if device != HOST:
        arguments = dict(arguments)
        if name != "plan":  # which launches nothing and keeps it
            stream = arguments.pop("stream", None)
    seen = _Seen(edge, lead, head, device, _written(name, arguments))
    with edge.placed(device, stream, seen.given):
        given = {key: value if type(value) in PLAIN else seen.value(value, key) for key, value in arguments.items()}
        results = seen.back(function(**given))
        edge.done(device, seen.views)
    return results


def _written(name: str, arguments: dict[str, Any]) -> tuple[str, ...]:
    """Arguments that the function writes to."""
    if name in NO_RESULTS:
        return ()
    if name not in ("decode", "decode_shared_prefix") or arguments.get("k_new") is None:
        return RESULTS
    return (*RESULTS, *CACHES, *(scale for scale in SCALES if len(getattr(arguments.get(scale), "shape", ())) > 1))


class _Seen:
    """The arrays of one call: what came, what it was seen as, and the way back."""

    def __init__(self, edge: Edge, lead: Any, head: str, device: int, written: tuple[str, ...]):
        self.edge, self.lead, self.head, self.device, self.written = edge, lead, head, device, written
        self.given: list[Any] = []  # the user's arrays on the device
        self.views: list[Any] = []  # what they are seen as
        self._back: dict[int, tuple[Any, Any]] = {}  # id of a view -> itself, which keeps the id, and the user's array

    def value(self, value: Any, name: str) -> Any:
        """An argument as the function takes it."""
        if name == "out_dtype":
            return self.edge.dtype(value)
        kind = type(value)
        edge = of(value)
        if edge is not None:
            return self._array(value, name, edge)
        if kind in (list, tuple) and any(of(x) is not None for x in value):
            return [self.value(x, f"{name}[{n}]") for n, x in enumerate(value)]
        if kind is dict:
            return {key: self.value(x, name) for key, x in value.items()}
        if name.partition("[")[0] not in ANYWHERE and (isinstance(value, np.ndarray) or arrays.on_device(value)):
            raise self._other_kind(value, name)
        return value

    def _array(self, x: Any, name: str, edge: Edge) -> Any:
        anywhere = name.partition("[")[0] in ANYWHERE
        device = edge.device(x, name)
        if edge is not self.edge and not (anywhere and device == HOST):
            raise self._other_kind(x, name)
        if device != self.device and not (anywhere and device == HOST):
            where, there = edge.where(device), edge.where(self.device)
            raise ValueError(f"{name}: on {where}, but {self.head} is on {there}; all arrays must be on one device")
        view = edge.view(x, name, device, name in self.written)
        if device != HOST:
            self.given.append(x)
            self.views.append(view)
        self._back[id(view)] = view, x
        return view

    def _other_kind(self, x: Any, name: str) -> TypeError:
        came, want = arrays.type_name(x), arrays.type_name(self.lead)
        return TypeError(f"{name}: got {came}, but {self.head} is {want}; all arrays must be of one kind")

    def back(self, result: Any) -> Any:
        """A result as the user takes it."""
        if isinstance(result, tuple):
            return tuple(self.back(x) for x in result)
        if isinstance(result, Gradients):
            return Gradients(*map(self.back, result))
        if id(result) in self._back:
            return self._back[id(result)][1]
        if isinstance(result, np.ndarray | np.generic) or arrays.on_device(result):
            return self.edge.give(result, self.lead)
        return result



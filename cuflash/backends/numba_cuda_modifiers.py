"""A user's score_mod or mask_mod as a device function on numbers.

These callables are written for NumPy, on whole tiles. Numba compiles them for single numbers, where some of NumPy's
functions have no counterpart; the stand-ins below give those.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda

# What Numba does not compile for a GPU under its NumPy name, on numbers. Keys are the names in NumPy's namespace.
STAND_INS: dict[str, Callable] = {
    "where": lambda condition, x, y: x if condition else y,
    "clip": lambda x, low, high: min(max(x, low), high) if x == x else x,
    "abs": lambda x: abs(x),
    "absolute": lambda x: abs(x),
    "exp": lambda x: math.exp(x),
    "expm1": lambda x: math.expm1(x),
    "log1p": lambda x: math.log1p(x),
    "sqrt": lambda x: math.sqrt(x),
    "floor": lambda x: math.floor(x),
    "ceil": lambda x: math.ceil(x),
    "isfinite": lambda x: abs(x) < math.inf,
    "sign": lambda x: (1.0 if x > 0 else -1.0) if x != 0 and x == x else x * 1.0,
    "square": lambda x: x * x,
    "mod": lambda x, y: x % y,
    "remainder": lambda x, y: x % y,
    "power": lambda x, y: x**y,
}


def modifier(function: Callable, arguments: str, names: tuple[str, ...]) -> Callable:
    """A user's score_mod or mask_mod as a device function that takes mod_args as one tuple.

    ``arguments`` are the positional ones, "s, b, h, i, j" or "b, h, i, j"; ``names`` the keys of mod_args in the tuple's order.
    """
    own = list(inspect.signature(function).parameters)[arguments.count(",") + 1 :]
    unknown = [n for n in own if n not in names] + [n for n in names if n not in own]
    if unknown:
        raise TypeError(f"{function.__name__}: {', '.join(unknown)} is not both a parameter and a name in mod_args")
    extra = "".join(f", mods[{names.index(n)}]" for n in own)
    scope = {"user": cuda.jit(device=True)(_on_numbers(function))}
    exec(f"def bound({arguments}, mods):\n    return user({arguments}{extra})\n", scope)  # the names are identifiers
    return cuda.jit(device=True)(scope["bound"])


def _on_numbers(function: Callable) -> Callable:
    """The same function with the stand-ins in NumPy's place, and keyword-only parameters made positional.

    (Device functions take no keywords.)
    """
    code = function.__code__
    if code.co_kwonlyargcount:
        code = code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0)
    scope = {name: _numpy_on_numbers() if value is np else value for name, value in function.__globals__.items()}
    return types.FunctionType(code, scope, function.__name__, None, function.__closure__)


def _numpy_on_numbers() -> Any:
    """NumPy's namespace with the stand-ins in it; the simulator, where all is Python, needs none."""
    if config.ENABLE_CUDASIM:
        return np
    module = types.ModuleType("numpy")
    module.__dict__.update(np.__dict__)
    module.__dict__.update({name: cuda.jit(device=True)(f) for name, f in STAND_INS.items()})
    return module

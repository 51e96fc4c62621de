"""A user's score_mod or mask_mod as a device function on numbers.

These callables are written for NumPy, on whole tiles. Numba compiles them for single numbers, where some of NumPy's
functions have no counterpart; the stand-ins below give those.
"""

from __future__ import annotations

import functools
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


class Meaning:
    """A function by what it computes, so that a lambda made anew for every call is compiled once.

    That is its code, defaults, closure and the numbers among its globals. Where those cannot be compared, it is the function itself.
    """

    def __init__(self, function: Callable):
        self.function = function
        scope, code = function.__globals__, function.__code__
        numbers = {n: scope[n] for n in code.co_names if isinstance(scope.get(n), (bool, int, float, np.number))}
        values = [
            *(cell.cell_contents for cell in function.__closure__ or ()),
            *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *numbers.values(),
        ]
        self.key: Any = (code, id(scope), *((type(value), value) for value in values))
        try:
            hash(self.key)
        except TypeError:  # an array, a list
            self.key = function

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Meaning) and self.key == other.key


def modifier(function: Callable, arguments: str, names: tuple[str, ...]) -> Callable:
    """A user's score_mod or mask_mod as a device function that takes mod_args as one tuple.

    ``arguments`` are the positional ones, "s, b, h, i, j" or "b, h, i, j"; ``names`` the keys of mod_args in the tuple's order.
    """
    return _bound(Meaning(function), arguments, names)


@functools.lru_cache(maxsize=256)
def _bound(meaning: Meaning, arguments: str, names: tuple[str, ...]) -> Callable:
    function = meaning.function
    scope: dict[str, Any] = {"user": cuda.jit(device=True)(_on_numbers(function))}
    given = arguments.split(", ")
    for parameter in list(inspect.signature(function).parameters.values())[len(given) :]:
        if parameter.name in names:
            given.append(f"mods[{names.index(parameter.name)}]")
        else:
            scope[f"default_{parameter.name}"] = parameter.default
            given.append(f"default_{parameter.name}")
    exec(f"def bound({arguments}, mods):\n    return user({', '.join(given)})\n", scope)  # the names are identifiers
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

"""One suite for every kernel of every backend: the cases of cases.py against the float64 oracle."""

from __future__ import annotations

import importlib

import compare
import devices
import numpy as np
import pytest
from calls import check, expected, gaps_untouched, parts, present, run
from case import F32, Case
from cases import ABSENT, ALL_TARGETS, BY_NAME, CASES, TARGETS, Target

from cuflash import backends

FEW = tuple(
    BY_NAME[name]
    for name in (
        "batch",
        "causal-more-queries-65",
        "sinks",
        "packed-slack",
        "paged-3-BHSD",
        "strides-reversed-BHSD-3axes",
        "no-keys",
    )
    if name in BY_NAME
)


def each(cases: tuple[Case, ...]) -> list:
    return [pytest.param(c, d, id=f"{c.name}-{d.name}") for c in cases for d in c.dtypes]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize(("case", "dtype"), each(CASES))
def test_case(case: Case, dtype: np.dtype, target: Target) -> None:
    call = present(case, dtype)
    run(call, target)
    check(call, expected(case, dtype))
    if devices.SIMULATED:  # slow
        return
    again = present(case, dtype)
    run(again, target)
    compare.assert_same_bits(call.out, again.out, "out of a second run")
    compare.assert_same_bits(call.lse, again.lse, "lse of a second run")
    assert gaps_untouched(again.out) and gaps_untouched(again.lse), "written between the elements of a buffer"


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize(("case", "dtype"), each(FEW))
def test_results_allocated(case: Case, dtype: np.dtype, target: Target) -> None:
    """Without buffers the results are new arrays, with the same bits; asking for the LSE does not change the output."""
    call = present(case, dtype)
    run(call, target)
    options = {**call.options, "kernel": target.kernel, "backend": target.backend}
    out, lse = devices.call(target, call.function, call.args, {**options, "return_lse": True})
    alone = devices.call(target, call.function, call.args, options)
    for got, want, name in ((out, call.out, "out"), (lse, call.lse, "lse"), (alone, call.out, "out without lse")):
        assert type(got) is np.ndarray
        compare.assert_same_bits(got, want, name)


@pytest.mark.parametrize(("case", "dtype"), each(FEW))
def test_automatic_choice(case: Case, dtype: np.dtype) -> None:
    """Nothing named: the choice is one that gives the right result, and not the slow oracle."""
    call = present(case, dtype)
    call.function(*call.args, out=call.out, lse=call.lse, return_lse=True, **call.options)
    check(call, expected(case, dtype))


def test_targets_are_all_kernels_of_the_registry() -> None:
    """A kernel that no suite runs is a fault of the suite."""
    offered = set()
    for name, module in backends.REGISTRY.items():
        if module is not None:
            offered |= {f"{name}/{kernel}" for kernel in importlib.import_module(f"cuflash.backends.{module}").KERNELS}
    assert {t.name for t in ALL_TARGETS} == offered


def test_case_names_are_unique() -> None:
    names = [c.name for c in CASES]
    assert len(names) == len(set(names))


def test_declines_name_targets() -> None:
    assert ABSENT.keys() <= {t.name for t in ALL_TARGETS}


@pytest.mark.parametrize("damage", ["value", "nan", "inf", "lse"])
def test_comparison_notices(damage: str) -> None:
    """The comparison itself: each kind of wrong result is found, and the worst element is named."""
    case, target = BY_NAME["causal-more-queries-65"], TARGETS[0]
    call = present(case, F32)
    run(call, target)
    want = expected(case, F32)
    check(call, want)
    (out, lse), = parts(call)
    array, at, value = {
        "value": (out, (0, 64, 1, 3), out[0, 64, 1, 3] + 2 * want.out_bound), "nan": (out, (0, 2, 0, 0), np.nan),
        "inf": (lse, (0, 0, 2), np.inf), "lse": (lse, (0, 1, 64), lse[0, 1, 64] - 2 * want.lse_bound),
    }[damage]
    array[at] = value
    with pytest.raises(AssertionError, match=r"index \(" + ", ".join(map(str, at)) + r"\)"):
        check(call, want)

"""A few of the problems that .ci/fuzz tries by the thousand: on the host's kernels, and on the raw kernels thread by thread."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import compare
import fuzz_backward
import fuzz_check
import numpy as np
import pytest
from case import BF16, F32
from cases import GRADIENT_TARGETS, TARGETS, Target
from cuflash import NoBackendError, device, structs
from cuflash import problem as problems
from cuflash.arrays import view
from cuflash.backends import cuda
from emulator import emulate
from fuzz_backward import Backward
from fuzz_forward import DECLINED, sources
from hypothesis import HealthCheck, Phase, given, settings

import devices
import fuzz
from fuzz import Example, Kind

HERE = Path(__file__).parent
KINDS = fuzz.kinds(1, 60)
H200 = device.KNOWN["H200"]
few = settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

if devices.SIMULATED:
    pytest.skip("the problems are too large for Numba's simulator", allow_module_level=True)


@pytest.mark.parametrize("target", [t for t in TARGETS if t.backend in ("cpu", "cuda") and t.kernel != "fa1"], ids=lambda t: t.name)
def test_problems_of_all_kinds(target: Target) -> None:
    able = {"naive": lambda kind: kind.naive, "fa3": lambda kind: kind.hopper}.get(target.kernel, lambda kind: True)
    wanted = [kind for kind in KINDS if target.backend == "cpu" or kind.kernel == "fa2" and able(kind)]

    @few
    @given(fuzz.examples(wanted, longest=300, naive=100 if target.name == "cuda/naive" else 0))
    def examine(e: Example) -> None:
        if target.name == "cuda/naive" and {"reversed", "every_other", "columns_reversed", "rows_reversed"} & set(e.memory):
            return  # which cuBLAS may not take
        try:
            fuzz_check.examine(e, target)
        except NoBackendError as reason:
            if target.kernel != "fa3" or not re.search(DECLINED["fa3"], str(reason)):
                raise

    examine()


@pytest.mark.parametrize("target", [t for t in GRADIENT_TARGETS if t.backend in ("cpu", "cuda")], ids=lambda t: t.name)
def test_gradients_of_all_kinds(target: Target) -> None:
    wanted = fuzz_backward.some_kinds(1, 60, target.name)

    @settings(few, max_examples=80)
    @given(fuzz_backward.backwards(wanted, longest=200, hopper=100 if target.kernel == "fa3" else 0))
    def examine(e: Backward) -> None:
        try:
            fuzz_backward.examine(e, target)
        except NoBackendError as reason:
            if not fuzz_backward.declines(e, target, str(reason)):
                raise

    examine()


@pytest.mark.skipif(emulate.why_unusable() is not None, reason="kernels cannot be emulated here")
@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_gradients_on_the_emulator(kernel: str, tmp_path: Path) -> None:
    examine = fuzz_backward.tester(f"emulator/{kernel}", tmp_path)
    kinds = {
        "fa2": [
            Kind(dtype="bfloat16", out="bfloat16", d=64, dv=96, side="left", bias="float32", softcap=True, load=4),
            Kind(dtype="float16", d=32, dv=32, side="right", mask=True, alibi=True),
            Kind(dtype="float32", out="float32", d=32, dv=64, side="right", load=4, folded=False),
        ],
        "fa3": [Kind(dtype="bfloat16", out="bfloat16", d=128, dv=96, side="left"), Kind(d=64, dv=64, side="right")],
    }[kernel]

    @settings(few, max_examples=15, phases=[Phase.explicit, Phase.generate])
    @given(fuzz_backward.backwards(kinds, longest=100, hopper=100 if kernel == "fa3" else 0))
    def run(e: Backward) -> None:
        try:
            examine(e)
        except NoBackendError as reason:
            if not fuzz_backward.may_decline(e, kernel, str(reason)):
                raise

    run()


@pytest.mark.skipif(emulate.why_unusable() is not None, reason="kernels cannot be emulated here")
def test_problems_on_the_emulator(tmp_path: Path) -> None:
    made = emulate.Emulator(tmp_path)
    kinds = [
        Kind(dtype="bfloat16", out="float16", d=64, dv=96, side="left", bias="float32", softcap=True, load=4),
        Kind(dtype="float16", d=32, dv=32, side="right", mask=True, alibi=True, paged=True),
        Kind(dtype="float32", out="float32", d=32, dv=64, side="right", load=4, folded=False),
    ]

    @settings(few, max_examples=40)
    @given(fuzz.examples(kinds, longest=100, naive=0))
    def examine(e: Example) -> None:
        built = fuzz_check.build(e)
        made.run(fuzz_check.emulated(built), H200)
        fuzz_check.check(built, built.call.out, built.call.lse)

    try:
        examine()
    finally:
        made.close()


def test_examples_are_of_their_kind() -> None:
    """Few kernels for a kind, so that no problem needs one that was not foreseen."""
    names: dict[Kind, set[str]] = {}

    @settings(few, max_examples=300)
    @given(fuzz.examples(KINDS, longest=200, naive=0, hopper=30))
    def collect(e: Example) -> None:
        problem = fuzz_check.emulated(fuzz_check.build(e))
        reason = cuda.decline(problem, e.kernel)
        if e.kernel == "fa3" and reason is not None:
            assert re.search(DECLINED["fa3"], reason)
            return
        assert reason is None
        if cuda._grid(problem, cuda.instance(problem, H200, e.kernel)) and problem.k.array.size:
            width = structs.copy_bytes((problem.q, problem.k, problem.v))  # 2 stands for any strides
            assert max(width, e.kind.itemsize) == e.kind.load
            names.setdefault(e.kind, set()).add(cuda.instance(problem, H200, e.kernel).name)

    collect()
    assert len(names) > 30
    for kind, found in names.items():
        assert found <= {source.name for source in sources([kind], H200)}, kind


@pytest.mark.parametrize("how", [*fuzz.ANY_STRIDES])
def test_memory_holds_the_same_numbers(how: str) -> None:
    a = np.arange(2 * 3 * 4 * 8.0).reshape(2, 3, 4, 8).astype(BF16)
    laid = fuzz_check.lay(a, how, 2)
    assert (laid == a).all() and laid.base is not a
    if how in fuzz.ROWS:
        assert structs.copy_bytes((view(laid, "q"),)) >= 4


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel would do that reads a key too many, leaves a row out or writes beside its results."""
    memory = ("contiguous", "contiguous", "contiguous", "padded")
    e = Example(Kind(dtype="float32", out="float32"), sq=70, sk=70, causal=True, hkv=2, memory=memory)
    built = fuzz_check.build(e)
    out, lse = fuzz_check.run(built, Target("cpu", "fa2"))
    fuzz_check.check(built, out, lse)
    for place, value in (((0, 5, 1, 3), 1e-5), ((0, 69, 0, 0), np.nan)):
        wrong = out.copy()
        wrong[place] += value
        with pytest.raises(AssertionError, match="out"):
            fuzz_check.check(built, wrong, lse)
    wrong = lse.copy()
    wrong[0, 0, 7] += 1e-4
    with pytest.raises(AssertionError, match="lse"):
        fuzz_check.check(built, out, wrong)
    shifted = fuzz_check.build(Example(e.kind, sq=70, sk=70, causal=True, window=(-1, 0), kv_lengths=(69,)))
    assert np.isnan(shifted.call.args[1][0, 69]).all(), "a key that does not exist must hold NaN"


def test_what_no_row_sees_is_garbage() -> None:
    e = Example(Kind(dtype="float32", out="float32", side="left", bias="float32"), sq=3, sk=70, window=(5, 0), b=2, seed=4)
    built = fuzz_check.build(e)
    q, k, v = built.call.args
    assert q.dtype == F32 and not np.isfinite(k[:, :62]).any() and not np.isfinite(v[:, :62]).any()
    assert np.isfinite(k[:, 62:]).all() and np.isfinite(built.problems[0].k.array).all()
    assert np.isnan(built.call.options["bias"][..., :62]).all()
    problems.build_attention(q, k, v, **built.call.options)


def test_a_wrong_gradient_is_seen() -> None:
    """A key too many, a row left out, a sum over half a group."""
    kind = Kind(dtype="float32", out="float32", bias="float32")
    of = Example(kind, sq=70, sk=70, ratio=2, causal=True, bias_axes="1 Hq Sq Sk", sinks=True)
    given = fuzz_backward.present(Backward(of, memory=("padded", "transposed", "contiguous", "reversed")))
    found = fuzz_backward.run(given, Target("cpu", "fa2"))
    assert 0 < fuzz_backward.check(given, found) <= 1
    for name, place in (("dq", (0, 69, 0, 0)), ("dk", (0, 5, 0, 3)), ("dv", (0, 0, 0, 0)), ("dbias", (0, 1, 3, 3)), ("dsinks", (1,))):
        wrong = getattr(found, name).copy()
        wrong[place] += 1e-4 * abs(wrong).max()
        with pytest.raises(AssertionError, match=name):
            fuzz_backward.check(given, dataclasses.replace(found, **{name: wrong}))


def test_delta_of_rounded_results() -> None:
    """Gradients of the problem with another dlse are those of the formula with delta = rowsum(dO O) - dlse of O as it was handed over."""
    given = fuzz_backward.present(Backward(Example(Kind(), sq=9, sk=20, ratio=2, d=16, dv=16, causal=True, magnitude=6.0)))
    (p,) = given.problems
    q, k, v, dout, out = (a.array.astype(np.float64)[0] for a in (p.q, p.k, p.v, p.dout, p.out))
    dlse = p.dlse.array[0].astype(np.float64)
    exact = compare.exact_gradients(fuzz_backward.with_delta_of_out(p))
    for h in range(2):
        s = np.where(np.arange(20) <= np.arange(9)[:, None] + 11, q[:, h] @ k[:, 0].T / 4, -np.inf)
        weights = np.exp(s - np.logaddexp.reduce(s, axis=1)[:, None])
        ds = weights * (dout[:, h] @ v[:, 0].T - ((dout[:, h] * out[:, h]).sum(axis=1) - dlse[h])[:, None])
        # Weights have the rounding errors of their logits, and sums of 16 and of 20 products theirs.
        few = float(np.finfo(np.float64).eps) * (np.abs(s[np.isfinite(s)]).max() + 16 + 20)
        np.testing.assert_allclose(exact.dq[0, :, h], ds @ k[:, 0] / 4, rtol=0, atol=few * abs(exact.dq).max())


@pytest.mark.slow
@pytest.mark.skipif(devices.gpu_wanted(), reason="the GPU has .ci/fuzz")
@pytest.mark.parametrize("script", ["fuzz_forward.py", "fuzz_backward.py"])
def test_the_command_runs_and_repeats_itself(script: str) -> None:
    command = [sys.executable, str(HERE / script), "--target", "cpu/fa2", "--problems", "30", "--kinds", "10", "--jobs", "1"]
    texts = [subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout for _ in range(2)]
    assert "0 kinds with failures" in texts[0]
    assert texts[0].splitlines()[1:] == texts[1].splitlines()[1:], "the same seed gives the same problems"

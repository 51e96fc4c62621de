"""The programs written to be read, online_softmax.py and kernel_regression.py in examples/, do what they say."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WIDE, NARROW = 36.0, 3.0  # hours: the bandwidths that kernel_regression.py uses unasked


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.\d+(?:e[+-]\d+)?", text)]


def line_of(text: str, start: str) -> str:
    (line,) = (line for line in text.splitlines() if line.strip().startswith(start))
    return line


# ---- online_softmax.py -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def online(import_example):
    return import_example("online_softmax")


@pytest.fixture(scope="module")
def printed() -> str:
    done = run(EXAMPLES / "online_softmax.py")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_softmax_fits_a_narrow_terminal(printed):
    assert printed.isascii() and max(map(len, printed.splitlines())) < 80


def test_every_printed_state_is_that_of_the_logits_so_far(printed, online):
    table = printed.split("sum l\n")[1].split("\n\n")[0].splitlines()
    assert len(table) == len(online.LOGITS)
    for seen, row in enumerate(table, 1):
        logits = online.LOGITS[:seen]
        logit, m, _, _, l = numbers(row)
        assert (logit, m) == (logits[-1], max(logits))
        assert abs(l - math.fsum(math.exp(x - m) for x in logits)) <= 0.51e-6  # printed to six decimals


def test_printed_weights_are_softmax(printed, online):
    total = math.fsum(map(math.exp, online.LOGITS))
    for start in ("exp(x - m) / l", "softmax   "):
        weights = numbers(line_of(printed, start))
        np.testing.assert_allclose(weights, [math.exp(x) / total for x in online.LOGITS], rtol=0, atol=0.51e-6)


def test_printed_results_are_softmax_attention(printed, online):
    rng = np.random.default_rng(0)
    shapes = (1, online.HEAD_SIZE), (online.KEYS, online.HEAD_SIZE), (online.KEYS, online.VALUE_SIZE)
    (q,), k, v = (rng.standard_normal(shape).tolist() for shape in shapes)
    weights = [math.exp(math.fsum(a * b for a, b in zip(q, key)) / 2) for key in k]  # 1/sqrt(4)
    expected = [math.fsum(w * x for w, x in zip(weights, column)) / math.fsum(weights) for column in zip(*v)]
    for start in ("merged tiles", "softmax(", "cuflash.attention"):
        result = numbers(line_of(printed, start))
        np.testing.assert_allclose(result, expected, rtol=0, atol=0.51e-12)  # printed to twelve decimals
    last_tile = [line for line in printed.splitlines() if re.match(r" +\d+-\d+ ", line)][-1]
    np.testing.assert_allclose(numbers(last_tile)[-3:], expected, rtol=0, atol=0.51e-3)
    assert abs(numbers(last_tile)[-4] - math.log(math.fsum(weights))) <= 0.51e-3


def test_wrong_merge_is_noticed(monkeypatch, online, capsys):
    monkeypatch.setattr(online.cuflash, "merge_states", lambda outs, lses: (sum(outs) / len(outs), np.logaddexp(*lses)))
    with pytest.raises(AssertionError):
        online.main()


# ---- kernel_regression.py --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel(import_example):
    for module in ("matplotlib", "statsmodels", "vega_datasets"):
        pytest.importorskip(module, reason=f"{module} is not installed (extra: examples)")
    return import_example("kernel_regression")


@pytest.fixture(scope="module")
def seen(kernel):
    return kernel.observations()


def nadaraya_watson(at, times, values, bandwidth):
    weights = np.exp(-(((at[:, None] - times) / bandwidth) ** 2) / 2)
    return (weights * values).sum(axis=1) / weights.sum(axis=1)


def test_regression_runs_and_draws(kernel, seen, tmp_path):
    from matplotlib.image import imread

    picture = tmp_path / "temperatures.png"
    done = run(EXAMPLES / "kernel_regression.py", "--output", picture)
    assert done.returncode == 0 and "FAILED" not in done.stderr, done.stderr
    assert max(map(len, done.stdout.partition("Picture")[0].splitlines())) <= 80
    for start in ("1.5 days", "3 hours"):
        statsmodels, sqdist, dots = numbers(line_of(done.stdout, start))[-3:]
        assert statsmodels <= 1e-10
        assert 0 < sqdist < dots
    pixels = imread(picture)
    assert min(pixels.shape[:2]) >= 1000
    for color in ((214, 39, 40), (31, 119, 180), (44, 160, 44), (255, 127, 14)):  # curves and error clouds are there
        assert (np.abs(pixels[..., :3] * 255 - color).max(axis=-1) < 1).sum() > 500


def test_observations_are_a_year_of_hours_in_celsius(seen):
    assert seen.hours.shape == seen.celsius.shape == seen.dates.shape == (8759,)
    assert seen.hours.dtype == seen.celsius.dtype == np.float64
    steps = np.diff(seen.hours)
    assert seen.hours[0] == 0 and set(steps) == {1.0, 2.0} and (steps == 2).sum() == 1  # the clock goes forward once
    assert 0 < seen.celsius.min() < 5 < 20 < seen.celsius.max() < 30


@pytest.mark.parametrize("bandwidth", [WIDE, NARROW])
def test_estimates_agree_with_statsmodels_and_the_formula(kernel, seen, bandwidth):
    from statsmodels.nonparametric.kernel_regression import KernelReg

    at = seen.hours[7::397] + 0.25  # between the observations
    ours = kernel.regression(at, seen.hours, seen.celsius, bandwidth)
    theirs, _ = KernelReg(seen.celsius, seen.hours, var_type="c", reg_type="lc", bw=[bandwidth], rng=0).fit(at)
    assert np.abs(ours - theirs).max() <= 1e-10
    assert np.abs(ours - nadaraya_watson(at, seen.hours, seen.celsius, bandwidth)).max() <= 1e-10


def test_squared_differences_keep_float32_exact_where_dot_products_do_not(kernel, seen):
    exact = kernel.regression(seen.hours, seen.hours, seen.celsius, NARROW)
    by_dots = kernel.regression_by_dot_products(seen.hours, seen.hours, seen.celsius, NARROW)
    sqdist, dots = (errors.max() for errors in kernel.float32_errors(seen, exact, NARROW))
    rounding = np.finfo(np.float32).eps * np.abs(seen.celsius).max()
    assert sqdist <= 16 * rounding
    assert dots > 1000 * rounding
    # In float64 the dot products are the same regression, so what they lose above is lost to float32 alone.
    largest_logit = seen.hours[-1] ** 2 / NARROW**2
    assert np.abs(by_dots - exact).max() <= 16 * np.finfo(np.float64).eps * largest_logit * np.abs(seen.celsius).max()


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read as Linux reports it")
def test_memory_does_not_grow_with_n_times_n(kernel, seen):
    code = f"""
import resource, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import kernel_regression as kernel
seen = kernel.observations()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
kernel.regression(seen.hours[:600], seen.hours[:600], seen.celsius[:600], {WIDE})  # compiles
before = peak()
kernel.regression(seen.hours, seen.hours, seen.celsius, {WIDE})
print(peak() - before)
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < len(seen.hours) ** 2 * 8 / 50  # the N x N float64 weights, with much room to either side


def test_disagreement_fails_the_program(kernel, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel, "draw", lambda *_: None)
    monkeypatch.setattr(kernel, "disagreement", lambda *_: 2e-10)
    with pytest.raises(SystemExit, match="FAILED"):
        kernel.main(["--output", str(tmp_path / "none.png")])


@pytest.mark.parametrize("name", ["no/such/folder/x.png", "x.nonsense"])
def test_unwritable_picture_is_one_message(kernel, tmp_path, name):
    with pytest.raises(SystemExit, match=r"^--output .*: .*"):
        kernel.main(["--output", str(tmp_path / name)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bandwidth", "0"], "must be positive and finite, not 0"),
        (["--narrow", "nan"], "must be positive and finite, not nan"),
        (["--bandwidth", "0.1"], "--narrow must be below --bandwidth"),
    ],
    ids=["zero", "nan", "order"],
)
def test_bandwidths_are_checked(kernel, capsys, arguments, message):
    with pytest.raises(SystemExit):
        kernel.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", ["matplotlib", "statsmodels", "vega_datasets"])
def test_missing_package_is_one_message_with_the_extra(kernel, module):
    path = EXAMPLES / "kernel_regression.py"
    done = run(
        "-c", f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert module in line and "pip install -e '.[examples]'" in line

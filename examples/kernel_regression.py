"""A year of hourly temperatures smoothed by kernel regression, which is attention: float64, checked, with a picture.

    python examples/kernel_regression.py
    python examples/kernel_regression.py --bandwidth 10 --narrow 0.25 --output smooth.png

The Nadaraya-Watson estimate at a time t is a weighted mean of all observations, with Gaussian weights of bandwidth h:

    estimate(t) = sum_i w_i y_i / sum_i w_i,    w_i = exp(-(t - t_i)^2 / (2 h^2))

Dividing by the sum makes the weights a softmax.  So this is attention with the times t as queries, the observation
times t_i as keys, the temperatures y_i as values, and -(t - t_i)^2 / (2 h^2) as logits.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

try:
    import matplotlib
    import numpy as np
    from statsmodels.nonparametric.kernel_regression import KernelReg
    from vega_datasets import data

    import cuflash
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. In the repository, run once: pip install -e '.[examples]'")

matplotlib.use("Agg")  # a file is wanted, not a window

import matplotlib.dates as mdates  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402

AGREEMENT = 1e-10  # degrees, between cuflash and statsmodels in float64
CHECK_EVERY = 23  # statsmodels loops over points in Python: one in 23, and so every hour of the day, is checked
ZOOM_DAYS = 7


@dataclass(frozen=True)
class Observations:
    dates: np.ndarray  # (N,) datetime64
    hours: np.ndarray  # (N,) float64, since the first observation
    celsius: np.ndarray  # (N,) float64


def observations() -> Observations:
    """Seattle's hourly normals (many years averaged, calendar of 2010), from the files inside vega_datasets."""
    table = data.seattle_temps()
    dates = table["date"].to_numpy()
    hours = (dates - dates[0]) / np.timedelta64(1, "h")
    return Observations(dates, hours, (table["temp"].to_numpy() - 32) / 1.8)


def regression(at: np.ndarray, times: np.ndarray, values: np.ndarray, bandwidth: float) -> np.ndarray:
    """The Nadaraya-Watson estimate.

    Parameters
    ----------
    at : ndarray (M,)
        Times to estimate at; float32 or float64, as `times` and `values`.
    times, values : ndarray (N,)
        The observations.
    bandwidth : float
        Standard deviation h of the Gaussian, in the unit of the times.

    Returns
    -------
    ndarray (M,)
    """
    # (S, D) arrays with D = 1.  "sqdist" subtracts first and squares then: near times keep all their digits.
    scale = 1 / (2 * bandwidth**2)
    return cuflash.attention(at[:, None], times[:, None], values[:, None], score="sqdist", scale=scale)[:, 0]


def regression_by_dot_products(at: np.ndarray, times: np.ndarray, values: np.ndarray, bandwidth: float) -> np.ndarray:
    """The same where only dot products are to be had; exact on paper, poor in float32.

    -(t - t_i)^2 / 2 = (t t_i - t_i^2 / 2) - t^2 / 2, and the last term is the same for all keys of a row, so that
    softmax cancels it.  The rest is the dot product of (t, 1) and (t_i, -t_i^2 / 2).
    """
    q = np.stack([at, np.ones_like(at)], axis=1)
    k = np.stack([times, -(times**2) / 2], axis=1)
    return cuflash.attention(q, k, values[:, None], scale=1 / bandwidth**2)[:, 0]


def float32_errors(seen: Observations, exact: np.ndarray, bandwidth: float) -> tuple[np.ndarray, np.ndarray]:
    """How far float32 is from the float64 estimate at each time: by squared differences, and by dot products."""
    times, values = seen.hours.astype(np.float32), seen.celsius.astype(np.float32)
    methods = (regression, regression_by_dot_products)
    return tuple(np.abs(method(times, times, values, bandwidth) - exact) for method in methods)


def disagreement(seen: Observations, estimate: np.ndarray, bandwidth: float) -> float:
    """Largest difference from statsmodels' local constant estimator, an independent Nadaraya-Watson."""
    # With a given bandwidth nothing is random; without rng it warns of what its default is going to be.
    model = KernelReg(seen.celsius, seen.hours, var_type="c", reg_type="lc", bw=[bandwidth], rng=0)
    mean, _ = model.fit(seen.hours[::CHECK_EVERY])
    return float(np.abs(estimate[::CHECK_EVERY] - mean).max())


def named(hours: float) -> str:
    return f"{hours / 24:g} days" if hours >= 24 else f"{hours:g} hours"


def draw(seen: Observations, estimates: dict[float, np.ndarray], errors: dict[float, tuple], output: str) -> None:
    """The year, one week of it, and the error of float32 over the year."""
    wide, narrow = estimates
    cloud, colors = "0.72", {wide: "tab:blue", narrow: "tab:red"}
    figure, axes = plt.subplot_mosaic("AA;BC", figsize=(11, 7.5), layout="constrained")
    year, week, error = axes["A"], axes["B"], axes["C"]

    middle = int(np.searchsorted(seen.dates, seen.dates[0].astype("datetime64[Y]") + np.timedelta64(195, "D")))
    shown = slice(middle, middle + 24 * ZOOM_DAYS)
    for panel, part, size in ((year, slice(None), 2), (week, shown, 14)):
        panel.scatter(seen.dates[part], seen.celsius[part], s=size, color=cloud, linewidths=0, label="hourly normals")
        for h, width in ((narrow, 0.4 if panel is year else 1.5), (wide, 2.2)):
            panel.plot(seen.dates[part], estimates[h][part], color=colors[h], lw=width, label=f"bandwidth {named(h)}")
        panel.set_ylabel("temperature (°C)")
    year.set_title(f"Seattle, {len(seen.hours)} hourly normals: kernel regression is attention")
    year.axvspan(seen.dates[shown][0], seen.dates[shown][-1], color="0.92", zorder=0)
    year.legend(loc="upper left", frameon=False, markerscale=4).legend_handles[1].set_linewidth(1.5)
    week.set_title("The shaded week")

    error.set_title(f"Error of float32 at bandwidth {named(narrow)}")
    labels = ("sqdist", "dot products")
    for values, color, label in zip(errors[narrow], ("tab:green", "tab:orange"), labels, strict=True):
        # An error of exactly 0 has no place on a logarithmic axis.
        error.semilogy(seen.dates, np.where(values > 0, values, np.nan), ".", ms=1.5, color=color, label=label)
    error.set_ylabel("distance from float64 (°C)")
    error.legend(loc="upper left", frameon=False, markerscale=8)

    for panel in (year, error):
        panel.xaxis.set_major_locator(mdates.MonthLocator())
        panel.xaxis.set_major_formatter(mdates.DateFormatter("%b"))
        panel.set_xlabel("month")
    week.xaxis.set_major_formatter(mdates.DateFormatter("%d %b"))
    week.set_xlabel("day")
    for panel in axes.values():
        panel.margins(x=0.01)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=150)


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, not {text}")
    return number


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bandwidth", type=positive, default=1.5, metavar="DAYS", help="blue curve (default: 1.5)")
    parser.add_argument("--narrow", type=positive, default=0.125, metavar="DAYS", help="red curve (default: 0.125)")
    parser.add_argument("--output", default="temperatures.png", help="the picture (default: temperatures.png)")
    options = parser.parse_args(arguments)
    if options.narrow >= options.bandwidth:
        parser.error(f"--narrow must be below --bandwidth, {options.bandwidth:g} days, not {options.narrow:g}")

    seen = observations()
    count = len(seen.hours)
    column = seen.hours[:, None]
    cost = cuflash.explain(column, column, seen.celsius[:, None], score="sqdist")
    print(f"{count} observations, estimated at each of their times, in float64.")
    matrix, tiles = (size / 2**20 for size in (cost.scores_total, cost.workspace))
    print(f"The {count} x {count} weights would fill {matrix:.0f} MiB; the tiles take {tiles:.1f} MiB.")

    estimates, errors = {}, {}
    for bandwidth in (24 * options.bandwidth, 24 * options.narrow):
        estimates[bandwidth] = exact = regression(seen.hours, seen.hours, seen.celsius, bandwidth)
        errors[bandwidth] = float32_errors(seen, exact, bandwidth)

    print("\nLargest differences in degrees C, each from the float64 estimate:\n")
    print("bandwidth     statsmodels    float32, sqdist    float32, dot products")
    agreed = True
    for bandwidth, estimate in estimates.items():
        apart = disagreement(seen, estimate, bandwidth)
        agreed &= apart <= AGREEMENT
        sqdist, dots = (e.max() for e in errors[bandwidth])
        print(f"{named(bandwidth):12} {apart:12.1e} {sqdist:18.1e} {dots:24.1e}")

    largest = np.float32(seen.hours[-1] ** 2)
    spacing = np.spacing(largest)
    print("\nTimes are whole hours: exact in float32, and so are their differences.  Their")
    print(f"products reach {largest:.3g}, where float32 has a number only every {spacing:g}.  The lost part")
    print("is divided by the bandwidth squared: narrow kernels need sqdist, or float64.")
    try:
        draw(seen, estimates, errors, options.output)
    except (OSError, ValueError) as error:
        sys.exit(f"--output {options.output}: {error}")
    print(f"\nPicture: {options.output}")
    if not agreed:
        sys.exit(f"FAILED: cuflash and statsmodels are further apart than {AGREEMENT:g}")


if __name__ == "__main__":
    main()

"""What every benchmark reports in the same way: ratios with a confidence bound, versions, JSON, and tables in a document."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cuflash


def require_gpu(what: str, instead: str = "") -> None:
    """Refuse a benchmark where CuPy or a GPU is missing."""
    from ..backends import cuda

    reason = cuda.unusable()
    if reason is not None:
        raise cuflash.NoBackendError(f"{what} needs a GPU and CuPy (pip install 'cuflash[cuda13]'): {reason}{instead}")


def lower_bound(ratios: Sequence[float]) -> float:
    """Lower end of the one-sided 95 % confidence interval of the median, by order statistics."""
    n, rank, chance = len(ratios), 0, 0.0
    while chance + math.comb(n, rank) / 2**n <= 0.05:
        chance += math.comb(n, rank) / 2**n
        rank += 1
    return sorted(ratios)[max(rank - 1, 0)]


def ratio(theirs: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """Their time / ours of the same turn: the median with the lower end of its confidence interval."""
    ratios = theirs / own
    return {"ratio": float(np.median(ratios)), "lower": float(lower_bound(list(ratios)))}


def cost(variant: np.ndarray, plain: np.ndarray) -> dict[str, float]:
    """A variant's time / that of the plain call in the same turn: the median with the upper end of its confidence interval."""
    costs = variant / plain
    return {"cost": float(np.median(costs)), "upper": float(1 / lower_bound(list(1 / costs)))}


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    logs = [math.log(x) for x in values]
    return math.exp(sum(logs) / len(logs))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python, and those of the packages that are installed (cuflash in any case)."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == "cuflash":
                found[package] = cuflash.__version__
    return found


def commit() -> str:
    """The commit of the checkout that runs, with a plus where files differ from it; "" outside of one."""
    root = Path(cuflash.__file__).resolve().parent.parent
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")


def write_markdown(path: Path, name: str, text: str) -> None:
    """Write tables: between the marker lines "<!-- name: begin -->" and "<!-- name: end -->" of a document, or as a file of their own."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text() if path.exists() else ""
    if begin in old and end in old:
        head, rest = old.split(begin, 1)
        text = head + begin + "\n" + text + end + rest.split(end, 1)[1]
    path.write_text(text)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return ["| " + " | ".join(header) + " |", "|---" * len(header) + "|", *("| " + " | ".join(row) + " |" for row in rows)]

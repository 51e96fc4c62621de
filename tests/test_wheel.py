"""What pip would install: built from the source archive, put into a fresh environment, used there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROBES = ("probe.cu", "include/probe.cuh")  # stand for the kernels that a later version brings

# Isolated mode: neither the working directory nor PYTHONPATH can lend it the checkout's cuflash.
USE = """
import json, sys
import numpy as np
import cuflash
rng = np.random.default_rng(1)
q, k, v = (rng.standard_normal((2, 33, 3, 16)) for _ in range(3))
out = cuflash.attention(q, k, v)
logits = np.einsum("bihd,bjhd->bhij", q, k) / 4
weights = np.exp(logits - logits.max(-1, keepdims=True))
expected = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)
error = np.abs(out - expected).max()
print(json.dumps({"file": cuflash.__file__, "error": error, "size": np.abs(expected).max()}))
"""


def run(*command: object, **options: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, env=environment, **options
    )
    assert done.returncode == 0, f"{command[:4]}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Folder with the wheel and the source archive; the wheel is made from the archive, so that both are complete."""
    place = tmp_path_factory.mktemp("build")
    source = place / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("cuflash", "kernels_cu", "tests", "examples", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for probe in PROBES:
        path = source / "kernels_cu" / probe
        path.parent.mkdir(exist_ok=True)
        path.write_text("// nothing\n")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place, source)
    return place


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (path,) = built.glob("cuflash-*.whl")
    return path


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory, wheel) -> Path:
    """Interpreter of a new environment holding the wheel; its dependencies are borrowed from the running one."""
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, with_pip=False, symlinks=os.name != "nt")
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
        wheel,
    )
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # Paths in a .pth file come after site-packages, and .pth files in them are not read: no editable install gets in.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(paths)) + "\n")
    return python


def relative_files(folder: Path, pattern: str = "*") -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_every_module_and_kernel_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"cuflash/{name}" for name in relative_files(ROOT / "cuflash")}
    kernels = {f"cuflash/kernels_cu/{name}" for name in (*relative_files(ROOT / "kernels_cu"), *PROBES)}
    assert {name for name in names if ".dist-info/" not in name} == modules | kernels


def test_source_archive_holds_what_the_tests_need(built):
    (path,) = built.glob("cuflash-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"LICENSE", "README.md", "setup.cfg", "pyproject.toml", *(f"kernels_cu/{name}" for name in PROBES)}
    expected |= {
        f"{folder}/{name}" for folder in ("tests", "examples", "cuflash") for name in relative_files(ROOT / folder, "*.py")
    }
    assert expected <= names


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.11" in lines
    required = {
        line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert {line.split(">=")[0] for line in required} == {"numpy", "numba", "scipy", "threadpoolctl", "ml_dtypes", "platformdirs"}
    assert "numpy>=2.1.2" in required


def test_installed_wheel_computes(fresh_python, tmp_path):
    result = json.loads(run(fresh_python, "-I", "-c", USE, cwd=tmp_path).splitlines()[-1])
    assert Path(result["file"]).is_relative_to(fresh_python.parent.parent)
    # 33 weighted terms and an exponential of logits below 10: some dozens of roundings.
    assert result["error"] <= 64 * sys.float_info.epsilon * result["size"]


def test_installed_wheel_has_its_kernels_beside_its_modules(fresh_python, tmp_path):
    folder = "(pathlib.Path(cuflash.__file__).parent / 'kernels_cu')"
    code = f"import cuflash, pathlib; print(*sorted(p.name for p in {folder}.iterdir()))"
    assert {"probe.cu", "include", "README.md"} <= set(run(fresh_python, "-I", "-c", code, cwd=tmp_path).split())


def test_installed_commands(fresh_python, tmp_path):
    info = json.loads(run(fresh_python, "-I", "-m", "cuflash", "info", "--json", cwd=tmp_path))
    assert Path(info["location"]).is_relative_to(fresh_python.parent.parent)
    assert info["backends"]["cpu"]["usable"] and info["backends"]["reference"]["usable"]
    (script,) = fresh_python.parent.glob("cuflash*")
    assert run(script, "--version", cwd=tmp_path).strip() == f"cuflash {info['cuflash']}"

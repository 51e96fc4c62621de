"""What importing cuflash does, and does not do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import cuflash

HEAVY = ("numba", "llvmlite", "cupy", "torch", "jax", "mpi4py", "scipy", "triton", "tqdm", "cuda", "onnx", "matplotlib")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    tell = "import json, sys\nprint(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    return set(json.loads(run_python(f"{code}\n{tell}").splitlines()[-1]))


def test_import_loads_nothing_heavy():
    loaded = loaded_after("import cuflash")
    assert "cuflash" in loaded
    assert not loaded & set(HEAVY)


def test_import_and_star_import_open_no_cuda_library():
    """No CUDA library is mapped into the process, whatever module would have done it."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc on this system")
    out = run_python("from cuflash import *\nprint(open('/proc/self/maps').read())")
    assert "libcuda.so" not in out and "libcudart" not in out and "libnvrtc" not in out


def test_listing_and_help_load_no_gpu_library():
    loaded = loaded_after("import cuflash\nfor name in dir(cuflash): getattr(cuflash, name)")
    assert not loaded & {"cupy", "cuda", "torch", "jax", "mpi4py", "triton"}


@pytest.mark.parametrize("name", cuflash.__all__)
def test_public_names_exist_and_are_documented(name):
    value = getattr(cuflash, name)
    assert name in dir(cuflash)
    if name != "__version__":
        assert value.__doc__ and len(value.__doc__.strip()) > 30, f"{name} has no docstring"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'attentoin'"):
        cuflash.attentoin  # noqa: B018


def test_version_is_the_one_that_setuptools_reads():
    source = (Path(cuflash.__file__)).read_text()
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+\S*)"$', source, re.MULTILINE) == [cuflash.__version__]


def test_typed_marker_is_beside_the_modules():
    assert files("cuflash").joinpath("py.typed").is_file()

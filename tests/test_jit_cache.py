"""The JIT's cache and its loaded kernels: one compile however many ask, nothing damaged ever runs, one module a device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from toy import files, in_threads, nvrtc, root, slow_compiles, toy, write  # noqa: F401  fixtures among them

from cuflash import backends, cli, compiled, device, jit
from cuflash.device import KNOWN

# ---- cache ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "zero length", "foreign", "garbled"])
def test_a_bad_file_is_compiled_again(nvrtc, damage):
    good, _ = jit.cubin(toy(), "sm_80")
    (path,) = files()
    content = path.read_bytes()
    if damage == "foreign":
        jit.cubin(toy(4), "sm_80")
        (other,) = set(files()) - {path}
        os.replace(other, path)
    else:
        path.write_bytes(
            {"truncated": content[:-100], "zero length": b"", "garbled": content[:99] + b"~~" + content[101:]}[damage]
        )
    assert jit.cubin(toy(), "sm_80") == (good, "compiled")
    assert jit.cubin(toy(), "sm_80") == (good, "cached") and files() == [path] and path.read_bytes() == content


def test_an_unwritable_cache_means_memory_and_one_warning(nvrtc, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for n in (3, 4):
        first, what = jit.cubin(toy(n), "sm_80")
        assert what == "not kept" and jit.cubin(toy(n), "sm_80") == (first, "cached")
    assert len(caplog.records) == 1 and "cannot keep" in caplog.text


def test_sixteen_threads_compile_once(nvrtc, monkeypatch):
    names = slow_compiles(monkeypatch)
    results = in_threads(16, lambda i: jit.cubin(toy(), "sm_80"))
    assert names == ["toy_n3"] and len(files()) == 1
    assert sorted(what for _, what in results) == ["cached"] * 15 + ["compiled"] and len({code for code, _ in results}) == 1


def test_different_kernels_compile_at_the_same_time(nvrtc, monkeypatch):
    together, original = threading.Barrier(2), jit._compile

    def compile_together(*arguments):
        together.wait(30)  # broken, and an error, unless both are here
        return original(*arguments)

    monkeypatch.setattr(jit, "_compile", compile_together)
    assert [what for _, what in in_threads(2, lambda i: jit.cubin(toy(i), "sm_80"))] == ["compiled"] * 2


CHILD = """
import sys
from pathlib import Path
from cuflash import jit
sys.path.insert(0, {tests!r})
from toy import toy
jit.kernel_directory = lambda: Path({root!r})
print(jit.cubin(toy(), "sm_80")[1], any("libnvrtc" in line for line in open("/proc/self/maps")))
"""


def start(root: Path) -> subprocess.Popen:
    code = CHILD.format(tests=str(Path(__file__).parent), root=str(root))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_sixteen_processes_leave_one_good_file_and_the_next_does_not_load_nvrtc(nvrtc):
    processes = [start(nvrtc) for _ in range(16)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and err == "" and out.split()[0] in ("compiled", "cached")
    assert len(files()) == 1
    assert jit.cubin(toy(), "sm_80")[1] == "cached"
    if jit.nvrtc_version().count(".") == 1:
        pytest.skip("this NVRTC came without a wheel: it must be loaded to be asked for its version")
    out, err = start(nvrtc).communicate(timeout=60)
    assert out.split() == ["cached", "False"] and err == ""


def test_the_log_has_one_line_for_each(nvrtc, monkeypatch, capsys):
    jit.cubin(toy(), "sm_80")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("CUFLASH_LOG", "plan,jit")
    for n in (3, 4):
        jit.cubin(toy(n), "sm_90")
    jit.cubin(toy(3), "sm_90")
    lines = capsys.readouterr().err.splitlines()
    patterns = (r"toy_n3 sm_90a \d+ ms compiled", r"toy_n4 sm_90a \d+ ms compiled", r"toy_n3 sm_90a [\d.]+ ms cached")
    assert len(lines) == 3
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch("cuflash jit: " + pattern, line)


# ---- precompile -------------------------------------------------------------------------------------------------------


def test_precompile_fills_the_cache(nvrtc, monkeypatch, capsys):
    kernels = types.SimpleNamespace(instances=lambda arch: [toy(n) for n in (1, 2, 3)])
    monkeypatch.setattr(backends, "load", lambda name: kernels)
    assert cli.main(["precompile", "--arch", "sm_90,sm_80,sm_90a", "--jobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[-1].startswith("6 compiled, 0 there before") and len(files()) == 6
    assert [line.split()[0] for line in lines[:-1]] == [f"[{i}/6]" for i in range(1, 7)]
    assert cli.main(["precompile", "--arch", "sm_90a,sm_80"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 compiled, 6 there before")


@pytest.mark.parametrize("arch", ["sm_10", "sm_70", "sm_91", "sm_999", "sm_80,sm_9"])
def test_precompile_names_the_architectures_that_there_are(nvrtc, capsys, arch):
    assert cli.main(["precompile", "--arch", arch]) == 2
    error = capsys.readouterr().err
    assert f"--arch: got {arch.split(',')[-1]!r}; allowed are sm_75, sm_80, " in error and "sm_90a" in error and "sm_70," not in error
    assert not compiled.directory().exists()


def test_precompile_fails_where_nothing_can_be_kept_or_compiled(nvrtc, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(backends, "load", lambda name: types.SimpleNamespace(instances=lambda arch: [toy()]))
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file"))
        assert cli.main(["precompile", "--arch", "sm_80"]) == 1
        assert "could not be kept" in capsys.readouterr().err
    write(nvrtc, {"toy.cu": "wrong"})
    assert cli.main(["precompile", "--arch", "sm_80"]) == 1
    assert "toy.cu(1)" in capsys.readouterr().err


# ---- on a GPU ---------------------------------------------------------------------------------------------------------


def launch(function, ordinal: int) -> list[float]:
    import cupy

    with cupy.cuda.Device(ordinal):
        p = cupy.arange(4, dtype=cupy.float32)
        function((1,), (4,), (p,))
        return p.tolist()


@pytest.mark.gpu
def test_a_function_runs_and_is_loaded_once(nvrtc, monkeypatch):
    names = slow_compiles(monkeypatch)
    assert not jit.loaded(toy(), 0)
    functions = in_threads(8, lambda i: jit.function(toy(), 0))
    assert names == ["toy_n3"] and len({id(function) for function in functions}) == 1
    assert jit.loaded(toy(), 0) and launch(functions[0], 0) == [0, 6, 12, 18]


@pytest.mark.gpu
def test_shared_memory_is_opted_in_to_and_only_grows(nvrtc):
    import cupy

    def granted() -> int:
        return cupy.cuda.driver.funcGetAttribute(8, function.ptr)

    function = jit.function(toy(), 0)
    for wanted, expected in ((60000, 60000), (1000, 60000), (65536, 65536)):
        assert jit.function(toy(), 0, wanted) is function and granted() == expected
    with pytest.raises(Exception, match="(?i)invalid"):
        jit.function(toy(), 0, 1 << 20)


@pytest.mark.gpu
def test_a_cold_kernel_does_not_break_a_capture(nvrtc):
    import cupy

    warm, cold = jit.function(toy(3), 0), toy(4)
    launch(warm, 0)
    p = cupy.arange(4, dtype=cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(jit.JitError, match="toy_n4 is not loaded yet"):
            jit.function(cold, 0)
        assert jit.function(toy(3), 0) is warm
        warm((1,), (4,), (p,))
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    assert p.tolist() == [0, 6, 12, 18]


@pytest.mark.gpu
def test_a_pretended_gpu_compiles_for_the_real_one(nvrtc):
    stub = 'extern "C" __global__ void toy_arch(float* p) { p[threadIdx.x] = CUFLASH_ARCH; }'
    source = toy(stub=stub, name="toy_arch")
    major, minor = device.actual(0).cc
    assert launch(jit.function(source, 0), 0) == [100 * major + 10 * minor] * 4
    with device.pretend(KNOWN["T4"]):
        assert not jit.loaded(source, 0)
        assert launch(jit.function(source, 0), 0) == [750] * 4
    assert launch(jit.function(source, 0), 0) == [100 * major + 10 * minor] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_device_has_its_own_module(nvrtc, order):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    for ordinal in (*order, *order):
        assert launch(jit.function(toy(), ordinal), ordinal) == [0, 6, 12, 18]


@pytest.mark.gpu
def test_a_damaged_file_still_gives_a_result(nvrtc):
    jit.cubin(toy(), device.actual(0).arch)
    (path,) = files()
    path.write_bytes(path.read_bytes()[:200])
    assert launch(jit.function(toy(), 0), 0) == [0, 6, 12, 18]

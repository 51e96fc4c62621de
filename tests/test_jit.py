"""The JIT: one translation unit, one compile per key, nothing stale, and messages that tell what is missing or wrong.

Compiling needs NVRTC and CuPy but no GPU; the tests that load a kernel are marked.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from cuflash import backends, cli, compiled, device, jit
from cuflash.device import KNOWN

TOY = {
    "toy.cu": '// A kernel.\n#include "include/scale.cuh"\n#include "include/twice.cuh"\n'
    "template <int N> __device__ void body(float* p) { p[threadIdx.x] = scale<N>(twice(p[threadIdx.x])); }\n",
    "include/scale.cuh": "#pragma once\ntemplate <int N> __device__ float scale(float x) { return N * x; }\n",
    "include/twice.cuh": '#pragma once\n#include "scale.cuh"\n__device__ inline float twice(float x) { return scale<2>(x); }\n',
}


def toy(n: int = 3, **changes) -> jit.Source:
    """The toy kernel: p[i] *= 2 * n."""
    fields = {
        "file": "toy.cu",
        "stub": f'extern "C" __global__ void toy_n{n}(float* p) {{ body<{n}>(p); }}',
        "name": f"toy_n{n}",
    }
    return jit.Source(**(fields | changes))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of toy kernels, an empty cache, and a JIT that has seen nothing yet."""
    write(tmp_path / "kernels", TOY)
    monkeypatch.setattr(jit, "kernel_directory", lambda: tmp_path / "kernels")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_warned", set())
    for name in ("_in_memory", "_functions", "_shared"):
        monkeypatch.setattr(jit, name, {})
    return tmp_path / "kernels"


@pytest.fixture
def nvrtc(root):
    """The same where NVRTC is installed."""
    if reason := jit.why_unusable():
        pytest.skip(reason)
    return root


def files() -> list[Path]:
    return sorted(compiled.directory().iterdir())


# ---- source text ------------------------------------------------------------------------------------------------------


def test_each_header_is_put_in_once_and_places_are_kept(root):
    text = jit.assemble(toy())
    assert text.count("float scale(float x)") == 1 and text.count("float twice(float x)") == 1
    assert "pragma once" not in text and not re.search(r"^\s*#\s*include", text, re.MULTILINE)
    assert text.index("scale(float x)") < text.index("twice(float x)") < text.index("void body") < text.index("void toy_n3")
    place, places = None, {}
    for line in text.splitlines():
        if directive := re.fullmatch(r'#line (\d+) "(.+)"', line):
            place = (directive[2], int(directive[1]))
        else:
            places[place] = line
            place = (place[0], place[1] + 1)
    for name, original in TOY.items():
        for number, line in enumerate(original.splitlines(), 1):
            if not line.startswith("#"):
                assert places[name, number] == line
    assert places["stub of toy_n3", 1] == toy().stub


def test_angle_includes_and_comments_are_left_alone(root):
    write(root, {"odd.cu": '#include <cuda_fp16.h>\n// #include "nowhere.cuh"\n  #  include "include/scale.cuh"  // late\n'})
    text = jit.assemble(toy(file="odd.cu"))
    assert "#include <cuda_fp16.h>\n" in text and '// #include "nowhere.cuh"' in text and "float scale(float x)" in text


def test_a_missing_include_names_the_line(root):
    write(root, {"include/twice.cuh": '\n\n#include "nowhere.cuh"\n'})
    with pytest.raises(jit.JitError, match=r"include/twice\.cuh, line 3: there is no nowhere\.cuh"):
        jit.assemble(toy())
    with pytest.raises(jit.JitError, match=r"cannot read the kernel source .*absent\.cu"):
        jit.assemble(toy(file="absent.cu"))


def test_the_sources_are_found_beside_the_modules_or_beside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "cuflash"
    package.mkdir()
    monkeypatch.setattr(jit, "__file__", str(package / "jit.py"))
    with pytest.raises(jit.JitError, match="kernels_cu"):
        jit.kernel_directory()
    (tmp_path / "kernels_cu").mkdir()
    assert jit.kernel_directory() == tmp_path / "kernels_cu"
    (package / "kernels_cu").mkdir()
    assert jit.kernel_directory() == package / "kernels_cu"


@pytest.mark.parametrize(
    ("arch", "as_arch", "first", "macro"),
    [
        ("sm_80", None, "-arch=sm_80", "800"),
        ("sm_90", None, "-arch=sm_90a", "900"),
        ("sm_90a", None, "-arch=sm_90a", "900"),
        ("sm_90a", "sm_75", "-arch=sm_90a", "750"),
        ("sm_121", None, "-arch=sm_121", "1210"),
    ],
)
def test_options(arch, as_arch, first, macro):
    options = jit.options(arch, as_arch)
    assert options[0] == first and f"-DCUFLASH_ARCH={macro}" in options
    assert not any("ftz" in option or "fast_math" in option for option in options)


@pytest.mark.parametrize("arch", ["90", "sm_", "compute_90", "sm_90a -lto", ""])
def test_what_is_no_architecture(arch):
    with pytest.raises(ValueError, match="'sm_80'"):
        jit.options(arch)


# ---- key --------------------------------------------------------------------------------------------------------------


def test_the_key_depends_on_everything(tmp_path):
    header = tmp_path / "cuda_fp16.h"
    header.write_text("1")
    base = {"text": "t", "options": ("-arch=sm_80",), "headers": {"cuda_fp16.h": header}, "version": "13.0.88"}
    keys = [jit.key(**base)]
    for change in ({"text": "u"}, {"options": ("-arch=sm_90a",)}, {"options": ("-arch=sm_80", "-g")}, {"version": "13.0.89"}):
        keys.append(jit.key(**(base | change)))
    header.write_text("2")
    keys.append(jit.key(**base))
    header.with_suffix(".hpp").write_text("3")
    keys.append(jit.key(**base))
    assert len(set(keys)) == len(keys)
    assert jit.key(**base) == keys[-1] and re.fullmatch("[0-9a-f]{64}", keys[-1])


def test_whatever_changes_is_compiled_again(nvrtc, monkeypatch):
    assert jit.cubin(toy(), "sm_80")[1] == "compiled"
    assert jit.cubin(toy(), "sm_80")[1] == "cached"
    for change in ({"arch": "sm_90"}, {"as_arch": "sm_75"}, {"source": toy(4)}, {"source": toy(options=("-ftz=true",))}):
        arguments = {"source": toy(), "arch": "sm_80"} | change
        assert jit.cubin(**arguments)[1] == "compiled"
        assert jit.cubin(**arguments)[1] == "cached"
    write(nvrtc, {"include/scale.cuh": TOY["include/scale.cuh"].replace("N * x", "x * N")})
    assert jit.cubin(toy(), "sm_80")[1] == "compiled"
    write(nvrtc, TOY)
    assert jit.cubin(toy(), "sm_80")[1] == "cached"
    newer = jit.nvrtc_version() + ".1"
    monkeypatch.setattr(jit, "nvrtc_version", lambda: newer)
    assert jit.cubin(toy(), "sm_80")[1] == "compiled"


def test_the_version_of_the_library_counts_where_the_metadata_are_wrong(nvrtc, monkeypatch):
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "99.1.2")
    assert jit.cubin(toy(), "sm_80")[1] == "compiled"
    loaded = jit._loaded_version(jit._nvrtc())
    text, options = jit.assemble(toy()), jit.options("sm_80")
    assert jit.key(text, options, {}, loaded)[:32] in files()[0].name
    assert jit.cubin(toy(), "sm_80")[1] == "cached"


# ---- compiling --------------------------------------------------------------------------------------------------------


def test_a_whole_elf_image_and_a_log_that_tells_registers(nvrtc):
    cubin, log = jit.compile_cubin(toy(), "sm_80")
    assert cubin[:4] == b"\x7fELF" and "Used" in log and "0 bytes spill stores" in log and "toy_n3" in log
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 32)
    size, count, section_size, section_count = struct.unpack_from("<4H", cubin, 54)
    assert len(cubin) == max(program_headers + size * count, section_headers + section_size * section_count)


def test_sm_90a_is_accepted_and_means_wgmma(nvrtc):
    stub = 'extern "C" __global__ void toy_wgmma() { asm volatile("wgmma.fence.sync.aligned;"); }'
    source = toy(stub=stub, name="toy_wgmma")
    for arch in ("sm_90a", "sm_90"):
        assert "sm_90a" in jit.compile_cubin(source, arch)[1]
    with pytest.raises(jit.JitError, match="wgmma"):
        jit.compile_cubin(source, "sm_80")


def test_the_macro_chooses_the_code_path(nvrtc):
    stub = 'static_assert(CUFLASH_ARCH == 750);\nextern "C" __global__ void toy_old() {}'
    jit.compile_cubin(toy(stub=stub, name="toy_old"), "sm_90a", "sm_75")
    with pytest.raises(jit.JitError, match=r"stub of toy_old\(1\)"):
        jit.compile_cubin(toy(stub=stub, name="toy_old"), "sm_90a")


@pytest.mark.parametrize("name", sorted(TOY))
def test_an_error_names_file_and_line(nvrtc, name):
    write(nvrtc, {name: TOY[name] + "\n\nint wrong = ;\n"})
    line = TOY[name].count("\n") + 3
    with pytest.raises(jit.JitError, match=rf"toy_n3 does not compile.*-arch=sm_80[\s\S]*{re.escape(name)}\({line}\): error"):
        jit.cubin(toy(), "sm_80")
    assert not compiled.directory().exists()


def test_an_unknown_architecture_is_the_compilers_error(nvrtc):
    with pytest.raises(jit.JitError, match="sm_999"):
        jit.compile_cubin(toy(), "sm_999")


def test_toolkit_headers_are_found_or_their_extra_is_named(nvrtc, monkeypatch):
    source = toy(
        stub='#include <cuda_fp16.h>\nextern "C" __global__ void toy_half(__half* p) { *p = __float2half(1.f); }',
        name="toy_half",
    )
    pathfinder = pytest.importorskip("cuda.pathfinder")
    if pathfinder.find_nvidia_header_directory("cudart"):
        assert jit.cubin(source, "sm_80")[1] == "compiled" and jit.cubin(source, "sm_80")[1] == "cached"
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    with pytest.raises(jit.JitError, match=r"headers are missing \(cuda_fp16\.h\); pip install 'cuflash\[cuda1[23]\]'"):
        jit.compile_cubin(source, "sm_80")


# ---- missing pieces ---------------------------------------------------------------------------------------------------


@pytest.fixture
def forgetful():
    """What was found out about NVRTC is forgotten before and after."""
    for function in (jit.why_unusable, jit.nvrtc_version):
        function.cache_clear()
    yield
    for function in (jit.why_unusable, jit.nvrtc_version):
        function.cache_clear()


def fake_cupy(monkeypatch, get_version, build: int) -> None:
    """CuPy's modules as jit.py uses them, with no NVRTC wheel beside them."""
    binding = types.SimpleNamespace(getVersion=get_version, NVRTCError=RuntimeError)
    driver = types.SimpleNamespace(get_build_version=lambda: build)
    for name, attributes in (
        ("cupy_backends", {}),
        ("cupy_backends.cuda", {}),
        ("cupy_backends.cuda.api", {"driver": driver}),
        ("cupy_backends.cuda.libs", {"nvrtc": binding}),
    ):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**attributes))

    def absent(name):
        raise jit.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(jit.importlib.metadata, "version", absent)


@pytest.mark.parametrize(("build", "extra"), [(13020, "cuda13"), (12090, "cuda12")])
def test_a_missing_nvrtc_names_the_extra(root, monkeypatch, forgetful, build, extra):
    def fail():
        raise RuntimeError("libnvrtc.so is not here\nsecond line")

    fake_cupy(monkeypatch, fail, build)
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: object())
    reason = jit.why_unusable()
    assert f"pip install 'cuflash[{extra}]'" in reason and "NVRTC" in reason and "libnvrtc.so is not here" in reason
    assert "\n" not in reason
    with pytest.raises(jit.JitError, match=extra):
        jit.cubin(toy(), "sm_80")


def test_a_missing_cupy_names_the_extra(root, monkeypatch, forgetful):
    for name in ("cupy", "cupy_backends", "cupy_backends.cuda.api", "cupy_backends.cuda.libs"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: None)
    reason = jit.why_unusable()
    assert "CuPy is not installed" in reason and "pip install 'cuflash[cuda13]'" in reason and "cuda12" in reason


def test_nvrtc_of_a_toolkit_is_asked_for_its_version(monkeypatch, forgetful):
    fake_cupy(monkeypatch, lambda: (12, 9), 12090)
    assert jit.nvrtc_version() == "12.9" and jit.why_unusable() is None


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


def slow_compiles(monkeypatch) -> list[str]:
    """The names compiled from now on; each compile takes a while longer, so that threads meet."""
    names, original = [], jit._compile

    def compile_slowly(name, *rest):
        names.append(name)
        time.sleep(0.1)
        return original(name, *rest)

    monkeypatch.setattr(jit, "_compile", compile_slowly)
    return names


def in_threads(count: int, work) -> list:
    """What ``work(i)`` returned in each of ``count`` threads that start together."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(i):
        barrier.wait(30)
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


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
from test_jit import toy
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

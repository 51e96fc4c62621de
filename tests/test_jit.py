"""The JIT: one translation unit, one compile per key, nothing stale, and messages that tell what is missing or wrong.

Compiling needs NVRTC and CuPy but no GPU; the tests that load a kernel are marked.
"""

from __future__ import annotations

import re
import struct
import sys
import types

import pytest
from toy import TOY, files, nvrtc, root, toy, write  # noqa: F401  fixtures among them

from cuflash import compiled, jit

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

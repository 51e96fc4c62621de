"""Kernel source -> one translation unit -> cubin -> a loaded function, each step once.

NVRTC compiles, through CuPy's binding; no GPU is needed for that. Cubins are kept by compiled.py under a hash of everything
they depend on, so that nothing stale ever runs and a second process compiles nothing: it does not even load NVRTC.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import compiled, host
from .device import actual, pretended

logger = logging.getLogger("cuflash")

OLDEST = 75  # architecture that the kernels are for
FORMAT = 1  # of key and file; raise it to leave every older file behind
_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"]+)"')
_SYSTEM_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>]+)>", re.MULTILINE)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class JitError(RuntimeError):
    """A kernel cannot be compiled: NVRTC or headers are missing, or the source is wrong; the message says which."""


@dataclass(frozen=True)
class Source:
    """One kernel instance.

    Attributes
    ----------
    file : str
        Its source in kernels_cu, such as "prefill_fa2.cu".
    stub : str
        A few lines of C++ put after that text: they fix the template parameters and define the ``extern "C" __global__`` entry.
    name : str
        The entry's name, readable: "prefill_fa2_bf16_d128_m128n64_causal".
    options : tuple[str, ...]
        Further NVRTC options, such as "-ftz=true".
    """

    file: str
    stub: str
    name: str
    options: tuple[str, ...] = ()


# ---- source text ------------------------------------------------------------------------------------------------------


def kernel_directory() -> Path:
    """Where the kernel sources are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for parent in (package, package.parent):
        if (parent / "kernels_cu").is_dir():
            return parent / "kernels_cu"
    raise JitError(f"the kernel sources are missing: there is no folder kernels_cu in {package} or in {package.parent}")


def assemble(source: Source) -> str:
    """One translation unit: the file with each of its quoted includes put in once, then the stub.

    ``#line`` directives keep the places that compiler messages name, relative to kernels_cu. Quoted includes are looked up
    beside the including file, then in kernels_cu, and must not depend on an ``#if``. ``#include <...>`` is left to NVRTC.
    """
    root = kernel_directory()
    lines = _inlined(root / source.file, root, set())
    stub = source.stub if source.stub.endswith("\n") else source.stub + "\n"
    return "".join((*lines, f'#line 1 "stub of {source.name}"\n', stub))


def _inlined(path: Path, root: Path, seen: set[Path]) -> Iterator[str]:
    """Lines of a file with its includes in place."""
    seen.add(path.resolve())
    shown = os.path.relpath(path, root).replace(os.sep, "/")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise JitError(f"cannot read the kernel source {path}: {error}") from error
    yield f'#line 1 "{shown}"\n'
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            # The one effect of "pragma once" is had already, and NVRTC warns of it in a main file.
            yield "\n" if line.split() == ["#pragma", "once"] else line + "\n"
            continue
        places = (path.parent / include[1], root / include[1])
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise JitError(f"{shown}, line {number}: there is no {include[1]} in {places[0].parent} or in {root}")
        if found.resolve() not in seen:
            yield from _inlined(found, root, seen)
            yield f'#line {number + 1} "{shown}"\n'
        else:
            yield "\n"


def options(arch: str, as_arch: str | None = None) -> tuple[str, ...]:
    """NVRTC options for an architecture such as "sm_80"; "sm_90" means "sm_90a", which alone has wgmma and TMA.

    The kernels choose their code paths by ``CUFLASH_ARCH`` (800, 900, ...), which is that of ``as_arch`` if given: paths of
    another GPU then run on this one. Denormals are kept: there is no -ftz.
    """
    number = exact(as_arch or arch).removeprefix("sm_").rstrip("af")
    return (f"-arch={exact(arch)}", "--std=c++17", "-lineinfo", "--ptxas-options=-v", f"-DCUFLASH_ARCH={number}0")


def exact(arch: str) -> str:
    """The architecture as NVRTC is asked for it: "sm_90" becomes "sm_90a"."""
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f"arch: got {arch!r}; it must look like 'sm_80' or 'sm_90a'")
    return "sm_90a" if arch == "sm_90" else arch


def supported() -> tuple[str, ...]:
    """Architectures that this NVRTC compiles the kernels for.

    Raises
    ------
    JitError
        If NVRTC is missing.
    """
    return tuple(exact(f"sm_{number}") for number in _nvrtc().getSupportedArchs() if number >= OLDEST)


# ---- NVRTC ------------------------------------------------------------------------------------------------------------


def _extra() -> str:
    """What to install, in words."""
    try:
        from cupy_backends.cuda.api import driver

        return f"pip install 'cuflash[cuda{driver.get_build_version() // 1000}]'"
    except Exception:  # noqa: BLE001  no CuPy, or a broken one
        return "pip install 'cuflash[cuda13]' (or cuda12: the CUDA version that nvidia-smi prints)"


def _nvrtc() -> Any:
    """CuPy's binding of NVRTC, with the library loaded."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # noqa: BLE001  CuPy raises ImportError, RuntimeError and others here
        installed = importlib.util.find_spec("cupy") is not None
        what = "NVRTC, CUDA's run-time compiler, cannot be loaded" if installed else "CuPy is not installed"
        raise JitError(f"{what}; {_extra()} brings it ({_first_line(error)})") from error
    return nvrtc


@functools.cache
def why_unusable() -> str | None:
    """Why kernels cannot be compiled here, in the user's words, or None."""
    try:
        nvrtc_version()
    except JitError as error:
        return str(error)
    return None


@functools.cache
def nvrtc_version() -> str:
    """Version of the NVRTC that will compile, as exactly as it is known.

    The wheel's metadata tell it without loading the library, which is 100 MB large; CuPy looks in the wheels first.
    """
    try:
        from cupy_backends.cuda.api import driver

        major = driver.get_build_version() // 1000
        claimed = importlib.metadata.version("nvidia-cuda-nvrtc" if major >= 13 else f"nvidia-cuda-nvrtc-cu{major}")
    except Exception:  # noqa: BLE001  no such wheel: NVRTC of a toolkit or of conda, or none
        claimed = ""
    return claimed or _loaded_version(_nvrtc())


def _loaded_version(nvrtc: Any) -> str:
    major, minor = nvrtc.getVersion()
    return f"{major}.{minor}"


def _true_version(nvrtc: Any, claimed: str) -> str:
    """The claimed version unless the loaded library is another one (a process may have loaded its own before)."""
    loaded = _loaded_version(nvrtc)
    return claimed if claimed.split(".")[:2] == loaded.split(".") else loaded


def _toolkit_headers(text: str) -> dict[str, Path]:
    """CUDA's own headers that the text includes, by name. Their content belongs to the key."""
    names = sorted(set(_SYSTEM_INCLUDE.findall(text)))
    if not names:
        return {}
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        folder = find_nvidia_header_directory("cudart")
    except Exception:  # noqa: BLE001  not installed, or too old
        folder = None
    missing = [name for name in names if folder is None or not Path(folder, name).is_file()]
    if missing:
        raise JitError(f"CUDA's headers are missing ({', '.join(missing)}); {_extra()} brings them")
    return {name: Path(folder, name) for name in names}


def compile_cubin(source: Source, arch: str, as_arch: str | None = None) -> tuple[bytes, str]:
    """Compile without cache and without GPU; returns the cubin and the log, which tells registers and spills.

    Raises
    ------
    JitError
        If NVRTC or headers are missing, or the source does not compile: the message then holds the compiler's.
    """
    text = assemble(source)
    return _compile(source.name, text, (*options(arch, as_arch), *source.options), _toolkit_headers(text))


def _compile(name: str, text: str, options: tuple[str, ...], headers: dict[str, Path]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    folders = sorted({str(path)[: -len(header) - 1] for header, path in headers.items()})
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, *(f"-I{folder}" for folder in folders)))
        cubin = nvrtc.getCUBIN(program)
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise JitError(f"{name} does not compile with {' '.join(options)}: {error}\n{log.strip()}") from error
    finally:
        nvrtc.destroyProgram(program)
    # CuPy takes NVRTC's bytes for a C string and drops the last one, which is the zero high byte of the last ELF field.
    return cubin + b"\0", log


# ---- cache ------------------------------------------------------------------------------------------------------------

_locks: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)
_locks_lock = threading.Lock()
_in_memory: dict[str, bytes] = {}  # cubins that could not be kept on disk


def _lock(key: Any) -> threading.Lock:
    with _locks_lock:
        return _locks[key]


def key(text: str, options: tuple[str, ...], headers: dict[str, Path], version: str) -> str:
    """Hash of everything that a cubin depends on: 64 hexadecimal digits."""
    contents = []
    for path in headers.values():  # CUDA's fp16 and bf16 headers keep their bodies in an .hpp of the same name
        for part in (path, path.with_suffix(".hpp")):
            contents.append(hashlib.sha256(part.read_bytes()).hexdigest() if part.is_file() else "")
    everything = [FORMAT, version, options, contents, text]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()


def cubin(source: Source, arch: str, as_arch: str | None = None) -> tuple[bytes, str]:
    """The kernel's cubin from the cache, else compiled and kept; and which it was: "cached", "compiled", or "not kept".

    However many threads ask for one kernel, one of them compiles it; different kernels compile at the same time. Processes
    that start at the same time may compile a kernel each; either file is complete and good.
    """
    arch, text = exact(arch), assemble(source)
    all_options = (*options(arch, as_arch), *source.options)
    headers = _toolkit_headers(text)
    claimed = nvrtc_version()
    digest = key(text, all_options, headers, claimed)
    with _lock(digest):
        started = time.perf_counter()
        found = _find(source.name, arch, digest)
        if found is None:
            version = _true_version(_nvrtc(), claimed)
            if version != claimed:
                digest = key(text, all_options, headers, version)
                found = _find(source.name, arch, digest)
        if found is not None:
            _report(f"{source.name} {arch} {1000 * (time.perf_counter() - started):.1f} ms cached")
            return found, "cached"
        made, _ = _compile(source.name, text, all_options, headers)
        _report(f"{source.name} {arch} {1000 * (time.perf_counter() - started):.0f} ms compiled")
        if compiled.store(_file(source.name, arch, digest), digest, made):
            return made, "compiled"
        _in_memory[digest] = made
        return made, "not kept"


def _file(name: str, arch: str, digest: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', name)[:120]}.{arch}.{digest[:32]}.cubin"


def _find(name: str, arch: str, digest: str) -> bytes | None:
    return _in_memory.get(digest) or compiled.load(_file(name, arch, digest), digest)


def _report(line: str) -> None:
    """One line on stderr if CUFLASH_LOG has "jit"."""
    logger.debug(line)
    host.log("jit", line)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def precompile(instances: Iterable[tuple[Source, str]], jobs: int = 1) -> Iterator[tuple[Source, str, str, float]]:
    """Put kernels into the cache, ``jobs`` at a time; needs no GPU.

    Yields
    ------
    source, arch, what, seconds
        In the order in which they are ready; ``what`` as ``cubin`` says it.
    """

    def one(source: Source, arch: str) -> tuple[Source, str, str, float]:
        started = time.perf_counter()
        _, what = cubin(source, arch)
        return source, arch, what, time.perf_counter() - started

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:  # NVRTC runs outside the interpreter's lock
        tasks = [pool.submit(one, source, arch) for source, arch in instances]
        try:
            for task in concurrent.futures.as_completed(tasks):
                yield task.result()
        finally:
            pool.shutdown(cancel_futures=True)


# ---- loaded functions -------------------------------------------------------------------------------------------------

_functions: dict[tuple[Source, int, str | None], Any] = {}
_shared: dict[tuple[Source, int, str | None], int] = {}  # dynamic shared memory opted in to


def loaded(source: Source, device: int) -> bool:
    """Whether ``function`` would answer at once, also while a stream is being captured."""
    return (source, device, _as_arch()) in _functions


def _as_arch() -> str | None:
    info = pretended()
    return info.arch if info else None


def function(source: Source, device: int, shared_memory: int = 0) -> Any:
    """The kernel on one device, as a ``cupy.cuda.function.Function``; compiled, cached and loaded at first use.

    Parameters
    ----------
    source : Source
    device : int
        Ordinal of the CUDA device that it will be launched on.
    shared_memory : int
        Bytes of dynamic shared memory that launches will ask for.

    Raises
    ------
    JitError
        See ``compile_cubin``; or the current stream is being captured and the kernel is not loaded. The capture goes on.
    """
    place = (source, device, _as_arch())
    found = _functions.get(place)
    if found is not None and shared_memory <= _shared[place]:
        return found
    import cupy

    with _lock(place), cupy.cuda.Device(device):
        found = _functions.get(place)
        if found is None:
            if cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr):
                raise JitError(f"{source.name} is not loaded yet, which a stream capture cannot do: make the call once before capturing it")
            code, _ = cubin(source, actual(device).arch, place[2])
            module = cupy.cuda.function.Module()
            module.load(code)
            found = module.get_function(source.name)
        if shared_memory > _shared.get(place, -1):
            if shared_memory:
                cupy.cuda.driver.funcSetAttribute(found.ptr, _MAX_DYNAMIC_SHARED, shared_memory)
            _shared[place] = shared_memory
        _functions[place] = found
    return found

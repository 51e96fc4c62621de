"""python -m cuflash: what runs here and why, what works where, what a call will cost, and the compiled kernels."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from . import compiled, host, jit

PACKAGES = (
    "numpy", "numba", "llvmlite", "scipy", "threadpoolctl", "ml_dtypes", "platformdirs",
    "cupy-cuda12x", "cupy-cuda13x", "cupy", "cuda-bindings", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "numba-cuda",
    "mpi4py",
)  # fmt: skip

# Modules that a backend cannot do without, and the command that brings them.
NEEDS = {
    "cuda": (("cupy",), 'pip install "cuflash[cuda13]"   (or cuda12: the CUDA version that nvidia-smi prints)'),
    "numba-cuda": (("cupy", "numba_cuda"), 'pip install "cuflash[cuda13-full]"   (or cuda12-full)'),
    "cpu": (("numba",), "pip install numba"),
    "reference": ((), ""),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 for a wrong argument, 1 for kernels that do not compile or cannot be kept."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        print(arguments.command(arguments))
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TypeError, ValueError, NotImplementedError, cuflash.NoBackendError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except (jit.JitError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cuflash", description="Exact attention on NumPy and CuPy arrays.")
    parser.add_argument("--version", action="version", version=f"cuflash {cuflash.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    info = commands.add_parser("info", help="versions, this machine, and which backends are usable")
    info.add_argument("--json", action="store_true", help="for programs")
    info.set_defaults(command=lambda a: json.dumps(gather_info(), indent=2) if a.json else format_info(gather_info()))

    support = commands.add_parser("support", help="the table of options and kernels, in Markdown")
    support.set_defaults(command=lambda a: load_support().table())

    explain = commands.add_parser("explain", help="cost of one call, and which kernel would run, on NumPy arrays")
    for name, default, meaning in (
        ("batch", 1, "sequences"),
        ("seqlen", None, "queries, and keys unless --seqlen-k says otherwise"),
        ("heads", None, "query heads"),
        ("dim", None, "head size"),
    ):
        explain.add_argument(f"--{name}", type=positive, default=default, required=default is None, help=meaning, metavar="N")
    explain.add_argument("--seqlen-k", type=positive, metavar="N", help="keys")
    explain.add_argument("--heads-kv", type=positive, metavar="N", help="key/value heads (default: as many as query heads)")
    explain.add_argument("--dtype", default="float32", choices=("float16", "bfloat16", "float32", "float64"), help="of q, k and v")
    explain.add_argument("--causal", action="store_true", help="no query sees a later key")
    explain.set_defaults(command=explain_command)

    precompile = commands.add_parser("precompile", help="compile the CUDA kernels into the cache; needs NVRTC, no GPU")
    precompile.add_argument(
        "--arch", type=archs, metavar="A,B", help="architectures such as sm_90a,sm_80 (default: of this machine's GPUs)"
    )
    precompile.add_argument("--jobs", type=positive, default=None, metavar="N", help="compile N at a time (default: all cores)")
    precompile.set_defaults(command=precompile_command)

    bench = commands.add_parser("bench", help="measure cuflash beside its peers").add_subparsers(required=True, metavar="what")
    prefill = bench.add_parser("prefill", help="long queries on a GPU, beside FlashAttention and cuDNN where they are installed")
    backward = bench.add_parser("backward", help="gradients on a GPU, beside FlashAttention and cuDNN where they are installed")
    variants = bench.add_parser("variants", help="grouped heads, packed sequences, pages, windows and odd head sizes beside plain calls")
    start = bench.add_parser("start", help="time to the first result on a GPU, and of a call on the host")
    on_host = bench.add_parser("host", help="host time of calls on a GPU, beside an empty launch")
    ladder = bench.add_parser("ladder", help="naive, fa1, fa2 and fa3 on a GPU: bytes moved, counted and measured, and speed")
    decode = bench.add_parser("decode", help="one query over dense and paged caches on a GPU, beside peers and a kernel that only reads")
    fallback = bench.add_parser("fallback", help="the Numba CUDA backend, which takes what the raw kernels do not")
    from .bench import backward as bench_backward
    from .bench import decode as bench_decode
    from .bench import fallback as bench_fallback
    from .bench import host as bench_host
    from .bench import ladder as bench_ladder
    from .bench import prefill as bench_prefill
    from .bench import start as bench_start
    from .bench import variants as bench_variants

    for subparser, module in (
        (prefill, bench_prefill), (variants, bench_variants), (ladder, bench_ladder), (start, bench_start), (on_host, bench_host),
        (fallback, bench_fallback), (decode, bench_decode), (backward, bench_backward),
    ):
        module.add_arguments(subparser)
        subparser.set_defaults(command=module.run)

    cache = commands.add_parser("cache", help="the compiled kernels on disk, of GPU and CPU")
    actions = cache.add_subparsers(required=True, metavar="action")
    for name, meaning, command in (
        ("list", "size, date and name of each file", cache_list),
        ("clear", "remove them all, saying which; they compile again when needed", cache_clear),
        ("path", "the directory; CUFLASH_CACHE_DIR chooses another", lambda _: str(host.cache_directory())),
    ):
        actions.add_parser(name, help=meaning).set_defaults(command=command)
    return parser


def positive(text: str) -> int:
    """An argument that counts something."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; it must be a whole number of at least 1")
    return value


def archs(text: str) -> list[str]:
    """Architectures, separated by commas."""
    try:
        return [jit.exact(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def load_support() -> Any:
    from . import support

    return support


def explain_command(arguments: argparse.Namespace) -> str:
    return str(
        cuflash.explain(
            batch=arguments.batch, seqlen=arguments.seqlen, seqlen_k=arguments.seqlen_k, heads=arguments.heads,
            heads_kv=arguments.heads_kv, dim=arguments.dim, dtype=arguments.dtype, causal=arguments.causal,
        )
    )  # fmt: skip


# ---- info ------------------------------------------------------------------------------------------------------------


def gather_info() -> dict[str, Any]:
    """Everything ``info`` shows; imports no GPU library and starts no CUDA."""
    from .backends.cpu_threads import thread_count

    return {
        "cuflash": cuflash.__version__,
        "location": str(Path(cuflash.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": host.cpu_model(),
        "threads": thread_count(),
        "cache": str(host.cache_directory()),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name))},
        "backends": backend_states(),
    }


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def backend_states() -> dict[str, dict[str, Any]]:
    """Of each backend: its kernels, or why it is not usable here and, where one command mends that, the command."""
    from . import backends

    return {name: backend_state(name) for name in backends.REGISTRY}


def backend_state(name: str) -> dict[str, Any]:
    from . import backends, planner, problem

    modules, mend = NEEDS[name]
    try:
        backend = backends.load(name)
        if isinstance(backend, str):
            return {"usable": False, "reason": backend}
        simulated = name == "numba-cuda" and host.simulates_cuda()
        missing = [] if simulated else [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            return {"usable": False, "reason": f"not installed: {', '.join(missing)}", "mend": mend}
        if name == "cpu":
            importlib.import_module("numba")  # which the backend itself loads at its first call
    except Exception as error:  # a broken Numba or driver raises many kinds
        return {"usable": False, "reason": f"does not load: {error}", "mend": mend}
    tiny = (problem.build_attention(*(np.zeros((1, 1, 1, 16), dtype),) * 3) for dtype in (np.float32, np.float16))
    declined = [planner.decline(backend, call, kernel) for call in tiny for kernel in backend.KERNELS]
    reason = planner.unusable(backend) or (None if None in declined else declined[0])
    if reason is not None:
        return {"usable": False, "reason": reason}
    return {"usable": True, "kernels": list(backend.KERNELS)}


def format_info(info: dict[str, Any]) -> str:
    """The text of ``info`` for people."""
    lines = [
        f"cuflash {info['cuflash']}   {info['location']}",
        f"Python {info['python']}   {info['platform']}",
        f"CPU: {info['cpu']}, {info['threads']} thread{'s' if info['threads'] != 1 else ''} usable",
        f"cache: {info['cache']}",
        "packages: " + ", ".join(f"{name} {version}" for name, version in info["packages"].items()),
        "backends:",
    ]
    for name, state in info["backends"].items():
        if state["usable"]:
            lines.append(f"  {name:<11} usable, kernels {', '.join(state['kernels'])}")
        else:
            lines.append(f"  {name:<11} not usable: {state['reason']}")
            if state.get("mend"):
                lines.append(f"  {'':<11} to mend it: {state['mend']}")
    return "\n".join(lines)


# ---- compiled kernels ------------------------------------------------------------------------------------------------


def precompile_command(arguments: argparse.Namespace) -> str:
    """Compile every kernel of the cuda backend for the architectures asked for; one line for each as it is ready."""
    from . import backends
    from .backends.cpu_threads import thread_count

    backend: Any = backends.load("cuda")
    if isinstance(backend, str):
        raise cuflash.NoBackendError(f"there are no CUDA kernels to compile: {backend}")
    names = dict.fromkeys(arguments.arch or local_archs())
    known = jit.supported()
    for name in names:
        if name not in known and name.rstrip("af") not in known:
            raise ValueError(f"--arch: got {name!r}; allowed are {', '.join(known)} (NVRTC {jit.nvrtc_version()})")
    instances = [(source, arch) for arch in names for source in backend.instances(arch)]
    counts = {"compiled": 0, "cached": 0, "not kept": 0}
    for source, arch, what, seconds in jit.precompile(instances, arguments.jobs or thread_count()):
        counts[what] += 1
        print(f"[{sum(counts.values())}/{len(instances)}] {source.name} {arch} {seconds:.2f} s {what}", flush=True)
    if counts["not kept"]:
        raise OSError(f"{counts['not kept']} kernels could not be kept in {compiled.directory()}")
    return f"{counts['compiled']} compiled, {counts['cached']} there before, in {compiled.directory()}"


def local_archs() -> list[str]:
    """Architectures of the GPUs of this machine."""
    from . import device

    try:
        import cupy

        found = [device.actual(ordinal).arch for ordinal in range(cupy.cuda.runtime.getDeviceCount())]
    except Exception as error:  # no CuPy, no driver, no device: many kinds
        raise ValueError(f"no GPU is found here ({error}); --arch must say for which one to compile, such as sm_90a") from error
    return found


def cache_list(_: argparse.Namespace) -> str:
    """Size, date and name of each file, and the sum."""
    lines, total, count = [], 0, 0
    for path in compiled.entries():
        try:
            status = path.stat()
        except FileNotFoundError:  # another process has just removed it
            continue
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        lines.append(f"{status.st_size:>11,}  {date}  {path.relative_to(host.cache_directory())}")
        total, count = total + status.st_size, count + 1
    return "\n".join([*lines, f"{total:>11,}  bytes, files: {count}, in {host.cache_directory()}"])


def cache_clear(_: argparse.Namespace) -> str:
    """Remove them; asks nothing."""
    lines = [f"removed {path}" for path in compiled.clear()]
    return "\n".join([*lines, f"files removed: {len(lines)}, from {host.cache_directory()}"])

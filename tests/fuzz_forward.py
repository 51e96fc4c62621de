"""Fuzz the forward kernels: thousands of random problems of at most 150 compiled instances against the oracle.

    python3 tests/fuzz_forward.py [--problems N] [--seed N] [--target cuda] [--kinds N] [--jobs N] [--seconds N]
    python3 tests/fuzz_forward.py --target cuda --run "Example(...)"

The second form repeats a failing example, which the first prints. Everything follows from the seed; Hypothesis keeps failing
examples in a folder as well and begins the next run with them. Targets are "cuda" (a GPU), "emulator" (the raw kernels on the host),
both with "/fa3" for the kinds that this kernel takes, and kernels of the host such as "cpu/fa2", which take the same problems.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # many processes, small matrices
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
from cases import Target  # noqa: E402
from cuflash import NoBackendError, device, jit, tiles_fp  # noqa: E402
from cuflash.backends import cuda, cuda_parts, naive_cuda  # noqa: E402
from fuzz_check import build, check, emulated, examine  # noqa: E402
from hypothesis import HealthCheck, Phase, given, reject, seed, settings  # noqa: E402
from hypothesis.database import DirectoryBasedExampleDatabase  # noqa: E402

from fuzz import LONGEST, PAGE_SIZES, Example, Kind, examples, kinds  # noqa: E402

MOST_INSTANCES = 150
SHRINK_SECONDS = 10.0
EMULATED_LONGEST = 150
DECLINED = {"naive": "cuBLAS needs|no scale of 0", "fa3": "it loads boxes|it stores 16"}  # reasons that depend on more than a kind


# --- which kernels -----------------------------------------------------------------------------------------------------


def sources(of: list[Kind], info: device.DeviceInfo, kernel: str = "") -> list[jit.Source]:
    """Everything that problems of these kinds may have compiled, for whichever kernel or for fa3 alone."""
    found: dict[str, jit.Source] = {}
    for kind in of:
        for source in _sources(kind, info):
            if kernel != "fa3" or source.name.startswith(("prefill_fa3", "clear_rows")):
                found[source.name] = source
    return list(found.values())


def _sources(kind: Kind, info: device.DeviceInfo) -> list[jit.Source]:
    window = {"": None, "right": (-1, 3), "left": (3, 3)}[kind.side]
    flat = {"packed": ((1, 2), (1, 2), (0, 0)), "b": 2, "on_device": "int32"} if kind.flat else {}
    pages = {"page_size": 2, "kv_lengths": (2,)} if kind.paged else {}
    scale = None if kind.folded else 0.0
    e = Example(
        kind, d=kind.d - kind.d % kind.unit, dv=kind.dv - kind.dv % kind.unit, sq=2, sk=2, window=window, scale=scale,
        softcap=2.0 if kind.softcap else None, **{"hidden": False, **flat, **pages},
    )
    found = []
    few, many = tiles_fp.FEW_ROWS, {"sk": 1000, "kv_lengths": (1000,) if kind.paged else None}  # in float32 and float64 keys may be split
    if window is not None:
        many["window"] = tuple(900 if side > 0 else side for side in window)
    of_pages = ({}, {"page_size": 16}) if kind.paged else ({},)  # in 16 bits keys of such pages are found sixteen at a time
    of_rows = ({"sq": 1}, {"sq": 1, "ratio": few + 1}, {}, {"sq": few + 1}, {"sq": few + 1, **many})
    for sizes in of_pages if kind.itemsize == 2 else of_rows:
        problem = emulated(build(dataclasses.replace(e, **sizes)))
        chosen = cuda.instance(problem, info, kind.kernel)
        assert chosen is not None
        found.append(chosen.source)
        if isinstance(chosen, cuda_parts.Instance):
            found.append(cuda_parts.combine_source(kind.dtype, kind.out))
    for flat_rows in (False, True) if kind.kernel == "fa2" and not kind.paged else ():  # device-side cu_seqlens
        if not flat_rows or kind.flat:
            found.append(cuda.clear_source(problem.out_dtype.itemsize, problem.compute_dtype.itemsize, flat_rows))
    if kind.hopper and info.cc == (9, 0):
        page_sizes = {n * 16 // math.gcd(n, 16) for n in PAGE_SIZES} if kind.paged else {0}
        for size, ratio in itertools.product(page_sizes, (1, 2)):  # heads of a group may share tiles
            hopper = cuda.instance(emulated(build(dataclasses.replace(e, page_size=size, ratio=ratio))), info, "fa3")
            assert hopper is not None
            found.append(hopper.source)
    if kind.naive:
        options = bool(kind.bias) or kind.mask or kind.softcap
        found.append(naive_cuda._instance(kind.dtype, options, kind.bias or kind.dtype))
        found.append(naive_cuda.repair_source(kind.dtype))
    return found


def some_kinds(number: int, count: int, info: device.DeviceInfo, kernel: str = "") -> list[Kind]:
    """As many kinds as there may be instances, and no more than ``count``; with "fa3" those that it takes."""
    taken: list[Kind] = []
    names: set[str] = set()
    for kind in [kind for kind in kinds(number, 10 * count) if kind.hopper] if kernel == "fa3" else kinds(number, count):
        more = names | {source.name for source in sources([kind], info, kernel)}
        if len(more) <= MOST_INSTANCES:
            taken.append(kind)
            names = more
    return taken


@dataclasses.dataclass(frozen=True)
class Pass:
    """What is fuzzed."""

    script: Path
    error: str  # what the number of an example means
    draw: Callable[[Kind, int, int, int], Any]  # examples of a kind: the longest, percents for naive and for fa3
    tester: Callable[[str, Path], Callable[[Any], float]]  # for a target and a folder
    may_decline: Callable[[Any, str, str], bool]  # this example, this kernel, with this reason
    kinds: Callable[[int, int, device.DeviceInfo, str], list[Kind]]  # a seed, how many, for a GPU and a target
    sources: Callable[..., list[jit.Source]] | None = sources  # None: what problems need is not known beforehand
    names: tuple = (Example, Kind)  # in the text of an example


# --- what a worker does ------------------------------------------------------------------------------------------------


class Broken(Exception):
    """The device can do no more in this process."""


def tester(target: str, folder: Path) -> Callable[[Example], float]:
    """A function that examines one example on the target."""
    backend, _, kernel = target.partition("/")
    if backend == "emulator":
        from emulator.emulate import Emulator

        made, gpu = Emulator(folder), device.KNOWN["H200"]

        def emulate(e: Example) -> float:
            built = build(e)
            problem = emulated(built)
            if (reason := cuda.decline(problem, kernel or e.kernel)) is not None:
                raise NoBackendError(reason)
            made.run(problem, gpu, cuda.instance(problem, gpu, kernel or e.kernel), side="end" if e.seed % 2 else "start")
            return check(built, built.call.out, built.call.lse)

        return emulate
    return lambda e: examine(e, Target(backend, kernel or e.kernel))


def search(
    what: Pass, kind: Kind, count: int, number: int, test: Callable[[Any], float], target: str, folder: Path, until: float
) -> dict[str, Any]:
    """Examine so many problems of a kind; the smallest that fails is kept."""
    tally: collections.Counter[str] = collections.Counter()
    kernel = target.partition("/")[2]
    failed: dict[str, str] = {}
    worst, first = [0.0, ""], [0.0]

    def body(e: Any) -> None:
        text = repr(e)
        late = time.monotonic() > (first[0] + SHRINK_SECONDS if failed else until)
        if late and text not in failed:
            reject()
        (folder / f"current-{os.getpid()}").write_text(text)
        try:
            error = test(e)
        except NoBackendError as reason:
            if what.may_decline(e, kernel or e.kernel, str(reason)):
                tally["declined"] += 1
                return
            raise _noted(failed, first, text, reason) from None
        except Exception as reason:
            raise _noted(failed, first, text, reason) from None
        tally["problems"] += 1
        if math.isinf(error):
            tally["right but for 16 bits"] += 1
            error = 0.0
        tally[f"{e.kernel} {kind.dtype}"] += 1
        for name, there in (("packed", e.packed), ("paged", e.page_size), ("lengths", e.kv_lengths), ("device", e.on_device)):
            tally[name] += bool(there)
        if error > worst[0]:
            worst[:] = error, text

    naive = 12 if target == "cuda" else 0
    longest = EMULATED_LONGEST if target.startswith("emulator") else LONGEST
    hopper = 100 if kernel == "fa3" else 40 if target == "cuda" and device.probe(0).cc == (9, 0) else 0
    run = given(what.draw(kind, longest, naive, hopper))(body)
    run = seed(number)(run)
    run = settings(
        max_examples=count, deadline=None, database=DirectoryBasedExampleDatabase(folder / "examples"), print_blob=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.reuse, Phase.generate, Phase.shrink), report_multiple_bugs=False,
    )(run)
    report: dict[str, Any] = {"tally": tally, "worst": worst, "loaded": [], "broken": False}
    try:
        run()
    except Broken:
        report["broken"] = True
    except BaseException as error:  # noqa: BLE001  what it is stands in failed, but for faults of this file
        if not failed:
            failed["(no example)"] = "".join(traceback.format_exception(error))[-3000:]
    if failed:
        text = min(failed, key=len) if "(no example)" in failed else list(failed)[-1]
        report["failure"] = {"example": text, "error": failed[text]}
    report["loaded"] = sorted({place[0].name for place in jit._functions})
    return report


def _noted(failed: dict[str, str], first: list[float], text: str, reason: BaseException) -> BaseException:
    """The error of an example, kept; the last one that Hypothesis tries is the smallest."""
    if not failed:
        first[0] = time.monotonic()
    failed.pop(text, None)
    failed[text] = f"{type(reason).__name__}: {reason}"
    if "CUDA" in type(reason).__name__:  # an illegal address stays with the context
        return Broken(str(reason))
    return reason


def work(what: Pass, arguments: argparse.Namespace) -> None:
    """Examine the kinds whose numbers come by the line."""
    folder = Path(arguments.folder)
    if arguments.target.startswith("cuda"):
        import cupy

        cupy.zeros(1)
    test = what.tester(arguments.target, folder)
    for line in sys.stdin:
        task = json.loads(line)
        kind = Kind(**task["kind"])
        report = search(what, kind, task["count"], task["seed"], test, arguments.target, folder, time.monotonic() + task["seconds"])
        print(json.dumps(report), flush=True)
        if report["broken"]:
            return


# --- handing out the work ----------------------------------------------------------------------------------------------


class Workers:
    """Processes that examine kinds, one after the other each."""

    def __init__(self, what: Pass, arguments: argparse.Namespace, folder: Path, tasks: list[dict[str, Any]], until: float):
        self.script, self.arguments, self.folder, self.until = what.script, arguments, folder, until
        self.tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        for task in tasks:
            self.tasks.put(task)
        self.reports: list[dict[str, Any]] = []

    def start(self) -> subprocess.Popen:
        command = [sys.executable, self.script, "--work", "--folder", self.folder, "--target", self.arguments.target]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def serve(self, process: subprocess.Popen) -> None:
        """Feed one process until nothing is left to do; a process that dies is replaced."""
        while time.monotonic() < self.until:
            try:
                task = self.tasks.get_nowait()
            except queue.Empty:
                break
            seconds = self.until - time.monotonic()
            process.stdin.write(json.dumps({**task, "seconds": seconds}) + "\n")
            process.stdin.flush()
            stop = threading.Timer(seconds + SHRINK_SECONDS + 20, process.kill)
            stop.start()
            line = process.stdout.readline()
            stop.cancel()
            if line:
                self.reports.append(json.loads(line))
            else:
                current = self.folder / f"current-{process.pid}"
                text = current.read_text() if current.exists() else "(no example)"
                failure = {"example": text, "error": f"the process ended with status {process.wait()}"}
                self.reports.append({"tally": {}, "worst": [0, ""], "loaded": [], "failure": failure, "broken": True})
            if self.reports[-1]["broken"]:
                process = self.start()
        process.stdin.close()
        process.wait()

    def run(self, jobs: int, between: Callable[[], None]) -> list[dict[str, Any]]:
        """Start processes, do something while they start, and hand out the tasks."""
        processes = [self.start() for _ in range(jobs)]
        between()
        threads = [threading.Thread(target=self.serve, args=(process,)) for process in processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.reports


def fuzz(what: Pass, arguments: argparse.Namespace, folder: Path) -> int:
    started = time.monotonic()
    until = started + arguments.seconds
    on_gpu = arguments.target.startswith("cuda")
    info = device.probe(0) if on_gpu else device.KNOWN["H200"]
    kernel = arguments.target.partition("/")[2]
    of = what.kinds(arguments.seed, arguments.kinds, info, arguments.target)
    planned = what.sources(of, info, kernel) if what.sources else []
    count = -(-arguments.problems // len(of))
    tasks = [{"kind": vars(kind), "count": count, "seed": arguments.seed * 1000 + n} for n, kind in enumerate(of)]

    def compile_all() -> None:
        if on_gpu:
            before = time.monotonic()
            made = [what for _, _, what, _ in jit.precompile([(source, info.arch) for source in planned], arguments.jobs)]
            print(f"{made.count('compiled')} of {len(made)} instances compiled in {time.monotonic() - before:.1f} s", flush=True)

    reports = Workers(what, arguments, folder, tasks, until).run(arguments.jobs, compile_all)
    return summary(what, reports, planned, len(tasks), arguments, time.monotonic() - started)


def summary(
    what: Pass, reports: list[dict[str, Any]], planned: list[jit.Source], tasks: int, arguments: argparse.Namespace, seconds: float
) -> int:
    """Print what was done and what failed; the exit status."""
    tally: collections.Counter[str] = collections.Counter()
    for report in reports:
        tally.update(report["tally"])
    loaded = {name for report in reports for name in report["loaded"]}
    failures = [report["failure"] for report in reports if "failure" in report]
    stray = sorted(loaded - {source.name for source in planned}) if what.sources else []
    print(
        f"seed {arguments.seed}, {arguments.target}: {tally['problems']} problems of {len(reports)} of {tasks} kinds in {seconds:.0f} s, "
        f"{len(planned)} instances planned, {len(loaded)} loaded, {len(failures)} kinds with failures"
    )
    print("; ".join(f"{name} {n}" for name, n in sorted(tally.items()) if name != "problems"))
    worst = max(reports, key=lambda r: r["worst"][0], default=None)
    if worst is not None:
        print(f"largest error: {what.error.format(worst['worst'][0])}, {worst['worst'][1]}")
    for failure in failures:
        print(f'\n{failure["error"][:1500]}\npython3 tests/{what.script.name} --target {arguments.target} --run "{failure["example"]}"')
    if stray:
        print(f"instances that were not planned: {', '.join(stray)}")
    short = tally["problems"] < 0.9 * arguments.problems - tally["declined"]
    if short:
        print(f"only {tally['problems']} of {arguments.problems} problems were done")
    return int(bool(failures or short or what.sources and len(loaded) > MOST_INSTANCES))


def main(what: Pass) -> int:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--kinds", type=int, default=130, help="of kernels, at most")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=100.0, help="after which no problem is begun")
    parser.add_argument("--folder", help="of failing examples, kept from run to run")
    parser.add_argument("--run", metavar="EXAMPLE", help="examine this example alone")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(what, arguments)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.run:
            named = {kind.__name__: kind for kind in what.names}
            error = what.tester(arguments.target, folder)(eval(arguments.run, {**named, "np": np}))
            print(f"right, {what.error.format(error)}")
            return 0
        return fuzz(what, arguments, folder)


FORWARD = Pass(
    Path(__file__), "{:.2f} eps of out's largest element", lambda kind, *numbers: examples([kind], *numbers), tester,
    lambda e, kernel, reason: bool(re.search(DECLINED.get(kernel, "$^"), reason)),
    lambda number, count, info, target: some_kinds(number, count, info, target.partition("/")[2]),
)

if __name__ == "__main__":
    sys.exit(main(FORWARD))

"""backward_fa2 on the host, thread by thread: gradients within the bounds of the contract, and nothing that a GPU must not do."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import compare
import numpy as np
import pytest
from case import BF16, F16, Case, Packed, alibi, case, causal, fixed, mask, upper_left
from cuflash import arrays, device, jit, reference, structs, tiles, tiles_backward
from cuflash import problem as problems
from cuflash.backends import cuda_backward_fa2
from cuflash.device import DeviceInfo
from cuflash.types import ArrayView, Gradients, Problem
from emulator import emulate
from emulator.guarded import Guarded
from test_gradients import differentiate, gradient_parts

T4, A100, RTX, H200 = (device.KNOWN[name] for name in ("T4", "A100", "RTX 3090", "H200"))
OF_FAMILY = {"sm_75": T4, "sm_80": A100, "sm_86": RTX, "sm_90": H200}
SHORT = {F16: "fp16", BF16: "bf16"}
CUDA = {"float16": "Fp16", "bfloat16": "Bf16"}
WINDOW = fixed(window=(70, 20))


def prepare_source(dtype: str, vector: bool) -> jit.Source:
    name, types = f"backward_prepare_{dtype}_{vector}", f"{CUDA[dtype]}, {CUDA[dtype]}, 16, {str(vector).lower()}"
    stub = f'extern "C" __global__ void {name}(const __grid_constant__ BackwardParams p) {{ backward_prepare<{types}>(p); }}\n'
    return jit.Source("backward_prepare.cu", stub, name)


def run(
    made: emulate.Emulator, problem: Problem, info: DeviceInfo, side: str = "end", chosen: cuda_backward_fa2.Instance | None = None
) -> Gradients:
    """Gradients in canonical axis order, by the launches of a call. Workspace and gradients hold NaN before."""
    assert cuda_backward_fa2.decline(problem) is None
    chosen = chosen or cuda_backward_fa2.instance(problem, info)
    dtype, rows, arch = chosen.dtype, chosen.tile_rows, 750 if info.cc < (8, 0) else 900 if info.cc >= (9, 0) else 800
    inputs = {
        name: Guarded(a, side)
        for name in ("q", "k", "v", "out", "lse", "dout", "dlse", "mask")
        if (a := getattr(problem, name)) is not None
    }
    small = {name: Guarded(arrays.view(value, name), side) for name, value in structs.small_arrays(problem).items()}
    small |= {name: Guarded(getattr(problem, name), side) for name in problem.indices_on_device}
    found = {f"d{name}": np.full_like(getattr(problem, name).array, np.nan) for name in "qkv"}
    if problem.varlen:
        for name, cu in (("dq", problem.cu_seqlens_q), ("dk", problem.cu_seqlens_k), ("dv", problem.cu_seqlens_k)):
            found[name][int(cu[-1]) if isinstance(cu, np.ndarray) else 0 :] = 0
    results = {name: Guarded(arrays.view(a, name), side, writable=True) for name, a in found.items()}
    places = structs.places(problem, rows)
    sizes = {name: problem.heads_q * places * (chosen.d if name == "dq_sum" else 1) for name in ("row_lse", "row_delta", "dq_sum")}
    work = {
        name: Guarded(arrays.view(np.full(size, np.nan, np.float32), name), side, writable=True, aligned=True)
        for name, size in sizes.items()
    }
    moved = problem.replace(**{name: a.view for name, a in inputs.items()})
    n_tiles, vector = -(-problem.seqlen_k // chosen.keys), structs.copy_bytes((problem.out, problem.dout)) == 16
    params = structs.pack_backward(
        moved, {name: a.view for name, a in results.items()}, rows, n_tiles, max(1, min(2, problem.batch * problem.heads_kv)),
        chosen.factor_left, {name: a.view.pointer for name, a in small.items()},
        {name: a.view.pointer for name, a in work.items()}, chosen.d,
    )
    launches = [(prepare_source(dtype, vector), problem.heads_q * places // 32, 256, 0)]
    launches += [(chosen.source, problem.batch * problem.heads_kv * n_tiles, chosen.threads, chosen.shared_memory)]
    aligned = structs.copy_bytes((results["dq"].view,)) == 16
    launches += [(cuda_backward_fa2.convert_source(dtype, aligned), problem.heads_q * places // 32, 256, 0)]
    for source, grid, threads, shared in launches:
        try:
            library = made.prepare_source(source, "BackwardParams", arch).result()
            if grid:
                made.execute(library, params, grid, threads, shared, {**inputs, **results, **small, **work})
        except emulate.EmulationError as error:
            raise emulate.EmulationError(f"{source.name}, {error}") from None
    for a in results.values():
        a.write_back()
    return Gradients(**found)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if (reason := emulate.why_unusable()) is not None:
        pytest.skip(reason)
    made = emulate.Emulator(tmp_path_factory.mktemp("emulated"))
    yield made
    made.close()


def check(made: emulate.Emulator, c: Case, dtype: np.dtype, info: DeviceInfo, deterministic: bool = False) -> None:
    """The ends of all arrays at forbidden pages, or for every other case the beginnings."""
    given = differentiate(c, dtype)
    call = given.call
    options = {**call.options, "dlse": given.dlse, "deterministic": deterministic}
    if c.packed is not None:
        options["varlen"] = (*call.args[3:5], options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None))
    problem = problems.build_backward(given.dout, *call.args[:3], call.out, call.lse, **options)
    found = run(made, problem, info, "start" if len(c.name) % 2 else "end")
    found = problems.user_gradients(found, problem, options.get("layout", "BSHD"), np.ndim(call.args[0]))
    want = compare.expect_gradients(given.problems)
    for name in ("dq", "dk", "dv"):
        for part, exact in zip(gradient_parts(name, getattr(found, name), c), want.parts[name], strict=True):
            compare.assert_close(part, exact, want.bounds[name], name)


# ---- kinds of problems --------------------------------------------------------------------------------------------------

CASES = (
    case("full", "1,70,150,1,1,64"),
    *(case(f"rows-{n}", f"1,{n},130,1,1,64") for n in (1, 31, 32, 33, 65)),
    *(case(f"keys-{n}", f"1,40,{n},1,1,64") for n in (1, 15, 63, 64, 65, 127, 128, 129)),
    *(case(f"causal-{sq}-{sk}-{d}", f"1,{sq},{sk},1,1,{d}", causal) for sq, sk in ((150, 150), (200, 70), (70, 200)) for d in (64, 128)),
    *(case(f"upper-left-{sq}-{sk}", f"1,{sq},{sk},1,1,64", upper_left) for sq, sk in ((150, 100), (100, 150))),
)
RUNS = [(c, (F16, BF16)[n % 2], (A100, H200)[n // 2 % 2]) for n, c in enumerate(CASES)]


@pytest.mark.parametrize(("case", "dtype", "info"), RUNS, ids=[f"{c.name}-{SHORT[t]}-{i.name}" for c, t, i in RUNS])
def test_gradients(emulator, case, dtype, info):
    check(emulator, case, dtype, info)

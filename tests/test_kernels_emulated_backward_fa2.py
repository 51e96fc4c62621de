"""backward_fa2 on the host, thread by thread: gradients within the bounds of the contract, and nothing that a GPU must not do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import compare
import numpy as np
import pytest
from case import BF16, F16, F32, Case, Packed, alibi, bias, case, causal, fixed, mask, sinks, upper_left
from cuflash import arrays, device, jit, reference, structs, tiles, tiles_backward
from cuflash import problem as problems
from cuflash.backends import cuda_backward_fa2
from cuflash.device import DeviceInfo
from cuflash.types import Gradients, Problem
from emulator import emulate
from emulator.backward_fp import repeated
from emulator.guarded import Guarded
from test_gradients import differentiate, gradient_parts
from test_indices_emulated import on_device

T4, A100, RTX, H200 = (device.KNOWN[name] for name in ("T4", "A100", "RTX 3090", "H200"))
FAMILIES = (T4, A100, RTX, H200)  # one GPU of each row of the tile tables
SHORT = {F16: "fp16", BF16: "bf16"}
CUDA = {"float16": "Fp16", "bfloat16": "Bf16"}
WINDOW = fixed(window=(70, 20))


def prepare_source(dtype: str, vector: bool) -> jit.Source:
    name, types = f"backward_prepare_{dtype}_{vector}", f"{CUDA[dtype]}, {CUDA[dtype]}, 16, {str(vector).lower()}"
    stub = f'extern "C" __global__ void {name}(const __grid_constant__ BackwardParams p) {{ backward_prepare<{types}>(p); }}\n'
    return jit.Source("backward_prepare.cu", stub, name)


def run(
    made: emulate.Emulator, problem: Problem, info: DeviceInfo, side: str = "end", chosen: cuda_backward_fa2.Instance | None = None,
    section: int = 2,
) -> Gradients:
    """Gradients in canonical axis order, by the launches of a call. Workspace and gradients hold NaN before."""
    assert cuda_backward_fa2.decline(problem) is None
    chosen = chosen or cuda_backward_fa2.instance(problem, info)
    dtype, rows, arch = chosen.dtype, chosen.tile_rows, 750 if info.cc < (8, 0) else 900 if info.cc >= (9, 0) else 800
    inputs = {
        name: Guarded(a, side)
        for name in ("q", "k", "v", "out", "lse", "dout", "dlse", "bias", "mask")
        if (a := getattr(problem, name)) is not None
    }
    small = {name: Guarded(arrays.view(value, name), side) for name, value in structs.small_arrays(problem).items()}
    small |= {name: Guarded(getattr(problem, name), side) for name in problem.indices_on_device}
    found = {f"d{name}": np.full_like(getattr(problem, name).array, np.nan) for name in "qkv"}
    if problem.varlen:
        for name, cu in (("dq", problem.cu_seqlens_q), ("dk", problem.cu_seqlens_k), ("dv", problem.cu_seqlens_k)):
            found[name][int(cu[-1]) if isinstance(cu, np.ndarray) else 0 :] = 0
    if problem.bias is not None:
        found["dbias"] = np.zeros(problem.bias_shape, cuda_backward_fa2.dbias_dtype(problem))
    if problem.sinks is not None:
        found["dsinks"] = np.full(problem.heads_q, np.nan, np.float32)
    results = {name: Guarded(arrays.view(a, name), side, writable=True) for name, a in found.items()}
    gradients = {name: a.view for name, a in results.items()}
    if problem.bias is not None:
        gradients["dbias"] = repeated(gradients["dbias"], problem.bias.shape)
    places = structs.places(problem, rows)
    sizes = {name: problem.heads_q * places * (chosen.dq_columns if name == "dq_sum" else 1) for name in ("row_lse", "row_delta", "dq_sum")}
    work = {
        name: Guarded(arrays.view(np.full(size, np.nan, np.float32), name), side, writable=True, aligned=True)
        for name, size in sizes.items()
    }
    moved = problem.replace(**{name: a.view for name, a in inputs.items()})
    n_tiles, vector = -(-problem.seqlen_k // chosen.keys), structs.copy_bytes((problem.out, problem.dout)) == 16
    params = structs.pack_backward(
        moved, gradients, rows, n_tiles, max(1, min(section, problem.batch * problem.heads_kv)),
        chosen.factor_left, {name: a.view.pointer for name, a in small.items()},
        {name: a.view.pointer for name, a in work.items()}, chosen.dq_columns,
    )
    launches = [(prepare_source(dtype, vector), problem.heads_q * places // 32, 256, 0)]
    aligned = structs.copy_bytes((results["dq"].view,)) == 16
    launches += cuda_backward_fa2.launches(problem, chosen, problem.batch * problem.heads_kv * n_tiles, aligned)
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
    for name in want.parts:
        gradient = getattr(found, name) if name != "dbias" else found.dbias.astype(problem.bias.dtype)
        exact_parts = [np.sum(want.parts[name], axis=0)] if name == "dsinks" else want.parts[name]  # one for all sequences
        for part, exact in zip(gradient_parts(name, gradient, c), exact_parts, strict=True):
            compare.assert_close(part, exact, want.bounds[name], name)


# ---- kinds of problems --------------------------------------------------------------------------------------------------

CASES = (
    case("full", "1,70,150,1,1,64"),
    *(case(f"rows-{n}", f"1,{n},130,1,1,64") for n in (1, 31, 32, 33, 65)),
    *(case(f"keys-{n}", f"1,40,{n},1,1,64") for n in (1, 15, 63, 64, 65, 127, 128, 129)),
    *(case(f"causal-{sq}-{sk}-{d}", f"1,{sq},{sk},1,1,{d}", causal) for sq, sk in ((150, 150), (200, 70), (70, 200)) for d in (64, 128)),
    *(case(f"upper-left-{sq}-{sk}", f"1,{sq},{sk},1,1,64", upper_left) for sq, sk in ((150, 100), (100, 150))),
    *(case(f"window-{d}", f"1,200,200,1,1,{d}", WINDOW) for d in (64, 128)),
    case("window-left", "1,200,200,1,1,128", fixed(window=(60, -1))),
    case("window-right", "1,200,200,1,1,64", fixed(window=(-1, 40))),
    case("window-causal-more-rows", "1,300,120,1,1,64", fixed(window=(64, 0), causal=True)),
    *(
        case(f"heads-{d}-{dv}", f"1,70,80,2,1,{d},{dv}", causal)
        for d, dv in (
            (8, 8), (40, 40), (72, 72), (96, 64), (64, 128), (48, 104), (128, 40), (192, 128), (256, 256), (256, 32), (33, 160), (1, 5),
        )
    ),
    *(case(f"groups-{h}-{hk}", f"2,70,90,{h},{hk},64", causal) for h, hk in ((4, 2), (6, 2), (5, 1))),
    # Memory.
    *(
        case(f"strides-{lay}", "2,140,140,4,2,64", causal, strides=lay)
        for lay in ("expanded", "reversed", "heads_of_packed", "every_other")
    ),
    *(case(f"copies-of-{n}-bytes", f"1,70,130,2,1,{d}", causal) for n, d in ((8, 20), (4, 34), (2, 33))),
    case("heads-first", "3,70,140,3,3,128", causal, layout="BHSD"),
    case("lengths", "3,90,200,2,1,64", causal, kv_lengths=(200, 77, 0)),
    case("lengths-128", "3,50,300,2,1,128", kv_lengths=(300, 77, 1)),
    case("starts", "3,100,200,2,1,64", kv_lengths=(200, 180, 100), kv_start=(129, 3, 100)),
    case("packed", "4,150,150,2,1,64", causal, packed=Packed((150, 1, 93, 76), (150, 64, 100, 1))),
    case("packed-empty-slack", "4,100,150,4,2,128", packed=Packed((3, 0, 100, 5), (70, 2, 150, 0), slack=(6, 4))),
    case("packed-heads-first", "3,80,80,2,2,64", causal, layout="BHSD", packed=Packed((80, 64, 7), (80, 64, 7))),
    # Logits.
    case("scale-negative", "1,70,150,1,1,64", fixed(scale=-0.3), causal),
    case("scale-zero", "1,70,150,1,1,128", fixed(scale=0.0)),
    *(case(f"softcap-{cap}", "1,70,150,2,1,64", fixed(softcap=cap), causal) for cap in (0.5, 3.0, 30.0)),
    case("softcap-saturated", "1,70,150,1,1,64", fixed(softcap=2.0, scale=4.0)),
    case("alibi", "2,70,150,4,2,64", alibi(), causal),
    case("alibi-softcap-window", "1,130,130,2,1,40", fixed(softcap=3.0, window=(50, 5), alibi_slopes=[0.5, 0.03])),
    # Arrays that hide keys.
    case("mask", "2,70,160,2,1,64", mask(visible=0.5)),
    case("mask-few-visible", "1,70,40,2,1,64", mask(visible=0.03)),
    case("mask-causal-odd", "1,90,131,4,2,128", causal, mask("1 1 Sq Sk", 0.8)),
    case("mask-softcap-alibi-window", "1,100,136,2,1,96", fixed(softcap=3.0, window=(50, 5)), alibi(), mask(visible=0.8)),
    case("bias", "2,70,160,4,2,64", bias()),
    case("bias-causal-odd-128", "1,90,131,2,1,128", causal, bias(hidden=0.1)),
    case("bias-float32-mask", "1,70,136,2,1,64", bias(dtype=F32, hidden=0.1), mask(visible=0.9)),
    *(
        case(f"bias-of-{axes.replace(' ', '-')}", "2,40,70,4,2,64", bias(axes), causal)
        for axes in ("Hq Sq Sk", "1 1 Sk", "B 1 Sq Sk", "1 1 1 1")
    ),
    case("bias-softcap-alibi-window", "1,100,136,2,1,96", fixed(softcap=3.0, window=(50, 5)), alibi(), bias(dtype=F32)),
    case("bias-strides", "1,40,130,2,1,64", bias(), strides="every_other"),
    case("bias-few-visible", "1,70,40,2,1,64", bias(hidden=0.97)),
    case("bias-lengths", "3,40,150,2,1,64", bias(), causal, kv_lengths=(150, 77, 0)),
    case("bias-256", "1,40,70,2,1,256", bias()),
    case("mask-strides", "1,40,130,2,1,64", mask(visible=0.9), strides="every_other"),
    case("sinks", "2,70,150,4,2,64", sinks, causal),
    case("sinks-more-rows", "1,300,70,3,3,64", sinks, causal),
    case("sinks-few-visible", "2,70,40,2,1,128", sinks, mask(visible=0.03)),
    case("sinks-bias-softcap-alibi", "1,40,70,2,1,64", sinks, bias(hidden=0.1), fixed(softcap=3.0), alibi()),
    case("sinks-lengths", "3,90,200,2,1,64", sinks, kv_lengths=(200, 77, 0), kv_start=(3, 0, 0)),
    case("sinks-packed", "4,100,150,4,2,128", sinks, causal, packed=Packed((3, 0, 100, 5), (70, 2, 150, 0), slack=(6, 4))),
)
RUNS = [(c, (F16, BF16)[n % 2], (A100, H200, RTX)[n // 2 % 3]) for n, c in enumerate(CASES)]
RUNS += [(c, F16, T4) for c in CASES[::3]]


@pytest.mark.parametrize(("case", "dtype", "info"), RUNS, ids=[f"{c.name}-{SHORT[t]}-{i.name}" for c, t, i in RUNS])
def test_gradients(emulator, case, dtype, info):
    check(emulator, case, dtype, info)


FIXED_ORDER = [
    (c, t, i) for n, (c, t, i) in enumerate(RUNS)
    if (n % 3 == 0 or len(c.options) > 1 or c.packed or c.kv_lengths) and not c.name.startswith("bias-of-")
]


@pytest.mark.parametrize(("case", "dtype", "info"), FIXED_ORDER, ids=[f"{c.name}-{SHORT[t]}-{i.name}" for c, t, i in FIXED_ORDER])
def test_gradients_in_a_fixed_order(emulator, case, dtype, info):
    check(emulator, case, dtype, info, deterministic=True)


# ---- every tile of the tables -------------------------------------------------------------------------------------------


def tile_runs() -> Iterator[tuple[Case, np.dtype, DeviceInfo, bool]]:
    """Each tile: two blocks of keys, the second with few, and two steps of queries and a few more; every other one with padded columns."""
    seen, kinds = set(), (("full", ()), ("softcap", (fixed(softcap=3.0),)), ("mask", (mask(),)))
    for info in FAMILIES:
        for d, (kind, options) in itertools.product(tiles.HEAD_CLASSES, kinds):
            tile = tiles_backward.backward_fa2(d, d, kind != "full", kind == "mask", info)
            key = d, tile._replace(resident=0), kind, info is T4
            if key in seen:
                continue
            seen.add(key)
            odd, dtype = len(seen) % 2, F16 if info is T4 or len(seen) % 3 else BF16
            name = f"tile-{d}-m{tile.m}n{tile.n}w{tile.warps}s{tile.stages}k{tile.keys}-{kind}"
            yield case(name, f"1,{2 * tile.m + 5},{tile.n + 9},1,1,{d - 8 * odd}", causal, *options), dtype, info, False
            other = tiles_backward.backward_fa2_dq(d, d, info)
            if (d, other._replace(resident=0), info is T4) not in seen:
                seen.add((d, other._replace(resident=0), info is T4))
                name = f"tile-{d}-m{other.m}n{other.n}w{other.warps}s{other.stages}-dq"
                yield case(name, f"1,{other.m + 5},{2 * other.n + 9},1,1,{d - 8 * odd}", causal), dtype, info, True


TILES = list(tile_runs())


@pytest.mark.parametrize(("case", "dtype", "info", "deterministic"), TILES, ids=[f"{c.name}-{SHORT[t]}-{i.name}" for c, t, i, _ in TILES])
def test_tiles(emulator, case, dtype, info, deterministic):
    check(emulator, case, dtype, info, deterministic)


# ---- hard values --------------------------------------------------------------------------------------------------------


def operands(sizes: tuple[int, int, int, int], dtype: np.dtype, d: int = 64) -> list[np.ndarray]:
    """q, k, v and dout."""
    b, sq, sk, h = sizes
    shapes = (b, sq, h, d), (b, sk, h, d), (b, sk, h, d), (b, sq, h, d)
    return [np.random.default_rng(n).standard_normal(s).astype(dtype) for n, s in enumerate(shapes)]


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: object) -> tuple[np.ndarray, np.ndarray]:
    out, lse = reference.forward(problems.build_attention(q, k, v, **options))
    return out.astype(q.dtype), lse.astype(np.float32)


def gradients(made, dout, q, k, v, info=A100, results=None, section=2, **options) -> Gradients:
    out, lse = results or forward(q, k, v, **{name: x for name, x in options.items() if name != "deterministic"})
    return run(made, problems.build_backward(dout, q, k, v, out, lse, **options), info, section=section)


def compare_all(found: Gradients, dout, q, k, v, **options) -> None:
    out, lse = forward(q, k, v, **options)
    want = compare.expect_gradients([problems.build_backward(dout, q, k, v, out, lse, **options)])
    for name in ("dq", "dk", "dv"):
        compare.assert_close(getattr(found, name), want.parts[name][0], want.bounds[name], name)


def all_finite(g: Gradients) -> bool:
    return all(np.isfinite(x.astype(np.float32)).all() for x in (g.dq, g.dk, g.dv))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("filler", [np.nan, np.inf])
@pytest.mark.parametrize("hidden", ["causal", "mask"])
def test_rows_that_see_nothing_contribute_nothing(emulator, hidden, filler, deterministic):
    """Case 5: whatever q and dO hold there; bit for bit."""
    q, k, v, dout = operands((1, 150, 70, 1), F16)
    blind = np.arange(150) < 80 if hidden == "causal" else np.arange(150) % 3 == 1
    options = {"causal": True} if hidden == "causal" else {"mask": np.broadcast_to(~blind[:, None], (150, 70))}
    results = forward(q, k, v, **options)
    want = gradients(emulator, dout, q, k, v, results=results, deterministic=deterministic, **options)
    compare_all(want, dout, q, k, v, **options)
    q, dout = q.copy(), dout.copy()
    q[:, blind], dout[:, blind] = filler, filler
    found = gradients(emulator, dout, q, k, v, results=results, deterministic=deterministic, **options)
    assert not found.dq[:, blind].any()
    for name in ("dq", "dk", "dv"):
        compare.assert_same_bits(getattr(found, name), getattr(want, name), name)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(65, 65), (1, 128), (9, 193)])
def test_logits_so_low_that_weights_of_absent_keys_would_overflow(emulator, rows, keys, deterministic):
    """Case 10: all logits are -120."""
    q, k = np.zeros((1, rows, 1, 64), BF16), np.zeros((1, keys, 1, 64), BF16)
    q[..., 0], k[..., 0] = 1, -120 * 8
    _, _, v, dout = operands((1, rows, keys, 1), BF16)
    found = gradients(emulator, dout, q, k, v, deterministic=deterministic)
    assert all_finite(found)
    want = dout.astype(np.float64).sum(1, keepdims=True).repeat(keys, 1) / keys
    compare.assert_close(found.dv, want, 2 * compare.eps(BF16) * np.abs(want).max(), "dv")


@pytest.mark.parametrize("info", [A100, T4], ids=["A100", "T4"])
def test_saturated_softcap(emulator, info):
    """Case 31: logits of thousands, whose derivatives are about 0."""
    q, k, v, dout = operands((1, 40, 70, 1), F16)
    found = gradients(emulator, dout, 50 * q, k, v, info, softcap=50.0, scale=1.0)
    assert all_finite(found)
    compare_all(found, dout, 50 * q, k, v, softcap=50.0, scale=1.0)


def test_memory_that_does_not_count(emulator):
    """NaN in keys and values behind lengths, before starts, and in rows of no sequence."""
    q, k, v, dout = (a[0] for a in operands((1, 100, 160, 2), BF16))
    cu_q, cu_k = [0, 40, 40, 90], [0, 70, 80, 150]
    results = [np.full(q.shape, np.nan, BF16), np.full((2, 100), np.nan, np.float32)]
    plain = problems.build_varlen(q, k, v, cu_q, cu_k, causal=True)
    results[0][:90], results[1][:, :90] = (a[..., :90] if n else a[:90] for n, a in enumerate(reference.forward(plain)))
    for a in (q, dout):
        a[90:] = np.nan
    for a in (k, v):
        a[150:] = np.nan
    for deterministic in (False, True):
        options = {"causal": True, "varlen": (cu_q, cu_k, None, None), "deterministic": deterministic}
        problem = problems.build_backward(dout, q, k, v, *results, **options)
        found = run(emulator, problem, H200)
        on_device = {name: arrays.view(np.array(getattr(problem, name)), name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        again = run(emulator, problem.replace(seqlen_q=100, seqlen_k=160, **on_device), H200)  # as if only the device knew
        want = compare.exact_gradients(problem)
        for name in ("dq", "dk", "dv"):
            exact = getattr(want, name)
            compare.assert_close(getattr(found, name), exact, 3 * compare.eps(BF16) * np.abs(exact).max(), name)
            compare.assert_same_bits(getattr(found, name), getattr(again, name), name)


def test_no_keys_and_no_queries(emulator):
    for rows, keys in ((3, 0), (0, 5), (0, 0)):
        q, k, v, dout = operands((1, rows, keys, 2), F16)
        found = gradients(emulator, dout, q, k, v)
        assert not any(g.any() for g in (found.dq, found.dk, found.dv))


def test_the_same_however_blocks_follow_each_other(emulator):
    """One head after the other, or tiles of all heads in turn."""
    q, k, v, dout = operands((2, 150, 200, 2), BF16)
    plain, first, second = (
        gradients(emulator, dout, q, k, v, causal=True, deterministic=n > 0, section=section) for n, section in enumerate((2, 1, 4))
    )
    for name in ("dq", "dk", "dv"):
        compare.assert_same_bits(getattr(first, name), getattr(second, name), name)
    exact = plain.dq.astype(np.float64)
    compare.assert_close(first.dq, exact, 2 * compare.eps(BF16) * np.abs(exact).max(), "dq")


@pytest.mark.parametrize("longest", [{"seqlen_q": 20}, {"seqlen_k": 20}], ids=str)
def test_lengths_on_the_device_that_are_longer_than_the_bias(emulator, longest):
    """Somebody gave a max_seqlen that is too small: nothing is written outside of dbias, and what is in it is right."""
    problem, smaller = packed_with_a_bias(BF16, longest)
    whole, found = run(emulator, problem, A100), run(emulator, smaller, A100)
    if "seqlen_q" in longest:
        want = whole.dbias[:, :, :20].astype(np.float64)
        compare.assert_close(found.dbias, want, 2 * compare.eps(F32) * np.abs(want).max(), "dbias")
    assert np.isfinite(found.dbias).all()


def packed_with_a_bias(dtype: np.dtype, longest: dict[str, int]) -> tuple[Problem, Problem]:
    """Two sequences with a bias, and the same where only the device knows how long they are, with a bias of shorter ones."""
    q, k, v, dout = (a[0] for a in operands((1, 120, 120, 2), dtype))
    cu, bias = np.array([0, 60, 120]), np.random.default_rng(0).standard_normal((2, 2, 60, 60)).astype(dtype)
    out, lse = reference.forward(problems.build_varlen(q, k, v, cu, cu, bias=bias))
    given = dout, q, k, v, out.astype(dtype), lse.astype(F32 if dtype == BF16 else dtype)
    problem = problems.build_backward(*given, bias=bias, varlen=(cu, cu, 60, 60))
    few = np.ascontiguousarray(bias[:, :, : longest.get("seqlen_q"), : longest.get("seqlen_k")])
    smaller = on_device(problem, np.int32).replace(bias=arrays.view(few, "bias"), bias_shape=few.shape, **longest)
    return problem, smaller


def test_what_it_leaves_to_others():
    q, k, v, dout = operands((1, 5, 5, 1), F16)
    out, lse = forward(q, k, v)
    broadcast_bias = {"bias": np.zeros((1, 5), F16), "deterministic": True}
    assert "no fixed order" in cuda_backward_fa2.decline(problems.build_backward(dout, q, k, v, out, lse, **broadcast_bias))
    assert "float32" in cuda_backward_fa2.decline(
        problems.build_backward(*(a.astype(np.float32) for a in (dout, q, k, v, out)), lse)
    )

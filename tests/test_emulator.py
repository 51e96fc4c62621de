"""The emulator finds what it is there to find: each probe does one thing that a kernel must not do."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from cuflash import arrays, jit
from emulator import emulate
from emulator.guarded import Guarded
from emulator.translate import calls, translate

PARAMS = np.dtype([("which", np.int32), ("stride", np.int32), ("input", np.uint64), ("output", np.uint64)])
THREADS, SHARED = 64, 2048

# One block of two warps; input and output are 64 float32.
PROBE = """
struct Probe {
    int which, stride;
    const float* input;
    float* output;
};

extern "C" __global__ void probe(const __grid_constant__ Probe p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const u32 base = smem_address(smem), own = base + 4 * threadIdx.x, next = base + 4 * (threadIdx.x ^ 1);
    const int i = threadIdx.x;
    u32 x = 0, m[4];
    float small[4] = {};
    switch (p.which) {
    case 0: store_smem(own, u32(i)); __syncthreads(); x = load_smem_4(next); break;
    case 1: store_smem(own, u32(i)); x = load_smem_4(next); break;
    case 2: x = load_smem_4(next); store_smem(own, u32(i)); break;
    case 3: store_smem(base, 1u); break;
    case 4: copy_or_zero<4>(own, p.input + i, true); copies_commit(); x = load_smem_4(own); break;
    case 5: copy_or_zero<4>(own, p.input + i, true); copies_commit(); copies_wait<0>(); x = load_smem_4(next); break;
    case 6: copy_or_zero<4>(own, p.input + i, true); copies_commit(); __syncthreads(); store_smem(own, 0u); break;
    case 7: store_smem(base + 2048, 1u); break;
    case 8: store_smem(base + 2, 1u); break;
    case 9: copy_16(base + 16 * i, p.input + 4 * i); break;
    case 10: copy_16(base + 16 * i, p.input + 1); break;
    case 11: x = u32(p.input[i + 1]); break;
    case 12: x = u32(p.input[i - 1]); break;
    case 13: const_cast<float*>(p.input)[i] = 1.0f; break;
    case 14: p.output[i + 1] = 1.0f; break;
    case 15: if (i < 32) return; __syncthreads(); break;
    case 16: if (i == 5) shuffle_xor<1>(1.0f); else x = __any_sync(~0u, true); break;
    case 17: if (i == 5) __syncthreads(); else shuffle_xor<1>(1.0f); break;
    case 18: if (i < 32) __syncthreads(); else __syncthreads_or(1); break;
    case 19: ldmatrix_x4(m, base + 128 * (i % 8)); break;
    case 20: x = u32(small[i % 8]); break;
    case 21: x = u32(2147483647 - 63 + i + p.which); break;
    case 22: *reinterpret_cast<uint4*>(p.output + i / 64 + 1) = make_uint4(1, 1, 1, 1); break;
    case 23: x = load_smem_4(own); break;
    case 24: x = pack2<Fp16>(p.input[i], p.input[i ^ 1]); break;
    case 25: x = pack2<Bf16>(p.input[i], p.input[i ^ 1]); break;
    case 26: x = copies_in_order(own, p.input + i); break;
    }
    p.output[i * p.stride] = __int_as_float(x);
}
"""
HELPER = """
// Of two groups, the older one is there after copies_wait<1>().
inline u32 copies_in_order(u32 own, const float* input) {
    copy_or_zero<4>(own, input, true);
    copies_commit();
    copy_or_zero<4>(own + 1024, input, false);
    copies_commit();
    copies_wait<1>();
    const u32 first = load_smem_4(own);
    copies_wait<0>();
    return first + load_smem_4(own + 1024);
}
"""

FAULTS = {
    1: r"thread \d+: race: (ld.shared reads|st.shared writes) shared memory at \d+, thread \d+ (wrote|read) it",
    2: r"race: (ld.shared reads|st.shared writes) shared memory at \d+, thread \d+ (wrote|read) it",
    3: r"race: st.shared writes shared memory at 0, thread 0 wrote it",
    4: r"ld.shared reads shared memory at 0, where thread 0 copies to and has not waited",
    5: r"race: (ld.shared reads|cp.async writes) shared memory at \d+, thread \d+ (wrote|read) it",
    6: r"thread (\d+): st.shared writes shared memory at \d+, where thread \1 copies to and has not waited",
    7: r"block 0, thread 0: st.shared: out of bounds, shared memory at 2048",
    8: r"misaligned, shared memory at 2",
    9: r"thread 16: cp.async reads byte 256 of input, which has 256",
    10: r"cp.async: misaligned, it reads byte 4 of input",
    11: r"thread 63: accesses byte 256 of input, which has 256",
    13: r"accesses byte 0 of input, which has 256; inputs can only be read",
    14: r"thread 63: accesses byte 256 of output, which has 256",
    15: r"deadlock: it waits at __syncthreads, and thread \d+ has left the kernel",
    16: r"is at (__any_sync|__shfl_xor_sync) while thread \d+ is at (__any_sync|__shfl_xor_sync)",
    17: r"deadlock: it waits at __\w+, and thread \d+ (at __\w+|has left the kernel)",
    18: r"is at __syncthreads_or while thread 0 is at __syncthreads",
    19: r"bank conflict: rows 1 and 0 of matrix 0 of ldmatrix, at 128 and 0",
    20: r"thread 4: undefined in C\+\+: an index out of bounds",
    21: r"undefined in C\+\+: .*an overflow of signed integers",
    22: r"undefined in C\+\+: .*a misaligned access",
}

needs_compiler = pytest.mark.skipif(emulate.why_unusable() is not None, reason=f"nothing can be emulated here: {emulate.why_unusable()}")


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """Runs a probe; gives its output."""
    emulator = emulate.Emulator(tmp_path_factory.mktemp("probe"))
    text = jit.assemble(jit.Source("include/ptx.cuh", HELPER + PROBE, "probe"))
    library = emulator.compile(text, "probe", "Probe", 800)

    def run(which: int, values: np.ndarray | None = None, side: str = "end", stride: int = 1) -> np.ndarray:
        values = np.arange(64, dtype=np.float32) if values is None else values
        result = np.full(64 * stride, np.nan, np.float32)[::stride]
        source = Guarded(arrays.view(values, "input"), side)
        target = Guarded(arrays.view(result, "output"), side, writable=True)
        params = np.zeros(1, PARAMS)
        params[0] = which, 1, source.view.pointer, target.view.pointer
        emulator.execute(library, params, 1, THREADS, SHARED, {"input": source, "output": target})
        target.write_back()
        return result.view(np.uint32) if stride == 1 else result

    yield run
    emulator.close()


@needs_compiler
def test_what_is_allowed_runs(probe):
    assert probe(0).tolist() == [i ^ 1 for i in range(64)]
    assert (probe(26) == np.arange(64, dtype=np.float32).view(np.uint32)).all()


@needs_compiler
@pytest.mark.parametrize("which", FAULTS)
def test_faults_are_found(probe, which):
    with pytest.raises(emulate.EmulationError, match=FAULTS[which]):
        probe(which)
    assert probe(0)[0] == 1  # and the next launch is none the worse


@needs_compiler
def test_the_beginning_of_an_array_is_watched_as_well(probe):
    probe(12)  # reads what lies before the array, in the same page
    with pytest.raises(emulate.EmulationError, match="thread 0: accesses byte -4 of input"):
        probe(12, side="start")


@needs_compiler
def test_what_is_written_beside_the_elements_is_found(probe):
    """The output has every other element, the probe writes all."""
    with pytest.raises(AssertionError, match="bytes beside the elements were written; first 6 bytes from the first"):
        probe(0, stride=2)


@needs_compiler
def test_shared_memory_begins_as_nan(probe):
    assert np.isnan(probe(23).view(np.float32)).all()


@needs_compiler
@pytest.mark.parametrize("which, dtype", [(24, np.float16), (25, ml_dtypes.bfloat16)])
def test_rounding_to_16_bits(probe, which, dtype):
    """Ties, denormals, the largest numbers and what is beyond; against NumPy's rounding."""
    rng = np.random.default_rng(0)
    rounded = rng.integers(0, 1 << 16, 4000).astype(np.uint16).view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        halfway = (rounded + np.nextafter(rounded.astype(dtype), dtype(np.inf)).astype(np.float32)) / 2
    wide = np.exp2(rng.uniform(-30, 18, 4000)) * rng.choice([-1.0, 1.0], 4000)
    special = np.array([0.0, -0.0, np.inf, -np.inf, 65504, 65519.996, 65520, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0001, 2.0**-14, 3.4e38])
    with np.errstate(all="ignore"):
        values = np.concatenate([rounded, halfway, wide, special]).astype(np.float32)
        values = np.resize(values[~np.isnan(values)], 200 * 64)
        want = values.astype(dtype).view(np.uint16)
    for part, bits in zip(values.reshape(-1, 64), want.reshape(-1, 64), strict=True):
        assert (probe(which, part) & 0xFFFF == bits).all()
    assert np.isnan((probe(which, np.full(64, np.nan, np.float32)) & 0xFFFF).astype(np.uint16).view(dtype)).all()


def test_asm_statements_become_calls():
    assert calls('"mov.u32 %0, %%tid.x;" : "=r"(x)') == "{ ptx::mov_u32(x, ptx::tid_x()); }"
    assert calls('"st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x[0]), "r"(f(a, b)) : "memory"') == (
        "{ ptx::st_shared_v2_b32(to, x[0], f(a, b)); }")
    assert calls('"{.reg .b16 a; cvt.rn.f16.f32 a, %1; mov.b32 %0, {a, a};}" : "=r"(d) : "f"(x)') == (
        "{ unsigned short a; ptx::cvt_rn_f16_f32(a, x); ptx::mov_b32(d, a, a); }")
    text = 'int f() {\n#pragma unroll\n    asm volatile("a.b %0;"\n        :: "r"(x));\n    return 1;\n}\n'
    assert translate(text) == "int f() {\n\n    { ptx::a_b(x); }\n\n    return 1;\n}\n"
    assert calls('"{.reg .pred p; try.parity p, [%1]; selp.u32 %0, 1, 0, p;}" : "=r"(d) : "r"(x)') == (
        "{ bool p; ptx::try_parity(p, x); ptx::selp_u32(d, 1, 0, p); }")
    assert calls('"a.shared::cta.b64 _, [%0];" :: "r"(x)') == "{ ptx::a_shared_cta_b64(x); }"
    assert calls('"{.reg .pred p; L: try.x p, [%0]; @!p bra L; @p a.b %0; M: }" :: "r"(x)') == (
        "{ __label__ L, M; bool p; L: ptx::try_x(p, x); if (!p) goto L; if (p) ptx::a_b(x); M: ; }")
    with pytest.raises(ValueError, match="registers of .b16 and .pred only"):
        calls('"{.reg .f32 p; mov.b32 %0, %1;}" : "=r"(d) : "r"(x)')


@needs_compiler
def test_an_instruction_that_the_emulator_lacks_is_named(tmp_path):
    emulator = emulate.Emulator(tmp_path)
    text = 'struct P { int x; };\nvoid f(P p) { asm("sin.approx.f32 %0, %0;" : "+r"(p.x)); }\n'
    with pytest.raises(RuntimeError, match=re.escape("sin_approx_f32")):
        emulator.compile(text, "f", "P", 800)
    emulator.close()

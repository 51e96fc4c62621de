"""What the emulator has of sm_90: products of warpgroups against NumPy, barriers in shared memory, and what is wrong with them is found."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cuflash import arrays, jit, tensor_map
from emulator import emulate
from emulator.guarded import Guarded

pytestmark = pytest.mark.skipif(emulate.why_unusable() is not None, reason=f"nothing can be emulated here: {emulate.why_unusable()}")

SHARED = 49152
PARAMS = np.dtype([("which", np.int32), ("bytes", np.int32), ("a", np.uint64), ("b", np.uint64), ("output", np.uint64)])
HEAD = """
struct Probe {
    int which, bytes;
    const u32* a;
    const u32* b;
    float* output;
};

inline void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
inline void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory"); }
"""

# A warpgroup multiplies A, 64 x 16 STEPS, by B, whose image comes from b, with that of A behind it; which: 0, or what is done wrong.
PRODUCT = """
extern "C" __global__ void probe(const __grid_constant__ Probe p) {{
    extern __shared__ __align__(1024) unsigned char smem[];
    const u32 base = smem_address(smem);
    const int i = threadIdx.x, row = i / 32 * 16 + i % 32 / 4, t = i % 4;
    for (int n = i; n < p.bytes / 4; n += 128) store_smem(base + 4 * n, p.b[n]);
    if (p.which != 1) fence();
    __syncthreads();
    float d[{registers}];
    for (int n = 0; n < {registers}; ++n) d[n] = 100.0f + n;
    u32 a[{steps}][4];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < {steps}; ++k) {{
        for (int r = 0; r < 4; ++r) a[k][r] = p.a[(row + r % 2 * 8) * {steps} * 8 + 8 * k + r / 2 * 4 + t];
        const u64 b = {descriptor}ull + ((base + k * {step_bytes}) >> 4) + (p.which == 2 && i == 77);
        const u64 from = {a_descriptor}ull + ((base + {a_place} + k * 32) >> 4);
        asm volatile("{{.reg .pred p; setp.ne.b32 p, {adds}, 0;"
                     "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} {operand_list}, p, 1, 1, {transposed};}}"
                     : {d_operands} : {a_operands}, "l"(b), "r"(k > 0));
        if (k == 0) commit();
    }}
    commit();
    if (p.which == 3) d[5] += 1.0f;
    if (p.which == 4) a[1][2] += 1;
    if (p.which == 5) {{ p.output[i] = d[0]; return; }}
    wait_products<1>();
    if (p.which == 6) for (int n = 0; n < {registers}; ++n) p.output[i * {registers} + n] = d[n];
    wait_products<0>();
    if (p.which == 6) return;
    if (p.which == 7 && i == 0) store_smem(base, 0u);
    for (int n = 0; n < {registers}; ++n) p.output[i * {registers} + n] = d[n];
}}
"""

# Warp 0 copies 8 tiles of 32 numbers through a ring of two stages, warp 1 adds each lane's numbers up.
RING = """
__device__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ void wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}
__device__ void init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

extern "C" __global__ void probe(const __grid_constant__ Probe p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const u32 base = smem_address(smem), full = base + 1024, empty = base + 1056;
    const int lane = threadIdx.x % 32, which = p.which;
    if (threadIdx.x == 0)
        for (int stage = 0; stage < 2; ++stage) init(full + 8 * stage, 64), init(empty + 8 * stage, which == 1 ? 2 : 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (which != 2) __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40));
        for (int tile = 0; tile < 8; ++tile) {
            const int stage = tile % 2;
            if (which != 3) wait(empty + 8 * stage, ~(tile / 2) & 1);
            copy_or_zero<4>(base + 128 * stage + 4 * lane, p.a + 32 * tile + lane, true);
            copies_commit();
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + 8 * stage) : "memory");
            arrive(full + 8 * stage + (which == 4 ? 64 : 0));
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(80));
        for (int tile = 0; tile < 8; ++tile) {
            const int stage = tile % 2;
            if (which != 5) wait(full + 8 * stage, tile / 2 & 1);
            sum += __uint_as_float(load_smem_4(base + 128 * stage + 4 * (lane ^ 1)));
            if (which != 6) __syncwarp();
            if (which == 7 ? tile < 4 && lane == 0 : lane == 0) arrive(empty + 8 * stage);
        }
    }
    if (which == 8) asm volatile("barrier.sync %0, %1;" ::"r"(3), "r"(threadIdx.x < 32 ? 64 : 32) : "memory");
    if (which == 9) asm volatile("bar.sync %0, %1;" ::"r"(16), "n"(64) : "memory");
    if (which == 10) {  // each warp has a barrier of its own
        store_smem(base + 512 + 4 * threadIdx.x, threadIdx.x);
        asm volatile("barrier.sync %0, %1;" ::"r"(1 + threadIdx.x / 32), "n"(32) : "memory");
        sum = load_smem_4(base + 512 + 4 * (threadIdx.x ^ 1));
    }
    if (which == 12 || which == 13) {  // warp 0 goes on at once: warp 1 knows of what it has written, not the other way round
        if ((which == 12) == (threadIdx.x < 32)) store_smem(base + 512 + 4 * threadIdx.x, threadIdx.x);
        if (threadIdx.x < 32) asm volatile("bar.arrive %0, %1;" ::"r"(5), "r"(64) : "memory");
        else asm volatile("bar.sync %0, %1;" ::"r"(5), "r"(64) : "memory");
        if ((which == 12) == (threadIdx.x >= 32)) sum = load_smem_4(base + 512 + 4 * (threadIdx.x ^ 32));
    }
    if (which == 11) {  // and what it orders is within the warp
        store_smem(base + 512 + 4 * threadIdx.x, threadIdx.x);
        asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / 32), "n"(32) : "memory");
        sum = load_smem_4(base + 512 + 4 * (threadIdx.x ^ 32));
    }
    p.output[threadIdx.x] = sum;
}
"""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    made = emulate.Emulator(tmp_path_factory.mktemp("sm90"))
    yield made
    made.close()


def run(
    emulator, library, which: int, threads: int, a: np.ndarray, b: np.ndarray, outputs: int, blocks: int = 1, cluster: int = 1,
) -> np.ndarray:
    result = np.full(outputs, np.nan, np.float32)
    memory = {name: Guarded(arrays.view(x, name), "end") for name, x in (("a", a), ("b", b))}
    memory["output"] = Guarded(arrays.view(result, "output"), "end", writable=True)
    params = np.zeros(1, PARAMS)
    params[0] = which, b.nbytes, *(memory[name].view.pointer for name in ("a", "b", "output"))
    emulator.execute(library, params, blocks, threads, SHARED, memory, cluster)
    memory["output"].write_back()
    return result


# ---- products -----------------------------------------------------------------------------------------------------------


class Product:
    """B has `width` columns a block of shared memory, and lies with a row for each of its columns, or (transposed) for each of its rows."""

    def __init__(self, columns: int = 64, dtype: str = "bf16", transposed: bool = False, width: int = 64, of_memory: bool = False):
        self.columns, self.dtype, self.transposed, self.width, self.of_memory = columns, dtype, transposed, width, of_memory
        self.steps = 3 if transposed and not of_memory else width // 16
        numbers, rng = np.dtype(ml_dtypes.bfloat16 if dtype == "bf16" else np.float16), np.random.default_rng(columns)
        self.a = rng.standard_normal((64, 16 * self.steps)).astype(numbers)
        self.b = rng.standard_normal((16 * self.steps, columns)).astype(numbers)

    def image(self) -> np.ndarray:
        """What is in shared memory."""
        b = self.tile(self.b if self.transposed else self.b.T)
        return np.concatenate([b, self.tile(self.a)]) if self.of_memory else b

    def tile(self, rows: np.ndarray) -> np.ndarray:
        """Blocks of columns, in whose rows the 16-byte pieces change places by the row's number."""
        pieces = rows.reshape(len(rows), -1, self.width // 8, 8).transpose(1, 0, 2, 3)
        swizzle = np.arange(len(rows)) * 2 * self.width >> 7 & self.width // 8 - 1
        turned = np.empty_like(pieces)
        for row, change in enumerate(swizzle):
            turned[:, row, np.arange(self.width // 8) ^ change] = pieces[:, row]
        return np.ascontiguousarray(turned).view(np.uint32).ravel()

    def text(self) -> str:
        registers, row_bytes = self.columns // 2, 2 * self.width
        common = {64: 1, 32: 2, 16: 3}[self.width] << 62 | 8 * row_bytes >> 4 << 32
        block_bytes = row_bytes * (16 * self.steps if self.transposed else self.columns)
        a = ['"l"(from)'] if self.of_memory else [f'"r"(a[k][{n}])' for n in range(4)]
        d = ", ".join(f"%{n}" for n in range(registers))
        a_list, (b, adds) = [f"%{registers + n}" for n in range(len(a))], (f"%{registers + len(a) + n}" for n in range(2))
        return HEAD + PRODUCT.format(
            registers=registers, steps=self.steps, columns=self.columns, dtype=self.dtype, descriptor=common | block_bytes >> 4 << 16,
            a_descriptor=common, a_place=self.b.nbytes, step_bytes=16 * row_bytes if self.transposed else 32,
            operand_list=f"{{{d}}}, {a_list[0] if self.of_memory else '{' + ', '.join(a_list) + '}'}, {b}", adds=adds,
            transposed=f"{'0, ' if self.of_memory else ''}{int(self.transposed)}",
            d_operands=", ".join(f'"+f"(d[{n}])' for n in range(registers)), a_operands=", ".join(a),
        )  # fmt: skip

    def compile(self, emulator):
        return emulator.compile(jit.assemble(jit.Source("include/ptx.cuh", self.text(), "probe")), "probe", "Probe", 900)

    def run(self, emulator, library, which: int = 0) -> np.ndarray:
        found = run(emulator, library, which, 128, self.a.view(np.uint32).ravel(), self.image(), 64 * self.columns)
        # Thread, then group of 8 columns, row of two, column of two.
        by_thread = found.reshape(4, 8, 4, -1, 2, 2)
        return by_thread.transpose(0, 4, 1, 3, 2, 5).reshape(64, self.columns)


@pytest.mark.parametrize("width", [64, 32, 16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "columns, dtype, of_memory",
    [
        (8, "f16", True), (32, "bf16", False), (64, "f16", False), (64, "bf16", True), (80, "bf16", True), (96, "f16", False),
        (128, "bf16", False), (176, "bf16", True), (192, "f16", False), (256, "f16", True),
    ],
)
def test_products_of_a_warpgroup(emulator, columns, dtype, of_memory, transposed, width):
    if transposed and columns % width:
        pytest.skip("the last block is wider than what is left of the matrix")
    product = Product(columns, dtype, transposed, width, of_memory)
    want = product.a.astype(np.float64) @ product.b.astype(np.float64)
    np.testing.assert_allclose(product.run(emulator, product.compile(emulator)), want, atol=1e-5)


FAULTS = {
    1: r"wgmma reads shared memory at \d+, thread \d+ wrote it, no fence.proxy.async in between",
    2: r"thread 77: wgmma.mma_async: the threads of its warpgroup do not agree on the descriptor",
    3: r"registers of D have changed while wgmma.mma_async was under way, in thread \d+",
    4: r"registers of A have changed while wgmma.mma_async was under way, in thread \d+",
    5: r"it leaves the kernel while wgmma.mma_async is under way",
    7: r"race: (st.shared writes shared memory at 0, thread \d+ read it|wgmma reads shared memory at 0, thread 0 wrote it)",
}


@pytest.mark.parametrize("which", FAULTS)
def test_faults_of_products_are_found(emulator, which):
    product = Product()
    library = product.compile(emulator)
    with pytest.raises(emulate.EmulationError, match=FAULTS[which]):
        product.run(emulator, library, which)
    product.run(emulator, library)


def test_sums_are_nan_until_all_that_add_to_them_are_waited_for(emulator):
    product = Product()
    assert np.isnan(product.run(emulator, product.compile(emulator), 6)).all()


# ---- barriers in shared memory ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ring(emulator):
    library = emulator.compile(jit.assemble(jit.Source("include/ptx.cuh", HEAD + RING, "probe")), "probe", "Probe", 900)
    numbers = np.random.default_rng(0).standard_normal(256).astype(np.float32)

    def tried(which: int) -> np.ndarray:
        return run(emulator, library, which, 64, numbers.view(np.uint32), numbers.view(np.uint32), 64)

    tried.want = numbers.reshape(8, 32).sum(axis=0)[np.arange(32) ^ 1]
    return tried


def test_a_ring_of_stages(ring):
    np.testing.assert_allclose(ring(0)[32:], ring.want, rtol=1e-5)
    assert ring(10).tolist() == [i ^ 1 for i in range(64)]
    assert ring(12)[32:].tolist() == list(range(32))


RING_FAULTS = {
    1: r"deadlock: it waits at mbarrier.try_wait",
    2: r"race: mbarrier.\w+ reads shared memory at 10\d\d, thread 0 wrote it|there is no mbarrier at 10\d\d",
    3: r"race: cp.async writes shared memory at \d+, thread \d+ read it|deadlock",
    4: r"mbarrier.arrive: there is no mbarrier at 1088",
    5: r"ld.shared reads shared memory at \d+, (where thread \d+ copies to|thread \d+ wrote it)|race: (ld.shared reads|cp.async writes)",
    6: r"race: cp.async writes shared memory at \d+, thread \d+ read it",
    7: r"deadlock: it waits at mbarrier.try_wait",
    8: r"barrier.sync 3, \d+: others came to it as one of \d+ threads",
    9: r"bar.sync 16, 64: there are barriers 0 to 15, of whole warps of the block's 64 threads",
    11: r"race: (ld.shared reads|st.shared writes) shared memory at \d+, thread \d+ (wrote|read) it",
    13: r"race: (ld.shared reads|st.shared writes) shared memory at \d+, thread \d+ (wrote|read) it",
}


@pytest.mark.parametrize("which", RING_FAULTS)
def test_faults_of_a_ring_are_found(ring, which):
    with pytest.raises(emulate.EmulationError, match=RING_FAULTS[which]):
        ring(which)
    np.testing.assert_allclose(ring(0)[32:], ring.want, rtol=1e-5)


# ---- clusters of blocks -------------------------------------------------------------------------------------------------

# Each of two blocks reads what the other one has written; which: 0, or what is done wrong.
CLUSTER = """
extern "C" __global__ void probe(const __grid_constant__ Probe p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const u32 base = smem_address(smem), rank = cluster_rank(), other = cluster_address(base, rank ^ 1);
    const int i = threadIdx.x, which = p.which;
    for (int n = 0; n < 4; ++n) store_smem(base + 16 * i + 4 * n, p.a[blockIdx.x * 128 + 4 * i + n]);
    if (which != 1) cluster_barrier();
    if (which == 2 && rank == 0) return;
    const float4 x = load_cluster_16(other + 16 * (i ^ 1));
    const float2 y = load_cluster_8(cluster_address(base, which == 3 ? 2 : rank) + 16 * i);
    p.output[blockIdx.x * 32 + i] = x.x + x.y + x.z + x.w + y.x + y.y;
    if (which == 4 && rank == 1) return;
    cluster_barrier();
    if (which == 5) store_smem(base + 16 * i, 0u), load_cluster_8(other + 16 * i);
}
"""
CLUSTER_FAULTS = {
    1: r"race: (ld.shared::cluster reads|st.shared writes) shared memory at \d+, thread \d+ (wrote|read) it",
    2: r"ld.shared::cluster reads shared memory at \d+ of a block that has ended",
    3: r"ld.shared::cluster: out of bounds",
    4: r"deadlock: it waits at barrier.cluster, and thread \d+ has left the kernel",
    5: r"race: (ld.shared::cluster reads|st.shared writes) shared memory at \d+, thread \d+ (wrote|read) it",
}


@pytest.fixture(scope="module")
def cluster(emulator):
    library = emulator.compile(jit.assemble(jit.Source("include/async.cuh", HEAD + CLUSTER, "probe")), "probe", "Probe", 900)
    numbers = np.random.default_rng(0).standard_normal((4, 32, 4)).astype(np.float32)
    order = (np.arange(4) ^ 1)[:, None], np.arange(32) ^ 1

    def tried(which: int) -> np.ndarray:
        return run(emulator, library, which, 32, numbers.view(np.uint32).ravel(), np.zeros(4, np.uint32), 128, blocks=4, cluster=2)

    tried.want = (numbers[order].sum(axis=-1) + numbers[..., :2].sum(axis=-1)).ravel()
    return tried


def test_blocks_of_a_cluster_read_each_others_memory(cluster):
    np.testing.assert_allclose(cluster(0), cluster.want, rtol=1e-5)


@pytest.mark.parametrize("which", CLUSTER_FAULTS)
def test_faults_of_a_cluster_are_found(cluster, which):
    with pytest.raises(emulate.EmulationError, match=CLUSTER_FAULTS[which]):
        cluster(which)
    np.testing.assert_allclose(cluster(0), cluster.want, rtol=1e-5)


# ---- boxes of arrays ----------------------------------------------------------------------------------------------------

# Thread 0 copies a box of 128 numbers by the map in b; all wait and hand it on. which: 10 times 0, or what is done wrong or otherwise, and
# the rank.
BOXES = """
extern "C" __global__ void probe(const __grid_constant__ Probe p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const u32 base = smem_address(smem), barrier = base + 2048;
    const int i = threadIdx.x, rank = p.which % 10, which = p.which / 10;
    const auto& map = *reinterpret_cast<const TensorMap*>(p.b);
    if (i == 0) mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    if (which == 3 || which == 4) store_smem(base + 4 * i, 0u);
    if (which == 4) async_proxy_fence();
    __syncthreads();
    if (i == 0) {
        prefetch_map(map);
        const u32 to = base + (which == 7 ? 64 : 0);
        if (which != 6 && which != 8) mbarrier_expect(barrier, which == 2 ? 528 : 512);
        if (rank == 3) copy_box(to, map, barrier, 0, 1, 2);
        if (rank == 4) copy_box<READ_AGAIN>(to, map, barrier, 0, 1, 1, 2);
        if (rank == 5) copy_box(to, map, barrier, 0, 1, 0, 1, 2);
        if (which == 8) mbarrier_expect(barrier, 512);
    }
    if (which == 6) return;
    if (which == 5 && i >= 64) __syncwarp();  // the others come first
    if (which != 1 && (which != 5 || i < 64)) mbarrier_wait(barrier, 0);
    p.output[i] = __uint_as_float(load_smem_4(base + 4 * i));
}
"""
BOX_SHAPES = {3: (3,), 4: (3, 2), 5: (3, 2, 1)}  # before rows and columns; the box is the last of them, from its second row on
BOX_FAULTS = {
    1: r"race: cp.async.bulk\S+ writes shared memory at \d+, thread \d+ read|ld.shared reads shared memory at \d+, where thread 0 copies",
    2: r"deadlock: it waits at mbarrier.try_wait",
    3: r"a bulk copy writes shared memory at \d+, thread \d+ wrote it, no fence.proxy.async in between",
    5: r"race: ld.shared reads shared memory at \d+, thread 0 wrote it",
    6: r"the block ends while 1 bulk copies into its shared memory are under way",
    7: r"cp.async.bulk.tensor: misaligned, shared memory at 64 is no multiple of 128",
}


@pytest.fixture(scope="module")
def boxes(emulator):
    """Runs the kernel: what has arrived, and what should; each in rows of 16 bytes, as they lie without a swizzle."""
    text = HEAD.partition("inline void fence")[0] + BOXES
    library = emulator.compile(jit.assemble(jit.Source("include/async.cuh", text, "probe")), "probe", "Probe", 900)

    def tried(rank: int = 4, which: int = 0, swizzle: int = 128, asked: int = 0, there: int = 3) -> tuple[np.ndarray, np.ndarray]:
        columns = (swizzle or 128) // 4
        rows = 128 // columns
        array = np.random.default_rng(1).standard_normal((*BOX_SHAPES[rank], rows, columns)).astype(np.float32)
        inside = array[..., : columns - 3]  # of each row, with 3 columns of something else behind it
        guarded = Guarded(arrays.view(array[:there], "a"), "end")
        box = (columns, rows, *(1,) * (rank - 2))
        with emulate.tensor_maps():
            made = tensor_map.TensorMap(4, inside.shape[::-1], array.strides[-2::-1], box, swizzle).at(guarded.view.pointer)
        image = tensor_map.aligned(made)
        result = np.full(128, np.nan, np.float32)
        memory = {"a": guarded, "output": Guarded(arrays.view(result, "output"), "end", True)}
        params = np.zeros(1, PARAMS)
        params[0] = (asked or rank) + 10 * which, 0, guarded.view.pointer, image.ctypes.data, memory["output"].view.pointer
        emulator.execute(library, params, 1, 128, SHARED, memory)
        memory["output"].write_back()
        want = np.zeros((rows, columns), np.float32)
        want[:-1, :-3] = inside[(-1,) * (rank - 2)][1:]
        place = np.arange(32) * 16
        return result.reshape(-1, 4)[(place ^ (place >> 7 & (max(swizzle, 16) // 16 - 1)) << 4) // 16], want.reshape(-1, 4)

    return tried


@pytest.mark.parametrize("rank", BOX_SHAPES)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_boxes(boxes, rank, swizzle):
    """Rows and columns that are outside arrive as 0; 16-byte pieces change places by the address."""
    found, want = boxes(rank, swizzle=swizzle)
    assert (found == want).all()


@pytest.mark.parametrize("which", [4, 8])
def test_boxes_over_what_was_written_and_ahead_of_what_is_expected(boxes, which):
    found, want = boxes(which=which)
    assert (found == want).all()


@pytest.mark.parametrize("which", BOX_FAULTS)
def test_faults_of_boxes_are_found(boxes, which):
    with pytest.raises(emulate.EmulationError, match=BOX_FAULTS[which]):
        boxes(which=which)


def test_maps_that_do_not_fit_are_found(boxes):
    with pytest.raises(emulate.EmulationError, match=r"cp.async.bulk.tensor: of 3 dimensions, the map has 4"):
        boxes(4, asked=3)
    with pytest.raises(emulate.EmulationError, match=r"cp.async.bulk.tensor reads byte \d+ of a, which has"):
        boxes(there=2)

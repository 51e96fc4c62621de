// The second kernel of a split: merges the parts that decode.cu left, where its last blocks do not. One block for ROWS rows of a
// (sequence, head).
#include "include/early.cuh"
#include "include/parts.cuh"

// What an instance fixes: as of decode.cu's, whose parts it merges.
template <class Out_, int DV_, int M_, int N_, int MASK_, int THREADS_, int ROWS_> struct Combine {
    using Out = Out_;
    static constexpr int DV = DV_, M = M_, N = N_, MASK = MASK_, THREADS = THREADS_, WORKERS = THREADS_, ROWS = ROWS_;
    static constexpr int PARTS_AT_ONCE = 4;  // few registers let many blocks work at a time
};

template <class C> __device__ __forceinline__ void combine(const DecodeParams& p) {
    let_next_kernel_begin();
    wait_for_kernel_before();
    const int heads = p.heads_kv * p.row_blocks, passes = p.passes;
    const u32 pair = block_index() / (C::M / C::ROWS);
    const int first_row = int(block_index() % (C::M / C::ROWS)) * C::ROWS;
    const int batch = int(pair / u32(heads)), head = int(pair % u32(heads));
    if (first_row >= p.rows) return;
    const UnitIndex<C::MASK, C::N> index(p);
    const Deal deal(p, index.total() * passes);
    const int units = index.units(batch), begin = index.before(batch) * passes + head / p.heads_at_once * units;
    const Parts parts(p, deal, begin, units, head % p.heads_at_once);
    if (parts.count > 1) merge_parts<C>(p, PackedRows(p, C::M, batch, head), parts, first_row, first_row + C::ROWS);
}

// The second kernel of a split: merges the parts that decode.cu left, where its last blocks do not. One block for each (sequence, head).
#include "include/parts.cuh"

// What an instance fixes: as of decode.cu's, whose parts it merges.
template <class Out_, int DV_, int M_, int N_, int MASK_, int THREADS_> struct Combine {
    using Out = Out_;
    static constexpr int DV = DV_, M = M_, N = N_, MASK = MASK_, THREADS = THREADS_;
};

template <class C> __device__ __forceinline__ void combine(const DecodeParams& p) {
    const int heads = p.heads_kv * p.row_blocks, passes = heads / p.heads_at_once;
    const int batch = int(block_index() / u32(heads)), head = int(block_index() % u32(heads));
    const UnitIndex<C::MASK, C::N> index(p);
    const Deal deal(p, index.total() * passes);
    const int units = index.units(batch), begin = index.before(batch) * passes + head / p.heads_at_once * units;
    const Parts parts(p, deal, begin, units, head % p.heads_at_once);
    if (parts.count > 1) merge_parts<C>(p, PackedRows(p, C::M, batch, head), parts);
}

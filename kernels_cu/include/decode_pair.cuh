// Two blocks that merge their parts of a (sequence, head) in their shared memory. C is the configuration of decode.cu.
#include "include/async.cuh"
#include "include/parts.cuh"

// What the blocks of a cluster have placed in their shared memory: two parts of the same rows, in the order of the blocks' numbers.
template <class C> struct Pair {
    u32 smem, of[2];  // where they are, seen from here
    int first;        // row of this block, which merges half of them

    struct Columns {  // four of a row, of both parts
        float4 of[2];
    };

    __device__ __forceinline__ Pair(u32 smem)
        : smem(smem), of{cluster_address(smem, 0), cluster_address(smem, 1)}, first(cluster_rank() * (C::M / 2)) {}

    __device__ __forceinline__ Columns load(int row, int column) const {
        const u32 at = 4 * ((first + row) * C::DV + (column / 8 ^ (row & 3)) * 8 + column % 8);
        return {load_cluster_16(of[0] + at), load_cluster_16(of[1] + at)};
    }

    // What a row's parts are multiplied by, and then both; in the place of the queries, which nobody needs any more.
    __device__ __forceinline__ u32 factors_smem(int row) const { return smem + C::ALL_Q_SMEM + 16 * row; }

    __device__ __forceinline__ void find_factors(const DecodeParams& p, const PackedRows& rows, int row) const {
        const u32 at = C::STATE_SMEM + 8 * (first + row);
        const float2 x = load_cluster_8(of[0] + at), y = load_cluster_8(of[1] + at);
        const float reference = fmaxf(x.x, y.x), a = exp2_fast(x.x - reference), b = exp2_fast(y.x - reference);
        const float sum = fmaf(y.y, b, x.y * a);
        const float inverse = finish_row(p, rows, first + row, reference, sum, true);
        store_smem(factors_smem(row), make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(inverse), sum == 0.0f));
    }

    __device__ __forceinline__ void merge(float (&result)[4], const Columns& x, int row) const {
        const uint4 factors = load_smem_16(factors_smem(row));
        const float a = __uint_as_float(factors.x), b = __uint_as_float(factors.y), inverse = __uint_as_float(factors.z);
        const float4 u = x.of[0], v = x.of[1];
        result[0] = fmaf(v.x, b, u.x * a), result[1] = fmaf(v.y, b, u.y * a);
        result[2] = fmaf(v.z, b, u.z * a), result[3] = fmaf(v.w, b, u.w * a);
#pragma unroll
        for (int i = 0; i < 4; ++i) result[i] = factors.w ? 0.0f : result[i] * inverse;
    }
};

// Merge this block's half of the rows. A thread's columns are on their way together, while some see to the rows' factors. This runs once,
// and instructions are fetched as it does: there must be few.
template <class C> __device__ __forceinline__ void merge_pair(const DecodeParams& p, const PackedRows& rows, u32 smem) {
    constexpr int HALF = C::M / 2, PER_ROW = C::DV / 4, ITEMS = HALF * PER_ROW / C::WORKERS;
    static_assert(HALF * PER_ROW % C::WORKERS == 0 && HALF <= C::WORKERS, "");
    const Pair<C> pair(smem);
    const int thread = thread_index(), count = p.rows - rows.first - pair.first;
    typename Pair<C>::Columns x[ITEMS];
    if (p.out_vector) {
#pragma unroll
        for (int n = 0; n < ITEMS; ++n) x[n] = pair.load((n * C::WORKERS + thread) / PER_ROW, (n * C::WORKERS + thread) % PER_ROW * 4);
    }
    if (thread < HALF && thread < count) pair.find_factors(p, rows, thread);
    C::sync();
    float result[4];
    if (p.out_vector) {
        u16* out = static_cast<u16*>(p.out) + rows.batch * p.out_stride.batch + rows.head(p, pair.first, 0) * p.out_stride.head;
#pragma unroll
        for (int n = 0; n < ITEMS; ++n) {
            const int row = (n * C::WORKERS + thread) / PER_ROW, column = (n * C::WORKERS + thread) % PER_ROW * 4;
            if (row >= count || column >= p.head_dim_v) continue;
            pair.merge(result, x[n], row);
            *reinterpret_cast<uint2*>(out + row * p.out_stride.head + column) =
                make_uint2(pack2<typename C::Out>(result[0], result[1]), pack2<typename C::Out>(result[2], result[3]));
        }
    } else {
#pragma unroll 1
        for (int i = thread; i < min(count, HALF) * PER_ROW; i += C::WORKERS) {
            pair.merge(result, pair.load(i / PER_ROW, i % PER_ROW * 4), i / PER_ROW);
            write_columns<C>(p, rows, pair.first + i / PER_ROW, i % PER_ROW * 4, result);
        }
    }
}

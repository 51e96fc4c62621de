// Rows of prefill_fa3.cu that a value has spoiled which they do not see: its weight is 0, but 0 * v is NaN where v is infinite or NaN.
//
// It happens only in tiles of keys that a mask cuts, where some rows see a key and others do not; values outside the sequence are 0 in
// shared memory. A row that is not finite is computed once more, from memory and slowly, with the keys alone that it sees: if it sees such
// a value, it comes out infinite or NaN again. Keys whose own logit is -inf are passed over here, as the reference does; without a mask
// nothing is repaired, and a value that is not finite spoils a row in which its logit is -inf.
#include "include/fa3_warpgroup.cuh"

// Number `at` of an array of 16-bit numbers T.
template <class T> __device__ __forceinline__ float number_at(const void* base, i64 at) {
    return unpack2<T>(static_cast<const u16*>(base)[at]).x;
}

// One query of a head, by a warp; the lane has columns lane, lane + 32, ... of it.
template <class C>
__device__ __forceinline__ void repair_row(const PrefillParams& p, const QueryTile<C>& tile, int row, int head) {
    using In = typename C::In;
    const int lane = thread_index() % 32, head_kv = tile.key_head(p);
    const i64 q_row = tile.seq.q_begin + row;
    const i64 q = tile.batch * p.q_stride.batch + q_row * p.q_stride.row + head * p.q_stride.head;
    float query[C::DQK / 32], acc[C::DV / 32];
#pragma unroll
    for (int i = 0; i < C::DQK / 32; ++i) {
        const int column = lane + 32 * i;
        query[i] = column < p.head_dim ? number_at<In>(p.q, q + column * p.q_stride.column) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < C::DV / 32; ++i) acc[i] = 0.0f;
    // A reference of its own: products are summed up in another order here, which large scores show.
    float reference = p.sinks ? p.sinks[head] : -infinity(), sum = reference > -infinity() ? 1.0f : 0.0f;
    const KeyRange keys = tile.visible.of_all(row + tile.seq.position, row + tile.seq.position);
#pragma unroll 1
    for (int key = keys.begin; key < keys.end; ++key) {
        const i64 k = kv_offset<C>(p, p.k_stride, tile, key) + head_kv * p.k_stride.head;
        const i64 v = kv_offset<C>(p, p.v_stride, tile, key) + head_kv * p.v_stride.head;
        float x = 0.0f;
#pragma unroll
        for (int i = 0; i < C::DQK / 32; ++i) {
            const int column = lane + 32 * i;
            if (column < p.head_dim) x = fmaf(query[i], number_at<In>(p.k, k + column * p.k_stride.column), x);
        }
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
        if constexpr (C::SCORE == SCORE_SOFTCAP) x = tanhf(x * p.scale);
        else if constexpr (C::SCORE == SCORE_SCALED) x *= p.scale;
        x = __fmul_rn(x, p.logit_scale);
        if (x == -infinity()) continue;
        const float factor = x > reference ? exp2_fast(reference - x) : 1.0f;
        reference = fmaxf(reference, x);
        const float weight = exp2_fast(x - reference);
        sum = fmaf(sum, factor, weight);
#pragma unroll
        for (int i = 0; i < C::DV / 32; ++i) {
            const int column = lane + 32 * i;
            if (column < p.head_dim_v) acc[i] = fmaf(weight, number_at<In>(p.v, v + column * p.v_stride.column), acc[i] * factor);
        }
    }
    u16* out = static_cast<u16*>(p.out) + tile.batch * p.out_stride.batch + q_row * p.out_stride.row + head * p.out_stride.head;
#pragma unroll
    for (int i = 0; i < C::DV / 32; ++i) {
        const int column = lane + 32 * i;
        if (column < p.head_dim_v) out[column * p.out_stride.column] = u16(pack2<typename C::Out>(sum == 0.0f ? 0.0f : acc[i] / sum, 0.0f));
    }
}

// The rows of this warp, after they have been stored, if one of them is spoiled.
template <class C> __device__ __forceinline__ void repair(const Warpgroup<C>& g, const QueryTile<C>& tile, bool spoiled) {
    if (!C::CUTS || !__any_sync(0xffffffffu, spoiled)) return;  // all rows see the same keys; or all is well
    const int first_row = thread_index() % 128 / 32 * 16;
    __syncwarp();  // rows have been stored by other lanes
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
        bool finite = true;
#pragma unroll
        for (int ot = 0; ot < C::DV / 8; ++ot)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (c / 2 == i / 8) finite = finite && fabsf(g.O_rmem[0][ot][c]) < infinity();
        const int lane = i % 8 * 4, query = tile.query(g.p, g.first_query(tile), first_row + i);
        const u32 rows = __ballot_sync(0xffffffffu, finite);
        const float sum = __shfl_sync(0xffffffffu, i < 8 ? g.state.sum[0] : g.state.sum[1], lane);
        const bool here = query >= 0 && query < tile.seq.q_length;
        const bool wrong = here && (rows >> lane & 15) != 15 && sum == sum;  // where a score is NaN, so is the row
        if (wrong) repair_row<C>(g.p, tile, query, tile.query_head(g.p, first_row + i));
    }
}

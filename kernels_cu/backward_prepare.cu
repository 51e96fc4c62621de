// What the backward pass needs of each row before its products: the log-sum-exp in log2 units, delta = rowsum(dO * O) - dLSE (Dao 2022,
// FlashAttention, appendix B.4), and sums for dQ that begin at 0.
#include "include/backward_rows.cuh"
#include "include/ptx.cuh"

constexpr int PREPARE_ROWS = 32;  // of a head and a sequence, by a block
constexpr int PREPARE_THREADS = 256;

template <class A, class B> __device__ __forceinline__ float dot2(u32 x, u32 y) {
    const float2 a = unpack2<A>(x), b = unpack2<B>(y);
    return fmaf(a.y, b.y, a.x * b.x);
}

// Out, Grad: types of out and dout. LANES have a row. VECTOR: both can be read 16 bytes at a time.
template <class Out, class Grad, int LANES, bool VECTOR> __device__ __forceinline__ void backward_prepare(const BackwardParams& p) {
    const PrefillParams& f = p.prefill;
    const u32 head = block_index() % u32(f.heads_q);  // rows of all heads are mostly neighbours in memory
    const i64 first = i64(block_index() / u32(f.heads_q)) * PREPARE_ROWS;
    const int batch = batch_of_tile(p, int(first / p.tile_rows));
    const Sequence seq = sequence(f, batch);
    const int first_row = int(first - first_place_of(p, batch, seq)), lane = threadIdx.x % LANES;
    const i64 entry = f.cu_seqlens_q ? 0 : batch;
    float4* sums = reinterpret_cast<float4*>(p.dq_sum + (head * p.places + first) * p.dq_columns);
    for (int i = threadIdx.x; i < PREPARE_ROWS * p.dq_columns / 4; i += PREPARE_THREADS) sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    if (p.dq_turns) {
        if (block_index() == 0 && threadIdx.x < FIRST_TURN) p.dq_turns[threadIdx.x] = 0;
        if (first % p.tile_rows == 0 && threadIdx.x < TURNS) {  // the first turn is that of the first key that some row of the tile sees
            const int key = max(max(seq.kv_start, seq.position + first_row - f.window_left), 0);
            p.dq_turns[FIRST_TURN + (head * p.places + first) / p.tile_rows * TURNS + threadIdx.x] = u32(key / p.turn_keys);
        }
    }
    constexpr int AT_ONCE = VECTOR ? PREPARE_ROWS * LANES / PREPARE_THREADS : 1;
#pragma unroll AT_ONCE
    for (int i = threadIdx.x / LANES; i < PREPARE_ROWS; i += PREPARE_THREADS / LANES) {
        const int row = first_row + i;
        const bool here = row < seq.q_length;
        // O is 0 where no key is seen, whatever dO holds.
        const int position = row + seq.position, begin = max(seq.kv_start, position - f.window_left);
        const bool sees = here && begin < min(seq.kv_length, position + f.window_right + 1);
        const float lse = here ? f.lse[entry * f.lse_stride.batch + head * f.lse_stride.head + (seq.q_begin + row) * f.lse_stride.row]
                               : -infinity();
        const bool weighs = lse != -infinity();  // keys, or the sink
        float delta = 0.0f;
        if (sees && weighs) {
            const u16* o = static_cast<const u16*>(f.out) + entry * f.out_stride.batch + i64(head) * f.out_stride.head +
                (seq.q_begin + row) * f.out_stride.row;
            const u16* g = static_cast<const u16*>(p.dout) + entry * p.dout_stride.batch + i64(head) * p.dout_stride.head +
                (seq.q_begin + row) * p.dout_stride.row;
            if constexpr (VECTOR) {
#pragma unroll 1
                for (int column = 8 * lane; column < f.head_dim_v; column += 8 * LANES) {
                    const uint4 x = *reinterpret_cast<const uint4*>(o + column), y = *reinterpret_cast<const uint4*>(g + column);
                    delta += dot2<Out, Grad>(x.x, y.x) + dot2<Out, Grad>(x.y, y.y);
                    delta += dot2<Out, Grad>(x.z, y.z) + dot2<Out, Grad>(x.w, y.w);
                }
            } else {
#pragma unroll 1
                for (int column = lane; column < f.head_dim_v; column += LANES)
                    delta += dot2<Out, Grad>(o[column * f.out_stride.column], g[column * p.dout_stride.column]);
            }
        }
#pragma unroll
        for (int lanes = LANES / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, lanes);
        const i64 place = head * p.places + first + i;
        if (lane == 0) {
            if (weighs && p.dlse)
                delta -= p.dlse[entry * p.dlse_stride.batch + head * p.dlse_stride.head + (seq.q_begin + row) * p.dlse_stride.row];
            p.row_lse[place] = weighs ? lse * LOG2E : infinity();
            p.row_delta[place] = delta;
        }
    }
}

// The end of the backward pass: dQ from the sums of backward_fa2.cu, which lie row after row, to 16-bit rows of any strides.
#include "include/backward_rows.cuh"
#include "include/ptx.cuh"
#include "include/types.cuh"

constexpr int CONVERT_ROWS = 32;  // of a head and a sequence, by a block
constexpr int CONVERT_THREADS = 256;

// VECTOR: rows of dq can be written 16 bytes at a time.
template <class In, bool VECTOR> __device__ __forceinline__ void backward_convert_rows(const BackwardParams& p) {
    const PrefillParams& f = p.prefill;
    const u32 per_head = u32(p.places / CONVERT_ROWS), head = block_index() / per_head;
    const i64 first = i64(block_index() % per_head) * CONVERT_ROWS;
    const int batch = batch_of_tile(p, int(first / p.tile_rows));
    const Sequence seq = sequence(f, batch);
    const int first_row = int(first - first_place_of(p, batch, seq)), pieces = (f.head_dim + 7) / 8;
    const i64 entry = f.cu_seqlens_q ? 0 : batch;
    for (int i = threadIdx.x; i < CONVERT_ROWS * pieces; i += CONVERT_THREADS) {
        const int row = first_row + i / pieces, column = i % pieces * 8;
        if (row >= seq.q_length) return;
        const float4* from = reinterpret_cast<const float4*>(p.dq_sum + (head * p.places + first + i / pieces) * p.dq_columns + column);
        const float4 low = from[0], high = from[1];
        const u32 word[4] = {
            pack2<In>(low.x * p.scale, low.y * p.scale), pack2<In>(low.z * p.scale, low.w * p.scale),
            pack2<In>(high.x * p.scale, high.y * p.scale), pack2<In>(high.z * p.scale, high.w * p.scale),
        };
        u16* to = static_cast<u16*>(p.dq) + entry * p.dq_stride.batch + i64(head) * p.dq_stride.head +
                  (seq.q_begin + row) * p.dq_stride.row;
        if constexpr (VECTOR) {
            *reinterpret_cast<uint4*>(to + column) = make_uint4(word[0], word[1], word[2], word[3]);
        } else {
#pragma unroll
            for (int n = 0; n < 8; ++n)
                if (column + n < f.head_dim) to[(column + n) * p.dq_stride.column] = u16(word[n / 2] >> (n % 2 * 16));
        }
    }
}

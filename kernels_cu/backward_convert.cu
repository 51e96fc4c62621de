// The end of the backward pass: dQ from the sums of backward_fa3.cu, in the order in which its warpgroups hold them, to 16-bit rows.
#include "include/backward_rows.cuh"
#include "include/ptx.cuh"
#include "include/types.cuh"

constexpr int CONVERT_THREADS = 256;

// M: queries of a tile. A part of a tile are 64 columns of all its queries, or, where there are no more columns, of half of them.
template <class In, int M, int COLUMNS> __device__ __forceinline__ void backward_convert(const BackwardParams& p) {
    constexpr int QUERIES = COLUMNS == 64 ? M / 2 : M, PARTS = COLUMNS == 64 ? 2 : COLUMNS / 64, PITCH = 64 + 8;
    __shared__ __align__(16) u16 rows_smem[QUERIES * PITCH];
    const PrefillParams& f = p.prefill;
    const u32 part = block_index() % PARTS, rest = block_index() / PARTS, head = rest % u32(f.heads_q), tile = rest / u32(f.heads_q);
    const u32 tiles = u32(p.places / M);
    const float4* sums = reinterpret_cast<const float4*>(p.dq_sum + (i64(head) * tiles + tile) * M * COLUMNS + part * QUERIES * 64);
    for (int i = threadIdx.x; i < QUERIES / 8 * 128; i += CONVERT_THREADS) {
        const float4 x = sums[i];
        const int lane = i % 32, j = i / 32 % (QUERIES / 8), warp = i / 32 / (QUERIES / 8);
        const int column = warp * 16 + lane / 4, query = j * 8 + lane % 4 * 2;
        const u32 low = pack2<In>(x.x * p.scale, x.y * p.scale), high = pack2<In>(x.z * p.scale, x.w * p.scale);
        u16* to = rows_smem + query * PITCH + column;
        to[0] = u16(low), to[PITCH] = u16(low >> 16);
        to[8] = u16(high), to[PITCH + 8] = u16(high >> 16);
    }
    __syncthreads();
    const int batch = batch_of_tile(p, tile);
    const Sequence seq = sequence(f, batch);
    const int first_row = int(i64(tile) * M - first_place_of(p, batch, seq)) + (COLUMNS == 64 ? part * QUERIES : 0);
    const int first_column = COLUMNS == 64 ? 0 : part * 64;
    const i64 entry = f.cu_seqlens_q ? 0 : batch;
    for (int i = threadIdx.x; i < QUERIES * 8; i += CONVERT_THREADS) {
        const int row = first_row + i / 8, column = first_column + i % 8 * 8;
        if (row >= seq.q_length || column >= f.head_dim) continue;
        u16* to = static_cast<u16*>(p.dq) + entry * p.dq_stride.batch + i64(head) * p.dq_stride.head +
            (seq.q_begin + row) * p.dq_stride.row;
        *reinterpret_cast<uint4*>(to + column) = *reinterpret_cast<const uint4*>(rows_smem + i / 8 * PITCH + i % 8 * 8);
    }
}

// What a block of decode.cu does when a part of the keys of a (sequence, head) is read. C is the configuration of decode.cu.
#include "include/decode_warp.cuh"

// A part ends: its warps' states become one, and that the result or a partial one. Nobody needs the stage any more.
template <class C>
__device__ __forceinline__ void gather_warps(const DecodeParams& p, WarpDecode<C>& warp, const Piece& piece, u32 smem, u32 stage_smem) {
    const int thread = C::thread(), lane = thread % 32, key_warp = thread / 32 % C::KEY_WARPS;
    const u32 state_smem = smem + C::STATE_SMEM;
#pragma unroll
    for (int r = 0; r < 2 * C::MT; ++r) {
        warp.state.reduce(r);
        const u32 at = state_smem + 8 * (key_warp * C::M + warp.row(thread, r));
        if (Fragments<C::TURNED>::speaks(lane)) {
            store_smem(at, __float_as_uint(warp.state.reference[r]));
            store_smem(at + 4, __float_as_uint(warp.state.sum[r]));
        }
    }
    C::sync();
    const PackedRows rows(p, C::M, piece.batch, piece.head);
    const int count = min(C::M, p.rows - rows.first);
    constexpr int PER_ROW = C::COLUMNS / 4, OT_COLUMNS = Fragments<C::TURNED>::COLUMNS;
#pragma unroll
    for (int first = 0; first < C::DV; first += C::COLUMNS) {
        if (first > 0) C::sync();
        // The 8 columns of a product lie at place (product ^ row % 4), so that the rows of a warp's store touch all banks.
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r)
#pragma unroll
            for (int ot = 0; ot < C::COLUMNS / OT_COLUMNS; ++ot) {
                const int row = warp.row(thread, r);
                const float* x = &warp.O_rmem[r / 2][first / OT_COLUMNS + ot][r % 2 * 2];
                const u32 row_smem = stage_smem + 4 * (key_warp * C::M + row) * C::COLUMNS;
                if constexpr (!C::SCALED) {
                    const u32 at = row_smem + 4 * ((ot ^ (row & 3)) * 8 + lane % 4 * 2);
                    store_smem(at, make_uint2(__float_as_uint(x[0]), __float_as_uint(x[1])));
                } else {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int column = warp.column(lane, ot, c);
                        store_smem(row_smem + 4 * ((column / 8 ^ (row & 3)) * 8 + column % 8), __float_as_uint(x[c] * warp.unit.unit));
                    }
                }
            }
        C::sync();
#pragma unroll 1
        for (int i = thread; i < count * PER_ROW; i += C::WORKERS) {
            const int row = i / PER_ROW, column = i % PER_ROW * 4;
            Accumulated a{{0.0f, 0.0f, 0.0f, 0.0f}, Fast32::LOWEST, 0.0f};
            float factor[C::KEY_WARPS];
#pragma unroll
            for (int w = 0; w < C::KEY_WARPS; ++w) {
                factor[w] = __uint_as_float(load_smem_4(state_smem + 8 * (w * C::M + row)));
                a.reference = fmaxf(a.reference, factor[w]);
            }
#pragma unroll
            for (int w = 0; w < C::KEY_WARPS; ++w) {
                factor[w] = exp2_fast(factor[w] - a.reference);
                a.sum = fmaf(__uint_as_float(load_smem_4(state_smem + 8 * (w * C::M + row) + 4)), factor[w], a.sum);
                const uint4 x = load_smem_16(
                    stage_smem + 4 * ((w * C::M + row) * C::COLUMNS + (column / 8 ^ (row & 3)) * 8 + column % 8));
                a.add({__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)}, factor[w]);
            }
            if (piece.flags & Piece::WHOLE) {
                write_result<C>(p, rows, row, first + column, a);
            } else {
                const i64 at = i64(piece.slot) * C::M + row;
                *reinterpret_cast<float4*>(p.part_out + at * C::DV + first + column) = {a.x[0], a.x[1], a.x[2], a.x[3]};
                if (first + column == 0) p.part_state[at] = {a.reference, a.sum};
            }
        }
    }
}

__device__ __forceinline__ Parts parts_of(const DecodeParams& p, const Deal& deal, const Piece& piece) {
    return Parts(p, deal, piece.before, piece.units, piece.head - int(quotient(piece.head, p.heads_at_once)) * p.heads_at_once);
}

// The block that brings the last part of a (sequence, head) merges all of them.
template <class C> __device__ __forceinline__ void merge_if_last(const DecodeParams& p, const Parts& parts, const Piece& piece, u32 smem) {
    const int heads = p.heads_kv * p.row_blocks;
    C::sync();
    if (threadIdx.x == 0)
        store_smem(smem + C::FLAG_SMEM, count_up(p.arrived + i64(piece.batch) * heads + piece.head, parts.count - 1));
    C::sync();
    if (int(load_smem_4(smem + C::FLAG_SMEM)) != parts.count - 1) return;
    merge_parts<C>(p, PackedRows(p, C::M, piece.batch, piece.head), parts, 0, C::M);
}

template <class C>
__device__ __forceinline__ void finish(
    const DecodeParams& p, WarpDecode<C>& warp, const Piece& piece, const Deal& deal, u32 smem, u32 stage_smem
) {
    const Parts parts = parts_of(p, deal, piece);
    gather_warps(p, warp, piece, smem, stage_smem);
    if (C::MERGES && !(piece.flags & Piece::WHOLE)) merge_if_last<C>(p, parts, piece, smem);
}

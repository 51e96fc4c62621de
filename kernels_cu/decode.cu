// Flash-Decoding: attention of a few queries over many keys, for sm_75 and every later GPU. It is reading K and V once that takes the time.
//
// All query heads of a key/value head, times all queries, fill the rows of a tile: what is read serves every one of them. The keys
// are split over the whole grid (see deal.cuh); a part leaves its accumulators in float32, and the last block to finish a
// (sequence, head) merges them, or combine.cu does. The warps of a block share the keys of a tile, 16 or more each, with an online
// softmax of their own, and meet only where a part ends: a tile costs one barrier. STAGES - 1 tiles are under way meanwhile: at
// 4.8 TB/s and a latency of 1 us, each of 132 multiprocessors needs 36 KiB of them at least.
#include "include/decode_load.cuh"
#include "include/decode_warp.cuh"

// What an instance fixes. ROW_WARPS: they share the rows, and the others of WARPS the keys. ONE: there is one query. MERGES: the last
// block merges the parts. LOAD: see TileLoader.
template <
    class In_, class Out_, int DQK_, int DV_, int M_, int N_, int WARPS_, int ROW_WARPS_, int STAGES_, int LOAD_, int MASK_, int SCORE_,
    bool ONE_, bool PAGED_, bool MERGES_, bool Q_IN_RMEM_>
struct Decode {
    using In = In_;
    using Out = Out_;
    static constexpr int DQK = DQK_, DV = DV_, M = M_, N = N_, STAGES = STAGES_, LOAD = LOAD_, MASK = MASK_, SCORE = SCORE_;
    static constexpr bool ONE = ONE_, PAGED = PAGED_, MERGES = MERGES_, Q_IN_RMEM = Q_IN_RMEM_, HIDES = false;
    static constexpr bool ARRAY = (MASK & MASK_ARRAY) != 0;
    static constexpr bool CUTS = ARRAY || (!ONE && (MASK & MASK_BAND) != 0);  // rows may see different keys
    using Order = KeyOrder<false>;
    static constexpr int THREADS = 32 * WARPS_, ROW_WARPS = ROW_WARPS_, KEY_WARPS = WARPS_ / ROW_WARPS, GROUPS = 1;
    static constexpr int WARP_ROWS = M / ROW_WARPS, KEYS = N / KEY_WARPS;  // rows and keys whose scores a warp computes
    static constexpr int MT = WARP_ROWS / 16, NT = KEYS / 8, OT = DV / 8;  // mma tiles of a warp: rows, keys, value columns
    using QTile = SmemTile<M, DQK>;
    using KTile = SmemTile<N, DQK>;
    using VTile = SmemTile<N, DV>;
    // Of a stage: keys, values, and the queries of a part, the one whose number it is modulo STAGES; what it is that lies there, see
    // Piece. No more than STAGES parts are under way, so that queries stay until their part is done.
    static constexpr int V_SMEM = KTile::BYTES, Q_SMEM = V_SMEM + VTile::BYTES, STAGE_BYTES = Q_SMEM + QTile::BYTES;
    static constexpr int PIECES_SMEM = STAGES * STAGE_BYTES, PIECE_BYTES = 64;
    static constexpr int STATE_SMEM = PIECES_SMEM + STAGES * PIECE_BYTES;  // reference and sum of each row of each of the key warps
    static constexpr int FLAG_SMEM = STATE_SMEM + 8 * KEY_WARPS * M, SMEM_BYTES = FLAG_SMEM + 16;
    // The accumulators of the key warps meet in the place of a stage, so many columns at a time.
    static __device__ constexpr int columns(int passes) {
        return OT % (4 * passes) == 0 && 4 * KEY_WARPS * M * (DV / passes) <= Q_SMEM ? DV / passes : columns(passes + 1);
    }
    static constexpr int COLUMNS = columns(1);
    static __device__ __forceinline__ u32 piece_smem(u32 smem, int stage) { return smem + PIECES_SMEM + stage * PIECE_BYTES; }
    static_assert(MT * 16 * ROW_WARPS == M && NT % 2 == 0 && OT % 4 == 0 && STAGES >= 2, "");
};

// A part ends: its warps' states become one, and that the result or a partial one. Nobody needs the stage any more.
template <class C> __device__ __forceinline__ void finish(const DecodeParams& p, WarpDecode<C>& warp, const Piece& piece, u32 smem, u32 stage_smem) {
    const int thread = thread_index(), lane = thread % 32, key_warp = thread / 32 % C::KEY_WARPS;
    const u32 state_smem = smem + C::STATE_SMEM;
#pragma unroll
    for (int r = 0; r < 2 * C::MT; ++r) {
        warp.state.reduce(r);
        const u32 at = state_smem + 8 * (key_warp * C::M + warp.row(thread, r));
        if (lane % 4 == 0) {
            store_smem(at, __float_as_uint(warp.state.reference[r]));
            store_smem(at + 4, __float_as_uint(warp.state.sum[r]));
        }
    }
    __syncthreads();
    const PackedRows rows(p, C::M, piece.batch, piece.head);
    const int count = min(C::M, p.rows - rows.first);
    constexpr int PER_ROW = C::COLUMNS / 4, OTS = C::COLUMNS / 8;
#pragma unroll
    for (int first = 0; first < C::DV; first += C::COLUMNS) {
        if (first > 0) __syncthreads();
        // The 8 columns of a product lie at place (product ^ row % 4), so that the rows of a warp's store touch all banks.
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r)
#pragma unroll
            for (int ot = 0; ot < OTS; ++ot) {
                const int row = warp.row(thread, r);
                const float* x = &warp.O_rmem[r / 2][first / 8 + ot][r % 2 * 2];
                store_smem(
                    stage_smem + 4 * ((key_warp * C::M + row) * C::COLUMNS + (ot ^ (row & 3)) * 8 + lane % 4 * 2),
                    make_uint2(__float_as_uint(x[0]), __float_as_uint(x[1])));
            }
        __syncthreads();
#pragma unroll 1
        for (int i = thread; i < count * PER_ROW; i += C::THREADS) {
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

// The block that brings the last part of a (sequence, head) merges all of them.
template <class C> __device__ __forceinline__ void merge_if_last(const DecodeParams& p, const Deal& deal, const Piece& piece, u32 smem) {
    const int heads = p.heads_kv * p.row_blocks;
    const Parts parts(p, deal, piece.before, piece.units, int(u32(piece.head) % u32(p.heads_at_once)));
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        store_smem(smem + C::FLAG_SMEM, count_up(p.arrived + i64(piece.batch) * heads + piece.head, parts.count - 1));
    __syncthreads();
    if (int(load_smem_4(smem + C::FLAG_SMEM)) != parts.count - 1) return;
    __threadfence();
    merge_parts<C>(p, PackedRows(p, C::M, piece.batch, piece.head), parts);
}

template <class C> __device__ __forceinline__ void decode(const DecodeParams& p, unsigned char* smem_pointer) {
    const u32 smem = smem_address(smem_pointer);
    Loader<C> loader(p);
    WarpDecode<C> warp(p);
    int ahead = 0;  // tiles that are being loaded or there
#pragma unroll 1
    for (int stage = 0; stage < C::STAGES - 1; ++stage) {
        ahead += loader.more();
        loader.load(smem, stage);
    }
#pragma unroll 1
    for (int stage = 0, free = C::STAGES - 1; ahead > 0; --ahead) {
        copies_wait<C::STAGES - 2>();
        __syncthreads();
        ahead += loader.more();
        loader.load(smem, free);
        const u32 stage_smem = smem + stage * C::STAGE_BYTES;
        const Piece piece = Piece::load(C::piece_smem(smem, stage));
        if (piece.flags & Piece::BEGINS) warp.begin(piece);
        warp.tile(piece, stage_smem);
        if (piece.flags & Piece::ENDS) {
            finish(p, warp, piece, smem, stage_smem);
            if (C::MERGES && !(piece.flags & Piece::WHOLE)) merge_if_last<C>(p, loader.next.deal, piece, smem);
        }
        free = stage;
        if (++stage == C::STAGES) stage = 0;
    }
}

// Flash-Decoding: attention of a few queries over many keys, for sm_75 and every later GPU. It is reading K and V once that takes the time.
//
// All query heads of a key/value head, times all queries, fill the rows of a tile: what is read serves every one of them. The keys
// are split over the whole grid (see deal.cuh); a part leaves its accumulators in float32, and the last block to finish a
// (sequence, head) merges them, or combine.cu does. The warps of a block share the keys of a tile, 16 or more each, with an online
// softmax of their own, and meet only where a part ends; where they load for each other, a tile costs one barrier. STAGES - 1 tiles are
// under way meanwhile: at 4.8 TB/s and a latency of 1 us, each of 132 multiprocessors needs 36 KiB of them at least.
#include "include/decode_finish.cuh"
#include "include/decode_groups.cuh"
#include "include/decode_load.cuh"
#include "include/early.cuh"

// What an instance fixes. ROW_WARPS: they share the rows, and the others of WARPS the keys. ONE: there is one query. MERGES: the last
// block merges the parts. LOAD: see TileLoader. WGMMA: it is warpgroups that multiply, see decode_wgmma.cuh.
// Kv: the type of keys and values, In or E4m3. PAIRED: two blocks in a row are a cluster, and have the two parts of a (sequence, head).
template <
    class In_, class Out_, int DQK_, int DV_, int M_, int N_, int WARPS_, int ROW_WARPS_, int STAGES_, int LOAD_, int MASK_, int SCORE_,
    bool ONE_, bool PAGED_, bool MERGES_, bool Q_IN_RMEM_, bool WGMMA_, class Kv_ = In_, bool PAIRED_ = false>
struct Decode {
    using In = In_;
    using Out = Out_;
    using Kv = Kv_;
    static constexpr int DQK = DQK_, DV = DV_, M = M_, N = N_, STAGES = STAGES_, LOAD = LOAD_, MASK = MASK_, SCORE = SCORE_;
    static constexpr bool ONE = ONE_, PAGED = PAGED_, MERGES = MERGES_, Q_IN_RMEM = Q_IN_RMEM_, WGMMA = WGMMA_, HIDES = false;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr bool ARRAY = (MASK & MASK_ARRAY) != 0;
    static constexpr bool CUTS = ARRAY || (!ONE && (MASK & MASK_BAND) != 0);  // rows may see different keys
    static constexpr bool TURNED = M == 8;  // queries are the columns of the products; of e4m3 alone
    using Order = typename Fragments<TURNED>::Order;
    static constexpr int WORKERS = 32 * WARPS_, THREADS = WORKERS + (WGMMA ? 128 : 0);  // of which some only load
    static constexpr bool SHARES = PAGED && LOAD == 16;      // each warp loads a share of the keys, see decode_pages.cuh
    static constexpr bool APART = SHARES && ROW_WARPS_ == 1;  // which is what it multiplies: it needs no other warp for a tile
    static constexpr int ROW_WARPS = ROW_WARPS_, KEY_WARPS = WARPS_ / ROW_WARPS, GROUPS = 1;
    static constexpr int WARP_ROWS = M / ROW_WARPS, KEYS = N / KEY_WARPS;  // rows and keys whose scores a warp computes
    static constexpr int MT = (WARP_ROWS + 8) / 16;  // mma tiles of a warp: rows, keys, value columns
    static constexpr int NT = KEYS / Fragments<TURNED>::KEYS, OT = DV / Fragments<TURNED>::COLUMNS;
    static constexpr bool SCALED = same<Kv, E4m3>;
    static constexpr int PACK = SCALED ? 2 : 1;  // keys and values lie in tiles of 16-bit words, so many numbers in each
    using Product = typename ProductType<In, SCALED>::Type;  // what is multiplied
    using QTile = SmemTile<TURNED ? 16 : M, DQK>;
    // Of 8-bit rows a thread copies 16 bytes of each block as well, so that finding a row pays: blocks are half as wide.
    template <int COLUMNS> using Tile = SmemTile<N, COLUMNS / PACK, SCALED || COLUMNS % 64 != 0 ? 32 : 64>;
    using KTile = Tile<DQK>;
    using VTile = Tile<DV>;
    // Of a stage: keys, values, and the queries of a part, the one whose number it is modulo STAGES; scales of keys, then of values; what
    // it is that lies there, see Piece. No more than STAGES parts are under way, so that queries stay until their part is done.
    static constexpr int V_SMEM = KTile::BYTES, Q_SMEM = V_SMEM + VTile::BYTES;
    static constexpr int SCALES_SMEM = Q_SMEM + (WGMMA ? 0 : QTile::BYTES), STAGE_BYTES = SCALES_SMEM + (SCALED ? 8 * N : 0);
    static constexpr int ALL_Q_SMEM = STAGES * STAGE_BYTES;  // queries of all stages, where they have no place there
    static constexpr int PIECES_SMEM = ALL_Q_SMEM + (WGMMA ? QTile::BYTES : 0), PIECE_BYTES = 64;
    static constexpr int STATE_SMEM = PIECES_SMEM + STAGES * PIECE_BYTES;  // reference and sum of each row of each of the key warps
    static constexpr int FLAG_SMEM = STATE_SMEM + 8 * KEY_WARPS * M, BARRIERS_SMEM = FLAG_SMEM + 16;
    static constexpr int FACTORS_SMEM = BARRIERS_SMEM + (WGMMA ? 16 * STAGES : 0);  // of rows, see decode_e4m3.cuh
    static constexpr int SMEM_BYTES = FACTORS_SMEM + (SCALED ? 4 * M : 0);
    // The accumulators of the key warps meet in the place of a stage, so many columns at a time.
    static __device__ constexpr int columns(int passes) {
        return DV % (32 * passes) == 0 && 4 * KEY_WARPS * M * (DV / passes) <= Q_SMEM ? DV / passes : columns(passes + 1);
    }
    static constexpr int COLUMNS = columns(1);
    static __device__ __forceinline__ u32 piece_smem(u32 smem, int stage) { return smem + PIECES_SMEM + stage * PIECE_BYTES; }
    // In 8 bits, where instructions are what counts, known not to be negative: divisions of it by powers of two are shifts.
    static __device__ __forceinline__ int thread() {
        const int x = thread_index();
        if constexpr (SCALED) __builtin_assume(x >= 0);
        return x;
    }
    static __device__ __forceinline__ int load_thread() { return thread(); }
    // A barrier of the workers.
    static __device__ __forceinline__ void sync() {
        if constexpr (WGMMA) block_barrier<WORKERS, 1>();
        else __syncthreads();
    }
    static constexpr int PARTS_AT_ONCE = DV > 128 || CUFLASH_ARCH >= 1000 ? 8 : 16;  // when they are merged: within the registers
    static_assert((TURNED ? SCALED && ROW_WARPS == 1 : MT * 16 * ROW_WARPS == M) && KEYS % 16 == 0 && DV % 32 == 0 && STAGES >= 2, "");
    static_assert(!PAIRED || (WGMMA && 4 * M * DV <= ALL_Q_SMEM && 8 * M <= QTile::BYTES), "");
};

// All warps load and work, tile by tile.
template <class C> __device__ __forceinline__ void decode_in_step(const DecodeParams& p, u32 smem) {
    // What follows from shapes alone is worked out while the kernel before is still busy.
    if (C::PAGED || p.kv_lengths || p.kv_start) wait_for_kernel_before();
    Loader<C> loader(p);
    wait_for_kernel_before();
    WarpDecode<C> warp(p);
    int ahead = 0;  // tiles that are being loaded or there
#pragma unroll 1
    for (int stage = 0; stage < C::STAGES - 1; ++stage) {
        ahead += loader.more();
        loader.load(smem, stage);
    }
    int part = 0, left = 0, key = 0;  // as the loader counts parts; tiles of the part that are left; the tile's first key
#pragma unroll 1
    for (int stage = 0, free = C::STAGES - 1; ahead > 0; --ahead) {
        copies_wait<C::STAGES - 2>();
        if constexpr (C::APART) __syncwarp();
        else C::sync();
        ahead += loader.more();
        loader.load(smem, free);
        const bool begins = left == 0;
        if (begins) {
            if (++part == C::STAGES) part = 0;
            if constexpr (C::APART) C::sync();  // all warps bring the queries
        }
        Piece piece = Piece::load(C::piece_smem(smem, part));
        if (begins) {
            left = piece.flags >> Piece::TILES_SHIFT, key = piece.key;
            warp.begin(piece, smem);
        }
        piece.key = key;
        const u32 stage_smem = smem + stage * C::STAGE_BYTES;
        warp.tile(piece, stage_smem);
        key += C::N;
        if (--left == 0) {
            finish(p, warp, piece, loader.next.deal, smem, stage_smem);
            if constexpr (C::APART) C::sync();  // else a warp would load to where others still read
        }
        free = stage;
        if (++stage == C::STAGES) stage = 0;
    }
}

template <class C> __device__ __forceinline__ void decode(const DecodeParams& p, unsigned char* smem_pointer) {
    const u32 smem = smem_address(smem_pointer);
    let_next_kernel_begin();
    if constexpr (C::WGMMA) decode_in_groups<C>(p, smem);
    else decode_in_step<C>(p, smem);
}

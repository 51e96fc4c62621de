// Flash-Decoding: attention of a few queries over many keys, for sm_75 and every later GPU. It is reading K and V once that takes the time.
//
// All query heads of a key/value head, times all queries, fill the rows of a tile: what is read serves every one of them. The keys
// are split over the whole grid (see deal.cuh); a part leaves its accumulators in float32, and the last block to finish a
// (sequence, head) merges them, or combine.cu does. The warps of a block share the keys of a tile, 16 or more each, with an online
// softmax of their own, and meet only where a part ends: a tile costs one barrier. STAGES - 1 tiles are under way meanwhile: at
// 4.8 TB/s and a latency of 1 us, each of 132 multiprocessors needs 36 KiB of them at least.
#include "include/deal.cuh"
#include "include/paged.cuh"
#include "include/parts.cuh"
#include "include/products.cuh"
#include "include/score.cuh"

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

// What lies in a stage; all threads agree on it.
struct Piece {
    int batch, head, key, flags;      // key: the tile's first one
    KeyRange range;                   // of the sequence
    int position, mask_key;           // of query 0; of the mask's first column
    int slot, before, units;          // see Cursor
    int queries;                      // where they are in shared memory

    static constexpr int BEGINS = 1, ENDS = 2, WHOLE = 4;  // a part begins and ends with the tile; the part is all there is

    __device__ __forceinline__ void store(u32 smem) const {
        store_smem(smem, make_uint4(batch, head, key, flags));
        store_smem(smem + 16, make_uint4(range.begin, range.end, position, mask_key));
        store_smem(smem + 32, make_uint4(slot, before, units, queries));
    }

    static __device__ __forceinline__ Piece load(u32 smem) {
        const uint4 a = load_smem_16(smem), b = load_smem_16(smem + 16), c = load_smem_16(smem + 32);
        return {int(a.x), int(a.y), int(a.z), int(a.w), {int(b.x), int(b.y)}, int(b.z), int(b.w), int(c.x), int(c.y), int(c.z), int(c.w)};
    }
};

// Copies the packed rows of queries.
template <class C> struct QueryLoader : TileLoader<typename C::QTile, C::THREADS, C::LOAD> {
    using Tile = typename C::QTile;
    using Base = TileLoader<Tile, C::THREADS, C::LOAD>;

    __device__ __forceinline__ QueryLoader(const DecodeParams& p, const PackedRows& rows)
        : Base(p.q, p.q_stride, rows.batch, 0, 0, p.head_dim) {}

    __device__ __forceinline__ void load(const DecodeParams& p, const PackedRows& rows, int thread, u32 tile_smem) const {
        const int row = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS;
        const u32 dst = tile_smem + Tile::offset(row, chunk);
#pragma unroll 1
        for (int pass = 0; pass < Base::PASSES; ++pass) {
            const int r = pass * Base::PASS + row;
            if (r >= Tile::ROWS) break;
            const bool here = rows.first + r < p.rows;
            const u16* src = Base::first_gmem;
            if (here) src += rows.query(p, r) * p.q_stride.row + rows.head(p, r) * p.q_stride.head;
            if constexpr (C::LOAD > 2) src += chunk * 8;
            Base::template copy_row<false>(Base::pass_smem(dst, pass), src, chunk, here);
        }
    }
};

// The block's way through its keys, as far as loading is concerned.
template <class C> struct Loader {
    using KLoader = KvLoader<C, typename C::KTile, 0x7fff7fffu>;  // NaN in both types
    using VLoader = KvLoader<C, typename C::VTile, 0>;
    static constexpr bool SAME_ROWS = C::KTile::CHUNKS == C::VTile::CHUNKS;  // a thread copies the same keys' keys and values
    const DecodeParams& p;
    int run, lane, passes;
    int part;     // modulo STAGES
    int head_kv;  // of the next tile
    Cursor<C::MASK, C::N> next;
    typename KLoader::Pages k_pages;  // of the tile that comes next; of values as well if SAME_ROWS
    typename VLoader::Pages v_pages;

    __device__ __forceinline__ Loader(const DecodeParams& p)
        : p(p), run(block_index() / u32(p.heads_at_once)), lane(block_index() % u32(p.heads_at_once)),
          passes(u32(p.heads_kv * p.row_blocks) / u32(p.heads_at_once)), part(0), next(p, UnitIndex<C::MASK, C::N>(p), passes, run) {
        find_head();
        look_up();
    }

    __device__ __forceinline__ bool more() const { return next.more(); }
    __device__ __forceinline__ int key() const { return (next.first + next.tile) * C::N; }
    __device__ __forceinline__ int head() const { return next.pass * p.heads_at_once + lane; }

    __device__ __forceinline__ void look_up() {
        if (C::PAGED && more()) {
            const int thread = thread_index();
            const KeyRange range = next.range;
            k_loader().look_up(k_pages, thread, key(), range.begin, range.end);
            if constexpr (!SAME_ROWS) v_loader().look_up(v_pages, thread, key(), range.begin, range.end);
        }
    }

    // Start to load the next tile; if there is none, an empty group of copies.
    __device__ __forceinline__ void load(u32 smem, int stage) {
        if (more()) {
            const u32 stage_smem = smem + stage * C::STAGE_BYTES;
            const int thread = thread_index();
            const KeyRange range = next.range;
            k_loader().load(k_pages, thread, stage_smem, key(), range.begin, range.end);
            if constexpr (SAME_ROWS) v_loader().load(k_pages, thread, stage_smem + C::V_SMEM, key(), range.begin, range.end);
            else v_loader().load(v_pages, thread, stage_smem + C::V_SMEM, key(), range.begin, range.end);
            if (next.begins()) {
                const PackedRows rows(p, C::M, next.batch, head());
                if (++part == C::STAGES) part = 0;
                QueryLoader<C>(p, rows).load(p, rows, thread, Q_smem(smem));
            }
            if (thread == 0) {
                const int flags = (next.begins() ? Piece::BEGINS : 0) | (next.ends() ? Piece::ENDS : 0) | (next.whole() ? Piece::WHOLE : 0);
                const int mask_key = p.mask_tail ? next.kv_length - p.mask_columns : 0;
                const Piece piece{next.batch, head(), key(), flags, range, next.position, mask_key,
                                  next.slot(run, lane), next.before, next.units, int(Q_smem(smem))};
                piece.store(C::piece_smem(smem, stage));
            }
            next.advance(passes);
            if (next.begins()) find_head();
            look_up();
        }
        copies_commit();
    }

  private:
    __device__ __forceinline__ u32 Q_smem(u32 smem) const { return smem + part * C::STAGE_BYTES + C::Q_SMEM; }
    __device__ __forceinline__ void find_head() { head_kv = more() ? int(u32(head()) / u32(p.row_blocks)) : 0; }
    __device__ __forceinline__ KLoader k_loader() const { return KLoader(p, p.k, p.k_stride, next.batch, head_kv, p.head_dim); }
    __device__ __forceinline__ VLoader v_loader() const { return VLoader(p, p.v, p.v_stride, next.batch, head_kv, p.head_dim_v); }
};

// A warp's share of the rows and keys of a block.
template <class C> struct WarpDecode {
    const DecodeParams& p;
    ScoreTransform<C::SCORE> score;
    SoftmaxState<2 * C::MT> state;
    u32 Q_rmem[C::Q_IN_RMEM ? C::DQK / 16 : 1][C::MT][4];
    float O_rmem[C::MT][C::OT][4];
    float S_rmem[C::MT][C::NT][4];
    int query[2 * C::MT];    // of the lane's rows
    float slope[2 * C::MT];  // of their heads

    __device__ __forceinline__ WarpDecode(const DecodeParams& p) : p(p), score(p) {}

    // Of the block's rows, the lane's row r; of a tile's keys, the warp's first one. What follows from the thread's number is worked out
    // anew for every tile: registers are scarce.
    static __device__ __forceinline__ int warp_row(int thread) { return thread / 32 / C::KEY_WARPS * C::WARP_ROWS; }
    static __device__ __forceinline__ int row(int thread, int r) { return warp_row(thread) + 8 * r + thread % 32 / 4; }
    static __device__ __forceinline__ int key(int thread) { return thread / 32 % C::KEY_WARPS * C::KEYS; }

    // A part begins, whose queries are in shared memory.
    __device__ __forceinline__ void begin(const Piece& piece) {
        state.init();
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
                for (int c = 0; c < 4; ++c) O_rmem[mt][ot][c] = 0.0f;
        const int thread = thread_index();
        if constexpr (C::Q_IN_RMEM) {
#pragma unroll
            for (int k = 0; k < C::DQK / 16; ++k)
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) ldmatrix_x4(Q_rmem[k][mt], C::QTile::fragment(Q_frag(piece, thread), mt, k));
        }
        const PackedRows rows(p, C::M, piece.batch, piece.head);
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            query[r] = 0, slope[r] = 0.0f;
            if constexpr (!C::ONE) query[r] = rows.query(p, row(thread, r));
            if constexpr ((C::SCORE & SCORE_ALIBI) != 0)
                if (rows.first + row(thread, r) < p.rows)
                    slope[r] = p.alibi_slopes[i64(piece.batch) * p.heads_q + rows.head(p, row(thread, r))];
        }
    }

    // Scores -> logits, -inf where they are invisible; whether rows may see different ones of the warp's keys.
    __device__ __forceinline__ bool mask(const Piece& piece) {
        const int thread = thread_index(), first_key = piece.key + key(thread), lane_key = first_key + thread % 4 * 2;
        int position[2 * C::MT];
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) position[r] = piece.position + query[r];
        apply_score<C::SCORE, typename C::Order>(S_rmem, score, slope, position, lane_key);
        bool cut = false;
        if constexpr (C::ARRAY) {
            cut = first_key + C::KEYS > piece.mask_key && first_key < piece.mask_key + p.mask_columns;
            if (cut) mask_elements(piece, thread, lane_key);
        }
        const Visibility<C::MASK> visible(p, piece.range);
        if (!visible.all(piece.position, piece.position + (C::ONE ? 0 : p.q_rows - 1), first_key, first_key + C::KEYS)) {
            apply_mask<C::MASK, typename C::Order>(S_rmem, visible, position, lane_key);
            cut = true;
        }
        return cut;
    }

    // O += P V
    __device__ __forceinline__ void values(u32 V_smem) {
        const int thread = thread_index();
        const u32 V_frag = fragment_a<typename C::VTile>(V_smem, key(thread), thread);
#pragma unroll
        for (int k = 0; k < C::KEYS / 16; ++k) {
            u32 a[C::MT][4];
            round_weights<C>(a, S_rmem, k);
            multiply_pv<C>(O_rmem, a, V_frag, k);
        }
    }

    __device__ __forceinline__ void tile(const Piece& piece, u32 stage_smem) {
        const int thread = thread_index();
        const u32 K_frag = fragment_b<typename C::KTile>(stage_smem, thread) + key(thread) * C::KTile::ROW_BYTES;
        multiply_qk<C>(S_rmem, Q_rmem, Q_frag(piece, thread), K_frag);
        const bool cut = mask(piece);
        u32 hidden = 0;  // a bit for each of the lane's scores
        if constexpr (C::CUTS) hidden = which_are_hidden();
        float top[2 * C::MT];
        state.tops(top, S_rmem);
        state.update(S_rmem, O_rmem, top, p.logit_scale);
        if constexpr (C::CUTS) {
            if (cut && not_finite(stage_smem + C::V_SMEM)) {
                values_one_by_one(stage_smem + C::V_SMEM, hidden);
                return;
            }
        }
        values(stage_smem + C::V_SMEM);
    }

  private:
    static __device__ __forceinline__ u32 Q_frag(const Piece& piece, int thread) {
        return fragment_a<typename C::QTile>(piece.queries, warp_row(thread), thread);
    }

    __device__ __forceinline__ void mask_elements(const Piece& piece, int thread, int lane_key) {
        const PackedRows rows(p, C::M, piece.batch, piece.head);
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            const int own = row(thread, r);
            const int head = rows.first + own < p.rows ? rows.head(p, own) : 0;
            const Matrix<1> matrix(p.mask, p.mask_stride, piece.batch, head, p.matrix_rows, p.mask_columns, false);
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (matrix.element(query[r], lane_key + C::Order::key(nt) + c - piece.mask_key, 1) == 0)
                        S_rmem[r / 2][nt][r % 2 * 2 + c] = -infinity();
        }
    }

    __device__ __forceinline__ u32 which_are_hidden() const {
        static_assert(!C::CUTS || C::MT * C::NT <= 8, "");
        u32 bits = 0;
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) bits |= (S_rmem[mt][nt][c] == -infinity() ? 1u : 0u) << ((mt * C::NT + nt) * 4 + c);
        return bits;
    }

    // Whether a value of the warp's keys is infinite or NaN.
    __device__ __forceinline__ bool not_finite(u32 V_smem) const {
        const int thread = thread_index();
        bool found = false;
#pragma unroll 4
        for (int i = thread % 32; i < C::KEYS * C::DV / 8; i += 32) {
            const int column = i % (C::DV / 8) * 8;
            const uint4 x = load_smem_16(
                V_smem + column / C::VTile::BLOCK * C::VTile::BLOCK_BYTES +
                C::VTile::offset(key(thread) + i / (C::DV / 8), column % C::VTile::BLOCK / 8));
            found = found || any_not_finite<typename C::In>(x);
        }
        return __any_sync(0xffffffffu, found);
    }

    // O += P V without 0 * v where a row does not see v: that would be NaN if v is infinite or NaN.
    __device__ __forceinline__ void values_one_by_one(u32 V_smem, u32 hidden) {
        const int thread = thread_index(), lane = thread % 32;
#pragma unroll 1
        for (int quad = 0; quad < 4; ++quad) {  // the lane of a row that has the weights
            const int from = (lane & ~3) | quad;
            const u32 from_hidden = __shfl_sync(0xffffffffu, hidden, from);
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float weight[2 * C::MT];
#pragma unroll
                    for (int r = 0; r < 2 * C::MT; ++r) weight[r] = __shfl_sync(0xffffffffu, S_rmem[r / 2][nt][r % 2 * 2 + c], from);
                    const int v_row = key(thread) + C::Order::key(nt) + 2 * quad + c;
#pragma unroll
                    for (int ot = 0; ot < C::OT; ++ot) {
                        const int chunk = ot % C::VTile::CHUNKS, block = ot / C::VTile::CHUNKS;
                        const u32 at = V_smem + block * C::VTile::BLOCK_BYTES + C::VTile::offset(v_row, chunk) + lane % 4 * 4;
                        const u32 word = load_smem_4(at);
                        const float2 v = unpack2<typename C::In>(word);
#pragma unroll
                        for (int r = 0; r < 2 * C::MT; ++r) {
                            const bool seen = (from_hidden >> ((r / 2 * C::NT + nt) * 4 + r % 2 * 2 + c) & 1) == 0;
                            add_value(O_rmem[r / 2][ot][r % 2 * 2], weight[r], v.x, seen);
                            add_value(O_rmem[r / 2][ot][r % 2 * 2 + 1], weight[r], v.y, seen);
                        }
                    }
                }
        }
    }

    static __device__ __forceinline__ void add_value(float& to, float weight, float v, bool seen) {
        if (fabsf(v) < infinity()) to = fmaf(weight, v, to);
        else if (seen) to += v;
    }
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

// How a block gets from its first tile of keys to its last: what it knows, and when its keys and values are loaded.
#include "include/keys_values.cuh"
#include "include/mask.cuh"
#include "include/score.cuh"

// What all threads of a block agree on, with the way of keys and values into shared memory. Tiles go from `last` down to `first`.
template <class C> struct Block {
    KeysValues<C> kv;
    Matrix<C::MASK_BYTES> mask;
    Matrix<C::BIAS_BYTES> bias;
    Visibility<C::MASK> visible;  // narrowed to the keys that some row of the block sees
    ScoreTransform<C::SCORE> score;
    u32 smem;
    int position;  // of the first row; see first_position()
    int row;       // the first row, within the sequence
    int mask_key;  // the key of the mask's first column
    int first, last;
    bool careful;  // with V: see arrive(), is_careful()

    __device__ __forceinline__ Block(const PrefillParams& p, const WorkItem& work, const Sequence& seq, u32 smem, bool careful)
        : kv(p, work, seq), mask(p.mask, p.mask_stride, work.batch, work.head, p.matrix_rows, p.mask_columns, p.mask_vector),
          bias(p.bias, p.bias_stride, work.batch, work.head, p.matrix_rows, p.bias_columns, p.bias_vector),
          visible(p, seq), score(p, work.batch, work.head), smem(smem), position(work.m_tile * C::M + seq.position),
          row(work.m_tile * C::M), mask_key(p.mask_tail ? seq.kv_length - p.mask_columns : 0), careful(careful) {
        const int rows = min(C::M, seq.q_length - work.m_tile * C::M);  // that exist
        visible.narrow(visible.of_any(position, position + rows - 1));
        first = visible.begin / C::N;
        last = (visible.end - 1) / C::N;
    }

    __device__ __forceinline__ u32 K_smem(int tile) const { return smem + C::K_SMEM + tile % C::STAGES * C::KTile::BYTES; }
    __device__ __forceinline__ u32 V_smem(int tile) const { return smem + C::V_SMEM + tile % C::STAGES * C::VTile::BYTES; }

    __device__ __forceinline__ KeyRange keys() const { return {visible.begin, visible.end}; }

    __device__ __forceinline__ void load_k(const typename KeysValues<C>::KRuns& runs, int thread, int tile) const {
        if (tile >= first) kv.load_k(runs, thread, smem, K_smem(tile), tile, keys());
        copies_commit();
    }

    // Of a tile, the values come after the keys.
    __device__ __forceinline__ void load_v(const typename KeysValues<C>::VRuns& runs, int thread, int tile) const {
        if (tile >= first) kv.load_v(runs, thread, smem, V_smem(tile), tile, keys());
        copies_commit();
    }

    __device__ __forceinline__ void start(int thread) {
        kv.start(thread, smem, last, keys(), position, careful);
        load_k(kv.read_k(thread, smem, last), thread, last);
        if (C::STAGES == 2) load_v(kv.read_v(thread, smem, last), thread, last);
        else kv.prefetch_v(thread, last, keys());
    }

    // What is asked for once a tile: with pages, it waits in shared memory.
    __device__ __forceinline__ int first_position() const {
        if constexpr (C::PAGED) return load_smem_4(kv.parked(smem, kv.POSITION));
        else return position;
    }

    __device__ __forceinline__ bool is_careful() const {
        if constexpr (C::PAGED) return load_smem_4(kv.parked(smem, kv.CAREFUL)) != 0;
        else return careful;
    }

    // Whether some row of the block, the first of which stands at `position`, may not see some key of the tile.
    __device__ __forceinline__ bool cut(int tile, int position) const {
        return C::HIDES || !visible.all(position, position + C::M - 1, tile * C::N, tile * C::N + C::N);
    }

    // Whether bias and mask let a row of the sequence see a key.
    __device__ __forceinline__ bool shows(int row, int key) const {
        if constexpr (C::MASK_BYTES != 0)
            if (mask.element(row, key - mask_key, 1) == 0) return false;
        if constexpr (C::BIAS_BYTES != 0) return bias_value(row, key) != -infinity();
        else return true;
    }

    __device__ __forceinline__ float bias_value(int row, int key) const {
        if constexpr (C::BIAS_BYTES == 2) return unpack2<typename C::In>(bias.element(row, key, 0)).x;
        else return __int_as_float(bias.element(row, key, 0));
    }

    // Wait for all copies; V of the tile may be among them. A careful block then puts 0 in the place of its numbers that are not
    // finite, if some row does not see them: 0 * v would be NaN there.
    __device__ __forceinline__ void arrive(int thread, int tile, bool with_v) const {
        copies_wait<0>();
        if (C::CUTS && with_v && is_careful() && cut(tile, first_position()))
            KeysValues<C>::VLoader::template clear_not_finite<typename C::In>(thread, V_smem(tile));  // its own copies
        block_barrier<C::THREADS>();
    }

    // Wait for K (with 2 stages, also for V) of a tile, and load what takes the place of the tile before.
    __device__ __forceinline__ void begin(int thread, int tile) {
        if constexpr (C::STAGES == 1) {
            const auto v_runs = kv.read_v(thread, smem, tile);
            arrive(thread, tile, false);
            load_v(v_runs, thread, tile);
        } else {
            const auto k_runs = kv.read_k(thread, smem, tile - 1);
            const auto v_runs = kv.read_v(thread, smem, tile - 1);
            arrive(thread, tile, true);
            load_k(k_runs, thread, tile - 1), load_v(v_runs, thread, tile - 1);
        }
    }

    // Nobody needs K of the tile any more: with 1 stage, wait for V and load the next K.
    __device__ __forceinline__ void middle(int thread, int tile) {
        if (C::STAGES == 2) {
            exchange();
        } else {
            kv.template look_ahead<true>(thread, smem, tile, keys());
            const auto k_runs = kv.read_k(thread, smem, tile - 1);
            arrive(thread, tile, true);
            load_k(k_runs, thread, tile - 1);
        }
    }

    // What the warps of a row have written for each other is there.
    static __device__ __forceinline__ void exchange() {
        if (C::GROUPS > 1) block_barrier<C::THREADS>();
    }

    __device__ __forceinline__ void end(int thread, int tile) { kv.template look_ahead<false>(thread, smem, tile, keys()); }

    // A tile that this warp has no use for, but others have.
    __device__ __forceinline__ void pass(int thread, int tile) {
        begin(thread, tile);
        middle(thread, tile);
        exchange();
        end(thread, tile);
    }

    // out += v for the numbers of V that a careful block took out, in the rows that see them; out is in shared memory, in 16 bits.
    __device__ __forceinline__ void add_not_finite(int thread, int rows) const {
#pragma unroll 1
        for (int column = 2 * thread; column < C::DV; column += 2 * C::THREADS)
#pragma unroll 1
            for (int key = visible.begin; key < visible.end; ++key) {
                if (!cut(key / C::N, position)) continue;
                const float2 v = not_finite2<typename C::In>(kv.value(key, column) | kv.value(key, column + 1) << 16);
                const u32 taken = (v.x != 0.0f ? 0xffffu : 0u) | (v.y != 0.0f ? 0xffff0000u : 0u);
                if (taken == 0) continue;
#pragma unroll 1
                for (int row = 0; row < rows; ++row) {
                    if (!visible.all(position + row, position + row, key, key + 1)) continue;
                    if constexpr (C::HIDES)
                        if (!shows(this->row + row, key)) continue;
                    const u32 at = smem + column / C::OTile::BLOCK * C::OTile::BLOCK_BYTES +
                                   C::OTile::offset(row, column % C::OTile::BLOCK / 8) + column % 8 * 2;
                    const u32 before = load_smem_4(at);
                    const float2 out = not_finite2<typename C::Out>(before);  // what is finite does not count beside v
                    store_smem(at, (before & ~taken) | (pack2<typename C::Out>(out.x + v.x, out.y + v.y) & taken));
                }
            }
    }
};

// Copies rows in runs that lie anywhere: each run has an address of its own, in shared memory.
#include "include/layout.cuh"

// RUN rows, one row stride apart, share an address. An odd one asks for care: of its rows not all are to be read; or it is none, and they
// become 0, or NaN.
template <class Tile, int THREADS, int LOAD, bool GROUPED, int RUN> struct RowLoader : TileLoader<Tile, THREADS, LOAD, GROUPED> {
    using Base = TileLoader<Tile, THREADS, LOAD, GROUPED>;
    using Base::PASS, Base::PASSES, Base::row_stride;
    static_assert((PASS % RUN == 0 || RUN % PASS == 0) && Tile::ROWS % RUN == 0, "rows of a thread are at one place of their runs");
    static constexpr u64 ZEROS = 1, NANS = 3;
    static constexpr int ABREAST = PASS > RUN ? PASS / RUN : 1;  // runs of a pass
    static constexpr int OWN = (Tile::ROWS + ABREAST * RUN - 1) / (ABREAST * RUN);  // runs that a thread copies rows of
    static constexpr int PAIRS = (OWN + 1) / 2, OWN_BYTES = 16 * PAIRS;             // it reads their addresses two by two
    static constexpr int BYTES = ABREAST * OWN_BYTES;

    __device__ __forceinline__ RowLoader(const Strides& s, int columns) : Base(nullptr, s, 0, 0, 0, columns) {}

    // Where the address of a run of the tile is.
    static __device__ __forceinline__ u32 place(u32 run) { return run % ABREAST * OWN_BYTES + run / ABREAST * 8; }

    // The addresses of a thread's runs.
    struct Runs {
        uint4 pair[PAIRS];

        __device__ __forceinline__ Runs() {}

        __device__ __forceinline__ Runs(u32 thread, u32 runs_smem) {
            if constexpr (Base::UNROLL == 1) return;  // they are read one by one
            const u32 first = ABREAST == 1 ? runs_smem : runs_smem + thread / Tile::CHUNKS / RUN * OWN_BYTES;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) pair[i] = load_smem_16(first + 16 * i);
        }

        // Whether no address is odd.
        __device__ __forceinline__ bool whole() const {
            u32 odd = 0;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                odd |= pair[i].x | (2 * i + 1 < OWN ? pair[i].z : 0);
                asm volatile("" : "+r"(odd));  // else the compiler tests one after the other
            }
            return (odd & 1) == 0;
        }

        __device__ __forceinline__ u64 operator[](int i) const {
            const uint4& x = pair[i / 2];
            return i % 2 == 0 ? address(x.x, x.y) : address(x.z, x.w);
        }
    };

    // Rows of a tile that begins at tile_row; only those in [begin, end) are read.
    __device__ __forceinline__ void load(
        const Runs& runs, u32 thread, u32 tile_smem, u32 runs_smem, int tile_row, int begin, int end) const {
        if constexpr (Base::UNROLL > 1) {
            if (runs.whole()) {
                load_whole(runs, thread, tile_smem);
                return;
            }
        }
        load_any(thread, tile_smem, runs_smem, tile_row, begin, end);
    }

    __device__ __forceinline__ void load_whole(const Runs& runs, u32 thread, u32 tile_smem) const {
        const u32 row = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS, dst = tile_smem + Tile::offset(Base::Order::row(row), chunk);
        if (Tile::ROWS % PASS != 0 && row >= Tile::ROWS) return;
        const i64 within = i64(ABREAST == 1 ? row : row % RUN) * row_stride + chunk * 8;  // rows of a pass < PASS
        const u16* src;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (pass * PASS % RUN == 0) src = reinterpret_cast<const u16*>(runs[pass * PASS / (ABREAST * RUN)]) + within;
            else src += PASS * row_stride;
            Base::template copy_row<true>(Base::pass_smem(dst, pass), src, chunk, true);
        }
    }

    __device__ __forceinline__ void load_any(u32 thread, u32 tile_smem, u32 runs_smem, int tile_row, int begin, int end) const {
        const u32 row = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS, dst = tile_smem + Tile::offset(Base::Order::row(row), chunk);
        if (Tile::ROWS % PASS != 0 && row >= Tile::ROWS) return;
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            const u32 r = pass * PASS + row, to = Base::pass_smem(dst, pass);
            const u32 at = runs_smem + row / RUN * OWN_BYTES + pass * PASS / (ABREAST * RUN) * 8;  // place(r / RUN)
            const bool here = RUN == 1 || (tile_row + int(r) >= begin && tile_row + int(r) < end);
            const u64 from = address(load_smem_4(at), load_smem_4(at + 4));
            if (here && from == NANS) {
#pragma unroll
                for (int block = 0; block < Tile::BLOCKS; ++block) {
                    constexpr u32 NAN2 = 0x7fff7fffu;  // two NaN in both types
                    store_smem(to + block * Tile::BLOCK_BYTES, make_uint4(NAN2, NAN2, NAN2, NAN2));
                }
            } else {
                const u16* src = reinterpret_cast<const u16*>(from & ~u64(1)) + i64(r % RUN) * row_stride + (LOAD > 2 ? chunk * 8 : 0);
                Base::template copy_row<false>(to, src, chunk, here && from != ZEROS);
            }
        }
    }

    static __device__ __forceinline__ u64 address(u32 low, u32 high) { return u64(high) << 32 | low; }
};

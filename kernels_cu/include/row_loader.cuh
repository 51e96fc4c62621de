// Copies rows that lie anywhere: each has an address of its own, in shared memory.
#include "include/layout.cuh"

// An odd address is none: the row becomes 0, or NaN.
template <class Tile, int THREADS, int LOAD, bool GROUPED> struct RowLoader : TileLoader<Tile, THREADS, LOAD, GROUPED> {
    using Base = TileLoader<Tile, THREADS, LOAD, GROUPED>;
    using Base::PASS, Base::PASSES;
    static constexpr u64 ZEROS = 1, NANS = 3;
    static constexpr int PAIRS = (PASSES + 1) / 2, ROW_BYTES = 16 * PAIRS;  // a thread reads the addresses of its rows two by two
    static constexpr int BYTES = PASS * ROW_BYTES;

    __device__ __forceinline__ RowLoader(const Strides& s, int columns) : Base(nullptr, s, 0, 0, 0, columns) {}

    // Where the address of a row is.
    static __device__ __forceinline__ u32 place(u32 row) { return row % PASS * ROW_BYTES + row / PASS * 8; }

    // The addresses of a thread's rows.
    struct Rows {
        uint4 pair[PAIRS];

        __device__ __forceinline__ Rows(u32 thread, u32 rows_smem) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) pair[i] = load_smem_16(rows_smem + thread / Tile::CHUNKS * ROW_BYTES + 16 * i);
        }

        // Whether all are addresses.
        __device__ __forceinline__ bool whole() const {
            u32 odd = 0;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                odd |= pair[i].x | (2 * i + 1 < PASSES ? pair[i].z : 0);
                asm volatile("" : "+r"(odd));  // else the compiler tests one after the other
            }
            return (odd & 1) == 0;
        }

        __device__ __forceinline__ u64 operator[](int pass) const {
            const uint4& x = pair[pass / 2];
            return pass % 2 == 0 ? address(x.x, x.y) : address(x.z, x.w);
        }
    };

    __device__ __forceinline__ void load(u32 thread, u32 tile_smem, u32 rows_smem) const {
        if constexpr (Base::UNROLL > 1) {
            const Rows rows(thread, rows_smem);
            if (rows.whole()) {
                load_whole(rows, thread, tile_smem);
                return;
            }
        }
        load_any(thread, tile_smem, rows_smem);
    }

    __device__ __forceinline__ void load_whole(const Rows& rows, u32 thread, u32 tile_smem) const {
        const u32 row = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS, dst = tile_smem + Tile::offset(Base::Order::row(row), chunk);
        if (Tile::ROWS % PASS != 0 && row >= Tile::ROWS) return;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            Base::template copy_row<true>(Base::pass_smem(dst, pass), reinterpret_cast<const u16*>(rows[pass]) + chunk * 8, chunk, true);
    }

    __device__ __forceinline__ void load_any(u32 thread, u32 tile_smem, u32 rows_smem) const {
        const u32 row = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS, dst = tile_smem + Tile::offset(Base::Order::row(row), chunk);
        if (Tile::ROWS % PASS != 0 && row >= Tile::ROWS) return;
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            const u32 at = rows_smem + row * ROW_BYTES + 8 * pass, to = Base::pass_smem(dst, pass);
            const u64 from = address(load_smem_4(at), load_smem_4(at + 4));
            if (from == NANS) {
#pragma unroll
                for (int block = 0; block < Tile::BLOCKS; ++block) {
                    constexpr u32 NAN2 = 0x7fff7fffu;  // two NaN in both types
                    store_smem(to + block * Tile::BLOCK_BYTES, make_uint4(NAN2, NAN2, NAN2, NAN2));
                }
            } else {
                Base::template copy_row<false>(to, reinterpret_cast<const u16*>(from) + (LOAD > 2 ? chunk * 8 : 0), chunk, from != ZEROS);
            }
        }
    }

    static __device__ __forceinline__ u64 address(u32 low, u32 high) { return u64(high) << 32 | low; }
};

// Accumulators put aside from time to time, in float32.
//
// A sum of many terms in float32 is off by the square root of their number, and what is added last is rounded most. So every so many
// tiles the accumulators are added to those of the tiles before, and begin at 0 anew: sums of sums. They wait where the result will be,
// which no other block touches and the L2 cache holds; the rows' references and sums wait in shared memory, [2][M].
#include "include/fp_work.cuh"
#include "include/softmax_state.cuh"

template <class C> struct Saved {
    using T = typename C::T;
    using State = SoftmaxState<2 * C::MT, typename C::Real>;
    static constexpr int SIZE = Chunk<T>::SIZE;

    // Whether it is time, after a tile; not after the last one, which is `first`.
    static __device__ __forceinline__ bool due(int tile, int first) { return tile > first && (tile - first) % C::SAVE_TILES == 0; }

    // Bring what is saved, if anything, and the accumulators together: in the array (to be saved, `keep`), or in the registers (the end).
    static __device__ __forceinline__ void combine(
        const typename C::Params& p, u32 smem, bool some, bool keep, State& state, T (&O_rmem)[C::MT][C::OT][4]
    ) {
        const int thread = thread_index(), lane = thread % 32, warp_row = thread / 32 * C::WARP_ROWS;
        const FpWork<C> work(p, block_index());
        const int columns = p.head_dim_v - work.first_column;
        const auto out = work.out(p);
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            const int own = warp_row + 8 * r + lane / 4, row = work.first_row() + own;
            const u32 place = smem + C::SAVED_SMEM + 4 * own;
            T factor = 0;
            state.reduce(r);
            if (some) {
                T reference = 0, sum = 0;  // the first of the row's four lanes keeps them
                if (lane % 4 == 0) reference = __uint_as_float(load_smem_4(place)), sum = __uint_as_float(load_smem_4(place + 4 * C::M));
                factor = C::Real::exp2(__shfl_sync(0xffffffffu, reference, lane & 28) - state.reference[r]);
                state.sum[r] = C::Real::fma(sum, factor, state.sum[r]);
            }
            if (keep && lane % 4 == 0) {
                store_smem(place, __float_as_uint(state.reference[r]));
                store_smem(place + 4 * C::M, __float_as_uint(state.sum[r]));
            }
#pragma unroll
            for (int ot = 0; ot < C::OT; ot += SIZE)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int column = 8 * ot + SIZE * (lane % 4 * 2 + c);
                    T x[SIZE] = {};
                    if (some && row < work.seq.q_length)
                        load_numbers<T>(x, out.at(row), out.column_stride, column, columns, out.vector);
#pragma unroll
                    for (int e = 0; e < SIZE; ++e) {
                        T& o = O_rmem[r / 2][ot + e][r % 2 * 2 + c];
                        x[e] = some ? C::Real::fma(x[e], factor, o) : o;
                        o = keep ? T(0) : x[e];
                    }
                    if (keep && row < work.seq.q_length)
                        store_numbers<T, T>(out.at(row), out.column_stride, column, columns, out.vector, x);
                }
            if (keep || lane % 4 != 0) state.sum[r] = 0;  // the end sums the lanes' shares once more
        }
    }
};

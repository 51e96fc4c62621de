// From scores to weights in prefill_fa3.cu, and the state of a warpgroup's 64 rows, of which a lane has two: see wgmma.cuh.
#include "include/params.cuh"
#include "include/softmax_state.cuh"
#include "include/wgmma.cuh"

template <class C> struct WarpgroupSoftmax {
    using In = typename C::In;
    const PrefillParams& p;
    SoftmaxState<2> state;
    // What scores are multiplied by where the row's reference follows them: the scale, or 0 where the row is not one of the sequence. It
    // takes no part in what the warp decides then, as results must not depend on neighbours.
    float follows[2];
    // Scores from which on a warp looks at the tops themselves: those that would make a reference large. Negative: always, as a reference
    // of the lane's is negative, or one of the warp large.
    float limit;
    float factor[2];  // brings O to the references, if one of the warp's has moved
    bool moved;
    float S_rmem[1][C::N / 8][4], O_rmem[1][C::DV / 8][4];
    u32 P_rmem[C::N / 16][4];
    // How far scores may be above the reference, in log2 units, before it follows: the largest weight of a row is between 1 and 2. If the
    // reference always followed, it would be 1, which 16 bits hold exactly. Errors are at most 2 % larger than then, with 8 up to 14 %.
    static constexpr float SLACK = 1.0f;

    __device__ __forceinline__ WarpgroupSoftmax(const PrefillParams& p) : p(p) {}

    // Scores -> weights. Unless it is the first tile, the values that run meanwhile are there in the end, if any do.
    template <bool FIRST> __device__ __forceinline__ void softmax() {
        float scale = p.logit_scale;
        raise_references<FIRST>(scale);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = 0.0f;
#pragma unroll
            for (int nt = 0; nt < C::N / 8; ++nt) sum += weigh(nt, r, scale);
            state.sum[r] += sum;
        }
        if constexpr (!FIRST && !C::ONE_WAIT) {
            // The weights are to be computed while the product with the values runs, but a plain wait the compiler puts before most of
            // them. It cannot put one before a branch that it cannot decide: the batch is never 0, so that the other side never runs. That
            // waits, too, as it writes O, which the product has until then; and it writes O so that the sides are not made one.
            if (p.batch > 0) {
                wgmma_wait<0>();
            } else {
                wgmma_wait<0>();
                O_rmem[0][0][0] = 0.0f;
            }
        }
    }

    // The weights of all keys -> operands of the product with values.
    __device__ __forceinline__ void round() {
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                P_rmem[k][i] = pack2<In>(S_rmem[0][2 * k + i / 2][i % 2 * 2], S_rmem[0][2 * k + i / 2][i % 2 * 2 + 1]);
    }

    // O to the references.
    __device__ __forceinline__ void scale_values() {
        if (!moved) return;
        state.scale_row(O_rmem, 0, factor[0]);
        state.scale_row(O_rmem, 1, factor[1]);
    }

  private:
    // Bring the references up to the scores, with the sums. Where they are neither negative nor large, nor will be, the largest positive
    // score of a row is all there is to know.
    template <bool FIRST> __device__ __forceinline__ void raise_references(float& scale) {
        float raised[2];
        bool other = FIRST;
        if constexpr (!FIRST) {
            float top[2] = {positive_top(0), positive_top(1)};
            other = __any_sync(0xffffffffu, (top[0] > limit) | (top[1] > limit));
            state.share(top);
            raised[0] = raise(0, top[0]), raised[1] = raise(1, top[1]);
        }
        if (__builtin_expect(other, FIRST)) {
            float top[2] = {-infinity(), -infinity()};
#pragma unroll
            for (int nt = 0; nt < C::N / 8; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) top[c / 2] = fmaxf(top[c / 2], S_rmem[0][nt][c]);
            state.share(top);
            bool large = false, negative = false;  // as SoftmaxState::is_large(), whose branches would make products wait for each other
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                raised[r] = raise(r, top[r]);
                large |= (Fast32::abs(raised[r]) >= Fast32::LARGE) & (raised[r] != Fast32::LOWEST);
                negative |= raised[r] < 0.0f;
            }
            large = __any_sync(0xffffffffu, large);
            limit = large | negative ? -1.0f : p.large_score;
            if (large) {  // see SoftmaxState::weigh
#pragma unroll
                for (int nt = 0; nt < C::N / 8; ++nt)
#pragma unroll
                    for (int c = 0; c < 4; ++c) S_rmem[0][nt][c] = __fmul_rn(S_rmem[0][nt][c], scale);
                scale = 1.0f;
            }
        }
        bool moves = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            moves |= raised[r] != state.reference[r];
            factor[r] = exp2_fast(state.reference[r] - raised[r]);
            state.reference[r] = raised[r];
            state.sum[r] *= factor[r];
        }
        moved = !FIRST && __any_sync(0xffffffffu, moves);
    }

    // The reference of a row whose largest score is this one. NaN is passed over: its weight will be NaN nevertheless.
    __device__ __forceinline__ float raise(int r, float top) const {
        const float to = __fmul_rn(top, follows[r]);
        return to > state.reference[r] + SLACK ? to : state.reference[r];
    }

    // Two scores -> weights, and their sum.
    __device__ __forceinline__ float weigh(int nt, int r, float scale) {
        float &x = S_rmem[0][nt][2 * r], &y = S_rmem[0][nt][2 * r + 1];
        x = exp2_fast(__fmaf_rn(x, scale, -state.reference[r]));
        y = exp2_fast(__fmaf_rn(y, scale, -state.reference[r]));
        return x + y;
    }

    // The lane's largest score of a row, or 0 if none is positive. Such numbers are in the order of their bits, and integers have a maximum
    // of three in one instruction.
    __device__ __forceinline__ float positive_top(int r) const {
        int top = 0;
#pragma unroll
        for (int nt = 0; nt < C::N / 8; ++nt)
            top = __vimax3_s32(top, __float_as_int(S_rmem[0][nt][2 * r]), __float_as_int(S_rmem[0][nt][2 * r + 1]));
        return __int_as_float(top);
    }
};

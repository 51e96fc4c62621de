// From scores to weights in prefill_fa3.cu, and the state of a warpgroup's 64 rows, of which a lane has two: see wgmma.cuh.
#include "include/params.cuh"
#include "include/softmax_state.cuh"
#include "include/wgmma.cuh"

template <class C> struct WarpgroupSoftmax {
    using In = typename C::In;
    const PrefillParams& p;
    SoftmaxState<2> state;
    // Scores up to which a row keeps its reference. Negative: always look at the tops themselves. Infinite: the row is not one of the
    // sequence and takes no part in what the warp decides, as results must not depend on neighbours.
    float limit[2];
    float S_rmem[1][C::N / 8][4], O_rmem[1][C::DV / 8][4];
    u32 P_rmem[C::N / 16][4];
    // How far scores may be above the reference, in log2 units, before a warp's references follow. The largest weight of a row is then
    // mostly 1, which 16 bits hold exactly: with 8 instead, errors are 4 to 10 % larger; with 0, 1 % smaller, but O is multiplied twice as
    // often.
    static constexpr float SLACK = 0.5f;
    static constexpr int PARTS = C::VALUES_FIRST && C::N % 32 == 0 ? C::N / 32 : 1;  // of softmax
    static constexpr int PART = C::N / 8 / PARTS;

    __device__ __forceinline__ WarpgroupSoftmax(const PrefillParams& p) : p(p) {}

    // Scores -> weights. Unless it is the first tile, wait for the values that run meanwhile, and bring O to the references.
    template <bool FIRST> __device__ __forceinline__ void softmax() {
        float factor[2], scale = p.logit_scale;
        const bool raise = FIRST || rises(0);
        if (__builtin_expect(raise, FIRST)) raise_references(0, scale, factor);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = 0.0f;
#pragma unroll
            for (int nt = 0; nt < C::N / 8; ++nt) sum += weigh(nt, r, scale);
            state.sum[r] += sum;
        }
        if constexpr (!FIRST) {
            if (p.batch > 0) {  // as it is; but the compiler, not knowing it, does not wait before the weights are computed
                wgmma_wait<0>();
            } else {
                wgmma_wait<0>();
                O_rmem[0][0][0] = 0.0f;
            }
            if (raise) {
                state.scale_row(O_rmem, 0, factor[0]);
                state.scale_row(O_rmem, 1, factor[1]);
            }
        }
    }

    // The same with no product under way, and weights are rounded as they come. Each part of the scores is looked at before the
    // exponentials of the part before it: these begin early, and the rest is done while they run.
    template <bool FIRST> __device__ __forceinline__ void softmax_in_parts() {
        float scale = p.logit_scale;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const bool raise = FIRST ? part == 0 : rises(part);
            if (part > 0) weights(part - 1, scale);
            if (__builtin_expect(raise, FIRST)) {
                float factor[2];
                raise_references(part, scale, factor);
                if (!FIRST) rescale(part, factor);
            }
        }
        weights(PARTS - 1, scale);
    }

    // The weights of all keys -> operands of the product with values.
    __device__ __forceinline__ void round() {
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                P_rmem[k][i] = pack2<In>(S_rmem[0][2 * k + i / 2][i % 2 * 2], S_rmem[0][2 * k + i / 2][i % 2 * 2 + 1]);
    }

  private:
    // Whether a row's reference may have to follow the scores of a part.
    __device__ __forceinline__ bool rises(int part) const {
        return __any_sync(0xffffffffu, (positive_top(part, 0) > limit[0]) | (positive_top(part, 1) > limit[1]));
    }

    // The warp's references up to the scores of the parts from this one on, and what that multiplies earlier weights by.
    __device__ __forceinline__ void raise_references(int part, float& scale, float (&factor)[2]) {
        float top[2] = {-infinity(), -infinity()};
#pragma unroll
        for (int nt = part * PART; nt < C::N / 8; ++nt)
#pragma unroll
            for (int c = 0; c < 4; ++c) top[c / 2] = fmaxf(top[c / 2], S_rmem[0][nt][c]);
        state.share(top);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float to = __fmul_rn(top[r], scale), raised = limit[r] == infinity() ? state.reference[r] : fmaxf(state.reference[r], to);
            factor[r] = exp2_fast(state.reference[r] - raised);
            state.reference[r] = raised;
            state.sum[r] *= factor[r];
        }
        const bool large = is_large();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float next = (state.reference[r] + SLACK) * reciprocal_fast(p.logit_scale);
            limit[r] = limit[r] == infinity() ? limit[r] : large | !(next >= 0.0f) ? -1.0f : next;
        }
        if (large) {  // see SoftmaxState::weigh
#pragma unroll
            for (int nt = part * PART; nt < C::N / 8; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) S_rmem[0][nt][c] = __fmul_rn(S_rmem[0][nt][c], scale);
            scale = 1.0f;
        }
    }

    // As SoftmaxState::is_large(), without its branches: the compiler would make products wait for each other.
    __device__ __forceinline__ bool is_large() const {
        bool large = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) large = large | (Fast32::abs(state.reference[r]) >= Fast32::LARGE) & (state.reference[r] != Fast32::LOWEST);
        return __any_sync(0xffffffffu, large);
    }

    // Bring O, and the weights of the parts before this one, to new references.
    __device__ __forceinline__ void rescale(int part, const float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state.scale_row(O_rmem, r, factor[r]);
#pragma unroll
            for (int nt = 0; nt < part * PART; ++nt) {
                const float2 w = unpack2<In>(P_rmem[nt / 2][nt % 2 * 2 + r]);
                P_rmem[nt / 2][nt % 2 * 2 + r] = pack2<In>(w.x * factor[r], w.y * factor[r]);
            }
        }
    }

    // Weights of a part, their sums, and operands of the product with values.
    __device__ __forceinline__ void weights(int part, float scale) {
#pragma unroll
        for (int nt = part * PART; nt < part * PART + PART; ++nt)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                state.sum[r] += weigh(nt, r, scale);
                P_rmem[nt / 2][nt % 2 * 2 + r] = pack2<In>(S_rmem[0][nt][2 * r], S_rmem[0][nt][2 * r + 1]);
            }
    }

    // Two scores -> weights, and their sum.
    __device__ __forceinline__ float weigh(int nt, int r, float scale) {
        float &x = S_rmem[0][nt][2 * r], &y = S_rmem[0][nt][2 * r + 1];
        x = exp2_fast(__fmaf_rn(x, scale, -state.reference[r]));
        y = exp2_fast(__fmaf_rn(y, scale, -state.reference[r]));
        return x + y;
    }

    // The lane's largest score of a row in a part, if it is positive: such numbers are in the order of their bits, and integers have a
    // maximum of three in one instruction.
    __device__ __forceinline__ float positive_top(int part, int r) const {
        int top = 0;
#pragma unroll
        for (int nt = part * PART; nt < part * PART + PART; ++nt)
            top = __vimax3_s32(top, __float_as_int(S_rmem[0][nt][2 * r]), __float_as_int(S_rmem[0][nt][2 * r + 1]));
        return __int_as_float(top);
    }
};

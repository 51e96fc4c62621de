// softcap * tanh(scale * score / softcap): different ways, by the size of the largest argument of a warp's tile, as the logits of most
// models lie far below their softcap.
#include "include/params.cuh"
#include "include/softmax_state.cuh"

// ---- any arguments ------------------------------------------------------------------------------------------------------

// The argument of tanh comes in this unit, which makes the leading coefficient of the series 1. It is TANH_SERIES of structs.py.
constexpr float TANH_UNIT = 1.57979278f;
constexpr float SERIES_LIMIT = 0.55f / TANH_UNIT;

// tanh(TANH_UNIT * z) for |z| <= SERIES_LIMIT, to 3 ulp: the polynomial of least relative error. 6 issue slots, one constant each, and
// none of the slow functions.
__device__ __forceinline__ float tanh_series(float z) {
    const float u = z * z;
    return z * fmaf(u, fmaf(u, fmaf(u, u - 1.29151194f, 1.31059416f), -1.31423221f), 1.57979273f);
}

// The same for two numbers of any size, to 4e-7 of max(|x|, 1), with one reciprocal for both. Through exp2 alone small arguments would
// lose digits.
__device__ __forceinline__ void tanh_pair(float& x, float& y) {
    constexpr float UNIT = 2.0f * LOG2E * TANH_UNIT;
    const float a = 1.0f + exp2_fast(fminf(UNIT * x, 60.0f)), b = 1.0f + exp2_fast(fminf(UNIT * y, 60.0f));
    const float both = -2.0f * reciprocal_fast(a * b), x_series = tanh_series(x), y_series = tanh_series(y);
    x = fabsf(x) > SERIES_LIMIT ? fmaf(b, both, 1.0f) : x_series;  // the series also of NaN, which fminf() drops
    y = fabsf(y) > SERIES_LIMIT ? fmaf(a, both, 1.0f) : y_series;
}

// s = tanh(TANH_UNIT * scale * s), of any size.
template <int MT, int NT> __device__ __forceinline__ void apply_tanh_pair(float (&s)[MT][NT][4], float scale) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int c = 0; c < 4; c += 2) {
                s[mt][nt][c] *= scale, s[mt][nt][c + 1] *= scale;
                tanh_pair(s[mt][nt][c], s[mt][nt][c + 1]);
            }
}

// s = tanh(TANH_UNIT * scale * s). The logits of most models lie far below their softcap: then the series does for a whole warp.
template <int MT, int NT> __device__ __forceinline__ void apply_tanh(float (&s)[MT][NT][4], float scale) {
    float largest = 0.0f;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int c = 0; c < 4; ++c) s[mt][nt][c] *= scale, largest = fmaxf(largest, fabsf(s[mt][nt][c]));
    if (__any_sync(0xffffffffu, largest > SERIES_LIMIT)) {
        apply_tanh_pair(s, 1.0f);
    } else {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[mt][nt][c] = tanh_series(s[mt][nt][c]);
    }
}

// ---- softcap alone: tanh within the exponential -------------------------------------------------------------------------
//
// Issue slots more than for plain scores: 3 with the series near_series, of 3 coefficients, 5 with softcap_series, of 5. The size of the
// largest score stands for the maximum of each row in nearly all tiles.

// The largest of a lane's scores, by size.
template <int MT, int NT> __device__ __forceinline__ float largest_size(const float (&s)[MT][NT][4]) {
    float largest = 0.0f;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int c = 0; c < 4; ++c) largest = fmaxf(largest, fabsf(s[mt][nt][c]));
    return largest;
}

// The logit of a score s, in log2 units, is s * capped(s). The last coefficient is positive, so that the logit of -inf is -inf.
template <int N> __device__ __forceinline__ float capped(float s, const float (&series)[N]) {
    const float u = s * s;
    float y = series[N - 1];
#pragma unroll
    for (int n = N - 2; n >= 0; --n) y = fmaf(u, y, series[n]);
    return y;
}

template <int N, int MT, int NT, int ROWS>
__device__ __forceinline__ void capped_weights(float (&s)[MT][NT][4], SoftmaxState<ROWS>& state, const float (&series)[N]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int r = 2 * mt + c / 2;
                s[mt][nt][c] = exp2_fast(fmaf(s[mt][nt][c], capped(s[mt][nt][c], series), -state.reference[r]));
                state.sum[r] += s[mt][nt][c];
            }
}

// SoftmaxState::update for scores within softcap_limit, of which `largest` is the lane's largest by size. Only if one may be above the
// reference of one of the lane's rows by more than there is slack for need the rows' own tops be known.
template <int MT, int NT, int OT, int ROWS>
__device__ __forceinline__ void update_capped(
    float (&s)[MT][NT][4], float (&acc)[MT][OT][4], SoftmaxState<ROWS>& state, float largest, const PrefillParams& p
) {
    float lowest = state.reference[0];
#pragma unroll
    for (int r = 1; r < ROWS; ++r) lowest = fminf(lowest, state.reference[r]);
    const bool near = !__any_sync(0xffffffffu, largest > p.near_limit);
    if (__any_sync(0xffffffffu, largest * p.near_series[0] > lowest + Fast32::SLACK)) {
        float top[ROWS];
        state.tops(top, s);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) top[r] *= near ? capped(top[r], p.near_series) : capped(top[r], p.softcap_series);
        state.raise(acc, top, 1.0f);
    }
    if (near) capped_weights(s, state, p.near_series);
    else capped_weights(s, state, p.softcap_series);
}

// From raw scores q.k to logits: functions of (score, query position i, key j), the same for every kernel on 16-bit arrays.
// prefill_fp, which sums in other units, has its own in fp_score.cuh.
#include "include/matrix.cuh"
#include "include/params.cuh"
#include "include/ptx.cuh"
#include "include/softcap.cuh"

// Compile-time kinds, combined by |. Those with a bias yield natural logits, for which the exponential has a factor log2(e). SCORE_PLAIN
// and SCORE_SOFTCAP alone leave it the scale or the softcap as well. The others yield logits in log2 units.
constexpr int SCORE_PLAIN = 0;    // scale > 0: it costs nothing, being folded into the exponential
constexpr int SCORE_SCALED = 1;   // a scale of any sign, multiplied first: a negative one turns the maximum into the minimum
constexpr int SCORE_SOFTCAP = 2;  // softcap * tanh(scale * s / softcap)
constexpr int SCORE_ALIBI = 4;    // - slope * |i - j|
constexpr int SCORE_BIAS = 8;     // + bias, in the type of the queries; -inf hides
constexpr int SCORE_BIAS32 = 16;  // + bias, in float32; -inf hides

__device__ constexpr int bias_bytes(int score) { return (score & SCORE_BIAS32) != 0 ? 4 : (score & SCORE_BIAS) != 0 ? 2 : 0; }

// ---- all of it ----------------------------------------------------------------------------------------------------------

template <int SCORE> struct ScoreTransform {
    static constexpr bool FACTOR_LEFT = SCORE == SCORE_PLAIN || SCORE == SCORE_SOFTCAP;  // to the exponential
    float scale, softcap, slope;

    // p.scale: of the argument of tanh if there is a softcap, else into the units of the logits, which softcap and slopes have.
    __device__ __forceinline__ ScoreTransform(const PrefillParams& p, int batch, int head)
        : scale((SCORE & SCORE_SOFTCAP) != 0 ? p.scale * (1.0f / TANH_UNIT) : p.scale), softcap(p.softcap), slope(0.0f) {
        if constexpr ((SCORE & SCORE_ALIBI) != 0) slope = p.alibi_slopes[i64(batch) * p.heads_q + head];
    }

    __device__ __forceinline__ ScoreTransform(const PrefillParams& p)  // whose rows have slopes of their own
        : scale((SCORE & SCORE_SOFTCAP) != 0 ? p.scale * (1.0f / TANH_UNIT) : p.scale), softcap(p.softcap), slope(0.0f) {}

    // s: the score, or its tanh. distance: i - j.
    __device__ __forceinline__ float operator()(float s, float distance, float bias) const { return (*this)(s, distance, bias, slope); }

    // The same for a row of another head, with the slope of that.
    __device__ __forceinline__ float operator()(float s, float distance, float bias, float slope) const {
        const float factor = (SCORE & SCORE_SOFTCAP) != 0 ? softcap : scale;
        float x = bias_bytes(SCORE) != 0 ? fmaf(s, factor, bias) : s * factor;
        if constexpr ((SCORE & SCORE_ALIBI) != 0) x = fmaf(-slope, fabsf(distance), x);
        if constexpr (bias_bytes(SCORE) != 0) x = bias == -infinity() ? -infinity() : x;  // also of NaN
        return x;
    }
};

// The bias of an element of a lane's scores; T: the type of 16-bit ones.
template <class T, int BYTES, int MT, int N>
__device__ __forceinline__ float bias_at(const MatrixTile<BYTES, MT, N>& bias, int r, int nt, int c) {
    if constexpr (BYTES == 4) return __int_as_float(bias.at(r, nt, c));
    else if constexpr (BYTES == 2) return bias.place(nt, c) == 0 ? unpack2<T>(bias.at(r, nt, c)).x : unpack2<T>(bias.at(r, nt, c)).y;
    else return 0.0f;
}

// What comes behind a softcap's tanh, for the scores of a warp; see apply_mask for position, key and Order. T: the type of 16-bit biases.
template <int SCORE, class Order, class T, int MT, int NT>
__device__ __forceinline__ void apply_terms(
    float (&s)[MT][NT][4], const ScoreTransform<SCORE>& score, const MatrixTile<bias_bytes(SCORE), MT, 8 * NT>& bias, int position, int key
) {
    if constexpr (!ScoreTransform<SCORE>::FACTOR_LEFT) {
#pragma unroll
        for (int row = 0; row < 2 * MT; ++row) {
            const float distance = float(position + 8 * row - key);  // one conversion a row: they are slow
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[row / 2][nt][row % 2 * 2 + c];
                    x = score(x, distance - float(Order::key(nt, c)), bias_at<T>(bias, row, nt, c));
                }
        }
    }
}

// All of it.
template <int SCORE, class Order, class T, int MT, int NT>
__device__ __forceinline__ void apply_score(
    float (&s)[MT][NT][4], const ScoreTransform<SCORE>& score, const MatrixTile<bias_bytes(SCORE), MT, 8 * NT>& bias, int position, int key
) {
    if constexpr ((SCORE & SCORE_SOFTCAP) != 0) apply_tanh(s, score.scale);
    apply_terms<SCORE, Order, T>(s, score, bias, position, key);
}

// The same without a bias, where the lane's rows stand at any positions and belong to heads of these slopes.
template <int SCORE, class Order, int MT, int NT>
__device__ __forceinline__ void apply_score(
    float (&s)[MT][NT][4], const ScoreTransform<SCORE>& score, const float (&slope)[2 * MT], const int (&position)[2 * MT], int key
) {
    static_assert(bias_bytes(SCORE) == 0, "");
    if constexpr ((SCORE & SCORE_SOFTCAP) != 0) apply_tanh(s, score.scale);
    if constexpr (!ScoreTransform<SCORE>::FACTOR_LEFT) {
#pragma unroll
        for (int row = 0; row < 2 * MT; ++row) {
            const float distance = float(position[row] - key);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[row / 2][nt][row % 2 * 2 + c];
                    x = score(x, distance - float(Order::key(nt, c)), 0.0f, slope[row]);
                }
        }
    }
}

// Natural logits beyond it by size are brought to half of what they are beyond: their order stays, two of them that differ go on differing
// by more than any weight can show, and none overflows in log2 units. Without this the largest finite biases would come out as infinite
// ones, and a row of the lowest, which many use to hide keys, as one that sees nothing.
constexpr float FAR = 8.507059e37f, LARGEST = 3.402823466e38f;  // 2^126; of all finite numbers

__device__ __forceinline__ float nearer(float x) {
    const float half = 0.5f * x;
    return half + fminf(fmaxf(half, -0.5f * FAR), 0.5f * FAR);  // x itself up to FAR; infinite and NaN stay so
}

// The natural logit of a reference in log2 units, back from where nearer() has put it. In float64, as the distance doubles again with
// its rounding error.
__device__ __forceinline__ float farther(float reference) {
    const double x = reference * (1.0 / double(LOG2E)), far = x - fmin(fmax(x, -double(FAR)), double(FAR));
    return float(fmin(fmax(x + far, -double(LARGEST)), double(LARGEST)));
}

// nearer() of a warp's logits and of their rows' tops, if it matters for one of its rows: of logits lower than others before it does not.
template <int MT, int NT, int ROWS>
__device__ __forceinline__ void bring_nearer(float (&s)[MT][NT][4], float (&top)[ROWS], const float (&reference)[ROWS]) {
    bool far = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) far = far || fabsf(fmaxf(top[r], reference[r])) > FAR;
    if (__any_sync(0xffffffffu, far)) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[mt][nt][c] = nearer(s[mt][nt][c]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) top[r] = nearer(top[r]);
    }
}

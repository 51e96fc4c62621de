// Softmax of materialised scores, row by row and in place: the middle of the naive kernel, between two matrix products.
// 16-bit weights go into the first half of the memory of their row. naive_repair.cu tells by the sign what a row does not see: such a
// key weighs -0, and +0 is a weight too small for its type; a row that sees nothing has weights of -infinity.
#include "include/element.cuh"

struct NaiveSoftmaxParams {
    void* scores;       // (heads, rows, ld), float or double, scaled; then the weights
    void* lse;          // (heads, rows), natural logarithm, or null
    const void* bias;   // (heads, rows, keys), or null
    const u8* mask;     // (heads, rows, keys), not 0 = visible, or null
    i64 lse_head, lse_row;  // strides, in elements; 0 and negative are fine
    i64 bias_head, bias_row, bias_column;
    i64 mask_head, mask_row, mask_column;
    i64 ld;             // a multiple of 4
    double softcap;     // 0: none
    i32 rows, keys;     // of the scores
    i32 first_key;      // key of column 0
    i32 position;       // of row 0
    i32 window_left, window_right;  // inclusive; -1: unbounded
    i32 mask_first;     // key of the mask's first column; earlier keys are visible
    i32 unused;
};

constexpr int THREADS = 128;

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double tangent(double x) { return tanh(x); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }  // a NaN loses; the sum remembers it
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// ---- four neighbours of a row -------------------------------------------------------------------------------------------

template <class Number> struct alignas(16) Four {
    Number x[4];
};

// Weights of type W as they are stored. FACTOR: 2^14 for fp16, whose weights below 2^-14 would lose bits; the second product
// takes it back out.
template <class W> struct Weights {
    static constexpr float FACTOR = 1.0f;

    static __device__ __forceinline__ void store(void* row, int j, const Four<W>& w) { static_cast<Four<W>*>(row)[j / 4] = w; }
};

template <class W> struct PackedWeights {
    static __device__ __forceinline__ void store(void* row, int j, const Four<float>& w) {
        static_cast<uint2*>(row)[j / 4] = make_uint2(pack2<W>(w.x[0], w.x[1]), pack2<W>(w.x[2], w.x[3]));
    }
};

template <> struct Weights<Fp16> : PackedWeights<Fp16> {
    static constexpr float FACTOR = 16384.0f;
};
#if CUFLASH_ARCH >= 800
template <> struct Weights<Bf16> : PackedWeights<Bf16> {
    static constexpr float FACTOR = 1.0f;
};
#endif

// ---- one row ------------------------------------------------------------------------------------------------------------

// Logits of a row: -inf for what it does not see.
template <class Number, class B, bool OPTIONS> struct Logits {
    const NaiveSoftmaxParams& p;
    const Number* scores;
    int begin, end;  // columns that the window shows
    int head, row;

    __device__ __forceinline__ Logits(const NaiveSoftmaxParams& p, const Number* scores, int head, int row)
        : p(p), scores(scores), begin(0), end(p.keys), head(head), row(row) {
        const i64 column = i64(p.position) + row - p.first_key;  // of the row's own position
        if (p.window_left >= 0) begin = int(min(max(column - p.window_left, i64(0)), i64(p.keys)));
        if (p.window_right >= 0) end = int(max(min(column + p.window_right + 1, i64(p.keys)), i64(0)));
    }

    __device__ __forceinline__ Four<Number> load(int j) const {  // columns j to j + 3, of which at least the first exists
        Four<Number> s;
        if (j + 4 <= p.keys) {
            s = reinterpret_cast<const Four<Number>*>(scores)[j / 4];
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) s.x[c] = j + c < p.keys ? scores[j + c] : Number(0);  // nobody has written behind the last
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            bool visible = j + c >= begin && j + c < end;
            if constexpr (OPTIONS) {
                const i64 key = i64(p.first_key) + j + c;
                if (visible && p.mask && key >= p.mask_first)
                    visible = p.mask[head * p.mask_head + row * p.mask_row + (key - p.mask_first) * p.mask_column] != 0;
                if (visible && p.softcap != 0.0) s.x[c] = Number(p.softcap) * tangent(s.x[c] / Number(p.softcap));
                if (visible && p.bias) {
                    const Number bias = Element<B>::load(p.bias, head * p.bias_head + row * p.bias_row + key * p.bias_column);
                    s.x[c] += bias;
                    visible = bias != -Number(infinity());  // it hides a score of NaN as well
                }
            }
            if (!visible) s.x[c] = -Number(infinity());
        }
        return s;
    }
};

// Sum of exp(x - max) relative to a maximum; an empty one is (-inf, 0). NaN and +inf make the sum NaN.
template <class Number> struct RowSum {
    Number maximum, sum;

    __device__ __forceinline__ Number reference() const { return maximum == -Number(infinity()) ? Number(0) : maximum; }

    __device__ __forceinline__ void raise(Number to) {
        const Number before = maximum;
        maximum = larger(before, to);
        if (maximum != before) sum *= exponential(before - reference());
    }

    __device__ __forceinline__ void add(const Four<Number>& x) {
        raise(larger(larger(x.x[0], x.x[1]), larger(x.x[2], x.x[3])));
#pragma unroll
        for (int c = 0; c < 4; ++c) sum += exponential(x.x[c] - reference());
    }

    __device__ __forceinline__ void merge(RowSum other) {
        raise(other.maximum);
        other.raise(maximum);
        sum += other.sum;
    }
};

template <class Number> __device__ __forceinline__ RowSum<Number> of_block(RowSum<Number> mine) {
    __shared__ RowSum<Number> warps[THREADS / 32];
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        mine.merge({__shfl_xor_sync(0xffffffffu, mine.maximum, lanes), __shfl_xor_sync(0xffffffffu, mine.sum, lanes)});
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    RowSum<Number> all = warps[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) all.merge(warps[warp]);
    return all;
}

// Block b does row b % rows of head b / rows. W: type of the weights, B: of the bias; OPTIONS: softcap, bias or mask.
template <class Number, class W, class B, bool OPTIONS> __device__ __forceinline__ void softmax_row(const NaiveSoftmaxParams& p) {
    const int head = int(blockIdx.x / u32(p.rows)), row = int(blockIdx.x % u32(p.rows));
    Number* row_gmem = static_cast<Number*>(p.scores) + i64(blockIdx.x) * p.ld;
    const Logits<Number, B, OPTIONS> logits(p, row_gmem, head, row);

    RowSum<Number> mine{-Number(infinity()), Number(0)};
    for (int j = 4 * threadIdx.x; j < p.keys; j += 4 * THREADS) mine.add(logits.load(j));
    const RowSum<Number> all = of_block(mine);

    const Number reference = all.reference();
    const Number factor = Number(Weights<W>::FACTOR) / all.sum;
    const Number unseen = all.sum == Number(0) ? -Number(infinity()) : -Number(0);
    for (int first = 0; first < p.keys; first += 4 * THREADS) {
        const int j = first + 4 * threadIdx.x;
        Four<Number> x;
        if (j < p.keys) x = logits.load(j);
        if (sizeof(Number) == 4) __syncthreads();  // narrower weights land on scores that others have just read
        if (j < p.keys) {
#pragma unroll
            for (int c = 0; c < 4; ++c) x.x[c] = x.x[c] == -Number(infinity()) ? unseen : exponential(x.x[c] - reference) * factor;
            Weights<W>::store(row_gmem, j, x);
        }
    }
    if (threadIdx.x == 0 && p.lse) {
        const Number lse = all.sum == Number(0) ? -Number(infinity()) : reference + logarithm(all.sum);
        static_cast<Number*>(p.lse)[head * p.lse_head + row * p.lse_row] = lse;
    }
}

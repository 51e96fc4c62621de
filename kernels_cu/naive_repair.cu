// What a matrix product cannot do right, after the second product of the naive kernel: a value that is not finite reaches rows that do
// not see it, as zero times infinity is NaN, and the sign of a row that sees nothing follows its values. Both leave something that is not
// finite in the output, so that all other rows are only looked at. A weight says by its sign what it is: see naive_softmax.cu.
#include "include/element.cuh"

struct NaiveRepairParams {
    void* out;            // (heads, rows, columns)
    const void* weights;  // (heads, rows, ld)
    const void* v;        // (heads / group, keys, columns)
    i64 out_head, out_row;          // strides, in elements
    i64 v_head, v_key, v_column;    // 0 and negative are fine
    i64 ld;
    double factor;        // takes the scale of the weights out again
    i32 rows_total;       // heads * rows
    i32 rows, keys, columns, group;
    i32 unused;
};

constexpr int THREADS = 128;
constexpr int WARP_ROWS = 4;  // rows that a warp looks at
constexpr int ROWS = THREADS / 32 * WARP_ROWS;  // of a block

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity(); }
__device__ __forceinline__ bool is_finite(double x) { return fabs(x) < double(infinity()); }
__device__ __forceinline__ bool is_negative(float x) { return __float_as_int(x) < 0; }
__device__ __forceinline__ bool is_negative(double x) { return __double_as_longlong(x) < 0; }
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }  // not fused with a sum
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

// A dot product with what its roundings lose (Ogita, Rump and Oishi 2005): as if computed with twice the digits and then rounded. So a
// row differs from what the matrix product would give by no more than that one's own error.
template <class Number> struct Dot {
    Number sum = 0, lost = 0, not_finite = 0;

    // A weight of 0 was too small for its type: what it weighs is infinite or NaN as it stands.
    __device__ __forceinline__ void add(Number weight, Number value) {
        if (!is_finite(value)) {
            not_finite += weight == Number(0) ? value : weight * value;
            return;
        }
        const Number x = product(weight, value), next = sum + x, part = next - sum;
        lost += (sum - (next - part)) + (x - part) + fused(weight, value, -x);
        sum = next;
    }

    __device__ __forceinline__ Number result() const { return (is_finite(sum) ? sum + lost : sum) + not_finite; }
};

// Sum of weight * value over the keys of a row that it sees, for one column: those whose weight is not -0.
template <class Number, class T> __device__ __forceinline__ Number weighted_sum(
    const void* weights, const void* v, i64 column, const NaiveRepairParams& p, bool wanted) {
    Dot<Number> dot;
    for (int j = 0; j < p.keys; ++j) {
        const Number weight = Element<T>::load(weights, j);
        if (weight == Number(0) && is_negative(weight)) continue;
        if (wanted) dot.add(weight, Element<T>::load(v, column + j * p.v_key));
        if (j % 32 == 0 && !__any_sync(0xffffffffu, wanted && dot.result() == dot.result())) break;  // all are NaN, and stay so
    }
    return dot.result() * Number(p.factor);
}

// Block b looks at ROWS rows, of all heads in a row. T: type of weights, values and output.
template <class Number, class T> __device__ __forceinline__ void repair_rows(const NaiveRepairParams& p) {
    const u32 lane = threadIdx.x % 32, first = blockIdx.x * ROWS + threadIdx.x / 32 * WARP_ROWS, last = p.rows_total - 1;
    const auto begin_of = [&p](u32 i) { return i64(i / u32(p.rows)) * p.out_head + i64(i % u32(p.rows)) * p.out_row; };
    i64 begin[WARP_ROWS];
#pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) begin[r] = begin_of(min(first + r, last));  // the last one several times: no branch below
    u32 spoiled = 0;  // a bit for each row
    for (int column = lane; column < p.columns; column += 32) {
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) spoiled |= u32(!is_finite(Element<T>::load(p.out, begin[r] + column))) << r;
    }
#pragma unroll 1
    for (u32 i = first; i < first + WARP_ROWS && i <= last; ++i, spoiled >>= 1) {
        if (!__any_sync(0xffffffffu, spoiled & 1)) continue;
        const void* weights = from_element<T>(p.weights, i * p.ld);
        const void* v = from_element<T>(p.v, i / u32(p.rows) / u32(p.group) * p.v_head);
        const bool empty = Element<T>::load(weights, 0) == -Number(infinity());
        for (int tile = 0; tile < p.columns; tile += 32) {
            const int column = tile + lane;
            const i64 at = begin_of(i) + column;
            const bool wanted = column < p.columns && (empty || !is_finite(Element<T>::load(p.out, at)));
            if (!__any_sync(0xffffffffu, wanted)) continue;
            const Number sum = empty ? Number(0) : weighted_sum<Number, T>(weights, v, column * p.v_column, p, wanted);
            if (wanted) Element<T>::store(p.out, at, sum);
        }
    }
}

// The end of a row: what its sums come to, and its numbers in global memory.
#include "include/fp_tile.cuh"
#include "include/reals.cuh"

// Column 0 of a row of an array.
template <class T> __device__ __forceinline__ T* row_gmem(const void* base, const Strides& s, i64 batch, i64 row, i64 head) {
    return static_cast<T*>(const_cast<void*>(base)) + batch * s.batch + row * s.row + head * s.head;
}

// One number as Out in the array.
template <class Out> struct Stored;
template <> struct Stored<float> {
    using Type = float;
    static __device__ __forceinline__ float from(float x) { return x; }
    static __device__ __forceinline__ float from(double x) { return float(x); }
};
template <> struct Stored<double> {
    using Type = double;
    static __device__ __forceinline__ double from(double x) { return x; }
};
template <> struct Stored<Fp16> {
    using Type = u16;
    static __device__ __forceinline__ u16 from(double x) { return u16(pack2<Fp16>(float(x), 0.0f)); }
};
#if CUFLASH_ARCH >= 800
template <> struct Stored<Bf16> {
    using Type = u16;
    static __device__ __forceinline__ u16 from(double x) { return u16(pack2<Bf16>(float(x), 0.0f)); }
};
#endif

// Chunk<T>::SIZE numbers that lie side by side, from `column` on; `vector`: columns are contiguous and aligned to 16 bytes of Out.
template <class Out, class T>
__device__ __forceinline__ void store_numbers(
    typename Stored<Out>::Type* row_gmem, i64 column_stride, int column, int columns, bool vector, const T (&x)[Chunk<T>::SIZE]
) {
    using Type = typename Stored<Out>::Type;
    constexpr int SIZE = Chunk<T>::SIZE;
    struct alignas(SIZE * sizeof(Type)) Vector {
        Type x[SIZE];
    } y;
#pragma unroll
    for (int e = 0; e < SIZE; ++e) y.x[e] = Stored<Out>::from(x[e]);
    if (vector && SIZE * sizeof(Type) <= 16) {
        if (column < columns) *reinterpret_cast<Vector*>(row_gmem + column) = y;
    } else {
#pragma unroll
        for (int e = 0; e < SIZE; ++e)
            if (column + e < columns) row_gmem[(column + e) * column_stride] = y.x[e];
    }
}

// What a row's sums come to. Once a row, so that float64 costs nothing even where it is slow: log2 units, a large sink and a small
// share of the keys lose digits in float32.
struct RowEnd {
    double reference, sum;  // natural
    double lse;      // natural, with the sink
    double inverse;  // of the sum of weights
    double share;    // of the keys in the softmax, less than 1 if there is a sink

    // `head`: whose sink the row takes; below 0: it takes none. `scale`: of the accumulators, but not of the sum. `unit`: what 1 of the
    // reference is in natural logits.
    __device__ __forceinline__ RowEnd(
        const PrefillParams& p, int head, double reference, double sum, double scale, double unit = Exact64::LN2
    )
        : reference(reference * unit), sum(sum), lse(fma(reference, unit, ::log(sum))),
          inverse(sum == 0.0 ? 0.0 : 1.0 / (sum * scale)), share(1.0) {
        if (!p.sinks || head < 0) return;
        const double sink = reinterpret_cast<const double*>(p.sinks)[head], top = fmax(lse, sink);
        if (top == -infinity()) return;
        const double total = top + ::log(::exp(lse - top) + ::exp(sink - top));
        share = ::exp(lse - total);
        lse = total;
    }

    template <class T> __device__ __forceinline__ T weighted(T x) const {
        return sizeof(T) == 4 && share == 1.0 ? x * T(inverse) : T(double(x) * inverse * share);
    }
};

// The same numbers from the array, which is of T.
template <class T>
__device__ __forceinline__ void load_numbers(
    T (&x)[Chunk<T>::SIZE], const T* row_gmem, i64 column_stride, int column, int columns, bool vector
) {
    if (vector && column < columns) {
        const Chunk<T> c = *reinterpret_cast<const Chunk<T>*>(row_gmem + column);
#pragma unroll
        for (int e = 0; e < Chunk<T>::SIZE; ++e) x[e] = c.x[e];
    } else {
#pragma unroll
        for (int e = 0; e < Chunk<T>::SIZE; ++e) x[e] = column + e < columns ? row_gmem[(column + e) * column_stride] : T(0);
    }
}

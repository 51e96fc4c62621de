// Numbers of an array whose type is known when the kernel is compiled: float, double, or of 16 or 8 bits, which are worked with as float.
#include "include/types.cuh"

// Raw: what lies in memory; load() and store() convert from and to what is computed with.
template <class T> struct Element {
    using Raw = T;

    static __device__ __forceinline__ T load(const void* p, i64 at) { return static_cast<const T*>(p)[at]; }
    static __device__ __forceinline__ void store(void* p, i64 at, T x) { static_cast<T*>(p)[at] = x; }
};

template <> struct Element<Fp16> {
    using Raw = u16;

    static __device__ __forceinline__ float load(const void* p, i64 at) {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<const u16*>(p)[at]));
        return x;
    }

    static __device__ __forceinline__ void store(void* p, i64 at, float x) { static_cast<u16*>(p)[at] = u16(pack2<Fp16>(x, 0.0f)); }
};

template <> struct Element<Bf16> {
    using Raw = u16;

    static __device__ __forceinline__ float load(const void* p, i64 at) {
        return __uint_as_float(u32(static_cast<const u16*>(p)[at]) << 16);
    }

#if CUFLASH_ARCH >= 800
    static __device__ __forceinline__ void store(void* p, i64 at, float x) { static_cast<u16*>(p)[at] = u16(pack2<Bf16>(x, 0.0f)); }
#endif
};

template <> struct Element<E4m3> {
    using Raw = u8;

    // To the nearest even, and the largest number there is for all beyond it.
    static __device__ __forceinline__ void store(void* p, i64 at, float x) {
        const float size = fminf(fabsf(x), 448.0f);
        const u32 bits = __float_as_uint(size);
        u32 y = (bits - (120u << 23) + 0x7ffffu + (bits >> 20 & 1)) >> 20;
        if (size < 0.015625f) y = __float_as_uint(size + 16384.0f) - __float_as_uint(16384.0f);  // below 2^-6: in steps of 2^-9
        static_cast<u8*>(p)[at] = u8(x != x ? 0x7fu : y | (__float_as_uint(x) >> 24 & 0x80));
    }
};

// The array from one of its elements on.
template <class T> __device__ __forceinline__ const void* from_element(const void* p, i64 at) {
    return static_cast<const typename Element<T>::Raw*>(p) + at;
}

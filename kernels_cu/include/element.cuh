// Numbers of an array whose type is known when the kernel is compiled: float, double, or 16 bits, which are worked with as float.
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

// The array from one of its elements on.
template <class T> __device__ __forceinline__ const void* from_element(const void* p, i64 at) {
    return static_cast<const typename Element<T>::Raw*>(p) + at;
}

// Number types of the kernels: fixed-width integers, and the two 16-bit floats as tags over raw bits. Nothing from the toolkit
// is included, so that an instance compiles in about a second.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

// The first type if so, else the second.
template <bool FIRST, class A, class B> struct Choose {
    using Type = A;
};
template <class A, class B> struct Choose<false, A, B> {
    using Type = B;
};

struct Fp16 {};  // IEEE binary16
struct Bf16 {};  // bfloat16
struct E4m3 {};  // 8 bits: sign, 4 of exponent, 3 of fraction; NaN, but no infinity (OCP FP8, float8_e4m3fn)

// What tensor cores multiply: the type of the queries, or fp16 where keys and values are converted.
template <class In, bool CONVERTED> struct ProductType {
    using Type = In;
};
template <class In> struct ProductType<In, true> {
    using Type = Fp16;
};

// What the copy engine of sm_90 must know of an array to copy boxes of it; cuflash/tensor_map.py has them made. Its bits are the driver's.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Two numbers rounded to 16 bits in one register, the first one in the low half: the order that mma fragments have.
template <class T> __device__ __forceinline__ u32 pack2(float low, float high);

template <> __device__ __forceinline__ u32 pack2<Fp16>(float low, float high) {
    u32 d;
#if CUFLASH_ARCH >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#else
    asm("{.reg .b16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b};}" : "=r"(d) : "f"(low), "f"(high));
#endif
    return d;
}

#if CUFLASH_ARCH >= 800
template <> __device__ __forceinline__ u32 pack2<Bf16>(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
#endif

// The two numbers of a register.
template <class T> __device__ __forceinline__ float2 unpack2(u32 x);

template <> __device__ __forceinline__ float2 unpack2<Fp16>(u32 x) {
    float2 f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(f.x), "=f"(f.y) : "r"(x));
    return f;
}

template <> __device__ __forceinline__ float2 unpack2<Bf16>(u32 x) { return {__int_as_float(x << 16), __int_as_float(x & 0xffff0000u)}; }

// The two numbers of a register, those that are finite replaced by 0.
template <class T> __device__ __forceinline__ float2 not_finite2(u32 x) {
    const float2 f = unpack2<T>(x);
    return {fabsf(f.x) < infinity() ? 0.0f : f.x, fabsf(f.y) < infinity() ? 0.0f : f.y};
}

// Whether one of eight numbers is infinite or NaN.
template <class T> __device__ __forceinline__ bool any_not_finite(uint4 x) {
    const float2 a = not_finite2<T>(x.x), b = not_finite2<T>(x.y), c = not_finite2<T>(x.z), d = not_finite2<T>(x.w);
    return a.x != 0.0f || a.y != 0.0f || b.x != 0.0f || b.y != 0.0f || c.x != 0.0f || c.y != 0.0f || d.x != 0.0f || d.y != 0.0f;
}

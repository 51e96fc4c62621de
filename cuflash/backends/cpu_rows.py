"""Reading and writing one row of an array of any dtype, stride and alignment, for the compiled CPU kernels.

float16 and bfloat16 are widened and rounded by integer arithmetic: exact, the same on every machine, and subnormal
numbers survive.
"""

from __future__ import annotations

import numpy as np

from .cpu_memory import (
    bits_from_f32,
    compiled,
    f32_from_bits,
    get,
    load_f32,
    load_f64,
    load_u8,
    load_u16,
    put,
    store_f32,
    store_f64,
    store_u16,
)

F32, F64, F16, BF16, E4M3 = 0, 1, 2, 3, 4  # the codes of cpu_params.CODES


@compiled
def widen_f16(bits):
    """float16 bits -> float32."""
    magnitude = np.uint32(bits & np.uint16(0x7FFF)) << np.uint32(13)
    sign = np.uint32(bits & np.uint16(0x8000)) << np.uint32(16)
    # The shifted bits are the number with a too small exponent; a product of floats mends that for subnormals, too.
    value = bits_from_f32(f32_from_bits(np.uint32(magnitude)) * np.float32(2.0**112))
    if magnitude >= np.uint32(0x0F800000):  # infinity and NaN
        value = np.uint32(magnitude | np.uint32(0x7F800000))
    return f32_from_bits(np.uint32(value | sign))


@compiled
def widen_bf16(bits):
    """bfloat16 bits -> float32."""
    return f32_from_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@compiled
def widen_e4m3(bits):
    """float8_e4m3fn bits -> float32, as `widen_f16` does it."""
    magnitude = np.uint32(bits & np.uint8(0x7F)) << np.uint32(20)
    sign = np.uint32(bits & np.uint8(0x80)) << np.uint32(24)
    value = bits_from_f32(f32_from_bits(np.uint32(magnitude)) * np.float32(2.0**120))
    if magnitude == np.uint32(0x07F00000):  # NaN
        value = np.uint32(0x7FC00000)
    return f32_from_bits(np.uint32(value | sign))


@compiled
def round_to_bf16(value):
    """float32 -> bfloat16 bits, to nearest, ties to even."""
    bits = bits_from_f32(value)
    if value != value:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def round_to_f16(value):
    """float32 -> float16 bits, to nearest, ties to even; subnormals kept, overflow to infinity."""
    bits = bits_from_f32(value)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if magnitude > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if magnitude >= np.uint32(0x477FF000):  # 65520 and above round to infinity
        return np.uint16(sign | np.uint32(0x7C00))
    if magnitude < np.uint32(0x38800000):  # below 2^-14: adding 0.5 leaves round(value * 2^24) in the low bits
        shifted = bits_from_f32(f32_from_bits(np.uint32(magnitude)) + np.float32(0.5))
        return np.uint16(sign | (shifted - np.uint32(0x3F000000)))
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    rounded = (magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    return np.uint16(sign | rounded)


@compiled
def narrow(value):
    """float64 -> float32 rounded to odd, so that a second rounding to 16 bits is as good as one; float32 as it is."""
    single = np.float32(value)
    if np.float64(single) == value or value != value:
        return single
    bits = bits_from_f32(single)
    if abs(np.float64(single)) > abs(value):
        bits = np.uint32(bits - np.uint32(1))
    return f32_from_bits(np.uint32(bits | np.uint32(1)))


@compiled
def read_row(like, target, address, stride, count, code):
    """Numbers of like's type at ``target`` = a row of ``count`` elements at ``address``; ``stride`` is in bytes."""
    # Where the compiler knows the stride the loop becomes vector moves.
    if code == F32 and stride == 4:
        for n in range(count):
            put(like, target, n, load_f32(address, 4 * n))
    elif code == F32:
        for n in range(count):
            put(like, target, n, load_f32(address, stride * n))
    elif code == F64 and stride == 8:
        for n in range(count):
            put(like, target, n, load_f64(address, 8 * n))
    elif code == F64:
        for n in range(count):
            put(like, target, n, load_f64(address, stride * n))
    elif code == F16 and stride == 2:
        for n in range(count):
            put(like, target, n, widen_f16(load_u16(address, 2 * n)))
    elif code == F16:
        for n in range(count):
            put(like, target, n, widen_f16(load_u16(address, stride * n)))
    elif code == E4M3 and stride == 1:
        for n in range(count):
            put(like, target, n, widen_e4m3(load_u8(address, n)))
    elif code == E4M3:
        for n in range(count):
            put(like, target, n, widen_e4m3(load_u8(address, stride * n)))
    elif stride == 2:
        for n in range(count):
            put(like, target, n, widen_bf16(load_u16(address, 2 * n)))
    else:
        for n in range(count):
            put(like, target, n, widen_bf16(load_u16(address, stride * n)))


@compiled
def scale_row(like, target, count, address):
    """Multiply ``count`` numbers of like's type at ``target`` by the float32 at ``address``."""
    scale = load_f32(address, 0)
    for n in range(count):
        put(like, target, n, get(like, target, n) * scale)


@compiled
def store_row(like, source, address, stride, count, code):
    """Round ``count`` numbers of like's type at ``source`` and store them from ``address`` on; ``stride`` is in bytes."""
    if code == F32 and stride == 4:
        for n in range(count):
            store_f32(address, 4 * n, np.float32(get(like, source, n)))
    elif code == F32:
        for n in range(count):
            store_f32(address, stride * n, np.float32(get(like, source, n)))
    elif code == F64 and stride == 8:
        for n in range(count):
            store_f64(address, 8 * n, np.float64(get(like, source, n)))
    elif code == F64:
        for n in range(count):
            store_f64(address, stride * n, np.float64(get(like, source, n)))
    elif code == F16:
        for n in range(count):
            store_u16(address, stride * n, round_to_f16(narrow(get(like, source, n))))
    else:
        for n in range(count):
            store_u16(address, stride * n, round_to_bf16(narrow(get(like, source, n))))

// Numbers of 16 and 8 bits.
#pragma once
#include <cmath>
#include <cstring>

namespace emulator {

using b16 = unsigned short;

template <class T, class From> T bits(From from) {
    static_assert(sizeof(T) == sizeof(From), "");
    T to;
    memcpy(&to, &from, sizeof to);
    return to;
}

struct Half {
    static float from(b16 x) {
        const int exponent = x >> 10 & 31, fraction = x & 1023;
        const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                           : exponent     ? ldexpf(fraction + 1024, exponent - 25)
                                          : ldexpf(fraction, -24);
        return x & 0x8000 ? -size : size;
    }

    static b16 to(float x) {  // to nearest even
        const unsigned sign = bits<unsigned>(x) >> 16 & 0x8000;
        const float size = fabsf(x);
        if (size != size) return 0x7fff;
        if (size >= 65520.0f) return sign | 0x7c00;
        if (size < 6.103515625e-5f) return sign | unsigned(rintf(size * 16777216.0f));  // a denormal, or the smallest number above
        const unsigned u = bits<unsigned>(size);
        return sign | (((u + 0xfff + (u >> 13 & 1)) >> 13) - (112 << 10));
    }
};

struct Bfloat {
    static float from(b16 x) { return bits<float>(unsigned(x) << 16); }

    static b16 to(float x) {
        const unsigned u = bits<unsigned>(x);
        return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    }
};

struct E4m3 {
    static float from(unsigned char x) {
        const int exponent = x >> 3 & 15, fraction = x & 7;
        const float size = (x & 127) == 127 ? NAN : exponent ? ldexpf(fraction + 8, exponent - 10) : ldexpf(fraction, -9);
        return x & 0x80 ? -size : size;
    }
};

template <class T> float number(b16 x) {
    static float* table = nullptr;
    if (!table) {
        table = new float[65536];
        for (int i = 0; i < 65536; ++i) table[i] = T::from(i);
    }
    return table[x];
}

}  // namespace emulator

// The bodies of PTX instructions.
#include "emulator.hpp"
#include "memory.hpp"
#include "numbers.hpp"

namespace ptx {

using namespace emulator;

// ---- 16-bit numbers -----------------------------------------------------------------------------------------------------

template <class T> static unsigned pack(float low, float high) { return T::to(low) | unsigned(T::to(high)) << 16; }

template <class T> static unsigned fma2(unsigned a, unsigned b, unsigned c) {
    const auto one = [](unsigned x, unsigned y, unsigned z) { return float(double(T::from(x)) * T::from(y) + T::from(z)); };
    return pack<T>(one(a & 0xffff, b & 0xffff, c & 0xffff), one(a >> 16, b >> 16, c >> 16));
}

void cvt_rn_f16x2_f32(b32& d, float high, float low) { d = pack<Half>(low, high); }
void cvt_rn_bf16x2_f32(b32& d, float high, float low) { d = pack<Bfloat>(low, high); }
void cvt_rn_f16_f32(b16& d, float a) { d = Half::to(a); }
void cvt_f32_f16(float& d, b16 a) { d = Half::from(a); }
void cvt_rn_f16x2_e4m3x2(b32& d, b16 a) { d = pack<Half>(E4m3::from(a & 0xff), E4m3::from(a >> 8)); }
void mul_f16x2(b32& d, b32 a, b32 b) {
    d = pack<Half>(Half::from(a & 0xffff) * Half::from(b & 0xffff), Half::from(a >> 16) * Half::from(b >> 16));
}
void prmt_b32(b32& d, b32 a, b32 b, b32 selector) {
    const unsigned long long both = a | (unsigned long long)b << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned which = selector >> 4 * i & 15;
        if (which > 7) fail("prmt.b32: a selector with sign replication, %x", selector);
        result |= unsigned(both >> 8 * which & 0xff) << 8 * i;
    }
    d = result;
}
void fma_rn_f16x2(b32& d, unsigned a, unsigned b, unsigned c) { d = fma2<Half>(a, b, c); }
void fma_rn_bf16x2(b32& d, unsigned a, unsigned b, unsigned c) { d = fma2<Bfloat>(a, b, c); }

// ---- arithmetic ------------------------------------------------------------------------------------------------------

static float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? 0.0f : x; }
void ex2_approx_f32(float& d, float a) { d = exp2f(a); }
void ex2_approx_ftz_f32(float& d, float a) { d = flushed(exp2f(flushed(a))); }
void rcp_approx_ftz_f32(float& d, float a) { d = flushed(1.0f / flushed(a)); }

// ---- memory -------------------------------------------------------------------------------------------------------------

void cp_async_cg_shared_global(unsigned to, const void* from, int bytes, int read) { begin_copy(to, from, bytes, read, "cp.async"); }
void cp_async_ca_shared_global(unsigned to, const void* from, int bytes, int read) { begin_copy(to, from, bytes, read, "cp.async"); }
void cp_async_cg_shared_global_L2_128B(unsigned to, const void* from, int bytes) { begin_copy(to, from, bytes, bytes, "cp.async"); }
void barrier_sync(int barrier, int count) { block_barrier("barrier.sync", false, barrier, count); }
void barrier_arrive(int barrier, int count) { block_barrier("barrier.arrive", false, barrier, count, false); }
void bar_sync(int barrier, int count) { block_barrier("bar.sync", false, barrier, count); }
void bar_arrive(int barrier, int count) { block_barrier("bar.arrive", false, barrier, count, false); }
void cp_async_commit_group() { commit_copies(); }
void cp_async_wait_group(int left) { wait_for_copies(left); }

template <class... D> static void read_words(const void* from, D&... d) {
    const auto* word = static_cast<const unsigned*>(from);
    ((d = *word++), ...);
}

template <class... S> static void write_words(unsigned char* to, S... s) {
    auto* word = reinterpret_cast<unsigned*>(to);
    ((*word++ = s), ...);
}

void prefetch_global_L2(const void* from) { read_global(from, 4, "prefetch"); }
void ld_global_nc_b32(b32& x, const void* from) { read_words(read_global(from, 4, "ld.global"), x); }
void ld_global_nc_v2_b32(b32& x, b32& y, const void* from) { read_words(read_global(from, 8, "ld.global"), x, y); }
void ld_global_nc_v4_b32(b32& x, b32& y, b32& z, b32& w, const void* from) {
    read_words(read_global(from, 16, "ld.global"), x, y, z, w);
}
void ld_global_cg_v2_f32(float& x, float& y, const void* from) {
    const auto* number = static_cast<const float*>(read_global(from, 8, "ld.global"));
    x = number[0], y = number[1];
}
void ld_global_cg_v4_f32(float& x, float& y, float& z, float& w, const void* from) {
    const auto* number = static_cast<const float*>(read_global(from, 16, "ld.global"));
    x = number[0], y = number[1], z = number[2], w = number[3];
}
void red_global_add_f32(float* to, float x) {
    read_global(to, 4, "red.global");
    *to += x;
}
void red_global_add_f64(double* to, double x) {
    read_global(to, 8, "red.global");
    *to += x;
}
void red_global_add_v2_f32(float* to, float x, float y) {
    read_global(to, 8, "red.global");
    to[0] += x, to[1] += y;
}
void atom_acq_rel_gpu_global_inc_u32(b32& before, void* counter, b32 last) {
    read_global(counter, 4, "atom");
    auto& count = *static_cast<unsigned*>(counter);
    before = count;
    count = before >= last ? 0 : before + 1;
}
void st_release_gpu_global_u32(void* to, b32 x) {
    read_global(to, 4, "st.release");
    *static_cast<unsigned*>(to) = x;
}
// Blocks come one after the other: what one of them waits for must be there.
void ld_acquire_gpu_global_u32(b32& x, const void* from) {
    constexpr int MOST = 1000;
    static const void* last;
    static int times;
    read_words(read_global(from, 4, "ld.acquire"), x);
    times = from == last ? times + 1 : 0, last = from;
    if (times == MOST) fail("ld.acquire: block %u waits for a block that comes later", block);
}
void ld_shared_v2_f32(float& x, float& y, b32 from) {
    const auto* number = reinterpret_cast<const float*>(read_shared(from, 8, "ld.shared"));
    x = number[0], y = number[1];
}
void st_shared_v4_f32(b32 to, float x, float y, float z, float w) {
    auto* number = reinterpret_cast<float*>(write_shared(to, 16, "st.shared"));
    number[0] = x, number[1] = y, number[2] = z, number[3] = w;
}
void ld_shared_b32(b32& x, unsigned from) { read_words(read_shared(from, 4, "ld.shared"), x); }
void ld_shared_v4_b32(b32& x, b32& y, b32& z, b32& w, unsigned from) {
    read_words(read_shared(from, 16, "ld.shared"), x, y, z, w);
}
void st_shared_b32(unsigned to, unsigned x) { write_words(write_shared(to, 4, "st.shared"), x); }
void st_shared_v2_b32(unsigned to, unsigned x, unsigned y) { write_words(write_shared(to, 8, "st.shared"), x, y); }
void st_shared_v4_b32(unsigned to, unsigned x, unsigned y, unsigned z, unsigned w) {
    write_words(write_shared(to, 16, "st.shared"), x, y, z, w);
}

// ---- instructions of a warp ---------------------------------------------------------------------------------------------

static void check_banks(const Thread* rows, int matrix, const char* name) {
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < i; ++j)
            if (rows[i].in[0] != rows[j].in[0] && rows[i].in[0] / 16 % 8 == rows[j].in[0] / 16 % 8)
                fail("bank conflict: rows %d and %d of matrix %d of %s, at %u and %u", i, j, matrix, name, rows[i].in[0], rows[j].in[0]);
}

// Lane l names row l % 8 of matrix l / 8, and gets columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; transposed: rows of a column.
static void load_matrices(b32& d0, b32& d1, b32& d2, b32& d3, unsigned row, bool transposed) {
    read_shared(row, 16, "ldmatrix");
    threads[current].in[0] = row;
    with_warp(transposed ? "ldmatrix.trans" : "ldmatrix", [transposed](Thread* lanes) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            const Thread* rows = lanes + 8 * matrix;
            check_banks(rows, matrix, "ldmatrix");
            for (int lane = 0; lane < WARP; ++lane) {
                b16 x[2];
                for (int e = 0; e < 2; ++e) {
                    const int a = lane / 4, b = lane % 4 * 2 + e;
                    memcpy(&x[e], smem + place(rows[transposed ? b : a].in[0]) + 2 * (transposed ? a : b), 2);
                }
                lanes[lane].out[matrix] = x[0] | unsigned(x[1]) << 16;
            }
        }
    });
    const unsigned* out = threads[current].out;
    d0 = out[0], d1 = out[1], d2 = out[2], d3 = out[3];
}

void ldmatrix_sync_aligned_m8n8_x4_shared_b16(b32& d0, b32& d1, b32& d2, b32& d3, unsigned row) {
    load_matrices(d0, d1, d2, d3, row, false);
}
void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(b32& d0, b32& d1, b32& d2, b32& d3, unsigned row) {
    load_matrices(d0, d1, d2, d3, row, true);
}

void stmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned row, unsigned s0, unsigned s1, unsigned s2, unsigned s3) {
    write_shared(row, 16, "stmatrix");
    const unsigned in[] = {row, s0, s1, s2, s3};
    memcpy(threads[current].in, in, sizeof in);
    with_warp("stmatrix", [](Thread* lanes) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            const Thread* rows = lanes + 8 * matrix;
            check_banks(rows, matrix, "stmatrix");
            for (int lane = 0; lane < WARP; ++lane)
                memcpy(smem + place(rows[lane / 4].in[0]) + lane % 4 * 4, &lanes[lane].in[1 + matrix], 4);
        }
    });
}

// Lane l has numbers 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, then of column l / 4.
void movmatrix_sync_aligned_m8n8_trans_b16(b32& d, b32 a) {
    threads[current].in[0] = a;
    with_warp("movmatrix", [](Thread* lanes) {
        const auto number = [lanes](int row, int column) { return lanes[row * 4 + column / 2].in[0] >> column % 2 * 16 & 0xffff; };
        for (int lane = 0; lane < WARP; ++lane)
            lanes[lane].out[0] = number(lane % 4 * 2, lane / 4) | number(lane % 4 * 2 + 1, lane / 4) << 16;
    });
    d = threads[current].out[0];
}

// D = A B + C, A 16 x DEPTH in DEPTH / 4 registers, B DEPTH x 8 in DEPTH / 8; sums are exact and rounded once.
template <class T, int DEPTH> static void multiply(Thread* lanes) {
    constexpr int A_REGISTERS = DEPTH / 4, B_REGISTERS = DEPTH / 8;
    double A[16][DEPTH], B[DEPTH][8];
    for (int lane = 0; lane < WARP; ++lane) {
        const unsigned* in = lanes[lane].in + 4;
        const int g = lane / 4, t = lane % 4;
        for (int e = 0; e < 2; ++e) {
            for (int i = 0; i < A_REGISTERS; ++i) A[g + i % 2 * 8][2 * t + e + i / 2 * 8] = number<T>(in[i] >> 16 * e);
            for (int i = 0; i < B_REGISTERS; ++i) B[2 * t + e + 8 * i][g] = number<T>(in[A_REGISTERS + i] >> 16 * e);
        }
    }
    for (int row = 0; row < 16; ++row) {
        double sum[8] = {};
        for (int k = 0; k < DEPTH; ++k)
            for (int column = 0; column < 8; ++column) sum[column] += A[row][k] * B[k][column];
        for (int column = 0; column < 8; ++column) {
            Thread& lane = lanes[row % 8 * 4 + column / 2];
            const int i = row / 8 * 2 + column % 2;
            lane.out[i] = bits<unsigned>(float(bits<float>(lane.in[i]) + sum[column]));
        }
    }
}

template <class T, int DEPTH, class... AB>
static void mma(const char* name, float& d0, float& d1, float& d2, float& d3, float c0, float c1, float c2, float c3, AB... ab) {
    const unsigned in[] = {bits<unsigned>(c0), bits<unsigned>(c1), bits<unsigned>(c2), bits<unsigned>(c3), ab...};
    memcpy(threads[current].in, in, sizeof in);
    with_warp(name, multiply<T, DEPTH>);
    const unsigned* out = threads[current].out;
    d0 = bits<float>(out[0]), d1 = bits<float>(out[1]), d2 = bits<float>(out[2]), d3 = bits<float>(out[3]);
}

void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& d0, float& d1, float& d2, float& d3, b32 a0, b32 a1, b32 a2, b32 a3, b32 b0, b32 b1, float c0, float c1, float c2, float c3) {
    mma<Half, 16>("mma.m16n8k16", d0, d1, d2, d3, c0, c1, c2, c3, a0, a1, a2, a3, b0, b1);
}
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& d0, float& d1, float& d2, float& d3, b32 a0, b32 a1, b32 a2, b32 a3, b32 b0, b32 b1, float c0, float c1, float c2, float c3) {
    mma<Bfloat, 16>("mma.m16n8k16.bf16", d0, d1, d2, d3, c0, c1, c2, c3, a0, a1, a2, a3, b0, b1);
}
void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(
    float& d0, float& d1, float& d2, float& d3, b32 a0, b32 a1, b32 b0, float c0, float c1, float c2, float c3) {
    mma<Half, 8>("mma.m16n8k8", d0, d1, d2, d3, c0, c1, c2, c3, a0, a1, b0);
}

// The 10 fraction bits of TF32. Conversion rounds ties away from 0, tensor cores leave the other bits out.
void cvt_rna_tf32_f32(b32& d, float a) {
    const unsigned x = bits<unsigned>(a);
    d = fabsf(a) < INFINITY ? (x + 0x1000) & 0xffffe000 : a != a ? 0x7fffe000 : x;
}

static float towards_zero(double x) {
    const float y = float(x);
    return fabs(double(y)) > fabs(x) && fabsf(y) < INFINITY ? nextafterf(y, 0.0f) : y;
}

// Sums are rounded towards 0, as tensor cores do.
void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(
    float& d0, float& d1, float& d2, float& d3, b32 a0, b32 a1, b32 a2, b32 a3, b32 b0, b32 b1, float c0, float c1, float c2, float c3) {
    const unsigned in[] = {bits<unsigned>(c0), bits<unsigned>(c1), bits<unsigned>(c2), bits<unsigned>(c3), a0, a1, a2, a3, b0, b1};
    memcpy(threads[current].in, in, sizeof in);
    with_warp("mma.m16n8k8.tf32", [](Thread* lanes) {
        const auto number = [lanes](int lane, int i) { return double(bits<float>(lanes[lane].in[i] & 0xffffe000)); };
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < 8; ++column) {
                Thread& lane = lanes[row % 8 * 4 + column / 2];
                const int i = row / 8 * 2 + column % 2;
                double sum = bits<float>(lane.in[i]);
                for (int k = 0; k < 8; ++k)
                    sum += number(row % 8 * 4 + k % 4, 4 + row / 8 + k / 4 * 2) * number(column * 4 + k % 4, 8 + k / 4);
                lane.out[i] = bits<unsigned>(towards_zero(sum));
            }
    });
    const unsigned* out = threads[current].out;
    d0 = bits<float>(out[0]), d1 = bits<float>(out[1]), d2 = bits<float>(out[2]), d3 = bits<float>(out[3]);
}

// D = C + A B, A ROWS x DEPTH, B DEPTH x 8, in float64: operands of a lane in the order D, A, B.
template <int ROWS, int DEPTH> static void multiply_f64(Thread* lanes) {
    constexpr int D = ROWS / 4, A = ROWS * DEPTH / 32;
    const auto number = [lanes](int lane, int i) {
        double x;
        memcpy(&x, &lanes[lane].in[2 * i], sizeof x);
        return x;
    };
    for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < 8; ++column) {
            const int lane = row % 8 * 4 + column / 2, i = row / 8 * 2 + column % 2;
            double sum = number(lane, i);
            for (int k = 0; k < DEPTH; ++k)
                sum = fma(number(row % 8 * 4 + k % 4, D + row / 8 + k / 4 * (ROWS / 8)), number(column * 4 + k % 4, D + A + k / 4), sum);
            memcpy(&lanes[lane].out[2 * i], &sum, sizeof sum);
        }
}

void mma_sync_aligned_m8n8k4_row_col_f64_f64_f64_f64(double& d0, double& d1, double a0, double b0, double c0, double c1) {
    const double in[] = {c0, c1, a0, b0};
    memcpy(threads[current].in, in, sizeof in);
    with_warp("mma.m8n8k4.f64", multiply_f64<8, 4>);
    memcpy(&d0, &threads[current].out[0], sizeof d0), memcpy(&d1, &threads[current].out[2], sizeof d1);
}

void mma_sync_aligned_m16n8k16_row_col_f64_f64_f64_f64(
    double& d0, double& d1, double& d2, double& d3, double a0, double a1, double a2, double a3, double a4, double a5, double a6, double a7,
    double b0, double b1, double b2, double b3, double c0, double c1, double c2, double c3) {
    const double in[] = {c0, c1, c2, c3, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3};
    memcpy(threads[current].in, in, sizeof in);
    with_warp("mma.m16n8k16.f64", multiply_f64<16, 16>);
    double* const d[] = {&d0, &d1, &d2, &d3};
    for (int i = 0; i < 4; ++i) memcpy(d[i], &threads[current].out[2 * i], sizeof(double));
}

}  // namespace ptx

// What decode() does before it attends, in one launch: new keys and values go behind those that are in the caches, dense or paged; a
// rotary embedding (Su et al. 2021, arXiv 2104.09864) turns the keys on their way, and the queries into memory of their own; and the
// lengths that the attention then works with are written, where the device alone knows those before.
//
// The grid is one row of threads: units of keys, of values, of queries, then a thread for each sequence. A unit is 16 bytes of a row, or
// two times 16 bytes that are turned together; where strides or addresses forbid that, a number or a pair of numbers. Where the caches are
// of e4m3 and the new keys and values are not, a warp quantizes a row, by the scale that its head has or one that it finds and writes.
#include "include/early.cuh"
#include "include/element.cuh"
#include "include/params.cuh"

struct AppendParams {
    const void* q;          // (batch, q_rows, heads_q, head_dim)
    const void* k_new;      // (batch, new_keys, heads_kv, head_dim)
    const void* v_new;      // (batch, new_keys, heads_kv, head_dim_v)
    const void* cos;        // (positions, pairs)
    const void* sin;        // (positions, pairs)
    const void* lengths;    // (batch): keys in the cache; i64, or i32 if lengths_i32; null: none
    const i32* page_table;  // (batch, max_pages), or null
    void* q_turned;         // (batch, q_rows, heads_q, head_dim), contiguous
    void* k;                // (batch, capacity, heads_kv, head_dim); paged: (pages, page_size, heads_kv, head_dim)
    void* v;                // likewise, with head_dim_v
    i32* lengths_after;     // (batch)
    float *k_scale, *v_scale;  // of caches in e4m3: (batch, capacity, heads_kv), or (pages, page_size, heads_kv); null: one for all
    Strides q_stride, k_new_stride, v_new_stride, k_stride, v_stride, k_scale_stride, v_scale_stride;
    i64 cos_row, cos_column, sin_row, sin_column;  // strides, in elements
    u32 k_units, v_units, q_units;                 // of a row
    u32 k_total, v_total, q_total, lengths_total;  // threads for each part of the work; 0: there is none
    i32 q_rows, new_keys, heads_q, heads_kv, head_dim, head_dim_v;
    i32 pairs;              // of features that are turned; 0: there is no embedding
    i32 interleaved;        // pairs are (0, 1), (2, 3), ...; else (0, pairs), (1, pairs + 1), ...
    i32 table_float;        // cos and sin are float, whatever the arrays are
    i32 positions;
    i32 upper_left;         // query row r stands at position r instead of r + keys - q_rows
    i32 k_vector, v_vector, q_vector;  // rows are moved 16 bytes at a time
    i32 lengths_i32;
    i32 capacity;           // keys that a sequence has room for
    i32 page_size, max_pages, pages;
    u32 page_magic;         // key / page_size = key * page_magic >> page_shift
    i32 page_shift;
    i32 k_by_token, v_by_token;  // scales are found here, for each token and head
    float k_factor, v_factor;
};

constexpr int APPEND_THREADS = 128;  // of a block
constexpr int MOST_COLUMNS = 256;    // of a row that is quantized

// N neighbouring numbers of a row.
template <class T, int N> struct __align__(N * sizeof(typename Element<T>::Raw)) Chunk {
    typename Element<T>::Raw x[N];
};

// A row, seen as chunks. N = 1: columns lie `step` apart; else they are contiguous.
template <class T, int N> struct Row {
    typename Element<T>::Raw* first_gmem;
    i64 step;

    __device__ __forceinline__ Row(const void* base, const Strides& s, i64 batch, i64 row, i64 head)
        : first_gmem(static_cast<typename Element<T>::Raw*>(const_cast<void*>(base)) + batch * s.batch + row * s.row + head * s.head),
          step(s.column) {}

    __device__ __forceinline__ Chunk<T, N>& chunk(int i) const {
        return *reinterpret_cast<Chunk<T, N>*>(N > 1 ? first_gmem + i * N : first_gmem + i * step);
    }
};

// Which keys a sequence has before the new ones and after them. An append that does not fit is left out as a whole, and so is one behind
// a negative length: lengths on the device cannot be checked beforehand.
struct Growth {
    int before, after;
    bool fits;

    __device__ __forceinline__ Growth(const AppendParams& p, int batch) {
        i64 given = 0;
        if (p.lengths) given = p.lengths_i32 ? i64(static_cast<const i32*>(p.lengths)[batch]) : static_cast<const i64*>(p.lengths)[batch];
        fits = given >= 0 && given <= p.capacity - p.new_keys;
        before = int(given < 0 ? 0 : given > p.capacity ? p.capacity : given);
        after = fits ? before + p.new_keys : before;
    }
};

// Where the n-th new key of a sequence goes, if anywhere: to a row of a batch entry or page.
struct Place {
    int key, row;
    i64 first;
    bool exists;

    __device__ __forceinline__ Place(const AppendParams& p, int batch, int n) {
        const Growth growth(p, batch);
        key = row = growth.before + n;
        first = batch;
        exists = growth.fits;
        if (exists && p.page_table) {
            const int slot = int(u64(u32(key)) * p.page_magic >> p.page_shift);
            first = p.page_table[i64(batch) * p.max_pages + slot];
            row = key - slot * p.page_size;
            exists = u32(first) < u32(p.pages);  // if not, the rows that see the key become NaN
        }
    }
};

// The angles of one position. Those of -n are the negative ones of n; of a position that the table does not have they are NaN.
template <class T> struct Rotation {
    using Real = decltype(Element<T>::load(nullptr, 0));
    const AppendParams& p;
    int position;

    __device__ __forceinline__ Real entry(const void* table, i64 at) const {
        return p.table_float ? Real(static_cast<const float*>(table)[at]) : Real(Element<T>::load(table, at));
    }

    __device__ __forceinline__ void turn(typename Element<T>::Raw& first, typename Element<T>::Raw& second, int pair) const {
        const i64 row = position < 0 ? -position : position;
        Real c = __int_as_float(0x7fffffff), s = c;
        if (row < p.positions) {
            c = entry(p.cos, row * p.cos_row + pair * p.cos_column);
            s = entry(p.sin, row * p.sin_row + pair * p.sin_column);
        }
        if (position < 0) s = -s;
        const Real x = Element<T>::load(&first, 0), y = Element<T>::load(&second, 0);
        Element<T>::store(&first, 0, x * c - y * s);
        Element<T>::store(&second, 0, y * c + x * s);
    }
};

// The one or two chunks of a unit, read before it is known where they go: looking that up takes as long.
template <class T, int N> struct Unit {
    static constexpr bool PAIRS_INSIDE = N > 1;  // of interleaved features
    int number, first, second;  // chunks; second is -1 if there is none
    Chunk<T, N> a, b;

    __device__ __forceinline__ Unit(const Row<T, N>& from, int number, int pairs, bool interleaved)
        : number(number), first(number), second(-1) {
        if (pairs > 0 && !(interleaved && PAIRS_INSIDE)) {
            const int turned = pairs / N;  // units of two chunks; behind them come features that stay as they are
            if (number >= turned) first = number + turned;
            else if (interleaved) first = 2 * number, second = first + 1;
            else second = number + turned;
        }
        a = from.chunk(first);
        if (second >= 0) b = from.chunk(second);
    }

    __device__ __forceinline__ void turn(const Rotation<T>& rotation, int pairs) {
        if (second >= 0) {
#pragma unroll
            for (int i = 0; i < N; ++i) rotation.turn(a.x[i], b.x[i], number * N + i);
        } else if (PAIRS_INSIDE && rotation.p.interleaved) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i)
                if (number * (N / 2) + i < pairs) rotation.turn(a.x[2 * i], a.x[2 * i + 1], number * (N / 2) + i);
        }
    }

    __device__ __forceinline__ void store(const Row<T, N>& to) const {
        to.chunk(first) = a;
        if (second >= 0) to.chunk(second) = b;
    }
};

// A unit of a new key (pairs > 0: turned) or value.
template <class T, int N> __device__ __forceinline__ void append_unit(
    const AppendParams& p, const void* source, const Strides& source_stride, void* cache, const Strides& stride, u32 at, u32 units,
    int pairs) {
    const u32 row = at / units, token = row / u32(p.heads_kv);
    const int head = row % u32(p.heads_kv), batch = token / u32(p.new_keys), n = token % u32(p.new_keys);
    Unit<T, N> unit(Row<T, N>(source, source_stride, batch, n, head), at % units, pairs, p.interleaved);
    const Place to(p, batch, n);
    if (!to.exists) return;
    if constexpr (!same<T, E4m3>)  // whose numbers are only copied
        if (pairs > 0) unit.turn(Rotation<T>{p, to.key}, pairs);
    unit.store(Row<T, N>(cache, stride, to.first, to.row, head));
}

// Quantizes a row of new keys (pairs > 0: turned) or values: one warp, whose lanes have every 32nd number.
template <class T> __device__ __forceinline__ void quantize_row(
    const AppendParams& p, const void* source, const Strides& source_stride, void* cache, const Strides& stride, float* scales,
    const Strides& scale_stride, bool by_token, float factor, u32 at, int columns, int pairs) {
    constexpr int EACH = MOST_COLUMNS / 32;
    const u32 row = at / 32, token = row / u32(p.heads_kv);
    const int lane = at % 32, head = row % u32(p.heads_kv), batch = token / u32(p.new_keys), n = token % u32(p.new_keys);
    const Place to(p, batch, n);
    if (!to.exists) return;
    const Row<T, 1> from(source, source_stride, batch, n, head);
    const Rotation<T> rotation{p, to.key};
    float x[EACH], top = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int column = lane + 32 * i;
        x[i] = 0.0f;
        if (column < columns) {
            Chunk<T, 1> own = from.chunk(column);
            if (column < 2 * pairs) {
                const bool first = p.interleaved ? column % 2 == 0 : column < pairs;
                Chunk<T, 1> other = from.chunk(p.interleaved ? column ^ 1 : first ? column + pairs : column - pairs);
                rotation.turn(first ? own.x[0] : other.x[0], first ? other.x[0] : own.x[0], p.interleaved ? column / 2 : column % pairs);
            }
            x[i] = float(Element<T>::load(own.x, 0));
        }
        top = fmaxf(top, fabsf(x[i]));  // passes over NaN
    }
    const i64 place = to.first * scale_stride.batch + to.row * scale_stride.row + head * scale_stride.head;
    float scale = scales && !by_token ? scales[place] : factor;
    if (by_token) {
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
        scale = fmaxf(top / 448.0f, 1.175494351e-38f);  // a row of zeros has one as well
        if (lane == 0) scales[place] = scale;
    }
    const Row<E4m3, 1> codes(cache, stride, to.first, to.row, head);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (lane + 32 * i < columns) Element<E4m3>::store(codes.chunk(lane + 32 * i).x, 0, x[i] / scale);
}

template <class T, int N> __device__ __forceinline__ void query_unit(const AppendParams& p, u32 at) {
    const u32 row = at / p.q_units, token = row / u32(p.heads_q);
    const int head = row % u32(p.heads_q), batch = token / u32(p.q_rows), r = token % u32(p.q_rows);
    Unit<T, N> unit(Row<T, N>(p.q, p.q_stride, batch, r, head), at % p.q_units, p.pairs, p.interleaved);
    const Growth growth(p, batch);
    unit.turn(Rotation<T>{p, p.upper_left ? r : growth.after - p.q_rows + r}, p.pairs);
    unit.store(Row<T, N>(p.q_turned, Strides{0, p.head_dim, 0, 1}, 0, row, 0));
}

// Kv: the caches' type, T or E4m3.
template <class T, class Kv = T> __device__ __forceinline__ void kv_append(const AppendParams& p) {
    constexpr bool QUANTIZES = !same<T, Kv>;
    constexpr int N = 16 / sizeof(typename Element<T>::Raw);
    u32 at = blockIdx.x * APPEND_THREADS + threadIdx.x;
    let_next_kernel_begin();
    wait_for_kernel_before();
    if (at < p.k_total) {
        if constexpr (QUANTIZES)
            quantize_row<T>(
                p, p.k_new, p.k_new_stride, p.k, p.k_stride, p.k_scale, p.k_scale_stride, p.k_by_token, p.k_factor, at, p.head_dim,
                p.pairs);
        else if (p.k_vector) append_unit<T, N>(p, p.k_new, p.k_new_stride, p.k, p.k_stride, at, p.k_units, p.pairs);
        else append_unit<T, 1>(p, p.k_new, p.k_new_stride, p.k, p.k_stride, at, p.k_units, p.pairs);
        return;
    }
    at -= p.k_total;
    if (at < p.v_total) {
        if constexpr (QUANTIZES)
            quantize_row<T>(
                p, p.v_new, p.v_new_stride, p.v, p.v_stride, p.v_scale, p.v_scale_stride, p.v_by_token, p.v_factor, at, p.head_dim_v, 0);
        else if (p.v_vector) append_unit<T, N>(p, p.v_new, p.v_new_stride, p.v, p.v_stride, at, p.v_units, 0);
        else append_unit<T, 1>(p, p.v_new, p.v_new_stride, p.v, p.v_stride, at, p.v_units, 0);
        return;
    }
    at -= p.v_total;
    if constexpr (!same<T, E4m3>) {
        if (at < p.q_total) {
            if (p.q_vector) query_unit<T, N>(p, at);
            else query_unit<T, 1>(p, at);
            return;
        }
        at -= p.q_total;
    }
    if (at < p.lengths_total) p.lengths_after[at] = Growth(p, at).after;
}

// The bodies of PTX instructions that sm_90 has: barriers in shared memory, and products of four warps that run on their own.
#include "sm90.hpp"

#include <map>

#include "emulator.hpp"
#include "memory.hpp"
#include "numbers.hpp"

namespace emulator {

// ---- mbarriers ----------------------------------------------------------------------------------------------------------

struct Bulk {  // a copy that completes on a mbarrier
    Access by;
    std::vector<Copy> parts;
};

struct Phases {
    int count, pending;  // arrivals that complete a phase, and that are left of the current one
    long bytes;          // of bulk copies that it waits for; below 0 where they are ahead of what is to be expected
    unsigned phase;
    std::vector<Bulk> copies;            // of the current phase
    std::vector<int> told, told_before;  // by those who have arrived, in the current phase and in the last one
};
static std::map<unsigned, Phases> mbarriers;  // by place

static Phases& mbarrier_at(unsigned address, const char* what) {
    read_shared(address, 8, what);  // who does not know of its beginning is in a race with it
    const auto found = mbarriers.find(place(address));
    if (found == mbarriers.end()) fail("%s: there is no mbarrier at %u", what, address);
    return found->second;
}

// Complete the phase if nothing is left of it.
static void try_to_complete(unsigned address, Phases& b) {
    if (b.pending > 0 || b.bytes != 0) return;
    for (const Bulk& copy : b.copies) {
        for (const Copy& c : copy.parts) {
            for (unsigned i = c.to / 4; i < (c.to + c.bytes) / 4; ++i) words[i].under_way = false, words[i].bulk = true;
            fill(c);
        }
        if (b.told[copy.by.thread] < copy.by.interval) b.told[copy.by.thread] = copy.by.interval;
    }
    bulk_copies -= b.copies.size();
    b.copies.clear();
    b.told_before = b.told, b.pending = b.count, ++b.phase;
    b.told.assign(MOST_THREADS, 0);
    for (int other = 0; other < thread_count; ++other)
        if (threads[other].state == State::WAITS_FOR_PHASE && threads[other].waits_on == place(address))
            threads[other].state = State::READY;
}

static void arrive(unsigned address, const char* what, unsigned bytes = 0) {
    Phases& b = mbarrier_at(address, what);
    if (b.pending == 0) fail("%s: more than %d arrivals in a phase", what, b.count);
    tell(b.told.data());
    --b.pending, b.bytes += bytes;
    try_to_complete(address, b);
}

// ---- bulk copies --------------------------------------------------------------------------------------------------------

// Tensor cores and bulk copies see what has been written if the writer, or somebody later who knows of it, has put a fence behind it.
static void check_fence(unsigned address, const char* what) {
    const Word& word = words[place(address) / 4];
    const Access& w = word.written;
    if (w.thread < 0 || word.bulk) return;
    if (known_to_tensor_cores[current][w.thread] < w.interval && known_to_tensor_cores[w.thread][w.thread] < w.interval)
        fail("%s shared memory at %u, thread %d wrote it, no fence.proxy.async in between", what, address, w.thread);
}

// Pieces of 16 bytes; their places hold NaN until the phase is completed, and only then are the sources read. The copy is an interval of
// its own.
static void begin_bulk(std::vector<Copy> parts, unsigned barrier, const char* what) {
    Phases& b = mbarrier_at(barrier, what);
    const int interval = ++known[current][current];
    for (Copy& c : parts) {
        if (c.read > 0) read_global(c.from, c.read, what, 1);
        check_fence(c.to, "a bulk copy writes");
        memset(write_shared(c.to, 16, what, true), 0xff, 16);
        c.to = place(c.to);
        b.bytes -= 16;
    }
    b.copies.push_back({{current, interval}, std::move(parts)});
    ++known[current][current];
    ++bulk_copies;
    try_to_complete(barrier, b);
}

struct Map {  // mirrored in emulate.py
    const unsigned char* address;
    unsigned long long stride[4];  // bytes, from dimension 1 on
    unsigned size[5], box[5];
    unsigned rank, item_bytes, swizzle_bytes;  // 0, 32, 64 or 128
};

static const Map& map_at(const void* map, const char* what) {
    if (reinterpret_cast<uintptr_t>(map) % 64 != 0) fail("%s: a tensor map at no multiple of 64", what);
    return *static_cast<const Map*>(map);
}

// A box of an array, line by line; what is outside becomes 0. In a line, 16-byte pieces are exchanged by the address.
static void copy_box(unsigned to, const void* map, const int (&first)[5], unsigned rank, unsigned barrier) {
    const char* what = "cp.async.bulk.tensor";
    const Map& m = map_at(map, what);
    if (m.rank != rank) fail("%s: of %u dimensions, the map has %u", what, rank, m.rank);
    if (to % 128 != 0) fail("%s: misaligned, shared memory at %u is no multiple of 128", what, to);
    unsigned lines = 1;
    for (unsigned n = 1; n < rank; ++n) lines *= m.box[n];
    const unsigned line_bytes = m.box[0] * m.item_bytes, swizzled = m.swizzle_bytes / 16 - (m.swizzle_bytes > 0);
    std::vector<Copy> parts;
    for (unsigned line = 0; line < lines; ++line) {
        const unsigned char* from = m.address;
        bool inside = true;
        for (unsigned n = 1, rest = line; n < rank; rest /= m.box[n++]) {
            const long at = first[n] + long(rest % m.box[n]);
            inside = inside && at >= 0 && at < long(m.size[n]);
            from += at * m.stride[n - 1];
        }
        for (unsigned piece = 0; piece < line_bytes; piece += 16) {
            const long column = first[0] + long(piece / m.item_bytes);
            if (column < 0) fail("%s: column %ld; the emulator knows those from 0 on", what, column);
            const long there = inside ? (long(m.size[0]) - column) * m.item_bytes : 0;
            const unsigned at = to + line * line_bytes + piece;
            const int read = there < 0 ? 0 : there > 16 ? 16 : there;
            parts.push_back({at ^ (at >> 7 & swizzled) << 4, from + column * m.item_bytes, 16, read});
        }
    }
    begin_bulk(std::move(parts), barrier, what);
}

// ---- wgmma --------------------------------------------------------------------------------------------------------------

constexpr int WARPGROUP = 4 * WARP;
constexpr unsigned POISON = 0x7fa0dead;  // what D holds meanwhile: a NaN that becomes another one wherever it is computed with

struct Sums {  // of one D, which some products that are under way add to
    std::vector<float*> at;
    std::vector<float> values;
    int products;
};

struct Kind {                  // what all threads of a warpgroup must agree on
    unsigned long long a, b;  // descriptors; a: 0 if A is in registers
    int columns;
    bool bfloat, adds, transposed_a, transposed;
    bool operator==(const Kind& k) const {
        return a == k.a && b == k.b && columns == k.columns && bfloat == k.bfloat && adds == k.adds && transposed_a == k.transposed_a &&
            transposed == k.transposed;
    }
};

struct Product {
    Kind kind;
    const unsigned* a_at[4];  // null if A is in shared memory
    unsigned a[4];
    float* d;  // names the sums
};

struct Products {  // of one thread, oldest first
    std::vector<Product> all;
    std::vector<size_t> groups;  // number of products in each committed group
    size_t open, begun;          // products of no group yet; that there were so far
    std::vector<Sums> sums;

    Sums& of(const float* d) {
        for (Sums& s : sums)
            if (s.at[0] == d) return s;
        fail("no sums");
    }
};
static Products products[MOST_THREADS];
static std::vector<Kind> begun[MOST_THREADS / WARPGROUP];  // by each warpgroup

void reset_sm90() {
    mbarriers.clear();
    bulk_copies = 0;
    for (Products& p : products) p.all.clear(), p.groups.clear(), p.sums.clear(), p.open = p.begun = 0;
    for (auto& kinds : begun) kinds.clear();
}

// Where element k of column n of B lies, or of row n of A: rows of 128, 64 or 32 bytes, in groups of 8, of which 16-byte pieces are
// exchanged.
static unsigned element(unsigned long long descriptor, bool transposed, int k, int n) {
    const auto bytes = [descriptor](int shift) { return unsigned(descriptor >> shift & 0x3fff) << 4; };
    const unsigned mode = descriptor >> 62, row_bytes = 256 >> mode, swizzled = row_bytes / 16 - 1;
    const unsigned start = bytes(0), block_stride = bytes(16), group_stride = bytes(32);
    if (mode == 0) fail("wgmma: a descriptor without swizzle; 1, 2 and 3, for 128, 64 and 32 bytes, are known");
    if (descriptor >> 49 & 7 || start >> 7 & swizzled) fail("wgmma: the matrix at %u does not begin with a group of 8 rows", start);
    const int row = transposed ? k : n, column = transposed ? n : k, per_row = row_bytes / 2;
    const unsigned at = start + column / per_row * block_stride + row / 8 * group_stride + row % 8 * row_bytes + column % per_row * 2;
    return at ^ (at >> 7 & swizzled) << 4;
}

static void read_by_tensor_cores(unsigned address) {
    read_shared(address / 16 * 16, 16, "wgmma");
    check_fence(address, "wgmma reads");
}

template <class T> static double read_number(unsigned at) {
    if (at % 16 == 0) read_by_tensor_cores(at);
    b16 x;
    memcpy(&x, smem + place(at), 2);
    return number<T>(x);
}

// Complete the same product of the 32 threads of the current warp; sums are exact and rounded once.
template <class T> static void complete(const Kind& kind, int first) {
    static double A[16][16], B[16][256];
    for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < kind.columns; ++n) B[k][n] = read_number<T>(element(kind.b, kind.transposed, k, n));
        for (int row = 0; row < 16 && kind.a; ++row) 
            A[row][k] = read_number<T>(element(kind.a, kind.transposed_a, k, first % WARPGROUP / 2 + row));
    }
    for (int lane = 0; lane < WARP && !kind.a; ++lane) {
        const Product& p = products[first + lane].all.front();
        for (int i = 0; i < 4; ++i) {
            if (*p.a_at[i] != p.a[i]) fail("registers of A have changed while wgmma.mma_async was under way, in thread %d", first + lane);
            for (int e = 0; e < 2; ++e) A[lane / 4 + i % 2 * 8][2 * (lane % 4) + e + i / 2 * 8] = number<T>(p.a[i] >> 16 * e & 0xffff);
        }
    }
    for (int lane = 0; lane < WARP; ++lane) {
        Products& own = products[first + lane];
        Sums& sums = own.of(own.all.front().d);
        for (int i = 0; i < kind.columns / 2; ++i) {
            const int row = lane / 4 + 8 * (i >> 1 & 1), column = 8 * (i / 4) + 2 * (lane % 4) + (i & 1);
            double sum = kind.adds ? double(sums.values[i]) : 0.0;
            for (int k = 0; k < 16; ++k) sum += A[row][k] * B[k][column];
            sums.values[i] = float(sum);
        }
        --sums.products, --threads[first + lane].products;
        own.all.erase(own.all.begin());
    }
}

// Give registers what was computed for them, where nothing is under way any more.
static void hand_over(int thread) {
    auto& sums = products[thread].sums;
    for (size_t n = 0; n < sums.size();) {
        Sums& s = sums[n];
        if (s.products > 0) {
            ++n;
            continue;
        }
        for (size_t i = 0; i < s.at.size(); ++i) {
            if (bits<unsigned>(*s.at[i]) != POISON)
                fail("registers of D have changed while wgmma.mma_async was under way, in thread %d", thread);
            *s.at[i] = s.values[i];
        }
        sums.erase(sums.begin() + n);
    }
}

}  // namespace emulator

namespace ptx {

using namespace emulator;

void mbarrier_init_shared_cta_b64(b32 barrier, int count) {
    write_shared(barrier, 8, "mbarrier.init");
    if (count <= 0) fail("mbarrier.init: a count of %d", count);
    mbarriers[place(barrier)] = {count, count, 0, 0, {}, std::vector<int>(MOST_THREADS), std::vector<int>(MOST_THREADS)};
}

void mbarrier_arrive_shared_cta_b64(b32 barrier) { arrive(barrier, "mbarrier.arrive"); }
void mbarrier_arrive_expect_tx_shared_cta_b64(b32 barrier, b32 bytes) { arrive(barrier, "mbarrier.arrive", bytes); }

void prefetch_tensormap(const void* map) { map_at(map, "prefetch.tensormap"); }
void cp_async_bulk_tensor_3d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    b32 to, const void* map, int x, int y, int z, b32 barrier, unsigned long long) {
    copy_box(to, map, {x, y, z}, 3, barrier);
}
void cp_async_bulk_tensor_4d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    b32 to, const void* map, int x, int y, int z, int u, b32 barrier, unsigned long long) {
    copy_box(to, map, {x, y, z, u}, 4, barrier);
}
void cp_async_bulk_tensor_5d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    b32 to, const void* map, int x, int y, int z, int u, int v, b32 barrier, unsigned long long) {
    copy_box(to, map, {x, y, z, u, v}, 5, barrier);
}

void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(b32 to, const void* from, b32 bytes, b32 barrier) {
    const char* what = "cp.async.bulk";
    if (bytes % 16 != 0 || to % 16 != 0) fail("%s: %u bytes to %u; both must be multiples of 16", what, bytes, to);
    std::vector<Copy> parts;
    for (unsigned i = 0; i < bytes; i += 16) parts.push_back({to + i, static_cast<const unsigned char*>(from) + i, 16, 16});
    begin_bulk(std::move(parts), barrier, what);
}

// At once: a test with several blocks cannot tell, and what comes later in this one waits for it or overwrites what was read.
void cp_reduce_async_bulk_global_shared_cta_bulk_group_add_f32(void* to, b32 from, b32 bytes) {
    const char* what = "cp.reduce.async.bulk";
    if (bytes % 16 != 0 || from % 16 != 0) fail("%s: %u bytes from %u; both must be multiples of 16", what, bytes, from);
    for (b32 i = 0; i < bytes; i += 16) {
        const auto* x = reinterpret_cast<const float*>(read_shared(from + i, 16, what));
        check_fence(from + i, "a bulk copy reads");
        auto* sum = reinterpret_cast<float*>(static_cast<unsigned char*>(to) + i);
        read_global(sum, 16, what, 16);
        for (int n = 0; n < 4; ++n) sum[n] += x[n];
    }
}

// The copies are complete now; those who wait for the phase cannot tell, and those who do not are in a race with them.
void cp_async_mbarrier_arrive_noinc_shared_cta_b64(b32 barrier) {
    Copies& own = copies[current];
    complete_copies(own.all.size());
    own.groups.clear(), own.open = 0;
    arrive(barrier, "cp.async.mbarrier.arrive");
}

void mbarrier_try_wait_parity_shared_cta_b64(bool& done, b32 barrier, b32 parity) {
    const Phases& b = mbarrier_at(barrier, "mbarrier.try_wait");
    while ((b.phase & 1) == parity) {
        threads[current].at = "mbarrier.try_wait", threads[current].waits_on = place(barrier);
        wait(State::WAITS_FOR_PHASE);
    }
    learn(known[current], b.told_before.data());
    done = true;
}

b32 cluster_ctarank() { return rank(); }
void mapa_shared_cluster_u32(b32& there, b32 here, b32 rank) { there = here + (rank + 1) * WINDOW; }

// What lies in the shared memory of a block that still runs.
static const float* read_cluster(b32 from, int bytes) {
    const char* what = "ld.shared::cluster";
    const auto* numbers = reinterpret_cast<const float*>(read_shared(from, bytes, what));
    const Thread* first = threads + place(from) / WINDOW * block_threads;
    for (const Thread* t = first; t < first + block_threads; ++t)
        if (t->state != State::DONE) return numbers;
    fail("%s reads shared memory at %u of a block that has ended", what, place(from) % WINDOW);
}

void ld_shared_cluster_v2_f32(float& x, float& y, b32 from) {
    const float* numbers = read_cluster(from, 8);
    x = numbers[0], y = numbers[1];
}
void ld_shared_cluster_v4_f32(float& x, float& y, float& z, float& w, b32 from) {
    const float* numbers = read_cluster(from, 16);
    x = numbers[0], y = numbers[1], z = numbers[2], w = numbers[3];
}
void barrier_cluster_wait_acquire_aligned() { barrier("barrier.cluster", false, MOST_BLOCKS * BARRIERS, thread_count); }

void fence_proxy_async_shared_cta() { memcpy(known_to_tensor_cores[current], known[current], sizeof(int) * thread_count); }

void begin_wgmma(const Wgmma& operands, int columns, bool bfloat) {
    Products& own = products[current];
    const bool of_memory = operands.a_count == 0;
    const unsigned long long* rest = operands.rest + of_memory;  // from the descriptor of B on
    const bool transposed_a = of_memory && rest[4] != 0;
    const Kind kind = {of_memory ? operands.rest[0] : 0, rest[0], columns, bfloat, rest[1] != 0, transposed_a, rest[4 + of_memory] != 0};
    if (rest[2] != 1 || rest[3] != 1) fail("wgmma: only signs of 1 are known");
    auto& kinds = begun[current / WARPGROUP];
    if (own.begun == kinds.size()) kinds.push_back(kind);
    if (!(kinds[own.begun++] == kind)) fail("wgmma.mma_async: the threads of its warpgroup do not agree on the descriptor or on the kind");
    Product p = {kind, {}, {}, operands.d[0]};
    for (int i = 0; i < operands.a_count; ++i) p.a_at[i] = operands.a[i], p.a[i] = *operands.a[i];
    Sums* sums = nullptr;
    for (Sums& s : own.sums)
        if (s.at[0] == p.d) sums = &s;
    if (!sums) {
        own.sums.push_back({{operands.d, operands.d + operands.d_count}, {}, 0});
        sums = &own.sums.back();
        for (float* d : sums->at) sums->values.push_back(*d), *d = bits<float>(POISON);
    }
    if (sums->at.size() != size_t(operands.d_count)) fail("wgmma.mma_async: another one that is under way has a part of its D");
    ++sums->products, ++threads[current].products;
    own.all.push_back(p);
    ++own.open;
}

void wgmma_commit_group_sync_aligned() {
    Products& own = products[current];
    own.groups.push_back(own.open);
    own.open = 0;
}

// B is read only now. All threads of the warp have waited, so that none reads it any more.
void wgmma_wait_group_sync_aligned(int left) {
    threads[current].in[0] = left;
    with_warp("wgmma.wait_group", [](Thread* lanes) {
        const int first = current / WARP * WARP;
        for (int lane = 0; lane < WARP; ++lane) {
            const Products &p = products[first], &other = products[first + lane];
            if (lanes[lane].in[0] != lanes[0].in[0] || other.groups != p.groups || other.all.size() != p.all.size())
                fail("wgmma.wait_group: thread %d has begun other products than thread %d, or waits for others", first + lane, first);
        }
        auto& groups = products[first].groups;
        while (groups.size() > lanes[0].in[0]) {
            for (size_t n = groups.front(); n > 0; --n) {
                const Kind kind = products[first].all.front().kind;
                if (kind.bfloat) complete<Bfloat>(kind, first);
                else complete<Half>(kind, first);
            }
            for (int lane = WARP - 1; lane >= 0; --lane) products[first + lane].groups.erase(products[first + lane].groups.begin());
        }
        for (int lane = 0; lane < WARP; ++lane) hand_over(first + lane);
        meet(first, WARP);
    });
}

}  // namespace ptx

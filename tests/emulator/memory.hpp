// Memory as the block's threads may use it: checks of shared and global accesses, and copies that take their time.
//
// Shared memory: each block of a cluster has a window of it; addresses within the first one are of the thread's own block. Every word knows
// who wrote it last, who has read it since, and in which of his intervals (threads.hpp). Two threads that
// touch a word, one of them writing, where the later one does not know of the earlier one's interval are a race, also where the order
// in which fibers happen to run hides it.
// Global memory: what copy instructions read must lie in one of the call's arrays. Plain C++ accesses cannot be seen one by one;
// the arrays lie between pages without access (see guarded.py), and a fault there ends the launch.
#pragma once
#include <csignal>
#include <cstdint>
#include <vector>

#include "threads.hpp"

constexpr int WINDOW = 256 << 10;  // of a block, which has 227 KiB at most
extern "C" {
alignas(1024) inline unsigned char smem[emulator::MOST_BLOCKS * WINDOW];  // the name that kernels give their dynamic shared memory
}

namespace emulator {

struct Range {  // of an array in global memory
    const char* name;
    const unsigned char *begin, *end;
};

struct Access {
    int thread, interval;
    bool is_known() const { return thread == current || known[current][thread] >= interval; }
};

struct Word {                   // of shared memory
    Access written;             // by thread -1: never
    bool under_way;             // an asynchronous copy into it has not been waited for
    bool bulk;                  // it was a bulk copy that wrote it
    std::vector<Access> reads;  // since then, one a thread
};

struct Copy {
    unsigned to;
    const void* from;
    int bytes, read;  // the rest becomes 0
};

struct Copies {  // of one thread, oldest first
    std::vector<Copy> all;
    std::vector<size_t> groups;  // number of copies in each committed group
    size_t open;                 // copies of no group yet
};

inline int shared_bytes, range_count;
inline const Range* ranges;
inline Word words[MOST_BLOCKS * WINDOW / 4];
inline Copies copies[MOST_THREADS];

inline void reset_memory(int blocks) {
    for (int start = 0; start < blocks * WINDOW; start += WINDOW) {
        memset(smem + start, 0xff, shared_bytes);  // NaN
        for (Word* w = words + start / 4; w < words + (start + shared_bytes) / 4; ++w)
            w->written = {-1, 0}, w->under_way = w->bulk = false, w->reads.clear();
    }
    for (Copies& c : copies) c.all.clear(), c.groups.clear(), c.open = 0;
}

// ---- shared memory ------------------------------------------------------------------------------------------------------

// Where an address of the current thread is in `smem`: in its block's window, or from WINDOW on in that of any block.
inline unsigned place(unsigned address) { return address < WINDOW ? address + rank() * WINDOW : address - WINDOW; }

inline void check_shared(unsigned address, int bytes, const char* what) {
    if (place(address) % WINDOW + size_t(bytes) > size_t(shared_bytes) || int(place(address) / WINDOW) >= thread_count / block_threads)
        fail("%s: out of bounds, shared memory at %u, but the block has %d bytes", what, address, shared_bytes);
    if (address % bytes != 0) fail("%s: misaligned, shared memory at %u is no multiple of %d", what, address, bytes);
}

inline const unsigned char* read_shared(unsigned address, int bytes, const char* what) {
    check_shared(address, bytes, what);
    const unsigned start = place(address);
    for (unsigned i = start / 4; i < (start + bytes + 3) / 4; ++i) {
        Word& w = words[i];
        if (w.under_way)
            fail("%s reads shared memory at %u, where thread %d copies to and has not waited", what, 4 * i % WINDOW, w.written.thread);
        if (w.written.thread >= 0 && !w.written.is_known())
            fail("race: %s reads shared memory at %u, thread %d wrote it, no barrier in between", what, 4 * i % WINDOW, w.written.thread);
        Access* own = nullptr;
        for (Access& read : w.reads)
            if (read.thread == current) own = &read;
        if (own) own->interval = known[current][current];
        else w.reads.push_back({current, known[current][current]});
    }
    return smem + start;
}

inline unsigned char* write_shared(unsigned address, int bytes, const char* what, bool under_way = false) {
    check_shared(address, bytes, what);
    const unsigned start = place(address);
    for (unsigned i = start / 4; i < (start + bytes + 3) / 4; ++i) {
        Word& w = words[i];
        if (w.under_way)
            fail("%s writes shared memory at %u, where thread %d copies to and has not waited", what, 4 * i % WINDOW, w.written.thread);
        if (w.written.thread >= 0 && !w.written.is_known())
            fail("race: %s writes shared memory at %u, thread %d wrote it, no barrier in between", what, 4 * i % WINDOW, w.written.thread);
        for (const Access& read : w.reads)
            if (!read.is_known())
                fail("race: %s writes shared memory at %u, thread %d read it, no barrier in between", what, 4 * i % WINDOW, read.thread);
        w.written = {current, known[current][current]}, w.under_way = under_way, w.bulk = false;
        w.reads.clear();
    }
    return smem + start;
}

// ---- global memory ------------------------------------------------------------------------------------------------------

// The array that an address belongs to, or the nearest one.
inline const Range& nearest(const void* address) {
    static const Range none{"null", nullptr, nullptr};
    const auto x = reinterpret_cast<intptr_t>(address);
    const Range* best = &none;
    intptr_t least = INTPTR_MAX;
    for (const Range* r = ranges; r < ranges + range_count; ++r) {
        const auto begin = reinterpret_cast<intptr_t>(r->begin), end = reinterpret_cast<intptr_t>(r->end);
        const intptr_t distance = x < begin ? begin - x : x >= end ? x - end + 1 : 0;
        if (distance < least) least = distance, best = r;
    }
    return *best;
}

inline long offset_in(const Range& r, const void* address) {
    return long(reinterpret_cast<intptr_t>(address) - reinterpret_cast<intptr_t>(r.begin));
}

// `alignment`: as many bytes as are read, unless it is given.
inline const void* read_global(const void* address, int bytes, const char* what, int alignment = 0) {
    if (alignment == 0) alignment = bytes;
    const Range& r = nearest(address);
    const long offset = offset_in(r, address), size = long(r.end - r.begin);
    if (offset < 0 || offset + bytes > size) fail("%s reads byte %ld of %s, which has %ld", what, offset, r.name, size);
    if (reinterpret_cast<uintptr_t>(address) % alignment != 0)
        fail("%s: misaligned, it reads byte %ld of %s, at no multiple of %d", what, offset, r.name, alignment);
    return address;
}

// A signal of the processor, or of a check that the compiler put in.
inline void on_signal(int signal, siginfo_t* info, void*) {
    if (signal == SIGILL || signal == SIGTRAP)
        fail("undefined in C++: an index out of bounds, an overflow of signed integers, or a misaligned access");
    const Range& r = nearest(info->si_addr);
    fail("accesses byte %ld of %s, which has %ld; inputs can only be read", offset_in(r, info->si_addr), r.name, long(r.end - r.begin));
}

// ---- asynchronous copies ------------------------------------------------------------------------------------------------

// `read` bytes and zeros up to `bytes`. The place holds NaN until the copy is waited for, and only then is the source read.
inline void begin_copy(unsigned to, const void* from, int bytes, int read, const char* what) {
    if (read > 0) read_global(from, bytes, what);
    memset(write_shared(to, bytes, what, true), 0xff, bytes);
    copies[current].all.push_back({place(to), from, bytes, read});
    ++copies[current].open;
}

inline void commit_copies() {
    copies[current].groups.push_back(copies[current].open);
    copies[current].open = 0;
}

inline void fill(const Copy& c) {
    memset(smem + c.to, 0, c.bytes);
    memcpy(smem + c.to, c.from, c.read);
}

// Complete the oldest of the current thread's copies.
inline void complete_copies(size_t count) {
    auto& all = copies[current].all;
    for (size_t n = 0; n < count; ++n) {
        const Copy& c = all[n];
        for (unsigned i = c.to / 4; i < (c.to + c.bytes) / 4; ++i)
            words[i].under_way = false, words[i].written.interval = known[current][current];
        fill(c);
    }
    all.erase(all.begin(), all.begin() + count);
}

// Complete the oldest groups until `left` are under way.
inline void wait_for_copies(size_t left) {
    Copies& own = copies[current];
    size_t count = 0;
    for (; own.groups.size() > left; own.groups.erase(own.groups.begin())) count += own.groups.front();
    complete_copies(count);
}

}  // namespace emulator

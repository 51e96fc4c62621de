// A block of decode.cu on sm_90a whose warpgroups do different things: two multiply, see decode_wgmma.cuh, and one loads.
#include "include/decode_load.cuh"
#include "include/decode_pair.cuh"
#include "include/decode_wgmma.cuh"
#include "include/early.cuh"
#include "include/ring.cuh"

// Of the block's threads, those who load.
template <class C> struct Loading : C {
    static constexpr int THREADS = C::THREADS - C::WORKERS;
    static __device__ __forceinline__ int load_thread() { return thread_index() - C::WORKERS; }
};

// What the thread has copied to the stage is there; on to the next one.
template <class C> __device__ __forceinline__ void hand_over(Ring<C>& ring) {
    async_proxy_fence();
    mbarrier_arrive(ring.full());
    ring.advance();
}

// The tile, when it is there.
template <class C> __device__ __forceinline__ Piece wait_for_tile(const Ring<C>& ring) {
    ring.wait_full();
    return Piece::load(C::piece_smem(ring.smem, ring.stage));
}

// Tiles are handed over when they are there, while LATE more are under way: it is those who load that wait for the copies, and not the
// workers, whose time is dearer.
template <class C> __device__ __forceinline__ void load_tiles(const DecodeParams& p, Ring<C> ring) {
    constexpr int LATE = 2;
    static_assert(C::STAGES >= LATE + 3, "a tile is handed over before the place of the one that follows LATE after it is free");
    Loader<Loading<C>> loader(p);
    if constexpr (C::PAIRED) wait_for_kernel_before();
    Ring<C> next = ring;  // to be handed over
    int under_way = 0;
#pragma unroll 1
    while (loader.more()) {
        const auto k = loader.k_loader();
        const auto v = loader.v_loader();
        bool ends;
        do {
            ends = loader.next.ends();
            ring.wait_empty();
            loader.load(k, v, ring.smem, ring.stage);
            copies_commit();
            ring.advance();
            if (under_way < LATE) {
                ++under_way;
            } else {
                copies_wait<LATE>();
                hand_over(next);
            }
        } while (!ends);
    }
    copies_wait<0>();
    for (; under_way > 0; --under_way) hand_over(next);
    ring.wait_empty();
    if (thread_index() == C::WORKERS) store_smem(C::piece_smem(ring.smem, ring.stage) + 12, Piece::QUIT);
    hand_over(next);
}

template <class C> __device__ __forceinline__ void work_on_tiles(const DecodeParams& p, Ring<C> ring) {
    GroupDecode<C> group(p);
    const Deal deal(p, UnitIndex<C::MASK, C::N>(p).total() * p.passes);
    if constexpr (C::PAIRED) {  // the block has one part, whose queries need not wait for its first tile
        const u32 pair = quotient(block_index() / 2, p.heads_at_once), lane = block_index() / 2 - pair * p.heads_at_once;
        const u32 batch = quotient(pair, p.passes);
        wait_for_kernel_before();
        group.load_queries(batch, (pair - batch * p.passes) * p.heads_at_once + lane, ring.smem);
    }
#pragma unroll 1
    while (true) {
        Piece piece = wait_for_tile(ring);
        if (uniform(piece.flags) & Piece::QUIT) return;
        if constexpr (!C::PAIRED) group.load_queries(piece.batch, piece.head, ring.smem);
        group.begin(piece, ring.smem);
        group.first_tile(piece, ring.stage_smem());
#pragma unroll 1
        while (!(uniform(piece.flags) & Piece::ENDS)) {
            const Ring<C> before = ring;
            ring.advance();
            piece = wait_for_tile(ring);
            group.tile(piece, ring.stage_smem(), before.stage_smem());
            before.release();
        }
        group.end(ring.stage_smem());
        C::sync();  // nobody reads keys and values of the part any more
        if constexpr (C::PAIRED) {
            group.place_part(ring.smem);
            cluster_barrier();
            merge_pair<C>(p, PackedRows(p, C::M, piece.batch, piece.head), ring.smem);
            cluster_barrier();  // nobody reads the shared memory of a block that is gone
            return;
        }
        if (uniform(piece.flags) & Piece::WHOLE) {
            gather_warps(p, group, piece, ring.smem, ring.stage_smem());
        } else {
            group.store_part(piece);
            if constexpr (C::MERGES) merge_if_last<C>(p, parts_of(p, deal, piece), piece, ring.smem);
        }
        ring.release();
        ring.advance();
    }
}

// Two warpgroups work, and a third one loads, with fewer registers.
template <class C> __device__ __forceinline__ void decode_in_groups(const DecodeParams& p, u32 smem) {
    static_assert(C::WORKERS == 256 && C::THREADS == 384, "of 504 registers for one thread of each group");
    if constexpr (!C::PAIRED) wait_for_kernel_before();  // else it needs no memory to find out what to read
    const Ring<C> ring{smem};
    if (threadIdx.x == 0) ring.init(C::THREADS - C::WORKERS, C::WORKERS / 32);
    __syncthreads();
    if (uniform(thread_index() / 128) == C::WORKERS / 128) {
        registers_lower<88>();
        load_tiles(p, ring);
        if constexpr (C::PAIRED) cluster_barrier(), cluster_barrier();  // they count all threads
    } else {
        registers_raise<208>();
        work_on_tiles(p, ring);
    }
}

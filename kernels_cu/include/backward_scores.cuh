// Weights and gradients of scores of 64 keys by OWN queries, in the registers of a warpgroup of backward_fa3.cu. A lane has two keys, 8
// apart, and of every 8 queries 2 (l % 4) and the next one.
#include "include/backward_load.cuh"
#include "include/wgmma.cuh"

template <class C> struct BackwardScores {
    using In = typename C::In;
    const BackwardParams& p;
    const int number;  // of the warpgroup
    const bool lead;   // the thread speaks for its warp
    const u32 smem;
    float S_rmem[C::OWN / 8][4], dP_rmem[C::OWN / 8][4];
    u32 P_rmem[C::OWN / 16][4], dS_rmem[C::OWN / 16][4];
    u32 seen_first;   // how far the thread's first query of a sequence is behind the first one that sees its first key
    u32 seen[2];      // queries that see each of its keys

    __device__ __forceinline__ BackwardScores(const BackwardParams& p, int number, u32 smem)
        : p(p), number(number), lead(thread_index() % 32 == 0), smem(smem) {}

    // Of the eight that multiply.
    static __device__ __forceinline__ int warp() { return thread_index() / 32 - 4; }

    // Its own part of the memory where dQ waits to be added, which is its at the end of a tile of keys, too.
    __device__ __forceinline__ u32 part_smem() const { return smem + C::DQ_SMEM + warp() * C::PART_BYTES; }

    // Until the warp may write what it adds next, of so many times before; all lanes.
    __device__ __forceinline__ void wait_for_part(u32 times) const {
        if constexpr (C::IN_ORDER) {
            parts(times).wait_empty();
        } else {
            if (lead) additions_wait();
            __syncwarp();
        }
    }

    // What the warp has written is to be added to its part of a tile of dQ: by the copy engine, or by the warp that knows the order.
    __device__ __forceinline__ void add_part(int tile, int part, u32 times) const {
        async_proxy_fence();
        __syncwarp();
        if (!lead) return;
        if constexpr (C::IN_ORDER) mbarrier_arrive(parts(times).full());
        else add_bytes(p.dq_sum + i64(tile) * (C::M * C::DQK) + part * (C::PART_BYTES / 4), part_smem(), C::PART_BYTES);
    }

    __device__ __forceinline__ Ring<typename C::PartStages> parts(u32 times) const { return {smem + C::DQ_SMEM, 0, times % 2}; }

    // Where seen_first is if in order: at D = 64 there is one register too few.
    __device__ __forceinline__ u32 seen_smem() const { return smem + C::SEEN_SMEM + (thread_index() - 128) * 4; }

    // Which queries see the thread's keys, of which the first one is this one of the block's.
    __device__ __forceinline__ void look(const KeyTile<C>& keys, int own_key) {
        const int key = keys.key + own_key;
        const KeyRange positions = keys.visible.positions_of_any(key, key);
        seen_first = u32(keys.seq.position + thread_index() % 4 * 2) - u32(positions.begin);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool there = key + 8 * r >= keys.seq.kv_start && key + 8 * r < keys.seq.kv_length;
            seen[r] = there ? u32(positions.end) - u32(positions.begin) : 0;
        }
        if (C::IN_ORDER) store_smem(seen_smem(), seen_first);
    }

    template <int N> static __device__ __forceinline__ void clear(float (&x)[N][4]) {
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) x[i][c] = 0.0f;
    }

    // Scores -> weights.
    // `first`: the first of these queries. lse_smem: the log-sum-exp of the thread's first one.
    template <bool MASKED> __device__ __forceinline__ void weigh(int first, u32 lse_smem) {
        const float scale = p.prefill.logit_scale;
#pragma unroll
        for (int j = 0; j < C::OWN / 8; ++j) {
            const float2 lse = load_smem_8(lse_smem + 32 * j);
#pragma unroll
            for (int c = 0; c < 4; ++c) S_rmem[j][c] = exp2_fast(fmaf(S_rmem[j][c], scale, c % 2 == 0 ? -lse.x : -lse.y));
        }
        if constexpr (MASKED) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 distance = u32(first) + (C::IN_ORDER ? load_smem_4(seen_smem()) : seen_first) - 8 * r;
#pragma unroll
                for (int j = 0; j < C::OWN / 8; ++j)
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        if (distance + 8 * j + c >= seen[r]) S_rmem[j][2 * r + c] = 0.0f;
            }
        }
    }

    // dP -> gradients of scores, and both they and the weights to operands. A weight of 0 has none, whatever dP is.
    template <bool MASKED> __device__ __forceinline__ void differentiate_scores(u32 delta_smem) {
#pragma unroll
        for (int j = 0; j < C::OWN / 8; ++j) {
            const float2 delta = load_smem_8(delta_smem + 32 * j);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float x = S_rmem[j][c] * (dP_rmem[j][c] - (c % 2 == 0 ? delta.x : delta.y));
                dP_rmem[j][c] = MASKED && S_rmem[j][c] == 0.0f ? 0.0f : x;
            }
        }
#pragma unroll
        for (int k = 0; k < C::OWN / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                P_rmem[k][i] = pack2<In>(S_rmem[2 * k + i / 2][i % 2 * 2], S_rmem[2 * k + i / 2][i % 2 * 2 + 1]);
                dS_rmem[k][i] = pack2<In>(dP_rmem[2 * k + i / 2][i % 2 * 2], dP_rmem[2 * k + i / 2][i % 2 * 2 + 1]);
            }
    }
};

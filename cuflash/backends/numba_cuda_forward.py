"""FlashAttention's first generation in Numba CUDA: the forward kernel of the fallback backend, and the merge of its splits.

Shared memory and barriers only, no warp intrinsics: the same source runs on any GPU and in Numba's simulator.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import config, cuda, int64

from .numba_cuda_logits import Instance, in_window, key_place, logit_function, reader, writer

CHUNK = 4 if config.ENABLE_CUDASIM else 64  # head elements that lie in shared memory at a time; the simulator pays for each
ROWS, HEADS = (1 << 62) - 1, (1 << 31) - 1  # "& ROWS" tells the compiler that an index is not negative (Python's x[-1])


@functools.lru_cache(maxsize=256)
def forward_kernel(instance: Instance) -> Any:
    """The forward kernel of one instance.

    A thread block computes ``tile.m`` packed rows of one sequence and key/value head against one split of its keys. Packed
    row r is query row r // group of head head_kv * group + r % group, so that keys are read once for the whole group.
    Steps of ``tile.n`` keys: scores; running maximum and sum; rescale the output; add P V (Dao et al. 2022, algorithm 1,
    with the loop over queries outside).
    """
    tile = instance.tile
    TX, RM, RN = tile.threads_x, tile.rows, tile.keys
    M, N, THREADS = tile.m, tile.n, tile.threads
    CHUNKS, CHUNKS_V = instance.chunks, instance.chunks_v
    RV = CHUNK // TX  # output columns of a chunk a thread
    COLUMNS = CHUNKS_V * RV
    PITCH, P_PITCH = CHUNK + 1, N + 1  # odd, so that a column lies in as many banks as it has rows
    SQDIST = instance.sqdist
    real, num = instance.real, instance.number
    INF, ZERO, HALF, ONE, HIDDEN = num(np.inf), num(0), num(0.5), num(1), num(-0.0)
    read, write, logit = reader(instance.storage), writer(instance.out), logit_function(instance)

    @cuda.jit
    def kernel(q, k, v, out, lse, partial, meta, page_table, page_size, bias, mask, mask_tail, slopes, sinks, scale, softcap, window_left,
               window_right, heads_kv, group, head_dim, head_dim_v, splits, split_keys, m_blocks, mods):
        A_smem = cuda.shared.array((M, PITCH), real)  # [row][element]: a chunk of Q
        B_smem = cuda.shared.array((N, PITCH), real)  # [key][element]: a chunk of K, then of V
        P_smem = cuda.shared.array((M, P_PITCH), real)  # [row][key]: weights; -0.0 marks a key that the row does not see
        row_smem = cuda.shared.array((M, TX), real)  # [row][tx]: partial maxima, then partial sums
        dirty_smem = cuda.shared.array(1, int64)  # the tile of V holds something that is not finite
        query_smem = cuda.shared.array((2, M), int64)  # query row within the sequence (-1: none) and head of each packed row
        key_smem = cuda.shared.array((2, N), int64)  # first two indices of each key's row in k and v (-1: none)
        s_rmem = cuda.local.array((RM, RN), real)
        o_rmem = cuda.local.array((RM, COLUMNS), real)
        m_rmem = cuda.local.array(RM, real)  # running maximum
        l_rmem = cuda.local.array(RM, real)  # running sum
        row_rmem = cuda.local.array(RM, int64)
        head_rmem = cuda.local.array(RM, int64)

        t = cuda.threadIdx.x & 1023  # tells the compiler that no index made of it is negative
        ty = t // TX
        tx = t % TX
        block = cuda.blockIdx.x & 0x7FFFFFFF
        split = block % splits
        block //= splits
        head_kv = (block % heads_kv) & HEADS
        block //= heads_kv
        m_block = m_blocks - 1 - block % m_blocks  # under a causal mask the last rows see most keys: they start first
        b = block // m_blocks

        q_begin, q_length, k_begin, kv_length = meta[0, b], meta[1, b], meta[2, b], meta[3, b]
        position, q_batch, k_batch = meta[5, b], meta[6, b], meta[7, b]
        rows = q_length * group
        first_row = m_block * M
        if first_row >= rows:
            return
        last_row = min(first_row + M, rows) - 1
        mask_shift = kv_length - q_length if mask_tail else 0

        # The keys that some row of this block may see, then this split's share of them.
        low, high = meta[4, b], kv_length
        if window_left >= 0:
            low = max(low, first_row // group + position - window_left)
        if window_right >= 0:
            high = min(high, last_row // group + position + window_right + 1)
        low = max(low, split * split_keys)
        high = min(high, (split + 1) * split_keys)

        for r in range(t, M, THREADS):
            packed = first_row + r
            query_smem[0, r] = packed // group if packed < rows else -1
            query_smem[1, r] = head_kv * group + packed % group
        cuda.syncthreads()
        for r in range(RM):
            row_rmem[r] = query_smem[0, ty * RM + r]
            head_rmem[r] = query_smem[1, ty * RM + r] & HEADS
            m_rmem[r] = -INF
            l_rmem[r] = ZERO
            for c in range(COLUMNS):
                o_rmem[r, c] = ZERO

        first_key = low
        while first_key < high:
            # Where this step's keys lie.
            for key in range(t, N, THREADS):
                j = first_key + key
                if j >= high:
                    key_smem[0, key] = -1
                else:
                    key_smem[0, key], key_smem[1, key] = key_place(page_table, page_size, b, j, k_batch, k_begin)
            cuda.syncthreads()

            # Scores, a chunk of the head at a time.
            for r in range(RM):
                for c in range(RN):
                    s_rmem[r, c] = ZERO
            for chunk in range(CHUNKS):
                base = chunk * CHUNK
                if CHUNKS > 1 or first_key == low:
                    for e in range(t, M * CHUNK, THREADS):
                        row, d = e // CHUNK, e % CHUNK
                        x = ZERO
                        if query_smem[0, row] >= 0 and base + d < head_dim:
                            x = read(q[q_batch, (q_begin + query_smem[0, row]) & ROWS, query_smem[1, row] & HEADS, base + d])
                        A_smem[row, d] = x
                for e in range(t, N * CHUNK, THREADS):
                    key, d = e // CHUNK, e % CHUNK
                    x = ZERO
                    if key_smem[0, key] >= 0 and base + d < head_dim:
                        x = read(k[key_smem[0, key], key_smem[1, key] & ROWS, head_kv, base + d])
                    B_smem[key, d] = x
                if t == 0:
                    dirty_smem[0] = 0
                cuda.syncthreads()
                for d in range(CHUNK):
                    if SQDIST:
                        factor = scale[min(base + d, head_dim - 1)]
                    for r in range(RM):
                        x = A_smem[ty * RM + r, d]
                        for c in range(RN):
                            if SQDIST:
                                y = x - B_smem[tx + c * TX, d]
                                s_rmem[r, c] -= factor * y * y
                            else:
                                s_rmem[r, c] += x * B_smem[tx + c * TX, d]
                cuda.syncthreads()

            # Logits, and each thread's part of the row maxima.
            for r in range(RM):
                row = row_rmem[r]
                h = head_rmem[r]
                i = row + position
                row_max = -INF
                for c in range(RN):
                    j = first_key + tx + c * TX
                    visible = j < high and row >= 0 and in_window(i, j, window_left, window_right)
                    x = -INF
                    if visible:
                        x = s_rmem[r, c]
                        if not SQDIST:
                            x *= scale[0]
                        x = logit(x, b, h, row, i, j, softcap, bias, slopes, mask, mask_shift, mods)
                    s_rmem[r, c] = x
                    if x > row_max or x != x:
                        row_max = x
                row_smem[ty * RM + r, tx] = row_max
            cuda.syncthreads()

            # Running maximum; what was there shrinks to it; weights relative to it.
            for r in range(RM):
                m_new = m_rmem[r]
                for c in range(TX):
                    x = row_smem[ty * RM + r, c]
                    if x > m_new or x != x:
                        m_new = x
                alpha = ONE
                if m_new != m_rmem[r]:
                    alpha = num(math.exp(m_rmem[r] - m_new))
                m_rmem[r] = m_new
                l_rmem[r] *= alpha
                for c in range(COLUMNS):
                    o_rmem[r, c] *= alpha
                row_sum = ZERO
                for c in range(RN):
                    p = HIDDEN
                    if s_rmem[r, c] != -INF:
                        p = num(math.exp(s_rmem[r, c] - m_new))
                        row_sum += p
                    P_smem[ty * RM + r, tx + c * TX] = p
                s_rmem[r, 0] = row_sum
            cuda.syncthreads()
            for r in range(RM):
                row_smem[ty * RM + r, tx] = s_rmem[r, 0]

            # Output, a chunk of the head at a time.
            for chunk in range(CHUNKS_V):
                base = chunk * CHUNK
                for e in range(t, N * CHUNK, THREADS):
                    key, d = e // CHUNK, e % CHUNK
                    x = ZERO
                    if key_smem[0, key] >= 0 and base + d < head_dim_v:
                        x = read(v[key_smem[0, key], key_smem[1, key] & ROWS, head_kv, base + d])
                        if not abs(x) < INF:
                            dirty_smem[0] = 1
                    B_smem[key, d] = x
                cuda.syncthreads()
                if dirty_smem[0] == 0:
                    for key in range(N):
                        for r in range(RM):
                            p = P_smem[ty * RM + r, key]
                            for c in range(RV):
                                o_rmem[r, chunk * RV + c] += p * B_smem[key, tx + c * TX]
                else:  # 0 * NaN is NaN: add only what the row sees
                    for key in range(N):
                        for r in range(RM):
                            p = P_smem[ty * RM + r, key]
                            if p != p or math.copysign(ONE, p) > ZERO:
                                for c in range(RV):
                                    o_rmem[r, chunk * RV + c] += p * B_smem[key, tx + c * TX]
                cuda.syncthreads()
            for r in range(RM):
                for c in range(TX):
                    l_rmem[r] += row_smem[ty * RM + r, c]
            first_key += N

        # Finish: divide by the sum. With splits, the state as it is goes to the merge, where the sink joins.
        for r in range(RM):
            row = row_rmem[r]
            if row >= 0:
                h = head_rmem[r]
                inverse, factor = ONE, ONE
                if splits > 1:
                    if tx == 0:
                        partial[split, q_batch, h, q_begin + row, head_dim_v] = m_rmem[r]
                        partial[split, q_batch, h, q_begin + row, head_dim_v + 1] = l_rmem[r]
                else:
                    m_end, l_end, row_lse = m_rmem[r], l_rmem[r], -INF
                    inverse = ZERO
                    if sinks.shape[0] > 0 and sinks[h] != -INF:
                        if sinks[h] > m_end:  # the root of the factor, applied twice: the factor itself may be too small a number
                            factor = num(math.exp((m_end - sinks[h]) * HALF))
                            m_end = sinks[h]
                        l_end = l_end * factor * factor + num(math.exp(sinks[h] - m_end))
                    if m_end != -INF:
                        row_lse = m_end + num(math.log(l_end))
                        inverse = factor / l_end
                        if not m_end < INF:  # +inf or NaN among the logits
                            row_lse = INF - INF
                            inverse = row_lse
                    if tx == 0 and lse.shape[0] > 0:
                        lse[q_batch, h, q_begin + row] = row_lse
                for c in range(COLUMNS):
                    d = c // RV * CHUNK + c % RV * TX + tx
                    if d < head_dim_v:
                        if splits > 1:
                            partial[split, q_batch, h, q_begin + row, d] = o_rmem[r, c]
                        else:
                            out[q_batch, q_begin + row, h, d] = write(o_rmem[r, c] * inverse * factor)

    return kernel


@functools.lru_cache(maxsize=256)
def combine_kernel(storage: str, out: str) -> Any:
    """Merge of the splits: one thread a row and output element; the sink joins here, once."""
    num = np.float64 if storage == "float64" else np.float32
    INF, ZERO, HALF = num(np.inf), num(0), num(0.5)
    write = writer(out)

    @cuda.jit
    def kernel(partial, out, lse, sinks, rows, heads_q, head_dim_v, splits, elements):
        e = cuda.grid(1)
        if e >= elements:
            return
        d = e % head_dim_v
        e //= head_dim_v
        h = e % heads_q
        e //= heads_q
        row = e % rows
        b = e // rows
        peak = -INF
        if sinks.shape[0] > 0:
            peak = sinks[h]
        for s in range(splits):
            m = partial[s, b, h, row, head_dim_v]
            if m > peak or m != m:
                peak = m
        x = ZERO
        total = ZERO
        if peak != -INF:
            if sinks.shape[0] > 0:
                total = num(math.exp(sinks[h] - peak))
            for s in range(splits):
                m = partial[s, b, h, row, head_dim_v]
                if m != -INF:
                    root = num(math.exp((m - peak) * HALF))  # applied twice: its square may be too small a number
                    total += partial[s, b, h, row, head_dim_v + 1] * root * root
                    x += partial[s, b, h, row, d] * root * root
            x /= total
        out[b, row, h, d] = write(x)
        if d == 0 and lse.shape[0] > 0:
            lse[b, h, row] = peak + num(math.log(total)) if peak != -INF else -INF

    return kernel

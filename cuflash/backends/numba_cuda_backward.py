"""The backward pass of the Numba CUDA fallback, by recomputation: nothing of size N x N is stored.

Two kernels, so that no gradient of q, k or v needs an atomic addition and every run gives the same bits: one owns a tile of
keys and walks over the queries (dk, dv, dbias), the other owns a tile of queries and walks over the keys (dq).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda, int64

from .numba_cuda_forward import CHUNK
from .numba_cuda_logits import Instance, logit_function, reader, slope_function, writer


@functools.lru_cache(maxsize=None)
def delta_kernel(instance: Instance, dout_storage: str) -> Any:
    """delta = rowsum(dO * O) - dLSE of each query row and head: what softmax's gradient subtracts. One thread a row."""
    num = instance.number
    ZERO, INF = num(0), num(np.inf)
    read_out, read_dout = reader(instance.out), reader(dout_storage)

    @cuda.jit
    def kernel(out, dout, lse, dlse, delta, rows, heads_q, head_dim_v, total):
        e = cuda.grid(1)
        if e >= total:
            return
        h = e % heads_q
        e //= heads_q
        row = e % rows
        b = e // rows
        x = ZERO
        if lse[b, h, row] != -INF:  # a row without keys passes nothing on, whatever dO holds
            for d in range(head_dim_v):
                x += num(read_dout(dout[b, row, h, d])) * num(read_out(out[b, row, h, d]))
            if dlse.shape[0] > 0:
                x -= dlse[b, h, row]
        delta[b, h, row] = x

    return kernel


@functools.lru_cache(maxsize=None)
def backward_kernel(instance: Instance, dout_storage: str, of_keys: bool, dbias: str) -> Any:
    """One of the two kernels: gradients of a tile of keys (``of_keys``), or of a tile of queries.

    ``dbias`` is "" (none), "store" (each element of the bias is met once) or "add" (it was broadcast).
    """
    tile = instance.tile
    TX, TY, RM, RN = tile.threads_x, tile.threads_y, tile.rows, tile.keys
    M, N, THREADS = tile.m, tile.n, tile.threads
    CHUNKS, CHUNKS_V = instance.chunks, instance.chunks_v
    RV = CHUNK // TX
    PITCH, P_PITCH = CHUNK + 1, N + 1
    SQDIST, OF_KEYS = instance.sqdist, of_keys
    WANT_DBIAS, ADD_DBIAS = bool(dbias), dbias == "add"
    RK = N // TY  # keys a thread owns when a tile of keys is accumulated
    K_COLUMNS, V_COLUMNS = CHUNKS * RV, CHUNKS_V * RV
    ROWS_OWN = RK if of_keys else RM
    V_ROWS = RK if of_keys else 1
    real, num = instance.real, instance.number
    INF, ZERO, ONE, HIDDEN, TWO = num(np.inf), num(0), num(1), num(-0.0), num(2)
    read, write = reader(instance.storage), writer(instance.storage)
    read_dout = reader(dout_storage)
    logit, slope = logit_function(instance), slope_function(instance)

    @cuda.jit
    def kernel(q, k, v, dout, lse, delta, grad_a, grad_v, grad_bias, meta, page_table, page_size, bias, mask, mask_tail, slopes, scale,
               softcap, window_left, window_right, heads_kv, group, head_dim, head_dim_v, tiles, mods):
        A_smem = cuda.shared.array((M, PITCH), real)  # [row][element]: a chunk of Q or dO
        B_smem = cuda.shared.array((N, PITCH), real)  # [key][element]: a chunk of K or V
        P_smem = cuda.shared.array((M, P_PITCH), real)  # [row][key]: weights, then gradients of scores; -0.0: not visible
        dirty_smem = cuda.shared.array(1, int64)  # something that is not finite was loaded in this step
        s_rmem = cuda.local.array((RM, RN), real)
        dp_rmem = cuda.local.array((RM, RN), real)
        ga_rmem = cuda.local.array((ROWS_OWN, K_COLUMNS), real)  # dK of own keys, or dQ of own rows
        gv_rmem = cuda.local.array((V_ROWS, V_COLUMNS), real)  # dV of own keys

        t = cuda.threadIdx.x & 1023  # tells the compiler that no index made of it is negative
        ty = t // TX
        tx = t % TX
        block = cuda.blockIdx.x & 0x7FFFFFFF
        head_kv = block % heads_kv
        block //= heads_kv
        own = block % tiles
        b = block // tiles

        q_begin, q_length, k_begin, kv_length = meta[0, b], meta[1, b], meta[2, b], meta[3, b]
        kv_start, position, q_batch, k_batch = meta[4, b], meta[5, b], meta[6, b], meta[7, b]
        rows = q_length * group
        mask_shift = kv_length - q_length if mask_tail else 0

        # The other operand's range that this tile can meet.
        if OF_KEYS:
            first_key = own * N
            if first_key >= kv_length:
                return
            low, high = 0, rows
            if window_right >= 0:  # i >= j - right
                low = max(low, (first_key - window_right - position) * group)
            if window_left >= 0:  # i <= j + left
                high = min(high, (min(first_key + N, kv_length) + window_left - position) * group)
            low = low // M * M
        else:
            first_row = own * M
            if first_row >= rows:
                return
            last_row = min(first_row + M, rows) - 1
            low, high = kv_start, kv_length
            if window_left >= 0:
                low = max(low, first_row // group + position - window_left)
            if window_right >= 0:
                high = min(high, last_row // group + position + window_right + 1)

        for r in range(ROWS_OWN):
            for c in range(K_COLUMNS):
                ga_rmem[r, c] = ZERO
        for r in range(V_ROWS):
            for c in range(V_COLUMNS):
                gv_rmem[r, c] = ZERO

        step = low
        while step < high:
            if OF_KEYS:
                first_row = step
            else:
                first_key = step
            if t == 0:
                dirty_smem[0] = 0
            cuda.syncthreads()
            for r in range(RM):
                for c in range(RN):
                    s_rmem[r, c] = ZERO
                    dp_rmem[r, c] = ZERO
            # Scores again, and dP = dO V^T.
            for chunk in range(CHUNKS + CHUNKS_V):
                of_v = chunk >= CHUNKS
                base = (chunk - CHUNKS) * CHUNK if of_v else chunk * CHUNK
                for e in range(t, M * CHUNK, THREADS):
                    row, d = e // CHUNK, e % CHUNK
                    x = ZERO
                    packed = first_row + row
                    if packed < rows:
                        h = head_kv * group + packed % group
                        if of_v:
                            if base + d < head_dim_v:
                                x = num(read_dout(dout[q_batch, q_begin + packed // group, h, base + d]))
                        elif base + d < head_dim:
                            x = read(q[q_batch, q_begin + packed // group, h, base + d])
                        if not abs(x) < INF:
                            dirty_smem[0] = 1
                    A_smem[row, d] = x
                for e in range(t, N * CHUNK, THREADS):
                    key, d = e // CHUNK, e % CHUNK
                    x = ZERO
                    j = first_key + key
                    if j < kv_length and base + d < (head_dim_v if of_v else head_dim):
                        k0, k1 = k_batch, k_begin + j
                        if page_size > 0:
                            k0, k1 = page_table[b, j // page_size], j % page_size
                        if of_v:
                            x = read(v[k0, k1, head_kv, base + d])
                        else:
                            x = read(k[k0, k1, head_kv, base + d])
                        if not abs(x) < INF:
                            dirty_smem[0] = 1
                    B_smem[key, d] = x
                cuda.syncthreads()
                for d in range(CHUNK):
                    if SQDIST:
                        factor = scale[min(base + d, head_dim - 1)]
                    for r in range(RM):
                        x = A_smem[ty * RM + r, d]
                        for c in range(RN):
                            y = B_smem[tx + c * TX, d]
                            if of_v:
                                dp_rmem[r, c] += x * y
                            elif SQDIST:
                                s_rmem[r, c] -= factor * (x - y) * (x - y)
                            else:
                                s_rmem[r, c] += x * y
                cuda.syncthreads()

            # P = exp(logit - LSE), and the gradient of the scaled scores, P * (dP - delta) through score_mod and softcap.
            for r in range(RM):
                packed = first_row + ty * RM + r
                row = packed // group
                h = head_kv * group + packed % group
                i = row + position
                row_lse, row_delta = -INF, ZERO
                if packed < rows:
                    row_lse = lse[q_batch, h, q_begin + row]
                    row_delta = delta[q_batch, h, q_begin + row]
                for c in range(RN):
                    j = first_key + tx + c * TX
                    visible = row_lse != -INF and j >= kv_start and j < kv_length
                    if window_left >= 0:
                        visible = visible and j >= i - window_left
                    if window_right >= 0:
                        visible = visible and j <= i + window_right
                    p, ds = HIDDEN, HIDDEN
                    if visible:
                        raw = s_rmem[r, c]
                        if not SQDIST:
                            raw *= scale[0]
                        x = logit(raw, b, h, row, i, j, softcap, bias, slopes, mask, mask_shift, mods)
                        if x != -INF:
                            p = num(math.exp(x - row_lse))
                            outer, through = slope(raw, b, h, row, i, j, softcap, bias, slopes, mods)
                            ds = p * (dp_rmem[r, c] - row_delta)
                            if WANT_DBIAS:
                                if ADD_DBIAS:
                                    cuda.atomic.add(grad_bias, (b * (grad_bias.shape[0] > 1), h * (grad_bias.shape[1] > 1),
                                                                row * (grad_bias.shape[2] > 1), j * (grad_bias.shape[3] > 1)), ds * outer)
                                else:
                                    grad_bias[b, h, row, j] = ds * outer
                            ds = ds * through
                            if ds == ZERO:
                                ds = ZERO  # a zero of a visible key must not look like the mark of an invisible one
                    s_rmem[r, c] = ds
                    P_smem[ty * RM + r, tx + c * TX] = p
            cuda.syncthreads()
            dirty = dirty_smem[0] != 0

            if OF_KEYS:  # dV += P^T dO
                for chunk in range(CHUNKS_V):
                    base = chunk * CHUNK
                    if CHUNKS_V > 1:
                        cuda.syncthreads()
                        for e in range(t, M * CHUNK, THREADS):
                            row, d = e // CHUNK, e % CHUNK
                            x = ZERO
                            packed = first_row + row
                            if packed < rows and base + d < head_dim_v:
                                x = num(read_dout(dout[q_batch, q_begin + packed // group, head_kv * group + packed % group, base + d]))
                            A_smem[row, d] = x
                        cuda.syncthreads()
                    for row in range(M):
                        for r in range(RK):
                            p = P_smem[row, ty * RK + r]
                            if not dirty or p != p or math.copysign(ONE, p) > ZERO:
                                for c in range(RV):
                                    gv_rmem[r, chunk * RV + c] += p * A_smem[row, tx + c * TX]
            cuda.syncthreads()
            for r in range(RM):
                for c in range(RN):
                    P_smem[ty * RM + r, tx + c * TX] = s_rmem[r, c]

            # dK += dS^T Q, or dQ += dS K; for squared distances the difference q - k takes their place.
            for chunk in range(CHUNKS):
                base = chunk * CHUNK
                if OF_KEYS or SQDIST:
                    for e in range(t, M * CHUNK, THREADS):
                        row, d = e // CHUNK, e % CHUNK
                        x = ZERO
                        packed = first_row + row
                        if packed < rows and base + d < head_dim:
                            x = read(q[q_batch, q_begin + packed // group, head_kv * group + packed % group, base + d])
                        A_smem[row, d] = x
                if not OF_KEYS or SQDIST:
                    for e in range(t, N * CHUNK, THREADS):
                        key, d = e // CHUNK, e % CHUNK
                        x = ZERO
                        j = first_key + key
                        if j < kv_length and base + d < head_dim:
                            k0, k1 = k_batch, k_begin + j
                            if page_size > 0:
                                k0, k1 = page_table[b, j // page_size], j % page_size
                            x = read(k[k0, k1, head_kv, base + d])
                        B_smem[key, d] = x
                cuda.syncthreads()
                for inner in range(M if OF_KEYS else N):
                    for r in range(ROWS_OWN):
                        if OF_KEYS:
                            ds = P_smem[inner, ty * RK + r]
                        else:
                            ds = P_smem[ty * RM + r, inner]
                        if not dirty or ds != ds or math.copysign(ONE, ds) > ZERO or ds != ZERO:
                            for c in range(RV):
                                d = tx + c * TX
                                if SQDIST:
                                    if OF_KEYS:
                                        y = A_smem[inner, d] - B_smem[ty * RK + r, d]
                                    else:
                                        y = B_smem[inner, d] - A_smem[ty * RM + r, d]
                                elif OF_KEYS:
                                    y = A_smem[inner, d]
                                else:
                                    y = B_smem[inner, d]
                                ga_rmem[r, chunk * RV + c] += ds * y
                cuda.syncthreads()
            step += M if OF_KEYS else N

        # Store the own tile.
        for r in range(ROWS_OWN):
            for c in range(K_COLUMNS):
                d = c // RV * CHUNK + c % RV * TX + tx
                if d < head_dim:
                    x = ga_rmem[r, c]
                    if SQDIST:
                        x *= TWO * scale[d]
                    else:
                        x *= scale[0]
                    if OF_KEYS:
                        j = first_key_of(own, N, ty, RK, r)
                        if j < kv_length:
                            k0, k1 = k_batch, k_begin + j
                            if page_size > 0:
                                k0, k1 = page_table[b, j // page_size], j % page_size
                            grad_a[k0, k1, head_kv, d] = write(x)
                    else:
                        packed = first_key_of(own, M, ty, RM, r)
                        if packed < rows:
                            grad_a[q_batch, q_begin + packed // group, head_kv * group + packed % group, d] = write(x)
        if OF_KEYS:
            for r in range(V_ROWS):
                j = first_key_of(own, N, ty, RK, r)
                if j < kv_length:
                    for c in range(V_COLUMNS):
                        d = c // RV * CHUNK + c % RV * TX + tx
                        if d < head_dim_v:
                            k0, k1 = k_batch, k_begin + j
                            if page_size > 0:
                                k0, k1 = page_table[b, j // page_size], j % page_size
                            grad_v[k0, k1, head_kv, d] = write(gv_rmem[r, c])

    return kernel


@cuda.jit(device=True)
def first_key_of(own, size, ty, each, r):
    """The row or key that is number r of thread row ty in tile ``own``."""
    return own * size + ty * each + r

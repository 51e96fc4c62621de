"""The backward pass of the Numba CUDA fallback, by recomputation: nothing of size N x N is stored.

Two kernels, so that no gradient of q, k or v needs an atomic addition and every run gives the same bits. The first owns a
tile of queries and walks over the keys twice: for the maximum, the sum and delta of each row, then for dq. The second owns a
tile of keys and walks over the queries (dk, dv, dbias).

The statistics are taken anew, and not from the forward pass: exp(logit - LSE) is off by as much as the rounding of the LSE,
which grows with the logits, and delta = rowsum(dO * O) by the rounding of O. Two products on top of seven are the price.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda, int64

from .numba_cuda_forward import CHUNK
from .numba_cuda_logits import Instance, in_window, key_place, logit_function, reader, slope_function, writer


@functools.lru_cache(maxsize=256)
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
    SWEEPS = 1 if of_keys else 2
    real, num = instance.real, instance.number
    INF, ZERO, ONE, HIDDEN, TWO = num(np.inf), num(0), num(1), num(-0.0), num(2)
    read, write = reader(instance.storage), writer(instance.storage)
    read_dout = reader(dout_storage)
    logit, slope = logit_function(instance), slope_function(instance)

    @cuda.jit
    def kernel(q, k, v, dout, dlse, state, grad, grad_values, grad_bias, meta, page_table, page_size, bias, mask, mask_tail, slopes,
               sinks, scale, softcap, window_left, window_right, heads_kv, group, head_dim, head_dim_v, tiles, mods):
        A_smem = cuda.shared.array((M, PITCH), real)  # [row][element]: a chunk of Q or dO
        B_smem = cuda.shared.array((N, PITCH), real)  # [key][element]: a chunk of K or V
        P_smem = cuda.shared.array((M, P_PITCH), real)  # [row][key]: weights, then gradients of scores; -0.0: not visible
        dirty_smem = cuda.shared.array(1, int64)  # something that is not finite was loaded in this step
        s_rmem = cuda.local.array((RM, RN), real)
        dp_rmem = cuda.local.array((RM, RN), real)
        ga_rmem = cuda.local.array((ROWS_OWN, K_COLUMNS), real)  # dK of own keys, or dQ of own rows
        gv_rmem = cuda.local.array((V_ROWS, V_COLUMNS), real)  # dV of own keys
        part_rmem = cuda.local.array((ROWS_OWN, RV), real)  # one step's share of either: sums of sums keep more digits
        base_rmem = cuda.local.array(RM, real)  # maximum of each row's logits,
        factor_rmem = cuda.local.array(RM, real)  # one over the sum of exp(logit - maximum),
        delta_rmem = cuda.local.array(RM, real)  # sum of P * dP, minus the gradient of the LSE

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

        for r in range(RM):
            base_rmem[r], factor_rmem[r], delta_rmem[r] = -INF, ZERO, ZERO
        step, sweep = low, 0
        while step < high or sweep < SWEEPS - 1:
            if step >= high:  # between the sweeps: the threads of a row put together what each saw of its keys
                for r in range(RM):
                    P_smem[ty * RM + r, tx] = base_rmem[r]
                cuda.syncthreads()
                for r in range(RM):
                    peak = -INF
                    for c in range(TX):
                        x = P_smem[ty * RM + r, c]
                        if x > peak or x != x:
                            peak = x
                    shrink = ZERO
                    if base_rmem[r] != -INF:
                        shrink = num(math.exp(base_rmem[r] - peak))
                    factor_rmem[r] *= shrink
                    delta_rmem[r] *= shrink
                    base_rmem[r] = peak
                cuda.syncthreads()
                for r in range(RM):
                    P_smem[ty * RM + r, tx] = factor_rmem[r]
                cuda.syncthreads()
                for r in range(RM):
                    factor_rmem[r] = ZERO
                    for c in range(TX):
                        factor_rmem[r] += P_smem[ty * RM + r, c]
                cuda.syncthreads()
                for r in range(RM):
                    P_smem[ty * RM + r, tx] = delta_rmem[r]
                cuda.syncthreads()
                for r in range(RM):
                    packed = first_row + ty * RM + r
                    if packed < rows:
                        row = packed // group
                        h = head_kv * group + packed % group
                        delta = ZERO
                        for c in range(TX):
                            delta += P_smem[ty * RM + r, c]
                        base, total = base_rmem[r], factor_rmem[r]
                        if sinks.shape[0] > 0 and sinks[h] != -INF:  # one more logit, whose value is 0
                            shrink = ONE
                            if sinks[h] > base:
                                shrink = num(math.exp(base - sinks[h]))
                                base = sinks[h]
                            total = total * shrink + num(math.exp(sinks[h] - base))
                            delta *= shrink
                        inverse = ZERO
                        if base != -INF:
                            inverse = ONE / total
                            delta *= inverse
                        if dlse.shape[0] > 0:
                            delta -= dlse[q_batch, h, q_begin + row]
                        base_rmem[r], factor_rmem[r], delta_rmem[r] = base, inverse, delta
                        if tx == 0:
                            state[0, q_batch, h, q_begin + row] = base
                            state[1, q_batch, h, q_begin + row] = inverse
                            state[2, q_batch, h, q_begin + row] = delta
                cuda.syncthreads()
                step, sweep = low, 1
                if step >= high:
                    break
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
                        k0, k1 = key_place(page_table, page_size, b, j, k_batch, k_begin)
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

            # P = exp(logit - maximum) / sum, and the gradient of the scaled scores, P * (dP - delta) through score_mod and softcap.
            for r in range(RM):
                packed = first_row + ty * RM + r
                row = packed // group
                h = head_kv * group + packed % group
                i = row + position
                if OF_KEYS and packed < rows:
                    base_rmem[r] = state[0, q_batch, h, q_begin + row]
                    factor_rmem[r] = state[1, q_batch, h, q_begin + row]
                    delta_rmem[r] = state[2, q_batch, h, q_begin + row]
                for c in range(RN):
                    j = first_key + tx + c * TX
                    visible = packed < rows and j >= kv_start and j < kv_length and in_window(i, j, window_left, window_right)
                    p, ds = HIDDEN, HIDDEN
                    if visible:
                        raw = s_rmem[r, c]
                        if not SQDIST:
                            raw *= scale[0]
                        x = logit(raw, b, h, row, i, j, softcap, bias, slopes, mask, mask_shift, mods)
                        if sweep < SWEEPS - 1:
                            if x != -INF:  # each thread keeps the statistics of the keys that it meets
                                dp = dp_rmem[r, c]
                                if x > base_rmem[r] or x != x:
                                    shrink = ZERO
                                    if base_rmem[r] != -INF:
                                        shrink = num(math.exp(base_rmem[r] - x))
                                    factor_rmem[r] = factor_rmem[r] * shrink + ONE
                                    delta_rmem[r] = delta_rmem[r] * shrink + dp
                                    base_rmem[r] = x
                                else:
                                    p = num(math.exp(x - base_rmem[r]))
                                    factor_rmem[r] += p
                                    delta_rmem[r] += p * dp
                        elif x != -INF:
                            p = num(math.exp(x - base_rmem[r])) * factor_rmem[r]
                            outer, through = slope(raw, b, h, row, i, j, softcap, bias, slopes, mods)
                            ds = p * (dp_rmem[r, c] - delta_rmem[r])
                            if WANT_DBIAS:
                                if ADD_DBIAS:
                                    at_b, at_h = b * (grad_bias.shape[1] > 1), h * (grad_bias.shape[2] > 1)
                                    at_row, at_j = row * (grad_bias.shape[3] > 1), j * (grad_bias.shape[4] > 1)
                                    copy = (cuda.blockIdx.x * THREADS + t) % grad_bias.shape[0]
                                    cuda.atomic.add(grad_bias, (copy, at_b, at_h, at_row, at_j), ds * outer)
                                else:
                                    grad_bias[0, b, h, row, j] = ds * outer
                            ds = ds * through
                            if ds == ZERO:
                                ds = ZERO  # a zero of a visible key must not look like the mark of an invisible one
                    s_rmem[r, c] = ds
                    P_smem[ty * RM + r, tx + c * TX] = p
            cuda.syncthreads()
            if sweep < SWEEPS - 1:
                step += N
                continue
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
                    for r in range(RK):
                        for c in range(RV):
                            part_rmem[r, c] = ZERO
                    for row in range(M):
                        for r in range(RK):
                            p = P_smem[row, ty * RK + r]
                            if not dirty or p != p or math.copysign(ONE, p) > ZERO:
                                for c in range(RV):
                                    part_rmem[r, c] += p * A_smem[row, tx + c * TX]
                    for r in range(RK):
                        for c in range(RV):
                            gv_rmem[r, chunk * RV + c] += part_rmem[r, c]
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
                            k0, k1 = key_place(page_table, page_size, b, j, k_batch, k_begin)
                            x = read(k[k0, k1, head_kv, base + d])
                        B_smem[key, d] = x
                cuda.syncthreads()
                for r in range(ROWS_OWN):
                    for c in range(RV):
                        part_rmem[r, c] = ZERO
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
                                part_rmem[r, c] += ds * y
                for r in range(ROWS_OWN):
                    for c in range(RV):
                        ga_rmem[r, chunk * RV + c] += part_rmem[r, c]
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
                        j = own_index(own, N, ty, RK, r)
                        if j < kv_length:
                            k0, k1 = key_place(page_table, page_size, b, j, k_batch, k_begin)
                            grad[k0, k1, head_kv, d] = write(x)
                    else:
                        packed = own_index(own, M, ty, RM, r)
                        if packed < rows:
                            grad[q_batch, q_begin + packed // group, head_kv * group + packed % group, d] = write(x)
        if OF_KEYS:
            for r in range(V_ROWS):
                j = own_index(own, N, ty, RK, r)
                if j < kv_length:
                    for c in range(V_COLUMNS):
                        d = c // RV * CHUNK + c % RV * TX + tx
                        if d < head_dim_v:
                            k0, k1 = key_place(page_table, page_size, b, j, k_batch, k_begin)
                            grad_values[k0, k1, head_kv, d] = write(gv_rmem[r, c])

    return kernel


@cuda.jit(device=True)
def own_index(own, size, ty, each, r):
    """The row or key that is number r of thread row ty in tile ``own``."""
    return own * size + ty * each + r

"""What happens to a panel of scores between the product and the softmax, for the compiled CPU kernels.

``st`` is S^T[keys][rows] of one panel; its first row is key ``j``. The order of the calls is the order of the logits in
types.Problem. Masked scores become -inf, whatever they were.
"""

from __future__ import annotations

import math

from .cpu_memory import WHOLE, compiled, get, load_u8, put
from .cpu_rows import read_row

INF = math.inf


@compiled
def apply_bias(one, p, st, keys, rows, address, j, row):
    for r in range(rows):
        read_row(one, row, get(WHOLE, address, r) + j * p.bias_c, p.bias_c, keys, p.bias_code)
        for n in range(keys):
            x, b = get(one, st, n * rows + r), get(one, row, n)
            put(one, st, n * rows + r, b if b == type(one)(-INF) else x + b)  # -inf hides, also a NaN or +inf


@compiled
def apply_alibi(one, st, keys, rows, slope, position, j):
    kind = type(one)
    for n in range(keys):
        for r in range(rows):
            distance = kind(abs(get(WHOLE, position, r) - j - n))
            put(one, st, n * rows + r, get(one, st, n * rows + r) - get(one, slope, r) * distance)


@compiled
def apply_mask(one, p, s, st, keys, rows, address, j, row):
    kind = type(one)
    shift = s.kv_length - s.q_length if p.mask_tail else 0  # column c is key c + shift; keys before it are visible
    first = max(0, shift - j)
    for r in range(rows):
        where = get(WHOLE, address, r) + (j + first - shift) * p.mask_c
        # As limits, because a minimum is one instruction where a branch on random bits costs ten times as much.
        if p.mask_c == 1:
            for n in range(keys - first):
                put(one, row, first + n, kind(INF) if load_u8(where, n) else kind(-INF))
        else:
            for n in range(keys - first):
                put(one, row, first + n, kind(INF) if load_u8(where, n * p.mask_c) else kind(-INF))
        for n in range(first, keys):
            # A NaN that is seen becomes +inf, which makes its row NaN just as well.
            x, limit = get(one, st, n * rows + r), get(one, row, n)
            put(one, st, n * rows + r, x if x < limit else limit)


@compiled
def apply_range(one, st, keys, rows, low, high, j):
    for n in range(keys):
        for r in range(rows):
            hidden = (j + n < get(WHOLE, low, r)) | (j + n >= get(WHOLE, high, r))
            put(one, st, n * rows + r, type(one)(-INF) if hidden else get(one, st, n * rows + r))


@compiled
def lane_maxima(one, st, keys, rows, start, top):
    """top = max(start, S^T) per lane; NaN is passed over, it shows in the sum."""
    for r in range(rows):
        put(one, top, r, get(one, start, r))
    for n in range(keys):
        for r in range(rows):
            x, best = get(one, st, n * rows + r), get(one, top, r)
            put(one, top, r, x if x > best else best)

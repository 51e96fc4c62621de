"""Online softmax by hand: why attention never needs the N x N matrix, and not even one whole row of it.

    python examples/online_softmax.py

Softmax divides exp(x) by the sum of all exp(x).  It seems to need every logit before the first weight is known, and a
second pass to subtract the largest one, without which exp overflows.  Two numbers kept up to date replace both passes:

    m   the largest logit so far
    l   the sum of exp(x - m) over the logits so far

A new logit may raise m.  All terms already inside l were taken relative to the old m, so one multiplication by
exp(m_old - m_new) corrects them together.  Attention does the same with tiles of keys instead of single logits, and
carries the weighted mean of the values along.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import softmax

import cuflash

EPS = float(np.finfo(np.float64).eps)  # everything below is float64

LOGITS = [1.0, 3.0, 2.0, 5.0, 0.0, 4.0]

KEYS, HEAD_SIZE, VALUE_SIZE, TILE = 8, 4, 3, 2
SCALE = 1 / math.sqrt(HEAD_SIZE)


def absorb(m: float, l: float, x: float) -> tuple[float, float]:
    """The state (m, l) after one more logit x: the whole idea, in three lines."""
    m_new = max(m, x)
    rescale = math.exp(m - m_new)  # 1 unless x is a new maximum; 0 at the start, where m is -inf
    return m_new, l * rescale + math.exp(x - m_new)


def logit_by_logit(logits: list[float]) -> tuple[float, float]:
    """Print the state after each logit; returns the last one."""
    print("1. Logit by logit\n")
    print("   logit x   max m   exp(m_old - m)   exp(x - m)        sum l")
    m, l = -math.inf, 0.0  # nothing seen yet
    for x in logits:
        # A single logit x is itself a state, (m, l) = (x, 1): absorbing it is merging two states.
        m_next, l_next = cuflash.merge_softmax_stats(m, l, x, 1.0)
        by_hand = absorb(m, l, x)
        assert m_next == by_hand[0] and abs(l_next - by_hand[1]) <= 4 * EPS * l_next
        print(f"   {x:7.1f} {m_next:7.1f} {math.exp(m - m_next):16.6f} {math.exp(x - m_next):12.6f} {l_next:12.6f}")
        m, l = m_next, l_next
    return m, l


def tile_of(n: int) -> slice:
    return slice(n * TILE, (n + 1) * TILE)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of the queries over these keys only: the output (S, D), and the log-sum-exp (S,).

    m and l meet again in one number, lse = m + log(l): the log of the sum of exp(logit).
    """
    logits = q @ k.T * SCALE  # the scores of this tile: S x TILE, not S x N
    m = logits.max(axis=-1, keepdims=True)
    p = np.exp(logits - m)
    l = p.sum(axis=-1, keepdims=True)
    return p @ v / l, (m + np.log(l))[:, 0]


def tile_by_tile(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Print the result over the first 1, 2, ... tiles; returns the one over all of them."""
    print(f"2. Tile by tile: one query, {KEYS} keys in tiles of {TILE}, values of {VALUE_SIZE} numbers\n")
    print("         this tile alone                   its    all tiles so far")
    print("   keys     lse   output                 share      lse   output")
    out, lse = np.zeros((1, VALUE_SIZE)), np.full(1, -math.inf)  # no key yet: output 0, lse = log(0)
    for n in range(KEYS // TILE):
        tile_out, tile_lse = attend(q, k[tile_of(n)], v[tile_of(n)])
        # The new output is a weighted mean of the two.  Each weight is a share of the common normaliser,
        # exp(lse) of the part / exp(lse) of the whole, and that is how the old part is rescaled.
        out, lse = cuflash.merge_states([out, tile_out], [lse, tile_lse])
        share = math.exp(tile_lse[0] - lse[0])
        here, so_far = (" ".join(f"{x:6.3f}" for x in o[0]) for o in (tile_out, out))
        first, last = n * TILE, (n + 1) * TILE - 1
        print(f"   {first}-{last} {tile_lse[0]:8.3f}   {here}  {share:7.1%} {lse[0]:8.3f}   {so_far}")
    return out


def main() -> None:
    m, l = logit_by_logit(LOGITS)
    online = np.exp(np.array(LOGITS) - m) / l
    expected = softmax(LOGITS)
    # exp of a number of size x is off by x * eps where its argument is rounded; the sum adds one rounding a term.
    spread = max(LOGITS) - min(LOGITS)
    assert np.all(np.abs(online - expected) <= 2 * (len(LOGITS) + spread) * EPS * expected)
    print("\n   exp(x - m) / l  " + " ".join(f"{w:.6f}" for w in online))
    print("   softmax         " + " ".join(f"{w:.6f}" for w in expected))

    shifted_m, shifted_l = -math.inf, 0.0
    for x in LOGITS:
        shifted_m, shifted_l = absorb(shifted_m, shifted_l, x + 1000)
    assert shifted_l == l  # the differences are the same whole numbers
    print(f"\n   All logits + 1000: m = {shifted_m:.1f}, l = {shifted_l:.6f}, as before.")
    print("   exp(1005) itself would have overflowed.\n")

    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, HEAD_SIZE))
    k = rng.standard_normal((KEYS, HEAD_SIZE))
    v = rng.standard_normal((KEYS, VALUE_SIZE))
    tiled = tile_by_tile(q, k, v)

    logits = q @ k.T * SCALE
    whole = softmax(logits, axis=-1) @ v
    library = cuflash.attention(q, k, v)  # the same algorithm, with tiles that fit a cache
    bound = 2 * (KEYS + float(np.abs(logits).max())) * EPS * float(np.abs(v).max())
    assert np.all(np.abs(tiled - whole) <= bound) and np.all(np.abs(library - whole) <= bound)
    print()
    for name, result in (("merged tiles", tiled), ("softmax(q k^T scale) v", whole), ("cuflash.attention", library)):
        print(f"   {name:24}" + " ".join(f"{x:16.12f}" for x in result[0]))
    print(f"\n   Largest difference {np.abs(tiled - whole).max():.1e}; rounding allows {bound:.1e}.")


if __name__ == "__main__":
    main()

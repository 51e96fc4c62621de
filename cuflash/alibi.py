"""The usual ALiBi slopes. A leaf."""

from __future__ import annotations

import operator

import numpy as np


def alibi_slopes(heads: int) -> np.ndarray:
    """Slopes of ALiBi, also for head counts that are no power of two.

    For n = 2**p heads they are 2**(-8/n), 2**(-16/n), ..., 2**(-8). Otherwise they are those of the largest power of two
    below ``heads``, followed by every other one of twice that power.

    Parameters
    ----------
    heads : int
        Number of query heads, at least 1.

    Returns
    -------
    ndarray, shape (heads,), float32

    Raises
    ------
    TypeError, ValueError
        If ``heads`` is not an integer, or below 1.

    References
    ----------
    Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
    arXiv:2108.12409, section 3.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    try:
        heads = operator.index(heads)
    except TypeError:
        raise TypeError(f"heads: got {heads!r}; it must be an integer") from None
    if heads < 1:
        raise ValueError(f"heads: got {heads}; it must be at least 1")
    power = 1 << (heads.bit_length() - 1)
    slopes = geometric(power)
    extra = geometric(2 * power)[::2][: heads - power]
    return np.concatenate([slopes, extra]).astype(np.float32)


def geometric(n: int) -> np.ndarray:
    """The slopes of n heads, n a power of two."""
    return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

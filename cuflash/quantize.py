"""float8_e4m3fn keys and values: numbers and their scales, on the host and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays, checks, edges, launch
from .backends.append import quantized
from .types import E4M3, HOST, LAYOUTS


def quantize_kv(x: Any, scale: Any = None, *, layout: str = "BSHD") -> tuple[Any, Any]:
    """Keys or values in float8_e4m3fn, for caches that `decode` reads with ``k_scale`` or ``v_scale``.

    Parameters
    ----------
    x : ndarray, shape (..., S, H, D); layout "BHSD": (..., H, S, D)
        float16, bfloat16, float32 or float64; on a GPU with D up to 256 and not float64.
    scale : float or array_like, shape (H,), optional
        One scale, or one for each head, above 0. By default each token and head has its own: its largest number divided by 448.
    layout : {"BSHD", "BHSD"}
        Where the axis of heads is.

    Returns
    -------
    codes : ndarray of float8_e4m3fn, shape of x
        x / scale to the nearest, ties to even; what is beyond 448 becomes 448. ``codes * scale`` is within 1/16 of x, or within
        2**-10 * scale if that is more. CuPy has no arrays of this dtype but by view: ``codes.view(numpy.uint8)`` are the bits.
    scale : ndarray of float32, shape (..., S, H) or (..., H, S); or as given
        Of a row of zeros it is the smallest normal number, of a row with an infinity it is infinite.

    Raises
    ------
    TypeError, ValueError
        Kinds, dtypes and shapes that do not fit.

    See Also
    --------
    decode : appends k_new and v_new of 16 bits to such caches by itself.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> codes, scale = cuflash.quantize_kv(np.full((4, 2, 16), 0.5, np.float32))
    >>> codes.dtype.name, codes[0, 0, 0].item(), scale.shape
    ('float8_e4m3fn', 448.0, (4, 2))
    """
    if edges.of(x) is not None:
        return edges.call(quantize_kv, {"x": x, "scale": scale, "layout": layout}, head="x")
    checks.choice(layout, "layout", LAYOUTS)
    a = arrays.view(x, "x")
    arrays.check_float_dtype(a.dtype, "x")
    if len(a.shape) < 3:
        raise ValueError(f"x: shape {a.shape}; it must be (..., S, H, D), or (..., H, S, D) for layout 'BHSD'")
    heads = a.shape[-2 if layout == "BSHD" else -3]
    given = None
    if scale is not None:
        given = arrays.host_floats(scale, "scale").astype(np.float32)
        if given.shape not in ((), (heads,)):
            raise ValueError(f"scale: shape {given.shape}; it must be a number or ({heads},), one for each head")
        if not (np.isfinite(given) & (given > 0)).all():
            raise ValueError(f"scale: got {given}; every scale must be finite and above 0")
    if a.device == HOST:
        each = given if given is None or given.ndim == 0 or layout == "BSHD" else given[:, None]
        codes, found = quantized(a.array, each)
    else:
        with launch.place(a.device, None):
            codes, found = _on_device(a, given, layout)
    return codes, found if scale is None else scale


def _on_device(a: arrays.ArrayView, given: np.ndarray | None, layout: str) -> tuple[Any, Any]:
    """Codes and scales of an array of CuPy."""
    import cupy

    from .backends import cuda_append

    most = cuda_append.MOST_COLUMNS
    if a.dtype == np.float64 or a.shape[-1] > most:
        raise ValueError(f"x: {a.dtype} of head size {a.shape[-1]}; on a GPU it must be of 16 or 32 bits, of head sizes up to {most}")
    codes = arrays.empty(a.shape, np.dtype(E4M3), a)
    if given is None:
        found = arrays.empty(a.shape[:-1], np.dtype(np.float32), a)
    else:
        found = cupy.asarray(given) if given.ndim else None
    turn = (0, 2, 1) if layout == "BHSD" else (0, 1, 2)
    x, y = (arrays.wrap(z.reshape(-1, *a.shape[-3:]).transpose(*turn, 3), "cupy") for z in (a.array, codes))
    scale: Any = float(given) if given is not None and given.ndim == 0 else None
    if found is not None and given is None:
        scale = arrays.wrap(found.reshape(-1, *a.shape[-3:-1]).transpose(turn), "cupy")
    elif found is not None:
        scale = arrays.broadcast(arrays.wrap(found, "cupy"), x.shape[:-1])
    cuda_append.quantize(x, y, scale)
    return codes, found

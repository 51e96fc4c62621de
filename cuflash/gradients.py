"""The backward pass: gradients of attention by recomputation."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import backends, launch, planner
from . import problem as problems
from .api import takes_options
from .types import Gradients, Problem


@takes_options
def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, deterministic: bool = False,
    layout: str = "BSHD", **options: Any,
) -> Gradients:
    """Gradients of `attention` by recomputation from (q, k, v, out, lse).

    Parameters
    ----------
    dout : ndarray, shape of out
        Gradient of the loss by out; any strides, broadcast views included.
    q, k, v : ndarray
        As given to `attention`.
    out, lse : ndarray
        What `attention` returned with ``return_lse=True``.
    dlse : ndarray, shape of lse, optional
        Gradient of the loss by the log-sum-exp.
    deterministic : bool, default False
        Two runs agree bit for bit in dq as well (dk and dv always do). On a GPU not together with a bias that several logits share,
        whose gradient is added up in no fixed order.
    **options
        The options that `attention` was called with, but for ``kernel``, ``backend``, ``num_splits`` and ``out_dtype``, which need
        not be the same. Slopes of a Python ``score_mod`` are central differences of it in float64 (exact to about 1e-10).

    Returns
    -------
    Gradients
        dq, dk, dv, and dbias (bias's shape) and dsinks (Hq,) where those were given; else None. Rows that see no key
        contribute exactly 0 whatever dout holds.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, NoBackendError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((1, 8, 2, 16), np.float32)
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    >>> dout = np.ones_like(out)  # the gradient of out.sum()
    >>> dq, dk, dv, _, _ = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> dv[0, :, 0, 0].sum().round(4).item()
    8.0
    """
    problem = problems.build_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, layout=layout, **options)
    return _differentiate(problem, layout, np.ndim(q))


@takes_options
def attention_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dlse: Any = None, deterministic: bool = False,
    layout: str = "BSHD", **options: Any,
) -> Gradients:
    """Gradients of `attention_varlen`; arguments as there and in `attention_backward`.

    Returns
    -------
    Gradients
        Rows behind the last entry of cu_seqlens have gradient 0.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, NoBackendError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((5, 2, 16), np.float32)  # two sequences, of 2 and 3 tokens
    >>> out, lse = cuflash.attention_varlen(q, k, v, [0, 2, 5], [0, 2, 5], return_lse=True)
    >>> cuflash.attention_varlen_backward(np.ones_like(out), q, k, v, out, lse, [0, 2, 5], [0, 2, 5]).dv[:, 0, 0].round(4).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    problem = problems.build_backward(
        dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, layout=layout,
        varlen=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), **options,
    )
    return _differentiate(problem, layout, np.ndim(q))


def _differentiate(problem: Problem, layout: str, ndim: int) -> Gradients:
    """Plan, run backward, and bring the gradients into the layout of the user's arrays."""
    chosen = planner.choose(problem)
    backend: Any = backends.load(chosen.backend)
    with launch.place(problem.q.device, problem.stream):
        gradients = backend.run_backward(chosen, problem)
    return problems.user_gradients(gradients, problem, layout, ndim)

"""What attention computes of queries and keys alone: the log-sum-exp of each row, and the weights where they are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import backends, planner
from . import problem as problems
from .api import attention, takes_options


@takes_options
def logsumexp(q: Any, k: Any, *, layout: str = "BSHD", **options: Any) -> Any:
    """Only the row statistics of attention: the log-sum-exp of each query's logits, memory O(N).

    Parameters
    ----------
    q, k : ndarray
        As for `attention`.
    **options
        As for `attention`.

    Returns
    -------
    ndarray, shape (B, Hq, Sq), (Hq, Sq) or (Sq,)
        Natural logarithm; float32, or float64 for float64 inputs; -inf for rows that see no key.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, NoBackendError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((3, 16), np.float32), np.zeros((8, 16), np.float32)  # every logit is 0
    >>> [round(x, 4) for x in cuflash.logsumexp(q, k).tolist()]  # log(8)
    [2.0794, 2.0794, 2.0794]
    """
    return attention(q, k, problems.no_values(k), return_lse=True, layout=layout, **options)[1]


@takes_options
def attention_weights(
    q: Any, k: Any, *, reduce: str | None = None, layout: str = "BSHD", out: Any = None, **options: Any,
) -> Any:
    """The softmax weights themselves, materialised on purpose: how much each query attends to each key.

    Parameters
    ----------
    q, k : ndarray
        As for `attention`.
    reduce : {None, "head_mean"}
        "head_mean" gives the mean over the query heads, added up block by block: beside the result there is a block of at most
        some 2^20 weights (tens of MiB), never the weights of all heads.
    layout : {"BSHD", "BHSD"}
        Of q and k. The result has its heads first in any case, as bias and mask have.
    out : ndarray, optional
        Buffer for the result, exact shape and dtype, any strides, sharing no element with an input.
    **options
        As for `attention`. ``out_dtype`` is by default that of the log-sum-exp: float32, or float64 for float64 inputs. float16
        has no number for a weight below 6e-8, so that the rows of a long sequence would not add up to 1.

    Returns
    -------
    ndarray, shape (B, Hq, Sq, Sk), (Hq, Sq, Sk) or (Sq, Sk)
        With ``reduce="head_mean"``: (B, Sq, Sk) or (Sq, Sk). Rows add up to 1, or to less where sinks take their share. A key that
        is not seen weighs exactly 0; rows that see no key are 0. With ``page_table``, Sk is max_pages * page_size.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, NoBackendError
        As `attention`. NoBackendError also for arrays on a GPU, and where the result does not fit into memory.

    See Also
    --------
    logsumexp : exp(logit - logsumexp) is a weight.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = np.zeros((1, 4, 2, 16), np.float32)  # all logits are 0
    >>> cuflash.attention_weights(q, k, causal=True, reduce="head_mean")[0].round(2).tolist()[:2]
    [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]
    """
    ndim = np.ndim(q)
    problem = problems.build_weights(q, k, reduce=reduce, layout=layout, **options)
    if out is not None:
        problem, out = problems.with_weights(problem, out, ndim)
    chosen = planner.choose(problem)
    backend: Any = backends.load(chosen.backend)
    if out is None:  # only now: a plan may have found that there is no memory for it
        problem, out = problems.with_weights(problem, out, ndim)
    backend.run_weights(chosen, problem)
    return out

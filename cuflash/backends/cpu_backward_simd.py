"""The vector micro-kernels that only the backward pass of the CPU backend needs; cpu_simd.py has the panel that they work on.

Beside the transposed panels of the forward pass there lie, row by row and padded to whole vectors::

    dO  [ROWS][columns]     Q  [ROWS][columns]     dV  [keys][columns]     dK  [keys][columns]

The sums over keys (for dQ) have query rows in their lanes, as in the forward pass. The sums over query rows (for dK and
dV) have head elements in their lanes, so that no vector is ever summed across its lanes.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .cpu_simd import INT64, UNROLL, _accumulate, _Emitter

I64 = types.int64



@intrinsic
def products(typingctx, like, k, k_stride, q, s, depth, scale):
    """S^T[0:UNROLL] = scale * K[0:UNROLL] Q: the scores of the forward pass, bit for bit, without their maxima."""
    signature = types.void(like, I64, I64, I64, I64, I64, like)

    def codegen(context, builder, sig, args):
        _, k, k_stride, q, s, depth, scale = args
        e = _Emitter(builder, sig.args[0], False)
        step = lambda _, left, right, total: e.muladd(left, right, total)
        sums = _accumulate(e, depth, k, k_stride, ir.Constant(INT64, 1), q, step)
        scale = e.splat(scale)
        for i, row in enumerate(sums):
            e.store_vectors([builder.fmul(value, scale) for value in row], e.offset(s, i * e.vectors * e.width))
        return context.get_dummy_value()

    return signature, codegen


def _key_update(distance: bool):
    """C[0:UNROLL, 0:columns of a panel] += A[0:UNROLL, 0:depth] X, with A in a panel and X and C row by row.

    With ``distance``, X stands for X - K, where K is the key of the row of C: subtracted first, so that nothing cancels.
    """

    @intrinsic
    def kernel(typingctx, like, a, a_row, x, x_row, c, c_row, k, k_row, depth):
        signature = types.void(like, *[I64] * 9)

        def codegen(context, builder, sig, args):
            _, a, a_row, x, x_row, c, c_row, k, k_row, depth = args
            e = _Emitter(builder, sig.args[0], False)
            at = [ir.Constant(INT64, i) for i in range(UNROLL)]
            lefts = [e.address(a, builder.mul(i, a_row)) for i in at]
            keys = [e.load_vectors(e.address(k, builder.mul(i, k_row))) for i in at] if distance else None

            def body(r, sums):
                right = e.load_vectors(e.address(x, builder.mul(r, x_row)))
                out = []
                for i in range(UNROLL):
                    left = e.load_splat(e.address(lefts[i], r))
                    for v in range(e.vectors):
                        value = builder.fsub(right[v], keys[i][v]) if distance else right[v]
                        out.append(e.muladd(left, value, sums[i * e.vectors + v]))
                return out

            sums = e.loop(depth, [e.constant(0)] * (UNROLL * e.vectors), body)
            for i in range(UNROLL):
                where = e.address(c, builder.mul(at[i], c_row))
                old = e.load_vectors(where)
                e.store_vectors([builder.fadd(old[v], sums[i * e.vectors + v]) for v in range(e.vectors)], where)
            return context.get_dummy_value()

        return signature, codegen

    return kernel


@intrinsic
def distance_row_update(typingctx, like, k, k_row, ds, dq, keys, q):
    """dQ^T[0:UNROLL] += sum over keys of dS^T * (Q^T[0:UNROLL] - K[:, 0:UNROLL]^T)."""
    signature = types.void(like, *[I64] * 6)

    def codegen(context, builder, sig, args):
        _, k, k_row, ds, dq, keys, q = args
        e = _Emitter(builder, sig.args[0], False)
        panel = e.vectors * e.width
        queries = [e.load_vectors(e.offset(q, i * panel)) for i in range(UNROLL)]

        def body(n, sums):
            right = e.load_vectors(e.address(ds, builder.mul(n, ir.Constant(INT64, panel))))
            row = e.address(k, builder.mul(n, k_row))
            out = []
            for i in range(UNROLL):
                left = e.load_splat(e.offset(row, i))
                for v in range(e.vectors):
                    out.append(e.muladd(builder.fsub(queries[i][v], left), right[v], sums[i * e.vectors + v]))
            return out

        sums = e.loop(keys, [e.constant(0)] * (UNROLL * e.vectors), body)
        for i in range(UNROLL):
            where = e.offset(dq, i * panel)
            old = e.load_vectors(where)
            e.store_vectors([builder.fadd(old[v], sums[i * e.vectors + v]) for v in range(e.vectors)], where)
        return context.get_dummy_value()

    return signature, codegen


def _weights(e: _Emitter, builder, s, lse):
    """Which keys are seen, and exp(s - lse) where they are, else 0. -inf marks a key that is not seen."""
    hidden, p = [], []
    for v, x in enumerate(s):
        hidden.append(builder.fcmp_ordered("==", x, e.constant(-math.inf)))
        p.append(builder.select(hidden[v], e.constant(0), e.exp(builder.fsub(x, lse[v]))))
    return hidden, p


@intrinsic
def gradient_step(typingctx, like, s, dp, keys, lse, factor, delta):
    """S^T becomes P^T = factor * exp(S^T - LSE), dP^T becomes P^T * (dP^T - delta); both 0 where a key is not seen."""
    signature = types.void(like, *[I64] * 6)

    def codegen(context, builder, sig, args):
        _, s, dp, keys, lse, factor, delta = args
        e = _Emitter(builder, sig.args[0], False)
        lse, factor, delta = (e.load_vectors(a) for a in (lse, factor, delta))

        def body(n, _):
            along = builder.mul(n, ir.Constant(INT64, e.vectors * e.width))
            s_at, dp_at = e.address(s, along), e.address(dp, along)
            hidden, p = _weights(e, builder, e.load_vectors(s_at), lse)
            p = [builder.fmul(p[v], factor[v]) for v in range(e.vectors)]
            ds = [builder.fmul(p[v], builder.fsub(x, delta[v])) for v, x in enumerate(e.load_vectors(dp_at))]
            e.store_vectors([builder.select(hidden[v], e.constant(0), x) for v, x in enumerate(p)], s_at)
            e.store_vectors([builder.select(hidden[v], e.constant(0), x) for v, x in enumerate(ds)], dp_at)
            return []

        e.loop(keys, [], body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def statistics_step(typingctx, like, s, dp, keys, running_max, new_max, sums):
    """The online softmax of a row with the sums of P^T and of P^T * dP^T; S^T and dP^T stay as they are.

    ``sums`` are four vectors of a panel: each of the two sums with what was lost in it (Kahan), because the gradients of
    rows with nearly equal logits are small differences of them.
    """
    signature = types.void(like, *[I64] * 6)

    def codegen(context, builder, sig, args):
        _, s, dp, keys, running_max, new_max, sums = args
        e = _Emitter(builder, sig.args[0], False)
        panel = e.vectors * e.width
        top, old = e.load_vectors(new_max), e.load_vectors(running_max)
        base = [builder.select(builder.fcmp_ordered("==", m, e.constant(-math.inf)), e.constant(0), m) for m in top]
        shrink = [e.exp(builder.fsub(old[v], base[v])) for v in range(e.vectors)]
        state = [builder.fmul(x, shrink[v]) for i in range(4) for v, x in enumerate(e.load_vectors(e.offset(sums, i * panel)))]

        def body(n, state):
            along = builder.mul(n, ir.Constant(INT64, panel))
            hidden, p = _weights(e, builder, e.load_vectors(e.address(s, along)), base)
            dp_row = e.load_vectors(e.address(dp, along))
            products = [builder.select(hidden[v], e.constant(0), builder.fmul(p[v], dp_row[v])) for v in range(e.vectors)]
            out = list(state)
            for i, terms in ((0, p), (2, products)):
                for v in range(e.vectors):
                    at, lost = i * e.vectors + v, (i + 1) * e.vectors + v
                    term = builder.fsub(terms[v], state[lost])
                    out[at] = builder.fadd(state[at], term)
                    out[lost] = builder.fsub(builder.fsub(out[at], state[at]), term)
            return out

        state = e.loop(keys, state, body)
        for i in range(4):
            e.store_vectors(state[i * e.vectors : (i + 1) * e.vectors], e.offset(sums, i * panel))
        e.store_vectors(top, running_max)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def row_products(typingctx, like, a, b, depth, out):
    """out = sum over depth of A^T * B^T, lane by lane; the same operations as in ``products``, so that equal rows give equal sums."""
    signature = types.void(like, I64, I64, I64, I64)

    def codegen(context, builder, sig, args):
        _, a, b, depth, out = args
        e = _Emitter(builder, sig.args[0], False)

        def body(d, sums):
            along = builder.mul(d, ir.Constant(INT64, e.vectors * e.width))
            left, right = e.load_vectors(e.address(a, along)), e.load_vectors(e.address(b, along))
            return [e.muladd(left[v], right[v], sums[v]) for v in range(e.vectors)]

        e.store_vectors(e.loop(depth, [e.constant(0)] * e.vectors, body), out)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def softcap_slope(typingctx, like, s, slope, count, cap):
    """``count`` logits x, rounded up to whole vectors, become cap * tanh(x / cap), as in softcap_step, with the slope of that.

    The slope 1 - tanh(x)^2 would cancel for large x; 4 t / (1 + t)^2 with t = exp(-2 |x|) does not.
    """
    signature = types.void(like, I64, I64, I64, like)

    def codegen(context, builder, sig, args):
        _, s, slope, count, cap = args
        e = _Emitter(builder, sig.args[0], False)
        cap = e.splat(cap)
        vectors = builder.sdiv(builder.add(count, ir.Constant(INT64, e.width - 1)), ir.Constant(INT64, e.width))

        def body(n, _):
            along = builder.mul(n, ir.Constant(INT64, e.width))
            where = e.address(s, along)
            x = builder.fdiv(e.load(where), cap)
            e.store(builder.fmul(cap, e.tanh(x)), where)
            t = e.exp(builder.fmul(e.maximum(x, builder.fneg(x)), e.constant(-2)))
            above = builder.fadd(e.constant(1), t)
            e.store(builder.fdiv(builder.fmul(e.constant(4), t), builder.fmul(above, above)), e.address(slope, along))
            return []

        e.loop(vectors, [], body)
        return context.get_dummy_value()

    return signature, codegen


key_update, distance_key_update = _key_update(False), _key_update(True)

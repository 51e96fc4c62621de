"""The vector micro-kernels of the CPU backend, written as LLVM IR because Numba has no vector type.

The lanes of a vector are query rows. A *panel* is ROWS query rows (a few vectors); around it lie::

    Q^T  [head_dim][ROWS]     K  [keys][head_dim]        S^T, P^T  [keys][ROWS]
    O^T  [head_dim_v][ROWS]   V  [keys][head_dim_v]      running max, running sum, alpha  [ROWS]

so that both products read K or V one scalar at a time and everything else in whole vectors, and the softmax never looks
across lanes. Multiplications and additions carry LLVM's ``contract`` flag: they fuse where the machine can, and stay
two instructions where it cannot. Nothing else is relaxed, which the rounding trick in ``_Emitter.exp`` needs.

Every function takes addresses (int64) and a ``like`` number that fixes the dtype.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

INT64 = ir.IntType(64)


def _vector_unit() -> tuple[int, int, int]:
    """Bytes of a vector, vectors of a panel, and keys (or columns of V) that one micro-kernel call covers.

    For the machine that Numba compiles for, which is part of Numba's cache key, too. The product of the last two is the
    number of accumulators. It must hide the latency of a multiply-add and leave registers for the operands; a wider panel
    would not stay in the L1 cache.
    """
    target = cpu_target.target_context.codegen().magic_tuple()
    features = str(target[2])
    if "+avx512f" in features:
        return 64, 2, 8
    if "+avx" in features:
        return 32, 2, 4
    return 16, 2, 8 if str(target[0]).startswith(("aarch64", "arm64")) else 4


VECTOR_BYTES, VECTORS, UNROLL = _vector_unit()
NARROW_LANES = 4  # a panel for one or a few query rows: a vector that wide; wider lanes would compute nothing


def panel_rows(itemsize: int) -> int:
    """Query rows of a wide panel."""
    return VECTOR_BYTES // itemsize * VECTORS


# exp(r) on |r| <= ln(2) / 2: Chebyshev fits, relative error below the dtype's rounding
_DEGREE = {4: 6, 8: 11}
_UNDERFLOW = {4: -103.97208, 8: -745.13321}  # exp of less is below half of the smallest subnormal number: 0
_LIFT = {4: 24, 8: 53}  # 2^(n + lift) is a normal number for every n that occurs; the product with 2^-lift rounds once
_MAGIC = {4: 1.5 * 2**23, 8: 1.5 * 2**52}  # adding it rounds to an integer, which then stands in the low bits
_MANTISSA = {4: 23, 8: 52}
_BIAS = {4: 127, 8: 1023}
_LN2_HIGH = {4: 0.693359375, 8: 6.93145751953125e-1}  # few bits, so that n * high is exact
_LN2_LOW = {4: -2.12194440054690583e-4, 8: 1.42860682030941723212e-6}


def _exp_coefficients(itemsize: int) -> np.ndarray:
    """Ascending coefficients of 1 + r + r^2 * q(r), the fit of exp that is exact at 0."""
    half = math.log(2) / 2 * 1.01
    nodes = half * np.cos(np.pi * (np.arange(200) + 0.5) / 200)
    # (exp(r) - 1 - r) / r^2 by its series: the closed form cancels near 0
    target = sum(nodes**n / math.factorial(n + 2) for n in range(22))
    fit = np.polynomial.chebyshev.Chebyshev.fit(nodes, target, _DEGREE[itemsize] - 2, domain=[-half, half])
    return np.concatenate([[1.0, 1.0], fit.convert(kind=np.polynomial.Polynomial).coef])


# tanh(x) = x + x^3 * p(x^2) below _TANH_SMALL; above it (1 - exp(-2x)) / (1 + exp(-2x)) no longer cancels
_TANH_SMALL = 0.5
_TANH_DEGREE = {4: 5, 8: 11}


def _tanh_coefficients(itemsize: int) -> np.ndarray:
    """Ascending coefficients of p, fitted to the continued fraction tanh(x) / x = 1 / (1 + z / (3 + z / (5 + ...)))."""
    top = _TANH_SMALL**2 * 1.01
    z = top * (0.5 + 0.5 * np.cos(np.pi * (np.arange(200) + 0.5) / 200))
    tail = np.full_like(z, 41.0)
    for odd in range(39, 1, -2):
        tail = odd + z / tail
    target = -1 / (tail + z)  # (tanh(x) / x - 1) / z, without the cancellation
    fit = np.polynomial.chebyshev.Chebyshev.fit(z, target, _TANH_DEGREE[itemsize], domain=[0, top])
    return fit.convert(kind=np.polynomial.Polynomial).coef


class _Emitter:
    """A few lines of IR building with one element type and one width of panel."""

    def __init__(self, builder: ir.IRBuilder, numba_type, narrow: bool):
        self.builder = builder
        self.size = numba_type.bitwidth // 8
        self.vectors = 1 if narrow else VECTORS
        self.scalar = ir.FloatType() if self.size == 4 else ir.DoubleType()
        self.integer = ir.IntType(8 * self.size)
        self.width = NARROW_LANES if narrow else VECTOR_BYTES // self.size
        self.vector = ir.VectorType(self.scalar, self.width)
        self.integers = ir.VectorType(self.integer, self.width)

    def constant(self, value):
        return ir.Constant(self.vector, [float(value)] * self.width)

    def bits(self, value):
        return ir.Constant(self.integers, [int(value)] * self.width)

    def address(self, base, elements):
        return self.builder.add(base, self.builder.mul(elements, ir.Constant(INT64, self.size)))

    def offset(self, base, elements: int):
        return self.builder.add(base, ir.Constant(INT64, elements * self.size)) if elements else base

    def load(self, address):
        pointer = self.builder.inttoptr(address, self.vector.as_pointer())
        return self.builder.load(pointer, align=self.size)

    def store(self, value, address):
        pointer = self.builder.inttoptr(address, self.vector.as_pointer())
        self.builder.store(value, pointer, align=self.size)

    def load_vectors(self, address):
        return [self.load(self.offset(address, v * self.width)) for v in range(self.vectors)]

    def store_vectors(self, values, address):
        for v, value in enumerate(values):
            self.store(value, self.offset(address, v * self.width))

    def splat(self, value):
        b = self.builder
        one = b.insert_element(ir.Constant(self.vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        return b.shuffle_vector(
            one,
            ir.Constant(self.vector, ir.Undefined),
            ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width),
        )

    def load_splat(self, address):
        pointer = self.builder.inttoptr(address, self.scalar.as_pointer())
        return self.splat(self.builder.load(pointer, align=self.size))

    def mul(self, a, b):
        return self.builder.fmul(a, b, flags=("contract",))

    def add(self, a, b):
        return self.builder.fadd(a, b, flags=("contract",))

    def muladd(self, a, b, c):
        return self.add(self.mul(a, b), c)

    def maximum(self, a, b):
        """The larger; b where a is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def loop(self, count, carried, body):
        """``for index in range(count): carried = body(index, carried)`` on SSA values; returns the last carried."""
        b = self.builder
        before = b.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(INT64)
        index.add_incoming(ir.Constant(INT64, 0), before)
        phis = []
        for value in carried:
            phi = b.phi(value.type)
            phi.add_incoming(value, before)
            phis.append(phi)
        b.cbranch(b.icmp_signed("<", index, count), inside, after)
        b.position_at_end(inside)
        results = body(index, phis)
        index.add_incoming(b.add(index, ir.Constant(INT64, 1)), b.block)
        for phi, result in zip(phis, results, strict=True):
            phi.add_incoming(result, b.block)
        b.branch(head)
        b.position_at_end(after)
        return phis

    def exp(self, x):
        """exp(x) for x <= 0: 0 below the underflow threshold and for -inf, NaN for NaN."""
        b, size = self.builder, self.size
        shifted = self.muladd(x, self.constant(1 / math.log(2)), self.constant(_MAGIC[size]))
        n = b.fsub(shifted, self.constant(_MAGIC[size]))
        r = self.muladd(n, self.constant(-_LN2_HIGH[size]), x)
        r = self.muladd(n, self.constant(-_LN2_LOW[size]), r)
        value = self.polynomial(_exp_coefficients(size), r)
        power = b.shl(b.bitcast(shifted, self.integers), self.bits(_MANTISSA[size]))
        power = b.add(power, self.bits((_BIAS[size] + _LIFT[size]) << _MANTISSA[size]))
        value = b.fmul(value, b.bitcast(power, self.vector))  # a product, so that NaN stays NaN
        value = b.fmul(value, self.constant(2.0 ** -_LIFT[size]))
        return b.select(b.fcmp_ordered("<", x, self.constant(_UNDERFLOW[size])), self.constant(0), value)

    def polynomial(self, coefficients, x):
        """Horner's rule; coefficients ascend."""
        value = self.constant(coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            value = self.muladd(value, x, self.constant(coefficient))
        return value

    def tanh(self, x):
        b = self.builder
        size = self.maximum(x, b.fneg(x))
        t = self.exp(b.fmul(size, self.constant(-2)))
        # 1 - 2t / (1 + t) above 1, where 1 - t and 1 + t would each add a rounding; one division serves both forms.
        beyond = b.fcmp_ordered(">", size, self.constant(1))
        top = b.select(beyond, b.fmul(t, self.constant(-2)), b.fsub(self.constant(1), t))
        large = b.fadd(b.select(beyond, self.constant(1), self.constant(0)), b.fdiv(top, b.fadd(self.constant(1), t)))
        large = b.select(b.fcmp_ordered("<", x, self.constant(0)), b.fneg(large), large)
        z = b.fmul(x, x)
        small = self.muladd(b.fmul(x, z), self.polynomial(_tanh_coefficients(self.size), z), x)
        return b.select(b.fcmp_ordered("<", size, self.constant(_TANH_SMALL)), small, large)


def _accumulate(e: _Emitter, depth, a_base, a_row, a_step, b_base, step):
    """UNROLL x VECTORS sums over depth; A[i, k] lies at a_base + (i * a_row + k * a_step), B[k, :] at b_base + k * ROWS."""
    b = e.builder
    rows = [e.address(a_base, b.mul(ir.Constant(INT64, i), a_row)) for i in range(UNROLL)]

    def body(k, sums):
        right = e.load_vectors(e.address(b_base, b.mul(k, ir.Constant(INT64, e.vectors * e.width))))
        along = b.mul(k, a_step)
        out = []
        for i in range(UNROLL):
            left = e.load_splat(e.address(rows[i], along))
            out += [step(k, left, right[v], sums[i * e.vectors + v]) for v in range(e.vectors)]
        return out

    sums = e.loop(depth, [e.constant(0)] * (UNROLL * e.vectors), body)
    return [sums[i * e.vectors : (i + 1) * e.vectors] for i in range(UNROLL)]


def _store_scores(e: _Emitter, sums, scale, s_address, top_address):
    """Store x = sum * scale, rounded once, and raise the lane maxima to it."""
    top = e.load_vectors(top_address)
    for i, row in enumerate(sums):
        row = [e.builder.fmul(value, scale) for value in row]
        top = [e.maximum(value, old) for value, old in zip(row, top, strict=True)]
        e.store_vectors(row, e.offset(s_address, i * e.vectors * e.width))
    e.store_vectors(top, top_address)


def _scores(narrow: bool):
    """S^T[0:UNROLL] = scale * K[0:UNROLL] Q, and top = max(top, S^T)."""

    @intrinsic
    def kernel(typingctx, like, k, k_stride, q, s, depth, scale, top):
        signature = types.void(like, types.int64, types.int64, types.int64, types.int64, types.int64, like, types.int64)

        def codegen(context, builder, sig, args):
            _, k, k_stride, q, s, depth, scale, top = args
            e = _Emitter(builder, sig.args[0], narrow)
            step = lambda _, left, right, total: e.muladd(left, right, total)  # noqa: E731
            sums = _accumulate(e, depth, k, k_stride, ir.Constant(INT64, 1), q, step)
            _store_scores(e, sums, e.splat(scale), s, top)
            return context.get_dummy_value()

        return signature, codegen

    return kernel


def _distances(narrow: bool):
    """S^T[0:UNROLL] = -sum over d of weights[d] * (q - k)^2, and top = max(top, S^T)."""

    @intrinsic
    def kernel(typingctx, like, k, k_stride, q, s, depth, weights, top):
        signature = types.void(like, *[types.int64] * 7)

        def codegen(context, builder, sig, args):
            _, k, k_stride, q, s, depth, weights, top = args
            e = _Emitter(builder, sig.args[0], narrow)

            def step(index, left, right, total):
                difference = builder.fsub(right, left)
                return e.muladd(e.mul(difference, difference), e.load_splat(e.address(weights, index)), total)

            sums = _accumulate(e, depth, k, k_stride, ir.Constant(INT64, 1), q, step)
            _store_scores(e, sums, e.constant(-1), s, top)
            return context.get_dummy_value()

        return signature, codegen

    return kernel


def _weighted_sum(narrow: bool):
    """O^T[0:UNROLL] = alpha * O^T[0:UNROLL] + V[:, 0:UNROLL]^T P^T."""

    @intrinsic
    def kernel(typingctx, like, v, v_stride, p, o, keys, alpha):
        signature = types.void(like, *[types.int64] * 6)

        def codegen(context, builder, sig, args):
            _, v, v_stride, p, o, keys, alpha = args
            e = _Emitter(builder, sig.args[0], narrow)
            step = lambda _, left, right, total: e.muladd(left, right, total)  # noqa: E731
            sums = _accumulate(e, keys, v, ir.Constant(INT64, 1), v_stride, p, step)
            factor = e.load_vectors(alpha)
            for i, row in enumerate(sums):
                where = e.offset(o, i * e.vectors * e.width)
                old = e.load_vectors(where)
                e.store_vectors([e.muladd(old[n], factor[n], row[n]) for n in range(e.vectors)], where)
            return context.get_dummy_value()

        return signature, codegen

    return kernel


def _softmax_step(narrow: bool):
    """One step of the online softmax: S^T becomes P^T = exp(S^T - new_max); the running state and alpha follow.

    Lanes that have seen no key yet keep a maximum of -inf; they subtract 0 instead, because -inf - -inf is NaN.
    """

    @intrinsic
    def kernel(typingctx, like, s, keys, running_max, new_max, running_sum, alpha):
        signature = types.void(like, *[types.int64] * 6)

        def codegen(context, builder, sig, args):
            _, s, keys, running_max, new_max, running_sum, alpha = args
            e = _Emitter(builder, sig.args[0], narrow)
            top = e.load_vectors(new_max)
            base = [
                builder.select(builder.fcmp_ordered("==", m, e.constant(-math.inf)), e.constant(0), m) for m in top
            ]
            old = e.load_vectors(running_max)
            factor = [e.exp(builder.fsub(old[v], base[v])) for v in range(e.vectors)]

            def body(j, totals):
                where = e.address(s, builder.mul(j, ir.Constant(INT64, e.vectors * e.width)))
                x = e.load_vectors(where)
                p = [e.exp(builder.fsub(x[v], base[v])) for v in range(e.vectors)]
                e.store_vectors(p, where)
                return [e.add(totals[v], p[v]) for v in range(e.vectors)]

            totals = e.loop(keys, [e.constant(0)] * e.vectors, body)
            sums = e.load_vectors(running_sum)
            e.store_vectors([e.muladd(sums[v], factor[v], totals[v]) for v in range(e.vectors)], running_sum)
            e.store_vectors(factor, alpha)
            e.store_vectors(top, running_max)
            return context.get_dummy_value()

        return signature, codegen

    return kernel


@intrinsic
def softcap_step(typingctx, like, s, count, cap):
    """``count`` logits x, rounded up to whole vectors, become cap * tanh(x / cap)."""
    signature = types.void(like, types.int64, types.int64, like)

    def codegen(context, builder, sig, args):
        _, s, count, cap = args
        e = _Emitter(builder, sig.args[0], narrow=False)
        cap = e.splat(cap)
        vectors = builder.sdiv(builder.add(count, ir.Constant(INT64, e.width - 1)), ir.Constant(INT64, e.width))

        def body(n, _):
            where = e.address(s, builder.mul(n, ir.Constant(INT64, e.width)))
            e.store(builder.fmul(cap, e.tanh(builder.fdiv(e.load(where), cap))), where)
            return []

        e.loop(vectors, [], body)
        return context.get_dummy_value()

    return signature, codegen


scores, scores_narrow = _scores(False), _scores(True)
distances, distances_narrow = _distances(False), _distances(True)
softmax_step, softmax_step_narrow = _softmax_step(False), _softmax_step(True)
weighted_sum, weighted_sum_narrow = _weighted_sum(False), _weighted_sum(True)

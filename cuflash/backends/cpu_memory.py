"""Raw memory for the compiled CPU kernels: numbers at addresses, and how functions around them are compiled.

NumPy arrays inside compiled functions carry reference counts, bounds and negative indices, which triples the time it
takes to compile. The kernels use addresses (int64) instead. ``get`` and ``put`` are for scratch, whose numbers lie close
together and aligned; ``load_*`` and ``store_*`` are for the user's memory, of any stride and alignment. Whoever passes an
address keeps the array alive.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

WHOLE = np.int64(1)  # carries the type of integer scratch, as ``one`` does that of numbers


def _memory(element: ir.Type, result):
    """An intrinsic that reads one ``element``, of any alignment, some bytes behind an address."""

    @intrinsic
    def load(typingctx, address, offset):
        def codegen(context, builder, sig, args):
            return builder.load(_byte_pointer(builder, args[0], args[1], element), align=1)

        return result(types.int64, types.int64), codegen

    return load


def _memory_store(element: ir.Type, kind):
    """An intrinsic that writes one ``element``, of any alignment, some bytes behind an address."""

    @intrinsic
    def store(typingctx, address, offset, value):
        def codegen(context, builder, sig, args):
            builder.store(args[2], _byte_pointer(builder, args[0], args[1], element), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), codegen

    return store


def _byte_pointer(builder, address, offset, element):
    # Pointer arithmetic, not integer arithmetic: LLVM makes vector moves only of loops whose pointers it can follow.
    base = builder.inttoptr(address, ir.IntType(8).as_pointer())
    return builder.bitcast(builder.gep(base, [offset]), element.as_pointer())


load_f32 = _memory(ir.FloatType(), types.float32)
load_f64 = _memory(ir.DoubleType(), types.float64)
load_u16 = _memory(ir.IntType(16), types.uint16)
load_u8 = _memory(ir.IntType(8), types.uint8)
store_f32 = _memory_store(ir.FloatType(), types.float32)
store_f64 = _memory_store(ir.DoubleType(), types.float64)
store_u16 = _memory_store(ir.IntType(16), types.uint16)


def _reinterpret(source, target):
    """An intrinsic that reads the bits of a number as another type of the same width."""

    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, sig, args):
            return builder.bitcast(args[0], context.get_value_type(sig.return_type))

        return target(source), codegen

    return cast


f32_from_bits = _reinterpret(types.uint32, types.float32)
bits_from_f32 = _reinterpret(types.float32, types.uint32)


@intrinsic
def get(typingctx, like, address, index):
    """Number ``index`` of a contiguous row of numbers of like's type that starts at an address."""

    def codegen(context, builder, sig, args):
        kind = context.get_value_type(sig.args[0])
        pointer = builder.inttoptr(args[1], kind.as_pointer())
        return builder.load(builder.gep(pointer, [args[2]]))

    return like(like, types.int64, types.int64), codegen


@intrinsic
def put(typingctx, like, address, index, value):
    """Set number ``index`` of a contiguous row of numbers of like's type; ``value`` is converted to that type."""

    def codegen(context, builder, sig, args):
        pointer = builder.inttoptr(args[1], args[3].type.as_pointer())
        builder.store(args[3], builder.gep(pointer, [args[2]]))
        return context.get_dummy_value()

    return types.void(like, types.int64, types.int64, like), codegen


def compiled(function):
    """Jit for functions that only other compiled functions call: no wrapper for Python, which halves compile time."""
    return njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def inlined(function):
    """The same for a large function that is called once: on its own it would be optimised twice."""
    return njit(nogil=True, error_model="numpy", inline="always")(function)

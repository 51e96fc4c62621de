"""Text of the functions by which prefill_fa3 starts products of a warpgroup: PTX names each of their up to 128 registers."""

from __future__ import annotations

_TYPES = {"Fp16": "f16", "Bf16": "bf16"}


def products(dtype: str, keys: int, columns: int) -> str:
    """C++ for an instance: S = Q K^T of 64 rows by ``keys`` keys, and O += P V of 64 rows by ``columns`` value columns.

    ``wgmma_ss`` takes descriptors of A and B in shared memory, ``wgmma_rs`` A in registers; see Columns in wgmma.cuh.

    Parameters
    ----------
    dtype : {"Fp16", "Bf16"}
        Of A and B; sums are float32.
    keys, columns : int
        Multiples of 8 up to 256.
    """
    return _product(dtype, keys, False) + _product(dtype, columns, True)


def backward_products(dtype: str, queries: int, columns: set[int], dq_queries: int) -> str:
    """C++ for an instance of backward_fa3: S^T and dP^T of 64 keys by ``queries``, dK and dV of 64 keys by ``columns``, dQ^T of 64 columns.

    ``wgmma_ss`` and ``wgmma_rs`` as in `products`; ``wgmma_tt`` takes A and B in shared memory with a row for each of the 16 products of
    a sum. ``dq_queries`` are the queries of its result. Numbers of columns are multiples of 8 up to 256.
    """
    of_keys = "".join(_product(dtype, n, True) for n in sorted(columns))
    return _product(dtype, queries, False) + of_keys + _product(dtype, dq_queries, False, True)


def _product(dtype: str, n: int, in_registers: bool, both_transposed: bool = False) -> str:
    count = n // 2
    of_a = [f'"r"(a[{i}])' for i in range(4)] if in_registers else ['"l"(a)']
    name, a = ("wgmma_rs", "const u32 (&a)[4]") if in_registers else ("wgmma_tt" if both_transposed else "wgmma_ss", "u64 a")
    *a_places, b_place, add_place = (f"%{count + i}" for i in range(len(of_a) + 2))
    a_list = "{" + ", ".join(a_places) + "}" if in_registers else a_places[0]
    # Whether B (and A, in shared memory) has a row for each of the 16 products of a sum.
    transposed = "1" if in_registers else "1, 1" if both_transposed else "0, 0"
    d_places = _lines([f"%{i}" for i in range(count)], ' "\n                 "')
    of_d = _lines([f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count)], "\n                   ")
    return (
        f"__device__ __forceinline__ void {name}({dtype}, Columns<{n}>, float (*d)[4], {a}, u64 b, bool add) {{\n"
        f'    asm volatile("{{.reg .pred p; setp.ne.b32 p, {add_place}, 0; "\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{_TYPES[dtype]}.{_TYPES[dtype]} "\n'
        f'                 "{{{d_places}}}, {a_list}, {b_place}, p, 1, 1, {transposed};}}"\n'
        f"                 : {of_d}\n"
        f'                 : {", ".join(of_a)}, "l"(b), "r"(int(add)));\n'
        "}\n"
    )


def _lines(items: list[str], between: str) -> str:
    """A list in lines of 8."""
    return f",{between}".join(", ".join(items[i : i + 8]) for i in range(0, len(items), 8))

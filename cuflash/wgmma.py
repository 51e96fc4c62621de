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
    return _product(dtype, keys, "ss") + _product(dtype, columns, "rs")


def backward_products(dtype: str, queries: int, columns: int, dq_queries: int, in_registers: bool) -> str:
    """C++ for an instance of backward_fa3: S^T and dP^T of 64 keys by ``queries``, dK and dV of 64 keys by ``columns``, dQ^T of 64 columns.

    Parameters
    ----------
    dtype : {"Fp16", "Bf16"}
    queries, columns, dq_queries : int
        Multiples of 8 up to 256. The last are the queries of a product for dQ^T.
    in_registers : bool
        Whether P^T and dS^T come to the products for dV and dK in registers; else in shared memory.
    """
    return _product(dtype, queries, "ss") + _product(dtype, columns, "rs" if in_registers else "st") + _product(dtype, dq_queries, "tt")


# Whether A and B in shared memory have a row for each of the 16 products of a sum (1), or for each of their own rows and columns.
_TRANSPOSED = {"ss": "0, 0", "rs": "1", "st": "0, 1", "tt": "1, 1"}


def _product(dtype: str, n: int, kind: str) -> str:
    count, in_registers = n // 2, kind == "rs"
    of_a = [f'"r"(a[{i}])' for i in range(4)] if in_registers else ['"l"(a)']
    name, a = f"wgmma_{kind}", "const u32 (&a)[4]" if in_registers else "u64 a"
    *a_places, b_place, add_place = (f"%{count + i}" for i in range(len(of_a) + 2))
    a_list = "{" + ", ".join(a_places) + "}" if in_registers else a_places[0]
    d_places = _lines([f"%{i}" for i in range(count)], ' "\n                 "')
    of_d = _lines([f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count)], "\n                   ")
    return (
        f"__device__ __forceinline__ void {name}({dtype}, Columns<{n}>, float (*d)[4], {a}, u64 b, bool add) {{\n"
        f'    asm volatile("{{.reg .pred p; setp.ne.b32 p, {add_place}, 0; "\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{_TYPES[dtype]}.{_TYPES[dtype]} "\n'
        f'                 "{{{d_places}}}, {a_list}, {b_place}, p, 1, 1, {_TRANSPOSED[kind]};}}"\n'
        f"                 : {of_d}\n"
        f'                 : {", ".join(of_a)}, "l"(b), "r"(int(add)));\n'
        "}\n"
    )


def _lines(items: list[str], between: str) -> str:
    """A list in lines of 8."""
    return f",{between}".join(", ".join(items[i : i + 8]) for i in range(0, len(items), 8))

"""From a case to a call: the plain arrays that the oracle sees, and the same numbers as the backend under test gets them.

The oracle reads contiguous (B, S, H, D) arrays, one sequence at a time where a case packs several, and no pages. So a
fault in how a layout, stride, packing or page table is read cannot cancel out of the comparison. What a backend must not
read (keys behind kv_lengths, unused rows of pages, gaps between strided rows) is NaN in its arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import compare
import devices
import numpy as np
from case import Case
from cases import Target
from devices import root

import cuflash
from cuflash.problem import build_attention
from cuflash.types import Problem

# --- how arrays lie in memory --------------------------------------------------------------------------------------


def _padded(a: np.ndarray) -> np.ndarray:
    wide = np.full((*a.shape[:-1], a.shape[-1] + 3), np.nan, a.dtype)
    wide[..., 1:-2] = a
    return wide[..., 1:-2]


def _offset(a: np.ndarray) -> np.ndarray:
    buffer = np.full(a.size + 1, np.nan, a.dtype)
    view = buffer[1:].reshape(a.shape)
    view[...] = a
    return view


def _every_other(a: np.ndarray) -> np.ndarray:
    wide = np.full(tuple(2 * n for n in a.shape), np.nan, a.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in a.shape)]
    view[...] = a
    return view


STRIDES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": np.ascontiguousarray,
    "transposed": np.asfortranarray,
    "reversed": lambda a: np.ascontiguousarray(a[(slice(None, None, -1),) * a.ndim])[(slice(None, None, -1),) * a.ndim],
    "offset": _offset,
    "padded": _padded,
    "every_other": _every_other,
    "heads_of_packed": np.ascontiguousarray,  # q, k and v are slices of one array, see _lay_out; the rest is contiguous
    "expanded": np.ascontiguousarray,  # k and v are one head, q one batch, seen many times; the rest is contiguous
}


def to_user(a: np.ndarray, case: Case) -> np.ndarray:
    """(B, S, H, D) in the layout and with the axes of the case."""
    if case.axes == 2:
        return a[0, :, 0]
    if case.layout == "BHSD":
        a = a.transpose(0, 2, 1, 3)
    return a if case.axes == 4 else a[0]


def from_user(a: np.ndarray, case: Case) -> np.ndarray:
    """The inverse of :func:`to_user`."""
    if case.axes == 2:
        return a[None, :, None]
    a = a if case.axes == 4 else a[None]
    return a if case.layout == "BSHD" else a.transpose(0, 2, 1, 3)


def _lay_out(q: np.ndarray, k: np.ndarray, v: np.ndarray, case: Case) -> list[np.ndarray]:
    """Canonical q, k and v as the user's arrays."""
    if case.strides == "heads_of_packed":
        h, n = q.shape[2], k.shape[2]
        packed = np.concatenate([q, k, v], axis=2)
        return [to_user(part, case) for part in (packed[:, :, :h], packed[:, :, h:h + n], packed[:, :, h + n:])]
    if case.strides == "expanded":
        seen = [np.broadcast_to(q[:1], q.shape), *(np.broadcast_to(a[:1, :, :1], a.shape) for a in (k, v))]
        return [to_user(a, case) for a in seen]
    return [STRIDES[case.strides](to_user(a, case)) for a in (q, k, v)]


# --- the plain problem ---------------------------------------------------------------------------------------------


class Plain(NamedTuple):
    """Canonical arrays and options of a case; keys that nobody may see are 0. q and k are those that decode() has turned."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    rng: np.random.Generator
    given_q: np.ndarray  # before
    given_k: np.ndarray


def plain(case: Case, dtype: np.dtype) -> Plain:
    """The numbers of a case, the same in every run."""
    s, rng = case.shape, case.rng()
    q, k, v = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((s.b, s.sq, s.hq, s.d), (s.b, s.sk, s.hkv, s.d), (s.b, s.sk, s.hkv, s.dv))
    )
    if case.strides == "expanded":
        q, k, v = q[:1].repeat(s.b, 0), *(a[:1, :, :1].repeat(s.b, 0).repeat(s.hkv, 2) for a in (k, v))
    options: dict[str, Any] = {}
    for builder in case.options:
        options.update(builder(rng, s, dtype))
    if case.kv_lengths is not None:
        options["kv_lengths"] = np.array(case.kv_lengths)
    if case.kv_start is not None:
        options["kv_start"] = np.array(case.kv_start)
    for a in (k, v):
        a[unused_keys(case)] = 0
    given_q, given_k = q, k
    if case.rope is not None:
        first = np.zeros(s.b, int) if "causal" in options and options["causal"] == "upper_left" else options["kv_lengths"] - s.sq
        q = turned(q, first[:, None] + np.arange(s.sq), case)
        k = np.where((new_keys(case))[..., None, None], turned(k, np.arange(s.sk)[None].repeat(s.b, 0), case), k)
    return Plain(q, k, v, options, rng, given_q, given_k)


def new_keys(case: Case) -> np.ndarray:
    """(B, Sk) bool: keys that decode() appends."""
    j, ends = np.arange(case.shape.sk), np.reshape(case.kv_lengths, (-1, 1))
    return (j >= ends - case.new) & (j < ends)


def angles(case: Case) -> np.ndarray:
    """Of the embedding of a case, (positions, rot / 2)."""
    half = case.rope[1] // 2
    return np.arange(case.shape.sk)[:, None] * 10000.0 ** (-np.arange(half) / half)


def turned(x: np.ndarray, positions: np.ndarray, case: Case) -> np.ndarray:
    """x (B, n, H, D) turned by the angles of positions (B, n): as complex numbers, rounded once."""
    style, rot = case.rope
    theta = np.sign(positions)[..., None] * angles(case)[abs(positions)]
    cos, sin = (f(theta).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))  # as the tables have them
    first, second = (slice(0, rot, 2), slice(1, rot, 2)) if style == "interleaved" else (slice(0, rot // 2), slice(rot // 2, rot))
    wide = x.astype(np.float64)
    z = (wide[..., first] + 1j * wide[..., second]) * (cos + 1j * sin)[:, :, None]
    wide[..., first], wide[..., second] = z.real, z.imag
    return wide.astype(x.dtype)


def unused_keys(case: Case) -> np.ndarray:
    """(B, Sk) bool: keys that do not exist or are padding."""
    j = np.arange(case.shape.sk)
    unused = np.zeros((case.shape.b, case.shape.sk), bool)
    if case.packed is not None:
        unused |= j >= np.reshape(case.packed.k, (-1, 1))
    if case.kv_lengths is not None:
        unused |= j >= np.reshape(case.kv_lengths, (-1, 1))
    if case.kv_start is not None:
        unused |= j < np.reshape(case.kv_start, (-1, 1))
    return unused


def sequences(case: Case, p: Plain) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]]:
    """Arguments of attention() for each sequence of a packed case, or for the whole of any other."""
    if case.packed is None:
        yield p.q, p.k, p.v, p.options
        return
    for b, (m, n) in enumerate(zip(case.packed.q, case.packed.k, strict=True)):
        yield p.q[b:b + 1, :m], p.k[b:b + 1, :n], p.v[b:b + 1, :n], _options_of_sequence(p, case, b, m, n)


def _options_of_sequence(p: Plain, case: Case, b: int, m: int, n: int) -> dict[str, Any]:
    options = dict(p.options)
    for name in ("bias", "mask"):
        if name in options:
            a = options[name][(None,) * (4 - options[name].ndim)]
            a = a if a.shape[0] == 1 else a[b:b + 1]
            a = a if a.shape[2] == 1 else a[:, :, :m]
            options[name] = a if a.shape[3] == 1 else a[..., :n]
    if np.ndim(options.get("alibi_slopes")) == 2:
        options["alibi_slopes"] = options["alibi_slopes"][b]
    for name in ("kv_lengths", "kv_start"):
        if name in options:
            options[name] = options[name][b:b + 1]
    for name in ("score_mod", "mask_mod"):
        if name in options:
            options[name] = _for_sequence(options[name], name, b)
    return options


def _for_sequence(mod: Callable, name: str, b: int) -> Callable:
    if name == "score_mod":
        return lambda s, _, h, i, j, **more: mod(s, b, h, i, j, **more)
    return lambda _, h, i, j, **more: mod(b, h, i, j, **more)


def problems(case: Case, dtype: np.dtype) -> list[Problem]:
    """What the oracle computes for a case."""
    return [build_attention(q, k, v, **options) for q, k, v, options in sequences(case, plain(case, dtype))]


@functools.lru_cache(maxsize=8)
def expected(case: Case, dtype: np.dtype) -> compare.Expected | None:
    """Oracle and bounds; None if the case has no sequence at all."""
    todo = problems(case, dtype)
    return compare.expect(todo) if todo else None


# --- the call ------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A call of a public function, its result buffers full of NaN, and what must hold of its arguments afterwards."""

    function: Callable
    args: tuple
    options: dict[str, Any]
    out: np.ndarray
    lse: np.ndarray
    case: Case
    appended: list[tuple[str, np.ndarray, np.ndarray]] = field(
        default_factory=list
    )  # cache name, the cache, what it must hold afterwards

    def inputs(self) -> Iterator[np.ndarray]:
        """Arrays that the call must leave as they are."""
        written = [id(root(cache)) for _, cache, _ in self.appended]
        for value in (*self.args, *self.options.values()):
            if isinstance(value, np.ndarray) and id(root(value)) not in written:
                yield root(value)


def present(case: Case, dtype: np.dtype) -> Call:
    """The call of a case, with its numbers in the layout, strides and storage of the case."""
    p = plain(case, dtype)
    k, v = p.k.copy(), p.v.copy()
    for a in (k, v):
        a[unused_keys(case)] = np.nan
    options = {**p.options, "layout": case.layout}
    for name in ("bias", "mask"):
        if name in options and case.strides != "expanded":
            options[name] = _gapless(case.strides)(options[name])
    build = _present_packed if case.packed is not None else _present_decode if case.decode else _present_attention
    return build(case, p, k, v, options, np.dtype(options.get("out_dtype", dtype)))


def _gapless(strides: str) -> Callable[[np.ndarray], np.ndarray]:
    """For bool arrays, which have no NaN to fill gaps with, and small ones: only the order of the memory changes."""
    return STRIDES[strides] if strides in ("transposed", "reversed") else np.ascontiguousarray


def poisoned(shape: tuple[int, ...], dtype: np.dtype, case: Case) -> np.ndarray:
    """A result buffer of NaN, strided like the inputs of the case."""
    return STRIDES[case.strides](np.full(shape, np.nan, dtype))


def _buffers(case: Case, p: Plain, out_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    s = case.shape
    out = poisoned(to_user(np.empty((s.b, s.sq, s.hq, s.dv), bool), case).shape, out_dtype, case)
    lse = poisoned((s.b, s.hq, s.sq)[4 - case.axes:], np.dtype(np.float64 if p.q.dtype == np.float64 else np.float32), case)
    return out, lse


def _present_attention(case: Case, p: Plain, k: np.ndarray, v: np.ndarray, options: dict[str, Any], out_dtype: np.dtype) -> Call:
    q, k, v = _lay_out(p.q, k, v, case)
    if case.page_size:
        k, v = paged(case, p, options)
    return Call(cuflash.attention, (q, k, v), options, *_buffers(case, p, out_dtype), case)


def _present_decode(case: Case, p: Plain, k: np.ndarray, v: np.ndarray, options: dict[str, Any], out_dtype: np.dtype) -> Call:
    """The last ``new`` keys of each sequence come beside the cache, in which their places hold NaN."""
    before = np.array(case.kv_lengths) - case.new
    if case.entries is not None:  # others than those of the sequences hold NaN
        of_entry = [{e: b for b, e in enumerate(case.entries)}.get(n) for n in range(max(case.entries) + 2)]
        k, v = (np.stack([np.full_like(a[0], np.nan) if b is None else a[b] for b in of_entry]) for a in (k, v))
        options["cache_batch_index"] = np.array(case.entries)
    q, k_cache, v_cache = _lay_out(p.given_q, k, v, case)
    if case.page_size:
        k_cache, v_cache = paged(case, p, options)
    options.pop("kv_lengths")
    if case.rope is not None:
        options["rope"] = (*(f(angles(case)).astype(np.float32) for f in (np.cos, np.sin)), case.rope[0])
    call = Call(cuflash.decode, (q, k_cache, v_cache, before), options, *_buffers(case, p, out_dtype), case)
    if case.new:
        rows = before[:, None] + np.arange(case.new)
        of_sequence = np.arange(case.shape.b)[:, None]
        for name, cache, source in (("k_new", k_cache, p.given_k), ("v_new", v_cache, p.v)):
            options[name] = STRIDES[case.strides](to_user(source[of_sequence, rows], case))
            call.appended.append((name, cache, cache.copy()))
            places = _places(cache, case, options.get("page_table"), rows)
            places[...] = np.nan
    return call


def _places(cache: np.ndarray, case: Case, table: np.ndarray | None, rows: np.ndarray) -> Any:
    """The places of new keys in a cache, to be written with one value."""

    class Places:
        def __setitem__(self, _: Any, value: float) -> None:
            a = cache if case.axes == 4 else cache[None]
            a = a if case.layout == "BSHD" else a.transpose(0, 2, 1, 3)
            for b, row in enumerate(rows):
                if table is None:
                    a[b if case.entries is None else case.entries[b], row] = value
                else:
                    a[table[b, row // case.page_size], row % case.page_size] = value

    return Places()


def paged(case: Case, p: Plain, options: dict[str, Any]) -> list[np.ndarray]:
    """k and v in pages of a shuffled pool; adds page_table to the options and widens bias and mask to its capacity."""
    size = case.page_size
    lengths = np.array(case.kv_lengths)
    used = -(-lengths // size)
    slots = -(-case.shape.sk // size) + 1
    pool = p.rng.permutation(int(used.sum()) + 3)
    table = np.array([[-1, 10**9][b % 2] for b in range(len(lengths))], np.int32)[:, None].repeat(slots, 1)
    arrays = []
    taken = 0
    for b, n in enumerate(used):
        table[b, :n] = pool[taken:taken + n]
        taken += n
    for source in (p.k, p.v):
        pages = np.full((len(pool), size, *source.shape[2:]), np.nan, source.dtype)
        for b, n in enumerate(lengths):
            j = np.arange(0 if case.kv_start is None else case.kv_start[b], n)
            pages[table[b, j // size], j % size] = source[b, j]
        arrays.append(STRIDES[case.strides](pages if case.layout == "BSHD" else pages.transpose(0, 2, 1, 3)))
    options["page_table"] = table
    for name, filler in (("bias", np.nan), ("mask", True)):
        if name in options and options[name].shape[-1] == case.shape.sk:
            a = options[name]
            options[name] = np.concatenate([a, np.full((*a.shape[:-1], slots * size - case.shape.sk), filler, a.dtype)], axis=-1)
    return arrays


def _present_packed(case: Case, p: Plain, k: np.ndarray, v: np.ndarray, options: dict[str, Any], out_dtype: np.dtype) -> Call:
    packed = case.packed
    user = pack if case.layout == "BSHD" else lambda *a: pack(*a).transpose(1, 0, 2)
    lay = STRIDES[case.strides]
    q = lay(user(p.q, packed.q, packed.slack[0]))
    cu_q, cu_k = cumulative(packed.q), cumulative(packed.k)
    if case.page_size:
        k, v = paged(case, p, options)
        cu_k = None
    else:
        k, v = (lay(user(a, packed.k, packed.slack[1])) for a in (k, v))
    total, heads = sum(packed.q) + packed.slack[0], case.shape.hq
    shape = (total, heads, case.shape.dv)
    out = poisoned(shape if case.layout == "BSHD" else (heads, total, case.shape.dv), out_dtype, case)
    lse = poisoned((heads, total), np.dtype(np.float64 if q.dtype == np.float64 else np.float32), case)
    return Call(cuflash.attention_varlen, (q, k, v, cu_q, cu_k), options, out, lse, case)


def pack(a: np.ndarray, lengths: Iterable[int], slack: int) -> np.ndarray:
    """(B, S, H, D) without its padding, one sequence behind the other, and NaN rows behind the last."""
    parts = [a[b, :n] for b, n in enumerate(lengths)]
    return np.concatenate([*parts, np.full((slack, *a.shape[2:]), np.nan, a.dtype)])


def cumulative(lengths: Iterable[int]) -> np.ndarray:
    return np.array([0, *np.cumsum(list(lengths), dtype=np.int64)], np.int32)


# --- running and checking ------------------------------------------------------------------------------------------


def run(call: Call, target: Target) -> None:
    """Run a call into its buffers and check everything but the numbers: what was returned, and that nothing else was written."""
    inputs = [(a, a.tobytes()) for a in call.inputs()]
    result = devices.run(target, call.function, *call.args, **call.options, out=call.out, lse=call.lse, return_lse=True)
    assert result[0] is call.out and result[1] is call.lse
    for a, before in inputs:
        assert a.tobytes() == before, "an input was changed"
    for name, cache, after in call.appended:
        if name == "k_new" and call.case.rope is not None:  # turned in the compute dtype: the last digit may differ
            got, want = (np.nan_to_num(a.astype(np.float64), nan=1e9) for a in (cache, after))
            near = abs(got - want) <= 4 * float(compare.ml_dtypes.finfo(cache.dtype).eps) * np.where(want == 1e9, 0, 4)
            assert near.all(), f"{name}: the cache holds something else than the old and the new keys"
            continue
        assert cache.tobytes() == after.tobytes(), f"{name}: the cache holds something else than the old and the new keys"


def gaps_untouched(buffer: np.ndarray) -> bool:
    """Whether the memory between the elements of a strided buffer still is NaN. Overwrites the buffer."""
    buffer[...] = np.nan
    return bool(np.isnan(root(buffer)).all())


def parts(call: Call) -> list[tuple[np.ndarray, np.ndarray]]:
    """The results in canonical axis order, sequence by sequence; rows of no sequence are checked here."""
    case = call.case
    if case.packed is None:
        return [(from_user(call.out, case), call.lse[(None,) * (4 - case.axes)])]
    out = call.out if case.layout == "BSHD" else call.out.transpose(1, 0, 2)
    cu = cumulative(case.packed.q)
    assert not out[cu[-1] :].any() and (call.lse[:, cu[-1] :] == -np.inf).all(), (
        "rows behind the last sequence must be 0, their LSE -inf"
    )
    return [(out[None, a:b], call.lse[None, :, a:b]) for a, b in zip(cu[:-1], cu[1:], strict=True)]


def check(call: Call, want: compare.Expected | None) -> None:
    """Compare the results of a call that ran with the oracle's."""
    got = parts(call)
    if want is None:
        assert not got
        return
    assert len(got) == len(want.out)
    for b, (out, lse) in enumerate(got):
        compare.assert_close(out, want.out[b], want.out_bound, f"out (part {b})")
        compare.assert_close(lse, want.lse[b], want.lse_bound, f"lse (part {b})")

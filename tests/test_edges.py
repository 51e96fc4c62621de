"""Arrays of other libraries on the host: same numbers, own kind, no copies."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from edge_arrays import F32, Dlpack, Jax, Library, Torch, inputs
from refusal import refused

import cuflash
from cuflash import edges

LIBRARIES = [
    pytest.param(Torch, marks=pytest.mark.torch),
    pytest.param(Jax, marks=pytest.mark.jax),
    Dlpack,
]
WRITEABLE = [LIBRARIES[0], Dlpack]


@pytest.fixture
def library(request) -> Library:
    return request.param()


every = pytest.mark.parametrize("library", LIBRARIES, indirect=True, ids=lambda p: p.__name__)
writeable = pytest.mark.parametrize("library", WRITEABLE, indirect=True, ids=lambda p: p.__name__)
torches = pytest.mark.torch


@every
def test_results_are_of_the_kind_of_q_and_the_numbers_those_of_numpy(library):
    q, k, v = inputs()
    args = [library.make(a) for a in (q, k, v)]
    for options in ({}, {"causal": True}, {"window": (2, 1), "softcap": 3.0}, {"layout": "BHSD"}):
        if options.get("layout") == "BHSD":
            q, k, v = inputs(shape=(2, 4, 3, 16), heads_kv=3)
            args = [library.make(a) for a in (q, k, v)]
        want = cuflash.attention(q, k, v, return_lse=True, **options)
        got = cuflash.attention(*args, return_lse=True, **options)
        assert type(got) is tuple
        for g, w in zip(got, want, strict=True):
            assert library.read(g).dtype == w.dtype and np.array_equal(library.read(g), w)
        assert np.array_equal(library.read(cuflash.attention(*args, **options)), want[0])
        assert np.array_equal(library.read(cuflash.logsumexp(*args[:2], **options)), want[1])
        weights = cuflash.attention_weights(*args[:2], **options)
        assert np.array_equal(library.read(weights), cuflash.attention_weights(q, k, **options))


@every
def test_parameters_of_the_same_library(library):
    q, k, v = inputs()
    rng = np.random.default_rng(1)
    arrays = {
        "bias": rng.standard_normal((4, 5, 5)).astype(F32), "mask": rng.random((2, 1, 5, 5)) < 0.7,
        "sinks": rng.standard_normal(4).astype(F32), "alibi_slopes": rng.random(4).astype(F32),
        "kv_lengths": np.array([3, 5], np.int32), "kv_start": np.array([0, 1], np.int32),
    }  # fmt: skip
    want = cuflash.attention(q, k, v, **arrays)
    got = cuflash.attention(*map(library.make, (q, k, v)), **{name: library.make(a) for name, a in arrays.items()})
    assert np.array_equal(library.read(got), want)
    host = {name: a if name not in ("bias", "mask") else library.make(a) for name, a in arrays.items()}
    host["kv_lengths"] = [3, 5]
    assert np.array_equal(library.read(cuflash.attention(*map(library.make, (q, k, v)), **host)), want)

    def shifted(s, b, h, i, j, table):
        assert type(table) is np.ndarray
        return s + table[h]

    options = {"score_mod": shifted, "mod_args": {"table": np.arange(4.0, dtype=F32)}}
    want = cuflash.attention(q, k, v, **options)
    options["mod_args"] = {"table": library.make(options["mod_args"]["table"])}
    assert np.array_equal(library.read(cuflash.attention(*map(library.make, (q, k, v)), **options)), want)


@every
def test_packed_paged_planned_explained_and_merged(library):
    q, k, v = inputs(shape=(5, 4, 16))
    args = [library.make(a) for a in (q, k, v)]
    cu = np.array([0, 2, 5], np.int32)
    want = cuflash.attention_varlen(q, k, v, cu, cu, causal=True)
    assert np.array_equal(library.read(cuflash.attention_varlen(*args, library.make(cu), [0, 2, 5], causal=True)), want)
    numbers = {"max_seqlen_q": library.make(np.array(3, np.int32)), "scale": library.make(np.array(0.25, F32))}
    assert np.array_equal(library.read(cuflash.attention_varlen(*args, cu, cu, causal=True, **numbers)), want)
    named = dict(zip(("q", "k", "v"), args, strict=True))
    assert np.array_equal(library.read(cuflash.attention_varlen(cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, **named)), want)

    pages = [np.ascontiguousarray(a.reshape(5, 1, 2, 16)) for a in (k, v)]
    table = np.array([[4, 2, 0]], np.int32)
    want = cuflash.attention(q[None], *pages, page_table=table, kv_lengths=[3])
    got = cuflash.attention(library.make(q[None]), *map(library.make, pages), page_table=library.make(table), kv_lengths=[3])
    assert np.array_equal(library.read(got), want)

    plan = cuflash.plan(*args, causal=True, return_lse=True)
    want = cuflash.attention(q, k, v, causal=True, return_lse=True)
    for g, w in zip(plan.run(*args), want, strict=True):
        assert np.array_equal(library.read(g), w)
    assert np.array_equal(plan.run(q, k, v)[0], want[0]), "a plan is for a signature, whatever the library"
    assert str(cuflash.explain(*args)) == str(cuflash.explain(q, k, v))

    parts = [cuflash.attention(q, k[s], v[s], return_lse=True) for s in (slice(2), slice(2, 5))]
    outs, lses = zip(*parts, strict=True)
    want = cuflash.merge_states(outs, lses)
    for made in (lambda xs: [library.make(x) for x in xs], lambda xs: library.make(np.stack(xs))):
        for g, w in zip(cuflash.merge_states(made(outs), made(lses)), want, strict=True):
            assert np.array_equal(library.read(g), w)
    want = cuflash.merge_softmax_stats(1.0, 2.0, lses[0], 1.0)
    for g, w in zip(cuflash.merge_softmax_stats(1.0, 2.0, library.make(lses[0]), 1.0), want, strict=True):
        assert np.array_equal(library.read(g), w)


@every
def test_gradients(library):
    q, k, v = inputs()
    sinks = np.arange(4, dtype=F32)
    bias = np.random.default_rng(1).standard_normal((4, 5, 5)).astype(F32)
    options = {"causal": True, "sinks": sinks, "bias": bias}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    want = cuflash.attention_backward(np.ones_like(out), q, k, v, out, lse, **options)
    options = {"causal": True, "sinks": library.make(sinks), "bias": library.make(bias)}
    arrays = [library.make(a) for a in (np.ones_like(out), q, k, v, out, lse)]
    got = cuflash.attention_backward(*arrays, **options)
    assert isinstance(got, cuflash.Gradients)
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(library.read(g), w)


@writeable
def test_results_and_caches_are_written_where_they_lie(library):
    q, k, v = inputs()
    want = cuflash.attention(q, k, v, return_lse=True)
    out, lse = np.full(q.shape[:2] + (4, 16), np.nan, F32), np.full((2, 4, 5), np.nan, F32)
    given = library.make(out), library.make(lse)
    got = cuflash.attention(*map(library.make, (q, k, v)), out=given[0], lse=given[1], return_lse=True)
    assert got[0] is given[0] and got[1] is given[1]
    assert np.array_equal(out, want[0]) and np.array_equal(lse, want[1])
    assert cuflash.attention(*map(library.make, (q, k, v)), out=given[0]) is given[0]

    caches, copies = ([np.zeros((2, 8, 2, 16), F32) for _ in range(2)] for _ in range(2))
    want = cuflash.decode(q, *copies, [1, 0], k_new=k, v_new=v, causal=True)
    new = {"k_new": library.make(k), "v_new": library.make(v)}
    got = cuflash.decode(library.make(q), *map(library.make, caches), library.make(np.array([1, 0])), causal=True, **new)
    assert np.array_equal(library.read(got), want)
    assert all(np.array_equal(a, b) and a.any() for a, b in zip(caches, copies, strict=True))


@every
def test_no_input_is_copied(library, monkeypatch):
    seen = []
    inner = edges.call

    def spy(function, arguments, **more):
        def looked_at(**given):
            seen.extend(given[name].__array_interface__["data"][0] for name in "qkv")
            return function(**given)

        looked_at.__name__ = function.__name__
        return inner(looked_at, arguments, **more)

    monkeypatch.setattr(edges, "call", spy)
    args = [library.make(a) for a in inputs()]
    cuflash.attention(*args)
    address = {"Torch": lambda x: x.data_ptr(), "Jax": lambda x: x.unsafe_buffer_pointer(), "Dlpack": lambda x: x.a.ctypes.data}
    assert seen == [address[type(library).__name__](x) for x in args]


@pytest.mark.parametrize("library", LIBRARIES[:2], indirect=True, ids=lambda p: p.__name__)
def test_bfloat16_goes_through(library):
    arrays = inputs(ml_dtypes.bfloat16)
    out, lse = cuflash.attention(*map(library.make, arrays), return_lse=True)
    want = cuflash.attention(*arrays, return_lse=True)
    assert library.read(out).dtype == ml_dtypes.bfloat16 and np.array_equal(library.read(out).view(np.int16), want[0].view(np.int16))
    assert np.array_equal(library.read(lse), want[1])


@every
def test_arrays_without_elements_and_without_axes(library):
    q, k, v = inputs()
    empty = cuflash.attention(library.make(q[:0]), library.make(k[:0]), library.make(v[:0]))
    assert library.read(empty).shape == (0, 5, 4, 16)
    none = cuflash.attention(library.make(q), library.make(k[:, :0]), library.make(v[:, :0]))
    assert library.read(none).shape == q.shape and not library.read(none).any()
    with refused(ValueError, "q:", "0 axes"):
        cuflash.attention(*[library.make(np.array(1.0, F32))] * 3)


@every
def test_one_kind_for_all_arrays(library):
    q, k, v = inputs()
    x = library.make(q)
    there, own = ("numpy.ndarray", f"q is {cuflash.arrays.type_name(x)}")
    for options, name in (((k, library.make(v)), "k"), ((library.make(k), v), "v")):
        with refused(TypeError, f"{name}:", there, own, "of one kind"):
            cuflash.attention(x, *options)
    with refused(TypeError, "k:", cuflash.arrays.type_name(x), "all of one library", "as q is"):
        cuflash.attention(q, library.make(k), v)
    for option in ({"bias": q[0, :, 0, :5]}, {"mask": np.ones((5, 5), bool)}, {"out": np.empty_like(q)}, {"lse": np.empty((2, 4, 5), F32)}):
        (name,) = option
        with refused(TypeError, f"{name}:", there, own, "of one kind"):
            cuflash.attention(x, library.make(k), library.make(v), **option)
    with refused(TypeError, "outs[1]:", there, "outs[0] is", "of one kind"):
        cuflash.merge_states([library.make(q[0, :, 0]), q[0, :, 0]], [q[0, :, 0, 0]] * 2)
    with refused(ValueError, "sinks:", "shape (3,)"):
        cuflash.attention(x, library.make(k), library.make(v), sinks=library.make(np.ones(3, F32)))
    with refused(TypeError, "got list"):
        cuflash.attention(x, [[1.0]], library.make(v))
    with refused(TypeError, "stream:", "host memory"):
        cuflash.attention(x, library.make(k), library.make(v), stream=0)
    with refused(TypeError, "q:", "int32"):
        cuflash.attention(*[library.make(np.ones((2, 3), np.int32))] * 3)


# --- PyTorch ---------------------------------------------------------------------------------------------------------


@torches
def test_tensors_of_any_strides():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, inputs())
    want = cuflash.attention(q, k, v, causal=True)
    views = {
        "transposed": q.transpose(1, 2).contiguous().transpose(1, 2),
        "spaced": torch.zeros(2, 5, 8, 32)[:, :, ::2, ::2].copy_(q),
        "offset": torch.zeros(q.numel() + 1)[1:].view(q.shape).copy_(q),
    }
    for x in views.values():
        assert torch.equal(cuflash.attention(x, k, v, causal=True), want)
        out = torch.empty_like(x)
        assert cuflash.attention(q, k, v, causal=True, out=out) is out and torch.equal(out, want)
    shared = k[:, :, :1].expand(2, 5, 4, 16)
    assert torch.equal(cuflash.attention(q, shared, shared), cuflash.attention(q, shared.contiguous(), shared.contiguous()))
    with refused(ValueError, "out:", "share one address"):
        cuflash.attention(q, k, v, out=torch.zeros(1, 1, 1, 16).expand(2, 5, 4, 16))
    with refused(ValueError, "out:", "overlaps q"):
        cuflash.attention(q, k, v, out=q)
    assert cuflash.attention(q, k, v, out_dtype=torch.float64).dtype is torch.float64
    bits = torch.ones(2, 3, dtype=torch.bfloat16).t()
    assert cuflash.attention(bits, bits, bits).dtype is torch.bfloat16


@torches
def test_tensors_that_autograd_follows():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, inputs())
    followed = k.clone().requires_grad_()
    for form in (followed, torch.nn.Parameter(k.clone()), followed * 1):
        with refused(TypeError, "k:", "requires grad", "torch.no_grad()", "k.detach()", "attention_backward"):
            cuflash.attention(q, form, v)
        with torch.no_grad():
            out = cuflash.attention(q, form, v)
        with torch.inference_mode():
            assert torch.equal(cuflash.attention(q, form, v), out)
        assert not out.requires_grad and torch.equal(out, cuflash.attention(q, k, v))
    with refused(TypeError, "out:", "requires grad"):
        cuflash.attention(q, k, v, out=torch.empty_like(q).requires_grad_())


@torches
def test_tensors_that_are_more_than_memory():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, inputs())
    negative = torch.complex(q, q).conj().imag
    assert negative.is_neg()
    with refused(TypeError, "q:", "negative bit", "q.resolve_neg()"):
        cuflash.attention(negative, k, v)
    assert torch.equal(cuflash.attention(negative.resolve_neg(), k, v), cuflash.attention(-q, k, v))
    with refused(TypeError, "k:", "conjugate bit", "k.resolve_conj()"):
        cuflash.attention(q, torch.complex(k, k).conj(), v)
    with refused(TypeError, "q:", "complex64", "allowed are"):
        cuflash.attention(*[torch.complex(q, q)] * 3)
    with refused(TypeError, "q:", "sparse_coo", "q.to_dense()"):
        cuflash.attention(q.to_sparse(), k, v)
    with refused(TypeError, "v:", "on meta", "allowed are tensors on the CPU and on CUDA devices"):
        cuflash.attention(q, k, v.to("meta"))
    with refused(TypeError, "q:", "nested"):
        cuflash.attention(torch.nested.nested_tensor([q[0], q[1, :3]], layout=torch.strided), k, v)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode, refused(TypeError, "q:", "FakeTensor", "wrapper"):
        cuflash.attention(mode.from_tensor(q), k, v)
    with refused(TypeError, "q:", "without memory of its own"):
        torch.func.vmap(lambda x: cuflash.attention(x, x, x))(q)
    with refused(TypeError, "q:", "quint8"):
        cuflash.attention(torch.quantize_per_tensor(q, 1.0, 0, torch.quint8), k, v)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        with refused(NotImplementedError, "q:", str(dtype).removeprefix("torch."), "not supported yet"):
            cuflash.attention(*[x.to(dtype) for x in (q, k, v)])


@torches
def test_index_tensors_beside_numpy_arrays():
    torch = pytest.importorskip("torch")
    q, k, v = inputs()
    assert np.array_equal(cuflash.attention(q, k, v, kv_lengths=torch.tensor([1, 2])), cuflash.attention(q, k, v, kv_lengths=[1, 2]))
    for bad in (torch.ones(4, requires_grad=True), torch.ones(4, dtype=torch.bfloat16)):
        with refused(TypeError, "sinks:", "torch.Tensor", "NumPy cannot read", "NumPy arrays and lists"):
            cuflash.attention(q, k, v, sinks=bad)
    there = SimpleNamespace(__cuda_array_interface__={"shape": (2,), "typestr": "<i4", "data": (8, False), "version": 3})
    with refused(TypeError, "kv_lengths:", "on a device", "not read back", "NumPy arrays and lists"):
        cuflash.attention(q, k, v, kv_lengths=there)


# --- JAX -------------------------------------------------------------------------------------------------------------


@pytest.mark.jax
def test_what_jax_does_not_allow():
    jax = pytest.importorskip("jax")
    q, k, v = map(Jax().make, inputs())
    with refused(ValueError, "out:", "immutable", "leave it away"):
        cuflash.attention(q, k, v, out=q + 1)
    cache = Jax().make(np.zeros((2, 8, 2, 16), F32))
    with refused(ValueError, "k_cache:", "immutable", "another library"):
        cuflash.decode(q, cache, cache, [1, 2], k_new=k, v_new=v)
    assert cuflash.decode(q, cache, cache, [1, 2]).shape == q.shape, "nothing is written without new keys"
    for transform in (jax.jit, jax.vmap):
        with refused(TypeError, "q:", "tracer", "jax.pure_callback"):
            transform(lambda x: cuflash.attention(x, x, x))(q)
    with refused(TypeError, "out_dtype:", "float64", "jax_enable_x64"):
        cuflash.attention(q, k, v, out_dtype=np.float64)
    with refused(NotImplementedError, "q:", "float8_e4m3fn"):
        cuflash.attention(*[x.astype(jax.numpy.float8_e4m3fn) for x in (q, k, v)])
    with refused(TypeError, "q:", "key<"):
        cuflash.attention(jax.random.key(0), k, v)
    gone = q + 1
    gone.delete()
    with refused(ValueError, "q:", "deleted"):
        cuflash.attention(gone, k, v)


@pytest.mark.jax
def test_within_jit_by_a_callback():
    jax = pytest.importorskip("jax")
    arrays = inputs()

    @jax.jit
    def inside(q, k, v):
        return jax.pure_callback(lambda *x: cuflash.attention(*map(np.asarray, x)), jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v)

    assert np.array_equal(np.asarray(inside(*map(Jax().make, arrays))), cuflash.attention(*arrays))

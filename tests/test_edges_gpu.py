"""Arrays of PyTorch, JAX, Numba and the bare protocols on a GPU: CuPy's bits, the library's own kind, memory and streams."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest
from refusal import refused

import cuflash
from cuflash.edges import base

# JAX takes three quarters of the GPU's memory when it starts, unless it is told not to.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

pytestmark = pytest.mark.gpu

F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
DTYPES = pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)


def inputs(dtype=F16, shape=(2, 130, 4, 64), heads_kv=2):
    rng = np.random.default_rng(0)
    kv = (*shape[:-2], heads_kv, shape[-1])
    return [rng.standard_normal(s).astype(F32).astype(dtype) for s in (shape, kv, kv)]


def there(a):
    """A CuPy array of a NumPy array."""
    import cupy

    return cupy.asarray(a.view(np.uint16)).view(a.dtype) if a.dtype == BF16 else cupy.asarray(a)


def here(a):
    """The bits of a CuPy array."""
    import cupy

    return a.view(cupy.uint16).get() if a.dtype.itemsize == 2 else a.get()


def expected(dtype=F16, arrays=None, **options):
    """What CuPy arrays give, as bits."""
    results = cuflash.attention(*map(there, arrays or inputs(dtype)), return_lse=True, **options)
    return [here(x) for x in results]


# --- PyTorch ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch sees no GPU")
    return module


def tensor(torch, a):
    if a.dtype == BF16:
        return torch.from_numpy(a.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(a).cuda()


def bits(x):
    """The bits of a tensor."""
    import torch

    assert isinstance(x, torch.Tensor) and x.is_cuda
    if x.element_size() == 2:
        return x.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    return x.cpu().numpy()


def assert_bits(got, want):
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(bits(g), w)


@pytest.mark.torch
@DTYPES
def test_tensors_give_what_cupy_arrays_give(torch, dtype):
    arrays = [tensor(torch, a) for a in inputs(dtype)]
    for options in ({}, {"causal": True}, {"window": (20, 0)}, {"layout": "BHSD"}):
        host = inputs(dtype)
        if options.get("layout") == "BHSD":
            host = [np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for a in host]
            arrays = [tensor(torch, a) for a in host]
        want = expected(arrays=host, **options)
        for _ in range(3):  # cold, then warm
            got = cuflash.attention(*arrays, return_lse=True, **options)
            assert got[0].dtype is arrays[0].dtype and got[1].dtype is torch.float32 and got[0].device == arrays[0].device
            assert_bits(got, want)
    out, lse = torch.full_like(arrays[0], torch.nan), torch.full(got[1].shape, torch.nan, device="cuda")
    again = cuflash.attention(*arrays, out=out, lse=lse, return_lse=True, **options)
    assert again[0] is out and again[1] is lse
    assert_bits(again, want)
    plan = cuflash.plan(*arrays, return_lse=True, **options)
    for _ in range(2):
        assert_bits(plan.run(*arrays), want)


@pytest.mark.torch
@pytest.mark.parametrize("how", [{"kernel": "naive", "backend": "cuda"}, {"backend": "cuda"}], ids=["naive", "fa2"])
def test_options_that_are_tensors(torch, how):
    arrays = [tensor(torch, a) for a in inputs()]
    rng = np.random.default_rng(1)
    bias, mask = rng.standard_normal((4, 130, 130)).astype(F16), rng.random((2, 1, 130, 130)) < 0.7
    mask[..., 0] = True
    sinks, its_sinks = [0.5, 1, 2, 3], torch.tensor([0.5, 1, 2, 3], dtype=torch.bfloat16)
    if how.get("kernel") == "naive":
        sinks = its_sinks = None  # it has none
    want = expected(bias=there(bias), mask=there(mask), sinks=sinks, **how)
    got = cuflash.attention(*arrays, bias=tensor(torch, bias), mask=tensor(torch, mask), sinks=its_sinks, return_lse=True, **how)
    assert_bits(got, want)
    lengths = np.array([70, 130], np.int32)
    want = expected(kv_lengths=lengths, **how)
    for form in (tensor(torch, lengths), torch.from_numpy(lengths), [70, 130]):
        if how.get("kernel") == "naive" and getattr(form, "is_cuda", False):
            continue  # takes lengths on the host alone
        for _ in range(2):
            assert_bits(cuflash.attention(*arrays, kv_lengths=form, return_lse=True, **how), want)


@pytest.mark.torch
def test_packed_tensors_and_caches(torch):
    import cupy

    q, k, v = inputs(shape=(300, 4, 64))
    cu = np.array([0, 100, 300], np.int32)
    want = cuflash.attention_varlen(*map(there, (q, k, v)), there(cu), there(cu), causal=True)
    got = cuflash.attention_varlen(*(tensor(torch, a) for a in (q, k, v, cu, cu)), causal=True)
    assert_bits([got], [here(want)])

    new = inputs(F32, (2, 1, 4, 64))
    caches = [cupy.zeros((2, 32, 2, 64), F32) for _ in range(2)]
    tensors = [torch.zeros(2, 32, 2, 64, device="cuda") for _ in range(2)]
    for step in range(3):
        want = cuflash.decode(there(new[0]), *caches, [step, step + 4], k_new=there(new[1]), v_new=there(new[2]))
        q, k, v = (tensor(torch, a) for a in new)
        got = cuflash.decode(q, *tensors, torch.tensor([step, step + 4]), k_new=k, v_new=v)
        assert_bits([got, *tensors], [here(want), *map(here, caches)])


@pytest.mark.torch
def test_tensors_of_any_strides_and_of_no_size(torch):
    q, k, v = (tensor(torch, a) for a in inputs())
    want = cuflash.attention(q, k, v, causal=True)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.empty(2, 64, 4, 130, dtype=q.dtype, device="cuda").permute(0, 3, 2, 1)
    assert torch.equal(cuflash.attention(turned, k, v, causal=True, out=out), want)
    offset = torch.zeros(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    apart = (cuflash.attention(offset, k, v, causal=True) - want).abs().max()  # by another tile
    assert apart <= 2 * torch.finfo(q.dtype).eps * want.abs().max()
    one = k[:, :, :1].expand(2, 130, 4, 64)
    assert torch.equal(cuflash.attention(q, one, one), cuflash.attention(q, one.contiguous(), one.contiguous()))
    assert cuflash.attention(q[:0], k[:0], v[:0]).shape == (0, 130, 4, 64)
    assert not cuflash.attention(q, k[:, :0], v[:, :0]).any()
    with refused(ValueError, "out:", "overlaps q"):
        cuflash.attention(q, k, v, out=q)
    with refused(ValueError, "k:", "on cpu, but q is on cuda:0", "on one device"):
        cuflash.attention(q, k.cpu(), v)
    with refused(NotImplementedError, "q:", "float8_e4m3fn"):
        cuflash.attention(*[x.to(torch.float8_e4m3fn) for x in (q, k, v)])
    with refused(TypeError, "q:", "requires grad"):
        cuflash.attention(q.clone().requires_grad_(), k, v)


@pytest.mark.torch
def test_memory_is_pytorchs(torch):
    import cupy

    q, k, v = (tensor(torch, a) for a in inputs(shape=(2, 2048, 4, 64)))
    cuflash.attention(q, k, v, return_lse=True)
    torch.cuda.synchronize()
    pool, before = cupy.get_default_memory_pool().used_bytes(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    needed = out.nbytes + lse.nbytes
    assert torch.cuda.memory_allocated() - before == needed == torch.cuda.max_memory_allocated() - before
    assert cupy.get_default_memory_pool().used_bytes() == pool
    assert out.untyped_storage().nbytes() == out.nbytes and out.is_contiguous()
    del out, lse
    assert torch.cuda.memory_allocated() == before


@pytest.mark.torch
@pytest.mark.parametrize("form", ["current", "stream", "pointer"])
def test_work_goes_to_pytorchs_current_stream_or_to_the_one_given(torch, form):
    q, k, v = (tensor(torch, a) for a in inputs())
    want = cuflash.attention(q, k, v, causal=True)
    stream, busy = torch.cuda.Stream(), torch.zeros(1 << 28, device="cuda")
    late = torch.full_like(q, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(4):
            busy += 1
        late.copy_(q)
        if form == "current":
            out = cuflash.attention(late, k, v, causal=True)
    if form != "current":
        out = cuflash.attention(late, k, v, causal=True, stream=stream if form == "stream" else stream.cuda_stream)
    with torch.cuda.stream(stream):
        result = out + 0
    stream.synchronize()
    assert torch.equal(result, want)
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "it is given back"


@pytest.mark.torch
def test_a_call_in_a_graph_of_pytorch(torch):
    q, k, v = (tensor(torch, a) for a in inputs())
    want = cuflash.attention(q, k, v, causal=True)
    still, graph = torch.zeros_like(q), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cuflash.attention(still, k, v, causal=True)  # compiled before
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = cuflash.attention(still, k, v, causal=True)
    still.copy_(q)
    filler = [torch.full_like(q, torch.nan) for _ in range(8)]  # would land in memory that the graph does not own
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want) and len(filler) == 8


@pytest.mark.torch
def test_merging_tensors(torch):
    q, k, v = (tensor(torch, a) for a in inputs())
    whole = cuflash.attention(q, k, v, return_lse=True)
    outs, lses = zip(*(cuflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(60), slice(60, 130))), strict=True)
    out, lse = cuflash.merge_states(outs, lses)
    assert out.is_cuda and out.dtype is q.dtype
    assert (out - whole[0]).abs().max() <= 4 * 2**-11 * whole[0].abs().max()
    assert (lse - whole[1]).abs().max() <= 1e-5


# --- JAX -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jax():
    module = pytest.importorskip("jax")
    try:
        module.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"this JAX sees no GPU: {error}")
    return module


def jax_bits(x):
    a = np.asarray(x)
    return a.view(np.uint16) if a.dtype.itemsize == 2 else a


@pytest.mark.jax
@DTYPES
def test_jax_arrays_give_what_cupy_arrays_give(jax, dtype):
    device = jax.devices("gpu")[0]
    arrays = [jax.device_put(a, device) for a in inputs(dtype)]
    want = expected(dtype, causal=True)
    for _ in range(3):
        got = cuflash.attention(*arrays, causal=True, return_lse=True)
        for g, w in zip(got, want, strict=True):
            assert isinstance(g, jax.Array) and g.devices() == {device} and np.array_equal(jax_bits(g), w)
    plan = cuflash.plan(*arrays, causal=True)
    assert np.array_equal(jax_bits(plan.run(*arrays)), want[0])
    empty = cuflash.attention(*(a[:0] for a in arrays))
    assert isinstance(empty, jax.Array) and empty.shape == (0, 130, 4, 64) and empty.devices() == {device}
    for name in ("out", "lse"):
        with refused(ValueError, f"{name}:", "immutable"):
            cuflash.attention(*arrays, **{name: arrays[0]})
    cpu = jax.device_put(inputs(dtype)[1], jax.devices("cpu")[0])
    with refused(ValueError, "k:", "on the host, but q is on GPU 0", "on one device"):
        cuflash.attention(arrays[0], cpu, arrays[2])


@pytest.mark.jax
def test_work_of_jax_comes_before_and_after(jax):
    """q is what a long computation leaves, its memory is given up at once, and JAX goes on with the result."""
    jnp = jax.numpy
    q, k, v = (jax.device_put(a, jax.devices("gpu")[0]) for a in inputs())
    want = expected(causal=True)[0]

    @jax.jit
    def late(x, a):
        return x + (jax.lax.fori_loop(0, 30, lambda _, b: jnp.tanh(b @ b), a).sum() * 0).astype(x.dtype)

    a = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.float32) * 1e-3
    late(q, a).block_until_ready()
    results = []
    for _ in range(8):
        out = cuflash.attention(late(q, a), k, v, causal=True)
        spoil = [jnp.full_like(q, jnp.nan) for _ in range(4)]  # takes the memory that has become free
        results.append(out * 1)
        del out, spoil
    for x in results:
        assert np.array_equal(jax_bits(x), want)
    jax.block_until_ready(results)


# --- the bare protocols ----------------------------------------------------------------------------------------------


class Producer:
    def __init__(self, a):
        self.a = a

    def __dlpack__(self, **options):
        return self.a.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.a.__dlpack_device__()


class Interface:
    def __init__(self, a, stream=None):
        self.__cuda_array_interface__ = {**a.__cuda_array_interface__, "stream": stream}
        self.owner = a


@DTYPES
@pytest.mark.parametrize("kind", [Producer, Interface])
def test_bare_protocols(kind, dtype):
    import cupy

    want = expected(dtype, causal=True)
    arrays = [there(a) for a in inputs(dtype)]
    if kind is Interface and dtype == BF16:
        with refused(TypeError, "q:", "no name for bfloat16"):
            cuflash.attention(*map(kind, arrays))
        return
    for _ in range(2):
        got = cuflash.attention(*map(kind, arrays), causal=True, return_lse=True)
        assert all(isinstance(x, cupy.ndarray) for x in got)
        for g, w in zip(got, want, strict=True):
            assert np.array_equal(here(g), w)
    out = cupy.full_like(arrays[0].view(cupy.uint16 if dtype.itemsize == 2 else F32), 7).view(dtype)
    target = kind(out)
    assert cuflash.attention(*map(kind, arrays), causal=True, out=target) is target
    assert np.array_equal(here(out), want[0])
    cupy.cuda.Device().synchronize()
    base.keep_until_done([])
    cupy.cuda.Device().synchronize()
    base.keep_until_done([])
    assert len(base._waiting) <= 1, "what has been read is let go"


def test_the_stream_of_an_interface_goes_first():
    import cupy

    q, k, v = (there(a) for a in inputs())
    want = expected(causal=True)[0]
    stream, busy = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1 << 28, F32)
    late = cupy.full_like(q, np.nan)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(4):
            busy += 1
        late[...] = q
    here_now = cupy.cuda.Stream(non_blocking=True)
    with here_now:
        out = cuflash.attention(Interface(late, stream.ptr), Interface(k), Interface(v), causal=True)
        result = out + 0
    here_now.synchronize()
    assert np.array_equal(here(result), want)


def test_device_arrays_of_numba():
    cuda = pytest.importorskip("numba.cuda")
    arrays = inputs()
    try:
        there_now = [cuda.to_device(a) for a in arrays]
    except Exception as error:
        pytest.skip(f"Numba's CUDA does not start: {error}")
    out, lse = cuflash.attention(*there_now, causal=True, return_lse=True)
    assert type(out) is type(lse) is type(there_now[0])
    want = expected(causal=True)
    assert np.array_equal(out.copy_to_host().view(np.uint16), want[0]) and np.array_equal(lse.copy_to_host(), want[1])

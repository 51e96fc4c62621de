"""DLPack and __cuda_array_interface__: producers that have nothing else, and the GPU's with a stand-in for it."""

from __future__ import annotations

import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from edge_arrays import F32, OldProducer, Producer, inputs
from fake_cupy import FakeArray, pretended_gpus
from refusal import refused

import cuflash
from cuflash import warm
from cuflash.edges import base


def test_producers_of_dlpack_without_a_namespace_get_numpy_arrays():
    arrays = inputs()
    want = cuflash.attention(*arrays)
    for kind in (Producer, OldProducer):
        got = cuflash.attention(*map(kind, arrays))
        assert type(got) is np.ndarray and np.array_equal(got, want)
    out = np.empty_like(arrays[0])
    target = Producer(out)
    assert cuflash.attention(*map(Producer, arrays), out=target) is target and np.array_equal(out, want)
    frozen = out.copy()
    frozen.flags.writeable = False
    for target in (OldProducer(out), Producer(frozen)):
        with refused(ValueError, "out:", "read-only"):
            cuflash.attention(*map(type(target), arrays), out=target)


def test_what_dlpack_cannot_bring():
    q, k, v = inputs()
    with refused(TypeError, "v:", "Producer", "DLPack's type 8", "allowed are host memory and CUDA"):
        cuflash.attention(Producer(q), Producer(k), Producer(v, (8, 0)))

    class Unnamed(Producer):
        def __dlpack__(self, **options):
            raise RuntimeError("Unsupported dtype in DLTensor.")

    with refused(TypeError, "q:", "Unsupported dtype", "neither bfloat16 nor float8", "ml_dtypes"):
        cuflash.attention(Unnamed(q), Producer(k), Producer(v))


class Device(Producer):
    """An array on a pretended GPU that speaks DLPack."""

    def __init__(self, a: FakeArray):
        super().__init__(a)
        self.waits = []

    def __dlpack_device__(self):
        return (2, self.a.device.id)

    def __dlpack__(self, stream=None, **options):
        self.waits.append(stream)
        return self


class Interface:
    """One that has ``__cuda_array_interface__`` alone."""

    def __init__(self, a: FakeArray, **more):
        self.a = a
        self.__cuda_array_interface__ = {
            "shape": a.shape, "strides": a.strides, "typestr": a.dtype.str, "data": (a.data.ptr, False), "version": 3, **more,
        }  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """The pretended GPUs, with CuPy's doors for arrays of others, events and streams."""
    warm.problems.clear()
    warm.launches.clear()
    base._waiting.clear()
    with pretended_gpus(monkeypatch) as fake:
        cupy = sys.modules["cupy"]
        fake.events, fake.order = [], []

        class Event:
            def __init__(self, **options):
                self.done, self.stream = False, None
                fake.events.append(self)

            def record(self, stream):
                self.stream = stream.ptr

        def current():
            now = fake.current()
            return SimpleNamespace(ptr=now.stream, wait_event=lambda event: fake.order.append((now.stream, event.stream)))

        def from_dlpack(x):
            x.__dlpack__(stream=fake.current().stream)
            return FakeArray((), host=x.a.host, device_id=x.a.device.id)

        def asarray(x):
            interface = getattr(x, "__cuda_array_interface__", None)
            if interface is None:
                return FakeArray((), host=np.array(x))
            assert interface["stream"] is None, "CuPy would wait for it"
            return FakeArray((), host=x.owner.a.host, device_id=x.owner.a.device.id)

        monkeypatch.setattr(cupy, "from_dlpack", from_dlpack, raising=False)
        monkeypatch.setattr(cupy, "asarray", asarray)
        monkeypatch.setattr(cupy.cuda, "Event", Event, raising=False)
        monkeypatch.setattr(cupy.cuda, "get_current_stream", current)
        using = cupy.cuda.Stream.from_external

        class Stream:
            """A stream, and a context in which it is the current one."""

            def __init__(self, stream):
                self.ptr = stream.__cuda_stream__()[1]
                self.context = using(stream)

            def __enter__(self):
                return self.context.__enter__()

            def __exit__(self, *error):
                return self.context.__exit__(*error)

        monkeypatch.setattr(cupy.cuda, "Stream", SimpleNamespace(from_external=Stream))
        places = {}
        monkeypatch.setattr(
            cupy.cuda.runtime, "pointerGetAttributes", lambda pointer: SimpleNamespace(device=places.get(pointer, 0)), raising=False
        )
        fake.places = places
        yield fake
    base._waiting.clear()


def on_gpu(kind, device_id=0, **more):
    arrays = []
    for a in inputs(np.float16):
        there = FakeArray(a.shape, a.dtype, device_id=device_id)
        there.host[...] = a
        arrays.append(kind(there, **more))
    return arrays


def close(got, want):
    np.testing.assert_allclose(got.host.astype(F32), want.astype(F32), rtol=4 * 2**-10, atol=1e-6)


@pytest.mark.parametrize("kind", [Device, Interface])
def test_arrays_on_a_gpu_that_speak_a_protocol(gpu, kind):
    want = cuflash.attention(*inputs(np.float16), causal=True, backend="reference")
    for _ in range(3):
        arrays = on_gpu(kind)
        got = cuflash.attention(*arrays, causal=True)
        assert type(got) is FakeArray
        close(got, want)
    assert len(gpu.launches) == 3 and len(warm.launches) == 1, "the second call finds the launch of the first"
    arrays = on_gpu(kind, device_id=1)
    if kind is Interface:
        gpu.places.update((x.a.data.ptr, 1) for x in arrays)
    out = cuflash.attention(*arrays, stream=77)
    assert out.device.id == 1 and gpu.launches[-1].device == 1 and gpu.launches[-1].stream == 77
    if kind is Device:
        assert all(x.waits == [77] for x in arrays), "the producer is told where its array will be read"
    with refused(ValueError, "k:", "GPU 1", "q is on GPU 0", "on one device"):
        cuflash.attention(on_gpu(kind)[0], *arrays[1:])


def test_memory_of_others_lives_until_it_has_been_read(gpu):
    arrays = on_gpu(Device)
    cuflash.attention(*arrays)
    ((event, views),) = base._waiting
    assert event.stream == 0 and len(views) == 3
    alive = weakref.ref(views[0])
    del views, arrays
    cuflash.attention(*on_gpu(Device))
    assert alive() is not None, "the kernel may still be reading"
    event.done = True
    cuflash.attention(*on_gpu(Device))
    assert alive() is None
    kept = len(base._waiting)
    gpu.capturing = True
    cuflash.attention(*on_gpu(Device))
    assert len(base._waiting) == kept, "no event belongs into a capture"


def test_a_stream_in_the_interface_goes_first(gpu):
    q, k, v = on_gpu(Interface)
    q.__cuda_array_interface__["stream"], k.__cuda_array_interface__["stream"] = 5, 1
    cuflash.attention(q, k, v)
    assert gpu.order == [(0, 5)], "CuPy's stream is the default one, which 1 names"
    assert gpu.waited == 0
    v.__cuda_array_interface__["stream"] = 0
    with refused(ValueError, "v:", "stream 0", "not allowed"):
        cuflash.attention(q, k, v)


def test_what_the_interface_cannot_bring(gpu):
    q, k, v = on_gpu(Interface)
    for typestr in ("<V2", "|V2"):
        k.__cuda_array_interface__["typestr"] = typestr
        with refused(TypeError, "k:", repr(typestr), "no name for bfloat16", "view(ml_dtypes.bfloat16)"):
            cuflash.attention(q, k, v)
    masked = on_gpu(Interface, mask=object())[1]
    with refused(TypeError, "k:", "masked"):
        cuflash.attention(q, masked, v)
    out = Interface(FakeArray((2, 5, 4, 16), np.float16))
    k = on_gpu(Interface)[1]
    assert cuflash.attention(q, k, v, out=out) is out
    close(out.a, cuflash.attention(*inputs(np.float16), backend="reference"))
    out.__cuda_array_interface__["data"] = (out.a.data.ptr, True)
    with refused(ValueError, "out:", "read-only"):
        cuflash.attention(q, k, v, out=out)


def test_a_gpu_needs_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    x = Producer(inputs()[0], (2, 0))
    with pytest.raises(cuflash.NoBackendError, match="arrays on a GPU need CuPy"):
        cuflash.attention(x, x, x)


def test_no_framework_is_loaded_for_arrays_of_others():
    code = (
        "import sys, numpy as np, cuflash\n"
        "class P:\n"
        "    a = np.ones((2, 3), np.float32)\n"
        "    def __dlpack__(self, **o): return self.a.__dlpack__(**o)\n"
        "    def __dlpack_device__(self): return self.a.__dlpack_device__()\n"
        "assert cuflash.attention(P(), P(), P()).shape == (2, 3)\n"
        "assert not {'torch', 'jax', 'cupy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)

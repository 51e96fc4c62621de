"""Every kernel instance compiles for the GPUs it is made for, keeps to its registers and spills none. Needs NVRTC, no GPU."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import re
from typing import NamedTuple

import pytest
from cuflash import jit, tiles_backward_fp
from cuflash.backends import (
    cuda, cuda_append, cuda_backward, cuda_backward_fa2, cuda_backward_fa3, cuda_backward_fp, cuda_decode, cuda_fa1, cuda_fa3, cuda_fp,
    cuda_merge, cuda_pages, cuda_parts,
)

pytestmark = pytest.mark.skipif(jit.why_unusable() is not None, reason=f"kernels cannot be compiled here: {jit.why_unusable()}")

WHOLE = ("sm_90a", "sm_80")  # all instances
ONE_EACH = ("sm_75", "sm_86", "sm_89", "sm_100", "sm_120")
REGISTERS_SM = 65536


logs: dict[tuple[str, str], str] = {}


def log(arch: str, instance: cuda.AnyInstance, as_arch: str | None = None) -> str:
    known = logs.get((arch, instance.name)) if as_arch is None else None
    return known or jit.compile_cubin(instance.source, arch, as_arch)[1]


def check(arch: str, instance: cuda.AnyInstance, as_arch: str | None = None) -> None:
    """No spills, no warnings, no products that wait for each other, and registers for as many resident blocks as the tile table says."""
    text = log(arch, instance, as_arch)
    what = f"{instance.name} for {arch}:\n{text}"
    assert re.search(rf"Compiling entry function '{instance.name}'", text), what
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert spilled and spilled.groups() == ("0", "0", "0"), what
    registers = int(re.search(r"Used (\d+) registers", text)[1])
    per_warp = -(-registers * 32 // 256) * 256  # registers are given to warps in units of 256
    assert per_warp * (instance.tile.threads // 32) * instance.tile.resident <= REGISTERS_SM, what
    assert "warning" not in text.lower() and "serialized" not in text, what
    if isinstance(instance, (cuda_fa3.Instance, cuda_backward_fa3.Instance)):  # waits and fences that the compiler adds to products
        assert not re.search(r"\(C75\d\d\)", text), what


def compile_all(arch: str, instances: list[cuda.AnyInstance]) -> None:
    """In two processes: in one, NVRTC makes its threads wait for each other."""
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        made = pool.map(jit.compile_cubin, (i.source for i in instances), itertools.repeat(arch))
        logs.update(((arch, instance.name), text) for instance, (_, text) in zip(instances, made, strict=True))


class OfReals(NamedTuple):
    """One of the two kernels of an instance of backward_fp, as what is compiled."""

    name: str
    source: jit.Source
    tile: tiles_backward_fp.BackwardTile

    @classmethod
    def both(cls, i: cuda_backward_fp.Instance) -> list[OfReals]:
        return [cls(i.name(of_keys), (i.source_of_rows, i.source_of_keys)[of_keys], i.tile(of_keys)) for of_keys in (0, 1)]


def every(arch: str) -> list[cuda.AnyInstance]:
    info = cuda.representative(arch)
    modules = cuda_fp, cuda_parts, cuda_fa1, cuda_fa3, cuda_decode, cuda_backward_fa3
    found = [*cuda.common(arch), *(instance for module in modules for instance in module.common(info))]
    for i in cuda_backward_fa2.common(info):
        found += [kernel for kernel in (i, i.delta, i.queries) if kernel is not None]
    found += [kernel for i in cuda_backward_fp.common(info) for kernel in OfReals.both(i)]
    return list({i.name: i for i in found}.values())


def each_tile(instances: list[cuda.AnyInstance]) -> list[cuda.AnyInstance]:
    """Of instances that differ in nothing but which 16-bit type they have, one: for every other tile the other one. And of the full and
    the causal one the latter, which has more to do; but for wgmma, whose products ptxas orders in each as it likes."""
    alike: dict[str, list[cuda.AnyInstance]] = {}
    causal = {i.name for i in instances}
    for i in instances:
        if "_fa3_" in i.name or f"{i.name}_causal" not in causal:
            alike.setdefault(re.sub("_(fp|bf)16", "", i.name), []).append(i)
    return [group[n % len(group)] for n, group in enumerate(alike.values())]


def with_most_options(instances: list[cuda.AnyInstance]) -> list[cuda.AnyInstance]:
    """Of instances with the same tile for the same head sizes and numbers, the one that has the most in it: the longest name."""
    longest: dict[str, cuda.AnyInstance] = {}
    for i in instances:
        tile = re.match(r".*?_m\d+n\d+[a-z\d]*", re.sub("_(fp|bf)16", "", i.name))
        key = tile[0] if tile else i.name
        longest[key] = max(longest.get(key, i), i, key=lambda i: len(i.name))
    return list(longest.values())


@pytest.mark.slow
@pytest.mark.parametrize("arch", WHOLE)
def test_every_tile(arch):
    """For Hopper with all options; what is for other GPUs as well, for one of them with the most that a tile is used with."""
    instances = each_tile(every(arch))
    if arch != WHOLE[0]:
        instances = with_most_options(instances)
    compile_all(arch, instances)
    for instance in instances:
        check(arch, instance)


@pytest.mark.parametrize("arch", ONE_EACH)
def test_one_instance_for_every_other_gpu(arch):
    check(arch, next(instance for instance in cuda.common(arch) if instance.d == 128))


@pytest.mark.parametrize("arch", ONE_EACH)
@pytest.mark.parametrize("d", [128, 256])
def test_two_instances_of_fa1_for_every_other_gpu(arch, d):
    """Those of the two tiles that leave the fewest registers."""
    check(arch, next(i for i in cuda_fa1.common(cuda.representative(arch)) if i.d == d and i.mask == cuda.MASK_RIGHT))


@pytest.mark.parametrize("arch", ONE_EACH)
def test_instances_of_the_backward_pass_for_every_other_gpu(arch):
    """Of heads of 128: causal, and the most that is in one instance."""
    info = cuda.representative(arch)
    sixteen = [i for i in cuda_backward_fa2.common(info) if i.d == 128]
    most = max(sixteen, key=lambda i: len(i.name))
    for instance in filter(None, (next(i for i in sixteen if i.mask == cuda.MASK_RIGHT), most, most.delta)):
        check(arch, instance)


@pytest.mark.parametrize("arch", ["sm_80", *ONE_EACH])
def test_fa3_is_for_one_architecture(arch):
    assert not cuda_fa3.common(cuda.representative(arch)) and not cuda_backward_fa3.common(cuda.representative(arch))


@pytest.mark.parametrize("arch", ONE_EACH)
def test_instances_of_decode_for_every_other_gpu(arch):
    """The widest heads that its shared memory has room for, and the most that is in one instance."""
    instances = list(cuda_decode.common(cuda.representative(arch)))
    check(arch, max(instances, key=lambda i: i.d))
    check(arch, max((i for i in instances if i.d == 64), key=lambda i: len(i.name)))


@pytest.mark.parametrize("arch", ONE_EACH)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_instance_in_float32_and_float64_for_every_other_gpu(arch, dtype):
    for module in (cuda_fp, cuda_parts):
        check(arch, next(i for i in module.common(cuda.representative(arch)) if i.d == 128 and i.dtype == dtype))


@pytest.mark.parametrize("arch", [*WHOLE, *ONE_EACH])
def test_the_kernels_that_append_copy_and_merge(arch):
    for module, count, with_bfloat16 in ((cuda_append, 8, 2), (cuda_merge, 4, 1), (cuda_pages, 1, 0)):
        sources = list(module.instances(arch))
        assert len(sources) == count - with_bfloat16 * (arch == "sm_75")  # which came with sm_80
        for source in sources:
            text = jit.compile_cubin(source, arch)[1]
            assert re.search("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", text) and "warning" not in text.lower(), text
            assert int(re.search(r"Used (\d+) registers", text)[1]) * module.THREADS * 8 <= REGISTERS_SM, text


def test_the_kernels_before_and_behind_a_backward_pass():
    files = {"backward_prepare.cu", "backward_convert.cu", "backward_convert_rows.cu", "backward_sinks.cu"}
    sources = [s for s in cuda_backward.instances(cuda.representative("sm_90a")) if s.file in files]
    sources.append(cuda_backward.prepare_source("float16", "bfloat16", 8, False))
    assert {s.file for s in sources} == files
    for source in sources:
        text = jit.compile_cubin(source, "sm_90a")[1]
        assert re.search("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", text) and "warning" not in text.lower(), text


@pytest.mark.parametrize("arch", [*WHOLE, *ONE_EACH])
def test_the_second_kernel_of_a_split(arch):
    sources = {i.combine_source for i in cuda_decode.common(cuda.representative(arch)) if not i.merges}
    assert sources and sources <= set(cuda.instances(arch))
    exact = [cuda_parts.combine_source(dtype, dtype) for dtype in ("float32", "float64")]
    for source in (*exact, *sorted(sources, key=lambda source: source.name)[:: 1 if arch in WHOLE else 4]):
        text = jit.compile_cubin(source, arch)[1]
        assert re.search("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", text) and "warning" not in text.lower(), text


@pytest.mark.parametrize("as_arch", ["sm_75", "sm_80", "sm_86"])
def test_the_code_of_another_gpu_compiles_for_this_one(as_arch):
    """device.pretend() runs the paths of older GPUs on a newer one."""
    instance = next(instance for instance in cuda.common(as_arch) if instance.d == 64)
    check("sm_90a", instance, as_arch)
    if as_arch == "sm_75":
        source = jit.assemble(instance.source)
        assert "m16n8k8" in source and "cp.async" in source  # both paths stand in the text; CUFLASH_ARCH chooses


def test_names_are_distinct_and_tell_the_tile():
    names = [instance.name for instance in every("sm_90a")]
    assert len(set(names)) == len(names)
    assert "prefill_fa1_bf16_d128_m32n128w4_causal" in names  # as tiles_fa1.py has it
    assert "prefill_fa2_bf16_d128_m128n64w4s2_causal" in names  # as tiles.py has it
    assert any(re.fullmatch(r"prefill_fa3_bf16_d128_m\d+n\d+s\d(_turns)?_causal", name) for name in names)
    assert any(re.fullmatch(r"prefill_fp_fp64_dmma_d128_m\d+n\d+w\d+s\d_causal", name) for name in names)

"""Which hard case is tested where, and which wait for something that is not there yet.

The hard cases are 65 small inputs that attention kernels are known to get wrong. A number is only the name of one; what
the input is and what is right stand in the tests that carry the number.
"""

from __future__ import annotations

import re
from pathlib import Path

ROWS = range(1, 66)

# Numbers of test functions (test_case_12_..., test_cases_33_and_34_...) in the files of hard cases and in test_merge.py say
# what is covered.
WAITS = {
    42: "fp8 arrays",
    43: "fp8 arrays",
    44: "fp8 arrays",
    47: "dropout",
    48: "dropout",
    49: "atomics of a backward kernel on a GPU; on the CPU every case runs twice in test_conformance.py",
    50: "ring attention",
    52: "ring attention",
}

# Tests of other files that cover a case, among others of their subject.
ELSEWHERE = {
    45: ("test_edges.py::test_bfloat16_goes_through", "test_edges_gpu.py::test_bare_protocols"),
    53: ("test_cuda.py::test_case_53_it_runs_on_the_callers_stream", "test_cuda.py::test_threads_on_streams_of_their_own_do_not_mix"),
    55: ("test_jit_cache.py::test_each_device_has_its_own_module",),
    56: (
        "test_jit_cache.py::test_sixteen_processes_leave_one_good_file_and_the_next_does_not_load_nvrtc",
        "test_jit_cache.py::test_a_bad_file_is_compiled_again", "test_compiled.py::test_a_file_that_is_not_exactly_right_counts_as_absent",
    ),
    57: ("test_jit.py::test_the_key_depends_on_everything", "test_jit.py::test_whatever_changes_is_compiled_again"),
    58: ("test_jit_cache.py::test_sixteen_processes_leave_one_good_file_and_the_next_does_not_load_nvrtc",),
    59: ("test_jit_cache.py::test_shared_memory_is_opted_in_to_and_only_grows", "test_cuda.py::test_plans_of_other_gpus"),
    60: (
        "test_edges_protocols.py::test_a_stream_in_the_interface_goes_first",
        "test_edges_gpu.py::test_the_stream_of_an_interface_goes_first",
    ),
    61: ("test_edges.py::test_tensors_of_any_strides", "test_edges_gpu.py::test_tensors_of_any_strides_and_of_no_size"),
}

# Covered for what runs on the host; the rest of the row waits.
PARTLY = {
    23: "a sanitizer run on a GPU",
    24: "a sanitizer run on a GPU; the emulator watches every access",
    54: "two GPUs",
    38: "the padded dq buffer of a backward kernel",
    39: "launch errors of a GPU, and a backward kernel",
    40: "tables on a device, which are not read back; kernels of the emulator meet bad entries",
    53: "a GPU",
    55: "two GPUs",
    51: "ring attention; the merge of an empty part is tested",
}


def covered() -> set[int]:
    here = Path(__file__).parent
    found = set()
    for path in (*here.glob("test_hard_*.py"), here / "test_merge.py"):
        for numbers in re.findall(r"^def test_cases?_(\d+(?:_and_\d+)*)_", path.read_text(), re.MULTILINE):
            found |= {int(n) for n in numbers.split("_and_")}
    return found


def test_every_case_is_covered_or_waits_for_a_stated_reason() -> None:
    assert covered() | set(ELSEWHERE) | set(WAITS) == set(ROWS)


def test_nothing_waits_that_is_covered() -> None:
    done = covered() | set(ELSEWHERE)
    assert not done & set(WAITS)
    assert set(PARTLY) <= done


def test_tests_of_other_files_are_there() -> None:
    for names in ELSEWHERE.values():
        for file, name in (where.split("::") for where in names):
            text = (Path(__file__).parent / file).read_text()
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no {name}"

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
    45: "DLPack on GPU arrays",
    47: "dropout",
    48: "dropout",
    49: "atomics of a backward kernel on a GPU; on the CPU every case runs twice in test_conformance.py",
    50: "ring attention",
    52: "ring attention",
    53: "CUDA streams",
    54: "several GPUs",
    55: "several GPUs",
    56: "the JIT of CUDA kernels",
    57: "the JIT of CUDA kernels",
    58: "the JIT of CUDA kernels",
    59: "shared memory of a GPU",
    60: "CUDA streams",
    61: "DLPack on GPU arrays",
}

# Covered for what runs on the host; the rest of the row waits.
PARTLY = {
    23: "a sanitizer run on a GPU",
    24: "a sanitizer run on a GPU",
    38: "the padded dq buffer of a backward kernel",
    39: "launch errors of a GPU, and a backward kernel",
    40: "tables on a device, which are not read back",
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
    assert covered() | set(WAITS) == set(ROWS)


def test_nothing_waits_that_is_covered() -> None:
    assert not covered() & set(WAITS)
    assert set(PARTLY) <= covered()

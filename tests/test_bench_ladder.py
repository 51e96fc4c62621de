"""The ladder's counting, its reading of the profiler and its table; what it measures needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cuflash import cli, device
from cuflash.bench import ladder, report

ROOT = Path(__file__).resolve().parent.parent
H200 = device.KNOWN["H200"]
FULL, CAUSAL = ladder.SHAPES
PROFILE = """==PROF== Connected to process 7
fa1 has run once
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","first","dram__bytes_read.sum","byte","1,000,000"
"0","7","first","dram__bytes_write.sum","byte","2000"
"0","7","first","smsp__inst_executed.sum","inst","5"
"0","7","first","another","inst","9"
"1","7","second","dram__bytes_read.sum","byte","24"
"1","7","second","dram__bytes_write.sum","byte","0"
"1","7","second","smsp__inst_executed.sum","inst","6"
"0","7","first","l1tex__m_xbar2l1tex_read_bytes.sum","byte","4096"
"0","7","first","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed","%","71.5"
"0","7","first","smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio","inst","1.25"
"0","7","first","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio","inst","0.5"
"0","7","first","smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio","inst","n/a"
"""
ONE_KERNEL = "".join(line for line in PROFILE.splitlines(keepends=True) if "second" not in line)


def test_memory_is_the_arrays_alone_but_for_naive():
    arrays = 4 * 2 * 4096 * 16 * 128 * 2
    for shape in ladder.SHAPES:
        assert {ladder.counted(shape, kernel, H200).memory for kernel in ("fa1", "fa2", "fa3")} == {arrays}
        assert ladder.counted(shape, "naive", H200).memory == arrays + 12 * 2 * 16 * 4096**2
    assert FULL.flops == 4 * 2 * 16 * 4096**2 * 128 == 2 * CAUSAL.flops


def test_a_block_reads_all_the_keys_that_its_rows_see():
    """Against a loop over blocks and tiles."""
    for shape, kernel in ((s, k) for s in ladder.SHAPES for k in ("fa1", "fa2", "fa3")):
        tile = ladder.tile_of(shape, kernel, H200)
        warps, l2, shared = tile.threads // 32, 0, 0
        for first in range(0, shape.seqlen, tile.m):
            l2 += 2 * min(tile.m, shape.seqlen - first) * 2 * shape.head_dim  # queries, and what is written
            for key in range(0, shape.seqlen, tile.n):
                if shape.causal and key > first + tile.m - 1:
                    continue
                l2 += 2 * tile.n * 2 * shape.head_dim
                numbers = {  # of 2 bytes that go into shared memory or out of it
                    "fa1": 2 * tile.n + warps * tile.m + 2 * tile.n + 2 * warps * tile.m * 2,
                    "fa2": 2 * tile.n + tile.m + warps * 2 * tile.n,
                    "fa3": 2 * tile.n + tile.m + tile.m // 64 * 2 * tile.n,
                }
                shared += numbers[kernel] * 2 * shape.head_dim
        found = ladder.counted(shape, kernel, H200)
        assert (found.l2, found.shared) == (32 * l2, 32 * shared)


def test_other_gpus_have_no_rung_for_hopper():
    assert ladder.kernels_of(H200) == ("naive", "fa1", "fa2", "fa3")
    assert ladder.kernels_of(device.KNOWN["A100"]) == ladder.kernels_of(device.KNOWN["RTX 4090"]) == ("naive", "fa1", "fa2")


def test_figures_of_the_profiler_are_summed_over_kernels():
    assert ladder.figures(PROFILE) == {"read": 1000024.0, "written": 2000.0, "instructions": 11.0, "l2_read": 4096.0}
    assert ladder.figures("==ERROR== no permission\n") == {} == ladder.figures("")


def test_what_cannot_be_summed_is_of_one_kernel():
    found = ladder.figures(ONE_KERNEL)
    assert found["instructions"] == 5 and found["tensor"] == 71.5 and found["stalls"] == {"gmma": 1.25, "long scoreboard": 0.5}


@pytest.mark.parametrize(
    ("script", "words"),
    [("echo '==ERROR== ERR_NVGPUCTRPERM: the user may not'; exit 1", "ERR_NVGPUCTRPERM"), ("exit 0", "no figures"), (None, "does not run")],
)
def test_a_profiler_that_measures_nothing_says_why(tmp_path, script, words):
    program = tmp_path / "ncu"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    assert words in ladder.profiled(str(program), FULL, "fa1")


def test_a_profiler_that_measures(tmp_path):
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{PROFILE}END\n")
    program.chmod(0o755)
    assert ladder.profiled(str(program), FULL, "fa1") == ladder.figures(PROFILE)


def test_the_table_has_the_columns_that_were_measured():
    counts = {kernel: {"counted": vars(ladder.counted(FULL, kernel, H200))} for kernel in ladder.KERNELS}
    bare = ladder.markdown({"heading": "here", "results": {FULL.name: counts}})
    assert "TFLOP/s" not in bare and "measured" not in bare and "134" in bare and "6,577" in bare
    for kernel, ms in zip(ladder.KERNELS, (4.0, 2.0, 1.0, 0.5), strict=True):
        counts[kernel] |= {"ms": ms, "tflops": FULL.flops / ms / 1e9} | ({} if kernel == "naive" else {"ratio": 2.0, "lower": 1.9})
    counts["fa1"] |= ladder.figures(ONE_KERNEL)
    text = ladder.markdown({"heading": "here", "results": {FULL.name: counts}, "profiler": "why not"})
    line = next(line for line in text.splitlines() if "| fa1 |" in line).split(" | ")
    assert line[-5:] == ["72", "gmma 1.2, long scoreboard 0.5", "2.000", f"{FULL.flops / 2e9:.0f}", "2.00 (1.90) |"]
    assert "1" in line and text.endswith("why not\n")


def test_the_document_shows_what_the_command_counts(capsys):
    """Its table may be of another run, but counts and words are those of the code."""
    assert cli.main(["bench", "ladder", "--counted"]) == 0
    document = (ROOT / "docs" / "kernels.md").read_text()
    assert document.count(f"<!-- {ladder.MARKER}: begin -->") == document.count(f"<!-- {ladder.MARKER}: end -->") == 1

    def table(text: str) -> dict[tuple[str, str], dict[str, str]]:
        lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
        header = next(line for line in lines if line[0] == "call")
        rows = [dict(zip(header, line, strict=True)) for line in lines if len(line) == len(header) and line != header]
        return {(row["call"], row["kernel"]): row for row in rows}

    counts, shown = table(capsys.readouterr().out), table(document.split(f"<!-- {ladder.MARKER}: begin -->")[1])
    assert counts.keys() == shown.keys() and len(counts) == 8
    for key, row in counts.items():
        assert {name: shown[key][name] for name in row} == row


def test_a_name_of_no_call_is_refused(capsys):
    assert cli.main(["bench", "ladder", "--counted", "--only", "D64"]) == 2
    assert "'D64'" in capsys.readouterr().err


def test_a_run_without_a_gpu_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr("cuflash.backends.cuda.unusable", lambda: "CUDA finds no GPU")
    assert cli.main(["bench", "ladder"]) == 2 and "no GPU; --counted" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_command_measures(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "cuflash", "bench", "ladder", "--only", "causal", "--json", str(path)]
    subprocess.run(command, check=True, timeout=300)
    found = json.loads(path.read_text())["results"]
    assert list(found) == [CAUSAL.name] and all(row["tflops"] > 0 for row in found[CAUSAL.name].values())
    assert report.geometric_mean([found[CAUSAL.name]["fa1"]["ratio"]]) > 0

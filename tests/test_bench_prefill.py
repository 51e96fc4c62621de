"""The prefill benchmark's own arithmetic; what it measures needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cuflash.bench import prefill, report, variants


def result(tflops: float, ratio: float) -> dict:
    peer = {"ms": 1.0, "tflops": tflops / ratio, "ratio": ratio, "lower": ratio - 0.01}
    return {"ms": 1.0, "tflops": tflops, "kernel": "fa2", "peers": {"FA2 (PyTorch)": peer}}


def test_all_shapes_have_the_same_tokens_and_width():
    shapes = list(prefill.cases())
    assert len(shapes) == 36 and len({s.name for s in shapes}) == 36
    assert {s.batch * s.seqlen for s in shapes} == {16384} and {s.heads * s.head_dim for s in shapes} == {2048}
    full, causal = prefill.cases("D128 N4096")
    assert full.flops == 4 * 4 * 16 * 4096**2 * 128 == 2 * causal.flops


def test_summary_is_of_ratios():
    figures = prefill.summary({"a": result(300, 1.0), "b": result(300, 4.0)})
    assert figures["FA2 (PyTorch) / cuflash, geometric mean of 2"] == pytest.approx(2)
    assert figures["FA2 (PyTorch) / cuflash, smallest"] == 1
    assert figures["FA2 (PyTorch) / cuflash, smallest lower bound"] == pytest.approx(0.99)


def test_tables_go_between_their_markers(tmp_path):
    environment = {"card": "a card", "driver_cuda": 13000, "runtime_cuda": 13000, "commit": "abc", "versions": {"numpy": "2"}}
    text = prefill.markdown({"environment": environment, "results": {"D64 N512 full": result(300, 1.25)}})
    assert "| D64 N512 full | 300 | 240: 1.25 (1.24) |" in text
    document = tmp_path / "x.md"
    document.write_text("head\n<!-- prefill tables: begin -->\nold\n<!-- prefill tables: end -->\ntail\n")
    report.write_markdown(document, prefill.MARKER, text)
    assert document.read_text() == f"head\n<!-- prefill tables: begin -->\n{text}<!-- prefill tables: end -->\ntail\n"


def test_geometric_mean_and_table():
    assert report.geometric_mean([1, 10, 100]) == pytest.approx(10)
    assert report.markdown_table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |"]


def test_variants_are_measured_beside_what_they_should_cost():
    found = {pair.name: pair for pair in variants.pairs()}
    grouped = found["GQA 16/4 D128 causal"]
    assert grouped.variant.heads_kv == 4 and grouped.plain.heads == 16 and grouped.share == 1.0
    assert found["D72 beside D128 full"].plain.head_dim == 128 and found["D160 beside D192 causal"].plain.head_dim == 192
    chunk = found["pages of 16, 512 queries after 8192 keys, D128 causal"]
    assert (chunk.variant.page, chunk.plain.page, chunk.limit) == (16, 0, 1.1)
    assert chunk.variant.queries == chunk.plain.queries == 512 and chunk.variant.seqlen == chunk.plain.seqlen == 8704
    in_pages = [pair.variant for pair in found.values() if pair.variant.page]
    assert len(in_pages) == 8 and all(call.seqlen % call.page == 0 for call in in_pages)
    # 128 blocks of rows that see 9 tiles of as many keys each, but for the first 8, of 128 * 129 / 2 tiles
    assert found["window 1024 of 16384 D128"].share == pytest.approx((128 * 9 - 36) / (128 * 129 / 2))


@pytest.mark.gpu
def test_pages_give_what_a_dense_cache_gives_and_are_timed_beside_it():
    pair = next(pair for pair in variants.pairs() if pair.name.startswith("pages of 16, 512 queries"))
    assert variants.measure(pair)["cost"] > 0


@pytest.mark.gpu
def test_the_command_measures(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "cuflash", "bench", "prefill", "--only", "D64 N512 full", "--peers", "naive", "--json", str(path)]
    subprocess.run(command, check=True, timeout=200)
    found = json.loads(path.read_text())["results"]["D64 N512 full"]
    assert found["tflops"] > 0 and found["peers"]["naive (cuflash)"]["ratio"] > 0

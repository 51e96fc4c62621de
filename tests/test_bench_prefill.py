"""The prefill benchmark's own arithmetic; what it measures needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from case import BF16, F16

from cuflash import reference
from cuflash.bench import accuracy, backward, peers, prefill, report, variants
from cuflash.problem import build_attention

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = {"card": "a card", "driver_cuda": 13000, "runtime_cuda": 13000, "commit": "abc", "versions": {"numpy": "2"}}


def result(tflops: float, ratio: float) -> dict:
    peer = {"ms": 1.0, "tflops": tflops / ratio, "ratio": ratio, "lower": ratio - 0.01}
    best = {"ratio": ratio, "lower": ratio - 0.02}
    return {"ms": 1.0, "tflops": tflops, "kernel": "fa3", "peers": {"FA2 (PyTorch)": peer}, "best": best, "failed": {}}


def test_all_shapes_have_the_same_tokens_and_width():
    shapes = list(prefill.cases())
    assert len(shapes) == 36 and len({s.name for s in shapes}) == 36
    assert {s.batch * s.seqlen for s in shapes} == {16384} and {s.heads * s.head_dim for s in shapes} == {2048}
    full, causal = prefill.cases("D128 N4096")
    assert full.flops == 4 * 4 * 16 * 4096**2 * 128 == 2 * causal.flops
    both = list(prefill.cases(dtypes=peers.DTYPES))
    assert len({s.name for s in both}) == 72 and {s.dtype for s in both} == {"bfloat16", "float16"}


def test_backward_counts_five_products():
    shapes = list(backward.cases())
    assert len(shapes) == 30 and len({s.name for s in shapes}) == 30
    full, causal = backward.cases("D128 N2048")
    assert backward.flops(full) == 10 * 8 * 16 * 2048**2 * 128 == 2 * backward.flops(causal)


def test_backward_refuses_gradients_that_differ():
    want = [np.linspace(-1, 1, 12, dtype=np.float32).reshape(1, 3, 2, 2) for _ in range(3)]
    same = tuple(a.astype(BF16) for a in want)
    backward.check(same, want)
    with pytest.raises(RuntimeError, match="its dv differs from cuflash's by 2 of the largest"):
        backward.check((*same[:2], (-want[2]).astype(BF16)), want)


def test_backward_tells_what_a_fixed_order_costs():
    found = {"bfloat16 a": result(300, 1.0) | {"deterministic": {"cost": 1.04, "upper": 1.06}}}
    text = backward.markdown({"environment": ENVIRONMENT, "results": found})
    assert "| bfloat16 a | 1.040 (1.060) |" in text


def test_summary_is_of_ratios():
    other = {**result(300, 9.0), "peers": {}}
    figures = prefill.summary({"bfloat16 a": result(300, 1.0), "bfloat16 b": result(300, 4.0), "float16 a": other})
    assert figures["bfloat16, FA2 (PyTorch) / cuflash, geometric mean of 2"] == pytest.approx(2)
    assert figures["bfloat16, FA2 (PyTorch) / cuflash, smallest (a)"] == 1
    assert figures["bfloat16, FA2 (PyTorch) / cuflash, smallest lower bound"] == pytest.approx(0.99)
    assert figures["bfloat16, best peer / cuflash, smallest lower bound"] == pytest.approx(0.98)
    assert figures["float16, best peer / cuflash, geometric mean of 1"] == pytest.approx(9)
    assert not [name for name in figures if name.startswith("float16, FA2")]


class Recorded:
    """A side whose times are known, and which notes that it was its turn."""

    def __init__(self, name: str, notes: list[str]):
        self.name, self.notes = name, notes

    def start(self) -> None:
        self.notes.append(self.name.upper())

    def seconds(self) -> float:
        self.notes.append(self.name)
        return float(len(self.notes))


def test_every_side_has_its_turn_after_itself_and_neighbours_change():
    notes: list[str] = []
    times = prefill.take_turns({name: Recorded(name, notes) for name in "abc"}, 40)
    rounds = ["".join(notes[6 * n : 6 * n + 6]) for n in range(40)]
    assert all(sorted(one[1::2]) == ["a", "b", "c"] and one[::2] == one[1::2].upper() for one in rounds)
    assert len(set(rounds)) == 6
    assert all(notes[int(t) - 1] == name for name, seconds in times.items() for t in seconds)


def test_ratios_are_of_the_same_turn():
    theirs, own = np.array([2.0, 9.0, 4.0]), np.array([1.0, 3.0, 4.0])
    assert report.ratio(theirs, own)["ratio"] == 2 and report.cost(theirs, own)["cost"] == 2
    assert report.ratio(theirs, own)["lower"] == 1 and report.cost(theirs, own)["upper"] == 3


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_what_differs_by_more_than_rounding_is_refused(dtype):
    right = np.random.default_rng(0).standard_normal((1, 9, 2, 8)).astype(dtype)
    expected = right.astype(np.float32)
    prefill.check(lambda: right, expected)
    for wrong in (right + (0.02 * np.abs(expected).max()).astype(dtype), np.where(expected > 1, np.nan, right).astype(dtype)):
        with pytest.raises(RuntimeError, match="differs from cuflash by"):
            prefill.check(lambda wrong=wrong: wrong, expected)


def test_errors_are_against_the_right_values():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 3, 8)).astype(BF16) for n in (9, 20, 20))
    right = accuracy.exact(q, k, v)
    assert right.dtype == np.float64
    np.testing.assert_allclose(right, reference.forward(build_attention(q, k, v))[0], rtol=1e-12, atol=1e-14)
    assert accuracy.rms(right.astype(BF16) * np.array(0, BF16), right) == pytest.approx(np.sqrt((right**2).mean()))
    row = {"rms": 1e-4, "peers": {"FA3": {"rms": 2e-4, "ratio": 0.5}}}
    table = "\n".join(accuracy.markdown({"bfloat16 D64 normal": row, "float16 D64 normal": {"rms": 1e-5, "peers": {}}}))
    assert "| bfloat16 D64 normal | 0.0001 | 0.0002: 0.500 |" in table and "| float16 D64 normal | 1e-05 | - |" in table


def test_tables_go_between_their_markers(tmp_path):
    rows = {"bfloat16 D64 N512 full": result(300, 1.25), "float16 D64 N512 full": {**result(300, 1.25), "failed": {"FA3": "no such dtype"}}}
    text = prefill.markdown({"environment": ENVIRONMENT, "results": rows})
    assert "| bfloat16 D64 N512 full | 300 | 240: 1.25 (1.24) |" in text and "FA3 in float16 (no such dtype)." in text
    name = prefill.marker(rows)
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    document = tmp_path / "x.md"
    document.write_text(f"head\n{begin}\nold\n{end}\ntail\n")
    report.write_markdown(document, name, text)
    assert document.read_text() == f"head\n{begin}\n{text}{end}\ntail\n"


def test_the_document_has_a_place_for_the_tables_of_each_kernel():
    """Where a marker is missing, a table would be written over the whole document."""
    document = (ROOT / "docs" / "performance.md").read_text()
    for name in (f"{table} of {kernel}" for table in ("prefill tables", "variants table") for kernel in ("fa2", "fa3")):
        assert document.count(f"<!-- {name}: begin -->") == document.count(f"<!-- {name}: end -->") == 1, name
    assert prefill.marker({"x": result(1, 1)}) == "prefill tables of fa3"


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
    assert found["D192/128 beside D192 full"].variant.head_dim_v == 128
    assert found["lengths D128 full"].variant.lengths and not found["lengths D128 full"].plain.lengths
    in_pages = [pair.variant for pair in found.values() if pair.variant.page]
    assert len(in_pages) == 8 and all(call.seqlen % call.page == 0 for call in in_pages)
    # 128 blocks of rows that see 9 tiles of as many keys each, but for the first 8, of 128 * 129 / 2 tiles
    assert found["window 1024 of 16384 D128"].share == pytest.approx((128 * 9 - 36) / (128 * 129 / 2))


def test_what_flash_attention_3_has_no_call_for_is_not_asked_of_it(monkeypatch):
    monkeypatch.setattr(peers, "has_flash_attention_3", lambda: True)
    asked: list[dict] = []
    monkeypatch.setattr(peers, "flash_attention_3", lambda arrays, causal, **options: asked.append({"causal": causal, **options}))
    found = {pair.name: pair.variant for pair in variants.pairs()}
    chunk = "pages of 16, 512 queries after 8192 keys, D64 causal"
    for name in ("lengths D64 full", "packed, longest unknown, D64 full", chunk):
        assert found[name].flash_attention_3((0, 0, 0)) is None
    for name in ("window 1024 of 16384 D64", "softcap D64 full", "GQA 32/8 D64 causal"):
        found[name].flash_attention_3((0, 0, 0))
    assert asked == [{"causal": False, "window_size": (1024, 0)}, {"causal": False, "softcap": 30.0}, {"causal": True}]


def test_the_table_of_variants_says_what_is_left_to_other_kernels():
    row = {"ms": 2.0, "cost": 1.01, "upper": 1.02, "limit": 1.03, "failed": {"FA3": "no"}}
    row["beside"] = {"fa2": {"ms": 3.0, "ratio": 1.5, "lower": 1.4}}
    text = variants.markdown({"environment": ENVIRONMENT, "results": {"a": row, "b": {"declined": "it has no b", "limit": 1.0}}})
    assert "| a | 2.000 | 1.01 (1.02) | 1.03 | 3.000: 1.50 (1.40) |" in text
    assert "b (it has no b)." in text and "FA3 for a (no)." in text


@pytest.mark.gpu
def test_pages_give_what_a_dense_cache_gives_and_are_timed_beside_it():
    pair = next(pair for pair in variants.pairs() if pair.name.startswith("pages of 16, 512 queries"))
    assert variants.measure(pair, "fa2")["cost"] > 0


@pytest.mark.gpu
def test_the_command_measures(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "cuflash", "bench", "prefill", "--only", "D64 N512 full", "--peers", "naive", "--json", str(path)]
    subprocess.run(command, check=True, timeout=200)
    found = json.loads(path.read_text())["results"]["bfloat16 D64 N512 full"]
    assert found["tflops"] > 0 and found["peers"]["naive (cuflash)"]["ratio"] > 0 and not found["failed"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", peers.DTYPES)
def test_errors_are_those_of_16_bits(dtype):
    """The result's rounding alone is of this size; weights in 16 bits add less than that again."""
    found = accuracy.measure("fa2", {"naive": peers.ours("naive")}, [dtype])
    assert len(found) == 6
    for row in found.values():
        assert 0 < row["rms"] < row["peers"]["naive"]["rms"] * 2

"""The benchmark's own arithmetic, and a run of it small enough for a test."""

from __future__ import annotations

import json

import numpy as np

from cuflash.bench import cpu as bench
from cuflash.bench import report


def test_lower_bound_of_a_median_is_the_order_statistic_of_the_binomial():
    # 5 pairs: P(the median lies below the smallest) = 1/32 <= 5 %.
    # 11 pairs: P(at most 2 below) = 67/2048 <= 5 %, 3 would be 11 %.
    assert report.lower_bound([5.0, 1.0, 4.0, 2.0, 3.0]) == 1
    assert report.lower_bound([float(n) for n in range(11)]) == 2


def test_peers_compute_attention():
    q, k, v = (np.random.default_rng(n).standard_normal((1, 2, 33, 8)) for n in range(3))
    for causal in (False, True):
        expected = bench.ours(q, k, v, causal)
        for peer in (bench.numpy_attention, bench.numpy_in_place):
            got = peer(q, k, v, causal)
            assert got.dtype == q.dtype
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


def test_peers_compute_gradients():
    arrays = [np.random.default_rng(n).standard_normal((1, 2, 33, 8)) for n in range(4)]
    for causal in (False, True):
        expected = bench.our_gradients(*arrays, causal)()
        for got, want in zip(bench.numpy_gradients(*arrays, causal)(), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


def test_a_run_writes_json_and_replaces_only_the_tables_of_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", ((1, 2, 64, 8),))
    monkeypatch.setattr(bench, "TURNS", {64: 6})
    monkeypatch.setattr(bench, "PAUSE", 0.0)
    monkeypatch.setattr(bench, "torch_attention", lambda: None)
    monkeypatch.setattr(bench, "gemm_gflops", lambda dtype: 100.0)
    document, data = tmp_path / "doc.md", tmp_path / "data.json"
    document.write_text("before\n<!-- cpu tables: begin -->\nold\n<!-- cpu tables: end -->\nafter\n")
    for only in ("float32", "float64"):  # the second run keeps what the first one measured
        assert bench.main(["--json", str(data), "--markdown", str(document), "--only", only]) == 0
    report = json.loads(data.read_text())
    assert len(report["results"]) == len(report["backward"]) == 4
    assert all(r["ms"] > 0 and set(r["peers"]) == {"NumPy"} for r in report["backward"].values())
    for result in report["results"].values():
        assert result["ms"] > 0 and {"NumPy", "NumPy in place"} == set(result["peers"])
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert all(name in text for name in report["results"]) and "causal time / full time" in text
    assert "| backward | cuflash ms" in text and "backward: NumPy / cuflash, geometric mean" in text

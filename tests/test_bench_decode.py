"""The decode benchmark's own arithmetic; what it measures needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.bench import decode, decode_more
from cuflash.bench.decode_sides import Shape, Side, cost, expected

ENVIRONMENT = {"card": "a card", "driver": "1.2", "driver_cuda": 13000, "runtime_cuda": 13000, "commit": "abc", "versions": {"numpy": "2"}}


def test_the_shapes_of_keys_and_values_beyond_the_cache():
    assert len({shape.name for shape in decode.SHAPES}) == 10 and set(decode.QUICK) < {shape.name for shape in decode.SHAPES}
    shape = decode.SHAPES[0]
    assert shape.name == "B1 32/8 N8192" and shape.bytes == 2 * 8192 * 8 * 128 * 2
    for shape in decode.SHAPES:
        copies = shape.copies(50 << 20)
        assert copies >= 2 and copies * shape.bytes >= 200 << 20


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_what_is_expected_is_attention_and_wrong_values_are_seen(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 1, 6, 16), (2, 50, 3, 16), (2, 50, 3, 16)))
    want = expected(q, k, v)
    out = cuflash.attention(q, k, v, backend="reference")
    np.testing.assert_allclose(want.values, out.astype(np.float32), atol=float(ml_dtypes.finfo(dtype).eps) * float(abs(want.values).max()))
    assert want.bound.shape == (2, 1, 1, 1)
    Side([lambda: out], [want]).check("right")
    for wrong in (out[::-1], np.where(np.arange(16) == 3, np.nan, out.astype(np.float32)), cuflash.attention(q, k[:, :-1], v[:, :-1])):
        with pytest.raises(RuntimeError, match="wrong: an error of"):
            Side([lambda wrong=wrong: wrong], [want]).check("wrong")


def test_a_row_pairs_times_of_the_same_turn():
    own = np.array([1e-4, 2e-4, 4e-4, 1e-4, 2e-4])
    times = {
        "cuflash": own, "read": 0.9 * own, "invariant": 1.2 * own, "page 64": own, "page 16": 1.02 * own, "page 1": 1.1 * own,
        "cuDNN (PyTorch)": 1.1 * own, "FA3": 1.05 * own, "naive (PyTorch)": 3 * own, "naive (cuflash)": 2 * own,
        "FlashInfer, page 64": 1.5 * own,
    }
    shape = Shape(1, 32, 8, 8192)
    row = decode.row(shape, times)
    assert row["us"] == pytest.approx(200) and row["tbps"] == pytest.approx(shape.bytes / 2e-4 / 1e12)
    assert row["read"]["ratio"] == pytest.approx(0.9) and row["invariant"]["upper"] == pytest.approx(1.2)
    assert row["best"]["ratio"] == pytest.approx(1.05) == row["best"]["lower"] and row["naive"]["ratio"] == pytest.approx(2)
    assert row["pages"]["page 16"]["cost"] == pytest.approx(1.02) and row["pages"]["page 64"]["FlashInfer"]["ratio"] == pytest.approx(1.5)
    assert "FlashInfer" not in row["pages"]["page 16"]
    assert set(row["peers"]) == {name for name in times if name.startswith(("cuDNN", "FA3", "naive"))}
    results = {"bfloat16 B1 32/8 N8192": row | {"failed": {"FA2": "no"}, "clock_mhz": 1700}}
    figures = decode.summary(results)
    assert figures["best peer / cuflash, smallest lower bound"] == pytest.approx(1.05)
    assert figures["page 1 / dense, largest"] == pytest.approx(1.1)
    text = decode.markdown({"environment": ENVIRONMENT, "shapes": results})
    assert "| 204.0: 1.020 (1.020) |" in text and "Not measured: FA2 on bfloat16 B1 32/8 N8192 (no)." in text
    assert cost(own, own) == {"us": pytest.approx(200), "cost": 1, "upper": 1}


def test_lengths_that_differ_and_equal_ones_have_as_many_keys():
    ragged, equal = decode_more.ragged_lengths(32, 131072)
    assert ragged.min() == 1 and ragged.max() == 131072 and len(np.unique(ragged)) > 25
    assert ragged.sum() == equal.sum() and equal.max() - equal.min() <= 1


def test_tables_of_what_was_measured():
    split = {"blocks": 264, "busy": 132, "us": 20.0, "tbps": 1.5}
    found = {
        "environment": ENVIRONMENT,
        "float8": {"bfloat16 B1": dict.fromkeys(("dense", "page 64"), {"float8_us": 10.0, "us": 17.0, "ratio": 1.7, "lower": 1.68})},
        "ragged": {"bfloat16 B2": {"bytes": 1, "equal_us": 10.0, "equal_tbps": 4.0, "ragged": {"us": 11.0, "cost": 1.1, "upper": 1.2}}},
        "splits": {"bfloat16 B1": {decode_more.split_name(n): split for n in decode_more.SPLITS}},
        "append": {"bfloat16 B1": {"us": 5.0, "new": {"us": 7.0, "more": 2.0}, "rope": {"us": 7.5, "more": 2.5}}},
    }
    text = decode.markdown(found)
    for line in (
        "| bfloat16 B1 | 17.0, 10.0: 1.70 (1.68) | 17.0, 10.0: 1.70 (1.68) |",
        "| bfloat16 B2 | 10.0 | 4.00 | 11.0: 1.100 (1.200) |", "| 64 | 132, 20.0, 1.50 |", "| auto | 132, 20.0, 1.50 |",
        "| bfloat16 B1 | 5.0 | 7.0: 2.0 more | 7.5: 2.5 more |",
    ):
        assert line in text


def test_results_of_another_commit_are_not_kept(tmp_path):
    path = tmp_path / "found.json"
    assert decode.kept(None, ENVIRONMENT) == decode.kept(path, ENVIRONMENT) == {"environment": ENVIRONMENT}
    path.write_text(json.dumps({"environment": ENVIRONMENT, "splits": {}}))
    assert decode.kept(path, ENVIRONMENT) == {"environment": ENVIRONMENT, "splits": {}}
    assert decode.kept(path, ENVIRONMENT | {"commit": "def"}) == {"environment": ENVIRONMENT | {"commit": "def"}}


@pytest.mark.gpu
def test_the_command_measures(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "cuflash", "bench", "decode", "--quick", "--only", "B1 32/8", "--peers", "none", "--json", str(path)]
    subprocess.run(command, check=True, timeout=200)
    found = json.loads(path.read_text())
    assert set(found) == {"environment", "shapes", "float8", "ragged", "splits", "append"}
    assert found["shapes"]["bfloat16 B1 32/8 N8192"]["tbps"] > 0 and found["ragged"]["bfloat16 B32, 1 to 131,072"]["ragged"]["cost"] > 0

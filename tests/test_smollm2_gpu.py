"""examples/smollm2_chat.py on CuPy arrays: the text of the CPU, with prompts through the CUDA kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import smollm2_attention as attention  # noqa: E402
from smollm2_graph import DenseTokenGraph  # noqa: E402
from smollm2_model import Decoder, Float64Weights  # noqa: E402
from toy_model import VOCABULARY, small_model  # noqa: E402

from cuflash.backends import cuda  # noqa: E402

pytestmark = pytest.mark.gpu

QUESTION = "What is the capital of France?"
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, 200).tolist()
PROMPT = 190


def logits(decoder, attend):
    """A prompt, then a token at a time."""
    rows = [decoder(TOKENS[:PROMPT], attend, every_position=True), *(decoder([token], attend) for token in TOKENS[PROMPT:])]
    return np.concatenate([row if isinstance(row, np.ndarray) else row.get() for row in rows])


@pytest.fixture(scope="module")
def truth():
    config, weights = small_model()
    return logits(Decoder(config, Float64Weights(weights)), attention.Float64Attention(config, len(TOKENS), np))


@pytest.fixture(scope="module")
def decoder():
    import cupy

    config, weights = small_model()
    return Decoder(config, {name: cupy.asarray(array) for name, array in weights.items()})


def allowed(truth, dtype):
    """Twice the error that the materialising form has on the CPU."""
    config, weights = small_model()
    naive = logits(Decoder(config, weights), attention.MaterialisedAttention(config, len(TOKENS), np, dtype=dtype))
    return 2 * np.abs(naive - truth).max() + 2 * np.finfo(np.float32).eps * np.abs(truth).max()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_logits_on_cupy_arrays(layout, dtype, decoder, truth, monkeypatch):
    import cupy

    ran = []
    run, prepare = cuda.run, cuda.prepare
    monkeypatch.setattr(cuda, "run", lambda plan, problem: ran.append(problem.op) or run(plan, problem))
    monkeypatch.setattr(cuda, "prepare", lambda plan, problem: ran.append(problem.op) or prepare(plan, problem))
    ours = logits(decoder, attention.DenseAttention(decoder.config, len(TOKENS), cupy, layout, dtype=dtype))
    assert np.abs(ours - truth).max() <= allowed(truth, dtype)
    assert dtype == "float16" or np.array_equal(ours.argmax(axis=1), truth.argmax(axis=1))
    assert "attention" in ran and "decode" in ran


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_logits_of_a_captured_graph(layout, dtype, decoder, truth):
    import cupy

    attend = attention.DenseAttention(decoder.config, len(TOKENS), cupy, layout, dtype=dtype)
    graph = DenseTokenGraph(decoder, attend)
    ours = [decoder(TOKENS[:PROMPT], attend, every_position=True).get()]
    for token in TOKENS[PROMPT:]:
        following = graph(token)
        ours.append(graph.logits.get())
        assert following == ours[-1].argmax()
        cupy.full(1 << 20, np.nan)  # nobody else may get the graph's memory
    assert np.abs(np.concatenate(ours) - truth).max() <= allowed(truth, dtype)
    with pytest.raises(ValueError, match="room for 200"):
        graph(0)


def test_a_graph_goes_on_behind_a_prompt_of_its_own_choice(decoder):
    """Its token and length come from the host where they are not those that it left."""
    import cupy

    attend = attention.DenseAttention(decoder.config, 64, cupy)
    graph = DenseTokenGraph(decoder, attend)
    decoder(TOKENS[:20], attend)
    first = graph(TOKENS[20])
    graph(first)
    decoder(TOKENS[:7], attend)
    graph(TOKENS[7])
    other = attention.DenseAttention(decoder.config, 64, cupy)
    expected = decoder([*TOKENS[:21], first, *TOKENS[:8]], other)
    assert attend.length == other.length == 30
    cupy.testing.assert_allclose(graph.logits, expected, atol=1e-4)


def test_a_graph_draws_by_the_noise_it_is_given(decoder):
    import cupy

    attend = attention.DenseAttention(decoder.config, 16, cupy)
    graph, noise = DenseTokenGraph(decoder, attend), np.zeros(VOCABULARY)
    decoder([1, 2, 3], attend)
    for token in (17, 42):
        noise[:] = 0
        noise[token] = 1e3
        assert graph(4, noise) == token
    assert attend.length == 5


@pytest.mark.model
def test_the_answer_is_that_of_the_cpu():
    """The command, once on each device."""
    import smollm2_download as download

    try:
        download.find_gguf()
    except download.DownloadError as error:
        pytest.skip(f"the model cannot be downloaded here: {str(error).splitlines()[0]}")
    answers = {}
    for device in ("cpu", "cuda"):
        command = [sys.executable, str(EXAMPLES / "smollm2_chat.py"), "--device", device, "--max-tokens", "12", QUESTION]
        done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "utf-8"}, capture_output=True, encoding="utf-8", timeout=300)
        assert done.returncode == 0, done.stderr
        answers[device] = done.stdout
    assert answers["cuda"] == answers["cpu"] == "The capital of France is Paris.\n"

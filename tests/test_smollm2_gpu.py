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


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_logits_on_cupy_arrays(layout, monkeypatch):
    """A prompt, then a token at a time: within the error that the materialising form has on the CPU."""
    import cupy

    ran = []
    run = cuda.run
    monkeypatch.setattr(cuda, "run", lambda plan, problem: ran.append(problem.op) or run(plan, problem))
    prepare = cuda.prepare
    monkeypatch.setattr(cuda, "prepare", lambda plan, problem: ran.append(problem.op) or prepare(plan, problem))
    config, weights = small_model()
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 200).tolist()
    prompt = 190

    def logits(decoder, kind, xp, *options):
        attend = kind(decoder.config, len(tokens), xp, *options)
        rows = [decoder(tokens[:prompt], attend, every_position=True)]
        return np.concatenate([x if isinstance(x, np.ndarray) else x.get() for x in (
            *rows, *(decoder([token], attend) for token in tokens[prompt:])
        )])  # fmt: skip

    naive = logits(Decoder(config, weights), attention.MaterialisedAttention, np)
    truth = logits(Decoder(config, Float64Weights(weights)), attention.Float64Attention, np)
    decoder = Decoder(config, {name: cupy.asarray(array) for name, array in weights.items()})
    ours = logits(decoder, attention.DenseAttention, cupy, layout)
    allowed = 2 * np.abs(naive - truth).max() + 2 * np.finfo(np.float32).eps * np.abs(truth).max()
    assert np.abs(ours - truth).max() <= allowed
    assert np.array_equal(ours.argmax(axis=1), truth.argmax(axis=1))
    assert "attention" in ran and "decode" in ran

    # The same from one captured graph, whose memory nobody else may get.
    attend = attention.DenseAttention(config, len(tokens), cupy, layout)
    graph = DenseTokenGraph(decoder, attend)
    ours = [decoder(tokens[:prompt], attend, every_position=True).get()]
    for token, row in zip(tokens[prompt:], truth[prompt:], strict=True):
        assert graph(token) == row.argmax()
        ours.append(graph.logits.get())
        cupy.full(1 << 20, np.nan)
    assert np.abs(np.concatenate(ours) - truth).max() <= allowed
    with pytest.raises(ValueError, match="room for 200"):
        graph(0)


def test_a_graph_draws_by_the_noise_it_is_given():
    import cupy

    config, weights = small_model()
    decoder = Decoder(config, {name: cupy.asarray(array) for name, array in weights.items()})
    attend = attention.DenseAttention(config, 16, cupy)
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

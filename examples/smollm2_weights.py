"""Read the GGUF file of SmolLM2-135M-Instruct into NumPy arrays."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Config:
    """The numbers that fix the architecture, read from the GGUF metadata."""

    layers: int
    width: int
    query_heads: int
    kv_heads: int
    head_size: int
    context: int
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class Vocabulary:
    """Token strings (byte-level alphabet), merge rules in order, and the ids with a role."""

    tokens: list[str]
    merges: list[str]
    special_ids: list[int]
    eos_id: int


@dataclass(frozen=True)
class Model:
    """Everything the GGUF holds: ``weights`` maps GGUF names to float32 arrays, matrices as (out, in)."""

    config: Config
    vocabulary: Vocabulary
    weights: dict[str, np.ndarray]


def load(path: str | os.PathLike[str]) -> Model:
    """Read a llama-architecture GGUF file; quantised tensors (Q4_1, Q8_0) become float32."""
    import gguf

    reader = gguf.GGUFReader(path)

    def field(name: str):
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        raise ValueError(f"{path} holds a {field('general.architecture')!r} model; this example runs 'llama' ones")
    width, query_heads = field("llama.embedding_length"), field("llama.attention.head_count")
    config = Config(
        layers=field("llama.block_count"),
        width=width,
        query_heads=query_heads,
        kv_heads=field("llama.attention.head_count_kv"),
        head_size=width // query_heads,
        context=field("llama.context_length"),
        rope_base=field("llama.rope.freq_base"),
        norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
    )
    control = int(gguf.TokenType.CONTROL)
    vocabulary = Vocabulary(
        tokens=field("tokenizer.ggml.tokens"),
        merges=field("tokenizer.ggml.merges"),
        special_ids=[i for i, kind in enumerate(field("tokenizer.ggml.token_type")) if kind == control],
        eos_id=field("tokenizer.ggml.eos_token_id"),
    )

    weights = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        for tensor in reader.tensors
    }
    return Model(config, vocabulary, weights)

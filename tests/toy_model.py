"""A small model of random weights in the shapes of the examples' language model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from smollm2_weights import Config  # noqa: E402

VOCABULARY = 300


def small_model() -> tuple[Config, dict[str, np.ndarray]]:
    """Scaled so that activations keep their size."""
    config = Config(layers=3, width=192, query_heads=3, kv_heads=1, head_size=64, context=512, rope_base=1e5, norm_eps=1e-5)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (VOCABULARY, 192)}
    for layer in range(config.layers):
        block = f"blk.{layer}."
        shapes |= {block + "attn_q": (192, 192), block + "attn_k": (64, 192), block + "attn_v": (64, 192)}
        shapes |= {block + "attn_output": (192, 192), block + "ffn_gate": (512, 192), block + "ffn_up": (512, 192)}
        shapes |= {block + "ffn_down": (192, 512)}
    weights = {f"{name}.weight": rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5) for name, shape in shapes.items()}
    norms = ("output_norm", *(f"blk.{layer}.{name}" for layer in range(config.layers) for name in ("attn_norm", "ffn_norm")))
    return config, weights | {f"{name}.weight": np.ones(192, np.float32) for name in norms}

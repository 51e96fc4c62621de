"""Train a small language model, character by character, on text that comes with Python; no deep-learning framework.

    python examples/train_transformer.py
    python examples/train_transformer.py --attention cuflash --steps 1000 --sample 500
    python examples/train_transformer.py --device cuda --context 1024 --plot loss-1024.png

It is trained twice from the same weights on the same text: with attention by cuflash, and by the plain formula that keeps
all N x N weights.  The two loss curves must agree to 1e-3, and are drawn.  The layers are in transformer_layers.py.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

try:
    import matplotlib
    import numpy as np
    from smollm2_chat import import_cupy, program, say
    from threadpoolctl import threadpool_limits
    from tqdm import tqdm
    from transformer_layers import ATTENTION, AdamW, Chain, CrossEntropy, transformer
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. In the repository, run once: pip install -e '.[examples]'")

matplotlib.use("Agg")  # a file is wanted, not a window

import matplotlib.pyplot as plt  # noqa: E402

AGREEMENT = 1e-3  # nats, between the losses of the two runs ...
AGREEMENT_STEPS = 200  # ... in so many steps; rounding grows from step to step, the faster the higher the learning rate
PROMPT = "The "
# Threads of BLAS gain little on narrower products, and where others use the cores as well they wait ten times as long as they compute.
BLAS_THREADS_FROM_WIDTH = 512


class Text(NamedTuple):
    characters: list[str]  # the vocabulary
    ids: np.ndarray  # (length,) int64, places in it


class Run(NamedTuple):
    model: Chain
    losses: np.ndarray  # (steps,) float64, in nats
    seconds: float


def read_text() -> Text:
    """The language reference as help("if") and the like show it: half a million characters in every installation of Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        sys.exit(f"This Python comes without the texts of help() ({error}): the system has them in a package of its own.")
    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    places = {character: place for place, character in enumerate(characters)}
    return Text(characters, np.array([places[character] for character in text]))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a line for a tenth of the steps, then down in half a cosine to a tenth of the peak."""
    rise = max(1, steps // 10)
    if step < rise:
        return peak * (step + 1) / rise
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def train(xp: Any, attention: str, text: Text, options: argparse.Namespace, dtype: Any = np.float32) -> Run:
    """Weights and batches are those of the seed, so that runs differ in nothing but the attention.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    attention : {"cuflash", "naive"}
    text : Text
    options : Namespace
        The command's.
    dtype : dtype
        Of all weights and layers, float32 or float64.
    """
    sizes = {name: getattr(options, name) for name in ("context", "layers", "heads", "width", "seed")}
    model = transformer(xp, attention, len(text.characters), **sizes, dtype=dtype)
    loss, optimizer = CrossEntropy(xp), AdamW(xp, list(model.parameters()))
    rng = np.random.default_rng(options.seed)

    def differentiate(windows: np.ndarray) -> float:
        batch = xp.asarray(windows)
        value = loss.forward(model.forward(batch[:, :-1]), batch[:, 1:])
        model.backward(loss.backward())
        return float(value)

    window = np.arange(options.context + 1)
    differentiate(text.ids[window][None])  # what is compiled or loaded once does not count as training
    losses = np.empty(options.steps)
    start = time.perf_counter()
    few = threadpool_limits(1 if options.width < BLAS_THREADS_FROM_WIDTH else None, user_api="blas")
    with few, tqdm(range(options.steps), desc=attention, unit="step", disable=None) as bar:
        for step in bar:
            starts = rng.integers(len(text.ids) - options.context, size=options.batch)
            losses[step] = differentiate(text.ids[starts[:, None] + window])
            if not math.isfinite(losses[step]):
                sys.exit(f"FAILED: with {attention} attention the loss is {losses[step]} at step {step + 1}; try a smaller --lr")
            optimizer.step(learning_rate(step, options.steps, options.lr))
            bar.set_postfix_str(f"loss {losses[step]:.3f}")
    return Run(model, losses, time.perf_counter() - start)


def sample(xp: Any, model: Chain, text: Text, count: int, context: int, seed: int) -> str:
    """What the model writes: `count` characters, each drawn with its probability after at most `context` before it."""
    rng = np.random.default_rng(seed)
    ids = [text.characters.index(character) for character in PROMPT]
    for _ in range(count):
        logits = model.forward(xp.asarray([ids[-context:]]))[0, -1].tolist()
        weights = np.exp(np.array(logits) - max(logits))
        ids.append(int(rng.choice(len(weights), p=weights / weights.sum())))
    return "".join(text.characters[place] for place in ids)


def draw(runs: dict[str, Run], vocabulary: int, output: str) -> None:
    """The loss curves, and below them how far apart they are."""
    both = len(runs) == 2
    figure, axes = plt.subplots(1 + both, squeeze=False, sharex=True, figsize=(9, 4.5 + 2.5 * both), layout="constrained")
    curves, *difference = axes[:, 0]
    styles = {"cuflash": {"color": "tab:blue", "lw": 3}, "naive": {"color": "tab:orange", "lw": 1.2, "ls": "--"}}
    for name, run in runs.items():
        curves.plot(range(1, 1 + len(run.losses)), run.losses, label=f"{name} attention", **styles[name])
    curves.axhline(math.log(vocabulary), color="0.6", lw=1, ls=":", label=f"all {vocabulary} characters alike")
    curves.set_ylabel("loss (nats a character)")
    curves.set_title("A character language model trained in plain array code")
    curves.legend(frameon=False)
    for panel in difference:
        apart = np.abs(runs["cuflash"].losses - runs["naive"].losses)
        # A difference of exactly 0 has no place on a logarithmic axis.
        panel.plot(range(1, 1 + len(apart)), np.where(apart > 0, apart, np.nan), ".", color="tab:green")
        panel.axhline(AGREEMENT, color="tab:red", lw=1, label="allowed")
        panel.set_yscale("log")
        panel.set_ylabel("difference")
        panel.legend(frameon=False)
    axes[-1, 0].set_xlabel("step")
    for panel in axes[:, 0]:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=150)
    plt.close(figure)


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {text}")
        return value

    return number


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    number = {"metavar": "N", "type": at_least(1)}
    parser.add_argument("--attention", choices=("both", *ATTENTION), default="both", help="both (the default) compares them")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: CuPy arrays on a GPU (default: cpu)")
    parser.add_argument("--steps", **number, default=200, help="batches to learn from (default: 200)")
    parser.add_argument("--batch", **number, default=8, help="pieces of text in a batch (default: 8)")
    parser.add_argument("--context", **number, default=128, help="characters in a piece (default: 128)")
    parser.add_argument("--layers", **number, default=2, help="each attention and an MLP (default: 2)")
    parser.add_argument("--heads", **number, default=4, help="of attention (default: 4)")
    parser.add_argument("--width", **number, default=128, help="of all heads together (default: 128)")
    parser.add_argument("--lr", type=rate, default=2e-3, metavar="RATE", help="highest learning rate (default: 0.002)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of weights, batches and sample (default: 0)")
    parser.add_argument("--sample", type=at_least(0), default=0, metavar="N", help="characters to write in the end (default: 0)")
    parser.add_argument("--plot", default="loss.png", metavar="FILE", help="the picture (default: loss.png)")
    options = parser.parse_args(arguments)
    if options.width % (2 * options.heads):
        parser.error(f"--width must be a multiple of twice --heads, {2 * options.heads}, not {options.width}")
    # A wrong name is better told now than after the training.
    plot, kinds = Path(options.plot), sorted(plt.figure().canvas.get_supported_filetypes())
    plt.close()
    if plot.suffix[1:].lower() not in kinds:
        parser.error(f"--plot must end in one of .{', .'.join(kinds)}, unlike {options.plot}")
    if not plot.parent.is_dir():
        parser.error(f"--plot {options.plot}: there is no folder {plot.parent}")
    return options


def compare(runs: dict[str, Run]) -> bool:
    """Say how far apart the losses of the two runs are; whether that is allowed."""
    apart = np.abs(runs["cuflash"].losses - runs["naive"].losses)[:AGREEMENT_STEPS]
    print(f"\nLargest difference of the losses: {apart.max():.1e}, at step {apart.argmax() + 1} of {len(apart)}; allowed: {AGREEMENT:g}")
    return bool(apart.max() <= AGREEMENT)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    xp = import_cupy() if options.device == "cuda" else np
    text = read_text()
    length, vocabulary = len(text.ids), len(text.characters)
    if options.context >= length:
        sys.exit(f"--context must be below the length of the text, {length}, not {options.context}")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    print(f"Text: the help topics of Python {version}, {length} characters, {vocabulary} different ones.")
    weights, rows = (options.layers * options.batch * options.heads * options.context**power * 4 / 2**20 for power in (2, 1))
    print(f"From forward to backward, naive attention keeps {weights:.3g} MiB of N x N weights;")
    print(f"cuflash keeps {rows:.3g} MiB, one number for each row of them.\n")

    runs: dict[str, Run] = {}
    print("attention    first loss    last loss    seconds")
    for name in ATTENTION if options.attention == "both" else [options.attention]:
        try:
            runs[name] = run = train(xp, name, text, options)
        except MemoryError as error:
            sys.exit(f"with {name} attention there is not enough memory: {error}")
        print(f"{name:9} {run.losses[0]:13.4f} {run.losses[-1]:12.4f} {run.seconds:10.1f}", flush=True)
    print(f"With all characters alike, the loss is log({vocabulary}) = {math.log(vocabulary):.4f}.")

    agreed = compare(runs) if len(runs) == 2 else True
    try:
        draw(runs, vocabulary, options.plot)
    except OSError as error:
        sys.exit(f"--plot {options.plot}: {error}")
    print(f"Picture: {options.plot}")
    if options.sample:
        say("\nWriting ...")
        first = next(iter(runs.values()))
        print(f"\n{sample(xp, first.model, text, options.sample, options.context, options.seed)}")
    if not agreed:
        sys.exit(f"FAILED: the losses with cuflash and with naive attention are further apart than {AGREEMENT:g}")


if __name__ == "__main__":
    program(main)

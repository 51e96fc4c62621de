"""examples/train_transformer.py learns, with cuflash as with naive attention, and every hand-written gradient is one."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

for module in ("gguf", "matplotlib", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(module, reason=f"{module} is not installed (extra: examples)")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PROGRAM = EXAMPLES / "train_transformer.py"
EPS32, EPS64 = (float(np.finfo(dtype).eps) for dtype in (np.float32, np.float64))
SMALL = ["--steps", "20", "--batch", "8", "--context", "24", "--layers", "1", "--heads", "2", "--width", "32", "--lr", "0.01"]


@pytest.fixture(scope="module")
def layers(import_example):
    return import_example("transformer_layers")


@pytest.fixture(scope="module")
def training(import_example):
    return import_example("train_transformer")


@pytest.fixture(scope="module")
def text(training):
    return training.read_text()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# ---- gradients -------------------------------------------------------------------------------------------------------

STEP = 1e-3
TERMS = 128  # no value below is reached by more roundings than this, each at most EPS64 of the largest value


def slopes(function, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Central differences of `function()` by each element of x, which it reads, and how far off they may be.

    D(h) is off by a series in h^2, so (4 D(h/2) - D(h)) / 3 is off by terms of h^4: smaller than D(h) - D(h/2), which is of
    h^2, by a factor of h^2 and a ratio of derivatives, to which h^2 / h = 1e-3 leaves a thousand. The rest is the rounding of
    the function's values over h.
    """
    wide, narrow, largest = np.empty(x.shape), np.empty(x.shape), 0.0
    for at in np.ndindex(x.shape):
        kept = x[at]
        values = []
        for h in (STEP, -STEP, STEP / 2, -STEP / 2):
            x[at] = kept + h
            values.append(function())
        x[at] = kept
        wide[at], narrow[at] = (values[0] - values[1]) / (2 * STEP), (values[2] - values[3]) / STEP
        largest = max(largest, *map(abs, values))
    bound = STEP * np.abs(wide - narrow) + 4 * TERMS * EPS64 * (1 + largest) / STEP
    assert bound.max() <= 1e-6 * max(1.0, np.abs(narrow).max())  # otherwise it would say little
    return (4 * narrow - wide) / 3, bound


def assert_gradients(layer, inputs: list[np.ndarray], backward, dy: np.ndarray) -> None:
    """The layer's gradients of sum(dy * output), by its inputs and by its parameters."""

    def value() -> float:
        return float((dy * layer.forward(*inputs)).sum()) / dy.size

    layer.forward(*inputs)
    got = backward(dy / dy.size)
    got = list(got) if isinstance(got, tuple) else [got]
    parameters = list(layer.parameters()) if hasattr(layer, "parameters") else []
    got += [p.gradient for p in parameters]
    by = [x for x in inputs if x.dtype.kind == "f"] + [p.value for p in parameters]
    got = [g for g in got if g is not None]
    assert len(got) == len(by)
    for gradient, x in zip(got, by, strict=True):
        want, bound = slopes(value, x)
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
        assert (np.abs(gradient - want) <= bound).all(), np.abs(gradient - want).max()


def simple_layers(layers):
    rotary = layers.Rotary(np, 7, 6, np.float64)
    return {
        "linear": (layers.Linear(normal(6, 5, seed=1)), (2, 3, 6)),
        "norm": (layers.RMSNorm(np, normal(6, seed=1)), (2, 3, 6)),
        "silu": (layers.SiLU(np), (2, 3, 6)),
        "rotary": (rotary, (2, 5, 2, 6)),
        "residual": (layers.Chain(layers.SiLU(np), layers.Linear(normal(6, 6, seed=1)), residual=True), (2, 3, 6)),
        "chain": (layers.Chain(layers.SiLU(np), layers.Linear(normal(6, 5, seed=1))), (2, 3, 6)),
    }


@pytest.mark.parametrize("name", ["linear", "norm", "silu", "rotary", "residual", "chain"])
def test_backward_of_a_layer_is_its_slope(layers, name):
    layer, shape = simple_layers(layers)[name]
    x = normal(*shape)
    assert_gradients(layer, [x], layer.backward, normal(*layer.forward(x).shape, seed=2))


def test_backward_of_the_embedding_sums_over_repeated_tokens(layers):
    embedding = layers.Embedding(np, normal(5, 3))
    ids = np.array([[0, 3, 3], [1, 0, 3]])  # 2 and 4 do not occur
    assert_gradients(embedding, [ids], embedding.backward, normal(2, 3, 3, seed=2))
    assert not embedding.table.gradient[[2, 4]].any()


@pytest.mark.parametrize("name", ["cuflash", "naive"])
def test_backward_of_attention_is_its_slope(layers, name):
    attention = layers.ATTENTION[name](np)
    q, k, v, dy = (normal(2, 5, 2, 4, seed=seed) for seed in range(4))
    assert_gradients(attention, [q, k, v], attention.backward, dy)
    first = attention.forward(q, k, v)[:, 0]
    np.testing.assert_allclose(first, v[:, 0], rtol=0, atol=4 * EPS64 * np.abs(v).max())  # the first row sees itself alone


@pytest.mark.parametrize("name", ["cuflash", "naive"])
def test_backward_of_self_attention_is_its_slope(layers, name):
    rotary = layers.Rotary(np, 8, 4, np.float64)
    layer = layers.SelfAttention(np, layers.ATTENTION[name](np), rotary, 2, normal(8, 24, seed=1) / 3, normal(8, 8, seed=2) / 3)
    assert_gradients(layer, [normal(2, 5, 8)], layer.backward, normal(2, 5, 8, seed=3))


def test_rotary_makes_products_depend_on_the_distance_alone(layers):
    rotary = layers.Rotary(np, 9, 6, np.float64)
    q, k = (rotary.forward(np.broadcast_to(normal(6, seed=seed), (1, 9, 1, 6)))[0, :, 0] for seed in (0, 1))
    products = q @ k.T
    size = np.linalg.norm(q[0]) * np.linalg.norm(k[0])
    assert np.abs(products[1:, 1:] - products[:-1, :-1]).max() <= 32 * EPS64 * size  # angles up to 8, and sums of 6
    assert abs(products[3, 0] - products[0, 0]) > 0.01 * size


def test_cross_entropy_and_its_slope(layers):
    loss, logits, targets = layers.CrossEntropy(np), normal(2, 3, 5), np.array([[0, 4, 4], [1, 2, 0]])
    want = -math.fsum(
        x[t] - math.log(math.fsum(map(math.exp, x))) for x, t in zip(logits.reshape(6, 5).tolist(), targets.ravel(), strict=True)
    ) / 6
    assert abs(loss.forward(logits, targets) - want) <= 16 * EPS64 * want
    got = loss.backward()
    slope, bound = slopes(lambda: float(loss.forward(logits, targets)), logits)
    assert got.shape == logits.shape and (np.abs(got - slope) <= bound).all()
    loss.forward(logits + 1e4, targets)  # exp of which would overflow
    assert np.abs(loss.backward() - got).max() <= 1e4 * EPS64


@pytest.mark.parametrize("name", ["cuflash", "naive"])
def test_gradients_of_the_whole_model(layers, name):
    """The slope along its own gradient is the gradient's squared length: every parameter counts, wired as it is."""
    model = layers.transformer(np, name, 11, 6, 2, 2, 8, seed=0, dtype=np.float64)
    ids = np.random.default_rng(1).integers(11, size=(3, 7))
    loss = layers.CrossEntropy(np)

    def value() -> float:
        return float(loss.forward(model.forward(ids[:, :-1]), ids[:, 1:]))

    value()
    model.backward(loss.backward())
    parameters = list(model.parameters())
    assert len(parameters) == 1 + 2 * 6 + 2
    assert all(np.abs(p.gradient).max() > 0 for p in parameters)
    for parameter in parameters:
        start, direction, along = parameter.value, parameter.gradient, np.zeros(1)

        def moved() -> float:
            parameter.value = start + along[0] * direction  # noqa: B023
            return value()

        want, bound = slopes(moved, along)
        parameter.value = start
        assert abs((direction**2).sum() - want[0]) <= bound[0]


def test_adamw_is_the_published_update(layers):
    vector, matrix = layers.Parameter(normal(3)), layers.Parameter(normal(2, 2, seed=1))
    optimizer = layers.AdamW(np, [vector, matrix], betas=(0.8, 0.95), decay=0.1)
    want = {p: p.value.ravel().tolist() for p in (vector, matrix)}
    means, squares = ({p: [0.0] * p.value.size for p in want} for _ in range(2))
    for step in range(1, 4):
        for p in want:
            p.gradient = normal(*p.value.shape, seed=10 * step + p.value.ndim)
        optimizer.step(0.01)
        for p, values in want.items():
            for i, g in enumerate(p.gradient.ravel().tolist()):
                means[p][i] = 0.8 * means[p][i] + 0.2 * g
                squares[p][i] = 0.95 * squares[p][i] + 0.05 * g * g
                corrected = means[p][i] / (1 - 0.8**step), squares[p][i] / (1 - 0.95**step)
                decayed = values[i] * (1 - 0.01 * 0.1) if p is matrix else values[i]
                values[i] = decayed - 0.01 * corrected[0] / (math.sqrt(corrected[1]) + 1e-8)
    for p, values in want.items():
        np.testing.assert_allclose(p.value.ravel(), values, rtol=0, atol=64 * EPS64 * np.abs(values).max())


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_losses_agree_and_fall(training, text, dtype):
    options = training.parse(SMALL)
    ours, naive = (training.train(np, name, text, options, dtype) for name in ("cuflash", "naive"))
    assert all(p.value.dtype == dtype for run in (ours, naive) for p in run.model.parameters())
    apart = np.abs(ours.losses - naive.losses)
    assert apart.shape == (20,)
    assert apart.max() <= training.AGREEMENT * np.finfo(dtype).eps / EPS32  # what the program allows, in its dtype
    uniform = math.log(len(text.characters))
    assert abs(ours.losses[0] - uniform) < 0.1 < 1 < uniform - ours.losses[-5:].mean()


def test_a_wrong_gradient_would_show(training, text, layers, monkeypatch):
    right = layers.CuflashAttention.backward

    def wrong(self, dout):
        dq, dk, dv = right(self, dout)
        return dq, -dk, dv  # a factor instead would be hard to see: Adam divides by the size of a gradient

    monkeypatch.setattr(layers.CuflashAttention, "backward", wrong)
    options = training.parse(SMALL)
    runs = {name: training.train(np, name, text, options) for name in ("cuflash", "naive")}
    assert not training.compare(runs)


def test_seed_decides_the_run(training, text):
    first, again, other = (
        training.train(np, "naive", text, training.parse([*SMALL, "--steps", "2", "--seed", seed])).losses for seed in ("1", "1", "2")
    )
    assert first[0] == again[0] and first[0] != other[0]


def test_text_is_the_help_topics(text):
    from pydoc_data.topics import topics

    characters = "".join(text.characters[place] for place in text.ids)
    assert topics["if"] in characters and topics["lambda"] in characters and len(characters) > 300_000
    assert text.characters == sorted(set(characters))


def test_sample_continues_the_prompt(training, text, layers):
    model = layers.transformer(np, "cuflash", len(text.characters), 8, 1, 2, 16, seed=0)
    written = [training.sample(np, model, text, 20, 8, seed) for seed in (3, 3, 4)]  # longer than the context
    assert written[0] == written[1] != written[2]
    assert all(line.startswith(training.PROMPT) and len(line) == len(training.PROMPT) + 20 for line in written)


def test_learning_rate_rises_then_falls(training):
    rates = [training.learning_rate(step, 100, 2.0) for step in range(100)]
    assert np.argmax(rates) in (9, 10) and max(rates) == 2.0
    assert all(np.diff(rates[:10]) > 0) and all(np.diff(rates[10:]) < 0)
    assert min(rates) >= 0.2 * (1 - EPS64)
    assert training.learning_rate(0, 1, 2.0) == 2.0


# ---- the command -----------------------------------------------------------------------------------------------------


def test_command_compares_draws_and_writes(training, tmp_path):
    from matplotlib.image import imread

    picture = tmp_path / "loss.png"
    done = run(PROGRAM, *SMALL, "--sample", "10", "--plot", picture)
    assert done.returncode == 0 and "FAILED" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert "cuflash" in done.stdout and "naive" in done.stdout and any("Largest difference" in line for line in lines)
    pixels = imread(picture)
    assert min(pixels.shape[:2]) >= 1000
    for color in ((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40)):  # two curves, their difference, its bound
        assert (np.abs(pixels[..., :3] * 255 - color).max(axis=-1) < 1).sum() > 100


def test_one_attention_is_not_compared(training, tmp_path, capsys):
    training.main([*SMALL, "--steps", "2", "--attention", "naive", "--plot", str(tmp_path / "one.svg")])
    printed = capsys.readouterr().out
    assert "Largest difference" not in printed and "cuflash  " not in printed
    assert "</svg>" in (tmp_path / "one.svg").read_text()


def test_disagreement_fails_the_program(training, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "compare", lambda runs: False)
    with pytest.raises(SystemExit, match="FAILED: the losses"):
        training.main([*SMALL, "--steps", "2", "--plot", str(tmp_path / "x.png")])


def test_divergence_is_told(training, text):
    with np.errstate(all="ignore"), pytest.raises(SystemExit, match=r"FAILED: .* loss is nan .* smaller --lr"):
        training.train(np, "naive", text, training.parse([*SMALL, "--lr", "1e30"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be 1 or more, not 0"),
        (["--batch", "many"], "argument --batch: must be a whole number, not 'many'"),
        (["--seed", "-1"], "argument --seed: must be 0 or more, not -1"),
        (["--lr", "nan"], "argument --lr: must be a positive number, not 'nan'"),
        (["--lr", "fast"], "argument --lr: must be a positive number, not 'fast'"),
        (["--heads", "3"], "--width must be a multiple of twice --heads, 6, not 128"),
        (["--attention", "flash"], "invalid choice: 'flash'"),
        (["--plot", "no/such/folder/x.png"], "there is no folder no/such/folder"),
        (["--plot", "x.nonsense"], "--plot must end in one of"),
    ],
    ids=["zero", "word", "negative", "nan", "lr", "heads", "attention", "folder", "ending"],
)
def test_arguments_are_checked(training, capsys, arguments, message):
    with pytest.raises(SystemExit) as refused:
        training.main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_context_longer_than_the_text(training):
    with pytest.raises(SystemExit, match=r"^--context must be below the length of the text"):
        training.main(["--context", "100000000"])


def test_unwritable_picture_is_one_message(training, tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit, match=r"^--plot .*folder\.png: "):
        training.main([*SMALL, "--steps", "1", "--plot", str(tmp_path / "folder.png")])


def test_too_little_memory_is_one_message(training, monkeypatch):
    def train(*_):
        raise MemoryError("Unable to allocate 3 TiB")

    monkeypatch.setattr(training, "train", train)
    with pytest.raises(SystemExit, match="^with cuflash attention there is not enough memory: Unable to allocate 3 TiB"):
        training.main(SMALL)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT, and opens a terminal")
def test_terminal_shows_a_bar_and_ctrl_c_is_a_word(tmp_path):
    import termios

    terminal, side = os.openpty()
    termios.tcsetwinsize(side, (24, 100))
    arguments = [*SMALL, "--steps", "1000000", "--plot", str(tmp_path / "never.png")]
    process = subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stdout=subprocess.DEVNULL, stderr=side, start_new_session=True)
    os.close(side)
    shown, asked = b"", False
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        while chunk := os.read(terminal, 1000):
            shown += chunk
            if b"loss 4" in shown and not asked:
                process.send_signal(signal.SIGINT)
                asked = True
    except OSError:  # how Linux tells that the program has closed its end
        pass
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        timer.cancel()
        process.kill()
        os.close(terminal)
    assert process.wait() == 130, shown.decode()
    assert b"/1000000 [" in shown and b"interrupted" in shown and b"Traceback" not in shown
    assert not list(tmp_path.iterdir())


def test_missing_package_is_one_message_with_the_extra():
    done = run("-c", f"import runpy, sys; sys.modules['matplotlib'] = None; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')")
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "matplotlib" in line and "pip install -e '.[examples]'" in line

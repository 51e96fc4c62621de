"""Compiled GPU kernels on disk: one file per kernel, and a file that is not exactly right counts as none.

A file is the cubin followed by a trailer: a mark of ten bytes and the SHA-256 of key and cubin. Tools that read cubins read it
as it is, the trailer lying behind the end of the ELF image.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .host import cache_directory

logger = logging.getLogger("cuflash")

_MARK = b"\ncuflash1\n"
_TRAILER = len(_MARK) + hashlib.sha256().digest_size
_warned: set[str] = set()

# Below the cache directory: who keeps what there. Only such files are ever listed or removed.
CONTENTS = {"cuda": (".cubin", ".tmp"), "cpu": (".nbi", ".nbc")}


def directory() -> Path:
    """Where the compiled GPU kernels are."""
    return cache_directory() / "cuda"


def load(file: str, key: str) -> bytes | None:
    """The cubin kept under this name and key, or None if there is none, or a damaged or foreign one."""
    path = directory() / file
    try:
        stored = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _warn("read", f"cannot read the compiled kernel {path} ({error}); compiling it again")
        return None
    cubin, trailer = stored[:-_TRAILER], stored[-_TRAILER:]
    if not cubin or trailer != _trailer(key, cubin):
        _warn("damaged", f"the compiled kernel {path} is damaged; compiling it again")
        return None
    return cubin


def store(file: str, key: str, cubin: bytes) -> bool:
    """Keep a cubin; False, and one warning per process, if that is not possible. Readers never see half a file."""
    temporary = None
    try:
        place = directory()
        for folder in (place.parent, place):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f"{file[:40]}.", suffix=".tmp", dir=place)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(cubin + _trailer(key, cubin))
        os.replace(temporary, place / file)
    except OSError as error:
        _warn("write", f"cannot keep compiled kernels in {directory()} ({error}); they live in memory only")
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def _trailer(key: str, cubin: bytes) -> bytes:
    return _MARK + hashlib.sha256(key.encode() + cubin).digest()


def _warn(kind: str, message: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        logger.warning(message)


# ---- for the command line ---------------------------------------------------------------------------------------------


def entries() -> Iterator[Path]:
    """Every file of cuflash's caches, of GPU and CPU kernels, whoever made it; nothing behind symbolic links."""
    for part, suffixes in CONTENTS.items():
        for folder, _, files in os.walk(cache_directory() / part):
            yield from (Path(folder, file) for file in sorted(files) if file.endswith(suffixes))


def clear() -> Iterator[Path]:
    """Remove those files, then the folders that this leaves empty; yields each file removed."""
    for path in list(entries()):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            path.unlink()
            yield path
    for part in CONTENTS:
        for folder, _, _ in os.walk(cache_directory() / part, topdown=False):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(folder)

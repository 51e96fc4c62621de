"""Where the compiled CPU kernels are kept between processes, and the message while they are compiled.

Numba's own on-disk cache does the work. Three things differ: the directory is cuflash's; the stamp covers every file that
the kernels are made from, where Numba looks only at the file of the outermost function; and whatever is wrong with the
cache, the call goes on and compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from numba.core import caching, event

from ..host import cache_directory

logger = logging.getLogger("cuflash")

COMPILE_SECONDS = 6  # about, for one compute dtype


def _stamp() -> str:
    """A hash of every source file of the CPU kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("cpu_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _CuflashLocator(caching.UserProvidedCacheLocator):
    """Places the kernels in cuflash's cache directory, which only its owner may read or change."""

    def __init__(self, py_func, py_file):
        super().__init__(py_func, py_file)
        self._cache_path = str(cache_directory() / "cpu" / self.get_suitable_cache_subpath(py_file))

    def get_source_stamp(self) -> str:
        return _stamp()

    @classmethod
    def from_function(cls, py_func, py_file):
        locator = cls(py_func, py_file)
        try:
            cache_directory().mkdir(mode=0o700, parents=True, exist_ok=True)
            locator.ensure_cache_path()
        except OSError as error:  # Numba would go on to say that there is no locator
            place = cache_directory()
            raise RuntimeError(f"the cache directory {place} cannot be used ({error}); CUFLASH_CACHE_DIR chooses another") from None
        return locator


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_CuflashLocator]


class _CheckedFile(caching.IndexDataCacheFile):
    """Numba's pair of files, with a checksum in front of the machine code: one wrong bit in it could do anything."""

    def _save_data(self, name, data):
        data = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(hashlib.sha256(data).digest() + data)

    def _load_data(self, name):
        stored = Path(self._data_path(name)).read_bytes()
        digest, data = stored[:32], stored[32:]
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("the checksum does not match")
        return pickle.loads(data)


class _ForgivingCache(caching.FunctionCache):
    """A cache that is only ever a help: an unreadable, damaged or unwritable file means compiling again."""

    _impl_class = _Implementation

    def __init__(self, py_func):
        super().__init__(py_func)
        self._cache_file = _CheckedFile(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # noqa: BLE001  a pickle may fail in any way
            logger.warning("cannot use the compiled kernels in %s (%s); compiling them again", self.cache_path, error)
            with contextlib.suppress(Exception):
                self.flush()
            return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except Exception as error:  # noqa: BLE001
            logger.warning("cannot keep the compiled kernels in %s (%s)", self.cache_path, error)


def cached(dispatcher):
    """Decorator of a jitted function: cache it on disk, if there is a place."""
    try:
        dispatcher._cache = _ForgivingCache(dispatcher.py_func)
    except Exception as error:  # noqa: BLE001  no writable directory, or another Numba
        logger.warning("compiled kernels will not be kept between processes: %s", error)
    return dispatcher


class _Announcer(event.Listener):
    """Says once on stderr that compiling has begun; loading from the cache never gets here."""

    def __init__(self, what: str, seconds: int):
        self.what, self.seconds = what, seconds
        self.started = 0.0

    def on_start(self, event) -> None:
        if self.started:
            return
        self.started = time.perf_counter()
        message = f"compiling the CPU kernels for {self.what} (once, about {self.seconds} s) ..."
        logger.info(message)
        with contextlib.suppress(Exception):  # there may be no stderr at all
            print(f"cuflash: {message}", file=sys.stderr, flush=True)

    def on_end(self, event) -> None:
        pass


@contextlib.contextmanager
def announced(what: str, seconds: int = COMPILE_SECONDS) -> Iterator[None]:
    """Announce compilation that happens inside the ``with`` block, and about how long it takes."""
    listener = _Announcer(what, seconds)
    with event.install_listener("numba:compile", listener):
        yield
    if listener.started:
        logger.info("compiled in %.1f s", time.perf_counter() - listener.started)


_compile_lock = threading.Lock()
_compiled: set[tuple] = set()


def compiled_kernel(kernel, signature: Callable, itemsize: int, what: str, seconds: int = COMPILE_SECONDS):
    """A jitted function for a compute dtype: from memory, from the cache on disk, or compiled now and announced as ``what``."""
    key = (kernel.__name__, itemsize)
    if key not in _compiled:
        with _compile_lock:
            if key not in _compiled:
                with announced(what, seconds):
                    kernel.compile(signature(itemsize))
                _compiled.add(key)
    return kernel

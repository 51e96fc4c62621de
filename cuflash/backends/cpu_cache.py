"""Where the compiled CPU kernels are kept between processes, and the message while they are compiled.

Numba's own on-disk cache does the work: beside the source, else in the user's cache directory. Three things differ.
CUFLASH_CACHE_DIR comes first if it is set; the stamp covers every file that the kernels are made from, where Numba looks
only at the file of the outermost function; and whatever is wrong with the cache, the call goes on and compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from numba.core import caching, event

logger = logging.getLogger("cuflash")

COMPILE_SECONDS = 6  # about, for one compute dtype


def _locator(name: str) -> type:
    """One of Numba's cache locators; in older versions their names begin with an underscore."""
    return getattr(caching, name, None) or getattr(caching, f"_{name}")


def _stamp() -> str:
    """A hash of every source file of the CPU kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("cpu_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Stamped:
    def get_source_stamp(self) -> str:
        return _stamp()


_UserProvided = _locator("UserProvidedCacheLocator")


class _CuflashLocator(_Stamped, _UserProvided):
    """The directory that CUFLASH_CACHE_DIR names."""

    def __init__(self, py_func, py_file):
        super().__init__(py_func, py_file)
        self._cache_path = os.path.join(os.environ["CUFLASH_CACHE_DIR"], "cpu", self.get_suitable_cache_subpath(py_file))

    @classmethod
    def from_function(cls, py_func, py_file):
        if not os.environ.get("CUFLASH_CACHE_DIR"):
            return None
        return super(_UserProvided, cls).from_function(py_func, py_file)


class _NumbaDirectory(_Stamped, _UserProvided):
    pass


class _BesideSource(_Stamped, _locator("InTreeCacheLocator")):
    pass


class _UserWide(_Stamped, _locator("UserWideCacheLocator")):
    pass


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_CuflashLocator, _NumbaDirectory, _BesideSource, _UserWide]


class _ForgivingCache(caching.FunctionCache):
    """A cache that is only ever a help: an unreadable, truncated or unwritable file means compiling again."""

    _impl_class = _Implementation

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

    def __init__(self, what: str):
        self.what = what
        self.started = 0.0

    def on_start(self, event) -> None:
        if self.started:
            return
        self.started = time.perf_counter()
        message = f"compiling the CPU kernels for {self.what} (once, about {COMPILE_SECONDS} s) ..."
        logger.info(message)
        with contextlib.suppress(Exception):  # there may be no stderr at all
            print(f"cuflash: {message}", file=sys.stderr, flush=True)

    def on_end(self, event) -> None:
        pass


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Announce compilation that happens inside the ``with`` block."""
    listener = _Announcer(what)
    with event.install_listener("numba:compile", listener):
        yield
    if listener.started:
        logger.info("compiled in %.1f s", time.perf_counter() - listener.started)

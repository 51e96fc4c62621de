"""Assertions on errors and their messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(error: type[Exception], *pieces: str) -> Iterator[None]:
    """The block raises exactly this kind of error, and the message holds all the pieces."""
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error
    missing = [piece for piece in pieces if piece not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"

"""A short run of what .ci/endurance does for long, and that it sees what it is there to see."""

from __future__ import annotations

import pytest
from endurance import endure

from cuflash.page_arrays import PageArrays
from cuflash.pages import PagePool


def test_a_few_hundred_requests():
    found = endure(300, seed=2)
    assert found["requests"] == 300 and found["checked"] == found["steps"]
    for event in ("shared", "forks", "truncations", "cancellations", "full", "moved"):
        assert found[event] > 0, event


def test_few_requests():
    assert endure(1, seed=2)["requests"] == 1
    with pytest.raises(ValueError, match="requests: got 0; it must be at least 1"):
        endure(0)


def test_pages_that_are_not_copied_are_noticed(monkeypatch):
    monkeypatch.setattr(PageArrays, "copy_pages", lambda self, old, new: None)
    with pytest.raises(AssertionError, match="request"):
        endure(300, seed=2)


def test_pages_that_are_lost_are_noticed(monkeypatch):
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages: release(self, list(pages)[:8]))
    with pytest.raises(AssertionError, match="pages were lost"):
        endure(40, seed=2)


@pytest.mark.gpu
def test_on_a_gpu():
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        endure(500, seed=3, device="cuda")

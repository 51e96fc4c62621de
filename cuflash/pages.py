"""Which sequence of a paged cache holds which pages: ids, lengths, page lists and reference counts.

Bookkeeping only. What lies in the pages is the caller's: it hands in the function that copies one.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import arrays, checks
from .types import CacheFullError

CopyPages = Callable[[list[int], list[int]], None]  # (from, to): no page that is written is read

NO_PAGE = -1  # fills the unused end of a page table row
INT32_MAX = 2**31 - 1  # tables and lengths leave the cache as int32


class PagePool:
    """Which pages are free, and how many sequences hold each of the others."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is the likeliest in the CPU's cache
        self.holders = [0] * num_pages

    def take(self, n: int) -> list[int]:
        pages = [self.free.pop() for _ in range(n)]
        self.share(pages)
        return pages

    def next(self, n: int) -> list[int]:
        """The pages that will be taken next."""
        return self.free[: -n - 1 : -1]

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free.append(page)

    def adopt(self, pages: Iterable[int]) -> None:
        """Hold pages of someone else's choice, free or not."""
        self.share(pages)
        self.free = [page for page in self.free if self.holders[page] == 0]


@dataclass(slots=True)
class PageList:
    """One sequence: it holds exactly the pages that its length needs."""

    pages: array = field(default_factory=lambda: array("i"))
    length: int = 0


class Sequences:
    """The sequences of a cache by id. Ids count up and are never used twice."""

    def __init__(self, num_pages: int, page_size: int, max_pages_per_seq: int, copy_pages: CopyPages) -> None:
        self.pool = PagePool(num_pages)
        self.num_pages, self.page_size, self.max_pages_per_seq = num_pages, page_size, max_pages_per_seq
        self.capacity = min(max_pages_per_seq * page_size, INT32_MAX)
        self._copy_pages = copy_pages
        self._lists: dict[int, PageList] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._lists)

    def __getitem__(self, known_id: int) -> PageList:
        return self._lists[known_id]

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    # ---- ids

    def id(self, seq: Any) -> int:
        seq = checks.integer(seq, "seq", 0)
        if seq not in self._lists:
            why = "it was freed" if seq < self._next_id else "no such id was given out"
            raise ValueError(f"seq: {seq} is not in the cache; {why}")
        return seq

    def ids(self, seqs: Any, distinct: bool = False) -> tuple[list[int], bool]:
        """Ids that are known to the cache (all for None), and whether a bare id came in."""
        if seqs is None:
            return list(self._lists), False
        if not isinstance(seqs, Iterable) or (isinstance(seqs, np.ndarray) and seqs.ndim == 0):
            return [self.id(seqs)], True
        lists = self._lists
        ids = [seq if type(seq) is int and seq in lists else self.id(seq) for seq in seqs]
        if distinct and len(set(ids)) != len(ids):
            raise ValueError(f"seqs: {Counter(ids).most_common(1)[0][0]} comes more than once; each may come once")
        return ids, False

    def lengths(self, ids: list[int]) -> list[int]:
        return [self._lists[i].length for i in ids]

    # ---- life of a sequence

    def add(self, pages: PageList) -> int:
        seq = self._next_id
        self._next_id += 1
        self._lists[seq] = pages
        return seq

    def fork(self, seq: int, length: int) -> int:
        pages = self._lists[seq].pages[: self.pages_for(length)]
        self.pool.share(pages)
        return self.add(PageList(pages, length))

    def cut(self, seq: int, length: int) -> None:
        """Give back the pages beyond a length."""
        sequence, keep = self._lists[seq], self.pages_for(length)
        self.pool.release(sequence.pages[keep:])
        del sequence.pages[keep:]
        sequence.length = length

    def remove(self, seq: int) -> None:
        self.cut(seq, 0)
        del self._lists[seq]

    # ---- room to write

    def grow(self, ids: list[int], counts: list[int]) -> list[int]:
        """Lengthen sequences, all or none; returns the lengths before."""
        begins = self.lengths(ids)
        for i, begin, n in zip(ids, begins, counts, strict=True):
            if begin + n > self.capacity:
                raise ValueError(
                    f"seq {i}: {n} tokens after its {begin} exceed its capacity of {self.capacity} "
                    f"({self.max_pages_per_seq} pages of {self.page_size})"
                )
        self.own(ids, begins, counts, "append")
        for i, begin, n in zip(ids, begins, counts, strict=True):
            self._lists[i].length = begin + n
        return begins

    def own(self, ids: list[int], begins: list[int], counts: list[int], what: str) -> None:
        """Give sequences pages of their own for tokens that will be written: new ones at the end, copies of shared ones."""
        pool, size, holders = self.pool, self.page_size, self.pool.holders
        missing: list[tuple[array, int]] = []  # (page list, how many)
        shared: list[tuple[array, int]] = []  # (page list, index into it)
        for i, begin, n in zip(ids, begins, counts, strict=True):
            if n == 0:
                continue
            pages, stop = self._lists[i].pages, -(-(begin + n) // size)
            held = len(pages)
            if stop > held:
                missing.append((pages, stop - held))
            for j in range(begin // size, stop if stop < held else held):
                if holders[pages[j]] > 1:
                    shared.append((pages, j))
        # The last holder of a page keeps it, so a page that only these sequences hold needs one copy fewer.
        touched = Counter(pages[j] for pages, j in shared)
        copies = sum(count - (count == pool.holders[page]) for page, count in touched.items())
        wanted = sum(n for _, n in missing) + copies
        if wanted > len(pool.free):
            raise CacheFullError(
                f"{what} wants {wanted} pages ({copies} of them copies of shared pages), "
                f"{len(pool.free)} of {self.num_pages} are free; nothing was changed"
            )
        left = {page: pool.holders[page] for page in touched}
        moved = []
        for pages, j in shared:
            if left[pages[j]] > 1:
                left[pages[j]] -= 1
                moved.append((pages, j))
        if moved:  # before anything is changed: it may fail
            self._copy_pages([pages[j] for pages, j in moved], pool.next(len(moved)))
        for pages, j in moved:
            old = pages[j]
            (pages[j],) = pool.take(1)
            pool.release((old,))
        for pages, n in missing:
            pages.extend(pool.take(n))

    def compact(self) -> int:
        """Move pages that are held to the front of the pool; returns how many moved."""
        pool = self.pool
        used = self.num_pages - len(pool.free)
        old = [page for page in range(used, self.num_pages) if pool.holders[page]]
        if not old:
            return 0
        new = [page for page in range(used) if not pool.holders[page]]
        self._copy_pages(old, new)
        place = dict(zip(old, new, strict=True))
        for sequence in self._lists.values():
            sequence.pages = array("i", (place.get(page, page) for page in sequence.pages))
        for page, to in place.items():
            pool.holders[to], pool.holders[page] = pool.holders[page], 0
        pool.free = list(range(self.num_pages - 1, used - 1, -1))
        return len(old)

    def written(self, ids: list[int], n: int, position: Any) -> list[int]:
        """First position of n tokens that are written to each sequence, by default its last n."""
        lengths = self.lengths(ids)
        begins = [length - n for length in lengths] if position is None else per_id(position, "position", ids)
        for i, begin, length in zip(ids, begins, lengths, strict=True):
            if begin < 0 or begin + n > length:
                raise ValueError(
                    f"seq {i}: {n} tokens at position {begin} lie outside its {length} tokens; make room for them by reserve()"
                )
        return begins

    def held(self, ids: list[int]) -> list[array]:
        """The pages of each sequence."""
        return [self._lists[i].pages for i in ids]

    # ---- tables

    def columns(self, ids: list[int], max_pages: int | None) -> int:
        """Columns of a table: at least those that the longest sequence needs, and one."""
        longest = max([1, *map(len, self.held(ids))])
        return longest if max_pages is None else checks.integer(max_pages, "max_pages", longest)

    def fill(self, ids: list[int], table: np.ndarray) -> None:
        """Write the pages of sequences to the first rows of a table that has room for them; other rows are empty."""
        for row, pages in zip(table, self.held(ids), strict=False):
            row[: len(pages)] = pages
            row[len(pages) :] = NO_PAGE
        table[len(ids) :] = NO_PAGE

    def table(self, ids: list[int], max_pages: int | None) -> np.ndarray:
        table = np.empty((len(ids), self.columns(ids, max_pages)), np.int32)
        self.fill(ids, table)
        return table

    def csr(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lists = self.held(ids)
        indptr = np.array([0, *itertools.accumulate(map(len, lists))], np.int32)
        indices = np.fromiter(itertools.chain.from_iterable(lists), np.int32)
        last = [length - max(len(pages) - 1, 0) * self.page_size for length, pages in zip(self.lengths(ids), lists, strict=True)]
        return indptr, indices, np.array(last, np.int32)

    def adopt_table(self, page_table: Any, lengths: Any) -> list[int]:
        table, lengths = index(page_table, "page_table", 2), index(lengths, "lengths", 1)
        room = np.full(len(table), table.shape[1] * self.page_size)
        what = f"{table.shape[1]} columns of page_table, {self.page_size} tokens a page"
        lengths = checks.per_sequence(lengths, "lengths", len(table), room, what).tolist()
        rows = [row[: self.pages_for(length)] for row, length in zip(table, lengths, strict=True)]
        return self._adopt("page_table", rows, lengths)

    def adopt_csr(self, indptr: Any, indices: Any, last_page_len: Any) -> list[int]:
        indices, last = index(indices, "indices", 1), index(last_page_len, "last_page_len", 1)
        indptr = checks.cu_seqlens(indptr, "indptr", len(indices), "indices")
        if indptr[-1] != len(indices):
            raise ValueError(f"indptr: ends at {indptr[-1]}; it must end at {len(indices)}, the entries of indices")
        if len(indptr) != len(last) + 1:
            raise ValueError(f"indptr: {len(indptr)} entries; last_page_len has {len(last)}, it must have one more")
        rows = [indices[begin:end] for begin, end in itertools.pairwise(indptr)]
        for b, (row, tail) in enumerate(zip(rows, last, strict=True)):
            low, high = (1, self.page_size) if len(row) else (0, 0)
            if not low <= tail <= high:
                raise ValueError(f"last_page_len: {tail} at index {b}; it must be from {low} to {high} ({len(row)} pages)")
        lengths = [max(len(row) - 1, 0) * self.page_size + int(tail) for row, tail in zip(rows, last, strict=True)]
        return self._adopt("indices", rows, lengths)

    def _adopt(self, name: str, rows: list[np.ndarray], lengths: list[int]) -> list[int]:
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length > self.capacity:
                raise ValueError(f"{name}: sequence {b} has {length} tokens; the capacity of a sequence is {self.capacity}")
            bad = row[(row < 0) | (row >= self.num_pages)]
            if bad.size:
                raise ValueError(f"{name}: sequence {b} uses page {bad[0]}; there are pages 0 to {self.num_pages - 1}")
            if len(np.unique(row)) != len(row):
                raise ValueError(f"{name}: sequence {b} uses a page more than once ({row.tolist()}); it may come once")
        lists = [PageList(array("i", row.tolist()), length) for row, length in zip(rows, lengths, strict=True)]
        self.pool.adopt([page for pages in lists for page in pages.pages])
        return [self.add(pages) for pages in lists]


def per_id(value: Any, name: str, ids: list[int]) -> list[int]:
    """One integer for all sequences, or one for each; at least 0."""
    values = [value] * len(ids) if np.ndim(value) == 0 else list(value)
    if len(values) != len(ids):
        raise ValueError(f"{name}: {len(values)} entries for {len(ids)} sequences; it must be one for all or one for each")
    return [checks.integer(x, name, 0) for x in values]


def index(value: Any, name: str, axes: int) -> np.ndarray:
    """An index array with so many axes, as int64."""
    found = arrays.host_index(value, name)
    if found.ndim != axes:
        raise ValueError(f"{name}: shape {found.shape}; it must have {axes} axes")
    return found

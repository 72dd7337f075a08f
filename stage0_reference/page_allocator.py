"""Who holds which page of the latent cache: sharing, copy-on-write, prefix re-use, eviction.

The cache is one pool of equal pages, `page_size` tokens each. A request does not own a stretch of
memory; it owns a *list of page ids* (its row of the block table), so requests of any length fit
wherever pages happen to be free. This file is the bookkeeping of those ids on the host. It
touches no tensor and runs in one thread.

**Reference counts.** A page may stand in several lists at once: a fork (beam, parallel sample)
shares every page of its parent. The count says in how many; a page with a count above zero is
never handed out again.

**Copy-on-write.** Sharing is safe only while nobody writes. Appending to a partly filled page that
someone else may also read moves the writer to a copy first. "Someone else" is a second reference,
or the prefix index below: a page that can still be found by its content must keep that content.

**Prefix re-use.** A latent depends on every token before it, so a page may serve another request
only if the *whole* prefix agrees. A published page is known as (parent's serial, its own tokens).
The tokens are compared, not a hash of them, and every publication draws a fresh serial. Two chains
can therefore never be confused: when a parent goes, the serial goes with it, and its children can
no longer be found, not even through a new page with the same id or the same tokens.

**Eviction.** A published page that nobody holds stays resident and counts as available. Clean pages
are handed out first, then resident ones, least recently used first; handing one out clears its
identity. A request's pages are given back tail first, so the tail of a prefix goes before its head.

**Writing.** `SequencePages.extend` only plans: it returns page copies and slots, which the caller
carries out on the cache. Plans are a log. Carried out in the order in which they were returned,
each with its copies before its slots, they are right whatever was called in between: a page that
left a sequence can be overwritten only by a *later* plan, after the copy that still needed it.
A round of plans, one for each of several sequences, may also be carried out at once: all copies
(in order, or as `plane[destinations] = plane[sources]`), then all slots. Until then nothing else
may be done with those sequences, except to release one and drop its plan.

What it leaves out: re-use of partly filled pages, moving pages to host memory, and the choice of a
request to stop when the pool is full. It refuses what does not fit, and changes nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from operator import index
from typing import NamedTuple, SupportsIndex

ROOT_SERIAL = 0  # the parent of every first page; publications count from 1


class OutOfPages(RuntimeError):
    """The pool cannot serve a request; nothing was changed.

    Attributes
    ----------
    needed : int
        Pages the call had to take.
    available : int
        Pages it could have taken.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            f"{needed} more pages needed, {available} available. Release a sequence, ask for "
            "fewer tokens, or build the pool with a larger num_pages"
        )
        self.needed = needed
        self.available = available


class PageIdentity(NamedTuple):
    """What a published page is known as: its tokens, and by its parent all tokens before them."""

    serial: int
    parent_serial: int
    tokens: tuple[int, ...]


class PageWrites(NamedTuple):
    """What the caller has to do to the cache after an `extend`: the copies, then the slots.

    Attributes
    ----------
    slots : list[int]
        `page * page_size + offset` for each new token, in order.
    copies : list[tuple[int, int]]
        (source page, destination page): whole pages, in every plane of the cache.
    """

    slots: list[int]
    copies: list[tuple[int, int]]


class PageAllocator:
    """The pool: reference counts, the prefix index and the order of eviction.

    Every page is in one of three states: *held* (reference count above zero), *clean* (not held,
    no identity), *evictable* (not held, identity kept until the page is needed).

    Parameters
    ----------
    num_pages : int
        Pages in the pool, at least 1.
    page_size : int
        Tokens per page, at least 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._refcounts = [0] * num_pages
        self._clean = deque(range(num_pages))
        # A dict keeps the order of insertion: the first key is the least recently used page.
        self._evictable: dict[int, None] = {}
        self._identities: dict[int, PageIdentity] = {}
        self._page_by_key: dict[tuple[int, tuple[int, ...]], int] = {}
        self._last_serial = ROOT_SERIAL

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._clean) + len(self._evictable)

    def refcount(self, page: int) -> int:
        """Return how many lists hold `page`."""
        self._require_held({page: 0})
        return self._refcounts[page]

    def is_writable(self, page: int) -> bool:
        """Say whether the one holder of `page` may change it: nobody else reads or finds it."""
        return self.refcount(page) == 1 and page not in self._identities

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages with reference count 1 and no identity, or none at all.

        Raises
        ------
        OutOfPages
            If fewer than `count` pages are available.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0; got {count}")
        if count > self.num_available:
            raise OutOfPages(count, self.num_available)
        return [self._take_page() for _ in range(count)]

    def retain(self, pages: Sequence[int]) -> None:
        """Add one reference to each of `pages`, which must be held already."""
        self._require_held(dict.fromkeys(pages, 1))
        for page in pages:
            self._refcounts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each of `pages`, given in sequence order and released tail first.

        A page that nobody holds any more becomes evictable if it was published, clean otherwise.

        Raises
        ------
        ValueError
            If a page is unknown or given more often than it is held; nothing is released then.
        """
        self._require_held(Counter(pages))
        for page in reversed(pages):
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                if page in self._identities:
                    self._evictable[page] = None
                else:
                    self._clean.append(page)

    def publish(self, pages: Sequence[int], token_ids: Sequence[SupportsIndex]) -> None:
        """Make the full pages of a prefix findable by `match_prefix`.

        Where an equal prefix is known already, the known page stays and the given one remains
        anonymous. Call it when the tokens are in the cache, or their writes are in line.

        Parameters
        ----------
        pages : sequence of int
            Held pages, from position 0; those after the last full page of tokens are ignored.
        token_ids : sequence of int
            The tokens in those pages, from position 0; a last, partly filled page is ignored.
        """
        contents = self._full_pages(token_ids)
        if len(pages) < len(contents):
            raise ValueError(
                f"pages must cover the {len(contents)} full pages of token_ids; got {len(pages)}"
            )
        pages = pages[: len(contents)]
        if len(set(pages)) < len(pages):
            raise ValueError(f"pages must be different pages; got {list(pages)}")
        self._require_held(dict.fromkeys(pages, 1))
        for page, tokens in zip(pages, contents, strict=True):
            if page in self._identities and self._identities[page].tokens != tokens:
                raise ValueError(
                    f"token_ids must be what pages hold; page {page} was published with tokens "
                    f"{self._identities[page].tokens}, got {tokens}"
                )

        parent_serial = ROOT_SERIAL
        for page, tokens in zip(pages, contents, strict=True):
            known = self._page_by_key.get((parent_serial, tokens))
            if known is None:
                # An older identity of this page hung on a parent that is gone; it found nothing.
                self._forget(page)
                self._last_serial += 1
                self._identities[page] = PageIdentity(self._last_serial, parent_serial, tokens)
                self._page_by_key[parent_serial, tokens] = known = page
            parent_serial = self._identities[known].serial

    def match_prefix(self, token_ids: Sequence[SupportsIndex]) -> list[int]:
        """Return the resident full pages that hold a prefix of `token_ids`, up to the first gap.

        The pages are retained for the caller, who has to release them. A page leaves the line of
        eviction while it is held and joins it at the end when it is released.
        """
        pages = []
        parent_serial = ROOT_SERIAL
        for tokens in self._full_pages(token_ids):
            page = self._page_by_key.get((parent_serial, tokens))
            if page is None:
                break
            pages.append(page)
            parent_serial = self._identities[page].serial
        for page in pages:
            self._evictable.pop(page, None)
            self._refcounts[page] += 1
        return pages

    def check_invariants(self) -> None:
        """Raise RuntimeError if the books contradict themselves: a bug in this file."""
        held = [page for page, count in enumerate(self._refcounts) if count > 0]
        known = self._identities
        keys = {(entry.parent_serial, entry.tokens): page for page, entry in known.items()}
        serials = {entry.serial for entry in known.values()}
        facts = {
            "every page is held, clean or evictable, and only one of these": (
                sorted([*held, *self._clean, *self._evictable]) == list(range(self.num_pages))
            ),
            "no reference count is negative": min(self._refcounts) >= 0,
            "every evictable page has an identity": self._evictable.keys() <= known.keys(),
            "no clean page has an identity": known.keys().isdisjoint(self._clean),
            "the index and the identities agree": keys == self._page_by_key,
            "every page has its own serial": len(serials) == len(known) == len(keys),
        }
        for fact, holds in facts.items():
            if not holds:
                raise RuntimeError(f"page allocator is inconsistent: it is not true that {fact}")

    def _take_page(self) -> int:
        """Hold one more page; the caller has checked that there is one."""
        if self._clean:
            page = self._clean.popleft()
        else:
            page = next(iter(self._evictable))
            del self._evictable[page]
            self._forget(page)
        self._refcounts[page] = 1
        return page

    def _forget(self, page: int) -> None:
        """Clear the identity of `page`, if it has one."""
        identity = self._identities.pop(page, None)
        if identity is not None:
            del self._page_by_key[identity.parent_serial, identity.tokens]

    def _full_pages(self, token_ids: Sequence[SupportsIndex]) -> list[tuple[int, ...]]:
        """Cut `token_ids` into the contents of full pages, dropping the rest."""
        # index() makes plain integers of Torch's, which as dictionary keys would never be equal.
        tokens = [index(token) for token in token_ids]
        full = len(tokens) // self.page_size * self.page_size
        return [
            tuple(tokens[start : start + self.page_size])
            for start in range(0, full, self.page_size)
        ]

    def _require_held(self, times: Mapping[int, int]) -> None:
        """Refuse unknown pages, and pages held less than `times[page]` times."""
        for page, needed in times.items():
            # Before the list is indexed: -1 would be read as its last page.
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page ids must be in [0, {self.num_pages}); got {page}")
            if self._refcounts[page] < needed:
                raise ValueError(
                    f"page {page} must be held at least {needed} times; it is held "
                    f"{self._refcounts[page]} times. Was it released twice?"
                )


class SequencePages:
    """One request's pages: token `i` is in page `pages[i // page_size]`, at `i % page_size`.

    Attributes
    ----------
    pages : list[int]
        Page ids in sequence order; exactly as many as `length` tokens need.
    length : int
        Tokens in the sequence, those of plans not yet carried out included.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.pages: list[int] = []
        self.length = 0

    @classmethod
    def from_prefix(
        cls, allocator: PageAllocator, token_ids: Sequence[SupportsIndex]
    ) -> SequencePages:
        """Start a sequence on the resident pages of a prefix; `length` says how much was found.

        Give a prompt without its last token: that one has to be computed in any case, since the
        model predicts from its output.
        """
        sequence = cls(allocator)
        sequence.pages = allocator.match_prefix(token_ids)
        sequence.length = len(sequence.pages) * allocator.page_size
        return sequence

    def extend(self, count: int) -> PageWrites:
        """Make room for `count` more tokens and plan their writes.

        Raises
        ------
        OutOfPages
            If the new pages and the copy of a shared last page do not fit together; the sequence
            and the pool are then as before.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0; got {count}. Use truncate to drop tokens")
        page_size = self.allocator.page_size
        end = self.length + count
        writes_last_page = count > 0 and self.length % page_size > 0
        copies_last_page = writes_last_page and not self.allocator.is_writable(self.pages[-1])
        new_pages = self.allocator.allocate(
            pages_for(end, page_size) - len(self.pages) + int(copies_last_page)
        )
        copies = []
        if copies_last_page:
            source, destination = self.pages[-1], new_pages.pop(0)
            copies.append((source, destination))
            self.pages[-1] = destination
            self.allocator.release([source])
        self.pages.extend(new_pages)
        slots = [
            self.pages[position // page_size] * page_size + position % page_size
            for position in range(self.length, end)
        ]
        self.length = end
        return PageWrites(slots, copies)

    def fork(self) -> SequencePages:
        """Return a second sequence with the same tokens, on the same pages."""
        self.allocator.retain(self.pages)
        child = SequencePages(self.allocator)
        child.pages = list(self.pages)
        child.length = self.length
        return child

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens (rejected speculation) and release pages left empty."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}]; got {length}")
        kept = pages_for(length, self.allocator.page_size)
        self.allocator.release(self.pages[kept:])
        del self.pages[kept:]
        self.length = length

    def publish(self, token_ids: Sequence[SupportsIndex]) -> None:
        """Publish the full pages of `token_ids`, this sequence's tokens from position 0."""
        if len(token_ids) > self.length:
            raise ValueError(
                f"token_ids must be tokens in the cache, at most {self.length}; "
                f"got {len(token_ids)}"
            )
        self.allocator.publish(self.pages, token_ids)

    def release(self) -> None:
        """Give all pages back. The sequence is then empty: a second call releases nothing."""
        self.truncate(0)

    def block_table_row(self, max_pages: int) -> list[int]:
        """Return `pages` padded with -1 (never read) to the width of a block table."""
        if len(self.pages) > max_pages:
            raise ValueError(f"max_pages must be at least {len(self.pages)}; got {max_pages}")
        return self.pages + [-1] * (max_pages - len(self.pages))


def pages_for(length: int, page_size: int) -> int:
    """Pages that `length` tokens need: the quotient rounded up."""
    return -(-length // page_size)

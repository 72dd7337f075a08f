"""The page allocator against a model that keeps every token, and against a simulated cache.

The simulated cache holds in each slot the *whole prefix* up to that token, which is what a latent
depends on. A page found under the wrong prefix is therefore wrong even where its tokens agree.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from stage0_reference.page_allocator import (
    OutOfPages,
    PageAllocator,
    PageWrites,
    SequencePages,
)

pytestmark = pytest.mark.stage0

# Two letters only: different requests have to share prefixes often.
TOKENS = st.lists(st.integers(0, 1), max_size=9)
SEATS = st.integers(0, 3)

Prefix = tuple[int, ...]  # what the simulated cache holds in a slot
Plan = tuple[PageWrites, list[Prefix]]  # what `extend` returned, and what goes into its slots


def snapshot(allocator: PageAllocator) -> str:
    """Return everything the allocator knows, the order of eviction included."""
    return repr(vars(allocator))


class Live:
    """A sequence and the tokens it must hold."""

    def __init__(self, sequence: SequencePages, tokens: list[int]) -> None:
        self.sequence = sequence
        self.tokens = tokens


class AllocatorMachine(RuleBasedStateMachine):
    """Four seats, each with a sequence that starts, grows, forks, shrinks and ends at random.

    The model knows pages by what a reader would see: `resident` maps a whole prefix to the page
    that holds its last `page_size` tokens. When a page is evicted, every longer prefix through it
    is unreachable for good, also if the evicted prefix is published again.
    """

    @initialize(num_pages=st.integers(1, 20), page_size=st.integers(1, 4))
    def start_pool(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.allocator = PageAllocator(num_pages, page_size)
        self.slots: list[Prefix | None] = [None] * (num_pages * page_size)
        self.log: list[Plan] = []
        self.seats = [Live(SequencePages(self.allocator), []) for _ in range(4)]
        self.published: set[int] = set()  # pages with an identity, reachable or not
        self.resident: dict[Prefix, int] = {}
        self.prompts: list[Prefix] = []  # published at some time, to be sent again
        self.lru: list[int] = []  # published pages that nobody holds, next to be evicted first

    # The model.

    def references(self, page: int) -> int:
        return sum(live.sequence.pages.count(page) for live in self.seats)

    def available(self) -> int:
        return sum(self.references(page) == 0 for page in range(self.num_pages))

    def expect_taken(self, new_pages: list[int], was_held: set[int]) -> None:
        """Check which pages were handed out, and evict in the model what had to be evicted."""
        assert len(set(new_pages)) == len(new_pages)
        assert not was_held & set(new_pages), "a page in use was handed out"
        num_clean = self.num_pages - len(was_held) - len(self.lru)
        num_evicted = max(0, len(new_pages) - num_clean)
        evicted = self.lru[:num_evicted]
        assert new_pages[len(new_pages) - num_evicted :] == evicted, "not clean first, then LRU"
        assert not set(new_pages[: len(new_pages) - num_evicted]) & set(self.lru)
        self.lru = self.lru[num_evicted:]
        self.published -= set(evicted)
        for gone in [prefix for prefix, page in self.resident.items() if page in evicted]:
            for prefix in list(self.resident):
                if prefix[: len(gone)] == gone:
                    del self.resident[prefix]

    def note_released(self, pages: list[int]) -> None:
        """Queue for eviction, tail first, the published pages that nobody holds any more."""
        for page in reversed(pages):
            if page in self.published and self.references(page) == 0:
                self.lru.append(page)

    def expect_match(self, tokens: list[int]) -> list[int]:
        pages = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            if tuple(tokens[:end]) not in self.resident:
                break
            pages.append(self.resident[tuple(tokens[:end])])
        return pages

    def held(self) -> set[int]:
        return {page for page in range(self.num_pages) if self.references(page)}

    # The simulated cache.

    def carry_out_log(self) -> None:
        for writes, values in self.log:
            self.copy_pages(writes.copies)
            self.write_slots(writes, values)
        self.log.clear()

    def copy_pages(self, copies: list[tuple[int, int]], *, gather_first: bool = False) -> None:
        size = self.page_size
        before = list(self.slots) if gather_first else self.slots
        for source, destination in copies:
            content = before[source * size : (source + 1) * size]
            self.slots[destination * size : (destination + 1) * size] = content

    def write_slots(self, writes: PageWrites, values: list[Prefix]) -> None:
        assert len(writes.slots) == len(values)
        for slot, value in zip(writes.slots, values, strict=True):
            self.slots[slot] = value

    def read(self, pages: list[int], length: int) -> list[Prefix | None]:
        size = self.page_size
        return [self.slots[pages[i // size] * size + i % size] for i in range(length)]

    @staticmethod
    def prefixes(tokens: list[int], start: int = 0) -> list[Prefix]:
        return [tuple(tokens[: end + 1]) for end in range(start, len(tokens))]

    def plan(self, live: Live, tokens: list[int]) -> Plan | None:
        """Extend `live` and compare with the model; None if the pool had to refuse."""
        sequence, size = live.sequence, self.page_size
        old_pages, was_held = list(sequence.pages), self.held()
        needs_copy = (
            len(tokens) > 0
            and len(live.tokens) % size > 0
            and (self.references(old_pages[-1]) > 1 or old_pages[-1] in self.published)
        )
        total_pages = (len(live.tokens) + len(tokens) + size - 1) // size
        needed, available = total_pages - len(old_pages) + needs_copy, self.available()
        before = snapshot(self.allocator)
        try:
            writes = sequence.extend(len(tokens))
        except OutOfPages as refusal:
            assert (refusal.needed, refusal.available) == (needed, available)
            assert needed > available
            assert snapshot(self.allocator) == before
            assert (sequence.pages, sequence.length) == (old_pages, len(live.tokens))
            return None
        assert needed <= available
        kept = len(old_pages) - needs_copy
        assert sequence.pages[:kept] == old_pages[:kept]
        self.expect_taken(sequence.pages[kept:], was_held)
        assert writes.copies == ([(old_pages[-1], sequence.pages[kept])] if needs_copy else [])
        if needs_copy:
            self.note_released(old_pages[-1:])
        values = self.prefixes(live.tokens + tokens, start=len(live.tokens))
        live.tokens = live.tokens + tokens
        return writes, values

    # The rules.

    def stop(self, live: Live, *, head_first: bool = False) -> None:
        """Release a sequence, which goes on as an empty one."""
        pages = list(live.sequence.pages)
        if head_first:
            # Not what a sequence does, but what loses a head while its tail stays resident.
            live.sequence = SequencePages(self.allocator)
            for page in pages:
                self.allocator.release([page])
                self.note_released([page])
        else:
            live.sequence.release()
            self.note_released(pages)
        live.tokens = []

    def publish_first(self, live: Live, length: int) -> None:
        live.sequence.publish(live.tokens[:length])
        for end in range(self.page_size, length + 1, self.page_size):
            prefix, page = tuple(live.tokens[:end]), live.sequence.pages[end // self.page_size - 1]
            if prefix not in self.resident:
                self.resident[prefix] = page
                self.published.add(page)
                self.prompts.append(prefix)

    @rule(
        seat=SEATS,
        data=st.data(),
        compute=st.booleans(),
        publish=st.booleans(),
        release_head_first=st.none() | st.booleans(),
    )
    def serve(
        self,
        seat: int,
        data: st.DataObject,
        compute: bool,
        publish: bool,
        release_head_first: bool | None,
    ) -> None:
        prompt = data.draw(TOKENS)
        if self.prompts:
            prompt = [*data.draw(st.sampled_from(self.prompts)), *prompt]
        self.stop(self.seats[seat])
        expected = self.expect_match(prompt)
        sequence = SequencePages.from_prefix(self.allocator, prompt)
        assert sequence.pages == expected
        assert sequence.length == len(expected) * self.page_size
        self.lru = [page for page in self.lru if page not in expected]
        live = self.seats[seat] = Live(sequence, prompt[: sequence.length])
        if compute:
            self.extend_later(seat, prompt[sequence.length :])
        if publish:
            self.publish_first(live, len(live.tokens))
        if release_head_first is not None:
            self.stop(live, head_first=release_head_first)

    def extend_later(self, seat: int, tokens: list[int]) -> None:
        """Plan and leave the writes in the log; a full pool costs the next seat its sequence."""
        plan = self.plan(self.seats[seat], tokens)
        if plan is not None:
            self.log.append(plan)
        else:
            self.stop(self.seats[(seat + 1) % 4])

    @rule(seat=SEATS, tokens=TOKENS)
    def extend(self, seat: int, tokens: list[int]) -> None:
        self.extend_later(seat, tokens)

    @rule(
        seats=st.permutations(range(4)),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        stop_the_first=st.booleans(),
        gather_first=st.booleans(),
        slots_backwards=st.booleans(),
    )
    def extend_a_round(
        self,
        seats: list[int],
        tokens: list[int],
        stop_the_first: bool,
        gather_first: bool,
        slots_backwards: bool,
    ) -> None:
        self.carry_out_log()
        lives = [self.seats[seat] for seat in seats]
        plans = []
        for live in lives:
            plans.append(self.plan(live, tokens))
            if live is lives[0] and stop_the_first:
                self.stop(live)
                plans.clear()
        planned = [plan for plan in plans if plan is not None]
        copies = [copy for writes, _ in planned for copy in writes.copies]
        self.copy_pages(copies, gather_first=gather_first)
        for writes, values in reversed(planned) if slots_backwards else planned:
            self.write_slots(writes, values)
        if None in plans:
            self.stop(lives[-1])

    @rule(seat=SEATS, other=SEATS, tokens=TOKENS)
    def fork(self, seat: int, other: int, tokens: list[int]) -> None:
        parent = self.seats[seat]
        child = Live(parent.sequence.fork(), list(parent.tokens))
        replaced, self.seats[other] = self.seats[other], child
        pages = list(replaced.sequence.pages)
        replaced.sequence.release()
        self.note_released(pages)
        self.extend_later(other, tokens)

    @rule(seat=SEATS, data=st.data(), tokens=TOKENS, publish=st.booleans())
    def truncate(self, seat: int, data: st.DataObject, tokens: list[int], publish: bool) -> None:
        live = self.seats[seat]
        if publish:
            self.publish_first(live, len(live.tokens))
        length = data.draw(st.integers(0, len(live.tokens)))
        old_pages = list(live.sequence.pages)
        live.sequence.truncate(length)
        live.tokens = live.tokens[:length]
        self.note_released(old_pages[len(live.sequence.pages) :])
        self.extend_later(seat, tokens)

    @rule(seat=SEATS, data=st.data())
    def publish(self, seat: int, data: st.DataObject) -> None:
        live = self.seats[seat]
        self.publish_first(live, data.draw(st.integers(0, len(live.tokens))))

    @rule(seat=SEATS, publish=st.booleans(), head_first=st.booleans(), data=st.data())
    def release(self, seat: int, publish: bool, head_first: bool, data: st.DataObject) -> None:
        page = data.draw(st.integers(0, self.num_pages - 1))
        once_too_often = [*self.held() - {page}, *[page] * (self.references(page) + 1)]
        before = snapshot(self.allocator)
        with pytest.raises(ValueError, match="must be held"):
            self.allocator.release(once_too_often)
        assert snapshot(self.allocator) == before
        if publish:
            self.publish_first(self.seats[seat], len(self.seats[seat].tokens))
        self.stop(self.seats[seat], head_first=head_first)

    @precondition(lambda self: self.log)
    @rule()
    def carry_out(self) -> None:
        self.carry_out_log()

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.carry_out_log()
        self.every_sequence_reads_its_own_tokens()
        self.every_resident_page_holds_its_prefix()
        for live in self.seats:
            live.sequence.release()
        self.allocator.check_invariants()
        assert self.allocator.num_available == self.num_pages, "a page leaked"

    # What must hold after every step.

    @invariant()
    def the_books_are_consistent(self) -> None:
        self.allocator.check_invariants()

    @invariant()
    def reference_counts_are_the_number_of_holders(self) -> None:
        for page in range(self.num_pages):
            assert self.allocator.refcount(page) == self.references(page)
        assert self.allocator.num_available == self.available()

    @invariant()
    def a_sequence_has_as_many_pages_as_its_tokens_need(self) -> None:
        for live in self.seats:
            assert live.sequence.length == len(live.tokens)
            assert len(live.sequence.pages) == -(-len(live.tokens) // self.page_size)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        # Plans may wait in the log: what counts is the cache at the times when it is up to date.
        if not self.log:
            for live in self.seats:
                content = self.read(live.sequence.pages, live.sequence.length)
                assert content == self.prefixes(live.tokens)

    @invariant()
    def every_resident_page_holds_its_prefix(self) -> None:
        if not self.log:
            for prefix, page in self.resident.items():
                expected = self.prefixes(list(prefix), start=len(prefix) - self.page_size)
                assert self.read([page], self.page_size) == expected


TestAllocatorMachine = AllocatorMachine.TestCase


def published_sequence(allocator: PageAllocator, tokens: list[int]) -> SequencePages:
    """Return a sequence that holds and has published `tokens`."""
    sequence = SequencePages(allocator)
    sequence.extend(len(tokens))
    sequence.publish(tokens)
    return sequence


A = [1, 2, 3, 4, 5, 6]
B = [7, 8, 9, 10, 11, 12, 13, 14]


def test_a_request_that_needs_the_whole_pool_leaves_no_hit_of_the_evicted_one() -> None:
    allocator = PageAllocator(num_pages=4, page_size=2)
    published_sequence(allocator, A).release()
    second = published_sequence(allocator, B)
    assert allocator.match_prefix(A) == []
    with pytest.raises(OutOfPages):
        SequencePages.from_prefix(allocator, A).extend(len(A))
    pages_of_b = list(second.pages)
    second.release()
    assert allocator.match_prefix(B) == pages_of_b


def test_eviction_takes_the_tail_of_a_prefix_before_its_head() -> None:
    allocator = PageAllocator(num_pages=4, page_size=2)
    first = published_sequence(allocator, A)
    pages_of_a = list(first.pages)
    first.release()
    allocator.allocate(2)  # the clean page, then the tail of A
    assert allocator.match_prefix(A) == pages_of_a[:2]


@pytest.mark.parametrize("new_head", [[1, 2], [9, 9]], ids=["same_tokens", "other_tokens"])
def test_later_pages_are_no_hit_once_the_first_is_gone(new_head: list[int]) -> None:
    allocator = PageAllocator(num_pages=3, page_size=2)
    first, *rest = published_sequence(allocator, A).pages
    allocator.release([first])
    allocator.release(rest)
    assert allocator.allocate(1) == [first]
    assert allocator.match_prefix(A) == []
    # The same page id under a new identity does not bring the orphans back either.
    allocator.publish([first], new_head)
    assert allocator.match_prefix([*new_head, *A[2:]]) == [first]


@given(
    num_pages=st.integers(1, 6),
    page_size=st.integers(1, 2),
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.booleans()),
        max_size=30,
    ),
)
def test_a_hit_holds_the_prefix_it_was_found_for_however_requests_churn(
    num_pages: int, page_size: int, requests: list[tuple[list[int], bool]]
) -> None:
    allocator = PageAllocator(num_pages, page_size)
    prefix_in: dict[int, list[int]] = {}
    for tokens, release_head_first in requests:
        sequence = SequencePages.from_prefix(allocator, tokens)
        for position, page in enumerate(sequence.pages):
            assert prefix_in[page] == tokens[: (position + 1) * page_size]
        num_found = len(sequence.pages)
        try:
            sequence.extend(len(tokens) - sequence.length)
        except OutOfPages:
            sequence.release()
            continue
        for position, page in enumerate(sequence.pages[num_found:], start=num_found):
            prefix_in[page] = tokens[: (position + 1) * page_size]
        sequence.publish(tokens)
        # Head first is not what a sequence does, but what loses a head before its tail.
        allocator.release(sequence.pages[::-1] if release_head_first else sequence.pages)
    assert allocator.num_available == num_pages
    allocator.check_invariants()


def test_a_page_that_outlived_its_parent_can_be_published_again() -> None:
    allocator = PageAllocator(num_pages=4, page_size=1)
    original = published_sequence(allocator, [1])
    twin = SequencePages(allocator)
    twin.extend(2)
    twin.publish([1, 2])  # page 0 of the twin stays anonymous, page 1 hangs on the original
    original.release()
    others = allocator.allocate(2)  # evicts the original
    assert allocator.match_prefix([1, 2]) == []
    twin.publish([1, 2])
    assert allocator.match_prefix([1, 2]) == twin.pages
    allocator.release(twin.pages + others)
    allocator.check_invariants()


def test_an_equal_prefix_keeps_its_first_page_and_the_duplicate_becomes_clean() -> None:
    allocator = PageAllocator(num_pages=4, page_size=2)
    first = published_sequence(allocator, [1, 2])
    second = published_sequence(allocator, [1, 2, 3, 4])
    assert allocator.match_prefix([1, 2, 3, 4]) == [first.pages[0], second.pages[1]]


def test_only_full_pages_are_found() -> None:
    allocator = PageAllocator(num_pages=4, page_size=4)
    sequence = published_sequence(allocator, [1, 2, 3, 4, 5, 6])
    found = SequencePages.from_prefix(allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (found.pages, found.length) == (sequence.pages[:1], 4)
    assert allocator.match_prefix([1, 2, 3]) == []


def test_a_matched_page_cannot_be_evicted_under_its_reader() -> None:
    allocator = PageAllocator(num_pages=3, page_size=2)
    published_sequence(allocator, A).release()
    reader = SequencePages.from_prefix(allocator, A[:4])
    assert allocator.num_available == 1
    with pytest.raises(OutOfPages):
        allocator.allocate(2)
    assert set(allocator.allocate(1)).isdisjoint(reader.pages)


def test_a_match_makes_a_prefix_the_last_to_be_evicted() -> None:
    allocator = PageAllocator(num_pages=2, page_size=1)
    published_sequence(allocator, [1]).release()
    published_sequence(allocator, [2]).release()
    allocator.release(allocator.match_prefix([1]))
    allocator.allocate(1)
    assert allocator.match_prefix([2]) == []
    assert len(allocator.match_prefix([1])) == 1


def test_after_a_fork_the_first_writer_copies_and_the_last_holder_writes_in_place() -> None:
    allocator = PageAllocator(num_pages=3, page_size=4)
    parent = SequencePages(allocator)
    parent.extend(6)
    full, partial = parent.pages
    child = parent.fork()
    writes = child.extend(1)
    copy = child.pages[1]
    assert child.pages[0] == full
    assert writes == PageWrites(slots=[copy * 4 + 2], copies=[(partial, copy)])
    assert parent.extend(1) == PageWrites(slots=[partial * 4 + 2], copies=[])
    assert allocator.refcount(full) == 2


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    allocator = PageAllocator(num_pages=3, page_size=2)
    parent = SequencePages(allocator)
    parent.extend(2)
    child = parent.fork()
    assert child.extend(1).copies == [] and parent.extend(1).copies == []
    assert child.pages[0] == parent.pages[0] and child.pages[1] != parent.pages[1]


def test_rejected_tokens_of_a_published_page_are_rewritten_in_a_copy() -> None:
    allocator = PageAllocator(num_pages=2, page_size=4)
    sequence = published_sequence(allocator, [1, 2, 3, 4])
    page = sequence.pages[0]
    sequence.truncate(3)
    writes = sequence.extend(1)
    assert writes.copies == [(page, sequence.pages[0])] and sequence.pages[0] != page
    assert allocator.match_prefix([1, 2, 3, 4]) == [page]


def test_rejected_tokens_of_a_private_page_are_rewritten_in_place() -> None:
    allocator = PageAllocator(num_pages=1, page_size=4)
    sequence = SequencePages(allocator)
    sequence.extend(4)
    sequence.truncate(1)
    assert sequence.extend(2) == PageWrites(slots=[1, 2], copies=[])


def test_a_refused_extension_leaves_no_trace_even_when_only_the_copy_does_not_fit() -> None:
    allocator = PageAllocator(num_pages=2, page_size=4)
    parent = SequencePages(allocator)
    parent.extend(6)
    child = parent.fork()
    before = snapshot(allocator)
    with pytest.raises(OutOfPages, match="1 more pages needed, 0 available. Release") as refusal:
        child.extend(1)
    assert (refusal.value.needed, refusal.value.available) == (1, 0)
    assert snapshot(allocator) == before
    assert (child.pages, child.length) == (parent.pages, 6)
    parent.release()
    assert child.extend(1).copies == []


def test_a_copy_and_the_pages_after_it_are_refused_together() -> None:
    allocator = PageAllocator(num_pages=3, page_size=4)
    parent = SequencePages(allocator)
    parent.extend(6)
    child = parent.fork()
    before = snapshot(allocator)
    with pytest.raises(OutOfPages, match="2 more pages needed, 1 available"):
        child.extend(3)
    assert snapshot(allocator) == before
    assert (child.pages, child.length) == (parent.pages, 6)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_130_tokens_in_pages_of_any_size(page_size: int) -> None:
    allocator = PageAllocator(num_pages=130, page_size=page_size)
    sequence = SequencePages(allocator)
    slots = sequence.extend(100).slots + sequence.extend(30).slots
    assert len(sequence.pages) == (130 + page_size - 1) // page_size
    assert slots == [sequence.pages[i // page_size] * page_size + i % page_size for i in range(130)]
    assert len(set(slots)) == 130


@given(st.lists(st.integers(0, 5), max_size=12))
def test_pages_of_one_token_never_need_a_copy(counts: list[int]) -> None:
    allocator = PageAllocator(num_pages=200, page_size=1)
    sequence = SequencePages(allocator)
    for count in counts:
        child = sequence.fork()
        assert sequence.extend(count).copies == []
        assert child.extend(1).copies == []
        child.release()
    assert allocator.num_available == 200 - sequence.length == 200 - sum(counts)


def test_a_double_release_is_refused_before_anything_changes() -> None:
    allocator = PageAllocator(num_pages=3, page_size=2)
    pages = allocator.allocate(2)
    allocator.release(pages[:1])
    before = snapshot(allocator)
    with pytest.raises(ValueError, match=r"page 0 must be held at least 1 times; .* twice"):
        allocator.release(pages)
    with pytest.raises(ValueError, match="page 1 must be held at least 2 times"):
        allocator.release([pages[1], pages[1]])
    assert snapshot(allocator) == before


@pytest.mark.parametrize("page", [-1, 3])
def test_an_unknown_page_is_refused_before_anything_changes(page: int) -> None:
    allocator = PageAllocator(num_pages=3, page_size=2)
    pages = allocator.allocate(2)
    before = snapshot(allocator)
    for call in (
        lambda: allocator.release([*pages, page]),
        lambda: allocator.retain([*pages, page]),
        lambda: allocator.publish([pages[0], page], [1, 2, 3, 4]),
        lambda: allocator.refcount(page),
    ):
        with pytest.raises(ValueError, match=rf"page ids must be in \[0, 3\); got {page}"):
            call()
    assert snapshot(allocator) == before


def test_a_page_that_nobody_holds_cannot_be_retained_or_published() -> None:
    allocator = PageAllocator(num_pages=3, page_size=1)
    pages = allocator.allocate(1)
    before = snapshot(allocator)
    with pytest.raises(ValueError, match="page 2 must be held"):
        allocator.retain([*pages, 2])
    with pytest.raises(ValueError, match="page 2 must be held"):
        allocator.publish([*pages, 2], [5, 6])
    assert snapshot(allocator) == before


def test_publishing_what_the_pages_cannot_hold_is_refused() -> None:
    allocator = PageAllocator(num_pages=3, page_size=2)
    sequence = published_sequence(allocator, [1, 2, 3])
    before = snapshot(allocator)
    with pytest.raises(ValueError, match="token_ids must be tokens in the cache, at most 3"):
        sequence.publish([1, 2, 3, 4])
    with pytest.raises(ValueError, match="pages must cover the 2 full pages of token_ids; got 1"):
        allocator.publish(sequence.pages[:1], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="pages must be different pages"):
        allocator.publish([sequence.pages[1]] * 2, [1, 2, 1, 2])
    with pytest.raises(ValueError, match=r"published with tokens \(1, 2\), got \(3, 4\)"):
        allocator.publish([sequence.pages[1], sequence.pages[0]], [1, 2, 3, 4])
    assert snapshot(allocator) == before


def test_counts_and_lengths_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="num_pages must be at least 1; got 0"):
        PageAllocator(num_pages=0, page_size=1)
    with pytest.raises(ValueError, match="page_size must be at least 1; got 0"):
        PageAllocator(num_pages=1, page_size=0)
    allocator = PageAllocator(num_pages=3, page_size=2)
    sequence = SequencePages(allocator)
    sequence.extend(3)
    before = snapshot(allocator)
    with pytest.raises(ValueError, match="count must be at least 0; got -1"):
        allocator.allocate(-1)
    with pytest.raises(ValueError, match="count must be at least 0; got -1. Use truncate"):
        sequence.extend(-1)
    for length in (-1, 4):
        with pytest.raises(ValueError, match=rf"length must be in \[0, 3\]; got {length}"):
            sequence.truncate(length)
    assert snapshot(allocator) == before and sequence.length == 3


def test_a_second_release_of_a_sequence_releases_nothing() -> None:
    allocator = PageAllocator(num_pages=3, page_size=2)
    sequence = SequencePages(allocator)
    sequence.extend(3)
    child = sequence.fork()
    sequence.release()
    sequence.release()
    assert (sequence.pages, sequence.length) == ([], 0)
    assert [allocator.refcount(page) for page in child.pages] == [1, 1]


def test_integers_of_tensor_libraries_match_plain_ones() -> None:
    allocator = PageAllocator(num_pages=3, page_size=2)
    sequence = SequencePages(allocator)
    sequence.extend(4)
    sequence.publish(list(torch.tensor([1, 2, 3, 4])))
    assert allocator.match_prefix([1, 2, 3, 4]) == sequence.pages


def test_a_block_table_row_is_padded_with_pages_that_are_never_read() -> None:
    sequence = SequencePages(PageAllocator(num_pages=3, page_size=2))
    sequence.extend(3)
    assert sequence.block_table_row(4) == [*sequence.pages, -1, -1]
    with pytest.raises(ValueError, match="max_pages must be at least 2; got 1"):
        sequence.block_table_row(1)

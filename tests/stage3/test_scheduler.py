"""The scheduler against a simulated engine and cache, in any order of events.

The simulated cache holds in each slot the whole prefix up to that token and the chunk that computed
it, which is what a latent's bits depend on: a page found under the wrong prefix, or computed in
another chunk than a request alone would have computed it in, is seen.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stage0_reference.page_allocator import OutOfPages, PageAllocator, SequencePages
from stage0_reference.sampling import SamplingParams
from stage3_dataflow.scheduler import Request, RequestStatus, Scheduler

pytestmark = pytest.mark.stage3


def make_request(request_id: int, prompt: list[int], max_new_tokens: int) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Request(request_id, tuple(prompt), params, len(prompt) + max_new_tokens)


def everything(scheduler: Scheduler) -> str:
    """Return all that the scheduler and its pool know, the order of eviction included."""
    state = vars(scheduler) | {"allocator": vars(scheduler.allocator)}
    return repr(state)


def held_pages(request: Request) -> SequencePages:
    assert request.pages is not None
    return request.pages


class SimulatedEngine:
    """Does what an engine does in a step, on a cache of prefixes instead of tensors."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        allocator = scheduler.allocator
        self.page_size = allocator.page_size
        self.slots: list[object] = [None] * (allocator.num_pages * allocator.page_size)

    def step(self) -> None:
        self.scheduler.admit()
        self.decode()
        self.prefill()

    def decode(self) -> None:
        for request in self.scheduler.decoding():
            position = request.length - 1
            self.write(request, position, position + 1, "decode")
            self.expect_readable(request)
            self.add_token(request)

    def prefill(self) -> None:
        budget = self.scheduler.prefill_chunk
        while (chunk := self.scheduler.next_chunk(budget)) is not None:
            request, start, end = chunk
            assert 0 < end - start <= budget
            budget -= end - start
            self.write(request, start, end, (start, end))
            request.computed_tokens = end
            self.expect_readable(request)
            assert chunk.is_last == (end == len(request.prompt_token_ids))
            if chunk.is_last:
                self.scheduler.finish_prefill(request)
                self.add_token(request)

    def add_token(self, request: Request) -> None:
        request.token_ids.append(request.length % 3 % 2)
        if request.length >= request.max_length:
            self.scheduler.finish(request, "length")

    def write(self, request: Request, start: int, end: int, computed_in: object) -> None:
        writes = held_pages(request).extend(end - start)  # the promise: never OutOfPages
        assert not writes.copies  # no request shares a page that it still writes
        for position, slot in zip(range(start, end), writes.slots, strict=True):
            self.slots[slot] = (self.tokens(request)[: position + 1], computed_in)

    def expect_readable(self, request: Request) -> None:
        """Check every cached token: its prefix, and the chunk a request alone computes it in."""
        prompt_length, chunk = len(request.prompt_token_ids), self.scheduler.prefill_chunk
        pages = held_pages(request)
        for position in range(pages.length):
            start = position // chunk * chunk
            alone = (start, min(start + chunk, prompt_length))
            expected = alone if position < prompt_length else "decode"
            page = pages.pages[position // self.page_size]
            held = self.slots[page * self.page_size + position % self.page_size]
            assert held == (self.tokens(request)[: position + 1], expected)

    @staticmethod
    def tokens(request: Request) -> tuple[int, ...]:
        return request.prompt_token_ids + tuple(request.token_ids)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of two letters (so that prefixes meet) come, run, fail and are cancelled."""

    @initialize(
        num_pages=st.integers(1, 12),
        page_size=st.integers(1, 4),
        max_running=st.integers(1, 3),
        prefill_chunk=st.integers(1, 6),
    )
    def start(self, num_pages: int, page_size: int, max_running: int, prefill_chunk: int) -> None:
        allocator = PageAllocator(num_pages, page_size)
        self.scheduler = Scheduler(allocator, max_running=max_running, prefill_chunk=prefill_chunk)
        self.engine = SimulatedEngine(self.scheduler)
        self.requests: list[Request] = []
        self.queue: list[int] = []  # ids that must be admitted, in this order

    def live(self) -> list[Request]:
        return [request for request in self.requests if not request.finished]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_new_tokens=st.integers(1, 6),
    )
    def submit(self, prompt: list[int], max_new_tokens: int) -> None:
        request = make_request(len(self.requests), prompt, max_new_tokens)
        before = everything(self.scheduler)
        allocator = self.scheduler.allocator
        cached_at_most = len(prompt) + max_new_tokens - 1
        needed = -(-cached_at_most // allocator.page_size)
        if needed > allocator.num_pages:
            with pytest.raises(OutOfPages) as refusal:
                self.scheduler.submit(request)
            assert (refusal.value.needed, refusal.value.available) == (needed, allocator.num_pages)
            assert everything(self.scheduler) == before
            return
        self.scheduler.submit(request)
        self.requests.append(request)
        self.queue.append(request.id)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "error"]))
    def end_early(self, data: st.DataObject, reason: str) -> None:
        request = data.draw(st.sampled_from(self.live()), label="request")
        self.scheduler.finish(request, reason, "why")
        assert (request.finish_reason, request.error) == (reason, "why")
        self.queue = [waiting for waiting in self.queue if waiting != request.id]

    @rule()
    def admit(self) -> None:
        admitted = self.scheduler.admit()
        ids = [request.id for request in admitted]
        assert ids == self.queue[: len(ids)]  # nobody overtakes
        del self.queue[: len(ids)]
        scheduler = self.scheduler
        if scheduler.waiting and len(scheduler.running) < scheduler.max_running:
            assert scheduler.running  # an empty pool takes whoever was not refused
            head = scheduler.waiting[0]
            needed = -(-(head.max_length - 1) // scheduler.allocator.page_size)
            assert needed > scheduler.allocator.num_available - scheduler.promised_pages
            # Not looking again must not have hidden that the head fits by now.
            scheduler._head_blocked = False
            assert scheduler.admit() == []

    @rule()
    def step(self) -> None:
        self.admit()
        scheduler = self.scheduler
        decoding = scheduler.decoding()
        lengths = [request.length for request in decoding]
        prefilling = [r for r in scheduler.running if r.status is RequestStatus.PREFILLING]
        computed = prefilling[0].computed_tokens if prefilling else 0
        self.engine.decode()
        # Every stream advances by one token, however many prompts are there.
        assert [request.length for request in decoding] == [length + 1 for length in lengths]
        self.engine.prefill()
        assert [request.length for request in decoding] == [length + 1 for length in lengths]
        if prefilling:
            assert prefilling[0].computed_tokens > computed

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_invariants()
        assert [request.id for request in self.scheduler.waiting] == self.queue
        for request in self.requests:
            assert request.finished == (request.finish_reason is not None)
            if request.finished:
                assert request.pages is None and request.row is None

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(sum(request.max_length for request in self.live())):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle
        assert self.live() == []
        assert self.scheduler.allocator.num_available == self.scheduler.allocator.num_pages
        for request in self.requests:
            if request.finish_reason == "length":
                assert request.length == request.max_length


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=40)


def make_scheduler(num_pages: int, page_size: int, *, max_running=4, prefill_chunk=4) -> Scheduler:
    return Scheduler(
        PageAllocator(num_pages, page_size), max_running=max_running, prefill_chunk=prefill_chunk
    )


def test_a_shared_prefix_counts_once():
    """8 shared tokens and 4 own ones each: 3 + 1 + 1 pages of 4, in a pool of 5."""
    scheduler = make_scheduler(5, 4)
    engine = SimulatedEngine(scheduler)
    prefix = [1, 0, 1, 1, 0, 0, 1, 0]
    for request_id in range(3):
        scheduler.submit(make_request(request_id, [*prefix, request_id], 4))
    engine.step()
    assert [r.id for r in scheduler.running] == [0]  # nothing is resident yet
    engine.step()
    engine.step()
    assert scheduler.running[0].status is RequestStatus.DECODING
    scheduler.admit()
    assert [r.id for r in scheduler.running] == [0, 1, 2]
    assert [r.cached_tokens for r in scheduler.running] == [0, 8, 8]
    assert scheduler.allocator.num_available == scheduler.promised_pages == 2


def test_requests_that_come_together_compute_their_common_prefix_once():
    scheduler = make_scheduler(20, 4)
    engine = SimulatedEngine(scheduler)
    requests = [make_request(i, [1, 0, 1, 1, 0, 0, 1, 0, i], 2) for i in range(3)]
    for request in requests:
        scheduler.submit(request)
    assert len(scheduler.admit()) == 3
    while not scheduler.idle:
        engine.step()
    assert [request.cached_tokens for request in requests] == [0, 8, 8]


def test_what_a_short_last_chunk_wrote_never_serves_a_longer_prompt():
    """The first prompt's last chunk ends at 6, the others' second chunk at 8.

    Were its page published, the second prompt's would be found behind it, and the third would read
    tokens 4 and 5 from a chunk that it would never have computed alone.
    """
    scheduler = make_scheduler(20, 2, prefill_chunk=4)
    engine = SimulatedEngine(scheduler)
    tokens = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    cached = []
    for request_id, length in enumerate((6, 9, 10)):
        request = make_request(request_id, tokens[:length], 2)
        scheduler.submit(request)
        while not scheduler.idle:
            engine.step()
        cached.append(request.cached_tokens)
    assert cached == [0, 4, 8]


def test_the_last_token_needs_no_page():
    scheduler = make_scheduler(2, 4)
    scheduler.submit(make_request(0, [1] * 7, 2))
    with pytest.raises(OutOfPages, match="3 more pages needed, 2 available"):
        scheduler.submit(make_request(1, [1] * 7, 3))


def test_a_small_request_waits_behind_a_large_one():
    scheduler = make_scheduler(4, 4)
    engine = SimulatedEngine(scheduler)
    small, large, late = (
        make_request(0, [0], 5),
        make_request(1, [1] * 10, 5),
        make_request(2, [0, 1], 2),
    )
    for request in (small, large, late):
        scheduler.submit(request)
    engine.step()
    assert [r.id for r in scheduler.running] == [0]  # 2 pages are promised, 4 are needed
    while not small.finished:
        assert late.status is RequestStatus.WAITING
        engine.step()
    scheduler.admit()
    assert [r.id for r in scheduler.running] == [1]


def test_chunks_of_one_step_stay_within_the_budget_oldest_first():
    scheduler = make_scheduler(20, 4, prefill_chunk=8)
    prompts = [[0] * 3, [1] * 4, [0, 1] * 5]
    for request_id, prompt in enumerate(prompts):
        scheduler.submit(make_request(request_id, prompt, 2))
    scheduler.admit()
    chunk = scheduler.next_chunk(8)
    assert (chunk.request.id, chunk.start, chunk.end, chunk.is_last) == (0, 0, 3, True)
    chunk.request.pages.extend(3)
    scheduler.finish_prefill(chunk.request)
    chunk = scheduler.next_chunk(5)
    assert (chunk.request.id, chunk.start, chunk.end, chunk.is_last) == (1, 0, 4, True)
    chunk.request.pages.extend(4)
    scheduler.finish_prefill(chunk.request)
    assert scheduler.next_chunk(1) is None  # a chunk is not cut to what is left
    chunk = scheduler.next_chunk(8)
    assert (chunk.request.id, chunk.start, chunk.end, chunk.is_last) == (2, 0, 8, False)


@pytest.mark.parametrize("name", ["max_running", "prefill_chunk"])
def test_sizes_below_one_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        make_scheduler(4, 4, **{name: 0})


def test_books_that_contradict_themselves_are_noticed():
    scheduler = make_scheduler(4, 4)
    scheduler.submit(make_request(0, [1] * 9, 4))
    scheduler.admit()
    scheduler.check_invariants()
    taken = scheduler.allocator.allocate(2)  # somebody else uses the pool
    with pytest.raises(RuntimeError, match="every promise can be kept"):
        scheduler.check_invariants()
    scheduler.allocator.release(taken)
    scheduler.running[0].row = 7
    with pytest.raises(RuntimeError, match="row of its own"):
        scheduler.check_invariants()

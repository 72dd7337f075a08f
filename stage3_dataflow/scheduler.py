"""Which request runs when: admission, the queue, chunks of prompts beside decoding.

Three rules.

*First come, first served.* Requests wait in one queue. The first of it is admitted when a row of
the decode step is free and the pool can hold it; nobody overtakes it, so nobody starves.

*A request is admitted with its longest length.* The pages that it may still need are promised to
it: a later request is admitted only into what is left of the available pages. So a running request
always finds its next page, none is ever stopped half-way to make room, and no work is lost or done
twice. The price: pages promised to a request that stops early were idle meanwhile. A resident
prefix counts once, however many requests run on it.

*One step serves everybody.* A step gives each decoding request its next token and computes at most
`prefill_chunk` tokens of prompts, oldest first, so a long prompt delays a stream by one chunk, not
by itself.

No tensor is touched here, and nothing depends on time: the same calls give the same schedule.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from typing import NamedTuple

from stage0_reference.generation import publish_prefix, resident_prefix
from stage0_reference.page_allocator import OutOfPages, PageAllocator, SequencePages, pages_for
from stage0_reference.sampling import SamplingParams


class RequestStatus(enum.StrEnum):
    """Where a request is on its way."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, what was generated for it, and where it stands. To be read, not changed.

    Attributes
    ----------
    id
        Unique in its engine, in order of submission.
    max_length
        Most tokens that prompt and generated tokens may have together.
    token_ids
        What was generated so far, stop token excluded.
    finish_reason
        "stop", "length", "cancelled" or "error"; None while it goes on.
    error
        What went wrong, if something did.
    cached_tokens
        Tokens of the prompt that were found in the cache.
    computed_tokens
        Tokens of the prompt that are in the cache by now, those found included.
    row
        Its row in the decode step while it is admitted. A request keeps its row.
    pages
        Its pages while it is admitted. The last generated token is never cached: nothing would
        read it.
    """

    id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_length: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    row: int | None = None
    pages: SequencePages | None = None

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    @property
    def length(self) -> int:
        """Tokens of prompt and generated tokens together."""
        return len(self.prompt_token_ids) + len(self.token_ids)


class PrefillChunk(NamedTuple):
    """Tokens `start` to `end` of a request's prompt, to be computed next."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt's last token is in it."""
        return self.end == len(self.request.prompt_token_ids)


class Scheduler:
    """The queue, the rows and the promises.

    Parameters
    ----------
    allocator
        The pool. Nobody else may take pages out of it.
    max_running
        Rows: most requests that are admitted at a time.
    prefill_chunk
        Prompt tokens that are computed at once.
    """

    def __init__(self, allocator: PageAllocator, *, max_running: int, prefill_chunk: int) -> None:
        for name, value in (("max_running", max_running), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        self.allocator = allocator
        self.max_running = max_running
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        # The head did not fit and nothing that could change it has happened: looking again would
        # search the prefix index for its whole prompt in every step.
        self._head_blocked = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    @property
    def promised_pages(self) -> int:
        """Pages that running requests do not hold yet and may still need."""
        return sum(map(self._pages_to_come, self.running))

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue.

        Raises
        ------
        OutOfPages
            At its longest it would not fit the whole pool. Nothing was changed.
        """
        needed = self._most_pages(request)
        if needed > self.allocator.num_pages:
            raise OutOfPages(needed, self.allocator.num_pages)
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move requests from the head of the queue to rows, as long as they fit."""
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.max_running and not self._head_blocked:
            request = self.waiting[0]
            pages = self._resident(request)
            to_come = self._most_pages(request) - len(pages.pages)
            # Resident pages are held by now, so they are no longer among those available.
            if to_come > self.allocator.num_available - self.promised_pages:
                pages.release()
                self._head_blocked = True
                break
            self.waiting.popleft()
            taken = {running.row for running in self.running}
            request.row = min(set(range(self.max_running)) - taken)
            request.status = RequestStatus.PREFILLING
            self._start_on(request, pages)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def next_chunk(self, budget: int) -> PrefillChunk | None:
        """Give the next chunk of the oldest unfinished prompt, None if it exceeds `budget` tokens.

        The caller computes it and sets `computed_tokens` to its end, or finishes the request.
        """
        request = next((r for r in self.running if r.status is RequestStatus.PREFILLING), None)
        if request is None:
            return None
        assert request.pages is not None
        if request.computed_tokens == request.cached_tokens:
            # Since it was admitted, requests before it may have computed more of its prefix.
            earlier = request.pages
            self._start_on(request, self._resident(request))
            earlier.release()
        start = request.computed_tokens
        end = min(start + self.prefill_chunk, len(request.prompt_token_ids))
        return PrefillChunk(request, start, end) if end - start <= budget else None

    def finish_prefill(self, request: Request) -> None:
        """Let a computed prompt decode, and others find it.

        What is generated is not published: a decode step rounds differently from a chunk, and a
        request's tokens would then depend on who had said the same before.
        """
        assert request.pages is not None
        publish_prefix(request.pages, request.prompt_token_ids, self.prefill_chunk)
        request.status = RequestStatus.DECODING
        self._head_blocked = False

    def decoding(self) -> list[Request]:
        """Give the requests whose prompt is computed, oldest first."""
        return [r for r in self.running if r.status is RequestStatus.DECODING]

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request, wherever it is, and give its row and pages back."""
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            assert request.pages is not None
            request.pages.release()
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.error = reason, error
        request.row = request.pages = None
        self._head_blocked = False

    def check_invariants(self) -> None:
        """Raise RuntimeError if the books contradict themselves: a bug in this file."""
        self.allocator.check_invariants()
        rows = [request.row for request in self.running]
        held = {page for r in self.running if r.pages is not None for page in r.pages.pages}
        facts = {
            "every running request has a row of its own": (
                len(set(rows)) == len(rows) and set(rows) <= set(range(self.max_running))
            ),
            "every promise can be kept": self.promised_pages <= self.allocator.num_available,
            "no request holds more pages than it was admitted with": all(
                self._pages_to_come(request) >= 0 for request in self.running
            ),
            "pages are held by running requests only": (
                len(held) + self.allocator.num_available == self.allocator.num_pages
            ),
            "requests were admitted in order, and those waiting come after them": (
                [r.id for r in (*self.running, *self.waiting)]
                == sorted(r.id for r in (*self.running, *self.waiting))
            ),
        }
        for fact, holds in facts.items():
            if not holds:
                raise RuntimeError(f"scheduler is inconsistent: it is not true that {fact}")

    def _most_pages(self, request: Request) -> int:
        """Pages of a request at its longest, when all but its last token are cached."""
        return pages_for(request.max_length - 1, self.allocator.page_size)

    def _pages_to_come(self, request: Request) -> int:
        assert request.pages is not None
        return self._most_pages(request) - len(request.pages.pages)

    def _resident(self, request: Request) -> SequencePages:
        """Hold what the cache has of the request's prompt, in whole chunks."""
        return resident_prefix(self.allocator, request.prompt_token_ids, self.prefill_chunk)

    @staticmethod
    def _start_on(request: Request, pages: SequencePages) -> None:
        request.pages = pages
        request.cached_tokens = request.computed_tokens = pages.length

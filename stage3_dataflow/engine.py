"""An engine for many requests: they come, stream, end, fail and are cancelled independently.

    engine = Engine(decoder, backend, num_pages=1000)
    request = engine.submit(prompt_token_ids, SamplingParams(max_new_tokens=64))
    for token_id in engine.stream(request):
        ...

`scheduler.py` decides what runs, `decode_graph.py` runs decode steps; here are the prompts' chunks,
the choice of tokens, and what happens when something goes wrong. Everything runs in the caller's
thread, one `step` at a time.

**A request's tokens do not depend on who else is there.** Chunks start at multiples of
`prefill_chunk`, cached prefixes are re-used in whole chunks, decoding runs on a fixed number of
rows, and each request draws from its own random stream. (`stage0_reference/generation.py` gives the
reasons. It holds as far as the backend's attention keeps a request's bits among batch mates, and
not beyond the rows that experts can compute without asking the host: `Engine.describe` says so.)

**Nothing is lost when one fails.** A request whose logits are NaN, whose prompt cannot be computed
or whose callback raises ends with finish_reason "error" and gives its pages back. A decode step
that fails as a whole is repeated for one request at a time, each in its own row among unused ones:
whoever fails alone ends, the others take the token that they would have taken. Repeating is safe,
after an interrupt too: a repeated step writes the same latents into the same slots, and a token is
drawn only when it is added.

**Memory.** A running request has its longest length promised (no request is ever preempted, see
`scheduler.py`). What computing needs beside the cache is set aside before pages are counted:
`plan_cache`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from stage0_reference.attention_backend import AttentionBackend, cache_bytes_per_token
from stage0_reference.decoder import ABSORBED_MAX_QUERIES, CachedAttention, Decoder
from stage0_reference.generation import GenerationTimes, check_prompt, run_requests
from stage0_reference.latent_cache import copy_pages
from stage0_reference.model_config import ModelConfig
from stage0_reference.page_allocator import PageAllocator, SequencePages, pages_for
from stage0_reference.sampling import SamplingParams, sample_token
from stage3_dataflow.decode_graph import (
    CudaGraphCapture,
    DecodeRow,
    DecodeStep,
    graph_obstacle,
    routes_on_the_host,
)
from stage3_dataflow.scheduler import PrefillChunk, Request, Scheduler


class StepEvent(NamedTuple):
    """Something that a step did for a request. Its last event has a finish_reason.

    Attributes
    ----------
    token_id
        The new token, or None where the request ended without one.
    finish_reason
        "stop", "length" (max_new_tokens or the context), "cancelled", "error"; None while it goes
        on.
    error
        What went wrong, for "error".
    """

    request_id: int
    token_id: int | None
    finish_reason: str | None = None
    error: str | None = None


class RequestFailed(RuntimeError):
    """A request that was being streamed ended with finish_reason "error"."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """How things stand, and what was done since the engine was made.

    Attributes
    ----------
    running, waiting
        Requests admitted, and in the queue.
    free_pages
        Pages that nobody holds; prefixes may be resident in them.
    promised_pages
        Those of them that running requests may still need.
    graph_replays
        Decode steps that were replays of a CUDA graph, of `times.decode_steps`.
    times
        Tokens and seconds of prefill and decode, and tokens found in the prefix cache.
    """

    running: int
    waiting: int
    free_pages: int
    promised_pages: int
    graph_replays: int
    times: GenerationTimes


class _Prediction(NamedTuple):
    """Logits of one row, and the likeliest token if it is known and its logit is finite."""

    logits: Tensor
    best: int | None


@dataclasses.dataclass
class _Listener:
    """What belongs to a live request and is nobody else's business."""

    request: Request
    stream: torch.Generator
    on_token: Callable[[StepEvent], None] | None


class Engine:
    """Serves requests on a decoder with a paged cache.

    Parameters
    ----------
    decoder
        The model.
    backend
        How attention is computed and cached.
    num_pages, page_size
        The pool; see `plan_cache`. Prefixes stay in it until their pages are needed.
    max_running
        Most requests that run at a time; also the rows of a decode step.
    prefill_chunk
        Most prompt tokens computed at once, and between two decode steps.
    max_context
        Most tokens of a request, prompt and generated ones; default: the model's context.
    use_cuda_graph
        "auto": where it is possible; `describe` says what was done, and why. True refuses to go
        without. The graph is captured now.
    graph_rows
        Numbers of rows a decode step may run on, ascending, the last one max_running. By default
        that one alone. With more, few requests run faster, but a request's bits depend on how many
        there are (steps without a graph follow the same choice).
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        *,
        num_pages: int,
        page_size: int = 64,
        max_running: int = 8,
        prefill_chunk: int = 512,
        max_context: int | None = None,
        use_cuda_graph: bool | Literal["auto"] = "auto",
        graph_rows: Sequence[int] | None = None,
    ) -> None:
        allocator = PageAllocator(num_pages, page_size)
        self.scheduler = Scheduler(allocator, max_running=max_running, prefill_chunk=prefill_chunk)
        rows = [max_running] if graph_rows is None else list(graph_rows)
        if not rows or rows[-1] != max_running:
            raise ValueError(f"graph_rows must end with max_running = {max_running}; got {rows}")
        if use_cuda_graph not in (True, False, "auto"):
            raise ValueError(
                f"use_cuda_graph must be True, False or 'auto'; got {use_cuda_graph!r}"
            )
        self.graph_obstacle = (
            graph_obstacle(decoder, backend, max_running)
            if use_cuda_graph
            else "use_cuda_graph is False"
        )
        if use_cuda_graph is True and self.graph_obstacle is not None:
            raise ValueError(
                "use_cuda_graph must be False or 'auto' here, since "
                f"{self.graph_obstacle}; got True"
            )
        self.decoder = decoder
        self.backend = backend
        self.max_context = _checked_context(max_context, decoder.config)
        self.cache = backend.make_cache(decoder.config, num_pages, page_size, device=decoder.device)
        max_pages = min(num_pages, pages_for(self.max_context, page_size))
        if self.graph_obstacle is None:
            self._settle_workspace(max_pages)
        self._decode_step = DecodeStep(
            decoder,
            backend,
            self.cache,
            rows=rows,
            max_pages=max_pages,
            capture=CudaGraphCapture(decoder.device) if self.graph_obstacle is None else None,
        )
        self._times = GenerationTimes()
        self._live: dict[int, _Listener] = {}
        self._next_id = 0
        self._events: list[StepEvent] = []
        self._in_step = False

    # Requests

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        on_token: Callable[[StepEvent], None] | None = None,
    ) -> Request:
        """Put a request into the queue; `step` computes it.

        Parameters
        ----------
        prompt_token_ids
            At least one.
        sampling
            How to choose tokens and when to end; default: `SamplingParams()`.
        on_token
            Called with each of the request's events while it runs, but not with its cancellation.
            It may submit and cancel requests. If it raises, this request ends with "error".

        Returns
        -------
        Request
            Its `token_ids`, `status`, `finish_reason` and `error` are kept up to date.

        Raises
        ------
        ValueError
            The prompt is empty, has an unknown token, or leaves no room for a token.
        OutOfPages
            At its longest it would not fit the whole pool.
        """
        params = SamplingParams() if sampling is None else sampling
        prompt = tuple(int(token) for token in prompt_token_ids)
        check_prompt(prompt, self.decoder.config, "prompt_token_ids")
        if len(prompt) >= self.max_context:
            raise ValueError(
                f"prompt_token_ids must have fewer than max_context = {self.max_context} tokens; "
                f"got {len(prompt)}"
            )
        longest = min(len(prompt) + params.max_new_tokens, self.max_context)
        request = Request(self._next_id, prompt, params, longest)
        self.scheduler.submit(request)
        self._next_id += 1
        stream = torch.Generator().manual_seed(params.seed)
        self._live[request.id] = _Listener(request, stream, on_token)
        return request

    def cancel(self, request_id: int) -> bool:
        """End a request now and give its pages back; what it generated stays in its `token_ids`.

        Returns
        -------
        bool
            Whether it was live. Its last event comes out of the next step, or the running one.
        """
        if not 0 <= request_id < self._next_id:
            raise ValueError(f"request_id must be one that submit gave; got {request_id}")
        if request_id not in self._live:
            return False
        self._finish(self._live[request_id].request, "cancelled")
        self._events.append(StepEvent(request_id, None, "cancelled"))
        return True

    def stream(self, request: Request) -> Iterator[int]:
        """Yield a request's tokens from its first on, running steps as needed.

        Other requests advance along with it. Several streams may be read in turn; closing one
        cancels nothing.

        Raises
        ------
        RequestFailed
            After its last token, if the request ended with "error".
        """
        seen = 0
        while True:
            while seen < len(request.token_ids):
                yield request.token_ids[seen]
                seen += 1
            if request.finished:
                break
            self.step()
        if request.finish_reason == "error":
            raise RequestFailed(f"request {request.id} failed: {request.error}")

    # Running

    @property
    def idle(self) -> bool:
        """Whether every request has ended and every event was given out."""
        return self.scheduler.idle and not self._events

    def run(self) -> None:
        """Step until idle."""
        while not self.idle:
            self.step()

    def step(self) -> list[StepEvent]:
        """Admit what fits, give each decoding request a token, compute a chunk of prompts.

        Returns
        -------
        list of StepEvent
            In the order in which they happened, at most one token a request.
        """
        if self._in_step:
            raise RuntimeError("step must not be called from a callback of a step that is running")
        self._in_step = True
        try:
            self.scheduler.admit()
            self._decode()
            self._prefill()
        finally:
            self._in_step = False
        events, self._events = self._events, []
        return events

    @property
    def stats(self) -> EngineStats:
        """A snapshot."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_pages=self.scheduler.allocator.num_available,
            promised_pages=self.scheduler.promised_pages,
            graph_replays=self._decode_step.replays,
            times=dataclasses.replace(self._times),
        )

    def describe(self) -> str:
        """Say what runs: the backend, the pool, the rows, and whether decoding is a CUDA graph."""
        allocator, rows = self.scheduler.allocator, self._decode_step.rows
        bytes_per_token = cache_bytes_per_token(self.cache)
        lines = [
            f"attention: stage {self.backend.stage}, {self.backend.description}",
            f"cache: {allocator.num_pages} pages of {allocator.page_size} tokens, "
            f"{bytes_per_token} bytes a token",
            f"rows: {', '.join(map(str, rows))}; prompts in chunks of "
            f"{self.scheduler.prefill_chunk}",
            "decode: CUDA graph"
            if self.graph_obstacle is None
            else f"decode: eager, because {self.graph_obstacle}",
        ]
        if len(rows) > 1 or routes_on_the_host(self.decoder, rows[-1]):
            lines.append("bits: a request's may depend on who runs beside it")
        return "\n".join(lines)

    # Decoding

    def _decode(self) -> None:
        """Give every decoding request its next token."""
        requests = self.scheduler.decoding()
        if not requests:
            return
        started = time.perf_counter()
        predictions: Sequence[_Prediction | Exception]
        try:
            predictions = self._predict(requests)
        except Exception as error:
            alone = len(requests) == 1
            predictions = [error] if alone else [self._predict_alone(r) for r in requests]
        self._times.decode_seconds += time.perf_counter() - started
        self._times.decode_steps += 1
        for request, prediction in zip(requests, predictions, strict=True):
            if request.finished:  # a callback cancelled it
                continue
            started = time.perf_counter()
            try:
                if isinstance(prediction, Exception):
                    raise prediction
                token = self._choose(request, prediction)
            except Exception as error:
                self._fail(request, error)
                continue
            self._times.decode_seconds += time.perf_counter() - started
            # Chosen and added in one go: whatever a callback raises, no draw is lost.
            self._times.decode_tokens += token not in request.params.stop_token_ids
            self._accept(request, token)

    def _predict(self, requests: Sequence[Request]) -> list[_Prediction]:
        """Run a decode step for some requests, each in its row."""
        live = {}
        for request in requests:
            assert request.row is not None
            pages = self._make_room(request, request.length)
            live[request.row] = DecodeRow(request.token_ids[-1], request.length - 1, pages.pages)
        logits = self._decode_step.run(live)
        greedy = any(request.params.temperature == 0.0 for request in requests)
        best = _greedy_tokens(logits) if greedy else [None] * len(logits)
        return [_Prediction(logits[row], best[row]) for row in live]

    def _predict_alone(self, request: Request) -> _Prediction | Exception:
        """Run a decode step for one request; what it gives outlives the next step."""
        try:
            (prediction,) = self._predict([request])
            return prediction._replace(logits=prediction.logits.clone())
        except Exception as error:
            return error

    # Prompts

    def _prefill(self) -> None:
        """Compute up to `prefill_chunk` tokens of prompts, and first tokens of those completed."""
        budget = self.scheduler.prefill_chunk
        while (chunk := self.scheduler.next_chunk(budget)) is not None:
            request, start, end = chunk
            budget -= end - start
            started = time.perf_counter()
            try:
                hidden = self._run_chunk(chunk)
                if chunk.is_last:
                    logits = self.decoder.logits(hidden[-1])
                    token = self._choose(request, _Prediction(logits, None))
            except Exception as error:
                self._fail(request, error)
                continue
            self._times.prefill_seconds += time.perf_counter() - started
            self._times.prefill_tokens += end - start
            if start == request.cached_tokens:
                self._times.cached_tokens += start
            request.computed_tokens = end
            if chunk.is_last:
                self.scheduler.finish_prefill(request)
                self._accept(request, token)

    @torch.inference_mode()
    def _run_chunk(self, chunk: PrefillChunk) -> Float[Tensor, "tokens hidden"]:
        """Cache the latents of a chunk and give its final hidden states."""
        request, start, end = chunk
        pages = self._make_room(request, end)
        size = pages.allocator.page_size
        hidden = run_requests(
            self.decoder,
            self.backend,
            self.cache,
            [request.prompt_token_ids[start:end]],
            [pages],
            [pages.pages[at // size] * size + at % size for at in range(start, end)],
        )
        if self.decoder.device.type == "cuda":  # or the next decode step would be charged for it
            torch.cuda.synchronize(self.decoder.device)
        return hidden

    @torch.inference_mode()
    def _settle_workspace(self, max_pages: int) -> None:
        """Attend as prompts will at most, over no token and writing none.

        A backend's workspace has its final size then. If it grew later, a graph captured before
        would go on writing into memory that belongs to somebody else.
        """
        device = self.decoder.device
        queries = min(self.scheduler.prefill_chunk, ABSORBED_MAX_QUERIES)
        nothing = torch.zeros(queries, dtype=torch.int64, device=device)
        attention = CachedAttention(
            self.backend,
            self.cache,
            query_lens=[queries],
            slot_mapping=nothing - 1,
            block_table=torch.full((1, max_pages), -1, dtype=torch.int32, device=device),
            cache_seqlens=torch.zeros(1, dtype=torch.int32, device=device),
        )
        self.decoder.hidden_states(nothing, nothing, attention)

    # Both

    def _make_room(self, request: Request, length: int) -> SequencePages:
        """Hold pages for the request's first `length` tokens, unless an earlier attempt did."""
        pages = request.pages
        assert pages is not None
        writes = pages.extend(max(0, length - pages.length))
        for layer in self.cache:
            copy_pages(layer, writes.copies)
        return pages

    def _choose(self, request: Request, prediction: _Prediction) -> int:
        """Choose the next token; raises as `sample_token`."""
        if request.params.temperature == 0.0 and prediction.best is not None:
            return prediction.best
        stream = self._live[request.id].stream
        return sample_token(prediction.logits, request.params, stream)

    def _accept(self, request: Request, token: int) -> None:
        """Add a token, unless it is a stop token, and end the request if it is its last."""
        stops = token in request.params.stop_token_ids
        if not stops:
            request.token_ids.append(token)
        reason = None
        if stops:
            reason = "stop"
        elif request.length >= request.max_length:
            reason = "length"
        self._emit(request, StepEvent(request.id, None if stops else token, reason))

    def _fail(self, request: Request, error: Exception) -> None:
        self._emit(request, StepEvent(request.id, None, "error", _message(error)))

    def _emit(self, request: Request, event: StepEvent) -> None:
        """End the request if the event says so, and tell its listener."""
        listener = self._live[request.id]
        if event.finish_reason is not None:
            self._finish(request, event.finish_reason, event.error)
        self._events.append(event)
        place = len(self._events) - 1
        if listener.on_token is None:
            return
        try:
            listener.on_token(event)
        except Exception as error:
            message = event.error or f"on_token raised {_message(error)}"
            if not request.finished:
                self._finish(request, "error", message)
            elif event.finish_reason is None:  # cancelled by the callback before it raised
                request.error = message
                return
            request.finish_reason, request.error = "error", message
            self._events[place] = event._replace(finish_reason="error", error=message)

    def _finish(self, request: Request, reason: str, error: str | None = None) -> None:
        del self._live[request.id]
        self.scheduler.finish(request, reason, error)


def _greedy_tokens(logits: Float[Tensor, "rows vocab_size"]) -> list[int | None]:
    """Likeliest token of each row, the first of equals, as `sample_token` would choose it.

    Made on the device: for a large vocabulary, copying all logits to the host may take longer than
    the step. None where `sample_token` would refuse.
    """
    finite = logits.amax(dim=-1).isfinite()  # a NaN is its own maximum
    best: list[int] = torch.where(finite, logits.argmax(dim=-1), -1).tolist()
    return [None if token < 0 else token for token in best]


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _checked_context(max_context: int | None, config: ModelConfig) -> int:
    """Give the longest request: the model's context unless a smaller one is asked for."""
    if max_context is None:
        return config.max_position_embeddings
    if not 2 <= max_context <= config.max_position_embeddings:
        raise ValueError(
            f"max_context must be between 2 and {config.max_position_embeddings} (the model's "
            f"context); got {max_context}"
        )
    return max_context


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """How a budget of memory is used.

    Attributes
    ----------
    num_pages
        Pages of the pool, for `Engine`.
    page_bytes
        Bytes of a page in all planes of all layers.
    attend_workspace_bytes
        What the backend keeps beside the cache, for decode steps and for short chunks.
    prefill_workspace_bytes
        What the naive form takes in passing, for a chunk at the end of the longest prompt.
    """

    num_pages: int
    page_bytes: int
    attend_workspace_bytes: int
    prefill_workspace_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """Bytes set aside."""
        return self.attend_workspace_bytes + self.prefill_workspace_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_pages * self.page_bytes


def plan_cache(
    config: ModelConfig,
    backend: AttentionBackend,
    memory_bytes: int,
    *,
    page_size: int = 64,
    decode_rows: int = 8,
    prefill_chunk: int = 512,
    max_context: int | None = None,
) -> CachePlan:
    """Count the pages that fit a budget after the workspace has been set aside.

    Parameters
    ----------
    config, backend
        The model, and how attention is computed and cached. A backend that needs memory beside the
        cache says so by ``workspace_bytes(batch, s_q, heads, kv_lora_rank, capacity_tokens)``.
    memory_bytes
        What is left of the device's memory when weights, and activations outside attention, have
        been counted.
    page_size, decode_rows, prefill_chunk, max_context
        As `Engine` will get them (`decode_rows` is its max_running). A smaller max_context leaves
        more pages: the prefill workspace grows with ``prefill_chunk x max_context``.

    Raises
    ------
    ValueError
        Not even one page fits.
    """
    context = _checked_context(max_context, config)
    # Planes without memory: shapes and dtypes are all that is asked for.
    page = backend.make_cache(config, 1, page_size, device="meta")
    page_bytes = cache_bytes_per_token(page) * page_size
    ask = getattr(backend, "workspace_bytes", None)
    heads = config.num_attention_heads

    def attend_bytes(batch: int, s_q: int) -> int:
        if ask is None:
            return 0
        capacity = pages_for(context, page_size) * page_size
        return int(ask(batch, s_q, heads, config.kv_lora_rank, capacity))

    plan = CachePlan(
        0,
        page_bytes,
        attend_workspace_bytes=max(
            attend_bytes(decode_rows, 1),
            attend_bytes(1, min(prefill_chunk, ABSORBED_MAX_QUERIES)),
        ),
        prefill_workspace_bytes=_naive_attention_bytes(config, prefill_chunk, context),
    )
    num_pages = (memory_bytes - plan.workspace_bytes) // page_bytes
    if num_pages < 1:
        raise ValueError(
            f"memory_bytes must be at least {plan.workspace_bytes + page_bytes} (a workspace of "
            f"{plan.workspace_bytes} and one page of {page_bytes}); got {memory_bytes}. Lower "
            "max_context, prefill_chunk or decode_rows"
        )
    return dataclasses.replace(plan, num_pages=num_pages)


def _naive_attention_bytes(config: ModelConfig, s_q: int, length: int) -> int:
    """Memory of one layer's `naive_attention` over a prefix of the cache, at its peak.

    Rows are read in BF16 and widened to float32 like the weights; keys and values are expanded per
    head; inside the softmax four tensors of scores are alive (scores, masked, shifted,
    exponentials) and two masks.
    """
    if s_q <= ABSORBED_MAX_QUERIES:
        return 0
    heads, row = config.num_attention_heads, config.kv_lora_rank + config.qk_rope_head_dim
    expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
    per_token = 2 * row + 4 * (row + expanded) + s_q * (4 * 4 * heads + 2)
    return length * per_token + 4 * expanded * config.kv_lora_rank

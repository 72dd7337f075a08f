"""Generating text for a batch of prompts over one paged cache.

Prompts are prefilled one request at a time, in chunks; then all live requests decode together, one
token a step. Two rules keep a request's tokens independent of its batch mates, bit for bit:

- the chunks of a prompt start at multiples of `prefill_chunk`, and a cached prefix is re-used only
  up to such a boundary, so every product over prompt tokens has the same shape alone, in a batch,
  and after a cache hit;
- decoding always runs on exactly `decode_rows` rows. Unused rows are padding (slot -1, length 0),
  which is also what a captured CUDA graph would need. (Which of the rows a request has does not
  matter where a row's width is a multiple of 16 bytes, as in every published model; at other widths
  a matrix library may start a row at an address that it rounds differently from.)

What it leaves out: requests that arrive while others run, and running with fewer pages than all
requests together may need. A batch that might not fit is refused before anything is written.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from stage0_reference.attention_backend import (
    AttentionBackend,
    LayerCache,
    cache_bytes_per_token,
)
from stage0_reference.decoder import CachedAttention, Decoder
from stage0_reference.latent_cache import copy_pages
from stage0_reference.mixture_of_experts import BATCHED_EXPERTS_MAX_ROWS
from stage0_reference.model_config import ModelConfig
from stage0_reference.page_allocator import (
    OutOfPages,
    PageAllocator,
    PageWrites,
    SequencePages,
    pages_for,
)
from stage0_reference.sampling import SamplingParams, sample_token


class GeneratedToken(NamedTuple):
    """One step of one request.

    Attributes
    ----------
    request
        Index of the prompt.
    token_id
        The new token, or None where the request ended without one (a stop token).
    finish_reason
        "stop", "length" (max_new_tokens or the model's context), or None while it goes on.
    """

    request: int
    token_id: int | None
    finish_reason: str | None


@dataclasses.dataclass
class Completion:
    """What a request generated."""

    prompt_token_ids: list[int]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None


@dataclasses.dataclass
class GenerationTimes:
    """Seconds and tokens of the last batch, prefill and decode apart.

    Attributes
    ----------
    prefill_tokens
        Prompt tokens computed; those found in the prefix cache are `cached_tokens`.
    decode_tokens
        Tokens that came out of decode steps (a request's first token comes out of its prefill).
    """

    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0


@dataclasses.dataclass
class _Request:
    """A prompt on its way."""

    index: int
    params: SamplingParams
    stream: torch.Generator
    token_ids: list[int]
    prompt_length: int
    longest: int
    pages: SequencePages

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_length


class TextGenerator:
    """A decoder with a cache to generate from.

    Parameters
    ----------
    decoder
        The model.
    backend
        How attention is computed and cached.
    num_pages, page_size
        The pool. Prefixes stay in it between batches until their pages are needed.
    prefill_chunk
        Prompt tokens computed at once.
    decode_rows
        Rows of a decode step; more live requests take several steps.
    attention_form
        As `CachedAttention.form`.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        *,
        num_pages: int,
        page_size: int = 64,
        prefill_chunk: int = 512,
        decode_rows: int = 8,
        attention_form: str = "auto",
    ) -> None:
        for name, value in (("prefill_chunk", prefill_chunk), ("decode_rows", decode_rows)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        has_experts = any(map(decoder.config.is_moe_layer, range(decoder.config.num_hidden_layers)))
        if has_experts and decode_rows > BATCHED_EXPERTS_MAX_ROWS:
            raise ValueError(
                f"decode_rows must be at most {BATCHED_EXPERTS_MAX_ROWS} for a model with experts "
                "(beyond, a row's bits would depend on where other rows are routed); "
                f"got {decode_rows}"
            )
        self.decoder = decoder
        self.backend = backend
        self.prefill_chunk = prefill_chunk
        self.decode_rows = decode_rows
        self.attention_form = attention_form
        self.allocator = PageAllocator(num_pages, page_size)
        self.cache = backend.make_cache(decoder.config, num_pages, page_size, device=decoder.device)
        self.times = GenerationTimes()

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes a token takes in the cache, all layers together."""
        return cache_bytes_per_token(self.cache)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        on_token: Callable[[GeneratedToken], None] | None = None,
    ) -> list[Completion]:
        """Generate for every prompt and return when all have ended. Raises as `stream`."""
        completions = [Completion(list(prompt)) for prompt in prompts]
        for step in self.stream(prompts, sampling):
            completion = completions[step.request]
            if step.token_id is not None:
                completion.token_ids.append(step.token_id)
            completion.finish_reason = step.finish_reason
            if on_token is not None:
                on_token(step)
        return completions

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
    ) -> Iterator[GeneratedToken]:
        """Yield tokens as they come. Pages are given back when the iterator ends or is closed.

        Parameters
        ----------
        prompts
            Token ids, at least one each, of any lengths.
        sampling
            One for all prompts, or one each.

        Raises
        ------
        ValueError
            A prompt is empty, does not leave room for a token in the model's context, or has a
            token outside the vocabulary.
        OutOfPages
            The pool cannot hold all requests at their longest. Nothing was computed.
        """
        # Checked now, not at the first token: a generator function's body would wait.
        return self._run(self._admit(prompts, sampling))

    def _admit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
    ) -> list[_Request]:
        config = self.decoder.config
        if isinstance(sampling, SamplingParams):
            sampling = [sampling] * len(prompts)
        if len(sampling) != len(prompts):
            raise ValueError(
                f"sampling must be one SamplingParams or one per prompt ({len(prompts)}); "
                f"got {len(sampling)}"
            )
        requests = []
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            check_prompt(prompt, config, f"prompts[{index}]")
            requests.append(
                _Request(
                    index,
                    params,
                    torch.Generator().manual_seed(params.seed),
                    list(prompt),
                    len(prompt),
                    min(len(prompt) + params.max_new_tokens, config.max_position_embeddings),
                    SequencePages(self.allocator),
                )
            )
        needed = pages_needed([r.longest for r in requests], self.allocator.page_size)
        if needed > self.allocator.num_available:
            raise OutOfPages(needed, self.allocator.num_available)
        return requests

    @torch.inference_mode()
    def _run(self, requests: list[_Request]) -> Iterator[GeneratedToken]:
        self.times = GenerationTimes()
        live: list[_Request] = []
        try:
            for request in requests:
                started = time.perf_counter()
                logits = self._prefill(request)
                step = self._choose(request, logits)
                self.times.prefill_seconds += time.perf_counter() - started
                if step.finish_reason is None:
                    live.append(request)
                yield step
            while live:
                going_on: list[_Request] = []
                for first in range(0, len(live), self.decode_rows):
                    started = time.perf_counter()
                    group = live[first : first + self.decode_rows]
                    logits = self._decode(group)
                    steps = [
                        self._choose(request, row)
                        for request, row in zip(group, logits, strict=False)  # padding is last
                    ]
                    self.times.decode_seconds += time.perf_counter() - started
                    self.times.decode_steps += 1
                    self.times.decode_tokens += sum(s.token_id is not None for s in steps)
                    going_on += [
                        request
                        for request, step in zip(group, steps, strict=True)
                        if step.finish_reason is None
                    ]
                    yield from steps
                live = going_on
        finally:
            for request in requests:
                request.pages.release()

    def _choose(self, request: _Request, logits: torch.Tensor) -> GeneratedToken:
        """Pick the request's next token and see whether it ends; give its pages back if so."""
        token = sample_token(logits, request.params, request.stream)
        reason = None
        if token in request.params.stop_token_ids:
            reason = "stop"
        else:
            request.token_ids.append(token)
            if len(request.token_ids) >= request.longest:
                reason = "length"
        if reason is not None:
            request.pages.release()
        return GeneratedToken(request.index, None if reason == "stop" else token, reason)

    def _prefill(self, request: _Request) -> torch.Tensor:
        """Compute the prompt (less what the cache has) and return its last token's logits."""
        prompt = request.token_ids
        request.pages = resident_prefix(self.allocator, prompt, self.prefill_chunk)
        self.times.cached_tokens += request.pages.length
        self.times.prefill_tokens += len(prompt) - request.pages.length
        hidden = None
        for start in range(request.pages.length, len(prompt), self.prefill_chunk):
            chunk = prompt[start : start + self.prefill_chunk]
            hidden = self._step([chunk], [request.pages], [self._extend(request.pages, len(chunk))])
        assert hidden is not None  # a prompt has at least one token that is not re-used
        publish_prefix(request.pages, prompt, self.prefill_chunk)
        return self.decoder.logits(hidden[-1])

    def _decode(self, group: Sequence[_Request]) -> torch.Tensor:
        """Append each request's newest token and return the logits after it."""
        writes = [self._extend(request.pages, 1) for request in group]
        hidden = self._step(
            [request.token_ids[-1:] for request in group],
            [request.pages for request in group],
            writes,
            rows=self.decode_rows,
        )
        return self.decoder.logits(hidden)

    def _extend(self, pages: SequencePages, count: int) -> PageWrites:
        """Make room for tokens; shared pages are copied now, in every plane of every layer."""
        writes = pages.extend(count)
        for layer in self.cache:
            copy_pages(layer, writes.copies)
        return writes

    def _step(
        self,
        token_ids: Sequence[Sequence[int]],
        pages: Sequence[SequencePages],
        writes: Sequence[PageWrites],
        rows: int = 0,
    ) -> torch.Tensor:
        """Run the layers on each request's new tokens, padded to `rows` requests of one token."""
        return run_requests(
            self.decoder,
            self.backend,
            self.cache,
            token_ids,
            pages,
            [slot for write in writes for slot in write.slots],
            rows=rows,
            form=self.attention_form,
        )


def run_requests(
    decoder: Decoder,
    backend: AttentionBackend,
    cache: Sequence[LayerCache],
    token_ids: Sequence[Sequence[int]],
    pages: Sequence[SequencePages],
    slots: Sequence[int],
    *,
    rows: int = 0,
    form: str = "auto",
) -> Float[Tensor, "tokens hidden"]:
    """Run the layers on the newest tokens of some requests and give their final hidden states.

    Parameters
    ----------
    decoder, backend, cache
        The model, and where and how its latents are kept.
    token_ids, pages
        Each request's new tokens, and its pages with room for them made: the new tokens are the
        last ones of the sequence.
    slots
        Slot of each new token, one request after the other.
    rows
        Pad with requests of one token (slot -1, length 0) up to so many.
    form
        As `CachedAttention.form`.
    """
    device = decoder.device
    padding = max(0, rows - len(token_ids))
    width = max(len(sequence.pages) for sequence in pages)
    packed: list[int] = [token for chunk in token_ids for token in chunk]
    positions = [
        position
        for chunk, sequence in zip(token_ids, pages, strict=True)
        for position in range(sequence.length - len(chunk), sequence.length)
    ]
    attention = CachedAttention(
        backend,
        cache,
        query_lens=[len(chunk) for chunk in token_ids] + [1] * padding,
        slot_mapping=torch.tensor([*slots, *[-1] * padding], device=device),
        block_table=torch.tensor(
            [sequence.block_table_row(width) for sequence in pages] + [[-1] * width] * padding,
            dtype=torch.int32,
            device=device,
        ),
        cache_seqlens=torch.tensor(
            [sequence.length for sequence in pages] + [0] * padding,
            dtype=torch.int32,
            device=device,
        ),
        form=form,
    )
    return decoder.hidden_states(
        torch.tensor(packed + [0] * padding, device=device),
        torch.tensor(positions + [0] * padding, device=device),
        attention,
    )


def check_prompt(prompt: Sequence[int], config: ModelConfig, name: str) -> None:
    """Refuse a prompt that is empty, leaves no room for a token, or holds an unknown token."""
    if not 1 <= len(prompt) < config.max_position_embeddings:
        raise ValueError(
            f"{name} must have between 1 and {config.max_position_embeddings - 1} tokens (the "
            f"model's context less one); got {len(prompt)}"
        )
    bad = next((t for t in prompt if not 0 <= t < config.vocab_size), None)
    if bad is not None:
        raise ValueError(
            f"{name} must hold token ids below vocab_size = {config.vocab_size}; got {bad}"
        )


def resident_prefix(
    allocator: PageAllocator, prompt: Sequence[int], prefill_chunk: int
) -> SequencePages:
    """Start a prompt on what the cache holds of it, its last token left out (see `from_prefix`)."""
    pages = SequencePages.from_prefix(allocator, prompt[:-1])
    pages.truncate(_whole_chunks(pages.length, prefill_chunk, allocator.page_size))
    return pages


def publish_prefix(pages: SequencePages, prompt: Sequence[int], prefill_chunk: int) -> None:
    """Make a computed prompt findable, as far as its chunks were whole.

    What a shorter last chunk wrote may differ in its bits from what a longer prompt's whole chunk
    would write there, and must not become the middle of that prompt's prefix.
    """
    pages.publish(prompt[: _whole_chunks(len(prompt), prefill_chunk, pages.allocator.page_size)])


def _whole_chunks(length: int, prefill_chunk: int, page_size: int) -> int:
    """Tokens up to the last boundary of chunks and pages alike: see the module docstring."""
    boundary = math.lcm(prefill_chunk, page_size)
    return length // boundary * boundary


def pages_needed(lengths: Sequence[int], page_size: int) -> int:
    """Pages that requests of these lengths (prompt and new tokens) need together."""
    return sum(pages_for(length, page_size) for length in lengths)

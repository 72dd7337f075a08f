"""Held-out loss at a context length, measured through the cache.

The same bytes are scored whatever the context: the last `scored_tokens` before each of a fixed set
of places. Only how far back the model may look changes, so two losses differ by what the extra
context (or a damaged cache) does, not by which bytes were drawn. For the same reason two stages or
two contexts are compared byte by byte: the noise of their *difference* is far below the noise of
either loss.

Every scored token attends in absorbed form through the stage's own backend, as decoding does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stage0_reference.attention_backend import AttentionBackend
from stage0_reference.decoder import CachedAttention, Decoder

SCORED_TOKENS = 256
"""Tokens scored at the end of each window."""


class Window(NamedTuple):
    """Tokens to read and how many at the end to score.

    Attributes
    ----------
    token_ids
        ``context + 1`` tokens: the last is only ever predicted.
    scored
        Predictions at the end that count.
    """

    token_ids: list[int]
    scored: int


@dataclasses.dataclass(frozen=True)
class LossReport:
    """Mean loss and its noise.

    Attributes
    ----------
    loss
        Nats per token.
    standard_error
        Of the mean, treating windows (not tokens) as the independent draws.
    tokens, windows
        How much was scored.
    token_losses
        f32 [tokens], for paired comparison.
    """

    loss: float
    standard_error: float
    tokens: int
    windows: int
    token_losses: Float[Tensor, " tokens"]


def choose_windows(
    documents: Sequence[Sequence[int]],
    context: int,
    *,
    longest_context: int,
    scored_tokens: int = SCORED_TOKENS,
    max_windows: int | None = None,
) -> list[Window]:
    """Cut windows whose scored tokens are the same for every context up to `longest_context`.

    Parameters
    ----------
    documents
        Token ids of each document; windows never cross from one to another.
    context
        Tokens the model reads in each window.
    longest_context
        Places are chosen so that this much context exists before the window's end.
    scored_tokens
        Tokens scored per window, each with at least ``context - scored_tokens`` tokens before it.
    max_windows
        Take about this many, spread evenly over all documents.

    Raises
    ------
    ValueError
        The context is too short to score, longer than `longest_context`, or no document is long
        enough.
    """
    if not scored_tokens < context <= longest_context:
        raise ValueError(
            f"context must be above {scored_tokens} (the scored tokens of a window) and at most "
            f"{longest_context}; got {context}"
        )
    places = [
        (index, end)
        for index, document in enumerate(documents)
        for end in range(longest_context, len(document), scored_tokens)
    ]
    if not places:
        longest = max((len(document) for document in documents), default=0)
        raise ValueError(
            f"the text must hold a document of more than {longest_context} tokens; "
            f"the longest has {longest}"
        )
    if max_windows is not None and max_windows < len(places):
        places = [places[i * len(places) // max_windows] for i in range(max_windows)]
    return [
        Window(list(documents[index][end - context : end + 1]), scored_tokens)
        for index, end in places
    ]


@torch.inference_mode()
def heldout_loss(
    decoder: Decoder,
    backend: AttentionBackend,
    windows: Sequence[Window],
    *,
    page_size: int = 64,
    chunk: int = 512,
    progress: Callable[[int], None] | None = None,
) -> LossReport:
    """Score windows through the backend's cache, in absorbed form.

    Parameters
    ----------
    decoder, backend
        The model and the attention to measure.
    windows
        From `choose_windows`.
    page_size, chunk
        Pages of the cache and tokens computed at once.
    progress
        Called with the number of windows done.

    Raises
    ------
    ValueError
        No window, a token outside the vocabulary, or a loss that is not a number.
    """
    if not windows:
        raise ValueError("windows must hold at least one window; got none")
    for name, value in (("page_size", page_size), ("chunk", chunk)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    largest = max(max(window.token_ids) for window in windows)
    if largest >= decoder.config.vocab_size:
        raise ValueError(
            f"windows must hold token ids below vocab_size = {decoder.config.vocab_size}; "
            f"got {largest}. Does the tokenizer belong to this model?"
        )
    longest = max(len(window.token_ids) for window in windows) - 1
    num_pages = -(-longest // page_size)
    device = decoder.device
    cache = backend.make_cache(decoder.config, num_pages, page_size, device=device)
    block_table = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
    losses = []
    for done, window in enumerate(windows, start=1):
        tokens = torch.tensor(window.token_ids, device=device)
        inputs, targets = tokens[:-1], tokens[1:]
        first_scored = len(inputs) - window.scored
        for start in range(0, len(inputs), chunk):
            end = min(start + chunk, len(inputs))
            places = torch.arange(start, end, device=device)
            attention = CachedAttention(
                backend,
                cache,
                query_lens=[end - start],
                slot_mapping=places,  # pages in order: slot and position coincide
                block_table=block_table,
                cache_seqlens=torch.tensor([end], dtype=torch.int32, device=device),
                form="absorbed",
            )
            hidden = decoder.hidden_states(inputs[start:end], places, attention)
            if end > first_scored:
                skip = max(first_scored - start, 0)
                logits = decoder.logits(hidden[skip:])
                losses.append(
                    F.cross_entropy(logits, targets[start + skip : end], reduction="none").cpu()
                )
        if progress is not None:
            progress(done)
    token_losses = torch.cat(losses).float()
    loss, standard_error = mean_over_windows(token_losses, len(windows))
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss must be a number; got {loss}. The weights or the cache hold values that "
            "overflow: try a wider dtype"
        )
    return LossReport(loss, standard_error, len(token_losses), len(windows), token_losses)


def mean_over_windows(values: Float[Tensor, " tokens"], windows: int) -> tuple[float, float]:
    """Mean of per-token values and its standard error, taking windows as the independent draws.

    With the difference of two reports' `token_losses` this is a paired comparison. One window
    gives no standard error (NaN).
    """
    per_window = values.double().view(windows, -1).mean(dim=1)
    spread = float(per_window.std()) if windows > 1 else math.nan
    return float(per_window.mean()), spread / math.sqrt(windows)

"""Answers for stage 0."""

from __future__ import annotations

import torch
from torch import Tensor


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """``q . (W c) = (W^T q) . c``, head by head."""
    return torch.einsum("qhd,hdc->qhc", q_nope, w_uk)


def visible(s_q: int, length: int) -> Tensor:
    """Count from the end of the keys, not from their start."""
    last = torch.arange(s_q)[:, None] + length - s_q
    return torch.arange(length)[None, :] <= last


def slots(block_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Widen the page before it is multiplied."""
    return block_table[positions // page_size].long() * page_size + positions % page_size


def online_step(
    running_max: Tensor,
    running_sum: Tensor,
    accumulator: Tensor,
    scores: Tensor,
    values: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shrink what was there by the growth of the maximum; never subtract -inf from -inf."""
    new_max = torch.maximum(running_max, scores.amax(-1))
    shift = torch.where(new_max.isneginf(), 0.0, new_max)
    decay = torch.exp(running_max - shift)
    weights = torch.exp(scores - shift[:, None])
    return (
        new_max,
        running_sum * decay + weights.sum(-1),
        accumulator * decay[:, None] + weights @ values,
    )

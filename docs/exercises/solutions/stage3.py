"""Answers for stage 3."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def splits_for(length: int, min_tokens: int, max_splits: int) -> list[tuple[int, int]]:
    """Wanted number first, then a size in whole blocks, then as many as that size needs."""
    wanted = max(1, min(max_splits, math.ceil(length / min_tokens)))
    size = 64 * max(1, math.ceil(math.ceil(length / 64) / wanted))
    return [(start, min(start + size, length)) for start in range(0, max(length, 1), size)]


def element_offset(page: Tensor, offset: Tensor, page_stride: int, token_stride: int) -> Tensor:
    """Widen first, multiply after."""
    return page.long() * page_stride + offset.long() * token_stride


def pad_batch(
    tables: list[list[int]], lengths: list[int], rows: int, max_pages: int
) -> tuple[Tensor, Tensor]:
    """Start from a batch of nothing and fill in who is there."""
    block_table = torch.full((rows, max_pages), -1, dtype=torch.int32)
    cache_seqlens = torch.zeros(rows, dtype=torch.int32)
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        block_table[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        cache_seqlens[row] = length
    return block_table, cache_seqlens


def rows_to_read(block_table: Tensor, cache_seqlens: Tensor, page_size: int) -> Tensor:
    """Request of every row by repetition, its position by counting from the request's start."""
    lengths = cache_seqlens.long()
    request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths)[request]
    page = block_table[request, position // page_size].long()
    return page * page_size + position % page_size

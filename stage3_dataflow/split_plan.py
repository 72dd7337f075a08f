"""How a request's tokens are cut into splits that run side by side.

A request of `length` tokens gets ``n = min(max_splits, ceil(length / min_tokens))`` splits of equal
size, rounded up to 64 tokens. Nothing but its own length decides, so its output has the same bits
alone and in any batch. Kernels compute the plan from the lengths on the device; the host only needs
the largest number of splits that a table of this width can ask for.

Few long requests want many splits, to fill the GPU; many requests want few, since every split costs
a partial result, written and read. The rule is therefore an argument: fixed for a
server, whatever its load, or chosen for a batch by `suggest_split_rule` where the last bit need not
repeat.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SPLIT_GRANULE = 64
"""Tokens that a split is a multiple of: the block that shares one scale of P."""

MIN_RAGGED_TOKENS = 1024
"""Least tokens of a split in a ragged batch: below, partial results cost more than they balance."""


class SplitRule(NamedTuple):
    """When to cut a request, and into how many parts at most.

    Attributes
    ----------
    min_tokens
        Tokens that a split should have before another one is opened.
    max_splits
        Splits of the longest request.
    """

    min_tokens: int = 1024
    max_splits: int = 64


DEFAULT_SPLIT_RULE = SplitRule()


def check_split_rule(rule: SplitRule) -> None:
    """Refuse a rule that could not cut anything."""
    for name, value in zip(SplitRule._fields, rule, strict=True):
        if value < 1:
            raise ValueError(f"split_rule.{name} must be at least 1; got {value}")


def splits_for(length: int, rule: SplitRule = DEFAULT_SPLIT_RULE) -> list[tuple[int, int]]:
    """First and last token of every split of a request: what the kernels compute on the device.

    Examples
    --------
    >>> splits_for(130, SplitRule(min_tokens=64, max_splits=2))
    [(0, 128), (128, 130)]
    """
    split_tokens = _split_tokens(length, rule)
    return [
        (start, min(start + split_tokens, length))
        for start in range(0, max(length, 1), split_tokens)
    ]


def largest_split_count(capacity: int, rule: SplitRule = DEFAULT_SPLIT_RULE) -> int:
    """Count the splits that a table of `capacity` tokens a row may ask for."""
    return max(1, min(rule.max_splits, -(-capacity // rule.min_tokens)))


def longest_first_order(
    cache_seqlens: Tensor, capacity: int, rule: SplitRule, grid_splits: int
) -> Tensor:
    """Order a batch's splits by size: those of the request whose first one is largest come first.

    Requests that are equal in this keep their order. Nothing but the time depends on it.

    Parameters
    ----------
    cache_seqlens
        Int32 [batch]. A length below 0 or above `capacity` counts as 0, and has one split.
    grid_splits
        `largest_split_count`.

    Returns
    -------
    Tensor
        Int32: the number of splits, then for each ``request * grid_splits + split``.
    """
    readable = (cache_seqlens >= 0) & (cache_seqlens <= capacity)
    plans = [splits_for(n, rule) for n in torch.where(readable, cache_seqlens, 0).tolist()]
    largest_first = sorted(range(len(plans)), key=lambda request: -plans[request][0][1])
    parts = [
        request * grid_splits + split
        for request in largest_first
        for split in range(len(plans[request]))
    ]
    return torch.tensor([len(parts), *parts]).to(cache_seqlens)


def _split_tokens(length: int, rule: SplitRule) -> int:
    """Tokens of every split but the last."""
    wanted = min(rule.max_splits, -(-length // rule.min_tokens))
    granules = -(-math.ceil(length / SPLIT_GRANULE) // max(wanted, 1))
    return max(granules, 1) * SPLIT_GRANULE


def suggest_split_rule(
    batch: int,
    rows: int,
    length: int,
    *,
    processors: int,
    longest: int | None = None,
    longest_first: bool = False,
    block_rows: int = 64,
) -> SplitRule:
    """Choose a rule that fills `processors` for a batch of requests about `length` tokens long.

    The bits of a request then depend on its batch mates. Processors take splits one after the
    other, so where there are somewhat fewer or more tiles than processors, several shorter splits
    leave less of the last round empty. What is fastest is estimated from times of the Hopper kernel
    on an H200; the portable kernel may be faster with more splits. More splits also take a larger
    workspace (`stage3_dataflow.workspace_bytes`).

    Parameters
    ----------
    batch, rows
        Requests, and query rows of each (s_q heads).
    length
        Mean of the requests' cached tokens.
    processors
        Multiprocessors of the GPU (132 on an H100 or H200).
    longest
        Cached tokens of the longest request. Where it is well above the mean, requests are cut so
        that no split holds more than a quarter of a processor's share of all tokens: the longest
        would otherwise go on alone.
    longest_first
        Whether requests are taken up in this order: by the Hopper kernel in any case, by the
        portable one if they stand in the batch so. A split may then be as long as a whole share (or
        a tenth more, rather than leave a gap that nothing fits), and the short ones fill the gaps
        at the end: there are fewer partial results.
    block_rows
        Rows that one program attends.

    Raises
    ------
    ValueError
        `processors` below 1.
    """
    if processors < 1:
        raise ValueError(f"processors must be at least 1; got {processors}")
    tiles = -(-rows // block_rows)
    if longest is not None and longest > 1.25 * length:
        share = batch * length * tiles / processors
        tokens = max(MIN_RAGGED_TOKENS, math.ceil(share / 4 / SPLIT_GRANULE) * SPLIT_GRANULE)
        largest = max(math.ceil(1.1 * share), tokens) if longest_first else tokens
        # One split would be taken up as it stands: of two, each finds its place in the order.
        return SplitRule(min_tokens=tokens, max_splits=max(-(-longest // largest), 2))
    fitting = {
        max(1, rounds * processors // max(batch * tiles, 1)) for rounds in range(1, MOST_ROUNDS + 1)
    }
    rules = [_equal_splits(length, splits) for splits in sorted({1, *fitting})]
    return min(rules, key=lambda rule: _cost(batch, rows, length, rule, processors, block_rows))


MOST_ROUNDS = 8
"""Splits that a processor takes one after the other: more would even out hardly more."""
BLOCK_COSTS = {16: 0.72, 32: 0.92, 64: 1.0}
"""What a tile of as many rows takes for 64 tokens in L2, as multiples of an H200's 1.3 us for 64
rows. This and what follows is fitted to `stage3_dataflow/results/h200_split_rules.json`."""
MEMORY_COST = 0.0073
"""A block's fetch, of which all processors together can do one after the other."""
ITEM_COST = 1.5
"""What a split takes beside its blocks."""
MERGE_COST = 3.0
"""The merge's launch."""
ORDER_COST = 3.0
"""The launch of what orders splits, where there are more than processors."""
PARTIAL_ROW_COST = 0.0004
"""A partial result of 512 channels, written and read."""


def _equal_splits(length: int, splits: int) -> SplitRule:
    """Cut requests of this length into as many splits, or fewer where whole blocks leave fewer."""
    rule = SplitRule(min_tokens=max(SPLIT_GRANULE, -(-length // splits)), max_splits=splits)
    # Grids and merges are made for the largest number.
    return rule._replace(max_splits=-(-max(length, 1) // _split_tokens(length, rule)))


def _cost(
    batch: int, rows: int, length: int, rule: SplitRule, processors: int, block_rows: int
) -> float:
    """Estimate a decode's time in blocks: rounds of splits, all as long as the longest."""
    splits, blocks = rule.max_splits, _split_tokens(length, rule) // SPLIT_GRANULE
    rounds = -(-batch * -(-rows // block_rows) * splits // processors)
    tile_rows = min(rows, block_rows)
    tile = next((size for size in BLOCK_COSTS if tile_rows <= size), max(BLOCK_COSTS))
    cost = max(
        rounds * (blocks + ITEM_COST) * BLOCK_COSTS[tile],
        batch * -(-length // SPLIT_GRANULE) * MEMORY_COST,
    )
    if splits > 1:
        cost += MERGE_COST + batch * rows * splits * PARTIAL_ROW_COST
        cost += ORDER_COST if rounds > 1 else 0.0
    return cost

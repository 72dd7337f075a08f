"""The order in which programs take up splits: the longest first.

Programs that take one item after another end together if the small ones come last. Nothing else
depends on the order: which bits a request has, its own length says. The meaning is
`stage3_dataflow.split_plan.longest_first_order`.
"""

import triton
import triton.language as tl

from stage3_dataflow.kernels.split_kv_decode import readable_length, split_bounds


@triton.jit
def first_split(seqlens_ptr, request, live, capacity, rule, SPLIT_GRANULE: tl.constexpr):
    """Read how long requests' first splits are, and how many they have; where not live: -1, 0."""
    min_tokens, max_splits = rule
    length = readable_length(seqlens_ptr, tl.where(live, request, 0), capacity)
    _, tokens, splits = split_bounds(length, 0, min_tokens, max_splits, SPLIT_GRANULE)
    return tl.where(live, tokens, -1), tl.where(live, splits, 0)


@triton.jit(do_not_specialize=["batch", "capacity", "min_tokens", "max_splits", "grid_splits"])
def longest_first_kernel(
    seqlens_ptr,
    order_ptr,
    counter_ptr,
    batch,
    capacity,
    min_tokens,
    max_splits,
    grid_splits,
    BLOCK: tl.constexpr,
    SPLIT_GRANULE: tl.constexpr,
):
    """Write the splits of `BLOCK` requests behind those that come before, which it counts.

    All programs write alike how many splits there are, and set the count of those taken to 0.
    """
    rule = (min_tokens, max_splits)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = request < batch
    tokens, splits = first_split(seqlens_ptr, request, live, capacity, rule, SPLIT_GRANULE)
    place = tl.zeros([BLOCK], tl.int32)
    total = 0
    for start in range(0, batch, BLOCK):
        other = start + tl.arange(0, BLOCK)
        their_tokens, their_splits = first_split(
            seqlens_ptr, other, other < batch, capacity, rule, SPLIT_GRANULE
        )
        before = (their_tokens[None, :] > tokens[:, None]) | (
            (their_tokens[None, :] == tokens[:, None]) & (other[None, :] < request[:, None])
        )
        place += tl.sum(tl.where(before, their_splits[None, :], 0), axis=1)
        total += tl.sum(their_splits, axis=0)
    tl.store(order_ptr, total)
    tl.store(counter_ptr, 0)
    for split in range(tl.max(splits, axis=0)):
        part = request * grid_splits + split
        tl.store(order_ptr + 1 + place + split, part, mask=split < splits)

"""The paged latent cache in BF16, and attention that reads it page by page.

A cache is two planes per layer, cut into pages of `page_size` tokens; a request's block table says
which page holds which of its tokens. ``slot = page * page_size + offset`` names one token's place.

========  ==============================================  ======  ===========================
bytes     field                                           dtype   why
========  ==============================================  ======  ===========================
1024      `c_kv`    [num_pages, page_size, kv_lora_rank]   bf16    the latent: key *and* value
128       `k_rope`  [num_pages, page_size, rope]           bf16    the rotary key
========  ==============================================  ======  ===========================

(for kv_lora_rank 512 and qk_rope_head_dim 64: 1152 bytes a token and layer.)

Attention walks a request's tokens in blocks of `BLOCK_TOKENS`, keeping a running maximum, a running
sum and an unfinished output per query row (online softmax). The result is the softmax over all
tokens; what it buys is memory that does not grow with length, and shapes that do not depend on the
longest request of the batch: among the same number of rows, a row's bits are the same whatever the
others hold. (Matrix libraries may round differently for another number of rows; `generation.py`
keeps it fixed.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput, accumulation_dtype

BLOCK_TOKENS = 512
"""Tokens per step of the online softmax. Any value gives the same attention."""


class LatentRows(NamedTuple):
    """Latents and rotary keys of some tokens, [..., kv_lora_rank] and [..., qk_rope_head_dim]."""

    c_kv: Tensor
    k_rope: Tensor


class Bf16LatentPages(NamedTuple):
    """One layer's planes, see the module's table. Views of larger buffers are welcome.

    Attributes
    ----------
    c_kv
        [num_pages, page_size, kv_lora_rank].
    k_rope
        [num_pages, page_size, qk_rope_head_dim].
    """

    c_kv: Tensor
    k_rope: Tensor


def check_pool_size(num_pages: int, page_size: int) -> None:
    """Refuse a pool without a page, or pages without a token."""
    for name, value in (("num_pages", num_pages), ("page_size", page_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")


def allocate_pages(
    num_pages: int,
    page_size: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Bf16LatentPages:
    """Allocate one layer's planes, uninitialised: a slot means nothing until it is written."""
    check_pool_size(num_pages, page_size)
    return Bf16LatentPages(
        torch.empty(num_pages, page_size, kv_lora_rank, dtype=dtype, device=device),
        torch.empty(num_pages, page_size, qk_rope_head_dim, dtype=dtype, device=device),
    )


def write_rows(
    planes: Sequence[Shaped[Tensor, "num_pages page_size ..."]],
    rows: Sequence[Shaped[Tensor, "tokens ..."]],
    slot_mapping: Int[Tensor, " tokens"],
) -> None:
    """Write each token's rows into its slot of every plane; a negative slot writes nothing.

    Parameters
    ----------
    planes, rows
        One tensor of rows per plane, cast to the plane's dtype.
    slot_mapping
        ``page * page_size + offset`` per token, int32 or int64.

    Raises
    ------
    ValueError
        A slot past the pool, or rows that do not match the planes. Nothing is written then.
    """
    num_pages, page_size = planes[0].shape[:2]
    for plane, row in zip(planes, rows, strict=True):
        expected = [len(slot_mapping), *plane.shape[2:]]
        if list(row.shape) != expected:
            raise ValueError(
                f"rows must be {expected} (tokens of slot_mapping, then as the cache); "
                f"got {list(row.shape)}"
            )
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    if slots.numel() and int(slots.max()) >= num_pages * page_size:
        raise ValueError(
            f"slot_mapping must stay below {num_pages} pages x {page_size} tokens = "
            f"{num_pages * page_size}; got slot {int(slots.max())}"
        )
    page, offset = slots // page_size, slots % page_size
    for plane, row in zip(planes, rows, strict=True):
        as_bytes(plane)[page, offset] = as_bytes(row[written].to(plane.dtype))


def as_bytes(plane: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """View an 8-bit float plane as uint8: torch indexes only the wider floats everywhere."""
    return plane.view(torch.uint8) if plane.element_size() == 1 else plane


def copy_pages(
    planes: Sequence[Shaped[Tensor, "num_pages page_size ..."]], copies: Sequence[tuple[int, int]]
) -> None:
    """Copy whole pages (source, destination) in every plane: the act behind copy-on-write.

    Raises
    ------
    ValueError
        A page outside the pool; nothing is copied then.
    """
    if not copies:
        return
    _check_page_ids(planes, [page for copy in copies for page in copy])
    source, destination = torch.tensor(copies, device=planes[0].device).unbind(1)
    for plane in map(as_bytes, planes):
        plane[destination] = plane[source]


def export_pages(
    planes: Sequence[Shaped[Tensor, "num_pages page_size ..."]], page_ids: Sequence[int]
) -> list[Shaped[Tensor, "pages page_size ..."]]:
    """Copy pages out of a cache, all planes together: to offload or to send them.

    Raises
    ------
    ValueError
        A page id outside the pool.
    """
    index = _check_page_ids(planes, page_ids)
    return [as_bytes(plane)[index].view(plane.dtype) for plane in planes]


def import_pages(
    planes: Sequence[Shaped[Tensor, "num_pages page_size ..."]],
    page_ids: Sequence[int],
    exported: Sequence[Shaped[Tensor, "pages page_size ..."]],
) -> None:
    """Copy exported pages into the pages `page_ids` of a cache, byte for byte.

    Raises
    ------
    ValueError
        A page id outside the pool or given twice, or planes that differ in number, shape or
        dtype. Nothing is written then.
    """
    index = _check_page_ids(planes, page_ids)
    if len(set(page_ids)) < len(page_ids):
        raise ValueError(f"page_ids must be different pages; got {list(page_ids)}")
    expected = [((len(page_ids), *plane.shape[1:]), plane.dtype) for plane in planes]
    got = [(tuple(plane.shape), plane.dtype) for plane in exported]
    if expected != got:
        raise ValueError(
            f"exported must hold every plane's pages, {_plain(expected)}; got {_plain(got)}"
        )
    for plane, pages in zip(planes, exported, strict=True):
        as_bytes(plane)[index] = as_bytes(pages.to(plane.device))


def _plain(planes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype)[6:]} {list(shape)}" for shape, dtype in planes)


def _check_page_ids(planes: Sequence[Tensor], page_ids: Sequence[int]) -> Tensor:
    """Page ids as an index tensor; those outside the pool are refused."""
    num_pages = planes[0].shape[0]
    for page in page_ids:
        if not 0 <= page < num_pages:
            raise ValueError(f"page_ids must be between 0 and {num_pages - 1}; got {page}")
    return torch.tensor(page_ids, dtype=torch.int64, device=planes[0].device)


def locate_tokens(
    block_table: Int[Tensor, "batch max_pages"], positions: Int[Tensor, " tokens"], page_size: int
) -> tuple[Int[Tensor, "batch tokens"], Int[Tensor, " tokens"]]:
    """Page ids and offsets of the tokens at `positions` of each request.

    Positions past the table's last column give its last column; the caller masks them.
    """
    column = (positions // page_size).clamp(max=block_table.shape[1] - 1)
    return block_table[:, column].long(), positions % page_size


def check_table(
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
    num_pages: int,
    page_size: int,
) -> list[int]:
    """Refuse a length that its table row cannot hold and a page outside the pool.

    Returns
    -------
    list of int
        `cache_seqlens` on the host. A request whose needed columns hold a negative page id comes
        back as length 0: it is an unused row of a padded batch.

    Raises
    ------
    ValueError
        As above. Columns past a request's last page may hold anything.
    """
    if block_table.shape[0] != cache_seqlens.shape[0]:
        raise ValueError(
            "block_table and cache_seqlens must have one row per request; got "
            f"{block_table.shape[0]} and {cache_seqlens.shape[0]}"
        )
    lengths: list[int] = cache_seqlens.tolist()
    capacity = block_table.shape[1] * page_size
    for request, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"cache_seqlens[{request}] must be between 0 and {capacity} (block_table has "
                f"{block_table.shape[1]} columns of {page_size} tokens); got {length}"
            )
    if block_table.shape[1] == 0:
        return lengths
    column = torch.arange(block_table.shape[1], device=block_table.device)
    needed = column[None, :] * page_size < cache_seqlens[:, None]
    if bool((needed & (block_table >= num_pages)).any()):
        request, at = (needed & (block_table >= num_pages)).nonzero()[0].tolist()
        raise ValueError(
            f"block_table[{request}, {at}] must be below num_pages = {num_pages}; "
            f"got {int(block_table[request, at])}"
        )
    unused: list[bool] = (needed & (block_table < 0)).any(dim=1).tolist()
    return [0 if skip else length for length, skip in zip(lengths, unused, strict=True)]


def gather_planes(
    planes: Sequence[Shaped[Tensor, "num_pages page_size ..."]],
    block_table: Int[Tensor, "batch max_pages"],
    positions: Int[Tensor, " tokens"],
) -> list[Shaped[Tensor, "batch tokens ..."]]:
    """Read the tokens at `positions` of every request from every plane, in the planes' dtypes.

    Equal to ``plane[block_table[b, p // page_size], p % page_size]`` for each b and p. Rows past a
    request's end come from wherever the table points and may be NaN: mask before use.
    """
    num_pages, page_size = planes[0].shape[:2]
    page, offset = locate_tokens(block_table, positions, page_size)
    page = page.clamp(0, num_pages - 1)  # columns past the end may hold anything
    return [as_bytes(plane)[page, offset].view(plane.dtype) for plane in planes]


def gather_rows(
    cache: Bf16LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    positions: Int[Tensor, " tokens"],
) -> LatentRows:
    """`gather_planes` of a BF16 cache, [batch, tokens, .] each."""
    return LatentRows(*gather_planes(cache, block_table, positions))


def gather_packed(
    planes: Sequence[Shaped[Tensor, "num_pages page_size ..."]],
    block_table: Int[Tensor, "batch max_pages"],
    lengths: Sequence[int],
) -> list[Shaped[Tensor, "total_tokens ..."]]:
    """Every request's rows one after the other, [sum of lengths, ...] from every plane."""
    requests = [
        gather_planes(planes, row[None], torch.arange(length, device=row.device))
        for row, length in zip(block_table, lengths, strict=True)
    ]
    if not requests:
        return [plane.new_empty(0, *plane.shape[2:]) for plane in planes]
    return [
        torch.cat([as_bytes(rows[0]) for rows in parts]).view(plane.dtype)
        for plane, parts in zip(planes, zip(*requests, strict=True), strict=True)
    ]


class ScoredBlock(NamedTuple):
    """What one block of tokens brings to attention.

    Attributes
    ----------
    scores
        Softmax logits, scale included, [batch, s_q * heads, block].
    values
        [batch, block, kv_lora_rank].
    """

    scores: Tensor
    values: Tensor


def last_visible_token(
    length: Int[Tensor, " batch"], s_q: int, heads: int, *, causal: bool
) -> Int[Tensor, "batch rows"]:
    """Position of the last token that each query row (query by query, all heads) may see.

    Query i of a request sees token t when ``t <= length - s_q + i``; all tokens without `causal`.
    """
    last = (length - 1)[:, None].expand(-1, s_q)
    if causal:
        last = last - s_q + 1 + torch.arange(s_q, device=length.device)
    return last.repeat_interleave(heads, dim=1)


def online_attention(
    read_block: Callable[[Int[Tensor, " tokens"]], ScoredBlock],
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    lengths: Sequence[int],
    *,
    causal: bool = True,
    block_tokens: int = BLOCK_TOKENS,
) -> AttentionOutput:
    """Softmax attention over blocks of tokens that are scored one after the other.

    Parameters
    ----------
    read_block
        Scores and values of the tokens at some positions, for the whole batch. Where a request
        has no token they may be anything, NaN included.
    q_latent
        Only its shape, dtype and device matter here.
    lengths
        Cached tokens of each request.
    causal
        Query i sees the keys before ``length - s_q + i + 1``; otherwise all keys.
    block_tokens
        Tokens per step; changes rounding only.

    Returns
    -------
    AttentionOutput
        `out` like q_latent, `lse` [batch, s_q, heads].

    References
    ----------
    Online softmax: Milakov and Gimelshein (arXiv 1805.02867); FlashAttention (arXiv 2205.14135).
    """
    batch, s_q, heads, latent_width = q_latent.shape
    if batch != len(lengths):
        raise ValueError(
            f"q_latent must have one row per request of block_table and cache_seqlens "
            f"({len(lengths)}); got {batch}"
        )
    device, wide = q_latent.device, accumulation_dtype(q_latent.dtype)
    length = torch.tensor(lengths, dtype=torch.int64, device=device)
    last_visible = last_visible_token(length, s_q, heads, causal=causal)

    running_max = torch.full((batch, s_q * heads), float("-inf"), dtype=wide, device=device)
    running_sum = torch.zeros(batch, s_q * heads, dtype=wide, device=device)
    accumulator = torch.zeros(batch, s_q * heads, latent_width, dtype=wide, device=device)
    for start in range(0, max(lengths, default=0), block_tokens):
        positions = torch.arange(start, start + block_tokens, device=device)
        scores, values = read_block(positions)
        hidden = positions > last_visible[..., None]  # [batch, s_q * heads, block]
        scores = scores.masked_fill(hidden, float("-inf"))
        # Masking the scores is not enough: 0 x NaN in the value product would still be NaN.
        absent = (positions >= length[:, None])[..., None]  # [batch, block, 1]
        values = values.masked_fill(absent, 0.0)

        block_max = torch.maximum(running_max, scores.amax(dim=-1))
        # A row that has seen nothing yet keeps -inf; subtract 0 there instead of -inf - -inf.
        shift = torch.where(block_max.isneginf(), 0.0, block_max)
        rescale = torch.exp(running_max - shift)
        weights = torch.exp(scores - shift[..., None])
        running_sum = running_sum * rescale + weights.sum(dim=-1)
        accumulator = accumulator * rescale[..., None] + weights @ values
        running_max = block_max

    seen = ~running_max.isneginf()
    out = accumulator / torch.where(seen, running_sum, 1.0)[..., None]
    lse = torch.where(seen, running_max + running_sum.log(), float("-inf"))
    return AttentionOutput(out.to(q_latent.dtype).view(q_latent.shape), lse.view(batch, s_q, heads))


def paged_latent_attention(
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
    read_rows: Callable[[Int[Tensor, " tokens"]], LatentRows],
    lengths: Sequence[int],
    softmax_scale: float,
    *,
    causal: bool = True,
    block_tokens: int = BLOCK_TOKENS,
) -> AttentionOutput:
    """`latent_attention` for a batch, over rows that are fetched block by block.

    Parameters
    ----------
    q_latent, q_rope
        Absorbed queries and rotated rotary queries of each request's last s_q tokens.
    read_rows
        Gives the rows at some positions for the whole batch, [batch, tokens, .].
    lengths, causal, block_tokens
        As `online_attention`.
    softmax_scale
        Factor on the scores.

    Returns
    -------
    AttentionOutput
        `out` [batch, s_q, heads, kv_lora_rank] in q_latent's dtype, `lse` [batch, s_q, heads].
    """
    wide = accumulation_dtype(q_latent.dtype)
    query_latent, query_rope = q_latent.to(wide).flatten(1, 2), q_rope.to(wide).flatten(1, 2)

    def read_block(positions: Int[Tensor, " tokens"]) -> ScoredBlock:
        rows = read_rows(positions)
        latents = rows.c_kv.to(wide)
        scores = query_latent @ latents.mT + query_rope @ rows.k_rope.to(wide).mT
        return ScoredBlock(scores * softmax_scale, latents)

    return online_attention(read_block, q_latent, lengths, causal=causal, block_tokens=block_tokens)

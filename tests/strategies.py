"""What tests may draw: geometries, lengths, pages, regimes of values, layouts of memory.

Shapes, seeds and regimes are drawn; large tensors are made from them, so that a failing example
prints in one line. Domains are as wide as what the code claims to serve. What is drawn often is
left to Hypothesis, except that sizes lean towards small ones, for speed, and lengths towards the
edges of pages, for spite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.bounds import latent_scores
from tests.model_factory import shuffled_block_table, slots_of

REGIMES = ("normal", "many binades", "one huge channel", "zero rows", "zeros")
LAYOUTS = ("contiguous", "sliced", "transposed", "every other", "offset")
ABSURD_PAGES = (2**31 - 1, -(2**31), -1, 10**6)
"""Page ids that stand behind a request's last page, where nobody may follow them."""


class Geometry(NamedTuple):
    """Widths of one MLA layer."""

    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


def seeds() -> st.SearchStrategy[int]:
    """Seeds of tensors."""
    return st.integers(0, 2**32 - 1)


def regimes() -> st.SearchStrategy[str]:
    """Names of value regimes, see `draw_values`."""
    return st.sampled_from(REGIMES)


def layouts() -> st.SearchStrategy[str]:
    """Names of memory layouts, see `with_layout`."""
    return st.sampled_from(LAYOUTS)


def float_dtypes() -> st.SearchStrategy[torch.dtype]:
    """Dtypes that a model may run in."""
    return st.sampled_from((torch.bfloat16, torch.float32, torch.float64))


def widths(typical: Sequence[int], largest: int) -> st.SearchStrategy[int]:
    """Mostly any small width; now and then one that published models have."""
    return st.one_of(st.integers(1, largest), st.integers(1, largest), st.sampled_from(typical))


def geometries(max_heads: int = 20) -> st.SearchStrategy[Geometry]:
    """Geometries of MLA: any head count, widths up to the published models', rope 0 included."""
    heads = [count for count in (1, 4, 8, 16, 20) if count <= max_heads]
    return st.builds(
        Geometry,
        heads=st.one_of(st.integers(1, max_heads), st.sampled_from(heads)),
        kv_lora_rank=widths((64, 256, 512), largest=24),
        qk_rope_head_dim=st.one_of(
            st.integers(0, 8).map(lambda pairs: 2 * pairs), st.sampled_from((0, 32, 64))
        ),
        qk_nope_head_dim=widths((64, 128), largest=16),
        v_head_dim=widths((64, 128), largest=16),
    )


def page_sizes() -> st.SearchStrategy[int]:
    """Tokens per page."""
    return st.one_of(st.integers(1, 128), st.sampled_from((1, 4, 16, 64, 128)))


def lengths(page_size: int, longest: int = 200) -> st.SearchStrategy[int]:
    """Cached tokens of a request: 0, around the edges of pages, or anything."""
    edges = {page_size * pages + by for pages in (1, 2, 3) for by in (-1, 0, 1)}
    return st.one_of(
        st.integers(0, longest),
        st.sampled_from(sorted({0, 1} | {edge for edge in edges if 0 <= edge <= longest})),
    )


def draw_values(
    shape: Sequence[int], regime: str, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Make a tensor in a value regime, rounded to `dtype`.

    Parameters
    ----------
    shape
        Last axis: channels.
    regime
        "normal"; "many binades" (magnitudes 2^-12 to 2^12); "one huge channel" (2^10 times the
        others); "zero rows" (about half of the rows are 0); "zeros".
    generator
        Source of the numbers.
    dtype
        Of the result. Values are drawn in float64 and rounded once, so that all dtypes of a seed
        are roundings of one tensor.
    """
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if regime == "many binades":
        values *= 2.0 ** torch.randint(-12, 13, tuple(shape), generator=generator)
    elif regime == "one huge channel" and values.numel():
        channel = int(torch.randint(shape[-1], (), generator=generator))
        values[..., channel] *= 2.0**10
    elif regime == "zero rows":
        values *= torch.randint(0, 2, (*shape[:-1], 1), generator=generator)
    elif regime == "zeros":
        values.zero_()
    return values.to(dtype)


def with_layout(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor equal to `tensor` in another memory layout, NaN in between.

    "sliced" is the middle of a larger buffer's last axis, "transposed" has its first two axes
    swapped in memory, "every other" steps by 2 along the first axis, "offset" starts one element
    into its buffer.
    """
    if layout == "contiguous" or tensor.ndim < 2:
        return tensor.contiguous()
    nan = float("nan")
    if layout == "sliced":
        buffer = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 5), nan)
        view = buffer[..., 2:-3]
    elif layout == "transposed":
        view = tensor.new_full((tensor.shape[1], tensor.shape[0], *tensor.shape[2:]), nan)
        view = view.transpose(0, 1)
    elif layout == "every other":
        view = tensor.new_full((2 * tensor.shape[0], *tensor.shape[1:]), nan)[1::2]
    elif layout == "offset":
        view = tensor.new_full((tensor.numel() + 1,), nan)[1:].view(tensor.shape)
    else:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    return view.copy_(tensor)


class Queries(NamedTuple):
    """Absorbed queries, [batch, s_q, heads, .]."""

    q_latent: Tensor
    q_rope: Tensor


class Pages(NamedTuple):
    """Where the tokens of a batch lie.

    Attributes
    ----------
    block_table
        int32 [batch, max_pages], absurd behind each request's last page.
    cache_seqlens
        int32 [batch].
    slot_mapping
        int64, one request after the other.
    num_pages
        Pages of the pool, two of them unused.
    """

    block_table: Tensor
    cache_seqlens: Tensor
    slot_mapping: Tensor
    num_pages: int


def lay_out_pages(token_counts: Sequence[int], page_size: int, seed: int) -> Pages:
    """Spread requests over a pool in random order, with one column more than anyone needs."""
    block_table, num_pages = shuffled_block_table(token_counts, page_size, seed=seed)
    block_table = torch.cat((block_table, block_table.new_zeros(len(token_counts), 1)), dim=1)
    counts = torch.tensor(token_counts, dtype=torch.int32)
    behind = torch.arange(block_table.shape[1]) * page_size >= counts[:, None]
    absurd = torch.tensor(ABSURD_PAGES, dtype=torch.int32).repeat(block_table.numel())
    block_table[behind] = absurd[: int(behind.sum())]
    slots = [
        slot
        for request, count in enumerate(token_counts)
        for slot in slots_of(block_table, request, 0, count, page_size)
    ]
    return Pages(
        block_table,
        counts,
        torch.tensor(slots, dtype=torch.int64),
        num_pages,
    )


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """A batch of decoding requests over a paged cache, as small enough to print.

    Attributes
    ----------
    token_counts
        Cached tokens of each request (`cache_seqlens`).
    s_q
        Query tokens of each request.
    spread
        Largest magnitude of a scaled score: from flat attention to one-hot.
    dtype
        Of the queries.
    """

    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    token_counts: tuple[int, ...]
    s_q: int
    regime: str
    spread: float
    dtype: torch.dtype
    seed: int

    def queries(self) -> Queries:
        """Queries in the case's dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        leading = (len(self.token_counts), self.s_q, self.heads)
        return Queries(
            draw_values((*leading, self.kv_lora_rank), self.regime, generator, self.dtype),
            draw_values((*leading, self.qk_rope_head_dim), "normal", generator, self.dtype),
        )

    def rows(self, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys of all tokens, one request after the other."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        tokens = sum(self.token_counts)
        return (
            draw_values((tokens, self.kv_lora_rank), self.regime, generator, dtype),
            draw_values((tokens, self.qk_rope_head_dim), "normal", generator, dtype),
        )

    def pages(self) -> Pages:
        """Places of the tokens in a pool."""
        return lay_out_pages(self.token_counts, self.page_size, self.seed)

    def softmax_scale(self) -> float:
        """Scale at which the largest score magnitude is `spread` (any, if there is no score).

        Rounding errors of scores are in proportion to this magnitude, so bounds stay meaningful
        whatever the regime.
        """
        q_latent, q_rope = self.queries()
        c_kv, k_rope = (plane.split(self.token_counts) for plane in self.rows())
        magnitudes = (
            latent_scores(*request, softmax_scale=1.0).magnitude
            for request in zip(q_latent, q_rope, c_kv, k_rope, strict=True)
        )
        largest = max((float(part.max()) for part in magnitudes if part.numel()), default=0.0)
        return self.spread / largest if largest else 1.0


@st.composite
def decode_cases(
    draw: st.DrawFn,
    *,
    longest: int = 200,
    largest_batch: int = 4,
    largest_s_q: int = 8,
    dtypes: st.SearchStrategy[torch.dtype] | None = None,
    s_q: st.SearchStrategy[int] | None = None,
) -> DecodeCase:
    """Batches of ragged requests, empty ones and ones shorter than their queries included."""
    geometry = draw(geometries())
    page_size = draw(page_sizes())
    return DecodeCase(
        heads=geometry.heads,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        page_size=page_size,
        token_counts=tuple(
            draw(st.lists(lengths(page_size, longest), min_size=1, max_size=largest_batch))
        ),
        s_q=draw(st.integers(1, largest_s_q) if s_q is None else s_q),
        regime=draw(regimes()),
        spread=draw(st.sampled_from((0.5, 5.0, 80.0, 1e4))),
        dtype=draw(float_dtypes() if dtypes is None else dtypes),
        seed=draw(seeds()),
    )


# Stage 3: what the kernels serve.

KERNEL_HEADS = (1, 4, 8, 16, 20, 32, 40, 64, 128)
KERNEL_PAGE_SIZES = (1, 16, 32, 64, 128)
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@st.composite
def kernel_cases(
    draw: st.DrawFn,
    *,
    longest: int = 140,
    largest_batch: int = 2,
    largest_s_q: int = 8,
    most_rows: int = 16,
    latents: Sequence[int] = (32, 64),
    ropes: Sequence[int] = (0, 16, 32),
    regime: st.SearchStrategy[str] | None = None,
    spread: st.SearchStrategy[float] | None = None,
    dtypes: Sequence[torch.dtype] = KERNEL_DTYPES,
) -> DecodeCase:
    """Decode batches of widths that the kernels have tiles for.

    Small widths by default: their code is the same, and an interpreter takes a millisecond for a
    handful of lines. `most_rows` bounds s_q times heads for the same reason:
    every row of a split request is a program of the combine.
    """
    heads = draw(st.sampled_from([count for count in KERNEL_HEADS if count <= most_rows]))
    page_size = draw(st.one_of(st.sampled_from(KERNEL_PAGE_SIZES), st.integers(1, 130)))
    return DecodeCase(
        heads=heads,
        kv_lora_rank=draw(st.sampled_from(latents)),
        qk_rope_head_dim=draw(st.sampled_from(ropes)),
        page_size=page_size,
        token_counts=tuple(
            draw(st.lists(lengths(page_size, longest), min_size=1, max_size=largest_batch))
        ),
        s_q=draw(st.integers(1, max(1, min(largest_s_q, most_rows // heads)))),
        regime=draw(regimes() if regime is None else regime),
        spread=draw(st.sampled_from((0.5, 5.0, 80.0)) if spread is None else spread),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(seeds()),
    )

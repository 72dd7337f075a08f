"""Stage 3: what stands around the kernels.

Replace each ``raise NotImplementedError`` and ask

    python -m docs.exercises.check stage3

Chapter 40 has the ideas.
"""

from __future__ import annotations

from torch import Tensor


def splits_for(length: int, min_tokens: int, max_splits: int) -> list[tuple[int, int]]:
    """Cut a request into splits: (first token, end) of each, in order.

    At most `max_splits`, and no more than one per `min_tokens` begun. All have one size, a multiple
    of 64 and as small as the wanted number allows; the last one ends at `length`. A request of
    length 0 has the one split (0, 0). Nothing but these three numbers decides.
    """
    raise NotImplementedError


def element_offset(page: Tensor, offset: Tensor, page_stride: int, token_stride: int) -> Tensor:
    """Where tokens lie in a plane, counted in elements, int64.

    `page` and `offset` are int32 tensors. A pool may have more than 2^31 elements.
    """
    raise NotImplementedError


def pad_batch(
    tables: list[list[int]], lengths: list[int], rows: int, max_pages: int
) -> tuple[Tensor, Tensor]:
    """Block table and lengths of a captured step, int32 [rows, max_pages] and [rows].

    The first rows are the live requests; the others must read and write nothing: page -1, length 0.
    Columns behind a request's last page hold -1.
    """
    raise NotImplementedError


def rows_to_read(block_table: Tensor, cache_seqlens: Tensor, page_size: int) -> Tensor:
    """Slots of all cached tokens, one request after the other, int64 [sum of cache_seqlens].

    What a fetch of prefixes reads. Its size follows the tokens asked for, never the pool.
    """
    raise NotImplementedError

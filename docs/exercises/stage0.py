"""Stage 0: write the attention that must not change.

Replace each ``raise NotImplementedError`` and ask

    python -m docs.exercises.check stage0

Everything is in float64 here, so that only a mistake can be wrong. Answers are in
``docs/exercises/solutions``; chapter 10 has the ideas.
"""

from __future__ import annotations

from torch import Tensor


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Move W_UK to the query's side.

    `q_nope` is [s_q, heads, nope], `w_uk` [heads, nope, latent]; the result [s_q, heads, latent]
    scores a latent as the query would score the key ``w_uk[head] @ latent``.
    """
    raise NotImplementedError


def visible(s_q: int, length: int) -> Tensor:
    """Which keys each query may see, bool [s_q, length].

    The queries are the last s_q of a request's `length` tokens. Query i sees the keys before
    ``length - s_q + i + 1``; with fewer tokens than queries the first queries see nothing.
    """
    raise NotImplementedError


def slots(block_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Slots of the tokens at `positions` of one request, int64.

    `block_table` is the request's row, int32 [pages]; a slot is ``page * page_size + offset``.
    """
    raise NotImplementedError


def online_step(
    running_max: Tensor,
    running_sum: Tensor,
    accumulator: Tensor,
    scores: Tensor,
    values: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one block of tokens into the online softmax.

    The state is [rows], [rows] and [rows, width]: the largest score so far (-inf at first), the sum
    of ``exp(score - max)``, and the sum of those weights times values. `scores` is [rows, block],
    -inf where a row may not look; `values` is [block, width]. A block of which a row sees nothing
    must leave that row as it was.
    """
    raise NotImplementedError

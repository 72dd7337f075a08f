"""The rescaled FP8 PV product: attention whose both large products read FP8 operands.

The value of a token is its latent, ``codes[t] * scale[t]``. In ``sum over t of p[t] * scale[t] *
codes[t]`` the scale runs along the axis that is summed, so no factor in front of or behind the
product can stand for it. It has to go *into* an operand:

    u = p * scale                V's scale fused into P
    sigma = max(u) / 448         one scale per query row and block: P is quantised dynamically
    p8 = e4m3(u / sigma)         its largest element becomes 448 exactly
    O = O * ratio + p8 @ codes   O is kept in units of the newest sigma

and dequantisation is never a step of its own: it is the multiplication that the online softmax
needs anyway, with ``sigma_old / sigma_new`` in it.

The denominator sums p before quantisation and without V's scale; lse therefore carries no FP8 error
of this product. O's unit is the newest block's sigma, so blocks of one row are applied in order.

References
----------
SnapMLA (arXiv 2602.10718), section 3.2; each line below names its step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput, accumulation_dtype
from stage0_reference.latent_cache import last_visible_token
from stage1_quant.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3

BLOCK_TOKENS = 64
"""Tokens that share one scale of P: the paper's block, and a page of the usual size."""

LOG2_E = math.log2(math.e)

PFormat = Literal["e4m3", "bf16", "exact"]
"""What P is rounded to for its product with the codes. "e4m3" is the paper's; "bf16" multiplies
BF16 by widened codes, needs no sigma, and is what a portable kernel may find faster; "exact" rounds
nothing."""

SMALLEST_UNIT = 2.0**-60
"""Floor under a new sigma, relative to the largest contribution so far. O is divided by sigma: when
V's scales fall by 2^100 from one block to the next, O in units of the new sigma would overflow.
With this floor O stays below 2^(60 + 24) times the number of blocks, and what the floor flushes is
below 2^-60 of the largest contribution to O so far."""


class QuantizedBlock(NamedTuple):
    """A block of tokens as attention meets it.

    Attributes
    ----------
    scores
        Softmax logits (natural), scale included, [batch, rows, block].
    codes
        Values without their scale: e4m3 codes as float32, [batch, block, kv_lora_rank].
    scale
        What each token's codes are multiplied by, [batch, block].
    """

    scores: Tensor
    codes: Tensor
    scale: Tensor


class PipelineState(NamedTuple):
    """What a row carries from block to block; all [batch, rows] but the accumulator.

    Attributes
    ----------
    max_log2
        Running maximum of the scores in base 2; -inf before anything was visible.
    denominator
        Sum of ``2^(score - max)``, without V's scale.
    accumulator
        O in units of sigma, [batch, rows, kv_lora_rank].
    sigma
        P's scale in the newest block that had anything visible.
    largest_unit
        Largest unfloored sigma so far, carried along with the maximum.
    """

    max_log2: Tensor
    denominator: Tensor
    accumulator: Tensor
    sigma: Tensor
    largest_unit: Tensor


def initial_state(
    batch: int, rows: int, width: int, *, dtype: torch.dtype, device: torch.device
) -> PipelineState:
    """State of rows that have seen nothing."""
    shape = (batch, rows)
    return PipelineState(
        max_log2=torch.full(shape, -math.inf, dtype=dtype, device=device),
        denominator=torch.zeros(shape, dtype=dtype, device=device),
        accumulator=torch.zeros(*shape, width, dtype=dtype, device=device),
        sigma=torch.ones(shape, dtype=dtype, device=device),
        largest_unit=torch.zeros(shape, dtype=dtype, device=device),
    )


def quantize_probabilities(
    scaled: Float[Tensor, "batch rows block"], sigma: Float[Tensor, "batch rows"]
) -> Float[Tensor, "batch rows block"]:
    """Give ``e4m3(scaled / sigma)`` as numbers: P in FP8, in units of sigma."""
    return decode_e4m3(encode_e4m3((scaled / sigma[..., None]).float())).to(scaled.dtype)


def check_p_format(p_format: str) -> None:
    """Refuse an unknown format of P by name."""
    if p_format not in get_args(PFormat):
        raise ValueError(
            f"p_format must be one of {', '.join(get_args(PFormat))}; got {p_format!r}"
        )


def apply_block(
    state: PipelineState, block: QuantizedBlock, *, p_format: PFormat = "e4m3"
) -> PipelineState:
    """Take one block of tokens into the online softmax.

    Parameters
    ----------
    state
        Of the blocks before, in order.
    block
        Masked already: scores -inf where a row may not look, codes and scale finite everywhere.
    p_format
        What P is rounded to; "exact" makes this exact attention.

    Returns
    -------
    PipelineState
        Unchanged, bit for bit, for a row that sees nothing of this block.
    """
    score_log2 = block.scores * LOG2_E
    max_log2 = torch.maximum(state.max_log2, score_log2.amax(dim=-1))
    seen = ~max_log2.isneginf()
    shift = torch.where(seen, max_log2, 0.0)  # -inf - -inf would be NaN
    decay = torch.exp2(state.max_log2 - shift)  # 0 for a row that had seen nothing
    p = torch.exp2(score_log2 - shift[..., None])  # [batch, rows, block]
    denominator = state.denominator * decay + p.sum(dim=-1)

    u = p * block.scale[:, None, :]  # scale fusion
    if p_format == "bf16":  # its range is float32's: sigma stays 1
        tile = u.bfloat16().to(u.dtype) @ block.codes
        return state._replace(
            max_log2=max_log2,
            denominator=denominator,
            accumulator=state.accumulator * decay[..., None] + tile,
        )
    block_unit = u.amax(dim=-1) / torch.full_like(decay, E4M3_MAX)
    largest_unit = torch.maximum(state.largest_unit * decay, block_unit)
    floored = torch.maximum(block_unit, largest_unit * SMALLEST_UNIT)
    nothing = block_unit == 0.0
    sigma = torch.where(nothing, state.sigma, floored)
    rounded = p_format == "e4m3"
    quantised = quantize_probabilities(u, sigma) if rounded else u / sigma[..., None]

    # Dequantisation is this ratio. Where the row has no past, O is 0 and any finite ratio will do.
    ratio = torch.where(decay > 0.0, decay * (state.sigma / sigma), 0.0)
    ratio = torch.where(nothing, decay, ratio)
    tile = quantised @ block.codes  # starts from zero: promoted, see tensor_core_accumulator.py
    accumulator = state.accumulator * ratio[..., None] + tile
    return PipelineState(max_log2, denominator, accumulator, sigma, largest_unit)


def finish(state: PipelineState) -> AttentionOutput:
    """Turn a row's state into its output and natural lse; a row that saw nothing gives 0, -inf."""
    seen = ~state.max_log2.isneginf()
    factor = state.sigma / torch.where(seen, state.denominator, 1.0)
    lse = (state.max_log2 + state.denominator.log2()) / LOG2_E
    return AttentionOutput(state.accumulator * factor[..., None], torch.where(seen, lse, -math.inf))


def rescaled_pv_attention(
    read_block: Callable[[Int[Tensor, " tokens"]], QuantizedBlock],
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    lengths: Sequence[int],
    *,
    causal: bool = True,
    block_tokens: int = BLOCK_TOKENS,
    first_token: int = 0,
    last_token: int | None = None,
    p_format: PFormat = "e4m3",
) -> AttentionOutput:
    """Attend over a batch, block by block, both products on FP8 operands.

    Parameters
    ----------
    read_block
        Scores, codes and scales of the tokens at some positions. Where a request has no token they
        may be anything, NaN included.
    q_latent
        Only its shape, dtype and device matter here.
    lengths
        Cached tokens of each request.
    causal
        Query i sees the keys before ``length - s_q + i + 1``; otherwise all keys.
    block_tokens
        Tokens that share a scale of P. Any value is right; it changes the rounding.
    first_token, last_token
        Take only this range of positions (a split); default all. Splits are joined by
        `merge_partials`.
    p_format
        See `PFormat`.

    Returns
    -------
    AttentionOutput
        `out` like q_latent but in the accumulation dtype (a partial is not rounded), `lse`
        [batch, s_q, heads].
    """
    check_p_format(p_format)
    batch, s_q, heads, width = q_latent.shape
    device, wide = q_latent.device, accumulation_dtype(q_latent.dtype)
    length = torch.tensor(lengths, dtype=torch.int64, device=device)
    last_visible = last_visible_token(length, s_q, heads, causal=causal)

    state = initial_state(batch, s_q * heads, width, dtype=wide, device=device)
    longest = max(lengths, default=0)
    end = longest if last_token is None else min(last_token, longest)
    for start in range(first_token, end, block_tokens):
        # Cut where the caller says, not where the longest request ends: a row's bits are its own.
        stop = start + block_tokens if last_token is None else min(start + block_tokens, last_token)
        positions = torch.arange(start, stop, device=device)
        block = read_block(positions)
        hidden = positions > last_visible[..., None]
        absent = positions >= length[:, None]  # [batch, block]; NaN may stand there
        state = apply_block(
            state,
            QuantizedBlock(
                block.scores.masked_fill(hidden, -math.inf).to(wide),
                block.codes.masked_fill(absent[..., None], 0.0).to(wide),
                block.scale.masked_fill(absent, 0.0).to(wide),
            ),
            p_format=p_format,
        )
    out, lse = finish(state)
    return AttentionOutput(out.view(q_latent.shape), lse.view(batch, s_q, heads))


def merge_partials(
    outs: Float[Tensor, "splits *rows width"], lses: Float[Tensor, "splits ..."]
) -> AttentionOutput:
    """Join attention over disjoint sets of keys; (0, -inf) is the identity.

    Parameters
    ----------
    outs, lses
        Partial outputs, each normalised by its own denominator, and natural lse.

    Returns
    -------
    AttentionOutput
        ``out = sum of outs * exp(lses - lse)`` with ``lse = logsumexp(lses)``.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse))
    # An empty partial has weight 0 and is not read: whatever stands in it, NaN too, stays there.
    outs = outs.masked_fill((weights == 0.0)[..., None], 0.0)
    return AttentionOutput((weights[..., None] * outs).sum(dim=0), lse)

"""Four ways to place the scales that look right, kept apart to be run and seen failing.

Never import this to compute attention: nothing else in the project does. Each function takes a
whole sequence, and its docstring says which input shows the damage;
`tests/stage2/test_wrong_ways.py` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput
from stage1_quant.e4m3 import decode_e4m3, encode_e4m3
from stage2_pv_pipeline.rescaled_pv import (
    BLOCK_TOKENS,
    PipelineState,
    QuantizedBlock,
    apply_block,
    finish,
    initial_state,
)


def split_blocks(whole: QuantizedBlock) -> list[QuantizedBlock]:
    """Cut a sequence into blocks of `BLOCK_TOKENS`."""
    return [
        QuantizedBlock(scores, codes, scale)
        for scores, codes, scale in zip(
            whole.scores.split(BLOCK_TOKENS, dim=-1),
            whole.codes.split(BLOCK_TOKENS, dim=1),
            whole.scale.split(BLOCK_TOKENS, dim=-1),
            strict=True,
        )
    ]


def _start(whole: QuantizedBlock) -> PipelineState:
    batch, rows, _ = whole.scores.shape
    return initial_state(
        batch, rows, whole.codes.shape[-1], dtype=torch.float32, device=whole.scores.device
    )


def right_way(whole: QuantizedBlock) -> AttentionOutput:
    """Run the pipeline itself, for comparison."""
    state = _start(whole)
    for block in split_blocks(whole):
        state = apply_block(state, block)
    return finish(state)


def without_value_scale(whole: QuantizedBlock) -> AttentionOutput:
    """Leave V's scale out: codes are taken for values.

    Smallest input: two tokens of equal score whose scales differ. Output mixes 448 with 448
    instead of the values 1 and 3.
    """
    state = _start(whole)
    for block in split_blocks(whole):
        state = apply_block(state, block._replace(scale=torch.ones_like(block.scale)))
    return finish(state)


def largest_scale_of_the_block(whole: QuantizedBlock) -> AttentionOutput:
    """Take V's scale out of the product as the block's largest.

    Smallest input: the same two tokens. A token with a small scale counts as if it had the
    neighbour's: the error is the ratio of the scales, not a rounding.
    """
    state = _start(whole)
    for block in split_blocks(whole):
        largest = block.scale.amax(dim=-1, keepdim=True).expand_as(block.scale)
        state = apply_block(state, block._replace(scale=largest))
    return finish(state)


def cast_without_a_scale(whole: QuantizedBlock) -> AttentionOutput:
    """Cast P to e4m3 as it is, V dequantised.

    Smallest input: one key at logit 0, 4095 at -7, V = 1. exp(-7) is below half of e4m3's smallest
    subnormal, 2^-10, and becomes 0, while the denominator keeps it: the output is 0.21 instead of 1
    and lse is perfect.
    """
    scores = whole.scores
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    values = whole.codes * whole.scale[..., None]
    cast = decode_e4m3(encode_e4m3(p.float()))
    return AttentionOutput(cast @ values / p.sum(dim=-1, keepdim=True), lse)


def out_of_order(whole: QuantizedBlock, order: Sequence[int]) -> AttentionOutput:
    """Let two workers add their tiles to O in another order than they rescaled it.

    Smallest input: two blocks with values 16 and 1, added in the order 1, 0. Each tile is in units
    of its own sigma, and each ratio leads from one sigma to the next; exchanged, the second tile is
    multiplied by the first one's ratio (0, as nothing came before it) and the first is read in the
    second's unit: 0.5 instead of 8.5. This is what the paper's order-enforced pipeline prevents.

    Parameters
    ----------
    whole
        The sequence.
    order
        In which tiles are added; ``range(blocks)`` is right.
    """
    blocks = split_blocks(whole)
    states = [_start(whole)]
    for block in blocks:
        states.append(apply_block(states[-1], block))
    accumulator = states[0].accumulator
    for index in order:
        before, after = states[index], states[index + 1]
        ratio = _ratio(before, after)
        tile = after.accumulator - before.accumulator * ratio
        accumulator = accumulator * ratio + tile
    return finish(states[-1]._replace(accumulator=accumulator))


def _ratio(before: PipelineState, after: PipelineState) -> Float[Tensor, "batch rows 1"]:
    """Recompute the factor between two states' accumulators."""
    decay = torch.exp2(before.max_log2 - after.max_log2)
    return (decay * (before.sigma / after.sigma))[..., None]

"""Answers for stage 2."""

from __future__ import annotations

import torch
from torch import Tensor

from stage1_quant import E4M3_MAX, decode_e4m3, encode_e4m3
from stage2_pv_pipeline.tensor_core_accumulator import tensor_core_product


def fuse_and_quantize(p: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Put the scale into the operand, since it cannot go in front of the sum."""
    u = p * scale
    sigma = u.amax(-1) / E4M3_MAX
    return decode_e4m3(encode_e4m3(u / sigma[:, None])), sigma


def rescaled_step(
    state: tuple[Tensor, Tensor, Tensor, Tensor], scores: Tensor, codes: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dequantisation is the ratio of two sigmas inside the online softmax's own rescale."""
    old_max, denominator, accumulator, old_sigma = state
    new_max = torch.maximum(old_max, scores.amax(-1))
    decay = torch.exp(old_max - new_max)
    p = torch.exp(scores - new_max[:, None])
    p8, sigma = fuse_and_quantize(p, scale)
    ratio = decay * old_sigma / sigma
    return (
        new_max,
        denominator * decay + p.sum(-1),
        accumulator * ratio[:, None] + p8 @ codes,
        sigma,
    )


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh by exp(lse - total); replace what has no weight before it is multiplied."""
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse))
    read = outs.masked_fill((weights == 0.0)[..., None], 0.0)
    return (weights[..., None] * read).sum(0), lse


def promoted(p: Tensor, codes: Tensor, promote_every: int) -> Tensor:
    """Short accumulations on the tensor core, long ones in float32."""
    total = torch.zeros(p.shape[0], codes.shape[1])
    for start in range(0, p.shape[1], promote_every):
        part = slice(start, start + promote_every)
        total = total + tensor_core_product(p[:, part], codes[part]).float()
    return total

"""Rotary position embedding, with angles that stay exact however the model is cast.

Each pair of elements is turned by ``position * frequency``. At position 16,000 a BF16 number has
steps of 64, so an angle computed in BF16 is noise; in float32 an angle of 10^5 radians is already
off by up to 0.004. Angles are therefore formed in float64 and only cos and sin, whose absolute
error is what enters the product, are rounded to float32. Nothing here is a module buffer: casting
the decoder to BF16 cannot reach the tables.

One layout: every rotated vector in this project, in the cache too, holds the first elements of all
pairs and then the second elements, ``(x_0, x_1, ...), (y_0, y_1, ...)``. Checkpoints whose
projections emit adjacent pairs ``x_0, y_0, x_1, y_1, ...`` (`rope_interleave`) are re-ordered on
the way in, queries and keys alike, which leaves every score unchanged.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.model_config import RopeConfig


class Rotation(NamedTuple):
    """Cosine and sine of every pair's angle for some tokens, f32 [..., qk_rope_head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def rotary_frequencies(rope: RopeConfig, rotary_dim: int) -> Float[Tensor, " pairs"]:
    """Angle per position of each rotary pair, float64 radians.

    Parameters
    ----------
    rope
        Base and stretching.
    rotary_dim
        qk_rope_head_dim: even, 0 allowed.

    Returns
    -------
    Tensor
        ``theta^(-2 i / rotary_dim)``, stretched as `rope` says.

    References
    ----------
    YaRN (arXiv 2309.00071), section 3.2: frequencies that turn more than `beta_fast` times over
    the pretrained context are kept, those below `beta_slow` turns are divided by the factor,
    with a linear ramp over the dimensions between. LongRoPE (arXiv 2402.13753), section 3.2: each
    pair has a divisor of its own, found by search.
    """
    if rotary_dim == 0:
        return torch.zeros(0, dtype=torch.float64)
    pair = torch.arange(rotary_dim // 2, dtype=torch.float64)
    kept = rope.theta ** (-2.0 * pair / rotary_dim)
    if rope.rope_type == "default":
        return kept
    if rope.rope_type == "longrope":
        return kept / torch.tensor(rope.pair_factors, dtype=torch.float64)
    interpolated = kept / rope.factor
    if rope.rope_type == "linear":
        return interpolated

    def pair_with(turns: float) -> float:
        """Pair index, as a real number, that turns `turns` times over the pretrained context."""
        wavelength = rope.original_max_position_embeddings / (turns * 2.0 * math.pi)
        return rotary_dim * math.log(wavelength) / (2.0 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without 0 / 0
    interpolate = ((pair - low) / (high - low)).clamp(0.0, 1.0)
    return kept * (1.0 - interpolate) + interpolated * interpolate


def query_scale(
    rope: RopeConfig, positions: Int[Tensor, " *tokens"]
) -> Float[Tensor, " *tokens"] | None:
    """Factor on each token's whole query, f32; None where queries do not grow with the position.

    ``1 + beta ln(1 + floor(position / original_max_position_embeddings))``: as the context grows,
    a softmax over more keys flattens, and larger queries sharpen it again.
    """
    if not rope.llama_4_scaling_beta:
        return None
    contexts = (positions // rope.original_max_position_embeddings).to(torch.float64)
    return (1.0 + rope.llama_4_scaling_beta * torch.log1p(contexts)).float()


class RotaryEmbedding:
    """Turns positions into cos and sin. Not a module: `.to(bfloat16)` must not reach it.

    Parameters
    ----------
    rope
        Base and stretching.
    rotary_dim
        qk_rope_head_dim.
    """

    def __init__(self, rope: RopeConfig, rotary_dim: int) -> None:
        self.amplitude = rope.amplitude
        self.frequencies = rotary_frequencies(rope, rotary_dim)

    def rotation(self, positions: Int[Tensor, " *tokens"]) -> Rotation:
        """Cos and sin for token positions (0-based), f32 [*tokens, qk_rope_head_dim / 2]."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions.to(torch.float64)[..., None] * self.frequencies
        return Rotation(
            cos=(angles.cos() * self.amplitude).float(),
            sin=(angles.sin() * self.amplitude).float(),
        )


def apply_rotary(
    x: Float[Tensor, "*tokens rotary_dim"], rotation: Rotation, *, interleaved: bool
) -> Float[Tensor, "*tokens rotary_dim"]:
    """Rotate every pair of `x` by its token's angles.

    Parameters
    ----------
    x
        Vectors whose pairs are adjacent elements if `interleaved`, else (i, i + rotary_dim / 2).
    rotation
        Cos and sin that broadcast against ``[*tokens, rotary_dim / 2]``.
    interleaved
        Layout of `x`.

    Returns
    -------
    Tensor
        Rotated vectors in `x`'s dtype, always in the halves layout of this module's docstring.
        Computed in float32 (float64 for float64 input).
    """
    if x.shape[-1] == 0:
        return x
    wide = x.double() if x.dtype == torch.float64 else x.float()
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = torch.cat(
        (
            first * rotation.cos - second * rotation.sin,
            second * rotation.cos + first * rotation.sin,
        ),
        dim=-1,
    )
    return turned.to(x.dtype)

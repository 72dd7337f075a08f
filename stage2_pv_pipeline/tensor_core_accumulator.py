"""What Hopper's FP8 tensor core loses when O is kept in its accumulator, and what promotion saves.

The obvious fast way keeps O in the tensor core across tiles: each tile's P @ V is added inside. On
Hopper that addition is not float32. In each step of 32 products all addends, the accumulator
among them, are aligned to the largest exponent and cut to about 14 bits. A product below 2^-13 of
what is already summed vanishes, and what is kept is cut towards zero, so that the loss has a
sign and grows with the number of tokens. Data around zero hides it; flat attention over positive
values shows it.

This module is a model of that accumulator in exact arithmetic, and three policies over it: never
promoted, promoted to float32 every so many tokens, promoted every tile. The pipeline of
`rescaled_pv.py` starts every tile from zero and adds it to O in float32: the third policy.

References
----------
DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, on the accumulation precision of FP8 products and
promotion; https://github.com/deepseek-ai/DeepGEMM/issues/37.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from stage1_quant.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3

STEP_PRODUCTS = 32
"""Products added at once: the K of one FP8 wgmma instruction."""

FRACTION_BITS = 13
"""Bits kept below the leading one of the largest addend."""


def tensor_core_product(
    p: Float[Tensor, "rows tokens"],
    codes: Float[Tensor, "tokens width"],
    accumulator: Float[Tensor, "rows width"] | None = None,
    *,
    fraction_bits: int = FRACTION_BITS,
) -> Float[Tensor, "rows width"]:
    """``accumulator + p @ codes`` as the FP8 tensor core adds it.

    Parameters
    ----------
    p, codes
        Values of e4m3 codes, float64.
    accumulator
        What the product is added to; zero if not given.
    fraction_bits
        See `FRACTION_BITS`.

    Returns
    -------
    Tensor
        Float64 holding what the accumulator holds.

    Notes
    -----
    For each step, with E the exponent of the largest addend and q = 2^(E - fraction_bits)::

        accumulator = q * (trunc(accumulator / q) + sum over the step of trunc(product / q))
    """
    if accumulator is None:
        accumulator = p.new_zeros(p.shape[0], codes.shape[1])
    for start in range(0, p.shape[1], STEP_PRODUCTS):
        step = slice(start, start + STEP_PRODUCTS)
        products = p[:, step, None] * codes[None, step]  # [rows, step, width]
        addends = torch.cat((accumulator[:, None], products), dim=1)
        _, exponent = torch.frexp(addends.abs().amax(dim=1, keepdim=True))  # in [0.5, 1) * 2^e
        quantum = torch.ldexp(torch.ones_like(addends[:, :1]), exponent - 1 - fraction_bits)
        accumulator = ((addends / quantum).trunc() * quantum).sum(dim=1)
    return accumulator


def promoted_product(
    p: Float[Tensor, "rows tokens"],
    codes: Float[Tensor, "tokens width"],
    *,
    promote_every: int | None,
    fraction_bits: int = FRACTION_BITS,
) -> Float[Tensor, "rows width"]:
    """``p @ codes`` with the accumulator emptied into float32 every `promote_every` tokens.

    None never promotes: one accumulator for all tokens.
    """
    if promote_every is None:
        return tensor_core_product(p, codes, fraction_bits=fraction_bits)
    total = torch.zeros(p.shape[0], codes.shape[1], dtype=torch.float32)
    for start in range(0, p.shape[1], promote_every):
        part = slice(start, start + promote_every)
        tile = tensor_core_product(p[:, part], codes[part], fraction_bits=fraction_bits)
        total = total + tile.float()
    return total.double()


@dataclasses.dataclass(frozen=True)
class Drift:
    """Relative bias of O for one kind of data and policy: ``sum(O - exact) / sum(exact)``."""

    kind: str
    tokens: int
    promote_every: int | None
    bias: float


KINDS = ("flat, V = 1", "flat, V = 1 + N(0, 0.5)", "one heavy key", "peaked")


def draw_case(
    kind: str, tokens: int, *, columns: int = 64, seed: int = 0
) -> tuple[Float[Tensor, "rows tokens"], Float[Tensor, "tokens width"]]:
    """P and V of one query row as the pipeline would quantise them, in one unit for all tokens.

    "flat" rows weigh all tokens alike. "one heavy key" is flat over one value of 1 among values of
    2^-9. "peaked" weighs half of the tokens 2^-6 of the first half, with V as in the second kind.
    A token's scale comes from a latent 512 wide, of which `columns` are given back.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(tokens, dtype=torch.float64)
    if kind == "flat, V = 1":
        values = torch.ones(tokens, 1, dtype=torch.float64)
    elif kind == "one heavy key":
        values = torch.full((tokens, 1), 2.0**-9, dtype=torch.float64)
        values[0] = 1.0
    elif kind in ("flat, V = 1 + N(0, 0.5)", "peaked"):
        values = 1 + 0.5 * torch.randn(tokens, 512, generator=generator, dtype=torch.float64)
        if kind == "peaked":
            weights[tokens // 2 :] = 2.0**-6
    else:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    scale = values.abs().amax(dim=-1) / E4M3_MAX
    values = values[:, :columns]
    codes = decode_e4m3(encode_e4m3((values / scale[:, None]).float())).double()
    u = weights * scale
    p = decode_e4m3(encode_e4m3((u / (u.max() / E4M3_MAX)).float())).double()
    return p[None], codes


def drift(
    kind: str, tokens: int, promote_every: int | None, *, fraction_bits: int = FRACTION_BITS
) -> Drift:
    """Bias of the product under a policy, against the exact sum of the same quantised operands."""
    p, codes = draw_case(kind, tokens)
    got = promoted_product(p, codes, promote_every=promote_every, fraction_bits=fraction_bits)
    exact = p @ codes
    return Drift(kind, tokens, promote_every, float((got - exact).sum() / exact.sum()))


def accumulation_error_bound(
    magnitude: Float[Tensor, "rows width"],
    tokens: int,
    promote_every: int | None,
    *,
    fraction_bits: int = FRACTION_BITS,
) -> Float[Tensor, "rows width"]:
    """Largest error of a policy, for any operands.

    Parameters
    ----------
    magnitude
        Sum of the products' magnitudes, ``p.abs() @ codes.abs()``.
    tokens
        Products per output element.
    promote_every
        As `promoted_product`.

    Notes
    -----
    One step cuts 33 addends, each by less than q = 2^(E - fraction_bits), and 2^E is at most the
    largest addend, hence at most M, the sum of magnitudes since the accumulator was empty, plus
    what cutting can have added (nothing: cutting shrinks). A tile of T tokens has T / 32 steps:

        error of a tile <= 33 ceil(T / 32) 2^-fraction_bits M_tile

    Tiles add up, and so do their M: promoted every T tokens, the error is at most
    33 ceil(T / 32) 2^-13 of M *whatever the length* (0.8% for T = 64); never promoted, T is the
    length and the bound passes 100% at 7,944 tokens. Adding tiles in float32 costs one rounding
    (2^-24) of at most M each.
    """
    per_tile = tokens if promote_every is None else min(promote_every, tokens)
    steps = -(-per_tile // STEP_PRODUCTS)
    tiles = 0 if promote_every is None else -(-tokens // promote_every)
    cut = (STEP_PRODUCTS + 1) * steps * 2.0**-fraction_bits
    return magnitude * (cut + 2 * tiles * 2.0**-24)


def aligned_score(
    q_codes: Float[Tensor, "rows kv_lora_rank"],
    k_codes: Float[Tensor, "tokens kv_lora_rank"],
    rope_score: Float[Tensor, "rows tokens"],
    *,
    rope_first: bool,
) -> Float[Tensor, "rows tokens"]:
    """Score in the scaled domain with the rotary product before or after the latent one.

    Rope first, the FP8 latent products are aligned to an accumulator that already holds the rotary
    score, and those below 2^-13 of it are lost. Latent first, they meet only each other, and the
    BF16 rotary product is then added in float32.
    """
    if rope_first:
        return tensor_core_product(q_codes, k_codes.T, rope_score)
    return tensor_core_product(q_codes, k_codes.T) + rope_score

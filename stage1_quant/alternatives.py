"""Other ways to shrink the cache, a few lines each, to be measured beside per-token e4m3.

Each is a *round trip*: latents and rotary keys go in, what a reader would get back comes out. That
is all an accuracy comparison needs. What it hides is the price of appending, which `append` states
for each: a scale that is shared by several tokens is not known when the first of them arrives.
Round trips get all tokens at once, so formats with shared scales are judged in hindsight, at
their best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.latent_attention import AttentionOutput, latent_attention
from stage0_reference.latent_cache import Bf16LatentPages, LatentRows, check_table, gather_packed
from stage1_quant.e4m3 import decode_e4m3, encode_e4m3
from stage1_quant.quantize import (
    SMALLEST_SCALE,
    ScaleFormat,
    dequantize_rows,
    divide,
    quantize_rows,
    token_scale,
)

E5M2_MAX = torch.finfo(torch.float8_e5m2).max
INT8_MAX = torch.iinfo(torch.int8).max
BLOCK_TOKENS = 64
TILE_CHANNELS = 128

AT_ONCE = "nothing: the token's own scale is known when it arrives"


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """One way to store latents and rotary keys.

    Attributes
    ----------
    name
        Short, for tables.
    idea
        What is shared and what is kept.
    round_trip
        Latents [tokens, kv_lora_rank] and rotary keys [tokens, qk_rope_head_dim], f32, to what a
        reader gets back.
    bytes_per_token
        At kv_lora_rank 512 and qk_rope_head_dim 64, one layer.
    append
        What appending one token costs.
    """

    name: str
    idea: str
    round_trip: Callable[[Tensor, Tensor], LatentRows]
    bytes_per_token: float
    append: str


def round_trip_e4m3(
    x: Float[Tensor, "*shape"], amax: Float[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """Quantise to e4m3 under the scale ``amax / 448`` and back; `amax` broadcasts against `x`."""
    scale = token_scale(amax, "amax")
    return decode_e4m3(encode_e4m3(x / scale)) * scale


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _in_bf16(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
    return LatentRows(_bf16(c_kv), _bf16(k_rope))


def _per_token(scale_format: ScaleFormat) -> Callable[[Tensor, Tensor], LatentRows]:
    def round_trip(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
        return dequantize_rows(quantize_rows(c_kv, k_rope, scale_format))

    return round_trip


def _one_row(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
    row = torch.cat((c_kv, k_rope), dim=-1)
    back = round_trip_e4m3(row, row.abs().amax(dim=-1, keepdim=True))
    return LatentRows(*back.split((c_kv.shape[-1], k_rope.shape[-1]), dim=-1))


def _one_row_per_tensor(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
    row = torch.cat((c_kv, k_rope), dim=-1)
    back = round_trip_e4m3(row, row.abs().amax())
    return LatentRows(*back.split((c_kv.shape[-1], k_rope.shape[-1]), dim=-1))


def _per_tensor(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
    return LatentRows(round_trip_e4m3(c_kv, c_kv.abs().amax()), _bf16(k_rope))


def _per_channel(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
    return LatentRows(round_trip_e4m3(c_kv, c_kv.abs().amax(dim=0)), _bf16(k_rope))


def _per_block(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
    blocks = [round_trip_e4m3(block, block.abs().amax()) for block in c_kv.split(BLOCK_TOKENS)]
    return LatentRows(torch.cat(blocks), _bf16(k_rope))


def _per_tile(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
    tiles = c_kv.split(TILE_CHANNELS, dim=-1)
    back = [round_trip_e4m3(tile, tile.abs().amax(dim=-1, keepdim=True)) for tile in tiles]
    return LatentRows(torch.cat(back, dim=-1), _bf16(k_rope))


def _e5m2(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
    amax = c_kv.abs().amax(dim=-1, keepdim=True)
    scale = divide(amax.clamp(min=E5M2_MAX * SMALLEST_SCALE), E5M2_MAX)
    codes = (c_kv / scale).clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)
    return LatentRows(codes.float() * scale, _bf16(k_rope))


def _int8(c_kv: Tensor, k_rope: Tensor) -> LatentRows:
    amax = c_kv.abs().amax(dim=-1, keepdim=True)
    scale = divide(amax.clamp(min=INT8_MAX * SMALLEST_SCALE), INT8_MAX)
    codes = (c_kv / scale).round().clamp(-INT8_MAX, INT8_MAX)
    return LatentRows(codes * scale, _bf16(k_rope))


FORMATS = (
    CacheFormat("bf16", "no quantisation", _in_bf16, 1152, "nothing"),
    CacheFormat(
        "token-amax", "e4m3, a scale a token, rope in BF16 (the paper)", _per_token("amax"), 644,
        AT_ONCE,
    ),
    CacheFormat(
        "token-pow2", "the same, scales rounded up to powers of two", _per_token("pow2"), 644,
        AT_ONCE,
    ),
    CacheFormat(
        "tile-1x128", "e4m3, a scale per token and 128 channels (FlashMLA's 656 bytes)", _per_tile,
        656, AT_ONCE,
    ),
    CacheFormat(
        "block-64", "e4m3, a scale per 64 tokens", _per_block, 512 + 4 / BLOCK_TOKENS + 128,
        "waits for its block in BF16, or requantises up to 63 tokens when the maximum grows",
    ),
    CacheFormat(
        "channel", "e4m3, a scale per channel over all tokens", _per_channel, 640,
        "a calibrated scale that may clip, or requantises the whole sequence; and a scale per "
        "channel must be multiplied into the query",
    ),
    CacheFormat(
        "tensor", "e4m3, one scale for all latents", _per_tensor, 640,
        "a calibrated scale that may clip, or requantises the whole sequence",
    ),
    CacheFormat(
        "one-row", "latent and rope in one e4m3 row, a scale a token (not RoPE-aware)", _one_row,
        580, AT_ONCE,
    ),
    CacheFormat(
        "one-row-tensor", "latent and rope in e4m3 under one scale for all", _one_row_per_tensor,
        576, "a calibrated scale that may clip, or requantises the whole sequence",
    ),
    CacheFormat("token-e5m2", "e5m2, a scale a token, rope in BF16", _e5m2, 644, AT_ONCE),
    CacheFormat("token-int8", "INT8, a scale a token, rope in BF16", _int8, 644, AT_ONCE),
)  # fmt: skip


class RoundTripBackend(AbsorbedBackend):
    """Stage 0's backend that sees its cache through a format's round trip.

    For measuring accuracy only: it quantises the whole sequence anew at every call.

    Parameters
    ----------
    cache_format
        One of `FORMATS`.
    """

    stage = 1

    def __init__(self, cache_format: CacheFormat) -> None:
        super().__init__()
        self.cache_format = cache_format
        self.description = f"exact attention over rows read back from {cache_format.name}"

    def attend(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: Bf16LatentPages,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        softmax_scale: float,
        *,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend over what the format gives back of each request's tokens."""
        lengths = check_table(block_table, cache_seqlens, *cache.c_kv.shape[:2])
        results = []
        for request, length in enumerate(lengths):
            rows = gather_packed(cache, block_table[request : request + 1], [length])
            back = self.cache_format.round_trip(*(part.float() for part in rows))
            results.append(
                latent_attention(
                    q_latent[request], q_rope[request], *back, softmax_scale, causal=causal
                )
            )
        return AttentionOutput(*(torch.stack(parts) for parts in zip(*results, strict=True)))

"""What the fused write kernels mean, in plain PyTorch: composed from stages 0 and 1."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_cache import Bf16LatentPages, write_rows
from stage0_reference.rope import Rotation, apply_rotary
from stage1_quant import fp8_latent_cache, quantize
from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import DEFAULT_SCALE_FORMAT, QuantizedRows, ScaleFormat


def fused_q_quant_reference(
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
    rotation: Rotation | None = None,
    *,
    interleaved: bool = False,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> QuantizedRows:
    """Rotate the rotary query, then quantise."""
    if rotation is not None:
        per_head = Rotation(*(part[..., None, :] for part in rotation))
        q_rope = apply_rotary(q_rope, per_head, interleaved=interleaved)
    return quantize.quantize_q(q_latent, q_rope, scale_format)


def fused_k_append_reference(
    c_kv: Float[Tensor, "tokens kv_lora_rank"],
    k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
    cache: LatentPages | Bf16LatentPages,
    slot_mapping: Int[Tensor, " tokens"],
    *,
    norm_weight: Float[Tensor, " kv_lora_rank"] | None = None,
    norm_eps: float = 1e-6,
    rotation: Rotation | None = None,
    interleaved: bool = False,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> None:
    """Normalise the latent, rotate the rotary key, quantise for an FP8 cache, write."""
    if norm_weight is not None:
        normed = F.rms_norm(c_kv.float(), norm_weight.shape, norm_weight.float(), norm_eps)
        c_kv = normed.to(c_kv.dtype)
    if rotation is not None:
        k_rope = apply_rotary(k_rope, rotation, interleaved=interleaved)
    if len(cache) == 2:
        write_rows(cache, (c_kv, k_rope), slot_mapping)
        return
    fp8_latent_cache.append_kv(c_kv, k_rope, cache, slot_mapping, scale_format=scale_format)

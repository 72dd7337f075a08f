"""Attention over latents, two ways that are equal in exact arithmetic.

MLA caches one latent ``c_kv`` and one rotary key ``k_rope`` per token, shared by all heads. With
``W_UK`` and ``W_UV`` the two halves of ``kv_b_proj`` (per head), head h of a query scores token t

    score[h, t] = (q_nope[h] . (W_UK[h] c_kv[t]) + q_rope[h] . k_rope[t]) * softmax_scale
    out[h]      = sum over t of softmax(score[h])[t] * (W_UV[h] c_kv[t])

*Naive*: expand every token's K and V per head, as the formula reads. Cheap per query, dear per
cached token: right for prefill, where many queries share one expansion.

*Absorbed*: move the matrices to the query's side, ``q_latent[h] = W_UK[h]^T q_nope[h]``, and leave
the output in latent space, ``out[h] = W_UV[h] out_latent[h]``. Every head now reads the same
cached row: multi-query attention with a key kv_lora_rank + qk_rope_head_dim wide and a value that
is the same memory. Right for decode, where the cache is what must be read. The later stages are
about making exactly this product fast.

Both take one request, without paging or batching. All arithmetic is in float32, or float64 where
the inputs are.

References
----------
DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class AttentionOutput(NamedTuple):
    """Result of attention.

    Attributes
    ----------
    out
        Weighted values, one row per query and head; 0 where nothing is visible.
    lse
        Natural logarithm of the softmax denominator, f32 (f64 for float64 inputs); -inf where
        nothing is visible.
    """

    out: Tensor
    lse: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 for float64 inputs, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def causal_mask(
    s_q: int, length: int, *, causal: bool = True, device: torch.device | None = None
) -> Bool[Tensor, "s_q length"]:
    """Which keys each query may see: query i the keys before ``length - s_q + i + 1``."""
    if not causal:
        return torch.ones(s_q, length, dtype=torch.bool, device=device)
    last_visible = torch.arange(s_q, device=device)[:, None] + (length - s_q)
    return torch.arange(length, device=device)[None, :] <= last_visible


def masked_softmax(
    scores: Float[Tensor, "*rows length"], visible: Bool[Tensor, "*#rows length"]
) -> tuple[Float[Tensor, "*rows length"], Float[Tensor, " *rows"]]:
    """Softmax over the visible keys and its log-denominator; a row that sees none gives 0, -inf."""
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # exp(score - lse), with lse = -inf replaced so that an empty row gives exp(-inf) = 0.
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    return weights, lse


def naive_attention(
    q_nope: Float[Tensor, "s_q heads qk_nope_head_dim"],
    q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
    c_kv: Float[Tensor, "length kv_lora_rank"],
    k_rope: Float[Tensor, "length qk_rope_head_dim"],
    w_uk: Float[Tensor, "heads qk_nope_head_dim kv_lora_rank"],
    w_uv: Float[Tensor, "heads v_head_dim kv_lora_rank"],
    softmax_scale: float,
    *,
    causal: bool = True,
) -> AttentionOutput:
    """Multi-head attention over keys and values expanded from the latents.

    Parameters
    ----------
    q_nope, q_rope
        The last s_q tokens' queries; the rotary part already rotated.
    c_kv, k_rope
        All tokens' latents (normed) and rotary keys (rotated), the queries' own tokens last.
    w_uk, w_uv
        The two halves of kv_b_proj, per head.
    softmax_scale
        Factor on the scores (`ModelConfig.softmax_scale`).
    causal
        Query i sees the keys before ``length - s_q + i + 1``; otherwise all keys.

    Returns
    -------
    AttentionOutput
        `out` [s_q, heads, v_head_dim] in q_nope's dtype, `lse` [s_q, heads].
    """
    wide = accumulation_dtype(q_nope.dtype)
    latents = c_kv.to(wide)
    k_nope = torch.einsum("tc,hdc->htd", latents, w_uk.to(wide))  # [heads, length, nope]
    values = torch.einsum("tc,hdc->htd", latents, w_uv.to(wide))  # [heads, length, v_head_dim]
    scores = torch.einsum("qhd,htd->hqt", q_nope.to(wide), k_nope)
    scores = scores + torch.einsum("qhd,td->hqt", q_rope.to(wide), k_rope.to(wide))
    visible = causal_mask(len(q_nope), len(c_kv), causal=causal, device=c_kv.device)
    weights, lse = masked_softmax(scores * softmax_scale, visible)  # [heads, s_q, length]
    out = torch.einsum("hqt,htd->qhd", weights, values)
    return AttentionOutput(out.to(q_nope.dtype), lse.T)


def absorb_query(
    q_nope: Float[Tensor, "*tokens heads qk_nope_head_dim"],
    w_uk: Float[Tensor, "heads qk_nope_head_dim kv_lora_rank"],
) -> Float[Tensor, "*tokens heads kv_lora_rank"]:
    """Move W_UK to the query's side: ``q_latent[h] = W_UK[h]^T q_nope[h]``."""
    return torch.einsum("...hd,hdc->...hc", q_nope, w_uk)


def project_values(
    out_latent: Float[Tensor, "*tokens heads kv_lora_rank"],
    w_uv: Float[Tensor, "heads v_head_dim kv_lora_rank"],
) -> Float[Tensor, "*tokens heads v_head_dim"]:
    """Leave latent space: ``out[h] = W_UV[h] out_latent[h]``."""
    return torch.einsum("...hc,hdc->...hd", out_latent, w_uv)


def latent_attention(
    q_latent: Float[Tensor, "s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
    c_kv: Float[Tensor, "length kv_lora_rank"],
    k_rope: Float[Tensor, "length qk_rope_head_dim"],
    softmax_scale: float,
    *,
    causal: bool = True,
) -> AttentionOutput:
    """Multi-query attention in latent space: the value of a token is its latent.

    Parameters and returns as `naive_attention`, except that the query is absorbed (`q_latent`)
    and `out` stays latent, [s_q, heads, kv_lora_rank].
    """
    wide = accumulation_dtype(q_latent.dtype)
    latents = c_kv.to(wide)
    scores = torch.einsum("qhc,tc->qht", q_latent.to(wide), latents)
    scores = scores + torch.einsum("qhd,td->qht", q_rope.to(wide), k_rope.to(wide))
    visible = causal_mask(len(q_latent), len(c_kv), causal=causal, device=c_kv.device)
    weights, lse = masked_softmax(scores * softmax_scale, visible[:, None, :])
    return AttentionOutput(torch.einsum("qht,tc->qhc", weights, latents).to(q_latent.dtype), lse)


def absorbed_attention(
    q_nope: Float[Tensor, "s_q heads qk_nope_head_dim"],
    q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
    c_kv: Float[Tensor, "length kv_lora_rank"],
    k_rope: Float[Tensor, "length qk_rope_head_dim"],
    w_uk: Float[Tensor, "heads qk_nope_head_dim kv_lora_rank"],
    w_uv: Float[Tensor, "heads v_head_dim kv_lora_rank"],
    softmax_scale: float,
    *,
    causal: bool = True,
) -> AttentionOutput:
    """Attend without expanding a single key; signature and result of `naive_attention`."""
    latent = latent_attention(
        absorb_query(q_nope, w_uk), q_rope, c_kv, k_rope, softmax_scale, causal=causal
    )
    return AttentionOutput(project_values(latent.out, w_uv), latent.lse)

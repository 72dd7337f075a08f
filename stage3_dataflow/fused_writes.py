"""The write side: quantise a query, append tokens to the cache. One launch each.

`quantize_q` and `append_kv` take what has been normed and rotated already. `fused_q_quant` and
`fused_k_append` do that too, in the same pass over memory.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_cache import Bf16LatentPages
from stage0_reference.rope import Rotation
from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import (
    DEFAULT_SCALE_FORMAT,
    QuantizedRows,
    ScaleFormat,
    check_scale_format,
)
from stage3_dataflow import custom_ops
from stage3_dataflow.arguments import (
    INDEX_DTYPES,
    QUERY_DTYPES,
    AcceptedGeometries,
    check_no_alias,
    check_tensor,
    check_widths,
    geometry_of,
)
from stage3_dataflow.execution_path import which_path
from stage3_dataflow.write_references import fused_k_append_reference, fused_q_quant_reference


def quantize_q(
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
    *,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> QuantizedRows:
    """Quantise absorbed, rotated queries per token and head. See `fused_q_quant`."""
    return fused_q_quant(q_latent, q_rope, scale_format=scale_format)


def fused_q_quant(
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
    rotation: Rotation | None = None,
    *,
    interleaved: bool = False,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> QuantizedRows:
    """Rotate the rotary query, quantise the latent query, align the rotary part to its scale.

    Parameters
    ----------
    q_latent, q_rope
        Absorbed query and rotary query; bf16, f16 or f32, strided views welcome (last axis
        contiguous).
    rotation
        Cos and sin per query token, f32 [batch, s_q, qk_rope_head_dim / 2]; None if `q_rope` is
        rotated already.
    interleaved
        Whether `q_rope` holds adjacent pairs; the result has the halves layout either way.
    scale_format
        "amax" or "pow2", see `stage1_quant.quantize.token_scale`.

    Returns
    -------
    QuantizedRows
        codes float8_e4m3fn [batch, s_q, heads, kv_lora_rank], scale f32 [batch, s_q, heads] and
        rope bf16 [batch, s_q, heads, qk_rope_head_dim], the same bytes as stage 1's.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        A dtype, shape or width outside the above, by argument name, before any launch.

    References
    ----------
    SnapMLA (arXiv 2602.10718), section 3.3 (Fused-Q-Quant).

    Examples
    --------
    >>> import torch
    >>> query = fused_q_quant(torch.ones(1, 1, 2, 512), torch.ones(1, 1, 2, 64))
    >>> query.codes.dtype, query.scale.shape
    (torch.float8_e4m3fn, torch.Size([1, 1, 2]))
    """
    if custom_ops.is_capturing():
        return custom_ops.fused_q_quant(
            q_latent, q_rope, rotation, interleaved=interleaved, scale_format=scale_format
        )
    check_scale_format(scale_format)
    geometry = geometry_of(q_latent, q_rope, rotation)
    if geometry not in _accepted_queries:
        _check_query(q_latent, q_rope, rotation)
        _accepted_queries.add(geometry)
    batch, s_q, heads, latent = q_latent.shape
    rope, device = q_rope.shape[-1], q_latent.device
    if which_path(device).name == "pytorch":
        return fused_q_quant_reference(
            q_latent, q_rope, rotation, interleaved=interleaved, scale_format=scale_format
        )
    check_widths(latent, rope)
    leading = (batch, s_q, heads)
    result = QuantizedRows(
        torch.empty(*leading, latent, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(leading, dtype=torch.float32, device=device),
        torch.empty(*leading, rope, dtype=torch.bfloat16, device=device),
    )
    if result.scale.numel():
        from stage3_dataflow.kernels.launch import launch_fused_q_quant

        launch_fused_q_quant(
            q_latent,
            q_rope,
            rotation,
            result,
            interleaved=interleaved,
            pow2=scale_format == "pow2",
        )
    return result


def append_kv(
    c_kv: Float[Tensor, "tokens kv_lora_rank"],
    k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
    cache: LatentPages,
    slot_mapping: Int[Tensor, " tokens"],
    *,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> None:
    """Quantise normed, rotated tokens and write all three planes. See `fused_k_append`."""
    fused_k_append(c_kv, k_rope, cache, slot_mapping, scale_format=scale_format)


def fused_k_append(
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
    """Normalise, rotate, quantise and align tokens, and write them into their slots.

    Parameters
    ----------
    c_kv, k_rope
        Latents and rotary keys; bf16, f16 or f32, rows may be strided.
    cache
        The planes to write, FP8 or BF16; views of larger buffers are welcome.
    slot_mapping
        ``page * page_size + offset`` per token, int32 or int64. A negative slot writes nothing.
    norm_weight, norm_eps
        Of the latent's RMSNorm; None if `c_kv` is normed already.
    rotation
        Cos and sin per token, f32 [tokens, qk_rope_head_dim / 2]; None if `k_rope` is rotated.
    interleaved
        Whether `k_rope` holds adjacent pairs.
    scale_format
        "amax" or "pow2".

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `fused_q_quant`; nothing is written then. A slot past the pool is refused on the CPU; on
        a GPU, where only the device could see it, it writes nothing.

    References
    ----------
    SnapMLA (arXiv 2602.10718), section 3.3 (Fused-K-Append).

    Examples
    --------
    >>> import torch
    >>> from stage1_quant.fp8_latent_cache import allocate_latent_pages
    >>> cache = allocate_latent_pages(2, 64, 512, 64)
    >>> append_kv(torch.ones(1, 512), torch.ones(1, 64), cache, torch.tensor([70]))
    >>> float(cache.codes[1, 6, 0].float() * cache.scale[1, 6])
    1.0
    """
    if custom_ops.is_capturing():
        custom_ops.fused_k_append(
            c_kv,
            k_rope,
            cache,
            slot_mapping,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            rotation=rotation,
            interleaved=interleaved,
            scale_format=scale_format,
        )
        return
    check_scale_format(scale_format)
    geometry = geometry_of(c_kv, k_rope, cache, slot_mapping, norm_weight, rotation)
    if geometry not in _accepted_tokens:
        _check_tokens(c_kv, k_rope, cache, slot_mapping, norm_weight, rotation)
        _accepted_tokens.add(geometry)
    tokens, latent = c_kv.shape
    rope, device = k_rope.shape[-1], c_kv.device
    for plane in cache:
        check_no_alias("cache", plane, {"c_kv": c_kv, "k_rope": k_rope})
    path = which_path(device).name
    if path == "pytorch":
        fused_k_append_reference(
            c_kv,
            k_rope,
            cache,
            slot_mapping,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            rotation=rotation,
            interleaved=interleaved,
            scale_format=scale_format,
        )
        return
    check_widths(latent, rope)
    if path == "interpreter":
        _check_slots(slot_mapping, cache)
    if tokens:
        from stage3_dataflow.kernels.launch import launch_fused_k_append

        launch_fused_k_append(
            c_kv,
            k_rope,
            cache,
            slot_mapping,
            norm_weight,
            norm_eps,
            rotation,
            interleaved=interleaved,
            pow2=scale_format == "pow2",
        )


_accepted_queries, _accepted_tokens = AcceptedGeometries(), AcceptedGeometries()


def _check_query(q_latent: Tensor, q_rope: Tensor, rotation: Rotation | None) -> None:
    check_tensor("q_latent", q_latent, QUERY_DTYPES, ("batch", "s_q", "heads", "kv_lora_rank"))
    batch, s_q, heads, _ = q_latent.shape
    shape = (batch, s_q, heads, "qk_rope_head_dim")
    check_tensor("q_rope", q_rope, QUERY_DTYPES, shape, device=q_latent.device)
    _check_rotation(rotation, (batch, s_q), q_rope)


def _check_tokens(
    c_kv: Tensor,
    k_rope: Tensor,
    cache: LatentPages | Bf16LatentPages,
    slot_mapping: Tensor,
    norm_weight: Tensor | None,
    rotation: Rotation | None,
) -> None:
    check_tensor("c_kv", c_kv, QUERY_DTYPES, ("tokens", "kv_lora_rank"))
    tokens, latent = c_kv.shape
    device = c_kv.device
    check_tensor("k_rope", k_rope, QUERY_DTYPES, (tokens, "qk_rope_head_dim"), device=device)
    check_planes(cache, latent, k_rope.shape[-1], device)
    check_tensor("slot_mapping", slot_mapping, INDEX_DTYPES, (tokens,), device=device)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, QUERY_DTYPES, (latent,), device=device)
    _check_rotation(rotation, (tokens,), k_rope)


def _check_rotation(rotation: Rotation | None, leading: tuple[int, ...], rope: Tensor) -> None:
    if rotation is None:
        return
    shape = (*leading, rope.shape[-1] // 2)
    for name, part in zip(("rotation.cos", "rotation.sin"), rotation, strict=True):
        check_tensor(name, part, (torch.float32,), shape, device=rope.device)


def check_planes(
    cache: LatentPages | Bf16LatentPages, latent: int, rope: int, device: torch.device
) -> None:
    """Refuse planes that do not belong together or to these widths."""
    anything: tuple[int | str, ...] = ("num_pages", "page_size")
    if len(cache) == 3:
        codes, scale, plane_rope = cache
        dtype = torch.float8_e4m3fn
        check_tensor("cache.codes", codes, (dtype,), (*anything, latent), device=device)
        pool = tuple(codes.shape[:2])
        check_tensor(
            "cache.scale", scale, (torch.float32,), pool, device=device, contiguous_last=False
        )
        check_tensor("cache.rope", plane_rope, (torch.bfloat16,), (*pool, rope), device=device)
    elif len(cache) == 2:
        c_kv, k_rope = cache
        check_tensor("cache.c_kv", c_kv, (torch.bfloat16,), (*anything, latent), device=device)
        pool = tuple(c_kv.shape[:2])
        check_tensor("cache.k_rope", k_rope, (torch.bfloat16,), (*pool, rope), device=device)
    else:
        raise ValueError(
            "cache must be LatentPages (codes, scale, rope) or Bf16LatentPages (c_kv, k_rope); "
            f"got {len(cache)} planes"
        )
    if pool[1] < 1:
        raise ValueError(f"cache must have a page_size of at least 1; got {pool[1]}")
    for plane in cache:
        if pool[1] * plane.stride(1) >= 2**31:  # offsets inside a page are 32 bits wide
            raise ValueError(
                "cache must have fewer than 2^31 elements between a page's first and last token; "
                f"got a token stride of {plane.stride(1)} in pages of {pool[1]} tokens"
            )


def _check_slots(slot_mapping: Tensor, cache: LatentPages | Bf16LatentPages) -> None:
    num_pages, page_size = cache[0].shape[:2]
    if slot_mapping.numel() and int(slot_mapping.max()) >= num_pages * page_size:
        raise ValueError(
            f"slot_mapping must stay below {num_pages} pages x {page_size} tokens = "
            f"{num_pages * page_size}; got slot {int(slot_mapping.max())}"
        )

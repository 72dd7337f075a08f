"""The kernels behind FlashMLA's names, for code that calls FlashMLA or its per-token FP8 branch.

Two families of callers are served, and change an import only:

- ``flash_mla`` (deepseek-ai/FlashMLA, ``flash_mla_interface.py``): `get_mla_metadata` and the dense
  `flash_mla_with_kvcache` over a BF16 cache, with the arguments of all its versions;
- ``flash_mla_fp8``, FlashMLA's branch ``feature/ckv_fp8_per_token`` as SGLang-FluentLLM calls it
  (meituan-longcat/SGLang-FluentLLM, ``layers/attention/flashmla_backend.py`` and
  ``mem_cache/memory_pool.py``): `flash_mla_ckv_fp8_per_token`, `quantize_ckv_per_token_head`,
  `quantize_and_cache_k` and `dequantize_ckv_fused_indexed`.

One cache, two spellings:

==============  =====================================================  =========================
here            there                                                  as
==============  =====================================================  =========================
`codes`         `k_cache_lora`, ``[pages, page_size, 1, 512]``         e4m3, or its bytes (uint8)
`scale`         `k_scale`, ``[pages, page_size, 1, 1]``                f32
`rope`          `k_cache_rope`, ``[pages, page_size, 1, 64]``          bf16
`lse`           ``[batch, heads, s_q]``                                a view of [batch, s_q, heads]
==============  =====================================================  =========================

FluentLLM's flat pool, ``[slots, 1, width]``, is a pool with pages of one token. Nothing is copied:
all of these are views.

**Convention of the FP8 planes.** Both rotary parts are divided by the scale of their latent, as
everywhere in this library: a score is ``(q_nope . k_lora + q_rope . k_rope) q_scale k_scale``.
FluentLLM's own PyTorch code for the cache (`MLATokenToKVPool.set_kv_buffer`) writes that form,
``scale = amax / 448``, ``k_lora / scale``, ``k_rope / scale``, and so does the PyTorch version of
the quantisers in FlagGems (``flash_mla_ckv_fp8_per_token``) for query and cache: nothing has to be
converted, and a cache that they filled can be read here. A caller that keeps unscaled rotary parts
passes ``q_rope / q_scale`` and stores ``k_rope / k_scale`` (divide in float32, then round to BF16).

What differs, and why:

- A row with nothing to see has lse -inf, the identity of a merge. FlashMLA writes +inf there:
  ``lse.masked_fill(lse == -math.inf, math.inf)`` gives it back.
- Written scales are powers of two by default and never below 2^-40 (see `stage1_quant.quantize`);
  theirs are ``amax / 448`` with a floor of about 2^-95 (FluentLLM's PyTorch code) or 1 for a row of
  zeros (FlagGems). Readers need not know: ``scale_format="amax"`` writes theirs but for the floor.
  A rotary part divided by 2^-95 on both sides overflows the scores; such rows come from all-zero
  latents only.
- `softmax_scale` defaults to ``head_dim^-0.5`` with 576 for 512 + 64, as theirs does. No MLA model
  wants that: pass ``(qk_nope_head_dim + qk_rope_head_dim)^-0.5`` and YaRN's correction.
- `causal` defaults to False, as theirs does.
- Splits follow `SplitRule` on the device. Metadata and split counts from `get_mla_metadata` are
  accepted and ignored; a `SplitRule` given as `tile_scheduler_metadata` is obeyed.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from stage0_reference.latent_cache import Bf16LatentPages
from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import DEFAULT_SCALE_FORMAT, QuantizedRows, ScaleFormat
from stage3_dataflow.arguments import QUERY_DTYPES, check_tensor, check_widths, describe
from stage3_dataflow.decode import decode_quantized, mla_decode
from stage3_dataflow.fused_writes import append_kv, quantize_q
from stage3_dataflow.prefix import fetch_dequant
from stage3_dataflow.split_plan import DEFAULT_SPLIT_RULE, SPLIT_GRANULE, SplitRule

METADATA_WIDTH = 8
"""Integers in a row of FlashMLA's tile scheduler metadata."""


def get_mla_metadata(
    cache_seqlens: Int[Tensor, " batch"] | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
) -> tuple[Tensor, Tensor] | tuple[SplitRule, None]:
    """Say how requests will be split. The decode functions here need none of it.

    Parameters
    ----------
    cache_seqlens
        int32 [batch], as for the decode. None, as FlashMLA's newest callers have it: the result is
        ``(SplitRule(), None)``.
    num_q_tokens_per_head_k, num_heads_per_head_k
        ``s_q * heads``, under its newer and its older name. Not used.
    num_heads_k
        1: all heads share one latent.
    num_heads_q, is_fp8_kvcache
        Not used.
    topk
        None: sparse attention is not served.

    Returns
    -------
    tile_scheduler_metadata
        int32 [1, 8] of zeros, whatever the batch: callers copy it into a buffer that a CUDA graph
        reads.
    num_splits
        int32 [batch + 1], cumulative: request i has ``num_splits[i + 1] - num_splits[i]`` splits
        under the default rule, computed on the device.

    Examples
    --------
    >>> import torch
    >>> lengths = torch.tensor([5, 3000], dtype=torch.int32)
    >>> get_mla_metadata(lengths, 16, 1)[1].tolist()
    [0, 1, 4]
    """
    _check_one_kv_head("num_heads_k", num_heads_k)
    _refuse_given({"topk": topk}, "sparse attention")
    if cache_seqlens is None:
        return DEFAULT_SPLIT_RULE, None
    check_tensor(
        "cache_seqlens",
        cache_seqlens,
        (torch.int32,),
        ("batch",),
        remedy="Use cache_seqlens.to(torch.int32)",
    )
    rule, granules = DEFAULT_SPLIT_RULE, _ceil_div(cache_seqlens, SPLIT_GRANULE)
    wanted = _ceil_div(cache_seqlens, rule.min_tokens).clamp(1, rule.max_splits)
    splits = _ceil_div(granules, _ceil_div(granules, wanted).clamp(min=1)).clamp(min=1)
    num_splits = cache_seqlens.new_zeros(len(cache_seqlens) + 1)
    num_splits[1:] = splits.cumsum(0)
    return cache_seqlens.new_zeros(1, METADATA_WIDTH), num_splits


def flash_mla_with_kvcache(
    q: Float[Tensor, "batch s_q heads head_dim"],
    k_cache: Float[Tensor, "num_pages page_size ... head_dim"],
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Float[Tensor, "batch s_q heads head_dim_v"], Float[Tensor, "batch heads s_q"]]:
    """Attend over a BF16 cache that keeps latent and rotary key side by side: dense decode.

    Parameters
    ----------
    q
        Absorbed query and rotary query side by side: bf16, f16 or f32.
    k_cache
        bf16 [num_pages, page_size, 1, head_dim] (the axis of one head may be left out).
    block_table, cache_seqlens
        int32 [batch, max_pages] and int32 [batch].
    head_dim_v
        Width of the latent; the rest of `head_dim` is rotary.
    tile_scheduler_metadata, num_splits
        What `get_mla_metadata` gave, or None: ignored. A `SplitRule` in the first is obeyed.
    softmax_scale, causal
        See the module's text for the defaults.
    is_fp8_kvcache, indices, ..., descale_k
        FP8 caches without a scale per token, and sparse attention, are refused by name.

    Returns
    -------
    out
        [batch, s_q, heads, head_dim_v] in q's dtype.
    softmax_lse
        f32 [batch, heads, s_q], natural; -inf where nothing is visible.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        By argument name, before any launch.

    References
    ----------
    deepseek-ai/FlashMLA, ``flash_mla/flash_mla_interface.py``.

    Examples
    --------
    >>> import torch
    >>> q, k_cache = torch.ones(1, 1, 4, 576), torch.ones(2, 64, 1, 576, dtype=torch.bfloat16)
    >>> table = torch.tensor([[1]], dtype=torch.int32)
    >>> lengths = torch.tensor([5], dtype=torch.int32)
    >>> metadata = get_mla_metadata(lengths, 4, 1)
    >>> out, lse = flash_mla_with_kvcache(q, k_cache, table, lengths, 512, *metadata, causal=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 1, 4, 512]), torch.Size([1, 4, 1]))
    """
    _refuse_given(
        {
            "is_fp8_kvcache": is_fp8_kvcache or None,
            "descale_q": descale_q,
            "descale_k": descale_k,
        },
        "an FP8 cache with one scale for latent and rotary key",
        "flash_mla_ckv_fp8_per_token serves FP8",
    )
    _refuse_given(
        {
            "indices": indices,
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        },
        "sparse attention",
    )
    check_tensor("q", q, QUERY_DTYPES, ("batch", "s_q", "heads", "head_dim"))
    head_dim = q.shape[-1]
    rows = _without_head("k_cache", k_cache)
    check_tensor(
        "k_cache", rows, (torch.bfloat16,), ("num_pages", "page_size", head_dim), device=q.device
    )
    _check_latent_width(head_dim_v, head_dim)
    attended = mla_decode(
        q[..., :head_dim_v],
        q[..., head_dim_v:],
        Bf16LatentPages(rows[..., :head_dim_v], rows[..., head_dim_v:]),
        block_table,
        cache_seqlens,
        head_dim**-0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        split_rule=_split_rule(tile_scheduler_metadata),
    )
    return attended.out, attended.lse.transpose(1, 2)


def flash_mla_ckv_fp8_per_token(
    q_nope: Shaped[Tensor, "batch s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
    k_cache_lora: Shaped[Tensor, "num_pages page_size ... kv_lora_rank"],
    k_cache_rope: Float[Tensor, "num_pages page_size ... qk_rope_head_dim"],
    q_scale: Float[Tensor, "batch s_q heads ..."],
    k_scale: Float[Tensor, "num_pages page_size ..."],
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Float[Tensor, "batch s_q heads head_dim_v"], Float[Tensor, "batch heads s_q"]]:
    """Attend over an FP8 cache with one scale a token: `decode_quantized` under FluentLLM's names.

    Parameters
    ----------
    q_nope, q_rope, q_scale
        What `quantize_ckv_per_token_head` gave: e4m3 (or its bytes), bf16 divided by the scale, f32
        with or without a trailing axis of 1.
    k_cache_lora, k_cache_rope, k_scale
        What `quantize_and_cache_k` wrote: e4m3 (or its bytes), bf16 divided by the scale, f32 with
        up to two trailing axes of 1.
    block_table, cache_seqlens
        int32 [batch, max_pages] and int32 [batch].
    head_dim_v
        Width of the latent.
    tile_scheduler_metadata, num_splits
        What `get_mla_metadata` gave, or None: ignored. A `SplitRule` in the first is obeyed.
    softmax_scale, causal
        See the module's text for the defaults and for the convention of the planes.

    Returns
    -------
    out
        bf16 [batch, s_q, heads, head_dim_v].
    lse
        f32 [batch, heads, s_q], natural; -inf where nothing is visible.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        By argument name, before any launch.

    References
    ----------
    meituan-longcat/SGLang-FluentLLM, ``python/sglang/srt/layers/attention/flashmla_backend.py``.
    """
    codes, lora = (
        _codes("q_nope", q_nope),
        _codes("k_cache_lora", _without_head("k_cache_lora", k_cache_lora)),
    )
    rope = _without_head("k_cache_rope", k_cache_rope)
    fp8, device = (torch.float8_e4m3fn,), q_nope.device
    check_tensor("q_nope", codes, fp8, ("batch", "s_q", "heads", "kv_lora_rank"))
    *leading, latent = codes.shape
    if head_dim_v != latent:
        raise ValueError(
            f"head_dim_v must be the width of q_nope, the latent; got {head_dim_v} for "
            f"{describe(q_nope)}"
        )
    check_tensor("q_rope", q_rope, (torch.bfloat16,), (*leading, "qk_rope_head_dim"), device=device)
    width = q_rope.shape[-1]
    _check_latent_width(latent, latent + width)
    scale = _without_ones("q_scale", q_scale, 3)
    check_tensor("q_scale", scale, (torch.float32,), leading, device=device, contiguous_last=False)
    check_tensor("k_cache_lora", lora, fp8, ("num_pages", "page_size", latent), device=device)
    pool = lora.shape[:2]
    check_tensor("k_cache_rope", rope, (torch.bfloat16,), (*pool, width), device=device)
    token_scale = _without_ones("k_scale", k_scale, 2)
    check_tensor(
        "k_scale", token_scale, (torch.float32,), pool, device=device, contiguous_last=False
    )
    attended = decode_quantized(
        QuantizedRows(codes, scale.contiguous(), q_rope),
        LatentPages(lora, token_scale, rope),
        block_table,
        cache_seqlens,
        (latent + width) ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        split_rule=_split_rule(tile_scheduler_metadata),
    )
    return attended.out, attended.lse.transpose(1, 2)


def quantize_ckv_per_token_head(
    q: Float[Tensor, "batch s_q heads head_dim"],
    head_dim_v: int = 512,
    *,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise absorbed, rotated queries per token and head.

    Returns
    -------
    q_nope, q_scale, q_rope
        In this order: e4m3 [batch, s_q, heads, head_dim_v], f32 [batch, s_q, heads, 1], and bf16
        [batch, s_q, heads, head_dim - head_dim_v] divided by the scale.
    """
    check_tensor("q", q, QUERY_DTYPES, ("batch", "s_q", "heads", "head_dim"))
    _check_latent_width(head_dim_v, q.shape[-1])
    query = quantize_q(q[..., :head_dim_v], q[..., head_dim_v:], scale_format=scale_format)
    return query.codes, query.scale[..., None], query.rope


def quantize_and_cache_k(
    key: Float[Tensor, "tokens ... head_dim"],
    k_lora_cache: Shaped[Tensor, "num_pages page_size ... kv_lora_rank"],
    k_lora_scale_cache: Float[Tensor, "num_pages page_size ..."],
    k_rope_cache: Float[Tensor, "num_pages page_size ... qk_rope_head_dim"],
    indices: Int[Tensor, " tokens"],
    head_dim_v: int = 512,
    *,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> None:
    """Quantise normed, rotated keys and write them into their slots of the three planes.

    Parameters
    ----------
    key
        Latent and rotary key side by side, [tokens, 1, head_dim] or [tokens, head_dim].
    k_lora_cache, k_lora_scale_cache, k_rope_cache
        The planes: flat, [slots, 1, width], or in pages.
    indices
        Slots, int32 or int64; a negative one writes nothing.
    """
    if key.dim() == 3:
        _check_one_kv_head("key", key.shape[1])
        key = key[:, 0]
    check_tensor("key", key, QUERY_DTYPES, ("tokens", "head_dim"))
    _check_latent_width(head_dim_v, key.shape[-1])
    append_kv(
        key[:, :head_dim_v],
        key[:, head_dim_v:],
        _latent_pages(k_lora_cache, k_lora_scale_cache, k_rope_cache),
        indices,
        scale_format=scale_format,
    )


def dequantize_ckv_fused_indexed(
    k_lora_cache: Shaped[Tensor, "slots 1 kv_lora_rank"],
    k_rope_cache: Float[Tensor, "slots 1 qk_rope_head_dim"],
    k_scale_cache: Float[Tensor, "slots 1 ..."],
    indices: Int[Tensor, " tokens"],
) -> tuple[Float[Tensor, "tokens 1 kv_lora_rank"], Float[Tensor, "tokens 1 qk_rope_head_dim"]]:
    """Read slots back in BF16: latents, and rotary keys with their scale multiplied back.

    Parameters
    ----------
    k_lora_cache, k_rope_cache, k_scale_cache
        The flat planes, in this order.
    indices
        Slots, int32 or int64. One outside the pool is refused on the CPU; on a GPU, where only the
        device could see it, all rows of the call are 0.

    Returns
    -------
    k_lora, k_rope
        bf16 [tokens, 1, .], contiguous.
    """
    cache = _latent_pages(k_lora_cache, k_scale_cache, k_rope_cache)
    if cache.codes.shape[1] != 1:
        raise ValueError(
            f"k_lora_cache must be flat, [slots, 1, kv_lora_rank]; got {describe(k_lora_cache)}. "
            "Use k_lora_cache.view(-1, 1, kv_lora_rank), and the other planes alike"
        )
    check_tensor("indices", indices, (torch.int32, torch.int64), ("tokens",))
    tokens, latent = len(indices), cache.codes.shape[-1]
    # A pool with pages of one token, and one request that has these pages.
    rows = fetch_dequant(
        cache,
        indices.to(torch.int32)[None],
        torch.full((1,), tokens, dtype=torch.int32, device=indices.device),
        total_tokens=tokens,
    )
    return rows[:, None, :latent].contiguous(), rows[:, None, latent:].contiguous()


def _latent_pages(lora: Tensor, scale: Tensor, rope: Tensor) -> LatentPages:
    """View three planes of a caller as this library's."""
    return LatentPages(
        _codes("k_lora_cache", _without_head("k_lora_cache", lora)),
        _without_ones("k_lora_scale_cache", scale, 2),
        _without_head("k_rope_cache", rope),
    )


def _codes(name: str, tensor: Tensor) -> Tensor:
    """View bytes as e4m3: FluentLLM's pool is stored as uint8."""
    if tensor.dtype == torch.uint8:
        return tensor.view(torch.float8_e4m3fn)
    if tensor.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"{name} must be float8_e4m3fn, or its bytes as uint8; got {describe(tensor)}"
        )
    return tensor


def _without_head(name: str, plane: Tensor) -> Tensor:
    """View a plane [num_pages, page_size, 1, width] without the axis of its one head."""
    if plane.dim() != 4:
        return plane
    _check_one_kv_head(name, plane.shape[2])
    return plane[:, :, 0]


def _without_ones(name: str, scale: Tensor, axes: int) -> Tensor:
    """View a scale without trailing axes of 1 behind its first `axes`."""
    view = scale
    while view.dim() > axes and view.shape[-1] == 1:
        view = view[..., 0]
    if view.dim() != axes:
        raise ValueError(
            f"{name} must have {axes} axes and perhaps some of size 1 behind them; "
            f"got {describe(scale)}"
        )
    return view


def _check_one_kv_head(name: str, heads: int) -> None:
    if heads != 1:
        raise NotImplementedError(
            f"{name} must have one KV head (h_kv = 1): all heads share one latent; got {heads}"
        )


def _check_latent_width(head_dim_v: int, head_dim: int) -> None:
    """Refuse widths that the kernels have no tiles for, under the caller's name for them."""
    try:
        check_widths(head_dim_v, head_dim - head_dim_v)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"head_dim_v must be the width of the latent, with the rotary part behind it: 512 of "
            f"576; got {head_dim_v} of {head_dim}. {error}"
        ) from None


def _refuse_given(arguments: dict[str, Any], feature: str, remedy: str = "") -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} must be left out: {feature} is not served"
                + (f". {remedy}" if remedy else "")
            )


def _split_rule(tile_scheduler_metadata: Any) -> SplitRule:
    if isinstance(tile_scheduler_metadata, SplitRule):
        return tile_scheduler_metadata
    return DEFAULT_SPLIT_RULE


def _ceil_div(dividend: Tensor, divisor: Tensor | int) -> Tensor:
    return (dividend + (divisor - 1)) // divisor

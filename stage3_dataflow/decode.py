"""Decode attention over the paged cache: validate, quantise the query, attend, merge splits."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import Bf16LatentPages, check_table
from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import DEFAULT_SCALE_FORMAT, QuantizedRows, ScaleFormat
from stage2_pv_pipeline import decode as pipeline
from stage3_dataflow.arguments import (
    QUERY_DTYPES,
    check_contiguous,
    check_no_alias,
    check_tensor,
    check_widths,
)
from stage3_dataflow.execution_path import which_path
from stage3_dataflow.fused_writes import check_planes, quantize_q
from stage3_dataflow.split_plan import (
    DEFAULT_SPLIT_RULE,
    SplitRule,
    check_split_rule,
    largest_split_count,
)
from stage3_dataflow.workspace import DecodeWorkspace

PFormat = Literal["e4m3", "bf16"]
DEFAULT_P_FORMAT: PFormat = "bf16"
"""What P is rounded to. The paper's e4m3 costs the portable kernel a byte-wise transpose of V."""

MAX_BATCH = 65535
"""Requests of one call: CUDA's limit on a grid's third axis."""


def mla_decode(
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
    cache: LatentPages | Bf16LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
    softmax_scale: float,
    *,
    causal: bool = True,
    out: Float[Tensor, "batch s_q heads kv_lora_rank"] | None = None,
    lse: Float[Tensor, "batch s_q heads"] | None = None,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
    p_format: PFormat = DEFAULT_P_FORMAT,
    split_rule: SplitRule = DEFAULT_SPLIT_RULE,
    workspace: DecodeWorkspace | None = None,
) -> AttentionOutput:
    """Attend over one layer's cache with absorbed queries.

    Nothing synchronises: lengths and table are read on the device, and a captured CUDA graph
    follows them when it is replayed.

    Parameters
    ----------
    q_latent, q_rope
        Absorbed query (q_nope W_UK) and rotated rotary query of each request's last s_q tokens:
        bf16, f16 or f32, [batch, s_q, heads, .], strided views welcome.
    cache
        FP8 planes, or the two planes of a BF16 cache (the baseline; the query is then rounded to
        the cache's dtype and P to BF16).
    block_table
        Page ids, int32 [batch, max_pages]. Columns past a request's last page are never followed.
    cache_seqlens
        Cached tokens of each request, int32.
    softmax_scale
        Factor on the scores: (qk_nope_head_dim + qk_rope_head_dim)^-0.5 and YaRN's correction.
    causal
        Query i sees the keys before ``cache_seqlens - s_q + i + 1``; otherwise all keys.
    out, lse
        Written instead of fresh tensors where given: contiguous, sharing no memory with an input.
    scale_format
        Of the query's scales; the cache's are read.
    p_format
        "bf16" (default here) or the paper's "e4m3".
    split_rule
        How requests are cut; see `stage3_dataflow.split_plan`. Changes rounding only.
    workspace
        Where partial results go; by default torch's caching allocator supplies them.

    Returns
    -------
    AttentionOutput
        `out` [batch, s_q, heads, kv_lora_rank] in q_latent's dtype and `lse`, natural, f32
        [batch, s_q, heads]. Where nothing is visible: 0 and -inf. So too for a request with a page
        id outside the pool below its length, or a length its table row cannot hold.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        An argument of another dtype, shape, device or width, by name, before any launch. On the
        CPU, lengths and pages are checked too.

    References
    ----------
    SnapMLA (arXiv 2602.10718), sections 3.1 to 3.3. Split-KV with a merge by lse: Flash-Decoding.

    Examples
    --------
    >>> import torch
    >>> from stage1_quant.fp8_latent_cache import allocate_latent_pages
    >>> from stage3_dataflow import append_kv, mla_decode
    >>> cache = allocate_latent_pages(4, 64, 512, 64)
    >>> append_kv(torch.ones(3, 512), torch.zeros(3, 64), cache, torch.arange(3))
    >>> table = torch.tensor([[0]], dtype=torch.int32)
    >>> lengths = torch.tensor([3], dtype=torch.int32)
    >>> query = torch.ones(1, 1, 16, 512), torch.zeros(1, 1, 16, 64)
    >>> out, lse = mla_decode(*query, cache, table, lengths, 192**-0.5)
    >>> bool((out - 1).abs().max() < 0.01)
    True
    """
    check_tensor("q_latent", q_latent, QUERY_DTYPES, ("batch", "s_q", "heads", "kv_lora_rank"))
    check_tensor(
        "q_rope",
        q_rope,
        QUERY_DTYPES,
        (*q_latent.shape[:3], "qk_rope_head_dim"),
        device=q_latent.device,
    )
    inputs = {"q_latent": q_latent, "q_rope": q_rope}
    check_outputs(out, lse, q_latent.shape, q_latent.dtype, q_latent.device, inputs)
    if len(cache) == 2:
        check_decode(q_latent, q_rope, cache, block_table, cache_seqlens, split_rule, p_format)
        plane = cache[0]
        query = QuantizedRows(q_latent.to(plane.dtype), q_latent, q_rope.to(plane.dtype))
    else:
        check_decode(q_latent, q_rope, cache, block_table, cache_seqlens, split_rule, p_format)
        query = quantize_q(q_latent, q_rope, scale_format=scale_format)
    return _attend(
        query,
        cache,
        block_table,
        cache_seqlens,
        softmax_scale,
        causal=causal,
        out=out,
        lse=lse,
        out_dtype=q_latent.dtype,
        p_format=p_format,
        split_rule=split_rule,
        workspace=workspace,
    )


def decode_quantized(
    query: QuantizedRows,
    cache: LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
    softmax_scale: float,
    *,
    causal: bool = True,
    out: Float[Tensor, "batch s_q heads kv_lora_rank"] | None = None,
    lse: Float[Tensor, "batch s_q heads"] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    p_format: PFormat = DEFAULT_P_FORMAT,
    split_rule: SplitRule = DEFAULT_SPLIT_RULE,
    workspace: DecodeWorkspace | None = None,
) -> AttentionOutput:
    """`mla_decode` of a query that `quantize_q` or `fused_q_quant` has quantised already.

    Parameters
    ----------
    query
        codes float8_e4m3fn [batch, s_q, heads, kv_lora_rank], scale f32 [batch, s_q, heads], rope
        bf16 [batch, s_q, heads, qk_rope_head_dim], divided by the scale.
    out_dtype
        Of `out` where none is given.

    See `mla_decode` for the other arguments, the result and what is refused.
    """
    check_tensor(
        "query.codes",
        query.codes,
        (torch.float8_e4m3fn,),
        ("batch", "s_q", "heads", "kv_lora_rank"),
    )
    leading, device = tuple(query.codes.shape[:3]), query.codes.device
    check_tensor("query.scale", query.scale, (torch.float32,), leading, device=device)
    check_tensor(
        "query.rope", query.rope, (torch.bfloat16,), (*leading, "qk_rope_head_dim"), device=device
    )
    if len(cache) != 3:
        raise ValueError("cache must be LatentPages (codes, scale, rope) for a quantised query")
    inputs = dict(zip(("query.codes", "query.scale", "query.rope"), query, strict=True))
    dtype = out_dtype if out is None else out.dtype
    check_outputs(out, lse, query.codes.shape, dtype, device, inputs)
    check_decode(query.codes, query.rope, cache, block_table, cache_seqlens, split_rule, p_format)
    return _attend(
        query._replace(scale=query.scale.contiguous()),
        cache,
        block_table,
        cache_seqlens,
        softmax_scale,
        causal=causal,
        out=out,
        lse=lse,
        out_dtype=dtype,
        p_format=p_format,
        split_rule=split_rule,
        workspace=workspace,
    )


def check_outputs(
    out: Tensor | None,
    lse: Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    inputs: dict[str, Tensor],
) -> None:
    """Refuse outputs of another shape or dtype, or that share memory with an input."""
    if out is not None:
        check_tensor("out", out, (dtype,), shape, device=device)
        check_contiguous("out", out)
        check_no_alias("out", out, inputs)
    if lse is not None:
        check_tensor("lse", lse, (torch.float32,), shape[:3], device=device)
        check_contiguous("lse", lse)
        check_no_alias("lse", lse, inputs)


def check_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentPages | Bf16LatentPages,
    block_table: Tensor,
    cache_seqlens: Tensor,
    split_rule: SplitRule,
    p_format: str,
) -> None:
    """Refuse, without a synchronisation, what a decode cannot run on."""
    batch, s_q, heads, latent = q_latent.shape
    rope, device = q_rope.shape[-1], q_latent.device
    for name, size in (("s_q", s_q), ("heads", heads)):
        if size < 1:
            raise ValueError(f"q_latent must have {name} of at least 1; got {list(q_latent.shape)}")
    if batch > MAX_BATCH:
        raise ValueError(f"q_latent must have at most {MAX_BATCH} requests; got {batch}")
    check_planes(cache, latent, rope, device)
    check_tensor(
        "block_table",
        block_table,
        (torch.int32,),
        (batch, "max_pages"),
        device=device,
        remedy="Use block_table.to(torch.int32)",
    )
    check_tensor(
        "cache_seqlens",
        cache_seqlens,
        (torch.int32,),
        (batch,),
        device=device,
        remedy="Use cache_seqlens.to(torch.int32)",
    )
    check_split_rule(split_rule)
    if p_format not in ("e4m3", "bf16"):
        raise ValueError(f"p_format must be e4m3 or bf16; got {p_format!r}")


def _attend(
    query: QuantizedRows,
    cache: LatentPages | Bf16LatentPages,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    *,
    causal: bool,
    out: Tensor | None,
    lse: Tensor | None,
    out_dtype: torch.dtype,
    p_format: PFormat,
    split_rule: SplitRule,
    workspace: DecodeWorkspace | None,
) -> AttentionOutput:
    """Run the path of this device; everything has been checked but what only values can say."""
    device = query.codes.device
    path = which_path(device).name
    if path != "triton":
        check_table(block_table, cache_seqlens, *cache[0].shape[:2])
    if path == "pytorch":
        return _attend_in_pytorch(
            query, cache, block_table, cache_seqlens, softmax_scale, causal, out, lse, out_dtype,
            p_format,
        )  # fmt: skip
    batch, s_q, heads, latent = query.codes.shape
    check_widths(latent, query.rope.shape[-1])
    from stage3_dataflow.kernels.launch import launch_combine, launch_split_kv_decode

    if out is None:
        out = torch.empty(query.codes.shape, dtype=out_dtype, device=device)
    if lse is None:
        lse = torch.empty(query.codes.shape[:3], dtype=torch.float32, device=device)
    if batch == 0:
        return AttentionOutput(out, lse)
    capacity = block_table.shape[1] * cache[0].shape[1]
    splits = largest_split_count(capacity, split_rule)
    workspace = workspace or DecodeWorkspace(device)
    partial_out, partial_lse = workspace.partials(
        batch, splits, s_q * heads, latent if splits > 1 else 0
    )
    launch_split_kv_decode(
        query,
        cache,
        block_table,
        cache_seqlens,
        softmax_scale,
        out,
        lse,
        partial_out,
        partial_lse,
        causal=causal,
        fp8_p=p_format == "e4m3",
        split_rule=split_rule,
    )
    if splits > 1:
        launch_combine(
            partial_out, partial_lse, cache_seqlens, capacity, out, lse, split_rule=split_rule
        )
    return AttentionOutput(out, lse)


def _attend_in_pytorch(
    query: QuantizedRows,
    cache: LatentPages | Bf16LatentPages,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool,
    out: Tensor | None,
    lse: Tensor | None,
    out_dtype: torch.dtype,
    p_format: PFormat,
) -> AttentionOutput:
    if len(cache) == 2:
        attended = AbsorbedBackend().attend(
            query.codes.float(),
            query.rope.float(),
            Bf16LatentPages(*cache),
            block_table,
            cache_seqlens,
            softmax_scale,
            causal=causal,
        )
    else:
        attended = pipeline.decode_quantized(
            query,
            LatentPages(*cache),
            block_table,
            cache_seqlens,
            softmax_scale,
            causal=causal,
            p_format=p_format,
        )
    result = attended.out.to(out_dtype)
    return AttentionOutput(
        result if out is None else out.copy_(result),
        attended.lse if lse is None else lse.copy_(attended.lse),
    )

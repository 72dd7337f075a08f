"""Decode attention over the paged cache: validate, quantise the query, attend, merge splits."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import Bf16LatentPages, check_table
from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import DEFAULT_SCALE_FORMAT, QuantizedRows, ScaleFormat
from stage2_pv_pipeline import decode as pipeline
from stage3_dataflow import custom_ops
from stage3_dataflow.arguments import (
    QUERY_DTYPES,
    AcceptedGeometries,
    check_contiguous,
    check_no_alias,
    check_tensor,
    check_widths,
    geometry_of,
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
"""What P is rounded to: the paper's e4m3, or bf16."""

Kernel = Literal["hopper", "portable"]

PORTABLE_P_FORMAT: PFormat = "bf16"
"""Where p_format is None and the Hopper kernel does not run: through `tl.dot` an FP8 V has to be
transposed byte by byte, which makes "e4m3" several times slower there."""

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
    p_format: PFormat | None = None,
    split_rule: SplitRule = DEFAULT_SPLIT_RULE,
    workspace: DecodeWorkspace | None = None,
    kernel: Kernel | None = None,
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
        "e4m3" (the paper's) or "bf16"; None takes what the kernel that runs is faster with: "e4m3"
        for the Hopper kernel, which has no other, "bf16" elsewhere.
    split_rule
        How requests are cut; see `stage3_dataflow.split_plan`. Changes rounding only.
    workspace
        Memory for what goes from launch to launch, one for each stream; by default torch's caching
        allocator supplies it.
    kernel
        "hopper" or "portable"; None takes the Hopper kernel where it can serve the call.
        `which_kernel` says what that is, and why.

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
    if custom_ops.is_capturing():
        return custom_ops.mla_decode(
            q_latent,
            q_rope,
            cache,
            block_table,
            cache_seqlens,
            softmax_scale,
            causal=causal,
            out=out,
            lse=lse,
            scale_format=scale_format,
            p_format=p_format,
            split_rule=split_rule,
            kernel=kernel,
        )
    geometry = geometry_of(q_latent, q_rope, cache, block_table, cache_seqlens, out, lse)
    if geometry not in _accepted_queries:
        check_tensor("q_latent", q_latent, QUERY_DTYPES, ("batch", "s_q", "heads", "kv_lora_rank"))
        check_tensor(
            "q_rope",
            q_rope,
            QUERY_DTYPES,
            (*q_latent.shape[:3], "qk_rope_head_dim"),
            device=q_latent.device,
        )
        check_outputs(out, lse, q_latent.shape, q_latent.dtype, q_latent.device)
        check_decode(q_latent, q_rope, cache, block_table, cache_seqlens)
        _accepted_queries.add(geometry)
    check_choices(split_rule, p_format, kernel)
    query_parts = {"q_latent": q_latent, "q_rope": q_rope}
    check_apart(out, lse, query_parts, cache, block_table, cache_seqlens)
    if len(cache) == 2:
        plane = cache[0]
        query = QuantizedRows(q_latent.to(plane.dtype), q_latent, q_rope.to(plane.dtype))
    else:
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
        kernel=kernel,
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
    p_format: PFormat | None = None,
    split_rule: SplitRule = DEFAULT_SPLIT_RULE,
    workspace: DecodeWorkspace | None = None,
    kernel: Kernel | None = None,
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
    if custom_ops.is_capturing():
        return custom_ops.decode_quantized(
            query,
            cache,
            block_table,
            cache_seqlens,
            softmax_scale,
            causal=causal,
            out=out,
            lse=lse,
            out_dtype=out_dtype,
            p_format=p_format,
            split_rule=split_rule,
            kernel=kernel,
        )
    dtype = out_dtype if out is None else out.dtype
    geometry = geometry_of(query, cache, block_table, cache_seqlens, out, lse)
    if geometry not in _accepted_codes:
        check_tensor(
            "query.codes",
            query.codes,
            (torch.float8_e4m3fn,),
            ("batch", "s_q", "heads", "kv_lora_rank"),
        )
        leading, device = tuple(query.codes.shape[:3]), query.codes.device
        check_tensor("query.scale", query.scale, (torch.float32,), leading, device=device)
        check_tensor(
            "query.rope",
            query.rope,
            (torch.bfloat16,),
            (*leading, "qk_rope_head_dim"),
            device=device,
        )
        if len(cache) != 3:
            raise ValueError("cache must be LatentPages (codes, scale, rope) for a quantised query")
        check_outputs(out, lse, query.codes.shape, dtype, device)
        check_decode(query.codes, query.rope, cache, block_table, cache_seqlens)
        _accepted_codes.add(geometry)
    check_choices(split_rule, p_format, kernel)
    names = ("query.codes", "query.scale", "query.rope")
    query_parts = dict(zip(names, query, strict=True))
    check_apart(out, lse, query_parts, cache, block_table, cache_seqlens)
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
        kernel=kernel,
    )


_accepted_queries, _accepted_codes = AcceptedGeometries(), AcceptedGeometries()


def check_outputs(
    out: Tensor | None,
    lse: Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse outputs of another shape or dtype, or with gaps."""
    if out is not None:
        check_tensor("out", out, (dtype,), shape, device=device)
        check_contiguous("out", out)
    if lse is not None:
        check_tensor("lse", lse, (torch.float32,), shape[:3], device=device)
        check_contiguous("lse", lse)


def check_apart(
    out: Tensor | None,
    lse: Tensor | None,
    query: dict[str, Tensor],
    cache: LatentPages | Bf16LatentPages,
    block_table: Tensor,
    cache_seqlens: Tensor,
) -> None:
    """Refuse outputs that share memory with an input or with each other."""
    if out is None and lse is None:
        return
    names = LatentPages._fields if len(cache) == 3 else Bf16LatentPages._fields
    inputs = query | {"block_table": block_table, "cache_seqlens": cache_seqlens}
    for name, plane in zip(names, cache, strict=True):
        inputs[f"cache.{name}"] = plane
    if out is not None:
        check_no_alias("out", out, inputs)
    if lse is not None:
        if out is not None:
            inputs["out"] = out
        check_no_alias("lse", lse, inputs)


def check_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentPages | Bf16LatentPages,
    block_table: Tensor,
    cache_seqlens: Tensor,
) -> None:
    """Refuse, without a synchronisation, tensors that a decode cannot run on."""
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


def check_choices(split_rule: SplitRule, p_format: str | None, kernel: str | None) -> None:
    """Refuse a rule that cuts nothing, and unknown names."""
    check_split_rule(split_rule)
    if p_format not in ("e4m3", "bf16", None):
        raise ValueError(f"p_format must be e4m3, bf16 or None; got {p_format!r}")
    if kernel not in ("hopper", "portable", None):
        raise ValueError(f"kernel must be hopper, portable or None; got {kernel!r}")


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
    p_format: PFormat | None,
    split_rule: SplitRule,
    workspace: DecodeWorkspace | None,
    kernel: Kernel | None,
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
    choice = which_kernel(
        query, cache, block_table, out, lse, causal=causal, p_format=p_format, kernel=kernel
    )
    if choice.name == "hopper":
        from stage3_dataflow.kernels.hopper_decode import launch_hopper_decode

        launch_hopper_decode(
            query,
            LatentPages(*cache),
            block_table,
            cache_seqlens,
            softmax_scale,
            causal=causal,
            split_rule=split_rule,
            out=out,
            lse=lse,
            workspace=workspace,
            num_splits_grid=splits,
        )
    else:
        check_widths(latent, query.rope.shape[-1])
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
            fp8_p=(p_format or PORTABLE_P_FORMAT) == "e4m3",
            split_rule=split_rule,
        )
        if splits > 1:
            launch_combine(
                partial_out,
                partial_lse,
                cache_seqlens,
                capacity,
                out,
                lse,
                split_rule=split_rule,
            )
    return AttentionOutput(out, lse)


class KernelChoice(NamedTuple):
    """Which decode kernel runs, and the reason in words."""

    name: Kernel
    reason: str


def which_kernel(
    query: QuantizedRows,
    cache: LatentPages | Bf16LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    out: Float[Tensor, "batch s_q heads kv_lora_rank"],
    lse: Float[Tensor, "batch s_q heads"],
    *,
    causal: bool = True,
    p_format: PFormat | None = None,
    kernel: Kernel | None = None,
) -> KernelChoice:
    """Say which decode kernel serves a call, and why. Nothing in it depends on the batch's size.

    Raises
    ------
    NotImplementedError
        `kernel` asks for the Hopper kernel and it can't serve the call; the message says why.
    """
    if kernel == "portable":
        return KernelChoice("portable", "asked for")
    unsupported = _why_not_hopper(query, cache, block_table, out, lse, causal, p_format)
    if unsupported is None:
        return KernelChoice("hopper", "asked for" if kernel else "the device is a Hopper GPU")
    if kernel == "hopper":
        raise NotImplementedError(
            f"kernel must be portable or None for this call, since {unsupported}; got 'hopper'"
        )
    return KernelChoice("portable", unsupported)


def _why_not_hopper(
    query: QuantizedRows,
    cache: LatentPages | Bf16LatentPages,
    block_table: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    p_format: PFormat | None,
) -> str | None:
    if len(cache) == 2:
        return "the cache is BF16"
    if p_format == "bf16":
        return "the Hopper kernel multiplies P in e4m3"
    if not query.codes.is_cuda or torch.cuda.get_device_capability(query.codes.device)[0] != 9:
        return "the device is not a Hopper GPU"
    from stage3_dataflow.kernels.hopper_decode import why_unsupported

    return why_unsupported(query, LatentPages(*cache), block_table, out, lse, causal=causal)


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
    p_format: PFormat | None,
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
            p_format=p_format or PORTABLE_P_FORMAT,
        )
    result = attended.out.to(out_dtype)
    return AttentionOutput(
        result if out is None else out.copy_(result),
        attended.lse if lse is None else lse.copy_(attended.lse),
    )

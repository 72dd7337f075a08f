"""Reading a cached prefix back in BF16, for prefill that continues behind it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_cache import check_table
from stage1_quant import fp8_latent_cache
from stage1_quant.fp8_latent_cache import LatentPages
from stage3_dataflow import custom_ops
from stage3_dataflow.arguments import check_tensor, check_widths
from stage3_dataflow.execution_path import which_path
from stage3_dataflow.fused_writes import check_planes


def fetch_dequant(
    cache: LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
    *,
    total_tokens: int | None = None,
) -> Float[Tensor, "total_tokens width"]:
    """Give back the cached rows of every request in BF16, one request after the other.

    Time and memory follow the rows asked for, not the pool.

    Parameters
    ----------
    cache, block_table, cache_seqlens
        As `mla_decode`.
    total_tokens
        Sum of `cache_seqlens`, if the caller knows it on the host: saves the synchronisation that
        reads it. Rows behind the last request's come out 0.

    Returns
    -------
    Tensor
        bf16 [total_tokens, kv_lora_rank + qk_rope_head_dim]: latents, then rotary keys with their
        scale multiplied back. A request that has a page id outside the pool below its length, or a
        length that its table row cannot hold, has no rows.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        By argument name, before any launch; on the CPU lengths and pages are checked too.

    References
    ----------
    SnapMLA (arXiv 2602.10718), section 3.3 (Fused-Fetch-Dequant).

    Examples
    --------
    >>> import torch
    >>> from stage1_quant.fp8_latent_cache import allocate_latent_pages
    >>> from stage3_dataflow import append_kv, fetch_dequant
    >>> cache = allocate_latent_pages(4, 64, 512, 64)
    >>> append_kv(torch.ones(3, 512), torch.ones(3, 64), cache, torch.arange(3))
    >>> table = torch.tensor([[0]], dtype=torch.int32)
    >>> rows = fetch_dequant(cache, table, torch.tensor([3], dtype=torch.int32))
    >>> rows.shape, rows.dtype
    (torch.Size([3, 576]), torch.bfloat16)
    """
    if custom_ops.is_capturing():
        return custom_ops.fetch_dequant(
            cache, block_table, cache_seqlens, total_tokens=total_tokens
        )
    device = cache.codes.device
    check_planes(cache, cache.codes.shape[-1], cache.rope.shape[-1], device)
    batch = cache_seqlens.shape[0]
    check_tensor("cache_seqlens", cache_seqlens, (torch.int32,), ("batch",), device=device)
    check_tensor("block_table", block_table, (torch.int32,), (batch, "max_pages"), device=device)
    if total_tokens is not None and total_tokens < 0:
        raise ValueError(f"total_tokens must be at least 0; got {total_tokens}")
    num_pages, page_size, latent = cache.codes.shape
    path = which_path(device).name
    if path != "triton":
        check_table(block_table, cache_seqlens, num_pages, page_size)
    if path == "pytorch":
        rows = fp8_latent_cache.fetch_dequant(cache, block_table, cache_seqlens)
        return rows if total_tokens is None else _fit(rows, total_tokens)
    width = latent + cache.rope.shape[-1]
    check_widths(latent, cache.rope.shape[-1])
    from stage3_dataflow.kernels.launch import launch_fetch_dequant, launch_readable_lengths

    lengths = torch.empty_like(cache_seqlens)
    if batch:
        launch_readable_lengths(block_table, cache_seqlens, lengths, num_pages, page_size)
    ends = lengths.cumsum(0)  # int64
    if total_tokens is None:
        total_tokens = int(ends[-1]) if batch else 0
    out = torch.empty(total_tokens, width, dtype=torch.bfloat16, device=device)
    if total_tokens:
        launch_fetch_dequant(cache, block_table, lengths, ends, out)
    return out


def _fit(rows: Tensor, total_tokens: int) -> Tensor:
    """Cut or pad with zeros to a number of rows."""
    missing = max(0, total_tokens - len(rows))
    return torch.cat((rows[:total_tokens], rows.new_zeros(missing, rows.shape[1])))

"""Context parallelism: the pages of one cache spread over ranks, attention merged by lse.

    torchrun --nproc-per-node 2 -m stage3_dataflow.parallel_demo context 'def main():'

The way to a context that one GPU's memory cannot hold, or cannot read fast enough. Softmax over
all tokens is the merge of softmaxes over disjoint sets of them, ``(out, lse)`` each: what split-KV
decoding does within a GPU, done once more across ranks. Page ids stay global, for allocator,
scheduler and block tables know nothing of ranks:

    global page g   is local page g // R of rank g % R

A rank writes the tokens whose page it has, attends over its pages of each request, gathers all
ranks' partial results, and merges them in the order of ranks. One of R ranks reads and keeps about
1 / R of every request, whatever its length and however it grows; a rank without a page of a request
brings (0, -inf), which changes no bit.

**Query tokens.** With several, query i sees tokens up to its own, and where a rank's share of them
ends follows from which pages it has; it is not "its length less s_q - 1 + i". What all queries
see, up to the last whole page, is one call without a causal mask; the few tokens after that are one
more, in which every query token is a request with a length of its own.

**What runs.** Stage 3 on a GPU finds the local pages in one kernel and merges in another: a handful
of launches beside attention, for a table of any width. Elsewhere plain PyTorch does the same
(`local_pages`, `local_length`, `merge_partials`); these are the kernels' twins.

Everything outside attention every rank computes whole and alike; so a rank needs all weights, and
`tensor_parallel.py` is the way to split these.

What it leaves out: copies of pages from one rank to another (a forked request's copy-on-write), and
fused projections.

References
----------
Flash-Decoding for the merge; merge_partials in stage 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.attention_backend import AttentionBackend, LayerCache
from stage0_reference.latent_attention import AttentionOutput, accumulation_dtype
from stage0_reference.latent_cache import LatentRows, check_table
from stage0_reference.model_config import ModelConfig
from stage0_reference.page_allocator import pages_for
from stage2_pv_pipeline.rescaled_pv import merge_partials
from stage3_dataflow.arguments import check_tensor
from stage3_dataflow.decode import decode_quantized
from stage3_dataflow.execution_path import which_path
from stage3_dataflow.fused_writes import quantize_q
from stage3_dataflow.rank_group import Ranks, require_same
from stage3_dataflow.triton_backend import FusedBackend


class LocalPages(NamedTuple):
    """A rank's pages of every request.

    Attributes
    ----------
    block_table
        Local page ids in sequence order, int32 [batch, max_pages]; what is behind a request's last
        local page is never followed.
    is_local
        Which columns of the global table are this rank's, bool [batch, max_pages].
    readable
        Which requests have any row at all: no page id outside the pool, and a length that the
        table holds, [batch].
    """

    block_table: Tensor
    is_local: Tensor
    readable: Tensor


def local_pages(
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
    ranks: Ranks,
    pages_per_rank: int,
    page_size: int,
) -> LocalPages:
    """Find a rank's pages in a table of global page ids, on the device."""
    batch, max_pages = block_table.shape
    column = torch.arange(max_pages, device=block_table.device)
    needed = column * page_size < cache_seqlens[:, None]
    outside = (block_table < 0) | (block_table >= pages_per_rank * ranks.size)
    readable = ~(needed & outside).any(dim=1)
    readable &= (cache_seqlens >= 0) & (cache_seqlens <= max_pages * page_size)
    is_local = ~outside & (block_table % ranks.size == ranks.rank)
    local_first = (~is_local).to(torch.int8).argsort(dim=1, stable=True)  # keeps their order
    table = block_table.gather(1, local_first) // ranks.size
    return LocalPages(table.to(torch.int32), is_local, readable)


def local_length(
    pages: LocalPages, visible: Int[Tensor, "batch ..."], page_size: int
) -> Int[Tensor, "batch ..."]:
    """How many of a request's first `visible` tokens are this rank's, int32.

    They are also its first so many local ones: pages keep their order.
    """
    max_pages = pages.is_local.shape[1]
    first = torch.arange(max_pages, device=visible.device) * page_size
    in_page = (visible[..., None] - first).clamp(0, page_size)  # [batch, *queries, max_pages]
    shape = (len(visible), *[1] * (visible.dim() - 1), max_pages)
    kept = pages.is_local & pages.readable[:, None]
    return (in_page * kept.view(shape)).sum(dim=-1).to(torch.int32)


class ContextParallelBackend:
    """An attention backend whose pages are spread over ranks.

    Parameters
    ----------
    inner
        What each rank does with its own pages: the backend of any stage.
    ranks
        Who holds the others. All are to be called alike.
    """

    def __init__(self, inner: AttentionBackend, ranks: Ranks) -> None:
        require_same(ranks, {"stage": inner.stage})
        self.inner = inner
        self.ranks = ranks
        self.stage = inner.stage
        self.capturable = getattr(inner, "capturable", False)
        self._describe()

    def _describe(self) -> None:
        self.description = f"{self.inner.description}; pages spread, ranks: {self.ranks.size}"

    def make_cache(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> list[LayerCache]:
        """Allocate this rank's planes for a pool of `num_pages` pages on all ranks together."""
        require_same(self.ranks, {"num_pages": num_pages, "page_size": page_size})
        per_rank = pages_for(num_pages, self.ranks.size)
        cache: list[LayerCache] = self.inner.make_cache(config, per_rank, page_size, device=device)
        self._describe()  # the inner backend may say what runs on this device
        return cache

    def append(
        self,
        c_kv: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
        cache: LayerCache,
        slot_mapping: Int[Tensor, " tokens"],
    ) -> None:
        """Write those tokens whose page is this rank's. Raises as the inner backend, on all."""
        pages_per_rank, page_size = cache[0].shape[:2]
        page, offset = slot_mapping // page_size, slot_mapping % page_size
        local = page % self.ranks.size == self.ranks.rank  # a negative slot stays negative
        # Past the pool on one rank is past the pool on all: the inner backends then refuse alike.
        local |= page >= pages_per_rank * self.ranks.size
        slots = torch.where(local, page // self.ranks.size * page_size + offset, -1)
        self.inner.append(c_kv, k_rope, cache, slots)

    def attend(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: LayerCache,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        softmax_scale: float,
        *,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend over all ranks' pages; every rank gets the result.

        On the CPU a page outside the pool and a length past the table are refused; on a GPU such a
        request gives 0 and -inf, as everywhere.
        """
        partial = self.attend_local(
            q_latent, q_rope, cache, block_table, cache_seqlens, softmax_scale, causal=causal
        )
        by_kernel = self._runs_kernels(q_latent.device)
        return merge_over_ranks(self.ranks, partial, q_latent.dtype, by_kernel=by_kernel)

    def _runs_kernels(self, device: torch.device) -> bool:
        """Whether stage 3's kernels run; stages before it are plain PyTorch on any device."""
        return self.stage == 3 and which_path(device).name != "pytorch"

    def attend_local(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: LayerCache,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        softmax_scale: float,
        *,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend over this rank's pages alone; `out` is float32, or float64 as the query."""
        pages_per_rank, page_size = cache[0].shape[:2]
        if block_table.device.type == "cpu":
            check_table(block_table, cache_seqlens, pages_per_rank * self.ranks.size, page_size)
        s_q = q_latent.shape[1]
        queries = s_q if causal and block_table.shape[1] else 1  # with different visible lengths
        local_table, lengths = self._local_table(
            block_table, cache_seqlens, queries, pages_per_rank, page_size
        )
        if queries == 1:
            return self._attend_all(
                q_latent, q_rope, cache, local_table, lengths[:, 0], softmax_scale
            )

        shared_pages = lengths[:, 0] // page_size  # whole ones that the first query sees
        shared = self._attend_all(
            q_latent, q_rope, cache, local_table, shared_pages * page_size, softmax_scale
        )
        # At most the rest of a page and s_q - 1 tokens more are left for the last query.
        columns = torch.arange(pages_for(page_size + s_q - 2, page_size), device=lengths.device)
        at = (shared_pages[:, None] + columns).clamp(max=block_table.shape[1] - 1)
        table = local_table.gather(1, at)
        rest = self._attend_all(
            q_latent.flatten(0, 1)[:, None],  # every query token is a request
            q_rope.flatten(0, 1)[:, None],
            cache,
            table.repeat_interleave(s_q, dim=0),
            (lengths - (shared_pages * page_size)[:, None]).flatten(),
            softmax_scale,
        )
        return merge(
            torch.stack((shared.out, rest.out.view_as(shared.out))),
            torch.stack((shared.lse, rest.lse.view_as(shared.lse))),
            shared.out.dtype,
            by_kernel=self._runs_kernels(q_latent.device),
        )

    def _local_table(
        self,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        queries: int,
        pages_per_rank: int,
        page_size: int,
    ) -> tuple[Int[Tensor, "batch max_pages"], Int[Tensor, "batch queries"]]:
        """Local page ids, and how many local tokens each of a request's last queries sees."""
        if not self._runs_kernels(block_table.device):
            pages = local_pages(block_table, cache_seqlens, self.ranks, pages_per_rank, page_size)
            offset = torch.arange(1 - queries, 1, device=cache_seqlens.device)
            visible = cache_seqlens[:, None] + offset
            return pages.block_table, local_length(pages, visible, page_size)

        from stage3_dataflow.kernels.launch_ranks import launch_local_pages

        device, int32 = block_table.device, (torch.int32,)
        check_tensor("block_table", block_table, int32, ("batch", "max_pages"))
        check_tensor("cache_seqlens", cache_seqlens, int32, (len(block_table),), device=device)
        table = torch.empty_like(block_table, memory_format=torch.contiguous_format)
        lengths = table.new_empty(len(table), queries)
        launch_local_pages(
            block_table,
            cache_seqlens,
            table,
            lengths,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            pages_per_rank=pages_per_rank,
            page_size=page_size,
        )
        return table, lengths

    def _attend_all(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: LayerCache,
        local_table: Int[Tensor, "batch max_pages"],
        lengths: Int[Tensor, " batch"],
        softmax_scale: float,
    ) -> AttentionOutput:
        """Attend over local keys, all visible, and do not round the result to the query's dtype."""
        inner = self.inner
        if isinstance(inner, FusedBackend):  # its query is quantised: no need to widen it first
            return decode_quantized(
                quantize_q(q_latent, q_rope, scale_format=inner.scale_format),
                cache,
                local_table,
                lengths,
                softmax_scale,
                causal=False,
                out_dtype=torch.float32,
                p_format=inner.p_format,
                split_rule=inner.split_rule,
                workspace=inner._workspace(q_latent.device),
            )
        wide = accumulation_dtype(q_latent.dtype)
        return inner.attend(
            q_latent.to(wide),
            q_rope.to(wide),
            cache,
            local_table,
            lengths,
            softmax_scale,
            causal=False,
        )

    def read_prefix(
        self,
        cache: LayerCache,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
    ) -> LatentRows:
        """Give back all ranks' rows of every request, packed, on every rank.

        For prompts in naive form, which expand them: memory for the whole context of one layer. A
        context beyond that is prefilled in absorbed form (``attention_form="absorbed"``).
        """
        pages_per_rank, page_size = cache[0].shape[:2]
        ranks = self.ranks
        lengths = check_table(block_table, cache_seqlens, pages_per_rank * ranks.size, page_size)
        pages = local_pages(block_table, cache_seqlens, ranks, pages_per_rank, page_size)
        mine = self.inner.read_prefix(
            cache, pages.block_table, local_length(pages, cache_seqlens, page_size)
        )
        owners = block_table.new_empty(0)  # [sum of lengths]: who holds each packed row
        for row, length in zip(block_table, lengths, strict=True):
            page_ids = row.repeat_interleave(page_size)[:length]
            owners = torch.cat((owners, page_ids % ranks.size))
        counts = owners.bincount(minlength=ranks.size).tolist()
        rows = torch.cat(mine, dim=-1)  # [local rows, width]
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows
        packed = rows.new_zeros(len(owners), rows.shape[1])
        for rank, part in enumerate(ranks.gather(padded)):
            packed[owners == rank] = part[: counts[rank]]
        return LatentRows(*packed.split([part.shape[1] for part in mine], dim=-1))

    def workspace_bytes(
        self, batch: int, s_q: int, heads: int, kv_lora_rank: int, capacity: int
    ) -> int:
        """Bytes that decoding needs beside the cache: the inner backend's, and all partials."""
        ask = getattr(self.inner, "workspace_bytes", None)
        inner = 0 if ask is None else int(ask(batch, s_q, heads, kv_lora_rank, capacity))
        partial = 4 * batch * s_q * heads * (kv_lora_rank + 1)
        return inner + (self.ranks.size + 4) * partial  # gathered; two kept, stacked and merged


def merge_over_ranks(
    ranks: Ranks, partial: AttentionOutput, out_dtype: torch.dtype, *, by_kernel: bool = False
) -> AttentionOutput:
    """Join the ranks' attention over disjoint keys, in the order of ranks, with one gather."""
    if ranks.size == 1:
        return AttentionOutput(partial.out.to(out_dtype), partial.lse)
    joined = torch.cat((partial.out, partial.lse[..., None].to(partial.out.dtype)), dim=-1)
    gathered = ranks.gather(joined)  # [ranks, batch, s_q, heads, width + 1]
    return merge(gathered[..., :-1], gathered[..., -1], out_dtype, by_kernel=by_kernel)


def merge(
    outs: Float[Tensor, "parts batch s_q heads width"],
    lses: Float[Tensor, "parts batch s_q heads"],
    out_dtype: torch.dtype,
    *,
    by_kernel: bool,
) -> AttentionOutput:
    """`merge_partials` with `out` rounded to `out_dtype`; the kernel takes float32 parts."""
    if not by_kernel:
        out, lse = merge_partials(outs, lses)
        return AttentionOutput(out.to(out_dtype), lse)

    from stage3_dataflow.kernels.launch_ranks import launch_merge_ranks

    out = torch.empty(outs.shape[1:], dtype=out_dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=lses.dtype, device=lses.device)
    launch_merge_ranks(outs, lses, out, lse)
    return AttentionOutput(out, lse)

"""Hugging Face transformers on the FP8 latent cache: a `Cache`, and an attention function for it.

.. code-block:: python

    from stage3_dataflow.transformers_integration import FP8LatentCache

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="snapmla")
    cache = FP8LatentCache(model.config, max_cache_len=4096)
    model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache

Importing this module registers "snapmla" as an attention function of transformers. No module of a
model is changed: ``model.set_attn_implementation("snapmla")`` makes a loaded model attend through
this library, and ``model.set_attn_implementation("sdpa")`` undoes that. The extra ``snapmla[hf]``
brings transformers, which nothing else in this library imports.

An MLA module of transformers (5.15 or newer) hands its normed latents and rotated keys to
``cache.update``, expands what comes back to keys and values per head, and calls the attention
function. `FP8LatentCache.update` leaves the new latents for `snapmla_attention`, which knows what
is padding, and gives back one token, so that nothing much is expanded. `snapmla_attention` appends
the new tokens and attends over the cache as the decoder of stage 0 does (`CachedAttention`):
absorbed for up to `ABSORBED_MAX_QUERIES` new tokens of a request, else over rows that are read back
and expanded. Projections, rotation, YaRN's correction and query scaling stay the model's own, so
that one function serves DeepSeek-V2 and V3, GLM-4.7-Flash, Youtu, MiniCPM3, LongCat-Flash and
Mistral 4.

W_UK and W_UV are views of ``kv_b_proj.weight``, taken anew in each call: weights that are loaded or
merged in place are seen at once. An adapter or a quantised layer in its place is refused.

What it leaves out: gradients, attention weights, masks other than causal with padding, and
torch.compile, since pages are planned on the host, once a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from stage0_reference.decoder import ABSORBED_MAX_QUERIES
from stage0_reference.latent_attention import absorb_query, naive_attention, project_values
from stage0_reference.latent_cache import copy_pages
from stage0_reference.page_allocator import PageAllocator, SequencePages, pages_for
from stage1_quant.fp8_latent_cache import LatentPages, allocate_latent_pages, latent_rows
from stage1_quant.quantize import DEFAULT_SCALE_FORMAT, ScaleFormat, check_scale_format
from stage3_dataflow.arguments import QUERY_DTYPES, describe
from stage3_dataflow.decode import mla_decode
from stage3_dataflow.fused_writes import append_kv
from stage3_dataflow.prefix import fetch_dequant

try:
    import transformers
    from transformers.cache_utils import Cache, CacheLayerMixin
    from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
    from transformers.modeling_utils import AttentionInterface
except ImportError as error:
    raise ImportError("transformers 5.15 or newer is needed: pip install 'snapmla[hf]'") from error

ATTN_IMPLEMENTATION = "snapmla"
"""The name under which transformers finds `snapmla_attention`."""

PROMPT_CHUNK = 512
"""Queries of a prompt that attend at a time: bounds the memory of their scores."""


class NewLatents(NamedTuple):
    """Normed latents and rotated keys, [batch, s_q, .], on their way into a layer's planes."""

    layer: FP8LatentLayer
    c_kv: Tensor
    k_rope: Tensor


_new_latents: ContextVar[NewLatents | None] = ContextVar("new_latents", default=None)


class Step(NamedTuple):
    """One forward pass, as its first layer planned it.

    Attributes
    ----------
    mask
        Which positions hold a token, not padding: bool [batch, cached and new], on the host.
    counts, lengths
        New tokens of each request, and its cached ones with them.
    order
        int64 [batch, s_q], new positions with padding first: each request's queries then end where
        its keys end. None if nothing is padding.
    slots, block_table, cache_seqlens
        As `append_kv` and `mla_decode` take them; padding has slot -1.
    """

    mask: Tensor
    counts: list[int]
    lengths: list[int]
    order: Tensor | None
    slots: Tensor
    block_table: Tensor
    cache_seqlens: Tensor


class FP8LatentLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's planes. Which token is where is the same in all layers: the cache knows."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: FP8LatentCache, index: int) -> None:
        super().__init__()
        self.cache = cache
        self.index = index
        self.planes: LatentPages | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> LatentPages:
        """Allocate the planes beside the layer's first latents and rotary keys."""
        pool = (self.cache.num_pages, self.cache.page_size)
        widths = (key_states.shape[-1], value_states.shape[-1])
        with torch.inference_mode(False):  # or nobody could write them outside of it later
            self.planes = allocate_latent_pages(*pool, *widths, device=key_states.device)
        return self.planes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Leave latents and rotary keys, [batch, 1, s_q, .], for `snapmla_attention`.

        What it gives back is NaN: whoever attends to it all the same shall see it.
        """
        config = self.cache.config
        if config._attn_implementation != ATTN_IMPLEMENTATION:
            raise ValueError(
                f"the model of an FP8LatentCache must attend by {ATTN_IMPLEMENTATION!r}; got "
                f"{config._attn_implementation!r}. Call model.set_attn_implementation"
                f"({ATTN_IMPLEMENTATION!r})"
            )
        widths = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        if widths != (1, config.kv_lora_rank, config.qk_rope_head_dim):
            raise NotImplementedError(
                f"FP8LatentCache takes latents [batch, 1, s_q, {config.kv_lora_rank}] and rotary "
                f"keys [batch, 1, s_q, {config.qk_rope_head_dim}]; got {list(key_states.shape)} "
                f"and {list(value_states.shape)} from transformers {transformers.__version__}, "
                "which expands them per head first if it is older than 5.15"
            )
        _new_latents.set(NewLatents(self, key_states[:, 0], value_states[:, 0]))
        return key_states[:, :, :1] * float("nan"), value_states[:, :, :1] * float("nan")

    def get_seq_length(self) -> int:
        """Count cached positions as transformers does, padding included."""
        return int(self.cache._mask.shape[1])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Give the number of positions of the next forward pass, and where they start."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Give the tokens that a request can have, padding not counted."""
        return self.cache._max_cache_len


class FP8LatentCache(Cache):  # type: ignore[misc]
    """Paged FP8 planes as the cache of a transformers model: 644 bytes a token and layer.

    Padding is not cached. A forward pass that fails leaves the cache as it was. Beams, and requests
    that `batch_repeat_interleave` made, share pages until one of them writes.

    Parameters
    ----------
    config
        ``model.config``.
    max_cache_len
        Tokens that a request can have, its prompt included, padding not.
    max_batch_size
        Requests, times beams, that the pool has room for; by default the first forward pass's.
    page_size
        Tokens a page.
    scale_format
        "amax" or "pow2", of cache and query.

    Attributes
    ----------
    layers
        Each with its `planes`, `LatentPages`, from the first forward pass on.

    Raises
    ------
    ValueError, NotImplementedError
        A size below 1, an unknown scale format, or a model that has layers without latents.
    """

    def __init__(
        self,
        config: Any,
        max_cache_len: int,
        max_batch_size: int | None = None,
        *,
        page_size: int = 64,
        scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
    ) -> None:
        self.config = config = config.get_text_config(decoder=True)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if getattr(config, "kv_lora_rank", None) is None or kinds != {"full_attention"}:
            raise NotImplementedError(
                "config must have a kv_lora_rank, and full attention in every layer; got "
                f"{config.model_type!r} with {', '.join(sorted(kinds))}"
            )
        sizes = {"max_cache_len": max_cache_len, "page_size": page_size}
        if max_batch_size is not None:
            sizes["max_batch_size"] = max_batch_size
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")
        check_scale_format(scale_format)
        self.page_size = page_size
        self.scale_format = scale_format
        self._max_cache_len = max_cache_len
        self._max_batch_size = max_batch_size
        self._allocator: PageAllocator | None = None
        self._requests: list[SequencePages] = []
        self._mask = torch.ones(0, 0, dtype=torch.bool)  # as Step.mask, of what is cached
        self._step: Step | None = None
        layers = range(config.num_hidden_layers)
        super().__init__(layers=[FP8LatentLayer(self, index) for index in layers])

    @property
    def num_pages(self) -> int:
        """Pages of the pool; 0 before the first forward pass."""
        return 0 if self._allocator is None else self._allocator.num_pages

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each request, padding not counted."""
        return self._mask.sum(1).tolist()

    # Between two forward passes

    def reset(self) -> None:
        """Forget every request; the planes stay."""
        self._select([])
        self._mask = self._mask[:, :0]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` positions: rejected speculation."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be negative or 0; got {tokens_to_remove}")
        self._mask = self._mask[:, : max(0, self._mask.shape[1] + tokens_to_remove)]

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Let each request go on from where request ``beam_idx[i]`` is. Copies no page."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some requests: their places, or a mask over the batch."""
        self._select(torch.arange(len(self._requests))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let `repeats` requests, side by side, go on from each one. Copies no page."""
        self._select([index for index in range(len(self._requests)) for _ in range(repeats)])

    def _select(self, indices: Sequence[int]) -> None:
        """Replace the requests by forks of some of them."""
        room = self.num_pages // pages_for(self._max_cache_len, self.page_size)
        if len(indices) > room:
            raise ValueError(
                f"the cache has room for {room} requests; got {len(indices)}. Build it with a "
                "larger max_batch_size"
            )
        forks = [self._requests[index].fork() for index in indices]
        for request in self._requests:
            request.release()
        self._requests, self._mask = forks, self._mask[list(indices)]

    # A forward pass

    def _begin(self, mask: Tensor | None, batch: int, s_q: int, device: torch.device) -> Step:
        """Check a forward pass and plan where its tokens go; no token is written yet."""
        cached = self._mask.shape[1]
        if cached == 0:
            self._start(batch)
        if batch != len(self._requests):
            raise ValueError(
                f"the cache holds {len(self._requests)} requests; got a batch of {batch}. Call "
                "cache.reset() to begin anew"
            )
        if mask is None:
            mask = torch.cat((self._mask, torch.ones(batch, s_q, dtype=torch.bool)), dim=1)
        if mask.shape != (batch, cached + s_q):
            raise NotImplementedError(
                f"attention_mask must be [{batch}, {cached + s_q}] (batch; cached and new "
                f"positions) and 0 for padding; got {list(mask.shape)}"
            )
        mask = mask.to("cpu", torch.bool)
        if not torch.equal(mask[:, :cached], self._mask):
            raise NotImplementedError(
                "attention_mask must repeat what it said of cached positions when they came: a "
                "cached token can't be hidden. Use cache.crop or cache.reset"
            )
        real = mask[:, cached:]
        counts, lengths = real.sum(1).tolist(), mask.sum(1).tolist()
        if max(lengths) > self._max_cache_len:
            raise ValueError(
                f"max_cache_len is {self._max_cache_len}; got a request of {max(lengths)} tokens"
            )
        for request, length in zip(self._requests, self.lengths, strict=True):
            request.truncate(length)  # after a crop, or a forward pass that failed
        plans = [r.extend(count) for r, count in zip(self._requests, counts, strict=True)]
        for layer in self.layers:
            if layer.planes is not None:
                copy_pages(layer.planes, [copy for plan in plans for copy in plan.copies])
        slots = torch.full(real.shape, -1)
        slots[real] = torch.tensor([s for plan in plans for s in plan.slots], dtype=torch.int64)
        columns = pages_for(max(lengths), self.page_size)
        table = [request.block_table_row(columns) for request in self._requests]
        padded = min(counts) < s_q
        return Step(
            mask,
            counts,
            lengths,
            real.byte().argsort(dim=1, stable=True).to(device) if padded else None,
            slots.flatten().to(device),
            torch.tensor(table, dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
        )

    def _start(self, batch: int) -> None:
        """Begin with empty requests, in a pool that has room for them."""
        room = self._max_batch_size or batch
        if batch > room:
            raise ValueError(f"max_batch_size is {room}; got a batch of {batch}")
        self.reset()
        pages = room * pages_for(self._max_cache_len, self.page_size)
        if self._allocator is None or self._allocator.num_pages < pages:
            self._allocator = PageAllocator(pages, self.page_size)
            for layer in self.layers:
                layer.planes = None
        self._requests = [SequencePages(self._allocator) for _ in range(batch)]
        self._mask = torch.ones(batch, 0, dtype=torch.bool)

    def append(self, new: NewLatents, mask: Tensor | None) -> tuple[LatentPages, Step]:
        """Write a layer's new tokens; the first layer plans for all, the last one concludes."""
        layer, c_kv, k_rope = new
        if layer.index == 0:
            self._step = self._begin(mask, c_kv.shape[0], c_kv.shape[1], c_kv.device)
        step, planes = self._step, layer.planes or layer.lazy_initialization(c_kv, k_rope)
        if step is None:
            raise RuntimeError(f"layer {layer.index} ran in a forward pass without a first layer")
        rows, slots = (c_kv.flatten(0, 1), k_rope.flatten(0, 1)), step.slots.to(c_kv.device)
        append_kv(*rows, planes, slots, scale_format=self.scale_format)
        if layer.index == len(self.layers) - 1:
            self._mask, self._step = step.mask, None
        return planes, step


def snapmla_attention(
    module: Any,
    query: Float[Tensor, "batch heads s_q qk_head_dim"],
    key: Float[Tensor, "batch heads 1 qk_head_dim"],
    value: Float[Tensor, "batch heads 1 v_head_dim"],
    attention_mask: Bool[Tensor, "batch positions"] | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch s_q heads v_head_dim"], None]:
    """Append the tokens that `FP8LatentCache.update` left, and attend over the cache.

    Parameters
    ----------
    module
        The MLA module: its widths and its `kv_b_proj`.
    query
        The rotary part last, and rotated.
    key, value
        Not used.
    attention_mask
        As `snapmla_mask` gives it.
    scaling
        Factor on the scores, YaRN's correction included.
    dropout
        0.

    Returns
    -------
    tuple
        Output, in which padding has finite values, and None for the attention weights.

    Raises
    ------
    ValueError
        No `FP8LatentCache`, another batch than it holds, or more tokens than it has room for.
    NotImplementedError
        Gradients, dropout, attention weights, a mask that is more than padding, or a `kv_b_proj`
        that is no plain floating-point linear layer. The cache is as before in either case.
    """
    new = _new_latents.get()
    _new_latents.set(None)
    if new is None:
        raise ValueError(
            f"attn_implementation {ATTN_IMPLEMENTATION!r} needs cache=FP8LatentCache(...). "
            "model.set_attn_implementation('sdpa') serves other caches, and none"
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError("FP8 attention has no gradient. Call under torch.no_grad()")
    if dropout or kwargs.get("output_attentions"):
        what = "attention_dropout" if dropout else "output_attentions"
        raise NotImplementedError(f"{ATTN_IMPLEMENTATION!r} has no {what}. Use 'eager'")
    w_uk, w_uv = _absorbed_weights(module, query)
    cache = new.layer.cache
    planes, step = cache.append(new, attention_mask)

    widths = (module.qk_nope_head_dim, module.qk_rope_head_dim)
    q_nope, q_rope = query.transpose(1, 2).split(widths, dim=-1)  # [batch, s_q, heads, .]
    order = None if step.order is None else step.order.to(query.device)[..., None, None]
    if order is not None:
        q_nope, q_rope = q_nope.take_along_dim(order, dim=1), q_rope.take_along_dim(order, dim=1)
    block_table, cache_seqlens = (
        part.to(query.device) for part in (step.block_table, step.cache_seqlens)
    )

    def absorbed(requests: slice, queries: slice) -> Tensor:
        attended = mla_decode(
            absorb_query(q_nope[requests, queries], w_uk),
            q_rope[requests, queries],
            planes,
            block_table[requests],
            cache_seqlens[requests],
            scaling,
            scale_format=cache.scale_format,
        )
        return project_values(attended.out, w_uv)

    def expanded(request: int, length: int, first: int) -> Tensor:
        only = slice(request, request + 1)
        rows = fetch_dequant(planes, block_table[only], cache_seqlens[only], total_tokens=length)
        chunks = []
        for start in range(first, s_q, PROMPT_CHUNK):
            queries = slice(start, min(start + PROMPT_CHUNK, s_q))
            keys = latent_rows(rows[: length - s_q + queries.stop], planes)
            new_queries = q_nope[request, queries], q_rope[request, queries]
            chunks.append(naive_attention(*new_queries, *keys, w_uk, w_uv, scaling).out)
        return torch.cat(chunks)

    s_q = q_nope.shape[1]
    if s_q <= ABSORBED_MAX_QUERIES:
        out = absorbed(slice(None), slice(None))
    else:
        out = q_nope.new_zeros(*q_nope.shape[:3], module.v_head_dim)
        for request, (count, length) in enumerate(zip(step.counts, step.lengths, strict=True)):
            first = s_q - count
            if count > ABSORBED_MAX_QUERIES:
                out[request, first:] = expanded(request, length, first)
            elif count:
                only = slice(request, request + 1)
                out[only, first:] = absorbed(only, slice(first, s_q))
    if order is not None:
        out = out.take_along_dim(order.argsort(dim=1), dim=1)
    return out, None


def _absorbed_weights(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """Give W_UK and W_UV as views; refuse what need not compute ``x @ weight.T``."""
    projection = module.kv_b_proj
    weight: Any = getattr(projection, "weight", None)
    plain = type(projection) is nn.Linear and projection.bias is None
    if not plain or weight.dtype not in QUERY_DTYPES or weight.device != query.device:
        raise NotImplementedError(
            f"kv_b_proj must be a torch.nn.Linear without bias in bf16, f16 or f32 on "
            f"{query.device}; got {type(projection).__name__} with {describe(weight)}. Merge an "
            "adapter, load a quantised checkpoint dequantised, do not offload"
        )
    per_head = weight.unflatten(0, (query.shape[1], -1))
    return per_head[:, : module.qk_nope_head_dim], per_head[:, module.qk_nope_head_dim :]


def snapmla_mask(
    *,
    attention_mask: Bool[Tensor, "batch positions"] | None = None,
    mask_function: Any = causal_mask_function,
    **sizes: Any,
) -> Bool[Tensor, "batch positions"] | None:
    """Hand on which positions are padding; nothing of size s_q x length is made.

    Raises
    ------
    NotImplementedError
        A mask function other than the causal one.
    """
    _new_latents.set(None)  # a forward pass begins; what an interrupted one left is void
    if mask_function is not causal_mask_function:
        raise NotImplementedError(
            f"{ATTN_IMPLEMENTATION!r} is causal; got mask function {mask_function}"
        )
    return attention_mask


AttentionInterface.register(ATTN_IMPLEMENTATION, snapmla_attention)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, snapmla_mask)

"""The decoder: embedding, layers of MLA and feed-forward, and a head that gives logits.

Parameter names are the hub's, so a checkpoint loads without a table of renames. The one exception
is the routed experts, which are stacked per layer; `Decoder.checkpoint_tensors` gives each expert's
slice under its hub name.

Attention itself is not here. A layer projects its input to queries, latents and rotary keys, hands
them to an `Attention` callable, and projects the result back: `CachedAttention` goes through a
backend and its paged cache, `FullAttention` over the given tokens alone (training, and the oracle
of the tests).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stage0_reference.attention_backend import AttentionBackend, LayerCache
from stage0_reference.latent_attention import (
    absorb_query,
    accumulation_dtype,
    naive_attention,
    project_values,
)
from stage0_reference.mixture_of_experts import GatedMLP, MixtureOfExperts, Router
from stage0_reference.model_config import ModelConfig
from stage0_reference.rope import RotaryEmbedding, Rotation, apply_rotary

LATENT_NORM_EPS = 1e-6
"""Epsilon of the two norms inside MLA: the published models fix it, whatever rms_norm_eps says."""

ABSORBED_MAX_QUERIES = 8
"""Queries per request up to which "auto" attention stays absorbed; beyond, expanding pays."""


@runtime_checkable
class Attention(Protocol):
    """How a layer's queries meet the keys."""

    def __call__(
        self,
        layer: MultiHeadLatentAttention,
        q_nope: Tensor,
        q_rope: Tensor,
        c_kv: Tensor,
        k_rope: Tensor,
    ) -> Tensor:
        """Give [*tokens, heads, v_head_dim] for this layer's new tokens."""
        ...


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``, computed in float32 and rounded once."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens width"]:
        """Normalise the last axis."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MultiHeadLatentAttention(nn.Module):
    """One layer's projections around latent attention.

    Attributes
    ----------
    w_uk, w_uv
        Views of kv_b_proj: [heads, qk_nope_head_dim, kv_lora_rank] and
        [heads, v_head_dim, kv_lora_rank].
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        heads, bias = config.num_attention_heads, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=bias
        )
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=bias)

    @property
    def w_uk(self) -> Float[Tensor, "heads qk_nope_head_dim kv_lora_rank"]:
        """The half of kv_b_proj that expands keys."""
        return self._kv_b_per_head()[:, : self.config.qk_nope_head_dim]

    @property
    def w_uv(self) -> Float[Tensor, "heads v_head_dim kv_lora_rank"]:
        """The half of kv_b_proj that expands values."""
        return self._kv_b_per_head()[:, self.config.qk_nope_head_dim :]

    def _kv_b_per_head(self) -> Tensor:
        return self.kv_b_proj.weight.unflatten(0, (self.config.num_attention_heads, -1))

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rotation: Rotation,
        attention: Attention,
    ) -> Float[Tensor, "*tokens hidden"]:
        """Apply the layer to new tokens whose rotary angles are `rotation`."""
        config = self.config
        if config.q_lora_rank is None:
            q = self.q_proj(hidden)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        q = q.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        q_nope, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split(
            (config.kv_lora_rank, config.qk_rope_head_dim), dim=-1
        )
        c_kv = self.kv_a_layernorm(latent)
        per_head = Rotation(rotation.cos[..., None, :], rotation.sin[..., None, :])
        q_rope = apply_rotary(q_rope, per_head, interleaved=config.rope_interleave)
        k_rope = apply_rotary(k_rope, rotation, interleaved=config.rope_interleave)
        heads = attention(self, q_nope, q_rope, c_kv, k_rope)  # [*tokens, heads, v_head_dim]
        output: Tensor = self.o_proj(heads.flatten(-2))
        return output


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MultiHeadLatentAttention(config, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module = (
            MixtureOfExperts(config)
            if config.is_moe_layer(layer_index)
            else GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        )

    def forward(
        self, hidden: Float[Tensor, "*tokens hidden"], rotation: Rotation, attention: Attention
    ) -> Float[Tensor, "*tokens hidden"]:
        """Apply the layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DecoderBody(nn.Module):
    """What the hub calls ``model``: everything below the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A DeepSeek-style MLA decoder.

    Parameters
    ----------
    config
        The model's numbers.
    dtype
        Dtype of parameters and activations. Routing and rotary angles stay in float32 or better.
    device
        Where parameters are allocated. "meta" allocates nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self.model = DecoderBody(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rotary = RotaryEmbedding(config.rope, config.qk_rope_head_dim)
        self.to(dtype)
        for module in self.modules():
            if isinstance(module, Router):  # a rounded score would choose other experts
                module.to(accumulation_dtype(dtype))

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return self.lm_head.weight.dtype

    def hidden_states(
        self,
        token_ids: Int[Tensor, " *tokens"],
        positions: Int[Tensor, " *#tokens"],
        attention: Attention,
    ) -> Float[Tensor, "*tokens hidden"]:
        """Run all layers and the final norm."""
        rotation = self.rotary.rotation(positions)
        if self.dtype == torch.float64:
            rotation = Rotation(rotation.cos.double(), rotation.sin.double())
        hidden: Tensor = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            hidden = layer(hidden, rotation, attention)
        normed: Tensor = self.model.norm(hidden)
        return normed

    def logits(
        self, hidden: Float[Tensor, "*tokens hidden"]
    ) -> Float[Tensor, "*tokens vocab_size"]:
        """Next-token logits, f32 (f64 for a float64 model)."""
        logits: Tensor = self.lm_head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def forward(
        self,
        token_ids: Int[Tensor, " *tokens"],
        positions: Int[Tensor, " *#tokens"],
        attention: Attention,
    ) -> Float[Tensor, "*tokens vocab_size"]:
        """Logits at every token.

        Parameters
        ----------
        token_ids, positions
            New tokens and their 0-based places in their requests. With `CachedAttention` they are
            packed, one request after the other; with `FullAttention` they are [batch, length].
        attention
            How queries meet keys.
        """
        return self.logits(self.hidden_states(token_ids, positions, attention))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every parameter under its hub name; an expert's is a view of the stacked parameter."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():  # tied weights come once
            if ".experts." not in name or ".shared_experts." in name:
                tensors[name] = parameter
                continue
            stem, projection = name.rsplit(".", 1)
            for expert, weight in enumerate(parameter):
                tensors[f"{stem}.{expert}.{projection}.weight"] = weight
        return tensors


class FullAttention:
    """Naive causal attention among the given tokens alone, [batch, length]: no cache."""

    def __call__(
        self,
        layer: MultiHeadLatentAttention,
        q_nope: Float[Tensor, "batch length heads qk_nope_head_dim"],
        q_rope: Float[Tensor, "batch length heads qk_rope_head_dim"],
        c_kv: Float[Tensor, "batch length kv_lora_rank"],
        k_rope: Float[Tensor, "batch length qk_rope_head_dim"],
    ) -> Float[Tensor, "batch length heads v_head_dim"]:
        """Attend."""
        scale = layer.config.softmax_scale
        return torch.stack(
            [
                naive_attention(*request, layer.w_uk, layer.w_uv, scale).out
                for request in zip(q_nope, q_rope, c_kv, k_rope, strict=True)
            ]
        )


@dataclasses.dataclass
class CachedAttention:
    """Append the new tokens to a paged cache, then attend over it.

    New tokens are read back from the cache like old ones. So what a token sees does not depend on
    how the prompt was cut into chunks, and a lossy cache shows its loss from the first token on.

    Parameters
    ----------
    backend, cache
        The stage's attention and its planes, one entry per layer.
    query_lens
        New tokens of each request, in the packed order.
    slot_mapping
        Slot of each new token, int64 [tokens]; negative for padding.
    block_table
        Page ids, int32 [batch, max_pages].
    cache_seqlens
        Cached tokens of each request with the new ones, int32 [batch].
    form
        "absorbed", "naive", or "auto": absorbed up to `ABSORBED_MAX_QUERIES` queries a request.
        A request's form depends on its own queries only.
    """

    backend: AttentionBackend
    cache: Sequence[LayerCache]
    query_lens: Sequence[int]
    slot_mapping: Int[Tensor, " tokens"]
    block_table: Int[Tensor, "batch max_pages"]
    cache_seqlens: Int[Tensor, " batch"]
    form: str = "auto"

    def __post_init__(self) -> None:
        if self.form not in ("auto", "absorbed", "naive"):
            raise ValueError(f"form must be auto, absorbed or naive; got {self.form!r}")
        if sum(self.query_lens) != len(self.slot_mapping):
            raise ValueError(
                "query_lens must add up to the tokens of slot_mapping; got "
                f"{sum(self.query_lens)} and {len(self.slot_mapping)}"
            )

    def __call__(
        self,
        layer: MultiHeadLatentAttention,
        q_nope: Float[Tensor, "tokens heads qk_nope_head_dim"],
        q_rope: Float[Tensor, "tokens heads qk_rope_head_dim"],
        c_kv: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
    ) -> Float[Tensor, "tokens heads v_head_dim"]:
        """Append, then attend."""
        planes = self.cache[layer.layer_index]
        self.backend.append(c_kv, k_rope, planes, self.slot_mapping)
        if len(set(self.query_lens)) == 1 and self._absorbs(self.query_lens[0]):
            nope, rope = (x.unflatten(0, (-1, self.query_lens[0])) for x in (q_nope, q_rope))
            return self._absorbed(layer, planes, nope, rope, slice(None)).flatten(0, 1)
        outputs = []
        first = 0
        for request, s_q in enumerate(self.query_lens):
            nope, rope = q_nope[first : first + s_q], q_rope[first : first + s_q]
            only = slice(request, request + 1)
            if self._absorbs(s_q):
                outputs.append(self._absorbed(layer, planes, nope[None], rope[None], only)[0])
            else:
                outputs.append(self._naive(layer, planes, nope, rope, only))
            first += s_q
        return torch.cat(outputs)

    def _absorbs(self, s_q: int) -> bool:
        return self.form == "absorbed" or (self.form == "auto" and s_q <= ABSORBED_MAX_QUERIES)

    def _absorbed(
        self,
        layer: MultiHeadLatentAttention,
        planes: LayerCache,
        q_nope: Float[Tensor, "batch s_q heads qk_nope_head_dim"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        requests: slice,
    ) -> Float[Tensor, "batch s_q heads v_head_dim"]:
        attended = self.backend.attend(
            absorb_query(q_nope, layer.w_uk),
            q_rope,
            planes,
            self.block_table[requests],
            self.cache_seqlens[requests],
            layer.config.softmax_scale,
        )
        return project_values(attended.out, layer.w_uv)

    def _naive(
        self,
        layer: MultiHeadLatentAttention,
        planes: LayerCache,
        q_nope: Float[Tensor, "s_q heads qk_nope_head_dim"],
        q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
        requests: slice,
    ) -> Float[Tensor, "s_q heads v_head_dim"]:
        rows = self.backend.read_prefix(
            planes, self.block_table[requests], self.cache_seqlens[requests]
        )
        return naive_attention(
            q_nope, q_rope, *rows, layer.w_uk, layer.w_uv, layer.config.softmax_scale
        ).out

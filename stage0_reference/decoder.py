"""The decoder: embedding, layers of MLA and feed-forward, and a head that gives logits.

Parameter names are the hub's, so a checkpoint loads without a table of renames. The one exception
is the routed experts, which are stacked per layer; `Decoder.checkpoint_tensors` gives each expert's
slice under its hub name.

Attention itself is not here. A layer projects its input to queries, latents and rotary keys, hands
them to an `Attention` callable, and projects the result back: `CachedAttention` goes through a
backend and its paged cache, `FullAttention` over the given tokens alone (training, and the oracle
of the tests). The latent's norm and the rotation are still to be done then: `finish_projections`
does them, or a backend in the same pass over memory that writes the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stage0_reference.attention_backend import AttentionBackend, FusedProjections, LayerCache
from stage0_reference.latent_attention import (
    absorb_query,
    accumulation_dtype,
    naive_attention,
    project_values,
)
from stage0_reference.mixture_of_experts import Experts, GatedMLP, MixtureOfExperts, Router
from stage0_reference.model_config import ModelConfig
from stage0_reference.rope import RotaryEmbedding, Rotation, apply_rotary, query_scale

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
        latent: Tensor,
        k_rope: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        """Give [*tokens, heads, v_head_dim] for this layer's new tokens.

        `latent` is not normed, `q_rope` and `k_rope` are not rotated by `rotation` yet.
        """
        ...


class RMSNorm(nn.Module):
    """``x / rms(x) * gain``, computed in float32 and rounded once.

    Parameters
    ----------
    width
        Of the last axis.
    eps
        Added to the mean square.
    scale
        Of the result, on top of the weight.
    """

    def __init__(self, width: int, eps: float, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.scale = scale

    @property
    def gain(self) -> Float[Tensor, " width"]:
        """``scale * weight``: all that whoever norms in this layer's place has to multiply by."""
        return self.weight if self.scale == 1.0 else self.weight * self.scale

    def forward(self, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens width"]:
        """Normalise the last axis."""
        return F.rms_norm(x, self.weight.shape, self.gain, self.eps)


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
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS, config.latent_scale)
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
        query_scale: Float[Tensor, " *#tokens"] | None = None,
    ) -> Float[Tensor, "*tokens hidden"]:
        """Apply the layer to new tokens whose rotary angles are `rotation`.

        `query_scale` multiplies each token's query; None means 1.
        """
        config = self.config
        if config.q_lora_rank is None:
            q = self.q_proj(hidden)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        if query_scale is not None:
            q = (q * query_scale[..., None]).to(q.dtype)
        q = q.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        q_nope, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split(
            (config.kv_lora_rank, config.qk_rope_head_dim), dim=-1
        )
        heads = attention(self, q_nope, q_rope, latent, k_rope, rotation)
        output: Tensor = self.o_proj(heads.flatten(-2))  # of [*tokens, heads, v_head_dim]
        return output

    def finish_projections(
        self,
        q_rope: Float[Tensor, "*tokens heads qk_rope_head_dim"],
        latent: Float[Tensor, "*tokens kv_lora_rank"],
        k_rope: Float[Tensor, "*tokens qk_rope_head_dim"],
        rotation: Rotation,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm the latent and rotate: rotary query, c_kv and rotary key, shapes unchanged."""
        interleaved = self.config.rope_interleave
        per_head = Rotation(rotation.cos[..., None, :], rotation.sin[..., None, :])
        return (
            apply_rotary(q_rope, per_head, interleaved=interleaved),
            self.kv_a_layernorm(latent),
            apply_rotary(k_rope, rotation, interleaved=interleaved),
        )


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream at its scale."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MultiHeadLatentAttention(config, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module = (
            MixtureOfExperts(config)
            if config.is_moe_layer(layer_index)
            else GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        )

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rotation: Rotation,
        attention: Attention,
        query_scale: Float[Tensor, " *#tokens"] | None = None,
    ) -> Float[Tensor, "*tokens hidden"]:
        """Apply the layer."""
        scale = self.residual_scale
        attended = self.self_attn(self.input_layernorm(hidden), rotation, attention, query_scale)
        hidden = torch.add(hidden, attended, alpha=scale)
        return torch.add(hidden, self.mlp(self.post_attention_layernorm(hidden)), alpha=scale)


class DecoderBody(nn.Module):
    """What the hub calls ``model``: everything below the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(config.family.layers(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """An MLA decoder; what is not as in DeepSeek's is in `families`.

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
        scale = query_scale(self.config.rope, positions)
        hidden: Tensor = self.model.embed_tokens(token_ids)
        if self.config.scale_emb != 1.0:
            hidden = hidden * self.config.scale_emb
        for layer in self.model.layers:
            hidden = layer(hidden, rotation, attention, scale)
        normed: Tensor = self.model.norm(hidden)
        return normed

    def logits(
        self, hidden: Float[Tensor, "*tokens hidden"]
    ) -> Float[Tensor, "*tokens vocab_size"]:
        """Next-token logits, f32 (f64 for a float64 model)."""
        if self.config.logit_scale != 1.0:
            hidden = hidden * self.config.logit_scale
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
            stem, projection = name.rsplit(".", 1)
            owner = self.get_submodule(stem)
            if not isinstance(owner, Experts) or owner.is_stacked_in_checkpoint:
                tensors[name] = parameter
                continue
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
        latent: Float[Tensor, "batch length kv_lora_rank"],
        k_rope: Float[Tensor, "batch length qk_rope_head_dim"],
        rotation: Rotation,
    ) -> Float[Tensor, "batch length heads v_head_dim"]:
        """Attend."""
        q_rope, c_kv, k_rope = layer.finish_projections(q_rope, latent, k_rope, rotation)
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
        self._fuses = isinstance(self.backend, FusedProjections)
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
        latent: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
        rotation: Rotation,
    ) -> Float[Tensor, "tokens heads v_head_dim"]:
        """Append, then attend."""
        planes = self.cache[layer.layer_index]
        if self._fuses:
            self.backend.append_projected(  # type: ignore[attr-defined]
                latent,
                k_rope,
                planes,
                self.slot_mapping,
                norm_weight=layer.kv_a_layernorm.gain,
                norm_eps=layer.kv_a_layernorm.eps,
                rotation=rotation,
                interleaved=layer.config.rope_interleave,
            )
        else:
            q_rope, c_kv, k_rope = layer.finish_projections(q_rope, latent, k_rope, rotation)
            self.backend.append(c_kv, k_rope, planes, self.slot_mapping)
        if len(set(self.query_lens)) == 1 and self._absorbs(self.query_lens[0]):
            nope, rope = (x.unflatten(0, (-1, self.query_lens[0])) for x in (q_nope, q_rope))
            angles = Rotation(*(x.unflatten(0, (-1, self.query_lens[0])) for x in rotation))
            return self._absorbed(layer, planes, nope, rope, angles, slice(None)).flatten(0, 1)
        outputs = []
        first = 0
        for request, s_q in enumerate(self.query_lens):
            tokens, only = slice(first, first + s_q), slice(request, request + 1)
            nope, rope = q_nope[tokens], q_rope[tokens]
            angles = Rotation(rotation.cos[tokens], rotation.sin[tokens])
            if self._absorbs(s_q):
                batched = Rotation(angles.cos[None], angles.sin[None])
                attended = self._absorbed(layer, planes, nope[None], rope[None], batched, only)
                outputs.append(attended[0])
            else:
                outputs.append(self._naive(layer, planes, nope, rope, angles, only))
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
        rotation: Rotation,
        requests: slice,
    ) -> Float[Tensor, "batch s_q heads v_head_dim"]:
        """Attend in absorbed form; `q_rope` is rotated unless the backend does it."""
        where = (self.block_table[requests], self.cache_seqlens[requests])
        q_latent, scale = absorb_query(q_nope, layer.w_uk), layer.config.softmax_scale
        if self._fuses:
            attended = self.backend.attend_projected(  # type: ignore[attr-defined]
                q_latent,
                q_rope,
                planes,
                *where,
                scale,
                rotation=rotation,
                interleaved=layer.config.rope_interleave,
            )
        else:
            attended = self.backend.attend(q_latent, q_rope, planes, *where, scale)
        return project_values(attended.out, layer.w_uv)

    def _naive(
        self,
        layer: MultiHeadLatentAttention,
        planes: LayerCache,
        q_nope: Float[Tensor, "s_q heads qk_nope_head_dim"],
        q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
        rotation: Rotation,
        requests: slice,
    ) -> Float[Tensor, "s_q heads v_head_dim"]:
        """Attend over keys and values expanded from the cache; as to rotation see `_absorbed`."""
        if self._fuses:
            per_head = Rotation(rotation.cos[:, None], rotation.sin[:, None])
            q_rope = apply_rotary(q_rope, per_head, interleaved=layer.config.rope_interleave)
        rows = self.backend.read_prefix(
            planes, self.block_table[requests], self.cache_seqlens[requests]
        )
        return naive_attention(
            q_nope, q_rope, *rows, layer.w_uk, layer.w_uv, layer.config.softmax_scale
        ).out

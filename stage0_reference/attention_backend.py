"""The seam between the decoder and the way attention is computed.

The decoder knows four things about attention: make a cache, append tokens to it, attend over it,
read a prefix back. A stage of this course is one implementation of these four. Later stages are
found by name through the entry-point group ``snapmla.stages``, so that no stage imports a later
one.

A layer's cache is a NamedTuple of planes, each ``[num_pages, page_size, ...]``; whoever copies or
exports pages treats all planes alike and need not know what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import LatentRows
from stage0_reference.model_config import ModelConfig
from stage0_reference.rope import Rotation

STAGES_GROUP = "snapmla.stages"
"""Entry-point group in which a later stage maps its number to its backend class."""

LayerCache = Any
"""One layer's planes: a NamedTuple of tensors [num_pages, page_size, ...]."""


@runtime_checkable
class AttentionBackend(Protocol):
    """What a stage supplies to the decoder."""

    stage: int
    description: str

    def make_cache(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> list[LayerCache]:
        """Allocate the planes of every layer."""
        ...

    def append(
        self,
        c_kv: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
        cache: LayerCache,
        slot_mapping: Int[Tensor, " tokens"],
    ) -> None:
        """Write tokens into their slots of one layer; a negative slot writes nothing."""
        ...

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
        """Attend over one layer's cache; the queries are each request's last s_q tokens."""
        ...

    def read_prefix(
        self,
        cache: LayerCache,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
    ) -> LatentRows:
        """Give back the cached rows of every request, packed one request after the other."""
        ...


@runtime_checkable
class FusedProjections(Protocol):
    """What a backend may offer on top: the latent's norm and the rotation in its own passes.

    The decoder then hands over projections as they come out of the matrix products.
    """

    def append_projected(
        self,
        latent: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
        cache: LayerCache,
        slot_mapping: Int[Tensor, " tokens"],
        *,
        norm_weight: Float[Tensor, " kv_lora_rank"],
        norm_eps: float,
        rotation: Rotation,
        interleaved: bool,
    ) -> None:
        """Norm, rotate and write tokens; otherwise as `AttentionBackend.append`."""
        ...

    def attend_projected(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: LayerCache,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        softmax_scale: float,
        *,
        rotation: Rotation,
        interleaved: bool,
        causal: bool = True,
    ) -> AttentionOutput:
        """Rotate the rotary query and attend; otherwise as `AttentionBackend.attend`."""
        ...


def cache_bytes_per_token(cache: Sequence[LayerCache]) -> int:
    """Bytes that one token takes in all planes of all layers."""
    return sum(plane.element_size() * plane.shape[2:].numel() for layer in cache for plane in layer)


def available_stages() -> list[int]:
    """Stages that can be loaded, in order: this one, and every installed later one."""
    return sorted({0, *(int(entry.name) for entry in entry_points(group=STAGES_GROUP))})


def load_backend(stage: int) -> AttentionBackend:
    """Import and construct the backend of a stage.

    Raises
    ------
    ValueError
        No installed package supplies that stage.
    """
    if stage == 0:
        from stage0_reference.absorbed_backend import AbsorbedBackend

        return AbsorbedBackend()
    for entry in entry_points(group=STAGES_GROUP):
        if entry.name == str(stage):
            backend: AttentionBackend = entry.load()()
            return backend
    raise ValueError(f"stage must be one of {', '.join(map(str, available_stages()))}; got {stage}")

"""Stage 3's attention backends: the decoder on the fused kernels.

`FusedBackend` is stage 2's cache and mathematics through the kernels. `Bf16KernelBackend` runs the
same decode kernel over stage 0's BF16 cache: the baseline that FP8 is measured against.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import Bf16LatentPages, LatentRows
from stage0_reference.model_config import ModelConfig
from stage0_reference.rope import Rotation
from stage1_quant.fp8_latent_cache import LatentPages, latent_rows
from stage1_quant.quantize import DEFAULT_SCALE_FORMAT, ScaleFormat
from stage2_pv_pipeline.fp8_pipeline_backend import Fp8PipelineBackend
from stage3_dataflow.decode import PFormat, decode_quantized, mla_decode
from stage3_dataflow.execution_path import which_path
from stage3_dataflow.fused_writes import append_kv, fused_k_append, fused_q_quant
from stage3_dataflow.prefix import fetch_dequant
from stage3_dataflow.split_plan import DEFAULT_SPLIT_RULE, SplitRule
from stage3_dataflow.workspace import DecodeWorkspace, workspace_bytes


class KernelAttention:
    """Attention by `mla_decode` over either cache; what both backends share.

    Parameters
    ----------
    p_format, split_rule
        As `stage3_dataflow.decode.mla_decode`.
    """

    stage = 3
    capturable = True
    """Nothing here synchronises on a GPU, so a decode step can be a CUDA graph."""
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT
    technique = ""

    def __init__(
        self,
        *,
        p_format: PFormat | None = None,
        split_rule: SplitRule = DEFAULT_SPLIT_RULE,
    ) -> None:
        self.p_format = p_format
        self.split_rule = split_rule
        self._workspaces: dict[torch.device, DecodeWorkspace] = {}
        self._use(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def _use(self, device: torch.device | str) -> None:
        """Say in the description what runs on this device; a meta device only plans."""
        if torch.device(device).type == "meta":
            return
        path = which_path(device).name
        runs = "here as PyTorch twins" if path == "pytorch" else path
        self.description = f"{self.technique} ({runs})"

    def make_cache(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> list[Any]:
        """Allocate the planes of every layer, in the format of the backend mixed with."""
        self._use(device)
        planes: list[Any] = super().make_cache(  # type: ignore[misc]  # the other base class has it
            config, num_pages, page_size, device=device
        )
        return planes

    def _workspace(self, device: torch.device) -> DecodeWorkspace:
        if device not in self._workspaces:
            self._workspaces[device] = DecodeWorkspace(device)
        return self._workspaces[device]

    def workspace_bytes(
        self, batch: int, s_q: int, heads: int, kv_lora_rank: int, capacity: int
    ) -> int:
        """Bytes that decoding needs beside the cache; see `stage3_dataflow.workspace`."""
        return workspace_bytes(batch, s_q, heads, kv_lora_rank, capacity, self.split_rule)

    def attend(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: LatentPages | Bf16LatentPages,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        softmax_scale: float,
        *,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend over one layer's cache. Raises as `mla_decode`."""
        return mla_decode(
            q_latent,
            q_rope,
            cache,
            block_table,
            cache_seqlens,
            softmax_scale,
            causal=causal,
            scale_format=self.scale_format,
            p_format=self.p_format,
            split_rule=self.split_rule,
            workspace=self._workspace(q_latent.device),
        )


class FusedBackend(KernelAttention, Fp8PipelineBackend):
    """Stages 1 and 2 by fused kernels.

    Parameters
    ----------
    scale_format
        "amax" or "pow2", for cache and query.
    p_format, split_rule
        As `stage3_dataflow.decode.mla_decode`.
    """

    technique = "fused FP8 kernels"

    def __init__(
        self,
        scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
        *,
        p_format: PFormat | None = None,
        split_rule: SplitRule = DEFAULT_SPLIT_RULE,
    ) -> None:
        Fp8PipelineBackend.__init__(self, scale_format)
        KernelAttention.__init__(self, p_format=p_format, split_rule=split_rule)

    def append(
        self,
        c_kv: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
        cache: LatentPages,
        slot_mapping: Int[Tensor, " tokens"],
    ) -> None:
        """Quantise tokens into their slots, in one launch. Raises as `append_kv`."""
        append_kv(c_kv, k_rope, cache, slot_mapping, scale_format=self.scale_format)

    def append_projected(
        self,
        latent: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
        cache: LatentPages,
        slot_mapping: Int[Tensor, " tokens"],
        *,
        norm_weight: Float[Tensor, " kv_lora_rank"],
        norm_eps: float,
        rotation: Rotation,
        interleaved: bool,
    ) -> None:
        """Norm, rotate and quantise tokens into their slots, in one launch."""
        fused_k_append(
            latent,
            k_rope,
            cache,
            slot_mapping,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            rotation=rotation,
            interleaved=interleaved,
            scale_format=self.scale_format,
        )

    def attend_projected(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: LatentPages,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        softmax_scale: float,
        *,
        rotation: Rotation,
        interleaved: bool,
        causal: bool = True,
    ) -> AttentionOutput:
        """Rotate and quantise the query in one launch, then attend."""
        query = fused_q_quant(
            q_latent, q_rope, rotation, interleaved=interleaved, scale_format=self.scale_format
        )
        return decode_quantized(
            query,
            cache,
            block_table,
            cache_seqlens,
            softmax_scale,
            causal=causal,
            out_dtype=q_latent.dtype,
            p_format=self.p_format,
            split_rule=self.split_rule,
            workspace=self._workspace(q_latent.device),
        )

    def read_prefix(
        self,
        cache: LatentPages,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
    ) -> LatentRows:
        """Give back cached rows in BF16, packed. Raises as `fetch_dequant`."""
        return latent_rows(fetch_dequant(cache, block_table, cache_seqlens), cache)


class Bf16KernelBackend(KernelAttention, AbsorbedBackend):
    """The kernels over a BF16 cache; reading a prefix back is stage 0's."""

    technique = "BF16 kernel"

    def __init__(self, *, split_rule: SplitRule = DEFAULT_SPLIT_RULE) -> None:
        AbsorbedBackend.__init__(self)
        KernelAttention.__init__(self, split_rule=split_rule)

    def append(
        self,
        c_kv: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
        cache: Bf16LatentPages,
        slot_mapping: Int[Tensor, " tokens"],
    ) -> None:
        """Round tokens to BF16 and write them, in one launch. Raises as `fused_k_append`."""
        fused_k_append(c_kv, k_rope, cache, slot_mapping)

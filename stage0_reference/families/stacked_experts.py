"""Experts that a checkpoint holds in two tensors a layer: gates with ups, and downs.

Views give the three projections that `Experts` computes with, so nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stage0_reference.decoder import DecoderLayer
from stage0_reference.mixture_of_experts import Experts, MixtureOfExperts
from stage0_reference.model_config import ModelConfig


class StackedExperts(Experts):
    """`gate_up_proj` [experts, 2 inner, hidden] and `down_proj` [experts, hidden, inner]."""

    is_stacked_in_checkpoint = True

    def allocate(self, inner: int, hidden: int) -> None:
        """Register the parameters."""
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, hidden, inner))

    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """As the base class; gate and up are views."""
        gate, up = self.gate_up_proj.chunk(2, dim=1)
        return gate, up, self.down_proj


class StackedLayer(DecoderLayer):
    """The usual layer around such experts."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        if isinstance(self.mlp, MixtureOfExperts):
            self.mlp.experts = StackedExperts(config)

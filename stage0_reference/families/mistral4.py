"""Mistral 4: queries grow with the position, so that attention stays sharp over a long context.

Every query is multiplied by ``1 + beta ln(1 + floor(position / original_max_position_embeddings))``
(`rope.query_scale`), on top of YaRN. Routing is a softmax, and checkpoints hold a layer's experts
stacked in two tensors (`stacked_experts.py`). Text models only: what stands around one in a
multimodal checkpoint is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from stage0_reference.families.family import Family, UnsupportedModelError

if TYPE_CHECKING:
    from stage0_reference.model_config import ModelConfig


class Mistral4(Family):
    """Greedy routing, stacked experts."""

    def derived(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse grouped routing, which no published model has, and positions left to a guess."""
        if (fields.get("n_group") or 1) != 1:
            raise UnsupportedModelError(
                f"n_group {fields['n_group']!r} is not supported for mistral4; supported: 1"
            )
        if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
            raise ValueError("config.json lacks rope_parameters, needed for mistral4")
        return {"topk_method": "greedy", "scoring_func": "softmax"}

    def layers(self, config: ModelConfig) -> list[nn.Module]:
        """Build layers whose experts are stacked as in the checkpoint."""
        from stage0_reference.families.stacked_experts import StackedLayer

        return [StackedLayer(config, index) for index in range(config.num_hidden_layers)]


MISTRAL4 = Mistral4(assumed={"norm_topk_prob": True})

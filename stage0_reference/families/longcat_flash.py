"""LongCat-Flash: two attentions a layer, a mixture beside them, experts that cost nothing.

The model that SnapMLA was measured on. Its low-rank projections are rescaled to the variance that
full-rank ones would have, and both factors disappear into what is there anyway:

- queries, nope and rotary alike, times ``sqrt(hidden_size / q_lora_rank)``: every score has it as a
  factor, so it belongs to `ModelConfig.softmax_scale`;
- the normed latent times ``sqrt(hidden_size / kv_lora_rank)``: part of the norm's `RMSNorm.gain`,
  which a backend that norms by itself is given too. The cache holds scaled latents, as in
  transformers.

`num_hidden_layers` counts attentions, since each has a cache: twice the file's ``num_layers``. How
a layer joins them is in `shortcut_layer.py`.

References
----------
LongCat-Flash (arXiv 2509.01322), sections 2.1 (zero-computation experts), 2.2 (shortcut-connected
mixture) and 2.3 (variance alignment).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from stage0_reference.families.family import NEEDED, Family, UnsupportedModelError

if TYPE_CHECKING:
    from stage0_reference.model_config import ModelConfig

ATTENTIONS = 2
"""Attentions in a layer."""


class LongcatFlash(Family):
    """Own spelling, own layers."""

    def derived(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Count attentions, and refuse variants that no code is published for."""
        kind = fields.get("zero_expert_type") or "identity"
        if kind != "identity":
            raise UnsupportedModelError(
                f"zero_expert_type {kind!r} is not supported; supported: identity"
            )
        if fields.get("router_bias"):
            raise UnsupportedModelError("router_bias true is not supported; supported: false")
        return {
            "num_hidden_layers": ATTENTIONS * fields["num_layers"],
            "topk_method": "noaux_tc",
            "scoring_func": "softmax",
        }

    def layers(self, config: ModelConfig) -> list[nn.Module]:
        """Build layers of two attentions."""
        from stage0_reference.families.shortcut_layer import ShortcutLayer

        return [
            ShortcutLayer(config, first) for first in range(0, config.num_hidden_layers, ATTENTIONS)
        ]

    def is_unused(self, name: str, config: ModelConfig) -> bool:
        """Multi-token prediction, and weights of zero-computation experts.

        The latter are an artefact: transformers keeps and saves gates for experts that have none.
        """
        _, is_expert, rest = name.partition(".mlp.experts.")
        number = rest.partition(".")[0]
        return name.startswith("model.mtp.") or bool(
            is_expert and number.isdecimal() and int(number) >= (config.n_routed_experts or 0)
        )


LONGCAT_FLASH = LongcatFlash(
    needed=(
        *NEEDED,
        "q_lora_rank",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ),
    spelling={
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "num_experts_per_tok": "moe_topk",
        "moe_intermediate_size": "expert_ffn_hidden_size",
    },
    assumed={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
        "routed_scaling_factor": 6.0,
        "zero_expert_num": 256,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    own_fields=("zero_expert_num", "mla_scale_q_lora", "mla_scale_kv_lora"),
)

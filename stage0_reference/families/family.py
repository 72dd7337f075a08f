"""What a model type may change, in one place: a family overrides what it differs in.

DeepSeek's own models are the base class as it stands. A family that only assumes other numbers
where its `config.json` is silent is an instance of it; one that spells fields differently, computes
a number from them, or has other layers is a subclass in a file of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from stage0_reference.model_config import ModelConfig

NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


class UnsupportedModelError(NotImplementedError):
    """The configuration asks for something that this decoder does not compute."""


@dataclasses.dataclass(frozen=True)
class Family:
    """How one model type is read and built.

    Attributes
    ----------
    needed
        Fields without which there is no model, by their names in `ModelConfig`.
    assumed
        What the family's published code assumes where ``config.json`` is silent.
    spelling
        `ModelConfig`'s name to the family's, where they differ.
    own_fields
        Fields of `ModelConfig` that only this family's ``config.json`` may set.
    """

    needed: tuple[str, ...] = NEEDED
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spelling: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own_fields: tuple[str, ...] = ()

    def spelt(self, name: str) -> str:
        """Name of a field in the family's ``config.json``."""
        return self.spelling.get(name, name)

    def derived(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Values of `ModelConfig` that follow from the others.

        Parameters
        ----------
        fields
            The whole ``config.json``, in the family's spelling; what `needed` lists is there and
            counts are whole numbers in range.
        """
        return {}

    def layers(self, config: ModelConfig) -> list[nn.Module]:
        """Build the decoder's layers, in order.

        A layer is called with (hidden, rotation, attention, query_scale); its attentions take the
        places of the cache from 0 on.
        """
        from stage0_reference.decoder import DecoderLayer

        return [DecoderLayer(config, index) for index in range(config.num_hidden_layers)]

    def is_unused(self, name: str, config: ModelConfig) -> bool:
        """Say whether published checkpoints have this tensor for something that is not computed."""
        return False

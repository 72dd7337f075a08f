"""MiniCPM3: a small dense model whose branches are scaled (maximal update parametrization).

Embeddings are multiplied by ``scale_emb``, every branch by ``scale_depth / sqrt(layers)`` before it
is added to the residual stream, and the head's input by ``dim_model_base / hidden_size``; so
`ModelConfig.residual_scale` and `logit_scale` say. Its positions are stretched by LongRoPE (see
`rope.py`), and rotary pairs are (i, i + d/2) as projected.

References
----------
MiniCPM (arXiv 2404.06395), section 4; LongRoPE (arXiv 2402.13753).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage0_reference.families.family import NEEDED, Family


class MiniCPM3(Family):
    """Three scales, and a value width that may be left out."""

    def derived(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Heads share the hidden width where no value width is given."""
        if fields.get("v_head_dim") is not None:
            return {}
        return {"v_head_dim": fields["hidden_size"] // fields["num_attention_heads"]}


MINICPM3 = MiniCPM3(
    needed=tuple(name for name in NEEDED if name != "v_head_dim"),
    assumed={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_interleave": False,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    own_fields=("scale_emb", "scale_depth", "dim_model_base"),
)

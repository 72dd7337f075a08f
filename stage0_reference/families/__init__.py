"""The model types that can be read, each with what it changes.

DeepSeek-V2 leaves routing to `ModelConfig`'s defaults. What its successors assume where a file is
silent is what transformers assumes for them.
"""

from __future__ import annotations

from stage0_reference.families.family import Family
from stage0_reference.families.longcat_flash import LONGCAT_FLASH
from stage0_reference.families.minicpm3 import MINICPM3
from stage0_reference.families.mistral4 import MISTRAL4

__all__ = ["FAMILIES", "Family"]

_NOAUX_TC = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
_DEEPSEEK_V3 = Family(
    assumed=_NOAUX_TC | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
)

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": Family(
        assumed=_NOAUX_TC
        | {"routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}
    ),
    "minicpm3": MINICPM3,
    "longcat_flash": LONGCAT_FLASH,
    "youtu": Family(assumed={"tie_word_embeddings": True}),
    "mistral4": MISTRAL4,
}
"""Model type in ``config.json`` to its family."""

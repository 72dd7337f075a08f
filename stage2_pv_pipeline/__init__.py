"""Stage 2: the rescaled FP8 PV product. See README.md in this folder."""

from stage2_pv_pipeline.decode import mla_decode
from stage2_pv_pipeline.fp8_pipeline_backend import Fp8PipelineBackend
from stage2_pv_pipeline.rescaled_pv import merge_partials, rescaled_pv_attention

__all__ = ["Fp8PipelineBackend", "merge_partials", "mla_decode", "rescaled_pv_attention"]

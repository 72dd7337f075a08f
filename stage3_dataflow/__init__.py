"""Stage 3: fused kernels, and the library people import. See README.md in this folder.

Importing it is light: Triton is imported by the first call that launches a kernel.
"""

from stage0_reference.latent_cache import Bf16LatentPages
from stage1_quant.fp8_latent_cache import LatentPages, allocate_latent_pages
from stage1_quant.quantize import QuantizedRows
from stage2_pv_pipeline.rescaled_pv import merge_partials
from stage3_dataflow.decode import decode_quantized, mla_decode, which_kernel
from stage3_dataflow.execution_path import ExecutionPath, use_path, which_path
from stage3_dataflow.fused_writes import append_kv, fused_k_append, fused_q_quant, quantize_q
from stage3_dataflow.prefix import fetch_dequant
from stage3_dataflow.split_plan import SplitRule, suggest_split_rule
from stage3_dataflow.workspace import DecodeWorkspace, workspace_bytes

__all__ = [
    "Bf16LatentPages",
    "DecodeWorkspace",
    "ExecutionPath",
    "LatentPages",
    "QuantizedRows",
    "SplitRule",
    "allocate_latent_pages",
    "append_kv",
    "decode_quantized",
    "fetch_dequant",
    "fused_k_append",
    "fused_q_quant",
    "merge_partials",
    "mla_decode",
    "quantize_q",
    "suggest_split_rule",
    "use_path",
    "which_kernel",
    "which_path",
    "workspace_bytes",
]

"""Stage 1: RoPE-aware per-token FP8 quantisation of the latent cache. See README.md here."""

from stage1_quant.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from stage1_quant.fp8_backend import Fp8CacheBackend
from stage1_quant.fp8_latent_cache import LatentPages, append_kv, fetch_dequant
from stage1_quant.quantize import (
    DEFAULT_SCALE_FORMAT,
    QuantizedRows,
    dequantize_rows,
    quantize_q,
    quantize_rows,
    token_scale,
)

__all__ = [
    "DEFAULT_SCALE_FORMAT",
    "E4M3_MAX",
    "Fp8CacheBackend",
    "LatentPages",
    "QuantizedRows",
    "append_kv",
    "decode_e4m3",
    "dequantize_rows",
    "encode_e4m3",
    "fetch_dequant",
    "quantize_q",
    "quantize_rows",
    "token_scale",
]

"""Stage 0: an exact BF16 MLA decoder in PyTorch. See README.md in this folder."""

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import AttentionBackend, available_stages, load_backend
from stage0_reference.checkpoint import CheckpointError, load_safetensors, save_safetensors
from stage0_reference.decoder import CachedAttention, Decoder, FullAttention
from stage0_reference.generation import Completion, GeneratedToken, TextGenerator
from stage0_reference.latent_attention import (
    AttentionOutput,
    absorbed_attention,
    latent_attention,
    naive_attention,
)
from stage0_reference.latent_cache import Bf16LatentPages
from stage0_reference.model_config import ModelConfig, UnsupportedModelError
from stage0_reference.page_allocator import OutOfPages, PageAllocator, SequencePages
from stage0_reference.pretrained import load_decoder, load_model, shipped_checkpoint
from stage0_reference.sampling import SamplingParams
from stage0_reference.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "AbsorbedBackend",
    "AttentionBackend",
    "AttentionOutput",
    "Bf16LatentPages",
    "ByteTokenizer",
    "CachedAttention",
    "CheckpointError",
    "Completion",
    "Decoder",
    "FullAttention",
    "GeneratedToken",
    "HubTokenizer",
    "ModelConfig",
    "OutOfPages",
    "PageAllocator",
    "SamplingParams",
    "SequencePages",
    "TextGenerator",
    "Tokenizer",
    "UnsupportedModelError",
    "absorbed_attention",
    "available_stages",
    "latent_attention",
    "load_backend",
    "load_decoder",
    "load_model",
    "load_safetensors",
    "load_tokenizer",
    "naive_attention",
    "save_safetensors",
    "shipped_checkpoint",
]

"""From a checkpoint directory to a decoder and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch

from stage0_reference.checkpoint import load_safetensors
from stage0_reference.decoder import Decoder
from stage0_reference.model_config import ModelConfig
from stage0_reference.tokenizer import Tokenizer, load_tokenizer


class LoadedModel(NamedTuple):
    """A decoder with its weights, and the tokenizer that came with it."""

    decoder: Decoder
    tokenizer: Tokenizer


def shipped_checkpoint() -> Path:
    """Directory of the small byte-level model that comes with the package."""
    return Path(str(files("stage0_reference"))) / "pretrained" / "python-bytes-8m"


def default_dtype(device: torch.device | str) -> torch.dtype:
    """BF16 where the hardware multiplies it, float32 on a CPU (the cache is BF16 either way)."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def load_decoder(
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> Decoder:
    """Build a decoder and fill it from a checkpoint, one tensor at a time.

    Parameters
    ----------
    directory
        Laid out as on the Hugging Face hub: ``config.json`` and safetensors, sharded or not.
    dtype
        Dtype of parameters and activations; `default_dtype` if not given.
    device
        Where the parameters live. They are allocated there once, and each tensor is copied in.
    progress
        Show a bar on stderr if that is a terminal.

    Raises
    ------
    FileNotFoundError, ValueError, UnsupportedModelError
        From the configuration (`ModelConfig.from_directory`).
    CheckpointError
        From the weights (`load_safetensors`): every problem at once.
    """
    config = ModelConfig.from_directory(directory)
    dtype = default_dtype(device) if dtype is None else dtype
    # On "meta" first: default initialisation would cost more than the load itself.
    decoder = Decoder(config, dtype=dtype, device="meta").to_empty(device=device)
    if config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    load_safetensors(
        directory,
        decoder.checkpoint_tensors(),
        ignore=unused_tensors(config),
        progress=progress,
    )
    return decoder.eval().requires_grad_(False)


def load_model(
    directory: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> LoadedModel:
    """Load a decoder and its tokenizer; the shipped model if no directory is given.

    Raises as `load_decoder` and `load_tokenizer`.
    """
    directory = shipped_checkpoint() if directory is None else Path(directory)
    ModelConfig.from_directory(directory)  # the first thing to be wrong about a directory
    tokenizer = load_tokenizer(directory)
    decoder = load_decoder(directory, dtype=dtype, device=device, progress=progress)
    return LoadedModel(decoder, tokenizer)


def unused_tensors(config: ModelConfig) -> Callable[[str], bool]:
    """Say which tensors of published checkpoints a decoder of this configuration leaves."""
    first = config.num_hidden_layers
    multi_token_prediction = tuple(
        f"model.layers.{layer}." for layer in range(first, first + config.num_nextn_predict_layers)
    )

    def is_unused(name: str) -> bool:
        return (
            name.startswith(multi_token_prediction)
            or name.endswith("rotary_emb.inv_freq")  # computed here
            or (config.tie_word_embeddings and name == "lm_head.weight")
            or config.family.is_unused(name, config)
        )

    return is_unused

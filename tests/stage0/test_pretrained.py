"""The checkpoint that comes with the package: small enough to ship, and worth decoding with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import cache_bytes_per_token
from stage0_reference.evaluation import LossReport, choose_windows, heldout_loss
from stage0_reference.generation import TextGenerator
from stage0_reference.model_config import ModelConfig
from stage0_reference.pretrained import (
    LoadedModel,
    default_dtype,
    load_decoder,
    load_model,
    shipped_checkpoint,
)
from stage0_reference.sampling import SamplingParams
from stage0_reference.tokenizer import ByteTokenizer
from stage0_reference.training.corpus import load_heldout
from tests.model_factory import config_fields, random_decoder, write_checkpoint

pytestmark = pytest.mark.stage0

MAX_BYTES = 16 * 2**20
CONTEXTS = (512, 4096)


@pytest.fixture(scope="module")
def shipped() -> LoadedModel:
    """The shipped model on the CPU."""
    return load_model()


def test_the_shipped_checkpoint_is_at_most_16_mib() -> None:
    files = [path for path in shipped_checkpoint().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_every_shipped_tensor_is_bf16() -> None:
    with safe_open(shipped_checkpoint() / "model.safetensors", framework="pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}
    assert set(dtypes.values()) == {"BF16"}


def test_the_shipped_model_has_the_published_cache_widths() -> None:
    config = ModelConfig.from_directory(shipped_checkpoint())
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
    assert config.num_attention_heads >= 8
    assert config.max_position_embeddings >= 4096
    cache = AbsorbedBackend().make_cache(config, num_pages=1, page_size=1)
    assert cache_bytes_per_token(cache) == 1152 * config.num_hidden_layers


def test_the_shipped_model_loads_with_its_tokenizer(shipped: LoadedModel) -> None:
    decoder, tokenizer = shipped
    assert isinstance(tokenizer, ByteTokenizer)
    assert decoder.config == ModelConfig.from_directory(shipped_checkpoint())
    assert tokenizer.decode(tokenizer.encode("def f(x):\n")) == "def f(x):\n"
    assert max(tokenizer.encode("é")) < decoder.config.vocab_size
    assert decoder.dtype == default_dtype("cpu") == torch.float32
    assert not decoder.training
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    for name, parameter in decoder.named_parameters():
        assert bool(parameter.isfinite().all()), name


def test_dtype_and_device_are_obeyed(tmp_path: Path) -> None:
    fields = config_fields()
    decoder = random_decoder(ModelConfig.from_dict(fields))
    write_checkpoint(tmp_path, fields, decoder.checkpoint_tensors())
    loaded = load_decoder(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (loaded.dtype, loaded.device) == (torch.bfloat16, torch.device("cpu"))
    assert default_dtype("cuda:1") == torch.bfloat16


def test_what_was_written_is_what_is_loaded(tmp_path: Path) -> None:
    fields = config_fields(tie_word_embeddings=True, topk_method="noaux_tc")
    decoder = random_decoder(ModelConfig.from_dict(fields), seed=5)
    write_checkpoint(tmp_path, fields, decoder.checkpoint_tensors())
    loaded = load_decoder(str(tmp_path))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    expected = decoder.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_tied_head_that_is_stored_all_the_same_is_not_read(tmp_path: Path) -> None:
    fields = config_fields(tie_word_embeddings=True)
    decoder = random_decoder(ModelConfig.from_dict(fields))
    stored = decoder.checkpoint_tensors()
    stored["lm_head.weight"] = torch.full_like(stored["model.embed_tokens.weight"], float("nan"))
    write_checkpoint(tmp_path, fields, stored)
    loaded = load_decoder(tmp_path)
    assert torch.equal(loaded.lm_head.weight, decoder.model.embed_tokens.weight)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load_decoder(tmp_path)


def test_it_writes_text_that_looks_like_python(shipped: LoadedModel) -> None:
    decoder, tokenizer = shipped
    prompt = tokenizer.encode(
        "import os\nimport sys\n\n\ndef main():\n    parser = argparse.Argume"
    )
    generator = TextGenerator(decoder, AbsorbedBackend(), num_pages=2)
    (completion,) = generator.generate([prompt], SamplingParams(max_new_tokens=10))
    assert tokenizer.decode(completion.token_ids).startswith("ntParser(")


@pytest.mark.slow
def test_it_reads_unseen_python_better_than_gzip_and_ngrams_and_uses_its_context(
    shipped: LoadedModel,
) -> None:
    documents = [list(text) for _, text in load_heldout()]
    reports: dict[int, LossReport] = {}
    for context in CONTEXTS:
        windows = choose_windows(documents, context, longest_context=max(CONTEXTS), max_windows=2)
        reports[context] = heldout_loss(shipped.decoder, AbsorbedBackend(), windows, chunk=64)

    baselines = json.loads((shipped_checkpoint() / "baselines.json").read_text())["rows"]
    figures = {
        row["name"]: row["nats_per_byte"]
        for row in baselines
        if "gzip" in row["name"] or "gram" in row["name"]
    }
    assert len(figures) >= 3
    for context, report in reports.items():
        assert report.loss < min(figures.values()), (context, report.loss, figures)

    # The same bytes are scored, so what counts is the noise of the differences, byte by byte.
    gain = (reports[512].token_losses - reports[4096].token_losses).double()
    assert len(gain) == 2 * 256
    assert float(gain.mean()) > 2.0 * float(gain.std()) / len(gain) ** 0.5, float(gain.mean())

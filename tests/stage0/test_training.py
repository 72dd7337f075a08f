"""The training script: it learns, it can be cut and resumed, and what it writes loads."""

from __future__ import annotations

import json

import pytest
import torch

from stage0_reference.decoder import Decoder, FullAttention
from stage0_reference.model_config import ModelConfig
from stage0_reference.pretrained import load_model
from stage0_reference.training import train as training
from stage0_reference.training.corpus import Document

pytestmark = [
    pytest.mark.stage0,
    # Under autocast a norm sees BF16 inputs and its float32 weight: torch says that it is slower.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

SMALL = training.SHIPPED_CONFIG | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
}
RECIPE = training.TrainingRecipe(steps=60, tokens_per_step=256, context=64, warmup=5)


@pytest.fixture
def small_run(monkeypatch, tmp_path):
    """Train a small model on a small text; give a function that runs it into a folder."""
    text = b"def add(a, b):\n    return a + b\n\n\n" * 60
    monkeypatch.setattr(training, "SHIPPED_CONFIG", SMALL)
    monkeypatch.setattr(training, "load_corpus", lambda path: [Document("s", "p.py", text)] * 4)
    monkeypatch.setattr(training, "heldout_loss", lambda model, context: 0.0)
    monkeypatch.setattr(training.sys, "argv", ["train.py", "--steps", "60"])

    def run(name, **choices):
        out = tmp_path / name
        arguments = {"resume": False, "stop_after": float("inf"), "save_every": 1000} | choices
        training.train(tmp_path / "corpus.xz", out, RECIPE, **arguments)
        return out

    return run


def test_loss_falls_and_the_result_loads_like_any_checkpoint(small_run):
    out = small_run("whole")
    log = json.loads((out / "training_log.json").read_text())
    (step, loss, _), *_ = log["curve"]
    assert step == 50
    assert loss < 4.0  # from ln 264 = 5.6
    assert log["command"] == "python -m stage0_reference.training.train --steps 60"
    decoder, tokenizer = load_model(out)
    assert decoder.config.num_hidden_layers == 2
    assert tokenizer.encode("a") == [256, 97]


def test_a_run_cut_and_resumed_ends_where_an_uncut_one_does(small_run):
    whole = small_run("whole")
    cut = small_run("cut", stop_after=0.0)  # saves after its first step
    assert not (cut / "model.safetensors").exists()
    resumed = small_run("cut", resume=True)
    assert resumed == cut
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()


def test_the_training_form_of_attention_is_the_naive_one():
    model = Decoder(ModelConfig.from_dict(SMALL))
    training.initialise(model, seed=1)
    tokens = torch.randint(264, (2, 48))
    positions = torch.arange(48)[None].expand(2, -1)
    with torch.no_grad():
        fused = model(tokens, positions, training.FusedCausalAttention())
        naive = model(tokens, positions, FullAttention())
        wide = model.double()(tokens, positions, FullAttention())
    # The field's rule: no further from float64 than a small multiple of plain float32 is.
    assert (fused - wide).abs().max() <= 4 * (naive - wide).abs().max() + 2**-24 * wide.abs().max()


def test_every_epoch_sees_every_piece_once():
    recipe = training.TrainingRecipe(steps=1, tokens_per_step=40, context=10)
    tokens = torch.arange(1000)
    windows = training.training_windows(tokens, recipe)
    pieces = (1000 - 10 - 1) // 10
    starts = torch.cat([next(windows)[:, 0] for _ in range(pieces // 4)])
    assert len(set(starts.tolist())) == len(starts)
    assert len(set((starts % 10).tolist())) == 1  # one offset an epoch
    resumed = training.training_windows(tokens, recipe, first_step=3)
    again = training.training_windows(tokens, recipe)
    for _ in range(3):
        next(again)
    assert torch.equal(next(resumed), next(again))

"""Train the small byte-level model that ships with the package, from nothing to safetensors.

The model has the true cache geometry (latent 512, rotary 64) in a body small enough to ship, and
reads bytes, so that it needs no tokenizer. It is trained with the same `Decoder` that generates,
in the naive form, through torch's fused attention; matrices by Muon, the rest by AdamW; constant
learning rate, then a linear descent to zero.

    python -m stage0_reference.training.corpus --out corpus.tar.xz
    python -m stage0_reference.training.train --corpus corpus.tar.xz --out trained --steps 5000

A run can be cut: it saves its state every `--save-every` steps and goes on with `--resume`.

References
----------
Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; torch.optim.Muon.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.checkpoint import save_safetensors
from stage0_reference.decoder import Decoder, MultiHeadLatentAttention, RMSNorm
from stage0_reference.model_config import ModelConfig
from stage0_reference.rope import Rotation
from stage0_reference.training.corpus import load_corpus, load_heldout, training_tokens

SHIPPED_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 264,  # 256 bytes, begin, end; the rest pads to a multiple of 8
    "bos_token_id": 256,
    "eos_token_id": 257,
    "hidden_size": 256,
    "intermediate_size": 960,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_interleave": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 6,  # every layer is dense: no parameter is spent on routing
    "moe_layer_freq": 1,
    "n_routed_experts": 1,
    "n_shared_experts": 0,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 960,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "torch_dtype": "bfloat16",
}
"""config.json of the shipped model: DeepSeek-V3's layout, all layers dense."""


@dataclasses.dataclass(frozen=True)
class TrainingRecipe:
    """What a run is made of.

    Attributes
    ----------
    steps
        Optimiser steps.
    tokens_per_step
        Tokens of one step, a multiple of the context.
    context
        Tokens of one training window.
    matrix_lr, other_lr
        Peak learning rates of Muon (scaled to AdamW's update size) and of AdamW.
    weight_decay
        Of the matrices.
    descent
        Fraction of the run over which the learning rate falls to zero.
    warmup
        Steps over which it rises.
    seed
        Of weights and of the order of the data.
    """

    steps: int
    tokens_per_step: int = 131072
    context: int = 4096
    matrix_lr: float = 4e-3
    other_lr: float = 4e-3
    weight_decay: float = 0.1
    descent: float = 0.5
    warmup: int = 100
    seed: int = 0

    def lr_factor(self, step: int) -> float:
        """Learning rate at a step, relative to its peak."""
        rising = (step + 1) / self.warmup
        falling = (self.steps - step) / (self.steps * self.descent)
        return min(1.0, rising, falling)


class FusedCausalAttention:
    """`FullAttention` through torch's fused kernel, for training speed."""

    def __call__(
        self,
        layer: MultiHeadLatentAttention,
        q_nope: Float[Tensor, "batch length heads qk_nope_head_dim"],
        q_rope: Float[Tensor, "batch length heads qk_rope_head_dim"],
        latent: Float[Tensor, "batch length kv_lora_rank"],
        k_rope: Float[Tensor, "batch length qk_rope_head_dim"],
        rotation: Rotation,
    ) -> Float[Tensor, "batch length heads v_head_dim"]:
        """Attend."""
        q_rope, c_kv, k_rope = layer.finish_projections(q_rope, latent, k_rope, rotation)
        config = layer.config
        expanded = layer.kv_b_proj(c_kv).unflatten(-1, (config.num_attention_heads, -1))
        k_nope, value = expanded.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
        query = torch.cat((q_nope, q_rope.to(q_nope.dtype)), dim=-1)
        shared = k_rope.to(k_nope.dtype)[:, :, None].expand(*k_nope.shape[:3], -1)
        key = torch.cat((k_nope, shared), dim=-1)
        # The fused kernel wants one head width; the padding's output columns are dropped.
        value = F.pad(value, (0, config.qk_head_dim - config.v_head_dim))
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=config.softmax_scale,
        )
        return out.transpose(1, 2)[..., : config.v_head_dim]


def initialise(model: Decoder, seed: int) -> None:
    """Draw weights: unit-gain matrices, residual projections damped by depth."""
    generator = torch.Generator(model.device).manual_seed(seed)
    damping = (2 * model.config.num_hidden_layers) ** -0.5
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            torch.nn.init.ones_(module.weight)
        elif isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.3, generator=generator)
        elif isinstance(module, torch.nn.Linear):
            gain = damping if name.endswith(("o_proj", "down_proj")) else 1.0
            gain = 0.1 if name == "lm_head" else gain
            std = gain * module.in_features**-0.5
            torch.nn.init.normal_(module.weight, std=std, generator=generator)


def make_optimizers(model: Decoder, recipe: TrainingRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding, head and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.matrix_lr,
            weight_decay=recipe.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        ),
    ]


def training_windows(
    tokens: Int[Tensor, " corpus"], recipe: TrainingRecipe, first_step: int = 0
) -> Iterator[Int[Tensor, "windows context_plus_one"]]:
    """Windows of each step: every epoch cuts the corpus at a new offset and shuffles the pieces."""
    per_step = recipe.tokens_per_step // recipe.context
    pieces = (len(tokens) - recipe.context - 1) // recipe.context
    steps_per_epoch = pieces // per_step
    step = first_step
    while True:
        epoch, within = divmod(step, steps_per_epoch)
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
        offset = int(torch.randint(recipe.context, (), generator=generator))
        order = torch.randperm(pieces, generator=generator)
        for index in range(within, steps_per_epoch):
            starts = order[index * per_step : (index + 1) * per_step] * recipe.context + offset
            places = starts[:, None] + torch.arange(recipe.context + 1)
            yield tokens[places.to(tokens.device)].long()
            step += 1


@torch.no_grad()
def heldout_loss(model: Decoder, context: int, scored: int = 512) -> float:
    """Mean loss in nats per byte of the last `scored` bytes of windows of `context` bytes.

    The scored bytes are the same for every context up to 4096, so that only what the model can
    look back at changes. A check while training; `snapmla eval` measures through the cache.
    """
    attention, total, count = FusedCausalAttention(), 0.0, 0
    for _, text in load_heldout():
        data = torch.tensor([256, *text], device=model.device)
        for end in range(4096, len(data), scored):
            window = data[None, end - context : end + 1]
            positions = torch.arange(context, device=model.device)[None]
            logits = model(window[:, :-1], positions, attention)[0, -scored:]
            total += float(
                F.cross_entropy(logits.float(), window[0, 1:][-scored:], reduction="sum")
            )
            count += scored
    return total / count


def train(
    corpus: Path,
    out: Path,
    recipe: TrainingRecipe,
    *,
    resume: bool,
    stop_after: float,
    save_every: int,
) -> None:
    """Run or continue training; write checkpoint, config and log into `out` when complete.

    Parameters
    ----------
    corpus
        Archive built by `stage0_reference.training.corpus`.
    out
        Directory for ``model.safetensors``, ``config.json``, ``training_log.json`` and, while
        unfinished, ``state.pt``.
    recipe
        The run.
    resume
        Go on from ``state.pt``.
    stop_after
        Seconds after which to save and return, finished or not.
    save_every
        Steps between saves.
    """
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    config = ModelConfig.from_dict(SHIPPED_CONFIG)
    model = Decoder(config, dtype=torch.float32, device=device)
    initialise(model, recipe.seed)
    optimizers = make_optimizers(model, recipe)
    documents = load_corpus(corpus)
    tokens = torch.from_numpy(training_tokens(documents, seed=recipe.seed).astype(np.int16))
    tokens = tokens.to(device)
    log: dict[str, Any] = {"steps": [], "seconds": 0.0}
    first_step = 0
    out.mkdir(parents=True, exist_ok=True)
    state_file = out / "state.pt"
    if resume and state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first_step, log = state["step"], json.loads(state["log"])
    earlier_seconds = log["seconds"]

    attention = FusedCausalAttention()

    def loss_of(windows: Tensor) -> Tensor:
        positions = torch.arange(windows.shape[1] - 1, device=device)[None]
        hidden = model.hidden_states(windows[:, :-1], positions, attention)
        logits = model.lm_head(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    compiled = torch.compile(loss_of) if device.type == "cuda" else loss_of

    def save(step: int) -> None:
        log["seconds"] = earlier_seconds + time.monotonic() - started
        partial = state_file.with_suffix(".partial")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "log": json.dumps(log),
            },
            partial,
        )
        partial.replace(state_file)

    windows = training_windows(tokens, recipe, first_step)
    interval, running = time.monotonic(), torch.zeros((), device=device)
    for step in range(first_step, recipe.steps):
        factor = recipe.lr_factor(step)
        for optimizer, peak in zip(optimizers, (recipe.matrix_lr, recipe.other_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compiled(next(windows))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        if (step + 1) % 50 == 0:
            mean = float(running) / 50
            elapsed = time.monotonic() - interval
            rate = 50 * recipe.tokens_per_step / elapsed
            log["steps"].append([step + 1, round(mean, 4), round(rate)])
            print(
                f"step {step + 1:5d}  loss {mean:.4f} nats/byte  {rate / 1e6:.2f} Mbyte/s",
                file=sys.stderr,
                flush=True,
            )
            if not math.isfinite(mean):
                raise FloatingPointError(f"loss became {mean} at step {step + 1}")
            interval = time.monotonic()
            running.zero_()
        if (step + 1) % save_every == 0:
            save(step + 1)
            interval = time.monotonic()
        if time.monotonic() - started > stop_after:
            save(step + 1)
            print(f"stopped after step {step + 1}; go on with --resume", file=sys.stderr)
            return

    log["seconds"] = round(earlier_seconds + time.monotonic() - started, 1)
    weights = {
        n: t.detach().to(torch.bfloat16).cpu().contiguous()
        for n, t in model.checkpoint_tensors().items()
    }
    save_safetensors(out, weights)
    (out / "config.json").write_text(json.dumps(SHIPPED_CONFIG, indent=2) + "\n")
    tokenizer = {"tokenizer_class": "ByteTokenizer", "add_bos_token": True}
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    rounded = Decoder(config, dtype=torch.bfloat16, device=device)
    rounded.load_state_dict({n: t.to(torch.bfloat16) for n, t in model.state_dict().items()})
    log |= {
        "recipe": dataclasses.asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        "corpus_bytes": sum(len(document.text) for document in documents),
        "corpus_documents": len(documents),
        "epochs": round(recipe.steps * recipe.tokens_per_step / len(tokens), 2),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "command": " ".join(["python -m stage0_reference.training.train", *sys.argv[1:]]),
        "heldout_nats_per_byte": {
            str(context): round(heldout_loss(rounded, context), 4)
            for context in (512, 1024, 2048, 4096)
        },
    }
    (out / "training_log.json").write_text(_format_log(log))
    print(json.dumps(log["heldout_nats_per_byte"]))


def _format_log(log: dict[str, Any]) -> str:
    """JSON with the loss curve last, one row a line."""
    facts = {name: value for name, value in log.items() if name != "steps"}
    facts["curve_columns"] = [
        "step",
        "mean loss since the last row, nats per byte",
        "bytes per second",
    ]
    rows = ",\n  ".join(json.dumps(row) for row in log["steps"])
    return json.dumps(facts, indent=1)[:-2] + f',\n "curve": [\n  {rows}\n ]\n}}\n'


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m stage0_reference.training.train", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--corpus", type=Path, required=True, help="archive made by .corpus")
    parser.add_argument("--out", type=Path, required=True, help="directory for the result")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="save and stop after this long",
    )
    parser.add_argument("--save-every", type=int, default=500, metavar="STEPS")
    for field in dataclasses.fields(TrainingRecipe):
        required = field.default is dataclasses.MISSING
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type={"int": int, "float": float}[str(field.type)],
            required=required,
            default=None if required else field.default,
        )
    parsed = vars(parser.parse_args(arguments))
    recipe = TrainingRecipe(**{f.name: parsed[f.name] for f in dataclasses.fields(TrainingRecipe)})
    train(
        parsed["corpus"],
        parsed["out"],
        recipe,
        resume=parsed["resume"],
        stop_after=parsed["stop_after"],
        save_every=parsed["save_every"],
    )


if __name__ == "__main__":
    main()

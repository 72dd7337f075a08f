"""How fast a stage decodes a model of DeepSeek-V2-Lite's shape, and where the time goes.

Weights are random (made on the device, never on disk) and so is the cache: speed depends on shapes,
not on values. What is timed is a decode step, one new token for every request of the batch.

    python -m stage0_reference.decode_benchmark --out result.json

Times of parts are taken with a device synchronisation around each part. That makes a step longer
than the undisturbed one, which is reported beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from stage0_reference.attention_backend import (
    AttentionBackend,
    LayerCache,
    cache_bytes_per_token,
    load_backend,
)
from stage0_reference.decoder import CachedAttention, Decoder, DecoderLayer
from stage0_reference.model_config import ModelConfig

V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
"""The numbers of DeepSeek-V2-Lite's published config.json that the decoder reads."""


class DecodeLoop:
    """A batch of requests of equal length, ready to decode one token each.

    Parameters
    ----------
    decoder, backend
        The model and its attention.
    batch, context
        Requests, and tokens each has in the cache after the step.
    page_size
        Tokens per page. Pages are shuffled.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        *,
        batch: int,
        context: int,
        page_size: int = 64,
    ) -> None:
        device = decoder.device
        generator = torch.Generator(device).manual_seed(0)
        pages = -(-context // page_size)
        table = torch.randperm(batch * pages, generator=generator, device=device)
        self.decoder, self.backend = decoder, backend
        self.block_table = table.view(batch, pages).int()
        self.cache = backend.make_cache(decoder.config, batch * pages, page_size, device=device)
        slots = torch.arange(batch * pages * page_size, device=device)
        for layer in self.cache:
            self._fill(layer, slots, generator)
        last = context - 1
        self.slot_mapping = (
            self.block_table[:, last // page_size].long() * page_size + last % page_size
        )
        self.cache_seqlens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.positions = torch.full((batch,), last, device=device)
        self.token_ids = torch.randint(
            decoder.config.vocab_size, (batch,), generator=generator, device=device
        )

    def _fill(self, layer: LayerCache, slots: torch.Tensor, generator: torch.Generator) -> None:
        config, device = self.decoder.config, self.decoder.device
        for chunk in slots.split(65536):
            widths = (config.kv_lora_rank, config.qk_rope_head_dim)
            c_kv, k_rope = (
                torch.randn(
                    len(chunk), width, generator=generator, device=device, dtype=torch.bfloat16
                )
                for width in widths
            )
            self.backend.append(c_kv, k_rope, layer, chunk)

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """Decode one token for every request; give the greedy choice [batch]."""
        attention = CachedAttention(
            self.backend,
            self.cache,
            query_lens=[1] * len(self.token_ids),
            slot_mapping=self.slot_mapping,
            block_table=self.block_table,
            cache_seqlens=self.cache_seqlens,
        )
        return self.decoder(self.token_ids, self.positions, attention).argmax(dim=-1)


def synchronise(device: torch.device) -> None:
    """Wait for the device's work, if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_parts(loop: DecodeLoop) -> dict[str, float]:
    """Milliseconds of one step by part: attention core, its projections, feed-forward, the rest."""
    device = loop.decoder.device
    spent: dict[str, float] = defaultdict(float)
    started: dict[str, float] = {}

    def begin(part: str) -> None:
        synchronise(device)
        started[part] = time.perf_counter()

    def end(part: str) -> None:
        synchronise(device)
        spent[part] += (time.perf_counter() - started[part]) * 1e3

    hooks = []
    for layer in loop.decoder.model.layers:
        assert isinstance(layer, DecoderLayer)
        for part, module in (("attention", layer.self_attn), ("feed_forward", layer.mlp)):
            hooks.append(module.register_forward_pre_hook(lambda m, i, part=part: begin(part)))
            hooks.append(module.register_forward_hook(lambda m, i, o, part=part: end(part)))
    attend, append = loop.backend.attend, loop.backend.append

    def timed(part: str, function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            begin(part)
            result = function(*arguments, **keywords)
            end(part)
            return result

        return call

    loop.backend.attend = timed("attend", attend)  # type: ignore[method-assign]
    loop.backend.append = timed("append", append)  # type: ignore[method-assign]
    try:
        loop.step()  # the hooks' own first costs
        spent.clear()
        begin("step")
        loop.step()
        end("step")
    finally:
        loop.backend.attend, loop.backend.append = attend, append  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    return {
        "attend over the cache": spent["attend"],
        "append to the cache": spent["append"],
        "attention projections": spent["attention"] - spent["attend"] - spent["append"],
        "feed-forward": spent["feed_forward"],
        "the rest": spent["step"] - spent["attention"] - spent["feed_forward"],
    }


def measure(
    decoder: Decoder, backend: AttentionBackend, *, batch: int, context: int, steps: int
) -> dict[str, Any]:
    """Time decode steps of one shape; median of `steps` after two warm-up steps."""
    device = decoder.device
    loop = DecodeLoop(decoder, backend, batch=batch, context=context)
    times = []
    for _ in range(steps + 2):
        synchronise(device)
        started = time.perf_counter()
        loop.step()
        synchronise(device)
        times.append((time.perf_counter() - started) * 1e3)
    step_ms = statistics.median(times[2:])
    result = {
        "batch": batch,
        "context": context,
        "step_ms": round(step_ms, 3),
        "tokens_per_second": round(batch / step_ms * 1e3, 1),
        "cache_gb": round(
            loop.block_table.numel() * 64 * cache_bytes_per_token(loop.cache) / 1e9, 3
        ),
        "parts_ms": {part: round(ms, 3) for part, ms in time_parts(loop).items()},
    }
    if device.type == "cuda":
        result["peak_memory_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
        torch.cuda.reset_peak_memory_stats(device)
    return result


def random_decoder(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Draw a decoder's weights on the device."""
    decoder = Decoder(config, dtype=dtype, device="meta").to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return decoder.eval().requires_grad_(False)


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m stage0_reference.decode_benchmark", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--stage", type=int, default=0, help="attention to use (default: 0)")
    parser.add_argument("--layers", type=int, default=27, help="layers of the model (27)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per shape (10)")
    parser.add_argument(
        "--shapes", default="1x1024,32x1024,32x8192,128x1024", help="batch x context, ..."
    )
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parsed = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = ModelConfig.from_dict(V2_LITE | {"num_hidden_layers": parsed.layers})
    decoder = random_decoder(config, device, dtype)
    backend = load_backend(parsed.stage)
    report: dict[str, Any] = {
        "what": f"decode, DeepSeek-V2-Lite geometry, {parsed.layers} layers, random {dtype}",
        "stage": backend.stage,
        "attention": backend.description,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "command": " ".join(["python -m stage0_reference.decode_benchmark", *sys.argv[1:]]),
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "shapes": [],
    }
    print(f"{report['device']}, torch {torch.__version__}: {report['what']}, stage {backend.stage}")
    print(f"{'batch':>6}{'context':>9}{'ms/step':>10}{'tokens/s':>10}  share of a step")
    for shape in parsed.shapes.split(","):
        batch, context = map(int, shape.split("x"))
        row = measure(decoder, backend, batch=batch, context=context, steps=parsed.steps)
        report["shapes"].append(row)
        total = sum(row["parts_ms"].values())
        shares = ", ".join(f"{part} {ms / total:.0%}" for part, ms in row["parts_ms"].items())
        print(
            f"{batch:>6}{context:>9}{row['step_ms']:>10.2f}{row['tokens_per_second']:>10.1f}  "
            f"{shares}",
            flush=True,
        )
    if parsed.out is not None:
        parsed.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Why per token, why not the rotary part: the measurements behind the cache's format.

Four questions, asked of the shipped model's own cache on held-out text and of synthetic caches with
the ranges that the paper reports for large models:

1. How large are latents and rotary keys, by layer and channel?
2. What error does each format leave on each part, and on the attention output?
3. What does that cost in held-out loss, by context length?
4. Is `scale_format` "pow2" as good as the paper's "amax"?

A small model need not grow the outliers of a large one, so a result on its cache and a result on a
synthetic cache are different facts; every table says which it is.

References
----------
SnapMLA (arXiv 2602.10718), section 3.1 and its figure of value ranges: latents within about 10,
rotary outliers to 10^3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import (
    AttentionBackend,
    available_stages,
    load_backend,
)
from stage0_reference.decoder import Decoder
from stage0_reference.evaluation import (
    LossReport,
    Window,
    choose_windows,
    heldout_loss,
    mean_over_windows,
)
from stage0_reference.latent_attention import AttentionOutput, latent_attention
from stage0_reference.latent_cache import Bf16LatentPages, LatentRows, check_table, gather_packed
from stage1_quant.alternatives import FORMATS, CacheFormat, RoundTripBackend
from stage1_quant.fp8_backend import Fp8CacheBackend
from stage1_quant.quantize import ScaleFormat

RECORDED_QUERIES = 16
"""Queries kept per layer and window: the last tokens, which see the whole context."""


@dataclasses.dataclass
class LayerSample:
    """What one layer's attention read in one window.

    Attributes
    ----------
    rows
        Latents [tokens, kv_lora_rank] and rotary keys [tokens, qk_rope_head_dim], f32.
    q_latent, q_rope
        Absorbed queries of the last `RECORDED_QUERIES` tokens, f32.
    softmax_scale
        Factor on the scores.
    """

    rows: LatentRows
    q_latent: Float[Tensor, "queries heads kv_lora_rank"]
    q_rope: Float[Tensor, "queries heads qk_rope_head_dim"]
    softmax_scale: float


class RecordingBackend(AbsorbedBackend):
    """Stage 0's backend that keeps what its latest call of each layer's cache saw."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[int, LayerSample] = {}

    def attend(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: Bf16LatentPages,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        softmax_scale: float,
        *,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend as stage 0 and remember the first request's rows and last queries."""
        lengths = check_table(block_table, cache_seqlens, *cache.c_kv.shape[:2])
        rows = gather_packed(cache, block_table[:1], lengths[:1])
        self.samples[cache.c_kv.data_ptr()] = LayerSample(
            LatentRows(*(part.float() for part in rows)),
            q_latent[0, -RECORDED_QUERIES:].float(),
            q_rope[0, -RECORDED_QUERIES:].float(),
            softmax_scale,
        )
        return super().attend(
            q_latent, q_rope, cache, block_table, cache_seqlens, softmax_scale, causal=causal
        )


def record_layers(decoder: Decoder, windows: Sequence[Window]) -> list[list[LayerSample]]:
    """Run windows through the decoder and give each one's samples, layer by layer."""
    recorded = []
    for window in windows:
        backend = RecordingBackend()
        heldout_loss(decoder, backend, [window])
        recorded.append(list(backend.samples.values()))  # in the order layers first ran
    return recorded


def synthetic_sample(
    *, tokens: int, heads: int = 16, latent_limit: float = 10.0, rope_outlier: float = 1e3,
    seed: int = 0, device: torch.device | str = "cpu",
) -> LayerSample:  # fmt: skip
    """Draw a cache with the ranges reported for large models.

    Latents are normal with per-token size varying over a factor of 4 and stay within
    `latent_limit`. Rotary keys are normal, but for two pairs of channels that reach `rope_outlier`.
    Queries are scaled so that scores have a standard deviation near 2, a typical sharpness.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    sizes = torch.exp2(2 * torch.rand(tokens, 1, generator=generator, device=device) - 1)
    c_kv = (normal(tokens, 512) * sizes).clamp(-latent_limit, latent_limit)
    c_kv[torch.arange(tokens, device=device), torch.arange(tokens, device=device) % 512] = (
        latent_limit * normal(tokens).sign()
    )  # each token has one element at the limit
    k_rope = normal(tokens, 64) * 3.0
    # Outlier channels share a sign and vary by a few percent: a large common offset, which the
    # softmax ignores, carrying differences that it does not.
    outliers = torch.tensor([3, 17, 35, 49], device=device)
    k_rope[:, outliers] = rope_outlier * (1 + 0.05 * normal(tokens, 4))
    q_latent, q_rope = normal(RECORDED_QUERIES, heads, 512), normal(RECORDED_QUERIES, heads, 64)
    q_rope[..., outliers] *= 0.02
    sample = LayerSample(LatentRows(c_kv, k_rope), q_latent, q_rope, 192**-0.5)
    spread = _scores(sample).std(dim=-1).mean()
    factor = 2.0 / float(spread)
    return dataclasses.replace(sample, q_latent=q_latent * factor, q_rope=q_rope * factor)


def _scores(sample: LayerSample) -> Float[Tensor, "queries heads tokens"]:
    latent = torch.einsum("qhc,tc->qht", sample.q_latent, sample.rows.c_kv)
    rotary = torch.einsum("qhc,tc->qht", sample.q_rope, sample.rows.k_rope)
    return (latent + rotary) * sample.softmax_scale


def value_ranges(recorded: Sequence[Sequence[LayerSample]]) -> list[dict[str, Any]]:
    """Size of latents and rotary keys by layer, over all windows."""
    table = []
    for layer, samples in enumerate(zip(*recorded, strict=True)):
        for part in ("c_kv", "k_rope"):
            size = torch.cat([getattr(sample.rows, part) for sample in samples]).abs()
            token_max = size.amax(dim=-1)
            table.append(
                {
                    "layer": layer,
                    "part": part,
                    "rms": float(size.square().mean().sqrt()),
                    "p99.9": float(_quantile(size.flatten(), 0.999)),
                    "max": float(size.max()),
                    "token_amax_min": float(token_max.min()),
                    "token_amax_max": float(token_max.max()),
                    "channel_amax": size.amax(dim=0).tolist(),
                }
            )
    return table


def _quantile(values: Tensor, q: float) -> Tensor:
    """`torch.quantile` without its limit on size."""
    return values.sort().values[min(int(q * values.numel()), values.numel() - 1)]


def format_errors(
    samples: Iterable[LayerSample], formats: Sequence[CacheFormat] = FORMATS
) -> list[dict[str, Any]]:
    """Error of each format on latent, rope and attention output, over all samples.

    Returns
    -------
    list of dict
        Per format: `latent_sqnr_db` and `rope_sqnr_db` (signal over error power, 10 log10),
        `latent_max_error` and `rope_max_error` relative to the part's largest value, and
        `output_error`, the relative L2 error of the attention output with exact queries.
    """
    samples = list(samples)
    exact = [_attend(sample, sample.rows) for sample in samples]
    table = []
    for cache_format in formats:
        backs = [cache_format.round_trip(*sample.rows) for sample in samples]
        row: dict[str, Any] = {"format": cache_format.name}
        for label, part in (("latent", "c_kv"), ("rope", "k_rope")):
            signal = torch.cat([getattr(sample.rows, part).flatten() for sample in samples])
            error = torch.cat([getattr(back, part).flatten() for back in backs]) - signal
            noise = float(error.double().square().sum())
            power = float(signal.double().square().sum())
            row[f"{label}_sqnr_db"] = (
                float("inf") if noise == 0 else 10 * torch.tensor(power / noise).log10().item()
            )
            row[f"{label}_max_error"] = float(error.abs().max() / signal.abs().max())
        outputs = [_attend(sample, back) for sample, back in zip(samples, backs, strict=True)]
        difference = sum(float((a - b).square().sum()) for a, b in zip(outputs, exact, strict=True))
        row["output_error"] = (difference / sum(float(b.square().sum()) for b in exact)) ** 0.5
        table.append(row)
    return table


def _attend(sample: LayerSample, rows: LatentRows) -> Float[Tensor, "queries heads kv_lora_rank"]:
    out = latent_attention(
        sample.q_latent.double(),
        sample.q_rope.double(),
        rows.c_kv.double(),
        rows.k_rope.double(),
        sample.softmax_scale,
    )
    return out.out


def format_backends() -> list[tuple[str, AttentionBackend]]:
    """Every cache format, BF16 first, and stage 1 itself under both scale formats."""
    return [
        *((cache_format.name, RoundTripBackend(cache_format)) for cache_format in FORMATS),
        *((f"stage1-{name}", Fp8CacheBackend(name)) for name in get_args(ScaleFormat)),
    ]


def stage_backends() -> list[tuple[str, AttentionBackend]]:
    """Every installed stage, in order."""
    return [(f"stage {stage}", load_backend(stage)) for stage in available_stages()]


def loss_by_context(
    decoder: Decoder,
    documents: Sequence[Sequence[int]],
    backends: Sequence[tuple[str, AttentionBackend]],
    *,
    contexts: Sequence[int],
    windows: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Held-out loss of every backend, and what each adds to the first one's.

    Returns
    -------
    list of dict
        Per backend (`format`) and context: `loss` (nats per token), `added`, the mean difference
        to the first backend on the same tokens, and `added_standard_error`, its standard error
        over windows.
    """
    table = []
    for context in contexts:
        chosen = choose_windows(
            documents, context, longest_context=max(contexts), max_windows=windows
        )
        baseline: LossReport | None = None
        for name, backend in backends:
            progress(f"loss at context {context}: {name}")
            report = heldout_loss(decoder, backend, chosen)
            baseline = report if baseline is None else baseline
            added, added_error = mean_over_windows(
                report.token_losses - baseline.token_losses, len(chosen)
            )
            table.append(
                {
                    "format": name,
                    "context": context,
                    "loss": report.loss,
                    "added": added,
                    "added_standard_error": added_error,
                    "tokens": report.tokens,
                }
            )
    return table

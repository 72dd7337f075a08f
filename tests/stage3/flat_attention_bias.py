"""Mean relative bias of O under flat attention, by length and split rule; a program, and no test.

    python -m tests.stage3.flat_attention_bias

Attention over keys that are all alike is the mean of V, and V lies around 1, so a loss of small
addends is a bias of every element towards zero. All tokens have one scale, so that P is 448 for
each and is not rounded: that would be a bias of its own, of either sign. Element by element it is
bounded in `test_mla_decode.test_flat_attention_has_no_bias_that_grows_with_length`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage1_quant.fp8_latent_cache import LatentPages, allocate_latent_pages, append_kv
from stage1_quant.quantize import quantize_q
from stage3_dataflow.decode import decode_quantized
from stage3_dataflow.split_plan import SplitRule
from tests.stage3.test_mla_decode import UNSPLIT

LENGTHS = (1024, 8192, 131072)
ROWS = (
    ("V = 1, one split", 0.0, UNSPLIT, torch.float32),
    ("V = 1 + N(0, 0.5), one split", 0.5, UNSPLIT, torch.float32),
    ("  two splits, BF16", 0.5, SplitRule(min_tokens=1, max_splits=2), torch.bfloat16),
    ("  64 splits or fewer, BF16", 0.5, SplitRule(min_tokens=512, max_splits=64), torch.bfloat16),
)
"""What is printed, spread of V, rule, and dtype of the output."""


def flat_cache(tokens: int, spread: float, device: torch.device) -> LatentPages:
    """Write tokens whose latents lie around 1, and whose rotary keys are 0."""
    generator = torch.Generator().manual_seed(0)
    latents = (1 + spread * torch.randn(tokens, 512, generator=generator)).clamp(-3.5, 3.5)
    latents[:, 0] = 3.0  # of every token in one binade, and so its scale
    cache = allocate_latent_pages(tokens // 64, 64, 512, 64, device=device)
    slots = torch.arange(tokens, device=device)
    rope = torch.zeros(tokens, 64, device=device)
    append_kv(latents.to(device), rope, cache, slots, scale_format="pow2")
    return cache


def mean_of_values(cache: LatentPages) -> Tensor:
    """Exact flat attention over what the cache stands for, float64 [512]."""
    return (cache.codes.double() * cache.scale.double()[..., None]).flatten(0, 1).mean(0)


def bias(cache: LatentPages, heads: int, rule: SplitRule, out_dtype: torch.dtype) -> float:
    """Mean of (O - exact) / exact over heads and dimensions."""
    device = cache.codes.device
    pages = len(cache.codes)
    latent, rope = (torch.zeros(1, 1, heads, width, device=device) for width in (512, 64))
    out, _lse = decode_quantized(
        quantize_q(latent, rope, "pow2"),
        cache,
        torch.arange(pages, dtype=torch.int32, device=device)[None],
        torch.tensor([pages * 64], dtype=torch.int32, device=device),
        1.0,
        split_rule=rule,
        out_dtype=out_dtype,
    )
    exact = mean_of_values(cache)
    return float(((out.double() - exact) / exact).mean())


def main() -> None:
    device = torch.device("cuda")
    print(f"{'':30}" + "".join(f"{length:>10,}" for length in LENGTHS) + "  tokens")
    for heads in (16, 32, 128):
        print(f"{heads} heads")
        for name, spread, rule, out_dtype in ROWS:
            found = (
                bias(flat_cache(tokens, spread, device), heads, rule, out_dtype)
                for tokens in LENGTHS
            )
            print(f"{name:30}" + "".join(f"{value:>+10.1e}" for value in found))


if __name__ == "__main__":
    main()

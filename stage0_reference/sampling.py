"""From logits to a token: greedy, temperature, top-k and top-p, with a seed per request.

A request draws from its own random stream, so what it says does not depend on who shares its
batch. The draw is made on the host in float64: the same logits and seed give the same token on any
device.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and when it ends.

    Attributes
    ----------
    max_new_tokens
        Most tokens to generate; the model's context is the other limit.
    temperature
        0 takes the likeliest token; otherwise logits are divided by it.
    top_k
        Keep only the k likeliest tokens; 0 keeps all.
    top_p
        Keep the fewest likeliest tokens whose probabilities reach p; 1 keeps all. Applied after
        top_k.
    seed
        Of the request's random stream.
    stop_token_ids
        Tokens that end the request. The stop token itself is not part of the result.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1; got {self.max_new_tokens}")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0; got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps all tokens); got {self.top_k}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must fit 64 bits; got {self.seed}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p}")


def token_probabilities(
    logits: Float[Tensor, " vocab_size"], params: SamplingParams
) -> Float[Tensor, " vocab_size"]:
    """Probabilities that `params` leave, float64; temperature must be above 0."""
    # The largest becomes 0: however small the temperature, nothing overflows upwards.
    scaled = (logits.double() - logits.double().max()) / params.temperature
    ranked, order = scaled.sort(descending=True, stable=True)
    if 0 < params.top_k < len(ranked):
        ranked[params.top_k :] = -math.inf
    probabilities = ranked.softmax(dim=-1)
    if params.top_p < 1.0:
        # A token stays while those before it have not reached p; nothing is before the likeliest.
        reached_before = probabilities.cumsum(dim=-1) - probabilities
        probabilities[reached_before >= params.top_p] = 0.0
        probabilities /= probabilities.sum()
    return torch.zeros_like(probabilities).scatter(0, order, probabilities)


def sample_token(
    logits: Float[Tensor, " vocab_size"], params: SamplingParams, stream: torch.Generator
) -> int:
    """Choose the next token.

    Parameters
    ----------
    logits
        On any device.
    params
        How to choose.
    stream
        The request's own CPU generator; advanced by one draw unless greedy.

    Raises
    ------
    ValueError
        A logit is NaN, or none is finite: the model is broken, and a token would hide it.
    """
    logits = logits.cpu()
    if not math.isfinite(float(logits.max())):  # a NaN is its own maximum
        raise ValueError(
            "logits must be numbers with a finite maximum; got NaN or infinity. The weights or the "
            "cache hold values that overflow: try a wider dtype"
        )
    if params.temperature == 0.0:
        return int(logits.argmax())
    probabilities = token_probabilities(logits, params)
    cumulative = probabilities.cumsum(dim=-1)
    point = torch.rand((), dtype=torch.float64, generator=stream) * cumulative[-1]
    # right=True: a draw of exactly 0 must not land on a token of probability 0.
    token = int(torch.searchsorted(cumulative, point, right=True))
    return min(token, int(probabilities.nonzero()[-1]))

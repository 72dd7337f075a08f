"""LongCat-Flash's layer: two attentions and two MLPs in a row, and a mixture on a shortcut.

    h1 = x  + attention_0(norm(x))
    h2 = h1 + mlp_0(norm(h1))              mixture(norm(h1)) begins here,
    h3 = h2 + attention_1(norm(h2))
    y  = h3 + mlp_1(norm(h3)) + mixture    and is added here

On a cluster the mixture's communication hides behind the dense path; here it is only the order of
the sums. Some of the mixture's experts are the identity: a token that chooses them is given back
to itself at the router's weight, and so costs less.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stage0_reference.decoder import Attention, MultiHeadLatentAttention, RMSNorm
from stage0_reference.families.longcat_flash import ATTENTIONS
from stage0_reference.mixture_of_experts import Experts, GatedMLP, Router, router_shares
from stage0_reference.model_config import ModelConfig
from stage0_reference.rope import Rotation


class ClassifierRouter(Router):
    """The router, with its weight where LongCat's checkpoints have it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, len(self.weight), bias=False)
        del self.weight

    @property
    def score_weight(self) -> Tensor:
        """[choices, hidden]."""
        return self.classifier.weight


class IdentityMixture(nn.Module):
    """Routed experts, the last `zero_expert_num` of which are the identity."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = ClassifierRouter(config)
        self.experts = Experts(config)
        self.num_choices = config.num_choices

    def forward(self, hidden: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens hidden"]:
        """Apply the layer."""
        rows = hidden.flatten(0, -2)
        weights, chosen = self.router(rows)
        shares = router_shares(weights, chosen, self.num_choices)  # [tokens, choices]
        num_routed = self.experts.num_experts
        output = self.experts.weighted_sum(rows, shares[:, :num_routed])
        kept = shares[:, num_routed:].sum(dim=-1, keepdim=True) * rows
        return (output + kept.to(output.dtype)).view_as(hidden)


class ShortcutLayer(nn.Module):
    """The equations above. Names are the hub's: `mlp` is the mixture, `mlps` are dense.

    Parameters
    ----------
    config
        The model's numbers.
    first
        Place of the first attention in the cache; the second's is the next.
    """

    def __init__(self, config: ModelConfig, first: int) -> None:
        super().__init__()

        def norms() -> nn.ModuleList:
            return nn.ModuleList(
                RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(ATTENTIONS)
            )

        self.self_attn = nn.ModuleList(
            MultiHeadLatentAttention(config, first + i) for i in range(ATTENTIONS)
        )
        self.mlps = nn.ModuleList(
            GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
            for _ in range(ATTENTIONS)
        )
        self.mlp = IdentityMixture(config)
        self.input_layernorm = norms()
        self.post_attention_layernorm = norms()

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rotation: Rotation,
        attention: Attention,
        query_scale: Float[Tensor, " *#tokens"] | None = None,
    ) -> Float[Tensor, "*tokens hidden"]:
        """Apply the layer."""
        shortcut = torch.zeros_like(hidden)
        for i in range(ATTENTIONS):
            normed = self.input_layernorm[i](hidden)
            hidden = hidden + self.self_attn[i](normed, rotation, attention, query_scale)
            normed = self.post_attention_layernorm[i](hidden)
            if i == 0:
                shortcut = self.mlp(normed)
            hidden = hidden + self.mlps[i](normed)
        return hidden + shortcut

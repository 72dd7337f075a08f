"""Feed-forward layers: the gated MLP, and the mixture of experts with its router.

A router scores all experts for each token, chooses `num_experts_per_tok` of them and weights their
outputs. DeepSeek's models differ only in how: V2-Lite takes the best softmax scores; V2 first
keeps the groups whose best expert scores highest; V3 scores with a sigmoid, adds a learned bias
for the *choice* only (so that load can be balanced without an auxiliary loss), and ranks groups by
their best two.

References
----------
DeepSeek-V2 (arXiv 2405.04434), section 2.2; DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stage0_reference.model_config import ModelConfig

BATCHED_EXPERTS_MAX_ROWS = 128
"""Up to this many tokens every expert computes every token and the router's zeros discard the
rest. Reading the weights dominates there, no host synchronisation is needed, and shapes (so a
token's bits) do not depend on where other tokens were routed."""


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the dense feed-forward layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, hidden: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens hidden"]:
        """Apply the layer."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Router(nn.Module):
    """Chooses and weights experts. Computed in float32 (float64 for float64 input)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_choices, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)
        if config.topk_method == "noaux_tc":
            self.e_score_correction_bias = nn.Parameter(
                torch.zeros(config.num_choices, dtype=torch.float32), requires_grad=False
            )

    @property
    def score_weight(self) -> Tensor:
        """What scores experts, [choices, hidden]."""
        return self.weight

    def forward(
        self, hidden: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, "tokens chosen"], Int[Tensor, "tokens chosen"]]:
        """Weights and ids of each token's experts."""
        config = self.config
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logits = F.linear(hidden.to(wide), self.score_weight.to(wide))
        scores = logits.softmax(dim=-1) if config.scoring_func == "softmax" else logits.sigmoid()
        preference = scores
        if config.topk_method == "noaux_tc":
            preference = scores + self.e_score_correction_bias.to(wide)
        if config.topk_method != "greedy" and config.n_group > 1:
            preference = self._keep_best_groups(preference)
        chosen = preference.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)  # the bias chooses; it does not weight
        if config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
            if config.model_type == "deepseek_v2":
                # DeepSeek-V2's own code normalises *instead of* scaling; no published V2 does it.
                return weights, chosen
        return weights * config.routed_scaling_factor, chosen

    def _keep_best_groups(
        self, preference: Float[Tensor, "tokens experts"]
    ) -> Float[Tensor, "tokens experts"]:
        """Leave only the experts of the `topk_group` best groups choosable."""
        config = self.config
        grouped = preference.unflatten(-1, (config.n_group, -1))  # [tokens, groups, per group]
        best = 1 if config.topk_method == "group_limited_greedy" else min(2, grouped.shape[-1])
        group_score = grouped.topk(best, dim=-1).values.sum(dim=-1)
        kept = group_score.topk(config.topk_group, dim=-1).indices
        dropped = torch.ones_like(group_score, dtype=torch.bool).scatter(-1, kept, False)
        return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(-2)


def router_shares(
    weights: Float[Tensor, "tokens chosen"], chosen: Int[Tensor, "tokens chosen"], num_choices: int
) -> Float[Tensor, "tokens {num_choices}"]:
    """Router's weight of every expert for each token, 0 where it was not chosen."""
    shape = (len(weights), num_choices)
    shares = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
    return shares.scatter(-1, chosen, weights)


class Experts(nn.Module):
    """All routed experts of a layer, stacked: [num_experts, out, in] per projection."""

    is_stacked_in_checkpoint = False
    """Whether the hub's files hold these very tensors, or one of each expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.n_routed_experts is not None
        self.num_experts = config.n_routed_experts
        self.allocate(config.moe_intermediate_size, config.hidden_size)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def allocate(self, inner: int, hidden: int) -> None:
        """Register the parameters."""
        self.gate_proj = nn.Parameter(torch.empty(self.num_experts, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(self.num_experts, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, hidden, inner))

    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gate and up, [experts, inner, hidden], and down, [experts, hidden, inner]."""
        return self.gate_proj, self.up_proj, self.down_proj

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        weights: Float[Tensor, "tokens chosen"],
        chosen: Int[Tensor, "tokens chosen"],
    ) -> Float[Tensor, "tokens hidden"]:
        """Weighted sum of the chosen experts' outputs for each token."""
        return self.weighted_sum(hidden, router_shares(weights, chosen, self.num_experts))

    def weighted_sum(
        self, hidden: Float[Tensor, "tokens hidden"], share: Float[Tensor, "tokens experts"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Sum all experts' outputs, each times its share in the token."""
        if len(hidden) <= BATCHED_EXPERTS_MAX_ROWS:
            return self._every_expert_on_every_token(hidden, share)
        return self._each_expert_on_its_tokens(hidden, share)

    def _every_expert_on_every_token(
        self, hidden: Float[Tensor, "tokens hidden"], share: Float[Tensor, "tokens experts"]
    ) -> Float[Tensor, "tokens hidden"]:
        gate, up, down = self.projections()
        inner = F.silu(hidden @ gate.mT) * (hidden @ up.mT)
        outputs = (inner @ down.mT).to(share.dtype)  # [experts, tokens, hidden]
        share = share.T[..., None]  # [experts, tokens, 1]
        # Masked before the product: an overflow in an expert nobody chose must not become NaN.
        return (share * outputs.masked_fill(share == 0.0, 0.0)).sum(dim=0).to(hidden.dtype)

    def _each_expert_on_its_tokens(
        self, hidden: Float[Tensor, "tokens hidden"], share: Float[Tensor, "tokens experts"]
    ) -> Float[Tensor, "tokens hidden"]:
        gate, up, down = self.projections()
        output = torch.zeros(hidden.shape, dtype=share.dtype, device=hidden.device)
        for expert in share.any(dim=0).nonzero().flatten().tolist():
            tokens = share[:, expert].nonzero().flatten()
            rows = hidden[tokens]
            inner = F.silu(F.linear(rows, gate[expert])) * F.linear(rows, up[expert])
            result = F.linear(inner, down[expert]).to(share.dtype)
            output.index_add_(0, tokens, result * share[tokens, expert, None])
        return output.to(hidden.dtype)


class MixtureOfExperts(nn.Module):
    """Routed experts plus the shared experts that every token passes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = (
            GatedMLP(
                config.hidden_size,
                config.moe_intermediate_size * config.n_shared_experts,
                bias=config.mlp_bias,
            )
            if config.n_shared_experts
            else None
        )

    def forward(self, hidden: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens hidden"]:
        """Apply the layer."""
        rows = hidden.flatten(0, -2)
        output = self.experts(rows, *self.gate(rows)).view_as(hidden)
        return output if self.shared_experts is None else output + self.shared_experts(hidden)

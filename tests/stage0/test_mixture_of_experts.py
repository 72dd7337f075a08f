"""The router against its definition in plain Python, and the two ways to run the experts.

The restatement below loops over tokens, groups and experts and uses no tensor operation, so that
it can be compared line by line with the papers: DeepSeek-V2, section 2.1.2 and 2.2; DeepSeek-V3,
section 2.1.2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from stage0_reference import mixture_of_experts
from stage0_reference.decoder import Decoder
from stage0_reference.mixture_of_experts import Experts, GatedMLP, MixtureOfExperts, Router
from stage0_reference.model_config import (
    SUPPORTED_SCORING_FUNCTIONS,
    SUPPORTED_TOPK_METHODS,
    ModelConfig,
)
from stage0_reference.pretrained import load_decoder
from tests.model_factory import (
    config_fields,
    random_decoder,
    randomise,
    tiny_config,
    write_checkpoint,
)

pytestmark = pytest.mark.stage0


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A mixture layer and some tokens, drawn by Hypothesis: sizes, method, seed."""

    num_tokens: int
    seed: int
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def config(self) -> ModelConfig:
        """One mixture layer. Read when asked for: a strategy may not run checked code.

        (beartype looks at random items of containers, and Hypothesis refuses such chance.)
        """
        return tiny_config(num_hidden_layers=1, first_k_dense_replace=0, **self.changes)

    def stream(self) -> torch.Generator:
        """The layer's random numbers."""
        return torch.Generator().manual_seed(self.seed)

    def router(self, stream: torch.Generator) -> Router:
        """A float64 router whose scores spread over most of their range."""
        router = Router(self.config).double()
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=stream))
            router.weight.mul_(2.0 * self.config.hidden_size**-0.5)
        return router.requires_grad_(False)

    def hidden(self, stream: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
        """[tokens, hidden]."""
        return torch.randn(
            self.num_tokens, self.config.hidden_size, generator=stream, dtype=torch.float64
        ).to(dtype)

    def experts(self, stream: torch.Generator, dtype: torch.dtype) -> Experts:
        """Experts whose products are of order 1."""
        experts = Experts(self.config)
        with torch.no_grad():
            for weight in experts.parameters():
                weight.copy_(torch.randn(weight.shape, generator=stream))
                weight.mul_(weight.shape[-1] ** -0.5)
        return experts.to(dtype).requires_grad_(False)


@st.composite
def mixtures(draw: st.DrawFn, max_tokens: int = 6) -> Mixture:
    """Sizes that a configuration allows, every method, every option."""
    method = draw(st.sampled_from(SUPPORTED_TOPK_METHODS))
    n_group = draw(st.integers(1, 4))
    per_group = draw(st.integers(1, 4))
    topk_group = draw(st.integers(1, n_group))
    reachable = per_group * (n_group if method == "greedy" else topk_group)
    changes = {
        "hidden_size": draw(st.integers(1, 24)),
        "moe_intermediate_size": draw(st.integers(1, 16)),
        "n_routed_experts": n_group * per_group,
        "n_group": n_group,
        "topk_group": topk_group,
        "num_experts_per_tok": draw(st.integers(1, reachable)),
        "topk_method": method,
        "scoring_func": draw(st.sampled_from(SUPPORTED_SCORING_FUNCTIONS)),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5, 16.0])),
    }
    return Mixture(draw(st.integers(1, max_tokens)), draw(st.integers(0, 2**32 - 1)), changes)


class Routed(NamedTuple):
    """What one token's routing comes to."""

    weight_of: dict[int, float]
    margin: float
    """Least difference between two numbers of which one was preferred to the other."""


def route_one_token(logits: list[float], bias: list[float] | None, config: ModelConfig) -> Routed:
    """Route one token as the papers say it, in Python's floats."""
    if config.scoring_func == "sigmoid":
        score = [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    else:
        largest = max(logits)
        total = sum(math.exp(logit - largest) for logit in logits)
        score = [math.exp(logit - largest) / total for logit in logits]

    preference = list(score)
    if config.topk_method == "noaux_tc":
        assert bias is not None
        preference = [s + b for s, b in zip(score, bias, strict=True)]

    margin = math.inf

    def best(values: dict[int, float], count: int) -> list[int]:
        nonlocal margin
        ranked = sorted(values, key=lambda key: values[key], reverse=True)
        if count < len(ranked):
            margin = min(margin, values[ranked[count - 1]] - values[ranked[count]])
        return ranked[:count]

    candidates = list(range(len(logits)))
    if config.topk_method != "greedy":
        size = len(logits) // config.n_group
        members = {g: range(g * size, (g + 1) * size) for g in range(config.n_group)}
        counted = 1 if config.topk_method == "group_limited_greedy" else 2
        group_score = {
            g: sum(sorted((preference[e] for e in members[g]), reverse=True)[:counted])
            for g in members
        }
        kept = best(group_score, config.topk_group)
        candidates = [e for g in kept for e in members[g]]
    chosen = best({e: preference[e] for e in candidates}, config.num_experts_per_tok)

    weight_of = {e: score[e] for e in chosen}
    if config.norm_topk_prob:
        total = sum(weight_of.values())
        weight_of = {e: weight / total for e, weight in weight_of.items()}
    weight_of = {e: weight * config.routed_scaling_factor for e, weight in weight_of.items()}
    return Routed(weight_of, margin)


def logits_in_python(hidden: Tensor, weight: Tensor) -> list[list[float]]:
    """Scores before their function: one dot product per token and expert."""
    return [
        [sum(x * w for x, w in zip(token, row, strict=True)) for row in weight.tolist()]
        for token in hidden.tolist()
    ]


def logit_bound(hidden: Tensor, weight: Tensor) -> float:
    """How far two float64 evaluations of the same logits may lie apart.

    A sum of n products is off by at most ``n u sum |x w|`` (first order, any order of addition);
    two evaluations by twice that.
    """
    largest = (hidden.abs() @ weight.abs().mT).max().item()
    return 2.0 * hidden.shape[-1] * 2.0**-53 * largest


@given(mixtures())
def test_the_router_is_its_definition(mixture: Mixture) -> None:
    config, stream = mixture.config, mixture.stream()
    router, hidden = mixture.router(stream), mixture.hidden(stream)
    weights, chosen = router(hidden)

    bias = None
    if config.topk_method == "noaux_tc":
        bias = router.e_score_correction_bias.tolist()
    # A logit off by delta moves a score by a factor of at most exp(2 delta) (softmax; sigmoid
    # less) and a normalised weight by exp(4 delta); the rest is a few roundings per expert.
    delta = logit_bound(hidden, router.weight)
    relative = math.expm1(4.0 * delta) + 4.0 * (len(router.weight) + 4) * 2.0**-53
    for token, logits in enumerate(logits_in_python(hidden, router.weight)):
        expected = route_one_token(logits, bias, config)
        # Preferences are scores (below 1) and biases (below 8 here); a group adds two of them.
        assume(expected.margin > 32.0 * relative)
        assert sorted(chosen[token].tolist()) == sorted(expected.weight_of)
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            wanted = expected.weight_of[expert]
            assert abs(weight - wanted) <= relative * wanted, (token, expert, weight, wanted)


def _router(weights: Any, bias: list[float] | None = None, **changes: Any) -> Router:
    """A router of given weights [experts, hidden]; with one-hot tokens a column is the logits."""
    weight = torch.tensor(weights, dtype=torch.float64)
    config = tiny_config(
        num_hidden_layers=1,
        first_k_dense_replace=0,
        n_routed_experts=weight.shape[0],
        hidden_size=weight.shape[1],
        **changes,
    )
    router = Router(config).double().requires_grad_(False)
    router.weight.copy_(weight)
    if bias is not None:
        router.e_score_correction_bias.copy_(torch.tensor(bias))
    return router


def _logit(probability: float) -> float:
    return math.log(probability / (1.0 - probability))


ONE = torch.ones(1, 1, dtype=torch.float64)


def test_the_bias_changes_the_choice_and_not_the_weight() -> None:
    scores = [0.9, 0.2, 0.5]
    logits = [[_logit(score)] for score in scores]
    for bias, expected in (([0.0] * 3, 0), ([0.0, 0.8, 0.0], 1), ([-0.5, 0.0, 0.0], 2)):
        weights, chosen = _router(logits, bias, num_experts_per_tok=1)(ONE)
        assert chosen.tolist() == [[expected]]
        assert math.isclose(weights.item(), scores[expected], rel_tol=8 * 2**-53)


def test_groups_compete_by_their_best_expert_in_v2_and_by_their_best_two_in_v3() -> None:
    logits = [[_logit(score)] for score in (0.9, 0.1, 0.6, 0.6)]
    for method, expected in (("group_limited_greedy", [0, 1]), ("noaux_tc", [2, 3])):
        router = _router(
            logits,
            topk_method=method,
            scoring_func="sigmoid",
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
        )
        assert sorted(router(ONE)[1][0].tolist()) == expected, method


def test_a_dropped_group_stays_dropped_where_every_preference_is_negative() -> None:
    # A mask of 0 instead of minus infinity would prefer the dropped experts to all others.
    logits = [[_logit(score)] for score in (0.8, 0.7, 0.3, 0.2)]
    sizes = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    _, chosen = _router(logits, [-2.0] * 4, **sizes)(ONE)
    assert sorted(chosen[0].tolist()) == [0, 1]


def test_greedy_ignores_groups() -> None:
    logits = [[_logit(score)] for score in (0.9, 0.1, 0.8, 0.2)]
    router = _router(logits, topk_method="greedy", n_group=2, topk_group=1, num_experts_per_tok=2)
    assert sorted(router(ONE)[1][0].tolist()) == [0, 2]


def test_normalised_weights_add_up_to_the_scaling_factor() -> None:
    logits = [[_logit(score)] for score in (0.9, 0.1, 0.8, 0.2)]
    router = _router(logits, norm_topk_prob=True, routed_scaling_factor=2.5, num_experts_per_tok=3)
    weights, _ = router(ONE)
    # Three quotients, two additions, three products: each rounds by at most 2^-53 relatively.
    assert math.isclose(weights.sum().item(), 2.5, rel_tol=8 * 2**-53)


def test_weights_that_underflow_are_not_normalised_into_nan() -> None:
    router = _router([[-800.0]] * 4, [1.0, 0.0, 0.0, 0.0], norm_topk_prob=True)
    weights, _ = router(ONE)
    assert weights.tolist() == [[0.0, 0.0, 0.0]]


def expert_bound(hidden: Tensor, experts: Experts, share: Tensor, unit: float) -> Tensor:
    """How far an evaluation of the weighted experts may lie from the exact sum, [tokens, hidden].

    To first order, for every expert: a product over n terms is off by ``n unit sum |x w|``; silu
    has a slope of at most 1.1 and is itself good to 8 units; errors of the inner layer pass
    through ``|down|``; the sum over k experts adds k + 2 roundings of its terms.
    """
    total = torch.zeros_like(hidden, dtype=torch.float64)
    x = hidden.double()
    for expert in range(share.shape[1]):
        gate, up, down = (
            w[expert].double() for w in (experts.gate_proj, experts.up_proj, experts.down_proj)
        )
        gate_error = x.shape[1] * unit * (x.abs() @ gate.abs().mT)
        up_error = x.shape[1] * unit * (x.abs() @ up.abs().mT)
        silu = torch.nn.functional.silu(x @ gate.mT)
        silu_error = 1.1 * gate_error + 8.0 * unit * silu.abs()
        value = x @ up.mT
        inner_error = (
            silu_error * (value.abs() + up_error)
            + silu.abs() * up_error
            + unit * (silu * value).abs()
        )
        inner = (silu * value).abs()
        out = inner @ down.abs().mT
        out_error = inner_error @ down.abs().mT + down.shape[1] * unit * out
        total += share[:, expert, None].double().abs() * (
            out_error + (share.shape[1] + 2) * unit * out
        )
    return total


def experts_in_a_loop(hidden: Tensor, experts: Experts, weights: Tensor, chosen: Tensor) -> Tensor:
    """One token, one expert at a time, in float64."""
    output = torch.zeros_like(hidden, dtype=torch.float64)
    for token in range(len(hidden)):
        for weight, expert in zip(weights[token].tolist(), chosen[token].tolist(), strict=True):
            x = hidden[token].double()
            gate = experts.gate_proj[expert].double() @ x
            inner = gate * torch.sigmoid(gate) * (experts.up_proj[expert].double() @ x)
            output[token] += weight * (experts.down_proj[expert].double() @ inner)
    return output


def run_batched(experts: Experts, *args: Tensor) -> Tensor:
    """Every expert on every token, however many tokens there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture_of_experts, "BATCHED_EXPERTS_MAX_ROWS", 10**9)
        return experts(*args)


def run_gathered(experts: Experts, *args: Tensor) -> Tensor:
    """Each expert on its tokens, however few tokens there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture_of_experts, "BATCHED_EXPERTS_MAX_ROWS", 0)
        return experts(*args)


@given(mixtures(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_both_ways_to_run_the_experts_are_the_weighted_sum(
    mixture: Mixture, dtype: torch.dtype
) -> None:
    stream = mixture.stream()
    hidden, experts = mixture.hidden(stream, dtype), mixture.experts(stream, dtype)
    weights, chosen = mixture.router(stream)(hidden.double())
    if dtype != torch.float64:
        weights = weights.float()
    share = torch.zeros(len(hidden), len(experts.gate_proj), dtype=weights.dtype)
    share.scatter_(-1, chosen, weights)

    exact = experts_in_a_loop(hidden, experts, weights, chosen)
    unit = torch.finfo(dtype).eps / 2
    bound = expert_bound(hidden, experts, share, unit) + unit * exact.abs()
    for name, run in (("batched", run_batched), ("gathered", run_gathered)):
        output = run(experts, hidden, weights, chosen)
        assert output.dtype == dtype
        error = (output.double() - exact).abs()
        worst = (error - bound).argmax()
        assert bool((error <= bound).all()), (name, error.flatten()[worst], bound.flatten()[worst])


@pytest.mark.parametrize("rows", [128, 129], ids=["batched", "gathered"])
def test_the_switch_between_the_two_ways_is_seamless(rows: int) -> None:
    mixture = Mixture(rows, seed=3)
    stream = mixture.stream()
    hidden = mixture.hidden(stream, torch.float32)
    experts = mixture.experts(stream, torch.float32)
    weights, chosen = mixture.router(stream)(hidden.double())
    weights = weights.float()
    share = torch.zeros(rows, len(experts.gate_proj)).scatter(-1, chosen, weights)
    output = experts(hidden, weights, chosen)
    # Which way was taken shows in the bits: the same rows, the same products, the same sums.
    run = run_batched if rows <= 128 else run_gathered
    assert torch.equal(output, run(experts, hidden, weights, chosen))
    other = run_gathered if rows <= 128 else run_batched
    apart = (output - other(experts, hidden, weights, chosen)).abs()
    assert bool((apart <= 2.0 * expert_bound(hidden, experts, share, 2.0**-24)).all())


@pytest.mark.parametrize("run", [run_batched, run_gathered], ids=["batched", "gathered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("poison", [1e4, 3e38, math.nan], ids=["large", "huge", "nan"])
def test_an_overflow_stays_with_the_tokens_that_chose_the_expert(
    run: Any, dtype: torch.dtype, poison: float
) -> None:
    mixture = Mixture(5, seed=1)
    stream = mixture.stream()
    hidden, experts = mixture.hidden(stream, dtype), mixture.experts(stream, dtype)
    weights = torch.rand(5, 2, generator=stream)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [7, 1]])
    clean = run(experts, hidden, weights, chosen)
    for expert in (3, 7):  # nobody chose 3; the last token alone chose 7
        for weight in experts.parameters():
            weight[expert] = poison
    output = run(experts, hidden, weights, chosen)
    assert torch.equal(output[:4], clean[:4])
    assert not torch.equal(output[4], clean[4])


def test_a_token_does_not_feel_where_its_batch_mates_are_routed() -> None:
    mixture = Mixture(8, seed=2)
    stream = mixture.stream()
    hidden = mixture.hidden(stream, torch.float32)
    layer = MixtureOfExperts(mixture.config).requires_grad_(False)
    randomise(dict(layer.named_parameters()), seed=2)
    alone = layer(hidden)
    mates = hidden.clone()
    mates[1:] = 100.0 * torch.randn(mates[1:].shape, generator=stream)
    assert not torch.equal(layer.gate(hidden)[1][1:], layer.gate(mates)[1][1:])
    assert torch.equal(layer(mates)[0], alone[0])


def test_shared_experts_are_added_for_every_token() -> None:
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, n_shared_experts=2)
    layer = MixtureOfExperts(config).double().requires_grad_(False)
    randomise(dict(layer.named_parameters()), seed=4)
    hidden = torch.randn(2, 3, config.hidden_size, dtype=torch.float64)
    together = layer(hidden)
    shared = layer.shared_experts
    assert isinstance(shared, GatedMLP)
    assert shared.gate_proj.out_features == 2 * config.moe_intermediate_size
    layer.shared_experts = None
    assert torch.equal(layer(hidden) + shared(hidden), together)


def test_without_shared_experts_there_is_no_module_for_them() -> None:
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, n_shared_experts=0)
    assert MixtureOfExperts(config).shared_experts is None


@given(st.integers(1, 6), st.integers(0, 7), st.integers(1, 3))
def test_layers_are_mixtures_where_the_configuration_says(
    num_layers: int, first_k_dense: int, frequency: int
) -> None:
    config = tiny_config(
        num_hidden_layers=num_layers, first_k_dense_replace=first_k_dense, moe_layer_freq=frequency
    )
    decoder = Decoder(config)
    for index, layer in enumerate(decoder.model.layers):
        is_mixture = index >= first_k_dense and index % frequency == 0
        assert isinstance(layer.mlp, MixtureOfExperts if is_mixture else GatedMLP), index


def test_only_noaux_tc_has_a_bias() -> None:
    for method in SUPPORTED_TOPK_METHODS:
        router = Router(tiny_config(first_k_dense_replace=0, topk_method=method))
        assert ("e_score_correction_bias" in router.state_dict()) == (method == "noaux_tc")


@pytest.mark.parametrize("source", ["cast", "loaded"])
def test_routing_stays_in_float32_in_a_bf16_decoder(source: str, tmp_path: Path) -> None:
    fields = config_fields(num_hidden_layers=1, first_k_dense_replace=0, num_experts_per_tok=1)
    decoder = random_decoder(ModelConfig.from_dict(fields))
    gate: Any = decoder.model.get_submodule("layers.0.mlp.gate")
    # 2^-12 apart: one number in BF16, whose steps are 2^-8 there, and the first would be taken.
    gate.weight.zero_()
    gate.e_score_correction_bias.copy_(1.0 + torch.arange(8.0) * 2.0**-12)
    if source == "cast":
        in_bf16 = Decoder(decoder.config, dtype=torch.bfloat16)
        in_bf16.load_state_dict(decoder.state_dict())
    else:
        write_checkpoint(tmp_path, fields, decoder.checkpoint_tensors())
        in_bf16 = load_decoder(tmp_path, dtype=torch.bfloat16)

    router: Any = in_bf16.model.get_submodule("layers.0.mlp.gate")
    for name, parameter in in_bf16.named_parameters():
        expected = torch.float32 if ".gate." in name else torch.bfloat16
        assert parameter.dtype == expected, name
    hidden = torch.randn(3, in_bf16.config.hidden_size).bfloat16()
    weights, chosen = router(hidden)
    assert weights.dtype == torch.float32
    assert chosen.tolist() == [[7]] * 3


def test_a_bf16_token_is_scored_without_rounding_its_score() -> None:
    # Two experts whose logits differ by 2^-10 at 1.0: the same number in BF16.
    router = _router([[1.0], [1.0 + 2.0**-10]], num_experts_per_tok=1, topk_method="greedy").float()
    _, chosen = router(torch.ones(1, 1, dtype=torch.bfloat16))
    assert chosen.tolist() == [[1]]

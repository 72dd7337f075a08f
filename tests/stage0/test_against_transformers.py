"""The decoder against transformers' DeepSeek-V2 and DeepSeek-V3, through the files on disk.

Every case builds transformers' model with random weights, saves it with `save_pretrained`, loads
the directory with `load_decoder` and compares logits: of a full forward, and token by token
through the paged cache. What may differ is rounding, and how much rounding costs is measured on
transformers' own model, run twice:

- in float32, as it is;
- with every float32 in it replaced by float64 (`Float64Everywhere`), which calls the same code:
  norms, routers, rotary tables and softmaxes are float32 there otherwise, in a float64 model too.

The difference of the two, `Oracle.float32_cost`, is what float32 costs this very computation, and
`2^-29` of it what float64 costs. So there are two comparisons:

- with float64 everywhere on our side too, we must agree to a few float64 roundings: a relative
  1e-14 or so, in which no mistake can hide;
- as it runs in float32, our error must be at most a small multiple of transformers' error.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import AttentionBackend
from stage0_reference.checkpoint import CheckpointError
from stage0_reference.decoder import CachedAttention, Decoder, FullAttention
from stage0_reference.generation import TextGenerator
from stage0_reference.pretrained import load_decoder, shipped_checkpoint
from stage0_reference.sampling import SamplingParams
from tests.model_factory import TINY_SIZES, randomise, shuffled_block_table, slots_of

transformers = pytest.importorskip("transformers", minversion="5.0")

pytestmark = pytest.mark.stage0

SMALL_MULTIPLE = 4.0
"""Our error against transformers': the same maths, summed in another order and through W_UK."""

FLOAT64_OVER_FLOAT32 = 2.0**-29  # unit roundoffs 2^-53 and 2^-24

LENGTHS = (17, 7)
PAGE_SIZE = 4


class Float64Everywhere(TorchFunctionMode):
    """Within it, whoever asks torch for float32 is given float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        return func(
            *(widen(value) for value in args),
            **{name: widen(value) for name, value in (kwargs or {}).items()},
        )


def test_float64_everywhere_reaches_what_a_float64_model_leaves_in_float32() -> None:
    with Float64Everywhere():
        assert torch.arange(3, dtype=torch.float32).dtype == torch.float64
        x = torch.zeros(3, dtype=torch.float64)
        assert x.float().dtype == torch.float64
        assert x.to(torch.float32).dtype == torch.float64
        assert x.type(torch.float32).dtype == torch.float64
        assert torch.softmax(x, dim=-1, dtype=torch.float32).dtype == torch.float64


class Case(NamedTuple):
    """A model: its type, and how it differs from `model_factory.TINY_SIZES`."""

    model_type: str
    changes: dict[str, Any]


GROUPS = {"n_group": 4, "topk_group": 2}
ALL_MOE = {"first_k_dense_replace": 0}
ALL_DENSE = {"first_k_dense_replace": 3}


def _rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    # A low base and a short pretrained context: within 17 tokens every frequency turns, and
    # YaRN's ramp ends inside the 8 pairs.
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 50.0, **settings}}


def _yarn(mscale: float, mscale_all_dim: float | None, **settings: Any) -> dict[str, Any]:
    if mscale_all_dim is not None:
        settings |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    settings = {"factor": 40.0, "original_max_position_embeddings": 64, **settings}
    return _rope("yarn", **settings) | {"max_position_embeddings": 2560}


V2, V3 = "deepseek_v2", "deepseek_v3"
CASES = {
    "v3": Case(V3, {}),
    "v3, direct queries": Case(V3, {"q_lora_rank": None}),
    "v3, values wider than keys": Case(V3, {"v_head_dim": 40, "qk_nope_head_dim": 6}),
    "v3, one head": Case(V3, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "v3, rotary halves": Case(V3, {"rope_interleave": False}),
    "v3, linear rope": Case(V3, _rope("linear", factor=4.0)),
    "v3, yarn 1.0": Case(V3, _yarn(1.0, 1.0)),
    "v3, yarn 0.707": Case(V3, _yarn(0.707, 0.707)),
    "v3, yarn magnitudes differ": Case(V3, _yarn(1.0, 0.707)),
    "v3, yarn without magnitudes": Case(V3, _yarn(1.0, None)),
    "v3, yarn ramp": Case(V3, _yarn(1.0, 1.0, beta_fast=4.0, beta_slow=0.5, truncate=False)),
    "v3, yarn attention factor": Case(V3, _yarn(1.0, 1.0, attention_factor=1.25)),
    "v3, yarn halves": Case(V3, _yarn(1.0, 1.0) | {"rope_interleave": False}),
    "v3, groups": Case(V3, GROUPS),
    "v3, one group of two": Case(V3, {"n_group": 2, "topk_group": 1}),
    "v3, weights not normalised": Case(V3, {"norm_topk_prob": False, **GROUPS}),
    "v3, scaling factor": Case(V3, {"routed_scaling_factor": 1.0}),
    "v3, all mixtures": Case(V3, ALL_MOE),
    "v3, all dense": Case(V3, ALL_DENSE),
    "v3, one shared expert": Case(V3, {"n_shared_experts": 1}),
    "v3, tied": Case(V3, {"tie_word_embeddings": True}),
    "v3, attention bias": Case(V3, {"attention_bias": True}),
    "v3, large epsilon": Case(V3, {"rms_norm_eps": 1e-2}),
    "v2": Case(V2, {}),
    "v2, direct queries": Case(V2, {"q_lora_rank": None}),
    "v2, groups": Case(V2, {"topk_method": "group_limited_greedy", **GROUPS}),
    "v2, yarn 0.707": Case(V2, _yarn(0.707, 0.707)),
    "v2, yarn magnitudes differ": Case(V2, _yarn(1.0, 0.707)),
    "v2, linear rope": Case(V2, _rope("linear", factor=4.0)),
    "v2, scaling factor": Case(V2, {"routed_scaling_factor": 16.0}),
    "v2, all mixtures": Case(V2, ALL_MOE),
    "v2, all dense": Case(V2, ALL_DENSE),
    "v2, biases everywhere": Case(V2, {"attention_bias": True, "mlp_bias": True}),
    "v2, biases, direct queries": Case(V2, {"attention_bias": True, "q_lora_rank": None}),
    "v2, tied": Case(V2, {"tie_word_embeddings": True}),
}


def build(case: Case, seed: int = 0) -> Any:
    """transformers' model of a case, with random weights, in float32."""
    family = {V2: "DeepseekV2", V3: "DeepseekV3"}[case.model_type]
    fields = {**TINY_SIZES, "num_key_value_heads": TINY_SIZES["num_attention_heads"]}
    fields |= {"n_group": 1, "topk_group": 1, **case.changes}
    config = getattr(transformers, f"{family}Config")(
        **fields, attn_implementation="eager", experts_implementation="eager"
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    weights = dict(model.named_parameters())
    weights |= {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    randomise(weights, seed)
    return model


def in_float64(model: Any) -> Any:
    """A copy of transformers' model to be run under `Float64Everywhere`."""
    wide = copy.deepcopy(model).double()
    with Float64Everywhere():
        wide.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return wide


def logits_of(model: Any, requests: Sequence[Tensor]) -> list[Tensor]:
    """transformers' logits, [length, vocab_size] a request."""
    return [model(request[None], use_cache=False).logits[0] for request in requests]


@contextlib.contextmanager
def watched_routers(model: Any) -> Iterator[list[float]]:
    """Collect by how much transformers' routers decide: one least distance a call and choice."""
    config = model.config
    margins: list[float] = []

    def distance(values: Tensor, count: int) -> None:
        """Note how far the last of the best `count` is from the next."""
        ranked = values.sort(dim=-1, descending=True).values
        if count < values.shape[-1]:
            margins.append(float((ranked[:, count - 1] - ranked[:, count]).min()))

    def watch(router: Any, _: Any, output: Any) -> None:
        in_v3 = config.model_type == V3
        candidates = output[0].sigmoid() if in_v3 else output[0].softmax(dim=-1)
        if in_v3:
            candidates = candidates + router.e_score_correction_bias
        if in_v3 or config.topk_method == "group_limited_greedy":
            by_group = candidates.unflatten(-1, (config.n_group, -1))
            group_scores = by_group.topk(2 if in_v3 else 1, dim=-1).values.sum(dim=-1)
            distance(group_scores, config.topk_group)
            kept = group_scores.topk(config.topk_group, dim=-1).indices
            candidates = by_group.take_along_dim(kept[..., None], dim=1).flatten(1)
        distance(candidates, config.num_experts_per_tok)

    routers = [m for m in model.modules() if type(m).__name__.endswith("TopkRouter")]
    hooks = [router.register_forward_hook(watch) for router in routers]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()


class Oracle(NamedTuple):
    """A case on disk and what transformers makes of it."""

    directory: Path
    requests: list[Tensor]
    exact: list[Tensor]
    """Logits, float64 everywhere."""
    float32_cost: float
    """Largest error of transformers' own float32 logits."""


def consult(case: Case, directory: Path) -> Oracle:
    """Build, save and run transformers' model.

    The seed is the first for which no router decides by less than 1e-4, a hundred times what
    float32 costs: otherwise a rounding may choose another expert, on either side, rightly.
    """
    for seed in range(20):
        model = build(case, seed)
        stream = torch.Generator().manual_seed(seed)
        requests = [
            torch.randint(model.config.vocab_size, (length,), generator=stream)
            for length in LENGTHS
        ]
        wide = in_float64(model)
        with Float64Everywhere(), torch.no_grad(), watched_routers(wide) as margins:
            exact = logits_of(wide, requests)
        if min(margins, default=1.0) > 1e-4:
            break
    else:
        pytest.fail("no seed leaves the routers a margin")
    with torch.no_grad():
        narrow = logits_of(model, requests)
    assert exact[0].dtype == torch.float64
    assert narrow[0].dtype == torch.float32
    model.save_pretrained(directory)
    return Oracle(directory, requests, exact, apart(narrow, exact))


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Largest difference of two lists of logits; NaN if there is one anywhere."""
    differences = [a.double() - b.double() for a, b in zip(one, other, strict=True)]
    return float(torch.cat(differences).abs().max())


@pytest.fixture(scope="module", params=CASES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Each case in turn."""
    return consult(CASES[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """One named case, built when first asked for."""
    known: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in known:
            known[name] = consult(CASES[name], tmp_path_factory.mktemp("checkpoint"))
        return known[name]

    return get


@torch.no_grad()
def full_logits(decoder: Decoder, requests: Sequence[Tensor]) -> list[Tensor]:
    """Our logits without a cache."""
    return [
        decoder(request[None], torch.arange(len(request))[None], FullAttention())[0]
        for request in requests
    ]


@torch.no_grad()
def cached_logits(
    decoder: Decoder,
    requests: Sequence[Tensor],
    chunks: Sequence[Sequence[int]],
    form: str,
    backend: AttentionBackend | None = None,
) -> list[Tensor]:
    """Our logits through a paged cache: stage 0's in the decoder's dtype, or that of `backend`.

    ``chunks[request]`` is how many tokens it takes in each step; a request whose list is shorter
    joins later, so that all end in the same step.
    """
    backend = backend or AbsorbedBackend(cache_dtype=decoder.dtype)
    table, num_pages = shuffled_block_table([len(r) for r in requests], PAGE_SIZE)
    cache = backend.make_cache(decoder.config, num_pages, PAGE_SIZE)
    for layer in cache:
        for plane in layer:
            plane.fill_(float("nan"))  # a slot that nobody wrote must not matter
    done = [0] * len(requests)
    logits: list[list[Tensor]] = [[] for _ in requests]
    num_steps = max(map(len, chunks))
    for step in range(num_steps):
        live = [r for r in range(len(requests)) if step >= num_steps - len(chunks[r])]
        counts = [chunks[r][step - num_steps + len(chunks[r])] for r in live]
        spans = [(done[r], done[r] + count) for r, count in zip(live, counts, strict=True)]
        slots = [
            slot
            for r, span in zip(live, spans, strict=True)
            for slot in slots_of(table, r, *span, PAGE_SIZE)
        ]
        attention = CachedAttention(
            backend,
            cache,
            query_lens=counts,
            slot_mapping=torch.tensor(slots),
            block_table=table[live],
            cache_seqlens=torch.tensor([end for _, end in spans], dtype=torch.int32),
            form=form,
        )
        packed = torch.cat([requests[r][slice(*s)] for r, s in zip(live, spans, strict=True)])
        positions = torch.cat([torch.arange(*span) for span in spans])
        for r, part in zip(live, decoder(packed, positions, attention).split(counts), strict=True):
            logits[r].append(part)
            done[r] += len(part)
    assert done == [len(request) for request in requests]
    return [torch.cat(parts) for parts in logits]


TOKEN_BY_TOKEN = [[1] * length for length in LENGTHS]
RAGGED = [[9, 1, 3, 1, 3], [1, 2, 4]]  # "auto" computes a chunk above 8 naively


def worst_error(decoder: Decoder, oracle: Oracle) -> dict[str, float]:
    """Largest error of our logits, by the way in which they were computed."""
    requests = oracle.requests
    return {
        "full": apart(full_logits(decoder, requests), oracle.exact),
        "token by token": apart(
            cached_logits(decoder, requests, TOKEN_BY_TOKEN, "auto"), oracle.exact
        ),
        "ragged": apart(cached_logits(decoder, requests, RAGGED, "auto"), oracle.exact),
    }


@pytest.mark.unchecked  # the mode sees every look at a shape; the test after this one is checked
def test_exact_arithmetic_gives_the_logits_of_transformers(oracle: Oracle) -> None:
    decoder = load_decoder(oracle.directory, dtype=torch.float64)
    with Float64Everywhere():
        errors = worst_error(decoder, oracle)
    bound = SMALL_MULTIPLE * FLOAT64_OVER_FLOAT32 * oracle.float32_cost
    assert all(error <= bound for error in errors.values()), (errors, bound)


def test_float32_costs_little_more_than_in_transformers(oracle: Oracle) -> None:
    errors = worst_error(load_decoder(oracle.directory, dtype=torch.float32), oracle)
    bound = SMALL_MULTIPLE * oracle.float32_cost
    assert all(error <= bound for error in errors.values()), (errors, bound)


@pytest.mark.parametrize("name", ["v2, all dense", "v3, all dense"])
def test_bf16_costs_little_more_than_in_transformers(name: str, saved: Any) -> None:
    # Without routers: BF16 moves their scores by enough to choose other experts, rightly.
    oracle = saved(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        oracle.directory, dtype=torch.bfloat16, attn_implementation="eager"
    ).requires_grad_(False)
    cost = apart(logits_of(model, oracle.requests), oracle.exact)
    errors = worst_error(load_decoder(oracle.directory, dtype=torch.bfloat16), oracle)
    assert all(error <= SMALL_MULTIPLE * cost for error in errors.values()), (errors, cost)
    # The other way round, so that the bound is known to be one: rounding to BF16 did happen.
    assert min(errors.values()) > 2.0**8 * oracle.float32_cost


@pytest.mark.parametrize("form", ["absorbed", "naive"])
@pytest.mark.parametrize("name", ["v2, yarn magnitudes differ", "v3, yarn halves"])
def test_either_form_alone_gives_the_logits_of_transformers(
    name: str, form: str, saved: Any
) -> None:
    oracle = saved(name)
    decoder = load_decoder(oracle.directory, dtype=torch.float64)
    with Float64Everywhere():
        logits = cached_logits(decoder, oracle.requests, RAGGED, form)
    bound = SMALL_MULTIPLE * FLOAT64_OVER_FLOAT32 * oracle.float32_cost
    assert apart(logits, oracle.exact) <= bound


def _edit_config(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))


def _edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _same_bits(one: Path, other: Path, requests: Sequence[Tensor]) -> bool:
    """Whether two directories give the same logits, bit for bit, in float32."""
    logits = [full_logits(load_decoder(d, dtype=torch.float32), requests) for d in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def test_float64_weights_without_the_mode_cost_less_than_float32(saved: Any) -> None:
    # As a user runs it: only cos and sin are rounded to float32 then.
    oracle = saved("v3, yarn 1.0")
    decoder = load_decoder(oracle.directory, dtype=torch.float64)
    logits = full_logits(decoder, oracle.requests)
    assert logits[0].dtype == torch.float64
    assert apart(logits, oracle.exact) <= oracle.float32_cost


@pytest.mark.parametrize(
    "name",
    ["v2", "v2, groups", "v2, yarn 0.707", "v3", "v3, yarn magnitudes differ", "v3, linear rope"],
)
def test_the_older_spelling_gives_the_same_bits(name: str, saved: Any, tmp_path: Path) -> None:
    oracle = saved(name)
    older = Path(shutil.copytree(oracle.directory, tmp_path / "older"))

    def respell(fields: dict[str, Any]) -> None:
        rope = fields.pop("rope_parameters")
        fields["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        fields["rope_scaling"] = None if rope["type"] == "default" else rope
        fields.pop("rope_interleave", None)
        fields["moe_layer_freq"] = 1
        fields["torch_dtype"] = fields.pop("dtype")
        if fields["model_type"] == V2:
            fields["scoring_func"] = "softmax"
        else:
            fields |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

    _edit_config(older, respell)
    assert _same_bits(oracle.directory, older, oracle.requests)


def test_kimi_k2_is_read_as_the_same_architecture(saved: Any, tmp_path: Path) -> None:
    oracle = saved("v3")
    kimi = Path(shutil.copytree(oracle.directory, tmp_path / "kimi"))
    _edit_config(kimi, lambda fields: fields.update(model_type="kimi_k2"))
    assert _same_bits(oracle.directory, kimi, oracle.requests)


@pytest.mark.parametrize("name", ["v2, tied", "v3"])
def test_shards_give_the_same_bits_as_one_file(name: str, saved: Any, tmp_path: Path) -> None:
    oracle = saved(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(oracle.directory)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert _same_bits(oracle.directory, tmp_path, oracle.requests)


def test_multi_token_prediction_layers_are_ignored(saved: Any, tmp_path: Path) -> None:
    oracle = saved("v3")
    extended = Path(shutil.copytree(oracle.directory, tmp_path / "extended"))

    def add_layer(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.2.")]:
            copied = name.replace("model.layers.2.", "model.layers.3.")
            tensors[copied] = torch.full_like(tensors[name], float("nan"))
        for name in ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.head"):
            tensors[f"model.layers.3.{name}.weight"] = torch.full((5, 7), float("nan"))

    _edit_tensors(extended, add_layer)
    _edit_config(extended, lambda fields: fields.update(num_nextn_predict_layers=1))
    assert _same_bits(oracle.directory, extended, oracle.requests)
    # Without the field that announces it, the layer is a stranger.
    _edit_config(extended, lambda fields: fields.update(num_nextn_predict_layers=0))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight"):
        load_decoder(extended)


def test_stored_rotary_tables_are_ignored(saved: Any, tmp_path: Path) -> None:
    oracle = saved("v3")
    older = Path(shutil.copytree(oracle.directory, tmp_path / "older"))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _edit_tensors(older, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert _same_bits(oracle.directory, older, oracle.requests)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_scale",
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "model.layers.13.input_layernorm.weight",
        "model.layers.0.mlp.gate.weight",
    ],
)
def test_an_unexpected_tensor_is_refused_by_name(name: str, saved: Any, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved("v3").directory, tmp_path / "changed"))
    _edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(CheckpointError) as caught:
        load_decoder(directory)
    assert caught.value.unexpected == (name,)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.7.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_refused_by_name(name: str, saved: Any, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved("v3").directory, tmp_path / "changed"))

    def remove(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    _edit_tensors(directory, remove)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(directory)
    assert caught.value.missing == (name,)
    assert name in str(caught.value)


def quantise(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and the values that they mean, block by block."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    values = torch.empty_like(weight)
    row_blocks, col_blocks = (-(-size // block) for size in weight.shape)
    scales = torch.empty(row_blocks, col_blocks)
    for i in range(row_blocks):
        for j in range(col_blocks):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale = weight[part].abs().max() / torch.finfo(torch.float8_e4m3fn).max
            codes[part] = (weight[part] / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scale
            scales[i, j] = scale
    return codes, scales, values


FP8_SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FP8_CASE = Case(
    V3,
    {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": 160,
        "kv_lora_rank": 144,
        "qk_nope_head_dim": 40,
        "v_head_dim": 50,
        "q_lora_rank": 136,
    },
)


def _is_quantised(name: str) -> bool:
    """Which weights DeepSeek-V3's checkpoint stores in FP8: all projections of the layers."""
    return name.startswith("model.layers.") and name.endswith("_proj.weight") or "_mqa." in name


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A block-FP8 checkpoint, and the float32 one that it stands for."""
    fp8, plain = (tmp_path_factory.mktemp(name) for name in ("fp8", "dequantised"))
    build(FP8_CASE).save_pretrained(plain)
    shutil.copytree(plain, fp8, dirs_exist_ok=True)
    scales_apart = set()

    def store(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if _is_quantised(n)]:
            tensors[name], scale, _ = quantise(tensors[name])
            tensors[name + "_scale_inv"] = scale
            scales_apart.add(scale.numel())

    def stand_for(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if _is_quantised(n)]:
            tensors[name] = quantise(tensors[name])[2]

    _edit_tensors(fp8, store)
    _edit_config(fp8, lambda fields: fields.update(quantization_config=FP8_SETTINGS))
    _edit_tensors(plain, stand_for)
    assert max(scales_apart) >= 4  # more than one block along both axes, the last ones cut short
    return fp8, plain


def test_an_fp8_checkpoint_is_its_dequantised_weights(quantised: tuple[Path, Path]) -> None:
    fp8, plain = quantised
    names = load_file(fp8 / "model.safetensors")
    assert names["model.layers.0.self_attn.kv_b_proj.weight"].dtype == torch.float8_e4m3fn
    request = torch.arange(13)
    assert _same_bits(fp8, plain, [request])

    # And these are the weights that transformers reads.
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        plain, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).requires_grad_(False)
    wide = in_float64(model)
    with Float64Everywhere(), torch.no_grad():
        exact = logits_of(wide, [request])
    cost = apart(logits_of(model, [request]), exact)
    ours = full_logits(load_decoder(fp8, dtype=torch.float32), [request])
    assert apart(ours, exact) <= SMALL_MULTIPLE * cost


def test_absorbed_and_naive_attention_agree_on_an_fp8_checkpoint(
    quantised: tuple[Path, Path],
) -> None:
    fp8, _ = quantised
    requests = [torch.tensor([3, 1, 4])]
    wide = load_decoder(fp8, dtype=torch.float64)
    narrow = load_decoder(fp8, dtype=torch.float32)
    exact = cached_logits(wide, requests, [[3]], "naive")
    absorbed = cached_logits(wide, requests, [[3]], "absorbed")
    cost = apart(cached_logits(narrow, requests, [[3]], "naive"), exact)
    assert 0.0 < apart(absorbed, exact) <= SMALL_MULTIPLE * FLOAT64_OVER_FLOAT32 * cost


def test_another_quantised_format_is_refused_by_name(saved: Any, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved("v3").directory, tmp_path / "gptq"))
    settings = {"quant_method": "gptq", "bits": 4}
    _edit_config(directory, lambda fields: fields.update(quantization_config=settings))
    with pytest.raises(CheckpointError, match="quant_method 'gptq' is not supported"):
        load_decoder(directory)


def test_greedy_generation_from_the_shipped_checkpoint_is_that_of_transformers() -> None:
    prompt = [256, *b'def binary_search(items, target):\n    """Return the index of target']
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        shipped_checkpoint(), dtype=torch.float32
    )
    model.generation_config.eos_token_id = None
    theirs = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=32,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    decoder = load_decoder(shipped_checkpoint(), dtype=torch.float32)
    generator = TextGenerator(
        decoder,
        AbsorbedBackend(cache_dtype=torch.float32),
        num_pages=4,
        page_size=32,
        decode_rows=2,
    )
    (ours,) = generator.generate([prompt], SamplingParams(max_new_tokens=32))
    their_tokens = theirs.sequences[0, len(prompt) :].tolist()
    their_logits = torch.cat(theirs.logits)
    best_two = their_logits.topk(2, dim=-1).values
    gaps = best_two[:, 0] - best_two[:, 1]
    assert ours.token_ids == their_tokens, f"transformers decided by {gaps.tolist()}"

    # No luck in it: on the same tokens the logits differ by less than half of the closest choice.
    (same,) = full_logits(decoder, [theirs.sequences[0, :-1]])
    assert apart([same[len(prompt) - 1 :]], [their_logits]) < float(gaps.min()) / 2

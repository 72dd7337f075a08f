"""Other MLA families against transformers' own classes, through the files on disk.

As `test_against_transformers.py` does for DeepSeek: random weights, saved and loaded again, logits
of a full forward and token by token, in exact arithmetic to a few float64 roundings and in float32
to a small multiple of transformers' own error. Then through the caches of all stages, where the
measure is what rounding its latents costs transformers' model.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import FusedProjections, load_backend
from stage0_reference.checkpoint import CheckpointError, save_safetensors
from stage0_reference.decoder import CachedAttention
from stage0_reference.families import FAMILIES
from stage0_reference.generation import TextGenerator
from stage0_reference.model_config import (
    SUPPORTED_MODEL_TYPES,
    ModelConfig,
    RopeConfig,
    UnsupportedModelError,
)
from stage0_reference.pretrained import load_decoder
from stage0_reference.rope import query_scale
from stage0_reference.sampling import SamplingParams
from tests.model_factory import (
    config_fields,
    random_decoder,
    randomise,
    tiny_config,
    write_checkpoint,
)
from tests.stage0.test_against_transformers import (
    FLOAT64_OVER_FLOAT32,
    LENGTHS,
    PAGE_SIZE,
    SMALL_MULTIPLE,
    TOKEN_BY_TOKEN,
    Case,
    Float64Everywhere,
    Oracle,
    apart,
    cached_logits,
    full_logits,
    in_float64,
    logits_of,
    worst_error,
)

transformers = pytest.importorskip("transformers", minversion="5.24")

pytestmark = pytest.mark.stage0

GLM, MINICPM, LONGCAT = "glm4_moe_lite", "minicpm3", "longcat_flash"
YOUTU, MISTRAL = "youtu", "mistral4"
PAIRS = 8  # of TINY_SIZES


def _rope(rope_type: str = "default", **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 50.0, **settings}}


def _longrope(context: int, pretrained: int, **settings: Any) -> dict[str, Any]:
    """LongRoPE whose two lists have nothing in common."""
    short = [1.0 + 0.1 * pair for pair in range(PAIRS)]
    long = [2.0 + 0.7 * pair for pair in range(PAIRS)]
    settings |= {"short_factor": short, "long_factor": long}
    settings["original_max_position_embeddings"] = pretrained
    return {"max_position_embeddings": context, **_rope("longrope", **settings)}


# Queries grow three times within 17 tokens; YaRN's ramp ends inside the pairs.
GROWING = _rope(
    "yarn",
    factor=40.0,
    original_max_position_embeddings=5,
    beta_fast=1.0,
    beta_slow=0.05,
    mscale=1.0,
    mscale_all_dim=0.707,
    llama_4_scaling_beta=0.3,
)
CASES = {
    "glm": Case(GLM, {}),
    "glm, 20 heads, values wider than keys": Case(
        GLM, {"num_attention_heads": 20, "v_head_dim": 16, "qk_nope_head_dim": 6}
    ),
    "glm, two dense layers": Case(GLM, {"mlp_layer_types": ["dense", "dense", "sparse"]}),
    "minicpm": Case(MINICPM, {}),
    "minicpm, untied": Case(MINICPM, {"tie_word_embeddings": False}),
    "minicpm, longrope within the pretrained context": Case(MINICPM, _longrope(64, 64)),
    # Shorter than the shortest request: transformers takes the long list for each then, as we do.
    "minicpm, longrope beyond it": Case(MINICPM, _longrope(64, 5)),
    "minicpm, longrope, factor given": Case(MINICPM, _longrope(64, 5, factor=3.0)),
    "longcat": Case(LONGCAT, {}),
    "longcat, yarn": Case(
        LONGCAT,
        _rope(
            "yarn",
            factor=40.0,
            original_max_position_embeddings=64,
            mscale=1.0,
            mscale_all_dim=0.707,
        ),
    ),
    "longcat, no identity experts": Case(LONGCAT, {"zero_expert_num": 0}),
    "youtu": Case(YOUTU, {}),
    "youtu, direct queries, untied": Case(
        YOUTU, {"q_lora_rank": None, "tie_word_embeddings": False}
    ),
    "mistral": Case(MISTRAL, GROWING),
    "mistral, all mixtures": Case(MISTRAL, GROWING | {"first_k_dense_replace": 0}),
}
EVERY_EXPERT = {
    # A cache moves router scores by enough to choose other experts, rightly: so, choose them all.
    "glm": Case(GLM, {"num_experts_per_tok": 8}),
    "minicpm": Case(MINICPM, _longrope(64, 5)),
    "longcat": Case(LONGCAT, {"moe_topk": 9}),
    "youtu": Case(YOUTU, {}),
    "mistral": Case(MISTRAL, GROWING | {"num_experts_per_tok": 8}),
}


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """float64 everywhere, and where nobody asks for a type too."""
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Everywhere():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def build(case: Case, seed: int) -> Any:
    """transformers' model of a case, with random weights, in float32."""
    fields = config_fields(case.model_type, **(_rope() | case.changes))
    if case.model_type == LONGCAT:
        fields["head_dim"] = fields["qk_rope_head_dim"]  # what its rotary class goes by
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(
        **fields, attn_implementation="eager", experts_implementation="eager"
    )
    # By name: the library's table of model classes lacks some.
    family = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))
    model = family(config).eval().requires_grad_(False)
    weights = dict(model.named_parameters())
    weights |= {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    randomise(weights, seed)
    return model


@contextlib.contextmanager
def watched_routers(model: Any) -> Iterator[list[float]]:
    """Collect by how much transformers' routers decide: one least distance a call."""
    margins: list[float] = []

    def watch(router: Any, _: Any, output: Any) -> None:
        sigmoid = model.config.model_type == GLM
        scores = output[0].sigmoid() if sigmoid else output[0].softmax(dim=-1)
        ranked = (scores + getattr(router, "e_score_correction_bias", 0.0)).sort(descending=True)
        if router.top_k < scores.shape[-1]:
            around = ranked.values[:, router.top_k - 1 : router.top_k + 1]
            margins.append(float((around[:, 0] - around[:, 1]).min()))

    routers = [m for m in model.modules() if type(m).__name__.endswith("TopkRouter")]
    hooks = [router.register_forward_hook(watch) for router in routers]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()


def consult(case: Case, directory: Path) -> tuple[Oracle, Any]:
    """Build, save and run transformers' model, with a seed that leaves its routers a margin.

    1e-4 is a hundred times what float32 costs, see `test_against_transformers.consult`.
    """
    for seed in range(20):
        model = build(case, seed)
        stream = torch.Generator().manual_seed(seed)
        requests = [torch.randint(61, (length,), generator=stream) for length in LENGTHS]
        with exact_arithmetic(), torch.no_grad(), watched_routers(wide := in_float64(model)) as m:
            exact = logits_of(wide, requests)
        if min(m, default=1.0) > 1e-4:
            break
    else:
        pytest.fail("no seed leaves the routers a margin")
    with torch.no_grad():
        narrow = logits_of(model, requests)
    assert (exact[0].dtype, narrow[0].dtype) == (torch.float64, torch.float32)
    model.save_pretrained(directory)
    return Oracle(directory, requests, exact, apart(narrow, exact)), model


@pytest.fixture(scope="module", params=CASES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Each case in turn."""
    return consult(CASES[request.param], tmp_path_factory.mktemp("checkpoint"))[0]


@pytest.mark.unchecked  # the mode sees every look at a shape; the test after this one is checked
def test_exact_arithmetic_gives_the_logits_of_transformers(oracle: Oracle) -> None:
    decoder = load_decoder(oracle.directory, dtype=torch.float64)
    with exact_arithmetic():
        errors = worst_error(decoder, oracle)
    bound = SMALL_MULTIPLE * FLOAT64_OVER_FLOAT32 * oracle.float32_cost
    assert all(error <= bound for error in errors.values()), (errors, bound)


# Through the caches of all stages


def round_to_cache(rows: Tensor, stage: int) -> Tensor:
    """Latents as a cache gives them back: BF16, or e4m3 under each token's scale."""
    if stage == 0:
        return rows.bfloat16().to(rows.dtype)
    scale = rows.abs().amax(dim=-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (rows / scale).to(torch.float8_e4m3fn).to(rows.dtype) * scale


@torch.no_grad()
def cost_of_a_cache(model: Any, oracle: Oracle, stage: int) -> float:
    """Error of transformers' logits when its normed latents are rounded as a stage's cache does."""

    def rounded(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return round_to_cache(output, stage)

    norms = [m for n, m in model.named_modules() if n.endswith("kv_a_layernorm")]
    hooks = [norm.register_forward_hook(rounded) for norm in norms]
    try:
        return apart(logits_of(model, oracle.requests), oracle.exact)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.fixture(scope="module", params=EVERY_EXPERT)
def consulted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Oracle, Any]:
    """Each family in turn, with transformers' model."""
    return consult(EVERY_EXPERT[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_cache_costs_little_more_than_its_rounding_in_transformers(
    stage: int, consulted: tuple[Oracle, Any]
) -> None:
    oracle, model = consulted
    cost = cost_of_a_cache(model, oracle, stage)
    decoder = load_decoder(oracle.directory, dtype=torch.float32)
    logits = cached_logits(
        decoder, oracle.requests, TOKEN_BY_TOKEN, "absorbed", load_backend(stage)
    )
    error = apart(logits, oracle.exact)
    # From below too, so that the bound is known to be one: there was rounding.
    assert cost / SMALL_MULTIPLE <= error <= SMALL_MULTIPLE * cost


def test_float32_costs_little_more_than_in_transformers(consulted: tuple[Oracle, Any]) -> None:
    oracle, _ = consulted
    errors = worst_error(load_decoder(oracle.directory, dtype=torch.float32), oracle)
    bound = SMALL_MULTIPLE * oracle.float32_cost
    assert all(error <= bound for error in errors.values()), (errors, bound)


def test_bf16_costs_little_more_than_in_transformers(consulted: tuple[Oracle, Any]) -> None:
    oracle, model = consulted
    narrow = copy.deepcopy(model).bfloat16()
    narrow.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # a cast ruins its angles
    cost = apart(logits_of(narrow, oracle.requests), oracle.exact)
    errors = worst_error(load_decoder(oracle.directory, dtype=torch.bfloat16), oracle)
    assert all(error <= SMALL_MULTIPLE * cost for error in errors.values()), (errors, cost)
    assert min(errors.values()) > 2.0**8 * oracle.float32_cost


def test_generation_takes_the_likeliest_token_of_the_full_forward(
    consulted: tuple[Oracle, Any],
) -> None:
    oracle, _ = consulted
    decoder = load_decoder(oracle.directory, dtype=torch.float32)
    backend = AbsorbedBackend(cache_dtype=torch.float32)
    generator = TextGenerator(decoder, backend, num_pages=16, page_size=PAGE_SIZE, decode_rows=2)
    prompts = [request.tolist() for request in oracle.requests]
    for prompt, completion in zip(
        prompts, generator.generate(prompts, SamplingParams(max_new_tokens=4)), strict=True
    ):
        whole = torch.tensor([*prompt, *completion.token_ids])
        (logits,) = full_logits(decoder, [whole[:-1]])
        best = logits[len(prompt) - 1 :].topk(2, dim=-1)
        assert float((best.values[:, 0] - best.values[:, 1]).min()) > 100 * oracle.float32_cost
        assert completion.token_ids == best.indices[:, 0].tolist()


@pytest.mark.parametrize("model_type", [LONGCAT, MINICPM, MISTRAL])
def test_a_backend_that_norms_and_rotates_by_itself_writes_the_same_bytes(model_type: str) -> None:
    decoder = random_decoder(tiny_config(model_type, **(GROWING if model_type == MISTRAL else {})))
    request = torch.arange(7)
    planes = []
    for stage in (2, 3):
        backend = load_backend(stage)
        assert isinstance(backend, FusedProjections) == (stage == 3)
        cache = backend.make_cache(decoder.config, 2, PAGE_SIZE)
        attention = CachedAttention(
            backend,
            cache,
            query_lens=[7],
            slot_mapping=torch.arange(7),
            block_table=torch.tensor([[0, 1]], dtype=torch.int32),
            cache_seqlens=torch.tensor([7], dtype=torch.int32),
        )
        decoder(request, request, attention)
        # The first attention's input is the same in both; later ones saw another attention's sums.
        planes.append([plane.flatten(0, 1)[:7] for plane in cache[0]])
    for ours, fused in zip(*planes, strict=True):
        assert torch.equal(ours.float(), fused.float())


# Reading config.json


def silent(model_type: str) -> dict[str, Any]:
    """A config.json with nothing but what is needed."""
    family = FAMILIES[model_type]
    names = [family.spelt(name) for name in family.needed]
    fields = {name: config_fields(model_type, **GROWING)[name] for name in names}
    if model_type == MISTRAL:
        fields |= GROWING
    return fields | {"model_type": model_type}


@pytest.mark.parametrize("model_type", [GLM, MINICPM, LONGCAT, YOUTU, MISTRAL])
def test_what_a_file_leaves_out_is_what_transformers_assumes(model_type: str) -> None:
    # Sizes aside: an absent q_lora_rank, or count of experts, means that there is none.
    given = silent(model_type) | {"max_position_embeddings": 64, "q_lora_rank": 20}
    if model_type in (GLM, MISTRAL):
        names = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
        given |= {name: config_fields(model_type)[name] for name in names}
        given["moe_intermediate_size"] = 14
    filled_in = transformers.AutoConfig.for_model(**given).to_dict()
    ids = {"bos_token_id": None, "eos_token_id": None}
    assert ModelConfig.from_dict(given) == ModelConfig.from_dict(filled_in | ids)


def published(model_type: str) -> ModelConfig:
    """The published model's numbers, which are the defaults of transformers' class."""
    return ModelConfig.from_dict(transformers.AutoConfig.for_model(model_type).to_dict())


def test_published_models_have_their_published_shapes_and_scales() -> None:
    def shape(config: ModelConfig) -> tuple[int, ...]:
        widths = (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim)
        return (config.num_attention_heads, *widths, config.v_head_dim)

    glm = published(GLM)
    assert shape(glm) == (20, 512, 192, 64, 256)
    assert [glm.is_moe_layer(i) for i in range(3)] == [False, True, True]
    assert glm.softmax_scale == 1 / 16

    minicpm = published(MINICPM)
    assert shape(minicpm) == (40, 256, 64, 32, 64)
    assert (minicpm.scale_emb, minicpm.logit_scale) == (12, 0.1)
    assert minicpm.residual_scale == 1.4 / math.sqrt(62)

    longcat = published(LONGCAT)
    assert shape(longcat) == (64, 512, 128, 64, 128)
    assert longcat.num_hidden_layers == 2 * 28
    assert longcat.latent_scale == math.sqrt(12)
    assert longcat.softmax_scale == 192**-0.5 * 2
    assert (longcat.num_choices, longcat.num_experts_per_tok) == (512 + 256, 12)
    assert longcat.rope.theta == 1e7

    assert shape(published(YOUTU)) == (16, 512, 128, 64, 128)
    assert published(YOUTU).tie_word_embeddings
    assert shape(published(MISTRAL)) == (32, 256, 64, 64, 128)
    assert published(MISTRAL).rope.llama_4_scaling_beta == 0.1


@pytest.mark.parametrize(
    ("context", "pretrained", "first", "amplitude"),
    [(64, 64, 1.0, 1.0), (65, 64, 2.0, None), (32, 64, 1.0, 1.0)],
    ids=["as pretrained", "longer", "shorter"],
)
def test_longrope_chooses_by_the_models_context(
    context: int, pretrained: int, first: float, amplitude: float | None
) -> None:
    rope = tiny_config(MINICPM, **_longrope(context, pretrained)).rope
    assert rope.pair_factors[0] == first
    assert len(rope.pair_factors) == PAIRS
    stretched = math.sqrt(1 + math.log(context / pretrained) / math.log(pretrained))
    assert rope.amplitude == (stretched if amplitude is None else amplitude)


def test_queries_grow_by_the_number_of_pretrained_contexts_before_them() -> None:
    rope = tiny_config(MISTRAL, **GROWING).rope
    scale = query_scale(rope, torch.arange(17))
    assert scale is not None
    expected = [1.0 + 0.3 * math.log(1 + position // 5) for position in range(17)]
    # float64 but for the last step: half an ulp of float32
    assert scale.tolist() == pytest.approx(expected, rel=2.0**-24)
    assert query_scale(RopeConfig(), torch.arange(17)) is None


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (LONGCAT, {"zero_expert_type": "copy"}, "zero_expert_type 'copy' .*supported: identity"),
        (LONGCAT, {"router_bias": True}, "router_bias true is not supported"),
        (
            GLM,
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "mlp_layer_types must be 'dense'",
        ),
        (GLM, {"mlp_layer_types": ["dense"]}, "mlp_layer_types .*3 in all; got .'dense'."),
        (MISTRAL, GROWING | {"n_group": 2}, "n_group 2 is not supported for mistral4"),
    ],
    ids=["zero experts", "router bias", "order of layers", "too few kinds", "groups"],
)
def test_variants_that_no_code_is_published_for_are_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        tiny_config(model_type, **changes)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (LONGCAT, {"moe_topk": 10}, "num_experts_per_tok must be between 1 and the 9 experts"),
        (LONGCAT, {"num_layers": "2"}, "num_layers must be an integer of at least 1; got '2'"),
        (LONGCAT, {"zero_expert_num": -1}, "zero_expert_num must be an integer of at least 0"),
        (MINICPM, {"scale_emb": "12"}, "scale_emb of config.json must be a number; got '12'"),
        (MINICPM, {"dim_model_base": 0}, "dim_model_base must be an integer of at least 1; got 0"),
        (MINICPM, _rope("longrope", long_factor=[1.0]), "short_factor must be a list of 8 .*None"),
        (MISTRAL, {}, "config.json lacks rope_parameters, needed for mistral4"),
    ],
    ids=["experts", "text", "negative", "scale", "base", "factors", "rope"],
)
def test_impossible_values_are_refused_by_the_files_own_names(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(model_type, **changes)


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_missing_fields_are_named_as_the_file_spells_them(model_type: str) -> None:
    family = FAMILIES[model_type]
    fields = config_fields(model_type, **GROWING)
    for name in family.needed:
        lacking = {k: v for k, v in fields.items() if k != family.spelt(name)}
        with pytest.raises(
            ValueError, match=f"lacks {family.spelt(name)}, needed for {model_type}"
        ):
            ModelConfig.from_dict(lacking)


# Faults of checkpoints


@pytest.fixture(params=[GLM, MINICPM, LONGCAT, YOUTU, MISTRAL])
def sharded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A family's checkpoint in several files."""
    fields = config_fields(request.param, **GROWING)
    decoder = random_decoder(ModelConfig.from_dict(fields))
    save_safetensors(tmp_path, decoder.checkpoint_tensors(), max_shard_bytes=40_000)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    load_decoder(tmp_path)
    return tmp_path


def test_faulty_shards_are_each_named_in_one_line(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        load_decoder(sharded)
    assert len(caught.value.files) == 2
    for fault, name in zip(sorted(caught.value.files), (first.name, second.name), strict=True):
        assert name in fault
        assert "\n" not in fault


def test_an_index_that_names_a_tensor_that_is_not_there_is_refused(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.layers.1.self_attn.extra.weight"
    index["weight_map"][name] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=name):
        load_decoder(sharded)


def test_only_longcats_own_leftovers_are_ignored(tmp_path: Path) -> None:
    fields = config_fields(LONGCAT)
    decoder = random_decoder(ModelConfig.from_dict(fields))
    tensors = decoder.checkpoint_tensors()
    leftovers = {
        name: torch.full((3,), math.nan)
        for name in ("model.mtp.layers.0.x", "model.layers.0.mlp.experts.6.up_proj.weight")
    }
    loaded = load_decoder(write_checkpoint(tmp_path, fields, tensors | leftovers))
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), decoder.parameters(), strict=True)
    )
    stray = {"model.layers.0.mlp.experts.5.bias": torch.zeros(3)}
    write_checkpoint(tmp_path, fields, tensors | stray)
    with pytest.raises(CheckpointError, match=r"experts\.5\.bias"):
        load_decoder(tmp_path)

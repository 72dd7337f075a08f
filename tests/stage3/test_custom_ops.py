"""Under torch.compile and torch.export an entry point is one operator, and gives eager's bits.

Nearly all tests run the operators' implementations by the PyTorch twins: what is tested is how the
entry points meet the compiler. One test runs the interpreted kernels.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import stage3_dataflow as snapmla
from stage0_reference.rope import Rotation
from stage3_dataflow import custom_ops, flash_mla
from stage3_dataflow.custom_ops import SCHEMAS

pytestmark = [pytest.mark.stage3, pytest.mark.unchecked]  # torch.compile cannot trace the checks

NUM_PAGES, PAGE_SIZE, LATENT, ROPE, HEADS = 8, 16, 32, 16, 3
SCALE = 0.2


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Compile anew in each test, and take back what it sets."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=False):
        yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def twins(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run implementations by the PyTorch twins but where a test asks for kernels."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    with snapmla.use_path("default" if on_gpu else "pytorch"):
        yield


class Step(NamedTuple):
    """Inputs of one decoding step: a token for each request is appended, then attended."""

    c_kv: Tensor
    k_rope: Tensor
    q_latent: Tensor
    q_rope: Tensor
    cache: Any
    slots: Tensor
    block_table: Tensor
    cache_seqlens: Tensor

    @property
    def attended(self) -> tuple[Any, ...]:
        """What a decode takes."""
        return *self[2:5], *self[6:], SCALE

    @property
    def requests(self) -> tuple[Any, ...]:
        """Pages and lengths of the requests."""
        return self[6:]

    def copy(self) -> Step:
        """Copy the inputs, so that a step can write its cache twice."""
        return Step(*(copied(part) for part in self))


def copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value)(*(copied(part) for part in value))
    return value.clone()


def assert_same_bits(got: Any, expected: Any) -> None:
    """Compare tensors, or tuples of tensors, byte by byte."""
    if isinstance(expected, tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(one, other)
        return
    assert (got.dtype, got.shape, got.stride()) == (
        expected.dtype, expected.shape, expected.stride(),
    )  # fmt: skip
    assert torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def fp8_cache(device: torch.device | str = "cpu", latent: int = LATENT, rope: int = ROPE) -> Any:
    pool = (NUM_PAGES, PAGE_SIZE)
    cache = snapmla.LatentPages(
        torch.zeros(*pool, latent, device=device).to(torch.float8_e4m3fn),
        torch.ones(pool, device=device),
        torch.zeros(*pool, rope, dtype=torch.bfloat16, device=device),
    )
    tokens = NUM_PAGES * PAGE_SIZE
    with snapmla.use_path("pytorch"):
        snapmla.append_kv(
            torch.randn(tokens, latent, device=device),
            torch.randn(tokens, rope, device=device),
            cache,
            torch.arange(tokens, device=device),
        )
    return cache


def bf16_cache(device: torch.device | str = "cpu", latent: int = LATENT, rope: int = ROPE) -> Any:
    """Planes that are views of one tensor, as servers keep a BF16 cache."""
    both = torch.randn(NUM_PAGES, PAGE_SIZE, latent + rope, device=device).bfloat16()
    return snapmla.Bf16LatentPages(both[..., :latent], both[..., latent:])


CACHES = {"fp8": fp8_cache, "bf16 views": bf16_cache}


def step(batch: int = 2, columns: int = 2, make: Callable[..., Any] = fp8_cache, **kw: Any) -> Step:
    """Make a step for `batch` requests of different lengths over shuffled pages."""
    device = kw.get("device", "cpu")
    latent, rope = kw.get("latent", LATENT), kw.get("rope", ROPE)
    generator = torch.Generator().manual_seed(batch)
    table = torch.randperm(NUM_PAGES, generator=generator)[: batch * columns].view(batch, columns)
    lengths = PAGE_SIZE + 1 + 3 * torch.arange(batch)
    slots = table[:, 1] * PAGE_SIZE + lengths - 1 - PAGE_SIZE
    return Step(
        torch.randn(batch, latent, device=device).bfloat16(),
        torch.randn(batch, rope, device=device).bfloat16(),
        torch.randn(batch, 1, HEADS, latent, device=device).bfloat16(),
        torch.randn(batch, 1, HEADS, rope, device=device).bfloat16(),
        make(**kw),
        slots.to(device),
        table.int().to(device),
        lengths.int().to(device),
    )


def rotation_of(*leading: int) -> Rotation:
    angles = torch.randn(*leading, ROPE // 2)
    return Rotation(angles.cos(), angles.sin())


def append_and_decode(
    c_kv: Tensor,
    k_rope: Tensor,
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Any,
    slots: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Do what a layer's attention does in a decoding step."""
    append = snapmla.append_kv if len(cache) == 3 else snapmla.fused_k_append
    append(c_kv, k_rope, cache, slots)
    return snapmla.mla_decode(q_latent, q_rope, cache, block_table, cache_seqlens, SCALE)


def among_other_work(c_kv: Tensor, k_rope: Tensor, q_latent: Tensor, *rest: Any) -> Any:
    """Do it with work before and behind it, for a compiler to fuse and lay out."""
    out, lse = append_and_decode(c_kv + 1, k_rope, q_latent * 2, *rest)
    return out.relu(), lse


class ExportedStep(torch.nn.Module):
    """A step as a module, for torch.export. What is to be saved takes and gives plain tuples."""

    def forward(
        self, c_kv, k_rope, q_latent, q_rope, codes, scale, rope, slots, block_table, lengths
    ):
        cache = snapmla.LatentPages(codes, scale, rope)
        inputs = Step(c_kv, k_rope, q_latent, q_rope, cache, slots, block_table, lengths)
        return tuple(append_and_decode(*inputs))


def flat(inputs: Step) -> tuple[Tensor, ...]:
    return (*inputs[:4], *inputs.cache, *inputs[5:])


def operators(graph: torch.fx.Graph) -> Counter[str]:
    """Count the nodes of a graph that are operators of this library."""
    return Counter(
        node.target._opname
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == custom_ops.NAMESPACE
    )


# The schemas.


def writes(name: str) -> set[str]:
    arguments = getattr(torch.ops.snapmla, name).default._schema.arguments
    return {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}


def test_schemas_say_what_is_written():
    planes = {"latent", "scale", "rope"}
    expected = {"fused_k_append": planes, "mla_decode_out": {"out", "lse"},
                "decode_quantized_out": {"out", "lse"}}  # fmt: skip
    assert {name: writes(name) for name in SCHEMAS if writes(name)} == expected


def attention(**changes: Any) -> dict[str, Any]:
    return {
        "causal": True, "p_format": None, "run_kernel": None, "min_tokens": 64, "max_splits": 4,
    } | changes  # fmt: skip


def operator_examples() -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Arguments for each operator: plain ones, strided views, and each optional argument."""
    fp8, bf16 = step(), step(make=bf16_cache)
    strided = step()._replace(
        q_latent=torch.randn(HEADS, 2, 1, LATENT).permute(1, 2, 0, 3),
        q_rope=torch.randn(2, 1, HEADS, ROPE + 8)[..., 8:],
        cache=snapmla.LatentPages(*(plane[1::2] for plane in fp8_cache())),
        block_table=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        slots=torch.tensor([17, -1]),
    )
    cos, sin = rotation_of(2, 1)
    k_cos, k_sin = rotation_of(2)
    with_cache = lambda s: (  # noqa: E731
        s.cache[0], s.cache[1] if len(s.cache) == 3 else None, s.cache[-1],
        s.block_table, s.cache_seqlens, SCALE,
    )  # fmt: skip
    quantised = snapmla.quantize_q(fp8.q_latent, fp8.q_rope)
    outputs = (torch.empty(2, 1, HEADS, LATENT).bfloat16(), torch.empty(2, 1, HEADS))
    append = {"norm_weight": None, "norm_eps": 1e-6, "cos": None, "sin": None,
              "interleaved": False, "scale_format": "amax"}  # fmt: skip
    rows = int(fp8.cache_seqlens.sum())
    mla = attention(scale_format="pow2")
    return {
        "fused_q_quant": [
            ((s.q_latent, s.q_rope, c, i), {"interleaved": False, "scale_format": "pow2"})
            for s in (fp8, strided) for c, i in ((None, None), (cos, sin))
        ],
        "fused_k_append": [
            ((fp8.c_kv, fp8.k_rope, *fp8.cache, fp8.slots), append),
            ((strided.c_kv, strided.k_rope, *strided.cache, strided.slots), append),
            ((fp8.c_kv, fp8.k_rope, *fp8.cache, fp8.slots),
             append | {"norm_weight": torch.randn(LATENT).bfloat16(), "cos": k_cos, "sin": k_sin}),
            ((bf16.c_kv, bf16.k_rope, bf16.cache[0].clone(), None, bf16.cache[1].clone(),
              bf16.slots), append),
        ],
        "mla_decode": [
            ((s.q_latent, s.q_rope, *with_cache(s)), mla) for s in (fp8, strided, bf16)
        ],
        "mla_decode_out": [((*outputs, fp8.q_latent, fp8.q_rope, *with_cache(fp8)), mla)],
        "decode_quantized": [
            ((*quantised, *with_cache(fp8)), attention(out_dtype=dtype))
            for dtype in (torch.bfloat16, torch.float32)
        ],
        "decode_quantized_out": [((*outputs, *quantised, *with_cache(fp8)), attention())],
        "fetch_dequant": [
            ((*fp8.cache, fp8.block_table, fp8.cache_seqlens), {"total_tokens": total})
            for total in (rows, rows + 5, None)
        ],
    }  # fmt: skip


@pytest.fixture
def allclose_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let opcheck compare e4m3 tensors, for which torch.allclose is not implemented."""
    allclose = torch.allclose

    def allclose_or_same_bytes(one: Tensor, other: Tensor, **tolerances: Any) -> bool:
        if one.dtype == torch.float8_e4m3fn:
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return allclose(one, other, **tolerances)

    monkeypatch.setattr(torch, "allclose", allclose_or_same_bytes)


@pytest.mark.usefixtures("allclose_in_fp8")
@pytest.mark.parametrize("name", SCHEMAS)
def test_operators_keep_pytorchs_rules(name):
    """Schema (writes, aliases), fake results, dispatch with symbolic shapes."""
    operator = getattr(torch.ops.snapmla, name).default
    for args, kwargs in operator_examples()[name]:
        torch.library.opcheck(operator, args, kwargs)


# torch.compile.


@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (
            append_and_decode,
            "inductor",
        ),  # its code for other work costs a C++ compiler's half minute
        (append_and_decode, "aot_eager"),
        (among_other_work, "aot_eager"),
    ],
)
@pytest.mark.parametrize("kind", CACHES)
def test_a_compiled_step_equals_eager_bit_for_bit(kind, function, backend):
    inputs = step(make=CACHES[kind])
    eager, compiled = inputs.copy(), inputs.copy()
    expected = function(*eager)
    counter = CompileCounterWithBackend(backend)
    got = torch.compile(function, backend=counter, fullgraph=True)(*compiled)
    assert_same_bits(tuple(got), tuple(expected))
    assert_same_bits(compiled.cache, eager.cache)
    assert not torch.equal(eager.cache[-1], inputs.cache[-1])  # and something was written
    assert counter.frame_count == 1
    assert operators(counter.graphs[0].graph) == {"fused_k_append": 1, "mla_decode": 1}


def test_a_compiled_step_may_run_the_kernels():
    inputs = step()
    eager, compiled = inputs.copy(), inputs.copy()
    with snapmla.use_path("default"):
        expected = append_and_decode(*eager)
        got = torch.compile(append_and_decode, backend="aot_eager", fullgraph=True)(*compiled)
    assert_same_bits(tuple(got), tuple(expected))
    assert_same_bits(compiled.cache, eager.cache)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHES)
def test_a_compiled_step_equals_eager_on_the_gpu(kind, device):
    function = torch.compile(among_other_work, fullgraph=True, dynamic=True)
    for batch in (2, 3, 4):
        inputs = step(batch, make=CACHES[kind], device=device, latent=512, rope=64)
        eager, compiled = inputs.copy(), inputs.copy()
        expected = among_other_work(*eager)
        assert_same_bits(tuple(function(*compiled)), tuple(expected))
        assert_same_bits(compiled.cache, eager.cache)


def test_a_compiled_step_serves_any_batch_and_table_without_compiling_again():
    function = torch.compile(append_and_decode, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, columns in ((2, 4), (4, 2), (3, 2), (2, 3)):
        inputs = step(batch, columns)
        eager, compiled = inputs.copy(), inputs.copy()
        expected = append_and_decode(*eager)
        assert_same_bits(tuple(function(*compiled)), tuple(expected))
        assert_same_bits(compiled.cache, eager.cache)
        torch._dynamo.config.error_on_recompile = True


def captured(function: Callable[..., Any], *args: Any) -> tuple[Any, Counter[str]]:
    """Run a function through torch.compile in one graph; give the result and its operators."""
    counter = CompileCounterWithBackend("aot_eager")
    result = torch.compile(function, backend=counter, fullgraph=True)(*args)
    assert counter.frame_count == 1
    return result, operators(counter.graphs[0].graph)


def test_a_query_may_be_quantised_first():
    def decode(inputs: Step) -> tuple[Any, Any]:
        query = snapmla.quantize_q(inputs.q_latent, inputs.q_rope)
        return query, snapmla.decode_quantized(query, *inputs.attended[2:])

    inputs = step()
    got, nodes = captured(decode, inputs)
    assert_same_bits(got, decode(inputs))
    assert nodes == {"fused_q_quant": 1, "decode_quantized": 1}


@pytest.mark.parametrize("given", [("out",), ("lse",), ("out", "lse")], ids="+".join)
@pytest.mark.parametrize("quantised", [False, True], ids=["mla_decode", "decode_quantized"])
def test_outputs_are_written_where_asked(quantised, given):
    inputs = step()
    query = snapmla.quantize_q(inputs.q_latent, inputs.q_rope)
    outputs = {"out": torch.empty(2, 1, HEADS, LATENT).bfloat16(), "lse": torch.empty(2, 1, HEADS)}
    chosen = {name: outputs[name] for name in given}

    def decode(outputs: Any) -> Any:
        if quantised:
            return snapmla.decode_quantized(query, *inputs.attended[2:], **outputs)
        return snapmla.mla_decode(*inputs.attended, **outputs)

    expected = decode({})
    got, nodes = captured(decode, chosen)
    assert_same_bits(got, expected)
    for name in given:
        assert getattr(got, name).data_ptr() == outputs[name].data_ptr()
        assert_same_bits(outputs[name], getattr(expected, name))
    assert nodes == {f"{'decode_quantized' if quantised else 'mla_decode'}_out": 1}


def decode_with(**options: Any) -> Callable[[Step], Any]:
    return lambda s: snapmla.mla_decode(*s.attended, **options)


def decode_quantized_with(**options: Any) -> Callable[[Step], Any]:
    def decode(s: Step) -> Any:
        query = snapmla.QuantizedRows(
            s.q_latent.to(torch.float8_e4m3fn), s.q_latent[..., 0].float().abs() + 1, s.q_rope
        )
        return snapmla.decode_quantized(query, *s.attended[2:], **options)

    return decode


def quantize_with(rotate: bool = False, **options: Any) -> Callable[[Step], Any]:
    def quantize(s: Step) -> Any:
        angles = s.q_rope[..., 0, : ROPE // 2].float()
        rotation = Rotation(angles.cos(), angles.sin()) if rotate else None
        return snapmla.fused_q_quant(s.q_latent, s.q_rope, rotation, **options)

    return quantize


def append_with(rotate: bool = False, norm: bool = False, **options: Any) -> Callable[[Step], Any]:
    def append(s: Step) -> Any:
        angles = s.k_rope[:, : ROPE // 2].float()
        rotation = Rotation(angles.cos(), angles.sin()) if rotate else None
        weight = s.c_kv[0] if norm else None
        snapmla.fused_k_append(
            s.c_kv, s.k_rope, s.cache, s.slots, rotation=rotation, norm_weight=weight, **options
        )
        return s.cache

    return append


OPTIONS = {
    "causal": (decode_with(), decode_with(causal=False), 2),
    "scale_format of a decode": (decode_with(), decode_with(scale_format="amax"), 1),
    "p_format": (decode_with(), decode_with(p_format="e4m3"), 1),
    "causal of codes": (decode_quantized_with(), decode_quantized_with(causal=False), 2),
    "p_format of codes": (decode_quantized_with(), decode_quantized_with(p_format="e4m3"), 1),
    "out_dtype": (decode_quantized_with(), decode_quantized_with(out_dtype=torch.float32), 1),
    "scale_format of a query": (quantize_with(), quantize_with(scale_format="amax"), 1),
    "rotation of a query": (quantize_with(), quantize_with(rotate=True), 1),
    "interleaved query": (
        quantize_with(rotate=True),
        quantize_with(rotate=True, interleaved=True),
        1,
    ),
    "scale_format of a key": (append_with(), append_with(scale_format="amax"), 1),
    "rotation of a key": (append_with(), append_with(rotate=True), 1),
    "interleaved key": (append_with(rotate=True), append_with(rotate=True, interleaved=True), 1),
    "norm_weight": (append_with(), append_with(norm=True), 1),
    "norm_eps": (append_with(norm=True), append_with(norm=True, norm_eps=10.0), 1),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_operator(name):
    """The option changes eager's result, and the compiled one alike."""
    without, with_option, s_q = OPTIONS[name]
    inputs = step()
    inputs = inputs._replace(
        q_latent=inputs.q_latent.repeat(1, s_q, 1, 1), q_rope=inputs.q_rope.repeat(1, s_q, 1, 1)
    )
    expected, plain = with_option(inputs.copy()), without(inputs.copy())
    got, _ = captured(with_option, inputs.copy())
    assert_same_bits(tuple(got), tuple(expected))
    with pytest.raises(AssertionError):
        assert_same_bits(tuple(plain), tuple(expected))


REFUSED = {
    "kernel": decode_with(kernel="fast"),
    "p_format": decode_with(p_format="e5m2"),
    "split_rule.min_tokens": decode_with(split_rule=snapmla.SplitRule(0, 4)),
    "split_rule.max_splits": decode_with(split_rule=snapmla.SplitRule(64, 0)),
    "scale_format": append_with(scale_format="max"),
    "cache_seqlens": lambda s: snapmla.mla_decode(
        *s._replace(cache_seqlens=s.cache_seqlens.long()).attended
    ),
    "cache": lambda s: snapmla.mla_decode(
        *s._replace(cache=s.cache[:1]).attended
    ),
    "query.scale": lambda s: snapmla.decode_quantized(
        snapmla.QuantizedRows(s.q_latent.to(torch.float8_e4m3fn), s.q_latent[..., 0], s.q_rope),
        *s.attended[2:],
    ),
    "slot_mapping": lambda s: snapmla.append_kv(s.c_kv, s.k_rope, s.cache, s.slots.float()),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_compiled_program_refuses_in_the_same_words(name):
    inputs = step()
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as eager:
        REFUSED[name](inputs)
    assert name in str(eager.value)
    # What is wrong with a tensor is seen when the program runs; torch wraps what it sees before.
    with pytest.raises((type(eager.value), torch._dynamo.exc.Unsupported)) as compiled:
        torch.compile(REFUSED[name], backend="aot_eager", fullgraph=True)(inputs)
    assert str(eager.value) in str(compiled.value)


def test_the_names_of_flash_mla_are_captured_too():
    def serve(
        key: Tensor, query: Tensor, cache: Any, slots: Tensor, table: Tensor, lengths: Tensor
    ):
        lora, scale, rope = (plane.flatten(0, 1).unsqueeze(1) for plane in cache)
        flash_mla.quantize_and_cache_k(key, lora, scale, rope, slots, LATENT)
        q_nope, q_scale, q_rope = flash_mla.quantize_ckv_per_token_head(query, LATENT)
        metadata, num_splits = flash_mla.get_mla_metadata(lengths, HEADS, 1)
        return flash_mla.flash_mla_ckv_fp8_per_token(
            q_nope, q_rope, cache.codes.unsqueeze(2), cache.rope.unsqueeze(2), q_scale,
            cache.scale[..., None, None], table, lengths, LATENT, metadata, num_splits, SCALE, True,
        )  # fmt: skip

    inputs = step()
    key = torch.cat((inputs.c_kv, inputs.k_rope), -1)[:, None]
    query = torch.cat((inputs.q_latent, inputs.q_rope), -1)
    expected = serve(key, query, *inputs.copy()[4:])
    got, nodes = captured(serve, key, query, *inputs.copy()[4:])
    assert_same_bits(got, expected)
    assert nodes == {"fused_k_append": 1, "fused_q_quant": 1, "decode_quantized": 1}


# fetch_dequant, whose result's size may be data.


def test_fetching_a_known_number_of_rows_is_one_node_for_any_number():
    def fetch(inputs: Step, like: Tensor) -> Tensor:
        return snapmla.fetch_dequant(inputs.cache, *inputs.requests, total_tokens=like.shape[0]) * 2

    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(fetch, backend=counter, fullgraph=True, dynamic=True)
    inputs = step()
    for total in (int(inputs.cache_seqlens.sum()), 11, 60):
        like = torch.empty(total)
        assert_same_bits(function(inputs, like), fetch(inputs, like))
    assert counter.frame_count == 1
    assert operators(counter.graphs[0].graph) == {"fetch_dequant": 1}


def test_fetching_an_unknown_number_of_rows_is_one_node():
    def fetch(inputs: Step) -> Tensor:
        return snapmla.fetch_dequant(inputs.cache, *inputs.requests) * 2

    inputs = step()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got, nodes = captured(fetch, inputs)
    assert_same_bits(got, fetch(inputs))
    assert len(got) == int(inputs.cache_seqlens.sum())
    assert nodes == {"fetch_dequant": 1}


# torch.export.


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_an_exported_step_has_one_node_for_each_call_and_serves_any_batch(strict):
    batch, columns = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("columns", max=64)
    first = {0: batch}
    shapes = (first, first, first, first, None, None, None, first, {0: batch, 1: columns}, first)
    inputs = step(3, 2)
    program = torch.export.export(
        ExportedStep(), flat(inputs.copy()), dynamic_shapes=shapes, strict=strict
    )
    assert operators(program.graph) == {"fused_k_append": 1, "mla_decode": 1}
    for changed in (inputs, step(1, 4), step(4, 2)):
        eager, exported = changed.copy(), changed.copy()
        expected = append_and_decode(*eager)
        assert_same_bits(tuple(program.module()(*flat(exported))), tuple(expected))
        assert_same_bits(exported.cache, eager.cache)


def test_an_exported_program_runs_in_another_process_that_imports_the_package(tmp_path):
    inputs = step()
    program = torch.export.export(ExportedStep(), flat(inputs.copy()))
    torch.export.save(program, tmp_path / "step.pt2")
    expected = append_and_decode(*inputs.copy())
    torch.save((flat(inputs), tuple(expected)), tmp_path / "case.pt")
    script = (
        "import torch, stage3_dataflow\n"
        f"inputs, expected = torch.load({str(tmp_path / 'case.pt')!r})\n"
        f"program = torch.export.load({str(tmp_path / 'step.pt2')!r})\n"
        "with stage3_dataflow.use_path('pytorch'):\n"
        "    got = program.module()(*inputs)\n"
        "assert all(map(torch.equal, got, expected))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# Eager calls.


class SeenOperators(TorchDispatchMode):
    """Note what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.namespaces: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.namespaces.add(func.namespace)
        return func(*args, **(kwargs or {}))


def test_eager_calls_pass_no_operator():
    inputs = step()
    with SeenOperators() as seen:
        append_and_decode(*inputs)
        snapmla.fetch_dequant(inputs.cache, *inputs.requests)
    assert seen.namespaces == {"aten"}


def test_an_export_in_another_thread_does_not_disturb_eager_calls(monkeypatch):
    """Its flag belongs to the whole process, and an operator's implementation sees it too."""
    inputs = step()
    eager, during = inputs.copy(), inputs.copy()
    expected = append_and_decode(*eager)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    assert_same_bits(append_and_decode(*during), expected)
    assert_same_bits(during.cache, eager.cache)
    rows = snapmla.fetch_dequant(during.cache, *during.requests)
    assert len(rows) == int(during.cache_seqlens.sum())

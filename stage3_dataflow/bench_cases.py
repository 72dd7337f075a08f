"""What is timed: shapes, the work they ask for, and data for them.

Work is the least that any implementation has to do: each product of the two matrix multiplications
once, each byte of cache, query and result moved once. What a kernel moves beside that (partial
results of splits, a second reading of the cache by another tile of heads) is its own affair and
lowers its rates.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_attention import latent_attention
from stage0_reference.latent_cache import Bf16LatentPages, allocate_pages, gather_packed
from stage0_reference.rope import Rotation
from stage1_quant.fp8_latent_cache import LatentPages, allocate_latent_pages
from stage1_quant.quantize import QuantizedRows, dequantize_rows
from stage3_dataflow.fused_writes import fused_k_append, quantize_q

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
SOFTMAX_SCALE = (128 + QK_ROPE_HEAD_DIM) ** -0.5
"""Of models with qk_nope_head_dim 128."""

RAGGED_LONGEST = 131072
"""Log-uniform lengths are drawn between 1 and this."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A batch of decode requests.

    Attributes
    ----------
    lengths
        Cached tokens of each request, the query's own tokens included.
    heads
        Query heads on this device.
    s_q
        Query tokens of each request.
    label
        Replaces the name that equal lengths give.
    """

    lengths: tuple[int, ...]
    heads: int
    s_q: int = 1
    label: str = ""

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Cached tokens of all requests."""
        return sum(self.lengths)

    @property
    def name(self) -> str:
        """``batch,heads,length`` and s_q where there is more than one query token."""
        if self.label:
            return self.label
        parts = [self.batch, self.heads, self.lengths[0], *([self.s_q] if self.s_q > 1 else [])]
        return ",".join(map(str, parts))


def equal_shape(batch: int, heads: int, length: int, s_q: int = 1) -> Shape:
    """All requests of one length."""
    for name, value in (("batch", batch), ("heads", heads), ("s_q", s_q)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if length < s_q:
        raise ValueError(f"length must be at least s_q = {s_q}; got {length}")
    return Shape((length,) * batch, heads, s_q)


def parse_shape(text: str) -> Shape:
    """Read ``batch,heads,length`` or ``batch,heads,length,s_q``.

    Examples
    --------
    >>> parse_shape("2,16,100").lengths
    (100, 100)
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4):
        raise ValueError(f"a shape must be batch,heads,length[,s_q] in whole numbers; got {text!r}")
    return equal_shape(*numbers)


def ragged_shapes(
    batch: int, heads: int, longest: int = RAGGED_LONGEST
) -> tuple[Shape, Shape, Shape]:
    """Lengths drawn log-uniformly from 1 to `longest`; longest first; as many in equal lengths."""
    draw = random.Random(0)
    lengths = [round(math.exp(draw.uniform(0.0, math.log(longest)))) for _ in range(batch)]
    total = sum(lengths)
    equal = [total // batch + (place < total % batch) for place in range(batch)]
    return (
        Shape(tuple(lengths), heads, label=f"{batch},{heads},ragged"),
        Shape(tuple(sorted(lengths, reverse=True)), heads, label=f"{batch},{heads},sorted"),
        Shape(tuple(equal), heads, label=f"{batch},{heads},equal"),
    )


Kind = Literal["q-quant", "k-append", "writes", "fetch-dequant", "decode", "mla_decode"]
CacheFormat = Literal["fp8", "bf16", "fp8 per tensor"]


class Work(NamedTuple):
    """Operations and bytes by term; what moves or multiplies nothing is left out."""

    flops: dict[str, int]
    bytes: dict[str, int]

    @property
    def total_flops(self) -> int:
        """Of all terms."""
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        """Of all terms."""
        return sum(self.bytes.values())


def count_work(kind: Kind, shape: Shape, cache: CacheFormat = "fp8", page_size: int = 64) -> Work:
    """Count the least that a kernel must compute and move.

    A multiply-add is two operations. Only matrix products are counted, and only for keys that a
    query may see (causal: query i of a request of `length` tokens sees length - s_q + i + 1).
    Activations are BF16, cos and sin float32.
    """
    latent, rope = KV_LORA_RANK, QK_ROPE_HEAD_DIM
    query_tokens = shape.batch * shape.s_q
    rows = query_tokens * shape.heads
    token = {
        "fp8": latent * 1 + 4 + rope * 2,  # codes, scale, rope / scale: 644
        "bf16": (latent + rope) * 2,  # 1152
        "fp8 per tensor": latent + rope,  # 576
    }
    table = sum(-(-length // page_size) for length in shape.lengths) * 4 + shape.batch * 4
    if kind == "q-quant":
        return Work(
            flops={},
            bytes={
                "query in": rows * token["bf16"],
                "cos and sin": query_tokens * rope * 4,
                "query out": rows * token["fp8"],
            },
        )
    if kind == "k-append":
        return Work(
            flops={},
            bytes={
                "tokens in": query_tokens * token["bf16"],
                "cos and sin": query_tokens * rope * 4,
                "norm weight": latent * 2,
                "slots": query_tokens * 8,
                "tokens out": query_tokens * token["fp8"],
            },
        )
    if kind == "writes":
        query = count_work("q-quant", shape, page_size=page_size).bytes
        tokens = count_work("k-append", shape, page_size=page_size).bytes
        return Work(
            flops={},
            bytes={f"q-quant, {term}": size for term, size in query.items()}
            | {f"k-append, {term}": size for term, size in tokens.items()},
        )
    if kind == "fetch-dequant":
        return Work(
            flops={},
            bytes={
                "cache": shape.tokens * token["fp8"],
                "table and lengths": table,
                "rows out": shape.tokens * token["bf16"],
            },
        )
    seen = sum(
        length - shape.s_q + place + 1 for length in shape.lengths for place in range(shape.s_q)
    )
    decode = Work(
        flops={
            "scores, latent": 2 * shape.heads * seen * latent,
            "scores, rope": 2 * shape.heads * seen * rope,
            "values": 2 * shape.heads * seen * latent,
        },
        bytes={
            "cache": shape.tokens * token[cache],
            "query": rows * token[cache],
            "table and lengths": table,
            "output": rows * latent * 2,
            "lse": rows * 4,
        },
    )
    if kind == "decode":
        return decode
    before = count_work("q-quant", shape, page_size=page_size).bytes
    unrotated = {f"q-quant, {term}": size for term, size in before.items() if term != "cos and sin"}
    return Work(decode.flops, unrotated | decode.bytes)


class Operands(NamedTuple):
    """What a kernel attended with, float64: one request's queries and its cached rows."""

    q_latent: Float[Tensor, "s_q heads kv_lora_rank"]
    q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"]
    c_kv: Float[Tensor, "length kv_lora_rank"]
    k_rope: Float[Tensor, "length qk_rope_head_dim"]


@dataclasses.dataclass
class Case:
    """A shape with data: normal latents, queries and rotary parts in shuffled pages.

    Attributes
    ----------
    new_latent, new_rope, rotation, norm_weight, slots, append_pages
        For the write kernels: the tokens that this step appends, into pages of their own.
    """

    shape: Shape
    page_size: int
    device: torch.device
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"]
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"]
    query: QuantizedRows
    fp8: LatentPages
    bf16: Bf16LatentPages
    block_table: Int[Tensor, "batch max_pages"]
    cache_seqlens: Int[Tensor, " batch"]
    new_latent: Float[Tensor, "tokens kv_lora_rank"]
    new_rope: Float[Tensor, "tokens qk_rope_head_dim"]
    rotation: Rotation
    norm_weight: Float[Tensor, " kv_lora_rank"]
    slots: Int[Tensor, " tokens"]
    append_pages: LatentPages

    @property
    def capacity(self) -> int:
        """Tokens that a row of the table can hold."""
        return self.block_table.shape[1] * self.page_size

    def fp8_operands(self, request: int) -> Operands:
        """Dequantise a request's query and rows."""
        query = dequantize_rows(QuantizedRows(*(part[request] for part in self.query)))
        rows = dequantize_rows(QuantizedRows(*self._gather(request, self.fp8)))
        return Operands(*(part.double() for part in (*query, *rows)))

    def bf16_operands(self, request: int) -> Operands:
        """Widen a request's query and rows."""
        rows = self._gather(request, self.bf16)
        query = self.q_latent[request], self.q_rope[request]
        return Operands(*(part.double() for part in (*query, *rows)))

    def _gather(self, request: int, planes: LatentPages | Bf16LatentPages) -> list[Tensor]:
        table = self.block_table[request : request + 1]
        return gather_packed(planes, table, [self.shape.lengths[request]])


def build_case(shape: Shape, *, device: torch.device, page_size: int = 64) -> Case:
    """Draw a case; the same numbers every time.

    Slots behind a request's end are written too: some of the libraries that stand beside this one
    do not promise to leave them alone.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    pages = [-(-length // page_size) for length in shape.lengths]
    num_pages = sum(pages)
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    table = torch.full((shape.batch, max(pages)), -1, dtype=torch.int32, device=device)
    for request, ids in enumerate(order.split(pages)):
        table[request, : len(ids)] = ids

    widths = KV_LORA_RANK, QK_ROPE_HEAD_DIM
    fp8 = allocate_latent_pages(num_pages, page_size, *widths, device=device)
    bf16 = allocate_pages(num_pages, page_size, *widths, device=device)
    for slots in torch.arange(num_pages * page_size, device=device).split(65536):
        rows = draw(len(slots), KV_LORA_RANK), draw(len(slots), QK_ROPE_HEAD_DIM)
        fused_k_append(*rows, fp8, slots)
        fused_k_append(*rows, bf16, slots)

    leading = shape.batch, shape.s_q, shape.heads
    q_latent, q_rope = draw(*leading, KV_LORA_RANK), draw(*leading, QK_ROPE_HEAD_DIM)
    tokens = shape.batch * shape.s_q
    lengths = torch.tensor(shape.lengths, device=device)
    positions = lengths[:, None] - shape.s_q + torch.arange(shape.s_q, device=device)
    frequency = 10000.0 ** (-torch.arange(QK_ROPE_HEAD_DIM // 2, device=device) * 2.0 / 64)
    angles = positions.double()[..., None] * frequency  # [batch, s_q, pairs]
    append_pages = -(-tokens // page_size)
    return Case(
        shape=shape,
        page_size=page_size,
        device=device,
        q_latent=q_latent,
        q_rope=q_rope,
        query=quantize_q(q_latent, q_rope),
        fp8=fp8,
        bf16=bf16,
        block_table=table,
        cache_seqlens=lengths.int(),
        new_latent=draw(tokens, KV_LORA_RANK),
        new_rope=draw(tokens, QK_ROPE_HEAD_DIM),
        rotation=Rotation(angles.cos().float(), angles.sin().float()),
        norm_weight=1.0 + 0.1 * draw(KV_LORA_RANK),
        slots=torch.randperm(append_pages * page_size, generator=generator, device=device)[:tokens],
        append_pages=allocate_latent_pages(append_pages, page_size, *widths, device=device),
    )


def exact_attention(operands: Operands) -> Float[Tensor, "s_q heads kv_lora_rank"]:
    """Attend in float64."""
    return latent_attention(*operands, SOFTMAX_SCALE).out


def relative_error(value: Float[Tensor, "*shape"], exact: Float[Tensor, "*shape"]) -> float:
    """``|value - exact| / |exact|`` in the L2 norm; NaN if anything is."""
    return float((value.double() - exact).norm() / exact.norm())

"""The entry points as operators of PyTorch, so that torch.compile and torch.export see one node.

A graph capture cannot look inside a kernel launch, nor inside checks of memory addresses. Under
`torch.compile` and `torch.export` the entry points therefore call an operator ``snapmla::...``: a
schema that says which arguments are written, an implementation (the entry point itself, run when
the compiled program runs, with all its checks and messages), and a fake implementation that gives
the results' shapes. Eager calls never come here.

=====================================  =====================================================
operator                               entry point
=====================================  =====================================================
``fused_q_quant``                      `fused_q_quant`, `quantize_q`
``fused_k_append``                     `fused_k_append`, `append_kv`: writes the planes
``mla_decode``, ``mla_decode_out``     `mla_decode`; ``_out`` writes `out` and `lse`
``decode_quantized``, its ``_out``     `decode_quantized`
``fetch_dequant``                      `fetch_dequant`
=====================================  =====================================================

Planes come one by one: (codes, scale, rope), or (c_kv, no scale, k_rope) for a BF16 cache.

A `DecodeWorkspace` stays out of a compiled graph, where the graph's own memory planning does its
work; the argument is ignored there and changes no result. Without `total_tokens` the size of what
`fetch_dequant` gives is data: ``torch.export`` copes, ``torch.compile(fullgraph=True)`` needs
``torch._dynamo.config.capture_dynamic_output_shape_ops``.

Operators are registered through `torch.library.Library`, which costs a call 1 to 2 microseconds (on
one CPU, torch 2.13); the wrappers of the `custom_op` decorator cost 10. There are no gradients.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import Bf16LatentPages
from stage0_reference.rope import Rotation
from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import QuantizedRows, ScaleFormat
from stage3_dataflow.split_plan import SplitRule

if TYPE_CHECKING:
    from stage3_dataflow.decode import Kernel, PFormat

NAMESPACE = "snapmla"

_library = torch.library.Library(NAMESPACE, "DEF")
_ops = getattr(torch.ops, NAMESPACE)
_running = threading.local()

_CACHE = "Tensor latent, Tensor? scale, Tensor rope, Tensor block_table, Tensor cache_seqlens"
# Not `kernel`: Inductor passes keywords on to a function of its own that has such a parameter.
_ATTENTION = "bool causal, str? p_format, str? run_kernel, SymInt min_tokens, SymInt max_splits"
_QUERY = "Tensor q_latent, Tensor q_rope"
_CODES = "Tensor q_codes, Tensor q_scale, Tensor q_rope"
_OUTPUTS = "Tensor(a!) out, Tensor(b!) lse"

SCHEMAS = {
    "fused_q_quant": f"({_QUERY}, Tensor? cos, Tensor? sin, *, bool interleaved, str scale_format)"
    " -> (Tensor codes, Tensor scale, Tensor rope)",
    "fused_k_append": "(Tensor c_kv, Tensor k_rope, Tensor(a!) latent, Tensor(b!)? scale, "
    "Tensor(c!) rope, Tensor slot_mapping, *, Tensor? norm_weight, float norm_eps, Tensor? cos, "
    "Tensor? sin, bool interleaved, str scale_format) -> ()",
    "mla_decode": f"({_QUERY}, {_CACHE}, float softmax_scale, *, {_ATTENTION}, str scale_format)"
    " -> (Tensor out, Tensor lse)",
    "mla_decode_out": f"({_OUTPUTS}, {_QUERY}, {_CACHE}, float softmax_scale, *, {_ATTENTION}, "
    "str scale_format) -> ()",
    "decode_quantized": f"({_CODES}, {_CACHE}, float softmax_scale, *, {_ATTENTION}, "
    "ScalarType out_dtype) -> (Tensor out, Tensor lse)",
    "decode_quantized_out": f"({_OUTPUTS}, {_CODES}, {_CACHE}, float softmax_scale, *, "
    f"{_ATTENTION}) -> ()",
    "fetch_dequant": "(Tensor codes, Tensor scale, Tensor rope, Tensor block_table, "
    "Tensor cache_seqlens, *, SymInt? total_tokens) -> Tensor",
}
"""What each operator takes, gives and, marked ``!``, writes."""


def is_capturing() -> bool:
    """Say whether a graph is being captured, so that an entry point should call its operator.

    Non-strict export is known by a flag of the whole process. An entry point that an operator of
    this thread runs is past that question: otherwise a decode that another thread runs during an
    export would call its operator for ever.
    """
    if not torch.compiler.is_compiling():
        return False
    # Dynamo, which traces this function, takes the first for true and never sees the second.
    return torch.compiler.is_dynamo_compiling() or not getattr(_running, "operator", False)


@contextlib.contextmanager
def _inside_operator() -> Iterator[None]:
    """Mark this thread as running an operator's implementation."""
    outer = getattr(_running, "operator", False)
    _running.operator = True
    try:
        yield
    finally:
        _running.operator = outer


# What the entry points call while a graph is captured.


def fused_q_quant(
    q_latent: Tensor,
    q_rope: Tensor,
    rotation: Rotation | None,
    *,
    interleaved: bool,
    scale_format: ScaleFormat,
) -> QuantizedRows:
    """One node for `stage3_dataflow.fused_q_quant`."""
    cos, sin = (None, None) if rotation is None else rotation
    return QuantizedRows(
        *_ops.fused_q_quant.default(
            q_latent, q_rope, cos, sin, interleaved=interleaved, scale_format=scale_format
        )
    )


def fused_k_append(
    c_kv: Tensor,
    k_rope: Tensor,
    cache: LatentPages | Bf16LatentPages,
    slot_mapping: Tensor,
    *,
    norm_weight: Tensor | None,
    norm_eps: float,
    rotation: Rotation | None,
    interleaved: bool,
    scale_format: ScaleFormat,
) -> None:
    """One node for `stage3_dataflow.fused_k_append`."""
    cos, sin = (None, None) if rotation is None else rotation
    _ops.fused_k_append.default(
        c_kv,
        k_rope,
        *_planes(cache),
        slot_mapping,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        scale_format=scale_format,
    )


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentPages | Bf16LatentPages,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    *,
    causal: bool,
    out: Tensor | None,
    lse: Tensor | None,
    scale_format: ScaleFormat,
    p_format: PFormat | None,
    split_rule: SplitRule,
    kernel: Kernel | None,
) -> AttentionOutput:
    """One node for `stage3_dataflow.mla_decode`."""
    return _decode(
        "mla_decode",
        (q_latent, q_rope, *_planes(cache), block_table, cache_seqlens, softmax_scale),
        {
            "causal": causal,
            "p_format": p_format,
            "run_kernel": kernel,
            "min_tokens": split_rule.min_tokens,
            "max_splits": split_rule.max_splits,
            "scale_format": scale_format,
        },
        q_latent,
        q_latent.dtype,
        out,
        lse,
    )


def decode_quantized(
    query: QuantizedRows,
    cache: LatentPages,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    *,
    causal: bool,
    out: Tensor | None,
    lse: Tensor | None,
    out_dtype: torch.dtype,
    p_format: PFormat | None,
    split_rule: SplitRule,
    kernel: Kernel | None,
) -> AttentionOutput:
    """One node for `stage3_dataflow.decode_quantized`."""
    options: dict[str, Any] = {
        "causal": causal,
        "p_format": p_format,
        "run_kernel": kernel,
        "min_tokens": split_rule.min_tokens,
        "max_splits": split_rule.max_splits,
    }
    if out is None and lse is None:
        options["out_dtype"] = out_dtype
    return _decode(
        "decode_quantized",
        (*query, *_planes(cache), block_table, cache_seqlens, softmax_scale),
        options,
        query.codes,
        out_dtype,
        out,
        lse,
    )


def fetch_dequant(
    cache: LatentPages, block_table: Tensor, cache_seqlens: Tensor, *, total_tokens: int | None
) -> Tensor:
    """One node for `stage3_dataflow.fetch_dequant`."""
    return _ops.fetch_dequant.default(*cache, block_table, cache_seqlens, total_tokens=total_tokens)


def _planes(cache: LatentPages | Bf16LatentPages) -> tuple[Tensor, Tensor | None, Tensor]:
    """Planes in the order of the schemas. Another number of them is refused before the capture."""
    if len(cache) == 3:
        return cache[0], cache[1], cache[2]
    if len(cache) == 2:
        return cache[0], None, cache[1]
    raise ValueError(
        "cache must be LatentPages (codes, scale, rope) or Bf16LatentPages (c_kv, k_rope); "
        f"got {len(cache)} planes"
    )


def _decode(
    name: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    query: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None,
    lse: Tensor | None,
) -> AttentionOutput:
    """Call the operator that gives the results, or the one that writes them where asked."""
    if out is None and lse is None:
        return AttentionOutput(*getattr(_ops, name).default(*arguments, **options))
    if out is None:
        out = query.new_empty(query.shape, dtype=out_dtype)
    if lse is None:
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    getattr(_ops, f"{name}_out").default(out, lse, *arguments, **options)
    return AttentionOutput(out, lse)


# Implementations. The entry points are imported here, late: they import this module.


def _run_fused_q_quant(
    q_latent: Tensor,
    q_rope: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    interleaved: bool,
    scale_format: ScaleFormat,
) -> tuple[Tensor, Tensor, Tensor]:
    from stage3_dataflow.fused_writes import fused_q_quant

    with _inside_operator():
        codes, scale, rope = fused_q_quant(
            q_latent,
            q_rope,
            _rotation(cos, sin),
            interleaved=interleaved,
            scale_format=scale_format,
        )
    return codes.contiguous(), scale.contiguous(), rope.contiguous()


def _run_fused_k_append(
    c_kv: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    scale: Tensor | None,
    rope: Tensor,
    slot_mapping: Tensor,
    *,
    cos: Tensor | None,
    sin: Tensor | None,
    **options: Any,
) -> None:
    from stage3_dataflow.fused_writes import fused_k_append

    with _inside_operator():
        fused_k_append(
            c_kv,
            k_rope,
            _cache(latent, scale, rope),
            slot_mapping,
            rotation=_rotation(cos, sin),
            **options,
        )


def _run_mla_decode_out(
    out: Tensor,
    lse: Tensor,
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    scale: Tensor | None,
    rope: Tensor,
    *inputs: Any,
    run_kernel: Kernel | None,
    min_tokens: int,
    max_splits: int,
    **options: Any,
) -> None:
    from stage3_dataflow.decode import mla_decode

    with _inside_operator():
        mla_decode(
            q_latent,
            q_rope,
            _cache(latent, scale, rope),
            *inputs,
            out=out,
            lse=lse,
            kernel=run_kernel,
            split_rule=SplitRule(min_tokens, max_splits),
            **options,
        )


def _run_mla_decode(
    q_latent: Tensor, q_rope: Tensor, *inputs: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    out, lse = _empty_outputs(q_latent, q_latent.dtype)
    _run_mla_decode_out(out, lse, q_latent, q_rope, *inputs, **options)
    return out, lse


def _run_decode_quantized_out(
    out: Tensor,
    lse: Tensor,
    q_codes: Tensor,
    q_scale: Tensor,
    q_rope: Tensor,
    codes: Tensor,
    scale: Tensor | None,
    rope: Tensor,
    *inputs: Any,
    run_kernel: Kernel | None,
    min_tokens: int,
    max_splits: int,
    **options: Any,
) -> None:
    from stage3_dataflow.decode import decode_quantized

    cache: Any = _cache(codes, scale, rope)  # a BF16 cache is refused by name
    with _inside_operator():
        decode_quantized(
            QuantizedRows(q_codes, q_scale, q_rope),
            cache,
            *inputs,
            out=out,
            lse=lse,
            kernel=run_kernel,
            split_rule=SplitRule(min_tokens, max_splits),
            **options,
        )


def _run_decode_quantized(
    q_codes: Tensor, *inputs: Any, out_dtype: torch.dtype, **options: Any
) -> tuple[Tensor, Tensor]:
    out, lse = _empty_outputs(q_codes, out_dtype)
    _run_decode_quantized_out(out, lse, q_codes, *inputs, **options)
    return out, lse


def _run_fetch_dequant(
    codes: Tensor,
    scale: Tensor,
    rope: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    total_tokens: int | None,
) -> Tensor:
    from stage3_dataflow.prefix import fetch_dequant

    with _inside_operator():
        rows = fetch_dequant(
            LatentPages(codes, scale, rope),
            block_table,
            cache_seqlens,
            total_tokens=total_tokens,
        )
    return rows.contiguous()


def _rotation(cos: Tensor | None, sin: Tensor | None) -> Rotation | None:
    return None if cos is None or sin is None else Rotation(cos, sin)


def _cache(latent: Tensor, scale: Tensor | None, rope: Tensor) -> LatentPages | Bf16LatentPages:
    return Bf16LatentPages(latent, rope) if scale is None else LatentPages(latent, scale, rope)


# Fake implementations: shapes, dtypes and strides of the results.


def _empty_outputs(query: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a query, or of a fake one."""
    return (
        torch.empty(query.shape, dtype=out_dtype, device=query.device),
        torch.empty(query.shape[:3], dtype=torch.float32, device=query.device),
    )


def _fake_fused_q_quant(
    q_latent: Tensor, q_rope: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    device = q_latent.device
    return (
        torch.empty(q_latent.shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(q_latent.shape[:3], dtype=torch.float32, device=device),
        torch.empty(q_rope.shape, dtype=torch.bfloat16, device=device),
    )


def _fake_mla_decode(q_latent: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q_latent, q_latent.dtype)


def _fake_decode_quantized(
    q_codes: Tensor, *_: Any, out_dtype: torch.dtype, **__: Any
) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q_codes, out_dtype)


def _fake_fetch_dequant(
    codes: Tensor,
    scale: Tensor,
    rope: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    total_tokens: int | torch.SymInt | None,
) -> Tensor:
    rows = torch.library.get_ctx().new_dynamic_size() if total_tokens is None else total_tokens
    width = codes.shape[-1] + rope.shape[-1]
    return torch.empty(rows, width, dtype=torch.bfloat16, device=codes.device)


def _fake_writer(*_: Any, **__: Any) -> None:
    """Give nothing: the operator only writes."""


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "fused_q_quant": (_run_fused_q_quant, _fake_fused_q_quant),
    "fused_k_append": (_run_fused_k_append, _fake_writer),
    "mla_decode": (_run_mla_decode, _fake_mla_decode),
    "mla_decode_out": (_run_mla_decode_out, _fake_writer),
    "decode_quantized": (_run_decode_quantized, _fake_decode_quantized),
    "decode_quantized_out": (_run_decode_quantized_out, _fake_writer),
    "fetch_dequant": (_run_fetch_dequant, _fake_fetch_dequant),
}

for _name, (_run, _fake) in _IMPLEMENTATIONS.items():
    # Views with gaps are served, but a last axis has to stay contiguous: no other layout, please.
    _library.define(_name + SCHEMAS[_name], tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)

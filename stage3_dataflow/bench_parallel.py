"""Several ranks: whether they compute what one does, and how much faster.

    torchrun --standalone --nproc-per-node 2 -m stage3_dataflow.bench_parallel --out results

``--smoke`` runs tiny sizes on any machine. Set NCCL_NVLS_ENABLE=0 on a host without NVLink
multicast. Five sections, each a question:

=============  ==================================================================================
messages       how long do ranks need to tell each other something? It bounds what follows
context        attention over one long request, its pages spread: right? how fast?
tensor         a decoder, its heads and experts split: logits, greedy tokens, cache bytes?
attention      how does attention scale when its heads are split? Nothing is communicated
decode         how does a step of a tensor parallel decoder scale?
=============  ==================================================================================

"One rank" is every rank by itself, all side by side; of the ranks' times the slowest counts. The
report is written after every row. An error that all ranks meet ends its section only; one that a
single rank meets leaves the others waiting until the time limit ends them all. `--only` runs the
remaining sections then.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import AttentionBackend, LayerCache
from stage0_reference.cli import OneLineParser
from stage0_reference.decode_benchmark import V2_LITE, random_decoder
from stage0_reference.decoder import CachedAttention, Decoder
from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import as_bytes
from stage0_reference.model_config import ModelConfig
from stage0_reference.page_allocator import pages_for
from stage1_quant.fp8_latent_cache import LatentPages
from stage3_dataflow.bench_cases import (
    SOFTMAX_SCALE,
    build_case,
    equal_shape,
    exact_attention,
    relative_error,
)
from stage3_dataflow.bench_command import _Progress
from stage3_dataflow.bench_kernels import allowed_error, available_kernels
from stage3_dataflow.bench_parallel_report import Row, failed_checks, text_of
from stage3_dataflow.bench_peers import one_line
from stage3_dataflow.bench_report import ResultFiles
from stage3_dataflow.bench_throughput import Setting, ThroughputBenchmark, page_bytes
from stage3_dataflow.bench_timing import Stopwatch, _output, describe_machine
from stage3_dataflow.context_parallel import ContextParallelBackend
from stage3_dataflow.parallel_demo import clear
from stage3_dataflow.rank_group import (
    ProcessRanks,
    Ranks,
    connected,
    gather_text,
    same_bytes,
    sum_over_ranks,
    together,
)
from stage3_dataflow.split_plan import SPLIT_GRANULE, splits_for
from stage3_dataflow.tensor_parallel import TensorParallelDecoder
from stage3_dataflow.triton_backend import FusedBackend

PAGE_SIZE = 64
SMALL_MULTIPLE = 8.0
"""Two evaluations of a decoder in one dtype round independently: their largest errors are of one
size, not equal. The usual rule for whole models compares them up to a small multiple."""

V3_WIDTHS: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 4,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
"""DeepSeek-V3's widths and heads; 4 of its 61 layers and 64 of its 256 experts, to fit one GPU."""

MODELS = {"V2-Lite": V2_LITE, "V3 widths": V3_WIDTHS}

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}


CHECKED = {
    "num_hidden_layers": 3,
    "vocab_size": 16384,
    "n_routed_experts": 32,
    "num_experts_per_tok": 32,
    "n_group": 1,
    "topk_group": 1,
}
"""Small enough for float64. Every token takes every expert: where a router nearly ties, a rounding
may choose another expert, rightly, and logits of other experts say nothing about splitting."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes
    ----------
    repeats, steps
        Timed repetitions of a call, and of a decode step.
    models
        Fields of the decoders that are timed, by name.
    checked
        How a decoder whose logits are compared in float64 differs from these.
    requests, prompt, new_tokens
        Of these decoders: requests, and tokens of each.
    long
        Heads and tokens of a long request.
    heads, attention
        Heads that are split, and (requests, tokens).
    batches, contexts
        Of decode steps; eager ones are timed at the first context only.
    """

    repeats: int = 50
    steps: int = 20
    models: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: MODELS)
    checked: Mapping[str, Any] = dataclasses.field(default_factory=lambda: CHECKED)
    requests: int = 4
    prompt: int = 64
    new_tokens: int = 32
    long: Sequence[tuple[int, int]] = ((128, 2**17), (128, 2**19), (128, 2**20), (16, 2**20))
    heads: int = 128
    attention: Sequence[tuple[int, int]] = ((1, 32768), (8, 32768), (64, 2048), (64, 32768))
    batches: Sequence[int] = (1, 8, 64)
    contexts: Sequence[int] = (2048, 32768)


SMOKE = Sizes(
    repeats=2,
    steps=2,
    models={name: fields | TINY for name, fields in MODELS.items()},
    checked={"num_experts_per_tok": TINY["n_routed_experts"], "n_group": 1, "topk_group": 1},
    requests=2,
    prompt=9,
    new_tokens=3,
    long=((4, 300),),
    heads=8,
    attention=((2, 100),),
    batches=(2,),
    contexts=(80,),
)
"""Enough to see that everything runs."""


class Decoded(NamedTuple):
    """What a decoder made of some requests.

    Attributes
    ----------
    tokens
        Prompts and what followed, [requests, length].
    logits
        At every token, [requests, length, vocab_size].
    cache
        All layers' planes.
    """

    tokens: Tensor
    logits: Tensor
    cache: Sequence[LayerCache]


@torch.inference_mode()
def decode_greedily(
    decoder: Decoder,
    backend: AttentionBackend,
    prompts: Int[Tensor, "requests prompt"],
    new_tokens: int,
    follow: Int[Tensor, "requests length"] | None = None,
) -> Decoded:
    """Compute prompts in one chunk, then one token after the other.

    Parameters
    ----------
    follow
        Takes these tokens instead of the likeliest ones.
    """
    batch, prompt = prompts.shape
    length, device = prompt + new_tokens, prompts.device
    tokens = torch.cat((prompts, prompts.new_zeros(batch, new_tokens)), dim=1)
    if follow is not None:
        tokens = follow
    pages = pages_for(length, PAGE_SIZE)
    table = torch.arange(batch * pages, device=device).view(batch, pages)
    cache = backend.make_cache(decoder.config, batch * pages, PAGE_SIZE, device=device)
    clear(cache)
    logits = []
    for start, end in [(0, prompt), *((at, at + 1) for at in range(prompt, length))]:
        at = torch.arange(start, end, device=device)
        attention = CachedAttention(
            backend,
            cache,
            query_lens=[end - start] * batch,
            slot_mapping=(table[:, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE).flatten(),
            block_table=table.int(),
            cache_seqlens=torch.full((batch,), end, dtype=torch.int32, device=device),
        )
        found = decoder(tokens[:, start:end].flatten(), at.repeat(batch), attention)
        logits.append(found.view(batch, end - start, -1))
        if follow is None and end < length:
            tokens[:, end] = logits[-1][:, -1].argmax(dim=-1)
    return Decoded(tokens, torch.cat(logits, dim=1), cache)


def compare(one: Decoded, several: Decoded, exact: Float[Tensor, "requests length vocab"]) -> Row:
    """Measure one rank's and several ranks' logits against exact ones along one rank's tokens.

    Several ranks may be further from exact logits than one by a small multiple of one's error, as
    `SMALL_MULTIPLE` says; an error of no rounding at all counts as one rounding. So a greedy token
    may differ only where the exact logits of the best two are within twice that bound. What
    follows a token that differs is not compared: it had other inputs.
    """
    same_inputs = (one.tokens == several.tokens).cumprod(dim=1).bool()  # [requests, length]
    error = [float((each.logits - exact)[same_inputs].abs().max()) for each in (one, several)]
    rounding = torch.finfo(one.logits.dtype).eps / 2 * float(exact.abs().max())
    bound = SMALL_MULTIPLE * (error[0] + rounding)
    gaps = []
    for request, same in enumerate(same_inputs.sum(dim=1).tolist()):
        if same < exact.shape[1]:
            best, second = exact[request, same - 1].topk(2).values.tolist()
            gaps.append(best - second)
    return {
        "error_one_rank": error[0],
        "error_ranks": error[1],
        "difference": float((one.logits - several.logits)[same_inputs].abs().max()),
        "bound": bound,
        "equal_tokens": int(same_inputs.sum()),
        "tokens": same_inputs.numel(),
        "gaps_where_tokens_differ": gaps,
        "checks": {
            "logits": error[1] <= bound,
            "greedy tokens": all(gap <= 2.0 * bound for gap in gaps),
        },
    }


def lse_bound(length: int, size: int) -> float:
    """Largest difference of lse between one rank and `size` ranks over the same cached tokens.

    Both exponentiate the same scores, which rounding in the same order makes equal bit by bit, and
    sum positive numbers in another order; a chain of n roundings is a relative n u, and in lse an
    absolute one. A sum has at most 64 additions within a block, six roundings a block for rescaling
    and adding it, six for each split and each rank; 64 more are for exponents and lse of up to
    2^5, rounded in float32 on the way. Twice, since there are two sums.
    """
    blocks = pages_for(max(end - start for start, end in splits_for(length)), SPLIT_GRANULE)
    roundings = SPLIT_GRANULE + 6 * (blocks + len(splits_for(length)) + size) + 64
    return 2.0 * roundings * torch.finfo(torch.float32).eps / 2


class ParallelBenchmark:
    """A run on all ranks; the first one writes.

    Parameters
    ----------
    ranks
        All call `run`.
    sizes
        What is measured.
    files
        Where the report goes; None on other ranks than the first.
    command
        Said in the report.
    say
        Told what goes on.
    """

    def __init__(
        self,
        ranks: Ranks,
        sizes: Sizes,
        files: ResultFiles | None = None,
        command: str = "",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.ranks, self.sizes, self.files, self.say = ranks, sizes, files, say
        self.device = ranks.device
        self.on_gpu = self.device.type == "cuda"
        self.watch = Stopwatch(self.device, sizes.repeats)
        self.no_graph = why_no_graph(ranks) if self.on_gpu else "the ranks are on a CPU"
        self.report: dict[str, Any] = {
            "command": command,
            "machine": describe_machine(self.device),
            "ranks": ranks.size,
            "connection": _connection(self.on_gpu),
            "method": {
                "microseconds": f"{self.watch.method}, median of {sizes.repeats}, slowest rank",
                "microseconds with communication": self.watch.method
                if self.no_graph is None or not self.on_gpu
                else f"CUDA events around single calls, since {self.no_graph}",
                "decode": "wall clock of a step, until the host has read the likeliest tokens; "
                f"median of {sizes.steps}, slowest rank",
                "one rank": "every rank by itself, all at the same time",
            },
            "sections": {},
        }
        self.report["devices"] = gather_text(ranks, self.report["machine"]["device"])

    def run(
        self, sections: Mapping[str, Callable[[], Iterator[Row]]] | None = None
    ) -> dict[str, Any]:
        """Measure section by section, whatever fails; give the report.

        Parameters
        ----------
        sections
            Their names and generators of rows; default: all of `sections`.
        """
        for name, measure in (self.sections() if sections is None else sections).items():
            section: dict[str, Any] = {"status": "running", "rows": []}
            self.report["sections"][name] = section
            started = time.perf_counter()

            self._write()
            try:
                together(self.ranks, name, functools.partial(self._collect, name, measure))
                section["status"] = "done"
            except Exception as error:
                section["status"] = "failed"
                section["error"] = one_line(error)
                self.say(f"{name}: {section['error']}")
            section["seconds"] = time.perf_counter() - started
            self._free()
            self._write()
        return self.report

    def _collect(self, name: str, measure: Callable[[], Iterator[Row]]) -> None:
        rows = self.report["sections"][name]["rows"]
        for row in measure():
            rows.append(row)
            self._write()
            self.say(f"{name}: row {len(rows)}")

    def sections(self) -> dict[str, Callable[[], Iterator[Row]]]:
        """All of them, the quickest first."""
        return {
            "messages": self.messages,
            "context": self.context,
            "tensor": self.tensor,
            "attention": self.attention,
            "decode": self.decode,
        }

    def _write(self) -> None:
        if self.files is not None:
            self.files.write(self.report, text_of(self.report))

    def _free(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    # Times

    def _slowest(self, values: Sequence[float]) -> list[float]:
        """Numbers of the rank whose first one is the largest."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        gathered = self.ranks.gather(mine)
        return gathered[int(gathered[:, 0].argmax())].tolist()

    def _time(self, call: Callable[[], Any], *, communicates: bool) -> dict[str, float]:
        """Microseconds of a call that all ranks make: median and quartiles."""
        if communicates and self.on_gpu and self.no_graph is not None:
            times = self._times_of_single_calls(call)
            median, (low, _, high) = statistics.median(times), statistics.quantiles(times, n=4)
        else:
            median, low, high, *_ = self.watch.time(call)
        return dict(zip(("us", "low", "high"), self._slowest([median, low, high]), strict=True))

    def _times_of_single_calls(self, call: Callable[[], Any]) -> list[float]:
        for _ in range(3):
            call()
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for _ in range(max(2, self.sizes.repeats))
        ]
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    # Sections

    def messages(self) -> Iterator[Row]:
        """Time what ranks tell each other, at the sizes of the other sections' messages."""
        sizes, ranks = self.sizes, self.ranks
        contents = {
            f"tensor parallel, {name}, {batch} requests": 2 * batch * int(fields["hidden_size"])
            for name, fields in sizes.models.items()
            for batch in (min(sizes.batches), max(sizes.batches))
        } | {
            f"context parallel, {heads} heads": 4 * heads * (512 + 1)
            for heads in sorted({heads for heads, _ in sizes.long})
        }
        for content, size in contents.items():
            part = torch.zeros(size // 2, dtype=torch.bfloat16, device=self.device)
            calls = {
                "gather": lambda part=part: ranks.gather(part),
                "sum_over_ranks": lambda part=part: sum_over_ranks(ranks, part),
                "all_reduce": lambda part=part: dist.all_reduce(part),
            }
            times = {name: self._time(call, communicates=True) for name, call in calls.items()}
            yield {"content": content, "bytes": size, **times}

    def context(self) -> Iterator[Row]:
        """Attend over one long request on one rank, and on all with its pages spread."""
        for heads, tokens in self.sizes.long:
            yield self._long_request(heads, tokens)
            self._free()

    def _long_request(self, heads: int, tokens: int) -> Row:
        size, rank = self.ranks.size, self.ranks.rank
        length = pages_for(tokens, PAGE_SIZE * size) * PAGE_SIZE * size  # as many pages each
        case = build_case(equal_shape(1, heads, length), device=self.device, page_size=PAGE_SIZE)
        mine = LatentPages(*(as_bytes(x)[rank::size].contiguous().view(x.dtype) for x in case.fp8))
        one, several = FusedBackend(), ContextParallelBackend(FusedBackend(), self.ranks)
        query, where = (case.q_latent, case.q_rope), (case.block_table, case.cache_seqlens)

        def attend_alone() -> AttentionOutput:
            return one.attend(*query, case.fp8, *where, SOFTMAX_SCALE)

        def attend_own_pages() -> AttentionOutput:
            return several.attend_local(*query, mine, *where, SOFTMAX_SCALE)

        def attend_together() -> AttentionOutput:
            return several.attend(*query, mine, *where, SOFTMAX_SCALE)

        alone, spread = attend_alone(), attend_together()
        exact = exact_attention(case.fp8_operands(0))
        is_hopper = available_kernels(case)[0] == "hopper"
        bound = allowed_error(torch.float8_e4m3fn if is_hopper else torch.bfloat16)
        errors = [relative_error(result.out[0], exact) for result in (alone, spread)]
        lse_difference = float((alone.lse - spread.lse).abs().max())
        times = {
            "one_rank": self._time(attend_alone, communicates=False),
            "own_pages": self._time(attend_own_pages, communicates=False),
            "ranks": self._time(attend_together, communicates=True),
        }
        return {
            "heads": heads,
            "tokens": length,
            "cache_bytes_one_rank": sum(plane.nbytes for plane in case.fp8),
            "cache_bytes_on_a_rank": sum(plane.nbytes for plane in mine),
            "error_one_rank": errors[0],
            "error_ranks": errors[1],
            "bound": bound,
            "difference": relative_error(spread.out, alone.out.double()),
            "lse_difference": lse_difference,
            "lse_bound": lse_bound(length, size),
            "checks": {
                "error of one rank": errors[0] <= bound,
                "error of all ranks": errors[1] <= bound,
                "lse": lse_difference <= lse_bound(length, size),
                "same data on all ranks": same_bytes(self.ranks, (*query, case.fp8.scale)),
                "same result on all ranks": same_bytes(self.ranks, spread),
            },
            **times,
            "speedup": times["one_rank"]["us"] / times["ranks"]["us"],
        }

    def tensor(self) -> Iterator[Row]:
        """Compare decoders on several ranks with one rank's: logits, greedy tokens, cache bytes.

        In float32 over a float32 cache, and in BF16 over the FP8 cache.
        """
        for name, fields in self.sizes.models.items():
            config = ModelConfig.from_dict({**fields, **self.sizes.checked})
            for dtype in (torch.float32, torch.bfloat16):
                yield {"model": name, **self._compared(config, dtype)}
                self._free()

    def _compared(self, config: ModelConfig, dtype: torch.dtype) -> Row:
        sizes, ranks = self.sizes, self.ranks
        backend = FusedBackend() if dtype == torch.bfloat16 else AbsorbedBackend(dtype)
        stream = torch.Generator().manual_seed(0)
        shape = (sizes.requests, sizes.prompt)
        prompts = torch.randint(config.vocab_size, shape, generator=stream).to(self.device)
        whole = random_decoder(config, self.device, torch.bfloat16)
        if dtype != torch.bfloat16:  # drawn in BF16 all the same: one set of weights for all
            whole = whole.to(dtype)
        share = TensorParallelDecoder(config, ranks, dtype=dtype).copy_from(whole)
        parameters = [sum(p.numel() for p in decoder.parameters()) for decoder in (whole, share)]
        one = decode_greedily(whole, backend, prompts, sizes.new_tokens)
        several = decode_greedily(share, backend, prompts, sizes.new_tokens)
        wide = AbsorbedBackend(torch.float64)
        exact = decode_greedily(whole.double(), wide, prompts, sizes.new_tokens, one.tokens)
        row = {
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "experts": config.n_routed_experts,
            "dtype": str(dtype).removeprefix("torch."),
            "attention": backend.description,
            "parameters": parameters[0],
            "parameters_on_a_rank": parameters[1],
            **compare(one, several, exact.logits),
        }
        planes = [plane for layer in several.cache for plane in layer]
        row["checks"] |= {
            "same cache on all ranks": same_bytes(ranks, planes),
            "same logits on all ranks": same_bytes(ranks, [several.logits]),
        }
        return row

    def attention(self) -> Iterator[Row]:
        """Time attention of all heads, and of one rank's share of them."""
        for batch, tokens in self.sizes.attention:
            yield self._split_heads(batch, tokens)
            self._free()

    def _split_heads(self, batch: int, tokens: int) -> Row:
        heads = self.sizes.heads
        share = heads // self.ranks.size
        backend = FusedBackend()
        case = build_case(equal_shape(batch, heads, tokens), device=self.device)

        def time_of(count: int) -> dict[str, float]:
            query = case.q_latent[:, :, :count], case.q_rope[:, :, :count]
            where = case.block_table, case.cache_seqlens
            return self._time(
                lambda: backend.attend(*query, case.fp8, *where, SOFTMAX_SCALE),
                communicates=False,
            )

        all_heads, own_heads = time_of(heads), time_of(share)
        return {
            "batch": batch,
            "tokens": tokens,
            "heads": heads,
            "heads_on_a_rank": share,
            "one_rank": all_heads,
            "ranks": own_heads,
            "speedup": all_heads["us"] / own_heads["us"],
        }

    def decode(self) -> Iterator[Row]:
        """Time decode steps of whole decoders and of shares, on a full FP8 cache."""
        sizes = self.sizes
        modes = ("graph", "eager") if self.on_gpu else ("eager",)
        settings = [
            (context, batch, mode)
            for mode in modes
            for context in (sizes.contexts[:1] if mode == "eager" else sizes.contexts)
            for batch in sizes.batches
        ]
        for name, fields in sizes.models.items():
            config = ModelConfig.from_dict(fields)
            dtype = torch.bfloat16
            decoder: Decoder = random_decoder(config, self.device, dtype)
            alone: dict[tuple[int, int, str], float] = {}
            for on_ranks in (False, True):
                if on_ranks:
                    shared = TensorParallelDecoder(config, self.ranks, dtype=dtype)
                    decoder = shared.copy_from(decoder)
                    self._free()
                for setting in settings:
                    row = {
                        "model": name,
                        "layers": config.num_hidden_layers,
                        "ranks": self.ranks.size if on_ranks else 1,
                        "parameters": sum(p.numel() for p in decoder.parameters()),
                        **dict(zip(("context", "batch", "mode"), setting, strict=True)),
                        **self._step(decoder, *setting, on_ranks=on_ranks),
                    }
                    if on_ranks and "ms" in row and setting in alone:
                        row["speedup"] = alone[setting] / row["ms"]
                    elif "ms" in row:
                        alone[setting] = row["ms"]
                    yield row
                    self._free()
            del decoder
            self._free()

    def _step(
        self, decoder: Decoder, context: int, batch: int, mode: str, *, on_ranks: bool
    ) -> Row:
        """Milliseconds of a step, or why it was skipped: the same on all ranks."""
        if on_ranks and mode == "graph" and self.no_graph is not None:
            return {"skipped": self.no_graph}
        backend = FusedBackend()
        backend.capturable = mode == "graph"
        memory = batch * pages_for(context, PAGE_SIZE) * page_bytes(decoder, backend, PAGE_SIZE)
        if self.on_gpu:
            free = torch.tensor(torch.cuda.mem_get_info(self.device)[0], device=self.device)
            smallest = int(self.ranks.gather(free).min())
            needed = round(1.05 * memory) + 4 * 2**30  # activations, partial results, the graph's
            if needed > smallest:
                return {"skipped": f"needs {needed / 1e9:.0f} GB; {smallest / 1e9:.0f} are free"}
        benchmark = ThroughputBenchmark(
            decoder, memory, page_size=PAGE_SIZE, steps=self.sizes.steps
        )
        measured = benchmark.steady(backend, Setting(context, 1, batch))
        times = [measured["ms_per_step"], *measured["quartiles_ms"]]
        milliseconds, low, high = self._slowest(times)
        return {
            "ms": milliseconds,
            "low": low,
            "high": high,
            "tokens_per_second": batch / milliseconds * 1e3,
            "cache_bytes": memory,
        }


def why_no_graph(ranks: Ranks) -> str | None:
    """Say why a CUDA graph cannot hold a gather; None if it can. Tried in a group of its own."""
    try:
        apart = ProcessRanks(ranks.device, dist.new_group())
        part = torch.full((1000,), float(ranks.rank), device=ranks.device)
        apart.gather(part)  # connects
        torch.cuda.synchronize(ranks.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gathered = apart.gather(part)
        part += 1.0
        graph.replay()
        found = gathered[:, -1].tolist()
        expected = [1.0 + rank for rank in range(ranks.size)]
        reason = "" if found == expected else f"a replay gathered {found}, not {expected}"
    except Exception as error:
        reason = one_line(error)
    reasons = [reason for reason in gather_text(ranks, reason) if reason]
    return reasons[0] if reasons else None


def _connection(on_gpu: bool) -> dict[str, Any]:
    """Say how ranks are connected."""
    facts: dict[str, Any] = {"backend": dist.get_backend() if dist.is_initialized() else None}
    if on_gpu:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["settings"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")}
        facts["topology"] = _output("nvidia-smi", "topo", "-m")
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 if something is wrong. See the module docstring."""
    parser = _parser()
    options = parser.parse_args(arguments)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # for one rank without torchrun
    os.environ.setdefault("MASTER_PORT", "0")
    size, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    gpus = torch.cuda.device_count()
    if gpus < here and not options.smoke:
        parser.error(f"{here} ranks need as many CUDA devices; got {gpus}. Use --smoke")
    words = ["torchrun", "--standalone", "--nproc-per-node", str(size)]
    words += ["-m", "stage3_dataflow.bench_parallel", *(arguments or sys.argv[1:])]
    with connected(timeout_seconds=options.timeout) as ranks:
        first = ranks.rank == 0
        benchmark = ParallelBenchmark(
            ranks,
            SMOKE if options.smoke else Sizes(),
            ResultFiles(out=options.out) if first else None,
            shlex.join(words),
            _Progress() if first else lambda text: None,
        )
        chosen = benchmark.sections()
        if options.only:
            chosen = {name: chosen[name] for name in chosen if name in options.only}
        report = benchmark.run(chosen)
    if first:
        print(text_of(report), end="", flush=True)
    return 1 if failed_checks(report) else 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="bench_parallel", description="Correctness and scaling of several ranks."
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="for results.json and table.txt"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    parser.add_argument(
        "--only",
        action="append",
        choices=("messages", "context", "tensor", "attention", "decode"),
        help="this section; may be given again",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="longest wait for other ranks"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

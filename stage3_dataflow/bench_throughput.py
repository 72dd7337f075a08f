"""Tokens per second of the engine: a BF16 cache against an FP8 cache in the same memory.

Both caches get as many bytes. The FP8 cache keeps 644 of them for a token where BF16 keeps 1152
(kv_lora_rank 512, qk_rope_head_dim 64), so it holds 1.79 times the tokens, and more requests run at
once. Two measurements for every context length:

*Steady state*: the engine's decode step (a CUDA graph where one is possible) on a cache full of
random latents, every row live. Nothing is prefilled: speed depends on shapes, not on values.

*Whole runs*: random prompts through `Engine` from submission to last token, prefill included, twice
as many as the BF16 cache holds at once.

Decode splits follow the default rule, as in service.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stage0_reference.attention_backend import AttentionBackend, cache_bytes_per_token
from stage0_reference.decode_benchmark import DecodeLoop
from stage0_reference.decoder import Decoder
from stage0_reference.mixture_of_experts import BATCHED_EXPERTS_MAX_ROWS
from stage0_reference.page_allocator import pages_for
from stage0_reference.sampling import SamplingParams
from stage3_dataflow.bench_peers import one_line
from stage3_dataflow.bench_timing import describe_machine
from stage3_dataflow.decode_graph import (
    CudaGraphCapture,
    DecodeRow,
    DecodeStep,
    graph_obstacle,
    routes_on_the_host,
)
from stage3_dataflow.engine import Engine
from stage3_dataflow.triton_backend import Bf16KernelBackend, FusedBackend

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "bf16": Bf16KernelBackend,
    "fp8": FusedBackend,
}

WARM_UP_STEPS = 2
"""Steps before the timed ones, where no graph's capture has warmed up."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is asked of both caches.

    Attributes
    ----------
    context
        Tokens of a request at its longest.
    new_tokens
        Of those, generated ones.
    most
        Requests that may run at once; None: as many as fit.
    """

    context: int
    new_tokens: int
    most: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.new_tokens < self.context:
            raise ValueError(
                f"new_tokens must be between 1 and {self.context - 1} for a context of "
                f"{self.context}; got {self.new_tokens}"
            )
        if self.most is not None and self.most < 1:
            raise ValueError(f"batch must be at least 1; got {self.most}")


def page_bytes(decoder: Decoder, backend: AttentionBackend, page_size: int) -> int:
    """Bytes of one page in all planes of all layers."""
    planes = backend.make_cache(decoder.config, 1, page_size, device=decoder.device)
    return cache_bytes_per_token(planes) * page_size


def default_memory(decoder: Decoder, context: int, page_size: int, requests: int = 16) -> int:
    """Bytes in which a BF16 cache holds `requests` requests of `context` tokens."""
    pages = requests * pages_for(context, page_size)
    return pages * page_bytes(decoder, Bf16KernelBackend(), page_size)


@dataclasses.dataclass
class ThroughputBenchmark:
    """A run over settings.

    Attributes
    ----------
    decoder
        The model.
    memory
        Bytes of the cache, the same for every backend.
    page_size
        Tokens per page.
    steps
        Timed steps of the steady state, which must leave a context's first token.
    prefill_chunk
        As `Engine`.
    say
        Told what goes on.
    """

    decoder: Decoder
    memory: int
    page_size: int = 64
    steps: int = 20
    prefill_chunk: int = 512
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1; got {self.steps}")

    def run(
        self,
        settings: Sequence[Setting],
        observe: Callable[[dict[str, Any]], None],
        *,
        whole_runs: bool = True,
    ) -> dict[str, Any]:
        """Measure every setting on both caches; `observe` sees the report after each."""
        config = self.decoder.config
        report: dict[str, Any] = {
            "machine": describe_machine(self.decoder.device),
            "model": {
                "parameters": sum(p.numel() for p in self.decoder.parameters()),
                "layers": config.num_hidden_layers,
                "heads": config.num_attention_heads,
                "kv_lora_rank": config.kv_lora_rank,
                "dtype": str(self.decoder.dtype).removeprefix("torch."),
            },
            "cache_bytes": self.memory,
            "page_size": self.page_size,
            "prefill_chunk": self.prefill_chunk,
            "steady": [],
            "whole": [],
        }
        self._say_what_fits(settings)
        measurements = {"steady": self.steady} | ({"whole": self.whole} if whole_runs else {})
        for kind, measure in measurements.items():
            for setting in settings:
                for name, make in BACKENDS.items():
                    self.say(f"{kind}: context {setting.context}, {name} cache")
                    try:
                        row = measure(make(), setting)
                    except (torch.OutOfMemoryError, ValueError) as error:
                        row = {"failure": one_line(error)}
                    report[kind].append(
                        {"cache": name, "context": setting.context, "most": setting.most} | row
                    )
                    gc.collect()
                    if self.decoder.device.type == "cuda":
                        torch.cuda.empty_cache()
                    observe(report)
        return report

    def _say_what_fits(self, settings: Sequence[Setting]) -> None:
        """Refuse a budget that holds no request, before anything is measured."""
        for setting in settings:
            self.requests_at_once(Bf16KernelBackend(), setting)

    def num_pages(self, backend: AttentionBackend) -> int:
        """Pages that the budget holds."""
        return self.memory // page_bytes(self.decoder, backend, self.page_size)

    def requests_at_once(self, backend: AttentionBackend, setting: Setting) -> int:
        """Count the requests of a setting that the budget holds, at most `most`.

        Without a limit of its own, a model with experts gets no more rows than a CUDA graph serves.
        """
        pages = self.num_pages(backend)
        fit = pages // pages_for(setting.context, self.page_size)
        if fit < 1:
            raise ValueError(
                f"the cache must hold a request of {setting.context} tokens, "
                f"{pages_for(setting.context, self.page_size)} pages; {self.memory} bytes are "
                f"{pages}. Raise --memory-gb or shorten --contexts"
            )
        if setting.most is not None:
            return min(fit, setting.most)
        captured = self.decoder.device.type == "cuda"
        by_host = captured and routes_on_the_host(self.decoder, fit)
        return BATCHED_EXPERTS_MAX_ROWS if by_host else fit

    def steady(self, backend: AttentionBackend, setting: Setting) -> dict[str, Any]:
        """Time decode steps with every row live."""
        decoder, device = self.decoder, self.decoder.device
        rows = self.requests_at_once(backend, setting)
        context = setting.context
        loop = DecodeLoop(decoder, backend, batch=rows, context=context, page_size=self.page_size)
        obstacle = graph_obstacle(decoder, backend, rows)
        step = DecodeStep(
            decoder,
            backend,
            loop.cache,
            rows=[rows],
            max_pages=loop.block_table.shape[1],
            capture=CudaGraphCapture(device) if obstacle is None else None,
        )
        table = loop.block_table.tolist()
        tokens: list[int] = loop.token_ids.tolist()
        steps = min(self.steps + WARM_UP_STEPS, context)
        times = []
        for position in range(context - steps, context):
            started = time.perf_counter()
            live = {
                row: DecodeRow(token, position, pages)
                for row, (token, pages) in enumerate(zip(tokens, table, strict=True))
            }
            tokens = step.run(live).argmax(dim=-1).tolist()  # tolist waits for the device
            times.append((time.perf_counter() - started) * 1e3)
        timed = times[WARM_UP_STEPS:] or times
        milliseconds = statistics.median(timed)
        return {
            "running": rows,
            "cache_tokens": self.num_pages(backend) * self.page_size,
            "ms_per_step": milliseconds,
            "quartiles_ms": statistics.quantiles(timed, n=4, method="inclusive")[::2]
            if len(timed) > 1
            else timed * 2,
            "tokens_per_second": rows / milliseconds * 1e3,
            "decode": "graph" if obstacle is None else "eager",
            "why_eager": obstacle,
        }

    def whole(self, backend: AttentionBackend, setting: Setting) -> dict[str, Any]:
        """Run random prompts from submission to their last token."""
        decoder = self.decoder
        submitted = 2 * self.requests_at_once(Bf16KernelBackend(), setting)
        rows = min(self.requests_at_once(backend, setting), submitted)
        engine = Engine(
            decoder,
            backend,
            num_pages=self.num_pages(backend),
            page_size=self.page_size,
            max_running=rows,
            prefill_chunk=self.prefill_chunk,
            max_context=setting.context,
        )
        stream = torch.Generator().manual_seed(0)
        prompts = torch.randint(
            decoder.config.vocab_size,
            (submitted, setting.context - setting.new_tokens),
            generator=stream,
        ).tolist()
        params = SamplingParams(max_new_tokens=setting.new_tokens)
        started = time.perf_counter()
        requests = [engine.submit(prompt, params) for prompt in prompts]
        most = 0
        while not engine.idle:
            engine.step()
            most = max(most, engine.stats.running)
        seconds = time.perf_counter() - started
        failed = [request.error for request in requests if request.finish_reason == "error"]
        if failed:
            raise ValueError(f"{len(failed)} of {submitted} requests failed: {failed[0]}")
        stats = engine.stats
        times = stats.times
        generated = sum(len(request.token_ids) for request in requests)
        return {
            "running": most,
            "requests": submitted,
            "generated_tokens": generated,
            "seconds": seconds,
            "tokens_per_second": generated / seconds,
            "prefill_seconds": times.prefill_seconds,
            "decode_seconds": times.decode_seconds,
            "decode_steps": times.decode_steps,
            "ms_per_step": times.decode_seconds / max(times.decode_steps, 1) * 1e3,
            "decode": "graph" if stats.graph_replays else "eager",
            "why_eager": engine.graph_obstacle,
        }

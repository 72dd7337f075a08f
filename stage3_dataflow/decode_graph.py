"""One decode step on a fixed number of rows, run eagerly or replayed as a CUDA graph.

A decode step launches a few dozen small kernels a layer. On a fast GPU the host needs longer to
launch them than the device to run them; a CUDA graph launches all of them at once. What a graph
replays is fixed: kernels, shapes and addresses. So everything that changes from step to step lives
in five input buffers that are allocated once, and is read there, on the device:

===============  ====================  =====================================  ================
buffer           shape and dtype       meaning                                unused row
===============  ====================  =====================================  ================
token_ids        int64 [rows]          newest token of each row               0
positions        int64 [rows]          its place in its request               0
slot_mapping     int64 [rows]          where its latent goes                  -1: nowhere
block_table      int32 [rows, pages]   pages of each row, -1 behind the last  all -1
cache_seqlens    int32 [rows]          tokens of each row, the newest with    0
===============  ====================  =====================================  ================

The eager step is the same function on the same buffers, so a graph changes no bit. A step may run
on the first rows only (one graph for each number of rows that is asked for); as a matrix library
may round a row differently among another number of rows, fix one number where bits matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.attention_backend import AttentionBackend, LayerCache
from stage0_reference.decoder import CachedAttention, Decoder
from stage0_reference.mixture_of_experts import BATCHED_EXPERTS_MAX_ROWS

WARM_UP_STEPS = 3
"""Steps before a capture: kernels are compiled and libraries set up, which a graph cannot hold."""


class DecodeInputs(NamedTuple):
    """The buffers of the module's table."""

    token_ids: Int[Tensor, " rows"]
    positions: Int[Tensor, " rows"]
    slot_mapping: Int[Tensor, " rows"]
    block_table: Int[Tensor, "rows max_pages"]
    cache_seqlens: Int[Tensor, " rows"]


class DecodeRow(NamedTuple):
    """One request's part in a step: its newest token, that token's place, and all its pages."""

    token_id: int
    position: int
    pages: Sequence[int]


class CapturedStep(NamedTuple):
    """A recorded step.

    Attributes
    ----------
    replay
        Runs it again on what its input buffers hold now.
    output
        Where every replay leaves its result.
    """

    replay: Callable[[], None]
    output: Tensor


Capture = Callable[[Callable[[], Tensor]], CapturedStep]
"""Records a step that reads static buffers, without side effects of its own."""


class CudaGraphCapture:
    """Records steps as CUDA graphs.

    They share one memory pool, so replays of different graphs must not overlap in time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Tensor]) -> CapturedStep:
        """Warm up on a side stream, then record."""
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_STEPS):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=side):
                output = step()
        return CapturedStep(graph.replay, output)


def graph_obstacle(decoder: Decoder, backend: AttentionBackend, rows: int) -> str | None:
    """Say why a decode step on `rows` rows cannot be a CUDA graph; None if it can."""
    if decoder.device.type != "cuda":
        return f"the model is on {decoder.device.type}"
    if not getattr(backend, "capturable", False):
        return f"the backend of stage {backend.stage} reads lengths on the host (not capturable)"
    if routes_on_the_host(decoder, rows):
        return (
            f"{rows} rows are more than the {BATCHED_EXPERTS_MAX_ROWS} that experts compute "
            "without asking the host"
        )
    return None


def routes_on_the_host(decoder: Decoder, rows: int) -> bool:
    """Whether experts get so many rows that they compute only those routed to them.

    The host must know the routing then, and the shapes, so a row's bits, depend on it.
    """
    config = decoder.config
    has_experts = any(map(config.is_moe_layer, range(config.num_hidden_layers)))
    return has_experts and rows > BATCHED_EXPERTS_MAX_ROWS


class DecodeStep:
    """The decode step of a decoder on its cache.

    Parameters
    ----------
    decoder, backend, cache
        The model, and where and how its latents are kept.
    rows
        Numbers of rows to run on, ascending.
    max_pages
        Columns of the block table: most pages that a request can have.
    capture
        How steps are recorded; None runs them eagerly.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        cache: Sequence[LayerCache],
        *,
        rows: Sequence[int],
        max_pages: int,
        capture: Capture | None = None,
    ) -> None:
        if not rows or min(rows) < 1 or list(rows) != sorted(set(rows)):
            raise ValueError(f"rows must be ascending and at least 1; got {list(rows)}")
        self.decoder = decoder
        self.backend = backend
        self.cache = cache
        self.rows = tuple(rows)
        self.page_size = cache[0][0].shape[1]
        self.replays = 0
        most, device = self.rows[-1], decoder.device
        self._host = _padding(most, max_pages, torch.device("cpu"))
        if device.type == "cuda":  # only page-locked memory is copied while the host goes on
            self._host = DecodeInputs(*(buffer.pin_memory() for buffer in self._host))
        self._table_rows: list[list[int]] = [[] for _ in range(most)]
        self.inputs = _padding(most, max_pages, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._captured: dict[int, CapturedStep] = {}
        if capture is not None:
            # Largest first: the smaller graphs then find their memory in the shared pool. All rows
            # are padding still, so warming up writes nothing into the cache.
            for count in reversed(self.rows):
                with torch.inference_mode():
                    self._captured[count] = capture(partial(self._logits, count))

    def run(self, live: Mapping[int, DecodeRow]) -> Float[Tensor, "rows vocab_size"]:
        """Cache each live row's newest token and predict the token after it.

        Parameters
        ----------
        live
            By row. The last row that is live decides which of `rows` the step runs on.

        Returns
        -------
        Tensor
            Logits of that many rows, valid until the next call; those of unused rows mean nothing.
        """
        last = max(live, default=-1)
        if not live or min(live) < 0 or last >= self.rows[-1]:
            raise ValueError(
                f"live must name rows between 0 and {self.rows[-1] - 1}, at least one; "
                f"got {sorted(live)}"
            )
        self._fill(live)
        count = next(rows for rows in self.rows if last < rows)
        captured = self._captured.get(count)
        if captured is None:
            with torch.inference_mode():
                return self._logits(count)
        captured.replay()
        self.replays += 1
        return captured.output

    def _fill(self, live: Mapping[int, DecodeRow]) -> None:
        """Write the rows into the host's buffers and copy these to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still be reading the host's buffers
        most = self.rows[-1]
        token_ids, positions = [0] * most, [0] * most
        slots, lengths = [-1] * most, [0] * most
        table_rows: list[list[int]] = [[] for _ in range(most)]
        for row, (token_id, position, pages) in live.items():
            page, offset = pages[position // self.page_size], position % self.page_size
            token_ids[row], positions[row] = token_id, position
            slots[row], lengths[row] = page * self.page_size + offset, position + 1
            table_rows[row] = list(pages)
        host = self._host
        # Through NumPy: it writes lists into memory much faster than torch does.
        host.token_ids.numpy()[:], host.positions.numpy()[:] = token_ids, positions
        host.slot_mapping.numpy()[:], host.cache_seqlens.numpy()[:] = slots, lengths
        table = host.block_table.numpy()
        changed = [row for row in range(most) if table_rows[row] != self._table_rows[row]]
        for row in changed:
            table[row, : len(table_rows[row])] = table_rows[row]
            table[row, len(table_rows[row]) :] = -1
        self._table_rows = table_rows
        for buffer, source in zip(self.inputs, host, strict=True):
            # The table is by far the largest, and changes once a page.
            if buffer is not self.inputs.block_table or changed:
                buffer.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _logits(self, rows: int) -> Float[Tensor, "rows vocab_size"]:
        """Run the step: it reads nothing but the input buffers, the weights and the cache."""
        inputs = DecodeInputs(*(buffer[:rows] for buffer in self.inputs))
        attention = CachedAttention(
            self.backend,
            self.cache,
            query_lens=[1] * rows,
            slot_mapping=inputs.slot_mapping,
            block_table=inputs.block_table,
            cache_seqlens=inputs.cache_seqlens,
            form="absorbed",
        )
        return self.decoder(inputs.token_ids, inputs.positions, attention)


def _padding(rows: int, max_pages: int, device: torch.device) -> DecodeInputs:
    """Allocate input buffers in which every row is unused."""
    return DecodeInputs(
        token_ids=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=torch.zeros(rows, dtype=torch.int64, device=device),
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
        block_table=torch.full((rows, max_pages), -1, dtype=torch.int32, device=device),
        cache_seqlens=torch.zeros(rows, dtype=torch.int32, device=device),
    )

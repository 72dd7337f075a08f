"""Other libraries' MLA decode kernels, to be timed beside this one where they are installed.

=================  =======================================  ============================
column             from                                     cache
=================  =======================================  ============================
FlashInfer BF16    `flashinfer-python`, backend "fa3"       BF16
FlashMLA BF16      `_flashmla_C` in vLLM's wheel            BF16
FlashMLA FP8       `_flashmla_extension_C` in vLLM's wheel  e4m3, one scale for all of it
=================  =======================================  ============================

None is a dependency. One that is absent, or that fails, is a column that says so. Only the two
shared objects of vLLM's wheel are needed, in a folder ``vllm`` on the path or wherever
``--flashmla-ops`` points; vLLM itself is never imported. FlashInfer compiles its kernel when it
is first used, which takes about a minute.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from stage0_reference.latent_cache import gather_packed
from stage3_dataflow.bench_cases import (
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    SOFTMAX_SCALE,
    CacheFormat,
    Case,
    Operands,
)

WORKSPACE_BYTES = 128 * 2**20
"""FlashInfer's recommendation."""


class PeerUnavailable(Exception):
    """Why a peer does not run here."""


@dataclasses.dataclass
class BoundPeer:
    """A peer's kernel on a case.

    Attributes
    ----------
    call
        Runs it and gives out [batch, s_q, heads, kv_lora_rank].
    operands
        What it attends with, of one request.
    """

    call: Callable[[], Tensor]
    operands: Callable[[int], Operands]


class Peer(Protocol):
    """A kernel of another library."""

    name: str
    cache: CacheFormat

    def load(self) -> None:
        """Import it; raises PeerUnavailable with a reason."""
        ...

    def bind(self, case: Case) -> BoundPeer:
        """Lay the case's data out as the kernel wants it."""
        ...


class FlashInferPeer:
    """FlashInfer's BatchMLAPagedAttentionWrapper."""

    name = "FlashInfer BF16"
    cache: CacheFormat = "bf16"

    def load(self) -> None:
        """Import flashinfer.mla."""
        if importlib.util.find_spec("flashinfer") is None:
            raise PeerUnavailable("not installed")
        self._wrapper_class = importlib.import_module(
            "flashinfer.mla"
        ).BatchMLAPagedAttentionWrapper

    def bind(self, case: Case) -> BoundPeer:
        """Plan once; what is timed is the run."""
        shape, device = case.shape, case.device
        pages = torch.tensor(
            [-(-length // case.page_size) for length in shape.lengths], device=device
        )
        starts = torch.zeros(shape.batch + 1, dtype=torch.int32, device=device)
        starts[1:] = pages.cumsum(0)
        used = torch.arange(case.block_table.shape[1], device=device) < pages[:, None]
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = self._wrapper_class(workspace, backend="fa3")
        wrapper.plan(
            torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.s_q,
            starts,
            case.block_table[used],
            case.cache_seqlens,
            shape.heads,
            KV_LORA_RANK,
            QK_ROPE_HEAD_DIM,
            case.page_size,
            shape.s_q > 1,  # causal
            SOFTMAX_SCALE,
            torch.bfloat16,
            torch.bfloat16,
        )
        query = case.q_latent.flatten(0, 1), case.q_rope.flatten(0, 1)
        out = torch.empty_like(query[0])

        def call() -> Tensor:
            wrapper.run(*query, *case.bf16, out=out)
            return out.view(case.q_latent.shape)

        return BoundPeer(call, case.bf16_operands)


class FlashMlaPeer:
    """FlashMLA's dense decode kernel over a BF16 cache, as vLLM builds it."""

    name = "FlashMLA BF16"
    cache: CacheFormat = "bf16"
    library = "_flashmla_C"

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def load(self) -> None:
        """Load the shared object, which registers operators."""
        folders = [self.folder] if self.folder else _vllm_folders()
        found = [path for folder in folders for path in folder.glob(f"{self.library}*.so")]
        if not found:
            where = f"no {self.library}*.so in {self.folder}" if self.folder else "not installed"
            raise PeerUnavailable(where)
        torch.ops.load_library(str(found[0]))

    def bind(self, case: Case) -> BoundPeer:
        """Join the planes; the first call makes the schedule that later ones re-use."""
        query = torch.cat((case.q_latent, case.q_rope), dim=-1)
        plane = torch.cat(case.bf16, dim=-1)[:, :, None]  # [pages, page_size, 1, 576]
        operator = torch.ops._flashmla_C.dense_decode_fwd.default
        # Later builds take an output tensor, too.
        optional = [None] * (len(operator._schema.arguments) - 9)

        def run(schedule: Any, splits: Any) -> Any:
            return operator(
                query,
                plane,
                KV_LORA_RANK,
                case.cache_seqlens,
                case.block_table,
                SOFTMAX_SCALE,
                case.shape.s_q > 1,
                schedule,
                splits,
                *optional,
            )

        *_, schedule, splits = run(None, None)
        return BoundPeer(lambda: run(schedule, splits)[0], case.bf16_operands)


class FlashMlaFp8Peer(FlashMlaPeer):
    """vLLM's FP8 FlashMLA: query and cache in e4m3, rotary part too, one scale each."""

    name = "FlashMLA FP8"
    cache: CacheFormat = "fp8 per tensor"
    library = "_flashmla_extension_C"

    def bind(self, case: Case) -> BoundPeer:
        """Cast with scale 1, which normal values suit."""
        shape = case.shape
        operators = torch.ops._flashmla_extension_C
        query = torch.cat((case.q_latent, case.q_rope), dim=-1).to(torch.float8_e4m3fn)
        plane = torch.cat(case.bf16, dim=-1).to(torch.float8_e4m3fn)
        one = torch.ones(1, device=case.device)
        schedule, splits = operators.get_mla_decoding_metadata_dense_fp8(
            case.cache_seqlens, shape.s_q * shape.heads, 1
        )

        def call() -> Tensor:
            out: Tensor = operators.fwd_kvcache_mla_fp8(
                query,
                plane[:, :, None],
                KV_LORA_RANK,
                case.cache_seqlens,
                case.block_table,
                SOFTMAX_SCALE,
                shape.s_q > 1,
                schedule,
                splits,
                one,
                one,
            )[0]
            return out

        def operands(request: int) -> Operands:
            table = case.block_table[request : request + 1]
            (rows,) = gather_packed([plane], table, [shape.lengths[request]])
            parts = query[request].double(), rows.double()
            widths = KV_LORA_RANK, QK_ROPE_HEAD_DIM
            return Operands(*(half for part in parts for half in part.split(widths, dim=-1)))

        return BoundPeer(call, operands)


def _vllm_folders() -> list[Path]:
    """Where a package named vllm lies, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    return [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]


def all_peers(flashmla_folder: Path | None = None) -> list[Peer]:
    """Every peer, in the order of the columns."""
    return [FlashInferPeer(), FlashMlaPeer(flashmla_folder), FlashMlaFp8Peer(flashmla_folder)]


def load_peers(peers: list[Peer], device: torch.device) -> dict[str, str]:
    """Load what can be loaded.

    Returns
    -------
    dict
        By name: "ready", or why it is not.
    """
    if device.type != "cuda":
        return {peer.name: "needs a CUDA device" for peer in peers}
    status = {}
    for peer in peers:
        try:
            peer.load()
            status[peer.name] = "ready"
        except PeerUnavailable as error:
            status[peer.name] = str(error)
        except Exception as error:  # whatever another library does wrong is not this one's end
            status[peer.name] = one_line(error)
    return status


def one_line(error: BaseException) -> str:
    """Name an error and what it says, short enough for a table's footnote."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else text[:197] + "..."


class PeerWarmUp:
    """Runs each loaded peer once on a small case, in a thread, so that it compiles meanwhile.

    Parameters
    ----------
    peers
        Loaded ones.
    case
        On the device; nobody else uses it.
    """

    def __init__(self, peers: list[Peer], case: Case) -> None:
        self.failures: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, args=(peers, case), daemon=True)
        self._thread.start()

    def _run(self, peers: list[Peer], case: Case) -> None:
        for peer in peers:
            try:
                peer.bind(case).call()
                torch.cuda.synchronize(case.device)
            except Exception as error:
                self.failures[peer.name] = one_line(error)

    def wait(self) -> dict[str, str]:
        """Wait for all of them; give the failures by name."""
        self._thread.join()
        return self.failures

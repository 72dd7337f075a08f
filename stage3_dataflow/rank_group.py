"""Several processes as one: what ranks tell each other, and what happens when one fails.

Ranks are driven alike: each runs the same program on the same requests, and they meet in `gather`,
the one operation that tensor and context parallelism are built from. Every rank leaves a gather
with the same bytes and computes on with the same instructions, so what should be equal on all ranks
(the latent cache, logits, chosen tokens) is equal bit by bit, and nobody has to broadcast it. An
all-reduce would move fewer bytes from three ranks on (2 (R - 1) / R messages against R - 1), but
leaves the order of its sum, and so its bits, to the library and the message's size; a decode step's
messages are small enough for latency to decide, and a gather has one phase where it has two.

What it leaves out: gradients, ranks that differ in hardware, and ranks that join or leave.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

# Before there is a group: its functions hold the group, as a default argument, that there is when
# they are first imported, and parts of torch import it on demand. A group that is held so outlives
# `destroy_process_group`, its threads with it; one that still has a finished gather's tensors while
# the interpreter ends aborts the process (https://github.com/pytorch/pytorch/pull/179291).
import torch.distributed.nn.functional  # noqa: F401
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from stage0_reference.decoder import Decoder
from stage0_reference.latent_attention import accumulation_dtype

Result = TypeVar("Result")

# Newer versions of torch have it under another name, and warn of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@runtime_checkable
class Ranks(Protocol):
    """One rank's view of the group.

    Attributes
    ----------
    rank, size
        Which of how many this is.
    device
        Where tensors have to be for `gather`.
    """

    rank: int
    size: int
    device: torch.device

    def gather(self, tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "ranks ..."]:
        """Give every rank's tensor to all of them; shapes and dtypes agree."""
        ...


class ProcessRanks:
    """Ranks that are processes of `torch.distributed`.

    Parameters
    ----------
    device
        This rank's.
    group
        Its process group; default: the one that `init_process_group` made.
    """

    def __init__(self, device: torch.device | str, group: Any = None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = torch.device(device)
        self.group = group
        # Gloo moves host memory only. It serves GPUs too, slowly: NCCL wants one for each rank.
        self._through_host = self.device.type != "cpu" and dist.get_backend(group) == "gloo"

    def gather(self, tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "ranks ..."]:
        """Give every rank's tensor to all of them."""
        sent = tensor.contiguous().reshape(-1).view(torch.uint8)  # bytes: any dtype, unchanged
        if self._through_host:
            sent = sent.cpu()
        received = torch.empty(self.size * sent.numel(), dtype=torch.uint8, device=sent.device)
        if sent.numel():
            _all_gather(received, sent, group=self.group)
        return received.to(tensor.device).view(tensor.dtype).view(self.size, *tensor.shape)


@contextlib.contextmanager
def connected(
    device: torch.device | str | None = None,
    *,
    init_method: str = "env://",
    rank: int | None = None,
    size: int | None = None,
    timeout_seconds: float = 300.0,
) -> Iterator[ProcessRanks]:
    """Join the group, and leave it at the end; a rank that fails names itself on stderr.

    Parameters
    ----------
    device
        This rank's; default: the GPU of its number on this host if there is one for each rank,
        else the CPU. NCCL connects GPUs that are each rank's own, Gloo everything else.
    init_method, rank, size
        As `torch.distributed.init_process_group`; the defaults are torchrun's environment.
    timeout_seconds
        After so long without the others a rank fails instead of waiting on.

    Notes
    -----
    Whoever started the ranks ends the others when one exits in failure: torchrun does, and so does
    `torch.multiprocessing.spawn`. The group is not taken down then, which would wait for them.
    """
    rank = int(os.environ.get("RANK", 0)) if rank is None else rank
    size = int(os.environ.get("WORLD_SIZE", 1)) if size is None else size
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    own_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    if device is None:
        device = f"cuda:{local_rank}" if own_gpus else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    through_nccl = own_gpus and device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if through_nccl else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            device_id=device if through_nccl else None,
        )
        yield ProcessRanks(device)
    except BaseException as error:
        text = " ".join(str(error).split())
        sys.stderr.write(f"rank {rank} of {size} failed: {type(error).__name__}: {text}\n")
        sys.stderr.flush()
        raise
    dist.destroy_process_group()


def sum_over_ranks(ranks: Ranks, partial: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Add up the ranks' partial sums in the order of ranks, in float32 (float64 if they are).

    The result is rounded to the partial sums' dtype once, and has the same bits on every rank.
    """
    if ranks.size == 1:
        return partial
    parts = ranks.gather(partial)  # [ranks, *shape]
    total = parts[0].to(accumulation_dtype(partial.dtype))
    for part in parts[1:]:
        total = total + part
    return total.to(partial.dtype)


def gather_text(ranks: Ranks, text: str) -> list[str]:
    """Give every rank's text to all of them."""
    encoded = list(text.encode())
    lengths = ranks.gather(torch.tensor([len(encoded)], device=ranks.device)).flatten().tolist()
    padded = encoded + [0] * (max(lengths) - len(encoded))
    rows = ranks.gather(torch.tensor(padded, dtype=torch.uint8, device=ranks.device)).tolist()
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def require_same(ranks: Ranks, values: Mapping[str, Any]) -> None:
    """Refuse, on all ranks alike, named values that are not equal everywhere.

    Raises
    ------
    ValueError
        With the first name that differs, the value of rank 0 and that of a rank that differs.
    """
    mine = json.dumps({name: repr(value) for name, value in values.items()})
    first, *others = map(json.loads, gather_text(ranks, mine))
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"{name} must be the same on all ranks; got {first.get(name)} on rank 0 and "
                    f"{other.get(name)} on rank {rank}"
                )


def together(ranks: Ranks, what: str, action: Callable[[], Result]) -> Result:
    """Do something on every rank that may fail on any; if it does, all ranks raise.

    Raises
    ------
    Exception
        This rank's own error.
    RuntimeError
        Another rank's, with its number and text. `what` says what was being done.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    texts = gather_text(ranks, "" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise RuntimeError(f"rank {rank} of {ranks.size} failed in {what}: {text}")
    return result


def same_bytes(ranks: Ranks, tensors: Iterable[Tensor]) -> bool:
    """Whether the tensors hold the same bytes on all ranks. Reads them on the host."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return len(set(gather_text(ranks, digest.hexdigest()))) == 1


class StepGuard:
    """Keeps a rank that fell out of a step from meeting the others in the next one.

    Gathers are matched by their order. A rank that catches an error between two of them and goes on
    (an engine does, to fail one request only) would meet the others' pending gather with a later
    one of its own, of the same shape, and all ranks would compute on with mixed-up numbers. So
    after a step that began and did not end this rank refuses to take part in another.

    Parameters
    ----------
    decoder
        Its forward passes are the steps: from the first layer to the final norm.
    """

    def __init__(self, decoder: Decoder, ranks: Ranks) -> None:
        self.ranks = ranks
        self.inside = False
        decoder.model.layers[0].register_forward_pre_hook(self._enter)
        decoder.model.norm.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if self.inside:
            raise RuntimeError(
                f"rank {self.ranks.rank} of {self.ranks.size} left a step unfinished, in which the "
                "other ranks may still wait. End all ranks and start them again"
            )
        self.inside = True

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.inside = False

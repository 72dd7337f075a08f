"""Tensor parallelism: a decoder's heads, inner widths and experts spread over ranks.

    torchrun --nproc-per-node 2 -m stage3_dataflow.parallel_demo tensor 'def main():'

======================================  =======================  ================================
weights                                 each rank holds          its output is
======================================  =======================  ================================
q_proj or q_b_proj, kv_b_proj           its heads' rows          its heads' queries; W_UK, W_UV
o_proj                                  its heads' columns       a partial sum, added up
gate_proj, up_proj of an MLP            rows of its inner share  its share
down_proj of an MLP                     the columns that fit     a partial sum, added up
routed experts                          some, whole              their part of the mixture's sum
everything else                         all of it                the same on all ranks
======================================  =======================  ================================

**The latent cache is not split.** All heads share one latent and one rotary key a token, so there
is no head axis to cut: every rank computes c_kv and k_rope itself, from weights that it has whole,
and caches the same bytes under the same page ids. What halves with two ranks is the heads that read
it. (Splitting the cache itself is `context_parallel.py`'s.) Keeping bytes equal asks for hidden
states that are equal, bit by bit: `rank_group.sum_over_ranks`.

An attention adds up once, and so does a feed-forward layer: routed and shared experts are partial
sums of one gather. Against one rank only the order of these sums changes, and a matrix library may
round a narrower product differently; nothing else does.

What it leaves out: embedding and head, which every rank has whole; and splitting a head.

References
----------
Megatron-LM (arXiv 1909.08053), section 3, for columns-then-rows; DeepSeek-V3 ``inference/model.py``
for latent attention.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stage0_reference.checkpoint import LoadReport, load_safetensors
from stage0_reference.decoder import Decoder, MultiHeadLatentAttention
from stage0_reference.families.stacked_experts import StackedExperts
from stage0_reference.mixture_of_experts import Experts, GatedMLP, MixtureOfExperts
from stage0_reference.model_config import ModelConfig
from stage0_reference.pretrained import default_dtype, unused_tensors
from stage3_dataflow.rank_group import Ranks, StepGuard, require_same, sum_over_ranks, together


class Part(NamedTuple):
    """What a rank holds of one of a checkpoint's tensors.

    Attributes
    ----------
    tensor
        A parameter, or a view of one.
    place
        Where in the whole tensor it is: ``whole[place]``. Empty where it is all of it.
    """

    tensor: Tensor
    place: tuple[slice, ...]


def share_of(total: int, ranks: Ranks) -> slice:
    """Which of `total` things in a row are this rank's: as equal shares as there can be."""
    return slice(total * ranks.rank // ranks.size, total * (ranks.rank + 1) // ranks.size)


class _ExpertShare(Experts):
    """Some of a layer's routed experts; shares are still given for all of them."""

    held = slice(0)
    ranks: Ranks
    adds_up = False
    """Whether the sum over ranks is taken here, rather than by the layer around."""

    def weighted_sum(
        self, hidden: Float[Tensor, "tokens hidden"], share: Float[Tensor, "tokens experts"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Sum the outputs of the experts held here, each times its share in the token."""
        partial = super().weighted_sum(hidden, share[:, self.held])
        return sum_over_ranks(self.ranks, partial) if self.adds_up else partial


class _StackedExpertShare(_ExpertShare, StackedExperts):
    """The same of experts that a checkpoint stacks."""


_SHARES: dict[type[Experts], type[_ExpertShare]] = {
    Experts: _ExpertShare,
    StackedExperts: _StackedExpertShare,
}


class TensorParallelDecoder(Decoder):
    """One rank's share of a decoder. Fill it by `load_tensor_parallel` or `copy_from`.

    It runs wherever a `Decoder` does, on every rank alike: same calls, same requests. Its `config`
    counts the heads on this rank.

    Parameters
    ----------
    config
        The whole model's numbers.
    ranks
        Who holds the others.
    dtype, device
        As `Decoder`; the device is the ranks' unless given. Parameters are allocated, not drawn.

    Raises
    ------
    ValueError
        Heads that do not divide among the ranks, or a configuration, dtype or version of torch
        that is not the same on all ranks.
    NotImplementedError
        A model type with experts of its own making.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        require_same(
            ranks, dataclasses.asdict(config) | {"dtype": dtype, "torch": torch.__version__}
        )
        check_heads(config, ranks.size)
        super().__init__(config, dtype=dtype, device="meta")
        self.ranks = ranks
        self.whole_config = config
        self.config = dataclasses.replace(
            config, num_attention_heads=config.num_attention_heads // ranks.size
        )
        self._whole_shapes = {
            name: tensor.shape for name, tensor in super().checkpoint_tensors().items()
        }
        self._places: dict[str, tuple[slice, ...]] = {}
        for name, module in list(self.named_modules()):
            self._split(name, module)
        self.to_empty(device=ranks.device if device is None else device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.eval().requires_grad_(False)
        self.step_guard = StepGuard(self, ranks)

    def parts(self) -> dict[str, Part]:
        """Everything this rank holds, under the names in a checkpoint."""
        parts = {}
        for name, parameter in self.named_parameters():
            stem, projection = name.rsplit(".", 1)
            owner = self.get_submodule(stem)
            if isinstance(owner, _ExpertShare) and not owner.is_stacked_in_checkpoint:
                for expert, weight in enumerate(parameter, start=owner.held.start):
                    parts[f"{stem}.{expert}.{projection}.weight"] = Part(weight, ())
            else:
                parts[name] = Part(parameter, self._places.get(name, ()))
        return parts

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """As `parts`, without saying which part of the checkpoint's tensor each one is."""
        return {name: part.tensor for name, part in self.parts().items()}

    def whole_shape(self, name: str) -> torch.Size | None:
        """Shape of a checkpoint's tensor; None if the model has none of that name."""
        return self._whole_shapes.get(name)

    @torch.no_grad()
    def copy_from(self, decoder: Decoder) -> TensorParallelDecoder:
        """Take this rank's share out of a whole decoder, which may be let go then."""
        whole = decoder.checkpoint_tensors()
        for name, part in self.parts().items():
            part.tensor.copy_(whole[name][part.place])
        return self

    # What is split how: see the module's table

    def _split(self, name: str, module: nn.Module) -> None:
        config, ranks = self.whole_config, self.ranks
        parent = self.get_submodule(name.rpartition(".")[0])
        in_mixture = type(parent) is MixtureOfExperts  # which adds up for all that it holds
        if isinstance(module, MultiHeadLatentAttention):
            heads = share_of(config.num_attention_heads, ranks)
            module.config = self.config
            query = "q_proj" if config.q_lora_rank is None else "q_b_proj"
            self._keep_rows(f"{name}.{query}", _widened(heads, config.qk_head_dim))
            expanded = config.qk_nope_head_dim + config.v_head_dim
            self._keep_rows(f"{name}.kv_b_proj", _widened(heads, expanded))
            self._keep_columns(f"{name}.o_proj", _widened(heads, config.v_head_dim))
            module.o_proj.register_forward_hook(self._add_up)
        elif isinstance(module, GatedMLP):
            inner = share_of(module.down_proj.in_features, ranks)
            self._keep_rows(f"{name}.gate_proj", inner)
            self._keep_rows(f"{name}.up_proj", inner)
            self._keep_columns(f"{name}.down_proj", inner)
            if not in_mixture:
                module.register_forward_hook(self._add_up)
        elif isinstance(module, Experts):
            self._keep_experts(name, module, adds_up=not in_mixture)
        elif type(module) is MixtureOfExperts:
            module.register_forward_hook(self._add_up)

    def _add_up(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        """Forward hook of a module whose output is a partial sum."""
        return sum_over_ranks(self.ranks, output)

    def _keep(self, name: str, place: tuple[slice, ...]) -> None:
        stem, own_name = name.rsplit(".", 1)
        owner = self.get_submodule(stem)
        whole = getattr(owner, own_name)
        setattr(owner, own_name, nn.Parameter(whole[place], requires_grad=False))
        self._places[name] = place

    def _keep_rows(self, name: str, rows: slice) -> None:
        """Keep some outputs of a linear layer."""
        linear = self.get_submodule(name)
        self._keep(f"{name}.weight", (rows,))
        if linear.bias is not None:
            self._keep(f"{name}.bias", (rows,))
        linear.out_features = rows.stop - rows.start

    def _keep_columns(self, name: str, columns: slice) -> None:
        """Keep some inputs of a linear layer. Its bias must be added once: the first rank does."""
        linear = self.get_submodule(name)
        self._keep(f"{name}.weight", (slice(None), columns))
        if self.ranks.rank > 0:
            linear.register_parameter("bias", None)
        linear.in_features = columns.stop - columns.start

    def _keep_experts(self, name: str, experts: Experts, *, adds_up: bool) -> None:
        kind = _SHARES.get(type(experts))
        if kind is None:
            raise NotImplementedError(
                f"{type(experts).__name__} of {self.whole_config.model_type} cannot be split over "
                f"ranks; supported: {', '.join(known.__name__ for known in _SHARES)}"
            )
        with torch.device("meta"):
            share = kind(self.whole_config).to(next(experts.parameters()).dtype)
        share.held = share_of(experts.num_experts, self.ranks)
        share.ranks, share.adds_up = self.ranks, adds_up
        parent, own_name = name.rsplit(".", 1)
        setattr(self.get_submodule(parent), own_name, share)
        for parameter_name, _ in list(share.named_parameters()):
            self._keep(f"{name}.{parameter_name}", (share.held,))


def check_heads(config: ModelConfig, size: int) -> None:
    """Refuse heads that do not divide among the ranks."""
    heads = config.num_attention_heads
    if heads % size:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            "num_attention_heads must be divisible by the number of ranks, each of which has as "
            f"many whole heads as the others; got {heads} heads on {size} ranks. "
            f"Numbers of ranks that divide {heads}: {fits}"
        )


def load_tensor_parallel(
    directory: str | Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> TensorParallelDecoder:
    """Build this rank's share of a decoder and fill it from a checkpoint.

    A rank reads through the files' memory map: experts of other ranks not at all, of a split weight
    its rows or columns. (A weight in block-scaled FP8 is multiplied out whole, one at a time.)

    Parameters
    ----------
    directory, dtype, progress
        As `stage0_reference.pretrained.load_decoder`.
    device
        Where the parameters live; default: the ranks' device.

    Raises
    ------
    Exception
        As `load_decoder` and `TensorParallelDecoder`. A checkpoint that one rank cannot load is
        an error on all of them.
    """
    config = together(ranks, "reading config.json", lambda: ModelConfig.from_directory(directory))
    device = ranks.device if device is None else device
    dtype = default_dtype(device) if dtype is None else dtype
    decoder = TensorParallelDecoder(config, ranks, dtype=dtype, device=device)
    is_unused = unused_tensors(config)
    destinations: dict[str, Tensor] = {}
    for name, part in decoder.parts().items():
        shape = decoder.whole_shape(name)
        assert shape is not None
        destinations[name] = _PartOfWhole(part, shape) if part.place else part.tensor

    def is_elsewhere(name: str) -> bool:  # asked of names without a destination
        return decoder.whole_shape(name) is not None or is_unused(name)

    def load() -> LoadReport:
        return load_safetensors(directory, destinations, ignore=is_elsewhere, progress=progress)

    together(ranks, "loading the checkpoint", load)
    return decoder


class _PartOfWhole(Tensor):
    """A destination with the whole tensor's shape that keeps a part of what is copied into it.

    It has no memory of its own. Slicing the source comes before any copy, so of a memory-mapped
    source only that slice is read.
    """

    part: Part

    @staticmethod
    def __new__(cls, part: Part, shape: torch.Size) -> _PartOfWhole:
        whole: _PartOfWhole = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.tensor.dtype, device=part.tensor.device
        )
        whole.part = part
        return whole

    def __init__(self, part: Part, shape: torch.Size) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub forgets `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if func is not torch.ops.aten.copy_.default:
            raise NotImplementedError(f"{func} of a tensor that is only there to be copied into")
        whole, source = args[:2]
        whole.part.tensor.copy_(source[whole.part.place])
        return whole


def _widened(heads: slice, width: int) -> slice:
    """Rows or columns of some heads, each `width` wide."""
    return slice(heads.start * width, heads.stop * width)

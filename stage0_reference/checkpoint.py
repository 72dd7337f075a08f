"""Read a Hugging Face checkpoint into tensors that already exist.

A model of this family is hundreds of gigabytes; to hold it twice, once as read and once as
parameters, is the difference between a machine that can run it and one that cannot. So the decoder
allocates its parameters once, where and how it wants them, and this module copies into them: shard
by shard through a memory map, tensor by tensor, converting the dtype in the copy. What it needs
beside the parameters is about one tensor; the map's pages belong to the operating system, which
drops them when it wants them back. `save_safetensors` writes the same layout.

Nothing here knows what a layer is. The caller hands over a mapping from the checkpoint's names to
tensors or views (a stack of experts gives one view per expert), and everything that does not fit is
found from the files' headers *before* the first copy, and reported in one `CheckpointError`: one
look at what is wrong with a download is cheaper than twenty.

One quantised format is read, the block-scaled FP8 of DeepSeek-V3: a weight `X.weight` in e4m3 with
a companion `X.weight_scale_inv`, one float for every 128 x 128 block. It is multiplied out on the
way in, so that whoever slices W_UK and W_UV from `kv_b_proj` never sees codes. Every other
quantised format is refused by its name. Left out: pickled files and GGUF. To read only a rank's
slices of a file's tensors is a matter of the destinations (`stage3_dataflow.tensor_parallel`).
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float8e4m3fn, Float32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from stage0_reference.hub_files import CONFIG_FILE, how_to_mend, read_json_object

__all__ = [
    "CheckpointError",
    "LoadReport",
    "MisShaped",
    "dequantize_block_fp8",
    "load_safetensors",
    "save_safetensors",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
DEFAULT_BLOCK = (128, 128)

_FP8 = "F8_E4M3"
_PLAIN = ("F64", "F32", "F16", "BF16")
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, _FP8: 1}
_SCALE_DTYPES = ("F32", "F16", "BF16")  # all exact in the float32 in which the scale is applied
_DESTINATION_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SUPPORTED = (
    "F64, F32, F16 and BF16, or F8_E4M3 with a block scale beside it (X.weight, X.weight_scale_inv)"
)
_MAX_LISTED = 20
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class MisShaped(NamedTuple):
    """A tensor whose shape in the checkpoint is not the shape of its destination.

    Attributes
    ----------
    name
        The tensor's name in the checkpoint.
    expected
        Shape of the destination.
    got
        Shape in the checkpoint.
    file
        Where in the directory it is.
    """

    name: str
    expected: tuple[int, ...]
    got: tuple[int, ...]
    file: str

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.name}: expected {list(self.expected)}, got {list(self.got)} in {self.file}"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, with every reason at once; nothing has been written.

    The message lists at most 20 entries of a kind; the attributes hold all of them.

    Attributes
    ----------
    summary
        One line: of each kind how many there are, the first and the remedy.
    files
        Files that are missing, truncated or corrupt, or a directory without weights: a line each.
    index
        Where ``model.safetensors.index.json`` and the shards disagree: a line each.
    quantization
        Formats that cannot be read, FP8 weights and scales that do not fit together: a line each.
    missing
        Names that have a destination and are not in the checkpoint.
    unexpected
        Names in the checkpoint that have no destination and are not ignored.
    mis_shaped
        Tensors of another shape than their destination.
    destinations
        Destinations that cannot be copied into: a line each.
    """

    def __init__(
        self,
        message: str,
        *,
        summary: str = "",
        files: Sequence[str] = (),
        index: Sequence[str] = (),
        quantization: Sequence[str] = (),
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mis_shaped: Sequence[MisShaped] = (),
        destinations: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.summary = summary
        self.files = tuple(files)
        self.index = tuple(index)
        self.quantization = tuple(quantization)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mis_shaped = tuple(mis_shaped)
        self.destinations = tuple(destinations)


@dataclass(frozen=True)
class LoadReport:
    """What `load_safetensors` did.

    Attributes
    ----------
    num_tensors
        Destinations written; every destination is, or the load is refused.
    num_bytes
        Bytes of the checkpoint that were copied, scales included.
    num_shards
        Files that were read from.
    dequantized
        Names of the FP8 weights that were multiplied out.
    ignored
        Names in the checkpoint that have no destination and that ``ignore`` accepted.
    """

    num_tensors: int
    num_bytes: int
    num_shards: int
    dequantized: tuple[str, ...]
    ignored: tuple[str, ...]


def dequantize_block_fp8(
    weight: Float8e4m3fn[Tensor, "rows cols"],
    scale: Float32[Tensor, "row_blocks col_blocks"],
    block: tuple[int, int] = DEFAULT_BLOCK,
) -> Float32[Tensor, "rows cols"]:
    """Multiply an FP8 weight by the scale of the block that each element lies in.

    Parameters
    ----------
    weight
        The codes. Neither side need be a multiple of the block: the last blocks are cut short.
    scale
        One factor per block, ``ceil(rows / block[0])`` by ``ceil(cols / block[1])``. Checkpoints
        call it ``weight_scale_inv``, being the inverse of what their quantiser multiplied by; to
        dequantise, it multiplies.
    block
        Rows and columns of a block.

    Returns
    -------
    Tensor
        ``weight * scale``, each element rounded once, on the weight's device.

    Raises
    ------
    TypeError
        ``weight`` is not float8_e4m3fn, or ``scale`` not float32.
    ValueError
        The shapes do not belong together.

    Notes
    -----
    The loop that it equals::

        for row in range(rows):
            for col in range(cols):
                out[row, col] = float32(weight[row, col]) * scale[row // block[0], col // block[1]]
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"weight must be float8_e4m3fn; got {weight.dtype}")
    if scale.dtype != torch.float32:
        raise TypeError(f"scale must be float32; got {scale.dtype}. Use scale.float()")
    if weight.ndim != 2:
        raise ValueError(f"weight must be [rows, cols]; got {list(weight.shape)}")
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"block must be two positive sizes; got {block}")
    expected = _scale_shape(tuple(weight.shape), block)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scale must be [ceil(rows / {block[0]}), ceil(cols / {block[1]})] = {list(expected)} "
            f"for a weight {list(weight.shape)}; got {list(scale.shape)}"
        )

    rows, cols = weight.shape
    num_whole = rows // block[0]
    end_of_whole = num_whole * block[0]
    # Stretched along the columns only: a scale for every element would be a second weight.
    scale_rows = scale.repeat_interleave(block[1], dim=1)[:, :cols]  # [row_blocks, cols]
    values = weight.to(torch.float32)  # [rows, cols] f32
    values[:end_of_whole].view(num_whole, block[0], cols).mul_(scale_rows[:num_whole, None])
    values[end_of_whole:].mul_(scale_rows[num_whole:])
    return values


@torch.no_grad()
def load_safetensors(
    directory: str | Path,
    destinations: Mapping[str, Tensor],
    *,
    ignore: Callable[[str], bool] | Sequence[str] = (),
    progress: bool = False,
) -> LoadReport:
    """Copy a checkpoint into tensors that exist, all of it or nothing.

    Parameters
    ----------
    directory
        Holds ``model.safetensors``, or shards and ``model.safetensors.index.json``. The block size
        of FP8 scales is taken from its ``config.json``, 128 x 128 if that does not say.
    destinations
        Checkpoint name to the tensor or view that receives it, in the checkpoint's shape. Any
        device; float64, float32, float16 or bfloat16, whichever the checkpoint has.
    ignore
        Which names without a destination are no mistake: a predicate, or shell-style patterns
        (``"model.layers.61.*"``). Shards that hold only such names need not exist. A scale is
        ignored with its weight. A name that has a destination is loaded, ignored or not.
    progress
        Show a bar, in bytes, on stderr if that is a terminal.

    Returns
    -------
    LoadReport
        Counts, and the names that were dequantised or ignored.

    Raises
    ------
    CheckpointError
        With everything that is wrong; no destination has been touched.
    TypeError
        ``ignore`` is one string.

    Notes
    -----
    The index is the table of contents. Where two shards hold one name, the one that the index
    points at is read. A name that a shard holds and the index does not list is fine if it is
    ignored; it is refused as unexpected if nobody wants it, and as a fault of the index if it has a
    destination: an index that does not know its shards comes from a mixed-up copy, and loading
    around it would hide that.
    """
    directory = Path(directory)
    found = _Findings()
    is_ignored = _as_predicate(ignore)
    block = _read_block_size(directory, found)
    contents = _read_contents(directory, destinations, is_ignored, found)
    _check_against(contents, destinations, is_ignored, block, found)
    found.raise_if_any(directory)

    by_shard: dict[str, list[str]] = {}
    for name in destinations:
        by_shard.setdefault(contents.tensors[name].shard, []).append(name)

    dequantized: list[str] = []
    total = sum(contents.num_bytes(name) for name in destinations)
    hidden = None if progress else True  # None: unless stderr is a terminal
    with tqdm(total=total, unit="B", unit_scale=True, desc="checkpoint", disable=hidden) as bar:
        for shard, names in by_shard.items():
            with safe_open(directory / shard, framework="pt") as file:
                # In the order of the bytes on the disk, which the system then reads ahead of us.
                position = {name: i for i, name in enumerate(file.offset_keys())}
                for name in sorted(names, key=position.__getitem__):
                    destination = destinations[name]
                    if contents.tensors[name].dtype == _FP8:
                        scale = _read_scale(directory, shard, file, name, contents)
                        # Multiplied out where it will live: one byte per element crosses, not four.
                        destination.copy_(
                            dequantize_block_fp8(
                                file.get_tensor(name).to(destination.device),
                                scale.to(device=destination.device, dtype=torch.float32),
                                block,
                            )
                        )
                        dequantized.append(name)
                    else:
                        destination.copy_(file.get_tensor(name))
                    bar.update(contents.num_bytes(name))

    return LoadReport(
        num_tensors=len(destinations),
        num_bytes=total,
        num_shards=len(by_shard),
        dequantized=tuple(dequantized),
        ignored=tuple(contents.ignored),
    )


def _read_scale(
    directory: Path, shard: str, file: Any, weight_name: str, contents: _Contents
) -> Tensor:
    """Read a weight's scale, which may have been packed into another shard than the weight."""
    scale_name = weight_name + SCALE_SUFFIX
    scale_shard = contents.tensors[scale_name].shard
    scale: Tensor
    if scale_shard == shard:
        scale = file.get_tensor(scale_name)
    else:
        with safe_open(directory / scale_shard, framework="pt") as other:
            scale = other.get_tensor(scale_name)
    return scale


def save_safetensors(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint that `load_safetensors`, and the hub's own tools, can read.

    Parameters
    ----------
    directory
        Made if it is not there. A checkpoint already in it is replaced, with all its shards.
    tensors
        Name to tensor, of any device and strides. Tensors that share memory are written once each.
    max_shard_bytes
        Start a new shard rather than go beyond it (a tensor that is larger by itself gets its own);
        None writes one file. Tensors that are not contiguous on the CPU are copied there, a shard
        at a time.
    metadata
        Strings for the files' headers, beside ``format: pt``, which the hub's loaders ask for.

    Raises
    ------
    ValueError
        There is nothing to write, a tensor is on the meta device, or ``max_shard_bytes`` is not
        positive.
    TypeError
        ``metadata`` has something other than strings.

    Notes
    -----
    Everything is written in a directory beside its place and renamed at the end: a full disk, or a
    type that cannot be stored, leaves the earlier checkpoint as it was. Where several files have to
    be exchanged, the earlier entry point (the index, or the single file) goes first and the new one
    comes last, so a process killed in between leaves a directory that `load_safetensors` refuses,
    never a mixture that it reads.
    """
    if not tensors:
        raise ValueError("tensors is empty; expected at least one tensor to write")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(
            f"max_shard_bytes must be positive, or None for one file; got {max_shard_bytes}"
        )
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta:
        raise ValueError(
            f"tensors must have values; got tensors on the meta device: {_shorten(on_meta)}"
        )
    header = {"format": "pt", **(metadata or {})}
    not_strings = [key for key, value in header.items() if not isinstance(value, str)]
    if not_strings:
        raise TypeError(f"metadata must map strings to strings; got other values for {not_strings}")

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards = _partition(tensors, max_shard_bytes)
    num_shards = len(shards)
    if num_shards == 1:
        file_names = [SINGLE_FILE]
    else:
        file_names = [
            f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)
        ]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {
            name: file_name
            for file_name, names in zip(file_names, shards, strict=True)
            for name in names
        },
    }

    with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as beside:
        for file_name, names in zip(file_names, shards, strict=True):
            shard = _own_memory({name: tensors[name] for name in names})
            save_file(shard, Path(beside) / file_name, metadata=header)
        if num_shards == 1:
            (directory / INDEX_FILE).unlink(missing_ok=True)
        else:
            (Path(beside) / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
            for entry_point in (INDEX_FILE, SINGLE_FILE):
                (directory / entry_point).unlink(missing_ok=True)
            file_names.append(INDEX_FILE)
        for file_name in file_names:
            (Path(beside) / file_name).replace(directory / file_name)
    for path in directory.iterdir():
        if _SHARD_NAME.fullmatch(path.name) and path.name not in file_names:
            path.unlink()


def _partition(tensors: Mapping[str, Tensor], max_shard_bytes: int | None) -> list[list[str]]:
    """Fill shards in the mapping's order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if max_shard_bytes is not None and shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    return shards


def _own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors no two of which share a storage, which the format cannot express."""
    seen: set[int] = set()
    owned: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        if value.untyped_storage().data_ptr() in seen:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        owned[name] = value
    return owned


class _Entry(NamedTuple):
    """A tensor as its file's header describes it."""

    shard: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class _Contents:
    """What a directory offers, before anything is read but headers."""

    tensors: dict[str, _Entry] = field(default_factory=dict)
    # Named by the index or a header, and not to be had for a reason that is already reported.
    unseen: set[str] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)
    # No table of contents at all: nothing can be said about what is missing.
    unknown: bool = False

    def lacks(self, name: str) -> bool:
        """Say whether the tensor is surely not there."""
        return not (name in self.tensors or name in self.unseen or self.unknown)

    def num_bytes(self, name: str) -> int:
        """Bytes that loading the tensor reads, its scale included."""
        entry = self.tensors[name]
        size = _BYTES[entry.dtype] * math.prod(entry.shape)
        return size + (self.num_bytes(name + SCALE_SUFFIX) if entry.dtype == _FP8 else 0)


@dataclass
class _Findings:
    """Everything that is wrong, collected before anything is refused."""

    files: list[str] = field(default_factory=list)
    index: list[str] = field(default_factory=list)
    quantization: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mis_shaped: list[MisShaped] = field(default_factory=list)
    destinations: list[str] = field(default_factory=list)

    def raise_if_any(self, directory: Path) -> None:
        """Raise one error for all, each kind under its remedy."""
        other_model = "; is config.json of the same model?"
        kinds: list[tuple[str, str, Sequence[object]]] = [
            ("files that cannot be used", "", self.files),
            ("index and shards disagree", "; take both from one export", self.index),
            (
                "quantisation",
                f"; {_SUPPORTED} can be read, convert others to BF16",
                self.quantization,
            ),
            ("missing from the checkpoint", other_model, self.missing),
            (
                "unexpected",
                f"{other_model} Pass them in ignore if it means to leave them",
                self.unexpected,
            ),
            ("mis-shaped", other_model, self.mis_shaped),
            ("destinations that cannot be written", "; allocate them anew", self.destinations),
        ]
        kinds = [kind for kind in kinds if kind[2]]
        if not kinds:
            return
        refusal = f"checkpoint {str(directory)!r} cannot be loaded"
        text, parts = f"{refusal}; nothing was written.", []
        for title, remedy, lines in kinds:
            text += f"\n{len(lines)} {title}{remedy}:"
            text += "".join(f"\n    {line}" for line in lines[:_MAX_LISTED])
            if len(lines) > _MAX_LISTED:
                text += f"\n    and {len(lines) - _MAX_LISTED} more"
            parts.append(f"{title} ({len(lines)}): {lines[0]}{remedy}")
        summary = f"{refusal}: {'. '.join(parts)}"
        raise CheckpointError(text, summary=summary, **vars(self))


def _as_predicate(ignore: Callable[[str], bool] | Sequence[str]) -> Callable[[str], bool]:
    """Turn patterns into a predicate, which takes a scale to go with its weight."""
    if isinstance(ignore, str):
        raise TypeError(
            f"ignore must be a predicate or a list of patterns; got {ignore!r}. Use [{ignore!r}]"
        )
    if callable(ignore):
        accepts = ignore
    else:
        patterns = tuple(ignore)

        def accepts(name: str) -> bool:
            return any(fnmatchcase(name, pattern) for pattern in patterns)

    return lambda name: (
        accepts(name) or (name.endswith(SCALE_SUFFIX) and accepts(name.removesuffix(SCALE_SUFFIX)))
    )


def _read_json(path: Path, found: _Findings) -> dict[str, Any] | None:
    """Read an object, or say in ``found`` why there is none."""
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        found.files.append(_one_line(error))
        return None


def _read_block_size(directory: Path, found: _Findings) -> tuple[int, int]:
    """Read the block of FP8 scales from config.json, and refuse every other format it names."""
    path = directory / CONFIG_FILE
    config = _read_json(path, found) if path.is_file() else None
    if config is None:
        return DEFAULT_BLOCK
    # Multi-modal checkpoints keep the language model's settings one level down.
    nested = config.get("text_config")
    settings = config.get("quantization_config")
    if settings is None and isinstance(nested, dict):
        settings = nested.get("quantization_config")
    if settings is None:
        return DEFAULT_BLOCK

    refuse = found.quantization.append
    if not isinstance(settings, dict):
        refuse(f"{CONFIG_FILE}: quantization_config must be an object; got {settings!r}")
        return DEFAULT_BLOCK
    method = settings.get("quant_method")
    if method != "fp8":
        refuse(f"{CONFIG_FILE}: quant_method {method!r} is not supported; expected 'fp8' or none")
        return DEFAULT_BLOCK
    fmt = settings.get("fmt", "e4m3")
    if fmt != "e4m3":
        refuse(f"{CONFIG_FILE}: fp8 of fmt {fmt!r} is not supported; expected 'e4m3'")
    block = settings.get("weight_block_size", list(DEFAULT_BLOCK))
    if block is None:
        refuse(
            f"{CONFIG_FILE}: fp8 without block scales (weight_block_size is null) is not supported"
        )
        return DEFAULT_BLOCK
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        refuse(f"{CONFIG_FILE}: weight_block_size must be two positive integers; got {block!r}")
        return DEFAULT_BLOCK
    return block[0], block[1]


def _read_contents(
    directory: Path,
    destinations: Mapping[str, Tensor],
    is_ignored: Callable[[str], bool],
    found: _Findings,
) -> _Contents:
    """Read the index and the headers of the shards that matter."""
    contents = _Contents()
    index = _choose_index(directory, found)
    if index is None:
        contents.unknown = True
        return contents

    def is_wanted(name: str) -> bool:
        return name in destinations or name.removesuffix(SCALE_SUFFIX) in destinations

    placed: dict[str, list[str]] = {}
    for name, shard in index.items():
        if is_wanted(name) or not is_ignored(name):
            placed.setdefault(shard, []).append(name)
        else:
            contents.ignored.append(name)
    if not index:  # a single file is its own table of contents
        placed = {SINGLE_FILE: []}

    for shard, names in placed.items():
        header = _read_header(directory, shard, found)
        if header is None:
            contents.unseen.update(names)
            contents.unknown = contents.unknown or not index
            continue
        for name in names:
            if name in header:
                contents.tensors[name] = header[name]
            else:
                found.index.append(f"{name} is placed in {shard}, which does not hold it")
                contents.unseen.add(name)
        for name, entry in header.items():
            if name in index:
                continue  # here by the index, or a second copy of what it takes from elsewhere
            if index and is_wanted(name):
                found.index.append(f"{name} is held by {shard} and not listed")
                contents.unseen.add(name)
            elif is_wanted(name) or not is_ignored(name):
                contents.tensors[name] = entry
            else:
                contents.ignored.append(name)
    return contents


def _choose_index(directory: Path, found: _Findings) -> dict[str, str] | None:
    """Return name to shard, empty for a single file; None if there is neither, having said so."""
    if not directory.is_dir():
        what = (
            "is a file; pass the directory that holds it"
            if directory.exists()
            else "does not exist"
        )
        found.files.append(f"{directory}: {what}")
        return None
    has_single = (directory / SINGLE_FILE).is_file()
    if not (directory / INDEX_FILE).is_file():
        if has_single:
            return {}
        others = sorted(
            path.name
            for path in directory.iterdir()
            if path.suffix in {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
        )
        there = f"; there is {_shorten(others)}" if others else ""
        found.files.append(
            f"no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{there}; download the one that "
            "there should be, or write it by transformers' save_pretrained"
        )
        return None

    content = _read_json(directory / INDEX_FILE, found)
    if content is None:
        return None
    index = content.get("weight_map")
    if (
        not isinstance(index, dict)
        or not index
        or not all(isinstance(shard, str) for shard in index.values())
    ):
        found.files.append(
            f"{INDEX_FILE}: weight_map must map at least one name to its file; get the file again"
        )
        return None
    if has_single and SINGLE_FILE not in index.values():
        found.files.append(
            f"two checkpoints: {SINGLE_FILE}, and an {INDEX_FILE} that does not name it; remove one"
        )
        return None
    return index


def _read_header(directory: Path, shard: str, found: _Findings) -> dict[str, _Entry] | None:
    """Read names, dtypes and shapes; safetensors checks that the file is as long as they say."""
    path = directory / shard
    if not path.is_file():
        found.files.append(f"{shard}: does not exist, and the index names it; download it")
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = {}
            for name in file.keys():
                entry = file.get_slice(name)
                header[name] = _Entry(shard, entry.get_dtype(), tuple(entry.get_shape()))
            return header
    except (SafetensorError, OSError) as error:
        found.files.append(
            f"{shard}: truncated or corrupt ({_one_line(error)}); {how_to_mend(path)}"
        )
        return None


def _check_against(
    contents: _Contents,
    destinations: Mapping[str, Tensor],
    is_ignored: Callable[[str], bool],
    block: tuple[int, int],
    found: _Findings,
) -> None:
    """Compare what is there with what is wanted."""
    for name, destination in destinations.items():
        reason = _why_not_writable(destination)
        if reason is not None:
            found.destinations.append(f"{name}: {reason}")
        if contents.lacks(name):
            found.missing.append(name)
        if name not in contents.tensors:
            continue
        entry = contents.tensors[name]
        if entry.shape != tuple(destination.shape):
            found.mis_shaped.append(
                MisShaped(name, tuple(destination.shape), entry.shape, entry.shard)
            )
        found.quantization += _check_format(name, contents, block)

    for name in contents.tensors:
        if name in destinations:
            continue
        weight = name.removesuffix(SCALE_SUFFIX)
        if name.endswith(SCALE_SUFFIX) and contents.lacks(weight):
            found.quantization.append(f"{name} is a scale without its weight {weight}")
        elif weight not in destinations:
            found.unexpected.append(name)
        elif weight in contents.tensors and contents.tensors[weight].dtype != _FP8:
            if is_ignored(name):
                contents.ignored.append(name)
            else:
                dtype = contents.tensors[weight].dtype
                found.quantization.append(f"{name} is a scale, but {weight} is {dtype}, not {_FP8}")


def _check_format(name: str, contents: _Contents, block: tuple[int, int]) -> Iterable[str]:
    """Say what keeps a tensor's numbers from being read."""
    entry = contents.tensors[name]
    if entry.dtype in _PLAIN:
        return
    if entry.dtype != _FP8:
        yield f"{name} is {entry.dtype}, which is not supported"
        return
    scale_name = name + SCALE_SUFFIX
    scale = contents.tensors.get(scale_name)
    if contents.lacks(scale_name):
        other = name + "_scale"
        hint = f"; {other} is not a block scale" if other in contents.tensors else ""
        yield f"{name} is {_FP8} without its block scale {scale_name}{hint}"
    if len(entry.shape) != 2:
        yield f"{name} is {_FP8} and {list(entry.shape)}; block scales are for [rows, cols]"
    elif scale is not None:
        if scale.dtype not in _SCALE_DTYPES:
            yield f"{scale_name} is {scale.dtype}; expected one of {', '.join(_SCALE_DTYPES)}"
        expected = _scale_shape(entry.shape, block)
        if scale.shape != expected:
            yield (
                f"{scale_name} is {list(scale.shape)}; expected {list(expected)} for a weight "
                f"{list(entry.shape)} in blocks of {block[0]} x {block[1]}"
            )


def _why_not_writable(destination: Tensor) -> str | None:
    """Name what would make a copy fail, or be lost, after others have been made."""
    if destination.is_meta:
        return "is on the meta device and has no memory"
    if destination.dtype not in _DESTINATION_DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DESTINATION_DTYPES)
        return f"is {destination.dtype}; expected one of {supported}"
    extents = zip(destination.shape, destination.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in extents):
        return "is an expanded view, whose elements share memory"
    return None


def _scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Count the blocks along rows and columns, the short ones at the ends included."""
    rows, cols = shape
    return -(-rows // block[0]), -(-cols // block[1])


def _one_line(error: Exception) -> str:
    """Fold an exception's text."""
    return " ".join(str(error).split())


def _shorten(names: Sequence[str]) -> str:
    """List a few names."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest

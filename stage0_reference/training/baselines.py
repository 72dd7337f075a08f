r"""What ordinary compressors and a byte n-gram model need for the held-out files.

A number such as "1.1 bits per byte" says nothing alone. These say what it must beat, on exactly the
bytes that the model is scored on:

| baseline         | what it has seen before it codes a byte                                |
|------------------|------------------------------------------------------------------------|
| uniform          | nothing: 8 bits                                                        |
| gzip -9 per file | the last 32 KB of that file; no training                               |
| gzip -9 joined   | the last 32 KB of the held-out files, joined by path; no training      |
| xz -9e per file  | all of that file so far; no training                                   |
| xz -9e joined    | all held-out files so far; no training                                 |
| xz -9e primed    | 32 MB of the training text as a prefix, and all held-out files so far  |
| n-gram           | counts of as much training text as it states, and the n - 1 bytes before |

A language model with a window of 4096 bytes has seen the training corpus and that window.
Compressed sizes include the format's own headers (18 bytes a file for gzip, about 60 for xz).

The n-gram model interpolates all orders from 0 to `order` with Witten-Bell weights: a context h
that was seen c(h) times with t(h) distinct successors trusts its own counts by c / (c + t),

    p(x | h) = (c(h, x) + t(h) p(x | h without its first byte)) / (c(h) + t(h))

and 1/256 stands below order 0. It is a distribution over all 256 bytes at every order, so its code
length is honest. It does not learn from the held-out file as it goes (PPM would, and gain by it).

    python -m stage0_reference.training.baselines --corpus corpus.xz --json baselines.json
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stage0_reference.training.corpus import (
    Document,
    load_corpus,
    load_heldout,
    shuffle_documents,
)

if TYPE_CHECKING:
    from jaxtyping import Float64, Int32, UInt8, UInt64

__all__ = ["Baseline", "NgramModel", "compressor_baselines", "ngram_baseline"]

GZIP_HEADER_BYTES = 18
MAX_ORDER = 7
PRIMING_BYTES = 32_000_000
"""Fits the 64 MiB dictionary of xz -9 with the held-out files behind it."""


@dataclass(frozen=True)
class Baseline:
    """One row: a method and what it needs.

    Parameters
    ----------
    name : str
        Method, as in the module's table.
    bits_per_byte, nats_per_byte : float
        Code length over the held-out bytes.
    trained_on_bytes : int
        Training text it has seen; 0 for a plain compressor.
    seconds : float
        Time spent, training included.
    """

    name: str
    bits_per_byte: float
    nats_per_byte: float
    trained_on_bytes: int
    seconds: float


def _row(name: str, bits: float, length: int, trained_on: int, started: float) -> Baseline:
    """Turn a total code length in bits into a row."""
    per_byte = bits / length
    seconds = round(time.perf_counter() - started, 2)
    return Baseline(name, per_byte, per_byte * math.log(2.0), trained_on, seconds)


def _gzip_size(text: bytes) -> int:
    """Size of the file that `gzip -9` would write, without a stored name."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9)
    return len(compressor.compress(text)) + len(compressor.flush()) + GZIP_HEADER_BYTES


def _xz_size(text: bytes) -> int:
    """Size of the file that `xz -9e` would write."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def compressor_baselines(heldout: Sequence[tuple[str, bytes]]) -> list[Baseline]:
    """Bits per byte under gzip and xz, file by file and over all files joined.

    Parameters
    ----------
    heldout : sequence of (str, bytes)
        As `load_heldout` returns them.

    Returns
    -------
    list of Baseline
        Four rows.
    """
    joined = b"".join(text for _, text in heldout)
    rows = []
    for name, size in (("gzip -9", _gzip_size), ("xz -9e", _xz_size)):
        started = time.perf_counter()
        per_file = sum(size(text) for _, text in heldout)
        rows.append(_row(f"{name} per file", 8 * per_file, len(joined), 0, started))
        started = time.perf_counter()
        rows.append(_row(f"{name} joined", 8 * size(joined), len(joined), 0, started))
    return rows


def primed_xz_baseline(training: bytes, heldout: Sequence[tuple[str, bytes]]) -> Baseline:
    """Bits per byte of the held-out files when xz has the training text in its dictionary.

    The difference of two compressed sizes: training text with and without the held-out files after
    it. It is the fair "zip" rival of a trained model, since it may copy from the corpus.
    """
    started = time.perf_counter()
    joined = b"".join(text for _, text in heldout)
    bits = 8 * (_xz_size(training + joined) - _xz_size(training))
    return _row("xz -9e primed", bits, len(joined), len(training), started)


class NgramModel:
    """Witten-Bell interpolated byte n-grams, counted by sorting.

    An n-gram of at most eight bytes is one 64-bit integer, so counting a hundred million of them is
    one `np.sort` an order. Only the n-grams that the scored text asks for are kept.

    Parameters
    ----------
    order : int
        Bytes of context of the longest n-gram, 0 to 7.
    """

    def __init__(self, order: int) -> None:
        if not 0 <= order <= MAX_ORDER:
            raise ValueError(
                f"order must be 0 to {MAX_ORDER} (an n-gram must fit in 64 bits); got {order}"
            )
        self.order = order

    def log2_probabilities(
        self, training: Sequence[bytes], scored: Sequence[bytes]
    ) -> list[Float64[np.ndarray, " length"]]:
        """Train on some texts and give log2 p of each byte of others.

        Parameters
        ----------
        training : sequence of bytes
            Texts to count; no n-gram spans two of them.
        scored : sequence of bytes
            Texts to score. The first bytes of each use the context that exists.

        Returns
        -------
        list of np.ndarray
            One array of `len(text)` values for each scored text.
        """
        target, position = _joined(scored)
        source, source_position = _joined(training)
        probability = np.full(len(target), 1.0 / 256.0)
        for order in range(self.order + 1):
            wanted = _grams(target, order + 1)
            # `grams` holds every n-gram of the training text whose bytes lie in one document.
            grams = _grams(source, order + 1)[source_position >= order]
            grams.sort()
            first = np.concatenate(([True], grams[1:] != grams[:-1]))[: len(grams)]
            unique = grams[first]  # [distinct n-grams], sorted: those of one context are neighbours
            contexts = unique >> np.uint64(8)

            gram_count = _count(grams, wanted)
            prefix = wanted >> np.uint64(8)
            context_count = _count_range(grams, prefix)
            distinct = np.searchsorted(contexts, prefix, "right") - np.searchsorted(
                contexts, prefix, "left"
            )
            total = context_count + distinct
            known = (total > 0) & (position >= order)
            backed_off = (gram_count + distinct * probability) / np.maximum(total, 1)
            probability = np.where(known, backed_off, probability)
        ends = np.cumsum([len(text) for text in scored])
        return np.split(np.log2(probability), ends[:-1]) if scored else []


def _joined(
    texts: Sequence[bytes],
) -> tuple[UInt8[np.ndarray, " length"], Int32[np.ndarray, " length"]]:
    """Concatenate texts, and say for each byte how far into its own text it stands."""
    joined = np.frombuffer(b"".join(texts), dtype=np.uint8)
    positions = [np.arange(len(text), dtype=np.int32) for text in texts]
    return joined, np.concatenate([np.zeros(0, dtype=np.int32), *positions])


def _grams(text: UInt8[np.ndarray, " length"], length: int) -> UInt64[np.ndarray, " length"]:
    """Pack, at each position, the `length` bytes that end there; zeros before the start."""
    grams = np.zeros(len(text), dtype=np.uint64)
    for back in range(min(length, len(text))):
        shifted = text[: len(text) - back].astype(np.uint64) << np.uint64(8 * back)
        grams[back:] |= shifted
    return grams


def _count(sorted_grams: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Occurrences of each wanted value in a sorted array."""
    found = np.searchsorted(sorted_grams, wanted, "right")
    return found - np.searchsorted(sorted_grams, wanted, "left")


def _count_range(sorted_grams: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Occurrences of n-grams with the given context: those from prefix*256 to prefix*256 + 255."""
    low = prefix << np.uint64(8)
    found = np.searchsorted(sorted_grams, low | np.uint64(255), "right")
    return found - np.searchsorted(sorted_grams, low, "left")


def ngram_baseline(
    training: Sequence[bytes], heldout: Sequence[tuple[str, bytes]], *, order: int
) -> Baseline:
    """Bits per byte of the held-out files under one n-gram model."""
    started = time.perf_counter()
    scored = [text for _, text in heldout]
    log2 = NgramModel(order).log2_probabilities(training, scored)
    bits = -float(sum(values.sum() for values in log2))
    length = sum(map(len, scored))
    trained_on = sum(map(len, training))
    return _row(f"{order + 1}-gram, Witten-Bell", bits, length, trained_on, started)


def training_subset(documents: Sequence[Document], limit: int) -> list[bytes]:
    """Return the texts of shuffled documents, as many as fit in `limit` bytes."""
    texts: list[bytes] = []
    room = limit
    for document in shuffle_documents(documents):
        if len(document.text) <= room:
            texts.append(document.text)
            room -= len(document.text)
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m stage0_reference.training.baselines")
    parser.add_argument("--corpus", type=Path, help="corpus file; without it: compressors only")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument(
        "--order", type=int, nargs="*", default=[2, 5], help="bytes of context of the n-gram models"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=100_000_000,
        help="most training bytes for the n-gram models (about 50 bytes of memory each)",
    )
    options = parser.parse_args(arguments)

    heldout = load_heldout()
    length = sum(len(text) for _, text in heldout)
    rows = [Baseline("uniform", 8.0, 8.0 * math.log(2.0), 0, 0.0), *compressor_baselines(heldout)]
    if options.corpus is not None:
        documents = load_corpus(options.corpus)
        priming = b"".join(training_subset(documents, PRIMING_BYTES))
        rows.append(primed_xz_baseline(priming, heldout))
        training = training_subset(documents, options.limit)
        rows.extend(ngram_baseline(training, heldout, order=order) for order in options.order)

    print(f"held-out: {len(heldout)} files, {length:,} bytes")
    print(f"{'baseline':24} {'bits/byte':>9} {'nats/byte':>9} {'trained on':>12} {'seconds':>8}")
    for row in rows:
        print(
            f"{row.name:24} {row.bits_per_byte:9.4f} {row.nats_per_byte:9.4f}"
            f" {row.trained_on_bytes:12,} {row.seconds:8.1f}"
        )
    if options.json is not None:
        result: dict[str, Any] = {
            "heldout_files": len(heldout),
            "heldout_bytes": length,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

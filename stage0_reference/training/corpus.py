"""The text the small model is trained on, and the text it is judged by.

A language model for bytes needs a few hundred megabytes of consistent text with a licence that
lets anyone rebuild it. Python source is such a text: the interpreter brings its standard library,
and the package index holds well-kept libraries under MIT, BSD, Apache, MPL and PSF licences.
`build_corpus` gathers both, drops what is data rather than code, and writes one `.xz` file that a
machine without network loads in seconds with the standard library alone:

| bytes      | field    | content                                                            |
|------------|----------|--------------------------------------------------------------------|
| first line | manifest | JSON: sources (version, licence, SHA-256), documents, exclusions   |
| the rest   | body     | the documents' bytes, one after the other, in the manifest's order |

The judge is a set of whole modules of the CPython 3.11 standard library that ship with this package
as text (`pretrained/heldout/`). Popular code is copied a lot: `setuptools` carries `distutils`,
packages carry backports. Splitting by path alone would let the model train on its own exam, so a
document is also excluded when it shares more than a tenth of the distinctive lines of any held-out
file.

    python -m stage0_reference.training.corpus --out corpus.xz

Left out: near-duplicates beyond whole lines (renamed identifiers), and any judgement of quality
beyond the choice of packages.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.resources
import json
import lzma
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt16

__all__ = [
    "BEGIN_TOKEN",
    "END_TOKEN",
    "PACKAGES",
    "Document",
    "OverlapReport",
    "Package",
    "build_corpus",
    "distinctive_lines",
    "exclude_heldout",
    "load_corpus",
    "load_heldout",
    "load_manifest",
    "rejection_reason",
    "select_heldout",
    "shuffle_documents",
    "training_tokens",
]

BEGIN_TOKEN = 256
"""Token before each file: the first number that is not a byte."""
END_TOKEN = 257
"""Token after each file."""

FORMAT_VERSION = 1
STDLIB_SOURCE = "cpython"
MIN_DOCUMENT_BYTES = 200
MAX_DOCUMENT_BYTES = 300_000

HELDOUT_MIN_BYTES = 9 * 1024
"""More than 8192 bytes, so that every held-out file holds a window twice the training context."""
HELDOUT_MAX_BYTES = 60 * 1024
HELDOUT_TOTAL_BYTES = 600_000

MIN_LINE_CHARACTERS = 20
MAX_SHARED_FRACTION = 0.10
COMMON_LINE_DOCUMENTS = 20
DUPLICATE_FRACTION = 0.8


class Document(NamedTuple):
    """One file of source text.

    Parameters
    ----------
    source : str
        Name of the package it came from; `cpython` for the standard library.
    path : str
        Path inside that source, with forward slashes: `asyncio/tasks.py`, `jinja2/lexer.py`.
    text : bytes
        UTF-8 text with line ends as a single newline.
    """

    source: str
    path: str
    text: bytes


@dataclass(frozen=True)
class Package:
    """A pinned package of the index, with the licence its own metadata states."""

    name: str
    version: str
    licence: str


PACKAGES: tuple[Package, ...] = (
    Package("aiohttp", "3.14.5", "Apache-2.0 AND MIT"),
    Package("astropy", "8.0.2", "BSD-3-Clause"),
    Package("attrs", "26.1.0", "MIT"),
    Package("black", "26.10.1", "MIT"),
    Package("bokeh", "3.10.2", "BSD-3-Clause"),
    Package("celery", "5.7.0", "BSD-3-Clause"),
    Package("click", "8.5.1", "BSD-3-Clause"),
    Package("dask", "2026.8.0", "BSD-3-Clause"),
    Package("distributed", "2026.8.0", "BSD-3-Clause"),
    Package("django", "6.1.3", "BSD-3-Clause"),
    Package("flask", "3.1.3", "BSD-3-Clause"),
    Package("hypothesis", "6.170.17", "MPL-2.0"),
    Package("ipython", "9.18.1", "BSD-3-Clause"),
    Package("jedi", "0.20.1", "MIT"),
    Package("jinja2", "3.1.6", "BSD-3-Clause"),
    Package("matplotlib", "3.11.2", "PSF-based (matplotlib)"),
    Package("mitmproxy", "12.3.1", "MIT"),
    Package("mypy", "2.4.1", "MIT"),
    Package("networkx", "3.7", "BSD-3-Clause"),
    Package("nltk", "3.10.4", "Apache-2.0"),
    Package("numba", "0.68.1", "BSD-2-Clause"),
    Package("numpy", "2.5.5", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"),
    Package("pandas", "3.1.1", "BSD-3-Clause"),
    Package("pip", "26.3", "MIT"),
    Package("poetry", "2.5.1", "MIT"),
    Package("pygments", "2.21.0", "BSD-2-Clause"),
    Package("pytest", "9.2.0", "MIT"),
    Package("rdflib", "7.6.0", "BSD-3-Clause"),
    Package("requests", "2.34.2", "Apache-2.0"),
    Package("rich", "15.0.0", "MIT"),
    Package("scikit-image", "0.26.0", "BSD-3-Clause"),
    Package("scikit-learn", "1.9.1", "BSD-3-Clause"),
    Package("scipy", "1.18.1", "BSD-3-Clause"),
    Package("scrapy", "2.19.0", "BSD-3-Clause"),
    Package("setuptools", "84.2.1", "MIT"),
    Package("sphinx", "9.2.0", "BSD-2-Clause"),
    Package("sqlalchemy", "2.1.9", "MIT"),
    Package("statsmodels", "0.15.0", "BSD-3-Clause"),
    Package("sympy", "1.14.0", "BSD-3-Clause"),
    Package("tornado", "6.6.1", "Apache-2.0"),
    Package("trio", "0.35.0", "MIT OR Apache-2.0"),
    Package("twisted", "26.10.0", "MIT"),
    Package("werkzeug", "3.1.9", "BSD-3-Clause"),
    Package("xarray", "2026.9.0", "Apache-2.0"),
)

# One fixed target, so that every machine reads the same wheels. This one has the smallest binaries
# (they are thrown away); the Python files differ between platforms by a few generated modules.
WHEEL_TARGET = (
    *("--python-version", "3.13", "--implementation", "cp"),
    *("--abi", "cp313", "--abi", "abi3", "--abi", "none"),
    *("--platform", "macosx_15_0_arm64"),
)

_VENDORED = frozenset({"_vendor", "vendor", "vendored", "_vendored", "extern", "externals"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# Not library code: codec tables, generated topic texts, demonstrations, and two copies of wheels.
_NOT_LIBRARY = frozenset(
    {"site-packages", "lib2to3", "turtledemo", "encodings", "pydoc_data", "ensurepip"}
)
_GENERATED = re.compile(
    rb"auto-?generated|automatically generated|generated (?:by|from|file|automatically)"
    rb"|do not edit|don't edit",
    re.IGNORECASE,
)
_TABLE_ROW = re.compile(rb"""\s*[\[({]*\s*(?:[rbuRBU]?["']|-?[0-9.])[^#]*[,:\])}]\s*(?:#.*)?$""")
_COPYLEFT = re.compile(rb"General\s+(?:#\s*)?Public\s+(?:#\s*)?Licen[sc]e", re.IGNORECASE)


def rejection_reason(text: bytes) -> str | None:
    r"""Say why a file is not source text worth learning from, or None when it is.

    Parameters
    ----------
    text : bytes
        The whole file.

    Returns
    -------
    str or None
        `"size"`, `"encoding"`, `"licence"` (its header names a General Public License),
        `"generated"` (its header says so), or `"data"`: very long lines, mostly digits or
        non-ASCII characters, or mostly rows of a table.
    """
    if not MIN_DOCUMENT_BYTES <= len(text) <= MAX_DOCUMENT_BYTES:
        return "size"
    if b"\0" in text:
        return "encoding"
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return "encoding"
    if _COPYLEFT.search(text[:4096]):
        return "licence"
    if _GENERATED.search(text[:600]):
        return "generated"
    lines = [line for line in text.split(b"\n") if line.strip()]
    visible = sum(len(line.strip()) for line in lines)
    digits = sum(text.count(digit) for digit in b"0123456789")
    non_ascii = len(text) - len(text.decode("utf-8").encode("ascii", "ignore"))
    too_long = sum(len(line) for line in lines if len(line) > 400)
    rows = sum(len(line.strip()) for line in lines if _TABLE_ROW.match(line))
    if too_long > 0.1 * visible or digits > 0.25 * visible or non_ascii > 0.15 * visible:
        return "data"
    if rows > 0.6 * visible:
        return "data"
    return None


def distinctive_lines(text: bytes) -> frozenset[bytes]:
    """Return the stripped lines of at least 20 characters: what a copy would have to share."""
    stripped = (line.strip() for line in text.splitlines())
    return frozenset(line for line in stripped if len(line) >= MIN_LINE_CHARACTERS)


@dataclass
class OverlapReport:
    """What `exclude_heldout` removed, and what little remains.

    Parameters
    ----------
    by_path : list of str
        Documents with the relative path of a held-out file, as `source:path`.
    by_lines : list of str
        Documents sharing too many lines, as `source:path ~ held-out path (fraction)`.
    largest_remaining_fraction : float
        Over held-out files and kept documents: the largest fraction of a held-out file's lines that
        one kept document has. At most the threshold, by construction.
    remaining_fraction : dict of str to float
        For each held-out file, the fraction of its lines that occur in *any* kept document.
    """

    by_path: list[str] = field(default_factory=list)
    by_lines: list[str] = field(default_factory=list)
    largest_remaining_fraction: float = 0.0
    remaining_fraction: dict[str, float] = field(default_factory=dict)


def exclude_heldout(
    documents: Sequence[Document],
    heldout: Sequence[tuple[str, bytes]],
    *,
    max_shared_fraction: float = MAX_SHARED_FRACTION,
    common_line_documents: int = COMMON_LINE_DOCUMENTS,
) -> tuple[list[Document], OverlapReport]:
    """Drop every document that is a copy, or a partial or modified copy, of a held-out file.

    Equal to this loop, run for each document::

        drop if document.path == name of any held-out file
        drop if |lines(document) & lines(heldout)| > fraction * |lines(heldout)| for any of them

    where lines() are the stripped lines of at least 20 characters, without those that more than
    `common_line_documents` documents have (`def __init__(self, *args, **kwargs):`).

    Parameters
    ----------
    documents : sequence of Document
        Candidates, each content at most once: repeated copies would make lines look common.
    heldout : sequence of (str, bytes)
        Relative path and text of each held-out file, as `load_heldout` returns them.
    max_shared_fraction : float
        Largest fraction of one held-out file's lines that a kept document may have, in [0, 1].
    common_line_documents : int
        A line in more documents than this says nothing about copying.

    Returns
    -------
    kept : list of Document
        In the order given.
    report : OverlapReport
        What was dropped, and how much the kept documents still share.
    """
    if not 0.0 <= max_shared_fraction <= 1.0:
        raise ValueError(
            f"max_shared_fraction must be a fraction in [0, 1]; got {max_shared_fraction}. "
            f"The default is {MAX_SHARED_FRACTION}."
        )
    all_lines = [(name, distinctive_lines(text)) for name, text in heldout]
    watched = frozenset[bytes]().union(*(lines for _, lines in all_lines))
    shared = [watched & distinctive_lines(document.text) for document in documents]
    frequency = Counter(line for lines in shared for line in lines)
    common = {line for line, count in frequency.items() if count > common_line_documents}
    wanted = {name: lines - common for name, lines in all_lines}

    report = OverlapReport()
    kept: list[Document] = []
    found: dict[str, set[bytes]] = {name: set() for name in wanted}
    for document, candidate_lines in zip(documents, shared, strict=True):
        where = f"{document.source}:{document.path}"
        if document.path in wanted:
            report.by_path.append(where)
            continue
        fractions = {
            name: len(candidate_lines & lines) / len(lines)
            for name, lines in wanted.items()
            if lines
        }
        worst = max(fractions, key=lambda name: fractions[name], default=None)
        if worst is not None and fractions[worst] > max_shared_fraction:
            report.by_lines.append(f"{where} ~ {worst} ({fractions[worst]:.2f})")
            continue
        kept.append(document)
        for name, lines in wanted.items():
            found[name] |= candidate_lines & lines
        if worst is not None:
            report.largest_remaining_fraction = max(
                report.largest_remaining_fraction, fractions[worst]
            )
    report.remaining_fraction = {
        name: round(len(found[name]) / max(1, len(lines)), 4) for name, lines in wanted.items()
    }
    return kept, report


def select_heldout(library: Path) -> list[str]:
    """Choose held-out modules of a standard library by the hash of their relative path.

    Modules between 9 and 60 KiB, no tests, tables or demonstrations, in the order of the SHA-256 of
    their path, until 600,000 bytes are reached. The files shipped with this package are the
    authority; this function records how they were chosen from CPython 3.11.

    Parameters
    ----------
    library : Path
        The directory that holds `argparse.py`.

    Returns
    -------
    list of str
        Relative paths with forward slashes, sorted.
    """
    candidates: list[tuple[str, str, int]] = []
    for file in library.rglob("*.py"):
        relative = file.relative_to(library)
        if relative.parts[0] in _NOT_LIBRARY or _TEST_FOLDERS.intersection(relative.parts):
            continue
        size = file.stat().st_size
        if HELDOUT_MIN_BYTES <= size <= HELDOUT_MAX_BYTES:
            path = relative.as_posix()
            candidates.append((hashlib.sha256(path.encode()).hexdigest(), path, size))
    chosen: list[str] = []
    total = 0
    for _, path, size in sorted(candidates):
        if total >= HELDOUT_TOTAL_BYTES:
            break
        chosen.append(path)
        total += size
    return sorted(chosen)


def heldout_file_name(path: str) -> str:
    """Flatten `asyncio/tasks.py` to the name it ships under, `Lib__asyncio__tasks.py.txt`."""
    return "Lib__" + path.replace("/", "__") + ".txt"


def load_heldout() -> list[tuple[str, bytes]]:
    """Return the held-out files that ship with the package.

    Returns
    -------
    list of (str, bytes)
        Path relative to the standard library (`asyncio/tasks.py`) and text, sorted by path.

    Raises
    ------
    FileNotFoundError
        If the installation lacks the files.
    """
    directory = importlib.resources.files("stage0_reference") / "pretrained" / "heldout"
    index = directory / "INDEX.json"
    if not index.is_file():
        raise FileNotFoundError(
            "the held-out files (stage0_reference/pretrained/heldout) are missing from this "
            "installation; reinstall the package with its package data"
        )
    entries: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))
    found = []
    for path, digest in sorted(entries.items()):
        text = (directory / heldout_file_name(path)).read_bytes()
        got = hashlib.sha256(text).hexdigest()
        if got != digest:
            raise ValueError(
                f"held-out file {path} must have SHA-256 {digest}; got {got}. Restore the file: "
                "numbers measured on other bytes cannot be compared."
            )
        found.append((path, text))
    return found


def _standard_library() -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of the running interpreter's library, tests where present."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        relative = file.relative_to(library)
        if "site-packages" not in relative.parts:
            yield relative.as_posix(), file.read_bytes()


def _wheel(wheel: Path) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
    """Read (what the metadata says, [(path, bytes), ...]) of a wheel's Python files."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(archive.namelist())
        metadata_name = next(n for n in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = HeaderParser().parsestr(archive.read(metadata_name).decode("utf-8"))
        classifiers = metadata.get_all("Classifier", [])
        # Some packages paste the whole licence where its name belongs: the first line is enough.
        stated = (metadata.get("License") or "").strip().splitlines()[:1]
        said = {
            "version": str(metadata["Version"]),
            "expression": str(metadata.get("License-Expression") or ""),
            "license": stated[0][:80] if stated else "",
            "classifiers": "; ".join(
                c.rsplit(" :: ", 1)[-1] for c in classifiers if c.startswith("License")
            ),
        }
        # A vendored library is another project's work under another licence.
        own = (n for n in names if n.endswith(".py") and not _VENDORED.intersection(n.split("/")))
        files = [(name, archive.read(name)) for name in own]
    return said, files


def _download(packages: Iterable[Package], directory: Path) -> None:
    """Fetch the pinned wheels that `directory` does not have yet, with the interpreter's pip."""
    directory.mkdir(parents=True, exist_ok=True)
    for package in packages:
        if _find_wheel(package, directory) is None:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            only = ["--only-binary", ":all:", *WHEEL_TARGET, "--dest", str(directory)]
            requirement = f"{package.name}=={package.version}"
            subprocess.run([*pip, *only, requirement], check=True)


def _find_wheel(package: Package, directory: Path) -> Path | None:
    """Return the package's wheel in `directory`, compared by normalised name and version."""
    for wheel in sorted(directory.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        if (re.sub(r"[-_.]+", "-", name).lower(), version) == (package.name, package.version):
            return wheel
    return None


def _drop_duplicates(documents: Sequence[Document]) -> tuple[list[Document], int]:
    """Keep the first of documents whose lines nearly all occurred earlier; count the rest."""
    kept: list[Document] = []
    seen: set[int] = set()
    for document in documents:
        lines = [
            # Eight bytes of a digest instead of the line: tens of millions of bytes less to hold.
            int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "little")
            for line in distinctive_lines(document.text)
        ]
        if lines and sum(line in seen for line in lines) > DUPLICATE_FRACTION * len(lines):
            continue
        seen.update(lines)
        kept.append(document)
    return kept, len(documents) - len(kept)


def build_corpus(
    out: Path | str,
    *,
    packages: Sequence[Package] = PACKAGES,
    wheels: Path | str | None = None,
    heldout: Sequence[tuple[str, bytes]] | None = None,
    preset: int = 6,
) -> dict[str, Any]:
    """Gather, filter, separate from the held-out files, and write the corpus.

    Parameters
    ----------
    out : path
        File to write (`corpus.xz`). Written under a temporary name first: it is whole or absent.
    packages : sequence of Package
        What to take beside the running interpreter's standard library.
    wheels : path, optional
        Folder of wheels to use and to add to; without it a temporary one, deleted at the end.
    heldout : sequence of (str, bytes), optional
        Files to keep away from; by default those that ship with the package.
    preset : int
        xz preset, 0 to 9. The content does not depend on it.

    Returns
    -------
    dict
        The manifest.

    Raises
    ------
    ValueError
        If a wheel's version is not the pinned one, or its metadata states a copyleft licence.
    """
    out = Path(out)
    if heldout is None:
        heldout = load_heldout()
    sources: list[dict[str, Any]] = [
        {
            "name": STDLIB_SOURCE,
            "version": platform.python_version(),
            "licence": "PSF-2.0",
        }
    ]
    raw: list[tuple[str, str, bytes]] = [
        (STDLIB_SOURCE, path, text) for path, text in _standard_library()
    ]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(wheels) if wheels is not None else Path(temporary)
        _download(packages, directory)
        for package in packages:
            wheel = _find_wheel(package, directory)
            if wheel is None:
                raise ValueError(
                    f"wheels must hold {package.name} {package.version}; got none in {directory}. "
                    "The index may no longer serve this version: change the pin."
                )
            said, files = _wheel(wheel)
            stated = " ".join((said["expression"], said["license"], said["classifiers"]))
            if re.search(r"\b[AL]?GPL|General Public", stated):
                raise ValueError(
                    f"packages must be under permissive licences; {package.name} "
                    f"{package.version} states {stated!r}. Remove it from PACKAGES."
                )
            sources.append({**asdict(package), "metadata": said})
            raw.extend((package.name, path, text) for path, text in files)

    excluded: Counter[str] = Counter()
    documents: list[Document] = []
    seen: set[bytes] = set()
    for source, path, text in raw:
        text = text.replace(b"\r\n", b"\n")
        reason = rejection_reason(text)
        digest = hashlib.sha256(text).digest()
        if reason is None and digest in seen:
            reason = "exact duplicate"
        if reason is not None:
            excluded[reason] += 1
            continue
        seen.add(digest)
        documents.append(Document(source, path, text))
    documents, report = exclude_heldout(documents, heldout)
    excluded["held-out path"] = len(report.by_path)
    excluded["held-out lines"] = len(report.by_lines)
    documents, excluded["near duplicate"] = _drop_duplicates(documents)

    for entry in sources:
        texts = [document.text for document in documents if document.source == entry["name"]]
        digest_of_source = hashlib.sha256()
        for text in texts:
            digest_of_source.update(text)
        entry["files"] = len(texts)
        entry["bytes"] = sum(map(len, texts))
        entry["sha256"] = digest_of_source.hexdigest()
    body = b"".join(document.text for document in documents)
    manifest: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "files": len(documents),
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
        "heldout": {name: hashlib.sha256(text).hexdigest() for name, text in heldout},
        "excluded": dict(sorted(excluded.items())),
        "overlap": asdict(report),
        "sources": sources,
        "documents": [[d.source, d.path, len(d.text)] for d in documents],
    }
    header = json.dumps(manifest, separators=(",", ":")).encode("ascii") + b"\n"
    # The dictionary spans the whole corpus, so that one package's idioms help to pack another's.
    window = max(4096, min(len(header) + len(body), 1 << 28))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": window}]
    partial = out.with_name(out.name + ".part")
    out.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(partial, "wb", filters=filters, check=lzma.CHECK_CRC64) as stream:
        stream.write(header)
        stream.write(body)
    partial.replace(out)
    return manifest


def load_manifest(path: Path | str) -> dict[str, Any]:
    """Read a corpus file's manifest (its first line) without unpacking the rest."""
    with lzma.open(path, "rb") as stream:
        manifest: dict[str, Any] = json.loads(stream.readline())
    if manifest.get("format") != FORMAT_VERSION:
        raise ValueError(
            f"path must be a corpus of format {FORMAT_VERSION}; got {manifest.get('format')}. "
            "Build it again with python -m stage0_reference.training.corpus."
        )
    return manifest


def load_corpus(path: Path | str) -> list[Document]:
    """Read a corpus file whole: some seconds for 250 MB.

    Parameters
    ----------
    path : path
        A file that `build_corpus` wrote.

    Returns
    -------
    list of Document
        In the order of the manifest.

    Raises
    ------
    ValueError
        If the file has another format or its body does not have the manifest's SHA-256.
    """
    manifest = load_manifest(path)
    with lzma.open(path, "rb") as stream:
        stream.readline()
        body = stream.read()
    digest = hashlib.sha256(body).hexdigest()
    if digest != manifest["sha256"]:
        raise ValueError(
            f"path must hold a body with SHA-256 {manifest['sha256']}; got {digest}. "
            "The file is damaged: build or copy it again."
        )
    documents: list[Document] = []
    start = 0
    for source, name, length in manifest["documents"]:
        documents.append(Document(source, name, body[start : start + length]))
        start += length
    return documents


def shuffle_documents(documents: Sequence[Document], *, seed: int = 0) -> list[Document]:
    """Order documents by a hash of seed, source and path.

    Unlike a shuffle by a random generator this is the same on every machine and in every version,
    and a document that is added or removed moves no other.
    """
    return sorted(
        documents,
        key=lambda d: hashlib.sha256(f"{seed}:{d.source}:{d.path}".encode()).digest(),
    )


def training_tokens(documents: Sequence[Document], *, seed: int = 0) -> UInt16[np.ndarray, " n"]:
    """Lay the documents out as one stream of tokens, each as 256, its bytes, 257.

    Parameters
    ----------
    documents : sequence of Document
        What to train on.
    seed : int
        Selects the order of the documents; see `shuffle_documents`.

    Returns
    -------
    np.ndarray
        Bytes as 0 to 255, one 256 before and one 257 after each document.
    """
    import numpy as np

    tokens = np.empty(sum(len(d.text) + 2 for d in documents), dtype=np.uint16)
    start = 0
    for document in shuffle_documents(documents, seed=seed):
        end = start + len(document.text) + 1
        tokens[start] = BEGIN_TOKEN
        tokens[start + 1 : end] = np.frombuffer(document.text, dtype=np.uint8)
        tokens[end] = END_TOKEN
        start = end + 1
    return tokens


def _write_heldout(directory: Path) -> None:
    """Copy the selection of the running interpreter's library to where it ships."""
    library = Path(sysconfig.get_path("stdlib"))
    directory.mkdir(parents=True, exist_ok=True)
    index = {}
    for path in select_heldout(library):
        text = (library / path).read_bytes()
        (directory / heldout_file_name(path)).write_bytes(text)
        index[path] = hashlib.sha256(text).hexdigest()
    (directory / "INDEX.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    licence = library / "LICENSE.txt"
    if licence.is_file():
        (directory / "LICENSE.txt").write_bytes(licence.read_bytes())


def _print_manifest(manifest: dict[str, Any]) -> None:
    """Print one aligned row a source, then what was excluded and what overlap remains."""
    print(f"{'source':16} {'version':12} {'files':>6} {'bytes':>12}  licence")
    for entry in manifest["sources"]:
        print(
            f"{entry['name']:16} {entry['version']:12} {entry['files']:6} {entry['bytes']:12,}"
            f"  {entry['licence']}"
        )
    print(f"{'total':29} {manifest['files']:6} {manifest['bytes']:12,}")
    print("excluded:", ", ".join(f"{k} {v}" for k, v in manifest["excluded"].items()))
    overlap = manifest["overlap"]
    for name in overlap["by_path"] + overlap["by_lines"]:
        print("  held-out:", name)
    print(f"largest share in one kept document: {overlap['largest_remaining_fraction']:.3f}")
    for name, fraction in overlap["remaining_fraction"].items():
        print(f"  {name:40} {fraction:.3f} of its lines occur somewhere in the corpus")


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the corpus, or write the held-out selection, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m stage0_reference.training.corpus")
    parser.add_argument("--out", type=Path, help="corpus file to write, e.g. corpus.xz")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use and to add to")
    parser.add_argument("--preset", type=int, default=6, help="xz preset, 0 to 9")
    parser.add_argument(
        "--write-heldout",
        type=Path,
        metavar="DIR",
        help="copy the running interpreter's held-out selection to DIR (done once, for 3.11)",
    )
    options = parser.parse_args(arguments)
    if options.out is None and options.write_heldout is None:
        parser.error("--out FILE is needed: where to write the corpus")
    if options.write_heldout is not None:
        _write_heldout(options.write_heldout)
    if options.out is not None:
        _print_manifest(build_corpus(options.out, wheels=options.wheels, preset=options.preset))
        print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

"""The training corpus: what is kept apart from the held-out files, and what baselines compute."""

from __future__ import annotations

import hashlib
import importlib.resources
import lzma
import math
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage0_reference.training import corpus
from stage0_reference.training.baselines import NgramModel, compressor_baselines, ngram_baseline
from stage0_reference.training.corpus import (
    BEGIN_TOKEN,
    END_TOKEN,
    MAX_SHARED_FRACTION,
    Document,
    Package,
    build_corpus,
    distinctive_lines,
    exclude_heldout,
    load_corpus,
    load_heldout,
    load_manifest,
    rejection_reason,
    select_heldout,
    shuffle_documents,
    training_tokens,
)

pytestmark = pytest.mark.stage0


def module_text(name: str, lines: int) -> bytes:
    """Source whose lines are long enough to count and occur in no other module."""
    body = (f"    {name}_value_{i} = compute_{name}({i}, {i + 1})" for i in range(lines))
    return ("\n".join([f"def {name}_function():", *body]) + "\n").encode()


EXAM = [("exam.py", module_text("exam", 100)), ("other/quiz.py", module_text("quiz", 60))]
EXAM_LINES = EXAM[0][1].splitlines()


documents_strategy = st.lists(
    st.builds(
        Document,
        st.sampled_from(["cpython", "first", "second"]),
        st.text("abc/_", min_size=1, max_size=8),
        st.binary(max_size=40),
    ),
    max_size=12,
    unique_by=lambda d: (d.source, d.path),
)


# Separation from the held-out files


@given(
    shared=st.integers(0, 100),
    own=st.integers(0, 80),
    indent=st.sampled_from([b"", b"    ", b"\t\t"]),
    order=st.randoms(use_true_random=False),
)
def test_a_document_is_dropped_exactly_when_it_shares_too_much(
    shared: int, own: int, indent: bytes, order: object
) -> None:
    """Copies with other indentation, order or surroundings are found, above the threshold."""
    lines = EXAM_LINES[1 : 1 + shared] + module_text("own", own).splitlines()
    order.shuffle(lines)  # type: ignore[attr-defined]
    text = b"\n".join(indent + line.strip() for line in lines)
    kept, report = exclude_heldout([Document("package", "package/vendored.py", text)], EXAM)

    distinctive = distinctive_lines(EXAM[0][1])
    fraction = len(distinctive & distinctive_lines(text)) / len(distinctive)
    assert bool(kept) == (fraction <= MAX_SHARED_FRACTION)
    assert bool(report.by_lines) == (fraction > MAX_SHARED_FRACTION)
    assert report.largest_remaining_fraction <= MAX_SHARED_FRACTION


def test_a_modified_copy_is_dropped() -> None:
    """A backport: a new header, every third line edited, some removed."""
    lines = [
        line.replace(b"compute", b"calculate") if i % 3 == 0 else line
        for i, line in enumerate(EXAM_LINES)
        if i % 5
    ]
    text = b"# A backport of exam.py\nfrom __future__ import annotations\n" + b"\n".join(lines)
    innocent = Document("package", "package/innocent.py", module_text("innocent", 100))
    kept, report = exclude_heldout(
        [Document("package", "package/_backport.py", text), innocent], EXAM
    )
    assert kept == [innocent]
    assert len(report.by_lines) == 1 and "exam.py" in report.by_lines[0]


def test_the_same_relative_path_is_dropped_whatever_it_holds() -> None:
    """Another version of a held-out module may share no line with it."""
    rewritten = Document("cpython", "other/quiz.py", module_text("rewritten", 50))
    elsewhere = Document("cpython", "quiz.py", module_text("elsewhere", 50))
    kept, report = exclude_heldout([rewritten, elsewhere], EXAM)
    assert kept == [elsewhere]
    assert report.by_path == ["cpython:other/quiz.py"]


def test_lines_that_everybody_writes_are_no_evidence() -> None:
    """A file of common lines is kept, and they do not hide a real copy."""
    common = [f"    raise SomeFrequentError('case {i}')".encode() for i in range(100)]
    exam = [("exam.py", b"\n".join(common + EXAM_LINES))]
    crowd = [
        Document("crowd", f"crowd_{n}.py", b"\n".join([*common, b"number = %d" % n]))
        for n in range(30)
    ]
    copy = Document("thief", "thief.py", b"\n".join(EXAM_LINES[:40]))
    kept, report = exclude_heldout([*crowd, copy], exam)
    assert kept == crowd
    assert report.by_lines == ["thief:thief.py ~ exam.py (0.40)"]


def test_what_remains_is_measured() -> None:
    """Two small borrowings stay, and the report adds them up."""
    borrowers = [
        Document("p", f"{i}.py", b"\n".join(EXAM_LINES[1 + 5 * i : 6 + 5 * i])) for i in range(2)
    ]
    kept, report = exclude_heldout(borrowers, EXAM)
    lines = len(distinctive_lines(EXAM[0][1]))
    assert kept == borrowers
    assert report.largest_remaining_fraction == pytest.approx(5 / lines)
    assert report.remaining_fraction["exam.py"] == pytest.approx(10 / lines, abs=1e-4)
    assert report.remaining_fraction["other/quiz.py"] == 0.0


def test_a_fraction_outside_its_range_is_refused() -> None:
    """A percentage where a fraction belongs would switch the exclusion off."""
    with pytest.raises(ValueError, match=r"max_shared_fraction must be a fraction in \[0, 1\]"):
        exclude_heldout([], EXAM, max_shared_fraction=10)


# The shipped files


def test_the_shipped_heldout_files_are_whole_modules_longer_than_two_contexts() -> None:
    """Each has its own path and compiles, and each holds a window of more than 8192 bytes."""
    heldout = load_heldout()
    assert [name for name, _ in heldout] == sorted({name for name, _ in heldout})
    assert 24 <= len(heldout) <= 40
    assert 500_000 <= sum(len(text) for _, text in heldout) <= 700_000
    for name, text in heldout:
        assert 8192 < len(text) <= 60 * 1024, name
        assert rejection_reason(text) in (None, "generated"), name
        compile(text, name, "exec", dont_inherit=True)


def test_loading_the_heldout_files_imports_nothing_heavy() -> None:
    """The corpus module alone brings neither torch nor numpy."""
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('corpus', {corpus.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['corpus'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr


def test_a_changed_heldout_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers measured on edited files must not pass for the published ones."""
    directory = tmp_path / "pretrained" / "heldout"
    directory.mkdir(parents=True)
    monkeypatch.setattr(importlib.resources, "files", lambda _: tmp_path)
    with pytest.raises(FileNotFoundError, match="held-out files .* are missing"):
        load_heldout()
    digest = hashlib.sha256(b"right").hexdigest()
    (directory / "INDEX.json").write_text(f'{{"a/b.py": "{digest}"}}')
    (directory / "Lib__a__b.py.txt").write_bytes(b"right")
    assert load_heldout() == [("a/b.py", b"right")]
    (directory / "Lib__a__b.py.txt").write_bytes(b"wrong")
    with pytest.raises(ValueError, match="a/b.py must have SHA-256"):
        load_heldout()


def test_the_running_library_is_kept_apart_from_the_shipped_files() -> None:
    """Of the running interpreter's files, every held-out module and its kin are dropped."""
    library = Path(sysconfig.get_path("stdlib"))
    heldout = load_heldout()
    names = {name for name, _ in heldout}
    # The held-out paths, their neighbours, and every seventh module: the whole library is slow.
    sample = {p for p in library.glob("*.py")} | {library / name for name in names}
    sample |= set(sorted(library.glob("*/*.py"))[::7])
    documents = [
        Document("cpython", p.relative_to(library).as_posix(), p.read_bytes())
        for p in sorted(sample)
        if p.is_file()
    ]
    kept, report = exclude_heldout(documents, heldout)
    assert not names & {document.path for document in kept}
    assert not {text for _, text in heldout} & {document.text for document in kept}
    assert len(kept) > 0.8 * (len(documents) - len(names))
    if (library / "lzma.py").is_file():
        assert any(line.startswith("cpython:lzma.py ~ bz2.py") for line in report.by_lines)


def test_the_selection_depends_on_paths_and_sizes_alone(tmp_path: Path) -> None:
    """Two copies of a tree give the same choice; tests, tables and short files are never in it."""
    for root in (tmp_path / "one", tmp_path / "two"):
        for n in range(60):
            file = root / ("package" if n % 2 else "") / f"module_{n}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(str(root).encode()[-3:] * (10_000 + 100 * n))
        for name in ("test/test_x.py", "encodings/cp1.py", "lib2to3/pytree.py"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_bytes(b"x" * 20_000)
        (root / "short.py").write_bytes(b"x" * 1_000)
    chosen = select_heldout(tmp_path / "one")
    assert chosen == select_heldout(tmp_path / "two") == sorted(chosen)
    assert all(Path(path).name.startswith("module_") for path in chosen)
    sizes = [(tmp_path / "one" / path).stat().st_size for path in chosen]
    assert 600_000 <= sum(sizes) < 600_000 + max(sizes)


@pytest.mark.skipif(
    sys.version_info[:3] != (3, 11, 7), reason="the files were chosen from CPython 3.11.7"
)
def test_the_shipped_files_are_the_selection_from_their_interpreter() -> None:
    """Nobody picked them by hand."""
    library = Path(sysconfig.get_path("stdlib"))
    heldout = load_heldout()
    assert [name for name, _ in heldout] == select_heldout(library)
    assert all((library / name).read_bytes() == text for name, text in heldout)


# Filter, container, tokens


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(module_text("plain", 20), None, id="code"),
        pytest.param(b"x = 1\n", "size", id="tiny"),
        pytest.param(module_text("huge", 9000), "size", id="huge"),
        pytest.param(b"# caf\xe9\n" + module_text("latin", 20), "encoding", id="latin-1"),
        pytest.param(b"a = '\0'\n" + module_text("nul", 20), "encoding", id="nul"),
        pytest.param(
            b"# GNU General Public License\n" + module_text("gpl", 20), "licence", id="gpl"
        ),
        pytest.param(
            b"# Generated by a tool\n" + module_text("made", 20), "generated", id="generated"
        ),
        pytest.param(
            b"table = [\n" + b"    0x41, 0x42, 17, 23,\n" * 40 + b"]\n", "data", id="rows"
        ),
        pytest.param(b"names = {\n" + b"    'amp': 'x26',\n" * 40 + b"}\n", "data", id="strings"),
        pytest.param(b"blob = '" + b"abcdefgh" * 200 + b"'\n", "data", id="long-line"),
        pytest.param("x = 'δοκιμή δοκιμή'\n".encode() * 40, "data", id="non-ascii"),
    ],
)
def test_only_source_text_is_kept(text: bytes, reason: str | None) -> None:
    """Each kind of file that teaches nothing about code is named."""
    assert rejection_reason(text) == reason


@given(documents=documents_strategy, seed=st.integers(0, 3))
def test_tokens_hold_each_document_once_between_begin_and_end(
    documents: list[Document], seed: int
) -> None:
    """Cutting the stream at its marks gives the documents back."""
    tokens = training_tokens(documents, seed=seed)
    assert tokens.dtype == np.uint16
    assert len(tokens) == sum(len(d.text) + 2 for d in documents)
    found: list[bytes] = []
    inside = False
    for token in tokens.tolist():
        if token == BEGIN_TOKEN:
            assert not inside
            inside = True
            found.append(b"")
        elif token == END_TOKEN:
            assert inside
            inside = False
        else:
            assert inside
            found[-1] += bytes([token])
    assert not inside
    assert found == [d.text for d in shuffle_documents(documents, seed=seed)]
    assert Counter(found) == Counter(d.text for d in documents)


@given(documents=documents_strategy, data=st.data())
def test_the_order_is_that_of_names_and_seed_alone(
    documents: list[Document], data: st.DataObject
) -> None:
    """Whatever order documents come in, and whichever is missing, the others stand alike."""
    ordered = shuffle_documents(documents, seed=1)
    assert shuffle_documents(data.draw(st.permutations(documents)), seed=1) == ordered
    if documents:
        missing = data.draw(st.sampled_from(documents))
        rest = [d for d in documents if d is not missing]
        assert shuffle_documents(rest, seed=1) == [d for d in ordered if d is not missing]


def test_another_seed_gives_another_order() -> None:
    """Twenty documents do not fall into one order twice."""
    documents = [Document("s", str(i), b"") for i in range(20)]
    assert shuffle_documents(documents, seed=0) != shuffle_documents(documents, seed=1)


def write_wheel(
    directory: Path, name: str, licence: str, files: Sequence[tuple[str, bytes]]
) -> None:
    """Write a wheel with just what the corpus reads of it."""
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        for path, text in files:
            archive.writestr(path, text)


@pytest.fixture
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a held-out module and another one in place of the standard library."""
    files = [EXAM[0], ("plain.py", module_text("plain", 30))]
    monkeypatch.setattr(corpus, "_standard_library", lambda: iter(files))


@pytest.mark.usefixtures("small_library")
def test_a_corpus_is_reproducible_and_comes_back_whole(tmp_path: Path) -> None:
    """Two builds agree to the bit; copies, vendored code, data and the exam are not in them."""
    package = module_text("package", 40)
    write_wheel(
        tmp_path,
        "demo",
        "MIT",
        [
            ("demo/package.py", package.replace(b"\n", b"\r\n")),
            ("demo/the_same.py", package),
            ("demo/with_one_more_line.py", package + b"one_more_line_at_the_end = True\n"),
            ("demo/_vendor/vendored.py", module_text("vendored", 40)),
            ("demo/stolen.py", b"\n".join(EXAM_LINES[:50])),
            ("demo/table.py", b"    0x41, 0x42, 17, 23,\n" * 40),
            ("demo/readme.txt", module_text("text", 40)),
        ],
    )
    packages = [Package("demo", "1.0", "MIT")]
    builds = []
    for name in ("one.xz", "two.xz"):
        manifest = build_corpus(
            tmp_path / name, packages=packages, wheels=tmp_path, heldout=EXAM, preset=0
        )
        builds.append((tmp_path / name).read_bytes())
    assert builds[0] == builds[1]
    assert load_manifest(tmp_path / "one.xz") == manifest
    assert load_corpus(tmp_path / "one.xz") == [
        Document("cpython", "plain.py", module_text("plain", 30)),
        Document("demo", "demo/package.py", package),
    ]
    assert manifest["excluded"] == {
        "data": 1,
        "exact duplicate": 1,
        "held-out lines": 1,
        "held-out path": 1,
        "near duplicate": 1,
    }
    cpython, demo = manifest["sources"]
    assert (cpython["files"], cpython["licence"]) == (1, "PSF-2.0")
    assert demo["sha256"] == hashlib.sha256(package).hexdigest()
    assert demo["metadata"]["expression"] == "MIT"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.usefixtures("small_library")
def test_a_copyleft_package_is_refused(tmp_path: Path) -> None:
    """The pin may say MIT: the wheel's own metadata decides."""
    write_wheel(tmp_path, "demo", "GPL-3.0-or-later", [("demo.py", module_text("demo", 30))])
    with pytest.raises(ValueError, match="must be under permissive licences; demo 1.0 states"):
        build_corpus(tmp_path / "c.xz", packages=[Package("demo", "1.0", "MIT")], wheels=tmp_path)
    assert not (tmp_path / "c.xz").exists()


@pytest.mark.usefixtures("small_library")
def test_a_damaged_or_foreign_corpus_is_refused(tmp_path: Path) -> None:
    """A file cut short of a document, or of another format, does not load."""
    path = tmp_path / "c.xz"
    build_corpus(path, packages=[], heldout=EXAM, preset=0)
    plain = lzma.decompress(path.read_bytes())
    path.write_bytes(lzma.compress(plain[:-5], preset=0))
    with pytest.raises(ValueError, match="must hold a body with SHA-256"):
        load_corpus(path)
    path.write_bytes(lzma.compress(b'{"format": 99}\n', preset=0))
    with pytest.raises(ValueError, match="must be a corpus of format 1; got 99"):
        load_corpus(path)


# Baselines


def witten_bell(training: Sequence[bytes], context: bytes, byte: int) -> float:
    """Probability by the recursion of the definition, from counts in dictionaries."""
    below = 1.0 / 256.0 if not context else witten_bell(training, context[1:], byte)
    n = len(context)
    after = Counter(
        text[i + n] for text in training for i in range(len(text) - n) if text[i : i + n] == context
    )
    total = sum(after.values()) + len(after)
    return (after[byte] + len(after) * below) / total if total else below


texts = st.lists(st.binary(max_size=12) | st.text("ab", max_size=20).map(str.encode), max_size=4)


@given(training=texts, scored=texts, order=st.integers(0, 4))
def test_ngram_probabilities_are_those_of_the_definition(
    training: list[bytes], scored: list[bytes], order: int
) -> None:
    """Counting by sorted 64-bit integers equals counting by dictionaries.

    Each level costs an addition, a product and a quotient of positive float64 numbers: three
    roundings a level, order + 1 levels, and one more for each logarithm's argument.
    """
    got = NgramModel(order).log2_probabilities(training, scored)
    bound = 2 * (3 * (order + 1) + 1) * np.finfo(np.float64).eps
    assert [len(values) for values in got] == [len(text) for text in scored]
    for text, values in zip(scored, got, strict=True):
        for i, value in enumerate(values):
            expected = witten_bell(training, text[max(0, i - order) : i], text[i])
            # A relative error of p moves log2 p by that over ln 2; log2 rounds its own result.
            allowed = bound / math.log(2.0) + np.finfo(np.float64).eps * abs(value)
            assert abs(value - math.log2(expected)) <= allowed, (text, i)


@given(training=texts, context=st.binary(max_size=6), order=st.integers(0, 7))
def test_ngram_probabilities_sum_to_one(training: list[bytes], context: bytes, order: int) -> None:
    """Over all 256 next bytes, after any context: the code length is one a decoder could use."""
    scored = [context + bytes([byte]) for byte in range(256)]
    last = [values[-1] for values in NgramModel(order).log2_probabilities(training, scored)]
    assert math.fsum(2.0**value for value in last) == pytest.approx(1.0, rel=1e-12)


def test_an_order_beyond_64_bits_is_refused() -> None:
    """A gram of nine bytes would silently lose its first."""
    with pytest.raises(ValueError, match="order must be 0 to 7"):
        NgramModel(8)


def test_compressor_rows_are_the_sizes_of_the_files_they_name() -> None:
    """The gzip figure is that of the gzip format; nats are bits times ln 2."""
    import gzip

    heldout = load_heldout()[:3]
    length = sum(len(text) for _, text in heldout)
    rows = {row.name: row for row in compressor_baselines(heldout)}
    size = sum(len(gzip.compress(text, 9, mtime=0)) for _, text in heldout)
    assert rows["gzip -9 per file"].bits_per_byte == pytest.approx(8 * size / length, rel=1e-3)
    packed = lzma.compress(b"".join(text for _, text in heldout), preset=9 | lzma.PRESET_EXTREME)
    assert rows["xz -9e joined"].bits_per_byte == 8 * len(packed) / length
    for row in rows.values():
        assert row.trained_on_bytes == 0
        assert row.nats_per_byte == pytest.approx(row.bits_per_byte * math.log(2.0))


def test_more_context_and_more_text_help_the_ngram_model() -> None:
    """On real files: order 3 beats order 0, and seeing related text beats seeing little."""
    heldout = load_heldout()
    scored, training = heldout[:2], [text for _, text in heldout[2:12]]
    short = ngram_baseline(training, scored, order=0)
    long = ngram_baseline(training, scored, order=3)
    little = ngram_baseline(training[:1], scored, order=3)
    assert long.bits_per_byte < short.bits_per_byte < 8.0
    assert long.bits_per_byte < little.bits_per_byte
    assert long.trained_on_bytes == sum(map(len, training))

"""Tokenizers: the round trip, the settings around a tokenizer.json, and streaming.

The property of a stream is exact: what it emits, joined, is `decode` of all ids, whatever the ids.
A model under sampling emits any of them, so they are drawn freely and not taken from encoded text.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from stage0_reference.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, load_tokenizer

pytestmark = pytest.mark.stage0

EURO = list("€".encode())
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def byte_level_backend(decoder: decoders.Decoder | None = None) -> Backend:
    """Build a vocabulary of 256 bytes, a few merges, and added tokens awkward on purpose."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = [("h", "e"), ("Ġ", "w"), ("â", "Ĥ"), ("ð", "Ł")]  # the last two: halves of characters
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoder or decoders.ByteLevel()
    backend.add_special_tokens(["<｜begin▁of▁text｜>", "<｜end▁of▁text｜>"])
    # With letters outside the byte alphabet, within it, and both.
    backend.add_tokens([AddedToken(text) for text in ("<think>", "日本", "two words", "éĠ", "é ")])
    return backend


def sentencepiece_backend() -> Backend:
    """Build a vocabulary with bytes to fall back on, and the decoder that published ones have."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "▁a", "▁b", "é", "�", "▁c▁", "a gap, left out below", "▁d", ""]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces) if "gap" not in piece},
            merges=[("▁", "▁"), ("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def word_backend() -> Backend:
    """Build a vocabulary of whole words with no decoder, which joins them with spaces."""
    return Backend(models.WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one"))


def wordpiece_backend() -> Backend:
    """Build a vocabulary whose pieces lean on what stands before them."""
    pieces = ["[UNK]", "do", "##ing", "n't", ".", ",", "un", "##able"]
    backend = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}))
    backend.decoder = decoders.WordPiece()
    return backend


TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(),
    "byte-level": HubTokenizer(byte_level_backend()),
    # The same inside a sequence, which a stream cannot see into.
    "byte-level-in-sequence": HubTokenizer(
        byte_level_backend(decoders.Sequence([decoders.ByteLevel()]))
    ),
    "sentencepiece": HubTokenizer(sentencepiece_backend()),
    "metaspace": HubTokenizer(byte_level_backend(decoders.Metaspace())),
    "words": HubTokenizer(word_backend()),
    "wordpiece": HubTokenizer(wordpiece_backend()),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@every_tokenizer
@given(data=st.data())
def test_a_streams_texts_joined_are_the_decoded_ids(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Whatever the ids: cut characters, broken ones, special ones, ones beyond the vocabulary."""
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 2), max_size=24))
    stream = tokenizer.stream()
    texts = [stream.push(token_id) for token_id in ids]
    assert "".join(texts) + stream.flush() == tokenizer.decode(ids)


@given(ids=st.lists(st.sampled_from([*range(3, 30), *EURO, 0xC5, 0xE5, 0x85, *range(258, 272)])))
@example(ids=[3 + byte for byte in EURO] + [3 + 0xFF, 261])  # one bad byte spoils its whole run
@example(ids=[259, 263, 1, 263, 264])  # leading spaces, and a special token that is no beginning
@example(ids=[263, 268, 269])  # an id without a token, and a word that keeps its space
@example(ids=[268, 84, 268, 181])  # the same between two bytes, which stay one run
@example(ids=[263, 270, 269])  # a token without text
def test_a_sentencepiece_stream_is_exact_around_bytes_and_spaces(ids: list[int]) -> None:
    """The same, with the ids that its decoder treats specially drawn often."""
    tokenizer = TOKENIZERS["sentencepiece"]
    stream = tokenizer.stream()
    texts = [stream.push(token_id) for token_id in ids]
    assert "".join(texts) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["bytes", "byte-level", "byte-level-in-sequence", "sentencepiece"])
@given(text=TEXTS)
@example(text="€ 🙂 日本 e\u0301")
def test_a_stream_of_good_text_never_shows_half_a_character(name: str, text: str) -> None:
    """Every text emitted is a piece of the whole, in order, with no replacement mark of its own."""
    tokenizer = TOKENIZERS[name]
    stream = tokenizer.stream()
    shown = ""
    whole = tokenizer.decode(tokenizer.encode(text))
    for token_id in tokenizer.encode(text):
        shown += stream.push(token_id)
        assert whole.startswith(shown)
    assert shown + stream.flush() == whole


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
def test_a_byte_stream_shows_a_character_with_its_last_byte(name: str) -> None:
    """Nothing is held longer than it must be: to be exact by waiting for the end is no stream."""
    tokenizer = TOKENIZERS[name]
    stream = tokenizer.stream()
    ids = tokenizer.encode("a€b", add_bos=False) if name == "bytes" else tokenizer.encode("a€b")
    texts = [stream.push(token_id) for token_id in ids]
    assert [text for text in texts if text] == ["a", "€", "b"]
    assert texts[-1] == "b" and stream.flush() == ""


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
def test_a_byte_stream_does_not_hold_back_what_is_broken(name: str) -> None:
    """Bytes that cannot become a character are shown as they come; waiting would cost O(n^2)."""
    tokenizer = TOKENIZERS[name]
    stream = tokenizer.stream()
    broken = next(
        i for i in range(256) if tokenizer.decode([i]) == tokenizer.decode([i, i])[1:] == "�"
    )
    assert [stream.push(broken) for _ in range(50)][1:] == ["�"] * 49


def test_a_sentencepiece_stream_shows_a_character_with_the_next_token() -> None:
    """A run of bytes is shown when it has ended, everything else at once."""
    tokenizer = TOKENIZERS["sentencepiece"]
    stream = tokenizer.stream()
    ids = [263, *(3 + byte for byte in EURO), 264, 264]  # "▁a", three bytes, "▁b", "▁b"
    assert [stream.push(token_id) for token_id in ids] == ["a", "", "", "", "€ b", " b"]


@every_tokenizer
def test_a_flushed_stream_begins_anew(tokenizer: Tokenizer) -> None:
    """What was held back before the flush does not leak into the next text."""
    ids = [min(0xE2, tokenizer.vocab_size - 1), 1]
    stream = tokenizer.stream()
    texts = ["".join(map(stream.push, ids)) + stream.flush() for _ in range(2)]
    assert texts == [tokenizer.decode(ids)] * 2


@given(text=TEXTS)
def test_byte_tokenizer_round_trips_any_text(text: str) -> None:
    """Ids are the UTF-8 bytes behind the beginning of text."""
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == [256, *text.encode()]
    assert tokenizer.encode(text, add_bos=False) == list(text.encode())
    assert ByteTokenizer(add_bos=False).encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), *tokenizer.eos_token_ids]) == text


@given(text=TEXTS)
@example(text="<think>日本 é two words")
def test_byte_level_tokenizer_round_trips_any_text(text: str) -> None:
    """Merges and added tokens change the ids and never the text."""
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def write(directory: Path, backend: Backend | None = None, **files: object) -> Path:
    """Write a tokenizer.json, and the files beside it by the names they have without .json."""
    if backend is not None:
        backend.save(str(directory / "tokenizer.json"))
    for stem, content in files.items():
        (directory / f"{stem}.json").write_text(json.dumps(content))
    return directory


BOS, EOS = "<｜begin▁of▁text｜>", "<｜end▁of▁text｜>"
BOS_ID, EOS_ID = 260, 261


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        pytest.param({}, None, (), id="nothing"),
        pytest.param(
            {"tokenizer_config": {"bos_token": BOS, "eos_token": EOS}}, 260, (261,), id="strings"
        ),
        pytest.param(
            {"tokenizer_config": {"bos_token": {"content": BOS}, "eos_token": {"content": EOS}}},
            260,
            (261,),
            id="objects",
        ),
        pytest.param(
            {"tokenizer_config": {"bos_token": None, "eos_token": EOS}}, None, (261,), id="null"
        ),
        pytest.param(
            {
                "tokenizer_config": {"eos_token": EOS},
                "generation_config": {"bos_token_id": 260, "eos_token_id": [262, 261, 5]},
                "config": {"bos_token_id": 1, "eos_token_id": 2},
            },
            260,
            (261, 262, 5),
            id="generation-config-adds-ends-and-config-does-not",
        ),
        pytest.param(
            {"config": {"bos_token_id": 260, "eos_token_id": 261}}, 260, (261,), id="config-alone"
        ),
        pytest.param(
            {"config": {"bos_token_id": 260, "eos_token_id": [261, 7]}},
            260,
            (261, 7),
            id="config-with-a-list",
        ),
    ],
)
def test_first_and_last_ids_are_found_where_the_hub_has_them(
    tmp_path: Path, files: dict[str, object], bos: int | None, eos: tuple[int, ...]
) -> None:
    """Each of the three files, and the order among them."""
    tokenizer = load_tokenizer(write(tmp_path, byte_level_backend(), **files))
    assert isinstance(tokenizer, HubTokenizer)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (bos, eos)
    assert tokenizer.vocab_size == 267


def with_post_processor() -> Backend:
    """Let tokenizer.json itself surround a text with special tokens."""
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $0 {EOS}", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
    )
    return backend


@pytest.mark.parametrize(
    ("add_bos_token", "post_processed", "expected"),
    [
        pytest.param(True, False, [BOS_ID, "a"], id="asked-for"),
        pytest.param(False, False, ["a"], id="declined"),
        pytest.param(None, False, ["a"], id="silent"),
        pytest.param(True, True, [BOS_ID, "a"], id="asked-for-over-a-post-processor"),
        pytest.param(False, True, ["a"], id="declined-over-a-post-processor"),
        pytest.param(None, True, [BOS_ID, "a", EOS_ID], id="left-to-the-post-processor"),
    ],
)
def test_add_bos_token_is_honoured(
    tmp_path: Path, add_bos_token: bool | None, post_processed: bool, expected: list[int | str]
) -> None:
    """True and False decide; silence leaves it to the post-processor; the caller overrules all."""
    backend = with_post_processor() if post_processed else byte_level_backend()
    settings: dict[str, object] = {"bos_token": BOS, "eos_token": EOS}
    if add_bos_token is not None:
        settings["add_bos_token"] = add_bos_token
    tokenizer = load_tokenizer(write(tmp_path, backend, tokenizer_config=settings))
    a = backend.token_to_id("a")
    assert tokenizer.encode("a") == [a if item == "a" else item for item in expected]
    assert tokenizer.encode("a", add_bos=True) == [BOS_ID, a]
    assert tokenizer.encode("a", add_bos=False) == [a]
    assert tokenizer.encode(BOS + "a", add_bos=True) == [BOS_ID, a]  # spelt out, and not doubled
    assert tokenizer.decode(tokenizer.encode("a")) == "a"


def test_truncation_and_padding_in_the_file_do_not_reach_a_prompt(tmp_path: Path) -> None:
    """A tokenizer.json saved after training may cut at 4 tokens, silently."""
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(write(tmp_path, backend))
    assert len(tokenizer.encode("x" * 20)) == 20
    assert len(tokenizer.encode("x")) == 1


@pytest.mark.parametrize("stem", ["tokenizer_config", "config"])
@pytest.mark.parametrize("add_bos", [None, True, False], ids=["silent", "bos", "no-bos"])
def test_a_byte_tokenizer_is_named_in_a_config(
    tmp_path: Path, stem: str, add_bos: bool | None
) -> None:
    """It has no vocabulary to save, only its name."""
    files: dict[str, dict[str, object]] = {stem: {"tokenizer_class": "ByteTokenizer"}}
    if add_bos is not None:
        files.setdefault("tokenizer_config", {})["add_bos_token"] = add_bos
    tokenizer = load_tokenizer(write(tmp_path, None, **files))
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("a") == ([97] if add_bos is False else [256, 97])


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("tokenizer.model", "save_pretrained"),
        ("tiktoken.model", "convert_tiktoken_to_fast"),
        ("vocab.json", "save_pretrained"),
    ],
)
def test_other_vocabularies_are_refused_with_the_way_to_convert_them(
    tmp_path: Path, name: str, remedy: str
) -> None:
    """The file that is there is named, and not only the one that is not."""
    (tmp_path / name).write_bytes(b"\0")
    with pytest.raises(NotImplementedError, match=rf"{name}, which is not supported.*{remedy}"):
        load_tokenizer(write(tmp_path, config={"tokenizer_class": "LlamaTokenizer"}))


def test_no_tokenizer_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    """Both kinds are named."""
    with pytest.raises(ValueError, match=r"tokenizer\.json.*ByteTokenizer.*tokenizer_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"eos_token": "<none>"}}, "eos_token must be a token of .*<none>"),
        ({"tokenizer_config": {"bos_token": 7}}, "bos_token must be a token of .*7"),
        ({"generation_config": {"eos_token_id": ["2"]}}, r"eos_token_id must be an id .*\['2'\]"),
        (
            {"config": {"bos_token_id": True}},
            "bos_token_id must be an id or a list of ids; got True",
        ),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, "add_bos_token must be a bool; got 'yes'"),
        ({"tokenizer_config": {"add_bos_token": True}}, "add_bos is True and bos_token_id None"),
        ({"config": []}, r"config\.json must hold a JSON object; got list"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, files: dict[str, object], message: str
) -> None:
    """A wrong last id is a model that never stops; better said before it starts."""
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write(tmp_path, byte_level_backend(), **files))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_not_json_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """For instance a page saved in the place of a file."""
    write(tmp_path, byte_level_backend())
    (tmp_path / name).write_text("<html>")
    with pytest.raises(ValueError, match=rf"{name} (is not valid JSON|cannot be read as a token)"):
        load_tokenizer(tmp_path)


def test_add_bos_without_a_beginning_of_text_is_refused() -> None:
    """The caller asked for something that the model does not have."""
    with pytest.raises(ValueError, match="add_bos must not be True"):
        TOKENIZERS["byte-level"].encode("a", add_bos=True)

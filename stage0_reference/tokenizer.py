"""Text to token ids and back, one id at a time if need be.

Two tokenizers behind one small protocol. `HubTokenizer` is what published checkpoints come with, a
`tokenizer.json` and the settings around it; `ByteTokenizer` needs no file, and serves models small
enough to be trained on the spot.

Streaming is where detokenisers go wrong. A character of three UTF-8 bytes may arrive in three
tokens, and printing each as it comes shows three replacement marks; decoding everything again at
every step is right and costs O(n^2). The streams here hold text back until nothing that follows can
change it, and promise one thing: what they emit, joined, is `decode` of all the ids. For byte-level
vocabularies (DeepSeek, GLM, LongCat) that takes a table from id to bytes and an incremental UTF-8
decoder, which never holds more than three bytes.

Left out: chat templates, and vocabularies that come only as `tokenizer.model` or `tiktoken.model`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from stage0_reference.hub_files import CONFIG_FILE, how_to_mend, read_json_object

if TYPE_CHECKING:
    import tokenizers

__all__ = ["ByteTokenizer", "HubTokenizer", "TokenStream", "Tokenizer", "load_tokenizer"]

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

# What a checkpoint may have instead of a tokenizer.json, and how to make one.
_SAVE_FAST = (
    "Write one with transformers: "
    "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
)
_UNSUPPORTED = {
    "tokenizer.model": _SAVE_FAST,
    "vocab.json": _SAVE_FAST,
    "tiktoken.model": (
        "Write one with transformers: "
        "transformers.integrations.tiktoken.convert_tiktoken_to_fast(encoding, directory)"
    ),
}

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@runtime_checkable
class TokenStream(Protocol):
    """Ids in, text out, never half a character.

    All texts of one stream, joined, are `Tokenizer.decode` of all its ids.
    """

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is settled by it, often none."""
        ...

    def flush(self) -> str:
        """End the text: return what was held back. The stream then stands at a new beginning."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """What generation asks of a tokenizer."""

    @property
    def bos_token_id(self) -> int | None:
        """Beginning-of-text id, or None where the model has none."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text; a chat model often has several."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` can give; an embedding may have more rows."""
        ...

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Turn text into ids.

        Parameters
        ----------
        text
            Any text; a special token's spelling in it becomes that token.
        add_bos
            Begin with `bos_token_id`; None means what the checkpoint says.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn ids into text; special and unknown ids add nothing, broken UTF-8 becomes U+FFFD."""
        ...

    def stream(self) -> TokenStream:
        """Begin to decode one id at a time."""
        ...


class ByteTokenizer:
    """Bytes as tokens: ids 0 to 255 are bytes, 256 begins a text and 257 ends it.

    Parameters
    ----------
    add_bos
        Whether `encode` begins with 256 unless told otherwise.
    """

    bos_token_id = 256
    eos_token_ids = (257,)
    vocab_size = 258

    def __init__(self, *, add_bos: bool = True) -> None:
        self.add_bos = add_bos

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Turn text into its UTF-8 bytes, behind 256 if ``add_bos`` (None: as constructed)."""
        begin = [self.bos_token_id] if _either(add_bos, self.add_bos) else []
        return begin + list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Read the bytes as UTF-8, U+FFFD where they are not; ids beyond 255 add nothing."""
        return b"".join(map(_byte, token_ids)).decode("utf-8", errors="replace")

    def stream(self) -> TokenStream:
        """Begin to decode one id at a time."""
        return _ByteStream(_byte)


class HubTokenizer:
    """A `tokenizer.json`, with the ids and the habits that the files beside it give.

    Parameters
    ----------
    tokenizer
        The `tokenizers` object. Truncation and padding are switched off in it, so that no prompt
        is cut.
    bos_token_id, eos_token_ids
        As in `Tokenizer`.
    add_bos
        Whether `encode` begins with ``bos_token_id``, and adds nothing else; None leaves it to the
        post-processor in `tokenizer.json`.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        add_bos: bool | None = None,
    ) -> None:
        if add_bos and bos_token_id is None:
            raise ValueError("add_bos is True and bos_token_id None; expected the id to begin with")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bos_token_id = bos_token_id
        self._eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.add_bos = add_bos
        # Ids may have gaps, which decoding skips; a stream has to know them for that.
        self._token_of_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> HubTokenizer:
        """Read a tokenizer in the hub's layout.

        Parameters
        ----------
        directory
            Holds `tokenizer.json`, and what it has of `tokenizer_config.json`,
            `generation_config.json` and `config.json`.

        Raises
        ------
        ValueError
            A file cannot be read, or names a token that the vocabulary does not have.

        Notes
        -----
        The first is: `bos_token` of `tokenizer_config.json`, else `bos_token_id` of
        `generation_config.json`, else that of `config.json`. A text ends at `eos_token` of
        `tokenizer_config.json` and at every `eos_token_id` of `generation_config.json`; only if
        both are silent does `config.json` count, the least maintained of them in published models.
        """
        import tokenizers

        directory = Path(directory)
        path = directory / TOKENIZER_FILE
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{path} cannot be read as a tokenizer ({error}); {how_to_mend(path)}"
            ) from error
        settings = _read_json(directory / TOKENIZER_CONFIG_FILE)
        generation = _read_json(directory / GENERATION_CONFIG_FILE)
        config = _read_json(directory / CONFIG_FILE)

        def named(key: str) -> list[int]:
            token = settings.get(key)
            content = token.get("content") if isinstance(token, dict) else token
            if content is None:
                return []
            token_id = tokenizer.token_to_id(content) if isinstance(content, str) else None
            if token_id is None:
                raise ValueError(
                    f"{TOKENIZER_CONFIG_FILE}: {key} must be a token of {TOKENIZER_FILE}; "
                    f"got {token!r}"
                )
            return [token_id]

        bos = (
            named("bos_token")
            or _ids(generation, "bos_token_id", GENERATION_CONFIG_FILE)
            or _ids(config, "bos_token_id", CONFIG_FILE)
        )
        eos = (
            named("eos_token") + _ids(generation, "eos_token_id", GENERATION_CONFIG_FILE)
        ) or _ids(config, "eos_token_id", CONFIG_FILE)
        return cls(
            tokenizer,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=eos,
            add_bos=_read_add_bos(settings),
        )

    @property
    def bos_token_id(self) -> int | None:
        """Beginning-of-text id, or None where the model has none."""
        return self._bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, each once."""
        return self._eos_token_ids

    @property
    def vocab_size(self) -> int:
        """One more than the largest id in the vocabulary, added tokens included."""
        return max(self._token_of_id, default=-1) + 1

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Turn text into ids.

        Parameters
        ----------
        text
            Any text; a special token's spelling in it becomes that token.
        add_bos
            Begin with `bos_token_id`, and add nothing else; a text that spells it out already does
            not get a second one. None means what the checkpoint says.
        """
        add_bos = _either(add_bos, self.add_bos)
        if add_bos is None:
            return list(self._tokenizer.encode(text).ids)
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if not add_bos:
            return token_ids
        if self._bos_token_id is None:
            raise ValueError("add_bos must not be True for a tokenizer without a bos_token_id")
        begin = [] if token_ids[:1] == [self._bos_token_id] else [self._bos_token_id]
        return begin + token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn ids into text; special and unknown ids add nothing, broken UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(self._visible(token_ids), skip_special_tokens=True)

    def stream(self) -> TokenStream:
        """Begin to decode one id at a time."""
        from tokenizers import decoders

        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return _ByteStream(self._token_bytes)
        return _WindowStream(self)

    def _visible(self, token_ids: Iterable[int]) -> list[int]:
        """Keep the ids that stand for text."""
        return [
            token_id
            for token_id in map(int, token_ids)
            if token_id in self._token_of_id and token_id not in self._special_ids
        ]

    def _token_bytes(self, token_id: int) -> bytes:
        """Return what a byte-level token stands for; an added token is spelt in plain text."""
        if not self._visible([token_id]):
            return b""
        token = self._token_of_id[token_id]
        try:
            return bytes(_BYTE_OF_LETTER[letter] for letter in token)
        except KeyError:
            return token.encode("utf-8")

    def _is_byte_token(self, token_id: int) -> bool:
        """Say whether the token is one byte of a character that the vocabulary does not have."""
        return _BYTE_TOKEN.fullmatch(self._token_of_id[token_id]) is not None


class _ByteStream:
    """The stream where every token is a number of bytes, whatever stands around it."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """The stream for decoders that look around, as those of SentencePiece vocabularies do.

    They drop a leading space at the beginning of the text only, and read a run of `<0xE2>` tokens
    as UTF-8 as a whole. So the newest ids are decoded together with the last ones that were
    emitted, and what these alone decode to is cut off in front; and nothing is emitted while a run
    of bytes may go on, or behind a U+FFFD, which may yet become a character. The decoder must leave
    earlier text alone; all that are in use with this family of models do.
    """

    def __init__(self, tokenizer: HubTokenizer) -> None:
        self._tokenizer = tokenizer
        self._emitted: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._tokenizer._visible([token_id]):
            return ""
        self._held.append(token_id)
        # Said before decoding: a run of n bytes is decoded once, not n times.
        if self._tokenizer._is_byte_token(token_id):
            return ""
        return self._emit(may_go_on=True)

    def flush(self) -> str:
        text = self._emit(may_go_on=False)
        self._emitted, self._held = [], []
        return text

    def _emit(self, *, may_go_on: bool) -> str:
        """Return the text of the held ids, and let them be the next ones' surroundings."""
        before = self._tokenizer.decode(self._emitted)
        text = self._tokenizer.decode(self._emitted + self._held)
        if may_go_on and text.endswith("\ufffd"):
            return ""
        # Ids that show nothing (an empty token, a space dropped at the beginning) cannot stand in
        # front by themselves: the decoder would take what follows for the beginning.
        if self._tokenizer.decode(self._held):
            self._emitted = self._held
        else:
            self._emitted = self._emitted + self._held
        self._held = []
        return text.removeprefix(before)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint.

    Parameters
    ----------
    directory
        The checkpoint's. With `tokenizer.json` it is a `HubTokenizer`; without, a `ByteTokenizer`
        if `tokenizer_config.json`, or `config.json`, says ``"tokenizer_class": "ByteTokenizer"``.

    Raises
    ------
    ValueError
        There is no tokenizer, or a file that cannot be read.
    NotImplementedError
        There is one of a kind that is not supported; the text says how to convert it.
    """
    directory = Path(directory)
    if (directory / TOKENIZER_FILE).is_file():
        return HubTokenizer.from_directory(directory)
    settings = _read_json(directory / TOKENIZER_CONFIG_FILE)
    for source in (settings, _read_json(directory / CONFIG_FILE)):
        if source.get("tokenizer_class") == "ByteTokenizer":
            add_bos = _read_add_bos(settings)
            return ByteTokenizer(add_bos=True if add_bos is None else add_bos)
    for name, remedy in _UNSUPPORTED.items():
        if (directory / name).is_file():
            raise NotImplementedError(
                f"directory {str(directory)!r} has {name}, which is not supported; expected "
                f"{TOKENIZER_FILE}. {remedy}"
            )
    raise ValueError(
        f"directory {str(directory)!r} has no tokenizer; looked for {TOKENIZER_FILE}, and for "
        f'"tokenizer_class": "ByteTokenizer" in {TOKENIZER_CONFIG_FILE} and {CONFIG_FILE}. '
        "Get the file that came with the weights"
    )


def _letters_of_bytes() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    Bytes that Latin-1 prints stand for themselves; the others (controls, spaces, the soft hyphen)
    take the letters from U+0100 on, in order.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_LETTER = _letters_of_bytes()


def _byte(token_id: int) -> bytes:
    """Return the byte that an id of `ByteTokenizer` stands for, none if it is special."""
    return bytes([token_id]) if 0 <= token_id < 256 else b""


def _either(choice: bool | None, default: bool | None) -> bool | None:
    """Return the caller's choice, if there is one."""
    return default if choice is None else choice


def _read_json(path: Path) -> dict[str, Any]:
    """Read an object; a file that is not there is an empty one."""
    return read_json_object(path) if path.is_file() else {}


def _read_add_bos(settings: dict[str, Any]) -> bool | None:
    """Read add_bos_token."""
    value = settings.get("add_bos_token")
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{TOKENIZER_CONFIG_FILE}: add_bos_token must be a bool; got {value!r}")
    return value


def _ids(settings: dict[str, Any], key: str, file_name: str) -> list[int]:
    """Read an id, a list of ids, or none."""
    value = settings.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item >= 0 for item in values):
        raise ValueError(f"{file_name}: {key} must be an id or a list of ids; got {value!r}")
    return values

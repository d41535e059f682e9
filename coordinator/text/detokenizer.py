"""Incremental detokenization: text deltas of a growing token sequence, never half a character.

`tokenizers.decoders.DecodeStream` is not used: it withholds all text after bytes that are not UTF-8, and its deltas
then differ from decoding all ids at once. If a decoder's bytes per token are known, a delta costs one table look-up
and one step of an incremental UTF-8 decoder, for any length of the sequence.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 6
"""Tokens that a decoder looks back, at most, to join neighbours or strip the start; half a character has fewer."""
_MOST_WINDOW_TOKENS = 64
"""Tokens after which a window begins anew wherever it falls."""
_MOST_TRIED = 4096
"""Tokens of the vocabulary that are looked at for an ordinary one; byte and special tokens come before these."""
_LONGEST_CHARACTER_BYTES = 4
"""Bytes of the longest character in UTF-8."""


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text, token by token."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; bytes that may be half a character are held back."""

    def finish(self) -> str:
        """The rest of the text; half a character becomes U+FFFD, as in `Tokenizer.decode`."""

    @property
    def is_at_start(self) -> bool:
        """Whether what the decoder strips off the start of a text may still come."""


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer, and gives the text of single tokens.

    Guarantee: the concatenation of all deltas is `tokenizer.decode(ids)`. For decoders with byte fallback it holds if
    the byte tokens are well-formed UTF-8; otherwise each stray byte gives one U+FFFD, while `Tokenizer.decode` also
    replaces the well-formed characters beside it, which may have been streamed already. Behind a prompt the deltas are
    what all ids decode to after the prompt's own text, and half a character at the prompt's end is completed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_texts: Mapping[int, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        """Special tokens."""
        self._special_ids = frozenset(self.special_texts)
        self._before: list[int] | None = None
        self._texts: dict[int, str] = {}
        self._byte_level: dict[int, bytes] = {}
        self._pieces: dict[int, str | int] = {}
        steps = _decoder_steps(tokenizer)
        kinds = [step["type"] for step in steps]
        self._make: Callable[[frozenset[int]], Detokenizer]
        if kinds == ["ByteLevel"]:
            alphabet = _byte_alphabet()
            self._to_bytes = lambda token: _bytes_of(token, alphabet)
            self._make = self._make_byte_level
        elif (
            "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and _is_plain(steps)
        ):
            self._replacements = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
            self._num_stripped = sum(s["start"] for s in steps if s["type"] == "Strip")
            self._make = self._make_byte_fallback
        else:
            self._make = lambda skipped: WindowDetokenizer(tokenizer, skipped)

    def create(self, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer behind the tokens of a prompt. Cost: a few tokens of the prompt are looked at."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        detokenizer = self._make(skipped)
        num_pushed = 0
        while num_pushed < len(prompt) and detokenizer.is_at_start:
            detokenizer.push(prompt[num_pushed])
            num_pushed += 1
        for token_id in _last_shown(prompt, num_pushed, skipped):
            detokenizer.push(token_id)
        return detokenizer

    def token_text(self, token_id: int) -> str:
        """A token's own text, special tokens included; half characters are U+FFFD. Empty for unknown ids."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._own_text(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes, special tokens included. Empty for unknown ids."""
        if self._make == self._make_byte_level:
            return self._bytes(token_id)
        if self._make == self._make_byte_fallback and isinstance(piece := self._piece(token_id), int):
            return bytes([piece])
        return self.token_text(token_id).encode()

    def _own_text(self, token_id: int) -> str:
        if self._make == self._make_byte_level:
            return self._bytes(token_id).decode("utf-8", "replace")
        if self._make == self._make_byte_fallback:
            piece = self._piece(token_id)
            return piece if isinstance(piece, str) else bytes([piece]).decode("utf-8", "replace")
        if self._before is None:
            self._before = self._ordinary_token()
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        text = self._tokenizer.decode([*self._before, token_id], skip_special_tokens=False)
        return text[len(before) :] if text.startswith(before) else self._tokenizer.decode([token_id])

    def _ordinary_token(self) -> list[int]:
        """A token behind which others show the space that a decoder strips off a text's start; [] if none is found."""
        for token_id in range(min(self._tokenizer.get_vocab_size(with_added_tokens=False), _MOST_TRIED)):
            text = "" if token_id in self._special_ids else self._tokenizer.decode([token_id])
            if text.isascii() and text.isalnum():
                return [token_id]
        return []

    def _bytes(self, token_id: int) -> bytes:
        data = self._byte_level.get(token_id)
        if data is None:
            data = self._byte_level[token_id] = self._to_bytes(self._tokenizer.id_to_token(token_id) or "")
        return data

    def _piece(self, token_id: int) -> str | int:
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            for old, new in self._replacements:
                token = token.replace(old, new)
            match = _BYTE_TOKEN.fullmatch(token)
            piece = self._pieces[token_id] = int(match[1], 16) if match else token
        return piece

    def _make_byte_level(self, skipped: frozenset[int]) -> Detokenizer:
        return ByteLevelDetokenizer(self._bytes, skipped)

    def _make_byte_fallback(self, skipped: frozenset[int]) -> Detokenizer:
        return ByteFallbackDetokenizer(self._piece, skipped, self._num_stripped)


class ByteLevelDetokenizer:
    """For byte-level BPE: every token is a string of bytes."""

    def __init__(self, to_bytes: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._to_bytes = to_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        return "" if token_id in self._skipped else self._decoder.decode(self._to_bytes(token_id))

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._decoder.decode(b"", True)

    @property
    def is_at_start(self) -> bool:
        """See `Detokenizer.is_at_start`."""
        return False


class ByteFallbackDetokenizer:
    """For SentencePiece vocabularies: a token is text, or one byte of a character that has no token."""

    def __init__(self, piece: Callable[[int], str | int], skipped: frozenset[int], num_stripped: int) -> None:
        self._piece = piece
        self._skipped = skipped
        self._num_to_strip = num_stripped
        self._held = b""

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        if token_id in self._skipped:
            return ""
        piece = self._piece(token_id)
        text = self._push_byte(piece) if isinstance(piece, int) else self.finish() + piece
        return self._strip(text) if self._num_to_strip and text else text

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        text = _REPLACEMENT * len(self._held)
        self._held = b""
        return text

    @property
    def is_at_start(self) -> bool:
        """See `Detokenizer.is_at_start`."""
        return self._num_to_strip > 0

    def _push_byte(self, byte: int) -> str:
        held = self._held + bytes([byte])
        try:
            text = held.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and len(held) < _LONGEST_CHARACTER_BYTES:
                self._held = held
                return ""
            if not self._held:
                return _REPLACEMENT
            return self.finish() + self._push_byte(byte)
        self._held = b""
        return text

    def _strip(self, text: str) -> str:
        num = min(self._num_to_strip, len(text) - len(text.lstrip(" ")))
        self._num_to_strip = self._num_to_strip - num if num == len(text) else 0
        return text[num:]


class WindowDetokenizer:
    """For any other decoder: decodes a short window twice and returns the difference.

    The window starts some tokens back, for decoders that join neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._num_read = 0

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        return self._take(hold_back=True)

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._take(hold_back=False)

    @property
    def is_at_start(self) -> bool:
        """See `Detokenizer.is_at_start`."""
        return False  # its window of the prompt's last tokens says what comes before

    def _take(self, hold_back: bool) -> str:
        before = self._decode(self._window[: self._num_read])
        after = self._decode(self._window)
        num_unread = len(self._window) - self._num_read
        if hold_back and after.endswith(_REPLACEMENT) and num_unread < _LONGEST_CHARACTER_BYTES:
            return ""
        self._num_read = len(self._window)
        if self._num_read > 2 * _WINDOW_TOKENS:
            last = self._window[-_WINDOW_TOKENS:]
            # A window that begins within a character would spoil the bytes behind it.
            if after.endswith(self._decode(last).lstrip()) or self._num_read > _MOST_WINDOW_TOKENS:
                self._window, self._num_read = last, _WINDOW_TOKENS
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""


def _last_shown(token_ids: Sequence[int], start: int, skipped: frozenset[int]) -> list[int]:
    """The last tokens from `start` on that have text, as many as a decoder looks back."""
    shown = (token_ids[at] for at in range(len(token_ids) - 1, start - 1, -1) if token_ids[at] not in skipped)
    return [*islice(shown, _WINDOW_TOKENS)][::-1]


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return list(steps)


def _is_plain(steps: list[dict[str, Any]]) -> bool:
    """Whether the steps only replace strings and strip spaces at the left end."""
    replaces = [s for s in steps if s["type"] == "Replace"]
    strips = [s for s in steps if s["type"] == "Strip"]
    kinds = [s["type"] for s in steps]
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    return (
        "Strip" not in kinds[:fused]
        and not {"Replace", "ByteFallback"}.intersection(kinds[fused:])
        and all("String" in s["pattern"] for s in replaces)
        and all(s["content"] == " " and s["stop"] == 0 for s in strips)
    )


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable characters for bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _bytes_of(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()

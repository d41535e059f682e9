"""The served model's tokenizer: text and conversations to token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from specdec.coordinator.text.chat_template import SPECIAL_TOKEN_NAMES, ChatTemplate, template_sources
from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.coordinator.text.request_templates import RequestTemplates
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import IncompatibleReplica, InvalidRequest
from specdec.wire.tokenizer_files import tokenizer_digest, whole_config

_DIGEST_DIGITS = 16
"""Hexadecimal digits of a template's digest: it tells versions apart, and proves nothing."""


class TextTokenizer:
    """A tokenizer with its chat template, as tokenizer.json and tokenizer_config.json describe it."""

    def __init__(self, tokenizer_json: bytes | str, config: dict[str, Any]) -> None:
        text = tokenizer_json.decode() if isinstance(tokenizer_json, bytes) else tokenizer_json
        self.digest = tokenizer_digest(text)
        """Digest as in the identities of replicas."""
        self._tokenizer = Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
        _add_named_tokens(self._tokenizer, config)
        self.longest_token_bytes = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
        """Upper bound of the bytes of text in a token."""
        self.detokenizers = DetokenizerFactory(self._tokenizer)
        self._special_tokens = _special_tokens(config)
        sources = template_sources(config)
        self._template = None if sources is None else ChatTemplate(sources, self._special_tokens)
        self.template_digest = "" if sources is None else _digest([sources, self._special_tokens])
        """Digest of what renders conversations; empty without a template."""
        self._request_templates = RequestTemplates(self._special_tokens)

    @classmethod
    def from_path(cls, path: Path) -> TextTokenizer:
        """Load a folder with tokenizer.json (tokenizer_config.json, chat_template.jinja), or that file."""
        folder = path if path.is_dir() else path.parent
        file = path / "tokenizer.json" if path.is_dir() else path
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.exists() else {}
        return cls(file.read_bytes(), whole_config(config, folder))

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text in the vocabulary; None if there is none."""
        return self._tokenizer.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_aside(self, text: str, add_special_tokens: bool, most: int) -> tuple[int, list[int]]:
        """Encode a long text in a thread; unlike `encode` it lets other threads run.

        Returns the number of tokens, and the last `most` of them: a list of all may need more memory than the text.
        """
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        num_tokens = len(encoding)
        if num_tokens > most:
            encoding.truncate(most, direction="left")
        return num_tokens, encoding.ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, *, is_prompt: bool = False) -> str:
        """Text of token ids, equal to the concatenation of streamed deltas.

        `is_prompt`: half a character at the end is left to the output, which completes it.
        """
        detokenizer = self.detokenizers.create(skip_special_tokens)
        text = "".join([*map(detokenizer.push, token_ids)])
        return text if is_prompt else text + detokenizer.finish()

    def chat_template(self, of_request: str = "") -> ChatTemplate:
        """The model's own template, or the compiled template `of_request`, which must be checked.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or the request's does not compile.
        """
        if of_request:
            return self._request_templates.compiled(of_request)
        if self._template is None:
            raise InvalidRequest("messages", "the model's tokenizer has no chat template; send a prompt instead")
        return self._template

    def describe(self) -> api.TokenizerInfo:
        """The tokenizer's description for clients."""
        shown = ("bos_token", "eos_token", "unk_token", "pad_token")
        return api.TokenizerInfo(
            chat_template=None if self._template is None else self._template.source,
            vocab_size=self._tokenizer.get_vocab_size(with_added_tokens=True),
            **{name: token for name, token in self._special_tokens.items() if name in shown},
        )


def read_tokenizer(tokenizer_json: bytes, config: str) -> TextTokenizer:
    """Read the tokenizer that a target sent. Raises IncompatibleReplica with the cause if it is invalid."""
    try:
        return TextTokenizer(tokenizer_json, json.loads(config or "{}"))
    except BaseException as error:
        # A panic in Rust is no Exception, and would end the link for good.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise IncompatibleReplica(f"its tokenizer cannot be read: {type(error).__name__}: {error}") from error


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGEST_DIGITS]


def _add_named_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that a configuration names and tokenizer.json lacks, with its flags, as transformers does."""
    known = tokenizer.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        listed = {int(token_id): _added(flags) for token_id, flags in listed.items()}
    special = set(_special_tokens(config).values())
    flags_of = {token.content: repr(token) for token in known.values()}
    for _, token in sorted((known if listed is None else listed).items()):
        token.special = token.special or token.content in special
        if flags_of.get(token.content) != repr(token):
            tokenizer.add_tokens([token])
            flags_of[token.content] = repr(token)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [value for key, value in config.items() if key.endswith("_token") and isinstance(value, (str, dict))]
    for value in [*named, *(extra.values() if isinstance(extra, dict) else extra)]:
        token = _added({"content": value} if isinstance(value, str) else value)
        token.special = True
        if token.content and token.content not in flags_of:
            tokenizer.add_special_tokens([token])


def _added(flags: dict[str, Any]) -> AddedToken:
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return AddedToken(flags["content"], **{name: bool(flags.get(name)) for name in names})


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {name: config.get(name) for name in SPECIAL_TOKEN_NAMES}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in tokens.items()
        if isinstance(token, (str, dict))
    }

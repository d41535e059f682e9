"""The served model's tokenizer: text and conversations to token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

from coordinator.text.detokenizer import DetokenizerFactory
from specdec.rpc.errors import IncompatibleReplica, InvalidRequest


class TextTokenizer:
    """A tokenizer with its chat template, as tokenizer.json and tokenizer_config.json describe it."""

    def __init__(self, tokenizer_json: bytes | str, config: dict[str, Any]) -> None:
        text = tokenizer_json.decode() if isinstance(tokenizer_json, bytes) else tokenizer_json
        self._tokenizer = Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.longest_token_bytes = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
        """At least as many bytes of text as any token stands for."""
        self.detokenizers = DetokenizerFactory(self._tokenizer)
        self._special_tokens = _special_tokens(config)
        template = _template_source(config)
        self._render = compile_template(template) if template is not None else None

    @classmethod
    def from_path(cls, path: Path) -> TextTokenizer:
        """From a folder with tokenizer.json (tokenizer_config.json, chat_template.jinja), or that file."""
        folder = path if path.is_dir() else path.parent
        file = path / "tokenizer.json" if path.is_dir() else path
        config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = json.loads(config_file.read_text()) if config_file.exists() else {}
        if template_file.exists():
            config["chat_template"] = template_file.read_text()
        return cls(file.read_bytes(), config)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._render is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_aside(self, text: str, add_special_tokens: bool, most: int) -> tuple[int, list[int]]:
        """For a long text in a thread: other threads go on meanwhile, which `encode` does not let them.

        Returns how many tokens it has, and the last `most` of them: a list of all may take more than the text.
        """
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        num_tokens = len(encoding)
        if num_tokens > most:
            encoding.truncate(most, direction="left")
        return num_tokens, encoding.ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids, equal to the concatenation of streamed deltas."""
        detokenizer = self.detokenizers.create(skip_special_tokens)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of a conversation of (role, content), ending where the assistant's turn starts.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or the template refuses the conversation.
        """
        if self._render is None:
            raise InvalidRequest("messages", "the model's tokenizer has no chat template; send a prompt instead")
        if not messages:
            raise InvalidRequest("messages.messages", "must not be empty")
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._render(messages=conversation, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest("messages", f"the chat template refused the conversation: {error}") from error


def read_tokenizer(tokenizer_json: bytes, config: str) -> TextTokenizer:
    """The tokenizer that a target sent. Raises IncompatibleReplica, which says what is wrong, when it is none."""
    try:
        return TextTokenizer(tokenizer_json, json.loads(config or "{}"))
    except BaseException as error:
        # Libraries raise what they like; what panics in Rust is no Exception, and would end the link for good.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise IncompatibleReplica(f"its tokenizer cannot be read: {type(error).__name__}: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def compile_template(source: str) -> Callable[..., str]:
    """Compile a chat template in a sandbox, with the settings and functions that templates rely on."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source).render


def _template_source(config: dict[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    tokens = {name: config.get(name) for name in names}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in tokens.items()
        if isinstance(token, (str, dict))
    }

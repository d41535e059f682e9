"""Render conversations by a tokenizer's chat templates, as transformers' `apply_chat_template` does."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from specdec.coordinator.text.call_format import CallFormats, with_names
from specdec.coordinator.text.content_format import ContentFormats, fit_content
from specdec.coordinator.text.json_values import JsonValues
from specdec.coordinator.text.system_messages import SystemPlaces
from specdec.wire.errors import InvalidRequest, SpecdecError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_RENDER_S = 10.0
"""Seconds to render a conversation, checked at each piece of text: some templates take quadratic time."""
_RENDERED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
_OF_JINJA = ("self", "loop", "caller", "varargs", "kwargs", "super", "true", "false", "none")
_CONTINUE = "messages.continue_final_message"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A template's input: plain data, checked."""

    messages: list[dict[str, Any]]
    """Oldest first; each has a role."""
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[Any] | None = None
    """Objects that the answer may use; then `variables` has no "documents"."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template; none of the template's `reserved_variables`."""
    values: JsonValues = field(default_factory=JsonValues)
    """Parses call arguments that are texts, within the conversation's bounds."""


class ChatTemplate:
    """The compiled templates of one tokenizer: the default one, and the one for conversations with tools, if any."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile. `sources` maps names to sources, and has "default". Raises jinja2.TemplateError."""
        self.source = sources["default"]
        """Jinja source of the default template."""
        self.reserved_variables = frozenset(
            {*_RENDERED, *_OF_JINJA, *SPECIAL_TOKEN_NAMES, *special_tokens, *_environment().globals}
        )
        """Names of a template's own variables, which callers may not set."""
        self._special_tokens = dict(special_tokens)
        self._default = _Compiled(self.source, special_tokens)
        self._for_tools = _Compiled(sources["tool_use"], special_tokens) if "tool_use" in sources else self._default

    def render(self, conversation: Conversation, most_bytes: int) -> str:
        """The text of a conversation.

        It ends where the assistant's turn starts, or with the last message's content if that is continued.

        Args:
            conversation: has at least one message.
            most_bytes: limit of the text in UTF-8; rendering stops there.

        Raises:
            InvalidRequest: the template refuses the conversation or takes too long.
            RenderedTooLong: the text is too long.
        """
        compiled = self._default if conversation.tools is None else self._for_tools
        messages = [_without_nulls(message) for message in conversation.messages]
        placed = compiled.systems.place(messages)
        messages = [fit_content(i, m, compiled.formats.of_role(m["role"])) for i, m in placed]
        tag = content = ""
        if conversation.continue_final_message:
            # Random, so that no client can send it: it marks the content's end, and shows whether spaces are kept.
            tag = f"CONTINUED-{secrets.token_hex(16)} "
            messages[-1], content = _tagged(messages[-1], tag)
        indexed = zip((index for index, _ in placed), messages, strict=True)
        messages = [compiled.calls.fit(index, message, conversation.values) for index, message in indexed]
        if any(m["role"] == "tool" and "name" not in m for m in messages) and compiled.calls.results_need_names:
            messages = with_names(messages)
        variables = {
            "documents": conversation.documents,
            **conversation.variables,
            **self._special_tokens,
            "messages": messages,
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        text = compiled.render(variables, most_bytes + len(tag))
        return _cut(text, tag, content) if conversation.continue_final_message else text


class RenderedTooLong(Exception):
    """The rendered conversation has more bytes than allowed."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"the rendered conversation exceeds the limit of {most_bytes} bytes")


class _Compiled:
    """One template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = special_tokens
        self._probe_left_s = _MOST_RENDER_S
        self.formats = ContentFormats(self._probe, lambda: self.calls.called())
        self.calls = CallFormats(self._probe, lambda message: fit_content(0, message, self.formats.of_role("user")))
        self.systems = SystemPlaces(
            self._probe,
            lambda message: fit_content(0, message, self.formats.of_role(message["role"])),
            lambda: self.calls.called(),
        )

    def render(self, variables: Mapping[str, Any], most_bytes: int) -> str:
        """The text. Raises InvalidRequest and RenderedTooLong."""
        try:
            text = "".join(self._pieces(variables, most_bytes))
            num_bytes = len(text.encode())
        except (SpecdecError, RenderedTooLong):
            raise
        except UnicodeEncodeError as error:
            raise InvalidRequest("messages", "a text has half of a surrogate pair") from error
        except Exception as error:  # templates are programs: they raise what they like
            message = f"the chat template refused the conversation: {str(error) or type(error).__name__}"
            raise InvalidRequest("messages", message) from error
        if num_bytes > most_bytes:
            raise RenderedTooLong(most_bytes)
        return text

    def _pieces(self, variables: Mapping[str, Any], most_bytes: int, most_s: float | None = None) -> Iterator[str]:
        num_left = most_bytes
        end_s = time.monotonic() + (_MOST_RENDER_S if most_s is None else most_s)
        for piece in self._template.generate(variables):
            num_left -= len(piece)
            if num_left < 0:
                raise RenderedTooLong(most_bytes)
            if time.monotonic() > end_s:
                raise InvalidRequest("messages", f"the chat template takes longer than {_MOST_RENDER_S:g} s for them")
            yield piece

    def _probe(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str | None:
        variables = {"documents": None, "add_generation_prompt": False, **self._special_tokens}
        most_bytes = sum(len(str(message)) for message in messages) + 65536
        started_s = time.monotonic()
        try:
            pieces = self._pieces({**variables, "tools": tools, "messages": messages}, most_bytes, self._probe_left_s)
            return "".join(pieces)
        except Exception:  # templates raise any exception
            return None
        finally:
            self._probe_left_s -= time.monotonic() - started_s


def template_sources(config: Mapping[str, Any]) -> dict[str, str] | None:
    """The templates in a tokenizer's configuration by name; None without a default one."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    elif isinstance(template, str):
        template = {"default": template}
    if not isinstance(template, dict) or not isinstance(template.get("default"), str):
        return None
    return {name: source for name, source in template.items() if isinstance(source, str)}


def _environment() -> jinja2.Environment:
    """A sandbox with the settings and functions that templates rely on."""

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
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """A message without null fields, except the content of one with calls, which may be meant."""
    keeps_content = bool(message.get("tool_calls"))
    return {
        name: value for name, value in message.items() if value is not None or (name == "content" and keeps_content)
    }


def _tagged(message: dict[str, Any], tag: str) -> tuple[dict[str, Any], str]:
    """The last message with a tag at the end of its text, and that text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + tag}, content
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            part = content[index]
            if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                parts = [*content[:index], {**part, "text": text + tag}, *content[index + 1 :]]
                return {**message, "content": parts}, text
    raise InvalidRequest(_CONTINUE, "the last message has no text to continue")


def _cut(text: str, tag: str, content: str) -> str:
    """A rendered text up to the end of the last message's content. White space is trimmed as the template trims it."""
    end = text.rfind(tag.rstrip())
    if end < 0:
        raise InvalidRequest(_CONTINUE, "the chat template leaves out the content of the last message")
    is_kept = text.startswith(tag, end)
    text = text[:end] if is_kept else text[:end].rstrip()
    if not text.endswith(content.lstrip() if is_kept else content.strip()):
        raise InvalidRequest(_CONTINUE, "the chat template changes the content of the last message")
    return text

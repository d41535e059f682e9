"""Chat templates in requests, compiled; the latest are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

from specdec.coordinator.text.chat_template import ChatTemplate
from specdec.wire.errors import InvalidRequest

FIELD = "messages.chat_template"
MOST_TEMPLATE_BYTES = 64 * 1024
"""Bytes of a template, at most; the longest in use have a third of it."""
_MOST_KEPT = 16
"""Compiled templates kept."""
_MOST_MESSAGE_CHARS = 300


class RequestTemplates:
    """Compiled templates by source, sandboxed and bounded like the model's own. Thread-safe."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: the model's, by their names in templates."""
        self._special_tokens = special_tokens
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, ChatTemplate] = OrderedDict()

    def compiled(self, source: str) -> ChatTemplate:
        """Compile a template, or return the kept one. Takes up to a second: call it in a thread.

        Raises:
            InvalidRequest: the source does not compile.
        """
        with self._lock:
            if (kept := self._kept.get(source)) is not None:
                self._kept.move_to_end(source)
                return kept
        try:
            template = ChatTemplate({"default": source}, self._special_tokens)
        except Exception as error:  # Python's compiler may raise, too, on deep nesting
            message = f"{str(error) or type(error).__name__}"[:_MOST_MESSAGE_CHARS]
            raise InvalidRequest(FIELD, f"is not a chat template: {message}") from error
        with self._lock:
            self._kept[source] = template
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return template


def check_request_template(source: str, is_trusted: bool) -> None:
    """Raise InvalidRequest if a request's template is not allowed or too long."""
    if not is_trusted:
        message = "this coordinator does not accept templates: leave it out, or set trust_request_chat_template"
        raise InvalidRequest(FIELD, message)
    if (num_bytes := len(source.encode())) > MOST_TEMPLATE_BYTES:
        raise InvalidRequest(FIELD, f"{num_bytes} bytes exceed the limit of {MOST_TEMPLATE_BYTES}")

"""Chat templates that requests bring, compiled; the latest are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

from specdec.coordinator.text.chat_template import ChatTemplate
from specdec.wire.errors import InvalidRequest

FIELD = "messages.chat_template"
MOST_TEMPLATE_BYTES = 64 * 1024
"""The longest in use have a third of it."""
_MOST_KEPT = 16
_MOST_MESSAGE_CHARS = 300


class RequestTemplates:
    """Templates by their text, in the sandbox and with the bounds of the model's own. For any thread."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """Keep none yet. `special_tokens` are those of the model, by the names that templates use."""
        self._special_tokens = special_tokens
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, ChatTemplate] = OrderedDict()

    def compiled(self, source: str) -> ChatTemplate:
        """The template of this text. Compiling takes up to a second: for a thread.

        Raises:
            InvalidRequest: it is no template.
        """
        with self._lock:
            if (kept := self._kept.get(source)) is not None:
                self._kept.move_to_end(source)
                return kept
        try:
            template = ChatTemplate({"default": source}, self._special_tokens)
        except Exception as error:  # beside jinja's own, what Python's compiler makes of what is nested too deeply
            message = f"{str(error) or type(error).__name__}"[:_MOST_MESSAGE_CHARS]
            raise InvalidRequest(FIELD, f"is not a chat template: {message}") from error
        with self._lock:
            self._kept[source] = template
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return template


def check_request_template(source: str, is_trusted: bool) -> None:
    """Whether a template that a request brings may be compiled. Raises InvalidRequest."""
    if not is_trusted:
        message = "templates of requests are not trusted here (the coordinator's setting trust_request_chat_template)"
        raise InvalidRequest(FIELD, message)
    if (num_bytes := len(source.encode())) > MOST_TEMPLATE_BYTES:
        raise InvalidRequest(FIELD, f"{num_bytes} bytes are more than the limit of {MOST_TEMPLATE_BYTES}")

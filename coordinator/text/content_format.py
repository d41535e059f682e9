"""Whether a chat template takes a message's content as text, as a list of parts, or both, found by rendering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.wire.errors import InvalidRequest

_PROBE = "What this part says."
_USER = "user"
_ASKED = {"role": _USER, "content": "Hello."}


@dataclass(frozen=True, slots=True)
class ContentFormat:
    """Content forms that a template takes from a role."""

    takes_text: bool = True
    takes_parts: bool = False
    takes_empty_text: bool = True
    """False: an empty text is refused, and a part without text is not."""


class ContentFormats:
    """The formats of one template, by role. A role's format is found at its first message."""

    def __init__(
        self, probe: Callable[[list[dict[str, Any]]], str | None], called: Callable[[], dict[str, Any]]
    ) -> None:
        """Find no format yet.

        Args:
            probe: renders messages; None if the template refuses them.
            called: returns a message with a call in the template's form.
        """
        self._probe = probe
        self._called = called
        self._known: dict[str, ContentFormat] = {}

    def of_role(self, role: str) -> ContentFormat:
        """A role's format; the users' format if the template refuses the role."""
        if role not in ("system", "assistant", "tool"):
            role = _USER
        known = self._known.get(role)
        if known is None:
            known = self._find(role) or (ContentFormat() if role == _USER else self.of_role(_USER))
            self._known[role] = known
        return known

    def _find(self, role: str) -> ContentFormat | None:
        as_text = self._render(role, _PROBE)
        as_parts = self._render(role, _parts_of(_PROBE))
        if as_text is not None and _PROBE in as_text:
            takes_parts = as_parts == as_text
            needs_part = (
                takes_parts and self._render(role, "") is None and self._render(role, _parts_of("")) is not None
            )
            return ContentFormat(takes_parts=takes_parts, takes_empty_text=not needs_part)
        # A list that is only printed shows its field names around the text.
        if as_parts is not None and _PROBE in as_parts and "'type'" not in as_parts and '"type"' not in as_parts:
            return ContentFormat(takes_text=False, takes_parts=True)
        return None

    def _render(self, role: str, content: Any) -> str | None:
        """Render the message between the messages that templates require around its role."""
        message = {"role": role, "content": content}
        if role == _USER:
            return self._probe([message])
        if role != "tool":
            return self._probe([*([_ASKED] if role == "assistant" else []), message, _ASKED])
        called = self._called()
        call = called["tool_calls"][0]
        return self._probe([_ASKED, called, {**message, "name": call["function"]["name"], "tool_call_id": call["id"]}])


def fit_content(index: int, message: dict[str, Any], known: ContentFormat) -> dict[str, Any]:
    """A message with its content in the template's form: parts become lines of text, or a text becomes a part.

    Raises:
        InvalidRequest: a part is no text, and the template takes only text.
    """
    content = message.get("content")
    if isinstance(content, str) and not (known.takes_text and (content or known.takes_empty_text)):
        return {**message, "content": _parts_of(content)}
    if isinstance(content, list) and not known.takes_parts:
        return {**message, "content": "\n".join(_text_of(index, number, part) for number, part in enumerate(content))}
    return message


def _parts_of(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _text_of(index: int, number: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        field = f"messages.messages[{index}].content[{number}]"
        raise InvalidRequest(field, "has no text, and the model's chat template takes only text")
    return text

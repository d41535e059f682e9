"""A request of another protocol as a chat, with the places of its fields, so that errors name what the client sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.errors import ApiError, from_specdec, param_of
from specdec.gateway.translation.chat_request import chat_field_names
from specdec.wire.errors import InvalidRequest


class FieldNames(Mapping[str, str]):
    """The client's field names by others. Those in long lists are found when they are asked for."""

    def __init__(self, fixed: Mapping[str, str], locate: Callable[[str], str | None]) -> None:
        """`locate` gives the client's path of a path such as messages[2]; None: it is none of these."""
        self._fixed = fixed
        self._locate = locate

    def __getitem__(self, path: str) -> str:
        own = self._fixed.get(path) or self._locate(path)
        if own is None:
            raise KeyError(path)
        return own

    def __iter__(self) -> Iterator[str]:
        return iter(self._fixed)

    def __len__(self) -> int:
        return len(self._fixed)


@dataclass(frozen=True, slots=True)
class AsChat:
    """A chat request, and what the client calls its fields."""

    request: ChatRequest
    own: FieldNames
    """The client's field names by the chat's."""

    def path(self, path: str) -> str:
        """The client's path of a path in the chat."""
        return param_of(path, self.own)

    def as_written(self, error: InvalidRequest) -> ApiError:
        """An error that names the client's field."""
        return from_specdec(error, self.own)

    def field_names(self, tool_parser: str) -> Mapping[str, str]:
        """The client's field names by gRPC field names, where they differ."""
        names = {name: self.path(of_chat) for name, of_chat in chat_field_names(self.request, tool_parser).items()}
        return FieldNames(names, self.own.get)

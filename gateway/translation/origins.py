"""Origins of tokens, for clients."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_NAMES = MappingProxyType(
    {
        pb.ORIGIN_PREFILL: "prefill",
        pb.ORIGIN_DRAFT: "draft",
        pb.ORIGIN_RECOVERED: "recovered",
        pb.ORIGIN_BONUS: "bonus",
        pb.ORIGIN_DECODE: "decode",
        pb.ORIGIN_FORCED: "forced",
    }
)


class OriginCounter:
    """Counts the rounds of one choice: each commits the accepted proposed tokens and one of the target's own."""

    def __init__(self) -> None:
        self._round = 0
        self._depth = 0

    def told(self, tokens: Iterable[api.OutputToken]) -> list[dict[str, Any]]:
        """The next tokens, as `TokenOrigin`."""
        return [self._next(token) for token in tokens]

    def _next(self, token: api.OutputToken) -> dict[str, Any]:
        is_draft = token.origin in (pb.ORIGIN_DRAFT, pb.ORIGIN_FORCED)
        self._depth = self._depth + 1 if is_draft else 0
        told = {
            "id": token.id,
            "text": token.text,
            "origin": _NAMES.get(token.origin, "decode"),
            "round": self._round,
            "depth": self._depth if is_draft else None,
            "drafter": token.drafter or None,
        }
        self._round += not is_draft
        return told

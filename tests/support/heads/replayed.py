"""Heads whose passes are replayed, as on a GPU, without one."""

from __future__ import annotations

import pytest

from specdec.drafting.heads.cache import HeadCache
from specdec.drafting.heads.passes import HeadPasses
from specdec.drafting.heads.replays import HeadReplays
from specdec.drafting.heads.target import HeadTarget
from tests.support.engine.captures import Captures


class CapturingSteps:
    """What a head's replays need of the target's, which replays no step itself."""

    row_edges = (1, 2, 4, 8)

    def __init__(self, captures: Captures, most_s: float = float("inf")) -> None:
        self.capture = captures
        self._most_s = most_s

    def has_room(self, more_s: float) -> bool:
        """See `specdec.engine.model.device_choice.Replays`."""
        return more_s <= self._most_s


def replayed_heads(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Heads that are loaded from now on replay their passes, by what is returned."""
    captures = Captures()

    def passes(target: HeadTarget, cache: HeadCache) -> HeadPasses:
        steps = CapturingSteps(captures)
        return HeadPasses(cache, HeadReplays(steps, cache, target.runner.dtype))  # type: ignore[arg-type]

    monkeypatch.setattr(HeadTarget, "passes", passes)
    return captures

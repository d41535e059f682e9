"""Heads that replay captured passes, as on a GPU, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.drafting.heads.cache import HeadCache
from specdec.drafting.heads.passes import HeadPasses
from specdec.drafting.heads.target import HeadTarget
from tests.support.engine.captures import Captures


class CapturingSteps:
    """The part of the target's replays that a head's replays need; the target replays no step."""

    row_edges = (1, 2, 4, 8)

    def __init__(self, captures: Captures) -> None:
        self.capture = captures


def replayed_heads(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Let heads that are loaded from now on replay their passes; returns their captures."""
    captures = Captures()

    def passes(target: HeadTarget, cache: HeadCache) -> HeadPasses:
        steps: Any = CapturingSteps(captures)
        return HeadPasses(cache, steps, target.runner.dtype, target.runner.max_model_len)

    monkeypatch.setattr(HeadTarget, "passes", passes)
    return captures

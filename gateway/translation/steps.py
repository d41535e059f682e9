"""The target's steps, for clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from specdec.gateway.translation.logprobs import LEAST
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api


def steps_told(steps: Iterable[api.DecodingStep], texts: TokenTexts) -> list[dict[str, Any]]:
    """The steps, each a `DecodingStep`."""
    return [_step(step, texts) for step in steps]


def _step(step: api.DecodingStep, texts: TokenTexts) -> dict[str, Any]:
    return {
        "start": step.start,
        "num_tokens": step.num_tokens,
        "nodes": list(_nodes(step.tree, texts)),
        "at_ms": step.at_us / 1e3,
        "step_ms": step.step_us / 1e3,
        "hold_off_ms": step.hold_off_us / 1e3,
        "draft_ms": step.draft_us / 1e3,
        "suspended": step.is_suspended,
    }


def _nodes(tree: pb.StepTree, texts: TokenTexts) -> Iterator[dict[str, Any]]:
    logprobs = dict(zip(tree.verified, tree.logprobs, strict=False))
    accepted = set(tree.accepted)
    drafters = [tree.drafters[place] for place in tree.proposed_by]
    for node, (token_id, parent, score) in enumerate(zip(tree.token_ids, tree.parents, tree.scores, strict=False)):
        logprob = logprobs.get(node)
        yield {
            "id": token_id,
            "text": texts.text(token_id),
            "parent": None if parent < 0 else parent,
            "score": score / 255,
            "logprob": None if logprob is None else _finite(logprob),
            "state": "unverified" if logprob is None else "accepted" if node in accepted else "rejected",
            "drafter": drafters[node] if drafters else None,
        }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST

"""The steps of a choice, explained: proposed tokens, their verdicts with reasons, and times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from specdec.client import CompletedChoice
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

ROOT = -1
"""Index of the last committed token, as a parent."""


class State(StrEnum):
    """Outcome of a proposed token."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """It was verified, and the target committed another token there or earlier."""
    UNVERIFIED = "unverified"
    """Its expected gain was below the cost of its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedNode:
    """A proposed token."""

    token_id: int
    text: str
    parent: int
    """Index of its parent in the step's nodes, or `ROOT`."""
    depth: int
    """Distance from the last committed token, from 1."""
    drafter: str
    """Name of its drafter; empty: unknown."""
    score: float
    """Its drafter's estimate of the probability that it is accepted, given that its parent is."""
    rank: int
    """Rank by score among its siblings, from 1."""
    target_prob: float | None
    """Probability in the target's raw distribution after its parent; None: not verified."""
    state: State
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedToken:
    """A committed token."""

    token_id: int
    text: str
    origin: str
    drafter: str
    """Name of its drafter, if its origin is a draft."""
    target_prob: float | None
    """Probability in the target's raw distribution; None: not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Milliseconds of a step; over all steps of a choice, those but `at_ms` and `draft_ms` add up to its time."""

    at_ms: float
    """Milliseconds from the request's arrival at the coordinator to the step's verdict."""
    step_ms: float
    """Milliseconds of forward pass and sampling; in the first step also of the rest of the prefill."""
    hold_off_ms: float
    """Milliseconds of waiting for a draft."""
    elsewhere_ms: float
    """Milliseconds of the rest since the previous verdict: messages, others' steps, waits for credit or admission."""
    draft_ms: float
    """Milliseconds of drafting for the step; they overlap the others, because a draft works beside the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedStep:
    """One step of the target."""

    number: int
    start: int
    """Index of its first token in the output."""
    tokens: list[ExplainedToken]
    nodes: list[ExplainedNode]
    times: Times
    is_suspended: bool
    """Whether speculation was suspended after it, because plain decoding was measured to be faster."""

    @property
    def num_verified(self) -> int:
        """Number of verified tokens."""
        return sum(node.state is not State.UNVERIFIED for node in self.nodes)

    @property
    def num_accepted(self) -> int:
        """Number of accepted tokens."""
        return sum(node.state is State.ACCEPTED for node in self.nodes)

    @property
    def summary(self) -> str:
        """The counts in a sentence."""
        num = len(self.tokens)
        made = f"{num} token{'s' * (num != 1)}"
        if not self.nodes:
            return f"{made}, nothing proposed"
        return f"{made}: {len(self.nodes)} proposed, {self.num_verified} verified, {self.num_accepted} accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The explained steps of a choice."""

    steps: list[ExplainedStep]

    @property
    def by_drafter(self) -> dict[str, dict[str, int]]:
        """Counts by drafter of nodes that it proposed first; the empty name stands for unknown ones."""
        found: dict[str, dict[str, int]] = {}
        for node in (node for step in self.steps for node in step.nodes):
            own = found.setdefault(node.drafter, dict.fromkeys(("proposed", "verified", "accepted"), 0))
            own["proposed"] += 1
            own["verified"] += node.state is not State.UNVERIFIED
            own["accepted"] += node.state is State.ACCEPTED
        return found

    @property
    def lost(self) -> dict[str, float]:
        """Milliseconds by part, over all steps but the first, which contains the prompt."""
        later = [step.times for step in self.steps[1:]]
        return {
            "steps of the target": sum(times.step_ms for times in later),
            "waiting for a draft": sum(times.hold_off_ms for times in later),
            "elsewhere": sum(times.elsewhere_ms for times in later),
        }

    def as_facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def token_ids_of(choice: CompletedChoice) -> set[int]:
    """All tokens whose texts an explanation needs."""
    return {node for step in choice.steps for node in step.tree.token_ids} | set(choice.token_ids)


def explain(choice: CompletedChoice, texts: Mapping[int, str]) -> Explained:
    """Explain a choice whose request asked for steps.

    Args:
        choice: may be unfinished.
        texts: by the ids of `token_ids_of`; missing ones are shown as numbers.
    """
    steps: list[ExplainedStep] = []
    before_us = 0
    for number, step in enumerate(choice.steps, 1):
        tokens = choice.tokens[step.start : step.start + step.num_tokens]
        spent_us = max(0, step.at_us - before_us)
        before_us = step.at_us
        steps.append(
            ExplainedStep(
                number=number,
                start=step.start,
                tokens=[_token(token) for token in tokens],
                nodes=_nodes(step.tree, tokens, texts),
                times=Times(
                    at_ms=step.at_us / 1e3,
                    step_ms=step.step_us / 1e3,
                    hold_off_ms=step.hold_off_us / 1e3,
                    elsewhere_ms=max(0, spent_us - step.step_us - step.hold_off_us) / 1e3,
                    draft_ms=step.draft_us / 1e3,
                ),
                is_suspended=step.is_suspended,
            )
        )
    return Explained(steps=steps)


def _token(token: api.OutputToken) -> ExplainedToken:
    logprob = token.logprobs.logprob if token.HasField("logprobs") else None
    return ExplainedToken(
        token_id=token.id,
        text=token.text,
        origin=pb.Origin.Name(token.origin).removeprefix("ORIGIN_").lower(),
        drafter=token.drafter,
        target_prob=None if logprob is None else math.exp(min(0.0, logprob)),
    )


def _nodes(tree: pb.StepTree, tokens: Sequence[api.OutputToken], texts: Mapping[int, str]) -> list[ExplainedNode]:
    parents, scores = list(tree.parents), [score / 255 for score in tree.scores]
    probs = {node: math.exp(min(0.0, logprob)) for node, logprob in zip(tree.verified, tree.logprobs, strict=False)}
    accepted, drafters = list(tree.accepted), _drafters(tree, tokens)
    depths: list[int] = []
    found: list[ExplainedNode] = []
    for node, token_id in enumerate(tree.token_ids):
        parent = parents[node]
        depths.append(1 if parent < 0 else depths[parent] + 1)
        state = State.ACCEPTED if node in accepted else State.REJECTED if node in probs else State.UNVERIFIED
        beside = [other for other, above in enumerate(parents) if above == parent]
        found.append(
            ExplainedNode(
                token_id=token_id,
                text=texts.get(token_id, f"token {token_id}"),
                parent=parent,
                depth=depths[node],
                drafter=drafters[node],
                score=scores[node],
                rank=1 + sum(scores[other] > scores[node] for other in beside),
                target_prob=probs.get(node),
                state=state,
                why=_why(tree, node, state, depths[node], beside, scores, tokens),
            )
        )
    return found


def _drafters(tree: pb.StepTree, tokens: Sequence[api.OutputToken]) -> list[str]:
    """Each node's drafter; if the target does not report it, only accepted nodes have one."""
    if len(tree.proposed_by) == len(tree.token_ids):
        return [tree.drafters[place] for place in tree.proposed_by]
    names = [""] * len(tree.token_ids)
    for node, token in zip(tree.accepted, tokens, strict=False):
        names[node] = token.drafter
    return names


def _why(
    tree: pb.StepTree,
    node: int,
    state: State,
    depth: int,
    beside: Sequence[int],
    scores: Sequence[float],
    tokens: Sequence[api.OutputToken],
) -> str:
    parent, accepted = tree.parents[node], list(tree.accepted)
    if state is State.ACCEPTED:
        return "it is the target's token"
    if state is State.UNVERIFIED:
        return "its expected gain was below the cost of a row"
    if parent not in (ROOT, *accepted):
        return "its parent was rejected"
    if len(tokens) < depth:
        return "the choice ended before it"
    taken = tokens[depth - 1]
    prob = f" (p {math.exp(min(0.0, taken.logprobs.logprob)):.2f})" if taken.HasField("logprobs") else ""
    if taken.id == tree.token_ids[node]:
        return f"the ratio test rejected it, then the same token was drawn: {taken.text!r}{prob}"
    guessed = next((other for other in beside if tree.token_ids[other] == taken.id), None)
    if guessed is None:
        where = "which was not proposed here"
    else:
        rank = 1 + sum(scores[other] > scores[guessed] for other in beside)
        where = f"proposal {rank} of {len(beside)} here, with score {scores[guessed]:.2f}"
    return f"the target's token is {taken.text!r}{prob}, {where}"

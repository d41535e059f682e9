"""Deployments that a plan chooses from, and what each needs besides its targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specdec.plan.inputs.devices import Device, PlanImpossible
from specdec.plan.inputs.models import ModelSizes
from specdec.plan.inputs.step_times import Measured, Roofline, StepTable
from specdec.plan.simulation.pair import PairSettings

MOST_BATCH = 64
"""Sequences of a step, at most (`max_batch_seqs`): the setting's default."""
BATCH_TOKENS = {"cpu": 512, "gpu": 2048}
"""Rows of a step (`max_batch_tokens`), by kind of device."""
_SHARES = (1, 2, 4)
"""Targets that share a draft."""
_MOST_RANKS = 2
"""Numbers of ranks that are tried, from the fewest that hold the model."""
_OWN_CONTEXT = 2048
_CPU_PER_VERDICT_S = {True: 80e-6, False: 40e-6}
"""A coordinator's CPU time per verdict with and without a draft (docs/capacity.md)."""
_CORE_SHARE = 0.7
_GATEWAY_TOKENS_PER_S = 10_000.0
"""Streamed tokens per second of a gateway's process: 200 streams of 50 (docs/gateway.md)."""
CORE_PRICE = 0.04
"""Assumed price of a core for an hour, in dollars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a plan, apart from the traffic."""

    target: ModelSizes | None
    """None: `measured` has the step times."""
    draft: ModelSizes | None
    devices: Sequence[Device]
    draft_devices: Sequence[Device]
    acceptance: Sequence[float]
    measured: Measured | None = None
    delay_s: float = 0.0002
    """Between target and draft, one way."""
    loss: float = 0.0
    context: int = 1024
    """Mean tokens of a sequence while it decodes."""
    prompt_tokens: float = 0.0
    """Mean tokens of a prompt."""
    request_tokens: float = 0.0
    """Mean tokens of a prompt and its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A kind of replica: the target's device and ranks, and what it has of a draft."""

    device: Device
    num_ranks: int
    steps: StepTable
    kv_tokens: float
    draft_device: Device | None = None
    """None: no draft, or the target runs it."""
    draft_steps: StepTable | None = None
    is_together: bool = False
    targets_per_draft: int = 1

    @property
    def label(self) -> str:
        """The placement in words."""
        ranks = f" x {self.num_ranks}" if self.num_ranks > 1 else ""
        if self.draft_steps is None:
            draft = "no draft"
        elif self.is_together or self.draft_device is None:
            draft = "draft in the target"
        else:
            draft = f"a draft on {self.draft_device.name} for {self.targets_per_draft}"
        return f"{self.device.name}{ranks}, {draft}"

    @property
    def price(self) -> float:
        """Dollars per hour of a target with its share of a draft."""
        draft = 0.0 if self.draft_device is None else self.draft_device.price / self.targets_per_draft
        return self.device.price * self.num_ranks + draft

    def price_of(self, num_targets: int, *, may_lose: bool) -> float:
        """Dollars per hour of a number of targets and their drafts."""
        drafts = num_drafts(self, num_targets, may_lose=may_lose)
        draft_price = 0.0 if self.draft_device is None else self.draft_device.price
        return num_targets * self.num_ranks * self.device.price + drafts * draft_price

    @property
    def per_node(self) -> int:
        """Targets of a full node."""
        return max(1, self.device.per_node // self.num_ranks)

    def pair(self, question: Question) -> PairSettings:
        """What a pair's simulation needs."""
        return PairSettings(
            target=self.steps,
            draft=self.draft_steps,
            acceptance=question.acceptance,
            is_together=self.is_together,
            targets_per_draft=self.targets_per_draft,
            delay_s=0.0 if self.is_together else question.delay_s,
            loss=question.loss,
            prompt_tokens=question.prompt_tokens,
        )


def placements(question: Question) -> list[Placement]:
    """All kinds of replicas worth a thought, the cheapest first. Raises PlanImpossible: the model fits nowhere."""
    if question.target is not None and question.request_tokens > question.target.max_len:
        raise PlanImpossible(
            f"{question.target.name} has {question.target.max_len} positions, and the mean request takes "
            f"{question.request_tokens:.0f} tokens of prompt and output: shorten --prompt-tokens or --output-tokens"
        )
    found = list(_measured(question)) if question.measured is not None else list(_by_roofline(question))
    if not found:
        assert question.target is not None
        sizes = ", ".join(f"{d.name} {d.per_node * d.memory / 1e9:.0f}" for d in question.devices)
        raise PlanImpossible(
            f"{question.target.name} takes {question.target.weight_bytes / 1e9:.0f} GB in bfloat16 and fits on no node "
            f"of these (GB per node: {sizes}): name a device with more memory"
        )
    return sorted(found, key=lambda each: each.price)


def _measured(question: Question) -> Iterator[Placement]:
    measured, device = question.measured, question.devices[0]
    assert measured is not None
    base = Placement(device=device, num_ranks=1, steps=measured.target, kv_tokens=MOST_BATCH * _OWN_CONTEXT)
    yield base
    for share in _SHARES:
        yield Placement(
            device=device,
            num_ranks=1,
            steps=measured.target,
            kv_tokens=base.kv_tokens,
            draft_device=question.draft_devices[0],
            draft_steps=measured.draft,
            targets_per_draft=share,
        )


def _by_roofline(question: Question) -> Iterator[Placement]:
    target, draft = question.target, question.draft
    assert target is not None
    for device in question.devices:
        fitting = [
            steps
            for ranks in (1, 2, 4, 8)
            if ranks <= device.per_node and target.heads % ranks == 0
            if (steps := Roofline(target, device, ranks, question.context)).kv_tokens >= question.context
        ]
        for steps in fitting[:_MOST_RANKS]:
            plain = Placement(device=device, num_ranks=steps.num_ranks, steps=steps, kv_tokens=float(steps.kv_tokens))
            yield plain
            if draft is not None:
                yield from _with_draft(question, draft, plain)


def _with_draft(question: Question, draft: ModelSizes, plain: Placement) -> Iterator[Placement]:
    own = Roofline(draft, plain.device, 1, question.context)
    assert question.target is not None
    left = plain.kv_tokens * question.target.kv_bytes - draft.weight_bytes * plain.num_ranks
    kv_tokens = left / (question.target.kv_bytes + draft.kv_bytes * plain.num_ranks)
    if kv_tokens >= question.context:
        yield Placement(
            device=plain.device,
            num_ranks=plain.num_ranks,
            steps=plain.steps,
            kv_tokens=kv_tokens,
            draft_steps=own,
            is_together=True,
        )
    for device in question.draft_devices:
        steps = Roofline(draft, device, 1, question.context)
        for share in _SHARES if steps.kv_tokens >= question.context * MOST_BATCH else ():
            yield Placement(
                device=plain.device,
                num_ranks=plain.num_ranks,
                steps=plain.steps,
                kv_tokens=plain.kv_tokens,
                draft_device=device,
                draft_steps=steps,
                targets_per_draft=share,
            )


def num_drafts(placement: Placement, num_targets: int, *, may_lose: bool) -> int:
    """Draft replicas of a number of targets; two at least where one may be lost."""
    if placement.draft_device is None:
        return 0
    return max(math.ceil(num_targets / placement.targets_per_draft), 2 if may_lose else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A number of replicas, and the services around them."""

    placement: Placement
    num_targets: int
    num_zones: int
    sessions: float
    """Sessions that run at once, on average, as simulated."""
    turn_s: float
    """Mean time from a session's commit to its next one."""
    tokens_per_s: float
    """Output tokens of all streams."""
    spare: int = field(default=1)
    """Processes of each service that may be lost."""

    @property
    def num_drafts(self) -> int:
        """Draft replicas."""
        return num_drafts(self.placement, self.num_targets, may_lose=self.spare > 0)

    @property
    def coordinator_cores(self) -> float:
        """Cores that coordinators use."""
        has_draft = self.placement.draft_device is not None
        return self.sessions / self.turn_s * _CPU_PER_VERDICT_S[has_draft]

    @property
    def num_coordinators(self) -> int:
        """Coordinator processes at 70 % of a core, and spare ones."""
        return max(1, math.ceil(self.coordinator_cores / _CORE_SHARE)) + self.spare

    @property
    def num_gateways(self) -> int:
        """Gateway processes, and spare ones."""
        return max(1, math.ceil(self.tokens_per_s / _GATEWAY_TOKENS_PER_S)) + self.spare

    @property
    def redis(self) -> str:
        """Kind of Redis: none for one coordinator, bundled where its loss costs little, else one with replicas."""
        if self.num_coordinators == 1:
            return "none"
        return "external" if self.num_zones > 1 else "bundled"

    @property
    def price(self) -> float:
        """Dollars per hour, with a core for each coordinator and gateway."""
        replicas = self.placement.price_of(self.num_targets, may_lose=self.spare > 0)
        return replicas + CORE_PRICE * (self.num_coordinators + self.num_gateways)

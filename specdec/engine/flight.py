"""A step between its launch and its collection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specdec.engine.batch import Batch
from specdec.engine.outputs import ItemOutput, StepOutput
from specdec.engine.runner import LaunchedPass, ResultT
from specdec.engine.scheduler import ScheduledStep
from specdec.engine.sequence import Sequence


@dataclass(slots=True)
class Flight:
    """A launched step. Until it is collected no sequence advances and no block changes its owner."""

    scheduled: ScheduledStep
    items: list[ItemOutput]
    batch: Batch
    computed: torch.Tensor | LaunchedPass
    """The logits, or the pass that will give them."""
    freed: list[Sequence] = field(default_factory=list)
    """Sequences freed since the launch, in the step or not; they keep their blocks until it ends."""

    def is_done(self) -> bool:
        """Whether the pass is over."""
        return isinstance(self.computed, torch.Tensor) or self.computed.is_done()

    def logits(self) -> torch.Tensor:
        """The pass's logits; waits for them. Raises the pass's error."""
        return self.computed if isinstance(self.computed, torch.Tensor) else self.computed.logits()

    def behind(self, work: Callable[[torch.Tensor], ResultT]) -> Callable[[], ResultT] | None:
        """See `LaunchedPass.behind`; None: the pass is over, and nothing was done."""
        return None if isinstance(self.computed, torch.Tensor) else self.computed.behind(work)

    def output(self, logits: torch.Tensor) -> StepOutput:
        """The step's output, without sequences freed since."""
        items, freed = self.items, self.freed
        preempted = self.scheduled.preempted
        return StepOutput(
            logits=logits,
            items=[item for item in items if item.seq not in freed] if freed else items,
            preempted=[seq for seq in preempted if seq not in freed] if freed else preempted,
            num_tokens=self.scheduled.num_tokens,
            hidden=None if self.batch.tap is None else self.batch.tap.states,
            gap_s=_unknown_gap_s if isinstance(self.computed, torch.Tensor) else self.computed.gap_s,
        )


def _unknown_gap_s() -> float | None:
    return None

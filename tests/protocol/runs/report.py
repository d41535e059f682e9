"""A run's violation for people: what it was, and the shortest schedule found that shows one."""

from __future__ import annotations

from tests.protocol.runs.run import Outcome, run
from tests.protocol.runs.schedule import Schedule
from tests.protocol.runs.shrink import shrink

_MOST_SHOWN = 5
_MOST_CHARS = 600


def explain(schedule: Schedule, outcome: Outcome, *, most_tries: int) -> str:
    """Shrink, run again, and describe."""
    shortest = shrink(schedule, lambda shorter: bool(run(shorter).violations), most_tries=most_tries)
    shown = run(shortest).violations or outcome.violations
    lines = [
        f"seed {schedule.seed}: {len(outcome.violations)} violations",
        *(f"  {violation[:_MOST_CHARS]}" for violation in shown[:_MOST_SHOWN]),
        f"again: python -m tests.protocol --replay '{shortest}'",
    ]
    return "\n".join(lines)

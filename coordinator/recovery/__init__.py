"""What happens when a replica breaks, errs, refuses, or comes back. Tokens already delivered are never in question.

target stream ended       another target that serves the same model takes its sessions over at once, with all their
                          tokens; without one they wait, for this target or any other that comes
no target for too long    UNAVAILABLE (the client can resume)
target drains             it gets no new sessions; those it has go on there until its stream ends
session held elsewhere    CANCELLED, TAKEN_OVER: another coordinator goes on with it
logits not finite         at a target: INTERNAL, NON_FINITE_LOGITS, for any other target would say the same; at a
                          draft: the session goes on without drafts, for good
target refuses a session  opened again with growing waits; at once, without its draft, when a proposal was at fault;
                          elsewhere, when the target has failed too often or drains
draft ended or wrong      the session goes on without it, and gets a draft again when there is one
draft drains              its sessions get another draft, if there is one
draft is slow             a session has a second one for a while, and the faster one keeps it (`hedging.py`)

`targets.py` and `drafts.py` take the events of each role's links; `moves.py` opens sessions again, there or elsewhere.
"""

from specdec.coordinator.recovery.drafts import DraftRecovery
from specdec.coordinator.recovery.targets import TargetRecovery

__all__ = ["DraftRecovery", "TargetRecovery"]

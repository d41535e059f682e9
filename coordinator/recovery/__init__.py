"""Recovery when a replica breaks, errs, refuses, or comes back. Delivered tokens never change.

target stream ended       another target of the same model takes its sessions over at once, with all their tokens;
                          without one they wait for this target or any other
no target for too long    UNAVAILABLE (the client can resume)
target drains             it gets no new sessions; its sessions go on there until its stream ends
session held elsewhere    CANCELLED, TAKEN_OVER: another coordinator goes on with it
logits not finite         at a target: INTERNAL, NON_FINITE_LOGITS, as every target would compute them; at a draft:
                          the session goes on without drafts, for good
target refuses a session  opened again with growing waits; at once, without its draft, if a proposal was at fault;
                          elsewhere, if the target has failed too often or drains
draft ended or wrong      the session goes on without it, and gets a draft again when there is one
draft drains              its sessions get another draft, if there is one
draft is slow             a session has a second one for a while, and keeps the faster one (`hedging.py`)

`targets.py` and `drafts.py` take the events of each role's links; `moves.py` opens sessions again, at the same or
another replica.
"""

from specdec.coordinator.recovery.drafts import DraftRecovery
from specdec.coordinator.recovery.targets import TargetRecovery

__all__ = ["DraftRecovery", "TargetRecovery"]

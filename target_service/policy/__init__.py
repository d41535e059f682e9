"""Who speculates, which nodes a step verifies, how long it waits: three decisions on one clock, one record, one budget.

Data:

- `step_clock.py`: `StepClock`, what a step of given rows (`step_time.py`), sessions and speculating share takes.
- `acceptance.py`: `Acceptance`, how often proposed tokens are accepted, by source, depth, score and session.
- `budget.py`: an `Account` for each kind of sessions and the `WaitPurse`; both are filled with `SHARE` of all time.
- `means.py`: the two weights of moving means, and the weight of an assumption.

Decisions:

- who speculates: `gate.py`, a session that gains more tokens than `StepClock.min_gain_tokens`;
- which nodes: `verify_policy.py`, best first by acceptance while that raises tokens per second;
- how long to wait: `hold_off.py`, the depth with the best rate of tokens so far.

Invariants:

- All costs are held against `StepClock.plain_s`, and metrics and decisions read the same one.
- Only trials are paid from the budget: at the floor of its account nobody of a kind speculates.
- Nothing here knows tokens. In rejection mode a draft's nodes are ranked by depth alone, and their scores not learnt
  from, so that what is verified does not depend on what was drawn (docs/rejection.md).

Failures: a step that stalls counts at most `MOST_SURPRISE` times the mean; an account that was emptied by mistake is
set to zero after a respite, which doubles; a kind whose drafts never propose is lent nothing after two trials; a source
that is exchanged loses its record; before a plain step was measured the clock goes by rows.
"""

"""Who speculates, which nodes a step verifies, how long it waits: three decisions on one clock, one record, one budget.

Data:

- `step_clock.py`: `StepClock`, the time of a step by its rows (`step_time.py`), sessions and speculating share.
- `acceptance.py`: `Acceptance`, how often proposed tokens are accepted, by source, depth, score and session.
- `budget.py`: an `Account` for each kind of sessions and the `WaitPurse`; both are filled with `SHARE` of all time.
- `means.py`: the two weights of moving means, and the weight of an assumption.

Decisions:

- who speculates: `gate.py`, a session that gains more tokens than `StepClock.min_gain_tokens`;
- which nodes: `verify_policy.py`, best first by acceptance while that raises tokens per second;
- how long to wait: `hold_off.py`, the depth with the best rate of tokens so far.

Invariants:

- All costs are compared with `StepClock.plain_s`; metrics and decisions read the same value.
- Trials and losses are paid from the budget: at the floor of a kind's account, no session of that kind speculates.
- The policies know no token ids. In rejection mode a draft's nodes are ranked by depth alone, and the policies do not
  learn from their scores: the verified nodes must not depend on drawn tokens (docs/rejection.md).

Failures:

- a stalled step counts at most `MOST_SURPRISE` times the mean;
- an account that was emptied by mistake is reset to zero after a respite, which doubles each time;
- a kind whose drafts never propose gets no reset after two failed trials, no session after the first few, and a trial
  every few seconds;
- a replaced source loses its record;
- before a plain step was measured, the clock predicts step times from rows.
"""

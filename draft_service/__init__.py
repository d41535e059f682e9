"""The draft service: proposes tokens to targets.

`worker.py` starts the engine process; `plain/` is a draft without a model. Drafting itself is in `specdec/drafting`
(`role/drafter.py`), because a target may also run a draft.
"""

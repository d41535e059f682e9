"""The draft service: proposes tokens to targets.

This folder has its processes: `worker.py` starts the engine process, `plain/` is a draft without a model. Drafting
itself is in `specdec/drafting` (`role/drafter.py`), since a target may run a draft of its own.
"""

"""specdec's draft service for vLLM, whose `speculative_config` names `specdec_vllm.RemoteDraft` (docs/vllm.md).

- `remote_draft.py`: the class that vLLM calls after each step.
- `rows.py`: which session a row of the batch is; `offers.py`: what a draft offers for it.
- `drafts.py`, `draft_stream.py`: the drafts, their streams and a thread that owns them.
- `waits.py`: how long a step waits; `metrics.py`: what it proposed, accepted and waited for.
"""

from specdec_vllm.remote_draft import RemoteDraft

__all__ = ["RemoteDraft"]

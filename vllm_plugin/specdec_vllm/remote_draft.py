"""The class that vLLM instantiates and calls after each step."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from specdec_vllm.drafts import Drafts
from specdec_vllm.metrics import PluginMetrics
from specdec_vllm.rows import RowSession, Tokens
from specdec_vllm.settings import WrongSettings, read_engine, read_settings
from specdec_vllm.waits import NOTHING, Waits

_FAULT_EVERY_S = 60.0
"""Seconds between two log lines about faults."""
_log = logging.getLogger("vllm.specdec")


Proposals = list[list[int]]


class Ranks:
    """vLLM's group of the tensor-parallel ranks: all propose the same, as the first one asks and tells the others."""

    def __init__(self, size: int) -> None:
        self._group: Any = None
        if size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            self._group = get_tp_group()

    @property
    def is_first(self) -> bool:
        """Whether this rank asks the drafts."""
        return self._group is None or self._group.rank_in_group == 0

    def share(self, proposals: Proposals | None) -> Proposals:
        """The first rank's proposals, on every rank; others pass None."""
        if self._group is None:
            return proposals or []
        shared: Proposals = self._group.broadcast_object(proposals, src=0)
        return shared


class RemoteDraft:
    """Proposes what specdec's drafts propose for each row.

    Guarantees: `propose` never raises for a draft's fault, and waits at most SPECDEC_VLLM_MAX_WAIT_MS. A row without an
    answer in time gets an empty list, and vLLM decodes it plainly.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Connect in the background. Raises WrongSettings, whose text is one line."""
        settings = read_settings()
        self._engine = read_engine(vllm_config)
        self._ranks = Ranks(int(getattr(vllm_config.parallel_config, "tensor_parallel_size", 1)))
        self._fault_s = -_FAULT_EVERY_S
        if self._ranks.is_first:
            self.metrics = PluginMetrics(settings.metrics_port)
            self._waits = Waits(settings.max_wait_ms / 1000)
            self._drafts = Drafts(settings, self._engine)

    def load_model(self, *_args: Any, **_more: Any) -> None:
        """Nothing is loaded: the draft has its own device."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> Proposals:
        """Proposed tokens of each row.

        Args:
            sampled_token_ids: tokens that the last step committed, by row; empty while its prompt is computed.
            num_tokens_no_spec: number of tokens of each row, these included.
            token_ids_cpu: the rows' tokens.
            slot_mappings: ignored.
        """
        if not self._ranks.is_first:
            return self._ranks.share(None)
        try:
            proposals = self._propose(sampled_token_ids, np.asarray(num_tokens_no_spec), np.asarray(token_ids_cpu))
        except Exception:
            self._fault(len(sampled_token_ids))
            proposals = [[] for _ in sampled_token_ids]
        return self._ranks.share(proposals)

    def close(self) -> None:
        """End the streams. vLLM does not call it: the thread ends with the process."""
        if self._ranks.is_first:
            self._drafts.close()

    def _propose(self, sampled: list[list[int]], lengths: Any, rows: Tokens) -> Proposals:
        if rows.ndim != 2 or len(lengths) < len(sampled) or len(rows) < len(sampled):
            raise WrongSettings("specdec-vllm does not know this version of vLLM: see docs/vllm.md")
        drafts, now_s = self._drafts, time.monotonic()
        with drafts.lock:
            drafts.last_step_s = now_s
            sessions = [
                self._follow(row, int(length), len(tokens))
                for row, length, tokens in zip(rows, lengths, sampled, strict=False)
            ]
            drafts.sessions.keep(sessions)
            dirty: set[Any] = set()
            for session in sessions:
                session.seen_s = now_s
                drafts.place(session, now_s, dirty)
            drafts.flush(dirty)
            most = [self._most(session) if tokens else 0 for session, tokens in zip(sessions, sampled, strict=True)]
            decoding = [one for one in zip(sessions, most, strict=True) if one[1]]
            num_committed = sum(map(len, sampled))
            depth = self._waits.begin(now_s, len(decoding), num_committed, self._engine.num_speculative_tokens)
            if depth == NOTHING:
                most = [0] * len(sessions)
            elif depth:
                self.metrics.waited.inc(self._waits.wait(drafts.lock, depth, decoding))
            proposals = [session.chain(num) for session, num in zip(sessions, most, strict=True)]
            self.metrics.step(sessions, sampled, proposals)
            self.metrics.sessions.set(len(drafts.sessions))
            self.metrics.drafts_ready.set(sum(stream.is_ready for stream in drafts.streams.values()))
        return proposals

    def _follow(self, row: Tokens, num_tokens: int, num_sampled: int) -> RowSession:
        """The row's session, with the row's tokens. A row whose prompt is being computed has its session already."""
        session = self._drafts.sessions.claim(row, num_tokens - num_sampled)
        session.take(row, num_tokens)
        return session

    def _most(self, session: RowSession) -> int:
        """Most tokens to propose for a row."""
        return min(self._engine.num_speculative_tokens, self._engine.max_model_len - session.num_tokens)

    def _fault(self, num_rows: int) -> None:
        self.metrics.faults.inc()
        now_s = time.monotonic()
        if now_s - self._fault_s >= _FAULT_EVERY_S:
            self._fault_s = now_s
            _log.exception("no proposals for %d rows in this step; vLLM decodes plainly", num_rows)

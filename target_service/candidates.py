"""From a step's logits to log-probabilities of prompts, and to the sessions whose next token the step decides."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec.engine.engine import Engine
from specdec.engine.errors import NonFiniteLogits
from specdec.engine.outputs import ItemOutput, StepOutput
from specdec.engine.tree import TokenTree
from specdec.replica.worker.host import SessionHost
from specdec.target_service.admission import Admission
from specdec.target_service.sample_and_walk import Candidate, Undecided
from specdec.target_service.session import TargetSession


class CandidateReader:
    """Finds the candidates of a step. Forks of a prompt get their sequences here, when the prompt is computed."""

    def __init__(
        self,
        host: SessionHost[TargetSession],
        engine: Engine,
        admission: Admission,
        on_fault: Callable[[TargetSession, Exception], None],
    ) -> None:
        """`on_fault` ends a session with the error that its part of the work raised."""
        self._host = host
        self._engine = engine
        self._admission = admission
        self._on_fault = on_fault

    def read(
        self,
        output: StepOutput,
        session_of: Callable[[ItemOutput], TargetSession],
        chosen: dict[str, list[int]],
        started_s: float,
    ) -> tuple[list[Candidate], list[Undecided]]:
        """Sessions whose pending tokens the step has computed, and sessions whose prompt has non-finite logits.

        Args:
            output: output of the step.
            session_of: session of an item.
            chosen: by session id, the verified nodes of its speculation tree.
            started_s: start of the step, of time.monotonic.
        """
        candidates: list[Candidate] = []
        undecided: list[Undecided] = []
        for item in output.items:
            session = session_of(item)
            if session.times.first_step_at_s is None:
                session.times.first_step_at_s = started_s
            is_bad = False
            if item.seq.prompt_logits:
                try:
                    self._tell_prompt(session, output.logits[item.rows], item.start)
                except NonFiniteLogits as error:
                    undecided.append(Undecided(session, error))
                    is_bad = True
                except Exception as error:
                    self._on_fault(session, error)
                    continue
            if not item.completes:
                continue
            root_row = item.rows.stop - item.tree_nodes - 1
            for fork in self._admission.forks.take(session.session_id):
                self._admission.register(fork, self._engine.fork(item.seq))
                fork.times.first_step_at_s = started_s
                candidates.append(Candidate(fork, root_row, TokenTree(), 0, []))
            if is_bad:
                continue
            tree = item.seq.verified_tree or TokenTree()
            candidates.append(Candidate(session, root_row, tree, item.tree_nodes, chosen.get(session.session_id, [])))
        return candidates, undecided

    def _tell_prompt(self, session: TargetSession, logits: torch.Tensor, start: int) -> None:
        """Send the log-probabilities of a chunk of prefill. The next chunk may have to wait for credit."""
        prompt = session.prompt_logprobs
        if prompt is None:
            return
        for part in prompt.take(logits, start):
            self._host.emit(session, prompt_logprobs=part)
        session.seq.prompt_logits_from = prompt.next_position - 1
        session.update_pause()

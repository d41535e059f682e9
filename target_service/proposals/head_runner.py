"""Heads of a target: they take in its hidden states, and are asked for many sessions in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specdec.config.drafter_options import HeadOptions, LayerSkipOptions
from specdec.drafting.heads.checkpoint import HeadRefused
from specdec.drafting.heads.methods.registry import load_head
from specdec.drafting.heads.session import Head, HeadAsk, HeadSession
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.interface import Drafter, Room
from specdec.drafting.layer_skip.drafter import LayerSkip, make_layer_skip
from specdec.engine.outputs import StepOutput
from specdec.engine.sampling.sampler import RowContext
from specdec.engine.tap import joined
from specdec.target_service.pacing.expectations import note_call
from specdec.target_service.policy.marginal_gains import Headroom
from specdec.target_service.proposals.deadline import Deadline, Overdue
from specdec.target_service.proposals.features import computed
from specdec.target_service.proposals.session_drafters import DrafterInSession, DrafterRecorder
from specdec.target_service.records.step_record import DrafterStep
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import TargetSession
from specdec.wire.sampling_params import VerifyMode

MOST_CALL_S = 10.0
"""Seconds of CPU time, over all threads, that one call for all sessions may take; native code is not interrupted."""
MOST_PENDING_BYTES = 2 * 2**20
"""Bytes of a session's hidden states that may wait for the next draft; above, the head takes them in at once. A
suspended session may never draft again."""


@dataclass(frozen=True, slots=True)
class Due:
    """A session whose next step is due."""

    session: TargetSession
    drafters: Sequence[DrafterInSession]
    """Drafters of the session."""
    room: Room
    headroom: Headroom
    """Headroom before the call."""


class HeadRunner:
    """The heads that are asked, by name. `ask` raises their errors, `feed` returns them; the caller drops the head."""

    def __init__(self, target: HeadTarget | None) -> None:
        """`target`: model and engine under the heads; None: there are no heads."""
        self._target = target
        self._heads: dict[str, Head] = {}
        self._columns: dict[str, list[int]] = {}
        self._debts_s: dict[str, float] = {}
        """Seconds, by session id, of taking in its hidden states outside of calls."""
        self._deadline = Deadline(MOST_CALL_S)
        if target is not None:
            target.engine.tap_ids = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the heads that are asked."""
        return tuple(self._heads)

    def load(self, options: HeadOptions | LayerSkipOptions) -> Drafter:
        """Load a head. Heads over hidden states may be loaded in another thread, while the target steps.

        Raises:
            HeadRefused, ModelLoadError: the head does not fit the target, or its files cannot be loaded.
            OfNoUse: the head would not help.
        """
        if self._target is None:
            raise HeadRefused(f"drafters: {options.method}: this engine runs no model that heads could sit on")
        if isinstance(options, LayerSkipOptions):
            return make_layer_skip(options, self._target)
        return load_head(options, self._target)

    def prepare(self) -> None:
        """Capture the graphs that steps and drafts replay; to be called before the first request."""
        if self._target is None:
            return
        if self._target.runner.settings.tensor_parallel_size == 1:
            self._target.runner.capture_steps(self._target.engine.tap_ids)
        for head in self._heads.values():
            head.prepare()

    def check(self, drafter: Drafter) -> None:
        """Check, by a pass over two rows, that the target hands out the layers a drafter reads. Raises TapRefused."""
        if (head := self._as_head(drafter)) is not None and head.layer_ids and self._target is not None:
            self._target.runner.check_tap(head.layer_ids)

    def add(self, name: str, drafter: Drafter) -> None:
        """Ask a checked drafter from now on, if it is a head; others are ignored."""
        if (head := self._as_head(drafter)) is not None:
            self._heads[name] = head
            self._tap()

    def _as_head(self, drafter: Drafter) -> Head | None:
        needs = drafter.capabilities
        if not (needs.needs_hidden_states or needs.needs_engine) or self._target is None:
            return None
        return drafter  # type: ignore[return-value]

    def remove(self, name: str) -> None:
        """Stop asking a head; names of other drafters are ignored."""
        if self._heads.pop(name, None) is not None:
            self._tap()

    def ask(self, name: str, due: Iterable[Due], recorder: DrafterRecorder) -> None:
        """Hang a head's offers on the trees of due sessions; the time of the call is divided equally among them.

        Raises:
            TreeError: an offer is no tree.
            Exception: the head's own errors.
            Overdue: the call took more than `MOST_CALL_S`.
        """
        asks: list[HeadAsk] = []
        asked: list[tuple[TargetSession, DrafterInSession, Headroom]] = []
        for each in due:
            session = each.session
            drafter = next((drafter for drafter in each.drafters if drafter.name == name), None)
            is_chain = session.mode is VerifyMode.REJECTION
            if drafter is None or not isinstance(drafter.proposer, HeadSession) or (is_chain and len(session.tree)):
                continue
            if drafter.is_due():
                row = RowContext(session.params, session.num_tokens, session.body.num_prompt_tokens, session.history)
                asks.append(HeadAsk(drafter.proposer, row, each.room, is_chain, session.seq))
                asked.append((session, drafter, each.headroom))
        if not asks:
            return
        began_s = time.monotonic()
        with self._deadline:
            offers = self._heads[name].draft(asks)
        head = self._heads[name]
        if isinstance(head, LayerSkip) and (found := head.take_found()) is not None:
            recorder.searched(*found)
        each_s = (time.monotonic() - began_s) / len(asks)
        for (session, drafter, headroom), offer in zip(asked, offers, strict=True):
            num_nodes, num_before = 0, len(session.tree)
            if offer is not None:
                num_nodes = session.tree.hang(name, offer.token_ids, offer.parents, offer.scores)
            elapsed_s = each_s + self._debts_s.pop(session.session_id, 0.0)
            note_call(session, name, headroom, num_before)
            drafter.step = DrafterStep(name, num_nodes, elapsed_s=elapsed_s)
            recorder.asked(name, num_nodes, elapsed_s)

    def closed(self, session: TargetSession) -> None:
        """Forget a session that has ended."""
        self._debts_s.pop(session.session_id, None)

    def feed(
        self,
        output: StepOutput,
        decisions: Sequence[Decision],
        sessions: Mapping[int, TargetSession],
        drafters_of: Callable[[TargetSession], Iterable[DrafterInSession]],
    ) -> list[tuple[str, BaseException]]:
        """Give heads the hidden states of a step, before its decisions are committed.

        Returns the names of heads that failed, with their errors.
        """
        failed: dict[str, BaseException] = {}

        def attempt(name: str, act: Callable[[Head], None]) -> None:
            if name in failed:
                return
            try:
                with self._deadline:
                    act(self._heads[name])
            except (Exception, Overdue) as error:
                failed[name] = error

        for name in self._heads:
            attempt(name, lambda head: _forget(head, output))
        heavy: dict[str, list[tuple[TargetSession, HeadSession]]] = {}
        for share in computed(output, decisions, sessions):
            for drafter in drafters_of(share.session):
                head = drafter.proposer
                if isinstance(head, HeadSession) and drafter.name in self._columns:
                    head.take(share.session.seq, share.features(self._columns[drafter.name]))
                    if head.num_pending_bytes > MOST_PENDING_BYTES:
                        heavy.setdefault(drafter.name, []).append((share.session, head))
        for name, pairs in heavy.items():
            began_s = time.monotonic()
            attempt(name, lambda head, pairs=pairs: head.absorb([own for _, own in pairs]))  # type: ignore[misc]
            each_s = (time.monotonic() - began_s) / len(pairs)
            for session, _ in pairs:
                self._debts_s[session.session_id] = self._debts_s.get(session.session_id, 0.0) + each_s
        return list(failed.items())

    def _tap(self) -> None:
        if self._target is None:
            return
        union = joined(head.layer_ids for head in self._heads.values())
        self._target.engine.tap_ids = union
        self._columns = {name: [union.index(i) for i in head.layer_ids] for name, head in self._heads.items()}

    def copied(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the heads' blocks as the target's were copied; see `PassObserver.blocks_copied`."""
        for head in self._heads.values():
            head.copied(pairs)


def _forget(head: Head, output: StepOutput) -> None:
    for item in output.items:
        head.forget(item.seq, item.start, item.start + item.num_new_tokens + item.tree_nodes)

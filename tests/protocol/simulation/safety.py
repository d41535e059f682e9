"""What must be true at every moment. Each violation is noted; nothing is raised into the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.coordinator.sessions.session import Session
from specdec.drafting.role.session import DraftSession
from specdec.replica.bridge.frame_codec import Frame, FrameKind
from specdec.replica.worker.sessions import EngineSession, EngineSessionTable
from specdec.target_service.session import TargetSession
from specdec.target_service.verdicts import end_position
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2
from tests.protocol.simulation import model
from tests.protocol.simulation.engine_process import EngineCore
from tests.support.engine.exact_runner import assert_blocks_add_up


class Violations(list[str]):
    """What was seen that must not be."""

    def check(self, is_right: bool, *words: object) -> None:
        """Note what was seen, unless it is right."""
        if not is_right:
            self.append(" ".join(map(str, words)))


def reference_of(prompt: Sequence[int], sampling: pb.TokenSampling) -> tuple[int, ...]:
    """Prompt and output of an undisturbed target."""
    output = model.reference(tuple(prompt), sampling.seed, sampling.choice, sampling.temperature, sampling.max_tokens)
    return (*prompt, *output)


def is_prefix(token_ids: Sequence[int], whole: Sequence[int], start: int = 0) -> bool:
    """Whether tokens are those of `whole` from `start` on."""
    return list(token_ids) == list(whole[start : start + len(token_ids)])


class EngineSafety:
    """Looks at an engine after each of its turns."""

    def __init__(self, name: str, core: EngineCore, violations: Violations) -> None:
        self._name = name
        self._core = core
        self._violations = violations
        self.num_linked = 0
        """Verdicts whose tokens went to a draft directly."""
        self._seen: dict[str, tuple[int, int]] = {}
        """The highest lease generation and epoch under which a session was held."""
        owners: Any = core.worker.owners
        handle = owners._handle_entry

        def spy(owner: Any, stream_id: int, entry: Any) -> None:
            self._check_entry(owner, entry, lambda: handle(owner, stream_id, entry))

        owners._handle_entry = spy

    def after_turn(self, sent: list[Frame]) -> None:
        """Check everything that there is to see."""
        check, sessions = self._violations.check, self._core.host.sessions
        for frame in sent:
            is_result = frame.kind is FrameKind.MESSAGE and frame.stream_id not in self._core.port.links
            if is_result and self._name.startswith("target"):
                for result in target_pb2.VerifyResponse.FromString(frame.payload).results:
                    if result.HasField("verdict"):
                        self.num_linked += result.verdict.HasField("linked")
                        self._check_verdict(result)
        check_table(self._name, sessions, self._violations)
        if not len(sessions):
            return
        settings: Any = self._core.role
        check(len(sessions) <= settings._settings.max_sessions, self._name, "holds", len(sessions), "sessions")
        try:
            assert_blocks_add_up(self._core.built.engine)
        except AssertionError as error:
            check(False, self._name, "has blocks that do not add up:", error)
        for session in sessions:
            self._check_epoch(session)
            self._check_session(session)

    def _check_epoch(self, session: EngineSession) -> None:
        now = (session.lease_generation, session.epoch)
        before = self._seen.get(session.session_id, now)
        is_newer = now[0] > before[0] or (now[0] == before[0] and now[1] >= before[1])
        self._violations.check(is_newer, self._name, "went from", before, "back to", now, "of", session.session_id)
        self._seen[session.session_id] = max(now, before)

    def _check_session(self, session: EngineSession) -> None:
        check, label = self._violations.check, f"{self._name}: {session.session_id}"
        if isinstance(session, DraftSession):
            body, held = session.body, session.heads[0].seq.token_ids[: session.num_committed]
            whole = reference_of(body.token_ids[: body.num_prompt_tokens], body.sampling)
            check(is_prefix(held, whole), label, "drafts after", held, "of", whole)
        elif isinstance(session, TargetSession):
            body, held = session.body, session.token_ids
            whole = reference_of(body.token_ids[: body.num_prompt_tokens], body.sampling)
            check(is_prefix(held, whole), label, "has decided", held, "of", whole)
            most = max(session.credit_position, len(body.token_ids), body.num_prompt_tokens + 1)
            check(len(held) <= most, label, "is at", len(held), "with credit to", most)
            self._check_sent(session, label)

    def _check_sent(self, session: TargetSession, label: str) -> None:
        ends = [end_position(verdict) for verdict in session.sent]
        starts = [verdict.start_position for verdict in session.sent]
        is_whole = starts[1:] == ends[:-1] and (not ends or ends[-1] == session.num_tokens)
        self._violations.check(is_whole, label, "keeps verdicts from", starts, "to", ends, "at", session.num_tokens)

    def _check_verdict(self, result: target_pb2.TargetResult) -> None:
        """Of sessions that ended with it, too: these are gone from the table."""
        verdict = result.verdict
        session = self._core.host.sessions.get(result.session_id)
        body = session.body if session is not None and session.epoch == result.epoch else None
        if body is not None:
            whole = reference_of(body.token_ids[: body.num_prompt_tokens], body.sampling)
            is_right = is_prefix(verdict.token_ids, whole, verdict.start_position)
            self._violations.check(is_right, self._name, "tells", verdict, "of", whole)

    def _check_entry(self, owner: Any, entry: Any, handle: Callable[[], None]) -> None:
        """What is of an earlier opening, or of an owner who has lost the session, changes nothing."""
        session = self._core.host.sessions.get(entry.session_id)
        if session is None:
            handle()
            return
        is_open = entry.WhichOneof("entry") == "open"
        generation = entry.open.lease_generation if is_open else session.lease_generation
        is_owner = session.owner is owner
        is_stale = entry.epoch <= session.epoch if is_open and is_owner else entry.epoch != session.epoch
        is_foreign = not is_owner and not (is_open and generation > session.lease_generation)
        if not ((is_stale and is_owner) or is_foreign or generation < session.lease_generation):
            handle()
            return
        before = _picture(session)
        handle()
        after = self._core.host.sessions.get(entry.session_id)
        is_same = after is session and _picture(session) == before
        self._violations.check(is_same, self._name, "was changed by", entry, "of", owner.owner_id)


def check_table(name: str, table: EngineSessionTable[Any], violations: Violations) -> None:
    """One owner for each session, one stream for each owner, and orphans where there is none."""
    owners = table._owners
    by_stream = [owner.owner_id for owner in table._streams.values()]
    violations.check(len(set(by_stream)) == len(by_stream), name, "has two streams of one owner:", by_stream)
    for stream_id, owner in table._streams.items():
        is_known = owners.get(owner.owner_id) is owner and owner.stream_id == stream_id
        violations.check(is_known, name, "has a stream of nobody:", owner)
    listed = {key for owned in table._by_owner.values() for key in owned}
    violations.check(listed == set(table._sessions), name, "lists", listed, "and holds", set(table._sessions))
    for session in table:
        owned = table._by_owner.get(session.owner.owner_id, {})
        is_owned = owners.get(session.owner.owner_id) is session.owner and owned.get(session.session_id) is session
        violations.check(is_owned, name, "holds a session of nobody:", session.session_id)
        is_orphan = session.owner.stream_id is None
        violations.check((session.orphaned_at_s is not None) == is_orphan, name, "mistakes an orphan")


def spy_on_results(violations: Violations) -> Callable[[ReplicaLink, Any], None]:
    """`ReplicaLink.on_result`, that notes when what is of an earlier opening changes a session."""
    handle = ReplicaLink.on_result

    def on_result(link: ReplicaLink, result: Any) -> None:
        session = link.sessions.get(result.session_id)
        if session is None or result.epoch == link._epoch_of(session):
            handle(link, result)
            return
        before = picture(session)
        handle(link, result)
        is_same, name = picture(session) == before, session.session_id
        violations.check(is_same, link.role, link.address, "of an earlier opening changed", name)

    return on_result


def picture(session: Session) -> tuple[Any, ...]:
    """What of a coordinator's session replicas may change."""
    sides = [(side.host, side.epoch) for side in (session.target, *session.drafting.sides)]
    retries = session.target.retry is None, session.drafting.retry is None
    return (tuple(session.token_ids), session.finish, session.target.progress, *retries, *sides)


def _picture(session: EngineSession) -> tuple[Any, ...]:
    owner: tuple[Any, ...] = (session.epoch, session.lease_generation, session.owner.owner_id, session.orphaned_at_s)
    if isinstance(session, TargetSession):
        return (*owner, session.num_tokens, session.credit_position, len(session.sent), session.arrived)
    assert isinstance(session, DraftSession)
    return (*owner, session.num_committed, session.num_unsent, len(session.tree))


def findings(violations: Violations) -> Iterator[str]:
    """Each once."""
    return iter(dict.fromkeys(violations))

"""What of a pair matters for what can happen to it: equal states have equal futures.

Left out are times and counters that only measure, and the numbers of calls, streams and lives, but for their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.role.session import DraftSession
from specdec.target_service.session import TargetSession
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from tests.protocol.exhaustive import link_state
from tests.protocol.exhaustive.replica_life import STREAMS, ReplicaLife
from tests.protocol.simulation.pipes import Call, End, Item, Message, Pipe

if TYPE_CHECKING:
    from specdec.coordinator.sessions.session import Session
    from tests.protocol.exhaustive.pair_system import PairSystem


def fingerprint(system: PairSystem) -> object:
    """Hashable."""
    calls = list(system.network.calls)
    return (
        tuple(sorted(system.left.items())),
        tuple(map(tuple, system.client_tokens)),
        system.is_answered,
        _coordinator(system),
        tuple(_replica(life, system.loop.time()) for life in system.replicas.values()),
        tuple(_call(call, system) for call in calls),
        _timers(system),
    )


def _coordinator(system: PairSystem) -> object:
    life = system.coordinator
    stream, trials = life.request.stream, life.targets.moves.quarantine._trials
    return (
        _link(life.link, _to_target),
        None if life.draft_link is None else _link(life.draft_link, _to_draft),
        tuple(map(_session, life.sessions)),
        tuple(_chunk(chunk) for chunk in stream._chunks),
        stream.is_closed,
        (life.request.num_deaths, life.request.num_losses, bool(trials._waiting), bool(trials._tried)),
        tuple(sorted(life.targets.moves._give_ups)),
    )


def _link(link: Any, read: Any) -> object:
    return (
        str(link.state),
        link._connection,
        tuple(sorted(link.sessions)),
        len(link._listed),
        tuple(read(entry) for entry, _ in link._stream._outbox._entries),
        link._stream._call is None,
        link._stream._reset_reason,
    )


def _session(session: Session) -> object:
    side, drafting = session.target, session.drafting
    return (
        session.session_id,
        session.position,
        session.num_written,
        session.finish is None,
        (side.host is None, side.epoch, side.credit_position, side.is_held, side.cleared_at, side.retry is None),
        side.told_epoch,
        tuple(
            (each.epoch, each.told, each.is_linked, each.linked_position, each.granted_for, each.is_suspended)
            for each in drafting.sides
        ),
        (drafting.num_openings, drafting.num_failures, drafting.retry is None),
    )


def _replica(life: ReplicaLife, now_s: float) -> object:
    core = life.core
    table = core.host.sessions
    order = {stream: index for index, stream in enumerate(sorted(table._streams))}

    def held(session: Any) -> object:
        read = _at_target if isinstance(session, TargetSession) else _at_draft
        owner = order.get(session.owner.stream_id)
        return (session.session_id, session.epoch, owner, session.orphaned_at_s is None, read(session))

    links = core.worker.links
    inbox = tuple(
        (
            frame.kind,
            link_state.of_frame(frame.payload)
            if frame.stream_id in links.streams
            else _request(frame.payload, life.name),
        )
        for frame in core.port.inbox
    )
    owners = tuple((owner.owner_id, order.get(owner.stream_id)) for owner in table._owners.values())
    num_cached = core.built.engine.stats().blocks_cached
    return (life._is_turn_due, tuple(map(held, table)), owners, inbox, num_cached, link_state.of_end(links, now_s))


def _at_target(session: TargetSession) -> object:
    return (
        session.num_tokens,
        session.credit_position,
        session.state,
        tuple((verdict.start_position, len(verdict.token_ids)) for verdict in session.sent),
        session.arrived is None,
        len(session.tree),
        session.seq.num_computed_tokens if session.has_seq else None,
    )


def _at_draft(session: DraftSession) -> object:
    heads = tuple((tuple(head.seq.token_ids), head.seq.num_computed_tokens, head.is_over) for head in session.heads)
    return (session.num_committed, len(session.tree), session.num_unsent, heads)


def _call(call: Call, system: PairSystem) -> object:
    life = next(life for life in system.replicas.values() if life.name == call.server.name)
    is_stream, is_link = call.method in STREAMS, call.method == STREAMS[-1]
    clients = (system.coordinator.process, *(replica.process for replica in system.replicas.values()))
    read: Any = link_state.of_frame if is_link else lambda payload: _request(payload, life.name)
    answer: Any = len
    if is_stream:
        answer = link_state.of_frame if is_link else lambda payload: _response(payload, life.name)
    return (
        call.method,
        (call.client in clients, call.server is life.process),
        call.is_client_done,
        call.is_server_done,
        _pipe(call.requests, read),
        _pipe(call.responses, answer),
        len(life.engine._sinks),
    )


def _pipe(pipe: Pipe, read: Any) -> object:
    def item(each: Item) -> object:
        if isinstance(each, Message):
            return read(each.payload)
        return each.details if isinstance(each, End) else "half"

    return (tuple(map(item, pipe.sent)), tuple(map(item, pipe.inbox)), pipe.is_cut, pipe.has_end, pipe.is_over)


def _request(payload: bytes, name: str) -> object:
    is_target = name.startswith("target")
    try:
        request: Any = (target_pb2.VerifyRequest if is_target else draft_pb2.DraftRequest).FromString(payload)
    except Exception:  # what says that a stream was opened is no message
        return len(payload)
    listed = tuple((s.session_id, s.epoch, s.committed_length) for s in request.attach.sessions)
    return (request.HasField("attach"), listed, tuple(map(_to_target if is_target else _to_draft, request.entries)))


def _to_target(entry: target_pb2.TargetEntry) -> object:
    kind = entry.WhichOneof("entry")
    what: object = None
    if kind == "open":
        what = (len(entry.open.token_ids), entry.open.credit_position)
    elif kind == "credit":
        what = (entry.credit.position, entry.credit.acknowledged_position)
    elif kind == "link":
        what = entry.link.epoch
    elif kind == "proposal":
        what = _proposal(entry.proposal)
    return (entry.session_id, entry.epoch, kind, what)


def _to_draft(entry: draft_pb2.DraftEntry) -> object:
    kind = entry.WhichOneof("entry")
    what: object = None
    if kind == "open":
        what = len(entry.open.token_ids)
    elif kind == "commit":
        what = (entry.commit.start_position, len(entry.commit.token_ids))
    elif kind == "link":
        what = entry.link.epoch
    return (entry.session_id, entry.epoch, kind, what)


def _response(payload: bytes, name: str) -> object:
    message = target_pb2.VerifyResponse if name.startswith("target") else draft_pb2.DraftResponse
    response: Any = message.FromString(payload)
    results = tuple(map(_result, response.results))
    unknown = tuple(response.attached.unknown_session_ids)
    return (response.HasField("attached"), unknown, results, response.HasField("load"))


def _result(result: Any) -> object:
    kind = result.WhichOneof("result")
    what: object = None
    if kind == "verdict":
        verdict = result.verdict
        linked = (verdict.linked.epoch, verdict.linked.position)
        what = (verdict.start_position, len(verdict.token_ids), verdict.finish_reason, linked)
    elif kind == "proposal":
        what = _proposal(result.proposal)
    elif kind == "link":
        what = (result.link.is_direct, result.link.position)
    return (result.session_id, result.epoch, kind, what)


def _proposal(encoded: bytes) -> object:
    proposal = pb.Proposal.FromString(encoded)
    return (proposal.start_position, tuple(proposal.token_ids), tuple(proposal.parents))


def _chunk(chunk: Any) -> object:
    return (chunk.WhichOneof("chunk"), chunk.delta.index, len(chunk.delta.tokens))


def _timers(system: PairSystem) -> object:
    """In their order, each by what it does."""
    return tuple(_name_of(timer) for timer in system.loop.timers())


def _name_of(timer: Any) -> str:
    callback = timer._callback
    return str(getattr(callback, "__qualname__", callback.__class__.__name__))

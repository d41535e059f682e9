"""Draft to target and target to draft on a direct link: changed frames into both engines' loops, in coupled mode.

Whatever a link's other end sends, the target's tokens stay what they are, and the session ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache

from specdec.v1 import common_pb2 as pb
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.judge import Complaints, require
from tests.fuzz.mutations import mutated
from tests.protocol.linked_pair import EPOCH, KEY, PROMPT, LinkedPair, linked_pair

_MOST_TURNS = 300


@cache
def _undisturbed() -> list[int]:
    with linked_pair() as pair:
        pair.relays = False
        pair.open()
        return pair.run()


def _messages(role: str, pair: LinkedPair) -> list[pb.LinkFrame]:
    """What an honest peer of the role's engine may send now, with all that it can have."""
    position = len(pair.tokens)
    hello = pb.LinkHello(max_message_bytes=1 << 20, socket_path="specdec-link-none")
    leave = pb.LinkEntry(session_id="s", epoch=EPOCH, leave=pb.LinkLeave(reason="a reason"))
    if role == "draft":
        commit = pb.Commit(start_position=position, token_ids=[9, 8], suspend=True)
        entries = [pb.LinkEntry(session_id="s", epoch=EPOCH, commit=commit), leave]
    else:
        proposal = pb.Proposal(start_position=position, token_ids=[9, 8, 7], parents=[-1, 0, 0], scores=b"\x99" * 3)
        offer = pb.LinkEntry(session_id="s", epoch=EPOCH, proposal=proposal.SerializeToString())
        join = pb.LinkEntry(session_id="s", epoch=EPOCH, join=pb.LinkJoin(key=KEY, position=len(PROMPT)))
        entries = [join, offer, leave]
    return [pb.LinkFrame(hello=hello, entries=entries), *(pb.LinkFrame(entries=[entry]) for entry in entries)]


def _opened(role: str) -> Callable[[Complaints], AbstractAsyncContextManager[Run]]:
    @asynccontextmanager
    async def opened(complaints: Complaints) -> AsyncIterator[Run]:
        async def run(case: Case) -> None:
            rng = case.rng
            with linked_pair() as pair:
                pair.open()
                pair.grant()
                pair.turn(rng.randint(2, 6))
                core = pair.target if role == "target" else pair.draft
                for _ in range(rng.choice([1, 1, 3])):
                    change = mutated(rng, rng.choice(_messages(role, pair)))
                    case.what.append(change.what)
                    pair.send_bytes(core, case.sent(change.apply()))
                    pair.turn(rng.randint(0, 2))
                if pair.aborts:
                    pair.cut()
                require(pair.run(_MOST_TURNS) == _undisturbed(), "the target's tokens have changed")

        yield run

    return opened


TO_TARGET = Link("draft-target-direct", _opened("target"))
TO_DRAFT = Link("target-draft-direct", _opened("draft"))

"""Sessions of the draft's role for its tests, and their contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specdec.drafting.role.growth import GrowthPolicy
from specdec.drafting.role.session import DraftSession
from specdec.engine.tree import TokenTree, check_tree
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.worker_client import WorkerClient

PROMPT = prompts()[0][:20]
MAX_AHEAD = 6


@contextmanager
def drafting_client(pair: LocalPair) -> Iterator[WorkerClient]:
    """The client of a draft that follows its main path alone, to the end; checks that its sessions leave nothing."""
    client = WorkerClient(pair, "draft")
    grow(client, max_heads=1, min_path_score=0.0)
    client.attach()
    yield client
    client.end_all()
    client.check_nothing_held()


def grow(client: WorkerClient, **policy: float) -> None:
    client.pair.drafter.growth = GrowthPolicy(MAX_AHEAD, 64, **policy)  # type: ignore[arg-type]


def a_session(max_tokens: int = 60, *, body: dict[str, object] | None = None, **sampling: object) -> pb.OpenSession:
    return open_session(PROMPT, max_tokens=max_tokens, body=body, **{"ignore_eos": True, **sampling})


def drafting(client: WorkerClient, body: pb.OpenSession | None = None, turns: int = 30) -> WorkerClient:
    client.entry("s", open=body or a_session())
    client.turn(turns)
    return client


def chain_of(client: WorkerClient) -> list[int]:
    session = client.session()
    chain = main_tokens(session)
    assert session.heads[0].seq.token_ids[session.num_committed :] == chain
    return chain


def session_path(client: WorkerClient) -> list[int]:
    return client.session().main_path


def main_tokens(session: DraftSession) -> list[int]:
    return [session.tree.token_ids[node] for node in session.main_path]


def proposals(client: WorkerClient, session_id: str = "s") -> list[pb.Proposal]:
    return [pb.Proposal.FromString(encoded) for encoded in client.take("proposal", session_id)]


def length_within(proposal: pb.Proposal, chain: list[int]) -> int:
    """Number of a chain's tokens that a proposal holds."""
    parents = list(proposal.parents) or list(range(-1, len(proposal.token_ids) - 1))
    check_tree(proposal.token_ids, parents, 4096)
    tree = TokenTree(proposal.token_ids, parents)
    node: int | None = -1
    for length, token in enumerate(chain):
        node = tree.child(node, token)
        if node is None:
            return length
    return len(chain)


def commit(client: WorkerClient, start: int, tokens: list[int], turns: int = 1) -> None:
    client.entry("s", commit=pb.Commit(start_position=start, token_ids=tokens))
    client.turn(turns)


def other(token: int) -> int:
    return (token + 1) % 4096

"""Compares a draft that draws several tokens per call with one that draws them one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from specdec.drafting.role.growth import GrowthPolicy
from specdec.drafting.role.session import DraftSession
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2
from tests.support.engine.exact_runner import assert_blocks_add_up, evict_all
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.worker_client import WorkerClient

MAX_AHEAD = 9

Snapshot = dict[str, Any]

plain: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
]


def client_of(pair: LocalPair, *, is_ahead: bool, max_heads: int, **policy: float) -> WorkerClient:
    """Client of a draft without sessions; `is_ahead`: the draft draws several tokens per call."""
    client = WorkerClient(pair, "draft")
    evict_all(client.engine.block_pool)
    pair.drafter.growth = GrowthPolicy(MAX_AHEAD, 64, max_heads, **policy)  # type: ignore[arg-type]
    if not is_ahead:
        pair.drafter._ahead.drawing = None
    client.attach()
    return client


def settle(client: WorkerClient) -> dict[str, Snapshot]:
    """Draft until nothing is left to draft; returns a snapshot of each session."""
    for _ in range(400):
        client.turn()
        assert_blocks_add_up(client.engine)
        if client.role.wait_s(0.0) is None:
            return {session.session_id: snapshot(client, session) for session in client.host.sessions}
    raise AssertionError("drafting does not come to an end")


def snapshot(client: WorkerClient, session: DraftSession) -> Snapshot:
    sent = client.take("proposal", session.session_id)
    last = pb.Proposal.FromString(sent[-1]) if sent else pb.Proposal()
    return {
        "committed": session.num_committed,
        "tokens": list(session.tree.token_ids),
        "parents": list(session.tree.parents),
        "scores": [note.score for note in session.notes],
        "ends": [note.is_end for note in session.notes],
        "heads": [(list(head.seq.token_ids), head.node, head.is_over) for head in session.heads],
        "sent": (list(last.token_ids), list(last.parents), last.scores, last.path_length, last.start_position),
    }


def any_path(session: DraftSession, rng: random.Random) -> list[int]:
    """Tokens of a random path of the tree."""
    tree = session.tree
    node = rng.randrange(-1, len(tree)) if len(tree) else -1
    return [tree.token_ids[each] for each in tree.path(node)]


def near_main_path(session: DraftSession, rng: random.Random) -> list[int]:
    """Tokens of a path that leaves the main path after two nodes at most; it exists in any order of drafting."""
    tree, main = session.tree, session.main_path
    above = rng.randrange(min(2, len(main)) + 1)
    parent = main[above - 1] if above else -1
    children = sorted(token for token, its in zip(tree.token_ids, tree.parents, strict=True) if its == parent)
    return [tree.token_ids[node] for node in main[:above]] + (rng.sample(children, 1) if children else [])


PickPath = Callable[[DraftSession, random.Random], list[int]]


def commit_of(session: DraftSession, rng: random.Random, pick_path: PickPath) -> pb.Commit:
    """A random commit of a target: the tokens of a path, with or without another token after them."""
    tokens = pick_path(session, rng)
    if not tokens or rng.random() < 0.6:
        tokens.append(rng.choice((rng.randrange(4096), 278, 13)))
    if rng.random() < 0.1:
        tokens += [rng.randrange(4096) for _ in range(5)]
    return pb.Commit(start_position=session.num_committed, token_ids=tokens)


def play(
    client: WorkerClient, seed: int, choices: list[dict[str, Any]], pick_path: PickPath = any_path
) -> list[dict[str, Snapshot]]:
    """Open, commit to, reopen and close sessions, and change the credit, by the seed; returns snapshots by round."""
    rng = random.Random(seed)
    opened: dict[str, int] = {}
    log = []
    for _ in range(14):
        for name in rng.sample("abcd", rng.randrange(1, 4)):
            session = client.session(name)
            chance = rng.random()
            if session is None or chance < 0.08:
                sampling = dict(rng.choice(choices))
                sampling.setdefault("stop_token_ids", rng.choice(((), (13, 199, 220, 278))))
                sampling["max_tokens"] = rng.choice((6, 30, 200))
                prompt = prompts()[rng.randrange(4)][: rng.choice((5, 16, 17, 31))]
                opened[name] = opened.get(name, 0) + 1
                body = open_session(prompt, seed=rng.randrange(99), **sampling)
                client.entry(name, epoch=opened[name], open=body)
            elif chance < 0.14:
                client.entry(name, epoch=opened[name], close=pb.CloseSession())
            elif chance < 0.2:
                report = draft_pb2.DraftRequest(target_load=pb.LoadReport(draft_credit=rng.randrange(1, 6)))
                client.role.owner_message(session.owner, report)  # type: ignore[attr-defined]
            else:
                client.entry(name, epoch=opened[name], commit=commit_of(session, rng, pick_path))
        log.append(settle(client))
    client.end_all()
    client.check_nothing_held()
    return log


def assert_alike(pair: LocalPair, seed: int, choices: list[dict[str, Any]], max_heads: int, **policy: float) -> None:
    """Sessions with random messages, opened by `choices`, have the same trees either way."""
    singly, ahead = (
        play(client_of(pair, is_ahead=is_ahead, max_heads=max_heads, **policy), seed, choices)
        for is_ahead in (False, True)
    )
    assert ahead == singly


def assert_same_guesses(
    pair: LocalPair, seed: int, choices: list[dict[str, Any]], max_heads: int, **policy: float
) -> None:
    """Common nodes have the same scores either way; below the node limit, the nodes are the same."""
    clients = (client_of(pair, is_ahead=is_ahead, max_heads=max_heads, **policy) for is_ahead in (False, True))
    singly, ahead = (play(client, seed, choices, near_main_path) for client in clients)
    limit = pair.drafter.growth.node_limit
    num_compared = 0
    for one, other in zip(singly, ahead, strict=True):
        assert one.keys() == other.keys()
        for name, expected in one.items():
            found = other[name]
            assert found["committed"] == expected["committed"]
            these, those = guesses(found), guesses(expected)
            assert {path: these[path] for path in these.keys() & those.keys()} == {
                path: those[path] for path in these.keys() & those.keys()
            }
            if max(len(these), len(those)) < limit:
                assert these == those
                num_compared += len(these)
    assert num_compared > 20


def guesses(snapshot: Snapshot) -> dict[tuple[int, ...], tuple[float, bool]]:
    """Score and end mark of each node, by the tokens of its path."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(snapshot["tokens"], snapshot["parents"], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, zip(snapshot["scores"], snapshot["ends"], strict=True), strict=True))

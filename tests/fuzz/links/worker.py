"""Coordinator to target and to draft, and draft to target: frames into an engine's loop, a real engine below."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.message import Message
from google.rpc import code_pb2

from specdec.replica.bridge.frames import Frame, FrameKind
from specdec.target_service.pacing.pacing import Pacing
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.judge import Complaints, check_typed, require
from tests.fuzz.mutations import mutated
from tests.support.engine.free_rows import FreeRows
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.worker_client import WorkerClient
from tests.support.services.tiny_pair import make_tiny_pair

_PROMPT = list(range(20, 40))
_NUM_TOKENS = 12
_NUM_GUESSES = 3
_GOOD, BAD_STREAM = 1, 2
"""Streams."""
_MOST_TURNS = 60
_ALLOWED = {"SESSION_TAKEN_OVER", "NON_FINITE_LOGITS"}


@cache
def tiny_local_pair() -> LocalPair:
    """A target and a draft that run in this process, on tiny models with a short context."""
    folder = Path(tempfile.mkdtemp(prefix="specdec-fuzz-"))
    pair = make_tiny_pair(folder, max_model_len=128)
    return LocalPair(str(pair.target), str(pair.draft), {"max_sessions": 8}, max_sessions=8, num_blocks=64)


def open_body(**fields: Any) -> pb.OpenSession:
    """A session that decodes to `_NUM_TOKENS`, with all that one can have."""
    sampling = pb.TokenSampling(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.1, logit_bias={7: 1.0}, max_tokens=_NUM_TOKENS, min_tokens=1, stop_token_ids=[5],
        ignore_eos=True, seed=7, choice=1, num_logprobs=2,
    )  # fmt: skip
    body = pb.OpenSession(
        token_ids=_PROMPT, num_prompt_tokens=len(_PROMPT), sampling=sampling, verify_mode=pb.VERIFY_MODE_COUPLED,
        speculate=True, max_draft_tokens=4, time_per_token_us=9, deadline_ms=600_000,
        lease_generation=1, priority=1, cache_salt=b"salt",
        fork_from="other", num_prompt_logprobs=1, credit_position=1000, target="127.0.0.1:1",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )  # fmt: skip
    body.MergeFrom(pb.OpenSession(**fields))
    return body


def proposal(start: int, mode: int) -> pb.Proposal:
    """A proposal with all that one can have: a tree, or a chain with distributions."""
    tokens = [30, 31, 32, 33]
    if mode == pb.VERIFY_MODE_REJECTION:
        sparse = [pb.SparseDistribution(token_ids=[token, 40], probs=[0.75, 0.25]) for token in tokens]
        return pb.Proposal(start_position=start, token_ids=tokens, distributions=sparse, draft_us=9, path_length=4)
    scores = bytes([200] * len(tokens))
    return pb.Proposal(
        start_position=start, token_ids=tokens, parents=[-1, 0, 0, 2], scores=scores, draft_us=9, path_length=3
    )


@dataclass(frozen=True, slots=True)
class Side:
    """What differs between the roles."""

    role: str
    entry: type[Any]
    request: type[Any]

    def conversation(self, rng: random.Random) -> list[Message]:
        """Valid frames, from the attach to the close."""
        mode = rng.choice([pb.VERIFY_MODE_COUPLED, pb.VERIFY_MODE_REJECTION])
        listed = pb.AttachedSession(session_id="x", epoch=1, committed_length=3)
        frames: list[Any] = [self.request(attach=pb.Attach(owner_id="bad", lease_generation=1, sessions=[listed]))]

        def add(**body: Any) -> None:
            frames.append(self.request(entries=[self.entry(session_id="bad/1", epoch=1, **body)]))

        start = len(_PROMPT)
        add(open=open_body(verify_mode=mode))
        if self.role == "target":
            add(proposal=proposal(start + 1, mode).SerializeToString())
            add(credit=pb.Credit(position=start + 5, acknowledged_position=start))
        else:
            frames[-1].target_load.CopyFrom(_load())
            frames[-1].target_loads.add(target="127.0.0.1:1").load.CopyFrom(_load())
            add(commit=pb.Commit(start_position=start, token_ids=[30, 31]))
        add(close=pb.CloseSession(reason="finished"))
        return frames


def _load() -> pb.LoadReport:
    return pb.LoadReport(
        num_running=1, num_waiting=1, kv_blocks_used=3, kv_blocks_total=64, draft_credit=4, step_us=100,
        draining=False, num_sessions=1, max_sessions=8, num_waiting_tokens=7,
    )  # fmt: skip


SIDES = {
    "target": Side("target", target_pb2.TargetEntry, target_pb2.VerifyRequest),
    "draft": Side("draft", draft_pb2.DraftEntry, draft_pb2.DraftRequest),
}


class Worker:
    """One engine loop with a good session and a bad one."""

    def __init__(self, side: Side) -> None:
        self._side = side
        pair = tiny_local_pair()
        self._client = WorkerClient(pair, side.role)
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(0))  # the pair has silenced it
        pair.verifier.steps.pacing = Pacing(0.0)
        pair.verifier.steps.pacing.clock.rows = FreeRows()
        self._expected = self._good_tokens(lambda: None)

    def try_messages(self, messages: list[bytes]) -> None:
        """Messages of a stream of its own while a good session decodes; nothing of either may be left."""
        self.try_frames([Frame(FrameKind.MESSAGE, BAD_STREAM, message) for message in messages])

    def try_frames(self, frames: list[Frame]) -> None:
        """Frames of any stream but the good one's while a good session decodes; nothing of either may be left."""
        client, waiting = self._client, list(frames)
        client.frame(FrameKind.STREAM_OPENED, BAD_STREAM, b"peer")

        def disturb() -> None:
            if waiting and BAD_STREAM not in client.aborts:
                client.port.inbox.append(waiting.pop(0))

        tokens = self._good_tokens(disturb)
        require(tokens == self._expected, f"the session beside got {tokens}")
        self._judge()
        client.frame(FrameKind.STREAM_CLOSED, BAD_STREAM)
        client.turn(1)
        client.end_all()
        client.turn(1)
        client.check_nothing_held()
        client.results.clear()
        client.aborts.clear()

    def check_good(self) -> None:
        """A session that nothing disturbs is what it was. Raises Fault."""
        require(self._good_tokens(lambda: None) == self._expected, "the session after all cases got other tokens")

    def _good_tokens(self, disturb: Callable[[], None]) -> list[int]:
        """The tokens of a session that is as any other; `disturb` is called before each turn."""
        client = self._client
        self._epoch = getattr(self, "_epoch", 0) + 1
        client.attach(_GOOD, "good", lease=self._epoch)
        body = open_body(cache_salt=b"good", fork_from="", credit_position=len(_PROMPT) + 3)
        client.entry("good/1", self._epoch, stream_id=_GOOD, open=body)
        tokens: list[int] = []
        for turn in range(_MOST_TURNS):
            disturb()
            client.turn(1)
            require(_GOOD not in client.aborts, "the stream beside was ended")
            require(not client.take("error", "good/1"), "the session beside was ended")
            if self._side.role == "target":
                tokens += [token for verdict in client.take("verdict", "good/1") for token in verdict.token_ids]
                client.entry("good/1", self._epoch, stream_id=_GOOD, credit=pb.Credit(position=1000))
            else:
                tokens = self._last_proposal() or tokens
            if turn > 8 and (len(tokens) >= _NUM_TOKENS or self._side.role == "draft"):
                break
        client.entry("good/1", self._epoch, stream_id=_GOOD, close=pb.CloseSession(reason="finished"))
        client.frame(FrameKind.STREAM_CLOSED, _GOOD)
        client.turn(1)
        return tokens

    def _last_proposal(self) -> list[int]:
        """The draft's first guesses: nothing is committed, so they do not depend on what else is there."""
        encoded = self._client.take("proposal", "good/1")
        if not encoded:
            return []
        tree = pb.Proposal.FromString(encoded[-1])
        parents = list(tree.parents) or list(range(-1, len(tree.token_ids) - 1))
        path, node = [], -1
        while node in parents and len(path) < _NUM_GUESSES:
            node = parents.index(node)
            path.append(tree.token_ids[node])
        return path

    def _judge(self) -> None:
        for stream_id, status in self._client.aborts.items():
            require(stream_id != _GOOD, f"stream {stream_id} was ended")
            check_typed(status)
            require(status.code not in (code_pb2.INTERNAL, code_pb2.UNKNOWN), f"the stream ended with {status}")
        for result in self._client.results:
            kind = result.WhichOneof("result")
            if kind in ("error", "proposal_rejected"):
                status = getattr(result, kind).status
                reason = check_typed(status)
                is_fault = status.code in (code_pb2.INTERNAL, code_pb2.UNKNOWN) and reason not in _ALLOWED
                require(not is_fault, f"{kind}: {status.message} ({reason})")


def link(role: str) -> Link:
    """Frames of a coordinator to one role."""

    @asynccontextmanager
    async def opened(complaints: Complaints) -> AsyncIterator[Run]:
        worker = Worker(SIDES[role])

        async def run(case: Case) -> None:
            worker.try_messages(changed(case, SIDES[role].conversation(case.rng)))

        yield run
        worker.check_good()

    return Link(f"coordinator-{role}", opened)


def changed(case: Case, frames: list[Message]) -> list[bytes]:
    """A conversation with one thing wrong: in a message, in a proposal within it, or in their order."""
    rng = random.Random(f"{case.rng.random()}")
    encoded = [frame.SerializeToString() for frame in frames]
    index = rng.randrange(len(frames))
    kind = rng.random()
    if kind < 0.1:
        other = rng.randrange(len(frames))
        encoded[index], encoded[other] = encoded[other], encoded[index]
        case.what.append(f"messages {index} and {other} swapped")
    elif kind < 0.2:
        times = rng.choice([0, 2, 3])
        encoded[index : index + 1] = encoded[index : index + 1] * times
        case.what.append(f"message {index} {times} times")
    else:
        inner = _inner_proposal(frames[index])
        mutation = mutated(rng, frames[index] if inner is None else inner)
        data = case.sent(mutation.apply())
        if inner is not None:
            frames[index].entries[0].proposal = data  # type: ignore[attr-defined]
            data = frames[index].SerializeToString()
        encoded[index] = data
        case.what.append(f"{type(frames[index]).__name__} {index}: {mutation.what}")
    return encoded


def _inner_proposal(frame: Any) -> pb.Proposal | None:
    is_one = bool(frame.entries) and frame.entries[0].WhichOneof("entry") == "proposal"
    return pb.Proposal.FromString(frame.entries[0].proposal) if is_one else None


TARGET, DRAFT = link("target"), link("draft")

"""The state of one choice while it decodes, and of the request it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.sessions.client_stream import ClientStream
from coordinator.sessions.request_trace import RequestTrace
from coordinator.sessions.tally import SpeculationTally
from coordinator.text.choice_output import ChoiceOutput, Finish
from coordinator.text.detokenizer import DetokenizerFactory
from specdec.store.interface import RequestKey
from specdec.v1 import common_pb2 as pb

if TYPE_CHECKING:
    from coordinator.links.draft_link import DraftLink
    from coordinator.links.target_link import TargetLink


@dataclass(slots=True, eq=False)
class Request:
    """A client's request while it runs.

    Invariant: `num_unfinished` is the number of sessions without a `finish`; at zero the stream is closed.
    """

    key: RequestKey
    uid: str
    stream: ClientStream
    arrived_s: float
    priority: int = 0
    cache_salt: bytes = b""
    model: pb.ModelIdentity = field(default_factory=pb.ModelIdentity)
    """What decides its tokens; only a target with the same weights and tokenizer may go on with it."""
    deadline_s: float | None = None
    """On the monotonic clock."""
    sessions: list[Session] = field(default_factory=list)
    num_unfinished: int = 0
    num_cached_tokens: int = 0
    has_output: bool = False
    waiting: asyncio.Task[Any] | None = None
    """Set while it waits for a place or a target; see `end_wait`."""
    is_aborted: bool = False
    trace: RequestTrace = field(default_factory=RequestTrace)

    def end_wait(self) -> None:
        """It has been ended (aborted, taken over, drained): nobody need wait for a place or a target any more."""
        if self.waiting is not None:
            self.waiting.cancel()

    def deadline_ms(self) -> int | None:
        """What is left of the deadline; None: there is none."""
        return None if self.deadline_s is None else max(1, round((self.deadline_s - time.monotonic()) * 1000))


@dataclass(slots=True, eq=False)
class Session:
    """One choice: its tokens, its text, and where it is open.

    Epochs count openings on each side apart and only grow: what comes from an earlier opening is dropped.
    """

    session_id: str
    choice: int
    request: Request
    token_ids: list[int]
    """Prompt and committed output."""
    num_prompt_tokens: int
    sampling: pb.TokenSampling
    verify_mode: pb.VerifyMode.ValueType
    speculate: bool
    output: ChoiceOutput
    detokenizers: DetokenizerFactory
    max_draft_tokens: int | None = None
    num_prompt_logprobs: int | None = None
    fork_from: str = ""
    """Used at the first opening only: later ones find the prompt in the prefix cache."""
    tally: SpeculationTally = field(default_factory=SpeculationTally)
    finish: Finish | None = None

    target: TargetLink | None = None
    target_epoch: int = 0
    num_written: int = 0
    """Position up to which the client has taken tokens."""
    credit_position: int = 0
    """The credit last given to the target."""
    had_verdict: bool = False
    was_relayed: bool = False
    """A proposal was relayed since the target session was opened."""
    relayed_s: float | None = None
    """When the first proposal since the last verdict was relayed."""
    target_failing_s: float | None = None
    """Since when the target has been refusing the session."""
    num_target_failures: int = 0
    target_retry: asyncio.TimerHandle | None = None

    draft: DraftLink | None = None
    draft_epoch: int = 0
    committed_s: float | None = None
    """When the draft was told of a commit that no proposal has followed yet."""
    num_draft_failures: int = 0
    draft_retry: asyncio.TimerHandle | None = None

    @property
    def log_fields(self) -> dict[str, str]:
        """What log lines about it carry."""
        return {"request_id": self.request.key[1], "session": self.session_id, **self.request.trace.log_fields}

    @property
    def position(self) -> int:
        """Where the next token goes."""
        return len(self.token_ids)

    def open_body(self, traceparent: str) -> pb.OpenSession:
        """The OpenSession of either side, with all committed tokens."""
        body = pb.OpenSession(
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            verify_mode=self.verify_mode,
            speculate=self.speculate,
            max_draft_tokens=self.max_draft_tokens,
            deadline_ms=self.request.deadline_ms(),
            priority=self.request.priority,
            cache_salt=self.request.cache_salt,
            credit_position=self.credit_position,
            traceparent=traceparent,
        )
        if self.position == self.num_prompt_tokens:
            body.fork_from = self.fork_from
            if self.num_prompt_logprobs is not None:
                body.num_prompt_logprobs = self.num_prompt_logprobs
        return body


class SessionTable:
    """All live sessions, and all live requests by tenant and id."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, Request] = {}
        self._sessions: dict[str, Session] = {}
        self._ended = asyncio.Event()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def requests(self) -> list[Request]:
        """All live requests, the waiting ones included."""
        return list(self._requests.values())

    def find_request(self, key: RequestKey) -> Request | None:
        """The live request with this id."""
        return self._requests.get(key)

    def add_request(self, request: Request) -> None:
        """Register a request; replaces one that it takes over."""
        self._requests[request.key] = request

    def remove_request(self, request: Request) -> None:
        """Forget a request, unless it was taken over."""
        if self._requests.get(request.key) is request:
            del self._requests[request.key]
            self._ended.set()

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until some request ends, at most this long."""
        self._ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()

    def add(self, session: Session) -> None:
        """Register a session that is about to be opened."""
        self._sessions[session.session_id] = session

    def remove(self, session: Session) -> None:
        """Forget a session."""
        self._sessions.pop(session.session_id, None)

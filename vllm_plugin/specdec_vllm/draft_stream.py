"""The stream to one draft: opened again whenever it breaks. To the draft service it is a coordinator's."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc
from google.rpc import code_pb2

from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, draft_pb2_grpc
from specdec.wire.backoff import Backoff
from specdec.wire.channel import ReplicaChannel
from specdec.wire.errors import SpecdecError
from specdec.wire.message_sizes import frame_bytes, frame_slices, most_bytes, most_entry_bytes
from specdec.wire.parsing.reading import parsed, parsing
from specdec.wire.proposals import MOST_PROPOSALS
from specdec_vllm.offers import BadOffer, read_offer
from specdec_vllm.rows import RowSession
from specdec_vllm.settings import Engine, PluginSettings

_BACKOFF = Backoff(0.1, 5.0, spread=(0.75, 1.25))
_LIAR_S = 60.0
"""Seconds for which a draft that sent impossible proposals, or far too many, is not called."""
_MOST_BAD = 3
"""Impossible proposals of one stream after which the draft is given up for a time."""
_PROMPT_PATIENCE = 4
"""Factor on `stall_s` for a draft that has proposed nothing for any of its rows yet."""
_MOST_STRAYS = 4096
"""Results of unknown sessions in one stream, at most: a few cross with closes."""
_MOST_UNSENT = 65_536
"""Entries that wait for a draft, at most: one that does not read is reset."""
_FULL_S, _REFUSED_S = 1.0, 60.0
"""Seconds before a row is opened again after a draft without room refused it, or one that finds it wrong."""
_log = logging.getLogger("vllm.specdec")


class Unfit(Exception):
    """A draft that cannot draft for this model; it is asked again at intervals, as it may be replaced."""


class DraftStream:
    """One draft. The loop's thread runs `run`; what concerns sessions is called with their lock held."""

    def __init__(
        self,
        address: str,
        channel: ReplicaChannel,
        settings: PluginSettings,
        engine: Engine,
        *,
        owner_id: str,
        lock: threading.Condition,
    ) -> None:
        """`lock` guards the sessions; it is notified when something came."""
        self.address = address
        self._channel = channel
        self._settings = settings
        self._engine = engine
        self._owner_id = owner_id
        self._lock = lock
        self.identity = pb.ModelIdentity()
        self.is_ready = False
        self.sessions: dict[str, RowSession] = {}
        self.heard_s = 0.0
        self.num_failures = 0
        """Ends of the stream since it last proposed something."""
        self._message_bytes = settings.max_message_bytes
        self._outbox: deque[draft_pb2.DraftEntry] = deque()
        self._wake = asyncio.Event()
        self._num_bad = self._num_strays = 0
        self._reset_reason = ""
        self._call: Any = None

    def fits(self, num_tokens: int) -> bool:
        """Whether it can take a row of this length."""
        return self.is_ready and num_tokens + 1 < self.identity.max_model_len

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether all these are tokens of its vocabulary."""
        return all(0 <= token < self.identity.vocab_size for token in tokens)

    def open(self, session: RowSession, now_s: float) -> bool:
        """Queue the opening of a session with all its tokens; False if the draft cannot take it."""
        tokens = session.tokens[: session.num_tokens].tolist()
        if not self.knows(tokens):
            return False
        session.epoch += 1
        body = pb.OpenSession(
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=pb.TokenSampling(
                temperature=0.0,
                top_p=1.0,
                repetition_penalty=1.0,
                max_tokens=self._engine.max_model_len,
                ignore_eos=True,
            ),
            verify_mode=pb.VERIFY_MODE_COUPLED,
            speculate=True,
            max_draft_tokens=self._engine.num_speculative_tokens,
            lease_generation=1,
        )
        entry = draft_pb2.DraftEntry(session_id=session.session_id, epoch=session.epoch, open=body)
        if entry.ByteSize() > most_entry_bytes(self._message_bytes):
            return False
        session.home, session.offer = self, None
        self.sessions[session.session_id] = session
        self._queue(session, entry, now_s)
        return True

    def commit(self, session: RowSession, now_s: float) -> bool:
        """Queue a session's new tokens; False, and the session leaves, if they are none of the draft's."""
        tokens = session.tokens[session.told : session.num_tokens].tolist()
        if not self.knows(tokens) or not self.fits(session.num_tokens):
            self.close(session, "finished")
            return False
        body = pb.Commit(start_position=session.told, token_ids=tokens)
        self._queue(
            session, draft_pb2.DraftEntry(session_id=session.session_id, epoch=session.epoch, commit=body), now_s
        )
        return True

    def close(self, session: RowSession, reason: str) -> None:
        """Queue a session's end."""
        if self.sessions.pop(session.session_id, None) is not None:
            body = pb.CloseSession(reason=reason)
            entry = draft_pb2.DraftEntry(session_id=session.session_id, epoch=session.epoch, close=body)
            self._outbox.append(entry)
        session.leave()

    def flush(self) -> None:
        """In the loop: send what is queued."""
        self._wake.set()

    def reset(self, reason: str) -> None:
        """In the loop: break the stream."""
        self._reset_reason = reason
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        try:
            while True:
                cause, wait_s = await self._fault()
                with self._lock:
                    self._end(cause)
                await asyncio.sleep(max(wait_s, _BACKOFF.wait_s(self.num_failures)))
        finally:
            await self._channel.close()

    async def _fault(self) -> tuple[str, float]:
        """Run the stream; returns why it ended, and the least seconds before the next."""
        self._reset_reason, self._num_bad, self._num_strays = "", 0, 0
        try:
            await self._stream()
            return "the draft ended the stream", 0.0
        except Unfit as error:
            return str(error), _BACKOFF.longest_s
        except grpc.aio.AioRpcError as error:
            cause = f"{error.code().name}: {error.details()}"
        except TimeoutError:
            cause = f"no answer within {self._settings.connect_timeout_s:g} s"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            cause = "the stream was reset"
        except (SpecdecError, asyncio.InvalidStateError) as error:
            cause = str(error)
        is_liar = self._num_bad >= _MOST_BAD
        return self._reset_reason or cause, _LIAR_S if is_liar else 0.0

    def _end(self, cause: str) -> None:
        was_ready, self.is_ready = self.is_ready, False
        self.num_failures += 1
        for session in self.sessions.values():
            session.leave()
        num_rows = len(self.sessions)
        self.sessions.clear()
        self._outbox.clear()
        if was_ready or self.num_failures == 1:
            _log.warning("draft %s is not used: %s (%d rows go on without it)", self.address, cause, num_rows)
        self._lock.notify_all()

    async def _stream(self) -> None:
        await self._channel.renew()
        channel = self._channel.current
        async with asyncio.timeout(self._settings.connect_timeout_s):
            stub = draft_pb2_grpc.DraftServiceStub(parsing(channel, counts_parts=True))
            info = parsed(await stub.GetReplicaInfo(pb.GetReplicaInfoRequest()))
        self._message_bytes = most_bytes(info.max_message_bytes, self._settings.max_message_bytes)
        call = self._call = stub.Draft()
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                attach = pb.Attach(
                    owner_id=self._owner_id, lease_generation=1, max_message_bytes=self._settings.max_message_bytes
                )
                await call.write(draft_pb2.DraftRequest(attach=attach))
                frame = parsed(await call.read())
            if not isinstance(frame, draft_pb2.DraftResponse) or not frame.HasField("attached"):
                raise Unfit("its first frame answers no attach: is it a draft?")
            with self._lock:
                self._adopt(frame.attached.identity)
            writer = asyncio.create_task(self._write(call))
            while isinstance(frame, draft_pb2.DraftResponse):
                with self._lock:
                    self._take(frame)
                frame = parsed(await call.read())
        finally:
            self._call = None
            call.cancel()
            if writer is not None:
                writer.cancel()

    def _adopt(self, identity: pb.ModelIdentity) -> None:
        ours, theirs = self._engine.tokenizer_digest, identity.tokenizer_digest
        if ours and theirs and ours != theirs:
            raise Unfit(
                f"its tokenizer ({theirs}) is not the target's ({ours}): set the draft's `target` or `tokenizer`"
            )
        if identity.vocab_size > self._engine.vocab_size:
            raise Unfit(f"its vocabulary has {identity.vocab_size} tokens, the target's {self._engine.vocab_size}")
        self.identity, self.heard_s = identity, time.monotonic()
        self._outbox.clear()
        self.is_ready = True
        compared = "" if ours and theirs else "; its tokenizer could not be compared"
        _log.info("draft %s is ready: %s%s", self.address, identity.name, compared)

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                with self._lock:
                    entries = [self._outbox.popleft() for _ in range(len(self._outbox))]
                for part in frame_slices((one.ByteSize() for one in entries), frame_bytes(self._message_bytes)):
                    await call.write(draft_pb2.DraftRequest(entries=entries[part]))
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader reports the end

    def _take(self, frame: draft_pb2.DraftResponse) -> None:
        self.heard_s = time.monotonic()
        for result in frame.results:
            session = self.sessions.get(result.session_id)
            if session is None or session.epoch != result.epoch:
                self._num_strays += 1
                if self._num_strays > _MOST_STRAYS:
                    self._give_up("it sends too many results of unknown sessions")
                continue
            kind = result.WhichOneof("result")
            if kind == "proposal":
                self._offered(session, result.proposal)
            elif kind == "error":
                self._refused(session, result.error)
        if frame.results:
            self._lock.notify_all()

    def _offered(self, session: RowSession, encoded: bytes) -> None:
        session.num_offers += 1
        if session.num_offers > MOST_PROPOSALS:
            self._give_up("it sends too many proposals")
            return
        try:
            offer = read_offer(encoded, self._engine.vocab_size)
        except BadOffer as error:
            self._num_bad += 1
            if self._num_bad >= _MOST_BAD:
                self._give_up(f"it sends impossible proposals: {error}")
            return
        session.offer, self.num_failures = offer, 0
        if offer.start >= session.told:
            session.is_answered = True

    def _give_up(self, reason: str) -> None:
        self._num_bad = _MOST_BAD
        self.reset(reason)

    def _refused(self, session: RowSession, error: pb.SessionError) -> None:
        code = error.status.code
        wait_s = _FULL_S if code == code_pb2.RESOURCE_EXHAUSTED else 0.0
        session.not_before_s = time.monotonic() + (_REFUSED_S if code == code_pb2.INVALID_ARGUMENT else wait_s)
        self.sessions.pop(session.session_id, None)
        session.leave()

    def _queue(self, session: RowSession, entry: draft_pb2.DraftEntry, now_s: float) -> None:
        session.told, session.told_s, session.is_answered = session.num_tokens, now_s, False
        session.num_offers = 0
        self._outbox.append(entry)

    @property
    def is_stuck(self) -> bool:
        """Whether it reads nothing, or has answered nothing for `stall_s`, or for longer if it computes prompts."""
        if len(self._outbox) > _MOST_UNSENT:
            return True
        silent_s = time.monotonic() - max(
            self.heard_s, min(map(_waits_since_s, self.sessions.values()), default=math.inf)
        )
        is_prompt = all(session.offer is None for session in self.sessions.values())
        return silent_s > self._settings.stall_s * (_PROMPT_PATIENCE if is_prompt else 1)


def _waits_since_s(session: RowSession) -> float:
    return math.inf if session.is_answered else session.told_s

"""The replicas: which there are, whether they fit together, and which one a session goes to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.links.draft_link import DraftLink
from coordinator.links.replica_link import ReplicaLink
from coordinator.links.target_link import TargetLink
from coordinator.router import PrefixRouter
from coordinator.tokenizer import TextTokenizer
from specdec.rpc.errors import IncompatibleReplica, NotReady, Unavailable
from specdec.v1 import common_pb2 as pb

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients get: the targets' common model, and its tokenizer."""

    identity: pb.ModelIdentity
    tokenizer: TextTokenizer


def same_model(a: pb.ModelIdentity, b: pb.ModelIdentity) -> bool:
    """Whether a session may move from one to the other: equal name, weights and tokenizer."""
    return (a.name, a.weights_digest, a.tokenizer_digest) == (b.name, b.weights_digest, b.tokenizer_digest)


class Fleet:
    """Knows all links. The first target that answers decides what is served.

    When every target is gone and one comes back with another model, that model is served from then on.
    """

    def __init__(self, router: PrefixRouter, tokenizer_path: Path | None) -> None:
        self.targets: Sequence[TargetLink] = ()
        self.drafts: Sequence[DraftLink] = ()
        self.served: ServedModel | None = None
        self._router = router
        self._tokenizer_path = tokenizer_path
        self._adopting = asyncio.Lock()
        self._has_served = asyncio.Event()
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def links(self) -> list[ReplicaLink]:
        """Targets, then drafts."""
        return [*self.targets, *self.drafts]

    async def wait_served(self) -> ServedModel:
        """The model, once a target has answered."""
        await self._has_served.wait()
        return self.require_served()

    def require_served(self) -> ServedModel:
        """The model.

        Raises:
            NotReady: no target has answered yet.
        """
        if self.served is None:
            raise NotReady("no target has answered yet")
        return self.served

    async def pick_target(self, token_ids: Sequence[int], salt: bytes, timeout_s: float) -> TargetLink:
        """The target for a prompt; waits for one if none is ready.

        Raises:
            Unavailable: none was ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (ready := self._ready_targets()):
                    await self._next_change()
        except TimeoutError:
            raise Unavailable(f"no target was ready within {timeout_s:g} s", reason="NO_TARGET") from None
        address = self._router.pick(token_ids, salt, {link.address: len(link.sessions) for link in ready})
        return next(link for link in ready if link.address == address)

    def find_target(self, model: pb.ModelIdentity, besides: TargetLink) -> TargetLink | None:
        """Another ready target that serves a model, the least loaded."""
        fit = [
            link
            for link in self.targets
            if link is not besides and link.is_ready and link.identity is not None and same_model(link.identity, model)
        ]
        return min(fit, key=lambda link: len(link.sessions), default=None)

    def pick_draft(self, position: int) -> DraftLink | None:
        """The least loaded ready draft whose context reaches past a position."""
        fit = [
            link
            for link in self.drafts
            if link.is_ready and link.identity is not None and link.identity.max_model_len > position
        ]
        return min(fit, key=lambda link: len(link.sessions), default=None)

    def notices(self) -> list[str]:
        """Limits that clients should know of."""
        served = self.require_served().identity
        notices = [
            f"draft {link.address} has a context of {link.identity.max_model_len} tokens, the target of "
            f"{served.max_model_len}: no speculation beyond"
            for link in self.drafts
            if link.is_ready and link.identity is not None and link.identity.max_model_len < served.max_model_len
        ]
        numerics = {link.identity.numerics_id for link in self._ready_targets() if link.identity is not None}
        if len(numerics) > 1:
            notices.append("targets differ in numerics: after a fail-over near-ties may fall the other way")
        return notices

    def on_state(self, link: ReplicaLink) -> None:
        """A link's state changed: whoever waits for a replica looks again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if isinstance(link, TargetLink) and not link.is_ready:
            self._router.forget(link.address)

    async def wait_changed(self, timeout_s: float) -> None:
        """Wait for any replica's state to change.

        Raises:
            TimeoutError: none did.
        """
        async with asyncio.timeout(timeout_s):
            await self._next_change()

    async def check_identity(self, link: ReplicaLink, identity: pb.ModelIdentity) -> None:
        """Whether a replica fits.

        Raises:
            IncompatibleReplica: another model (target) or another tokenizer (draft).
        """
        if isinstance(link, TargetLink):
            await self._check_target(link, identity)
            return
        served = (await self.wait_served()).identity
        if identity.tokenizer_digest != served.tokenizer_digest:
            raise IncompatibleReplica(
                f"the draft {identity.name} has another tokenizer ({identity.tokenizer_digest or 'unknown'}) "
                f"than the target {served.name} ({served.tokenizer_digest or 'unknown'}): "
                "decoding goes on without it"
            )

    async def _check_target(self, link: TargetLink, identity: pb.ModelIdentity) -> None:
        async with self._adopting:
            if self.served is not None and same_model(self.served.identity, identity):
                return
            others = [other for other in self._ready_targets() if other is not link]
            if self.served is not None and others:
                raise IncompatibleReplica(
                    f"the target serves {identity.name} ({identity.weights_digest}), the others serve "
                    f"{self.served.identity.name} ({self.served.identity.weights_digest})"
                )
            await self._adopt(link, identity)

    async def _adopt(self, link: TargetLink, identity: pb.ModelIdentity) -> None:
        if self._tokenizer_path is not None:
            tokenizer = await asyncio.to_thread(TextTokenizer.from_path, self._tokenizer_path)
        else:
            tokenizer_json, config = await link.fetch_tokenizer()
            tokenizer = await asyncio.to_thread(TextTokenizer, tokenizer_json, json.loads(config or "{}"))
        former, self.served = self.served, ServedModel(identity, tokenizer)
        self._has_served.set()
        _log.info("model_served", model=identity.name, revision=identity.revision, numerics=identity.numerics_id)
        if former is not None and former.identity.tokenizer_digest != identity.tokenizer_digest:
            for draft in self.drafts:
                draft.reset("the target's tokenizer changed")

    def _ready_targets(self) -> list[TargetLink]:
        return [link for link in self.targets if link.is_ready]

    async def _next_change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

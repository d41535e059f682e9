"""All replicas: compatibility checks, the served model, and the choice of a replica for a session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from specdec.coordinator.links.draft_link import DraftLink
from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.coordinator.links.target_link import TargetLink
from specdec.coordinator.replicas.compatibility import ServedModel, difference, may_serve, unsound
from specdec.coordinator.replicas.load import has_room, has_spare, is_idle, usable, weight, with_room
from specdec.coordinator.replicas.outliers import EjectionSettings
from specdec.coordinator.replicas.router import BLOCK_TOKENS, PrefixRouter, block_digests
from specdec.coordinator.replicas.standings import Standings
from specdec.coordinator.sessions.session import DraftHost, Request, Session, SessionHost, TargetHost
from specdec.coordinator.tasks import LONG_TOKENS, let_others_run
from specdec.coordinator.text.tokenizer import TextTokenizer, read_tokenizer
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import FailedPrecondition, IncompatibleReplica, ModelNotFound, NoTarget, NotReady
from specdec.wire.message_sizes import most_entry_bytes

_MOST_NOTICES = 8
"""Notices about drafts, at most: there may be hundreds of drafts, and people read notices."""
_log = structlog.get_logger(__name__)


def _require_sound(identity: pb.ModelIdentity) -> None:
    if (cause := unsound(identity)) is not None:
        raise IncompatibleReplica(f"the replica reports an impossible model: {cause}")


class Fleet:
    """Knows all links. The first target that answers decides which model is served.

    If every target is gone and one comes back with another model, that model is served from then on.
    """

    def __init__(
        self,
        router: PrefixRouter,
        tokenizer_path: Path | None,
        ejection: EjectionSettings | None = None,
        *,
        allow_mixed_numerics: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`allow_mixed_numerics`: a session may go on at a target whose logits differ in their last bits; `clock`:
        monotonic seconds, as of `ReplicaLink.refused_s`.
        """
        self._clock = clock
        self.targets: Sequence[TargetLink] = ()
        """The known targets; `TargetRecovery.set_links` replaces them."""
        self.drafts: Sequence[DraftLink] = ()
        """The known drafts; `DraftRecovery.set_links` replaces them."""
        self.served: ServedModel | None = None
        self._router = router
        self._standings = {
            "target": Standings("target", ejection or EjectionSettings(), lambda: self.targets),
            "draft": Standings("draft", ejection or EjectionSettings(), lambda: self.drafts),
        }
        self._tokenizer_path = tokenizer_path
        self.allow_mixed_numerics = allow_mixed_numerics
        self._adopting = asyncio.Lock()
        self._has_served = asyncio.Event()
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def links(self) -> list[ReplicaLink]:
        """Targets, then drafts."""
        return [*self.targets, *self.drafts]

    async def wait_served(self) -> ServedModel:
        """Wait until a target has answered; returns the served model."""
        await self._has_served.wait()
        return self.require_served()

    def require_served(self, model: str = "") -> ServedModel:
        """The served model, whose name must be `model` unless that is empty.

        Raises:
            NotReady: no target has answered yet.
            ModelNotFound: another model is served.
        """
        if self.served is None:
            raise NotReady("no target has answered yet: retry")
        if model and model != self.served.identity.name:
            raise ModelNotFound(f"model {model[:100]!r} is not served here, only {self.served.identity.name!r}")
        return self.served

    def check_numerics(self, planned: pb.ModelIdentity) -> None:
        """Check that a request begun with some numerics may go on with the served ones.

        Raises:
            FailedPrecondition: they differ, and mixed numerics are not allowed.
        """
        served = self.require_served().identity
        if planned.numerics_id != served.numerics_id and not self.allow_mixed_numerics:
            raise FailedPrecondition(
                f"the request was begun with numerics {planned.numerics_id}; {served.numerics_id} are served now, "
                "and the output could differ: start the request anew, or set allow_mixed_numerics",
                reason="NUMERICS_CHANGED",
            )

    async def pick_target(self, request: Request, token_ids: Sequence[int], timeout_s: float) -> TargetLink:
        """Choose a target for a prompt; waits if none is ready. Cost: one hash per 32 tokens.

        Raises:
            Unavailable: none was ready in time.
        """
        digests = request.prompt_digests
        for end in (*range(LONG_TOKENS, len(token_ids), LONG_TOKENS), len(token_ids)):
            digests = block_digests(token_ids[:end], request.cache_salt, digests)
            await let_others_run(len(token_ids))
        if request.sessions:
            request.prompt_digests = digests[: request.sessions[0].num_prompt_tokens // BLOCK_TOKENS]
        try:
            async with asyncio.timeout(timeout_s):
                links = await self._usable_targets(request)
                known_to_others = await self._router.ask_others(digests, [link.holder for link in links])
                links = await self._usable_targets(request)  # they may have changed meanwhile
        except TimeoutError:
            raise NoTarget(f"no target was ready within {timeout_s:g} s") from None
        return self._router.pick_link(links, digests, self._clock(), known_to_others)

    def find_target(self, request: Request, besides: TargetHost, *, only_ready: bool = False) -> TargetLink | None:
        """The least loaded other target that can serve a request and takes sessions; None if there is none.

        `only_ready`: exclude targets on probation, which a session that need not move should not try.
        """
        links = with_room(self._usable_for(request, besides, only_ready=only_ready), self._clock())
        return min(links, key=weight, default=None)

    def find_idle(self, request: Request, besides: TargetHost) -> TargetLink | None:
        """Another target that would step a request's sessions at once; None if there is none."""
        links, now_s = self._usable_for(request, besides, only_ready=True), self._clock()
        idle = [link for link in links if is_idle(link, now_s)]
        return min(idle, key=weight, default=None)

    def has_room(self, link: TargetLink) -> bool:
        """Whether a target would take one more session, by its last report."""
        return has_room(link, self._clock())

    def capacity(self) -> int | None:
        """Sessions that all usable targets together hold; None: not every one has told."""
        told = [0 if link.load is None else link.load.max_sessions for link in self._ready_targets()]
        return sum(told) if told and all(told) else None

    def draft_credit(self, target: TargetHost | None) -> int | None:
        """Draft tokens worth proposing to a target; None: unknown."""
        load = next((link.load for link in self.targets if link is target), None)
        return None if load is None else load.draft_credit

    def may_serve(self, link: TargetLink, request: Request) -> bool:
        """Whether a target, by its last identity, can decode a request to its end."""
        return (
            link.identity is not None
            and link.may_take(request)
            and may_serve(link.identity, request, allow_mixed_numerics=self.allow_mixed_numerics)
        )

    def most_open_bytes(self) -> int | None:
        """Bytes of the largest opening entry that some target accepts; None without a target."""
        return max((most_entry_bytes(link.message_bytes) for link in self._ready_targets()), default=None)

    def drafters(self) -> list[str]:
        """Names of the drafters that every target runs itself."""
        links = self._ready_targets()
        return sorted(frozenset.intersection(*(link.drafters for link in links))) if links else []

    def own_draft(self) -> pb.ModelIdentity | None:
        """The first target's own draft model, if every target runs one in its process; otherwise None."""
        own = [link.own_draft for link in self._ready_targets()]
        return own[0] if own and all(one is not None and unsound(one) is None for one in own) else None

    def pick_draft(self, position: int, besides: DraftHost | None = None) -> DraftLink | None:
        """The least loaded draft that takes sessions and whose context is longer than `position`; None without one."""
        return min(with_room(usable(self._fit_drafts(position, besides)), self._clock()), key=weight, default=None)

    def find_spare_draft(self, position: int, besides: DraftHost) -> DraftLink | None:
        """Another such draft with spare capacity; None if there is none."""
        fit, now_s = self._fit_drafts(position, besides), self._clock()
        return min((link for link in fit if link.is_ready and has_spare(link, now_s)), key=weight, default=None)

    def _fit_drafts(self, position: int, besides: DraftHost | None) -> list[DraftLink]:
        return [
            link
            for link in self.drafts
            if link is not besides and link.identity is not None and link.identity.max_model_len > position
        ]

    def remember(self, link: TargetLink, session: Session) -> None:
        """A session ended on a target, which caches its prompt and output, of which the beginning is remembered."""
        request = session.request
        most = len(request.prompt_digests) * BLOCK_TOKENS + LONG_TOKENS
        digests = block_digests(session.token_ids[:most], request.cache_salt, request.prompt_digests)
        self._router.remember(digests, link.holder)

    def failed(self, replica: SessionHost, *, is_proven: bool = False) -> bool:
        """A replica failed; returns whether it is ejected. See `Standings.failed`."""
        return self._standings[replica.role].failed(replica.address, is_proven=is_proven)

    def succeeded(self, link: ReplicaLink) -> None:
        """A replica succeeded."""
        self._standings[link.role].succeeded(link)

    def notices(self) -> list[str]:
        """Notices of limits, for clients."""
        served = self.require_served().identity
        shorter = [
            f"draft {link.address} has a context of {link.identity.max_model_len} tokens, the target of "
            f"{served.max_model_len}: no speculation beyond the draft's"
            for link in self.drafts
            if link.is_ready and link.identity is not None and link.identity.max_model_len < served.max_model_len
        ]
        notices = shorter[:_MOST_NOTICES]
        if len(shorter) > len(notices):
            notices.append(f"{len(shorter) - len(notices)} more drafts have shorter contexts")
        numerics = {identity.numerics_id for identity in self._ready_identities()}
        if len(numerics) > 1:
            notices.append(
                "targets differ in numerics: a fail-over may change near-tied tokens; the end of each choice names "
                "the numerics that computed it"
            )
        return notices

    def on_state(self) -> None:
        """A link's state changed: update the served terms, and wake the calls that wait for a replica."""
        self._set_terms()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def on_removed(self, link: ReplicaLink) -> None:
        """A link was removed."""
        self._standings[link.role].forget(link.address)

    def forget_prefixes(self, link: TargetLink) -> None:
        """A target may have lost its prefix cache."""
        self._router.forget(link.holder)

    async def wait_changed(self) -> None:
        """Wait for any replica's state to change."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def check_instance(self, link: ReplicaLink, instance_id: str) -> None:
        """Check that a replica is not already in use under another address: a second stream would end the first.

        Raises:
            IncompatibleReplica: it is in use.
        """
        for other in self._of_role(link.role):
            if other is not link and other.is_up and instance_id and other.instance_id == instance_id:
                raise IncompatibleReplica(f"this process is already used as {other.address}")

    async def check_draft(self, identity: pb.ModelIdentity) -> None:
        """Check that a draft fits the target; waits until a model is served.

        Raises:
            IncompatibleReplica: it has another tokenizer, or reports an impossible model.
        """
        _require_sound(identity)
        served = (await self.wait_served()).identity
        if identity.tokenizer_digest != served.tokenizer_digest:
            raise IncompatibleReplica(
                f"the tokenizer of draft {identity.name} ({identity.tokenizer_digest or 'unknown'}) differs from that "
                f"of target {served.name} ({served.tokenizer_digest or 'unknown'}): the draft is not used. Set "
                "`target` of the draft to let it translate"
            )

    async def check_target(self, link: TargetLink, identity: pb.ModelIdentity) -> None:
        """Check that a target fits; its model is served from now on if no other target is there.

        Raises:
            IncompatibleReplica: its output would differ from the others', or it reports an impossible model.
        """
        _require_sound(identity)
        async with self._adopting:
            cause = None
            if self.served is not None:
                cause = difference(self.served.identity, identity, allow_mixed_numerics=self.allow_mixed_numerics)
                if cause is None:
                    return
            others = [other for other in self._ready_targets() if other is not link]
            if cause is not None and others:
                raise IncompatibleReplica(f"it cannot take over the other targets' sessions: {cause}")
            await self._adopt(link, identity)

    async def _adopt(self, link: TargetLink, identity: pb.ModelIdentity) -> None:
        if self._tokenizer_path is not None:
            tokenizer = await asyncio.to_thread(TextTokenizer.from_path, self._tokenizer_path)
            if identity.tokenizer_digest and tokenizer.digest != identity.tokenizer_digest:
                raise IncompatibleReplica(
                    f"its tokenizer ({identity.tokenizer_digest}) differs from `tokenizer` {self._tokenizer_path} "
                    f"({tokenizer.digest}): its text would be wrong. Set the model's own, or none"
                )
        else:
            tokenizer = await asyncio.to_thread(read_tokenizer, *await link.fetch_tokenizer())
        former, self.served = self.served, ServedModel(identity, tokenizer)
        self._has_served.set()
        _log.info("model_served", model=identity.name, revision=identity.revision, numerics_id=identity.numerics_id)
        if former is not None and former.identity.tokenizer_digest != identity.tokenizer_digest:
            for draft in self.drafts:
                draft.reset("the target's tokenizer changed")

    def _set_terms(self) -> None:
        """Update the terms of the served model; they stay while no target is usable."""
        identities = self._ready_identities()
        if self.served is None or not identities:
            return
        numerics = [identity.numerics_id for identity in identities]
        own = self.served.identity
        wanted = own.numerics_id
        if wanted not in numerics:
            wanted = max(sorted(set(numerics)), key=numerics.count)
        terms = pb.ModelIdentity(sampling_defaults=own.sampling_defaults, constraints_id=own.constraints_id)
        constraints = {identity.constraints_id for identity in identities} - {""}
        if own.constraints_id not in constraints:
            terms.constraints_id = min(constraints, default="")
        defaults = [identity.sampling_defaults for identity in identities]
        if own.sampling_defaults not in defaults:
            terms.sampling_defaults.CopyFrom(max(defaults, key=defaults.count))
        if not own.config_digest:  # adopted from a former release
            terms.config_digest = next((one.config_digest for one in identities if one.config_digest), "")
        served = self.served.with_terms(min(identity.max_model_len for identity in identities), wanted, terms)
        if served is not self.served:
            _log.info("terms_served", max_model_len=served.identity.max_model_len, numerics_id=wanted)
            self.served = served

    def _ready_identities(self) -> list[pb.ModelIdentity]:
        return [link.identity for link in self._ready_targets() if link.identity is not None]

    def _ready_targets(self) -> list[TargetLink]:
        return [link for link in self.targets if link.is_up and not link.is_draining]

    def _of_role(self, role: str) -> Sequence[ReplicaLink]:
        return self.targets if role == "target" else self.drafts

    def _usable_for(
        self, request: Request, besides: TargetHost | None = None, *, only_ready: bool = False
    ) -> list[TargetLink]:
        """Targets that a request may be sent to; those with other numerics only if there are no others."""
        fit = [
            link
            for link in self.targets
            if link is not besides and (link.is_ready or not only_ready) and self.may_serve(link, request)
        ]
        alike = [
            link for link in fit if link.identity is not None and link.identity.numerics_id == request.model.numerics_id
        ]
        return usable(alike) or usable(fit)

    async def _usable_targets(self, request: Request) -> list[TargetLink]:
        while not (links := self._usable_for(request)):
            await self.wait_changed()
        return links

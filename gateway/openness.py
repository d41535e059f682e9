"""Whether whoever reaches the gateway may use the model: coordinators are asked without a key."""

from __future__ import annotations

import asyncio

from specdec.gateway.settings import GatewaySettings
from specdec.gateway.upstream.coordinators import Coordinators
from specdec.service.exposure import is_loopback
from specdec.wire.errors import NotReady

_ANSWER_S = 1.0
"""Seconds for an answer of a coordinator."""
_FIRST_INTERVAL_S = 0.2
"""Seconds between questions until a coordinator has answered."""
_INTERVAL_S = 5.0
"""Seconds between later questions: a coordinator may come, or lose its keys."""
_REMEDY = (
    "give the coordinators api_keys_file, the gateway tls_dir with tls_verify_clients or host 127.0.0.1; "
    "or set allow_unauthenticated where only trusted clients reach it"
)


class Openness:
    """Looks whether clients beyond loopback need a key or a certificate."""

    def __init__(self, settings: GatewaySettings, coordinators: Coordinators) -> None:
        """Ask nobody yet."""
        self._settings = settings
        self._coordinators = coordinators
        self._knows = settings.trusts_network
        self._refusal = ""
        self._is_refused = asyncio.Event()

    def check(self) -> None:
        """Raise NotReady until a coordinator has told whether it demands keys, unless everybody may call."""
        if not self._knows or self._is_refused.is_set():
            raise NotReady("the gateway does not know yet that its coordinators demand keys", retry_after_s=1.0)

    async def refused(self) -> str:
        """Wait until the gateway must not serve; returns the reason."""
        await self._is_refused.wait()
        return self._refusal

    async def run(self) -> None:
        """Ask until everybody may call, which is logged, or nobody may."""
        settings = self._settings
        if is_loopback(settings.host) or settings.verifies_clients:
            return
        while True:
            answers = await self._coordinators.keyless(_ANSWER_S)
            is_open = [address for address, needs_no_key in answers.items() if needs_no_key]
            if is_open:
                break
            self._knows = self._knows or bool(answers)
            await asyncio.sleep(_INTERVAL_S if self._knows else _FIRST_INTERVAL_S)
        if settings.allow_unauthenticated:
            settings.warn_if_open(has_keys=False, remedy=_REMEDY)
            return
        told = f"host {settings.host}: whoever reaches this gateway could use the model, because the coordinator "
        self._refusal = f"{told}{is_open[0]} demands no key: {_REMEDY}"
        self._is_refused.set()
